"""What OptimWrapper and strategies need of an optimizer beyond torch's interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

_INNER = "/"  # between an attribute that holds an optimizer and what that one keeps
# Of torch's own; others, and subclasses of these, are tried (see trial.py).
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
    )
)  # fmt: skip


class OptimizerAdapter:
    """Suits torch's own optimizers, which need nothing; a subclass speaks for a family of others.

    Args:
        optimizer: the optimizer, built.
        where: the configuration key of its wrapper, for messages.
    """

    owns_gradients = False
    """Whether it keeps gradients in memory of its own, which nobody may replace."""

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        self.optimizer = optimizer
        self.where = where

    @property
    def is_elementwise(self) -> bool:
        """Whether it is known to update every element of a parameter by itself, so that parts of one will do."""
        return type(self.optimizer) in _ELEMENTWISE

    @property
    def name(self) -> str:
        """What a checkpoint calls the optimizer: the one of torch's that computes the same, if there is one."""
        return type(self.optimizer).__name__

    def check(self, model: nn.Module) -> None:
        """Raise StrategyError unless it can train the parameters of ``model`` where they are."""

    def begin_update(self) -> None:
        """Called before every update; raises StrategyError if the gradients are not what it can use."""

    def zero_grad(self) -> None:
        """Drop the gradients, or set them to zero where the optimizer keeps them."""
        optimizer = self.optimizer
        if type(optimizer).zero_grad is not Optimizer.zero_grad:  # it keeps more than the gradients
            optimizer.zero_grad()
            return
        # What torch's own does, without its entry in the profile, which takes longer than the work.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def clip(self, max_norm: float, norm_type: float) -> Tensor | None:
        """Clip by the total norm and return it as it was, 0-dim on the device; None where it has no clipping of its own."""
        return None

    @property
    def grad_scaler(self) -> Callable[..., GradScaler] | None:
        """Its own class of loss scaler, if it has one."""
        return None

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """What it keeps of a parameter, in the form in which a checkpoint has it."""
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        inner = {
            f"{name}{_INNER}{key}": value
            for name, optimizer in self._inner().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        return {**state, **inner} if inner else state

    def _inner(self) -> dict[str, Optimizer]:
        """Optimizers that this one steps, as SAM and Lookahead do, by attribute; they keep state of their own."""
        own = self.optimizer
        found = {name: value for name, value in vars(own).items() if isinstance(value, Optimizer) and value is not own}
        return {name: value for name, value in found.items() if value.state is not own.state}

    def settings_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hyper-parameters of a group, in the form in which a checkpoint has them."""
        return group

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The reverse of ``state_of``."""
        return state

    def own_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The reverse of ``settings_of``.

        Raises:
            CheckpointError: they ask for something that the optimizer does not do.
        """
        return settings

    def load(self, packed: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of the optimizer, also in the middle of training."""
        optimizer, inner = self.optimizer, self._inner()
        groups = [group["params"] for group in optimizer.param_groups]
        sharing = [one for one in inner.values() if one.param_groups is optimizer.param_groups]
        states = packed["state"]
        optimizer.load_state_dict({**packed, "state": {number: without_inner(kept) for number, kept in states.items()}})
        for one in sharing:  # or what a schedule sets would not reach it any more
            one.param_groups = optimizer.param_groups
        numbers = (number for group in packed["param_groups"] for number in group["params"])
        for parameter, number in zip((p for group in groups for p in group), numbers, strict=True):
            self.load_inner(parameter, states.get(number, {}))

    def load_inner(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Give the optimizers that this one steps their part of a parameter's state."""
        for name, optimizer in self._inner().items():
            prefix = f"{name}{_INNER}"
            kept = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            optimizer.state.pop(parameter, None)
            if kept:
                optimizer.state[parameter] = kept


def without_inner(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer itself keeps, out of that which a checkpoint has."""
    return {key: value for key, value in state.items() if _INNER not in key}
