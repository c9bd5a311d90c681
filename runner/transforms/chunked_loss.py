"""ChunkedLoss: the loss of a language model without a tensor of all logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.base.errors import ConfigError, StrategyError, suggest
from ...core.base.registry import TRANSFORMS
from ...core.base.tensors import size_text
from ...core.base.trees import tree_map_only
from ...core.device.precision import running_statistics
from ...core.model.logits import Deferred, Logits, defer, is_deferred
from ...core.torch_compat.torch_private import tree_flatten

logger = logging.getLogger("flextrain")
_AFTER = (
    "ChunkedLoss: the logits of training are gone after the loss; compute what needs them in the model's forward, or leave the "
    "transform out"
)
_AFTER_EVALUATION = "ChunkedLoss: the logits of an evaluation are gone after the loss; give it evaluation_logits=True"


@TRANSFORMS.register_module()
class ChunkedLoss:
    """Computes logits and what is made of them, such as the cross entropy, for some tokens at a time, forward and backward.

    Nothing else changes: the loss is that of whole logits but for rounding, and names and parameters stay. Logits that the
    model returns cannot be read in training; in validation and test they are whole. A function that needs all logits of
    training gets them, and a line in the log says which.

    Args:
        chunk: tokens whose logits exist at a time.
        head: name of the module that makes logits; default: what the model's ``get_output_embeddings()`` says.
        z_loss: weight of the squared logsumexp of a token's logits, which is added to its cross entropy in training, and so is
            summed, averaged and weighted as that is; evaluations have the cross entropy alone. PaLM has 1e-4.
        evaluation_logits: False: where an evaluation computes the loss, its logits are not made whole and cannot be read.

    Raises:
        ConfigError: there is no such module, or it has no forward or a batch normalisation; a wrong number.
        StrategyError: in training, if ``z_loss`` is given and the model's forward computes no ``cross_entropy`` of its logits; at
            the first forward, if the head does not compute each row by itself, with parameters of its own.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024; z-loss: Chowdhery et al., "PaLM: Scaling
    Language Modeling with Pathways", 2022.

    Example:
        transforms=[dict(type="ChunkedLoss", chunk=1024)]
    """

    changes = "logits and the loss are computed for some tokens at a time"

    def __init__(
        self,
        chunk: int = 1024,
        head: str | None = None,
        z_loss: float = 0.0,
        evaluation_logits: bool = True,
        *,
        where: str = "ChunkedLoss",
    ) -> None:
        if type(chunk) is not int or chunk < 1:
            raise ConfigError(f"{where}.chunk: {chunk!r} is not allowed, give a number of tokens, 1 or more")
        if head is not None and not isinstance(head, str):
            raise ConfigError(f"{where}.head: {head!r} is not allowed, give the name of a module")
        if type(z_loss) not in (int, float) or not 0 <= z_loss < math.inf:
            raise ConfigError(f"{where}.z_loss: {z_loss!r} is not allowed, give a number, 0 or more, such as 1e-4")
        if type(evaluation_logits) is not bool:
            raise ConfigError(f"{where}.evaluation_logits: {evaluation_logits!r} is not allowed, give True or False")
        self._chunk, self._head, self._z_loss, self._where = chunk, head, float(z_loss), where
        self._keeps = evaluation_logits

    def __call__(self, module: nn.Module) -> None:
        """Change the head's forward in place."""
        head = self._found(module)
        if is_deferred(head):
            raise ConfigError(f"{self._where}: the model has a ChunkedLoss already, leave one out")
        kind = type(head).__name__
        if type(head).forward is nn.Module.forward and "forward" not in vars(head):
            raise ConfigError(
                f"{self._where}.head: is a {kind}, which has no forward; give the module that makes logits"
            )
        if statistics := next(iter(running_statistics(head)), None):
            raise ConfigError(
                f"{self._where}.head: is a {kind} with {statistics}, a statistic of all tokens, of which it would see some at a time; "
                "leave the transform out"
            )
        name = next((name for name, each in module.named_modules() if each is head), "the head")
        deferred = defer(head, self._chunk, self._z_loss, name)
        module.register_forward_pre_hook(partial(_enter, deferred))
        module.register_forward_hook(partial(_leave, head, deferred, self._keeps))

    def _found(self, model: nn.Module) -> nn.Module:
        if self._head is not None:
            names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
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


