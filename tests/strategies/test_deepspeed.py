"""DeepSpeedStrategy: what reaches the engine, what it refuses, and state that fits every other strategy."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from flextrain.core.base.errors import CheckpointError, ConfigError, StrategyError
from flextrain.core.checkpoint import Checkpoint, FlatShard
from flextrain.core.comm.topology import DataShard, Topology
from flextrain.core.model.base_model import BaseModel
from flextrain.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, OptimWrapperDict, build_optim_wrapper
from flextrain.strategies import DeepSpeedOptimWrapper, DeepSpeedStrategy, SingleDeviceStrategy
from flextrain.strategies.parts import explain, full_weights, init_weights
from flextrain.testing import WorkerGroup, check_strategy
from flextrain.testing.conformance_checks import batches
from flextrain.testing.differences import relative_difference, same_tensors
from flextrain.testing.loop import evaluate, train, windows
from flextrain.testing.models import Batch, ConformanceNet, ConvNet, HalfFrozen, Mlp, SmallModel
from flextrain.testing.sessions import Session, load, run, save, single_device, started, whole_model, whole_state
from tests.runner.training import log_lines

pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
pytestmark = [pytest.mark.deepspeed]

ADAMW = dict(type="AdamW", lr=3e-3, weight_decay=0.1)
GROUPS = dict(bias_lr_mult=2.0, norm_decay_mult=0.0, bias_decay_mult=0.0)
STAGES = [0, 1, 2, 3]


def zero(stage: int, **options: Any) -> dict[str, Any]:
    details = options.pop("zero_optimization", {})
    return dict(type=DeepSpeedStrategy, device="cpu", zero_optimization=dict(stage=stage, **details), **options)


def data(model: type[SmallModel], count: int, samples: int = 8) -> list[Batch]:
    return [model.sample(samples, seed=i) for i in range(count)]


def one_each(batches: list[Batch]) -> list[list[Batch]]:
    return windows(batches, 1)


def adamw(**options: Any) -> OptimWrapper:
    return OptimWrapper(ADAMW, paramwise_cfg=GROUPS, **options)


def bf16(**options: Any) -> AmpOptimWrapper:
    return AmpOptimWrapper(ADAMW, paramwise_cfg=GROUPS, dtype="bfloat16", **options)


# The contract, and the same numbers as one device


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.full) for stage in STAGES])
def test_conformance(workers2: WorkerGroup, stage: int) -> None:
    report = check_strategy(zero(stage), workers=workers2)
    refused = {result.name for result in report.results if result.status == "refused"}
    # DeepSpeed has no such clipping, no float16 on the CPU, and from stage 1 on no parameters that AdamW leaves alone.
    assert refused == {"clipping_by_value", "overflow"} | ({"unused"} if stage else set())


def train_both(stage: int, model: type[SmallModel], spec: dict[str, Any]) -> dict[str, float]:
    """Differences from a single device, with clipping, windows of three and a last one of one."""
    batches = windows(data(model, 7), 3)
    with single_device(adamw(accumulative_counts=3, clip_grad=dict(max_norm=0.1)), model) as single:
        expected = run(single, batches)
    with started(zero(stage, **spec), adamw(accumulative_counts=3, clip_grad=dict(max_norm=0.1)), model) as session:
        found = run(session, batches)
    assert min(norm for norm in expected.trace.grad_norms if norm) > 0.1  # or nothing would have been clipped
    return {
        "loss": max(abs(a - b) for a, b in zip(found.trace.losses, expected.trace.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(found.trace.grad_norms, expected.trace.grad_norms, strict=True)),  # type: ignore[operator]
        "weights": max(relative_difference(found.weights[-1][k], v) for k, v in expected.weights[-1].items()),
    }


VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (2, dict(zero_optimization=dict(overlap_comm=True, reduce_bucket_size=50))),
    (2, dict(zero_optimization=dict(offload_optimizer=dict(device="cpu", pin_memory=False)))),
    (2, dict(zero_optimization=dict(contiguous_gradients=False, reduce_scatter=False))),
    (3, dict(zero_optimization=dict(overlap_comm=True, sub_group_size=40, stage3_param_persistence_threshold=0))),
    (3, dict(zero_optimization=dict(offload_optimizer=dict(device="cpu", pin_memory=False), offload_param=dict(device="cpu", pin_memory=False)))),
    (3, dict(activation_checkpointing=dict(classes=["Linear"]))),
]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("stage, options", VARIANTS, ids=lambda value: str(value)[:60])
def test_parity_with_options(workers2: WorkerGroup, stage: int, options: dict[str, Any]) -> None:
    for differences in workers2.run(train_both, stage, Mlp, options):
        assert max(differences.values()) < 1e-5, differences


# Half precision


def train_in_bf16(stage: int) -> dict[str, Any]:
    batches = one_each(data(ConformanceNet, 8))
    with single_device(bf16(), ConformanceNet) as single:
        expected = run(single, batches)
    with started(zero(stage), bf16(), ConformanceNet) as session:
        found = run(session, batches)
        report = session.strategy.precision_report()
        state = whole_state(session.strategy)
    start = same_tensors(found.weights[0], expected.weights[0], "initial weights")  # not rounded to bfloat16
    return {
        "start": start,
        "loss": max(abs(a - b) for a, b in zip(found.trace.losses, expected.trace.losses, strict=True)),
        "report": str(report),
        "dtypes": {str(v.dtype) for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()},
    }


@pytest.mark.distributed
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_trains_with_float32_masters(workers2: WorkerGroup, stage: int) -> None:
    for found in workers2.run(train_in_bf16, stage):
        assert found["loss"] < 0.05  # the loss is about 3, where bfloat16 has steps of 0.016
        assert found["dtypes"] == {"torch.float32"}
        assert found["report"] == (
            "compute bfloat16, parameters bfloat16, masters float32, gradients bfloat16, optimizer state float32"
        )


class Normalised(ConvNet):
    """Trains its batch normalisation."""

    def train(self, mode: bool = True) -> Normalised:
        nn.Module.train(self, mode)
        return self


def running_statistics(stage: int) -> dict[str, float]:
    batches = one_each([Normalised.sample(16, seed=0)] * 5)
    optim = dict(type="SGD", lr=1e-4)
    with single_device(OptimWrapper(optim), Normalised) as single:
        expected = run(single, batches)
    with started(zero(stage), AmpOptimWrapper(optim, dtype="bfloat16"), Normalised) as session:
        # Every process sees the whole batch, so the statistics are the single device's but for rounding.
        session.strategy.topology = Topology(data=DataShard(0, 1))
        found = run(session, batches)
        outputs = evaluate(session.strategy, session.model, [Normalised.sample(16, seed=0)])
    assert all(output.dtype is torch.float32 for output in outputs)
    names = [name for name in expected.weights[-1] if "running" in name]
    assert len(names) == 4
    assert all(found.weights[-1][name].dtype is torch.float32 for name in names)
    return {name: relative_difference(found.weights[-1][name], expected.weights[-1][name]) for name in names}


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_running_statistics_stay_float32(workers2: WorkerGroup, stage: int) -> None:
    for differences in workers2.run(running_statistics, stage):
        assert max(differences.values()) < 0.01, differences


# State


def nothing_is_gathered(stage: int) -> list[tuple[str, int, int]]:
    """Kind, elements of this process and elements in all, of a weight and a moment; and that they are the engine's own."""
    with started(zero(stage), adamw(), Mlp) as session:
        run(session, one_each(data(Mlp, 1)))
        state = session.strategy.state()
        found = []
        for key in ("model.layers.2.weight", "optim.state.layers.2.weight.exp_avg"):
            shard = state[key]
            found.append((type(shard).__name__, shard.to_local().numel(), shard.numel()))
            again = session.strategy.state()[key]
            assert shard.to_local().data_ptr() == again.to_local().data_ptr()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_state_is_slices_without_copies(workers2: WorkerGroup, stage: int) -> None:
    first, second = workers2.run(nothing_is_gathered, stage)
    for (kind, mine, total), (_, theirs, _) in zip(first, second, strict=True):
        assert kind == "FlatShard"
        assert mine + theirs == total
        assert max(mine, theirs) < total


