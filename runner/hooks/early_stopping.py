"""EarlyStoppingHook: stops training when a metric no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from ...core.base.errors import ConfigError, TrialPruned, counted, suggest
from ...core.base.registry import HOOKS
from ...core.comm.agreement import raising_together, told_by_rank_0
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run

# PruningHook: reports a metric to the trial of a search, and ends the run if the search has no use for it.


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


# Compare two values of a metric: greater is better, or less.


Rule = Literal["greater", "less"]
logger = logging.getLogger("flextrain")

# MMEngine's words, matched as part of a metric's name, in upper or lower case.
GREATER_KEYS = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
LESS_KEYS = ("loss", "perplexity")


def check_rule(rule: str, where: str) -> Rule:
    """Return ``rule`` if it is valid.

    Raises:
        ConfigError: the rule is neither "greater" nor "less".
    """
    if rule not in ("greater", "less"):
        raise ConfigError(f'{where}: "{rule}" is not allowed, choose greater or less')
    return rule  # type: ignore[return-value]


def infer_rule(
    key: str, where: str, greater_keys: Sequence[str] = GREATER_KEYS, less_keys: Sequence[str] = LESS_KEYS
) -> Rule:
    """Return the rule that fits the metric's name: the whole name is looked up first, then parts of it.

    Raises:
        ConfigError: no known word is in the name.
    """
    name = key.lower()
    greater, less = [k.lower() for k in greater_keys], [k.lower() for k in less_keys]
    if name in greater:
        return "greater"
    if name in less:
        return "less"
    if any(word in name for word in greater):
        return "greater"
    if any(word in name for word in less):
        return "less"
    raise ConfigError(f'{where}: missing, the name "{key}" does not say whether greater or less is better')


def says_greater(key: str) -> bool:
    """True if the metric's name says that greater is better, and nothing of errors or losses (``top1_error``)."""
    name = key.lower()
    return any(word.lower() in name for word in GREATER_KEYS) and not any(word in name for word in ("err", "loss"))


def says_less(key: str) -> bool:
    """True if the metric's name says that less is better, and nothing that says greater."""
    name = key.lower()
    return any(word in name for word in LESS_KEYS) and not any(word.lower() in name for word in GREATER_KEYS)


def is_better(rule: Rule, value: float, than: float) -> bool:
    """True if ``value`` is better than ``than``; never for NaN and infinity, which no later value could beat."""
    return math.isfinite(value) and (value > than if rule == "greater" else value < than)


def worst(rule: Rule) -> float:
    """Return the value that every finite number is better than."""
    return -math.inf if rule == "greater" else math.inf


