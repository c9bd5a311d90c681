"""ExpertBiasHook: the bias follows the loads of all tokens, each counted once, under every strategy; what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import ConfigError, OptimWrapper, StrategyError
from flextrain.core.checkpoint import Checkpoint
from flextrain.core.hugging_face.transformers_private import biased_routers
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup

from ..mesh.models import MATRICES, VOCABULARY, Plain
from ..mesh.parity import dtype_of
from . import balanced
from .balanced import EXPERTS, PLAN, Balanced, Router, joined, model, settings, tokens, trained
from .training import make_runner, refuses, validation

pytestmark = pytest.mark.usefixtures("quick")
FULL = pytest.mark.full


def by_hand(accumulate: int, updates: int = 6, size: int = 8) -> balanced.Found:
    """The same run, in a loop that shares no code with the hook."""
    loads, biases, samples = [], [], tokens(24)
    with dtype_of(torch.float64):
        net = model()
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    routers = {name: part for name, part in net.named_modules() if isinstance(part, Router)}
    chosen: dict[str, list[int]] = {}
    for name, router in routers.items():
        router.register_forward_hook(lambda _, __, out, name=name: chosen[name].extend(out[1].flatten().tolist()))
    size //= accumulate
    for update in range(updates):
        chosen |= {name: [] for name in routers}
        for index in range(accumulate):
            first = (update * accumulate + index) * size % len(samples)
            batch = samples[first : first + size]
            stacked = {key: torch.stack([one[key] for one in batch]) for key in batch[0]}
            (net(**stacked)["loss"] / accumulate).backward()
        optim.step()
        optim.zero_grad()
        loads.append({name: [ids.count(expert) for expert in range(EXPERTS)] for name, ids in chosen.items()})
        for name, router in routers.items():
            load = loads[-1][name]
            for expert in range(EXPERTS):
                mean = sum(load) / EXPERTS
                step = 0.05 if load[expert] < mean else -0.05 if load[expert] > mean else 0.0
                router.expert_bias[expert] += torch.tensor(step, dtype=torch.float32)
        biases.append({f"{name}.expert_bias": router.expert_bias.tolist() for name, router in routers.items()})
    return loads, biases


def in_order(accumulate: int = 1, shards: int = 1) -> dict[str, Any]:
    loader = dict(batch_size=8 // accumulate // shards, dataset=tokens(24), collate_fn="default_collate", shuffle=False)
    optim = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=accumulate)
    return dict(train_dataloader=loader, optim_wrapper=optim)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_formula(tmp_path: Path, accumulate: int) -> None:
    found, expected = trained(tmp_path, **in_order(accumulate)), by_hand(accumulate)
    assert found == expected
    first, last = expected[0][0]["layers.0.router"], expected[0][-1]["layers.0.router"]
    assert max(last) < max(first), "the experts are busy more equally"


RECOMPUTED: list[Any] = [
    pytest.param(model, dict(every=1), id="blocks"),
    pytest.param(model, "matmuls", id="policy", marks=FULL),
    pytest.param(model, dict(offload=True), id="offloaded", marks=FULL),
    *(pytest.param(build, None, id=name) for name, build in balanced.repeating.items()),
]


@pytest.mark.parametrize("build, how", RECOMPUTED)
def test_tokens_that_are_computed_again_count_once(tmp_path: Path, build: Any, how: Any) -> None:
    strategy = dict(type="SingleDeviceStrategy", device="cpu", activation_checkpointing=how)
    assert trained(tmp_path, strategy, model=build, **in_order(2)) == by_hand(2)


def test_tokens_of_a_window_that_is_run_again_count_once(tmp_path: Path) -> None:
    hooks = [dict(type="ExpertBiasHook", update_speed=0.05), dict(type="ReplayHook", interval=2)]
    assert trained(tmp_path, custom_hooks=hooks, **in_order(2)) == by_hand(2)


class Validated(nn.Module):
    """A model that trains while it is validated, as some do by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        self.net.train()
        ids = x.abs().mul(10).long() % VOCABULARY
        found = self.net(ids, ids)
        return found if mode == "loss" else {"index": index, "logits": x[:, :2], "y": y}