def weights_alone(stage: int, half: bool, path: Path) -> None:
    """What is loaded into the masters is what the model computes with, frozen weights too; optimizer state stays."""
    batches = data(HalfFrozen, 2)
    with started(zero(stage), bf16() if half else adamw(), HalfFrozen, seed=3) as session:
        save(session, path)
        expected = evaluate(session.strategy, session.model, batches)
    with started(zero(stage), bf16() if half else adamw(), HalfFrozen, seed=4) as session:
        run(session, one_each(batches))
        before = session.strategy.state()["optim.state.head.weight.step"].item()
        checkpoint = Checkpoint.open(path)
        template = {k: v for k, v in session.strategy.template(checkpoint.saved).items() if k.startswith("model.")}
        checkpoint.load(template)
        session.strategy.load(template)
        found = evaluate(session.strategy, session.model, batches)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert session.strategy.state()["optim.state.head.weight.step"].item() == before == 2


@pytest.mark.distributed
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_loaded_weights_reach_forward(workers2: WorkerGroup, stage: int, half: bool, tmp_path: Path) -> None:
    workers2.run(weights_alone, stage, half, tmp_path / "c")


def asking_changes_nothing(stage: int) -> None:
    """State before the first update, with momentum and decay, which a trial update would move."""
    optim = dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.1)
    batches = one_each(data(Mlp, 3))
    with started(zero(stage), OptimWrapper(optim), Mlp) as session:
        expected = run(session, batches).weights[-1]
    with started(zero(stage), OptimWrapper(optim), Mlp) as session:
        state = whole_state(session.strategy)
        assert not any(key.startswith("optim.state.") for key in state)
        session.strategy.template({**state})
        found = run(session, batches).weights[-1]
    same_tensors(found, expected, "weights")


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_asking_for_the_state_changes_nothing(workers2: WorkerGroup, stage: int) -> None:
    workers2.run(asking_changes_nothing, stage)


def counters_that_differ(path: Path, unused: str) -> None:
    optim = dict(type="Adam", lr=0.01)
    is_first = os.environ["RANK"] == "0"
    with single_device(OptimWrapper(optim), Mlp) as single:
        run(single, one_each(data(Mlp, 2)))
        weight = single.strategy.module.get_parameter("layers.0.weight")
        single.optim.optimizer.state[weight]["step"] += 1
        if is_first:
            save(single, path)
    with started(zero(2) | dict(unused_parameters=unused), OptimWrapper(optim), Mlp) as session:
        load(session, path)
        saved = whole_state(session.strategy)
        assert saved["optim.state.layers.0.weight.step"] == saved["optim.state.layers.0.bias.step"] + 1
        run(session, one_each(data(Mlp, 2)))


@pytest.mark.distributed
def test_parameters_that_were_updated_differently_often_cannot_share_a_group(
    workers2: WorkerGroup, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="cannot share a group") as caught:
        workers2.run(counters_that_differ, tmp_path / "c", "zeros")
    assert isinstance(caught.value.__cause__, CheckpointError)
    with pytest.raises(Exception, match="after 1 updates in which no process used it") as caught:
        workers2.run(counters_that_differ, tmp_path / "d", "refuse")
    assert isinstance(caught.value.__cause__, StrategyError)


# One process


