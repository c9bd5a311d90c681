"""OptimizerAdapter: the operations on an optimizer that torch's interface lacks: clipping, scaling, checkpoint form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

_INNER = "/"  # separates the attribute that holds an inner optimizer from the key of its state
# torch's own only; other classes, subclasses of these included, are tried on small parameters (see trial.py).
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
    )
)  # fmt: skip


class OptimizerAdapter:
    """Adapter of torch's own optimizers, which need nothing more; subclasses adapt other families.

    Args:
        optimizer: the built optimizer.
        where: the configuration key of its wrapper, for messages.
    """

    owns_gradients = False
    """Whether it keeps gradients in its own memory, so that ``parameter.grad`` must not be replaced."""

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        self.optimizer = optimizer
        self.where = where

    @property
    def is_elementwise(self) -> bool:
        """Whether it is known to update every element of a parameter independently, so that it can train shards."""
        return type(self.optimizer) in _ELEMENTWISE

    @property
    def name(self) -> str:
        """The optimizer's name in checkpoints: that of torch's equivalent optimizer, if there is one."""
        return type(self.optimizer).__name__

    def check(self, model: nn.Module) -> None:
        """Raise StrategyError if it cannot train the parameters of ``model`` on their device and in their layout."""

    def begin_update(self) -> None:
        """Prepare the gradients of an update; raise StrategyError if the optimizer cannot use them."""

    def zero_grad(self) -> None:
        """Drop the gradients, or set them to zero where the optimizer keeps them."""
        optimizer = self.optimizer
        if type(optimizer).zero_grad is not Optimizer.zero_grad:  # an override may reset more than the gradients
            optimizer.zero_grad()
            return
        # The same as Optimizer.zero_grad, without its profiler entry, which takes longer than the work.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def clip(self, max_norm: float, norm_type: float) -> Tensor | None:
        """Clip by the total norm; return the norm before, 0-dim on the device, or None if it has no own clipping."""
        return None

    @property
    def grad_scaler(self) -> Callable[..., GradScaler] | None:
        """The optimizer's own class of loss scaler, or None."""
        return None

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter, in the form of checkpoints."""
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        inner = {
            f"{name}{_INNER}{key}": value
            for name, optimizer in self._inner().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        return {**state, **inner} if inner else state

    def _inner(self) -> dict[str, Optimizer]:
        """Return the inner optimizers with their own state, as in SAM and Lookahead, by attribute."""
        own = self.optimizer
        found = {name: value for name, value in vars(own).items() if isinstance(value, Optimizer) and value is not own}
        return {name: value for name, value in found.items() if value.state is not own.state}

    def hyper_parameters_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the hyper-parameters of a group, in the form of checkpoints."""
        return group

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint's state of a parameter to the optimizer's own form; the inverse of ``state_of``."""
        return state

    def own_hyper_parameters(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint's hyper-parameters to the optimizer's own form; the inverse of ``hyper_parameters_of``.

        Raises:
            CheckpointError: the optimizer does not support one of them.
        """
        return settings

    def load(self, packed: dict[str, Any]) -> None:
        """Continue from the optimizer's ``state_dict``, also in the middle of training."""
        optimizer, inner = self.optimizer, self._inner()
        groups = [group["params"] for group in optimizer.param_groups]
        sharing = [one for one in inner.values() if one.param_groups is optimizer.param_groups]
        states = packed["state"]
        optimizer.load_state_dict({**packed, "state": {number: without_inner(kept) for number, kept in states.items()}})
        for one in sharing:  # keep sharing, so that it sees what schedulers set
            one.param_groups = optimizer.param_groups
        numbers = (number for group in packed["param_groups"] for number in group["params"])
        for parameter, number in zip((p for group in groups for p in group), numbers, strict=True):
            self.load_inner(parameter, states.get(number, {}))

    def load_inner(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Load the inner optimizers' part of a parameter's state."""
        for name, optimizer in self._inner().items():
            prefix = f"{name}{_INNER}"
            kept = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            optimizer.state.pop(parameter, None)
            if kept:
                optimizer.state[parameter] = kept


def without_inner(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state of a parameter without the inner optimizers' part."""
    return {key: value for key, value in state.items() if _INNER not in key}
