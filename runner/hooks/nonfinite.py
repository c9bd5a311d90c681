"""NonFiniteHook: reports a loss or a gradient norm that is NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import find_latest, what_is_not_finite
from ...core.comm.collectives import all_gather_object, broadcast_object
from ...core.errors import CheckpointError, ConfigError, NonFiniteError
from ...core.registry import HOOKS
from ..finite_weights import nonfinite_weights, own_nonfinite
from ..reporting.finite_watch import Look, NonfiniteFigure, Witness
from ..reporting.message_hub import AVERAGED
from .hook import Hook
from .logger import LoggerHook
from .nonfinite_origin import find_origin

if TYPE_CHECKING:
    from ..run import Run

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

    def __init__(self) -> None:
        self._bad, self._good, self._next, self._is_told = 0, 0, 1, False

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