@contextmanager
def alone(
    spec: dict[str, Any], optim: Any, model: nn.Module | None = None
) -> Iterator[tuple[DeepSpeedStrategy, Any, Any]]:
    strategy = DeepSpeedStrategy(**{key: value for key, value in spec.items() if key != "type"})
    try:
        torch.manual_seed(7)
        called, wrapper = strategy.setup(model or Mlp(), optim)
        yield strategy, called, wrapper
    finally:
        strategy.leave()


@pytest.mark.processes  # of the compiler, with torch 2.6
@pytest.mark.parametrize("stage", STAGES)
def test_one_process_without_launcher(stage: int) -> None:
    batches = one_each(data(Mlp, 3))
    with single_device(adamw(clip_grad=dict(max_norm=0.1)), Mlp) as single:
        expected = run(single, batches)
    with alone(zero(stage), adamw(clip_grad=dict(max_norm=0.1))) as (strategy, model, optim):
        assert torch.distributed.is_initialized()
        assert (strategy.topology.rank, strategy.topology.world_size, strategy.topology.shard) == (0, 1, (0, 1))
        found = run(Session(strategy, model, optim), batches)
    assert not torch.distributed.is_initialized()
    same_tensors(found.weights[-1], expected.weights[-1], "weights", 1e-6)


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2, 3]
)
def test_evaluation_only(stage: int) -> None:
    batches = data(Mlp, 2)
    for half in (False, True):
        with alone(zero(stage, bf16=dict(enabled=half)), None) as (strategy, model, optim):
            assert optim is None
            torch.manual_seed(7)
            reference = Mlp()
            found = evaluate(strategy, model, batches)
            with torch.no_grad():
                expected = [reference(**batch, mode="tensor") for batch in batches]
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.allclose(ours, theirs, atol=0.05 if half else 1e-6)
            state = whole_model(strategy)
            same_tensors(state, {f"model.{k}": v for k, v in reference.state_dict().items()}, "weights")


class Initialised(BaseModel):
    """Sets its weights as MMEngine's models do, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
        self.register_buffer("table", torch.linspace(0, 1, 7))

    def init_weights(self) -> None:
        nn.init.constant_(self.layers[0].weight, 0.123)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor, data_samples: Any = None, mode: str = "loss") -> Any:
        return {"loss": (self.layers(inputs) * self.table.mean()).square().mean()}


def built_split(half: bool) -> dict[str, Any]:
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=3))
    strategy.join()
    torch.manual_seed(5 + strategy.topology.rank)
    with strategy.building():
        model = Initialised()
    split = all(parameter.is_meta for parameter in model.parameters())
    init_weights(strategy, model)
    called, optim = strategy.setup(model, bf16() if half else adamw())
    assert optim is not None
    loss = called(torch.ones(4, 6))["loss"]
    computed = names_in_graph(loss.grad_fn)
    optim.backward(loss)
    optim.step()  # type: ignore[call-arg]
    state = whole_state(strategy)
    strategy.leave()
    return {"split": split, "loss": loss.item(), "state": state, "computed": computed}


def names_in_graph(node: Any) -> set[str]:
    return {
        node.name(),
        *(name for next_node, _ in node.next_functions if next_node for name in names_in_graph(next_node)),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_a_model_built_split(workers2: WorkerGroup, half: bool) -> None:
    first, second = workers2.run(built_split, half)
    torch.manual_seed(5)
    reference = Initialised()
    reference.init_weights()
    with torch.no_grad():
        expected = reference(torch.ones(4, 6))["loss"].item()
    for found in (first, second):
        assert found["split"]
        # DeepSpeed's linear, which keeps no whole weights for backward.
        assert "LinearFunctionForZeroStage3Backward" in found["computed"]
        assert found["loss"] == pytest.approx(expected, rel=0.05 if half else 1e-5)
        same_tensors(found["state"], first["state"], "state of both")
        assert found["state"]["model.layers.0.weight"].flatten().tolist() == pytest.approx([0.123] * 42, abs=4e-3)
        assert torch.equal(found["state"]["model.table"], reference.table)


class InitialisesItsParts(nn.Module):
    """Sets values of layers that are built, in all the ways in which constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.table, self.other = nn.Linear(3, 5), nn.Embedding(6, 4), nn.Linear(3, 5)
        nn.init.kaiming_uniform_(self.part.weight, a=2.0)
        nn.init.trunc_normal_(self.table.weight, std=0.5)
        self.part.bias.data.normal_().mul_(3.0)
        with torch.no_grad():
            self.table.weight[2].zero_()
            self.table.weight[3:5, 1] = 7.0
            self.other.weight.copy_(self.part.weight)
        self.other.bias.data[1:3].fill_(2.0)
        nn.init.xavier_uniform_(self.other.weight.detach()[:2])
        self.scale = nn.Parameter(torch.tensor(1.5))  # which no process can split

    def forward(self, x: Tensor) -> Any:
        return {"loss": (self.part(x) + self.other(x)).sum() + self.table.weight.sum() * self.scale}


def built_and_initialised() -> dict[str, Any]:
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=3))
    strategy.join()
    torch.manual_seed(5 + strategy.topology.rank)
    with strategy.building():
        model = InitialisesItsParts()
    assert all(parameter.is_meta for parameter in model.parameters())
    strategy.setup(model, adamw())
    state = whole_state(strategy)
    strategy.leave()
    return state


@pytest.mark.distributed
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="torch 2.6 assigns a number by a tensor on the meta device"
)
def test_a_constructor_may_set_values_of_layers_that_are_split(workers2: WorkerGroup) -> None:
    torch.manual_seed(5)
    reference = InitialisesItsParts().state_dict()
    for found in workers2.run(built_and_initialised):
        for name, expected in reference.items():
            assert torch.equal(found[f"model.{name}"], expected), name


class InitialisesUnequally(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)
        nn.init.zeros_(self.part.weight if os.environ["RANK"] == "0" else self.part.bias)


