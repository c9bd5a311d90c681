"""PrepareTTAHook: tests a trained model with several augmentations of every sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError
from ...core.registry import HOOKS, MODELS
from ...core.tta_model import BaseTTAModel
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class PrepareTTAHook(Hook):
    """Makes ``runner.test()`` merge the predictions of augmented samples; see BaseTTAModel.

    Args:
        tta_cfg: ``dict(type=..., **arguments)`` of the BaseTTAModel, without its ``module``, which is the run's.
    """

    priority = "VERY_HIGH"

    def __init__(self, tta_cfg: dict[str, Any], *, where: str = "PrepareTTAHook") -> None:
        kind = MODELS.check(tta_cfg, f"{where}.tta_cfg", ("module",))
        if isinstance(kind, type) and not issubclass(kind, BaseTTAModel):
            raise ConfigError(f"{where}.tta_cfg.type: {kind.__name__} is not derived from BaseTTAModel")
        self.tta_cfg: Mapping[str, Any] = tta_cfg
        self._built: BaseTTAModel | None = None

    def before_test(self, runner: Run) -> None:
        """Build the BaseTTAModel around the run's model."""
        if runner.stepper.merging not in (None, self._built):
            raise ConfigError("PrepareTTAHook: the runner's model is a BaseTTAModel already, leave the hook out")
        self._built = MODELS.build(self.tta_cfg, "PrepareTTAHook.tta_cfg", module=runner.strategy.module)
        runner.stepper.merge_with(self._built)

    def after_test(self, runner: Run) -> None:
        """Test without augmentations again."""
        runner.stepper.merge_with(None)
