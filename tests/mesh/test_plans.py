"""Plans for tensor parallelism: a model's own, and those found by tracing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from flextrain import MeshStrategy
from flextrain.core.base.errors import ConfigError
from flextrain.core.hugging_face.transformers_private import TENSOR_PARALLEL, WITH_PLANS
from flextrain.runner.data.first_batches import example_batch
from flextrain.strategies.mesh.config import MeshConfig
from flextrain.strategies.mesh.plans import check_heads_given, check_styles_given, choose_plan
from flextrain.strategies.mesh.plans.chosen import without_rowwise
from flextrain.strategies.mesh.plans.found import find_plan, with_globs
from flextrain.strategies.mesh.plans.own import OwnPlan
from flextrain.strategies.mesh.plans.tracing import trace
from flextrain.strategies.mesh.tensor.styles import STYLES
from flextrain.strategies.mesh.tensor.tensor_parallel import match_rules

from .models import build, of_transformers, sample

ATTENTION = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def found(model: nn.Module, batch: Any, tp: int = 2) -> dict[str, str]:
    """The plan that tracing finds."""
    return find_plan(model, trace(model, batch), tp)


@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "plain",
            {
                "embed": "embedding_rowwise",
                **{f"layers.*.{name}": style for name, style in ATTENTION.items()},
                "layers.*.up": "colwise",
                "layers.*.down": "rowwise",
                "head": "colwise",
            },
        ),
        (
            "fused",
            {
                "embed": "embedding_rowwise",
                "layers.*.qkv": "packed_colwise:3",
                "layers.*.out": "rowwise",
                "layers.*.mlp.0": "colwise",
                "layers.*.mlp.2": "rowwise",
                "head": "colwise",
            },
        ),
        (
            "gpt2",
            {
                "transformer.wte": "embedding_rowwise",
                "transformer.h.*.attn.c_attn": "packed_colwise:3",
                "transformer.h.*.attn.c_proj": "rowwise",
                "transformer.h.*.mlp.c_fc": "colwise",
                "transformer.h.*.mlp.c_proj": "rowwise",
                "lm_head": "colwise",
            },
        ),
        (
            "vision",
            {
                "net.encoder.layers.encoder_layer_*.self_attention": "packed_colwise:3",
                "net.encoder.layers.encoder_layer_*.self_attention.out_proj": "rowwise",
                "net.encoder.layers.encoder_layer_*.mlp.0": "colwise",
                "net.encoder.layers.encoder_layer_*.mlp.3": "rowwise",
            },
        ),
        ("convolutions", {}),
    ],
)
def test_found(name: str, expected: dict[str, str]) -> None:
    assert found(build(name), sample(name, 2, 0)) == expected


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_found_is_as_the_models_own(name: str) -> None:
    pytest.importorskip("transformers", minversion=WITH_PLANS)
    model: Any = build(name)
    styles = dict(model.tp_plan)
    assert styles.pop("lm_head") == "colwise_gather_output"  # logits stay divided where a cross entropy takes them
    table = {"model.embed_tokens": "embedding_rowwise"}  # of which the plan in transformers 5.17 says nothing
    assert found(model, sample(name, 2, 0)) == {**table, **styles, "lm_head": "colwise"}


class TwoBranches(nn.Module):
    """Two perceptrons, one gated, whose results are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)
        self.gate_up, self.down = nn.Linear(8, 48), nn.Linear(24, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        branches = torch.cat([self.first(x).relu(), self.second(x).tanh()], -1)
        x = self.norm(x + self.last(branches))
        gate, up = self.gate_up(x).chunk(2, -1)
        return {"loss": self.norm(x + self.down(functional.silu(gate) * up)).square().mean()}


class ByHand(nn.Module):
    """Attention without a function of torch, einsum, a norm by hand, and keys that several heads share."""

    def __init__(self, width: int = 16, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.head = heads, shared, width // heads
        self.q, self.k, self.v = (nn.Linear(width, n * self.head) for n in (heads, shared, shared))
        self.out, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        batch, length, width = x.shape
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        q = self.q(h).view(batch, length, self.heads, self.head).transpose(1, 2)
        k, v = (
            f(h)
            .view(batch, length, self.shared, self.head)
            .transpose(1, 2)
            .repeat_interleave(self.heads // self.shared, 1)
            for f in (self.k, self.v)
        )
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return {"loss": x.square().mean()}


class Unknown(nn.Module):
    """A pair of matrices between which an operation needs all features."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.down(self.between(self.up(x))).square().mean()}


def test_two_branches() -> None:
    expected = {"first": "colwise", "second": "colwise", "last": "packed_rowwise:2"}
    expected |= {"gate_up": "packed_colwise:2", "down": "rowwise"}
    assert found(TwoBranches(), [torch.zeros(2, 8)]) == expected


def test_attention_by_hand() -> None:
    batch = [torch.zeros(2, 4, 16)]
    assert found(ByHand(), batch) == ATTENTION
    assert found(ByHand(), batch, tp=4) == {}, "there are two heads of keys only"
    assert found(ByHand(shared=4), batch, tp=4) == ATTENTION


@pytest.mark.parametrize(
    "between, is_pair",
    [
        (torch.relu, True),
        (lambda x: functional.dropout(x) * 2 + 1, True),
        (lambda x: x.unflatten(-1, (4, 4)).softmax(-1).flatten(-2), True),
        (lambda x: x.softmax(-1), False),
        (lambda x: functional.layer_norm(x, (16,)), False),
        (lambda x: x.cumsum(-1), False),
        (lambda x: x.flip(-1), False),
        (lambda x: x.sort(-1).values, False),
        (lambda x: x[:, torch.arange(15, -1, -1)], False),
        (lambda x: x - x.mean(-1, keepdim=True), False),
        (lambda x: torch.cat([x[:, :5], x[:, 5:]], -1), False),
    ],
)
def test_what_is_between_decides(between: Callable[[Tensor], Tensor], is_pair: bool) -> None:
    expected = {"up": "colwise", "down": "rowwise"} if is_pair else {}
    assert found(Unknown(between), [torch.zeros(2, 8)]) == expected


def test_sizes_that_tp_does_not_divide_stay_whole() -> None:
    assert found(build("plain"), sample("plain", 2, 0), tp=3) == {}
    assert "layers.*.q" not in (plan := found(build("plain"), sample("plain", 2, 0), tp=8))
    assert plan["layers.*.up"] == "colwise"


def test_the_larger_pair_wins() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    assert found(_WithLoss(model), [torch.zeros(2, 4)]) == {"net.2": "colwise", "net.4": "rowwise"}


class _WithLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x).square().mean()}


class Remembers(nn.Module):
    """A model that changes in forward: a list, a dict, a buffer, a counter, and what it keeps of the longest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8)
        self.kept: Tensor | None = None
        self.calls, self.seen, self.by_length = 0, list[Tensor](), dict[int, Tensor]()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.kept = torch.arange(len(x))
        self.seen.append(x)
        self.by_length[len(x)] = x
        return {"loss": self.norm(self.down(functional.dropout(self.up(x)))).square().mean()}


def test_tracing_changes_nothing() -> None:
    model = Remembers().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, random = [*model.parameters()], torch.get_rng_state()
    assert found(model, [torch.zeros(2, 8)]) == {"up": "colwise", "down": "rowwise"}
    assert (model.calls, model.kept, model.seen, model.by_length, model.training) == (0, None, [], {}, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_without_memory_is_traced() -> None:
    with torch.device("meta"):
        model = TwoBranches()
    assert found(model, [torch.zeros(2, 8)]) == found(TwoBranches(), [torch.zeros(2, 8)])
    assert all(parameter.is_meta for parameter in model.parameters())


class Constant(nn.Module):
    """Keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.factors = nn.Linear(8, 16), nn.Linear(16, 8), torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.factors).mean()


def test_a_model_with_a_tensor_that_is_no_buffer_is_traced() -> None:
    assert found(Constant(), [torch.zeros(2, 8)]) == {"up": "colwise", "down": "rowwise"}


def test_a_model_that_needs_values_is_refused() -> None:
    model = Unknown(lambda x: x[x[:, 0] > 0])
    with pytest.raises(ConfigError) as caught:
        trace(model, [torch.zeros(2, 8)])
    assert str(caught.value).startswith("strategy.plan: Unknown could not be traced with the example batch (Dynamic")
    assert str(caught.value).endswith('give a plan, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}')
    assert "\n" not in str(caught.value)
    assert all(type(value) is Tensor for value in model.state_dict().values())


def test_globs_name_nothing_else() -> None:
    names = ["a.0.up", "a.1.up", "a.1.x.up", "b.0.1", "b.1.1"]
    assert with_globs({"a.0.up": "colwise", "a.1.up": "colwise"}, names) == {"a.0.up": "colwise", "a.1.up": "colwise"}
    assert with_globs({"b.0.1": "colwise", "b.1.1": "colwise"}, names) == {"b.*.*": "colwise"}


# Bad input


def check_heads(name: str, plan: dict[str, str], tp: int) -> None:
    model = build(name)
    styles = match_rules(plan, [each for each, _ in model.named_modules()], list(STYLES))
    check_heads_given(MeshConfig(tp=tp, plan=plan), model, styles, tp, lambda: sample(name, 2, 0))


CUT_HEADS = [
    ("plain", {"layers.*.[qkv]": "colwise"}, 3, "tp=3 does not divide the 4 heads of layers.0.q, for which it says"),
    (
        "fused",
        {"layers.*.qkv": "packed_colwise:3"},
        8,
        'the 4 heads of layers.0.qkv, for which it says "packed_colwise:3"',
    ),
    ("gpt2", {"transformer.h.*.c_attn": "packed_colwise:3"}, 8, "heads of transformer.h.0.attn.c_attn"),
    (
        "vision",
        {"*.self_attention": "packed_colwise:3"},
        4,
        "the 2 heads of net.encoder.layers.encoder_layer_0.self_attention",
    ),
    (
        "llama",
        {"*.[qkv]_proj": "colwise"},
        4,
        'the 2 heads of model.layers.0.self_attn.k_proj, for which it says "colwise"; choose 2, or leave it out',
    ),
]


@pytest.mark.parametrize("name, plan, tp, message", CUT_HEADS)
def test_a_given_plan_that_cuts_heads(name: str, plan: dict[str, str], tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^strategy\.plan: tp=") as caught:
        check_heads(name, plan, tp)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_that_a_given_plan_does_not_cut() -> None:
    check_heads("llama", {"*.q_proj": "colwise", "*.[kv]_proj": "colwise_gather_output"}, 4)
    check_heads("plain", {"layers.*.up": "colwise", "layers.*.out": "rowwise"}, 3)
    check_heads("mixture", {"layers.*.attention.[qkv]": "colwise"}, 3)  # cannot be traced


GIVE = 'give a plan, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
Row = tuple[Callable[[], object], str]


def chosen(
    model: nn.Module, example: Callable[[], Any] | None = None, tp: int = 2, **options: Any
) -> Callable[[], Any]:
    return lambda: choose_plan(MeshStrategy(tp=tp, **options).config, model, tp, example)


def rules(plan: dict[Any, Any]) -> Callable[[], Any]:
    names = [name for name, _ in build("plain").named_modules() if name]
    return lambda: match_rules(plan, names, list(STYLES))


def given(plan: dict[str, str], name: str = "plain") -> Callable[[], Any]:
    return lambda: check_styles_given(plan, build(name))


def own(kind: str, tp: int, **options: Any) -> Callable[[], Any]:
    return lambda: OwnPlan.of(of_transformers(kind, **options), tp)


class OwnStep(TwoBranches):
    """A model that trains itself."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        raise NotImplementedError


class Stream(torch.utils.data.IterableDataset[Any]):
    """Gives each sample once."""

    def __iter__(self) -> Any:
        raise NotImplementedError


def no_samples() -> Any:
    raise KeyError("image")


def of_another_style() -> nn.Module:
    """A model whose own plan has a style that transformers does not have."""
    model: Any = of_transformers("llama", layers=1)
    model._tp_plan["model.layers.*.mlp"] = "diagonal"
    return model


ROWS: list[Row] = [
    (
        rules({"blocks.*.up": "colwise"}),
        'strategy.plan["blocks.*.up"]: names no module of the model, did you mean "layers.*.up"?',
    ),
    (
        rules({"model.layers.*.up": "colwise"}),
        'strategy.plan["model.layers.*.up"]: names no module of the model, did you mean "layers.*.up"?',
    ),
    (
        rules({"*.up.weight": "colwise"}),
        'strategy.plan["*.up.weight"]: names no module of the model, rules are for modules, did you mean "*.up"?',
    ),
    (rules({"zzz": "colwise"}), 'strategy.plan["zzz"]: names no module of the model'),
    (
        rules({"layers.*.up": 0}),
        'strategy.plan["layers.*.up"]: 0 is not allowed, give the name of a style: ',
    ),
    (
        given({"layers.0": "colwise"}),
        'strategy.plan: "colwise" for layers.0, a PlainBlock without parameters of its own; name what is in it, such as layers.0.q',
    ),
    (
        given({"layers.0.drop": "rowwise"}),
        'strategy.plan: "rowwise" for layers.0.drop, a Dropout without parameters of its own; leave it out',
    ),
    (given({}), 'strategy.plan: divides nothing, give styles such as "colwise" and "rowwise", or "auto"'),
    (
        given({"norm": "replicate", "layers.0.norm1": "sequence"}),
        'strategy.plan: divides nothing, give styles such as "colwise" and "rowwise", or "auto"',
    ),
    (
        chosen(TwoBranches(), plan=None),
        'strategy.plan: None is not allowed with tp=2, give "auto", or a plan, such as {"layers.*.up"',
    ),
    (
        chosen(TwoBranches()),
        'strategy.plan_example: missing, TwoBranches has no plan of its own, and "auto" needs a batch to find one by tracing; '
        f"give it, or {GIVE}",
    ),
    (
        chosen(TwoBranches(), no_samples),
        f"strategy.plan: the first samples of the data gave no batch to find one with (KeyError: 'image'); {GIVE}",
    ),
    (
        chosen(TwoBranches(), plan_example=no_samples),
        f"strategy.plan_example gave no batch to find one with (KeyError: 'image'); {GIVE}",
    ),
    (
        chosen(TwoBranches(), plan_example={"y": torch.zeros(2, 8)}),
        "strategy.plan: TwoBranches could not be traced with the example batch (TypeError: ",
    ),
    (
        chosen(build("convolutions"), lambda: sample("convolutions", 2, 0)),
        "strategy.plan: tracing Images found no two matrices that follow each other and that tp=2 divides; "
        f"{GIVE}, or choose another axis than tp",
    ),
    (
        chosen(OwnStep(), lambda: [torch.zeros(2, 8)]),
        f"strategy.plan: OwnStep defines its own train_step, which cannot be traced; {GIVE}",
    ),
    (
        own("llama", 4),
        "strategy.tp: 4 does not divide the 2 key/value heads of LlamaForCausalLM, which the model's own plan divides; "
        "choose 2, or give a plan that leaves it out",
    ),
    (
        own("llama", 2, intermediate_size=33),
        "strategy.tp: 2 does not divide 33, the size of dimension 0 of model.layers.0.mlp.gate_proj.weight, for which the "
        'model\'s own plan says "colwise"; give a plan that leaves it out',
    ),
    (
        own("llama", 2, vocab_size=63),
        "strategy.tp: 2 does not divide 63, the size of dimension 0 of ",  # the embedding's, or the head's in transformers 5.17
    ),
    (
        own("mixtral", 2, intermediate_size=31),
        "strategy.tp: 2 does not divide 31, the size of dimension 1 of each of its 2 matrices of "
        'model.layers.0.mlp.experts.gate_up_proj, for which the model\'s own plan says "packed_colwise"; give a plan',
    ),
    (
        lambda: chosen(of_transformers("mixtral"), sequence_parallel=True)(),
        'strategy.sequence_parallel: the plan of MixtralForCausalLM itself says "packed_colwise" for '
        "model.layers.0.mlp.experts.gate_up_proj, which divides no positions; give a plan without it, or leave sequence_parallel out",
    ),
    (
        lambda: chosen(of_another_style())(),
        'strategy.plan: the plan of LlamaForCausalLM itself says "diagonal" for model.layers.0.mlp, which transformers does not know; ',
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_refused(row: Row) -> None:
    call, message = row
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_transformers_without_plans_for_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_transformers("llama", layers=1)
    monkeypatch.setitem(sys.modules, TENSOR_PARALLEL, None)  # as before 5.16
    with pytest.raises(
        ConfigError, match=r'^strategy.plan: "auto" needs transformers 5.16 or newer .*, 5\..* is installed; '
    ):
        chosen(model)()


def test_a_compiled_model_is_refused() -> None:
    model = TwoBranches()
    model.compile()
    with pytest.raises(ConfigError) as caught:
        trace(model, [torch.zeros(2, 8)])
    assert str(caught.value).startswith(
        "strategy.plan: TwoBranches is compiled already and cannot be traced; give strategy."
    )


def test_what_is_slow_is_said() -> None:
    styles = {"layers.0.up": "colwise", "layers.1.up": "colwise", "layers.1.down": "rowwise", "head": "colwise"}
    assert without_rowwise(styles) == ["layers.0.up"]
    assert without_rowwise({"net.0": "colwise", "net.2": "rowwise"}) == []


class Augmented(torch.utils.data.Dataset[Tensor]):
    """Samples that are drawn at random."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8) + index

    def __len__(self) -> int:
        return 5


def test_an_example_takes_nothing_from_training() -> None:
    run = SimpleNamespace(
        train_dataloader=DataLoader(Augmented(), batch_size=4),
        val_dataloader=None,
        test_dataloader=DataLoader(Stream()),
    )
    random = torch.get_rng_state()
    assert example_batch(run, ["train_dataloader"]).shape == (2, 8)
    assert torch.equal(torch.get_rng_state(), random)
    assert example_batch(run, ["val_dataloader", "test_dataloader"]) is None