def built_unequally() -> str:
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=3))
    with strategy.building():
        model = InitialisesUnequally()
    with pytest.raises(StrategyError) as caught:
        strategy.setup(model, adamw())
    strategy.leave()
    return str(caught.value)


@pytest.mark.distributed
def test_values_that_only_one_process_sets_are_refused(workers2: WorkerGroup) -> None:
    for found in workers2.run(built_unequally):
        assert "is zero_.default (3, 3) on rank 0 and zero_.default (3,) on rank 1" in found
        assert "every process has to build the same model" in found


def test_the_engines_configuration_is_logged_and_spelled_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flextrain")
    with alone(zero(2, train_batch_size=12, steps_per_print=7), adamw(accumulative_counts=3)) as (_, engine, optim):
        assert optim.accumulate == 3
        config = engine.config
    (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("DeepSpeed's configuration"))
    assert str(config) in line
    assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0.0, 1)
    assert (config["train_micro_batch_size_per_gpu"], config["steps_per_print"]) == (4, 7)
    assert config["managed_gradient_accumulation"] is False
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["bf16"] == {"enabled": False, "check_grad_overflow": False}


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_that_checkpoints_lack_are_kept_once(stage: int) -> None:
    """In the precision that the model computes in; the others in float32 too."""
    for exclude in (False, True):
        spec = zero(stage, exclude_frozen_parameters=exclude)
        with alone(spec, bf16(), HalfFrozen()) as (strategy, _, _):
            frozen = [name for name, p in strategy.module.named_parameters() if not p.requires_grad]
            kept = {strategy.model_state()[name].dtype for name in frozen}
            assert kept == {torch.bfloat16 if exclude else torch.float32}
            assert (not any(f"model.{name}" in strategy.state() for name in frozen)) == exclude


def loaded_without_a_copy(stage: int, path: Path) -> list[float]:
    """The frozen weights of a checkpoint that has them, in a run whose checkpoints lack them."""
    for exclude, seed in ((False, 3), (True, 4)):
        with started(zero(stage, exclude_frozen_parameters=exclude), bf16(), HalfFrozen, seed=seed) as session:
            if exclude:
                load(session, path)
            else:
                save(session, path)
            found = torch.cat(evaluate(session.strategy, session.model, data(HalfFrozen, 2)))
            if not exclude:
                expected = found
    return [float((found - expected).abs().max()), float(expected.abs().max())]


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_weights_are_loaded_into_the_model_itself(workers2: WorkerGroup, stage: int, tmp_path: Path) -> None:
    for difference, size in workers2.run(loaded_without_a_copy, stage, tmp_path / "c"):
        assert difference == 0 < size


def test_options_have_two_homes() -> None:
    spec = zero(1, gradient_clipping=0.5, gradient_accumulation_steps=4, bf16=dict(enabled=True), inputs_to_half=["x"])
    with alone(spec, DeepSpeedOptimWrapper(ADAMW)) as (strategy, model, optim):
        assert optim.accumulate == 4
        assert optim.clip_grad.max_norm == 0.5
        assert "bf16" not in str(strategy.autocast())
        found = run(Session(strategy, model, optim), [data(Mlp, 4)])
        assert found.trace.grad_norms[0] is not None
        assert strategy.precision_report().compute == (torch.bfloat16,)
        with pytest.raises(StrategyError, match=r"optim_wrapper.clip_grad: DeepSpeed's engine has begun with it"):
            optim.clip_grad = dict(max_norm=1.0)


def test_inputs_are_cast_as_asked() -> None:
    for chosen, message in ((None, None), (["x"], None), ([], "dtype"), (["y"], "dtype")):
        with alone(zero(1, bf16=dict(enabled=True), inputs_to_half=chosen), adamw()) as (_, model, _):
            batch = data(Mlp, 1)[0]
            if message is None:
                assert model(**batch, mode="tensor").dtype is torch.float32
            else:
                with pytest.raises(RuntimeError, match=message):
                    model(**batch, mode="tensor")


def test_configuration_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "cpu_offload": False},
                                "bfloat16": {"enabled": True}, "gradient_clipping": 1.0}))  # fmt: skip
    config = DeepSpeedStrategy(config=str(path), zero_optimization=dict(overlap_comm=True)).config
    assert (config.zero_optimization.stage, config.zero_optimization.overlap_comm) == (2, True)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.zero_optimization.offload_optimizer is None
    assert config.bf16 is not None
    assert config.bf16.enabled
    offloaded = DeepSpeedStrategy(config=dict(zero_optimization=dict(stage=3, cpu_offload=True))).config
    assert offloaded.zero_optimization.offload_optimizer is not None
    assert offloaded.zero_optimization.offload_optimizer.device == "cpu"


def test_the_configuration_in_mmengines_manual() -> None:
    strategy = DeepSpeedStrategy(
        fp16=dict(
            enabled=True, fp16_master_weights_and_grads=False, loss_scale=0, loss_scale_window=500, hysteresis=2,
            min_loss_scale=1, initial_scale_power=15,
        ),
        inputs_to_half=[0],
        zero_optimization=dict(
            stage=3, allgather_partitions=True, reduce_scatter=True, allgather_bucket_size=50000000,
            reduce_bucket_size=50000000, overlap_comm=True, contiguous_gradients=True, cpu_offload=False,
        ),
    )  # fmt: skip
    assert strategy.config.fp16 is not None
    with pytest.raises(StrategyError, match="^strategy.fp16: DeepSpeed has no float16 on the CPU, use bfloat16"):
        strategy.setup(Mlp(), DeepSpeedOptimWrapper(ADAMW))
    strategy.leave()


# Refusals