def test_validation_does_not_count(tmp_path: Path) -> None:
    given = dict(model=Validated, train_dataloader=None, custom_hooks=[dict(type="ExpertBiasHook", update_speed=0.05)])
    del given["train_dataloader"]
    loader = validation()["val_dataloader"] | dict(sampler=dict(type="DefaultSampler", shuffle=False))
    cfg = dict(by_epoch=False, max_iters=4, val_interval=1)
    changes = settings(**given) | dict(train_dataloader=loader)
    runs = []
    for name, more in (("without", dict(train_cfg=dict(by_epoch=False, max_iters=4))), ("with", validation())):
        trace = balanced.Trace()
        with dtype_of(torch.float64):
            options = {**changes, "train_cfg": cfg, **more}
            options["custom_hooks"] = [*changes["custom_hooks"], trace]
            make_runner(tmp_path / name, **options).train()
        runs.append((trace.loads, trace.biases))
    assert runs[0] == runs[1]


class WithoutItems(nn.Module):
    """Every second update has no item that counts, and is skipped as after an overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.updates = model(), 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.net(input_ids, labels)

    def loss_weight(self, data: Any) -> int:
        self.updates += 1
        return self.updates % 2


def test_a_skipped_update_does_not_move_it(tmp_path: Path) -> None:
    _, biases = trained(tmp_path, model=WithoutItems, **in_order())
    assert biases[0] == biases[1] != biases[2] == biases[3]


class Late(OptimWrapper):
    """Updates after every second window; the gradients of both count."""

    windows = 0

    def should_update(self) -> bool:
        self.windows += super().should_update()
        return super().should_update() and self.windows % 2 == 0


def test_it_moves_with_updates_that_a_recipe_makes_rarely(tmp_path: Path) -> None:
    """The choices of both windows count, as their gradients do: it is a window of two micro-batches."""
    loads, biases = trained(tmp_path, **in_order(2) | dict(optim_wrapper=Late(dict(type="SGD", lr=0.05))))
    assert (loads[1::2], biases[1::2]) == by_hand(2)
    assert biases[2::2] == biases[1:-1:2]
    assert not any(map(any, biases[0].values()))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.net(input_ids, labels)


def masked(kept: int) -> list[dict[str, Tensor]]:
    return [{**one, "attention_mask": (torch.arange(len(one["labels"])) < kept).long()} for one in tokens(24)]


def test_padding_does_not_count(tmp_path: Path) -> None:
    loader = dict(batch_size=8, dataset=masked(5), collate_fn="default_collate")
    loads, _ = trained(tmp_path / "some", model=Masked, train_dataloader=loader)
    assert {sum(row) for one in loads for row in one.values()} == {8 * 5 * 2}
    hooks = [dict(type="ExpertBiasHook", mask=None)]
    loads, _ = trained(tmp_path / "all", model=Masked, train_dataloader=loader, custom_hooks=hooks)
    assert {sum(row) for one in loads for row in one.values()} == {8 * 16 * 2}


class Dropping(Router):
    """Has room for half of the tokens that want its first expert."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super().forward(tokens)
        is_dropped = (ids == 0) & (torch.arange(len(ids)) % 2 == 0).unsqueeze(1)
        return weights.masked_fill(is_dropped, 0), ids.masked_fill(is_dropped, -1)


class DroppingBlock(Balanced):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.router = Dropping(width)


