"""FSDPStrategy: what is sharded and how, models without memory, and that it trains what a single device trains."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flextrain import (
    AmpOptimWrapper,
    BaseModel,
    ConfigError,
    DefaultOptimWrapperConstructor,
    FSDPStrategy,
    OptimWrapper,
    OptimWrapperDict,
    StrategyError,
)
from flextrain.core.base.registry import FUNCTIONS
from flextrain.core.checkpoint import Checkpoint, save_checkpoint
from flextrain.core.model.base_model import run_forward
from flextrain.core.torch_compat.dtensor_private import is_gathered
from flextrain.strategies import SingleDeviceStrategy
from flextrain.strategies.fsdp import strategy as fsdp_strategy
from flextrain.strategies.fsdp import strategy as nodes
from flextrain.strategies.fsdp.units import choose_roots
from flextrain.strategies.parts import explain, init_weights
from flextrain.testing import WorkerGroup, check_strategy
from flextrain.testing.loop import train
from flextrain.testing.models import Mlp, SmallModel
from flextrain.testing.sessions import load, save, single_device, started, whole_state

pytestmark = pytest.mark.distributed
SGD = dict(type="SGD", lr=0.1, momentum=0.9)


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Three blocks between an embedding and a tied head, a buffer, and a position table that it fills by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.position = nn.Parameter(torch.zeros(5, 6))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        nn.init.normal_(self.position, std=0.1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(x) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden) * self.scale
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), x.roll(1, 1).flatten())}


def data(rank: int, index: int = 0) -> Tensor:
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(10 * index + rank))


def prepared(
    model: nn.Module | type[nn.Module] | None = None, optim: Any = SGD, **options: Any
) -> tuple[FSDPStrategy, Any, Any]:
    strategy = FSDPStrategy(device="cpu", timeout_s=60, **options)
    optim = OptimWrapper(optim) if isinstance(optim, dict) else optim
    torch.manual_seed(0)
    called, optim = strategy.setup(model() if isinstance(model, type) else model or Net(), optim)
    return strategy, called, optim


def whole(strategy: Any) -> dict[str, Tensor]:
    values = strategy.state().items()
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for key, value in values
        if isinstance(value, Tensor)
    }


# The contract


@pytest.mark.full
@pytest.mark.slow
def test_conformance(workers2: WorkerGroup) -> None:
    assert check_strategy("FSDPStrategy", workers=workers2).passed


SOME = ["initial_weights", "gradients", "accumulation", "clipping", "overflow", "resume_itself"]
OF_OPTIONS = ["gradients", "accumulation", "clipping", "resume_itself"]


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            dict(wrap=["Linear"], reshard_after_forward=False, reduce_every_micro_batch=True), marks=pytest.mark.full
        ),
        pytest.param(dict(wrap=["Linear"], reshard_after_forward=True, prefetch=2), marks=pytest.mark.full),
        dict(replicate_size=2),
        pytest.param(dict(wrap=["Linear"], activation_checkpointing=dict(classes=["Linear"])), marks=pytest.mark.full),
    ],
    ids=lambda options: "-".join(options),
)
def test_conformance_with_options(workers2: WorkerGroup, options: dict[str, Any]) -> None:
    assert check_strategy(dict(type="FSDPStrategy", **options), workers=workers2, only=OF_OPTIONS).passed


@pytest.mark.full
def test_conformance_on_other_numbers_of_processes(workers1: WorkerGroup, workers3: WorkerGroup) -> None:
    assert check_strategy("FSDPStrategy", world_size=1, workers=workers1, only=["losses", "resume_itself"]).passed
    assert check_strategy("FSDPStrategy", world_size=3, workers=workers3, only=SOME[:-1]).passed


class Partly(Mlp):
    """Never uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


def states(path: Path) -> None:
    """In a worker: state is what the optimizer made, no more; momentum and decay show whether asking made any."""
    batches = [[Partly.sample(8, seed)] for seed in range(4)]
    optim = partial(OptimWrapper, dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.1))
    with started("FSDPStrategy", optim(), Partly) as session:
        expected = train(session.strategy, session.model, session.optim, batches).losses
    with started("FSDPStrategy", optim(), Partly) as session:
        before = whole_state(session.strategy)
        session.strategy.template(before)
        found = train(session.strategy, session.model, session.optim, batches[:2]).losses
        after = whole_state(session.strategy)
        save(session, path)
    with started("FSDPStrategy", optim(), Partly, seed=99) as session:
        load(session, path)
        found += train(session.strategy, session.model, session.optim, batches[2:]).losses
    assert found == expected, (found, expected)
    assert not any(key.startswith("optim.state.") for key in before)
    kept = {key.split(".momentum_buffer")[0] for key in after if key.startswith("optim.state.")}
    assert kept == {f"optim.state.{name}" for name, _ in Mlp().named_parameters()}


