"""Ending: why a process left the run, as it tells the others, and errors that only follow from it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Literal

import torch.distributed as dist

from ...core.comm.bulletin import StoreLostError
from ...core.errors import LaunchError, StrategyError
from .identity import Identity

Kind = Literal["failed", "left", "killed", "silent", "finished", "stalled", "store"]


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why a process left the run.

    Attributes:
        kind: "failed" by an error of its own; "left" by a signal or sys.exit; "killed" without a word; "silent": its
            machine or its link is gone; "finished" before the others; "stalled": the watchdog ends all processes;
            "store": the job's store is gone.
        process: the process; for "stalled", the one that noticed.
        said: the error with its message, and the like.
        iteration: updates that the process had completed.
    """

    kind: Kind
    process: Identity
    said: str = ""
    iteration: int = 0

    def text(self) -> str:
        """This ending as a text, for ``read``."""
        return json.dumps([self.kind, self.process.text(), self.said, self.iteration])

    @classmethod
    def read(cls, text: str) -> Ending:
        """The ending that ``text`` gave."""
        kind, process, said, iteration = json.loads(text)
        return cls(kind, Identity.read(process), said, iteration)

    def words(self, with_machine: bool = True) -> str:
        """What the process did, to follow "Failed because": ``rank 1 failed: ValueError: ...``."""
        rank = self.process.words(with_process=False) if with_machine else f"rank {self.process.rank}"
        if self.kind == "killed":
            return f"{self.process.words()} has ended without a word: killed, for example for memory, or crashed"
        if self.kind == "silent":
            return f"{self.process.words()} does not answer any more: its machine or its network is gone"
        if self.kind == "finished":
            return f"{rank} has finished its run after iteration {self.iteration}, before the others"
        if self.kind == "failed":
            return f"{rank} failed: {self.said}"
        return self.said if self.kind in ("store", "stalled") else f"{rank} {self.said}"


_LOST = re.compile(
    r"Connection (?:closed by peer|reset by peer|refused|was likely closed)|Broken pipe|recvValue failed|"
    r"remote process exited|gloo/transport|Socket Timeout|[Ww]ait timeout|Timed out (?:waiting|after)|"
    r"pair closure|Application timeout caused|NCCL (?:error|communicator)|Watchdog caught collective"
)
_NOT_COME = re.compile(r"rank [\d, ]+ did not come within|^another process failed|was lost \(|came too late")


def follows_from_another(error: BaseException) -> bool:
    """Whether an error says that another process ended or did not answer, or was raised because of one that does."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if _is_of_communication(found):
            return True
        found = found.__cause__ or found.__context__
    return False


def _is_of_communication(error: BaseException) -> bool:
    if isinstance(error, (StoreLostError, dist.DistError)):
        return True
    if isinstance(error, (StrategyError, LaunchError)):
        return _NOT_COME.search(str(error)) is not None
    # What the user's code says of its own connections, to storage for example, has classes of its own.
    return type(error) is RuntimeError and _LOST.search(str(error)) is not None and "DataLoader" not in str(error)