def test_the_log_has_loads_and_what_was_dropped(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, **settings(model=partial(model, DroppingBlock)))
    runner.train()
    hook = next(hook for hook in runner.hooks if type(hook).__name__ == "ExpertBiasHook")
    loads = torch.stack([*hook.loads.values()]).double()
    worst = (loads.amax(1) / loads.mean(1)).max()
    hub = runner.message_hub
    assert hub.get_scalar("train/load_max_over_mean").current() == pytest.approx(float(worst))
    dropped = 1 - loads.sum() / (2 * 8 * 16 * 2)
    assert 0 < dropped < 0.5
    assert hub.get_scalar("train/dropped_tokens").current() == pytest.approx(float(dropped))


def test_it_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, **settings())
    trained_module = runner.train()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in trained_module.modules())


@pytest.mark.parametrize("build", [model, *balanced.repeating.values()])
def test_compiled(tmp_path: Path, build: Any) -> None:
    plain = trained(tmp_path / "plain", model=build, **in_order())
    assert trained(tmp_path / "compiled", model=build, compile=dict(backend="eager"), **in_order()) == plain


# Checkpoints


def saving(folder: Path, strategy: Any, epochs: int, shards: int = 1, **changes: Any) -> balanced.Found:
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1))
    cfg = dict(by_epoch=True, max_epochs=epochs)
    return trained(folder, strategy, default_hooks=hooks, train_cfg=cfg, **in_order(1, shards), **changes)


@pytest.mark.distributed
def test_a_run_goes_on_on_another_layout(tmp_path: Path, workers2: WorkerGroup) -> None:
    whole = saving(tmp_path / "whole", None, 2)
    workers2.run(saving, tmp_path / "first", dict(type="MeshStrategy", ep=2, plan=PLAN), 1, 2)
    saved = torch.empty(EXPERTS)
    Checkpoint.open(tmp_path / "first" / "epoch_1").load({"model.layers.1.router.expert_bias": saved})
    assert saved.tolist() == whole[1][2]["layers.1.router.expert_bias"]
    loads, biases = saving(tmp_path / "again", None, 2, resume=str(tmp_path / "first" / "epoch_1"))
    assert (loads, biases) == (whole[0][3:], whole[1][3:])


class Saves(Hook):
    """Before the hooks with a lower priority follow an update."""

    priority = "HIGH"

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.iter == 2:
            runner.save_checkpoint(runner.work_dir, "early")


def test_what_is_saved_before_its_turn_has_the_move_too(tmp_path: Path) -> None:
    both = [dict(type="ExpertBiasHook", update_speed=0.05), Saves()]
    whole = trained(tmp_path / "whole", custom_hooks=both)
    found = trained(tmp_path / "again", resume=str(tmp_path / "whole" / "early"))
    assert (found[0], found[1]) == (whole[0][3:], whole[1][3:])


# Several processes

MESH = dict(type="MeshStrategy")
CASES: list[Any] = [
    pytest.param(2, dict(type="DDPStrategy"), 2, id="ddp"),
    pytest.param(2, dict(type="FSDPStrategy", wrap="blocks"), 2, id="fsdp"),
    pytest.param(2, MESH | dict(ep=2, plan=PLAN), 2, id="ep2", marks=FULL),
    pytest.param(2, MESH | dict(pp=2), 1, id="pp2"),
    pytest.param(2, MESH | dict(tp=2, plan=MATRICES), 1, id="tp2", marks=FULL),
    pytest.param(2, MESH | dict(ep=2, tp=2, plan=PLAN | MATRICES), 1, id="ep2xtp2", marks=FULL),
    pytest.param(2, MESH | dict(cp=2), 1, id="cp2", marks=FULL),
    pytest.param(4, MESH | dict(ep=2, pp=2, plan=PLAN), 2, id="ep2xpp2", marks=FULL),
    pytest.param(4, MESH | dict(ep=4, cp=2, tp=2, plan=PLAN | MATRICES), 1, id="ep4xcp2xtp2", marks=FULL),
    pytest.param(4, MESH | dict(dp_replicate=2, ep=2, plan=PLAN), 4, id="hsdp", marks=FULL),
    pytest.param(2, MESH | dict(ep=2, plan=PLAN, activation_checkpointing=dict(every=1)), 2, id="ep2-recomputed"),
    pytest.param(
        2, MESH | dict(pp=2, activation_checkpointing=dict(every=1)), 1, id="pp2-recomputed", marks=FULL
    ),
    pytest.param(2, MESH | dict(tp=2, plan=MATRICES, sequence_parallel=True), 1, id="tp2-sequence", marks=FULL),
]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("world_size, strategy, shards", CASES)
def test_parity(tmp_path: Path, workers: Any, world_size: int, strategy: dict[str, Any], shards: int) -> None:
    everyones = workers(world_size).run(trained, tmp_path, strategy, **in_order(2, shards))
    assert joined(everyones) == by_hand(2)