def test_state_is_what_the_optimizer_made(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(states, tmp_path / "c")


class Matrices(SmallModel):
    """Without a vector, which Muon does not take; of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 13, bias=False), nn.Linear(13, self.num_classes, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def losses_with_muon(alone: bool) -> list[float]:
    batches = [[Matrices.sample(8, seed)] for seed in range(5)]
    optim = OptimWrapper(dict(type="Muon", lr=0.02))
    with single_device(optim, Matrices) if alone else started("FSDPStrategy", optim, Matrices) as session:
        return train(session.strategy, session.model, session.optim, batches).losses


def test_an_optimizer_of_whole_matrices(workers2: WorkerGroup) -> None:
    found, expected = workers2.run(losses_with_muon, False)[0], workers2.run(losses_with_muon, True)[0]
    # Muon computes in bfloat16, which keeps 8 bits.
    assert found == pytest.approx(expected, rel=2.0**-8)


# Units


def units(**options: Any) -> tuple[list[str], str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flextrain")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    strategy, model, _ = prepared(**options)
    logger.removeHandler(handler)
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    strategy.leave()
    return names, next(line for line in found if line.startswith("FSDP units"))


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]


def by_policy(**policy: Any) -> dict[str, Any]:
    return dict(model_wrapper=dict(type="MMFullyShardedDataParallel", auto_wrap_policy=policy))


def of_mine(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [""]),
        (dict(wrap="blocks"), BLOCKS),
        (dict(wrap=["Block"]), BLOCKS),
        (dict(wrap=lambda module: isinstance(module, Block)), BLOCKS),
        (dict(model_wrapper=dict(auto_wrap_policy=ModuleWrapPolicy({Block}))), BLOCKS),
        (
            dict(
                model_wrapper=dict(
                    auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
                )
            ),
            BLOCKS,
        ),
        (dict(model_wrapper=dict(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=50))), BLOCKS),
        (dict(model_wrapper=dict(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=100))), [""]),
        (by_policy(type="size_based_auto_wrap_policy", min_num_params=50), BLOCKS),
        (
            by_policy(
                type="size_based_auto_wrap_policy",
                min_num_params=42,
                exclude_wrap_modules=[Block, "torch.nn.ModuleList"],
            ),
            ["", *(f"{block}.linear" for block in BLOCKS[1:])],
        ),
        (by_policy(type="torch.distributed.fsdp.wrap.size_based_auto_wrap_policy", min_num_params=50), BLOCKS),
        (by_policy(type="transformer_auto_wrap_policy", transformer_layer_cls=[f"{__name__}.Block"]), BLOCKS),
        (by_policy(type=ModuleWrapPolicy, module_classes={Block}), BLOCKS),
        (dict(model_wrapper=dict(auto_wrap_policy=f"{__name__}.of_mine")), BLOCKS),
    ],
    ids=[
        "root",
        "blocks",
        "names",
        "function",
        "module_wrap_policy",
        "transformer_policy",
        "size_policy",
        "size_policy_whole",
        "size_by_name",
        "size_by_name_without_blocks",
        "size_by_import_path",
        "transformer_by_name",
        "policy_class",
        "own_function_by_import_path",
    ],
)
def test_units(options: dict[str, Any], expected: list[str]) -> None:
    """In this process, because options may hold functions that cannot be sent to another.

    By size, torch's policy takes what holds enough by itself and is no list; an embedding that is tied stays outside.
    """
    names, line = units(**options)
    assert names == expected
    assert "Net (258)" in line
    if expected == BLOCKS:
        assert "3 x Block (54)" in line


@pytest.mark.parametrize(
    ("options", "root", "blocks"),
    [
        ({}, False, True),
        (dict(reshard_after_forward=True), True, True),
        (dict(reshard_after_forward=False), False, False),
        (dict(model_wrapper=dict(sharding_strategy="SHARD_GRAD_OP")), False, False),
        (dict(model_wrapper=dict(sharding_strategy="HYBRID_SHARD", backward_prefetch="BACKWARD_PRE")), True, True),
        (dict(model_wrapper=dict(sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)), False, False),
    ],
    ids=["default", "always", "never", "older key", "hybrid", "hybrid without resharding"],
)
def test_what_is_freed_after_forward(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], root: bool, blocks: bool
) -> None:
    """Said in full to torch, which takes no None in 2.6."""
    said: list[tuple[type[nn.Module], Any]] = []

    @wraps(fsdp_strategy.fully_shard)
    def watched(module: nn.Module, **given: Any) -> Any:
        said.append((type(module), given["reshard_after_forward"]))
        return sharded(module, **given)

    sharded = fsdp_strategy.fully_shard
    monkeypatch.setattr(fsdp_strategy, "fully_shard", watched)
    strategy, called, _ = prepared(wrap="blocks", **options)
    called(data(0))
    kept = [type(p) is nn.Parameter for p in called.blocks[0].parameters()]
    strategy.leave()
    assert said == [(Block, blocks)] * 3 + [(Net, root)]
    assert kept == [not blocks] * 4


def test_a_torch_that_cannot_shard_on_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    with pytest.raises(StrategyError, match=r'^strategy.device: torch .* "cpu" needs torch 2\.7$'):
        prepared()
    torch.distributed.destroy_process_group()


def layouts(**options: Any) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    strategy, model, _ = prepared(**options)
    found = [
        (name, type(p).__name__, tuple(p.shape), tuple(p.to_local().shape)) for name, p in model.named_parameters()
    ]
    strategy.leave()
    return found


def test_no_process_holds_more_than_its_part(workers2: WorkerGroup) -> None:
    first, second = workers2.run(layouts, wrap="blocks")
    assert [name for name, *_ in first] == [name for name, _ in Net().named_parameters()]
    for (_, kind, shape, one), (_, _, _, other) in zip(first, second, strict=True):
        assert kind == "DTensor"
        assert one[0] + other[0] == shape[0]
        assert one[1:] == other[1:] == shape[1:]
        assert one[0] - other[0] in (0, 1)


# Models without memory


class Watches(TorchDispatchMode):
    """The largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not isinstance(out, DTensor) and not out.is_meta:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


def built_without_memory(kind: Any, seed: int, **options: Any) -> dict[str, Tensor]:
    strategy = FSDPStrategy(device="cpu", **options)
    strategy.join()
    torch.manual_seed(seed + 7 * strategy.topology.rank * (seed % 2))
    with strategy.building():
        model = kind()
    if isinstance(model, BaseModel):
        init_weights(strategy, model)
    assert all(parameter.is_meta for parameter in model.parameters())
    strategy.setup(model, OptimWrapper(SGD))
    found = whole(strategy)
    found["loss"] = strategy._model(data(0))["loss"].detach()  # type: ignore[misc]
    tied = model.head.weight is model.embed.weight
    strategy.leave()
    assert tied
    return found


class WithInitWeights(Net, BaseModel):
    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("seed", [4, 5], ids=["equal-seeds", "other-seeds"])
@pytest.mark.parametrize("kind", [Net, WithInitWeights])
def test_a_model_without_memory_begins_as_any_other(workers2: WorkerGroup, kind: Any, seed: int) -> None:
    torch.manual_seed(seed)
    expected = kind()
    if kind is WithInitWeights:
        expected.init_weights()
    first, second = workers2.run(built_without_memory, kind, seed, wrap="blocks")
    for name, parameter in expected.named_parameters():
        assert torch.equal(first[f"model.{name}"], parameter), name
        assert torch.equal(second[f"model.{name}"], parameter), name
    assert torch.equal(first["model.scale"], torch.tensor(0.5))
    torch.testing.assert_close(first["loss"], expected(data(0))["loss"].detach())


class WithGivenValues(Net):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(3, 6))


