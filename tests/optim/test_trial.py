"""Trials of optimizers: what they find in the first updates, and in later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from flextrain.optim.trial import Samples, resumes, updates_apart, why_not_flat_shards


class Scaled(torch.optim.SGD):
    """Scales the gradient of a parameter by norms from its update ``first`` on, as after a warm-up."""

    first = 1

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
            for parameter in (each for each in group["params"] if each.grad is not None):
                if group["updates"] >= self.first:
                    parameter.grad.mul_(parameter.detach().norm() / parameter.grad.norm())
        return super().step(closure)


class ScaledLater(Scaled):
    first = 6


class Synced(torch.optim.SGD):
    """Counts outside of its state, and does something else at every tenth update, as Lookahead does."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        if self.updates % 10 == 0:
            for parameter in (each for group in self.param_groups for each in group["params"]):
                parameter.data.mul_(0.5)
        return super().step(closure)


class Finding(torch.optim.SGD):
    """Finds its step size by a sum over all parameters, as Prodigy does: from a tiny one, which grows slowly."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        size = self.param_groups[0].get("size", 1e-7)
        for each in trained:
            each.sub_(each.grad, alpha=size)
        total = sum(float(each.grad.abs().sum()) for each in trained)
        for group in self.param_groups:
            group["size"] = size * (1.0 + min(1.0, total / 2000))


def tried(kind: type[Optimizer]) -> tuple[Callable[..., Optimizer], Samples]:
    def make(groups: list[dict[str, Any]]) -> Optimizer:
        return kind(groups, lr=0.1)  # type: ignore[call-arg]

    return make, Samples.like(make([{"params": list(nn.Linear(4, 4).parameters())}]))


@pytest.mark.parametrize("kind", [Scaled, ScaledLater])
def test_what_is_computed_with_whole_parameters_is_found(kind: type[Optimizer]) -> None:
    assert "as a whole" in str(why_not_flat_shards(*tried(kind)))
    assert why_not_flat_shards(*tried(torch.optim.AdamW)) is None


def test_a_sum_over_all_parameters_is_found_behind_tiny_steps() -> None:
    assert not updates_apart(*tried(Finding))
    assert updates_apart(*tried(Scaled))


def test_a_counter_outside_of_the_state_is_found() -> None:
    assert not resumes(*tried(Synced))
    assert resumes(*tried(ScaledLater))
