"""BuildMethods: MMEngine's ``build_...`` methods of a runner that make a second model, optimizer or schedule for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..core.config import validate
from ..core.errors import ConfigError, StrategyError
from ..optim.build import build_optim_wrapper
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from .build import build_model, build_schedulers, scale_lr
from .data.user_loaders import batch_size
from .options import AutoScaleLR
from .parts import Parts
from .transforms.apply import transform


class BuildMethods(Parts):
    """Builds more parts for a run, for loops and hooks of one's own; the run's own are made without them.

    The runner neither updates nor saves what these methods return.
    """

    def _build_model(self) -> nn.Module:
        return self._transformed(super()._build_model())

    def _transformed(self, model: nn.Module) -> nn.Module:
        """Apply the run's transforms to its model."""
        load_from = self.options.load_from
        model, self._changes = transform(model, self._transforms, self.strategy, self.seed, load_from)
        return model

    def build_model(self, model: Any) -> nn.Module:
        """Build a module as the runner builds its own, without initial weights of ``init_weights``.

        Args:
            model: see the runner's ``model``; the strategy neither moves nor wraps the module.
        """
        if not (isinstance(model, (nn.Module, Mapping, str)) or callable(model)):
            raise ConfigError(
                f"model: {model!r} is not allowed, give a module, a dict or a function that returns a module"
            )
        return build_model(model, None, self.strategy, for_training=False)

    def build_optim_wrapper(self, optim_wrapper: Any) -> OptimWrapper | OptimWrapperDict:
        """Build an OptimWrapper with an optimizer of its own for the run's model, after the strategy has placed it.

        Args:
            optim_wrapper: see the runner's ``optim_wrapper``; a built optimizer may hold any parameters.

        Raises:
            StrategyError: the strategy's own engine makes the updates, or other processes have other parameters.
        """
        built = build_optim_wrapper(optim_wrapper)
        self._setup_model()
        if self._has_engine or self.strategy.topology.model is not None:
            raise StrategyError(
                f"build_optim_wrapper: {type(self.strategy).__name__} updates one optimizer, the runner's; give several by "
                "name in the runner's optim_wrapper"
            )
        built.attach(self.strategy.device, self.strategy.autocast)
        if not all(wrapper.is_built for wrapper in built.wrappers.values()):
            built.build(self.strategy.module)
        return built

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Build schedulers for ``runner.optim_wrapper``; ``end`` and units come from the training loop.

        Args:
            scheduler: see the runner's ``param_scheduler``.

        Returns:
            A list; for several optimizers a dict of lists.
        """
        if not isinstance(self.optim_wrapper, (OptimWrapper, OptimWrapperDict)):
            kind = type(self.optim_wrapper).__name__
            raise ConfigError(f"runner.optim_wrapper: is {kind}, give build_param_scheduler's runner an OptimWrapper")
        self._setup_model()
        optim = self.optim_wrapper
        self.train_loop.data.compare_lengths(float(self.strategy.config.timeout_s))
        built = build_schedulers(scheduler, optim, self.train_loop)
        return built if isinstance(optim, OptimWrapperDict) else built[""]

    def scale_lr(self, optim_wrapper: OptimWrapper | OptimWrapperDict, auto_scale_lr: Any = None) -> None:
        """Scale the learning rates of a built wrapper, as ``auto_scale_lr`` of the runner does; None scales nothing.

        Args:
            auto_scale_lr: ``dict(base_batch_size=..., enable=True)``.
        """
        if auto_scale_lr is None:
            return
        options = validate(AutoScaleLR, auto_scale_lr, "auto_scale_lr")
        if options.enable:
            size, shards = batch_size(self.train_dataloader), self.strategy.topology.data.count
            self.logger.info(scale_lr(optim_wrapper, size, shards, options.base_batch_size))