def test_values_that_each_process_drew_are_those_of_rank_0(workers2: WorkerGroup) -> None:
    """Those that were put off before it, too: what it moved the random state from and to is rank 0's."""
    torch.manual_seed(5)
    expected = dict(WithGivenValues().named_parameters())
    for found in workers2.run(built_without_memory, WithGivenValues, 5):
        for name, parameter in expected.items():
            assert torch.equal(found[f"model.{name}"], parameter), name


class Uninitialised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.empty(3))


def refused(kind: Any) -> str:
    with pytest.raises(StrategyError) as caught:
        built_without_memory(kind, 0)
    return str(caught.value)


def test_what_nothing_initialises_is_named(workers1: WorkerGroup) -> None:
    (message,) = workers1.run(refused, Uninitialised)
    assert message.startswith("model.extra: is built without memory and nothing initialises it")


def test_initialisation_can_be_left_out(workers1: WorkerGroup) -> None:
    (found,) = workers1.run(built_without_memory, Net, 0, skip_init_weights=True)
    assert not found["model.embed.weight"].any()


# Training


def losses(
    model: type[nn.Module], updates: int, accumulate: int = 2, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    optim = OptimWrapper(SGD, accumulative_counts=accumulate, clip_grad=dict(max_norm=0.5))
    strategy, called, optim = prepared(model(), optim, **options)
    seen = []
    for update in range(updates):
        for i in range(accumulate):
            with strategy.grad_sync(i == accumulate - 1), strategy.autocast():
                loss = called(data(strategy.topology.rank, accumulate * update + i))["loss"]
                optim.backward(loss / accumulate)
        optim.step()
        seen.append(loss.item())
    state = whole(strategy)
    strategy.leave()
    return seen, state


class Normed(Net):
    """With batch normalisation, whose statistics differ between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.norm(self.embed(x).mean(1))
        return super().forward(x)


def test_statistics_of_normalisation_are_those_of_rank_0(workers2: WorkerGroup) -> None:
    (_, first), (_, second) = workers2.run(losses, Normed, 3)
    assert first["model.norm.running_mean"].any()
    assert "model.norm.running_mean" not in second, "offered once"


class Untied(Net):
    """Backward has computed the gradient of its head when it comes to the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11, bias=False)


def interrupted(*, in_backward: bool, in_thread: bool = False, kind: type[Net] = Net) -> None:
    """In a worker: errors within the second block, reading all weights after each, and training on."""

    def attempt(window: Any) -> None:
        if in_thread:  # which has ended when the weights are read
            with ThreadPoolExecutor(1) as pool:
                pool.submit(train, strategy, called, optim, [window]).result()
        train(strategy, called, optim, [window])

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        if not in_backward:
            raise ZeroDivisionError
        output.register_hook(lambda grad: 1 / 0)  # type: ignore[no-untyped-call]

    windows = [
        [{"x": torch.cat([data(rank, 2 * update + i) for rank in range(2)])} for i in range(2)] for update in (0, 1)
    ]
    strategy, called, optim = prepared(kind, wrap=["Block"])
    expected = train(strategy, called, optim, windows)
    weights = whole(strategy)
    strategy.leave()
    strategy, called, optim = prepared(kind, wrap=["Block"])
    losses = []
    for window in windows:
        for tried in (window[1:], window):
            before, handle = whole(strategy), strategy.module.blocks[1].linear.register_forward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                attempt(tried)
            handle.remove()
            optim.zero_grad()
            for key, value in whole(strategy).items():
                assert torch.equal(value, before[key]), key
        losses += train(strategy, called, optim, [window]).losses
    assert losses == expected.losses
    for key, value in whole(strategy).items():
        assert torch.equal(value, weights[key]), key
    strategy.leave()


