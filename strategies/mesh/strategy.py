"""MeshStrategy: any product of data, tensor, context, expert and pipeline parallelism."""

from __future__ import annotations

import itertools
import logging
import math
import socket
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...core.base.errors import ConfigError, counted
from ...core.base.registry import STRATEGIES
from ...core.comm import collectives as dist
from ...core.comm.agreement import gather_differing
from ...core.comm.topology import DataShard, Topology
from ..base import EvalStep, Optim, TrainStep
from ..fsdp import FSDPStrategy
from ..parts import check_window, computes_alone, pipeline_of, prepare_whole
from .axis import DATA, Axis, CheckWindow, Evaluate, Layout, RunWindow, check_pairs
from .config import REST, MeshConfig, check_overlay, check_sizes, resolved, sizes_in
from .context import Context
from .experts import ExpertParallel
from .pipeline import Pipeline
from .pipeline.pipeline_parallel import stages_per_process
from .tensor import TensorParallel

# Overview: a table of what each axis of a mesh divides, for the log.


_WIDTH = 54  # of the column with text; the table is 96 columns wide
_MEGABYTE = 1e6


@dataclass
class _Row:
    axis: str
    size: str
    divides: str
    parameters: int
    size_in_bytes: int


class Overview:
    """Collects, while a model is divided, how many parameters a process has left after each axis.

    Args:
        model: the whole model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows = [_Row("", "", "the whole model", *_held(model))]

    def add(self, axis: str, size: int, divides: str, model: nn.Module) -> None:
        """Note what an axis has done to the model.

        Args:
            axis: its name, or the names of several.
            size: number of processes along it.
            divides: what it divides, in words.
            model: as it is after the axis has changed it.
        """
        self._rows.append(_Row(axis, str(size), divides, *_held(model)))

    def table(self, world_size: int) -> str:
        """Return the table; numbers are the largest of all processes. A collective."""
        everyones = gather_differing([[row.parameters, row.size_in_bytes] for row in self._rows])
        largest = [[max(numbers) for numbers in zip(*rows, strict=True)] for rows in zip(*everyones, strict=True)]
        title = f"Mesh of {counted(world_size, 'process', 'processes')}, and what each axis leaves to one of them:"
        lines = [title, _line("axis", "size", "divides", "parameters", "MB")]
        for row, (parameters, size) in zip(self._rows, largest, strict=True):
            text = textwrap.wrap(row.divides, _WIDTH) or [""]
            lines.append(_line(row.axis, row.size, text[0], f"{parameters:,}", f"{size / _MEGABYTE:,.1f}"))
            lines += [_line("", "", more, "", "") for more in text[1:]]
        return "\n".join(line.rstrip() for line in lines)


def _line(axis: str, size: str, divides: str, parameters: str, megabytes: str) -> str:
    return f"  {axis:<14}{size:>4}  {divides:<{_WIDTH}}{parameters:>15}{megabytes:>10}"


def _held(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters that this process holds, and their bytes."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.numel() for p in local), sum(p.numel() * p.element_size() for p in local)


# Fast axes: those that send within every layer, and which of them have processes on several nodes.


def across_nodes(
    sizes: Mapping[str, int], overlays: Mapping[str, int], fast: Sequence[str], nodes: Sequence[str]
) -> list[str]:
    """Return a line for each fast axis that has to send between nodes, with the size that does not.

    Args:
        sizes, overlays: of the axes, as Layout has them.
        fast: the axes that send within every layer.
        nodes: by rank, the name of the node that the process is on.
    """
    counts = [len(list(same)) for _, same in itertools.groupby(nodes)]
    alternate = len(counts) > len(set(nodes))
    lines = []
    for axis in fast:
        size = overlays[axis] if axis in overlays else sizes[axis]
        # An overlay has neighbouring ranks, whatever is inside of it.
        nearer = {} if axis in overlays else dict([*sizes.items()][[*sizes].index(axis) + 1 :])
        spanned = _spanned(nodes, size, math.prod(nearer.values()))
        if spanned == 1:
            continue
        if alternate:
            advice = "start the processes so that those of a node have consecutive ranks"
        else:
            dp_shard = None if axis in overlays else sizes["dp_shard"]
            advice = _other_size(axis, size, nearer, counts, dp_shard)
        lines.append(
            f"strategy.{axis}: its {size} processes, which send within every layer, are on {spanned} nodes, {advice}"
        )
    return lines


def _spanned(nodes: Sequence[str], size: int, stride: int) -> int:
    """Return the largest number of nodes with processes that differ along one axis only.

    Args:
        size: number of processes along the axis.
        stride: difference of rank between two neighbours along it.
    """
    lines: dict[tuple[int, int], set[str]] = {}
    for rank, node in enumerate(nodes):
        lines.setdefault((rank // (size * stride), rank % stride), set()).add(node)
    return max(len(names) for names in lines.values())


def _other_size(axis: str, size: int, nearer: Mapping[str, int], counts: Sequence[int], dp_shard: int | None) -> str:
    """Return the advice to give the axis a size that fits a node, and the rest to dp_shard unless it is None."""
    of_a_node, stride = math.gcd(*counts), math.prod(nearer.values())
    divisors = (s for s in range(1, size + 1) if size % s == 0)
    fits = max(s for s in divisors if s == 1 or of_a_node % (s * stride) == 0)
    held = counted(counts[0], "process", "processes") if len({*counts}) == 1 else f"{min(counts)} to {max(counts)}"
    inside = " and ".join(f"{name}={number}" for name, number in nearer.items() if number > 1)
    nearest = f", the nearest are for {inside}" if inside else ""
    rest = "" if dp_shard is None else f" and dp_shard={dp_shard * size // fits}"
    return f"a node has {held}{nearest}; give {axis}={fits}{rest}"


# Options of FSDP without effect are refused: who gives one expects it to do something.


_OF_SHARDS = ("reshard_after_forward", "prefetch", "reduce_every_micro_batch")


def without_shards(config: MeshConfig) -> list[str]:
    """Return the given options that have no effect where no parameter is sharded over several processes."""
    return [key for key in _OF_SHARDS if getattr(config, key) != type(config).model_fields[key].default]


def check_sharded(config: MeshConfig, sizes: Mapping[str, int], sharding: Sequence[str]) -> None:
    """Raise ConfigError for an option of FSDP if the given sizes leave FSDP out.

    Args:
        sizes: of all axes, also -1.
        sharding: the axes over which parameters are sharded, and those that divide them anew.
    """
    if config.mixed_precision is not None or config.offloads or any(sizes[axis] != 1 for axis in sharding):
        return
    for key in without_shards(config):
        raise ConfigError(
            f"strategy.{key}: has no effect with {', '.join(f'{axis}=1' for axis in sharding)}, which shard no parameter over "
            "several processes; leave it out"
        )


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
        self._checks: CheckWindow = _nothing_to_check
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
        """The device meshes; valid after ``join``."""
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
        check_pairs(self._axes, self.device.type, dist.group_backend())
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
        if not dist.is_alone():
            self._keep_groups()
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
            check_window(self, window, step)
        return self._window(window, step)

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        """See Strategy."""
        with self._computing():  # the first batch is compared outside of FSDP's evaluation
            return self._evaluation(batch, step)

    def leave(self) -> None:
        """See Strategy."""
        for axis in self._axes if self._model is not None else ():
            axis.release()
        super().leave()
        self._layout, self._axes, self._chosen = None, [], []
        self._window, self._evaluation, self._checks = super().run_window, super().evaluate, _nothing_to_check
        self._is_checked = False


def _nothing_to_check(window: Sequence[Any], step: TrainStep) -> None:
    pass


@check_window.register(MeshStrategy)
def _(strategy: MeshStrategy, window: Sequence[Any], step: TrainStep) -> None:
    if not strategy._is_checked:
        with strategy._computing():
            strategy._checks(window, step)
        strategy._is_checked = True


@computes_alone.register(MeshStrategy)
def _(strategy: MeshStrategy) -> bool:
    return not strategy._axes


@prepare_whole.register(MeshStrategy)
def _(strategy: MeshStrategy, model: nn.Module) -> torch.dtype | None:
    for axis in strategy._axes:
        axis.prepare_whole(model)
    return prepare_whole.dispatch(FSDPStrategy)(strategy, model)


@pipeline_of.register(MeshStrategy)
def _(strategy: MeshStrategy) -> tuple[str, int] | None:
    return strategy.config.pp_schedule, stages_per_process(strategy.config)
