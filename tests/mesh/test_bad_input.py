"""Bad input in one table: options, a model, and the one line that they give before any training.

What only a call inside of a model shows (a forward that cannot be cut, arguments of attention) is in test_refusals.py and
test_pipeline_refusals.py, plans that cannot be found in test_plans.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import MeshStrategy, OptimWrapper
from flextrain.core.base.errors import FlexTrainError
from flextrain.strategies.build import build_strategy
from flextrain.strategies.mesh.axis import Axis
from flextrain.strategies.mesh.config import resolved
from flextrain.strategies.mesh.experts import ExpertParallel
from flextrain.strategies.mesh.tensor import TensorParallel

from .models import Images, Plain, build, of_transformers, sample

Made = Callable[[], nn.Module]
Row = tuple[dict[str, Any], str]
ModelRow = tuple[dict[str, Any], Made, str]

PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
EXPERTS = {"layers.*.experts": "experts"}
NUMBER = "is not allowed, give a positive number"


NO_SHARDS = dict(dp_shard=1, pp=2)
# Options alone, when the strategy is made. A key "world" is the number of processes.
OPTIONS: list[Row] = [
    # Sizes
    (dict(tp=0), f"strategy.tp: 0 {NUMBER}, or -1 for the processes that are left"),
    (dict(pp=0), f"strategy.pp: 0 {NUMBER}, or -1"),
    (dict(cp=-2), f"strategy.cp: -2 {NUMBER}, or -1"),
    (dict(dp_shard=0), f"strategy.dp_shard: 0 {NUMBER}, or -1"),
    (dict(dp_replicate=0), f"strategy.dp_replicate: 0 {NUMBER}, or -1"),
    (dict(ep=0), f"strategy.ep: 0 {NUMBER} that divides dp_shard * cp * tp"),
    (dict(ep=-1), f"strategy.ep: -1 {NUMBER} that divides dp_shard * cp * tp"),
    (dict(tp=-1, dp_shard=-1), "strategy.dp_shard: -1 is given for strategy.tp too, one axis takes what is left; give the others"),
    (dict(pp=-1, tp=-1), "strategy.pp: -1 is given for strategy.tp too"),
    (dict(tp=2, dp_shard=1, world=4), "strategy: tp=2 is 2, but there are 4 processes; start 2, or give dp_shard=-1"),
    (dict(tp=4, dp_shard=1, world=2), "strategy: tp=4 is 4, but there are 2 processes; start 4, or give dp_shard=-1"),
    (dict(pp=2, dp_shard=2, tp=2, world=6), "strategy: pp=2 * dp_shard=2 * tp=2 is 8, but there are 6 processes; start 8, or give "),
    (dict(tp=3, world=4), "strategy: tp=3 needs a multiple of 3 processes, not 4; start 6"),
    (dict(pp=2, cp=-1, tp=3, world=8), "strategy.pp: 2 is not possible with strategy.cp=-1; give pp=1 or cp=1"),
    (dict(ep=3, dp_shard=4), "strategy.ep: 3 does not divide the 4 processes of dp_shard * cp * tp, which are dp_shard=4"),
    (dict(ep=2, tp=3, dp_shard=1), "strategy.ep: 2 does not divide the 3 processes of dp_shard * cp * tp, which are tp=3"),
    (dict(ep=4, dp_replicate=2, world=4), "strategy.ep: 4 does not divide the 2 processes of dp_shard * cp * tp"),
    # Names
    (dict(dp=2), 'strategy.dp: unknown key, did you mean "dp_shard"?'),
    (dict(sp=2), 'strategy.sp: unknown key, did you mean "cp"?'),
    (dict(tensor_model_parallel_size=2), 'strategy.tensor_model_parallel_size: unknown key, did you mean "tp"?'),
    (dict(expert_parallel_degree=2), 'strategy.expert_parallel_degree: unknown key, did you mean "ep"?'),
    (dict(pipeline_parallel_size=2), 'strategy.pipeline_parallel_size: unknown key, did you mean "pp"?'),
    (dict(replicate_size=2), "strategy.replicate_size: is FSDPStrategy's, give dp_replicate"),
    (dict(model_wrapper=dict(sharding_strategy="HYBRID_SHARD")), "strategy.model_wrapper.sharding_strategy: one replica for each node"),
    (dict(type="mesh:tq2"), 'strategy: "mesh:tq2" has "tq", choose dp, dp_replicate, dp_shard, pp, ep, tp or cp'),
    (dict(type="mesh:tp2xtp2"), 'strategy: "mesh:tp2xtp2" has tp twice, give one size'),
    (dict(type="mesh:tp=two"), 'strategy: "mesh:tp=two" is not allowed, write axes with their sizes, such as "mesh:dp2xtp2"'),
    (dict(type="mesh:tp2", tp=4), 'strategy.tp: 4 disagrees with type "mesh:tp2", give one of them'),
    # Options of an axis
    (dict(tp_kind="local"), "strategy.tp_kind: has no effect with strategy.tp=1; give tp, or leave it out"),
    (dict(sequence_parallel=True), "strategy.sequence_parallel: has no effect with strategy.tp=1; give tp"),
    (dict(tp=2, tp_kind="locale"), 'strategy.tp_kind: "locale" is not allowed, choose "auto", "dtensor" or "local", did you mean "local"?'),
    (dict(tp=2, tp_kind="local", sequence_parallel=True), 'strategy.sequence_parallel: True needs strategy.tp_kind="dtensor"'),
    (dict(tp=2, plan="autos"), 'strategy.plan: "autos" is not allowed, choose "auto", did you mean "auto"?'),
    (dict(tp=2, plan=[1]), 'strategy.plan: [1] is not allowed, choose "auto" or give a dict'),
    (dict(cp_kind="ring"), "strategy.cp_kind: has no effect with strategy.cp=1; give cp, or leave it out"),
    (dict(cp_keys={"x": 1}), "strategy.cp_keys: has no effect with strategy.cp=1"),
    (dict(cp_positions=None), "strategy.cp_positions: has no effect with strategy.cp=1"),
    (dict(cp=2, cp_kind="rings"), 'strategy.cp_kind: "rings" is not allowed, choose "auto", "ring" or "ulysses", did you mean "ring"?'),
    (dict(cp=2, pp=2), "strategy.pp: 2 is not possible with strategy.cp=2; give pp=1 or cp=1"),
    (dict(cp=True), "strategy.cp: True is not allowed, give an integer"),
    (dict(cp=2.0), "strategy.cp: 2.0 is not allowed, give an integer"),
    (dict(cp=2, cp_kind=None), 'strategy.cp_kind: None is not allowed, choose "auto", "ring" or "ulysses"'),
    (dict(cp=2, cp_kind="ulyses"), 'strategy.cp_kind: "ulyses" is not allowed, choose "auto", "ring" or "ulysses", did you mean "ulysses"?'),
    (dict(cp=2, cp_keys=["tokens"]), "strategy.cp_keys: ['tokens'] is not allowed, give a dict"),
    (dict(cp=2, cp_keys={"tokens": "1"}), 'strategy.cp_keys.tokens: "1" is not allowed, give an integer'),
    (dict(cp=2, cp_keys={"tokens": True}), "strategy.cp_keys.tokens: True is not allowed, give an integer"),
    (dict(cp=2, cp_positions=5), "strategy.cp_positions: 5 is not allowed, give a string"),
    (dict(cp=2, cp_position="where"), 'strategy.cp_position: unknown key, did you mean "cp_positions"?'),
    (dict(cp=2, sliding_window=4), "strategy.sliding_window: unknown key, choose "),
    (dict(cp=2, world=3), "strategy: cp=2 needs a multiple of 2 processes, not 3; start 4"),
    (dict(type="mesh:cp"), 'strategy: "mesh:cp" is not allowed, write axes with their sizes'),
    (dict(pp_schedule="gpipe"), "strategy.pp_schedule: has no meaning with pp=1, give pp, or leave it out"),
    (dict(pp_split=[1, 1]), "strategy.pp_split: has no meaning with pp=1"),
    (dict(pp_layers=["layers"]), "strategy.pp_layers: has no meaning with pp=1"),
    (dict(pp_stages_per_process=2), "strategy.pp_stages_per_process: has no meaning with pp=1"),
    (dict(pp=2, pp_schedule="1f1c"), 'strategy.pp_schedule: "1f1c" is not allowed, choose gpipe, 1f1b, interleaved_1f1b, zero_bubble or zbv, did you mean "1f1b"?'),
    (dict(pp=2, pp_split=[0, 2]), "strategy.pp_split: 0 is not allowed, every stage has 1 layer or more"),
    (dict(pp=2, pp_layers=[]), "strategy.pp_layers: is empty, name the layers"),
    (dict(pp=2, pp_stages_per_process=0), 'strategy.pp_stages_per_process: 0 is not allowed, "1f1b" has 1; give 1'),
    (dict(pp=2, pp_stages_per_process=2), 'strategy.pp_stages_per_process: 2 is not allowed, "1f1b" has 1; give 1, or pp_schedule="interleaved_1f1b"'),
    (dict(pp=2, pp_schedule="interleaved_1f1b", pp_stages_per_process=1), 'strategy.pp_stages_per_process: 1 is not allowed, "interleaved_1f1b" has 2 or'),
    (dict(pp=2, pp_schedule="zbv", pp_stages_per_process=3), 'strategy.pp_stages_per_process: 3 is not allowed, "zbv" has 2; give 2'),
    # Options that every mesh has
    (dict(tp=2, zero_optimization=dict(stage=2)), "strategy.zero_optimization: unknown key, choose "),
    # Without effect
    (dict(plan_example={"x": 1}), "strategy.plan_example: has no effect with strategy.tp=1; give tp, or leave"),
    (
        dict(NO_SHARDS, wrap="blocks", prefetch=2),
        "strategy.prefetch: has no effect with dp_replicate=1, dp_shard=1, ep",
    ),
    (dict(NO_SHARDS, reshard_after_forward=False), "strategy.reshard_after_forward: has no effect with dp_replicate=1"),
    (
        dict(NO_SHARDS, reduce_every_micro_batch=True),
        "strategy.reduce_every_micro_batch: has no effect with dp_replicate=1, dp_shard=1, ep=1, cp=1, which shard no",
    ),
    (dict(prefetch=2), 'strategy.prefetch: has no effect on a model that is one unit, give strategy.wrap="blocks"'),
    (
        dict(pp=2, pp_schedule="zbv", reshard_after_forward=True),
        'strategy.reshard_after_forward: is not possible with pp_schedule="zbv", which computes gradients of weights later',
    ),
]  # fmt: skip


class Steps(Plain):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return {}


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.right = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))


class Counts(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


def of(kind: str, **settings: Any) -> Made:
    """A model of transformers, with further settings of its configuration."""
    return lambda: of_transformers(kind, layers=1, **settings)


def convolutions() -> nn.Module:
    return Images(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)))


def mixture() -> nn.Module:
    return build("mixture")


def parametrized() -> nn.Module:
    model: Any = Plain()
    nn.utils.parametrizations.weight_norm(model.layers[0].down)
    return model  # type: ignore[no-any-return]


def apart() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(2, 2), "stray": nn.Linear(2, 2), "b": nn.Linear(2, 2)})


# Options and a model, before it is changed.
MODELS: list[ModelRow] = [
    # Rules that match nothing or overlap, unknown styles
    (dict(tp=2, plan={"blocks.*.up": "colwise"}), Plain, 'strategy.plan["blocks.*.up"]: names no module of the model, did you mean "layers.*.up"?'),
    (dict(tp=2, plan={"*.up.weight": "colwise"}), Plain, 'strategy.plan["*.up.weight"]: names no module of the model, rules are for modules, did you mean "*.up"?'),
    (dict(tp=2, plan={**PLAN, "layers.1.*": "rowwise"}), Plain, 'strategy.plan["layers.1.*"]: "rowwise" for layers.1.up, for which "layers.*.up" says "colwise"; give one of them'),
    (dict(tp=2, plan={"layers.*.up": "colwize"}), Plain, 'strategy.plan["layers.*.up"]: "colwize" is not allowed, choose '),
    (dict(tp=2, plan={"layers.*.up": 0}), Plain, 'strategy.plan["layers.*.up"]: 0 is not allowed, give the name of a style: '),
    (dict(tp=2, plan={"head": "colwise:3"}), Plain, 'strategy.plan, for head: "colwise:3" is not allowed, colwise takes no number; give "colwise"'),
    (dict(tp=2, plan={"head": "packed_colwise:1"}), Plain, 'strategy.plan, for head: "packed_colwise:1" is not allowed, give the number of matrices'),
    (dict(tp=2, plan={"head": "packed_colwise:q"}), Plain, 'strategy.plan, for head: "packed_colwise:q" is not allowed, give the number'),
    (dict(tp=2, plan={"layers.0": "colwise"}), Plain, 'strategy.plan: "colwise" for layers.0, a PlainBlock without parameters of its own; name what is in it'),
    (dict(tp=2, plan={}), Plain, 'strategy.plan: divides nothing, give styles such as "colwise" and "rowwise", or "auto"'),
    (dict(tp=2, plan=None), Plain, 'strategy.plan: None is not allowed with tp=2, give "auto", or a plan, such as'),
    # Heads and widths that do not divide
    (dict(tp=2, plan={"head": "packed_colwise:3"}), Plain, "strategy.plan: model.head.weight: its 64 features are not 3 matrices that tp=2 divides; choose another style or tp"),
    (dict(tp=3, plan=PLAN, tp_kind="local"), Plain, 'strategy.tp_kind: "local" is not possible, choose "dtensor": tp=3 does not divide the 64 features of model.layers.0.up.weight'),
    (dict(tp=2, plan=PLAN, tp_kind="local"), parametrized, 'strategy.tp_kind: "local" is not possible, choose "dtensor": model.layers.0.down has a parametrization'),
    (dict(tp=2, plan={**PLAN, "norm": "sequence"}, tp_kind="local"), Plain, 'strategy.tp_kind: "local" is not possible, choose "dtensor": norm divides sequences'),
    (dict(tp=2, plan={"0": "packed_rowwise"}), lambda: nn.Sequential(nn.Linear(6, 8)), "strategy.plan: model.0.weight: its 6 features are not 2 matrices that tp=2 divides"),
    (dict(tp=2, plan={"embed": "embedding_rowwise"}, tp_kind="local"), lambda: Plain(tied=True), 'strategy.tp_kind: "local" is not possible, choose "dtensor": model.head.weight is shared with a module of the plan; or give head a style too'),
    (dict(tp=4), of("llama"), "strategy.tp: 4 does not divide the 2 key/value heads of LlamaForCausalLM, which the model's own plan divides; choose 2, or give a plan"),
    (dict(tp=2), of("llama", intermediate_size=33), "strategy.tp: 2 does not divide 33, the size of dimension 0 of model.layers.0.mlp.gate_proj.weight"),
    (dict(tp=2), of("llama", vocab_size=63), "strategy.tp: 2 does not divide 63, the size of dimension 0 of "),
    (dict(tp=2, sequence_parallel=True), of("mixtral"), 'strategy.sequence_parallel: the plan of MixtralForCausalLM itself says "packed_colwise" for model.layers.0.mlp.experts'),
    # A model without a plan where none can be found
    (dict(tp=2), convolutions, "strategy.plan: tracing Images found no two matrices that follow each other and that tp=2 divides; give a plan"),
    (dict(tp=2), Steps, "strategy.plan: Steps defines its own train_step, which cannot be traced; give a plan, such as"),
    (dict(tp=2, plan_example={"x": 1}), Plain, "strategy.plan: Plain could not be traced with the example batch (TypeError: "),
    # Context parallelism
    (dict(cp=2), Counts, "strategy.cp_positions: Counts.forward has no parameter position_ids, and would count positions from 0 on every"),
    (dict(cp=2, cp_positions="positions"), Plain, "strategy.cp_positions: Plain.forward has no parameter positions"),
    (dict(cp=2, cp_positions="position_idz"), Plain, "strategy.cp_positions: Plain.forward has no parameter position_idz, and would count positions from 0 on every process; add it, name another one, or give None if it needs no positions, did you mean"),
    (dict(cp=2, cp_positions=""), Plain, "strategy.cp_positions: Plain.forward has no parameter '', and would"),
    (dict(cp=2), of("llama", output_attentions=True, attn_implementation="eager"), "model.config.output_attentions: True is not possible with strategy.cp=2, whose attention has"),
    (dict(cp=2), Steps, "model: Steps defines its own train_step, whose loss strategy.cp cannot weigh over the processes"),
    (dict(cp=2), lambda: nn.Sequential(nn.BatchNorm1d(4)), "model.0.running_mean: strategy.cp=2 would keep statistics of a process's positions only; use LayerNorm"),
    (dict(cp=8, cp_kind="ulysses"), of("llama"), 'strategy.cp_kind: "ulysses" needs a number of heads that cp * tp = 8 divides, LlamaForCausalLM has 4; choose "ring"'),
    (dict(cp=2, cp_kind="ring"), of("llama", attention_dropout=0.1), 'model.config.attention_dropout: 0.1 is not possible with strategy.cp_kind="ring"; choose "ulysses"'),
    (dict(cp=2), of("mixtral", output_router_logits=True), "model.config.output_router_logits: True is not possible with strategy.cp=2"),
    # Experts
    (dict(ep=2), Plain, "strategy.ep: Plain has no plan for experts, give a model with a module of stacked"),
    (dict(ep=2, plan=PLAN), mixture, 'strategy.ep: Plain has no plan for experts, give strategy.plan={"layers.*.experts": "experts"}, or leave ep out'),
    (dict(ep=2, plan={"layers.*.expert": "experts"}), mixture, 'strategy.plan["layers.*.expert"]: names no module of the model, did you mean "layers.'),
    (dict(ep=2, plan={"layers.*.router": "experts"}), mixture, 'strategy.plan["layers.*.router"]: layers.0.router is a Linear without num_experts, name the module whose'),
    (dict(ep=3, plan=EXPERTS), mixture, "strategy.ep: 3 does not divide the 4 experts of layers.0.experts, choose one of 1, 2, 4"),
    # Pipelines
    (dict(pp=2), lambda: nn.Linear(2, 2), "strategy.pp: Linear has no list of layers that follow each other; name its layers"),
    (dict(pp=2), TwoLists, 'strategy.pp: TwoLists has several chains of layers, "left", "right"; name its layers'),
    (dict(pp=4), Plain, 'strategy.pp: 4 stages need as many layers, Plain has 2 ("layers.0" to "layers.1"); give a smaller pp or pp_stages_per_process'),
    (dict(pp=2), Steps, "strategy.pp: Steps defines its own train_step, but no process of a pipeline can run it"),
    (dict(pp=2, pp_layers=["layer.0"]), Plain, 'strategy.pp_layers[0]: the model has no "layer.0", did you mean "layers.0"?'),
    (dict(pp=2, pp_layers=["norm", "norm"]), Plain, 'strategy.pp_layers[1]: "norm" is named twice'),
    (dict(pp=2, pp_layers=["layers.0", "layers.0.q"]), Plain, 'strategy.pp_layers[1]: "layers.0.q" is inside of "layers.0", which is named too'),
    (dict(pp=2, pp_layers=["a", "b"]), apart, 'strategy.pp_layers: "stray" stands between "a" and "b" and has parameters'),
    (dict(pp=2, pp_split=[1, 1, 1]), Plain, "strategy.pp_split: has 3 numbers, give one for each of the 2 stages"),
    (dict(pp=2, pp_split=[1, 2]), Plain, "strategy.pp_split: 1 + 2 is 3, but Plain has 2 layers"),
    (dict(pp=2, tp=2, plan=PLAN, pp_schedule="zbv"), lambda: Plain(layers=4), 'strategy.pp_schedule: "zbv" computes gradients of weights apart, which torch cannot with strategy.tp'),
    (dict(pp=2, wrap=["ModuleList"]), Plain, "strategy.wrap: accepts a ModuleList"),
    # Optimizers of whole matrices
    (dict(tp=2, plan=PLAN, optimizer="Adafactor"), Plain, "optim_wrapper.optimizer: Adafactor "),
]  # fmt: skip


def attempt(options: dict[str, Any], model: Made | None) -> None:
    """Check options, and a model, as far as it is done before anything is started."""
    options = dict(options)
    world, optimizer = options.pop("world", None), options.pop("optimizer", None)
    strategy: Any = build_strategy({"type": "MeshStrategy", **options})
    if world is not None:
        strategy._check_world(world)
    if model is not None:
        check_model(strategy, model(), optimizer)


def check_model(strategy: MeshStrategy, model: nn.Module, optimizer: str | None) -> None:
    """What the strategy's axes check before training, as if there were their processes."""
    given = {**strategy._sizes(), **strategy._overlays()}
    world = math.prod(abs(size) for axis, size in given.items() if axis not in strategy._overlays())
    sizes = resolved(strategy._sizes(), world)
    alone: Any = SimpleNamespace(count=1, group=None)
    layout: Any = SimpleNamespace(
        sizes=sizes,
        overlays=strategy._overlays(),
        index=dict.fromkeys(given, 0),
        device_type="cpu",
        averaging=lambda: alone,
    )
    for kind in strategy.axes:
        if given[kind.name] > 1:
            axis = kind(strategy.config, layout)
            axis.example = lambda: sample("convolutions" if isinstance(model, Images) else "plain", 2, 0)
            axis.check(model, None)
            if optimizer is not None:
                wrapper = OptimWrapper(dict(type=optimizer, lr=0.1))
                wrapper.build(nn.Linear(8, 8, bias=False))
                axis.check_optimizer(wrapper)


