"""MeshStrategy: any product of data, tensor, context, expert and pipeline parallelism."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...core.comm import collectives as dist
from ...core.comm.topology import DataShard, Topology
from ...core.registry import STRATEGIES
from ..fsdp import FSDPStrategy
from ..state import Optim
from ..steps import EvalStep, TrainStep
from .axis import Axis, CheckWindow, Evaluate, RunWindow
from .config import MeshConfig
from .context import Context
from .experts import ExpertParallel
from .fast_axes import across_nodes
from .layout import DATA, Layout
from .overview import Overview
from .pipeline import Pipeline
from .sizes import REST, check_overlay, check_sizes, resolved, sizes_in
from .tensor import TensorParallel
from .unused_options import check_sharded, without_shards

_logger = logging.getLogger("flextrain")


@STRATEGIES.register_module()
class MeshStrategy(FSDPStrategy):
    """Trains an unmodified model on a mesh of processes, each axis of which divides the work in another way.

    Samples are divided over ``dp_replicate`` and ``dp_shard``, the latter with parameters and optimizer state sharded as by
    FSDPStrategy, whose options this class has too. The other axes are model parallelism, see ``axes``.

    Neighbouring ranks are along ``tp``, then ``cp``, ``dp_shard``, ``dp_replicate`` and ``pp``: what sends most is nearest.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
    """

    Config = MeshConfig
    axes: ClassVar[Sequence[type[Axis]]] = (Pipeline, ExpertParallel, TensorParallel, Context)
    """The kinds of model parallelism, in the order in which they change a model, and from the farthest to the nearest ranks;
    those with ``folds`` are the farthest inside ``dp_shard``."""
    short_names = {"mesh": {}}
    config: MeshConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        check_sizes(self._sizes())
        self._check_overlays(self._sizes())
        for axis in self.axes:
            axis.check_config(self.config)
        sharding = [*DATA, *(axis.name for axis in self.axes if axis.folds or axis.overlays)]
        check_sharded(self.config, self._sizes() | self._overlays(), sharding)
        self._layout: Layout | None = None
        self._axes: list[Axis] = []
        self._chosen: list[nn.Module] = []  # submodules of the whole model that are FSDP units
        self._window: RunWindow = super().run_window
        self._checks: CheckWindow = super().check_window
        self._is_checked = False
        self._evaluation: Evaluate = super().evaluate

    @classmethod
    def options_of(cls, text: str, where: str) -> dict[str, Any]:
        """Return the sizes in a short name such as "tp2xpp2" or "tp=2,pp=2", which stands after "mesh:".

        Raises:
            ConfigError: it is written otherwise, or an axis is unknown.
        """
        return sizes_in(text, [*DATA, *(axis.name for axis in cls.axes)], where)

    @property
    def layout(self) -> Layout:
        """The device meshes; valid after ``setup_environment``."""
        assert self._layout is not None
        return self._layout

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the options, outermost axis first."""
        outer = [axis.name for axis in self.axes if axis.outer and not axis.overlays]
        # Axes that shard parameters together with dp_shard are beside it.
        nearest_last = sorted(self.axes, key=lambda axis: not axis.folds)
        inner = [axis.name for axis in nearest_last if not axis.outer and not axis.overlays]
        sizes = {name: getattr(self.config, name) for name in (*outer, *DATA, *inner)}
        if "dp_shard" not in self.config.model_fields_set and REST in (
            size for name, size in sizes.items() if name != "dp_shard"
        ):
            sizes["dp_shard"] = 1  # its default takes what is left only if no other axis does
        return sizes

    def _overlays(self) -> dict[str, int]:
        return {axis.name: getattr(self.config, axis.name) for axis in self.axes if axis.overlays}

    def _check_overlays(self, sizes: dict[str, int]) -> None:
        divided = [*sizes][[*sizes].index("dp_shard") :]
        for name, size in self._overlays().items():
            check_overlay(name, size, {axis: sizes[axis] for axis in divided})

    def _check_world(self, world_size: int) -> None:
        self._check_overlays(resolved(self._sizes(), world_size))

    def _arrange(self) -> Topology:
        self._join_alone()
        sizes = resolved(self._sizes(), Topology().world_size)
        self._check_overlays(sizes)
        folded = [axis.name for axis in self.axes if axis.folds]
        overlays = {name: size for name, size in self._overlays().items() if size > 1}
        layout = self._layout = Layout(sizes, folded, self.device.type, overlays)
        self._axes = [axis(self.config, layout) for axis in self.axes if {**sizes, **overlays}.get(axis.name, 1) > 1]
        for axis in reversed(self._axes):  # the first one is around all others
            if type(axis).run_window is not Axis.run_window:
                self._window = partial(axis.run_window, inner=self._window)
            if type(axis).evaluate is not Axis.evaluate:
                self._evaluation = partial(axis.evaluate, inner=self._evaluation)
        # A pipeline calls the model in the contexts of all others.
        for axis in (*filter(lambda axis: axis.outer, self._axes), *reversed([a for a in self._axes if not a.outer])):
            self._checks = partial(axis.check_window, inner=self._checks)
        reporting = {axis.name: axis.size - 1 if axis.reports_last else 0 for axis in self._axes if not axis.overlays}
        return layout.topology(reporting, [axis.name for axis in self._axes if axis.divides])

    def _mesh(self) -> DeviceMesh:
        return self.layout.sharding()

    def _shards(self, *meshes: DeviceMesh) -> bool:
        return (
            self.config.mixed_precision is not None or self.config.offloads or any(mesh.size() > 1 for mesh in meshes)
        )

    def _averaged_over(self) -> DataShard:
        return self.layout.averaging()

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        super()._check_request(model, optim)
        for axis in self._axes:
            axis.example = self.example
            axis.check(model, optim)

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """See Strategy."""
        called, optim = super().setup(model, optim)
        for axis in self._axes:
            for wrapper in optim.wrappers.values() if optim is not None else ():
                axis.check_optimizer(wrapper)
            axis.finish(called, optim)
        return called, optim

    def _choose_units(self, model: nn.Module) -> list[nn.Module]:
        # Chosen while the model is whole: which modules repeat does not depend on what a process has of them.
        held = set(model.modules())
        return [unit for unit in self._chosen if unit in held and any(True for _ in unit.parameters())]

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._chosen = super()._choose_units(model)
        overview = Overview(model)
        for axis in self._axes:
            model = axis.apply(model)
            overview.add(axis.name, axis.size, axis.described(), model)
        model = super()._wrap(model)
        self._chosen = []  # units of other stages would keep their parameters
        sizes = self.layout.sizes
        sharding = ["dp_shard", *(axis.name for axis in self._axes if axis.folds)]
        if (size := math.prod(sizes[axis] for axis in sharding)) > 1:
            names = [axis for axis in sharding if sizes[axis] > 1]
            own = "samples, and " if "dp_shard" in names else ""
            overview.add(" x ".join(names), size, f"{own}parameters, gradients, optimizer state", model)
        if (copies := sizes["dp_replicate"]) > 1:
            overview.add("dp_replicate", copies, "samples; parameters are replicated", model)
        _logger.info(overview.table(math.prod(sizes.values())))
        self._warn_of_nodes()
        return model

    def _warn_of_nodes(self) -> None:
        if fast := [axis.name for axis in self._axes if axis.fast]:
            nodes = dist.all_gather_object(socket.gethostname())
            for line in across_nodes(self.layout.sizes, self.layout.overlays, fast, nodes):
                _logger.warning(line)

    def _unsharded(self, model: nn.Module) -> nn.Module:
        if unused := without_shards(self.config):
            _logger.warning(
                f"strategy.{', strategy.'.join(unused)}: no effect here, each parameter is on one process, or divided already"
            )
        return super()._unsharded(model)

    def _other_meshes(self) -> dict[nn.Module, DeviceMesh]:
        return {module: mesh for axis in self._axes for module, mesh in axis.meshes().items()}

    def _stage(self) -> Hashable:
        return tuple(axis.stage() for axis in self._axes)

    def split(self, batch: Any) -> Any:
        """See Strategy."""
        for axis in self._axes:
            batch = axis.split(batch)
        return batch

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        """See Strategy."""
        if not self._is_checked:  # a loop of the user's may not have called it
            self.check_window(window, step)
        return self._window(window, step)

    def check_window(self, window: Sequence[Any], step: TrainStep) -> None:
        """See Strategy."""
        if not self._is_checked:
            self._checks(window, step)
            self._is_checked = True

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        """See Strategy."""
        return self._evaluation(batch, step)

    def _computes_alone(self) -> bool:
        return not self._axes

    def _prepare_whole(self, model: nn.Module) -> torch.dtype | None:
        for axis in self._axes:
            axis.prepare_whole(model)
        return super()._prepare_whole(model)

    def teardown(self) -> None:
        """See Strategy."""
        for axis in self._axes if self._model is not None else ():
            axis.release()
        super().teardown()
        self._layout, self._axes, self._chosen = None, [], []
        self._window, self._evaluation, self._checks = super().run_window, super().evaluate, super().check_window
        self._is_checked = False
