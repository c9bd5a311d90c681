"""Models of transformers by their own plan: sequence parallelism, and a loss of logits that no process has all of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flextrain import AmpOptimWrapper, OptimWrapper, SingleDeviceStrategy
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.model.token_counts import count_tokens
from flextrain.core.torch_compat.torch_private import tree_flatten
from flextrain.runner.loops.step import Stepper
from flextrain.strategies.mesh.tensor.operations import backward_within
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone, train
from flextrain.testing.sessions import whole_model

from ..device import DEVICE
from .parity import dtype_of

pytestmark = pytest.mark.distributed

TP = dict(type="MeshStrategy", tp=2)
SEQUENCE = dict(TP, sequence_parallel=True)
BLOCKS = dict(dp_shard=2, wrap="blocks")
ODD = 15  # positions
SMALL = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": dict(final_logit_softcapping=5.0, attn_logit_softcapping=10.0, query_pre_attn_scalar=8, sliding_window=8),
    "gemma3_text": dict(sliding_window=8),
    "cohere": dict(logit_scale=0.3),
    "granite": dict(logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5),
    "falcon": dict(head_dim=None, num_key_value_heads=None, multi_query=False, parallel_attn=False, alibi=False),
}
OTHERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3", "olmo2", "gpt_neox", "stablelm", "starcoder2")


class InFloat64(TorchFunctionMode):
    """Context in which models of transformers compute in float64 what they cast to float32: norms, softmax and the loss."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.backward:
            return backward_within(self, *args, **kwargs)
        if function is Tensor.float:
            return args[0].double()
        if function in (Tensor.to, Tensor.type, functional.softmax, torch.softmax):
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def made(family: str, **options: Any) -> Any:
    import transformers

    given = {**SMALL, **FAMILIES.get(family, {}), **options}
    config = transformers.AutoConfig.for_model(
        family, **{name: value for name, value in given.items() if value is not None}
    )
    torch.manual_seed(7)
    chosen = {"gemma2": {"attn_implementation": "eager"}, "mixtral": {"experts_implementation": "eager"}}.get(
        family, {}
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), **chosen)
    with torch.no_grad():  # norms and biases that differ from 1 and 0
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    count_tokens(model)
    return model