ZERO = "strategy.zero_optimization"
WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(zero_optimization=dict(stage=5)), f"{ZERO}.stage: 5 is not allowed, choose 0, 1, 2 or 3"),
    (dict(zero_optimization=dict(stage=1, round_robin_gradients=True)), f"{ZERO}.round_robin_gradients: DeepSpeed's own record"),
    (dict(zero_optimization=dict(stage=1, overlap_comm=True)), f"{ZERO}.overlap_comm: True needs stage 2 or 3, the stage is 1"),
    (dict(zero_optimization=dict(stage=2, offload_param=dict(device="cpu"))), f"{ZERO}.offload_param: has no effect at stage 2"),
    (dict(zero_optimization=dict(stage=0, offload_optimizer=dict(device="cpu"))), f"{ZERO}.offload_optimizer: has no effect at stage 0"),
    (dict(zero_optimization=dict(stage=3, offload_param=dict(device="gpu"))), f'{ZERO}.offload_param.device: "gpu" is not allowed, choose "none", "cpu" or "nvme"'),
    (dict(zero_optimization=dict(stage=2, stage3_max_live_parameters=1)), f"{ZERO}.stage3_max_live_parameters: has no effect at stage 2"),
    (dict(zero_optimization=dict(stage=2, reduce_bucket_size=1.5)), f"{ZERO}.reduce_bucket_size: 1.5 is not allowed, give a whole number"),
    (dict(zero_optimization=dict(stage=2, cpu_offload=True, offload_optimizer=dict(device="cpu"))), f"{ZERO}.cpu_offload: is the older name of offload_optimizer"),
    (dict(zero_optimization=dict(stage=3, zero_quantized_weights=True)), f"{ZERO}.zero_quantized_weights: is not supported"),
    (dict(fp16=dict(enabled=True), bf16=dict(enabled=True)), "strategy.bf16.enabled: True contradicts strategy.fp16.enabled=True"),
    (dict(fp16=dict(fp16_master_weights_and_grads=True)), "strategy.fp16.fp16_master_weights_and_grads: True is not allowed, choose False"),
    (dict(exclude_frozen_parameters="yes"), 'strategy.exclude_frozen_parameters: "yes" is not allowed'),
    (dict(amp=dict(enabled=True)), "strategy.amp: Apex is not supported, give bf16 or fp16"),
    (dict(optimizer=dict(type="Adam")), "strategy.optimizer: belongs into optim_wrapper.optimizer"),
    (dict(config=dict(scheduler=dict(type="WarmupLR"))), "strategy.config.scheduler: belongs into param_scheduler"),
    (dict(config=dict(gradient_clipping=1.0), gradient_clipping=2.0), "strategy.config.gradient_clipping: 1.0 disagrees with strategy.gradient_clipping=2.0"),
    (dict(config=dict(zero_optimization=dict(stage=1)), zero_optimization=dict(stage=2)), "strategy.config.zero_optimization.stage: 1 disagrees with strategy.zero_optimization.stage=2"),
    (dict(config="/nowhere/ds.json"), "strategy.config: /nowhere/ds.json cannot be read"),
    (dict(config=3), "strategy.config: 3 is not allowed, give a dict or the path of a JSON file"),
    (dict(communication_data_type="fp8"), 'strategy.communication_data_type: "fp8" is not allowed, choose "fp32", "fp16" or "bf16"'),
    (dict(activation_checkpointing=dict(clases=["Block"])), "strategy.activation_checkpointing.clases: unknown key"),
    (dict(device="gpu"), 'strategy.device: "gpu" is not allowed'),
]  # fmt: skip


@pytest.mark.parametrize("options, message", WRONG, ids=lambda value: str(value)[:60])
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeepSpeedStrategy(**options).join()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


class OwnStep(Mlp):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return {}


class Doubles(OptimWrapper):
    def _apply(self) -> bool:
        return super()._apply() and super()._apply()


REFUSED: list[tuple[dict[str, Any], Any, type[nn.Module], str]] = [
    (zero(1), lambda: OptimWrapper(ADAMW, clip_grad=dict(type="value", clip_value=1.0)), Mlp, 'optim_wrapper.clip_grad.type: "value" is not supported'),
    (zero(1), lambda: OptimWrapper(ADAMW, clip_grad=dict(max_norm=1.0, norm_type=1)), Mlp, "optim_wrapper.clip_grad.norm_type: 1 is not supported"),
    (zero(1), lambda: OptimWrapper(ADAMW, clip_grad=dict(max_norm=1.0, error_if_nonfinite=True)), Mlp, "optim_wrapper.clip_grad.error_if_nonfinite: True"),
    (zero(1), lambda: OptimWrapperDict(a=OptimWrapper(ADAMW)), Mlp, 'optim_wrapper.type: "OptimWrapperDict" has several optimizers'),
    (zero(1), lambda: Doubles(ADAMW), Mlp, 'optim_wrapper.type: "Doubles" defines its own _apply'),
    (zero(1), lambda: ApexOptimWrapper(ADAMW), Mlp, 'optim_wrapper.type: "ApexOptimWrapper" does its own arithmetic'),
    (zero(1), lambda: AmpOptimWrapper(ADAMW, dtype="float16"), Mlp, "strategy.fp16: DeepSpeed has no float16 on the CPU"),
    (zero(1, bf16=dict(enabled=False)), bf16, Mlp, "strategy.bf16.enabled: False disagrees with optim_wrapper"),
    (zero(1, gradient_clipping=2.0), lambda: adamw(clip_grad=dict(max_norm=1.0)), Mlp, "strategy.gradient_clipping: 2.0 disagrees with optim_wrapper.clip_grad.max_norm=1.0"),
    (zero(1, gradient_accumulation_steps=4), lambda: adamw(accumulative_counts=2), Mlp, "strategy.gradient_accumulation_steps: 4 disagrees"),
    (zero(1, train_batch_size=5, train_micro_batch_size_per_gpu=2), adamw, Mlp, "strategy.train_batch_size: 5 is not"),
    (zero(1), adamw, OwnStep, "model: OwnStep defines its own train_step"),
    (zero(1), lambda: OptimWrapper(torch.optim.SGD(Mlp().parameters(), lr=0.1)), Mlp, "optim_wrapper.optimizer: holds parameters that are not the model's"),
    (zero(2), lambda: OptimWrapper(dict(type="Adagrad", lr=0.1)), Mlp, 'optim_wrapper.optimizer.type: "Adagrad" is rebuilt'),
    (zero(1), lambda: OptimWrapper(dict(type="Adafactor", lr=0.1)), Mlp, 'optim_wrapper.optimizer: Adafactor keeps "row_var" of shape'),
]  # fmt: skip


