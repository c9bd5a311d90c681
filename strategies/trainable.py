"""Refuse parameters that are frozen or thawed during training, where gradients of a strategy were arranged before."""

from __future__ import annotations

from torch import nn

from ..core.errors import StrategyError
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict


class TrainableAsBefore:
    """A hook of an optimizer wrapper's updates that raises if the trainable parameters are others than at set-up.

    Args:
        module: the user's model.
        why: what would happen to a thawed parameter, for the message.
        freezing_too: refuse a parameter that was trainable, too.
    """

    def __init__(self, module: nn.Module, why: str, *, freezing_too: bool = False) -> None:
        self._why = why
        named = list(module.named_parameters())
        self._frozen = [parameter for _, parameter in named if not parameter.requires_grad]
        self._trained = [parameter for _, parameter in named if parameter.requires_grad] if freezing_too else []
        self._names = {id(parameter): name for name, parameter in named}

    def register(self, optim: OptimWrapper | OptimWrapperDict | None) -> None:
        """Look at every update of all optimizers; a model in which nothing can change costs nothing."""
        if optim is not None and (self._frozen or self._trained):
            for wrapper in optim.wrappers.values():
                wrapper.register_step_pre_hook(self)

    def __call__(self, optim: OptimWrapper) -> None:
        """Raise StrategyError before the update."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise self._error(parameter, "is trainable now and was frozen")
        for parameter in self._trained:
            if not parameter.requires_grad:
                raise self._error(parameter, "is frozen now and was trainable")

    def _error(self, parameter: nn.Parameter, what: str) -> StrategyError:
        return StrategyError(
            f"model: {self._names[id(parameter)]} {what} when training was set up, {self._why}; use "
            'strategy="fsdp", or end this run and begin another with load_from'
        )