def looked_at(where: str) -> None:
    """In a worker: something asks for the module while the model computes; the run is as without it."""

    def look(*_: Any) -> None:
        if where == "another thread":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: strategy.module).result()
        else:
            assert strategy.module is called

    found = []
    for looks in (False, True):
        strategy, called, optim = prepared(reshard_after_forward=True)
        if looks and where == "backward":
            called.blocks[1].register_full_backward_hook(look)
        elif looks:
            called.blocks[1].register_forward_hook(look)
        windows = [
            [{"x": torch.cat([data(rank, 2 * update + i) for rank in range(2)])} for i in range(2)] for update in (0, 1)
        ]
        losses = train(strategy, called, optim, windows).losses
        called.eval()
        step: Any = SimpleNamespace(predict=partial(run_forward, called))
        with torch.no_grad():
            evaluated = float(strategy.evaluate(windows[0][0], step)["loss"])
        found.append((losses, evaluated, whole(strategy)))
        strategy.leave()
    assert found[0][:2] == found[1][:2]
    for key, value in found[0][2].items():
        assert torch.equal(found[1][2][key], value), key


class Taught(nn.Module):
    """Blocks that are trained, and blocks that an optimizer need not know, of which no backward comes to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.teacher = nn.ModuleList([Block()]), nn.ModuleList([Block(), Block()])
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.blocks[0](self.teacher[0](x))
        with torch.no_grad():
            aim = self.teacher[1](x)
        return {"loss": (hidden - aim).square().mean()}


def gathered_after_an_update() -> list[bool]:
    """In a worker: which blocks are gathered, all of which forward leaves so."""
    model = Taught()

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for group in groups for p in group["params"] if p.requires_grad], lr=0.1)

    strategy, called, optim = prepared(model, OptimWrapper(make), wrap=["Block"], reshard_after_forward=False)
    train(strategy, called, optim, [[{"x": torch.ones(4, 6)}]])
    found = [is_gathered(block) for block in (*model.blocks, *model.teacher)]
    strategy.leave()
    return found


def test_nothing_stays_gathered_after_an_update(workers2: WorkerGroup) -> None:
    assert workers2.run(gathered_after_an_update) == [[False] * 3] * 2


@pytest.mark.parametrize("where", ["forward", "backward", "another thread"])
def test_the_module_may_be_asked_for_while_it_computes(workers2: WorkerGroup, where: str) -> None:
    workers2.run(looked_at, where)


def without_backward() -> None:
    """In a worker: the state after a forward in training is that of before, in shards, also of units that stay gathered for backward."""
    strategy, called, _ = prepared(wrap="blocks", reshard_after_forward=False)
    before = whole(strategy)
    called(data(0))
    found = strategy.model_state()
    for key, value in strategy.module.named_parameters():
        assert isinstance(value, DTensor), key
        assert torch.equal(found[key].full_tensor(), before[f"model.{key}"]), key  # type: ignore[attr-defined]
    strategy.leave()


def test_a_forward_without_backward_leaves_shards(workers2: WorkerGroup) -> None:
    workers2.run(without_backward)


def interrupted_before_torch_could_go_on() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        with pytest.raises(StrategyError, match=r"^strategy: an error ended backward, after which FSDP of torch"):
            interrupted(in_backward=True)


def test_an_error_in_backward_that_torch_cannot_go_on_after(workers2: WorkerGroup) -> None:
    workers2.run(interrupted_before_torch_could_go_on)


@pytest.mark.parametrize(
    "in_backward, in_thread, kind",
    [(False, False, Net), (True, False, Net), (True, True, Net), (True, False, Untied)],
    ids=["forward", "backward", "a thread that has ended", "backward that has gradients"],
)
def test_an_error_within_an_update_leaves_nothing_behind(
    workers2: WorkerGroup, in_backward: bool, in_thread: bool, kind: type[Net]
) -> None:
    workers2.run(interrupted, in_backward=in_backward, in_thread=in_thread, kind=kind)


def messages(**options: Any) -> list[int]:
    """How many times gradients were reduced in each of three micro-batches."""
    strategy, called, _ = prepared(**options)
    counts = []
    for i in range(3):
        with torch.profiler.profile() as profile, strategy.grad_sync(i == 2):
            called(data(strategy.topology.rank, i))["loss"].backward()
        events = profile.events() or []
        counts.append(sum("reduce_scatter" in event.name and "c10d::" in event.name for event in events))
    strategy.leave()
    return counts


def test_inner_micro_batches_send_nothing(workers2: WorkerGroup) -> None:
    held, each = workers2.run(messages)[0], workers2.run(messages, reduce_every_micro_batch=True)[0]
    assert held[:2] == [0, 0]
    assert held[2] > 0
    assert min(each) > 0


def test_compiled_blocks(workers2: WorkerGroup) -> None:
    plain, _ = workers2.run(losses, Net, 2, wrap="blocks")[0]
    compiled, state = workers2.run(losses, Net, 2, wrap="blocks", compile=dict(backend="eager"))[0]
    assert compiled == pytest.approx(plain, rel=1e-6)
    assert not any("_orig_mod" in key for key in state)


# Precision


def precision(optim: str, **options: Any) -> tuple[str, str, str, bool]:
    wrapper = AmpOptimWrapper(SGD, dtype="bfloat16") if optim == "amp" else OptimWrapper(SGD)
    strategy, called, built = prepared(optim=wrapper, **options)
    seen: list[str] = []
    called.blocks[0].linear.register_forward_hook(lambda m, args, out: seen.append(str(out.dtype)))
    loss = called(data(0))["loss"] if optim != "amp" else None
    if loss is None:
        with strategy.autocast():
            loss = called(data(0))["loss"]
    built.backward(loss)
    built.step()
    stored = {str(value.dtype) for key, value in whole(strategy).items() if key.startswith(("model.", "optim.state"))}
    report = str(strategy.precision_report())
    strategy.leave()
    return seen[0], str(loss.dtype), report, stored == {"torch.float32"}


def test_mixed_precision(workers2: WorkerGroup) -> None:
    mixed = dict(param_dtype="bfloat16")
    compute, loss, report, stores = workers2.run(precision, "plain", wrap="blocks", mixed_precision=mixed)[0]
    assert (compute, loss, stores) == ("torch.bfloat16", "torch.float32", True)
    assert report == "compute bfloat16, parameters float32, gradients float32, optimizer state float32"
    compute, _, report, stores = workers2.run(precision, "amp", wrap="blocks")[0]
    assert (compute, stores) == ("torch.bfloat16", True)
    assert report.startswith("compute bfloat16, parameters float32")


# Several models


class Two(BaseModel):
    """Two models with an optimizer each, and a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 1)

    def train_step(self, data: Tensor, optim_wrapper: Any) -> dict[str, Tensor]:
        first = self.one(data).square().mean()
        optim_wrapper["one"].update_params(first)
        second = self.two(self.one(data).detach()).square().mean()
        optim_wrapper["two"].update_params(second)
        return {"loss": first + second}