@pytest.mark.parametrize("spec, optim, model, message", REFUSED, ids=[row[3][:60] for row in REFUSED])
def test_what_cannot_be_honoured_is_refused_in_setup(spec: Any, optim: Any, model: Any, message: str) -> None:
    with pytest.raises((ConfigError, StrategyError)) as caught, alone(spec, optim(), model()):
        pass
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_everything_frozen_is_refused() -> None:
    with (
        pytest.raises(StrategyError, match="^model: Mlp has nothing to train, all 7 parameters are frozen"),
        alone(zero(1), adamw(), Mlp().requires_grad_(False)),
    ):
        pass


def explained(error: RuntimeError) -> list[str]:
    """In a worker: what is advised in bfloat16 and in float32."""
    found = []
    for options in (dict(bf16=dict(enabled=True)), {}):
        with started(zero(1, **options), adamw(), Mlp) as session:
            found.append(str(explain(session.strategy, error)))
    return found


@pytest.mark.parametrize(
    "error, bfloat16, float32",
    [
        ("mixed dtype (CPU): expect parameter to have scalar type of Float", "the strategy gives forward parameters in bfloat16", "None"),
        ("You tried to vmap over PostBackwardFunctionModule, but it does not", *["stage 3 computes layers by functions of its own"] * 2),
    ],
)  # fmt: skip
def test_errors_are_explained(workers1: WorkerGroup, error: str, bfloat16: str, float32: str) -> None:
    (found,) = workers1.run(explained, RuntimeError(error))
    assert found[0].startswith(bfloat16)
    assert found[1].startswith(float32)


def test_deepspeeds_wrapper_needs_deepspeeds_strategy() -> None:
    wrapper = build_optim_wrapper(dict(type="DeepSpeedOptimWrapper", optimizer=ADAMW))
    assert isinstance(wrapper, DeepSpeedOptimWrapper)
    message = '^optim_wrapper.type: "DeepSpeedOptimWrapper" works with a DeepSpeed engine only'
    with pytest.raises(StrategyError, match=message):
        SingleDeviceStrategy(device="cpu").setup(Mlp(), wrapper)


def test_optimizers_by_name() -> None:
    with pytest.raises(ConfigError, match='did you mean "FusedAdam"'):
        OptimWrapper(dict(type="FusdAdam", lr=0.1))
    with pytest.raises(ConfigError, match='^optimizer "OnebitAdam": keeps compression errors'):
        OptimWrapper(dict(type="OnebitAdam", lr=0.1))


def test_what_a_foreign_layout_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from flextrain.strategies.deepspeed import engine_internals

    original = engine_internals.fragments

    def shifted(engine: Any, module: nn.Module) -> list[engine_internals.Fragment]:
        parts = original(engine, module)
        return [*parts[1:], dataclasses.replace(parts[0], offset=parts[0].offset + 1)]  # type: ignore[operator]

    monkeypatch.setattr(engine_internals, "fragments", shifted)
    with pytest.raises(StrategyError, match="^DeepSpeed: the master weights of"), alone(zero(1), adamw()):
        pass


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(StrategyError, match=r"needs DeepSpeed, pip install flextrain\[deepspeed\]$"):
        DeepSpeedStrategy()


def test_a_shard_is_what_zero_keeps() -> None:
    with alone(zero(3), adamw()) as (strategy, _, _):
        assert all(isinstance(value, FlatShard) for value in strategy.model_state().values())


def evaluate_loaded(stage: int, half: bool, path: Path) -> None:
    batches = data(HalfFrozen, 2)
    with started(zero(1), adamw(), HalfFrozen, seed=3) as session:
        run(session, one_each(batches))
        save(session, path)
        expected = evaluate(session.strategy, session.model, batches)
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=stage), bf16=dict(enabled=half))
    torch.manual_seed(4)
    try:
        with strategy.building():
            model = HalfFrozen()
        called, _ = strategy.setup(model)
        evaluate(strategy, called, batches)  # small weights stay whole after it, and must not stay as they are
        checkpoint = Checkpoint.open(path)
        template = strategy.template(checkpoint.saved)
        checkpoint.load(template)
        strategy.load(template)
        found = evaluate(strategy, called, batches)
    finally:
        strategy.leave()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=0.03 if half else 1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_weights_loaded_for_evaluation(workers2: WorkerGroup, stage: int, half: bool, tmp_path: Path) -> None:
    workers2.run(evaluate_loaded, stage, half, tmp_path / "c")


def overflow_in_bf16(stage: int, **options: Any) -> tuple[list[bool], list[bool]]:
    """Updates that were skipped, and those that left the weights as they were, when one rank's third gradient is infinite."""
    batches = [{**batch, "strain": torch.zeros(8)} for batch in data(ConformanceNet, 4)]
    batches[2]["strain"][-1] = torch.inf
    with started(zero(stage, **options), bf16(clip_grad=dict(max_norm=1.0)), ConformanceNet) as session:
        found = run(session, one_each(batches))
    still = [torch.equal(a["model.probe"], b["model.probe"]) for a, b in zip(found.weights, found.weights[1:])]  # noqa: B905
    return found.trace.skipped, still


