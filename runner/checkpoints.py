"""Checkpoints: what a run starts from, and what it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.base.config import check_call
from ..core.base.errors import CheckpointError
from ..core.checkpoint import as_path
from ..core.checkpoint.foreign.download import local_copy, shown
from ..core.comm.agreement import raising_together
from ..strategies.parts import check_initialised, meet
from .config import check_loading
from .options import Resume
from .parts import Parts
from .resume import run_state
from .resume.choose_checkpoint import GoBack, ResumeFrom, check_resumable, find_source, find_start
from .resume.saver import Saver, check_can_be_saved, export_model
from .resume.weights import frozen_advice, leaves_out

if TYPE_CHECKING:
    import torch

    from .loops.train import TrainLoop
    from .resume.publish import Target
    from .run import Run


class Checkpoints:
    """Loads what a run starts from, once, and saves it.

    Args:
        run: the runner.
        parts: what is loaded, and saved.

    Attributes:
        saver: makes the saves.
        has_begun: whether hooks were told that the run begins.
        started: whether training has loaded its start, or resumed.
        resumed_from: the checkpoint that training went on from; None: it began anew.
    """

    def __init__(self, run: Run, parts: Parts) -> None:
        self._run, self._parts = run, parts
        self.saver = Saver(run)
        self.has_begun = False
        self.started = False
        self.resumed_from: Path | None = None
        self._has_weights = False  # True once weights were loaded

    def begin(self) -> None:
        """Call before_run, once per run, so that hooks allocate what a checkpoint is loaded into."""
        if not self.has_begun:
            self.has_begun = True
            self._run.hook_calls.refresh()
            self._run.call_hook("before_run")

    def start_training(self) -> None:
        """Resume, load weights or do neither, as the configuration says, once; then check that the run can be saved."""
        run = self._run
        if not self.started:
            source, resumed = find_start(run)
            if source is not None and resumed:
                self._resume_newest(as_path(source), resumed)
            elif source is not None and not self._has_weights:
                run.load_checkpoint(source)
            elif resumed:
                run.logger.info(f"Nothing to resume in {run.checkpoint_dir}, training starts from the beginning")
            if any(hook.checkpoint_dir(run) for hook in run.hooks):
                check_can_be_saved(run)
                if line := frozen_advice(run):
                    run.logger.info(line)
        for hook in run.hooks:
            hook.check_folders(run)
        self.started = True
        self._check_initialised()
        loop = run.train_loop
        done, goal = (loop.epoch, loop.max_epochs) if loop.by_epoch else (loop.iter, loop.max_iters)
        if done >= goal:
            unit = "epochs" if loop.by_epoch else "iters"
            run.logger.info(f"Nothing is left to train: {done} of max_{unit}={goal} are done")

    def _resume_newest(self, path: Path, options: Resume) -> None:
        """Resume; if the fast tier's checkpoint is damaged, from the ordinary one, unless the script names it."""
        run = self._run
        try:
            self.resume(path, options)
        except CheckpointError as error:
            if path.parent != run.fast_checkpoint_dir:
                raise
            other, options_of_other = find_start(run, without=path)
            if other is None or options_of_other is None or as_path(other) == path:
                raise
            run.logger.warning(f"{error}; {other} is resumed in its place")
            self.resume(as_path(other), options_of_other)

    def train(self, loop: TrainLoop) -> None:
        """Run the training loop to its end, again from another checkpoint whenever a hook or the strategy asks for it."""
        while True:
            try:
                loop.run()
                return
            except (GoBack, ResumeFrom) as left:
                from .resume.going_back import go_on  # few runs do

                self._run.call_hook("on_exception", exception=left)
                go_on(self._run, loop, left, partial(self.resume, left.path, Resume()))
                for hook in self._run.hooks:
                    hook.check_folders(self._run)

    def start_evaluation(self) -> None:
        """Load the weights to begin with for a call besides train(), if they were not; train() may still resume."""
        source, _ = find_source(self._run)
        if source is not None and not self.started and not self._has_weights:
            self._load_left_out(source)
            self._run.load_checkpoint(source)
        self._check_initialised()

    def load(self, filename: str | Path, strict: bool, revise_keys: Sequence[tuple[str, str]]) -> None:
        """See ``FlexibleRunner.load_checkpoint``."""
        check_loading(strict, revise_keys)
        meet(self._run.strategy, "load_checkpoint()")
        path = local_copy(filename)  # before the model is built, which may take longer
        self._parts.set_up()
        self.begin()
        run_state.load_weights(self._run, path, strict=strict, revise_keys=revise_keys)
        self._has_weights = True
        self._run.logger.info(f"Loaded the weights of {shown(filename)}")

    def resume(self, path: Path, options: Resume) -> None:
        """Restore the run from a checkpoint, except the pieces that ``options`` leaves out."""
        check_resumable(path)
        run = self._run
        self._parts.resumed_from = path
        self._parts.set_up()
        self._parts.set_up_schedulers()
        self.begin()
        self._load_left_out(path)
        run_state.resume(run, path, options)
        self.started, self.resumed_from = True, path
        left_out = [name for name, value in options if value is False and name != "verify"]
        but = f", without {', '.join(left_out)}" if left_out else ""
        run.logger.info(f"Resumed from {path}{but}: epoch {run.epoch}, iteration {run.iter}")

    def export_hugging_face(self, folder: str | Path, options: Mapping[str, Any]) -> list[Path]:
        """See ``FlexibleRunner.export_hugging_face``."""
        from ..core.checkpoint import export_hugging_face
        from ..core.checkpoint.export.files import local_folder
        from .loops.evaluate import tell_training_mode

        check_call(export_hugging_face, options, "export_hugging_face", ("checkpoint", "folder", "config", "averaged"))
        meet(self._run.strategy, "export_hugging_face()")
        self._parts.set_up()
        self.start_evaluation()
        tell_training_mode(self._run, "call its eval() before export_hugging_face(), and train() after it")
        return export_model(self._run, local_folder(folder), options)

    def publish(self, target: Target, dtype: str | torch.dtype | None) -> Any:
        """See ``FlexibleRunner.publish``."""
        from .loops.evaluate import tell_training_mode
        from .resume.publish import check_dtype, check_target, publish

        check_target(target)
        kind = check_dtype(dtype)
        meet(self._run.strategy, "publish()")
        self._parts.set_up()
        self.start_evaluation()
        tell_training_mode(self._run, "call its eval() before publish(), and train() after it")
        return publish(self._run, target, kind)

    def _load_left_out(self, path: str | Path) -> None:
        """Load the base of a checkpoint that was saved without its frozen parameters, if load_from gives one."""
        run, path = self._run, as_path(path)
        base = run.options.load_from
        if base is None or self._has_weights or as_path(base) == path or not leaves_out(path):
            return
        run.logger.info(f"{path}: was saved without its frozen parameters, which are loaded from {shown(base)} first")
        run.load_checkpoint(base)

    def _check_initialised(self) -> None:
        with raising_together():  # a process may hold other parameters than the next
            check_initialised(self._run.strategy)
