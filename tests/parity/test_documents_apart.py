"""Packed documents stay apart: a token of one changes nothing of another, and every label weighs the same on every process.

All tokens of every other document are changed, and then those of the rest. Every number of the documents that were not is
compared, bit by bit: logits, losses of tokens, and the gradients of the embeddings of their tokens, which no two documents share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import OptimWrapper
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.comm import collectives as dist
from flextrain.core.hugging_face.transformers_private import keep_documents_apart
from flextrain.core.model.token_counts import count_tokens
from flextrain.data import PackedTokens
from flextrain.strategies.mesh.context import masks
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone, shard, train
from flextrain.testing.sessions import whole_model

from ..device import DEVICE
from ..mesh import attention_models
from ..mesh.cutting import outputs_of
from ..mesh.models import LENGTH, VOCABULARY, Batch, of_transformers
from ..mesh.parity import dtype_of

FULL = pytest.mark.full

DOCUMENTS = (5, 3, 7, 1, 4, 8, 4, 16, 7, 9)
"""Their lengths, in four sequences; some have a part on either side of each cut, some begin at a cut, and one is a token."""
EACH = VOCABULARY // len(DOCUMENTS)
"""Tokens of each document, which no other one has."""
LABELLED = (5, 3, 5, 1, 4, 8, 4, 2, 2, 1)
"""How many of its last tokens have labels: most are in the first two sequences."""


def packed() -> tuple[Batch, Tensor]:
    """Four sequences of ``PackedTokens``, and the number of each token's document."""
    generator = torch.Generator().manual_seed(0)
    documents = [
        (at * EACH + torch.randint(0, EACH, (length,), generator=generator)).tolist()
        for at, length in enumerate(DOCUMENTS)
    ]
    data = PackedTokens(documents, LENGTH, position_ids=True)
    batch = {key: torch.stack([data[i][key] for i in range(len(data))]) for key in data[0]}
    number = batch["input_ids"] // EACH
    counts = torch.tensor(DOCUMENTS)[number] - torch.tensor(LABELLED)[number]
    batch["labels"] = torch.where(batch["position_ids"] < counts, -100, batch["labels"])
    return batch, number


def changed(batch: Batch, number: Tensor, rest: int) -> Batch:
    """The batch with other tokens in every other document; labels stay as they are."""
    ids = batch["input_ids"]
    others = number * EACH + (ids - number * EACH + 1) % EACH
    return {**batch, "input_ids": torch.where(number % 2 == rest, others, ids)}


def _llama() -> nn.Module:
    model = of_transformers("llama")
    model.config.use_cache = True  # type: ignore[union-attr]  # as in configurations of transformers by default
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "dropout": functools.partial(of_transformers, "llama", attention_dropout=0.5),
    "gemma2": functools.partial(attention_models.build, "gemma2"),
    "mistral": functools.partial(attention_models.build, "mistral"),
}
STRATEGY = dict(
    one=dict(type="SingleDeviceStrategy"),
    ddp=dict(type="DDPStrategy"),
    fsdp=dict(type="FSDPStrategy"),
    ring=dict(type="MeshStrategy", cp=2, cp_kind="ring"),
    ulysses=dict(type="MeshStrategy", cp=2, cp_kind="ulysses"),
    tp=dict(type="MeshStrategy", tp=2),
    pp=dict(type="MeshStrategy", pp=2),
)


def numbers(spec: Mapping[str, Any], name: str, batch: Batch) -> tuple[list[Tensor], int, int]:
    """Logits and losses of this process's tokens, and the embeddings after one update by their gradients; which shard it is."""
    strategy = STRATEGIES.build(dict(spec, device=DEVICE), "strategy")
    strategy.join()
    torch.manual_seed(7)
    whole = MODELS[name]()
    assert count_tokens(whole)
    model, optim = strategy.setup(whole, OptimWrapper(dict(type="SGD", lr=1.0)))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    (logits,) = outputs_of(strategy, model, [inputs])
    found = []
    index, count = strategy.topology.shard
    if logits is not None:
        logits = logits.cpu()
        targets = functional.pad(shard(batch, index, count)["labels"], (0, 1), value=-100)[:, 1:]
        losses = functional.cross_entropy(logits.mT, targets, reduction="none")
        found += [logits, losses[..., None]]
    train(strategy, model, optim, [[batch]])  # type: ignore[arg-type]
    found.append(whole_model(strategy)["model.model.embed_tokens.weight"].cpu())
    strategy.leave()
    dist.destroy_process_group()
    return found, index, count


