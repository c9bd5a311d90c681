"""Checkpoints: the runner's methods that save, load and resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..core.base.config import check_call, known_keywords, validate
from ..core.checkpoint import as_path
from ..core.checkpoint.foreign.download import local_copy, shown
from ..core.comm.agreement import raising_together
from ..core.hugging_face.pretrained import Description, describe, pretrained_in
from ..strategies.parts import check_initialised, expect_values, meet
from .config import Checked, check_loading
from .options import Resume
from .parts import BuildMethods
from .resume import run_state
from .resume.choose_checkpoint import check_resumable, find_source, find_start
from .resume.saver import Saver, check_can_be_saved, check_on_error, export_model
from .resume.weights import ToRead, frozen_advice, leaves_out, read_pretrained


class Checkpoints(BuildMethods):
    """The methods of FlexibleRunner that save and load checkpoints.

    Args:
        given: the runner's arguments.
        checked: the checked arguments, and the parts built from them.
    """

    def __init__(self, given: Mapping[str, Any], checked: Checked) -> None:
        super().__init__(given, checked)
        self._saver = Saver()
        self._has_begun = False  # True after before_run
        self._has_weights = False  # True once load_checkpoint has run
        self._started = False  # True once training has loaded its start or resumed
        self._pretrained: list[ToRead] = []
        self.hugging_face: Description | None = None
        """What exports have to know of a model of transformers; None for other models, and before it is built."""
        self.resumed_from: Path | None = None
        self._ending: Exception | None = None  # what train() raises once the run has ended in order

    def _build_model(self) -> nn.Module:
        model = super()._build_model()
        self.hugging_face = describe(model)  # before a strategy changes the configuration
        self._pretrained = [ToRead(source, model) for source in pretrained_in(model)]
        expect_values(self.strategy, {name for part in self._pretrained for name in part.names.values()})
        return model

    def _setup_model(self) -> None:
        is_new = self._model is None
        super()._setup_model()
        for part in self._pretrained if is_new else ():
            read_pretrained(self, part)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call every hook at the hook point ``fn_name``."""
        self.hook_calls.call(fn_name, self, **kwargs)

    def end_with(self, error: Exception) -> None:
        """Stop training after the current epoch or iteration; ``train()`` raises ``error`` when the run has been closed.

        For hooks, during training and on every process. The run ends in order: hooks are told of its end and not of an
        exception, logs are closed, and checkpoints complete. An error of that end is raised in place of ``error``.
        """
        self._ending = error
        self.train_loop.stop_training = True

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        async_save: bool = False,
        verify: bool = False,
        on_error: Literal["raise", "continue"] = "raise",
    ) -> str:
        """Write the checkpoint directory ``out_dir/filename``; a collective.

        If it has the optimizer state, and so can be resumed, ``latest`` names it from then on.

        Args:
            meta: plain values to save beside the state.
            async_save: return after the state is copied to the CPU, and write it in the background; see
                ``finish_saving``. The copy takes as much memory as this process writes, and is kept for the next save.
            verify: read back what was written before the checkpoint counts as complete.
            on_error: "continue" logs a warning when storage fails, and ``train()`` raises only if the last save has
                failed; ``save_failed`` tells. A process that is lost and state that cannot be saved raise in any case.

        Raises:
            CheckpointError: this save failed, or the previous one failed in the background.
            ConfigError: ``on_error`` is something else.
        """
        check_on_error(on_error, "save_checkpoint.on_error")
        path = as_path(out_dir) / filename
        self._saver.save(
            self,
            path,
            save_optimizer=save_optimizer,
            save_param_scheduler=save_param_scheduler,
            meta=meta,
            in_background=async_save,
            verify=verify,
            on_error=on_error,
        )
        return str(path)

    def finish_saving(self, wait: bool = True) -> bool:
        """Wait for the save in progress in the background; with ``wait=False`` only ask whether it is complete.

        With ``wait=False`` one process may get True an iteration before another does.

        Returns:
            True if no save is in progress.

        Raises:
            CheckpointError: the save failed, and its ``on_error`` is "raise".
        """
        return self._saver.finish(self, wait)

    def was_marked(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path`` with NaN or infinity where values must be finite."""
        return self._saver.was_marked(path)

    def has_saved(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path``, and it was complete."""
        return self._saver.has_saved(path)

    def export_hugging_face(self, folder: str | Path, **options: Any) -> list[Path]:
        """Write the model of transformers that is trained to a folder which ``from_pretrained`` loads; a collective.

        Every process writes its own part beside the folder first, as in a checkpoint, so that none holds the whole model.
        Frozen parameters are always written, and adapters of LoRA are merged into their base. Before training, weights are
        those of ``load_from`` or ``resume``; the runner may be one that does not train.

        Args:
            folder: the folder to write, which every process reaches.
            options: ``tokenizer``, ``dtype`` and ``max_shard_size`` of ``export_hugging_face`` in flextrain.core.checkpoint.

        Returns:
            The files that were written.

        Raises:
            CheckpointError: the model is none of transformers, or the folder holds one already.
            ConfigError: an unknown option.
        """
        from ..core.checkpoint import export_hugging_face
        from ..core.checkpoint.export.files import local_folder

        check_call(export_hugging_face, options, "export_hugging_face", ("checkpoint", "folder", "config", "averaged"))
        meet(self.strategy, "export_hugging_face()")
        self._setup_model()
        self._load_source()
        return export_model(self, local_folder(folder), options)

    @property
    def saving_s(self) -> float:
        """Seconds that training has waited for saves so far."""
        return self._saver.seconds

    def save_failed(self, path: str | Path) -> bool:
        """True if the last save of the checkpoint ``path`` failed; one before may have been complete."""
        return path in self._saver.failed

    def saved_here(self) -> Path | None:
        """The complete checkpoint of the present position in training, if this run saved one to go on from."""
        return self._saver.saved_here(self)

    def load_checkpoint(
        self,
        filename: str | Path,
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
    ) -> None:
        """Load weights into the model; a collective.

        Args:
            filename: a path or URL that ``load_from`` accepts.
            strict: raise if any name or shape does not fit; otherwise this is logged.
            revise_keys: (pattern, replacement) pairs of ``re.sub``, applied in this order to all names of the file.

        Raises:
            ConfigError: ``strict`` is not a bool, or ``revise_keys`` are not such pairs; nothing was read.
            CheckpointError: nothing fits; with ``strict``, something does not fit; or the file cannot be read.
        """
        check_loading(strict, revise_keys)
        meet(self.strategy, "load_checkpoint()")
        path = local_copy(filename)  # before the model is built, which may take longer
        self._setup_model()
        self._begin()
        run_state.load_weights(self, path, strict=strict, revise_keys=revise_keys)
        self._has_weights = True
        self.logger.info(f"Loaded the weights of {shown(filename)}")

    @known_keywords()
    def resume(
        self,
        filename: str | Path,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        *,
        random: bool = True,
        hooks: bool = True,
        logs: bool = True,
        data: bool = True,
        verify: bool = True,
    ) -> None:
        """Restore a run from a checkpoint, except the pieces that are left out; a collective.

        In the middle of an epoch the run continues with the next sample, on any number of processes and with any batch
        size. RNG states are restored for the same number of processes. For another number, every process uses a new
        seed made of the run's seed, the iteration and its rank.

        Args:
            filename: the checkpoint directory.
            resume_optimizer, resume_param_scheduler, random, hooks, logs, data, verify: see ``resume`` of the runner.

        Raises:
            CheckpointError: a piece is missing or damaged, or does not fit; the message says how to leave it out.
            ConfigError: an unknown keyword.
        """
        options = {"optimizer": resume_optimizer, "param_scheduler": resume_param_scheduler}
        options |= {"random": random, "hooks": hooks, "logs": logs, "data": data, "verify": verify}
        checked = validate(Resume, options, "resume")
        meet(self.strategy, "resume()")
        self._resume(as_path(filename), checked)

    def _resume(self, path: Path, options: Resume) -> None:
        check_resumable(path)
        self._resumed_from = path
        self._setup_model()
        self._setup_schedulers()
        self._begin()
        self._load_left_out(path)
        run_state.resume(self, path, options)
        self._started, self.resumed_from = True, path
        left_out = [name for name, value in options if value is False and name != "verify"]
        but = f", without {', '.join(left_out)}" if left_out else ""
        self.logger.info(f"Resumed from {path}{but}: epoch {self.epoch}, iteration {self.iter}")

    def _load_left_out(self, path: str | Path) -> None:
        """Load the base of a checkpoint that was saved without its frozen parameters, if load_from gives one."""
        base, path = self.options.load_from, as_path(path)
        if base is None or self._has_weights or as_path(base) == path or not leaves_out(path):
            return
        self.logger.info(f"{path}: was saved without its frozen parameters, which are loaded from {shown(base)} first")
        self.load_checkpoint(base)

    def _load_source(self) -> None:
        """Load the weights to begin with for a call besides train(), if they were not."""
        source, _ = find_source(self)
        if source is not None and not self._started and not self._has_weights:
            self._load_left_out(source)
            self.load_checkpoint(source)  # _started stays False: train() may still resume from it
        self._check_initialised()

    def _check_initialised(self) -> None:
        with raising_together():  # a process may hold other parameters than the next
            check_initialised(self.strategy)

    def use_data_seed(self, seed: int) -> None:
        """Set the seed of the data order to that of the resumed run."""
        self.seed = seed
        self.train_loop.data.use_seed(seed)

    def _load_or_resume(self) -> None:
        if self._started:
            return
        source, resumed = find_start(self)
        if source is not None and resumed:
            self._resume(as_path(source), resumed)
        elif source is not None:
            if not self._has_weights:
                self.load_checkpoint(source)
        elif resumed:
            self.logger.info(f"Nothing to resume in {self.checkpoint_dir}, training starts from the beginning")
        if any(hook.checkpoint_dir(self) for hook in self.hooks):
            check_can_be_saved(self)
            if line := frozen_advice(self):
                self.logger.info(line)
        self._started = True

    def _begin(self) -> None:
        """Call before_run, once per run, so that hooks allocate what a checkpoint is loaded into."""
        if not self._has_begun:
            self._has_begun = True
            self.hook_calls.refresh()
            self.call_hook("before_run")
