"""ExpertParallel: the axis of MeshStrategy along which each process has some of the experts of every mixture."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ....optim.wrapper import OptimWrapper
from ...sharded_optimizers import check_divided
from ...state import Optim
from ...steps import EvalStep, TrainStep
from ..axis import Axis, Evaluate, RunWindow
from ..replaced_forward import replace_forward
from .balance import BalanceLoss
from .stacks import find_stacks
from .token_dispatch import Dispatch


class ExpertParallel(Axis):
    """Experts are divided over the processes, and tokens go to them by all-to-all; the rest of the model is as without it.

    It takes processes of ``dp_shard``, ``cp`` and ``tp``: those of a group have different tokens, or each sends some of
    the tokens that they share. FSDP shards experts over the processes that have the same ones.

    Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.
    """

    name = "ep"
    overlays = True
    fast = True

    def check(self, model: nn.Module, optim: Optim | None) -> None:
        """See Axis."""
        self._found = find_stacks(model, self.config.plan, self.size)
        self._balance = BalanceLoss(model, self.layout.averaging().group)

    def apply(self, model: nn.Module) -> nn.Module:
        """See Axis."""
        shared = [axis for axis in self.layout.sharing if self.layout.sizes[axis] > 1]
        sharing = self.layout.over(*shared) if shared else None
        scale = self._scale()
        there = set(model.modules())  # not what is on another stage of a pipeline
        self._stacks = {name: module for name, module in self._found.items() if module in there}
        for name, module in self._stacks.items():
            for key, parameter in [*module.named_parameters(recurse=False)]:
                own = distribute_tensor(parameter.detach(), self.mesh, (Shard(0),), src_data_rank=None)
                setattr(module, key, nn.Parameter(own, requires_grad=parameter.requires_grad))
            replace_forward(module, functools.partial(Dispatch, name, module, self.mesh, sharing, scale))
        return model

    def _scale(self) -> float:
        """Return the factor of an expert's gradients.

        The tokens of all processes have reached it, and FSDP averages over those that have it; all other parameters are
        averaged over the processes that have different tokens.
        """
        return self.layout.sharding(self.name).size() / self.layout.sharding().size()

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """See Axis."""
        with self._balance.used():
            return inner(window, step)

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """See Axis."""
        with self._balance.used():
            return inner(batch, step)

    def meshes(self) -> Mapping[nn.Module, DeviceMesh]:
        """See Axis."""
        return dict.fromkeys(self._stacks.values(), self.layout.sharding(self.name))

    def check_optimizer(self, wrapper: OptimWrapper) -> None:
        """See Axis."""
        check_divided(wrapper, f"ep={self.size} divides experts", "ep=1")

    def described(self) -> str:
        """See Axis."""
        counts = {int(module.num_experts) for module in self._stacks.values()}  # type: ignore[arg-type]
        experts = " or ".join(str(count // self.size) for count in sorted(counts))
        return f"{experts} of {' or '.join(map(str, sorted(counts)))} experts in each of {len(self._stacks)} mixtures"
