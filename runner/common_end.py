"""CommonEnd: how the processes of a job come to end at the same position, by what they leave in a Bulletin."""

from __future__ import annotations

import json
import platform
import time
from typing import Any

from ..core.comm.bulletin import Bulletin, StoreLostError

TOGETHER_S = 2.0
"""Seconds that a process waits for the others to know before it leaves."""
_NAP_S = 0.02


class CommonEnd:
    """One end on which all processes agree. Who asks first writes so; from then on each process says where it is.

    The methods belong to the thread that the bulletin belongs to, except ``is_there``.

    Args:
        bulletin: the bulletin of that thread.
        turn: how many ends there were before; a program may catch one and go on.
    """

    def __init__(self, bulletin: Bulletin, turn: int) -> None:
        self._bulletin, self._key = bulletin, f"stop {turn}"
        self._next_look = 0.0
        self._own: Bulletin | None = None  # of the thread that trains
        self._has_answered = False
        self._target: int | None = None

    def word(self, asked: str | None) -> dict[str, Any] | None:
        """What came, to which rank on which host, the same on all processes; None as long as nobody has asked.

        Args:
            asked: what has come to this process, if something has.
        """
        board = self._bulletin
        if asked is None:
            if time.monotonic() < self._next_look:
                return None
            self._next_look = time.monotonic() + board.pace_s
            text = board.read_first(self._key)
        else:
            text = board.put_first(self._key, json.dumps({"what": asked, "rank": board.rank, "host": platform.node()}))
        return None if text is None else json.loads(text)

    def is_now(self, own: bool) -> bool:
        """Whether all leave at once, as the first one to know decides: the others cannot be far from it."""
        return self._bulletin.put_first(f"{self._key} how", "now" if own else "") == "now"

    def meet_those_who(self, does: str) -> None:
        """Count this process among those who ``does``, such as "know", and wait for the others, not for long."""
        board, key, deadline = self._bulletin, f"{self._key} {does}", time.monotonic() + TOGETHER_S
        try:
            number, nap_s = board.count(key), max(_NAP_S, board.pace_s / 5)
            while number < board.world_size and time.monotonic() < deadline:
                time.sleep(nap_s)
                number = board.count(key, 0)
            if board.rank == 0:  # which may keep the store: the others look once more
                time.sleep(2 * nap_s)
        except StoreLostError:  # then somebody has left
            return

    def is_there(self, here: int) -> bool:
        """Whether all processes end at this position: the number of updates and batches of validations so far.

        For the thread that trains. Rank 0 names the position before it goes on from ``here``. Nobody can have finished
        ``here + 2`` before that: an update needs all processes, and of a validation a process reads one batch ahead.
        """
        if self._own is None:
            self._own = self._bulletin.for_another_thread()
        board, key = self._own, self._key
        if not self._has_answered:
            self._has_answered = True
            board.put(f"{key} at {board.rank}", str(here))
            board.count(f"{key} answers")
        if self._target is None and board.rank == 0 and board.count(f"{key} answers", 0) == board.world_size:
            answers = board.read([f"{key} at {rank}" for rank in range(board.world_size)])
            self._target = max(here + 2, *(int(answer or 0) + 1 for answer in answers))
            board.put_first(f"{key} target", str(self._target))
        if self._target is None and (text := board.read_first(f"{key} target")) is not None:
            self._target = int(text)
        return self._target is not None and here >= self._target