@HOOKS.register_module()
class EarlyStoppingHook(Hook):
    """Stops training after the epoch in which a metric has not improved for ``patience`` validations.

    Args:
        monitor: name of the validation metric.
        rule: "greater" or "less" is better; default: by the metric's name.
        min_delta: smallest difference that counts as an improvement.
        strict: raise if the metric is missing; otherwise warn.
        check_finite: stop when the metric is NaN or infinite.
        patience: number of validations without improvement after which training stops; 0 is the same as 1.
        stopping_threshold: stop as soon as the metric is better than this.
    """

    priority = "LOWEST"

    def __init__(
        self,
        monitor: str,
        rule: str | None = None,
        min_delta: float = 0.1,
        strict: bool = False,
        check_finite: bool = True,
        patience: int = 5,
        stopping_threshold: float | None = None,
    ) -> None:
        where = "EarlyStoppingHook"
        if not (min_delta >= 0 and math.isfinite(min_delta)):
            raise ConfigError(
                f"{where}.min_delta: {min_delta} is not allowed, give the smallest difference that counts, 0 or more; rule "
                "says whether greater or less is better"
            )
        if patience < 0:
            raise ConfigError(f"{where}.patience: {patience} is not allowed, give a number of validations")
        self.monitor = monitor
        self.rule = infer_rule(monitor, f"{where}.rule") if rule is None else check_rule(rule, f"{where}.rule")
        self.min_delta = min_delta
        self.strict = strict
        self.check_finite = check_finite
        self.patience = patience
        self.stopping_threshold = stopping_threshold
        self.wait_count = 0
        self.best_score = worst(self.rule)
        self._judged = -1  # the iteration of the validation that has counted last
        self._repeated = -1  # that of the one that a resumed run may repeat
        self._is_training = False
        self._has_warned = False  # of a missing metric

    def check_metrics(self, runner: Run, names: Collection[str]) -> None:
        """Warn if the metric is missing; with ``strict``, raise ConfigError."""
        if self.monitor not in names:
            message = (
                f'EarlyStoppingHook.monitor: "{self.monitor}" is no metric of the validation'
                f"{suggest(self.monitor, names) or f', there are {sorted(names)}'}"
            )
            if self.strict:
                raise ConfigError(message)
            if not self._has_warned:
                runner.logger.warning(message)
            self._has_warned = True

    def before_train(self, runner: Run) -> None:
        """Compare metrics from now on; a resumed run that had stopped, and would by its rules of now, stops at once."""
        self._is_training = True
        if reason := self._reason_in_state():
            runner.train_loop.stop_training = True
            runner.logger.info("Training stops: %s; change custom_hooks to go on", reason)
        if runner.train_loop.by_epoch and self.patience >= runner.max_epochs:
            runner.logger.warning(
                f"EarlyStoppingHook.patience: {self.patience} validations without improvement do not fit into the "
                f"{counted(runner.max_epochs, 'epoch')} of training, it never stops early; give less"
            )

    def after_train(self, runner: Run) -> None:
        """Leave training: a later validation must not count."""
        self._is_training = False

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: a later validation must not count."""
        self._is_training = False

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Compare the metric with the best value, and stop training if the rules say so."""
        if not self._is_training:
            return
        metrics = metrics or {}
        self.check_metrics(runner, metrics)
        if self.monitor not in metrics or runner.iter == self._repeated:  # by a resumed run
            return
        score, self._judged = float(metrics[self.monitor]), runner.iter
        if not math.isfinite(self.best_score) and (doubt := self._doubt(score)):
            runner.logger.warning(doubt)
        reason = self._reason_to_stop(score)
        if reason:
            runner.train_loop.stop_training = True
            runner.logger.info("Training stops: %s", reason)

    def _doubt(self, score: float) -> str | None:
        """Return a line if ``min_delta`` is large for a metric of this size, as for a share that counts to 1, not 100."""
        is_share = self.rule == "greater" and 0.0 <= score <= 1.0 and self.min_delta >= 0.05
        if not math.isfinite(score) or not (is_share or (self.min_delta >= abs(score) > 0)):
            return None
        what = "a share of 1" if is_share else "no larger than that"
        return (
            f"EarlyStoppingHook.min_delta: {self.min_delta:g} is a large difference for {self.monitor} = {score:.4f}, which is "
            f"{what}; smaller improvements count as none, give less"
        )

    def _reason_to_stop(self, score: float) -> str | None:
        name = f"{self.monitor} = {score:.4f}"
        if self.check_finite and not math.isfinite(score):
            return f"{name} is not finite, the best value was {self.best_score:.4f}"
        if self.stopping_threshold is not None and is_better(self.rule, score, self.stopping_threshold):
            self.best_score = score
            return self._reason_in_state()
        needed = self.best_score + (self.min_delta if self.rule == "greater" else -self.min_delta)
        # A difference of exactly min_delta is an improvement; NaN and infinity (with check_finite=False) never are.
        if (score == needed and math.isfinite(score)) or is_better(self.rule, score, needed):
            self.best_score, self.wait_count = score, 0
            return None
        self.wait_count += 1
        return self._reason_in_state()

    def _reason_in_state(self) -> str | None:
        best = f"{self.best_score:.4f}"
        if self.stopping_threshold is not None and is_better(self.rule, self.best_score, self.stopping_threshold):
            return f"{self.monitor} = {best} is {self.rule} than stopping_threshold = {self.stopping_threshold}"
        if self.wait_count < max(self.patience, 1):
            return None
        return f"{self.monitor} has not improved in {self.wait_count} validations, the best value is {best}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best score of which metric, and the number of validations since it was reached."""
        what = {"monitor": self.monitor, "rule": self.rule, "judged": self._judged}
        return {"best_score": self.best_score, "wait_count": self.wait_count, **what}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, unless that is of another metric."""
        then, now = (state.get("monitor", self.monitor), state.get("rule", self.rule)), (self.monitor, self.rule)
        if then != now:
            logger.warning(
                f"EarlyStoppingHook: the checkpoint has the best of {then[0]} ({then[1]}), and now {now[0]} ({now[1]}) is "
                "monitored; its best value is looked for anew"
            )
            return
        self.best_score, self.wait_count = float(state["best_score"]), int(state["wait_count"])
        self._judged = self._repeated = int(state.get("judged", -1))