def in_float32(folder: Path, strategy: Any, shards: int) -> balanced.Found:
    return trained(folder, strategy, model=as_float, **in_order(2, shards))


def as_float() -> nn.Module:
    return model().float()


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed(tmp_path: Path, workers2: WorkerGroup, stage: int) -> None:
    strategy = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage))
    assert joined(workers2.run(in_float32, tmp_path / "two", strategy, 2)) == in_float32(tmp_path / "one", None, 1)


# Models of transformers

COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=32, intermediate_size=32, moe_intermediate_size=16, num_experts_per_tok=2, pad_token_id=0,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": dict(
        n_routed_experts=4, n_group=2, topk_group=2, first_k_dense_replace=1, num_key_value_heads=4, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
    "Glm4Moe": dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=0, head_dim=8),
    "Ernie4_5_Moe": dict(
        moe_num_experts=4, moe_k=2, moe_layer_start_index=0, moe_layer_interval=1, moe_num_shared_experts=1
    ),
    "Lfm2Moe": dict(num_experts=4, num_dense_layers=1, layer_types=["full_attention", "full_attention"]),
    "Afmoe": dict(num_experts=4, num_dense_layers=0, num_shared_experts=1, head_dim=8),
}  # fmt: skip


def of_transformers(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(3)
    net = getattr(transformers, f"{family}ForCausalLM")(config(**{**COMMON, **FAMILIES[family]}))
    net.set_experts_implementation("eager")
    net.config.use_cache = False
    return net  # type: ignore[no-any-return]


def family_trained(folder: Path, family: str, strategy: Any, shards: int) -> balanced.Found:
    samples = [{**one, "attention_mask": (torch.arange(16) < 12).long()} for one in tokens(24, "mixtral")]
    given = in_order(2, shards)
    given["train_dataloader"]["dataset"] = samples
    trace = balanced.Trace()
    options = settings(strategy, model=partial(of_transformers, family), **given)
    options["custom_hooks"] += [trace]
    runner = make_runner(folder, **options)
    runner.train()
    runner.close()
    return trace.loads, trace.biases


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[FULL] * (name not in ("DeepseekV3", "Ernie4_5_Moe"))) for name in FAMILIES]
)
def test_models_of_transformers(tmp_path: Path, family: str) -> None:
    """In the router, inside of it, and around it; as buffer and as frozen parameter."""
    if family == "DeepseekV3" and any(
        hasattr(part, "route_tokens_to_experts") for part in of_transformers(family).modules()
    ):
        with refuses(
            ConfigError, begins="ExpertBiasHook.choice: model.layers.1.mlp.gate, this version of transformers chooses"
        ):
            family_trained(tmp_path, family, None, 1)
        return
    loads, biases = family_trained(tmp_path, family, None, 1)
    routers = biased_routers(of_transformers(family))
    assert loads[0].keys() == routers.keys()
    assert {sum(row) for one in loads for row in one.values()} == {8 * 12 * 2}, "without padding"
    assert {*routers.values()} == biases[0].keys()
    check_moves(loads, biases, routers)


