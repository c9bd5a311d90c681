"""Messages between the processes that save or load a checkpoint; every process learns which rank is missing or failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..base.errors import CheckpointError, StorageError
from ..comm.agreement import collect, roll_call
from ..comm.collectives import broadcast_object, gather_object, get_rank, get_world_size

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Failure:
    """The reason of a failure, sent to the other processes instead of a result."""

    reason: str
    of_storage: bool
    """The storage failed, not the state that is saved: a later save may succeed."""


class Participants:
    """All processes of the run.

    Args:
        what: the begin of error messages, such as "epoch_3: could not be saved".
        group: a process group of all of them; None: the default one, with which a thread must not send messages.
    """

    def __init__(self, what: str, group: Any = None) -> None:
        self.what, self.group = what, group

    @property
    def is_main(self) -> bool:
        """Whether this process combines the results of all."""
        return get_rank() == 0

    def meet(self, name: str, timeout_s: float) -> None:
        """Wait until every process has called this to save ``name``.

        Raises:
            CheckpointError: some ranks do not come within ``timeout_s`` seconds, or are in another call; it names them.
        """
        if problem := roll_call(f"save_checkpoint({name})", timeout_s):
            raise CheckpointError(f"{self.what}: {problem}; every process has to save")

    def round(self, own: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run ``own`` on every process, then ``combine`` on rank 0 with all results; return its result on every process.

        Raises:
            CheckpointError: on every process, if one of them failed; it names the rank. A StorageError if nothing but
                storage failed.
        """
        everyone = range(get_world_size())
        return self._exchange(everyone, own, lambda result: gather_object(result, self.group), combine)

    def ask(self, ranks: Sequence[int], own: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Like ``round``, which every process must call, but only some ``ranks`` have something to say, in this order.

        What is gathered from all has the length of the longest message for each of them.
        """
        return self._exchange(ranks, own, lambda result: collect(ranks, result, self.group), combine)

    def _exchange(
        self,
        ranks: Sequence[int],
        own: Callable[[], T],
        gather: Callable[[Any], list[Any] | None],
        combine: Callable[[list[T]], R],
    ) -> R:
        result, error = _attempt(own) if get_rank() in ranks else (None, None)
        try:
            gathered = gather(result)
            answer = broadcast_object(
                None if gathered is None else self._combine(ranks, gathered, combine), group=self.group
            )
        except RuntimeError as lost:
            reason = " ".join(str(lost).split())
            raise CheckpointError(f"{self.what}: another process was lost, {reason}") from lost
        if isinstance(answer, _Failure):
            kind = StorageError if answer.of_storage else CheckpointError
            raise kind(f"{self.what} on rank {answer.reason}") from error
        return answer  # type: ignore[return-value]

    def _combine(self, ranks: Sequence[int], gathered: list[Any], combine: Callable[[list[Any]], Any]) -> Any:
        failures = {rank: result for rank, result in zip(ranks, gathered, strict=True) if isinstance(result, _Failure)}
        if failures:
            of_storage = all(failure.of_storage for failure in failures.values())
            return _Failure(f"{ranks_text(list(failures))}: {next(iter(failures.values())).reason}", of_storage)
        answer, _ = _attempt(lambda: combine(gathered))
        return replace(answer, reason=f"0: {answer.reason}") if isinstance(answer, _Failure) else answer


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a message: at most eight."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


def _attempt(action: Callable[[], T]) -> tuple[T | _Failure, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # raised on every process, also here, after all know of it
        reason = " ".join(str(error).split()) or type(error).__name__
        return _Failure(reason, isinstance(error, (OSError, StorageError))), error
