"""DeepSpeed's FusedAdam and DeepSpeedCPUAdam, compiled for the CPU: their checkpoints are those of torch's AdamW and Adam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import CheckpointError
from flextrain.optim import AmpOptimWrapper, OptimWrapper
from flextrain.optim.wrapper import adapter_for
from flextrain.strategies import DDPStrategy, DeepSpeedStrategy
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import windows
from flextrain.testing.models import ConformanceNet
from flextrain.testing.sessions import Session, load, make_strategy, run, save, single_device, started, whole_state

adam = pytest.importorskip("deepspeed.ops.adam", reason="needs pip install flextrain[deepspeed]")
# Compiling starts the compiler, and takes minutes, once.
pytestmark = [pytest.mark.deepspeed, pytest.mark.full, pytest.mark.processes, pytest.mark.usefixtures("compiled")]

BATCHES = windows([ConformanceNet.sample(8, seed=i) for i in range(12)], 1)
NAMES = ["FusedAdam", "DeepSpeedCPUAdam"]


@pytest.fixture(scope="module")
def compiled() -> None:
    """DeepSpeed compiles both when they are first made, and keeps what it has compiled."""
    for name in NAMES:
        try:
            getattr(adam, name)([nn.Parameter(torch.zeros(1))])
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            pytest.skip(f"DeepSpeed cannot compile {name} here: {error}")


def zero(stage: int) -> dict[str, Any]:
    return dict(type=DeepSpeedStrategy, device="cpu", zero_optimization=dict(stage=stage))


def wrapper(kind: str, decoupled: bool, half: bool = False, **more: Any) -> OptimWrapper:
    """AdamW or Adam, of torch or of DeepSpeed, with two settings of decay and rate."""
    name = {"torch": "AdamW" if decoupled else "Adam"}.get(kind, kind)
    mode = {"FusedAdam": dict(adam_w_mode=decoupled), "DeepSpeedCPUAdam": dict(adamw_mode=decoupled)}.get(kind, {})
    options: dict[str, Any] = dict(paramwise_cfg=dict(bias_lr_mult=2.0, bias_decay_mult=0.0))
    optimizer = dict(type=name, lr=3e-3, weight_decay=0.1, **mode, **more)
    return AmpOptimWrapper(optimizer, dtype="bfloat16", **options) if half else OptimWrapper(optimizer, **options)


CHAIN: list[tuple[Any, str]] = [
    (DDPStrategy, "torch"),
    (zero(1), "FusedAdam"),
    (zero(3), "DeepSpeedCPUAdam"),
    (zero(0), "FusedAdam"),
    (DDPStrategy, "DeepSpeedCPUAdam"),
    (zero(2), "torch"),
]


def one_after_another(path: Path, decoupled: bool) -> dict[str, float]:
    """Two updates with each, from the checkpoint of the one before; differences from twelve with torch's own."""
    with single_device(wrapper("torch", decoupled)) as single:
        expected = run(single, BATCHES)
        final = whole_state(single.strategy)
    before: dict[str, Any] = {}
    for number, (spec, kind) in enumerate(CHAIN):
        with started(spec, wrapper(kind, decoupled), seed=7 + number) as session:
            if number:
                load(session, path / str(number - 1))
                state = whole_state(session.strategy)
                assert state.keys() == before.keys()
                same_tensors(state, before, "state as it is loaded")
                assert {k: v for k, v in state.items() if k.startswith("optim.group.")} == {
                    k: v for k, v in before.items() if k.startswith("optim.group.")
                }
            weights = run(session, BATCHES[2 * number : 2 * number + 2]).weights[-1]
            save(session, path / str(number))
            before = whole_state(session.strategy)
            same_tensors(weights, expected.weights[2 * number + 2], f"weights after {number}", 1e-4)
    assert before.keys() == final.keys()
    kinds = {value for key, value in before.items() if key.endswith(".optimizer")}
    assert kinds == {"AdamW" if decoupled else "Adam"}
    return {key: value.item() for key, value in before.items() if isinstance(value, Tensor) and key.endswith(".step")}


@pytest.mark.distributed
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_each_goes_on_from_the_others_checkpoint(workers2: WorkerGroup, tmp_path: Path, decoupled: bool) -> None:
    for steps in workers2.run(one_after_another, tmp_path, decoupled):
        assert set(steps.values()) == {float(len(BATCHES))}


def in_half_precision(path: Path, stage: int, name: str) -> None:
    """Resumed by itself, bit for bit: counts and moments are all there."""
    with started(zero(stage), wrapper(name, True, half=True)) as session:
        run(session, BATCHES[:3])
        save(session, path)
        expected = run(session, BATCHES[3:6]).trace.losses
    with started(zero(stage), wrapper(name, True, half=True), seed=99) as session:
        load(session, path)
        assert run(session, BATCHES[3:6]).trace.losses == expected


@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "name"), [(0, "FusedAdam"), (1, "DeepSpeedCPUAdam"), (3, "FusedAdam")])
def test_they_resume_exactly_in_bf16(workers2: WorkerGroup, tmp_path: Path, stage: int, name: str) -> None:
    workers2.run(in_half_precision, tmp_path / "c", stage, name)


@pytest.mark.parametrize("name", NAMES)
def test_what_they_are_called(name: str) -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    mode = "adam_w_mode" if name == "FusedAdam" else "adamw_mode"
    for options, called in ({}, "AdamW"), ({mode: False}, "Adam"), ({"bias_correction": False}, name):
        assert adapter_for(getattr(adam, name)(parameters, **options), "optim_wrapper").name == called


def saved(path: Path, **options: Any) -> None:
    with single_device(wrapper("torch", True, **options)) as single:
        run(single, BATCHES[:1])
        save(single, path)


@pytest.mark.parametrize(
    ("kind", "decoupled", "saved_with", "message"),
    [
        ("FusedAdam", True, dict(amsgrad=True), 'the checkpoint\'s AdamW has amsgrad=True, which FusedAdam cannot do; choose "AdamW"'),
        ("DeepSpeedCPUAdam", True, dict(amsgrad=True), "the checkpoint's AdamW has amsgrad=True, which DeepSpeedCPUAdam cannot do"),
        ("FusedAdam", True, dict(maximize=True), "the checkpoint's AdamW has maximize=True, which FusedAdam cannot do"),
        ("FusedAdam", False, {}, "the checkpoint's is AdamW, the configuration's is FusedAdam; resume with the same one"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("engine", [True, False], ids=["engine", "no engine"])
def test_what_they_cannot_do_is_refused(
    tmp_path: Path, kind: str, decoupled: bool, saved_with: dict[str, Any], message: str, engine: bool
) -> None:
    saved(tmp_path / "c", **saved_with)
    strategy = make_strategy(zero(1) if engine else "SingleDeviceStrategy")
    model, optim = strategy.setup(ConformanceNet(), wrapper(kind, decoupled))
    assert isinstance(optim, OptimWrapper)
    with pytest.raises(CheckpointError) as caught:
        load(Session(strategy, model, optim), tmp_path / "c")
    strategy.leave()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
