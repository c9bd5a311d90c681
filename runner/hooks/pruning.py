"""PruningHook: reports a metric to the trial of a search, and ends the run if the search has no use for it."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...core.comm.joint_errors import raising_together, told_by_rank_0
from ...core.errors import ConfigError, TrialPruned, counted, suggest
from ...core.registry import HOOKS
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@runtime_checkable
class SearchTrial(Protocol):
    """What the hook needs of a trial; ``optuna.Trial`` fits."""

    def report(self, value: float, step: int) -> None:
        """Take the metric after ``step`` epochs; in training by iterations, after ``step`` updates."""

    def should_prune(self) -> bool:
        """Return whether this trial ends, by what was reported so far."""


@HOOKS.register_module()
class PruningHook(Hook):
    """Reports a metric to a trial after each validation, and ends the run in order if the trial is to be pruned.

    Training then stops after the current epoch or iteration, hooks, logs and checkpoints are closed as at any end, and
    ``train()`` raises ``optuna.TrialPruned``, whose message has the metric and the newest checkpoint. With several
    processes rank 0 has the trial and decides; all of them raise.

    If the trial has ``set_user_attr``, as Optuna's has, its attribute "work_dir" is the run's folder.

    Args:
        trial: the trial on rank 0, None on all other ranks. Any object with ``report(value, step)`` and ``should_prune()``.
        monitor: name of the validation metric.
        error: the exception to raise, made with the message; default: ``optuna.TrialPruned`` if the trial is Optuna's,
            otherwise ``flextrain.TrialPruned``.

    Raises:
        ConfigError: an argument is invalid; in ``before_train``: there is no validation, rank 0 has no trial or another rank
            has one, or a study of several objectives, which prunes nothing; in the dry pass: the metric is missing.
    """

    priority = "LOWEST"  # after the hook that saves the best checkpoint

    def __init__(self, trial: SearchTrial | None, monitor: str, error: type[Exception] | None = None) -> None:
        missing = [name for name in ("report", "should_prune") if not callable(getattr(trial, name, None))]
        if trial is not None and missing:
            raise ConfigError(
                f"PruningHook.trial: {trial!r} is not allowed, it has no {' and no '.join(missing)}; give the trial of a "
                "search, such as optuna.Trial"
            )
        name: object = monitor  # a configuration may have anything
        if not isinstance(name, str) or not name:
            raise ConfigError(f"PruningHook.monitor: {monitor!r} is not allowed, give the name of a validation metric")
        kind: object = error
        if kind is not None and not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigError(f"PruningHook.error: {error!r} is not allowed, give a class of exceptions")
        self._trial = trial  # private, because processes are compared by their hooks' public attributes
        self.monitor = monitor
        self.error = error
        self._is_training = False

    def before_train(self, runner: Run) -> None:
        """Check that there is what the search needs, and report from now on."""
        with raising_together():
            self._check(runner)
        if self._trial is not None and callable(note := getattr(self._trial, "set_user_attr", None)):
            note("work_dir", runner.work_dir)
        self._is_training = True

    def _check(self, runner: Run) -> None:
        if runner.val_loop is None:
            raise ConfigError("PruningHook: needs validation, give val_dataloader, val_cfg and val_evaluator")
        if runner.rank == 0 and self._trial is None:
            raise ConfigError("PruningHook.trial: rank 0 has none, and it decides for all processes; give it the trial")
        if runner.rank > 0 and self._trial is not None:
            raise ConfigError(
                f"PruningHook.trial: rank {runner.rank} has one too; give it to rank 0, which decides for all processes, and "
                "None to the others"
            )
        directions = getattr(getattr(self._trial, "study", None), "directions", ())
        if len(directions) > 1:
            raise ConfigError(
                f"PruningHook: the study has {counted(len(directions), 'objective')}, and only a study of one prunes trials; "
                "leave the hook out"
            )

    def after_train(self, runner: Run) -> None:
        """Leave training: a later validation is not reported."""
        self._is_training = False

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: a later validation is not reported."""
        self._is_training = False

    def check_metrics(self, runner: Run, names: Collection[str]) -> None:
        """Raise ConfigError if the metric is missing."""
        if self.monitor not in names:
            raise ConfigError(
                f'PruningHook.monitor: "{self.monitor}" is no metric of the validation'
                f"{suggest(self.monitor, names) or f', there are {sorted(names)}'}"
            )

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Report the metric on rank 0, and end the run on all processes if it is to be pruned."""
        if not self._is_training:
            return
        said: tuple[str, str] | None = told_by_rank_0(lambda: self._ask(runner, metrics or {}))
        if said is None:
            return
        message, module = said
        kind = import_module(module).TrialPruned if self.error is None else self.error
        runner.logger.info("Training stops: the trial is pruned, %s", message)
        runner.end_with(kind(message))

    def _ask(self, runner: Run, metrics: dict[str, Any]) -> tuple[str, str] | None:
        """Return the message of a pruned trial, and the module of its exception; None if the trial goes on."""
        assert self._trial is not None
        self.check_metrics(runner, metrics)  # not every validation begins with a dry pass
        try:
            value = float(metrics[self.monitor])
        except (TypeError, ValueError, RuntimeError):  # a list, a text, a matrix
            kind = type(metrics[self.monitor]).__name__
            raise ConfigError(
                f"PruningHook.monitor: {self.monitor} is no number but {kind}, give another metric"
            ) from None
        progress = runner.train_loop
        state = progress.state_dict()
        noun, step = ("epoch", state["epoch"]) if progress.by_epoch else ("iteration", state["iter"])
        self._trial.report(value, int(step or 0))
        if not self._trial.should_prune():
            return None
        newest = runner.message_hub.get_info("last_ckpt")
        folder = f"checkpoint {Path(newest)}" if newest else f"no checkpoint, logs in {runner.work_dir}"
        return f"{self.monitor} = {value:.6g} after {counted(int(step or 0), noun)}, {folder}", _home_of(self._trial)


def _home_of(trial: SearchTrial) -> str:
    """Return the module that has the TrialPruned of the trial's search: "optuna", or ours."""
    homes = {kind.__module__.partition(".")[0] for kind in type(trial).__mro__}
    return "optuna" if "optuna" in homes else TrialPruned.__module__
