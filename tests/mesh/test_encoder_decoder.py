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
        labels[row, : length if row and seed % 3 else target // 2 + 1] = -100
    return {"input_ids": inputs, "labels": labels}


def padded(source: int, target: int, batch: Batch, seed: int) -> Batch:
    """The same with padding of the source on either side, and of the target on the right."""
    found = pairs(source, target, batch, seed)
    found |= {"attention_mask": _mask(source, seed), "decoder_attention_mask": _mask(target, seed + 9, target // 3)}
    return {**found, "labels": found["labels"].masked_fill(found["decoder_attention_mask"] == 0, -100)}


def given(source: int, target: int, batch: Batch, seed: int) -> Batch:
    """The same, with what the decoder is given, which no rule makes of labels."""
    found = padded(source, target, batch, seed)
    return {**found, "decoder_input_ids": pairs(source, target, batch, seed + 50)["labels"].abs() % VOCABULARY}


def _mask(length: int, seed: int, most: int | None = None) -> Tensor:
    """Padding of at most ``most`` positions on the right; None: of some samples on the left too, and of all but a few positions."""
    mask = torch.ones(4, length, dtype=torch.long)
    counts = torch.randint(0, most or length - 4, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    for row, count in enumerate(counts):
        mask[row, slice(0, count) if most is None and row % 2 else slice(length - count, length)] = 0
    return mask


def left(source: int, target: int, batch: Batch, seed: int) -> Batch:
    """Positions of the target that attend to none and count: padding on the left."""
    found = padded(source, target, batch, seed)
    found["decoder_attention_mask"][2, :3] = 0
    return {**found, "labels": pairs(source, target, batch, seed)["labels"].abs() % VOCABULARY}


def empty(source: int, target: int, batch: Batch, seed: int) -> Batch:
    """A source that is padding alone."""
    found = padded(source, target, batch, seed)
    found["attention_mask"][3] = 0
    return found


BATCHES: Mapping[str, Callable[[int, int, Batch, int], Batch]] = dict(pairs=pairs, padded=padded, given=given, left=left, empty=empty)


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
    more = [str(value if not isinstance(value, dict) else key) for key, value in {**options, **settings}.items()]
    name = [kind, change, str(source), str(target), cp_kind, *more]
    layout: dict[str, Any] = dict(dict(cp=2, cp_kind=cp_kind), **options)
    return pytest.param(
        layout["cp"] * layout.get("dp_shard", 1), kind, change, (source, target), layout, settings, id="-".join(name), marks=marks
    )


KINDS = ("t5", "umt5", "bart", "mbart", "marian", "pegasus", "blenderbot")
"""Kinds that train under cp."""
ODD, SHORT, LONG = LENGTH + 6, LENGTH // 2, 2 * LENGTH - 4
DAILY = [
    case("t5", "padded", ODD, LENGTH, cp_kind="ring"),
    case("bart", "padded", LENGTH, LONG, cp_kind="ulysses"),
]
REST = [
    *(case(kind, change, SHORT, ODD, FULL, cp_kind="ring") for kind in KINDS for change in ("pairs", "padded", "given")),
    *(case(kind, "padded", ODD, SHORT, FULL, cp_kind="ulysses") for kind in KINDS),
    *(case(kind, "given", LENGTH, LENGTH, FULL, cp_kind="auto", wrap="blocks") for kind in KINDS),
]
ALONE = [
    case(kind, change, LENGTH, ODD, FULL, cp_kind=cp_kind, settings=dict(attn_implementation=implementation))
    for kind in ("t5", "bart")
    for cp_kind in ("ring", "ulysses")
    for implementation in ("eager", "sdpa")
    for change in ("left", "empty")
]
LAYERS = dict(t5=["T5Block"], bart=["BartEncoderLayer", "BartDecoderLayer"])
REPEATED = [
    case(kind, "padded", LENGTH, ODD, FULL, cp_kind=cp_kind, activation_checkpointing=how)
    for kind in LAYERS
    for cp_kind in ("ring", "ulysses")
    for how in ("model", dict(classes=LAYERS[kind]))
]
MANY = [
    case("t5", "padded", LENGTH, LONG, FULL, cp_kind="ring", cp=4),
    case("bart", "pairs", LONG, LENGTH, FULL, cp_kind="ulysses", cp=4),
    case("bart", "padded", LONG, LENGTH, FULL, cp_kind="ring", dp_shard=2),
    case("t5", "given", LONG, LENGTH, FULL, cp_kind="ulysses", compile=dict(backend="eager")),
]


@pytest.mark.parametrize("world_size, kind, change, lengths, options, settings", [*DAILY, *REST, *ALONE, *REPEATED, *MANY])
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
