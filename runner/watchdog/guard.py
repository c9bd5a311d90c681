"""The guard: a second thread beside the Monitor's, which waits without end if the store does not answer."""

from __future__ import annotations

import os
import threading

from ...core.events import append_event
from ..last_words import leave, say
from .pulse import Age, Clock
from .rounds import STALLED, Rounds
from .watched import Watched

_PERIOD_S = 0.25
_ENDING_S = 50.0
"""Seconds after which an end that has begun is made, whatever it waits for; more than all that an end waits for together."""


class Guard:
    """Ends this process if the job's store is silent or lost and training does not get on either.

    Args:
        rounds: the rounds of the Monitor's thread.
        watched: the run.
        stall_s, long_s: see WatchdogOptions.
    """

    def __init__(self, rounds: Rounds, watched: Watched, stall_s: float, long_s: float) -> None:
        self._rounds, self._watched = rounds, watched
        self._stall_s, self._long_s = stall_s, long_s
        self._ends = threading.Event()
        threading.Thread(target=self._guard, name="flextrain-guard", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._ends.set()

    def _guard(self) -> None:
        clock = Clock()
        silent, still, ending = Age(clock), Age(clock), Age(clock)
        while not self._ends.wait(min(_PERIOD_S, self._stall_s / 8)):
            clock.tick()
            rounds, watched = self._rounds, self._watched
            silent.note(rounds.number)
            still.note(watched.count())
            ending.note(rounds.is_ending)
            if rounds.is_ending:
                if ending.seconds > _ENDING_S:
                    os._exit(STALLED)
                continue
            lost = rounds.exchange is not None and rounds.exchange.lost is not None
            limit = self._long_s if watched.is_first() or watched.is_compiling() else self._stall_s
            if (lost or silent.seconds > self._stall_s) and still.seconds > limit:
                self._end(silent.seconds, still.seconds, lost)

    def _end(self, silent: float, still: float, lost: bool) -> None:
        rounds, watched = self._rounds, self._watched
        rounds.is_ending = True
        own, run = watched.whereabouts(), watched.run
        keeper = keeper_of_store()
        said = (
            f"{keeper} has ended"
            if lost
            else f"{keeper} {'have' if ' or ' in keeper else 'has'} not answered for {silent:.0f} s"
        )
        text = f"The run stands still for {still:.0f} s: {said}; rank {run.rank} is in iteration {own.iteration + 1}{own.words}"
        say(run, text, f"The stack of rank {run.rank}:\n{own.stack}")
        append_event(run.work_dir, "stalled", rank=run.rank, iter=run.iter, reason=text)
        leave(STALLED)


def keeper_of_store() -> str:
    """Who keeps the job's store, with a relative clause."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "torchrun or its machine, which keep the job's store,"
    return "rank 0 or its machine, which keep the job's store,"
