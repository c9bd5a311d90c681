"""TensorParallel: the axis of MeshStrategy along which each process has a part of every matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication

from ....core.errors import ConfigError
from ...fsdp.units import choose_roots
from ...state import Optim
from ...steps import EvalStep, TrainStep
from ..axis import Axis, Evaluate, RunWindow
from .attention import register_cpu_attention
from .distribute import as_local, as_replicated, distribute_model
from .rules import match_rules

STYLES = ("colwise", "rowwise")


class TensorParallel(Axis):
    """Every matrix of the plan is divided over the processes, by its rows or columns; the rest is replicated.

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
    """

    name = "tp"

    def check(self, model: nn.Module, optim: Optim | None) -> None:
        """See Axis."""
        if not isinstance(self.config.plan, Mapping):
            raise ConfigError(
                f"strategy.plan: {type(model).__name__} has none of its own, give one, such as "
                '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
            )
        self._styles = match_rules(self.config.plan, [name for name, _ in model.named_modules() if name], STYLES)

    def apply(self, model: nn.Module) -> nn.Module:
        """See Axis."""
        register_cpu_attention()
        distribute_model(model, self.mesh, self._styles)
        for root in choose_roots(model):
            root.register_forward_pre_hook(self._enter, with_kwargs=True)
            root.register_forward_hook(self._leave)
        return model

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return as_replicated(self.mesh, args), as_replicated(self.mesh, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return as_local(output)

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """See Axis; tensors that the model makes itself, such as masks, are equal on all processes."""
        with implicit_replication():
            return inner(window, step)

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """See Axis."""
        with implicit_replication():
            return inner(batch, step)
