"""ProcessEnvironment: device, process group and topology of this process."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from ..core.base.config import validate
from ..core.base.errors import StrategyError
from ..core.base.overriding import refuse_misspelled
from ..core.comm import collectives as dist
from ..core.comm.agreement import raising_together, roll_call
from ..core.comm.topology import Topology, use_shard
from ..core.device.device import DeviceSpec, device_spec, select_device
from .config import StrategyConfig
from .launchers import Launch, detect_launch, saying_why_this_process_leaves


class ProcessEnvironment:
    """The part of a strategy that handles processes and devices, without a model.

    Args:
        options: the fields of this class's ``Config``.
    """

    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    given_as: Mapping[str, str] = MappingProxyType({})
    """Where the configuration has options that are not given under ``strategy``, for messages."""

    def __init__(self, **options: Any) -> None:
        self.config = validate(self.Config, options, "strategy")
        if hasattr(type(self), "data_shard"):
            raise StrategyError(
                f"{type(self).__name__}.data_shard: is never asked, define _arrange() and give Topology(data=DataShard(index, "
                "count, group)), strategy.topology then has it"
            )
        refuse_misspelled(type(self), "strategy")
        self.device = torch.device("cpu")
        self.launch = Launch()
        self.topology = Topology()
        """This process's relations to the others; valid after ``setup_environment``."""
        self._spec: DeviceSpec | None = None
        self._owns_group = False

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.topology.world_size

    def setup_environment(self) -> None:
        """Choose the device and join the process group; may be called again.

        Raises:
            LaunchError: the launcher's variables are missing.
            ConfigError: a backend that the device does not support.
            StrategyError: the device is not usable, the strategy cannot run on this number of processes, or the
                existing process group cannot send CPU tensors.
        """
        if self._spec is not None:
            return
        spec = device_spec(self.config.device)
        self.launch = detect_launch(self.config.launcher)
        with saying_why_this_process_leaves(self.config.launcher):
            self._check_world(self.launch.world_size)
            self.device = select_device(spec, self.launch.local_rank)
        if self.launch.world_size > 1 and not dist.is_initialized():
            dist.init_process_group(
                spec.complete_backend(self.config.backend, self._key_of_backend),
                rank=self.launch.rank,
                world_size=self.launch.world_size,
                init_method=self.launch.init_method,
                timeout_s=float(self.config.timeout_s),
                job=self.launch.job,
                is_derived=self.launch.is_derived,
                several_machines=self.launch.several_machines,
            )
            self._owns_group = True
            dist.leave_at_exit()
        self._check_group()
        dist.side_group(float(self.config.timeout_s))  # created here, because all processes are here
        # The processes compare their topologies below, where one that is alone would wait without end.
        if not dist.is_alone():
            self.meet("Strategy.setup_environment()")
        self._spec = spec
        self.topology = Topology()  # _arrange may need rank and world size
        try:
            with raising_together():
                arranged: object = self._arrange()
                if not isinstance(arranged, Topology):
                    raise StrategyError(
                        f"{type(self).__name__}._arrange: gave {type(arranged).__name__}, return Topology(data=DataShard(index, "
                        "count, group))"
                    )
                self.topology = arranged
                use_shard(arranged.data)
            if not dist.is_alone():
                self.topology.check()
        except BaseException:
            self._spec, self.topology = None, Topology()  # another call must not find it set up
            raise

    def _arrange(self) -> Topology:
        """Return this process's relations to the others; called once on every process, after the process group exists.

        By default every process trains on its own data and holds all parameters.
        """
        return Topology()

    @property
    def _key_of_backend(self) -> str:
        return self.given_as.get("backend", "strategy.backend")

    def meet(self, call: str) -> None:
        """Wait until every process has made ``call``; a collective.

        Raises:
            StrategyError: on every process, if one does not come within ``timeout_s`` seconds or makes another call.
        """
        if problem := roll_call(call, float(self.config.timeout_s)):
            raise StrategyError(f"{call}: {problem}; every process has to call it")

    def _join_alone(self) -> None:
        """Create a process group of this process alone if there is none, for libraries that need one."""
        if dist.is_initialized():
            return
        assert self._spec is not None
        dist.init_alone(self._spec.complete_backend(self.config.backend, self._key_of_backend))
        self._owns_group = True
        dist.leave_at_exit()

    def _check_group(self) -> None:
        """Raise StrategyError if an existing process group cannot send CPU tensors: counts, metrics, objects."""
        if not dist.is_alone() and not dist.carries_cpu_tensors(found := dist.group_backend()):
            raise StrategyError(
                f'strategy.backend: the existing process group has the backend "{found}" and none for CPU tensors, '
                f'create it with init_process_group("cpu:gloo,{found}") or let the strategy create it'
            )

    def _check_world(self, world_size: int) -> None:
        """Raise StrategyError if this strategy cannot run on ``world_size`` processes."""

    def _leave_environment(self) -> None:
        """Leave the process group, if this strategy joined it."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
        self._spec = None
        self.topology = Topology()
