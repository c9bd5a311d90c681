"""Strategies on the simulated device: they keep the contract, and train as one CPU does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.testing import check_strategy
from flextrain.testing.conformance_checks import CHECKS
from flextrain.testing.differences import relative_difference

from .training import ADAMW, CPU, Classifier, History, make_runner, train, train_on_cpu

pytestmark = [pytest.mark.npu, pytest.mark.distributed]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

NPU = dict(type="NPUStrategy")
FSDP = dict(type="FSDPStrategy", device="npu", wrap=["Sequential"])


def zero(stage: int, **options: Any) -> Any:
    strategy = dict(type="DeepSpeedStrategy", device="npu", zero_optimization=dict(stage=stage), **options)
    return pytest.param(strategy, id=f"zero{stage}", marks=[needs_deepspeed, pytest.mark.deepspeed])


SHARDED = [pytest.param(FSDP, id="fsdp"), zero(1), zero(2), zero(3)]
# What a device can make a difference to; the rest is the same code as on the CPU.
ON_DEVICE = (
    "facts",
    "gradients",
    "clipping",
    "precision",
    "overflow",
    "resume_from_single",
    "resume_to_single",
    "teardown",
)


@pytest.mark.full
def test_conformance(npu2: Any) -> None:
    with npu2.visible() as workers:
        report = check_strategy("NPUStrategy", workers=workers)
    statuses = {result.name: result.status for result in report.results}
    assert statuses == {name: "refused" if name == "unused" else "passed" for name in CHECKS}


def test_conformance_of_one_process(npu1: Any) -> None:
    with npu1.visible() as workers:
        assert check_strategy("NPUStrategy", world_size=1, workers=workers, only=ON_DEVICE).passed


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(dict(type="FSDPStrategy", device="npu"), id="fsdp", marks=pytest.mark.full),
        *(pytest.param(*p.values, id=p.id, marks=[*p.marks, pytest.mark.full]) for p in SHARDED[1:]),
    ],
)
def test_conformance_of_sharded_strategies(npu2: Any, strategy: Any) -> None:
    with npu2.visible() as workers:
        assert check_strategy(strategy, workers=workers, only=ON_DEVICE).passed


def on_both(folder: Path, strategy: Any, **changes: Any) -> tuple[list[float], set[str], list[float]]:
    losses, devices = train(folder / "npu", strategy, **changes)
    return losses, devices, train_on_cpu(folder / "cpu", **changes)


def test_digits_in_one_process_bit_for_bit(npu1: Any, tmp_path: Path) -> None:
    ((losses, devices, expected),) = npu1.run(on_both, tmp_path, NPU)
    assert devices == {"npu"}
    assert losses == expected
    assert expected[-1] < 0.5 * expected[0]


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(NPU, id="npu"), *SHARDED, pytest.param(dict(type="DDPStrategy"), id="ddp finds the device")],
)
def test_digits_in_two_processes(npu2: Any, tmp_path: Path, strategy: Any) -> None:
    for losses, devices, expected in npu2.run(on_both, tmp_path, strategy):
        assert devices == {"npu"}
        assert (
            relative_difference(torch.tensor(losses), torch.tensor(expected)) < 1e-5
        )  # AdamW enlarges the rounding of another order of sums


OFFLOADED = {**FSDP, "cpu_offload": True}


class Scaled(Classifier):
    """With buffers to compute with, and a parameter of odd size and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.head[3] = nn.Linear(32, 11)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 11))

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        logits = self.head(self.features(images)) * self.scale * self.temperature
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def offloaded(folder: Path, is_built: bool) -> tuple[list[float], list[float], dict[str, str]]:
    """Losses, those expected, and where parameters and buffers are."""
    torch.manual_seed(5)
    history = History()
    model = Scaled() if is_built else Scaled
    runner = make_runner(folder / "npu", OFFLOADED, 2, model=model, custom_hooks=[history])
    runner.train()
    places = {name: tensor.device.type for name, tensor in runner.strategy.model_state().items()}
    runner.strategy.leave()
    torch.manual_seed(5)
    return history.losses, train_on_cpu(folder / "cpu", model=Scaled() if is_built else Scaled), places


@pytest.mark.parametrize("is_built", [True, False], ids=["instance", "class"])
def test_parameters_on_the_host(npu2: Any, tmp_path: Path, is_built: bool) -> None:
    on_device = {"temperature", "scale"}  # what is whole in every process
    for losses, expected, places in npu2.run(offloaded, tmp_path, is_built):
        assert places == {name: "npu" if name in on_device else "cpu" for name in places}
        assert relative_difference(torch.tensor(losses), torch.tensor(expected)) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strategy", [pytest.param(NPU, id="npu"), SHARDED[0], SHARDED[2]])
def test_digits_in_mixed_precision(npu2: Any, tmp_path: Path, strategy: Any, dtype: str) -> None:
    amp = dict(optim_wrapper=dict(type="AmpOptimWrapper", dtype=dtype, optimizer=ADAMW))
    if dtype == "float16":
        amp["optim_wrapper"]["loss_scale"] = 256.0  # a dynamic one may begin by leaving out updates here or there
    results = npu2.run(on_both, tmp_path, strategy, **amp)
    (exact, _), _ = npu2.run(train, tmp_path / "exact", strategy)
    for losses, devices, expected in results:
        assert devices == {"npu"}
        # The CPU's autocast has other lists of operators, and DeepSpeed casts the model as a whole.
        assert relative_difference(torch.tensor(losses), torch.tensor(expected)) < 0.02
        assert losses != exact


def interrupted(folder: Path, first: Any, second: Any) -> tuple[list[float], list[float]]:
    """Two epochs of which the second resumes elsewhere, and the same without interruption on the CPU."""
    own = dict(default_hooks=dict(checkpoint=dict(interval=1)))
    begun, _ = train(folder / "run", first, train_cfg=dict(by_epoch=True, max_epochs=1), **own)
    rest, _ = train(folder / "run", second, resume=True, **own)
    return begun + rest, train_on_cpu(folder / "cpu")


@pytest.mark.parametrize("way", ["npu to cpu", "cpu to npu"])
def test_a_checkpoint_is_resumed_on_the_other_device(npu1: Any, tmp_path: Path, way: str) -> None:
    first, second = (NPU, CPU) if way == "npu to cpu" else (CPU, NPU)
    ((losses, expected),) = npu1.run(interrupted, tmp_path, first, second)
    assert losses == expected


def sent_from(folder: Path) -> set[str]:
    """The kinds of devices whose memory broadcasts went through while a model that is on the host was shared and wrapped."""
    seen: set[str] = set()
    broadcast = torch.distributed.broadcast

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 100:  # not what processes agree on
            seen.add(tensor.device.type)
        return broadcast(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "broadcast", noted)
        make_runner(folder, FSDP, 2, model=Classifier()).train()
    return seen


def test_an_instance_is_shared_through_the_device(npu2: Any, tmp_path: Path) -> None:
    assert npu2.run(sent_from, tmp_path) == [{"npu"}] * 2
