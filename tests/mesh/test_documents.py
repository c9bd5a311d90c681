"""Packed documents under context parallelism, however a model is given them, are those of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import MeshStrategy, OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.strategies.mesh.context.batches import SequenceBatches, SequenceShards
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from ..device import DEVICE
from .cutting import adamw, language_loss, packed, padded, same_training, uneven
from .models import LENGTH, Batch, Plain, of_transformers, sample

FULL = pytest.mark.full


class ByPosition(nn.Module):
    """Names its inputs itself, and gives them to a model of transformers by position."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = of_transformers("llama")
        self.model.loss_function = language_loss

    def forward(self, input_ids: Tensor, where: Tensor, labels: Tensor | None = None) -> Any:
        return self.model(input_ids, None, where, labels=labels)


class Asking(nn.Module):
    """Has to be given a mask, which it may give to a model of transformers."""

    def __init__(self, uses_mask: bool) -> None:
        super().__init__()
        self.model: Any = of_transformers("llama")
        self.model.loss_function = language_loss
        self.uses_mask = uses_mask

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, labels: Tensor | None = None
    ) -> Any:
        return self.model(input_ids, attention_mask if self.uses_mask else None, position_ids, labels=labels)


def _where(batch: Batch, seed: int) -> Batch:
    batch = packed(batch, seed)
    return {"where": batch.pop("position_ids"), **batch}


def _some_masked(batch: Batch, seed: int) -> Batch:
    """Documents beside a mask are one, on one device too; the mask is of ones in every other batch."""
    masked = padded(packed(batch, seed), seed)
    return {**masked, "attention_mask": masked["attention_mask"] | seed % 2}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Batch, int], Batch]]] = {
    "by position": (ByPosition, _where),
    "mask": (functools.partial(Asking, True), _some_masked),
    "mask without use": (functools.partial(Asking, False), _some_masked),
}
RECOMPUTED = dict(activation_checkpointing=dict(classes=["LlamaForCausalLM"]))
CASES = [
    pytest.param("by position", dict(cp_kind="ring", cp_positions="where", **RECOMPUTED), id="by position-recomputed"),
    pytest.param("by position", dict(cp_kind="ulysses", cp_positions="where"), id="by position", marks=FULL),
    pytest.param("mask", dict(cp_kind="ring"), id="mask"),
    pytest.param("mask without use", dict(cp_kind="ring"), id="mask without use", marks=FULL),
]


def trained(name: str, options: dict[str, Any]) -> None:
    """In a worker: two updates on one device, and under a mesh."""
    same_training(name, dict(options, cp=2), models=MODELS, updates=2)


@pytest.mark.distributed
@pytest.mark.parametrize("name, options", CASES)
def test_as_on_one_device(workers2: WorkerGroup, name: str, options: dict[str, Any]) -> None:
    workers2.run(trained, name, options)


# A later batch


def later(kind: str) -> str:
    """In a worker: what is said of a second update that has several documents in a sequence, which the first had not."""
    torch.set_num_threads(1)
    strategy = MeshStrategy(device=DEVICE, cp=2)
    strategy.join()
    model, optim = strategy.setup(of_transformers("llama"), adamw(1))
    first = sample("llama", 4, 0)
    second = packed(first, 0)
    windows = [[first], [second]] if kind == "none before" else [[second], [first], [second]]
    message = ""
    try:
        train(strategy, model, optim, windows)  # type: ignore[arg-type]
    except StrategyError as error:
        message = str(error)
    strategy.leave()
    dist.destroy_process_group()
    return message


@pytest.mark.distributed
def test_documents_that_the_compared_batch_did_not_have(workers2: WorkerGroup) -> None:
    for message in workers2.run(later, "none before"):
        assert message.startswith(
            "batch: has several documents in a sequence, whose positions begin again, and the batch that"
        )
    assert workers2.run(later, "some before") == ["", ""]


# Where documents begin


def documents(positions: Tensor) -> Tensor | None:
    """What is found in a batch of three sequences."""
    batches = SequenceBatches(
        {}, "position_ids", lambda length: SequenceShards(length, 2, True), 1, of_transformers=True
    )
    return batches.cut({"input_ids": torch.zeros(3, LENGTH, dtype=torch.long), "position_ids": positions}).documents


