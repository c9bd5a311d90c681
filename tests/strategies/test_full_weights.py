"""full_weights: whole weights under every strategy, as one device has them, and a strategy that goes on as if nothing had been."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import OptimWrapper, Strategy
from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.torch_compat.torch_private import tensors_of
from flextrain.strategies.noted import Blueprint
from flextrain.strategies.parts import full_weights
from flextrain.strategies.parts.whole_weights import empty, fill
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from .whole_models import batch, generated, language_model

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers")

DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap="blocks")
ZERO3 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0))
ZERO2 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2))
TP = dict(type="MeshStrategy", tp=2)
PP = dict(type="MeshStrategy", pp=2)
FULL = pytest.mark.full
HALF = dict(mixed_precision=dict(param_dtype="bfloat16"))


class Run:
    """A strategy with a model that is trained for two updates, and one device that has made the same."""

    def __init__(self, strategy: dict[str, Any], build: Callable[[], nn.Module]) -> None:
        self.strategy: Strategy = STRATEGIES.build(dict(strategy), "strategy")
        self.strategy.join()
        self.rank = int(os.environ["RANK"])
        self.reference = build()
        self._of_reference = torch.optim.SGD(self.reference.parameters(), lr=0.1)
        self.called, optim = self.strategy.setup(build(), OptimWrapper(dict(type="SGD", lr=0.1)))
        assert isinstance(optim, OptimWrapper)
        self.optim = optim

    def train(self, seed: int = 0) -> list[float]:
        """Two updates, of the reference too."""
        trace = train(self.strategy, self.called, self.optim, [[batch(seed)], [batch(seed + 1)]])
        self.reference.train()
        for number in (seed, seed + 1):
            self.reference(**batch(number)).loss.backward()
            self._of_reference.step()
            self._of_reference.zero_grad()
        return trace.losses


@contextmanager
def running(strategy: dict[str, Any], kind: str = "llama", tied: bool = False, width: int = 16) -> Iterator[Run]:
    run = Run(strategy, lambda: language_model(kind, tied, width=width))
    try:
        yield run
    finally:
        run.strategy.leave()


def generates_as_one_device(strategy: dict[str, Any], kind: str, tied: bool, by_layer: bool) -> None:
    with running(strategy, kind, tied) as run:
        with full_weights(run.strategy, by_layer=by_layer) as model:
            assert generated(model, run.rank) == generated(run.reference, run.rank)
        first = run.train()
        untrained = dict(language_model(kind, tied).named_parameters())
        assert not any(torch.equal(own, untrained[name]) for name, own in run.reference.named_parameters())
        with full_weights(run.strategy, by_layer=by_layer) as model:
            assert type(model) is type(run.reference)
            for name, parameter in model.named_parameters() if not by_layer else ():
                torch.testing.assert_close(parameter, run.reference.get_parameter(name))
                assert type(parameter) is nn.Parameter
            assert generated(model, run.rank) == generated(run.reference, run.rank)
        second = run.train(2)
        losses = [*first, *second]
    with running(strategy, kind, tied) as run:
        assert losses == [*run.train(), *run.train(2)]  # as if nothing had been generated between


CP = dict(type="MeshStrategy", cp=2)
STRATEGIES_OF_TWO = {"cp2": CP, "ddp": DDP, "zero2": ZERO2, "fsdp": FSDP, "zero3": ZERO3, "tp2": TP, "pp2": PP}
QUICK = {
    ("ddp", "llama", False, False), ("fsdp", "gpt2", True, False), ("zero3", "llama", False, False), ("tp2", "gpt2", True, False),
    ("pp2", "llama", True, False), ("pp2", "gpt2", False, True),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=() if case in QUICK else FULL)
    for case in itertools.product(STRATEGIES_OF_TWO, ("llama", "gpt2"), (False, True), (False, True))
]


@pytest.mark.parametrize(("strategy", "kind", "tied", "by_layer"), CASES)
def test_text_is_that_of_one_device(
    workers2: WorkerGroup, strategy: str, kind: str, tied: bool, by_layer: bool
) -> None:
    workers2.run(generates_as_one_device, STRATEGIES_OF_TWO[strategy], kind, tied, by_layer)


@FULL
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by_layer"])
@pytest.mark.parametrize("sizes", [dict(dp_shard=2, tp=2), dict(dp_shard=2, pp=2), dict(tp=2, pp=2)], ids=str)
def test_text_under_meshes_of_four(
    workers: Callable[[int], WorkerGroup], sizes: dict[str, int], by_layer: bool
) -> None:
    strategy = dict(type="MeshStrategy", wrap="blocks", **sizes)
    for kind, tied in (("llama", False), ("gpt2", True)):
        workers(4).run(generates_as_one_device, strategy, kind, tied, by_layer)


# What stays as it was


def restores(strategy: dict[str, Any]) -> None:
    with running(strategy) as run:
        run.train()
        module = run.strategy.module
        module.get_submodule("model.layers.0").eval()
        frozen = next(module.parameters())
        before = [(part, part.training) for part in module.modules()]
        state = {name: tensor.clone() for name, tensor in run.strategy.model_state().items()}
        kinds = {name: type(parameter) for name, parameter in module.named_parameters()}
        kept: list[Any] = []

        def fail() -> None:
            with full_weights(run.strategy) as model:
                kept.append(model)
                model.train()
                if model is module:
                    frozen.requires_grad_(False)
                raise KeyError("inside")

        with pytest.raises(KeyError, match="inside"):
            fail()
        assert all(part.training == training for part, training in before)
        assert frozen.requires_grad
        assert {name: type(parameter) for name, parameter in run.strategy.module.named_parameters()} == kinds
        for name, tensor in run.strategy.model_state().items():
            assert torch.equal(_local(tensor), _local(state[name]))
        if kept[0] is not module:  # one that was kept has no memory
            assert all(parameter.is_meta for parameter in kept[0].parameters())
        run.train(2)
        with full_weights(run.strategy) as model:
            assert generated(model, run.rank) == generated(run.reference, run.rank)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", [FSDP, *(pytest.param(one, marks=FULL) for one in (DDP, PP, ZERO3, TP))])
def test_flags_weights_and_layouts_are_restored_after_an_error_inside(
    workers2: WorkerGroup, strategy: dict[str, Any]
) -> None:
    workers2.run(restores, strategy)


def refuses_writes(strategy: dict[str, Any]) -> None:
    with running(strategy) as run:
        with (
            pytest.raises(StrategyError, match=r"full_weights: model.model.norm.weight was written to inside"),
            full_weights(run.strategy) as model,
            torch.no_grad(),
        ):
            model.model.norm.weight.mul_(2)
        if strategy == FSDP:  # all of it is sharded
            with full_weights(run.strategy) as model:
                assert float(model.model.norm.weight.detach().max()) == 1.0


@pytest.mark.parametrize("strategy", [DDP, FSDP, pytest.param(PP, marks=FULL)], ids=["ddp", "fsdp", "pp2"])
def test_writes_inside_are_refused(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    workers2.run(refuses_writes, strategy)


# Who gets them, and how much memory that takes


def some_ranks(strategy: dict[str, Any]) -> None:
    with running(strategy) as run:
        run.train()
        for by_layer in (False, True):
            with full_weights(run.strategy, ranks=[1], by_layer=by_layer) as model:
                assert (model is None) == (run.rank == 0)
                if model is not None:
                    assert generated(model, 1) == generated(run.reference, 1)


@pytest.mark.parametrize(
    "strategy", [FSDP, pytest.param(DDP, marks=FULL), pytest.param(PP, marks=FULL), pytest.param(ZERO3, marks=FULL)]
)
def test_only_some_processes_ask(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    workers2.run(some_ranks, strategy)


def an_error_of_one_process_layer_by_layer() -> None:
    with running(FSDP) as run:
        try:
            with full_weights(run.strategy, by_layer=True) as model:
                if run.rank == 0:
                    raise KeyError("one process")
                assert generated(model, 1) == generated(run.reference, 1)
        except KeyError:
            assert run.rank == 0
        run.train()


def test_layer_by_layer_the_others_go_on_after_an_error_of_one(workers2: WorkerGroup) -> None:
    workers2.run(an_error_of_one_process_layer_by_layer)


def peak(act: Callable[[], object]) -> int:
    """The most bytes of tensors that ``act`` had at the same time, of those that it made."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        act()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def measured(strategy: dict[str, Any], by_layer: bool) -> tuple[int, int]:
    """Peaks of entering the context and calling the model, and the smallest limit that is enough."""
    with running(strategy, width=96) as run:  # a matrix is much larger than activations of one token
        run.train()
        low, high = 1, 2**30
        while low < high:  # the smallest limit that is not refused
            middle = (low + high) // 2
            try:
                with full_weights(run.strategy, memory_limit=middle, by_layer=by_layer):
                    high = middle
            except StrategyError:
                low = middle + 1

        def act() -> None:
            with full_weights(run.strategy, memory_limit=low, by_layer=by_layer) as model, torch.no_grad():
                model.eval()(torch.tensor([[3]]), use_cache=False)

        return peak(act), low


