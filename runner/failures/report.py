"""The reason of a failure in words: the part of the run, its own message, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.errors import FlexTrainError
from ...core.torch_private import is_compile_error
from . import model_advice, process_advice
from .advice import Failure, advice_on
from .origin import Origin, causes, find_origin
from .worker_failure import WorkerFailure, read_worker_failure

if TYPE_CHECKING:
    from ..run import Run

RULE_FILES = (model_advice, process_advice)
"""Their rules are in force because they are imported, in this order."""

_COMPILING = (
    "torch.compile failed, which eager mode may not: leave out `compile`, or give compile=dict(fullgraph=False) or "
    'dict(backend="aot_eager"); TORCH_LOGS="+dynamo" says more'
)


@dataclass(frozen=True)
class Reason:
    """Why a run failed.

    Attributes:
        where: to follow "Failed after ...", such as " in backward"; may be empty.
        said: class and message of the error, on one line.
        advice: what to do; empty if the error says it, or if nothing is known.
        samples: indices of the batch that could not be read, at most 16; empty if another part failed.
    """

    where: str
    said: str
    advice: str = ""
    samples: tuple[int, ...] = ()

    @property
    def in_a_line(self) -> str:
        """What was said, and where."""
        return f"{self.said}{f' ({self.where.strip()})' if self.where else ''}"

    @property
    def follows(self) -> bool:
        """Whether it only follows from the end of another process."""
        return re.search(process_advice.LOST, self.said) is not None


def reason_of(run: Run, error: BaseException) -> Reason:
    """Find out why a run failed; this never raises."""
    try:
        return _reason_of(run, error)
    except Exception as second:  # logged, because it must not hide the error
        run.logger.debug(f"Nothing is known of the failure, {type(second).__name__}: {second}", exc_info=second)
        return Reason("", _first_line(error))


def _reason_of(run: Run, error: BaseException) -> Reason:
    # It names the key, and says what to do; one that a worker sent is torch's text, with the worker's traceback.
    if isinstance(error, FlexTrainError) and read_worker_failure(error) is None:
        return Reason("", _first_line(error))
    origin = find_origin(error, run.strategy.module)
    worker = next((found for cause in causes(error) if (found := read_worker_failure(cause))), None)
    if worker is None:
        kind, text, notes = type(error).__name__, str(error).strip(), tuple(getattr(error, "__notes__", ()))
        where, said = origin.words(), _first_line(error)
    else:
        kind, text, notes = worker.kind, worker.text, worker.notes
        where, said = _of_worker(worker, origin), f"{worker.kind}: {worker.text}"
    if samples := next(filter(None, (origin.samples(), *(note for note in notes if "of the dataset" in note))), ""):
        said = f"{said} ({samples})"
    failure = Failure(run, error, origin, kind, " ".join((text, samples)).strip())
    advice = _COMPILING if is_compile_error(error) else run.strategy.explain(error) or advice_on(failure)
    return Reason(where, said, advice or "", tuple(map(int, re.findall(r"\d+", samples))))


def _of_worker(worker: WorkerFailure, origin: Origin) -> str:
    inside = ", ".join(filter(None, (f"worker {worker.worker}", worker.function, worker.source)))
    return f" in {origin.loader} ({inside}){' in the dry pass' if origin.is_dry else ''}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
