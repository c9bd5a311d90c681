"""Context parallelism trains as one device does, and refuses what it could only do wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import MeshStrategy, OptimWrapper, SingleDeviceStrategy
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone, shard, train, windows
from flextrain.testing.sessions import whole_model

from .models import LENGTH, VOCABULARY, Batch, of_transformers, sample
from .parity import RECIPES, TOLERANCE, compare, dtype_of

pytestmark = pytest.mark.distributed

MESH = dict(type="MeshStrategy")
PLAN = {"layers.*.[qkv]": "colwise", "layers.*.out": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
FULL = pytest.mark.full


def case(world_size: int, model: str, recipe: str = "accumulate-clip", *marks: Any, **options: Any) -> Any:
    """A training run to compare with one device."""
    name = "-".join([*(f"{key}{value}" for key, value in options.items() if key != "plan"), model, recipe])
    return pytest.param(world_size, {**MESH, **options}, model, recipe, id=name, marks=marks)


PARITY = [
    case(2, "llama", cp=2),
    case(4, "plain", cp=2, tp=2, plan=PLAN),
    case(2, "llama_tied", "frozen", FULL, cp=2, cp_kind="ring"),
    case(2, "gpt2", "adamw-clip", FULL, cp=2),
    case(2, "mixtral", "accumulate-clip", FULL, cp=2),
    case(2, "qwen3_moe", "accumulate-clip", FULL, cp=2, cp_kind="ring"),
    case(2, "plain_tied", "adamw", FULL, cp=2),
    case(2, "fused", "adamw", FULL, cp=2),
    case(4, "llama", "accumulate-clip", FULL, cp=4, cp_kind="ring"),
    case(4, "llama", "accumulate-clip", FULL, cp=4, cp_kind="ulysses"),
    case(4, "llama", "accumulate-clip", FULL, cp=2, wrap="blocks"),
    case(4, "plain", "frozen", FULL, cp=2, dp_replicate=2),
    case(4, "gpt2", "accumulate-clip", FULL, cp=2, cp_kind="ring"),
    case(
        4, "fused", "accumulate-clip", FULL, cp=2, tp=2, plan={"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
    ),
    case(8, "plain", "accumulate-clip", FULL, dp_shard=2, cp=2, tp=2, plan=PLAN, wrap="blocks"),
    case(8, "plain", "accumulate-clip", FULL, dp_shard=2, cp=4, wrap="blocks"),
]


@pytest.mark.parametrize("world_size, spec, model, recipe", PARITY)
def test_parity(
    workers: Callable[[int], WorkerGroup], world_size: int, spec: dict[str, Any], model: str, recipe: str
) -> None:
    traces = workers(world_size).run(compare, spec, model, RECIPES[recipe])
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])


# Batches that a cut may get wrong


def _uneven(batch: Batch, seed: int) -> Batch:
    """Labels that do not count: the beginning of every sample, at times all of what the first process has."""
    labels = batch["labels"].clone()
    for row, length in enumerate(torch.randint(0, LENGTH - 2, (len(labels),), generator=_generator(seed)).tolist()):
        labels[row, : length if seed % 3 else max(length, LENGTH // 2 + 1)] = -100
    return {**batch, "labels": labels}


def _padded(batch: Batch, seed: int) -> Batch:
    """Padding on the left of some samples and on the right of others."""
    mask, labels = torch.ones_like(batch["labels"]), batch["labels"].clone()
    for row, length in enumerate(torch.randint(0, LENGTH - 4, (len(labels),), generator=_generator(seed)).tolist()):
        span = slice(0, length) if row % 2 else slice(LENGTH - length, LENGTH)
        mask[row, span], labels[row, span] = 0, -100
    return {**batch, "labels": labels, "attention_mask": mask}


def _packed(batch: Batch, seed: int) -> Batch:
    """Several documents in each sequence, whose positions start again."""
    count = len(batch["labels"])
    starts = torch.randint(1, 6, (count, LENGTH), generator=_generator(seed)).cumsum(-1)
    positions = torch.stack([torch.cat([torch.arange(n) for n in _lengths(row.tolist())])[:LENGTH] for row in starts])
    return {**batch, "position_ids": positions}


def _lengths(stops: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Weighed(nn.Module):
    """A causal language model with ``loss_weight``, as users write it for one device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, mode: str = "loss", **batch: Tensor) -> Any:
        found = self.model(**{**batch, "position_ids": batch.get("position_ids")})
        return {"loss": found.loss * self.temperature} if mode == "loss" else found.logits

    def loss_weight(self, data: Batch) -> Tensor:
        return (data["labels"][:, 1:] != -100).sum()