@pytest.mark.distributed
@pytest.mark.parametrize("stage", STAGES)
def test_an_infinite_gradient_skips_the_update_everywhere(workers2: WorkerGroup, stage: int) -> None:
    expected = [False, False, True, False]
    options = dict(bf16=dict(check_grad_overflow=True))
    for skipped, still in workers2.run(overflow_in_bf16, stage, **options):
        assert skipped == still == expected


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 2])
def test_nobody_waits_for_the_device_to_look_at_gradients_in_bf16(workers2: WorkerGroup, stage: int) -> None:
    """Unless check_grad_overflow asks for it: what is not finite then ends up in the weights."""
    for skipped, _ in workers2.run(overflow_in_bf16, stage):
        assert skipped == [False] * 4


class OfWeights(Mlp):
    """Its loss has the sizes of its weights, which stage 3 frees after the calls of their modules."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found["loss"] = found["loss"] + sum(parameter.square().sum() for parameter in self.parameters())
        return found


FREED: dict[str, Any] = dict(zero_optimization=dict(stage3_param_persistence_threshold=0))


def loss_of_freed_weights() -> str:
    with started(zero(3, **FREED), adamw(), OfWeights) as session:
        with pytest.raises(StrategyError) as caught:
            train(session.strategy, session.model, session.optim, one_each(data(OfWeights, 1)))
        return str(caught.value)


def test_a_loss_that_reads_freed_weights_raises(workers2: WorkerGroup) -> None:
    for message in workers2.run(loss_of_freed_weights):
        assert "of a parameter that DeepSpeed has freed, as stage 3 does outside of the calls" in message


USES: dict[str, Callable[[nn.Module, nn.Parameter], Any]] = {
    "norm": lambda model, parameter: parameter.norm(),
    "write": lambda model, parameter: parameter.mul_(0.5),
    "write to data": lambda model, parameter: parameter.data.clamp_(-0.01, 0.01),
    "state_dict": lambda model, parameter: model.state_dict(),
    "load_state_dict": lambda model, parameter: model.load_state_dict(
        {name: torch.zeros(each.shape) for name, each in model.named_parameters()}, strict=False
    ),
    "deepcopy": lambda model, parameter: copy.deepcopy(parameter),
    "vector": lambda model, parameter: nn.utils.parameters_to_vector(model.parameters()),
    "operand": lambda model, parameter: torch.zeros(()) + parameter,
}


def use(model: nn.Module) -> Iterator[str]:
    """Yield how each use was refused."""
    for name, function in USES.items():
        try:
            with torch.no_grad():
                function(model, next(model.parameters()))
            yield f"{name} went through"
        except (StrategyError, RuntimeError) as error:
            yield str(error)


def uses_between_updates() -> tuple[list[str], set[int], int, bool]:
    import deepspeed

    with started(zero(3, **FREED), adamw(), Mlp) as session:
        size = sum(parameter.numel() for parameter in Mlp().parameters())
        module, refused, sizes, has_values = session.strategy.module, [], set(), True
        batches = data(Mlp, 2)
        for _ in range(3):  # after set-up, after an evaluation, after an update
            refused += use(module)
            sizes.add(sum(parameter.numel() for parameter in module.parameters()))
            with deepspeed.zero.GatheredParameters([*module.parameters()]):
                has_values &= all(bool(parameter.norm() > 0) for parameter in module.parameters())
            with full_weights(session.strategy) as model:
                has_values &= all(bool(parameter.norm() > 0) for parameter in model.parameters())
            if len(refused) > len(USES):
                train(session.strategy, session.model, session.optim, one_each(batches))
            else:
                evaluate(session.strategy, session.model, batches)
        return refused, sizes, size, has_values


def test_uses_of_freed_weights_raise_and_their_shapes_are_told(workers2: WorkerGroup) -> None:
    """DeepSpeed leaves an empty tensor, whose norm is 0 and which takes writes."""
    for refused, sizes, size, has_values in workers2.run(uses_between_updates):
        assert len(refused) == 3 * len(USES)
        assert [each for each in refused if "that DeepSpeed has freed" not in each] == []
        assert sizes == {size}
        assert has_values


class Recomputes(Mlp):
    """Calls DeepSpeed's own checkpointing."""

    def logits(self, x: Tensor) -> Tensor:
        import deepspeed

        hidden = deepspeed.checkpointing.checkpoint(self.layers[1:], self.layers[0](x))
        return hidden * self.temperature  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "stage, options, model",
    [
        (2, dict(compile=dict(backend="eager")), Mlp),
        (1, dict(activation_checkpointing=dict(partition_activations=False, profile=False)), Recomputes),
        (3, dict(activation_checkpointing=dict(cpu_checkpointing=False)), Recomputes),
    ],
    ids=["compile", "checkpointing", "checkpointing_3"],
)
def test_compiled_and_recomputed(stage: int, options: dict[str, Any], model: type[SmallModel]) -> None:
    batches = one_each(data(Mlp, 3))
    with single_device(adamw(), Mlp) as single:
        expected = run(single, batches)
    torch.manual_seed(7)
    with alone(zero(stage, **options), adamw(), model()) as (strategy, called, optim):
        found = run(Session(strategy, called, optim), batches)
    same_tensors(found.weights[-1], expected.weights[-1], "weights", 1e-6)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), y)}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": (x.sum() > 0).long()}


def runner_in(folder: Path, stage: int, epochs: int, **options: Any) -> Any:
    from flextrain import FlexibleRunner

    return FlexibleRunner(
        model=Classifier,
        work_dir=str(folder),
        strategy=zero(stage, bf16=dict(enabled=True)),
        optim_wrapper=dict(type="DeepSpeedOptimWrapper", optimizer=ADAMW),
        param_scheduler=dict(type="LinearLR", by_epoch=False, end=6),
        train_dataloader=dict(batch_size=8, dataset=Samples(), collate_fn=dict(type="default_collate")),
        train_cfg=dict(max_epochs=epochs),
        custom_hooks=[dict(type="EMAHook")],
        log_level="ERROR",
        randomness=dict(seed=1),
        **options,
    )