ROWS = [*((options, None, message) for options, message in OPTIONS), *MODELS]


@pytest.mark.parametrize("options, model, message", ROWS, ids=[f"{n}-{row[2][:50]}" for n, row in enumerate(ROWS)])
def test_one_line_before_training(
    options: dict[str, Any], model: Made | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FlexTrainError) as caught:
        attempt(options, model)
    found = str(caught.value)
    assert found.startswith(message)
    assert re.match(r"(strategy|model|optim_wrapper)[.:\[, ]", found), "the key comes first"
    assert "\n" not in found


@pytest.mark.parametrize("axis", [TensorParallel, ExpertParallel])
def test_a_torch_that_cannot_divide_parameters(axis: type[Axis], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    name = axis.name
    layout: Any = SimpleNamespace(sizes={name: 2}, overlays={name: 2}, index={name: 0})
    with pytest.raises(FlexTrainError) as caught:
        axis(MeshStrategy(**{name: 2}).config, layout).apply(Plain())
    assert str(caught.value) == (
        f"strategy.{name}: needs torch 2.7 or newer, 2.6.0 is installed; install it, or leave {name} out"
    )


def test_the_table_is_long() -> None:
    assert len({message for _, _, message in ROWS}) == len(ROWS) >= 60


@pytest.mark.parametrize(
    "options",
    [
        dict(tp=1, tp_kind="auto", sequence_parallel=False, plan="auto", prefetch=None),  # as if they were left out
        dict(plan={"a": "colwise"}),  # says what the model is like, for every size
        dict(pp=2, wrap="blocks", prefetch=2),  # the processes that are left may shard
        dict(NO_SHARDS, wrap="blocks", prefetch=2, mixed_precision=dict(param_dtype="bfloat16")),
        dict(dp_shard=1, tp=4, ep=2, wrap="blocks", prefetch=2),  # experts may be sharded
    ],
)
def test_taken(options: dict[str, Any]) -> None:
    MeshStrategy(**options)
