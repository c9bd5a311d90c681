"""Processes whose samples use different parameters: all reduce the same gradients, and update what any of them has used."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.comm import collectives as dist
from ...core.comm.topology import DataShard
from ...core.dtensor_private import fill_gradients
from ...core.errors import StrategyError
from ...optim.wrapper import OptimWrapper

_NONE, _ZEROS, _OWN = range(3)
"""What a process has computed for a parameter: no gradient, or frozen; none, for which it has sent zeros; a gradient."""


class UsedParameters:
    """Lets every process reduce gradients of the same parameters, with zeros for those that it has not used.

    Before an update the processes agree on which parameters were used, in one small message. A parameter that no process has
    used has no gradient then, as on one device, where neither weight decay nor momentum moves it.

    Args:
        module: the model, after ``fully_shard``.
        units: the modules that FSDP gathers.
        data: the processes that average gradients, and the ``device`` on which they do.
        rank: of this process, for messages.
    """

    def __init__(
        self, module: nn.Module, units: Iterable[nn.Module], data: DataShard, device: torch.device, rank: int
    ) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        self._zeros: dict[int, Tensor] = {}  # gradients that are zeros of this process, by parameter
        self._data, self._device, self._rank = data, device, rank
        self._updates = 0
        self._told: list[tuple[list[int], Tensor]] = []  # of each wrapper, what was told last: here, on the device
        for unit in units:
            fill_gradients(unit, self._takes_part, self._note)

    def register(self, optim: OptimWrapper) -> None:
        """Agree before every update of this wrapper."""
        own = [optim.model_parameter(p) for group in optim.param_groups for p in group["params"]]
        sharded = [parameter for parameter in own if isinstance(parameter, DTensor)]
        if sharded and self._data.count > 1:
            number, all_own = len(self._told), torch.zeros(2, len(sharded), dtype=torch.int8, device=self._device)
            all_own[0] = _OWN  # without a copy from the host
            self._told.append(([_OWN] * len(sharded), all_own))
            optim.register_step_pre_hook(lambda _: self._agree(number, sharded))

    def _takes_part(self, parameter: Tensor) -> bool:
        if parameter.requires_grad:
            self._trained.add(id(parameter))  # also one that was frozen at first
        return id(parameter) in self._trained

    def _note(self, given: list[Tensor], filled: list[Tensor]) -> None:
        for parameter in given:
            self._zeros.pop(id(parameter), None)
        for parameter in filled:
            assert parameter.grad is not None
            self._zeros[id(parameter)] = parameter.grad

    def _agree(self, number: int, parameters: list[DTensor]) -> None:
        """Drop gradients that are zeros of all processes.

        The answer is read where this process has sent zeros, or has no gradient and did not say so before the last update: whatever
        differs then is read by the process that has changed. On the CPU, where reading waits for nothing, it is always read.

        Raises:
            StrategyError: some processes have computed a gradient that others have not, and have sent no zeros for.
        """
        self._updates += 1
        zeros = self._zeros
        computed = [
            _NONE
            if (gradient := parameter.grad) is None or not parameter.requires_grad
            else _ZEROS
            if zeros and zeros.get(id(parameter)) is gradient
            else _OWN
            for parameter in parameters
        ]
        is_new = computed != self._told[number][0]
        if is_new:
            told = [computed, [_OWN - one for one in computed]]
            self._told[number] = computed, torch.tensor(told, dtype=torch.int8, device=self._device)
        dist.all_reduce(ends := self._told[number][1].clone(), "max", self._data.group)
        if self._device.type == "cpu" or _ZEROS in computed or (is_new and _NONE in computed):
            for parameter, own, most, least in zip(parameters, computed, *ends.tolist(), strict=True):
                if most < _OWN or least:
                    self._settle(parameter, own, most, _OWN - least)
        zeros.clear()

    def _settle(self, parameter: DTensor, own: int, most: int, least: int) -> None:
        if least == _NONE < most:
            name, has_none = self._names[id(parameter)], own == _NONE
            frozen = "" if parameter.requires_grad else ", because it is frozen here"
            raise StrategyError(
                f"model.{name}: rank {self._rank} has {f'no gradient{frozen}' if has_none else 'a gradient'} in update "
                f"{self._updates} since the start, and other processes have {'one' if has_none else 'none'}; freeze and thaw a "
                "parameter, and call the modules that train_step calls, on every process alike"
            )
        if most < _OWN:
            parameter.grad = None
        if most == _NONE and not parameter.requires_grad:
            self._trained.discard(id(parameter))