def leaks(spec: Mapping[str, Any], name: str = "llama", by_kernels: bool = False) -> None:
    """In a worker: change tokens of some documents, and count what differs in the others.

    Args:
        by_kernels: with cp, each document is computed by a kernel, as longer ones are, and not in tiles of a mask.
    """
    torch.set_num_threads(1)
    batch, number = packed()
    with dtype_of(torch.float64), pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "SHORTEST", 1 if by_kernels else masks.SHORTEST)
        before, index, count = numbers(spec, name, batch)
        own = number.tensor_split(count)[index]
        for rest in (0, 1):
            after, *_ = numbers(spec, name, changed(batch, number, rest))
            counts = {}
            for at, (one, other) in enumerate(zip(before, after, strict=True)):
                differs = (one != other).any(-1)
                of = torch.arange(VOCABULARY) // EACH if one is before[-1] else own
                is_changed = (of % 2 == rest) & (of < len(DOCUMENTS))
                counts[at] = int(differs[~is_changed].sum()), int(differs[is_changed].sum())
            assert {of_others for of_others, _ in counts.values()} == {0}, (rest, counts)
            assert counts[len(before) - 1][1] > len(DOCUMENTS)  # their own embeddings get other gradients
            if len(before) == 3:
                assert counts[0][1] == int((own % 2 == rest).sum())  # and their own logits are others


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy, model, by_kernels",
    [
        *((strategy, "llama", strategy == "ring") for strategy in STRATEGY if strategy not in ("one", "pp")),
        pytest.param("pp", "llama", False, marks=FULL),
        pytest.param("ring", "llama", False, marks=FULL),
        pytest.param("ulysses", "llama", True, marks=FULL),
        pytest.param("ulysses", "dropout", False, marks=FULL),
        *(
            pytest.param(strategy, model, False, marks=FULL)
            for strategy in STRATEGY
            if strategy != "pp"
            for model in ("gemma2", "mistral")
        ),
    ],
)
def test_documents_stay_apart(workers2: WorkerGroup, strategy: str, model: str, by_kernels: bool) -> None:
    workers2.run(of_one_device if strategy == "one" else leaks, STRATEGY[strategy], model, by_kernels)


def of_one_device(spec: Mapping[str, Any], name: str, by_kernels: bool) -> None:
    """In a worker: the same on one device."""
    with alone():
        leaks(spec, name, by_kernels)


@pytest.mark.distributed
def test_documents_stay_apart_on_one_device(workers1: WorkerGroup) -> None:
    workers1.run(leaks, STRATEGY["one"])


def test_positions_may_be_given_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    batch, _ = packed()
    model: Any = _llama()
    keep_documents_apart(model)
    inner, ids, positions = model.model, batch["input_ids"], batch["position_ids"]
    apart = inner(input_ids=ids, position_ids=positions)[0]
    assert torch.equal(inner(ids, None, positions)[0], apart)
    assert not torch.equal(inner(ids, None, positions, use_cache=True)[0], apart)


# How much each label weighs


def weighed(spec: Mapping[str, Any]) -> None:
    """In a worker: three updates of two micro-batches, of which the second has few labels, and the same on one device."""
    torch.set_num_threads(1)
    batch, _ = packed()
    few = {**batch, "labels": torch.where(batch["position_ids"] < 12, -100, batch["labels"])}
    results = []
    with dtype_of(torch.float64):
        for own in (STRATEGY["one"], spec):
            with alone() if not results else dtype_of(torch.float64):
                strategy = STRATEGIES.build(dict(own, device=DEVICE), "strategy")
                strategy.join()
                torch.manual_seed(7)
                whole = MODELS["llama"]()
                assert count_tokens(whole)
                options = dict(accumulative_counts=2, clip_grad=dict(max_norm=1.0))
                model, optim = strategy.setup(whole, OptimWrapper(dict(type="AdamW", lr=1e-2), **options))
                inputs = {key: value for key, value in batch.items() if key != "labels"}
                outputs_of(strategy, model, [inputs])  # what has no labels decides nothing
                trace = train(strategy, model, optim, [[batch, few], [few, batch], [batch, few]])  # type: ignore[arg-type]
                outputs_of(strategy, model, [inputs])
                results.append((trace, whole_model(strategy)))
                strategy.leave()
        dist.destroy_process_group()
    (expected, weights), (trace, found) = results
    same_numbers(trace.losses, expected.losses, "the loss", 1e-10)
    same_numbers(trace.grad_norms, expected.grad_norms, "the gradient norm", 1e-10)
    same_tensors(found, weights, "final weights", 1e-10)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=FULL if name == "pp" else ()) for name in STRATEGY if name != "one"]
)
def test_every_label_weighs_the_same(workers2: WorkerGroup, strategy: str) -> None:
    workers2.run(weighed, STRATEGY[strategy])


def test_processes_have_different_numbers_of_labels() -> None:
    batch, number = packed()
    counts = (batch["labels"] != -100).sum(1)
    assert len(set(number.flatten().tolist())) == len(DOCUMENTS)
    assert counts[:2].sum() > 4 * counts[2:].sum()  # of data parallelism
    halves = (batch["labels"] != -100).view(len(counts), 2, -1).sum((0, 2))
    assert halves[0] != halves[1]  # of Ulysses