class CallsBeforeUpdate(Two):
    """Calls a part once more, without backward, between its gradients and its update."""

    def train_step(self, data: Tensor, optim_wrapper: Any) -> dict[str, Tensor]:
        first = self.one(data).square().mean()
        optim_wrapper["one"].backward(first)
        second = self.two(self.one(data).detach()).square().mean()
        optim_wrapper["one"].step()
        optim_wrapper["one"].zero_grad()
        optim_wrapper["two"].update_params(second)
        return {"loss": first + second}


class WithOwnParameter(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def two_models(kind: type[Two], strategy: Any = None) -> dict[str, Tensor]:
    optim = OptimWrapperDict(one=OptimWrapper(SGD), two=OptimWrapper(SGD))
    if strategy is None:
        strategy, _, optim = prepared(kind(), optim)
    else:
        torch.manual_seed(0)
        strategy.setup(kind(), optim)
    size, module = 4 // strategy.topology.world_size, strategy.module
    for i in range(3):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        module.train_step(batch[strategy.topology.rank * size : (strategy.topology.rank + 1) * size], optim)
    found = whole(strategy)
    strategy.leave()
    return found


@pytest.mark.parametrize("kind", [Two, CallsBeforeUpdate])
def test_a_train_step_that_calls_parts(workers2: WorkerGroup, kind: type[Two]) -> None:
    first, second = workers2.run(two_models, kind)
    alone = two_models(kind, SingleDeviceStrategy(device="cpu"))
    assert first.keys() == second.keys() == alone.keys()
    for key, value in alone.items():
        torch.testing.assert_close(first[key], value, rtol=1e-6, atol=1e-7)


def refused_two() -> str:
    with pytest.raises(StrategyError) as caught:
        two_models(WithOwnParameter)
    return str(caught.value)


def test_parts_in_a_list_are_called_one_by_one() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Tanh()})])

        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            return {}

    model = Listed()
    names = {module: name for name, module in model.named_modules()}
    assert [names[root] for root in choose_roots(model)] == ["first", "last", "layers.0", "layers.1.a"]


def test_parts_that_are_called_one_by_one_share_no_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
            self.head.weight = self.embed.weight

        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            return {}

    with pytest.raises(
        StrategyError, match=r"model\.embed\.weight: is shared by embed and head, which FSDP shards apart"
    ):
        choose_roots(Tied())


def test_parameters_outside_of_forward_are_explained() -> None:
    error = RuntimeError("aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor")
    assert str(explain(FSDPStrategy(), error)).startswith(
        "parameters are sharded while the model is not called: call it"
    )
    assert explain(FSDPStrategy(), RuntimeError("out of memory")) is None


class KeepsIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.slow = {id(parameter) for parameter in self.body.parameters()}


class ByIds(DefaultOptimWrapperConstructor):
    """Gives parameters that it knows from before a smaller learning rate; ``now``: it looks which they are."""

    now = False

    def add_params(self, params: Any, module: Any, prefix: str = "", is_dcn_module: Any = None) -> None:
        slow = {id(parameter) for parameter in module.body.parameters()} if self.now else module.slow
        params += [dict(params=[p], lr=0.01 if id(p) in slow else 0.1) for p in module.parameters()]


class ByIdsNow(ByIds):
    now = True


class ByValues(ByIds):
    """Looks at values, which a model has on the meta device only later."""

    def add_params(self, params: Any, module: Any, prefix: str = "", is_dcn_module: Any = None) -> None:
        params += [dict(params=[p], lr=0.01 if float(p.detach().norm()) > 1 else 0.1) for p in module.parameters()]


def grouped(kind: type) -> str:
    """In a worker: what set-up says of a constructor."""
    strategy = FSDPStrategy(device="cpu")
    strategy.join()
    try:
        with strategy.building():
            model = KeepsIds()
        strategy.setup(model, OptimWrapper(dict(type="SGD", lr=0.1), constructor=kind))
        return ""
    except StrategyError as error:
        if "constructor" not in str(error):  # torch 2.6 shards on accelerators only
            raise
        return str(error)
    finally:
        strategy.leave()


