"""What context parallelism finds in batches, attention and losses and cannot do is told in one line.

Options, and models before they run, are in test_bad_input.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import MeshStrategy
from flextrain.core.base.errors import FlexTrainError
from flextrain.strategies.mesh.axis import Axis, check_pairs
from flextrain.strategies.mesh.context import Context
from flextrain.strategies.mesh.context.attention import SequenceAttention
from flextrain.strategies.mesh.context.batches import SequenceBatches, SequenceShards
from flextrain.strategies.mesh.context.context_parallel import check_of_transformers
from flextrain.strategies.mesh.context.masks import CAUSAL, BatchMasks
from flextrain.strategies.mesh.context.transformers import Interception, rule_of, shifts_labels
from flextrain.strategies.mesh.experts import ExpertParallel
from flextrain.strategies.mesh.pipeline import Pipeline
from flextrain.strategies.mesh.tensor import TensorParallel

from .models import of_transformers

Row = tuple[Callable[[], object], str]


def config(**options: Any) -> Any:
    return MeshStrategy(**options).config


# Context parallelism


def cut(batch: Any, count: int = 2, **options: Any) -> Callable[[], object]:
    def shards(length: int) -> SequenceShards:
        return SequenceShards(length, count, False)

    given: dict[str, Any] = dict(keys={}, positions="position_ids", shards=shards, index=0)
    return lambda: SequenceBatches(**{**given, **options}).cut(batch)


def keys_of(*batches: dict[str, Any], **keys: int | None) -> Callable[[], object]:
    """The check of ``cp_keys`` with the batches of the first update."""
    batch = SequenceBatches(keys=keys, positions="where", shards=lambda n: SequenceShards(n, 2, False), index=0)
    return lambda: batch.check_keys(batches)


def ids(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def attend(
    *args: Any, heads: int = 2, length: int | None = None, kind: str = "ring", **kwargs: Any
) -> Callable[[], Any]:
    """A call of scaled_dot_product_attention in a model, on one of two processes."""
    attention = SequenceAttention.__new__(SequenceAttention)
    vars(attention).update(
        kind=kind,
        count=2,
        index=0,
        calls=0,
        is_local=False,
        is_apart=False,
        length=length,
        masks=BatchMasks(),
    )
    tensors = args or (torch.zeros(1, heads, 4, 2),) * 3

    def call() -> Any:
        with Interception(attention):
            return functional.scaled_dot_product_attention(*tensors, **kwargs)

    return call


def multi_head(**kwargs: Any) -> Any:
    x = torch.zeros(1, 4, 4)
    with Interception(cast(Any, None)):
        return nn.MultiheadAttention(4, 2, batch_first=True)(x, x, x, **kwargs)


def transformers_model(kind: str = "llama", cp: int = 2, cp_kind: str = "ring", tp: int = 1, **settings: Any) -> Any:
    model = of_transformers(kind, layers=1)
    for key, value in settings.items():
        setattr(model.config, key, value)
    return lambda: check_of_transformers(model, config(cp=cp, tp=tp, plan=None), cp_kind)


def no_shift(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return logits.sum()


def loss_of(function: Any) -> Callable[[], object]:
    return lambda: shifts_labels(function, of_transformers("llama", layers=1))


def every_second(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key % 2 == 0)


def of(*kinds: type[Axis], **options: Any) -> list[Axis]:
    """Axes with these options, in no job."""
    found: list[Axis] = []
    for kind in kinds:
        axis = kind.__new__(kind)
        axis.config = SimpleNamespace(**options)  # type: ignore[assignment]
        found.append(axis)
    return found


CONTEXT: list[Row] = [
    (transformers_model("gpt2", attn_pdrop=0.2), "model.config.attn_pdrop: 0.2 is not possible with strategy.cp_kind"),
    (
        transformers_model(is_encoder_decoder=True),
        "strategy.cp: 2 is not possible for LlamaForCausalLM, no encoder and decoder of tokens, and each of two sequences",
    ),
    (
        lambda: check_of_transformers(
            cast(
                Any,
                SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: None), forward=lambda input_ids: None),
            ),
            config(cp=2),
            "ring",
        ),
        "strategy.cp: 2 is not possible for SimpleNamespace, whose forward has no position_ids and counts positions from 0",
    ),
    (
        loss_of(no_shift),
        "model: LlamaForCausalLM.loss_function does not depend on the label of each position, which cp needs",
    ),
    (
        loss_of(lambda logits: logits),
        "model: LlamaForCausalLM.loss_function cannot be called with logits and labels of each",
    ),
    (
        lambda: rule_of(every_second, None),
        "model: has a mask of its own, cp has causal and full attention, with sliding",
    ),
    (
        lambda: ids(2, 1, 8, 8) + cast(Any, BatchMasks().of(CAUSAL)),
        "model: calls add with the mask of its attention, which cp has as a rule and not as a tensor; use dp_shard or tp",
    ),
    (
        lambda: ids(2, 1, 8, 8).masked_fill(cast(Any, BatchMasks().of(CAUSAL)), 0),
        "model: calls masked_fill with the mask of its attention, which cp has as a rule and not as a tensor; use",
    ),
    *(
        (
            lambda compute=compute: compute(cast(Any, BatchMasks().of(CAUSAL))),
            f"model: calls {name} with the mask of its attention, which cp has as a rule and not as a tensor; use dp_shard or tp",
        )
        for name, compute in {
            "rsub": lambda mask: 1.0 - mask,
            "invert": lambda mask: ~mask,
            "eq": lambda mask: mask == 0,
            "lt": lambda mask: mask < 0,
            "bool": lambda mask: mask or None,
            "setitem": lambda mask: operator.setitem(mask, 0, 1),
        }.items()
    ),
    (cut((ids(2, 8),)), "batch: is tuple, cp=2 needs a dict, whose keys say what is a sequence"),
    (
        cut({"tokens": ids(2, 8), "mask": ids(2, 8)}),
        'strategy.cp_keys: names no entry of the batch, which has "tokens", "mask"; give the dimension of sequences by key, '
        'such as {"tokens": 1}',
    ),
    (
        cut({"tokens": ids(2, 8)}, keys={"tokens": 2}),
        "strategy.cp_keys.tokens: 2 is no dimension of a tensor of shape (2, 8)",
    ),
    (
        keys_of({"input_ids": ids(2, 8), "labels": ids(2, 8)}, input_idz=1),
        'strategy.cp_keys: "input_idz" is not in the batch, which has "input_ids", "labels"; did you mean "input_ids"?',
    ),
    (
        keys_of({"tokens": ids(2, 8)}, tokens=1, hint=None),
        'strategy.cp_keys: "hint" is not in the batch, which has "tokens"; if only some batches have it, let it be None in the '
        "others",
    ),
    (
        cut({"input_ids": ids(2, 9)}),
        'batch["input_ids"]: 9 positions do not divide over cp=2 processes; pad to a multiple of 2, with label -100',
    ),
    (
        cut({"input_ids": ids(2, 8), "labels": ids(2, 6)}),
        'batch["labels"]: has 6 positions and "input_ids" has 8, cp needs the same',
    ),
    (
        cut({"input_ids": ids(2, 8), "weights": ids(2, 8)}),
        'batch["weights"]: has a dimension of 8 as the sequence has; give strategy.cp_keys={"weights": dim}, or None for an',
    ),
    (
        cut({"input_ids": ids(2, 8), "attention_mask": ids(2, 1, 8, 8)}, of_transformers=True),
        'batch["attention_mask"]: has 4 dimensions, cp needs (samples, positions) with 0 for padding',
    ),
    (
        cut({"input_ids": ids(2, 8), "attention_mask": {"full_attention": ids(2, 1, 8, 8)}}, of_transformers=True),
        'batch["attention_mask"]: is dict, cp needs (samples, positions) with 0 for padding',
    ),
    (
        cut({"input_ids": ids(2, 8), "attention_mask": ids(2, 9)}, of_transformers=True),
        'batch["attention_mask"]: has 9 positions and the sequences have 8, cp needs the same',
    ),
    (
        cut({"input_ids": ids(2, 8), "use_cache": True}, of_transformers=True),
        'batch["use_cache"]: True is not possible with cp, whose processes have a shard of each cache',
    ),
    (
        cut({"input_ids": ids(2, 8), "output_attentions": True}, of_transformers=True),
        'batch["output_attentions"]: True is not possible with cp, whose attention has no weights of whole sequences',
    ),
    (cut({}), "batch: has no tensor, cp=2 needs those that are a sequence"),
    (cut({"input_ids": [[1, 2], [3, 4]]}), "batch: has no tensor, cp=2 needs those that are"),
    (cut({"input_ids": ids(8)}), "strategy.cp_keys.input_ids: 1 is no dimension of a tensor of shape (8,)"),
    (
        cut({"input_ids": ids(2, 8), "labels": ids(2)}),
        "strategy.cp_keys.labels: 1 is no dimension of a tensor of shape (2,)",
    ),
    (
        cut({"input_ids": ids(2, 8), "position_ids": ids(1, 9)}),
        'batch["position_ids"]: has 9 positions and "input_ids" has 8, cp needs the same',
    ),
    (
        cut({"input_ids": ids(2, 8), "attention_mask": ids(8)}, of_transformers=True),
        'batch["attention_mask"]: has 1 dimensions, cp needs (samples, positions) with 0 for padding',
    ),
    (
        cut({"input_ids": ids(2, 8), "attention_mask": "causal"}, of_transformers=True),
        'batch["attention_mask"]: is str, cp needs (samples, positions) with 0 for padding',
    ),
    (
        cut({"input_ids": ids(2, 8)}, loss_weight=lambda data: 0.0),
        "model.loss_weight: gave 0 for 4 targets of a process; with strategy.cp targets that do not count are -100",
    ),
    (
        attend(attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        "model: scaled_dot_product_attention: has a mask of shape (4, 4) for this process's positions only; with cp give",
    ),
    (
        attend(torch.zeros(1, 2, 4, 2), torch.zeros(1, 2, 6, 2), torch.zeros(1, 2, 6, 2)),
        "model: scaled_dot_product_attention: 4 queries and 6 keys, context parallelism needs the sequence's 4 positions",
    ),
    (
        transformers_model(rope_parameters=dict(rope_type="dynamic", factor=2.0)),
        'model.config: rotary positions of type "dynamic" depend on the length of a sequence',
    ),
    (
        attend(length=10),
        "model: scaled_dot_product_attention: 4 queries and 4 keys, context parallelism needs the sequence's 5",
    ),
    (
        attend(*(torch.zeros(1, 1, 2, 4, 2),) * 3),
        "model: scaled_dot_product_attention: queries of shape (1, 1, 2, 4, 2), cp needs (samples, heads, positions, width)",
    ),
    (
        attend(dropout_p=0.1),
        'strategy.cp_kind: "ring" has no dropout of attention, model: scaled_dot_product_attention asks for 0.1; choose',
    ),
    (
        attend(heads=3, kind="ulysses"),
        'strategy.cp_kind: "ulysses" needs a number of heads that cp=2 divides, model: scaled_dot_product_attention has 3',
    ),
    (
        multi_head,
        "model: MultiheadAttention computes its weights by hand with need_weights=True; with cp give need_weights=",
    ),
    (
        lambda: check_pairs(of(ExpertParallel, Pipeline), "cuda", "cpu:gloo,cuda:gloo"),
        "strategy.backend: gloo cannot send cuda tensors from one process to another, which strategy.pp does; leave it",
    ),
    (
        lambda: check_pairs(of(Context, cp_kind="ring"), "cuda", "cpu:gloo,cuda:gloo"),
        "strategy.backend: gloo cannot send cuda tensors from one process to another, which strategy.cp does; leave it",
    ),
]


@pytest.mark.parametrize(
    "call, message",
    CONTEXT,
    ids=range(len(CONTEXT)),
)
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        call()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "axes, device, backends",
    [
        ([Context, Pipeline], "cpu", "cpu:gloo"),
        ([Context, Pipeline], "cuda", "cpu:gloo,cuda:nccl"),
        ([TensorParallel, ExpertParallel, Context], "cuda", "cpu:gloo,cuda:gloo"),
    ],
)
def test_axes_that_a_back_end_can_serve(axes: list[type[Axis]], device: str, backends: str) -> None:
    check_pairs(of(*axes, cp_kind="ulysses"), device, backends)


def test_keys_that_may_be_absent_from_the_first_update() -> None:
    """What transformers' models may be given, positions that are counted, and what one of its batches has."""
    keys_of({"tokens": 1}, {"tokens": 1, "hint": None}, tokens=1, hint=1, token_type_ids=1, where=1)()


def test_causal_masks_of_transformers_are_known() -> None:
    def causal(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    assert rule_of(causal, None) == CAUSAL


def test_padding_of_a_transformers_model_is_not_that_of_attention_beside_it() -> None:
    masks: list[Any] = []
    attention = object.__new__(SequenceAttention)
    attention.masks, attention.is_local = (
        BatchMasks(keys=torch.tensor([[True, True, False]])),
        False,
    )  # of the batch before
    attention._attend = lambda query, key, value, mask, *_: (masks.append(mask), query)[1]  # type: ignore[method-assign,func-returns-value]
    x = torch.ones(1, 2, 3, 8)
    with Interception(attention):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert [mask.by_rule for mask in masks] == [True]
