"""CheckpointHook: decides when checkpoints are saved and which are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import (
    as_path,
    find_latest,
    is_checkpoint,
    is_marked,
    make_writable,
    remove_checkpoint,
    what_is_not_finite,
)
from ...core.comm.collectives import broadcast_object
from ...core.errors import CheckpointError, ConfigError, counted
from ...core.registry import HOOKS
from ..finite_weights import nonfinite_weights
from .best_scores import BestScores
from .hook import Hook
from .save_interval import beyond_the_end
from .unsupported import refuse

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Saves a checkpoint every few epochs or iterations, and keeps the newest and the best ones.

    Checkpoints are directories ``epoch_3`` or ``iter_1000``, and ``best_<metric>_epoch_3`` without the optimizer. A
    checkpoint is deleted only after its successor is complete, and never while ``latest`` names it. Checkpoints of
    other runs are not touched; if a checkpoint would take the name of one, training does not start, unless
    ``overwrite`` is set.

    A checkpoint with NaN or infinity in weights, averages or optimizer state is marked: ``latest`` does not move to it,
    it never becomes the best, and it does not count in ``max_keep_ckpts``. Of the marked ones only the newest is kept.

    With ``async_save`` training waits only while the state is copied to the CPU. From the first save on, the copy takes
    as much memory as the process writes. At most one save is in progress: the next one waits for it. The next iteration
    raises an error of the writing, and training does not end before the last checkpoint is complete.

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
        overwrite: replace checkpoints of another run that have the same names. If it is False and there are some,
            training from the beginning, or from a checkpoint in another folder, is refused before the first update.
        verify: read back what was written and compare checksums before a checkpoint counts as complete.
        save_last: also save at the end of training, whatever the interval.
        save_best: metrics whose best checkpoint is kept; "auto": the first metric of the first validation.
        rule: "greater" or "less" is better, one for all metrics or a list with one each; default: by their names.
        greater_keys, less_keys: words in a metric's name that determine the rule.
        filename_tmpl: name with one ``{}`` for the number.
        save_begin: first epoch or iteration at which a checkpoint may be saved.
        file_client_args, backend_args, published_keys: not supported.
    """

    priority = "VERY_LOW"

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
    ) -> None:
        where = "CheckpointHook"
        refuse(where, file_client_args=file_client_args, backend_args=backend_args, published_keys=published_keys)
        if interval < 1 and interval != -1:
            raise ConfigError(f"{where}.interval: {interval} is not allowed, give 1 or more, or -1 for never")
        if max_keep_ckpts < 1 and max_keep_ckpts != -1:
            raise ConfigError(f"{where}.max_keep_ckpts: {max_keep_ckpts} is not allowed, give 1 or more, or -1 for all")
        if keep_every < 1 and keep_every != -1:
            raise ConfigError(f"{where}.keep_every: {keep_every} is not allowed, give 1 or more, or -1 for none")
        if keep_every != -1 and max_keep_ckpts == -1:
            raise ConfigError(f"{where}.keep_every: has no meaning without max_keep_ckpts, all are kept")
        if save_begin < 0:
            raise ConfigError(f"{where}.save_begin: {save_begin} is not allowed, give 0 or more")
        self.interval = interval
        self.by_epoch = by_epoch
        self.save_optimizer = save_optimizer
        self.save_param_scheduler = save_param_scheduler
        self.max_keep_ckpts = max_keep_ckpts
        self.keep_every = keep_every
        self.async_save = async_save
        self.verify = verify
        self.overwrite = overwrite
        self.save_last = save_last
        self.save_begin = save_begin
        self.filename_tmpl = _check_template(filename_tmpl, f"{where}.filename_tmpl") or f"{self._unit}_{{}}"
        self._parent = None if out_dir is None else as_path(out_dir)
        self._best = BestScores(save_best, rule, greater_keys, less_keys, where)
        self._kept: list[int] = []
        self._marked: list[int] = []  # with NaN or infinity, not counted among the kept ones
        self._last: int | None = None
        self._is_training = False
        self._has_looked = False  # True once the folder may hold checkpoints of this run
        self._deletions: list[Callable[[], object]] = []  # to do when the save in progress is complete

    @property
    def saves_best(self) -> bool:
        """True if metrics are monitored, which needs validation."""
        return self._best.wanted

    @property
    def best_scores(self) -> dict[str, Any]:
        """The best value of each monitored metric, and its checkpoint: ``{"accuracy": {"score", "checkpoint"}}``."""
        return self._best.state_dict()

    @property
    def _unit(self) -> str:
        return "epoch" if self.by_epoch else "iter"

    def out_dir(self, runner: Run) -> Path:
        """Return the folder that checkpoints are saved to."""
        work_dir = Path(runner.work_dir)
        return work_dir if self._parent is None else self._parent / work_dir.name

    def checkpoint_dir(self, runner: Run) -> Path:
        """See Hook."""
        return self.out_dir(runner)

    def check_metrics(self, runner: Run, names: Collection[str]) -> None:
        """Raise ConfigError if ``save_best`` names no metric."""
        self._best.check_names(names)

    # When to save

    def before_train(self, runner: Run) -> None:
        """Check that the folder is writable, and continue with the checkpoints that a resumed run had kept."""
        if self._parent is not None:  # the runner has checked its work directory
            make_writable(self.out_dir(runner), "CheckpointHook.out_dir")
        self._is_training, self._last = True, None
        how = dict(by_epoch=self.by_epoch, save_last=self.save_last)
        if doubt := beyond_the_end(runner, self.interval, self.save_begin, **how):
            runner.logger.warning(doubt)
        runner.logger.info("Checkpoints will be saved to %s", self.out_dir(runner))
        if runner.iter == 0 or not self._has_looked:
            self._keep_others(runner)
        self._has_looked = True
        if self._kept:
            # A checkpoint is marked only after it is written, too late for this hook's state in it.
            is_bad: bool = broadcast_object(runner.rank == 0 and is_marked(self._path(runner, self._kept[-1])))
            self._marked += [self._kept.pop()] if is_bad else []
        self._prune(runner)

    def after_train_epoch(self, runner: Run) -> None:
        """Save a checkpoint if it is due."""
        if self.by_epoch and (
            self.every_n_epochs(runner, self.interval, self.save_begin)
            or (self.save_last and self.is_last_train_epoch(runner))
        ):
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
            self._settle(runner, wait=False)
        if not self.by_epoch and (
            self.every_n_train_iters(runner, self.interval, self.save_begin)
            or (self.save_last and self.is_last_train_iter(runner))
        ):
            self._save_checkpoint(runner)

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
        """Save the last state if training was stopped early."""
        number = runner.epoch if self.by_epoch else runner.iter
        if self.save_last and number > 0 and number != self._last and runner.train_loop.stop_training:
            self._save_checkpoint_with_step(runner, number, {"epoch": runner.epoch, "iter": runner.iter})
        self._settle(runner)
        self._is_training = False

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: a later validation must not save."""
        self._is_training = False

    # What to save. The three names with _save_ are MMEngine's; a subclass may override them.

    def _save_checkpoint(self, runner: Run) -> None:
        if self.by_epoch:
            self._save_checkpoint_with_step(runner, runner.epoch + 1, {"epoch": runner.epoch + 1, "iter": runner.iter})
        else:
            self._save_checkpoint_with_step(runner, runner.iter + 1, {"epoch": runner.epoch, "iter": runner.iter + 1})

    def _save_best_checkpoint(self, runner: Run, metrics: dict[str, Any]) -> None:
        number = runner.epoch if self.by_epoch else runner.iter
        for key, score in self._best.improved(metrics):
            name = f"best_{key}_{self.filename_tmpl.format(number)}".replace("/", "_")
            self._save_best(runner, key, score, name)

    def _save_checkpoint_with_step(self, runner: Run, step: int, meta: dict[str, int]) -> None:
        runner.logger.info("Saving checkpoint at %s", counted(step, self._unit))
        self._settle(runner)
        # A checkpoint that is saved twice must not count as two, or the older of them would be deleted.
        self._marked = [marked for marked in self._marked if marked != step]
        self._kept = [*(kept for kept in self._kept if kept != step), step]
        self._last = step
        name = self.filename_tmpl.format(step)
        runner.message_hub.update_info("last_ckpt", str(self.out_dir(runner) / name))
        self._write(runner, name, self.save_optimizer, self.save_param_scheduler, meta)
        self._when_complete(lambda: self._sort_in(runner, step))

    def _write(
        self, runner: Run, name: str, save_optimizer: bool, save_param_scheduler: bool, meta: dict[str, int]
    ) -> None:
        runner.save_checkpoint(
            self.out_dir(runner),
            name,
            save_optimizer=save_optimizer,
            save_param_scheduler=save_param_scheduler,
            meta=meta,
            async_save=self.async_save,
            verify=self.verify,
        )

    def _when_complete(self, deletion: Callable[[], object]) -> None:
        """Call ``deletion`` now, or after the background save of the successor is complete."""
        if self.async_save:
            self._deletions.append(deletion)
        else:
            deletion()

    def _settle(self, runner: Run, wait: bool = True) -> None:
        """Make the pending deletions if no save is in progress."""
        if runner.finish_saving(wait):
            deletions, self._deletions = self._deletions, []
            for deletion in deletions:
                deletion()

    def _save_best(self, runner: Run, key: str, score: float, name: str) -> None:
        if marked := nonfinite_weights(runner):
            runner.logger.warning(
                f"CheckpointHook.save_best: {key} = {score:.4f} is not kept as the best, the weights hold NaN or infinity in "
                f"{what_is_not_finite(marked, 'parameter')}"
            )
            return
        self._settle(runner)
        folder, previous = self.out_dir(runner), self._best.name(key)
        self._best.set(key, score, name)
        suffix = "" if self._best.is_single else f"_{key}"
        runner.message_hub.update_info(f"best_score{suffix}", score)
        runner.message_hub.update_info(f"best_ckpt{suffix}", str(folder / name))
        self._write(runner, name, False, False, {"epoch": runner.epoch, "iter": runner.iter})
        if previous not in (None, name):
            self._when_complete(lambda: self._remove(runner, folder / str(previous)))
        runner.logger.info("The best %s is now %.4f, saved to %s", key, score, name)

    def _sort_in(self, runner: Run, number: int) -> None:
        """Count a completed checkpoint among the good or the marked ones, then delete old ones."""
        if number in self._kept and runner.was_marked(self._path(runner, number)):
            self._kept.remove(number)
            self._marked.append(number)
        self._prune(runner)

    def _path(self, runner: Run, number: int) -> Path:
        return self.out_dir(runner) / self.filename_tmpl.format(number)

    def _prune(self, runner: Run) -> None:
        """Delete the oldest checkpoints of this run beyond ``max_keep_ckpts``, and all marked ones but the newest."""
        if self.max_keep_ckpts < 1:
            return
        for numbers, count in ((self._kept, self.max_keep_ckpts), (self._marked, 1)):
            for number in numbers[:-count]:
                if self.keep_every > 0 and number % self.keep_every == 0:
                    continue
                if self._remove(runner, self._path(runner, number)):
                    numbers.remove(number)

    def _remove(self, runner: Run, path: Path) -> bool:
        """Delete a checkpoint on rank 0, unless ``latest`` names it; return False if it stays."""
        # No collective is needed: all processes have left the last save, so they read the same ``latest``.
        if _is_latest(path):
            return False
        if runner.rank == 0 and path.exists():  # it has no manifest if a process was killed while deleting it
            try:
                remove_checkpoint(path)
            except OSError as error:
                runner.logger.warning("Checkpoint %s could not be deleted: %s", path, error)
        return True

    def _keep_others(self, runner: Run) -> None:
        """Raise ConfigError if checkpoints of another run would be replaced without ``overwrite``.

        A run with ``resume`` that found no checkpoint to start from continues with its own folder.
        """
        folder = self.out_dir(runner)
        looks = runner.rank == 0 and (runner.iter == 0 or _comes_from_elsewhere(runner, folder))
        names = broadcast_object(self._in_the_way(runner, folder) if looks else [])
        if not names:
            return
        found = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        if not self.overwrite and (runner.options.resume_options is None or runner.iter > 0):
            raise ConfigError(
                f"work_dir: {folder} holds checkpoints of another run ({found}), which this one would replace; resume=True "
                "continues that run, another work_dir keeps it, default_hooks=dict(checkpoint=dict(overwrite=True)) "
                "replaces it"
            )
        runner.logger.warning("%s holds checkpoints of another run (%s), which will be replaced", folder, found)

    def _in_the_way(self, runner: Run, folder: Path) -> list[str]:
        """Return the existing checkpoints whose names this run will use."""
        last = runner.max_epochs if self.by_epoch else runner.max_iters
        before, after = self.filename_tmpl.split("{}")
        name = re.compile(rf"(?:best_.+_)?{re.escape(before)}(\d+){re.escape(after)}")
        patterns = [self.filename_tmpl] if self.interval > 0 or self.save_last else []
        patterns += [f"best_*_{self.filename_tmpl}"] if self._best.wanted else []
        found = {path.name: path for pattern in patterns for path in folder.glob(pattern.format("*"))}
        numbers = {text: int(match[1]) for text in found if (match := name.fullmatch(text))}
        reached = sorted((text for text, number in numbers.items() if number <= last), key=lambda text: numbers[text])
        return [text for text in reached if is_checkpoint(found[text])]

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the kept and the marked checkpoints, and the best scores."""
        return {"kept": list(self._kept), "marked": list(self._marked), "best": self._best.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._kept, self._marked = list(state["kept"]), list(state.get("marked", ()))
        self._best.load_state_dict(state["best"])


def _comes_from_elsewhere(runner: Run, folder: Path) -> bool:
    """Return True if the run resumed from a checkpoint outside ``folder``, so those in ``folder`` are not its own."""
    resumed = runner.options.resume_options
    source = None if resumed is None else resumed.path or runner.options.load_from
    return source is not None and as_path(source).parent.resolve() != folder.resolve()


def _is_latest(path: Path) -> bool:
    try:
        latest = find_latest(path.parent)
    except CheckpointError:
        return False
    return latest is not None and latest.name == path.name


def _check_template(template: str | None, where: str) -> str | None:
    if template is None:
        return None
    if template.count("{}") != 1 or "/" in template:
        raise ConfigError(f'{where}: "{template}" is not allowed, give a name with exactly one {{}}')
    if template.endswith((".pth", ".pt")):
        raise ConfigError(f'{where}: "{template}" is not allowed, checkpoints are directories; leave the ending out')
    return template