def _words(model: nn.Module) -> int:
    """Return the size of the vocabulary, as the first configuration in a model has it; 0 if none has."""
    configs = (vars(module).get("config") for module in model.modules())
    sizes = (getattr(config, "__dict__", {}).get("vocab_size") for config in configs)
    return next((size for size in sizes if isinstance(size, int)), 0)


_LARGE = 512 * 2**20


def large_logits(model: nn.Module, batch: Any) -> str:
    """Return a line on the logits of a batch, if they take more than 512 MiB in float32 and all of them are made; otherwise "".

    It calls nothing of the model's, which nobody has asked for this.

    Args:
        model: any; of those without a ``config.vocab_size``, and a module with so many outputs, nothing is known.
        batch: a micro-batch, whose ``labels`` are of tokens.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
        return ""
    words = _words(model)
    heads = [module for module in model.modules() if words and vars(module).get("out_features") == words]
    if not heads or any(map(is_deferred, heads)) or (size := labels.numel() * words * 4) <= _LARGE:
        return ""
    tokens = " x ".join(f"{each:,}" for each in labels.shape)
    return (
        f"model: logits of {tokens} x {words:,} take {size_text(size)} in float32, several times over with their gradients; "
        'transforms=[dict(type="ChunkedLoss")] computes some tokens at a time, with equal losses'
    )


class _Gone:
    """Stands where logits were: hooks run after the update, and strategies free weights before."""

    def __init__(self, why: str) -> None:
        self.__dict__["__why__"] = why

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StrategyError(vars(self)["__why__"])

    def __getitem__(self, index: Any) -> Any:
        raise StrategyError(vars(self)["__why__"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gone = [each for each in tree_flatten([args, kwargs or {}])[0] if isinstance(each, _Gone)]
        raise StrategyError(vars(gone[0])["__why__"] if gone else _AFTER)


def _enter(deferred: Deferred, module: nn.Module, args: Any) -> None:
    deferred.begin()


def _check_used(head: nn.Module, deferred: Deferred, model: nn.Module, output: Any) -> None:
    """Raise StrategyError if a z-loss is added to nothing; say so once if a forward of training makes no logits by the head."""
    gives_loss = isinstance(output, Mapping) and any(
        "loss" in str(key) for key, value in output.items() if value is not None
    )
    if not deferred.is_called and not gives_loss:
        return  # also of a stage of a pipeline
    if deferred.z_loss and not any(each.is_added for each in deferred.z_losses):
        raise StrategyError(
            f"ChunkedLoss.z_loss: {type(model).__name__}.forward computes no cross_entropy of its logits, to which it could be added; "
            "compute the loss there, or leave z_loss out"
        )
    if not deferred.is_called and not deferred.is_idle:
        deferred.is_idle = True
        logger.warning(
            "ChunkedLoss: %s.forward does not call the %s that makes its logits, so none are computed by chunks",
            *(type(each).__name__ for each in (model, head)),
        )


def _leave(head: nn.Module, deferred: Deferred, keeps: bool, module: nn.Module, args: Any, output: Any) -> Any:
    """What the model returns.

    Args:
        head: that makes the logits.
        deferred: its forward.
        keeps: whether logits are whole in an evaluation that has computed a loss of them.
        module: the model.
        args: of its forward.
        output: of its forward.
    """
    if torch.is_grad_enabled():
        _check_used(head, deferred, module, output)

    def found(logits: Logits) -> Any:
        if logits.layer is not head:  # of another ChunkedLoss
            return logits
        if torch.is_grad_enabled():
            return _Gone(_AFTER) if logits.is_used else logits
        return _Gone(_AFTER_EVALUATION) if logits.is_used and not keeps else logits.whole()

    return tree_map_only(Logits, found, output)
