"""RehearsedZero: the tensors and collectives of DeepSpeed's engine, by formula, for a rehearsal.

The engine keeps process groups and events in variables of modules and cannot be one rank of many. Here, the same buffers are
made as plain tensors, with the sizes, padding and dtypes that DeepSpeed 0.19.8 gives them, and the collectives are called on
them: gradients of stages 1 and 2 are copied into a bucket, reduced whole, and the own partition is kept.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.checkpoint.flat_shard import FlatShard
from ...core.errors import ConfigError
from ...core.precision import DTYPES, Precision
from ...core.shard_spans import share
from ...optim.canonical import GROUP, STATE
from ...optim.wrapper import ClipGrad, OptimWrapper
from ..base import NOTHING, Strategy
from ..state import Optim
from .config import DeepSpeedConfig
from .engine_config import Request, check_wrapper, resolve
from .half_precision import cast_inputs_and_outputs
from .optimizers import check_supported
from .rehearsed_gathering import ZeroPartitions
from .rehearsed_partitions import WholeParameters, ZeroState
from .running_statistics import keep_running_statistics


class RehearsedWrapper(OptimWrapper):
    """An OptimWrapper whose optimizer updates what the engine's does; made by ``RehearsedZero``."""

    _zero: ZeroState

    @classmethod
    def of(cls, asked: OptimWrapper) -> RehearsedWrapper:
        """Return a wrapper with the settings of ``asked``, in the precision of the model."""
        wrapper = cls.__new__(cls)
        vars(wrapper).update(vars(asked))
        return wrapper

    @property
    def precision(self) -> Precision:
        """No autocast: the whole model is cast."""
        return Precision()

    def build(self, model: nn.Module) -> None:
        """See OptimWrapper; the optimizer gets this rank's masters in place of the parameters."""
        super().build(model)
        check_supported(self, self._zero.zero.stage)
        self._zero.shard(self.optimizer)

    def backward(self, loss: Tensor) -> None:
        """See OptimWrapper."""
        super().backward(loss)
        self._zero.after_backward()

    def _unscale(self) -> None:
        self._zero.before_update()

    def _apply(self) -> bool:
        applied = super()._apply()
        self._zero.after_update()
        return applied


class RehearsedZero(Strategy):
    """Makes the tensors and collectives of DeepSpeedStrategy with the same options; only in a rehearsal.

    Args:
        asked: options of the DeepSpeedStrategy.

    Raises:
        ConfigError: state is offloaded.
    """

    Config = DeepSpeedConfig
    config: DeepSpeedConfig

    def __init__(self, asked: DeepSpeedConfig) -> None:
        super().__init__()
        self.config = asked
        for part in (asked.zero_optimization.offload_optimizer, asked.zero_optimization.offload_param):
            if part is not None and part.device != "none":
                raise ConfigError(
                    f'strategy.zero_optimization.{part.key}.device: "{part.device}" cannot be planned, memory of the host is '
                    "not counted"
                )
        self._request = Request(torch.float32, 0.0, 1, {})
        self._zero: ZeroState | None = None

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """See Strategy."""
        self.setup_environment()
        asked = check_wrapper(optim)
        asked.attach(self.device, self.autocast)
        # float16 has the sizes that it has on an accelerator, where it is possible.
        self._request = resolve(self.config, asked, torch.device("cuda"))
        wrapper = RehearsedWrapper.of(asked)
        wrapper.accumulate = wrapper._size = self._request.accumulate
        if self._request.max_norm and wrapper.clip_grad is None:
            wrapper.clip_grad = ClipGrad(max_norm=self._request.max_norm)
        zero = self.config.zero_optimization
        kind = ZeroPartitions if zero.stage == 3 else WholeParameters
        sent = self.config.communication_data_type
        dtype = self._request.dtype
        wrapper._zero = self._zero = kind(zero, dtype, DTYPES[sent] if sent else dtype, self.rank, self.world_size)
        return super().setup(model, wrapper)

    def _wrap(self, model: nn.Module) -> nn.Module:
        assert self._zero is not None
        dtype = self._request.dtype
        if dtype is not torch.float32:
            keep_running_statistics(model, dtype)
            cast_inputs_and_outputs(model, dtype, self.config.inputs_to_half)
        self._zero.adopt(model)
        return model

    def _check_precision(self) -> None:
        pass

    def autocast(self) -> AbstractContextManager[None]:
        """See Strategy; none, as under DeepSpeedStrategy."""
        return NOTHING

    def model_state(self) -> dict[str, Tensor]:
        """See Strategy; float32 masters, of which every rank has an even share but at stage 0."""
        return {name: self._offered_as(parameter) for name, parameter in self.named_parameters()} | self._buffers()

    def _offered_as(self, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = tuple(getattr(like, "whole_shape", like.shape))
        if self.config.zero_optimization.stage == 0:
            return torch.empty(shape, dtype=dtype, device="meta")
        begin, end = share(math.prod(shape), self.world_size, self.rank)
        return FlatShard(torch.empty(end - begin, dtype=dtype, device="meta"), shape, begin)

    def state_dict(self) -> dict[str, Any]:
        """See Strategy."""
        assert self._zero is not None
        state: dict[str, Any] = dict(self._offered())
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for wrapper in self.optim.wrappers.values() if self.optim is not None else ():
            for master, group, parameters in self._zero.updated(wrapper.optimizer):
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for name, parameter in ((names[id(parameter)], parameter) for parameter in parameters):
                    for key, value in wrapper.optimizer.state.get(master, {}).items():
                        each = isinstance(value, Tensor) and value.shape == master.shape and master.dim()
                        state[f"{STATE}{name}.{key}"] = self._offered_as(parameter, value.dtype) if each else value
                    state |= {f"{GROUP}{name}.{key}": value for key, value in settings.items()}
                    state[f"{GROUP}{name}.optimizer"] = type(wrapper.optimizer).__name__
        return state
