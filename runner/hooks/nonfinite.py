"""NonFiniteHook: reports a loss or a gradient norm that is NaN or infinite."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.base.errors import CheckpointError, ConfigError, NonFiniteError
from ...core.base.registry import HOOKS
from ...core.base.tensors import nonfinite
from ...core.checkpoint import find_latest, what_is_not_finite
from ...core.comm import collectives as dist
from ...core.comm.collectives import all_gather_object, broadcast_object
from ...core.torch_compat.torch_private import without_compiling
from ..reporting.message_hub import AVERAGED, MessageHub
from ..resume.weights import nonfinite_weights, own_nonfinite
from .hook import Hook
from .logger import LoggerHook

if TYPE_CHECKING:
    from ..run import Run

# Find the first module whose output is not finite, by running the last batch again.


def find_origin(runner: Run, batch: Any) -> str:
    """Return the origin of NaN or infinity, as the end of a sentence; a collective, with the same result on every process.

    Random numbers differ from the first run. Training cannot continue afterwards: gradients and statistics change.

    Args:
        runner: the runner whose model is checked.
        batch: the last batch; with gradient accumulation, the list of the last window's micro-batches.
    """
    window = batch if runner.accumulate > 1 else [batch]
    weights = nonfinite_weights(runner)
    own = _run_again(runner, window)
    if weights:
        # Each process may hold some of the modules; those that come first in forward have the lower ranks.
        answers = dist.all_gather_object(_first_with(weights, own, runner))
        first = next(filter(None, answers), f"NaN or infinity is in {what_is_not_finite(weights)}")
        return f"{first}; LoggerHook(interval=1) looks after every iteration"
    found = {rank: run for rank, run in enumerate(dist.all_gather_object(own)) if run.bad is not None}
    if found:
        rank, run = min(found.items(), key=lambda item: item[1].called.index(str(item[1].bad)))
        where = f" on rank {rank}" if runner.world_size > 1 else ""
        return f"{run.bad} is the first module whose output is not finite, when the batch is run again{where}"
    if failed := next((run.error for run in dist.all_gather_object(own) if run.error), None):
        return f"run again, the batch fails with {failed}"
    return _in_backward(runner, window)


class _Run(NamedTuple):
    """The modules and outputs seen when a window was run again."""

    called: list[str]
    """The modules, in the order in which their forward ended."""
    bad: str | None
    """The first of them whose output is not finite."""
    error: str | None


def _run_again(runner: Run, window: list[Any]) -> _Run:
    error = None
    with _watching(runner.strategy.module, bool(runner.strategy.config.compile)) as seen:
        try:
            for index, micro_batch in enumerate(window):
                before = len(seen)
                runner.stepper.rehearse(micro_batch, _Idle(runner.optim_wrapper))
                if not runner.stepper.counts(micro_batch, index):  # the update ignores it: a mean over no items
                    del seen[before:]
        except Exception as reason:  # a model may check its input; the error becomes part of the message
            error = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
    bad = next((name for name, is_finite in seen if not bool(is_finite)), None)
    return _Run([name for name, _ in seen], bad, error)


@contextmanager
def _watching(module: nn.Module, is_compiled: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """Record by name, in the order in which they end, whether the outputs of all modules are finite."""
    seen: list[tuple[str, Tensor]] = []

    def watch(name: str) -> Any:
        def look(_: nn.Module, args: Any, output: Any) -> None:
            flags = [tensor.detach().isfinite().all() for tensor in _tensors(output)]
            if flags:
                seen.append((name, torch.stack([flag.to(flags[0].device) for flag in flags]).all()))

        return look

    handles = [part.register_forward_hook(watch(_title(name, part))) for name, part in module.named_modules()]
    try:
        # Compiled code ignores hooks that are registered after compilation.
        with without_compiling() if is_compiled else nullcontext():
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _title(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _first_with(weights: list[str], run: _Run, runner: Run) -> str | None:
    """Return the first module in forward that directly owns some of the ``weights``; None if only averages do."""
    own = {
        _title(prefix, part): [name for name in weights if name.rpartition(".")[0] == prefix]
        for prefix, part in runner.strategy.module.named_modules()
    }
    first = next((title for title in (*run.called, *own) if own.get(title)), None)
    if first is None:
        return None
    return f"weights are not finite, {first} is the first module in forward with such weights ({', '.join(own[first])})"


def _in_backward(runner: Run, window: list[Any]) -> str:
    """Return the gradients that are not finite, when all outputs of forward are."""
    again = "weights are finite, and so is every output when the batch is run again"
    if not runner.stepper.differentiate(window):
        return again
    named = runner.strategy.module.named_parameters()
    own = nonfinite({name: parameter.grad for name, parameter in named if parameter.grad is not None})
    names = sorted({name for names in dist.all_gather_object(own) for name in names})
    if names:
        return f"{again}; in backward the gradients of {what_is_not_finite(names, 'parameter')} are not finite"
    return f"{again}, and so is every gradient"


class _Idle:
    """Wraps an OptimWrapper, or several, for a model's own ``train_step``; it neither differentiates nor updates."""

    def __init__(self, optim: Any) -> None:
        self._optim = optim

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optim, name)

    def __getitem__(self, name: str) -> _Idle:
        return _Idle(self._optim[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._optim)

    def __len__(self) -> int:
        return len(self._optim)

    def update_params(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    backward = step = zero_grad = update_params


# Witness: finds losses and gradient norms that were not finite, with their iteration and rank.


_PREFIX = "train/"


class NonfiniteFigure(NamedTuple):
    """A scalar that is not finite."""

    iteration: int
    name: str
    value: float


@dataclass(frozen=True)
class Look:
    """The result of one look at the scalars that are new since the last look."""

    is_bad: bool
    """True if any scalar is not finite; on any rank, if ``is_agreed``."""
    is_agreed: bool
    """True if all processes know the same result; False if the model gives no loss to average."""
    own: tuple[NonfiniteFigure, ...]
    """This rank's own scalars that are not finite, oldest first."""
    iterations: int
    """Number of iterations since the last look."""
    forgotten: int
    """Number of the oldest of these iterations whose values are no longer kept."""


class Witness:
    """Looks at losses and gradient norms in the message hub, after they were read for a log line.

    Losses are averaged over the processes at that time, so every process sees if one is not finite. The other scalars,
    gradient norms and parts of losses, are reduced with them as a single number.

    Args:
        hub: the message hub of the run.
        iteration: number of updates done.
        norms: also look at gradient norms; with loss scaling they may be infinite, and the update is then skipped.
    """

    def __init__(self, hub: MessageHub, iteration: int, norms: bool) -> None:
        self._hub, self._iteration = hub, iteration
        self._names = re.compile("loss|grad_norm" if norms else "loss")
        self._seen: dict[str, int] = {}  # number of updates of each scalar at the last look
        self._new(is_looked_at=True)
        hub.beside = lambda: [value for key, values in self._new().items() if key != AVERAGED for value in values]

    def look(self, iteration: int) -> Look:
        """Return what is new since the last look; the newest values belong to update number ``iteration``."""
        hub, several = self._hub, not self._hub.topology.is_alone
        own: list[NonfiniteFigure] = []
        is_agreed, is_bad, kept = not several, False, 0
        for key, values in self._new(is_looked_at=True).items():
            kept = max(kept, len(values))
            if several and key == AVERAGED:
                is_agreed = True
                is_bad = bool(values) and not all(map(math.isfinite, (*map(float, values), hub.verdict.current())))
                values = hub.log_scalars[key].averaged[::-1] if is_bad else []
            for back, value in enumerate(values):
                if not math.isfinite(number := float(value)):
                    own.append(NonfiniteFigure(iteration - back, key.removeprefix(_PREFIX), number))
        count, self._iteration = iteration - self._iteration, iteration
        if not (several and is_agreed):
            is_bad = bool(own)
        return Look(is_bad, is_agreed, tuple(sorted(own, key=_as_told)) if is_bad else (), count, count - kept)

    def _new(self, is_looked_at: bool = False) -> dict[str, list[Any]]:
        """Return the values of each scalar since the last look, newest first."""
        found = {}
        for key, history in self._hub.log_scalars.items():
            if key.startswith(_PREFIX) and self._names.search(key):
                found[key] = history.newest(history.updates - self._seen.get(key, 0))
                if is_looked_at:
                    self._seen[key] = history.updates
        return found


def _as_told(finding: NonfiniteFigure) -> tuple[int, bool, str]:
    """Return a sort key: oldest first, and losses before gradient norms, which follow from them."""
    return finding.iteration, "grad_norm" in finding.name, finding.name


_QUIET_LOOKS = 10
_LEFT_OUT = "such updates are left out"
_ADVICE = 'env_cfg=dict(nonfinite="raise") names the module where it begins'


@HOOKS.register_module()
class NonFiniteHook(Hook):
    """Detects a loss or gradient norm that is NaN or infinite, when the scalars are read for a log line.

    Nothing else is read from the device. So the problem is noticed at the next log line (in a fast loop, with the last
    of several lines that are written together), but the message names the right iteration and rank. The reaction is
    ``env_cfg=dict(nonfinite=...)``:

    - "warn", the default: one warning with the iteration, the rank, and the parameters that are not finite at that
      time; more warnings after 10, 100, ... lines with such values, and one when they are finite again. If weights are not
      finite when training ends, ``train()`` raises NonFiniteError after its last checkpoint; "skip" does so too.
    - "raise": NonFiniteError on every process. It names the first module whose output is not finite when the last batch is
      run again; or, if weights are no longer finite, the first module with such weights.
    - "skip": an update whose loss or gradients are not finite is skipped on all processes, as loss scaling does: weights,
      moments, schedules and averages do not change. The host waits for the device at every update to decide this.
      Running statistics of normalisation layers are not protected. Refused with an OptimWrapper that overrides ``step``
      or ``backward``, and with stage 0 of DeepSpeed.
    - "ignore": no reaction.

    With loss scaling, gradients may be infinite, so only losses are checked.

    Args:
        interval: iterations between two checks if there is no LoggerHook; the scalars are then read for the checks.
    """

    priority = "LOW"  # after the logger has read the scalars, before checkpoints are saved

    def __init__(self, interval: int = 50) -> None:
        if interval < 1:
            raise ConfigError(f"NonFiniteHook.interval: {interval} is not allowed, give 1 or more")
        self.interval = interval
        self._episode = _Episode()
        self._witness: Witness | None = None
        self._batch: Any = None
        self._raises = self._skips = False
        self._readings, self._waited, self._patience = 0, 0, 0
        self._left_out = self._begun = 0
        self._since = ""  # where the values that are still not finite began

    def before_train(self, runner: Run) -> None:
        """Start checking from the current iteration."""
        action = runner.options.env_cfg.nonfinite
        self._raises, self._skips = action == "raise", action == "skip"
        # Log lines are less than two intervals apart, also where an epoch ends in between.
        lines = [2 * hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)]
        self._patience = max(lines, default=self.interval)
        self._readings, self._waited = runner.message_hub.readings, 0
        self._left_out = _left_out(runner) if self._skips else 0
        self._begun, self._since = runner.iter, ""
        runner.message_hub.reads_every_line = self._raises
        scales = runner.strategy.precision.loss_scale is not None
        self._witness = Witness(runner.message_hub, runner.iter, norms=not scales)

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the scalars if they have been read."""
        self._waited += 1
        if self._raises:
            self._batch = data_batch
        hub = runner.message_hub
        if hub.readings == self._readings and self._waited >= self._patience and not hub.waiting:
            hub.fetch("train/", reduce=AVERAGED)
        if hub.readings != self._readings:
            self._look(runner, runner.iter + 1)

    def after_train_epoch(self, runner: Run) -> None:
        """Check the last lines of the epoch, which may have been pending until now."""
        self._look_behind(runner)

    def before_val_epoch(self, runner: Run) -> None:
        """Check the last lines before a validation, which may have been pending until now."""
        self._look_behind(runner)

    def after_train(self, runner: Run) -> None:
        """Check once more, and let ``train()`` raise in the end if the weights are not finite."""
        if self._waited:
            runner.message_hub.fetch("train/", reduce=AVERAGED)
            self._look(runner, runner.iter)
        if runner.iter > self._begun and (names := nonfinite_weights(runner)):
            since = f" ({self._since})" if self._since else ""
            where = what_is_not_finite(names, "parameter")
            good = broadcast_object(_last_good(runner) if runner.rank == 0 else "")
            runner.end_with(NonFiniteError(f"Training ended with NaN or infinity in {where}{since}; {good}"))
        self._batch = None

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Release the batch."""
        self._batch = None

    def _look_behind(self, runner: Run) -> None:
        """Check between two iterations, if new scalars have been read since the last check."""
        if self._waited and runner.message_hub.readings != self._readings:
            self._look(runner, runner.iter)
        self._readings = runner.message_hub.readings

    def _look(self, runner: Run, iteration: int) -> None:
        assert self._witness is not None, "before_train makes it"
        self._readings, self._waited = runner.message_hub.readings, 0
        look = self._witness.look(iteration)
        self._since = self._since if look.is_bad else ""
        before, self._left_out = self._left_out, _left_out(runner) if self._skips else 0
        left_out = self._left_out - before
        if look.is_bad:
            if self._raises or self._episode.goes_on():
                self._report(runner, look, iteration)
        elif left_out:  # no loss is bad, and no gradient norm was computed for the log
            if self._episode.goes_on():
                what = f"{left_out} of the last {look.iterations} updates had gradients that are not finite"
                runner.logger.warning(f"Iteration {iteration}: {what}; {_LEFT_OUT}")
        elif self._episode.passes():
            runner.logger.warning(f"Iteration {iteration}: losses and gradient norms are finite again")

    def _report(self, runner: Run, look: Look, iteration: int) -> None:
        own = (look.own, own_nonfinite(runner))
        by_rank = all_gather_object(own) if look.is_agreed else [own]
        findings = [found for found, _ in by_rank]
        weights = sorted({name for _, names in by_rank for name in names})
        ranks = range(runner.world_size) if look.is_agreed else [runner.rank]
        what = "; ".join(_in_words(findings, ranks, look, iteration))
        self._since = self._since or what.partition(";")[0]
        if self._raises:
            origin = find_origin(runner, self._batch) if look.is_agreed else _ADVICE
            raise NonFiniteError(f"{what}; {origin}")
        state = (
            f"NaN or infinity in {what_is_not_finite(weights, 'parameter')}" if weights else "all weights are finite"
        )
        advice = _LEFT_OUT if self._skips else _ADVICE
        runner.logger.warning(f"{what}; {state}; {advice}")


def _left_out(runner: Run) -> int:
    """Return the number of updates that the guards have skipped."""
    wrappers = runner.optim_wrapper.wrappers.values() if runner.optim_wrapper is not None else ()
    return sum(wrapper.guard.left_out for wrapper in wrappers if wrapper.guard is not None)


class _Episode:
    """Decides how often to report: at bad looks 1, 10, 100, ..., starting again after ten good ones in a row."""

    _bad, _good, _next, _is_told = 0, 0, 1, False

    def goes_on(self) -> bool:
        """Count a bad look; return True if it is to be reported."""
        self._bad, self._good = self._bad + 1, 0
        if self._bad < self._next:
            return False
        self._next, self._is_told = self._next * 10, True
        return True

    def passes(self) -> bool:
        """Count a good look; return True if it is to be reported."""
        self._good += 1
        if self._good >= _QUIET_LOOKS:
            self._bad, self._next = 0, 1
        is_told, self._is_told = self._is_told, False
        return is_told


def _in_words(
    findings: Sequence[Sequence[NonfiniteFigure]], ranks: Sequence[int], look: Look, iteration: int
) -> Iterator[str]:
    """Yield the first scalars that were not finite, with iteration and ranks, and how often this happened."""
    bad = {finding.iteration for found in findings for finding in found}
    if not bad:  # only the sum over the processes overflowed
        yield f"Iteration {iteration}: the mean of the loss over the processes is not finite"
        return
    first = min(bad)
    on_ranks: dict[str, list[int]] = {}
    for rank, found in zip(ranks, findings, strict=True):
        for finding in found:
            if finding.iteration == first:
                on_ranks.setdefault(f"{finding.name} is {finding.value}", []).append(rank)
    several = len(ranks) > 1 or ranks[0] > 0
    parts = [f"{what} on rank {', '.join(map(str, where))}" if several else what for what, where in on_ranks.items()]
    before = " or before" if look.forgotten and first == iteration - look.iterations + look.forgotten + 1 else ""
    yield f"Iteration {first}{before}: {', '.join(parts)}"
    if len(bad) > 1:
        yield f"likewise in {len(bad)} of the last {look.iterations} iterations"


def _last_good(runner: Run) -> str:
    try:
        found = find_latest(runner.checkpoint_dir)
    except CheckpointError as error:
        return str(error)
    return f"the newest checkpoint with finite weights is {found.name}" if found else "no finite checkpoint was saved"
