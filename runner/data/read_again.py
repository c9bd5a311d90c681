"""Reading data again from their beginning, up to the position of a resumed run; says how long it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from ...core.errors import counted

logger = logging.getLogger("flextrain")


def timed(batches: Iterator[Any], skipped: int, name: str) -> Iterator[Any]:
    """Yield the batches, whose first one comes after ``skipped`` others were read; log what it does, and the time it took."""
    before = counted(skipped, "batch", "batches")
    logger.info(
        f"train_dataloader: reads {before} of {name} again to continue after them; data with state_dict need not"
    )
    begin = time.perf_counter()
    for number, batch in enumerate(batches):
        if not number:
            seconds = time.perf_counter() - begin
            logger.info(
                f"train_dataloader: read {before} of {name} again in {seconds:.1f} s, {seconds / skipped * 1000:.3g} ms each"
            )
        yield batch