def test_where_documents_begin() -> None:
    one = torch.arange(LENGTH)
    several = torch.cat(
        [torch.arange(count) for count in (4, 1, 7, 4)]
    )  # two begin at a boundary of shards, one is a token
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor([4, 1, 7, 4]))
    assert documents(one[None]) is None
    assert documents(one[None] + 5) is None
    found = documents(several[None])
    assert found is not None
    assert torch.equal(found, numbers[None])  # for all sequences
    found = documents(torch.stack([one, several, one]))
    assert found is not None
    assert torch.equal(found, torch.stack([0 * one, numbers, 0 * one]))


# Labels that do not count, in a later batch


class Regularised(Plain):
    """A term of its loss is a mean over all positions, whose labels may not count."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        logits = super().forward(input_ids, None, position_ids)
        assert isinstance(logits, Tensor)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.1 * logits.logsumexp(-1).square().mean()}


class MeanOfSamples(Plain):
    """Its loss is a mean over samples, whose own is over their labels that count."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        logits = super().forward(input_ids, None, position_ids)
        assert isinstance(logits, Tensor)
        counts = labels != -100
        found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return {"loss": -((found * counts).sum(1) / counts.sum(1)).mean()}


class OfACopy(MeanOfSamples):
    """The same of labels that are not the batch's, as on a device where forward brings them there."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        return super().forward(input_ids, labels.int().long(), position_ids)


class OfTokens(Plain):
    """Its targets are its tokens, in which no label can stand that does not count; it leaves the batch's labels alone."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        logits = super().forward(input_ids, None, position_ids)
        assert isinstance(logits, Tensor)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.clone().flatten())}


class MeanOfAll(Plain):
    """Its loss is divided by the number of all labels, whether they count or not."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        logits = super().forward(input_ids, None, position_ids)
        assert isinstance(logits, Tensor)
        found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return {"loss": -(found * (labels != -100)).mean()}


class TwoTargets(Plain):
    """Its loss is the sum of two means, over targets of their own."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None, others: Any = None) -> Any:
        logits = super().forward(input_ids, None, position_ids)
        assert isinstance(logits, Tensor)
        loss = torch.nn.functional.cross_entropy
        return {"loss": loss(logits.mT, labels) + loss(-logits.mT, others)}


def _ignoring(*rows: Sequence[int], others: Sequence[Sequence[int]] = ()) -> dict[str, Tensor]:
    """A batch of two samples without the labels at some positions of each."""
    batch = sample("plain", 2, 0)
    found = {"labels": (batch["labels"], rows), **({"others": (batch["input_ids"], others)} if others else {})}
    for key, (targets, left_out) in found.items():
        batch[key] = targets.clone()
        for row, positions in zip(batch[key], left_out, strict=True):
            row[list(positions)] = -100
    return batch


END, ENDS, UNEVEN = [-1], [0, 4], [-4, -3, -1]  # those of one process, of both, of one
SHARES: dict[str, tuple[type[nn.Module], Sequence[dict[str, Tensor]], str]] = {
    "samples": (
        MeanOfSamples,
        [_ignoring([], []), _ignoring(END, END), _ignoring(END, UNEVEN)],
        "for one sample than for another",
    ),
    "samples, not all at first": (
        MeanOfSamples,
        [_ignoring(END, END), _ignoring(UNEVEN, UNEVEN), _ignoring(END, UNEVEN)],
        "for one sample than for another",
    ),
    "samples, of a copy": (
        OfACopy,
        [_ignoring([], []), _ignoring(END, END), _ignoring(END, UNEVEN)],
        "for one sample than for another",
    ),
    "keys": (
        TwoTargets,
        [
            _ignoring(END, END, others=[END, END]),
            _ignoring(END, UNEVEN, others=[UNEVEN, END]),
            _ignoring(UNEVEN, UNEVEN, others=[END, END]),
        ],
        "for one key than for another",
    ),
    "tokens": (OfTokens, [_ignoring([], []), _ignoring(END, END)], "the model did not compare it with -100"),
    "all": (MeanOfAll, [_ignoring(ENDS, ENDS)], "and where other ones do not count"),
}


