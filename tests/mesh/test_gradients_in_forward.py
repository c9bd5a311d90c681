"""Models that ask for gradients within their forward, of what was divided over processes: adversarial inputs, saliency, penalties."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from flextrain.core.base.errors import StrategyError
from flextrain.core.torch_compat.dtensor_private import differentiates_twice
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from .models import VOCABULARY, register
from .parity import NEEDS_LAYOUTS, Recipe, compare, data, started

pytestmark = [pytest.mark.distributed, NEEDS_LAYOUTS]
TWICE = pytest.mark.skipif(not differentiates_twice(), reason="an older torch is refused, see test_tensor_operations")

PLAN = {"up": "colwise", "down": "rowwise"}
SGD = Recipe(optimizer="SGD", lr=0.1, accumulate=2, clip=None)


class Asking(nn.Module):
    """Asks for gradients from its third batch on, so that no comparison of the first sees it.

    Args:
        way: "inputs" and "backward" train on inputs that are worse by the gradient, "weights" scales the loss by a gradient's size.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls = way, 0
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x + self.down(functional.gelu(self.up(x))))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        x = self.embed(input_ids)
        loss = self.loss(x, labels)
        if self.calls <= 2:
            return {"loss": loss}
        if self.way == "weights":
            weights = [self.up.weight, self.down.bias]
            found = torch.autograd.grad(loss, weights, retain_graph=True)
            return {"loss": loss * (1 + sum(bool(each.isfinite().all()) for each in found))}
        x = x.detach().requires_grad_()
        asked = self.loss(x, labels)
        if self.way == "inputs":
            (gradient,) = torch.autograd.grad(asked, x)
        else:
            asked.backward(inputs=[x])  # type: ignore[no-untyped-call]
            assert x.grad is not None
            gradient = x.grad
        return {"loss": self.loss(self.embed(input_ids) + 0.1 * gradient.sign(), labels)}


class Penalised(Asking):
    """Differentiates the gradient of its inputs."""

    def __init__(self) -> None:
        super().__init__("penalty")

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        loss = self.loss(x, labels)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return {"loss": loss + gradient.square().sum()}


class OfTransformers(nn.Module):
    """The same of a model that has a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        sizes: Any = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        self.lm = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attn_implementation="eager", **sizes))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.lm.get_input_embeddings()(input_ids)
        loss = self.lm(inputs_embeds=x, labels=labels).loss
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return {"loss": loss + gradient.square().sum()}


WAYS = ("inputs", "backward", "weights")
register(**{f"asking_{way}": partial(Asking, way) for way in WAYS})
register(penalised=Penalised, penalised_own_plan=OfTransformers)


def parity(spec: dict[str, Any], name: str, updates: int) -> None:
    """In a worker, where this module registers its models: see ``compare``."""
    compare(spec, name, SGD, updates=updates)


@pytest.mark.parametrize("kind", ["local", "dtensor"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_asks_for_is_not_added_to_the_gradients_of_weights(
    workers2: WorkerGroup, way: str, kind: str
) -> None:
    workers2.run(parity, dict(type="MeshStrategy", tp=2, tp_kind=kind, plan=PLAN), f"asking_{way}", 4)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_of_shards_that_fsdp_gathers(workers: Callable[[int], WorkerGroup], way: str) -> None:
    workers(4).run(parity, dict(type="MeshStrategy", tp=2, dp_shard=2, tp_kind="local", plan=PLAN), f"asking_{way}", 4)


@TWICE
def test_gradients_of_gradients_are_those_of_one_device(workers2: WorkerGroup) -> None:
    plan = {**PLAN, "head": "colwise_gather_output"}
    workers2.run(parity, dict(type="MeshStrategy", tp=2, tp_kind="dtensor", plan=plan), "penalised", 2)


def refused(spec: dict[str, Any], name: str) -> str:
    """In a worker: the message of the error that training ends with."""
    with started(spec, name, SGD) as session:
        try:
            train(session.strategy, session.model, session.optim, data(name, SGD, 1))
        except StrategyError as error:
            return str(error)
    return "trained"


@TWICE
@pytest.mark.parametrize(
    "name, options, message",
    [
        ("penalised", dict(tp_kind="dtensor", plan={"head": "colwise"}), "through cross_entropy of logits of which"),
        ("penalised_own_plan", {}, "which the model's own plan computes wrongly; give strategy.plan"),
        ("penalised", dict(tp_kind="local", plan=PLAN), 'strategy.tp_kind: "local" is not possible, choose "dtensor"'),
    ],
)
def test_gradients_of_gradients_that_would_be_wrong(
    workers2: WorkerGroup, name: str, options: dict[str, Any], message: str
) -> None:
    for found in workers2.run(refused, dict(type="MeshStrategy", tp=2, **options), name):
        assert message in found
