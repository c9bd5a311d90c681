"""Axis, the base class of the kinds of model parallelism that MeshStrategy combines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...optim.wrapper import OptimWrapper
from ..state import Optim
from ..steps import EvalStep, TrainStep
from .config import MeshConfig
from .layout import Layout

RunWindow = Callable[[Sequence[Any], TrainStep], dict[str, Tensor]]
CheckWindow = Callable[[Sequence[Any], TrainStep], None]
Evaluate = Callable[[Any, EvalStep], Any]


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
        reports_last: predictions are on its last process; otherwise on its first. May be a property of the object.
    """

    name: ClassVar[str]
    outer: ClassVar[bool] = False
    folds: ClassVar[bool] = False
    divides: ClassVar[bool] = False
    overlays: ClassVar[bool] = False
    fast: ClassVar[bool] = False
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
        """Raise StrategyError for a model that cannot be trained, see ``Strategy.check_window``; ``inner``: that of the others."""
        inner(window, step)

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """Run forward and backward of an update, see ``Strategy.run_window``; ``inner`` is that of the other axes."""
        return inner(window, step)

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """Return the predictions for a batch, see ``Strategy.evaluate``; ``inner`` is that of the other axes."""
        return inner(batch, step)

    def prepare_whole(self, model: nn.Module) -> None:
        """Take back in a copy of the model, for ``full_weights``, what ``apply`` changed in objects that the copy shares."""

    def release(self) -> None:
        """Undo what ``apply`` did to objects that outlive the strategy; called by ``teardown`` after ``apply``."""

    def described(self) -> str:
        """Return what this axis divides, in words for the table that is logged at the start; called after ``apply``."""
        return ""
