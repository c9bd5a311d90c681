"""State of an OptimWrapper in torch's own format, for training loops of one's own."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.errors import CheckpointError, StrategyError

_SCALER = "loss_scaler"
_MMENGINES = (_SCALER, "apex_amp", "base_param_settings")
"""Keys that MMEngine adds to those of torch; the last one only has what its get_lr() shows."""


class Wrapper(Protocol):
    """What is used of an OptimWrapper."""

    where: str

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer."""

    def plain_values(self) -> dict[str, Any]:
        """Return the loss scale as ``scaler``, if there is one."""

    def load_plain_values(self, state: dict[str, Any]) -> None:
        """Continue from ``plain_values``."""

    def model_parameter(self, parameter: Tensor) -> Tensor:
        """Return the model's parameter for one of the optimizer's."""


def state_of(wrapper: Wrapper, *, is_part: bool) -> dict[str, Any]:
    """Return the torch optimizer's ``state_dict``, with the loss scale as ``loss_scaler`` where losses are scaled.

    Args:
        is_part: other processes have other parameters of the model.

    Raises:
        StrategyError: the state is not whole, or the optimizer is not built yet.
    """
    _check_whole(wrapper, "state_dict", is_part)
    state: dict[str, Any] = wrapper.optimizer.state_dict()
    scaler = wrapper.plain_values().get("scaler")
    return state if scaler is None else {**state, _SCALER: scaler}


def load(wrapper: Wrapper, state: dict[str, Any], *, is_part: bool) -> None:
    """Continue from the result of ``state_of``.

    Raises:
        CheckpointError: it is no state of an optimizer, or of one with other parameters.
        StrategyError: as ``state_of``.
    """
    _check_whole(wrapper, "load_state_dict", is_part)
    if not {"state", "param_groups"} <= state.keys():
        found = ", ".join(map(str, state)) or "nothing"
        raise CheckpointError(
            f"{wrapper.where}.load_state_dict: has {found}, give what state_dict() returned: state and param_groups"
        )
    own = {key: value for key, value in state.items() if key not in _MMENGINES}
    try:
        wrapper.optimizer.load_state_dict(own)
    except ValueError as error:  # other groups, or other numbers of parameters
        raise CheckpointError(f"{wrapper.where}.load_state_dict: {error}") from error
    if scaler := state.get(_SCALER):
        wrapper.load_plain_values({"scaler": scaler})


def _check_whole(wrapper: Wrapper, method: str, is_part: bool) -> None:
    """Raise StrategyError if parameters are sharded, or are float32 masters of others."""
    parameters = [parameter for group in wrapper.optimizer.param_groups for parameter in group["params"]]
    if any(isinstance(parameter, DTensor) for parameter in parameters) or is_part:
        raise in_strategy(wrapper, method, "this process holds a part of the optimizer's state")
    if any(wrapper.model_parameter(parameter) is not parameter for parameter in parameters):
        raise in_strategy(wrapper, method, "torch's format has no float32 masters of half-precision weights")


def in_strategy(wrapper: Wrapper, method: str, reason: str) -> StrategyError:
    """Return the error that says where the state is instead."""
    return StrategyError(
        f"{wrapper.where}.{method}(): {reason}; runner.save_checkpoint and runner.load_checkpoint have all of it, and so "
        "has Strategy.state_dict()"
    )
