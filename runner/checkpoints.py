"""Checkpoints: how a run saves, loads and resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.checkpoint import place
from ..core.config import known_keywords, validate
from .arguments import Checked
from .configuration import check_loading
from .options import Resume
from .parts import Parts
from .resume import checkpoint
from .resume.saver import Saver
from .resume.source import find_source


class Checkpoints(Parts):
    """The methods of FlexibleRunner that write checkpoints and read them.

    Args:
        given: the runner's arguments.
        checked: what was made of them.
    """

    def __init__(self, given: Mapping[str, Any], checked: Checked) -> None:
        super().__init__(given, checked)
        self._saver = Saver()
        self._has_begun = False  # whether hooks were told
        self._has_weights = False  # whether the model has those that evaluation begins with
        self._started = False  # whether training has what it begins with

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Run every hook at the point ``fn_name``."""
        self.hook_calls.call(fn_name, self, **kwargs)

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        async_save: bool = False,
        verify: bool = False,
    ) -> str:
        """Write the checkpoint directory ``out_dir/filename``; every process must call it.

        One that can be resumed, with the optimizer, becomes what ``latest`` names.

        Args:
            meta: plain values to put beside the state.
            async_save: return as soon as the state is copied to the CPU, and write it in the background; see
                ``finish_saving``. The copy takes as much memory as this process writes, which is kept for the next one.
            verify: read what was written, before it counts as complete.

        Raises:
            CheckpointError: it could not be saved, or the one before could not, in the background.
        """
        path = place(out_dir) / filename
        self._saver.save(
            self,
            path,
            save_optimizer=save_optimizer,
            save_param_scheduler=save_param_scheduler,
            meta=meta,
            in_background=async_save,
            verify=verify,
        )
        return str(path)

    def finish_saving(self, wait: bool = True) -> bool:
        """Wait for the checkpoint that is being written in the background; ``wait=False`` only looks whether it is done.

        With ``wait=False`` one process may find it done an iteration before another does.

        Returns:
            Whether nothing is being written any more.

        Raises:
            CheckpointError: it could not be saved; every process has logged the reason when it happened.
        """
        return self._saver.finish(self, wait)

    def is_marked(self, path: str | Path) -> bool:
        """Whether the checkpoint that this run has saved to ``path`` holds NaN or infinity where it should not."""
        return self._saver.is_marked(path)

    def load_checkpoint(
        self,
        filename: str | Path,
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
    ) -> None:
        """Fill the model with weights; every process must call it.

        Args:
            filename: whatever ``load_from`` takes.
            strict: raise if any name or shape does not fit, which is logged otherwise.
            revise_keys: (pattern, replacement) pairs of ``re.sub``, each applied to all names of the file in this order.

        Raises:
            ConfigError: ``strict`` is no bool, or ``revise_keys`` no such pairs; nothing has been read then.
            CheckpointError: nothing fits, or, with ``strict``, not everything; or the file cannot be read.
        """
        check_loading(strict, revise_keys)
        self.strategy.meet("load_checkpoint()")
        self._setup_model()
        self._begin()
        checkpoint.load_weights(self, place(filename), strict=strict, revise_keys=revise_keys)
        self._has_weights = True
        self.logger.info(f"Loaded the weights of {filename}")

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
    ) -> None:
        """Bring everything to where the checkpoint was written, but for what is left out; every process must call it.

        In the middle of an epoch the run goes on with the next sample, on any number of processes and in batches of any
        size. Random states come back among the same number of processes; among another, every process draws from a seed
        made of the run's, the iteration and its rank.

        Args:
            filename: the checkpoint directory.
            resume_optimizer, resume_param_scheduler, random, hooks, logs, data: see ``resume`` of the runner.

        Raises:
            CheckpointError: a piece is missing or damaged, or does not fit this run; it says how to leave the piece out.
            ConfigError: an unknown keyword.
        """
        options = {"optimizer": resume_optimizer, "param_scheduler": resume_param_scheduler}
        options |= {"random": random, "hooks": hooks, "logs": logs, "data": data}
        checked = validate(Resume, options, "resume")
        self.strategy.meet("resume()")
        self._resume(place(filename), checked)

    def _resume(self, path: Path, options: Resume) -> None:
        self._setup_model()
        self._setup_schedulers()
        self._begin()
        checkpoint.resume(self, path, options)
        self._started = True
        left_out = [name for name, value in options if value is False]
        but = f", without {', '.join(left_out)}" if left_out else ""
        self.logger.info(f"Resumed from {path}{but}: epoch {self.epoch}, iteration {self.iter}")

    def use_data_seed(self, seed: int) -> None:
        """Order the training data by another seed, that of a run which is continued."""
        self.seed = seed
        self.train_loop.data.use_seed(seed)

    def _load_or_resume(self) -> None:
        if self._started:
            return
        source, resumed = find_source(self)
        if source is not None and resumed:
            self._resume(place(source), resumed)
        elif source is not None:
            if not self._has_weights:
                self.load_checkpoint(source)
        elif resumed:
            self.logger.info(f"Nothing to resume in {self.checkpoint_dir}, training starts from the beginning")
        self._started = True

    def _begin(self) -> None:
        """Let hooks make what a checkpoint is loaded into, once per run."""
        if not self._has_begun:
            self._has_begun = True
            self.hook_calls.refresh()
            self.call_hook("before_run")
