"""Axis, the base class of the kinds of model parallelism that MeshStrategy combines."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...core.base.errors import StrategyError
from ...core.comm.topology import DataShard, Topology
from ...core.torch_compat.torch_private import with_values
from ...optim.wrapper import OptimWrapper
from ..base import EvalStep, Optim, TrainStep
from .config import MeshConfig


def check_pairs(axes: Sequence[Axis], device_type: str, backends: str) -> None:
    """Raise StrategyError where a process of an axis would send a device's tensor to another one by gloo, which cannot.

    Args:
        axes: those with several processes.
        device_type: such as "cuda".
        backends: of the process group, as ``device:name,...``.
    """
    if device_type != "cpu" and f"{device_type}:gloo" in backends.split(","):
        for axis in axes:
            if axis.pairs:
                raise StrategyError(
                    f"strategy.backend: gloo cannot send {device_type} tensors from one process to another, which "
                    f"strategy.{axis.name} does; leave it out"
                )


# Layout: the device meshes of a job, and the place of this process in them.


DATA = ("dp_replicate", "dp_shard")
"""The axes over which the samples of a global batch are divided."""
SHARD = "shard"
"""The dimension of ``dense`` over which FSDP shards; dp_shard, and the axes that divide samples, such as cp."""


class Layout:
    """The processes as one array, with a dimension for each axis; the last one has neighbouring ranks.

    Args:
        sizes: number of processes by axis, outermost first; every process gives the same.
        folded: the axes, directly after dp_shard, whose processes shard parameters together with those of dp_shard.
        device_type: such as "cuda".
        overlays: sizes of the axes that are no dimension of the array: each divides the processes of dp_shard and of the
            axes inside of it anew, with its own neighbours nearest.

    Attributes:
        sizes, overlays: as given.
        index: this process's index, by axis.
        sharing: the axes inside of dp_shard whose processes work on the same tokens.
        dense: mesh of all processes, for parameters that every data shard has; ``folded`` are in its dimension SHARD.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        folded: Sequence[str],
        device_type: str,
        overlays: Mapping[str, int] | None = None,
    ) -> None:
        self.sizes, self.overlays = dict(sizes), dict(overlays or {})
        self.device_type = device_type
        self._folded = tuple(folded)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        shapes = {axis: size for axis, size in sizes.items() if axis not in folded}
        shapes = {SHARD if axis == "dp_shard" else axis: size for axis, size in shapes.items()}
        shapes[SHARD] = math.prod(sizes[axis] for axis in ("dp_shard", *folded))
        self.dense = self.mesh_of(shapes)
        indices = (self._ranks() == Topology().rank).nonzero()[0].tolist()
        self.index: dict[str, int] = dict(zip(self.sizes, indices, strict=True))
        inside = [*self.sizes][[*self.sizes].index("dp_shard") :]
        self.sharing = tuple(axis for axis in inside[1:] if axis not in folded)
        self._overlaid = {axis: self.mesh_of(self._overlay(axis, inside)) for axis in self.overlays}
        self.index |= {axis: mesh.get_local_rank(axis) for axis, mesh in self._overlaid.items()}

    def mesh_of(self, shape: Mapping[str, int]) -> DeviceMesh:
        """Return a mesh of all processes with other dimensions; a collective.

        Args:
            shape: sizes by name, outermost first; their product is the number of processes.
        """
        ranks = torch.arange(math.prod(self.sizes.values())).view(*shape.values())
        return DeviceMesh(self.device_type, ranks, mesh_dim_names=tuple(shape))

    def over(self, *axes: str) -> DeviceMesh:
        """Return the mesh of one dimension of the processes that differ from this one in ``axes`` only; a collective.

        The first call with the same axes creates process groups, which every process must do.
        """
        if axes not in self._meshes:
            if len(axes) == 1 and axes[0] in self._overlaid:
                self._meshes[axes] = self._overlaid[axes[0]][axes[0]]
            elif len(axes) == 1 and axes[0] in (self.dense.mesh_dim_names or ()):
                self._meshes[axes] = self.dense[axes[0]]
            elif axes == ("dp_shard", *self._folded):
                self._meshes[axes] = self.dense[SHARD]
            else:
                names = list(self.sizes)
                order = [names.index(axis) for axis in (*(a for a in names if a not in axes), *axes)]
                size = math.prod(self.sizes[axis] for axis in axes)
                with with_values():
                    ranks = self._ranks().permute(order).reshape(-1, size)
                    mesh = DeviceMesh(self.device_type, ranks, mesh_dim_names=("others", "_".join(axes)))
                self._meshes[axes] = mesh["_".join(axes)]
        return self._meshes[axes]

    def lines(self, axis: str) -> list[tuple[int, ...]]:
        """Return the ranks of every set of processes that differ in one axis only, in their order along it."""
        with with_values():
            ranks = self._ranks().movedim(list(self.sizes).index(axis), -1)
            return [tuple(line) for line in ranks.reshape(-1, self.sizes[axis]).tolist()]

    def sharding(self, overlay: str | None = None) -> DeviceMesh:
        """Return the mesh for ``fully_shard``: one dimension, or a first one for replicas.

        Args:
            overlay: an axis of ``overlays``: the mesh for parameters that it divides.
        """
        mesh = self.dense if overlay is None else self._overlaid[overlay]
        shard = SHARD if overlay is None else f"{overlay}_{SHARD}"
        return mesh["dp_replicate", shard] if self.sizes["dp_replicate"] > 1 else mesh[shard]

    def averaging(self) -> DataShard:
        """Return the processes over which gradients are averaged: those of the data axes and of ``folded``; a collective."""
        axes = [axis for axis in (*DATA, *self._folded) if self.sizes[axis] > 1]
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + self.index[axis]
        count = math.prod(self.sizes[axis] for axis in axes)
        return DataShard(index, count, self.over(*axes).get_group() if axes else None)

    def topology(self, reporting: Mapping[str, int], dividing: Sequence[str]) -> Topology:
        """Return the relations of this process to the others; a collective.

        Args:
            reporting: by axis, the index at which processes have the outputs that metrics count.
            dividing: axes whose processes hold different parameters of one replica of the model.
        """
        count = math.prod(self.sizes[axis] for axis in DATA)
        index = self.index["dp_replicate"] * self.sizes["dp_shard"] + self.index["dp_shard"]
        spread = [axis for axis in DATA if self.sizes[axis] > 1]
        divided = [axis for axis in dividing if self.sizes[axis] > 1]
        return Topology(
            data=DataShard(index, count, self.over(*spread).get_group() if spread else None),
            reports=all(self.index[axis] == at for axis, at in reporting.items()),
            model=self.over(*divided).get_group() if divided else None,
            axes={axis: (self.index[axis], size) for axis, size in {**self.sizes, **self.overlays}.items()},
        )

    def _overlay(self, axis: str, inside: Sequence[str]) -> dict[str, int]:
        """Return the sizes of an array in which ``axis`` takes processes of the axes ``inside``, and FSDP has the rest."""
        shapes = {name: size for name, size in self.sizes.items() if name not in inside}
        rest = math.prod(self.sizes[name] for name in inside) // self.overlays[axis]
        return {**shapes, f"{axis}_{SHARD}": rest, axis: self.overlays[axis]}

    def _ranks(self) -> torch.Tensor:
        return torch.arange(math.prod(self.sizes.values())).view(*self.sizes.values())