@pytest.mark.parametrize(
    "strategy", [FSDP, pytest.param(ZERO3, marks=FULL), pytest.param(TP, marks=FULL), pytest.param(PP, marks=FULL)]
)
def test_memory_stays_under_the_limit(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    whole = sum(p.numel() * 4 for p in language_model("llama", width=96).parameters())
    for by_layer in (False, True):
        for used, limit in workers2.run(measured, strategy, by_layer):
            activations = 8192  # of one token, and messages; a matrix is nine times that
            assert whole * 0.2 < used <= limit + activations
            assert limit < whole * (0.9 if by_layer else 2)


def limits() -> None:
    with running(FSDP) as run:
        with (
            pytest.raises(
                StrategyError,
                match=r"memory_limit: 1000 bytes is not enough, the whole .* need .* KiB, and .* layer by",
            ),
            full_weights(run.strategy, memory_limit=1000),
        ):
            raise AssertionError("not reached")
        with (
            pytest.raises(StrategyError, match=r"1000 bytes is not enough, .* KiB are needed layer by layer"),
            full_weights(run.strategy, memory_limit=1000, by_layer=True),
        ):
            raise AssertionError("not reached")
        with (
            pytest.raises(ConfigError, match='"2 GiX" is not allowed, give bytes'),
            full_weights(run.strategy, memory_limit="2 GiX"),
        ):
            raise AssertionError("not reached")
        with (
            pytest.raises(ConfigError, match="ranks: 2 is not allowed, give numbers from 0 to 1"),
            full_weights(run.strategy, ranks=[2]),
        ):
            raise AssertionError("not reached")
        with (
            pytest.raises(ConfigError, match="its arguments differ between processes"),
            full_weights(run.strategy, ranks=[run.rank]),
        ):
            raise AssertionError("not reached")
        with (
            full_weights(run.strategy, memory_limit="1MiB"),
            pytest.raises(StrategyError, match="is open already"),
            full_weights(run.strategy),
        ):
            raise AssertionError("not reached")
        with full_weights(run.strategy):
            pass


def test_what_is_refused(workers2: WorkerGroup) -> None:
    workers2.run(limits)


# Precision


def in_half_precision(strategy: dict[str, Any]) -> None:
    with running(strategy) as run:
        run.train()
        ids = torch.tensor([[3, 4]])
        run.called.eval()
        with torch.no_grad():
            live = run.called(ids, use_cache=False).logits
        with full_weights(run.strategy) as model, torch.no_grad():
            assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
            found = model(ids, use_cache=False).logits
            assert found.dtype == live.dtype
            tolerance = (
                0.0 if strategy["type"] != "MeshStrategy" else 0.05
            )  # sums over processes round in another order
            torch.testing.assert_close(found, live, rtol=tolerance, atol=tolerance)
            generated(model, run.rank)


@FULL
@pytest.mark.parametrize(
    "strategy", [{**FSDP, **HALF}, {**ZERO3, "bf16": dict(enabled=True)}, {**TP, **HALF}], ids=["fsdp", "zero3", "tp2"]
)
def test_in_half_precision_it_computes_as_evaluation_does(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    workers2.run(in_half_precision, strategy)


# The copy of a model


class Helper:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


class Unusual(nn.Module):
    """Refers to its parts in ways that are no submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.order = [self.second, self.first]
        self.by_name = {"one": (self.first, 1)}
        self.helper = Helper(self)
        self.act = self.squared
        self.plain = torch.ones(1)
        self.scale = 1.0
        self.settings = {"shared": True}
        self.cell = nn.LSTM(3, 3)
        self.register_buffer("shift", torch.ones(3), persistent=False)
        self.first.register_forward_hook(lambda module, args, output: output * self.scale)

    def squared(self, x: Tensor) -> Tensor:
        return x**2

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.helper.model.order:
            x = self.act(layer(x)) + self.shift
        return self.cell(x)[0]  # type: ignore[no-any-return]


def test_a_copy_refers_to_its_own_parts_only() -> None:
    model = Unusual()
    blueprint = Blueprint(model, lambda tensor: tensor.shape)
    blueprint.follow()
    model.scale = 2.0
    copy, tensors = blueprint.build()
    assert isinstance(copy, Unusual)
    assert all(tensor.is_meta for tensor in tensors.values())
    assert copy.second.weight is copy.first.weight
    assert copy.order == [copy.second, copy.first]
    assert copy.by_name["one"][0] is copy.first
    assert copy.helper.model is copy
    assert copy.act.__self__ is copy  # type: ignore[attr-defined]
    assert copy.plain is model.plain
    assert copy.settings is model.settings
    assert copy.scale == 2.0
    for name, tensor in tensors_of(model).items():
        fill(tensors[name], tensor.detach())
    x = torch.randn(2, 1, 3)
    torch.testing.assert_close(copy(x), model(x))
    empty(copy, tensors)
    assert all(parameter.is_meta for parameter in copy.parameters())


def test_a_script_module_is_refused_where_it_would_be_copied() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    blueprint = Blueprint(model, lambda tensor: tensor.shape)
    with pytest.raises(StrategyError, match=r"model\.0 is a ScriptModule"):
        blueprint.build()