def by_shares(name: str) -> tuple[list[float], list[float], str]:
    """In a worker: losses of batches, those of one process, and what is said of the last one."""
    torch.set_num_threads(1)
    model, batches, _ = SHARES[name]
    strategy = MeshStrategy(device=DEVICE, cp=2, cp_keys={"others": 1} if model is TwoTargets else None)
    strategy.join()
    torch.manual_seed(7)
    optim = OptimWrapper(dict(type="SGD", lr=1e-9))
    built, _ = strategy.setup(model(), optim)
    found, message = [], ""
    try:
        for batch in batches:
            found += train(strategy, built, optim, [[batch]]).losses
    except StrategyError as error:
        message = str(error)
    strategy.leave()
    dist.destroy_process_group()
    torch.manual_seed(7)
    alone = model()
    return found, [float(alone(**batch)["loss"].detach()) for batch in batches], message


@pytest.mark.distributed
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_labels_that_count_are_those_that_were_compared(workers2: WorkerGroup, name: str) -> None:
    """A factor weighs the loss of a process. It is no such loss if samples, or targets of two kinds, have factors of their own."""
    for found, expected, message in workers2.run(by_shares, name):
        assert found == pytest.approx(expected[:-1], rel=1e-5)
        assert message.startswith("batch: ")
        assert SHARES[name][2] in message


def counting(model: type[nn.Module]) -> tuple[list[float], str]:
    """In a worker: losses of an update in which all labels count, and of two in which some do not; and what is said of these."""
    torch.set_num_threads(1)
    strategy = MeshStrategy(device=DEVICE, cp=2)
    strategy.join()
    built, optim = strategy.setup(model(), adamw(1))
    batch = sample("plain", 4, 0)
    losses, message = [], ""
    try:
        for each in (batch, batch, uneven(batch, 1), uneven(batch, 2)):
            losses += train(strategy, built, optim, [[each]]).losses  # type: ignore[arg-type]
    except StrategyError as error:
        message = str(error)
    strategy.leave()
    dist.destroy_process_group()
    return losses, message


class Predicts:
    """An EvalStep that gives what the model does."""

    mode = "val"

    def __init__(self, model: nn.Module) -> None:
        self.predict = lambda batch: model(**batch)

    def prepare(self, batch: Any) -> Any:
        return batch


def counting_in_evaluation(model: type[nn.Module]) -> tuple[int, str]:
    """In a worker: how many of three batches are evaluated, of which some labels of the last one do not count; and what is said of it."""
    torch.set_num_threads(1)
    strategy = MeshStrategy(device=DEVICE, cp=2)
    strategy.join()
    built, _ = strategy.setup(model(), adamw(1))
    built.eval()
    batch, step = sample("plain", 4, 0), Predicts(built)
    done, message = 0, ""
    try:
        for each in (batch, batch, uneven(batch, 1)):
            with torch.no_grad():
                strategy.evaluate(strategy.split(each), step)
            done += 1
    except StrategyError as error:
        message = str(error)
    strategy.leave()
    dist.destroy_process_group()
    return done, message


@pytest.mark.distributed
def test_labels_that_do_not_count_in_a_later_evaluation(workers2: WorkerGroup) -> None:
    for done, message in workers2.run(counting_in_evaluation, Regularised):
        assert done == 2
        assert message.startswith("batch: has targets of -100, and where other ones do not count, model")
    assert workers2.run(counting_in_evaluation, Plain) == [(3, ""), (3, "")]


@pytest.mark.distributed
def test_labels_that_do_not_count_after_some_that_all_did(workers2: WorkerGroup) -> None:
    for losses, message in workers2.run(counting, Regularised):
        assert len(losses) == 2
        assert message.startswith("batch: has targets of -100, and where other ones do not count, model")
    for losses, message in workers2.run(counting, Plain):
        assert (len(losses), message) == (4, "")
