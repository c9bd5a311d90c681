"""What a mesh cannot do is told in one line, before any training: key, value, what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import MeshStrategy, OptimWrapper
from flextrain.core.errors import FlexTrainError
from flextrain.strategies.mesh.context.batches import SequenceBatches
from flextrain.strategies.mesh.context.cuttable import check_of_transformers, check_positions, check_without_cut
from flextrain.strategies.mesh.context.interception import Interception
from flextrain.strategies.mesh.context.masks import CAUSAL
from flextrain.strategies.mesh.context.of_transformers import rule_of, shifts_labels
from flextrain.strategies.mesh.context.sequence import SequenceShards
from flextrain.strategies.mesh.context.sequence_attention import SequenceAttention
from flextrain.strategies.mesh.tensor.distribute import check_styles
from flextrain.strategies.mesh.tensor.local_tensors import check_local
from flextrain.strategies.mesh.tensor.rules import match_rules
from flextrain.strategies.mesh.tensor.styles import STYLES, style_of
from flextrain.strategies.sharded_optimizers import check_divided

from .models import Plain, of_transformers

Row = tuple[Callable[[], object], str]


def config(**options: Any) -> Any:
    return MeshStrategy(**options).config


# Context parallelism


def cut(batch: Any, count: int = 2, **options: Any) -> Callable[[], object]:
    def shards(length: int) -> SequenceShards:
        return SequenceShards(length, count, False)

    given: dict[str, Any] = dict(keys={}, positions="position_ids", shards=shards, index=0)
    return lambda: SequenceBatches(**{**given, **options}).cut(batch)


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
        is_alone=False,
        is_sharp=False,
        length=length,
        keys=None,
        documents=None,
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


class Counting(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


class Stepping(nn.Module):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return {}


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


CONTEXT: list[Row] = [
    (partial(config, cp=0), "strategy.cp: 0 is not allowed, give a positive number, or -1"),
    (partial(config, cp=2, cp_kind="rings"), 'strategy.cp_kind: "rings" is not allowed'),
    (partial(config, cp_kind="ring"), "strategy.cp_kind: has no effect with strategy.cp=1; give cp, or leave it out"),
    (partial(config, cp_keys={"x": 1}), "strategy.cp_keys: has no effect with strategy.cp=1"),
    (partial(config, cp_positions=None), "strategy.cp_positions: has no effect with strategy.cp=1"),
    (partial(config, cp=2, pp=2), "strategy.pp: 2 is not possible with strategy.cp=2; give pp=1 or cp=1"),
    (
        lambda: check_positions(Counting(), "position_ids"),
        "strategy.cp_positions: Counting.forward has no parameter position_ids, and would count positions from 0 on every",
    ),
    (lambda: check_positions(Plain(), "positions"), "strategy.cp_positions: Plain.forward has no parameter positions"),
    (
        lambda: check_without_cut(Stepping(), 2),
        "model: Stepping defines its own train_step, whose loss strategy.cp cannot",
    ),
    (
        lambda: check_without_cut(nn.Sequential(nn.BatchNorm1d(4)), 2),
        "model.0.running_mean: strategy.cp=2 would keep statistics of a process's positions only; use LayerNorm",
    ),
    (
        transformers_model(cp_kind="ulysses", cp=8),
        'strategy.cp_kind: "ulysses" needs a number of heads that cp * tp = 8 divides, LlamaForCausalLM has 4; choose "ring"',
    ),
    (
        transformers_model(attention_dropout=0.1),
        'model.config.attention_dropout: 0.1 is not possible with strategy.cp_kind="ring"; choose "ulysses", or set it to 0',
    ),
    (transformers_model("gpt2", attn_pdrop=0.2), "model.config.attn_pdrop: 0.2 is not possible with strategy.cp_kind"),
    (
        transformers_model("mixtral", output_router_logits=True),
        "model.config.output_router_logits: True is not possible with strategy.cp=2, the balancing loss is no mean over",
    ),
    (
        transformers_model(is_encoder_decoder=True),
        "strategy.cp: 2 is not possible for LlamaForCausalLM, an encoder and",
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
        cut({"input_ids": ids(2, 8), "use_cache": True}, of_transformers=True),
        'batch["use_cache"]: True is not possible with cp, whose processes have a shard of each cache',
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
]


# Tensor parallelism


def styled(
    plan: dict[str, str], model: nn.Module | None = None, tp: int = 2, local: bool = False
) -> Callable[[], None]:
    """The checks of a plan, without any process."""

    def call() -> None:
        given = Plain() if model is None else model
        names = [name for name, _ in given.named_modules() if name]
        found = match_rules(plan, names, list(STYLES))
        styles = {name: style_of(style, f"strategy.plan, for {name}") for name, style in found.items()}
        check_styles(given, styles, tp)
        if local:
            check_local(given, styles, tp)

    return call


def divided(optimizer: str) -> Callable[[], None]:
    def call() -> None:
        wrapper = OptimWrapper(dict(type=optimizer, lr=0.1))
        wrapper.build(nn.Linear(8, 8, bias=False))
        check_divided(wrapper, "tp=2 divides matrices", "tp=1")

    return call


LOCAL = 'strategy.tp_kind: "local" is not possible, choose "dtensor":'
TENSOR: list[Row] = [
    (styled({"layers.*.up": "colwis"}), 'strategy.plan["layers.*.up"]: "colwis" is not allowed, choose '),
    (styled({"layers.*.upp": "colwise"}), 'strategy.plan["layers.*.upp"]: names no module of the model'),
    (
        styled({"layers.*.up": "colwise", "layers.0.*": "rowwise"}),
        'strategy.plan["layers.0.*"]: "rowwise" for layers.0.up, for which "layers.*.up" says "colwise"; give one of them',
    ),
    (
        styled({"head": "colwise:3"}),
        'strategy.plan, for head: "colwise:3" is not allowed, colwise takes no number; give "colwise"',
    ),
    (
        styled({"head": "packed_colwise:1"}),
        'strategy.plan, for head: "packed_colwise:1" is not allowed, give the number of matrices, as in "packed_colwise:3"',
    ),
    (
        styled({"head": "packed_colwise:q"}),
        'strategy.plan, for head: "packed_colwise:q" is not allowed, give the number',
    ),
    (
        styled({"head": "packed_colwise:3"}),
        "strategy.plan: model.head.weight: its 64 features are not 3 matrices that tp=2 divides; choose another style or tp",
    ),
    (
        styled({"0": "packed_rowwise"}, nn.Sequential(nn.Linear(6, 8))),
        "strategy.plan: model.0.weight: its 6 features are not 2 matrices that tp=2 divides",
    ),
    (
        lambda: MeshStrategy(tp=2, tp_kind="local", sequence_parallel=True),
        'strategy.sequence_parallel: True needs strategy.tp_kind="dtensor"',
    ),
    (lambda: MeshStrategy(tp=2, tp_kind="locale"), 'strategy.tp_kind: "locale" is not allowed'),
    (styled({"norm": "sequence"}, local=True), f"{LOCAL} norm divides sequences"),
    (
        styled({"embed": "embedding_rowwise"}, Plain(tied=True), local=True),
        f"{LOCAL} model.head.weight is shared with a module of the plan; or give head a style too",
    ),
    (
        styled({"0": "colwise"}, nn.Sequential(nn.Linear(8, 7)), local=True),
        f"{LOCAL} tp=2 does not divide the 7 features of model.0.weight",
    ),
    (divided("Adafactor"), "optim_wrapper.optimizer: Adafactor "),
    (divided("Muon"), "optim_wrapper.optimizer: Muon "),
]


@pytest.mark.parametrize(
    "call, message",
    [*CONTEXT, *TENSOR],
    ids=[*(f"context{i}" for i in range(len(CONTEXT))), *(f"tensor{i}" for i in range(len(TENSOR)))],
)
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        call()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_causal_masks_of_transformers_are_known() -> None:
    def causal(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    assert rule_of(causal, None) == CAUSAL