def check_moves(loads: list[Any], biases: list[Any], routers: dict[str, str]) -> None:
    """Every bias moves from update to update as the loads of its router say."""
    for name, bias in routers.items():
        before = [0.0] * EXPERTS
        for update, found in enumerate(biases):
            load = loads[update][name]
            mean = sum(load) / EXPERTS
            steps = [0.05 * ((count < mean) - (count > mean)) for count in load]
            tensors = (torch.tensor(values, dtype=torch.float32) for values in (before, steps))
            before = sum(tensors, torch.zeros(EXPERTS, dtype=torch.float32)).tolist()
            assert found[bias] == before


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("family", ["DeepseekV3", "Ernie4_5_Moe"])
@pytest.mark.parametrize("strategy", [dict(type="FSDPStrategy", wrap="blocks"), MESH | dict(ep=2, wrap="blocks")])
def test_families_on_two_processes(
    tmp_path: Path, workers2: WorkerGroup, family: str, strategy: dict[str, Any]
) -> None:
    two = joined(workers2.run(family_trained, tmp_path / "two", family, strategy, 2))
    assert two == family_trained(tmp_path / "one", family, None, 1)


# What is refused


def with_bias(bias: Any, name: str = "expert_bias") -> nn.Module:
    net = model()
    for layer in net.layers:  # type: ignore[union-attr]
        del layer.router.expert_bias
        setattr(layer.router, name, bias())
    return net


class Silent(Router):
    def forward(self, tokens: Tensor) -> Any:
        weights, ids = super().forward(tokens)
        return weights, functional.one_hot(ids, EXPERTS).double()


class SilentBlock(Balanced):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.router = Silent(width)

    def forward(self, x: Tensor) -> Tensor:
        self.router(self.norm(x).flatten(0, 1))
        return self.attention(x)  # type: ignore[no-any-return]


class Masking(Router):
    """Gives a mask of the chosen experts in place of their numbers."""

    def forward(self, tokens: Tensor) -> Any:
        weights, ids = super().forward(tokens)
        return weights, functional.one_hot(ids, EXPERTS).sum(1)


class Counting(Router):
    """Gives how often each expert is chosen."""

    def forward(self, tokens: Tensor) -> Any:
        weights, ids = super().forward(tokens)
        return weights, ids.flatten().bincount(minlength=EXPERTS)


class Counted(Router):
    """Gives the choice, and how often each expert is chosen."""

    def forward(self, tokens: Tensor) -> Any:
        weights, ids = super().forward(tokens)
        return weights, ids, ids.flatten().bincount(minlength=EXPERTS)


class CountedBlock(SilentBlock):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.router = Counted(width)


