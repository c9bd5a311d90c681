"""ChunkedLoss: the loss of a language model without a tensor of all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.base.errors import ConfigError, StrategyError, suggest
from ...core.base.registry import TRANSFORMS
from ...core.base.trees import tree_map_only
from ...core.model.logits import Deferred, Logits, is_deferred

_AFTER = (
    "ChunkedLoss: the logits of training are gone after the loss; compute what needs them in the model's forward, or leave the "
    "transform out"
)


@TRANSFORMS.register_module()
class ChunkedLoss:
    """Computes logits and what is made of them, such as the cross entropy, for some tokens at a time, forward and backward.

    Nothing else changes: the loss is that of whole logits but for rounding, and names and parameters stay. Logits that the
    model returns cannot be read in training; in validation and test they are whole. A function that needs all logits of
    training gets them, and a line in the log says which.

    Args:
        chunk: tokens whose logits exist at a time.
        head: name of the module that makes logits; default: what the model's ``get_output_embeddings()`` says.

    Raises:
        ConfigError: there is no such module.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024.

    Example:
        transforms=[dict(type="ChunkedLoss", chunk=1024)]
    """

    def __init__(self, chunk: int = 1024, head: str | None = None, *, where: str = "ChunkedLoss") -> None:
        if type(chunk) is not int or chunk < 1:
            raise ConfigError(f"{where}.chunk: {chunk!r} is not allowed, give a number of tokens, 1 or more")
        self._chunk, self._head, self._where = chunk, head, where

    def __call__(self, module: nn.Module) -> None:
        """Change the head's forward in place."""
        head = self._found(module)
        if is_deferred(head):
            raise ConfigError(f"{self._where}: the model has a ChunkedLoss already, leave one out")
        head.forward = Deferred(head, self._chunk)
        module.register_forward_hook(_leave)

    def _found(self, model: nn.Module) -> nn.Module:
        if self._head is not None:
            names = [name for name, _ in model.named_modules() if name]
            if self._head not in names:
                raise ConfigError(
                    f'{self._where}.head: the model has no module "{self._head}"{suggest(self._head, names)}'
                )
            return model.get_submodule(self._head)
        if (found := head_of(model)) is None:
            raise ConfigError(
                f'{self._where}.head: {type(model).__name__} does not say which module makes its logits, give its name, such as "lm_head"'
            )
        return found


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the module of which a model says that it makes its logits, as those of transformers do."""
    asked = getattr(model, "get_output_embeddings", None)
    found = asked() if callable(asked) else None
    return found if isinstance(found, nn.Module) else None


class _Gone:
    """Stands where logits were: hooks run after the update, and strategies free weights before."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StrategyError(_AFTER)

    def __getitem__(self, index: Any) -> Any:
        raise StrategyError(_AFTER)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise StrategyError(_AFTER)


def _leave(module: nn.Module, args: Any, output: Any) -> Any:
    """What the model returns."""

    def left(logits: Logits) -> Any:
        if not torch.is_grad_enabled():
            return logits.whole()
        return _Gone() if logits.is_used else logits

    return tree_map_only(Logits, left, output)
