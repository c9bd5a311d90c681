"""The own message of an error in a data worker, which torch sends to the training process as a traceback in text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_CAUGHT = re.compile(r"Caught (\S+) in DataLoader worker process (\d+)\.")
_TRACEBACK = re.compile(r"^(?:Original )?Traceback \(most recent call last\):$", re.MULTILINE)
_LINE = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class WorkerFailure:
    """An error that a data worker raised.

    Attributes:
        worker: number of the worker.
        kind: name of the exception's class.
        text: its message, on one line.
        source: file and line of the innermost code outside of torch and this library; empty if there is none.
        function: the function there.
        notes: lines that were added to the exception.
    """

    worker: int
    kind: str
    text: str
    source: str
    function: str
    notes: tuple[str, ...] = ()


def read_worker_failure(error: BaseException) -> WorkerFailure | None:
    """Read the text of an exception that a data worker sent; None if it is none."""
    whole = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    found = _CAUGHT.search(whole)
    if found is None:
        return None
    begins = [match.end() for match in _TRACEBACK.finditer(whole)]
    own = whole[begins[-1] :] if begins else whole[found.end() :]
    rest = [line for line in own.splitlines() if line.strip()]
    at = next((i for i, line in enumerate(rest) if not line.startswith(" ")), None)
    said = [] if at is None else rest[at:]
    kind, _, text = (said[0] if said else found[1]).partition(": ")
    lines = [match for match in _LINE.finditer(own) if not _is_library(match[1])]
    source, function = (f"{lines[-1][1]}:{lines[-1][2]}", lines[-1][3]) if lines else ("", "")
    return WorkerFailure(
        int(found[2]), kind.rpartition(".")[2], " ".join(text.split()), source, function, tuple(said[1:])
    )


def _is_library(file: str) -> bool:
    return "/torch/" in file or file.startswith(_OWN)


_OWN = str(Path(__file__).parents[1])
