"""Models with an encoder and a decoder under context parallelism: both sequences are cut, and training is that of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import MeshStrategy
from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.core.model.token_counts import count_tokens
from flextrain.core.torch_compat.torch_private import repeating_in
from flextrain.strategies.mesh.context.batches import SequenceBatches, SequenceShards
from flextrain.strategies.mesh.context.context_parallel import check_alike, check_of_transformers
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from ..device import DEVICE
from .attention_models import Exact, build
from .cutting import adamw, same_training
from .models import LENGTH, VOCABULARY, Batch
from .parity import dtype_of

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


BATCHES: Mapping[str, Callable[[int, int, Batch, int], Batch]] = dict(
    pairs=pairs, padded=padded, given=given, left=left, empty=empty
)


def made(kind: str, *, repeats: bool = False, counts: bool = False, **settings: Any) -> nn.Module:
    """The model of a kind; with ``repeats`` it recomputes its layers by transformers' own switch, with ``counts`` each token is one."""
    model: Any = build(kind, **settings)
    if repeats:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    if counts:
        count_tokens(model)
    return model  # type: ignore[no-any-return]


def trained(
    kind: str, change: str, lengths: tuple[int, int], options: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """In a worker: two updates on one device and under a mesh, in float64: losses, gradient norms, weights, and outputs."""
    models: dict[str, tuple[Callable[[], nn.Module], Callable[[Batch, int], Batch]]] = {
        kind: (functools.partial(made, kind, **settings), functools.partial(BATCHES[change], *lengths))
    }
    with Exact(), repeating_in(lambda: (nullcontext(), Exact())):
        same_training(kind, options, models=models, updates=2, tolerance=1e-10, without=())


def case(
    kind: str,
    change: str,
    source: int,
    target: int,
    *marks: Any,
    cp_kind: str,
    settings: Mapping[str, Any] = {},
    **options: Any,
) -> Any:
    more = [str(value if not isinstance(value, dict) else key) for key, value in {**options, **settings}.items()]
    name = [kind, change, str(source), str(target), cp_kind, *more]
    layout: dict[str, Any] = dict(dict(cp=2, cp_kind=cp_kind), **options)
    return pytest.param(
        layout["cp"] * layout.get("dp_shard", 1),
        kind,
        change,
        (source, target),
        layout,
        settings,
        id="-".join(name),
        marks=marks,
    )


KINDS = ("t5", "umt5", "bart", "mbart", "marian", "pegasus", "blenderbot")
"""Kinds that train under cp."""
ODD, SHORT, LONG = LENGTH + 6, LENGTH // 2, 2 * LENGTH - 4
DAILY = [
    case("t5", "padded", ODD, LENGTH, cp_kind="ring"),
    case("bart", "padded", LENGTH, LONG, cp_kind="ulysses"),
]
REST = [
    *(
        case(kind, change, SHORT, ODD, FULL, cp_kind="ring")
        for kind in KINDS
        for change in ("pairs", "padded", "given")
        if (kind, change) != ("mbart", "padded")  # it makes no inputs of a sample without labels
    ),
    *(case(kind, "padded", ODD, SHORT, FULL, cp_kind="ulysses") for kind in KINDS),
    *(case(kind, "given", LENGTH, LENGTH, FULL, cp_kind="auto", wrap="blocks") for kind in KINDS),
]
# Torch's kernel of the CPU gives another gradient where all keys have the least number, as T5 has it.
ALONE = [
    case(kind, change, LENGTH, ODD, FULL, cp_kind=cp_kind, settings=dict(attn_implementation=implementation))
    for kind in ("t5", "bart")
    for cp_kind in ("ring", "ulysses")
    for implementation in ("eager", "sdpa")
    for change in ("left", "empty")
    if (kind, implementation, change) != ("t5", "sdpa", "empty")
]
LAYERS = dict(t5=["T5Block"], bart=["BartEncoderLayer", "BartDecoderLayer"])
REPEATED = [
    case(kind, "padded", LENGTH, ODD, FULL, cp_kind=cp_kind, activation_checkpointing=how)
    for kind in LAYERS
    for cp_kind in ("ring", "ulysses")
    for how in ("model", dict(classes=LAYERS[kind]))
] + [case(kind, "padded", LENGTH, ODD, FULL, cp_kind="ring", settings=dict(repeats=True)) for kind in LAYERS]
MANY = [
    case("t5", "padded", LENGTH, LONG, FULL, cp_kind="ring", cp=4),
    case("bart", "pairs", LONG, LENGTH, FULL, cp_kind="ulysses", cp=4),
    case("bart", "padded", LONG, LENGTH, FULL, cp_kind="ring", dp_shard=2, settings=dict(counts=True)),
    case("t5", "padded", LONG, LENGTH, FULL, cp_kind="ulysses", settings=dict(counts=True)),
    case("t5", "given", LONG, LENGTH, FULL, cp_kind="ulysses", compile=dict(backend="eager")),
]


@pytest.mark.parametrize(
    "world_size, kind, change, lengths, options, settings", [*DAILY, *REST, *ALONE, *REPEATED, *MANY]
)
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


# Dropout


def dropped(rate: float) -> list[float]:
    """In a worker: the losses of two updates with dropout, twice from the same beginning."""
    torch.set_num_threads(1)
    losses = []
    with dtype_of(torch.float64):
        for _ in range(2):
            strategy = MeshStrategy(device=DEVICE, cp=2)
            strategy.join()
            torch.manual_seed(5)
            model, optim = strategy.setup(build("t5", dropout_rate=rate), adamw(1))
            batches = [[padded(ODD, LENGTH, {}, seed)] for seed in range(2)]
            losses += train(strategy, model, optim, batches).losses  # type: ignore[arg-type]
            strategy.leave()
            dist.destroy_process_group()
    return losses


@FULL
def test_dropout(workers2: WorkerGroup) -> None:
    losses, others = workers2.run(dropped, 0.1)
    assert losses == others
    assert losses[:2] == losses[2:]
    without, _ = workers2.run(dropped, 0.0)
    assert losses[0] != pytest.approx(without[0], rel=1e-4)
    assert losses[0] == pytest.approx(without[0], rel=0.5)


# The model outside of training, and afterwards


def left_as_it_was(kind: str) -> None:
    """In a worker: outside of training the model is as on one device, and after the strategy as it was."""
    batch = padded(ODD, LENGTH, {}, 0)
    torch.manual_seed(7)
    expected = build(kind)(**batch).logits.detach()
    torch.manual_seed(7)
    model = build(kind)
    strategy = MeshStrategy(device=DEVICE, cp=2)
    strategy.join()
    called, optim = strategy.setup(model, adamw(1))
    for is_trained in (False, True):
        with torch.no_grad():
            found = called(**{key: value.to(DEVICE) for key, value in batch.items()}).logits
        if not is_trained:
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
            train(strategy, called, optim, [[batch]])  # type: ignore[arg-type]
    strategy.leave()
    dist.destroy_process_group()
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert not any(getattr(hook, "__module__", "").endswith("context.transformers") for hook in hooks)
    assert not any("compute_bias" in vars(module) for module in model.modules())


@FULL
@pytest.mark.parametrize("kind", LAYERS)
def test_a_model_is_its_own_outside_of_training_and_afterwards(workers2: WorkerGroup, kind: str) -> None:
    workers2.run(left_as_it_was, kind)


# What is refused


def of_pairs(batch: Mapping[str, Any], **keys: int) -> Callable[[], object]:
    def shards(length: int) -> SequenceShards:
        return SequenceShards(length, 2, False)

    return lambda: SequenceBatches(keys, None, shards, 0, True, decoder_inputs=lambda labels: labels.roll(1, 1)).cut(
        batch
    )


def ids(length: int) -> Tensor:
    return torch.zeros(2, length, dtype=torch.long)


WRONG: dict[str, tuple[Mapping[str, Any], str]] = {
    "odd source": (
        dict(input_ids=ids(7), labels=ids(4)),
        'batch["input_ids"]: 7 positions do not divide over cp=2 processes; pad to a multiple of 2, with 0 in attention_mask',
    ),
    "odd target": (
        dict(input_ids=ids(8), labels=ids(5)),
        'batch["labels"]: 5 positions do not divide over cp=2 processes; pad to a multiple of 2, with label -100',
    ),
    "no target": (
        dict(input_ids=ids(8)),
        'batch: has no sequence for the decoder, cp=2 needs one of "labels", "decoder_input_ids", "decoder_inputs_embeds"',
    ),
    "no source": (
        dict(labels=ids(8)),
        'batch: has no sequence for the encoder, cp=2 needs one of "input_ids", "inputs_embeds"',
    ),
    "encoded": (
        dict(input_ids=ids(8), labels=ids(4), encoder_outputs=(ids(8),)),
        'batch["encoder_outputs"]: is not possible with cp, whose processes have a shard of each sequence; give input_ids',
    ),
    "two targets": (
        dict(input_ids=ids(8), labels=ids(8), decoder_input_ids=ids(4)),
        'batch["decoder_input_ids"]: has 4 positions and "labels" has 8, cp needs the same',
    ),
    "mask of the target": (
        dict(input_ids=ids(8), labels=ids(4), attention_mask=ids(4)),
        'batch["attention_mask"]: has 4 positions and the sequences have 8, cp needs the same',
    ),
    "mask of the source": (
        dict(input_ids=ids(8), labels=ids(4), decoder_attention_mask=ids(8)),
        'batch["decoder_attention_mask"]: has 8 positions and the sequences have 4, cp needs the same',
    ),
    "unknown": (
        dict(input_ids=ids(8), labels=ids(4), weights=ids(4)),
        'batch["weights"]: has a dimension of 4 as the sequence has; give strategy.cp_keys={"weights": dim}',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_batches_that_cannot_be_cut(name: str) -> None:
    batch, message = WRONG[name]
    with pytest.raises((ConfigError, StrategyError)) as caught:
        of_pairs(batch)()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_entries_of_either_sequence() -> None:
    given = dict(input_ids=ids(8), labels=ids(4), of_source=ids(8), of_target=ids(4))
    cut: Any = of_pairs(given, of_source=1, of_target=1)()
    lengths = {key: value.shape[1] for key, value in cut.items()}
    assert lengths == dict(input_ids=4, labels=2, decoder_input_ids=2, of_source=4, of_target=2)
    assert (cut.shards.length, cut.of_encoder.length) == (4, 8)


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "tp": ("bart", {}, dict(tp=2), "strategy.tp: 2 is not possible for BartForConditionalGeneration beside cp=2"),
    "layerdrop": (
        "bart",
        dict(decoder_layerdrop=0.1),
        {},
        "model.config.decoder_layerdrop: 0.1 is not possible with strategy.cp=2, whose processes would leave out different",
    ),
    "dropout": (
        "t5",
        dict(dropout_rate=0.1),
        {},
        'model.config.dropout_rate: 0.1 is not possible with strategy.cp_kind="ring"',
    ),
    "heads": (
        "bart",
        dict(decoder_attention_heads=1),
        dict(kind="ulysses"),
        'strategy.cp_kind: "ulysses" needs a number of heads that cp * tp = 2 divides, BartForConditionalGeneration has 1',
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kind, settings, options, message = MODELS[name]
    config = SimpleNamespace(cp=2, tp=options.get("tp", 1))
    with pytest.raises(ConfigError) as caught:
        check_of_transformers(build(kind, **settings), config, options.get("kind", "ring"))
    assert str(caught.value).startswith(message)


class Around(nn.Module):
    """A module that does not take what the decoder is given."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.models[0](input_ids=input_ids, labels=labels)


def test_a_module_around_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = build("bart")
    with pytest.raises(
        ConfigError, match=r"^model: Around.forward has no parameter decoder_input_ids, which strategy.cp=2 makes"
    ):
        check_alike(Around(model), [model], 2)
    other = build("mistral")
    with pytest.raises(
        ConfigError, match=r"of whose models only some have an encoder and a decoder; use dp_shard or tp instead$"
    ):
        check_alike(Around(model, other), [model, other], 2)
    assert check_alike(model, [model], 2)
    assert not check_alike(other, [other], 2)
