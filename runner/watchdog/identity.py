"""Identity: what a process is called on its machine, and whether it still lives there."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from pathlib import Path

_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a device or a disk that does not answer",
}
_ENDED = ("Z", "X", "x")


@dataclasses.dataclass(frozen=True)
class Identity:
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

    @classmethod
    def read(cls, text: str) -> Identity:
        """The identity that ``text`` gave."""
        return cls(*json.loads(text))

    def text(self) -> str:
        """This identity as a text, for ``read``."""
        return json.dumps(dataclasses.astuple(self))

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
