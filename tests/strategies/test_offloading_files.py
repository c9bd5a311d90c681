"""ZeRO-3 with optimizer state and parameters in files: the numbers of one device, and files that go when the run goes."""

from __future__ import annotations

import errno
import logging
import logging.handlers
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import StrategyError
from flextrain.optim import AmpOptimWrapper, OptimWrapper
from flextrain.testing import WorkerError, WorkerGroup
from flextrain.testing.differences import relative_difference, same_tensors
from flextrain.testing.loop import evaluate, windows
from flextrain.testing.models import Batch, ConformanceNet, ConvNet, HalfFrozen, Mlp, SmallModel, TinyTransformer
from flextrain.testing.sessions import Session, make_strategy, run, single_device, started, whole_state

from ..swapping import Wide, allow_small_files, on_files, swap_files

pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.full,
    pytest.mark.distributed,
    pytest.mark.usefixtures("async_io"),
]

ADAMW = dict(type="AdamW", lr=3e-3, weight_decay=0.1)
GROUPS = dict(bias_lr_mult=2.0, norm_decay_mult=0.0, bias_decay_mult=0.0)


def data(model: type[SmallModel], count: int) -> list[Batch]:
    return [model.sample(8, seed=i) for i in range(count)]


def adamw(**options: Any) -> OptimWrapper:
    return OptimWrapper(dict(options.pop("optimizer", ADAMW), weight_decay=0.1), paramwise_cfg=GROUPS, **options)


def bf16(**options: Any) -> AmpOptimWrapper:
    return AmpOptimWrapper(ADAMW, paramwise_cfg=GROUPS, dtype="bfloat16", **options)


