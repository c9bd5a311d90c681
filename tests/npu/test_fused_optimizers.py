"""torch_npu's fused optimizers, from its own sources, on the simulated device.

`python tests/npu/fetch_torch_npu.py` gets the sources; without them these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.optim.adapters import EQUIVALENTS, NEAREST

from . import fused
from .fetch_torch_npu import SOURCE, documented_signatures
from .simulated import NpuWorkers

pytestmark = [pytest.mark.npu, pytest.mark.distributed]
NAMES = sorted({**EQUIVALENTS, **NEAREST})
CPU = dict(type="SingleDeviceStrategy", device="cpu")


def workers_with_sources(world_size: int) -> Iterator[NpuWorkers]:
    source = Path(os.environ.get("TORCH_NPU_SOURCE", SOURCE))
    if not (source / "optim").is_dir():
        pytest.skip("needs torch_npu's sources: python tests/npu/fetch_torch_npu.py")
    workers = NpuWorkers(world_size, {"TORCH_NPU_SOURCE": str(source)})
    yield workers
    workers.group.close()


@pytest.fixture(scope="module")
def one(simulated_npu: Path) -> Iterator[NpuWorkers]:
    yield from workers_with_sources(1)


@pytest.fixture(scope="module")
def two(simulated_npu: Path) -> Iterator[NpuWorkers]:
    yield from workers_with_sources(2)


@pytest.mark.parametrize("name", NAMES)
def test_names_signatures_and_scaler_are_torch_npus(one: Any, name: str) -> None:
    ((file, signature, scaler),) = one.run(fused.facts, name)
    assert "sim" not in Path(file).parts
    assert signature == documented_signatures()[name]
    assert scaler == "torch_npu.npu.amp.grad_scaler"


@pytest.mark.parametrize("recipe", fused.RECIPES)
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_they_train_like_their_twins(one: Any, name: str, recipe: str) -> None:
    assert one.run(fused.gap_to_twin, name, recipe)[0] < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("recipe", fused.IN_TWO_PROCESSES)
@pytest.mark.parametrize("name", ["NpuFusedAdamW", "NpuFusedSGD"])
def test_they_train_like_their_twins_in_two_processes(two: Any, name: str, recipe: str) -> None:
    assert max(two.run(fused.gap_to_twin, name, recipe)) < 1e-6


@pytest.mark.parametrize("name", NEAREST)
def test_those_without_twin_train(one: Any, name: str) -> None:
    (losses,) = one.run(fused.trains, name)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_loaded_into_an_optimizer_that_has_stepped(one: Any, tmp_path: Path, name: str) -> None:
    assert one.run(fused.resumes, name, tmp_path) == [0.0]


@pytest.mark.parametrize(
    "name", [name if name == "NpuFusedAdamW" else pytest.param(name, marks=pytest.mark.full) for name in EQUIVALENTS]
)
def test_the_twin_continues_their_checkpoint_and_the_other_way_round(one: Any, tmp_path: Path, name: str) -> None:
    assert one.run(fused.changes_over, name, tmp_path, name, EQUIVALENTS[name])[0] < 1e-6
    assert one.run(fused.changes_over, name, tmp_path, EQUIVALENTS[name], name)[0] < 1e-6
    assert one.run(fused.changes_over, name, tmp_path / "cpu", name, EQUIVALENTS[name], second_on=CPU)[0] < 1e-6
    assert one.run(fused.changes_over, name, tmp_path / "cpu", EQUIVALENTS[name], name, first_on=CPU)[0] < 1e-6


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_their_state_looks_like_the_twins(one: Any, name: str) -> None:
    ((found, expected),) = one.run(fused.keys_and_values, name)
    assert found == expected


def test_a_twins_checkpoint_with_settings_they_lack_is_refused(one: Any, tmp_path: Path) -> None:
    (said,) = one.run(fused.loads, "NpuFusedAdamW", tmp_path, maximize=True)
    assert said == (
        'optimizer: the checkpoint\'s AdamW has maximize=True, which NpuFusedAdamW cannot do; choose "AdamW"'
    )


@pytest.mark.parametrize("name", NEAREST)
def test_another_optimizers_checkpoint_is_refused(one: Any, tmp_path: Path, name: str) -> None:
    (said,) = one.run(fused.loads, name, tmp_path)
    assert said.startswith(f"optimizer: the checkpoint's is AdamW, the configuration's is {name};")


ADAMW, LAMB = dict(type="NpuFusedAdamW"), dict(type="NpuFusedLamb", use_global_grad_norm=True)
COSINE = dict(type="NpuFusedBertAdam", lr=1e-3, schedule="warmup_cosine")
NPU = fused.NPU
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "the CPU": (dict(strategy=CPU), ADAMW, "works on npu only and weight is on cpu; choose \"AdamW\", which computes the same"),
    "bfloat16": (dict(dtype=torch.bfloat16), ADAMW, "takes float32 and float16 only and weight is torch.bfloat16; choose"),
    "shared memory": (dict(weight="shared"), ADAMW, "weight shares its memory with others; choose"),
    "not contiguous": (dict(weight="turned"), ADAMW, "takes contiguous parameters only and weight is not; choose"),
    "FSDP": (dict(strategy=dict(type="FSDPStrategy")), ADAMW, "needs whole parameters and weight is sharded; choose"),
    "global norm": ({}, LAMB, "cannot do use_global_grad_norm=True, which calls a method that torch_npu lacks; choose"),
    "cosine": ({}, COSINE, 'cannot do schedule="warmup_cosine", in which torch_npu takes the cosine of a number; choose'),
    "bucket views": (
        dict(strategy=dict(type="NPUStrategy", gradient_as_bucket_view=True)), ADAMW,
        "strategy.gradient_as_bucket_view: NpuFusedAdamW keeps all gradients in memory of its own",
    ),
    "unused parameters": (
        dict(strategy=dict(type="NPUStrategy", find_unused_parameters=True)), ADAMW,
        "strategy.find_unused_parameters: NpuFusedAdamW keeps all gradients in memory of its own",
    ),
    "ZeRO": (
        dict(strategy=dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1))), ADAMW,
        "NpuFusedAdamW keeps parameters and gradients in memory of its own, and so does DeepSpeed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_they_cannot_do_is_refused_by_setup(one: Any, what: str) -> None:
    if what == "ZeRO":
        pytest.importorskip("deepspeed")
    arguments, optimizer, message = REFUSED[what]
    (said,) = one.run(fused.refused, wrapper=dict(optimizer=optimizer), **{"strategy": NPU, **arguments})
    assert said.startswith("StrategyError: ")
    assert message in said


def test_a_parameter_in_a_layout_of_the_devices_own_is_not_taken_for_a_shared_one(one: Any) -> None:
    # It is padded, so that its memory is larger than its elements; shared stands for that here.
    arguments = dict(wrapper=dict(optimizer=ADAMW), strategy=NPU, weight="shared")
    assert one.run(fused.refused, **arguments, format=29) == ["nothing"]


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_gradients_that_are_parts_of_one_tensor(one: Any, name: str, zero_first: bool) -> None:
    assert one.run(fused.joined, name, zero_first)[0] < 1e-6


@pytest.mark.parametrize("name", ["NpuFusedAdamW", "NpuFusedSGD", "NpuFusedLamb"])
@pytest.mark.parametrize(
    "how, message",
    [
        ("unfrozen", "knows the gradients of its first update only, and 0.bias had none then"),
        ("frozen", "moves all parameters of its first update together and 0.bias was frozen since; choose"),
        ("dropped", "or it was dropped since (by module.zero_grad(), say); choose"),
        ("unused", "needs a gradient of every parameter at the first update and 0.weight has none; choose"),
    ],
)
def test_gradients_that_they_would_not_see_are_an_error(one: Any, name: str, how: str, message: str) -> None:
    (said,) = one.run(fused.misuse, name, how)
    assert message in said
