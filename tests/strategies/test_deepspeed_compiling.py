"""What DeepSpeed compiles: nothing that training has no use for, not without a line, and no lock of the dead is waited for."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from torch import nn

from flextrain import OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.strategies import DeepSpeedStrategy
from flextrain.strategies.deepspeed import compiling
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.deepspeed


def compiled(folder: Path, stage: int) -> list[str]:
    """What a set-up leaves in the folder for extensions, and what DeepSpeed loaded."""
    import deepspeed.comm
    from deepspeed.ops.op_builder.builder import OpBuilder

    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    OpBuilder._loaded_ops.clear()
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=stage))
    strategy.setup(nn.Linear(4, 2), OptimWrapper(dict(type="AdamW", lr=0.1)))
    assert deepspeed.comm.comm.cdb.shm_comm_op is None
    strategy.leave()
    return sorted(path.name for path in folder.iterdir()) + list(OpBuilder._loaded_ops)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_training_compiles_nothing(workers2: WorkerGroup, tmp_path: Path, stage: int) -> None:
    assert workers2.run(compiled, tmp_path, stage) == [[], []]


class Clock:
    """Time that passes only while somebody sleeps; takes the place of the module ``time``.

    Attributes:
        naps: how long each sleep was.
        at: what happens at the end of a sleep, by its number.
    """

    def __init__(self) -> None:
        self.naps: list[float] = []
        self.at: dict[int, Callable[[], object]] = {}
        self.time = time.time

    def monotonic(self) -> float:
        return sum(self.naps)

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.at.get(len(self.naps), lambda: None)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(compiling, "time", clock)
    return clock


@pytest.fixture(params=["file", "flock"])
def kind_of_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How torch locks the folder in which it compiles: until 2.13 or so by a file that is there."""
    monkeypatch.setattr(compiling, "build_lock_is_advisory", lambda: request.param == "flock")
    return str(request.param)


def leave_lock(folder: Path, age_s: float) -> Path:
    """As a process leaves it that was killed while it compiled."""
    folder.mkdir(exist_ok=True)
    lock = folder / "lock"
    lock.touch()
    for path in (lock, folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return lock


def test_a_lock_that_was_left_behind_is_named(tmp_path: Path, kind_of_lock: str) -> None:
    lock = leave_lock(tmp_path / "op", 600)
    if kind_of_lock == "flock":
        compiling.await_lock(tmp_path / "op", 60)  # the file stays after every compilation, and means nothing
        return
    with pytest.raises(StrategyError) as caught:
        compiling.await_lock(tmp_path / "op", 60)
    assert str(caught.value).startswith(f"{lock}: the lock of the compilation of a DeepSpeed extension is still there")
    assert str(caught.value).endswith(f"if no process compiles it, remove the file: rm {lock}")
    assert lock.exists()


def test_a_process_that_compiles_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock, kind_of_lock: str
) -> None:
    lock = leave_lock(tmp_path / "op", 10)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        logger = logging.getLogger("flextrain")
        logger.addHandler(caplog.handler)
        caplog.set_level("WARNING", logger="flextrain")
        clock.at[3] = lock.unlink
        compiling.await_lock(tmp_path / "op", 60)
        logger.removeHandler(caplog.handler)
    assert len(clock.naps) == 3
    assert f"Waiting for a process that compiles an extension of DeepSpeed: {lock}" in caplog.text


def test_a_young_lock_is_waited_for_as_long_as_the_strategy_waits(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "build_lock_is_advisory", lambda: False)
    leave_lock(tmp_path / "op", 0)
    with pytest.raises(StrategyError, match="is still there"):
        compiling.await_lock(tmp_path / "op", 0.5)
    assert 0.5 < clock.monotonic() <= 0.5 + clock.naps[-1]


@pytest.mark.processes
def test_what_an_optimizer_compiles_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "build_lock_is_advisory", lambda: False)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda name, **options: f"compiled {name}")
    logger = logging.getLogger("flextrain")
    logger.addHandler(caplog.handler)
    caplog.set_level("INFO", logger="flextrain")
    before = OpBuilder.jit_load
    with compiling.announced(1.0):
        assert CPUAdamBuilder().load() == "compiled cpu_adam"
    (folder,) = tmp_path.rglob("cpu_adam")
    assert (
        f"DeepSpeed compiles its extension cpu_adam with the C++ compiler, once on this machine, in {folder}"
        in caplog.text
    )
    leave_lock(folder, 600)
    OpBuilder._loaded_ops.clear()
    with compiling.announced(1.0), pytest.raises(StrategyError, match=f"rm {folder}/lock"):
        CPUAdamBuilder().load()
    assert OpBuilder.jit_load is before
    logger.removeHandler(caplog.handler)
