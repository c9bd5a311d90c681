"""Get torch_npu's own sources, with which tests/npu/test_fused_optimizers.py runs on the simulated device.

    python tests/npu/fetch_torch_npu.py

The wheel (44 MB) is unpacked into build/, never installed: without CANN an installed torch_npu keeps torch from being imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "2.14.0"
ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
SOURCE = BUILD / f"torch_npu-{VERSION}" / "torch_npu"
DOCUMENT = ROOT / "docs" / "npu.md"


def fetch() -> None:
    """Put the Python files of the wheel where the tests look for them.

    Raises:
        OSError: it cannot be downloaded; the message ends with what pip said.
    """
    if SOURCE.is_dir():
        return
    BUILD.mkdir(exist_ok=True)
    # In the same file system, so that the folder appears at once or not at all.
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        # The machine at hand does not matter: only Python files are taken.
        wheel = [f"torch_npu=={VERSION}", "--platform", "manylinux_2_28_x86_64", "--python-version", "3.11"]
        how = ["--only-binary=:all:", "--no-deps", "--quiet", "--retries", "1", "--timeout", "15"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            *wheel,
            *how,
            "--dest",
            folder,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
            raise OSError(f"torch_npu {VERSION} cannot be downloaded: {said[-1]}")
        (file,) = Path(folder).glob("*.whl")
        unpacked = Path(folder) / SOURCE.parent.name
        with zipfile.ZipFile(file) as archive:
            sources = [name for name in archive.namelist() if name.startswith("torch_npu/") and name.endswith(".py")]
            archive.extractall(unpacked, sources)
        unpacked.rename(SOURCE.parent)


def documented_signatures() -> dict[str, str]:
    """The arguments after ``params`` that docs/npu.md gives for each optimizer."""
    rows = re.findall(r"^\| `(NpuFused\w+)` \| `([^`]*)` \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    return dict(rows)


if __name__ == "__main__":
    try:
        fetch()
    except OSError as error:
        sys.exit(f"{error}; without its sources the tests of its fused optimizers are skipped")