class Encoder(nn.Module):
    """A model of torch's own layers, in which every position sees all others, without positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, functional.gelu, batch_first=True, norm_first=True, bias=False)
            for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, where: Tensor, targets: Tensor | None = None) -> Any:
        hidden = self.embed(tokens) + self.position(where)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        if targets is None:
            return logits
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def _for_encoder(batch: Batch, seed: int) -> Batch:
    labels = batch["labels"].clone()
    labels[torch.rand(labels.shape, generator=_generator(seed)) < 0.6] = -100
    where = torch.arange(LENGTH).expand(len(labels), -1)
    return {"tokens": batch["input_ids"], "where": where.contiguous(), "targets": labels}


def _llama(**options: Any) -> nn.Module:
    return of_transformers("llama", **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Batch, int], Batch]]] = {
    "uneven": (_llama, _uneven),
    "padded": (_llama, _padded),
    "packed": (_llama, _packed),
    "window": (functools.partial(of_transformers, "mixtral", sliding_window=5), _padded),
    "weighed": (lambda: Weighed(of_transformers("llama")), _uneven),
    "encoder": (Encoder, _for_encoder),
}
ENCODER = dict(cp_keys={"tokens": 1, "targets": 1, "where": 1}, cp_positions="where")


def _windows(name: str, accumulate: int) -> list[list[Batch]]:
    change = MODELS[name][1]
    return windows([change(sample("llama", 4, seed), seed) for seed in range(5)], accumulate) * 2


def _model(name: str) -> nn.Module:
    torch.manual_seed(7)
    model = MODELS[name][0]()
    loss = getattr(model, "model", model)
    if hasattr(loss, "loss_function"):  # in float64, and with labels that do not count
        loss.loss_function = _loss
    return model


def _loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _optim(accumulate: int) -> OptimWrapper:
    return OptimWrapper(dict(type="AdamW", lr=3e-3), accumulative_counts=accumulate, clip_grad=dict(max_norm=0.1))


def same_training(name: str, options: Mapping[str, Any], accumulate: int = 2) -> None:
    """In a worker: train a case on one device and under a mesh, and compare; then compare outputs of the trained model."""
    torch.set_num_threads(1)
    found = []
    with dtype_of(torch.float64):
        data = _windows(name, accumulate)
        inputs = [{k: v for k, v in batch.items() if k not in ("labels", "targets")} for batch in data[0]]
        for make in (lambda: SingleDeviceStrategy(device="cpu"), lambda: MeshStrategy(device="cpu", **options)):
            with alone() if not found else torch.enable_grad():
                strategy = make()
                strategy.setup_environment()
                model, optim = strategy.setup(_model(name), _optim(accumulate))
                trace = train(strategy, model, optim, data)  # type: ignore[arg-type]
                outputs = None if name == "weighed" else _outputs(strategy, inputs)
                found.append((trace, whole_model(strategy), outputs))
                reports = strategy.topology.reports
                index, count = strategy.topology.shard
                strategy.teardown()
                if len(found) == 2:
                    dist.destroy_process_group()
    (expected, weights, outputs), (trace, found_weights, found_outputs) = found
    same_numbers(trace.losses, expected.losses, "the loss", TOLERANCE[torch.float64])
    same_numbers(trace.grad_norms, expected.grad_norms, "the gradient norm", TOLERANCE[torch.float64])
    same_tensors(found_weights, weights, "final weights", TOLERANCE[torch.float64])
    if outputs is not None:
        assert reports == (found_outputs is not None and found_outputs[0] is not None)
        for mine, whole in zip(found_outputs or (), outputs, strict=True):
            if reports:
                torch.testing.assert_close(mine, whole.tensor_split(count)[index], rtol=1e-9, atol=1e-9)


def _outputs(strategy: Any, batches: Sequence[Batch]) -> list[Any]:
    class Logits:
        def prepare(self, batch: Batch) -> Batch:
            return batch

        def predict(self, batch: Batch) -> Any:
            result = strategy._model(**batch)
            return result if isinstance(result, Tensor) else result.logits

    strategy._model.eval()
    with torch.no_grad():
        parts = [strategy.split(shard(batch, *strategy.topology.shard)) for batch in batches]
        found = [strategy.evaluate(part, Logits()) for part in parts]
    strategy._model.train()
    return found


@pytest.mark.parametrize(
    "world_size, name, options",
    [
        pytest.param(2, "uneven", dict(cp=2, cp_kind="ring"), id="uneven-ring"),
        pytest.param(2, "packed", dict(cp=2, cp_kind="ring"), id="packed-ring"),
        pytest.param(2, "uneven", dict(cp=2), id="uneven-ulysses", marks=FULL),
        pytest.param(2, "packed", dict(cp=2), id="packed-ulysses", marks=FULL),
        pytest.param(2, "padded", dict(cp=2), id="padded-ulysses"),
        pytest.param(2, "padded", dict(cp=2, cp_kind="ring"), id="padded-ring", marks=FULL),
        pytest.param(2, "window", dict(cp=2, cp_kind="ring"), id="window-ring", marks=FULL),
        pytest.param(2, "window", dict(cp=2, cp_kind="ulysses"), id="window-ulysses", marks=FULL),
        pytest.param(2, "encoder", dict(cp=2, **ENCODER), id="encoder-ring"),
        pytest.param(2, "encoder", dict(cp=2, cp_kind="ulysses", **ENCODER), id="encoder-ulysses", marks=FULL),
        pytest.param(2, "weighed", dict(cp=2), id="weighed", marks=FULL),
        pytest.param(4, "weighed", dict(cp=2), id="weighed-dp2"),
        pytest.param(4, "packed", dict(cp=4, cp_kind="ring"), id="packed-ring4", marks=FULL),
        pytest.param(4, "window", dict(cp=4, cp_kind="ring"), id="window-ring4", marks=FULL),
    ],
)
def test_what_a_cut_may_get_wrong(
    workers: Callable[[int], WorkerGroup], world_size: int, name: str, options: dict[str, Any]
) -> None:
    workers(world_size).run(same_training, name, options)