def train_both(
    folder: Path, spec: dict[str, Any], model: type[SmallModel], optimizer: dict[str, Any]
) -> tuple[dict[str, float], dict[str, int]]:
    """Differences from a single device, with clipping, windows of three and a last one of one; the files there were."""
    allow_small_files()
    options: dict[str, Any] = dict(optimizer=optimizer, accumulative_counts=3, clip_grad=dict(max_norm=0.1))
    batches = windows(data(model, 10), 3)
    with single_device(adamw(**options), model) as single:
        expected = run(single, batches)
        outputs = evaluate(single.strategy, single.model, data(model, 2))
    with started(spec, adamw(**options), model) as session:
        found = run(session, batches)
        shards = evaluate(session.strategy, session.model, data(model, 2))
        files, index = swap_files(folder), session.strategy.topology.rank
    assert min(norm for norm in expected.trace.grad_norms if norm) > 0.1  # or nothing would have been clipped
    return {
        "loss": max(abs(a - b) for a, b in zip(found.trace.losses, expected.trace.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(found.trace.grad_norms, expected.trace.grad_norms, strict=True)),  # type: ignore[operator]
        "weights": max(relative_difference(found.weights[-1][k], v) for k, v in expected.weights[-1].items()),
        "outputs": max(
            relative_difference(own, whole.tensor_split(2)[index]) for own, whole in zip(shards, outputs, strict=True)
        ),
    }, files


@pytest.mark.parametrize(
    ("optimizer", "param"), [("nvme", "nvme"), ("nvme", "none"), ("nvme", "cpu"), ("cpu", "nvme"), ("none", "nvme")]
)
@pytest.mark.parametrize("model", [Mlp, ConvNet, TinyTransformer, HalfFrozen, ConformanceNet])
def test_parity(workers2: WorkerGroup, tmp_path: Path, optimizer: str, param: str, model: type[SmallModel]) -> None:
    spec = on_files(tmp_path, optimizer, param)
    expected = {"optimizer"} if optimizer == "nvme" and model not in (Mlp, HalfFrozen) else set()
    if param == "nvme" and model not in (Mlp, HalfFrozen):  # too small for a file
        expected.add("float32params")
    for differences, files in workers2.run(train_both, tmp_path, spec, model, ADAMW):
        assert max(differences.values()) < 1e-5, differences
        assert files.keys() == expected
    assert not list(tmp_path.iterdir())


VARIANTS: list[dict[str, Any]] = [
    dict(zero_optimization=dict(sub_group_size=300)),
    dict(zero_optimization=dict(sub_group_size=300, offload_optimizer=dict(pipeline_read=True, pipeline_write=True))),
    dict(zero_optimization=dict(overlap_comm=True, reduce_bucket_size=50, stage3_prefetch_bucket_size=0)),
    dict(zero_optimization=dict(offload_param=dict(max_in_cpu=500), stage3_max_live_parameters=0)),
    dict(activation_checkpointing=dict(classes=["Block"])),
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda value: str(value)[:70])
def test_parity_with_options(workers2: WorkerGroup, tmp_path: Path, options: dict[str, Any]) -> None:
    spec = on_files(tmp_path, **options)
    for differences, _ in workers2.run(train_both, tmp_path, spec, ConformanceNet, ADAMW):
        assert max(differences.values()) < 1e-5, differences


OPTIMIZERS: list[dict[str, Any]] = [
    dict(type="SGD", lr=0.02),
    dict(type="SGD", lr=0.02, momentum=0.9),
    dict(type="AdamW", lr=3e-3, amsgrad=True),
    dict(type="RMSprop", lr=1e-3, momentum=0.9, centered=True),
    dict(type="NAdam", lr=1e-3),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda value: "-".join(map(str, value.values())))
def test_optimizers_with_any_number_of_states(workers2: WorkerGroup, tmp_path: Path, optimizer: dict[str, Any]) -> None:
    spec = on_files(tmp_path, zero_optimization=dict(sub_group_size=300))
    for differences, _ in workers2.run(train_both, tmp_path, spec, ConformanceNet, optimizer):
        assert max(differences.values()) < 1e-5, differences


class EveryOther(Wide):
    every = 2


def with_layers_left_out(spec: dict[str, Any], reference: dict[str, Any], size: int) -> float:
    """The weights with state in files and in memory, where a layer has no gradient in every other micro-batch."""
    allow_small_files()
    ends = []
    for each in (reference, spec):
        with started(each, adamw(accumulative_counts=size), EveryOther) as session:
            ends.append(run(session, windows(data(EveryOther, 6), size)).weights)
    for found, expected in zip(ends[1], ends[0], strict=True):
        same_tensors(found, expected, "weights", 2e-4)
    return relative_difference(ends[0][0]["model.sometimes.weight"], ends[0][-1]["model.sometimes.weight"])


def test_a_layer_without_gradient_has_a_gradient_of_zero(workers2: WorkerGroup, tmp_path: Path) -> None:
    zeros = dict(unused_parameters="zeros")
    memory = dict(type="DeepSpeedStrategy", device="cpu", zero_optimization=dict(stage=2), **zeros)
    for spec in (
        on_files(tmp_path, zero_optimization=dict(sub_group_size=300), **zeros),
        on_files(tmp_path, "none", **zeros),
    ):
        for size in (
            1,
            2,
            3,
        ):  # of windows: the layer is used in every other, in the last of each, or in different ones of each
            assert min(workers2.run(with_layers_left_out, spec, memory, size)) > 1e-3


# Half precision, models that are built in shards, updates that are skipped


def same_as_in_memory(
    folder: Path, memory: dict[str, Any], spec: dict[str, Any], half: bool, source: str
) -> dict[str, int]:
    """The same weights and state, bit for bit, as with everything in memory; the files there were."""
    allow_small_files()
    found: list[Any] = []
    files: dict[str, int] = {}
    for each in (memory, spec):
        strategy = make_strategy(each)
        try:
            strategy.join()
            torch.manual_seed(7)
            with strategy.building() if source == "built in shards" else torch.enable_grad():
                model = Wide()
            optim = bf16(clip_grad=dict(max_norm=0.1)) if half else adamw(clip_grad=dict(max_norm=0.1))
            session = Session(strategy, *strategy.setup(model, optim))  # type: ignore[arg-type]
            trace = run(session, windows(data(Wide, 4), 2))
            found.append((trace, whole_state(strategy), str(strategy.precision_report())))
            files = swap_files(folder)
        finally:
            strategy.leave()
    same_tensors(found[1][0].weights[0], found[0][0].weights[0], "initial weights")
    assert found[1][0].trace.losses == found[0][0].trace.losses
    same_tensors(found[1][1], found[0][1], "final state")
    assert found[1][2] == found[0][2]
    return files


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("source", ["given", "built in shards"])
@pytest.mark.parametrize(("optimizer", "param"), [("nvme", "nvme"), ("none", "nvme"), ("nvme", "none")])
def test_the_same_bits_as_in_memory(
    workers2: WorkerGroup, tmp_path: Path, half: bool, source: str, optimizer: str, param: str
) -> None:
    memory = on_files(tmp_path, "cpu" if optimizer == "nvme" else "none", "cpu" if param == "nvme" else "none")
    del memory["aio"]
    spec = on_files(tmp_path, optimizer, param)
    expected = {"optimizer"} if optimizer == "nvme" else set()
    if param == "nvme":
        expected.add("bfloat16params" if half else "float32params")
    for files in workers2.run(same_as_in_memory, tmp_path, memory, spec, half, source):
        assert files.keys() == expected
    assert not list(tmp_path.iterdir())


class Bursts(Wide):
    """Loses its finite loss at a third call.

    Every gradient is far from zero: that of a bias that a norm takes away is nothing but rounding, which Adam makes large.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Sequential(self.sometimes, nn.Tanh())

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * (math.inf if self.calls == 3 else 1.0)


def skipped(spec: dict[str, Any]) -> tuple[list[bool], dict[str, Tensor]]:
    allow_small_files()
    with started(spec, adamw(clip_grad=dict(max_norm=0.1)), Bursts) as session:
        found = run(session, windows(data(Bursts, 6), 1))
        return found.trace.skipped, found.weights[-1]


def test_a_skipped_update_leaves_nothing_behind(workers2: WorkerGroup, tmp_path: Path) -> None:
    memory = dict(type="DeepSpeedStrategy", device="cpu", zero_optimization=dict(stage=2))
    for (flags, weights), (reference, expected) in zip(
        workers2.run(skipped, on_files(tmp_path)), workers2.run(skipped, memory), strict=True
    ):
        assert flags == reference == [False, False, True, False, False, False]
        same_tensors(weights, expected, "weights", 1e-6)


# Files of the size that DeepSpeed has them for, and refusals


class Large(SmallModel):
    """Weights of 4 MiB, of which most begin in the middle of a sector."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(6, 1001), nn.Tanh(), nn.Linear(1001, 1003), nn.Tanh(), nn.Linear(1003, 1005)
        self.body, self.head = nn.Sequential(*layers), nn.Linear(1005, self.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def train_large(folder: Path) -> tuple[float, dict[str, int]]:
    batches = windows(data(Large, 3), 1)
    with started(
        dict(type="DeepSpeedStrategy", device="cpu", zero_optimization=dict(stage=2)), adamw(), Large
    ) as session:
        expected = run(session, batches).weights[-1]
    spec = on_files(folder) | dict(aio=dict(block_size=2**20, intra_op_parallelism=2))
    with started(spec, adamw(), Large) as session:
        weights = run(session, batches).weights[-1]
        return max(relative_difference(weights[key], value) for key, value in expected.items()), swap_files(folder)


def test_large_tensors_without_smaller_limits(tmp_path: Path) -> None:
    with WorkerGroup(2) as workers:  # others have got smaller limits for good
        for difference, files in workers.run(train_large, tmp_path):
            assert difference < 1e-5
            assert files["optimizer"] > 2.9 * files["float32params"] > 2.9 * 2**21


def refused(spec: dict[str, Any], model: type[SmallModel]) -> None:
    allow_small_files()
    with started(spec, adamw(), model):
        pass


@pytest.mark.parametrize(
    ("details", "message"),
    [
        (dict(offload_optimizer=dict(buffer_count=3)), "offload_optimizer.buffer_count: 3 is not enough, this optimizer needs 4"),
        (dict(offload_optimizer=dict(buffer_count=4, pipeline_read=True)), "needs 8: master, gradient and 2 states of a sub-group, for each"),
        (dict(offload_param=dict(buffer_size=100)), "offload_param.buffer_size: 100 is not enough, a process's shard of "),
        (dict(offload_param=dict(buffer_count=1)), "offload_param.buffer_count: 1 is not enough, "),
    ],
)  # fmt: skip
def test_buffers_that_are_too_few_are_named(
    workers1: WorkerGroup, tmp_path: Path, details: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        workers1.run(refused, on_files(tmp_path, zero_optimization=details), Nested)
    assert isinstance(caught.value.__cause__, StrategyError)
    assert message in str(caught.value.__cause__)
    assert not list(tmp_path.iterdir())


class Nested(Wide):
    """A parameter of its own, which stays gathered while the layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(200))

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.scale.mean()


def without_room(spec: dict[str, Any]) -> str:
    allow_small_files()

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with started(spec, adamw(), Wide) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(StrategyError) as caught:
            run(session, windows(data(Wide, 1), 1))
        return str(caught.value)


def test_a_full_disk_is_named(workers2: WorkerGroup, tmp_path: Path) -> None:
    for message in workers2.run(without_room, on_files(tmp_path)):
        assert message.startswith(f"{tmp_path}/flextrain_swap_")
        assert message.endswith("MiB of swapped state cannot be written, No space left on device")
    assert not list(tmp_path.iterdir())


def warned(spec: dict[str, Any]) -> list[str]:
    logger, found = logging.getLogger("flextrain"), logging.handlers.BufferingHandler(1000)
    logger.addHandler(found)
    with started(spec, adamw(), Mlp):
        logger.removeHandler(found)
    return [record.getMessage() for record in found.buffer if record.levelname == "WARNING"]


def test_models_without_anything_for_files_are_told(workers2: WorkerGroup, tmp_path: Path) -> None:
    for lines in workers2.run(warned, on_files(tmp_path)):
        assert [line.split(":")[0] for line in lines if "has no effect for this model" in line] == [
            "strategy.zero_optimization.offload_optimizer",
            "strategy.zero_optimization.offload_param",
        ]
