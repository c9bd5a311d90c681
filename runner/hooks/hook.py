"""Hook: base class of code that runs at named points of training, validation and testing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .points import overridden_points
from .priority import Priority

if TYPE_CHECKING:
    from ..run import Run


class Hook:
    """Base class of all hooks; every hook point does nothing until a subclass overrides it.

    Unless overridden, a hook point of one mode (``before_train_iter``) calls the group form (``before_iter``) with the
    mode. Hook points that no hook overrides cost nothing at run time.

    ``runner`` is the FlexibleRunner. Its type is Any, so that a hook may annotate it as FlexibleRunner or as ``Run``.

    In ``after_train_iter`` of the first iteration ``runner.iter`` is 0. An iteration is one optimizer update; with
    gradient accumulation ``data_batch`` is the list of its micro-batches.
    """

    priority: int | str | Priority = "NORMAL"
    holds_weights: bool = False
    """True if the hook's state is weights of the model, which ``load_from`` loads together with the model's own."""

    def checkpoint_dir(self, runner: Any) -> Path | None:
        """Return the folder of this hook's checkpoints, in which ``resume=True`` looks; None: it saves none."""
        return None

    def fast_checkpoint_dir(self, runner: Any) -> Path | None:
        """Return the folder of this hook's second tier of checkpoints, where ``resume=True`` looks too; None: no tier."""
        return None

    def check_metrics(self, runner: Any, names: Collection[str]) -> None:
        """Raise ConfigError if a metric that this hook needs is not in ``names``; called by the dry pass of validation.

        Args:
            names: the metrics of a few validation batches.
        """

    # The whole run

    def before_run(self, runner: Any) -> None:
        """Before anything is loaded; the model and the optimizer exist already."""

    def after_run(self, runner: Any) -> None:
        """At the very end of train(), val() or test()."""

    def on_exception(self, runner: Any, exception: BaseException) -> None:
        """Instead of the remaining hook points, when train(), val() or test() ends with ``exception``."""

    def before_train(self, runner: Any) -> None:
        """After loading and resuming, before the first iteration."""

    def after_train(self, runner: Any) -> None:
        """After the last iteration and its validation."""

    def before_val(self, runner: Any) -> None:
        """Before each pass over the validation data."""

    def after_val(self, runner: Any) -> None:
        """After each pass over the validation data."""

    def before_test(self, runner: Any) -> None:
        """Before the pass over the test data."""

    def after_test(self, runner: Any) -> None:
        """After the pass over the test data."""

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """On every process, before ``checkpoint`` is written; a hook may add plain values and tensors under its own keys.

        It also holds ``meta``, ``message_hub``, ``state_dict`` and, where they are saved, ``optimizer`` and
        ``param_schedulers``; ``SavedView`` says which of them may be changed. The weights are the live ones.
        """

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """On every process, after resuming; ``checkpoint`` holds ``meta`` and what hooks added when it was saved."""

    # Epochs

    def before_train_epoch(self, runner: Any) -> None:
        """Before the first iteration of an epoch; a loop without epochs calls it once."""
        self._before_epoch(runner, mode="train")

    def after_train_epoch(self, runner: Any) -> None:
        """After the last iteration of an epoch, before ``runner.epoch`` increases."""
        self._after_epoch(runner, mode="train")

    def before_val_epoch(self, runner: Any) -> None:
        """Before the first validation batch."""
        self._before_epoch(runner, mode="val")

    def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        """After the last validation batch, with the metrics, which are equal on every process."""
        self._after_epoch(runner, mode="val")

    def before_test_epoch(self, runner: Any) -> None:
        """Before the first test batch."""
        self._before_epoch(runner, mode="test")

    def after_test_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        """After the last test batch, with the metrics, which are equal on every process."""
        self._after_epoch(runner, mode="test")

    # Iterations

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before an update.

        ``batch_idx`` counts updates from the start of the epoch; in training by iterations, from that of training.
        """
        self._before_iter(runner, batch_idx, data_batch, mode="train")

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """After an update; ``outputs`` holds 0-dim tensors that are still on the device."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="train")

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before a validation batch."""
        self._before_iter(runner, batch_idx, data_batch, mode="val")

    def after_val_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        """After a validation batch, with the model's predictions."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="val")

    def before_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before a test batch."""
        self._before_iter(runner, batch_idx, data_batch, mode="test")

    def after_test_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        """After a test batch, with the model's predictions."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="test")

    # Group forms, for all three modes. The names with an underscore come from MMEngine.

    def before_epoch(self, runner: Any, mode: str = "train") -> None:
        """Before every epoch; ``mode`` is train, val or test."""

    def after_epoch(self, runner: Any, mode: str = "train") -> None:
        """After every epoch; ``mode`` is train, val or test."""

    def before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """Before every iteration; ``mode`` is train, val or test."""

    def after_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """After every iteration; ``mode`` is train, val or test."""

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self.before_epoch(runner, mode=mode)

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        self.after_epoch(runner, mode=mode)

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        self.before_iter(runner, batch_idx, data_batch, mode=mode)

    def _after_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        self.after_iter(runner, batch_idx, data_batch, outputs, mode=mode)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: plain values and tensors. Empty: nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``."""

    def get_triggered_stages(self) -> list[str]:
        """Return the hook points at which this hook does something."""
        return overridden_points(self, Hook)

    # Helpers for intervals

    def every_n_epochs(self, runner: Run, n: int, start: int = 0) -> bool:
        """True if the ending epoch is the n-th, 2n-th, ... counted from ``start``; never for n < 1."""
        count = runner.epoch + 1 - start
        return n > 0 and count >= 0 and count % n == 0

    def every_n_train_iters(self, runner: Run, n: int, start: int = 0) -> bool:
        """True if the ending iteration is the n-th, 2n-th, ... counted from ``start``; never for n < 1."""
        count = runner.iter + 1 - start
        return n > 0 and count >= 0 and count % n == 0

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """True if the iteration is the n-th, 2n-th, ... of its epoch, or in training by iterations of training.

        Never for n < 1.
        """
        return n > 0 and (batch_idx + 1) % n == 0

    def end_of_epoch(self, dataloader: Sized | int, batch_idx: int) -> bool:
        """True if the iteration is the last of its epoch.

        Args:
            dataloader: the dataloader of the loop, or the number of iterations. In training give
                ``runner.train_loop.epoch_length``: with gradient accumulation the dataloader is longer.
            batch_idx: index of the iteration, from 0.
        """
        return (batch_idx + 1) % (dataloader if isinstance(dataloader, int) else len(dataloader)) == 0

    def is_last_train_epoch(self, runner: Run) -> bool:
        """True if training ends with this epoch."""
        return runner.epoch + 1 == runner.max_epochs

    def is_last_train_iter(self, runner: Run) -> bool:
        """True if training ends with this iteration."""
        return runner.iter + 1 == runner.max_iters