RunWindow = Callable[[Sequence[Any], TrainStep], dict[str, Tensor]]
CheckWindow = Callable[[Sequence[Any], TrainStep], None]
Evaluate = Callable[[Any, EvalStep], Any]


def check_torch(axis: str) -> None:
    """Refuse torch 2.6 for an axis that lays out parameters as DTensors, which that version always sends.

    It also loses writes to rows of them, and refuses products of theirs with other tensors.

    Raises:
        StrategyError: in one line, with both versions.
    """
    if Version(torch.__version__) < Version("2.7"):
        raise StrategyError(
            f"strategy.{axis}: needs torch 2.7 or newer, {torch.__version__} is installed; install it, or leave {axis} out"
        )


class Axis:
    """One kind of model parallelism: processes along one dimension of the mesh that work on the same samples.

    Subclass it for another kind, and name the subclass in ``MeshStrategy.axes``. An object exists only where the axis has
    several processes.

    Args:
        config: the options of the strategy.
        layout: the sizes of all axes, and this process's index along each.

    Attributes:
        name: the name of the axis, and of the option that has its size.
        outer: the axis is outside the data axes, so that its neighbours are the farthest ranks; otherwise inside.
        folds: its processes have the same parameters and different parts of every sample, like data parallelism:
            FSDP shards parameters over them too.
        divides: its processes hold different parameters of one replica of the model, not parts of each.
        overlays: it is no dimension of its own: it divides the processes of dp_shard, and of the axes inside of it, anew.
        fast: it sends within every layer; the log warns where its processes are not all on one node.
        pairs: a process sends to a single other one, which gloo does for CPU tensors alone. May be a property of the object.
        reports_last: predictions are on its last process; otherwise on its first. May be a property of the object.
    """

    name: ClassVar[str]
    outer: ClassVar[bool] = False
    folds: ClassVar[bool] = False
    divides: ClassVar[bool] = False
    overlays: ClassVar[bool] = False
    fast: ClassVar[bool] = False
    pairs: ClassVar[bool] = False
    reports_last: ClassVar[bool] = False

    example: Callable[[], Any] | None = None
    """Returns a batch of the data or None, see Strategy; set before ``check``."""

    def __init__(self, config: MeshConfig, layout: Layout) -> None:
        self.config, self.layout = config, layout
        sizes = layout.overlays if self.overlays else layout.sizes
        self.size, self.index = sizes[self.name], layout.index[self.name]

    @classmethod
    def check_config(cls, config: MeshConfig) -> None:
        """Raise ConfigError for options of this axis that exclude each other; called when the strategy is made."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of one dimension that this process is in along this axis."""
        return self.layout.over(self.name)

    def check(self, model: nn.Module, optim: Optim | None) -> None:
        """Raise StrategyError or ConfigError if a model or wrapper does not fit; before the model is changed."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the module to call in place of ``model``, changed for this axis; parameters may be on the meta device.

        Called for every axis in the order of ``MeshStrategy.axes``, before FSDP shards what is left of each parameter. A
        module whose own parameters are DTensors was divided by an axis before this one: leave it as it is.
        """
        return model

    def meshes(self) -> Mapping[nn.Module, DeviceMesh]:
        """Return the modules that FSDP must shard over another mesh than all the rest; called after ``apply``."""
        return {}

    def check_optimizer(self, wrapper: OptimWrapper) -> None:
        """Raise StrategyError if an optimizer, which is built, cannot train what this axis has made of the parameters."""

    def finish(self, model: nn.Module, optim: Optim | None) -> None:
        """Prepare what needs the wrapped model and the built optimizer; called at the end of setup, a collective."""

    def stage(self) -> int | None:
        """Return which part of the model is called now, where that is not all that this process has."""
        return None

    def split(self, batch: Any) -> Any:
        """Return this process's part of a batch."""
        return batch

    def check_window(self, window: Sequence[Any], step: TrainStep, inner: CheckWindow) -> None:
        """Raise StrategyError for a model that cannot be trained, see ``check_window`` of strategies/parts; ``inner``: that of the others."""
        inner(window, step)

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """Run forward and backward of an update, see ``Strategy.run_window``; ``inner`` is that of the other axes."""
        return inner(window, step)

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """Return the predictions for a batch, see ``Strategy.evaluate``; ``inner`` is that of the other axes."""
        return inner(batch, step)

    def own_random_numbers(self) -> AbstractContextManager[None]:
        """Return a context in which processes along this axis draw other numbers than each other, as dropout needs where they
        compute different things; see ``own_random_numbers``. Without it they draw the same: they have the same samples."""
        return own_random_numbers(self.layout.device_type, self.index)

    def prepare_whole(self, model: nn.Module) -> None:
        """Take back in a copy of the model, for ``full_weights``, what ``apply`` changed in objects that the copy shares."""

    def release(self) -> None:
        """Undo what ``apply`` did to objects that outlive the strategy; called by ``leave`` after ``apply``."""

    def described(self) -> str:
        """Return what this axis divides, in words for the table that is logged at the start; called after ``apply``."""
        return ""


