"""The outer optimizer: it updates weights by what rounds of updates of several groups have changed in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flextrain import OPTIMIZERS, ConfigError

WHERE = "strategy.outer_optimizer"
AVERAGES: Mapping[str, Any] = dict(type="SGD", lr=1.0)
"""Gives the mean of the groups' weights, which is LocalSGD."""
OF_THE_PAPER: Mapping[str, Any] = dict(type="SGD", lr=0.7, momentum=0.9, nesterov=True)
_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# They update each element by itself, so that shards may be updated apart, and their state is in ``optimizer.state``.
_PREFIX = "optim.own.outer."


class OuterOptimizer:
    """Takes the difference between weights before and after a round as their gradient, its mean over all groups.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv 2311.08105,
    algorithm 1.

    Args:
        given: the options of SGD, which are those of ``OF_THE_PAPER`` otherwise; or with ``type`` all that one of torch's SGD,
            Adam and AdamW is given; None: the weights become the mean over the groups.

    Attributes:
        options: the type and the options.
        state: of each parameter, by name, as the torch optimizer has it: the dtype, device and layout are the parameter's.

    Raises:
        ConfigError: another optimizer, or options that it does not take.
    """

    def __init__(self, given: Mapping[str, Any] | None) -> None:
        if given is None:
            self.options = dict(AVERAGES)
        else:
            self.options = dict(given) if "type" in given else {**OF_THE_PAPER, **given}
        self.state: dict[str, dict[str, Any]] = {}
        self._live: dict[str, Tensor] = {}
        self._starts: dict[str, nn.Parameter] = {}
        sample = nn.Parameter(torch.zeros(1))
        sample.grad = torch.zeros(1)
        optimizer = self._build([sample])
        optimizer.step()
        self._keys = {key for key, value in optimizer.state[sample].items() if isinstance(value, Tensor)}

    def _build(self, parameters: list[nn.Parameter]) -> Any:
        kind = OPTIMIZERS.resolve(self.options["type"], f"{WHERE}.type")
        if kind not in _KINDS:
            names = ", ".join(each.__name__ for each in _KINDS[:-1])
            raise ConfigError(
                f"{WHERE}.type: {getattr(kind, '__name__', kind)} is not supported, give {names} or {_KINDS[-1].__name__}"
            )
        try:
            return OPTIMIZERS.build(self.options, WHERE, params=parameters)
        except ConfigError:
            raise
        except ValueError as error:  # of torch
            raise ConfigError(f"{WHERE}: {error}") from error

    # A round

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep a copy of the parameters that will be trained, as they are at the start of a round."""
        self._live = {name: parameter.detach() for name, parameter in parameters.items()}
        self._starts = {name: nn.Parameter(live.clone()) for name, live in self._live.items()}

    def pseudo_gradients(self) -> list[Tensor]:
        """Put what the round has taken away from the parameters into their place, to be added up over the groups."""
        for name, live in self._live.items():
            live.neg_().add_(self._starts[name].detach())
        return list(self._live.values())

    def step(self, groups: int) -> None:
        """Update the copies by the mean of the sums, of so many groups, that are in the parameters, and copy them back."""
        for name, start in self._starts.items():
            start.grad = self._live[name].div_(groups)
        if self._starts:
            optimizer = self._build(list(self._starts.values()))
            for name, start in self._starts.items():
                if name in self.state:
                    optimizer.state[start] = self.state[name]
            optimizer.step()
            self.state |= {name: optimizer.state[start] for name, start in self._starts.items() if self._keys}
        for name, start in self._starts.items():
            self._live[name].copy_(start.detach())
        self._live, self._starts = {}, {}

    # Checkpoints

    def entries(self) -> dict[str, Any]:
        """Return the entries of a checkpoint, ``optim.own.outer.<parameter>.<key>``."""
        return {
            f"{_PREFIX}{name}.{key}": value
            for name, state in self.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def template(self, saved: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors to fill with a checkpoint's entries; without those of an optimizer that keeps others."""
        found: dict[str, dict[str, Any]] = {}
        for key, info in saved.items():
            name, _, item = key.removeprefix(_PREFIX).rpartition(".")
            if key.startswith(_PREFIX) and name in parameters:
                found.setdefault(name, {})[item] = info
        return {
            f"{_PREFIX}{name}.{item}": _empty(info, parameters[name])
            for name, items in found.items()
            if items.keys() == self._keys
            for item, info in items.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from filled entries, if this is the state of an optimizer; without any, from none."""
        if not any(key.startswith("optim.") for key in state):
            return
        self.state = {}
        for key, value in state.items():
            if key.startswith(_PREFIX):
                name, _, item = key.removeprefix(_PREFIX).rpartition(".")
                self.state.setdefault(name, {})[item] = value


def _empty(info: Any, parameter: Tensor) -> Tensor:
    if tuple(info.shape) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=info.dtype, requires_grad=False)
    return torch.empty(info.shape, dtype=info.dtype)  # a count of updates
