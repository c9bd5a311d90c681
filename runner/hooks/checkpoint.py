"""CheckpointHook: decides when checkpoints are saved and which are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...core.base.errors import ConfigError, counted, suggest
from ...core.base.registry import HOOKS
from ...core.checkpoint import as_path, is_checkpoint, make_writable, what_is_not_finite
from ...core.checkpoint.directory import recover
from ...core.checkpoint.folders import reaching
from ...core.comm.agreement import told_by_rank_0
from ..resume.saver import check_on_error
from ..resume.weights import nonfinite_weights
from .early_stopping import (
    GREATER_KEYS,
    LESS_KEYS,
    Rule,
    check_rule,
    infer_rule,
    is_better,
    says_greater,
    says_less,
    worst,
)
from .hook import Hook, refuse
from .kept_checkpoints import AwaitedSaves, FastTier, KeptCheckpoints, keep_others, remove

if TYPE_CHECKING:
    from ..run import Run

# Tell when a CheckpointHook saves, and if its interval does not end within the run.


def beyond_the_end(run: Run, interval: int, save_begin: int, *, by_epoch: bool, save_last: bool) -> str | None:
    """Return a line for the log, or None if the hook saves in the course of the run; see CheckpointHook."""
    end, unit = (run.max_epochs, "epoch") if by_epoch else (run.max_iters, "iteration")
    key, value = ("interval", interval) if interval > end else ("save_begin", save_begin)
    if value <= end:
        return None
    then = "one checkpoint is saved, at the end" if save_last else "no checkpoint is saved"
    return f"CheckpointHook.{key}: {value} is beyond the {counted(end, unit)} of training, {then}; give at most {end}"


def has_no_epochs(run: Run, interval: int, *, by_epoch: bool, save_last: bool) -> str | None:
    """Return a line for the log if the interval counts epochs, and a training by iterations is longer, or may be."""
    loop = run.train_loop
    if loop.by_epoch or not by_epoch or interval < 1:
        return None
    if loop.data.epoch_length is not None and interval >= run.max_epochs:
        return None
    then = "one checkpoint is saved, at its end" if save_last else "no checkpoint is saved"
    return (
        f"CheckpointHook.by_epoch: True counts epochs, of which training by iterations has only one, so {then}; "
        "checkpoint=dict(by_epoch=False, interval=...) counts iterations"
    )


def when_saved(interval: int, *, save_last: bool, saves_best: bool) -> str:
    """What the log adds to the folder if there are no checkpoints at an interval: ``, at the end only``."""
    if interval > 0:
        return ""
    times = (["at the end"] if save_last else []) + (["at a new best value"] if saves_best else [])
    return f", {' and '.join(times) or 'when the run is preempted'} only (CheckpointHook.interval={interval})"


# BestScores: the best value of each monitored metric, and the checkpoint with that value.


logger = logging.getLogger("flextrain")


class BestScores:
    """The metrics that ``save_best`` names, with their best values so far.

    Args:
        save_best, rule, greater_keys, less_keys: see CheckpointHook.
        where: the configuration key, for messages.
    """

    def __init__(
        self,
        save_best: str | list[str] | None,
        rule: str | list[str] | None,
        greater_keys: Sequence[str] | str | None,
        less_keys: Sequence[str] | str | None,
        where: str,
    ) -> None:
        keys = [] if save_best is None else [save_best] if isinstance(save_best, str) else list(save_best)
        if len(set(keys)) < len(keys):
            raise ConfigError(f"{where}.save_best: {keys} is not allowed, it names a metric twice")
        if "auto" in keys and len(keys) > 1:
            raise ConfigError(f'{where}.save_best: {keys} is not allowed, "auto" stands alone')
        if rule is not None and not keys:
            raise ConfigError(f"{where}.rule: has no meaning without save_best")
        rules = [rule] if rule is None or isinstance(rule, str) else list(rule)
        if len(rules) not in (1, len(keys)) and keys:
            raise ConfigError(f"{where}.rule: {rule} is not allowed, give one rule or one for each of {keys}")
        self._greater_keys = GREATER_KEYS if greater_keys is None else _as_tuple(greater_keys)
        self._less_keys = LESS_KEYS if less_keys is None else _as_tuple(less_keys)
        self._where = where
        self._given = rules[0]
        self._rules: dict[str, Rule] = {}
        self._waits_for_auto = keys == ["auto"]
        if self._given is not None:
            for one in rules:
                check_rule(str(one), f"{where}.rule")
        if not self._waits_for_auto:
            rules = rules * len(keys) if len(rules) == 1 else rules
            self._rules = {key: self._rule(key, one) for key, one in zip(keys, rules, strict=True)}
        self._entries: dict[str, dict[str, Any]] = {}

    @property
    def wanted(self) -> bool:
        """True if any metric is monitored."""
        return bool(self._rules) or self._waits_for_auto

    @property
    def is_single(self) -> bool:
        """True if exactly one metric is monitored."""
        return len(self._rules) == 1

    def improved(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Yield the metrics that are better than ever before, with their values.

        Raises:
            ConfigError: a monitored metric is missing, or is not a number.
        """
        if self._waits_for_auto:
            first = next(iter(metrics))
            self._rules, self._waits_for_auto = {first: self._rule(first, self._given)}, False
        self.check_names(metrics)
        for key, rule in self._rules.items():
            if metrics[key] is None:
                continue
            try:
                score = float(metrics[key])
            except (TypeError, ValueError):
                raise ConfigError(f'{self._where}.save_best: "{key}" is {metrics[key]!r}, which is no number') from None
            best = self._entries[key]["score"] if key in self._entries else worst(rule)
            if is_better(rule, score, best):
                yield key, score

    def check_names(self, names: Collection[str]) -> None:
        """Raise ConfigError if a monitored metric is not among ``names``, or has no rule."""
        if self._waits_for_auto and names:
            self._rule(next(iter(names)), self._given)  # raises if the name does not say which is better
        for key in self._rules:
            if key not in names:
                hint = suggest(key, names) or f", there are {sorted(names)}"
                raise ConfigError(f'{self._where}.save_best: "{key}" is no metric of the validation{hint}')

    def name(self, key: str) -> str | None:
        """Return the name of the checkpoint with the best value of ``key``; None if there is none."""
        return self._entries[key]["checkpoint"] if key in self._entries else None

    def set(self, key: str, score: float, checkpoint: str) -> None:
        """Record a new best value and its checkpoint."""
        self._entries[key] = {"score": score, "checkpoint": checkpoint}

    def forget(self, key: str) -> None:
        """Begin anew with a metric."""
        del self._entries[key]

    def state_dict(self) -> dict[str, Any]:
        """Return the best values and their checkpoints."""
        return {key: dict(entry) for key, entry in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._entries = {key: dict(entry) for key, entry in state.items()}

    def _rule(self, key: str, given: str | None) -> Rule:
        if given is not None:
            if (given == "greater" and says_less(key)) or (given == "less" and says_greater(key)):
                logger.warning(f'{self._where}.rule: "{given}" keeps the checkpoint with the worst {key}; leave it out')
            return check_rule(given, f"{self._where}.rule")
        return infer_rule(key, f"{self._where}.rule", self._greater_keys, self._less_keys)


def _as_tuple(keys: Sequence[str] | str) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else tuple(keys)


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Saves a checkpoint every few epochs or iterations, and keeps the newest and the best ones.

    Checkpoints are directories ``epoch_3`` or ``iter_1000``, and ``best_<metric>_epoch_3`` without the optimizer. A
    checkpoint is deleted only after its successor is complete, and never while ``latest`` names it. Checkpoints of
    other runs are not touched; if there are some in the folder, training does not start, unless ``overwrite`` is set.

    A checkpoint with NaN or infinity in weights, averages or optimizer state is marked: ``latest`` does not move to it,
    it never becomes the best, and it does not count in ``max_keep_ckpts``. Of the marked ones only the newest is kept.

    With ``async_save`` training waits only while the state is copied to the CPU. From the first save on, the copy takes
    as much memory as the process writes. At most one save is in progress: the next one waits for it. The next iteration
    raises an error of the writing, and training does not end before the last checkpoint is complete.

    With ``on_error="continue"`` training survives storage that fails: a full disk, a folder that turned read-only or was
    deleted, a server that does not answer. Each failed save is a warning and a line in ``events.jsonl``, the checkpoints
    before it stay, and the next save is due as ever. If the last save failed, ``train()`` raises when all is done. A
    process that is lost, replicas that differ and state that cannot be saved raise in any case.

    ``fast_dir`` is a second tier: frequent checkpoints in memory (``/dev/shm/run``) or on a fast disk, of which only the
    newest is kept. ``resume=True`` takes the checkpoint of the higher iteration from both. The folder is for one run
    alone, and all processes have to see it; so one in memory serves one machine. It takes room for two checkpoints. The
    tier is removed when the run ends well, and kept when it fails. With ``async_save``, one of its checkpoints is left
    out while another is still being written.

    Args:
        interval: epochs or iterations between two checkpoints; -1: none before the end.
        by_epoch: the interval counts epochs, otherwise iterations.
        save_optimizer: save the optimizer state too.
        save_param_scheduler: save the state of the parameter schedulers too.
        out_dir: folder for checkpoints, in a subfolder named like the work directory; default: the work directory. A
            URL that fsspec knows, such as ``s3://bucket/runs``, is allowed. When training begins, a file is written to
            it and removed again; if that fails, every process raises a ConfigError with the reason.
        max_keep_ckpts: number of newest checkpoints to keep; -1: all.
        keep_every: also keep checkpoints whose number is a multiple of it; -1: none.
        async_save: write in the background.
        overwrite: replace the checkpoints of another run, whatever their numbers: they are deleted when the first one of this
            run is complete, and a warning names them. If it is False and there are some, training from the beginning, or from
            a checkpoint in another folder, is refused before the first update.
        on_error: "raise" ends the run when a save fails; "continue" goes on without the checkpoint.
        verify: read back what was written and compare checksums before a checkpoint counts as complete.
        save_last: also save at the end of training, whatever the interval.
        save_best: metrics whose best checkpoint is kept; "auto": the first metric of the first validation.
        rule: "greater" or "less" is better, one for all metrics or a list with one each; default: by their names.
        greater_keys, less_keys: words in a metric's name that determine the rule.
        filename_tmpl: name with one ``{}`` for the number.
        save_begin: first epoch or iteration at which a checkpoint may be saved.
        fast_dir: a local folder for the second tier; default: there is none.
        fast_interval: iterations between two of its checkpoints.
        file_client_args, backend_args, published_keys: not supported.
    """

    priority = "VERY_LOW"
    _lost: Sequence[str] = ()
    """Metrics whose best checkpoint was gone when training began."""

    def __init__(
        self,
        interval: int = -1,
        by_epoch: bool = True,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        out_dir: str | Path | None = None,
        max_keep_ckpts: int = -1,
        save_last: bool = True,
        save_best: str | list[str] | None = None,
        rule: str | list[str] | None = None,
        greater_keys: Sequence[str] | str | None = None,
        less_keys: Sequence[str] | str | None = None,
        file_client_args: dict[str, Any] | None = None,
        filename_tmpl: str | None = None,
        backend_args: dict[str, Any] | None = None,
        published_keys: str | list[str] | None = None,
        save_begin: int = 0,
        keep_every: int = -1,
        async_save: bool = False,
        verify: bool = False,
        overwrite: bool = False,
        on_error: Literal["raise", "continue"] = "raise",
        fast_dir: str | Path | None = None,
        fast_interval: int | None = None,
    ) -> None:
        where = "CheckpointHook"
        refuse(where, file_client_args=file_client_args, backend_args=backend_args, published_keys=published_keys)
        if interval < 1 and interval != -1:
            raise ConfigError(f"{where}.interval: {interval} is not allowed, give 1 or more, or -1 for never")
        if save_begin < 0:
            raise ConfigError(f"{where}.save_begin: {save_begin} is not allowed, give 0 or more")
        check_on_error(on_error, f"{where}.on_error")
        if (fast_dir is None) != (fast_interval is None):
            missing, given = ("fast_interval", "fast_dir") if fast_interval is None else ("fast_dir", "fast_interval")
            raise ConfigError(f"{where}.{missing}: missing, {given} needs it")
        self.interval = interval
        self.by_epoch = by_epoch
        self._unit = "epoch" if by_epoch else "iter"
        self.save_optimizer = save_optimizer
        self.save_param_scheduler = save_param_scheduler
        self.max_keep_ckpts = max_keep_ckpts
        self.keep_every = keep_every
        self.async_save = async_save
        self.verify = verify
        self.overwrite = overwrite
        self.on_error = on_error
        self.save_last = save_last
        self.save_begin = save_begin
        self.filename_tmpl = _check_template(filename_tmpl, f"{where}.filename_tmpl") or f"{self._unit}_{{}}"
        self._out_dir = None if out_dir is None else as_path(out_dir)
        self._best = BestScores(save_best, rule, greater_keys, less_keys, where)
        self._kept = KeptCheckpoints(self.filename_tmpl, max_keep_ckpts, keep_every, where)
        self._last: int | None = None
        self._tried = 0  # updates at the last save, whether it has failed or not, or when training began
        self._last_failed = False
        self._is_training = False
        self._has_looked = False  # True once the folder may hold checkpoints of this run
        self.found_of_others: set[Path] = set()
        """Checkpoints that another run, or another course of this one, had in the folder when training began."""
        self._has_ended = False  # True between a training that was saved to its end, and the end of the run
        self._saves = AwaitedSaves(async_save, on_error)
        self.fast_interval = fast_interval
        self._fast: FastTier | None = None
        if fast_dir is not None and fast_interval is not None:
            self._fast = FastTier(fast_dir, fast_interval, where, self._saves, skips=async_save)

    @property
    def saves_best(self) -> bool:
        """True if metrics are monitored, which needs validation."""
        return self._best.wanted

    @property
    def best_scores(self) -> dict[str, Any]:
        """The best value of each monitored metric, and its checkpoint: ``{"accuracy": {"score", "checkpoint"}}``."""
        return self._best.state_dict()

    def out_dir(self, runner: Run) -> Path:
        """Return the folder that checkpoints are saved to."""
        work_dir = Path(runner.work_dir)
        return work_dir if self._out_dir is None else self._out_dir / work_dir.name

    def checkpoint_dir(self, runner: Run) -> Path:
        """See Hook."""
        return self.out_dir(runner)

    def fast_checkpoint_dir(self, runner: Run) -> Path | None:
        """See Hook."""
        return self._fast.folder if self._fast else None

    def check_metrics(self, runner: Run, names: Collection[str]) -> None:
        """Raise ConfigError if ``save_best`` names no metric."""
        self._best.check_names(names)

    # When to save

    def before_run(self, runner: Run) -> None:
        """Check that all processes see the folder of the second tier, before it is looked into."""
        if self._fast:
            self._fast.check_shared(runner)

    def check_folders(self, runner: Run) -> None:
        """Check that the folders are writable, and hold no checkpoints of another run."""
        if self._out_dir is not None:  # the runner has checked its work directory
            make_writable(self.out_dir(runner), "CheckpointHook.out_dir")
        if runner.iter == 0 or not self._has_looked:
            own = [self.out_dir(runner)] + ([self._fast.folder] if self._fast else [])
            if self.interval > 0 or self.save_last or self._best.wanted:
                found, replaced = keep_others(runner, own[0], self.filename_tmpl, own=own, overwrite=self.overwrite)
                self.found_of_others, self._kept.others = {own[0] / name for name in found}, replaced
        self._has_looked = True
        if self._fast:
            self._fast.begin(runner, overwrite=self.overwrite)

    def before_train(self, runner: Run) -> None:
        """Say when checkpoints will be saved, and continue with those that a resumed run had kept."""
        self._is_training, self._has_ended, self._last = True, False, None
        self._tried = runner.iter
        how = dict(by_epoch=self.by_epoch, save_last=self.save_last)
        never = beyond_the_end(runner, self.interval, self.save_begin, **how)
        for doubt in filter(None, (never, has_no_epochs(runner, self.interval, **how))):
            runner.logger.warning(doubt)
        when = when_saved(self.interval, save_last=self.save_last, saves_best=self.saves_best)
        runner.logger.info(f"Checkpoints will be saved to {self.out_dir(runner)}{when}")
        self._kept.go_on(runner, self.out_dir(runner))
        self._lost = self._lost_ones(runner) if self._best.wanted and self.best_scores else ()

    def after_train_epoch(self, runner: Run) -> None:
        """Save a checkpoint if it is due."""
        if self.by_epoch and (
            self.every_n_epochs(runner, self.interval, self.save_begin)
            or (self.save_last and self.is_last_train_epoch(runner))
        ):
            self._tried = runner.iter
            self._save_checkpoint(runner)

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint if it is due."""
        if self.async_save:
            self._saves.settle(runner, wait=False)
        if not self.by_epoch and (
            self.every_n_train_iters(runner, self.interval, self.save_begin)
            or (self.save_last and self.is_last_train_iter(runner))
        ):
            self._tried = runner.iter + 1
            self._save_checkpoint(runner)
        elif self._fast and self._fast.is_due(runner.iter + 1):
            self._fast.save(runner, runner.iter + 1, runner.epoch)

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Save a checkpoint for each metric that reached a new best value, during training only."""
        if not self._is_training:
            return
        if not metrics:
            if self._best.wanted:
                runner.logger.warning("CheckpointHook.save_best: the validation gave no metrics, nothing to compare")
            return
        self._save_best_checkpoint(runner, metrics)

    def after_train(self, runner: Run) -> None:
        """Save the last state if that was not done: training was stopped early, or had other updates than ``len`` of its data says."""
        number = runner.epoch if self.by_epoch else runner.iter
        if self.save_last and number > 0 and number != self._last and runner.iter != self._tried:
            self._save_checkpoint_with_step(runner, number, self._position(runner))
        self._saves.settle(runner)
        self._is_training, self._has_ended = False, not self._last_failed

    def after_run(self, runner: Run) -> None:
        """Remove the second tier, unless the last checkpoint of the first one is missing."""
        if self._fast and self._has_ended:
            self._fast.remove(runner)
        self._has_ended = False

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: a later validation must not save. What the last complete checkpoint replaces is deleted."""
        self._is_training = self._has_ended = False
        self._saves.settle(runner, wait=False)

    def _lost_ones(self, runner: Run) -> list[str]:
        """Return the metrics whose best checkpoint is gone; a collective.

        A better one has replaced it after the checkpoint from which training goes on.
        """
        folders = {self.out_dir(runner)} | ({runner.resumed_from.parent} if runner.resumed_from else set())
        names = {key: entry["checkpoint"] for key, entry in self.best_scores.items()}
        return told_by_rank_0(
            lambda: [key for key, name in names.items() if not any(_is_there(folder / name) for folder in folders)]
        )

    def _forget_lost_ones(self, runner: Run, metrics: Mapping[str, Any]) -> None:
        """Begin anew with metrics whose best checkpoint is gone, unless this validation is better: it may be the one that is repeated."""
        better = {key for key, _ in self._best.improved(metrics)}
        for key in self._lost:
            if key in better:
                continue
            entry = self.best_scores[key]
            runner.logger.warning(
                f"CheckpointHook.save_best: {entry['checkpoint']}, the best by {key} = {entry['score']:.4f}, is not in "
                f"{self.out_dir(runner)} any more, as after one that a later validation had saved; the best is looked for anew"
            )
            self._best.forget(key)
        self._lost = ()

    def _position(self, runner: Run) -> dict[str, int]:
        return {"epoch": runner.epoch, "iter": runner.iter}

    # What to save. The three names with _save_ are MMEngine's; a subclass may override them.

    def _save_checkpoint(self, runner: Run) -> None:
        if self.by_epoch:
            self._save_checkpoint_with_step(runner, runner.epoch + 1, {"epoch": runner.epoch + 1, "iter": runner.iter})
        else:
            self._save_checkpoint_with_step(runner, runner.iter + 1, {"epoch": runner.epoch, "iter": runner.iter + 1})

    def _save_best_checkpoint(self, runner: Run, metrics: dict[str, Any]) -> None:
        number = runner.epoch if self.by_epoch else runner.iter
        if self._lost:
            self._forget_lost_ones(runner, metrics)
        for key, score in self._best.improved(metrics):
            name = f"best_{key}_{self.filename_tmpl.format(number)}".replace("/", "_")
            self._save_best(runner, key, score, name)

    def _save_checkpoint_with_step(self, runner: Run, step: int, meta: dict[str, int]) -> None:
        runner.logger.info("Saving checkpoint at %s", counted(step, self._unit))
        self._saves.settle(runner)
        undo, last = self._kept.add(step), self._last
        self._last = step
        folder = self.out_dir(runner)
        path = folder / self.filename_tmpl.format(step)
        show_before = _show(runner, {"last_ckpt": str(path)})

        def complete() -> None:
            self._last_failed = False
            self._kept.sort_in(runner, folder, step)

        def failed() -> None:
            self._last_failed = True
            undo()
            self._last = last
            show_before()

        what = dict(save_optimizer=self.save_optimizer, save_param_scheduler=self.save_param_scheduler)
        self._saves.save(runner, path, complete, failed, **what, meta=meta, verify=self.verify)

    def save_now(self, runner: Run) -> Path:
        """Save what was trained so far, unless that has just been done, and return the complete checkpoint to resume from.

        A hook that counts epochs calls it ``iter_<n>``; with ``max_keep_ckpts`` the next checkpoint replaces it. Raises
        CheckpointError if it cannot be saved.
        """
        self._saves.settle(runner)
        # Not in memory, which may be lost with the machine.
        if (saved := runner.saved_here()) is not None and saved.parent == self.out_dir(runner):
            return saved
        done, folder = runner.train_loop.iter, self.out_dir(runner)
        name = f"iter_{done}" if self.by_epoch else self.filename_tmpl.format(done)
        undo = self._kept.add_between(name) if self.by_epoch else self._kept.add(done)
        show_before = _show(runner, {"last_ckpt": str(folder / name)})
        try:
            runner.save_checkpoint(folder, name, verify=self.verify)
        except BaseException:
            undo()
            show_before()
            raise
        if self.by_epoch:
            self._kept.prune_between(runner, folder, name)
        else:
            self._kept.sort_in(runner, folder, done)
        return folder / name

    def _save_best(self, runner: Run, key: str, score: float, name: str) -> None:
        if marked := nonfinite_weights(runner):
            runner.logger.warning(
                f"CheckpointHook.save_best: {key} = {score:.4f} is not kept as the best, the weights hold NaN or infinity in "
                f"{what_is_not_finite(marked, 'parameter')}"
            )
            return
        self._saves.settle(runner)
        folder, previous, before = self.out_dir(runner), self._best.name(key), self._best.state_dict()
        self._best.set(key, score, name)
        suffix = "" if self._best.is_single else f"_{key}"
        show_before = _show(runner, {f"best_score{suffix}": score, f"best_ckpt{suffix}": str(folder / name)})

        def complete() -> None:
            runner.logger.info("The best %s is now %.4f, saved to %s", key, score, name)
            if previous not in (None, name):
                remove(runner, folder / str(previous))
            self._kept.remove_others(runner, folder, name)

        def failed() -> None:
            self._best.load_state_dict(before)  # the next one only has to be better than what is there
            show_before()

        what = dict(save_optimizer=False, save_param_scheduler=False, meta=self._position(runner), verify=self.verify)
        self._saves.save(runner, folder / name, complete, failed, **what)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the kept and the marked checkpoints, and the best scores."""
        return {**self._kept.state_dict(), "best": self._best.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._kept.load_state_dict(state)
        self._best.load_state_dict(state["best"])


def _is_there(path: Path) -> bool:
    with reaching(path):
        recover(path)
        return is_checkpoint(path)


def _show(runner: Run, infos: Mapping[str, Any]) -> Callable[[], None]:
    """Set infos of the message hub; return what sets them back."""
    hub = runner.message_hub
    before = {name: hub.get_info(name) for name in infos}
    for name, value in infos.items():
        hub.update_info(name, value)

    def show_before() -> None:
        for name, value in before.items():
            if value is None:
                hub.pop_info(name)
            else:
                hub.update_info(name, value)

    return show_before


def _check_template(template: str | None, where: str) -> str | None:
    if template is None:
        return None
    if template.count("{}") != 1 or "/" in template:
        raise ConfigError(f'{where}: "{template}" is not allowed, give a name with exactly one {{}}')
    if template.endswith((".pth", ".pt")):
        raise ConfigError(f'{where}: "{template}" is not allowed, checkpoints are directories; leave the ending out')
    return template