def run_and_resume(folder: Path, stage: int) -> None:
    """Three epochs at once, and one and then two; with averaged weights, which are slices too."""
    states = []
    for name, parts in (("once", [3]), ("twice", [1, 3])):
        for number, epochs in enumerate(parts):
            runner = runner_in(folder / name, stage, epochs, resume=number > 0)
            runner.train()
            state = whole_state(runner.strategy)
            if epochs == 3:
                states.append(state)
            runner.strategy.leave()
    same_tensors(states[1], states[0], "state after resuming")
    saved = [Checkpoint.open(folder / name / "epoch_3") for name in ("once", "twice")]
    averages = [key for key in saved[0].tensors if "averaged" in key]
    assert len(averages) == 4
    values = [{key: torch.empty(c.tensors[key].shape) for key in averages} for c in saved]
    for checkpoint, target in zip(saved, values, strict=True):
        checkpoint.load(target)
    same_tensors(values[1], values[0], "averages after resuming")


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_with_averaged_weights_resumes_exactly(workers2: WorkerGroup, tmp_path: Path, stage: int) -> None:
    workers2.run(run_and_resume, tmp_path, stage)


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
def test_a_loss_scale_of_the_wrapper_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from flextrain.strategies.deepspeed.engine_config import resolve

    monkeypatch.setattr("flextrain.optim.amp.autocast_computes_in", lambda *_: True)
    device, config = torch.device("cuda"), DeepSpeedStrategy(bf16=dict(enabled=True)).config
    chosen, scaled = AmpOptimWrapper(ADAMW), AmpOptimWrapper(ADAMW, loss_scale=128.0)
    for optim in (chosen, scaled):
        optim.attach(device, nullcontext)
    assert resolve(config, chosen, device).dtype is torch.bfloat16
    with pytest.raises(
        ConfigError, match=r"bf16\.enabled: True disagrees with optim_wrapper, which asks for torch\.float16"
    ):
        resolve(config, scaled, device)


@pytest.mark.parametrize("updates", range(12))
def test_a_dynamic_loss_scale_goes_on_where_it_was(updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no float16 for the engine: DeepSpeed's own scaler, alone."""
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)  # rank 0 talks of overflows
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from flextrain.strategies.deepspeed.engine_internals import load_scale_state, scale_state

    def scaler() -> Any:
        return DynamicLossScaler(2.0**16, 3, 1.0, delayed_shift=2, consecutive_hysteresis=False)

    overflows = [False, True, False, True, False, False, False, False, False, True, True] + [False] * 12
    whole, rest = scaler(), scaler()
    for number, overflow in enumerate(overflows):
        if number == updates:
            load_scale_state(rest, scale_state(whole))
        whole.update_scale(overflow)
        if number >= updates:
            rest.update_scale(overflow)
            assert (rest.cur_scale, rest.cur_hysteresis) == (whole.cur_scale, whole.cur_hysteresis)
    assert len({rest.cur_scale, 2.0**16}) == 2


@pytest.mark.parametrize("updates", range(1, 9))
def test_a_loss_scale_goes_on_between_torch_and_deepspeed(updates: int) -> None:
    """From DeepSpeed to torch and back: the scale grows with the same update."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from flextrain.strategies.deepspeed.engine_internals import load_scale_state, scale_state

    def scaler() -> Any:
        return DynamicLossScaler(8.0, 4, 1.0, delayed_shift=1, consecutive_hysteresis=False)

    def torch_scaler() -> Any:
        made = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        made.scale(torch.ones(()))
        return made

    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    engine, alone, back = scaler(), torch_scaler(), scaler()
    for _ in range(updates):
        engine.update_scale(False)
    alone.load_state_dict(scale_state(engine))
    load_scale_state(back, alone.state_dict())
    for _ in range(4):
        for each in (engine, back):
            each.update_scale(False)
        alone.scale(parameter.sum()).backward()
        alone.step(optimizer)
        alone.update()
        assert engine.cur_scale == back.cur_scale == alone.get_scale()


class SharedData(DeepSpeedStrategy):
    def _arrange(self) -> Topology:
        return Topology(data=DataShard(0, 1), reports=self.topology.rank == 0)


def refusal_of_shared_data() -> None:
    strategy = SharedData()
    try:
        with pytest.raises(StrategyError, match="SharedData: DeepSpeed averages over all processes"):
            strategy.join()
    finally:
        strategy.leave()


@pytest.mark.distributed
def test_processes_that_share_data_are_refused(workers2: WorkerGroup) -> None:
    workers2.run(refusal_of_shared_data)


def warned_of_step_hooks(stage: int) -> list[int]:
    """In a worker: how often the log warns in two updates without a hook of the user's, and in two more with one."""
    spec = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage))
    found, logger = [], logging.getLogger("flextrain")
    level = logger.level
    with started(spec, OptimWrapper(dict(type="SGD", lr=0.1), clip_grad=dict(max_norm=1.0))) as session:
        logger.setLevel(logging.WARNING)  # a runner of an earlier test may have left it at errors
        for seed in (0, 2):
            if seed:
                session.optim.optimizer.register_step_pre_hook(lambda *_: None)
            with log_lines() as said:
                train(session.strategy, session.model, session.optim, [[one] for one in batches(2, seed=seed)])
            found.append(sum("optim_wrapper.optimizer: has a step hook" in line for line in said))
    logger.setLevel(level)
    return found


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_step_hooks_of_the_optimizer_have_parts_of_all_parameters(workers2: WorkerGroup, stage: int) -> None:
    assert workers2.run(warned_of_step_hooks, stage) == [[0, int(stage > 0)]] * 2
