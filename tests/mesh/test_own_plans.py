"""Training by the plans that models of transformers bring with them, and by plans that are found, equals one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flextrain.runner.loops.step import Stepper
from flextrain.strategies.mesh.plans import own
from flextrain.strategies.mesh.plans.own import OwnPlan
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import train
from flextrain.testing.sessions import load, save, whole_model

from .models import MODELS, of_transformers, register, sample
from .parity import RECIPES, Recipe, compare, data, dtype_of, started

pytestmark = pytest.mark.distributed

MESH = dict(type="MeshStrategy")
TP = dict(MESH, tp=2)
FLOAT32_INSIDE = 1e-6
"""Mixtral's router computes in float32, also in a float64 model."""


class Wrapped(nn.Module):
    """A model of transformers in a module of one's own, which has parameters too."""

    def __init__(self) -> None:
        super().__init__()
        self.llm: Any = of_transformers("llama")
        self.weight, self.table = nn.Parameter(torch.ones(3)), nn.Linear(32, 64, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.llm(input_ids=input_ids, labels=labels)
        embedded = self.table(self.llm.get_input_embeddings()(input_ids))
        return {"loss": (out.loss * self.weight).sum() + embedded.square().mean()}


register(wrapped=Wrapped, qwen3=functools.partial(of_transformers, "qwen3"))


@pytest.mark.parametrize(
    "world_size, spec, model, recipe, tolerance",
    [
        pytest.param(2, TP, "llama_tied", "accumulate-clip", None, id="tp2-llama_tied"),
        pytest.param(2, TP, "qwen3_moe", "accumulate-clip", None, id="tp2-qwen3_moe"),
        pytest.param(2, TP, "mixtral", "adamw-clip", FLOAT32_INSIDE, id="tp2-mixtral", marks=pytest.mark.full),
        pytest.param(2, TP, "llama", "frozen", None, id="tp2-llama", marks=pytest.mark.full),
        pytest.param(
            4, dict(TP, dp_shard=2, wrap="blocks"), "llama_tied", "accumulate-clip", None, id="dp2xtp2-llama_tied",
            marks=pytest.mark.full,
        ),
        pytest.param(
            4, dict(TP, dp_shard=2, wrap="blocks"), "qwen3_moe", "accumulate-clip", None, id="dp2xtp2-qwen3_moe",
            marks=pytest.mark.full,
        ),
        pytest.param(
            4, dict(TP, pp=2), "llama_tied", "accumulate-clip", None, id="pp2xtp2-llama_tied", marks=pytest.mark.full,
        ),
        pytest.param(
            4, dict(TP, dp_replicate=2), "mixtral", "accumulate-clip", FLOAT32_INSIDE, id="hsdp2xtp2-mixtral",
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_parity(
    workers: Callable[[int], WorkerGroup],
    world_size: int,
    spec: Mapping[str, Any],
    model: str,
    recipe: str,
    tolerance: float | None,
) -> None:
    traces = workers(world_size).run(compare, spec, model, RECIPES[recipe], torch.float64, 20, tolerance)
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])


# Found plans


def hidden(name: str) -> nn.Module:
    """A model of transformers without its plan."""
    model: Any = MODELS[name]()
    model.tp_plan = None
    return model  # type: ignore[no-any-return]


register(llama_without_plan=functools.partial(hidden, "llama_tied"))
FOUND = [
    pytest.param(2, TP, "fused", id="tp2-fused"),
    pytest.param(2, TP, "vision", id="tp2-vision", marks=pytest.mark.full),
    pytest.param(2, TP, "gpt2", id="tp2-gpt2", marks=pytest.mark.full),
    pytest.param(2, TP, "llama_without_plan", id="tp2-llama_without_plan", marks=pytest.mark.full),
    pytest.param(4, dict(TP, dp_shard=2, wrap="blocks"), "gpt2", id="dp2xtp2-gpt2", marks=pytest.mark.full),
    pytest.param(4, dict(TP, dp_shard=2, wrap="blocks"), "vision", id="dp2xtp2-vision", marks=pytest.mark.full),
]


@pytest.mark.parametrize("world_size, spec, model", FOUND)
def test_parity_of_found_plans(
    workers: Callable[[int], WorkerGroup], world_size: int, spec: Mapping[str, Any], model: str
) -> None:
    traces = workers(world_size).run(_as_found, spec, model)
    assert all(trace == traces[0] for trace in traces)


def _as_found(spec: Mapping[str, Any], model: str) -> Any:
    example = functools.partial(_sample, model)
    # The bias of keys in the vision transformer has no gradient but rounding noise, which Adam scales to full steps.
    tolerance = 1e-10 if model == "vision" else None
    return compare({**spec, "plan_example": example}, model, RECIPES["accumulate-clip"], tolerance=tolerance)


def _sample(model: str) -> Any:
    return sample(model, 2, 0)


def _logits() -> list[tuple[str, ...]]:
    """In a worker: the classes of the logits that a model returns in training, in evaluation, and to the user."""
    found = []
    recipe = RECIPES["adamw"]
    with started({**TP, "plan_example": functools.partial(_sample, "gpt2")}, "gpt2", recipe) as session:
        session.model.register_forward_hook(lambda _, args, output: found.append(output.logits))
        train(session.strategy, session.model, session.optim, data("gpt2", recipe, 1))
        session.model.eval()
        Stepper(session.strategy, session.model).evaluate(_sample("gpt2"), "val")
        session.model(**_sample("gpt2"))
    return [(type(logits).__name__, *logits.shape) for logits in found]


def test_logits_of_a_found_plan_stay_divided_in_training(workers2: WorkerGroup) -> None:
    for found in workers2.run(_logits):
        # The first batch of each kind is compared: it is computed twice before.
        assert [found[2], *found[5:]] == [("DTensor", 8, 16, 64), ("Tensor", 2, 16, 64), ("Tensor", 2, 16, 64)]


# Broken on purpose


def _breaks(spec: Mapping[str, Any], model: str, patch: Any) -> None:
    with patch, pytest.raises(AssertionError):
        compare(spec, model, RECIPES["accumulate-clip"], updates=4)


def _duplicate_a_head() -> None:
    apply = OwnPlan.apply

    def broken(self: OwnPlan, model: Any, mesh: Any) -> None:
        apply(self, model, mesh)
        keys = model.model.layers[0].self_attn.k_proj.weight.detach().to_local()
        torch.distributed.broadcast(keys, 0)

    _breaks(TP, "llama", mock.patch.object(OwnPlan, "apply", broken))


def test_a_key_value_head_duplicated(workers2: WorkerGroup) -> None:
    workers2.run(_duplicate_a_head)


def _add_what_has_accumulated() -> None:
    _breaks(TP, "qwen3_moe", mock.patch.object(own, "SUMMED", "no style"))


def test_gradients_of_earlier_micro_batches_added_again(workers2: WorkerGroup) -> None:
    """So transformers does it itself."""
    workers2.run(_add_what_has_accumulated)


# Checkpoints, and models without memory


def _resumes(path: str, name: str, specs: list[Mapping[str, Any]], tolerance: float) -> None:
    """Train under each strategy in turn, each from the checkpoint of the one before; compare with one device."""
    recipe, updates = Recipe(clip=None), 3
    windows = data(name, recipe, updates * len(specs))
    torch.set_num_threads(1)
    with dtype_of(torch.float64):
        with started(dict(type="FSDPStrategy"), name, recipe) as session:
            expected = train(session.strategy, session.model, session.optim, windows)
            weights = whole_model(session.strategy)
        losses: list[float] = []
        for number, spec in enumerate(specs):
            with started(spec, name, recipe, deferred=number > 0) as session:
                if number:
                    load(session, Path(path) / str(number - 1))
                part = windows[number * updates : (number + 1) * updates]
                losses += train(session.strategy, session.model, session.optim, part).losses
                save(session, Path(path) / str(number))
                found = whole_model(session.strategy)
    same_numbers(losses, expected.losses, "the loss", tolerance)
    same_tensors(found, weights, "final weights", tolerance)


@pytest.mark.parametrize("name", ["llama_tied", pytest.param("mixtral", marks=pytest.mark.full)])
def test_resumes(workers2: WorkerGroup, tmp_path: Path, name: str) -> None:
    workers2.run(_resumes, str(tmp_path), name, [TP, dict(type="FSDPStrategy"), TP], 1e-6)


def _wrapped() -> None:
    compare(TP, "wrapped", RECIPES["accumulate-clip"], updates=4)


@pytest.mark.full
def test_a_model_inside_of_another(workers2: WorkerGroup) -> None:
    workers2.run(_wrapped)