class Uncalled(Balanced):
    """Computes what its router would, without calling it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x := self.attention(x)).flatten(0, 1)
        weights, ids = Router.forward(self.router, flat)
        return x + self.experts(flat, ids, weights).view_as(x)


class InMixture(SilentBlock):
    """Has the bias itself, and returns no choice."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        del self.router.expert_bias
        self.expert_bias = nn.Buffer(torch.zeros(EXPERTS, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)  # type: ignore[no-any-return]


def sharing() -> nn.Module:
    net: Any = model()
    net.layers[1].router.expert_bias = net.layers[0].router.expert_bias
    return net  # type: ignore[no-any-return]


def zeros(*shape: int) -> Any:
    return partial(with_bias, lambda: nn.Buffer(torch.zeros(shape, dtype=torch.float32)))


class MaskingBlock(SilentBlock):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.router = Masking(width)


class CountingBlock(SilentBlock):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.router = Counting(width)


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (model, dict(update_speed=-1), "update_speed: -1 is not allowed, give a number from 0"),
        (model, dict(update_sped=1), 'unknown key, did you mean "update_speed"'),
        (model, dict(bias="a.b"), "bias: 'a.b' is not allowed, give a name"),
        (model, dict(choice=3), "choice: 3 is not allowed, give a function"),
        (model, dict(bias="expert_bios"), 'ExpertBiasHook.bias: no router .* a "expert_bios", did you mean "expert_bias"'),
        (
            partial(with_bias, lambda: nn.Parameter(torch.zeros(EXPERTS))),
            {},
            r"layers.0.router.expert_bias is trained by the optimizer; make it a buffer",
        ),
        (partial(with_bias, lambda: nn.Buffer(torch.zeros(EXPERTS), persistent=False)), {}, "is in no checkpoint"),
        (partial(model, SilentBlock), {}, "ExpertBiasHook.choice: layers.0.router, its output has no tensor of integers"),
        (partial(model, MaskingBlock), {}, r"layers.0.router, its output has integers of shape \(128, 4\) for 4 experts, which look like a mask"),
        (partial(model, CountingBlock), {}, r"its output has integers of shape \(4,\) for 4 experts, which look like a mask or counts"),
        (model, dict(choice=lambda output: output[0]), r"choice: layers.0.router, choice gave a torch.float64 of shape \(128, 2\), return"),
        (Masked, {}, r"ExpertBiasHook.mask: attention_mask has shape \(8, 8\), and net.layers.0.router chooses for 128 tokens"),
        (model, dict(update_speed=True), "update_speed: True is not allowed, give a number"),
        (model, dict(update_speed="0.001"), 'update_speed: "0.001" is not allowed, give a number'),
        (model, dict(update_speed=1.0), "update_speed: 1.0 is not allowed, give a number from 0 to below 1"),
        (model, dict(update_speed=float("nan")), "update_speed: nan is not allowed, give a number from 0 to below 1"),
        (model, dict(bias=""), "bias: '' is not allowed, give a name"),
        (model, dict(bias=5), "bias: 5 is not allowed, give a string"),
        (model, dict(mask=""), "mask: '' is not allowed, give a name"),
        (model, dict(mask=["attention_mask"]), r"mask: \['attention_mask'\] is not allowed, give a string"),
        (model, dict(mask="padding"), 'ExpertBiasHook.mask: Plain.forward has no argument "padding"'),
        (Masked, dict(mask="attention_maks"), 'mask: Masked.forward has no argument "attention_maks", did you mean "attention_mask"'),
        (model, dict(type="ExpertBiasHok"), '"ExpertBiasHok" is no known hook, did you mean "ExpertBiasHook"'),
        (Plain, {}, 'ExpertBiasHook.bias: no router of transformers has a bias, and no module of the model a "expert_bias"$'),
        (zeros(), {}, r"bias: layers.0.router.expert_bias is of shape \(\), give it one element for each expert"),
        (zeros(1), {}, r"bias: layers.0.router.expert_bias is of shape \(1,\), give it one element for each expert"),
        (sharing, {}, "bias: layers.1.router.expert_bias is layers.0.router.expert_bias too; give each router a bias of its own"),
        (partial(model, CountedBlock), {}, "choice: layers.0.router, its output has 2 tensors of integers; return the chosen"),
        (partial(model, InMixture), {}, "choice: layers.0, its output has no tensor of integers; return the chosen experts as one"),
        (partial(model, Uncalled), {}, "ExpertBiasHook: layers.0.router was not called in an update, so that what it chooses is not"),
        (model, dict(choice=lambda output: output[1].bool()), r"choice gave a torch.bool of shape \(128, 2\), return a tensor of"),
        (model, dict(choice=lambda output: output[1][0, 0]), r"choice gave a torch.int64 of shape \(\), return a tensor of integers"),
        (model, dict(choice=lambda output: output[1].tolist()), "choice gave list, return a tensor of integers"),
        (model, dict(choice=lambda output: functional.one_hot(output[1], EXPERTS).sum(1)), r"choice gave integers of shape \(128, 4\) for 4 experts, which"),
        (model, dict(choice=lambda output: output[1].flatten().bincount(minlength=EXPERTS)), r"choice gave integers of shape \(4,\) for 4 experts"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, build: Any, options: dict[str, Any], says: str) -> None:
    samples = [{**one, "attention_mask": one["labels"][:8]} for one in tokens(24)] if build is Masked else tokens(24)
    loader = dict(batch_size=8, dataset=samples, collate_fn="default_collate")
    with refuses(ConfigError, matches=says):
        hooks = [dict({"type": "ExpertBiasHook"}, **options)]
        trained(tmp_path, model=build, train_dataloader=loader, custom_hooks=hooks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64"])
def test_half_precision_is_refused(tmp_path: Path, dtype: str) -> None:
    build = partial(with_bias, lambda: nn.Buffer(torch.zeros(EXPERTS, dtype=getattr(torch, dtype))))
    with refuses(StrategyError, says=f"is {dtype}, in which steps of 0.05 are lost; keep it in float32"):
        trained(tmp_path, model=build)


def test_two_hooks_for_one_router_are_refused(tmp_path: Path) -> None:
    """Each would move the bias."""
    hooks = [dict(type="ExpertBiasHook", update_speed=0.05)] * 2
    says = "ExpertBiasHook: layers.0.router.expert_bias is moved by another ExpertBiasHook already, leave one out"
    with refuses(ConfigError, says=says):
        trained(tmp_path, custom_hooks=hooks)


def test_a_bias_that_checkpoints_leave_out_is_refused(tmp_path: Path) -> None:
    build = partial(with_bias, lambda: nn.Parameter(torch.zeros(EXPERTS, dtype=torch.float32), requires_grad=False))
    strategy = dict(type="SingleDeviceStrategy", device="cpu", exclude_frozen_parameters=True)
    with refuses(ConfigError, begins="strategy.exclude_frozen_parameters: leaves layers.0.router.expert_bias out of"):
        trained(tmp_path, strategy, model=build)


@pytest.mark.parametrize(
    "options", [dict(choice=lambda output: output[1]), dict(bias="my_bias")], ids=["choice", "bias"]
)
def test_what_is_for_other_routers_than_those_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    hooks = [dict(type="ExpertBiasHook", **options)]
    begins = f"ExpertBiasHook.{next(iter(options))}: has no effect, all routers with a bias are those of transformers; leave it out"
    given = settings(model=partial(of_transformers, "DeepseekV3"), custom_hooks=hooks)
    with refuses(ConfigError, begins=begins):
        make_runner(tmp_path, **given).train()


def test_all_experts_may_be_chosen_by_a_function(tmp_path: Path) -> None:
    hooks = [
        dict(type="ExpertBiasHook", choice=lambda output: output[0].new_tensor([[2, 0, 3, 1]]).long().repeat(128, 1))
    ]
    loads, biases = trained(tmp_path, custom_hooks=hooks, **in_order())
    assert loads[-1]["layers.0.router"] == [128] * EXPERTS
    assert not any(biases[-1]["layers.0.router.expert_bias"])


def test_another_name_and_a_function_for_the_choice(tmp_path: Path) -> None:
    hooks = [dict(type="ExpertBiasHook", update_speed=0.05, bias="shift_bias", choice=lambda output: output[1])]
    loads, biases = trained(tmp_path, model=partial(model, Renamed), custom_hooks=hooks, **in_order())
    check_moves(loads, biases, {f"layers.{i}.router": f"layers.{i}.router.shift_bias" for i in range(2)})
    assert any(biases[-1]["layers.0.router.shift_bias"])


class RenamedRouter(Router):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.shift_bias = nn.Buffer(self.expert_bias)
        del self.expert_bias

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(tokens).sigmoid()
        ids = (scores.detach() + self.shift_bias).topk(2).indices
        return scores.gather(1, ids), ids


class Renamed(Balanced):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.router = RenamedRouter(width)
