"""Exchange: what the processes of a run tell each other through the job's store, beside training."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from ...core.base.errors import LaunchError, StrategyError
from ...core.comm.agreement import Bulletin, StoreLostError

ToldT = TypeVar("ToldT", bound="Told")


@dataclasses.dataclass(frozen=True)
class Told:
    """Base class of what processes tell each other as text."""

    def text(self) -> str:
        """These values as a text, for ``read``."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls: type[ToldT], text: str) -> ToldT:
        """The values that ``text`` gave."""
        values: Any = {
            key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()
        }
        return cls(**values)


# Identity: what a process is called on its machine, and whether it still lives there.


_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a device or a disk that does not answer",
}
_ENDED = ("Z", "X", "x")


@dataclasses.dataclass(frozen=True)
class Identity(Told):
    """A process of the job.

    Attributes:
        rank: its rank.
        pid: its number on its machine.
        machine: the machine's host name.
        namespace: the kernel's name for the set of process numbers; containers on one machine have different ones.
        began: when the process began, in ticks since the machine started: numbers of processes are used again.
    """

    rank: int
    pid: int
    machine: str
    namespace: str = ""
    began: str = ""

    @classmethod
    def of_this_process(cls, rank: int) -> Identity:
        """The identity of this process."""
        try:
            namespace = str(Path("/proc/self/ns/pid").readlink())
        except OSError:  # no Linux
            namespace = ""
        pid = os.getpid()
        return cls(rank, pid, socket.gethostname(), namespace, (_stat(pid) or ("", ""))[1])

    def is_beside(self, other: Identity) -> bool:
        """Whether a process can see the other one in /proc."""
        return (self.machine, self.namespace) == (other.machine, other.namespace) and bool(self.began)

    def has_ended(self) -> bool:
        """Whether the process has ended; only for one that is beside this one."""
        found = _stat(self.pid)
        return found is None or found[0] in _ENDED or found[1] != self.began

    def state(self) -> str:
        """What the kernel says of a process that does not answer; only for one that is beside this one."""
        return state_of(self.pid, self.began)

    def words(self, with_process: bool = True) -> str:
        """``rank 1 (process 4711 on node2)``, or shorter ``rank 1 (node2)``."""
        return f"rank {self.rank} ({f'process {self.pid} on ' if with_process else ''}{self.machine})"


def state_of(pid: int, began: str | None = None) -> str:
    """What the kernel says of a process on this machine that does not answer.

    Args:
        pid: its number.
        began: when it began, as in Identity; None: it is known that the number is not used again.
    """
    found = _stat(pid)
    if found is None or found[0] in _ENDED or began not in (None, found[1]):
        return "has ended"
    return _STATES.get(found[0], "does not answer")


def _stat(pid: int) -> tuple[str, str] | None:
    """State and time of start of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, the name, may hold anything; it ends at the last parenthesis.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


# Ending: why a process left the run, as it tells the others, and errors that only follow from it.


Kind = Literal["failed", "left", "killed", "silent", "finished", "stalled", "store"]


@dataclasses.dataclass(frozen=True)
class Ending(Told):
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

    @classmethod
    def read(cls, text: str) -> Ending:
        """See Told."""
        values = json.loads(text)
        return cls(**{**values, "process": Identity(**values["process"])})

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


T = TypeVar("T")


class Exchange:
    """The store as the watchdog uses it; its methods belong to the thread of the Monitor, except ``ask``.

    Runs are counted, because one runner may train, fail, and train again: an ending belongs to one run.

    Args:
        bulletin: the bulletin of the Monitor's thread.
        myself: this process.
    """

    def __init__(self, bulletin: Bulletin, myself: Identity) -> None:
        self.bulletin, self.myself = bulletin, myself
        self.rank, self.world_size = myself.rank, bulletin.world_size
        self.lost: StoreLostError | None = None
        """The error with which the store was lost."""
        self.answered = 0
        """Number of the last alarm that this process has answered."""
        self._questions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._known: dict[int, Identity] = {}
        self._heard: set[int] = set()
        self.bulletin.put(f"process {self.rank}", myself.text())
        self.bulletin.put(
            f"answer {self.rank}", "0"
        )  # texts that are there are read with two messages, whatever their number

    # Another thread's questions

    def ask(self, question: Callable[[], T], patience_s: float, wake: Callable[[], None]) -> T | None:
        """Let the Monitor's thread call a function; None if it does not come to that in time, or the store is lost."""
        done, results = threading.Event(), list[T]()

        def answer() -> None:
            try:
                results.append(question())
            finally:
                done.set()

        self._questions.put(answer)
        wake()
        done.wait(patience_s)
        return results[0] if results else None

    def answer_questions(self) -> None:
        """Call what ``ask`` was given."""
        while not self._questions.empty():
            self._questions.get()()

    # Endings

    def announce(self, run: int, ending: Ending) -> Ending:
        """Tell the others of an ending; return the first one of this run, which counts."""
        first = Ending.read(self.bulletin.put_first(f"end {run}", ending.text()))
        self.hear(run)
        self.alarm()
        return first

    def alarm(self) -> int:
        """Make every process look at once, and say that it is there; return the number of the alarm."""
        return self.bulletin.count("alarms")

    def has_alarm(self) -> bool:
        """Whether there is an alarm that this process has not answered; answers it."""
        number = self.bulletin.count("alarms", 0)
        if number == self.answered:
            return False
        self.bulletin.put(f"answer {self.rank}", str(number))
        self.answered = number
        return True

    def first_ending(self, run: int) -> Ending | None:
        """The ending that was announced first in a run."""
        text = self.bulletin.read_first(f"end {run}")
        if text is None:
            return None
        self.hear(run)
        return Ending.read(text)

    def hear(self, run: int) -> None:
        """Take note that this process knows how the run ends."""
        if run not in self._heard:
            self._heard.add(run)
            self.bulletin.count(f"heard {run}")

    def all_have_heard(self, run: int) -> bool:
        """Whether every process knows how the run ends."""
        return self.bulletin.count(f"heard {run}", 0) >= self.world_size

    def silent(self, number: int) -> list[int]:
        """The ranks that have not answered alarm ``number``."""
        answers = self.bulletin.read([f"answer {rank}" for rank in range(self.world_size)])
        return [rank for rank, text in enumerate(answers) if text is None or int(text) < number]

    # Processes

    def identities(self, ranks: Iterable[int]) -> dict[int, Identity]:
        """The identities of these ranks, as far as they are there."""
        new = [rank for rank in ranks if rank not in self._known]
        for rank, text in zip(new, self.bulletin.read([f"process {rank}" for rank in new]), strict=True):
            if text is not None:
                self._known[rank] = Identity.read(text)
        return {rank: self._known[rank] for rank in ranks if rank in self._known}

    def ended_beside(self, number: int) -> list[Identity]:
        """Processes on this machine that have ended, among ``number`` ranks up and down; asks the store only once.

        If the store is lost, rank 0, which may have kept it, is one of them.
        """
        near = [*range(max(0, self.rank - number), min(self.world_size, self.rank + number + 1))]
        known = self._known
        if self.lost is None and not all(rank in known for rank in near):
            known = self.identities(near)
        elif self.lost is not None and 0 not in near:
            near.append(0)
        return [
            known[rank]
            for rank in near
            if rank in known and rank != self.rank and known[rank].is_beside(self.myself) and known[rank].has_ended()
        ]

    def is_elsewhere(self, identity: Identity) -> bool:
        """Whether a process is on another machine, so that its name has to be said."""
        return identity.machine != self.myself.machine
