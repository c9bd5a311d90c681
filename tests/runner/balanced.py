"""A small mixture of experts whose routers have a bias, and runs that write down its loads and biases after every update."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flextrain.runner.hooks import Hook
from flextrain.runner.hooks.expert_bias import ExpertBiasHook

from ..mesh.models import Experts, Plain, PlainBlock, sample
from ..mesh.parity import dtype_of
from .training import make_runner, whole

EXPERTS = 4
PLAN = {"layers.*.experts": "experts"}


class Router(nn.Module):
    """Chooses two experts for each token; without a bias nearly all choose the first ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, EXPERTS)
        self.expert_bias = nn.Buffer(torch.zeros(EXPERTS, dtype=torch.float32))
        with torch.no_grad():
            self.scores.bias.copy_(torch.linspace(0.5, -0.5, EXPERTS))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(tokens).sigmoid()
        ids = (scores.detach() + self.expert_bias).topk(2).indices
        return scores.gather(1, ids), ids


class Balanced(nn.Module):
    """Attention, then a mixture."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = PlainBlock(width, heads, dropout)
        self.norm, self.router, self.experts = nn.LayerNorm(width), Router(width), Experts(EXPERTS, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        flat = self.norm(x).flatten(0, 1)
        weights, ids = self.router(flat)
        return x + self.experts(flat, ids, weights).view_as(x)


class Repeating(Balanced):
    """Calls torch's checkpoint itself."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class RepeatingReentrantly(Repeating):
    use_reentrant = True


def model(block: Any = Balanced) -> nn.Module:
    torch.manual_seed(7)
    return Plain(block)


class Trace(Hook):
    """Writes down the loads of the hook, and the biases, after every update."""

    def __init__(self) -> None:
        self.loads: list[dict[str, list[int]]] = []
        self.biases: list[dict[str, list[float]]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        hook = next(hook for hook in runner.hooks if isinstance(hook, ExpertBiasHook))
        self.loads.append({name: loads.tolist() for name, loads in hook.loads.items()})
        named = (*runner.strategy.module.named_buffers(), *runner.strategy.module.named_parameters())
        self.biases.append({name: whole(bias).flatten().tolist() for name, bias in named if "_bias" in name})


def tokens(count: int, name: str = "plain") -> list[dict[str, Tensor]]:
    """Samples of a data set."""
    found = sample(name, count, 3)
    return [{key: value[i] for key, value in found.items()} for i in range(count)]


def settings(strategy: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Six updates of eight samples by default, on one device."""
    return {
        "model": model,
        "strategy": dict(strategy or dict(type="SingleDeviceStrategy", device="cpu")),
        "train_dataloader": dict(batch_size=8, dataset=tokens(24), collate_fn="default_collate"),
        "optim_wrapper": dict(optimizer=dict(type="SGD", lr=0.1)),
        "train_cfg": dict(by_epoch=True, max_epochs=2),
        "custom_hooks": [dict(type="ExpertBiasHook", update_speed=0.05)],
        **changes,
    }


Found = tuple[list[dict[str, list[int]]], list[dict[str, list[float]]]]


def trained(folder: Path, strategy: Mapping[str, Any] | None = None, **changes: Any) -> Found:
    """The loads and biases after each update of a run; in a worker, or here."""
    torch.set_num_threads(1)
    trace = Trace()
    with dtype_of(torch.float64):
        given = settings(strategy, **changes)
        given["custom_hooks"] = [*given["custom_hooks"], trace]
        runner = make_runner(folder, **given)
        runner.train()
        runner.close()
    return trace.loads, trace.biases


def joined(everyones: list[Found]) -> Found:
    """What all processes have, of which each may have other layers; the same where they have the same."""
    loads: list[dict[str, list[int]]] = [{} for _ in everyones[0][0]]
    biases: list[dict[str, list[float]]] = [{} for _ in everyones[0][1]]
    for own in everyones:
        for parts, found in ((loads, own[0]), (biases, own[1])):
            for all_of, one in zip(parts, found, strict=True):  # type: ignore[call-overload]
                for name, values in one.items():
                    assert all_of.setdefault(name, values) == values, (name, "differs between processes")
    return loads, biases


repeating = {"non-reentrant": partial(model, Repeating), "reentrant": partial(model, RepeatingReentrantly)}