@pytest.mark.parametrize("kind", [ByIds, ByIdsNow, ByValues])
def test_groups_of_parameters_known_from_before_are_refused(workers2: WorkerGroup, kind: type) -> None:
    refused = "optim_wrapper.constructor: body.weight has other settings than before FSDPStrategy replaced the model's parameters"
    for found in workers2.run(grouped, kind):
        assert found.startswith(refused) if kind is ByIds else not found


def test_a_part_in_float32_is_explained_where_parameters_are_cast() -> None:
    with pytest.raises(RuntimeError) as caught:
        nn.LayerNorm(4).bfloat16()(torch.ones(2, 4))
    half = FSDPStrategy(mixed_precision=dict(param_dtype="bfloat16"))
    assert str(explain(half, caught.value)).startswith("the strategy gives forward parameters in bfloat16")
    assert explain(FSDPStrategy(), caught.value) is None


class Scaled(nn.Module):
    """Moves its weights by their gradients and asks for others, as SAM does; its scale has no dimension to shard."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 2), Scaled.Scale()

    def train_step(self, x: Tensor, optim_wrapper: Any) -> None:
        moved = {}
        for _ in range(2):
            optim_wrapper.backward(self.scale(self.linear(x)).square().mean())
            with torch.no_grad():
                if not moved:
                    moved = {p: p + 0.05 * p.grad - p for p in self.parameters()}
                    for parameter, by in moved.items():
                        parameter.add_(by)
                    optim_wrapper.zero_grad()
        with torch.no_grad():
            for parameter, by in moved.items():
                parameter.sub_(by)
        optim_wrapper.step()


def scaled() -> tuple[Any, Any]:
    """In a worker: the scale after two updates, of FSDP and of one device with the whole batch."""
    torch.manual_seed(0)
    alone = Scaled()
    strategy, _, optim = prepared(Scaled)
    own = OptimWrapper(torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9))
    alone.load_state_dict(
        {key.removeprefix("model."): value for key, value in whole(strategy).items() if key.startswith("model.")}
    )
    for index in range(2):
        rows = [torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * index + rank)) for rank in range(2)]
        strategy.module.train_step(rows[strategy.topology.rank], optim)  # type: ignore[operator]
        alone.train_step(torch.cat(rows), own)
    found = whole(strategy)["model.scale.by"]
    strategy.leave()
    return found, alone.scale.by.detach()


def test_a_train_step_has_means_of_what_is_not_sharded(workers2: WorkerGroup) -> None:
    for found, expected in workers2.run(scaled):
        torch.testing.assert_close(found, expected)


def copied() -> str:
    """In a worker: what is said of a copy of the model, as torch's AveragedModel makes one."""
    strategy, model, _ = prepared()
    try:
        torch.optim.swa_utils.AveragedModel(model)
    except AssertionError as error:
        return str(explain(strategy, error))
    finally:
        strategy.leave()
    return "nothing was raised"


def test_copies_of_the_model_are_explained(workers1: WorkerGroup) -> None:
    assert workers1.run(copied)[0].startswith("a sharded model cannot be copied (copy.deepcopy, torch's AveragedModel)")


def test_a_parameter_that_no_part_holds_is_refused(workers1: WorkerGroup) -> None:
    assert workers1.run(refused_two)[0].startswith("model.scale: belongs to WithOwnParameter itself")


# State


def saves_and_loads(folder: str) -> bool:
    strategy, called, optim = prepared(wrap="blocks")
    for i in range(2):
        optim.backward(called(data(strategy.topology.rank, i))["loss"])
        optim.step()
    save_checkpoint(Path(folder) / "saved", strategy.state())
    expected = whole(strategy)
    strategy.leave()
    strategy, _, _ = prepared(replicate_size=2)
    checkpoint = Checkpoint.open(Path(folder) / "saved")
    template = strategy.template(checkpoint.saved)
    checkpoint.load(template)
    strategy.load({**checkpoint.values, **template})
    found = whole(strategy)
    strategy.leave()
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_checkpoint_fits_another_arrangement(tmp_path: Path, workers2: WorkerGroup) -> None:
    assert workers2.run(saves_and_loads, str(tmp_path)) == [True, True]
    shards = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(shards) == 2
    sizes = [shard.stat().st_size for shard in shards]
    assert min(sizes) > 0.6 * max(sizes), "each wrote its own part"


# Hybrid sharding by nodes


