"""A strategy whose processes hold different parameters of one copy of a model: two stages, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from flextrain import DataShard, Strategy, Topology
from flextrain.strategies.base import EvalStep, TrainStep


class TwoParts(nn.Module):
    """``first`` and ``last``, either of which may be on another process; the head's matrix is tied to the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last: Any = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        self.last[1].weight = self.first[0].weight

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        hidden = x if self.first is None else self.first(x)
        if self.last is None:
            return hidden
        logits = self.last(hidden)
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits.float(), y)}
        return {"index": index, "logits": logits, "y": y}

    def loss_weight(self, data: Any) -> int:
        return len(data["y"])


class Stages(Strategy):
    """Forward of all micro-batches, then backward of all, from stage to stage; half of all processes are first stages."""

    def _arrange(self) -> Topology:
        half = self.topology.world_size // 2
        mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("pp", "dp"))
        self._stage, part = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        self._other = (self.topology.rank + half) % self.topology.world_size
        return Topology(
            data=DataShard(part, half, mesh.get_group("dp")),
            reports=self._stage == 1,
            model=mesh.get_group("pp"),
            axes={"pp": (self._stage, 2), "dp": (part, half)},
        )

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._stage == 0:
            model.last = None
        else:
            model.first = None
        return model

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        optim.register_step_pre_hook(self._add_gradients)
        return model, optim

    def _add_gradients(self, optim: Any) -> None:
        tied = self.module.first[0].weight if self._stage == 0 else self.module.last[1].weight
        dist.all_reduce(tied.grad, group=self.topology.model)
        self.topology.data.average([p.grad for p in self.module.parameters()])

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        hidden, found = [], []
        for i, batch in enumerate(window):
            step.begin(i)
            data = step.prepare(batch)
            if self._stage == 0:
                with self.autocast():
                    hidden.append(self.module(**data))
                dist.send(hidden[-1].detach().float(), self._other)
            else:
                hidden.append(self._received(data["x"]).requires_grad_())
                found.append(step.forward({**batch, "x": hidden[-1]}))
        for i, kept in enumerate(hidden):
            if self._stage == 0:
                kept.backward(self._received(kept).to(kept.dtype))
            else:
                step.backward(found[i][0], i)
                dist.send(kept.grad, self._other)
        loss = step.mean([logs for _, logs in found])["loss"] if found else torch.zeros(())
        return {"loss": dist.all_reduce(loss, group=self.topology.model) or loss}

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        data = step.prepare(batch)
        if self._stage == 0:
            dist.send(step.predict(batch).detach(), self._other)
            return None
        return step.predict({**batch, "x": self._received(data["x"])})

    def _received(self, like: Tensor) -> Tensor:
        found = torch.empty(like.shape)
        dist.recv(found, self._other)
        return found