# Random numbers of processes that have the same samples, and therefore equal generators.


@contextmanager
def own_random_numbers(device_type: str, index: int) -> Iterator[None]:
    """Context in which torch draws on the device by ``index``; after it, processes with equal generators draw alike again.

    What is drawn depends on the generator only, so that recomputed activations are the same. No accelerator waits. Numbers of
    the host, by which a model may skip layers, stay the same on all processes if the device is another.
    """
    generator = torch.default_generator
    if device_type != "cpu":
        module = torch.get_device_module(device_type)
        generator = module.default_generators[module.current_device()]
    with with_values():
        state = generator.get_state().numpy().tobytes()  # in the host's memory
        torch.rand((), device=device_type)  # the next context has other numbers
        after = generator.get_state()
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "big")
    generator.manual_seed(seed + index)
    try:
        yield
    finally:
        generator.set_state(after)


# Replace the forward of a module, inside of activation checkpointing if that was applied to it.


def replace_forward(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give ``module`` the forward that ``make`` returns for the one that it has; what recomputes it recomputes that."""
    before = module.__dict__.get("forward")
    if isinstance(before, functools.partial):
        module.forward = functools.partial(before.func, make(before.args[0]), *before.args[1:], **before.keywords)
    else:
        module.forward = make(module.forward)
