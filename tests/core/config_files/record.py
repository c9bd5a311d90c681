"""Record what MMEngine makes of the cases: ``python -m tests.core.config_files.record``, with mmengine installed.

``recorded.json`` was written by MMEngine 0.10.7 on Python 3.11, from the root of the repository.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

from .cases import CASES, ENVIRONMENT, outcome

RECORDED = Path(__file__).with_name("recorded.json")


def main() -> None:
    """Write the file."""
    import mmengine
    from mmengine.config import Config, DictAction

    logging.disable(logging.WARNING)
    os.environ.update(ENVIRONMENT)
    found = {}
    for each in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[each.name] = outcome(each, Path(folder).resolve(), Config, DictAction)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    RECORDED.write_text(f'{{\n  "mmengine": {json.dumps(mmengine.__version__)},\n{lines}\n}}\n')


if __name__ == "__main__":
    main()