def arranged(hosts: list[str], **options: Any) -> tuple[list[int], list[int], list[str], float]:
    """The mesh of a run whose processes are on these nodes, how often data are shared, its axes, and a loss."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])
    with mock.patch("socket.gethostname", return_value=hosts[rank]):
        strategy, called, optim = prepared(wrap="blocks", **options)
    mesh = next(p for p in strategy.module.parameters() if isinstance(p, DTensor)).device_mesh
    result = called(data(strategy.topology.rank))["loss"]
    optim.backward(result)
    optim.step()
    found = list(mesh.mesh.shape), [strategy.topology.data.count], [*(mesh.mesh_dim_names or ())], float(result)
    strategy.leave()
    return found


HYBRID = dict(model_wrapper=dict(sharding_strategy="HYBRID_SHARD"))


@pytest.mark.parametrize(
    ("hosts", "options", "shape", "names"),
    [
        (["a", "b"], HYBRID, [2, 1], ["replicate", "shard"]),
        (["a", "a"], HYBRID, [2], ["shard"]),
        (["a", "a"], {**HYBRID, "replicate_size": 2}, [2, 1], ["replicate", "shard"]),
        (["a", "b"], {**HYBRID, "replicate_size": 1}, [2], ["shard"]),
    ],
    ids=["two nodes", "one node", "replicas given", "none given"],
)
def test_a_replica_on_every_node(
    workers2: WorkerGroup, hosts: list[str], options: dict[str, Any], shape: list[int], names: list[str]
) -> None:
    plain = workers2.run(arranged, ["a", "a"])
    for found, expected in zip(workers2.run(arranged, hosts, **options), plain, strict=True):
        assert found[:3] == (shape, [2], names)
        assert found[3] == pytest.approx(expected[3])


def test_nodes_that_hybrid_sharding_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for hosts in (["a", "b", "b"], ["a", "b", "a", "b"]):
        monkeypatch.setattr(nodes.dist, "all_gather_object", lambda _, hosts=hosts: hosts)
        with pytest.raises(
            StrategyError, match="sharding_strategy: needs as many processes on each node, .* on a, b; give"
        ):
            nodes.replicas_by_node(mock.Mock(count=len(hosts)))


# MMEngine's mixed precision


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (dict(param_dtype="bfloat16", reduce_dtype="float32", buffer_dtype="float32"), ("bfloat16", "float32")),
        (dict(param_dtype=torch.bfloat16), (torch.bfloat16, torch.bfloat16)),
        (dict(reduce_dtype="bfloat16"), (None, "bfloat16")),
        (MixedPrecision(param_dtype=torch.bfloat16), (torch.bfloat16, torch.bfloat16)),
    ],
    ids=["names", "as parameters", "reduction only", "torch's"],
)
def test_mixed_precision_of_the_older_class(given: Any, expected: tuple[Any, Any]) -> None:
    config = FSDPStrategy(model_wrapper=dict(mixed_precision=given)).config
    assert config.mixed_precision is not None
    assert (config.mixed_precision.param_dtype, config.mixed_precision.reduce_dtype) == expected
    assert config.mixed_precision.cast_forward_inputs


# Functions by name


def test_what_to_recompute_by_name() -> None:
    FUNCTIONS.register_module("is_of_class", module=is_of_class)
    try:
        config = FSDPStrategy(
            activation_checkpointing=dict(check_fn=dict(type="is_of_class", name="Block"))
        ).config.activation_checkpointing
        assert config is not None
        assert config.check_fn is not None
        assert [config.check_fn(module) for module in (Block(), nn.Linear(1, 1))] == [True, False]
    finally:
        del FUNCTIONS._modules["is_of_class"]


def is_of_class(module: nn.Module, name: str) -> bool:
    return type(module).__name__ == name


# Bad input

WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(mixed_precision=dict(param_dtype="bf8")), 'strategy.mixed_precision.param_dtype: "bf8" is not allowed'),
    (
        dict(mixed_precision=dict(param_dtype="float16")),
        "strategy.mixed_precision.param_dtype: float16 needs loss scaling",
    ),
    (dict(mixed_precision=dict(reduce_dtype="int8")), 'strategy.mixed_precision.reduce_dtype: "int8" is not allowed'),
    (
        dict(optim_state_dict_cfg="full"),
        "strategy.optim_state_dict_cfg: checkpoints are sharded and fit every strategy",
    ),
    (dict(state_dict_cfg="full"), "strategy.state_dict_cfg: checkpoints are sharded and fit every strategy"),
    (dict(model_wrapper=dict(sharding_strategy="NO_SHARD")), "strategy.model_wrapper.sharding_strategy: NO_SHARD"),
    (
        dict(model_wrapper=dict(sharding_strategy="ALL")),
        'strategy.model_wrapper.sharding_strategy: "ALL" is not allowed',
    ),
    (
        dict(model_wrapper=dict(sharding_strategy="FULL_SHARD"), reshard_after_forward=False),
        "strategy.model_wrapper.sharding_strategy: disagrees with strategy.reshard_after_forward=False",
    ),
    (dict(model_wrapper=dict(use_orig_params=False)), "strategy.model_wrapper.use_orig_params: False is not allowed"),
    (dict(model_wrapper=dict(ignored_modules=[1])), "strategy.model_wrapper.ignored_modules: has no counterpart"),
    (
        dict(model_wrapper=dict(auto_wrap_policy="size_based_auto_wrap_polic")),
        'strategy.model_wrapper.auto_wrap_policy: "size_based_auto_wrap_polic" is no known function, did you mean '
        '"size_based_auto_wrap_policy"?',
    ),
    (
        dict(model_wrapper=dict(auto_wrap_policy=5)),
        "strategy.model_wrapper.auto_wrap_policy: int is not allowed, give a function",
    ),
    (
        dict(model_wrapper=dict(auto_wrap_policy=dict(min_num_params=5))),
        "strategy.model_wrapper.auto_wrap_policy.type: missing, say which function",
    ),
    (
        dict(model_wrapper=dict(auto_wrap_policy=dict(type="size_based_auto_wrap_policy", min_params=5))),
        'strategy.model_wrapper.auto_wrap_policy.min_params: unknown key, did you mean "min_num_params"?',
    ),
    (
        dict(model_wrapper=dict(auto_wrap_policy=dict(type="size_based_auto_wrap_policy", min_num_params="5"))),
        'strategy.model_wrapper.auto_wrap_policy.min_num_params: "5" is not allowed, give an integer',
    ),
    (
        dict(model_wrapper=dict(auto_wrap_policy="transformer_auto_wrap_policy")),
        "strategy.model_wrapper.auto_wrap_policy.transformer_layer_cls: missing, it must be given",
    ),
    (
        dict(
            model_wrapper=dict(
                auto_wrap_policy=dict(type="transformer_auto_wrap_policy", transformer_layer_cls=["torch.nn.Lienar"])
            )
        ),
        'strategy.model_wrapper.auto_wrap_policy.transformer_layer_cls: "torch.nn.Lienar" does not exist',
    ),
    (
        dict(
            model_wrapper=dict(mixed_precision=dict(param_dtype="bfloat16")),
            mixed_precision=dict(param_dtype="float32"),
        ),
        "strategy.model_wrapper.mixed_precision: strategy.mixed_precision is given too, give one",
    ),
    (
        dict(model_wrapper=dict(mixed_precision=dict(param_dtype="float16", reduce_dtype="float32"))),
        "strategy.mixed_precision.param_dtype: float16 needs loss scaling",
    ),
    (
        dict(model_wrapper=dict(mixed_precision=dict(buffer_dtype="bfloat16"))),
        "strategy.mixed_precision.buffer_dtype: bfloat16 is not allowed, buffers keep the dtype",
    ),
    (
        dict(model_wrapper=dict(mixed_precision=dict(keep_low_precision_grads=True))),
        "strategy.model_wrapper.mixed_precision.keep_low_precision_grads: has no counterpart",
    ),
    (dict(sync_bn="torch"), "strategy.sync_bn: call torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    (dict(find_unused_parameters=True), "strategy.find_unused_parameters: parameters may always stay unused"),
    (dict(env_kwargs=dict(cudnn_benchmark=True)), "strategy.env_kwargs: belongs to the runner, give env_cfg"),
    (
        dict(activation_checkpointing=dict(check_fn="no_such_function")),
        'strategy.activation_checkpointing.check_fn: "no_such_function" is no known function',
    ),
    (
        dict(model_wrapper=dict(auto_warp_policy=1)),
        "strategy.model_wrapper.auto_warp_policy: unknown key, did you mean",
    ),
    (dict(model_wrapper=dict(type="DDP")), 'strategy.model_wrapper.type: "DDP" is not allowed'),
    (
        dict(model_wrapper=dict(forward_prefetch=True)),
        "strategy.model_wrapper.forward_prefetch: has no counterpart, give",
    ),
    (
        dict(model_wrapper=dict(auto_wrap_policy=size_based_auto_wrap_policy), wrap="blocks"),
        "strategy.model_wrapper.auto_wrap_policy: strategy.wrap is given too",
    ),
    (
        dict(model_wrapper=dict(mixed_precision=1)),
        "strategy.model_wrapper.mixed_precision: 1 is not allowed, give dict(param_dtype=..., reduce_dtype=...)",
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FSDPStrategy(**options)
    assert str(caught.value).startswith(message), caught.value
    assert "\n" not in str(caught.value)


def setup_fails(case: str) -> str:
    options: dict[str, Any] = {}
    model: nn.Module = Net()
    optim: Any = OptimWrapper(SGD)
    if case == "nothing matches":
        options = dict(wrap="blocks")
        model = nn.Sequential(nn.Linear(2, 2))
    elif case == "policy":
        options = dict(model_wrapper=dict(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=10**7)))
    elif case == "container":
        options = dict(wrap=["ModuleList"])
    elif case == "unknown class":
        options = dict(wrap=["Blok"])
    elif case == "two homes":
        options, optim = dict(mixed_precision=dict(param_dtype="bf16")), AmpOptimWrapper(SGD, dtype="bfloat16")
    elif case == "offload":
        options = dict(cpu_offload=True)
    elif case == "copies":
        options = dict(replicate_size=2)
    elif case == "no initialisation":
        options = dict(skip_init_weights=True)
    elif case == "two dtypes":
        model.head.to(torch.float64)
    elif case == "optimizer of matrices":
        optim = OptimWrapper(dict(type="Adafactor", lr=0.1))
    elif case == "built optimizer":
        optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        prepared(model, optim, **options)
    except (ConfigError, StrategyError) as error:
        return str(error)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return "nothing was raised"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "nothing matches",
            "strategy.wrap: accepts no submodule of Sequential, the largest is a Linear with 6 parameters",
        ),
        ("policy", "strategy.model_wrapper.auto_wrap_policy: accepts no submodule of Net, the largest is a ModuleList"),
        ("container", "strategy.wrap: accepts a ModuleList, which is never called itself; choose the modules in it"),
        (
            "unknown class",
            'strategy.wrap: no submodule is a "Blok", did you mean "Block"? The model has Block, Embedding, LayerNorm, Linear, '
            "ModuleList, Net",
        ),
        ("two homes", "strategy.mixed_precision: the optim_wrapper asks for autocast too, give one of them"),
        ("offload", "strategy.cpu_offload: everything is in the host's memory already"),
        ("copies", "strategy.replicate_size: 2 does not divide the 1 processes"),
        (
            "no initialisation",
            "strategy.skip_init_weights: has no effect on a model that is given as an instance, give dict",
        ),
        (
            "two dtypes",
            "model: Net has parameters of torch.float32, torch.float64, as embed.weight and position, FSDP needs one dtype; cast them "
            "before the runner is made, or choose DDPStrategy",
        ),
        ("optimizer of matrices", "optim_wrapper.optimizer: Adafactor cannot update sharded parameters"),
        ("built optimizer", "optim_wrapper.optimizer: holds parameters that are not the model's"),
    ],
)
def test_refusals(workers1: WorkerGroup, case: str, message: str) -> None:
    (found,) = workers1.run(setup_fails, case)
    assert found.startswith(message), found
    assert "\n" not in found
