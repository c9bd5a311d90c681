"""What only the text log of a run says: warnings, errors, and how long an epoch is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_WARNING = re.compile(r"^(?:\d{4}/)?(\d\d/\d\d \d\d:\d\d:\d\d) - \S+ - (WARNING|ERROR) - (.*)$")
_TRAINING = re.compile(r"(?:Epoch|Iter)\(train\)\s+(?:\[(\d+)\])?\[\s*(\d+)/(\d+)\]")
_MOST = 1000
"""Warnings that are kept: a run may repeat one for days."""


@dataclass
class TextLog:
    """A log file.

    Attributes:
        warnings: level, text, time as it is written, and the iteration of the last line of training before it.
        epoch_length: updates of an epoch; None: lines do not tell.
        left_out: warnings beyond the first thousand.
    """

    warnings: list[tuple[str, str, str, int]] = field(default_factory=list)
    epoch_length: int | None = None
    left_out: int = 0


def text_log(path: Path, begins: int) -> TextLog:
    """Read a log file.

    Args:
        path: the file; it may be missing.
        begins: the iteration at which this start of the run began.
    """
    found, at = TextLog(), begins
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return found
    with file:
        for line in file:
            if "(train)" in line and (match := _TRAINING.search(line)):
                epoch, inner, length = match.groups()
                at = int(inner)
                if epoch is not None:
                    found.epoch_length = int(length)
                    at += (int(epoch) - 1) * int(length)
            elif match := _WARNING.match(line):
                if len(found.warnings) < _MOST:
                    found.warnings.append((match[2], match[3], match[1], at))
                else:
                    found.left_out += 1
    return found
