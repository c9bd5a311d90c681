"""Models with an encoder and a decoder under context parallelism: both sequences are cut, and training is that of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.torch_compat.torch_private import repeating_in
from flextrain.testing import WorkerGroup

from .attention_models import Exact, build
from .cutting import same_training
from .models import LENGTH, VOCABULARY, Batch

pytestmark = pytest.mark.distributed
FULL = pytest.mark.full


def pairs(source: int, target: int, batch: Batch, seed: int) -> Batch:
    """Two sequences of different lengths, and labels that do not count: at times all of what the first process has."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = (torch.randint(3, VOCABULARY, (4, length), generator=generator) for length in (source, target))
    for row, length in enumerate(torch.randint(0, target - 2, (4,), generator=generator).tolist()):
        labels[row, : length if seed % 3 else max(length, target // 2 + 1)] = -100
    return {"input_ids": inputs, "labels": labels}


def padded(source: int, target: int, batch: Batch, seed: int) -> Batch:
    """The same with padding of the source on either side, and of the target on the right."""
    found = pairs(source, target, batch, seed)
    found |= {"attention_mask": _mask(source, seed, True), "decoder_attention_mask": _mask(target, seed + 9, False)}
    return {**found, "labels": found["labels"].masked_fill(found["decoder_attention_mask"] == 0, -100)}


def given(source: int, target: int, batch: Batch, seed: int) -> Batch:
    """The same, with what the decoder is given, which no rule makes of labels."""
    found = padded(source, target, batch, seed)
    return {**found, "decoder_input_ids": pairs(source, target, batch, seed + 50)["labels"].abs() % VOCABULARY}


def _mask(length: int, seed: int, either: bool) -> Tensor:
    mask = torch.ones(4, length, dtype=torch.long)
    counts = torch.randint(0, length - 4, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    for row, count in enumerate(counts):
        mask[row, slice(0, count) if either and row % 2 else slice(length - count, length)] = 0
    return mask


BATCHES: Mapping[str, Callable[[int, int, Batch, int], Batch]] = dict(pairs=pairs, padded=padded, given=given)


def trained(
    kind: str, change: str, lengths: tuple[int, int], options: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """In a worker: two updates on one device and under a mesh, in float64: losses, gradient norms, weights, and outputs."""
    models: dict[str, tuple[Callable[[], nn.Module], Callable[[Batch, int], Batch]]] = {
        kind: (functools.partial(build, kind, **settings), functools.partial(BATCHES[change], *lengths))
    }
    with Exact(), repeating_in(lambda: (nullcontext(), Exact())):
        same_training(kind, options, models=models, updates=2, tolerance=1e-10, without=())


def case(
    kind: str, change: str, source: int, target: int, *marks: Any, cp_kind: str, settings: Mapping[str, Any] = {}, **options: Any
) -> Any:
    name = [kind, change, str(source), str(target), cp_kind, *options, *settings]
    layout = dict(cp=2, cp_kind=cp_kind, **options)
    return pytest.param(
        layout["cp"], kind, change, (source, target), layout, settings, id="-".join(name), marks=marks
    )


KINDS = ("t5", "umt5", "bart", "mbart", "marian", "pegasus", "blenderbot")
"""Kinds that train under cp."""
DAILY = [
    case("t5", "padded", 2 * LENGTH - 2, LENGTH, cp_kind="ring"),
    case("bart", "padded", LENGTH, 2 * LENGTH - 2, cp_kind="ulysses"),
]


@pytest.mark.parametrize("world_size, kind, change, lengths, options, settings", DAILY)
def test_as_on_one_device(
    workers: Callable[[int], WorkerGroup],
    world_size: int,
    kind: str,
    change: str,
    lengths: tuple[int, int],
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    workers(world_size).run(trained, kind, change, lengths, options, settings)
