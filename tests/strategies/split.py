"""A strategy whose processes hold different layers, as stages of a pipeline do, and a model that trains without a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from flextrain import FlexibleRunner, OptimWrapper, Strategy
from flextrain.core.comm.topology import DataShard, Topology


class Layer(nn.Module):
    """Has running statistics, extra state, and a buffer that comes up in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.calls, self.last = 0, torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.linear(x)).tanh()
        if self.training:
            self.calls, self.last = self.calls + 1, out.detach().flatten()[:2].clone()
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.zeros(3))
            self.late += self.calls
        return out.square().mean()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "last": self.last}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.last = state["calls"], state["last"].clone()


class Net(nn.Module):
    """Every layer has a loss of its own, so that each can be trained where it is; first and last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 5, bias=False)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        x = x.flatten(0, -2)
        losses = [layer(x) for layer in self.layers.values()]
        losses += [self.embed(x).cos().mean()] if hasattr(self, "embed") else []
        losses += [self.head(x).sigmoid().mean()] if hasattr(self, "head") else []
        return {"loss": torch.stack(losses).sum()}


class SplitStrategy(Strategy):
    """Each process keeps a part of the layers; the first has the embedding, the last the head."""

    def _arrange(self) -> Topology:
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return Topology(data=DataShard(0, 1), reports=is_last, model=dist.group.WORLD)

    def _wrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, Net)
        for i in range(4):
            if i * self.topology.world_size // 4 != self.topology.rank:
                del model.layers[str(i)]
        if self.topology.rank > 0:
            del model.embed
        if self.topology.rank < self.topology.world_size - 1:
            del model.head
        return model

    def setup(self, model: nn.Module, optim: Any = None) -> tuple[nn.Module, Any]:
        called, optim = super().setup(model, optim)
        if optim is not None:
            optim.register_step_pre_hook(self._add_tied)
        return called, optim

    def _add_tied(self, optim: OptimWrapper) -> None:
        own = next((part.weight for name in ("embed", "head") if (part := getattr(self.module, name, None))), None)
        grad = torch.zeros(5, 6) if own is None else own.grad
        dist.all_reduce(grad)


class Same(Dataset[dict[str, Tensor]]):
    """Whoever reads whatever of it gets the same."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(1))}


def make_runner(folder: Path, strategy: Any, iters: int, **changes: Any) -> FlexibleRunner:
    torch.manual_seed(0)
    return FlexibleRunner(
        model=Net(),
        work_dir=folder,
        strategy=strategy,
        train_dataloader=dict(batch_size=1, dataset=Same(), collate_fn="default_collate"),
        optim_wrapper=OptimWrapper(dict(type="AdamW", lr=0.05)),
        param_scheduler=dict(type="LinearLR", start_factor=0.5, end=6, by_epoch=False),
        train_cfg=dict(by_epoch=False, max_iters=iters),
        default_hooks=dict(checkpoint=dict(interval=iters, by_epoch=False)),
        custom_hooks=[dict(type="EMAHook", momentum=0.3, update_buffers=True)],
        randomness=dict(seed=1),
        **changes,
    )