def batch(seed: int = 0, length: int = ODD) -> dict[str, Tensor]:
    """Sequences with padding on either side, and labels that do not count, not equally many in each."""
    ids = torch.randint(3, 63, (4, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, -5:], mask[2, :3] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 4:7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(
    spec: Mapping[str, Any], model: Callable[[], nn.Module], length: int = ODD
) -> tuple[Any, dict[str, Tensor]]:
    strategy: Any = STRATEGIES.build({"device": DEVICE, "timeout_s": 300, **spec}, "strategy")
    try:
        strategy.join()
        optim = OptimWrapper(
            dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=2, clip_grad=dict(max_norm=0.5)
        )
        called, wrapper = strategy.setup(model(), optim)
        with InFloat64():
            trace = train(strategy, called, wrapper, [[batch(2 * i + j, length) for j in (0, 1)] for i in range(3)])
        return trace, {name: weight.clone() for name, weight in whole_model(strategy).items()}
    finally:
        strategy.leave()


def compare(spec: Mapping[str, Any], model: Callable[[], nn.Module], length: int = ODD) -> None:
    """In a worker: train under a mesh and on one device."""
    with dtype_of(torch.float64):
        with alone():
            expected, weights = trained(dict(type=SingleDeviceStrategy), model, length)
        trace, found = trained(spec, model, length)
    same_numbers(trace.losses, expected.losses, "the loss", 1e-12)
    same_numbers(trace.grad_norms, expected.grad_norms, "the gradient norm", 1e-12)
    same_tensors(found, weights, "final weights", 1e-12)


def case(processes: int, spec: Mapping[str, Any], family: str, *marks: Any, length: int = ODD, **options: Any) -> Any:
    chosen = {name: value for name, value in spec.items() if name not in ("type", "wrap")} | options
    name = "-".join([family, *(f"{key}={value}" for key, value in chosen.items())])
    return pytest.param(processes, spec, family, length, options, marks=marks, id=name)


FULL = pytest.mark.full
RECOMPUTED = dict(activation_checkpointing=dict(classes=["LlamaDecoderLayer"]))


@pytest.mark.parametrize(
    "processes, spec, family, length, options",
    [
        case(2, TP, "gemma2"),
        case(2, SEQUENCE, "qwen3", tie_word_embeddings=True),
        *(case(2, TP, family, FULL) for family in (*OTHERS, *FAMILIES) if family not in ("gemma2", "falcon")),
        *(case(2, SEQUENCE, family, FULL) for family in (*OTHERS, *FAMILIES)),
        *(case(2, spec | RECOMPUTED, "llama", FULL) for spec in (TP, SEQUENCE)),
        *(case(4, spec | BLOCKS, "gemma2", FULL) for spec in (TP, SEQUENCE)),
        *(case(4, spec | dict(dp_replicate=2, dp_shard=1), "gemma3_text", FULL) for spec in (TP, SEQUENCE)),
        *(case(4, spec | dict(pp=2), "gemma2", FULL) for spec in (TP, SEQUENCE)),
        *(case(4, spec | dict(cp=2), "llama", FULL, length=16) for spec in (TP, SEQUENCE)),
    ],
)
def test_trains_as_one_device(
    workers: Callable[[int], WorkerGroup],
    processes: int,
    spec: Mapping[str, Any],
    family: str,
    length: int,
    options: dict[str, Any],
) -> None:
    workers(processes).run(compare, spec, functools.partial(made, family, **options), length)


def dropped(spec: Mapping[str, Any]) -> None:
    """In a worker: the same training with and without recomputation, in which each process drops of its own heads."""
    found = []
    for more in ({}, RECOMPUTED):
        with dtype_of(torch.float64):
            torch.manual_seed(1)
            found.append(
                trained({**spec, **more}, functools.partial(made, "llama", attention_dropout=0.3))[0].grad_norms
            )
    assert found[0] == found[1]


@pytest.mark.parametrize("spec", [TP, pytest.param(SEQUENCE, marks=FULL)], ids=["plan", "sequence"])
def test_what_is_computed_again_drops_the_same(workers2: WorkerGroup, spec: Mapping[str, Any]) -> None:
    workers2.run(dropped, spec)


class Local(TorchDispatchMode):
    """Notes the shapes and dtypes of all tensors on this process that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[tuple[int, ...], torch.dtype]] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for one in tree_flatten(found)[0]:
            if isinstance(one, Tensor):
                own = one.to_local() if isinstance(one, DTensor) else one
                self.seen.add((tuple(own.shape), own.dtype))
        return found


class Reading(nn.Module):
    """A model around one of transformers, with a loss of its own of all logits."""

    def __init__(self, *, labels: bool = True) -> None:
        super().__init__()
        self.llm, self.scale, self.labels = made("llama"), nn.Parameter(torch.ones(())), labels

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.llm(input_ids, attention_mask=attention_mask, **({"labels": labels} if self.labels else {}))
        logits = found.logits[:, :-1] * self.scale
        chosen = logits.log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))
        smoothed = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
        own = found.loss if self.labels else 0.0
        return {"loss": own + smoothed + 0.1 * logits.logsumexp(-1).square().mean() - 0.1 * chosen.mean()}


@pytest.mark.parametrize("labels", [True, pytest.param(False, marks=FULL)])
def test_a_loss_of_ones_own_reads_all_logits(workers2: WorkerGroup, labels: bool) -> None:
    workers2.run(compare, TP, functools.partial(Reading, labels=labels))


def seen_in_training(spec: Mapping[str, Any]) -> tuple[set[tuple[tuple[int, ...], torch.dtype]], list[str]]:
    """In a worker: what there is of an update's tensors on this process, and what a model returns as logits.

    Those are of an update, of an evaluation, and of a call by the user.
    """
    strategy: Any = STRATEGIES.build({"device": DEVICE, "timeout_s": 300, **spec}, "strategy")
    logits: list[Any] = []
    try:
        strategy.join()
        optim = AmpOptimWrapper(dict(type="SGD", lr=0.1), dtype="bfloat16")
        model, optim = strategy.setup(made("llama", vocab_size=200, tie_word_embeddings=True), optim)
        model.register_forward_hook(lambda _, args, output: logits.append(output.logits))
        with Local() as local:
            train(strategy, model, optim, [[batch(length=16)]])
        model.eval()
        Stepper(strategy, model).evaluate(batch(), "val")
        with torch.no_grad():
            model(**batch())
            model(batch()["input_ids"])
        return local.seen, [f"{type(one).__name__} {tuple(one.shape)}" for one in logits]
    finally:
        strategy.leave()


@pytest.mark.parametrize("spec", [TP, SEQUENCE], ids=["plan", "sequence"])
def test_no_process_has_all_logits(workers2: WorkerGroup, spec: Mapping[str, Any]) -> None:
    for seen, logits in workers2.run(seen_in_training, spec):
        sizes = {torch.Size(shape).numel() for shape, _ in seen}
        assert ((4 * 16, 200 // 2), torch.float32) in seen
        assert 4 * 16 * 200 not in sizes
        positions = {shape[1] for shape, dtype in seen if shape[::2] == (4, 1) and dtype == torch.float32}  # of norms
        assert max(positions) == (8 if "sequence_parallel" in spec else 16)
        assert logits == ["DTensor (4, 16, 200)", *["Tensor (4, 15, 200)"] * 3]
