"""Options of offloading to files: wrong ones are named on one line, before anything is built."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")

from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.checkpoint.folders import FolderLock
from flextrain.strategies import DeepSpeedStrategy, detect_launch
from flextrain.strategies.deepspeed import swap_files
from flextrain.strategies.deepspeed import swap_files as async_io
from flextrain.strategies.deepspeed.engine_config import Request, engine_config
from flextrain.strategies.deepspeed.swap_files import SwapFolder
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.deepspeed


def zero(stage: int = 3, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}}


OPTIMIZER, PARAM = "strategy.zero_optimization.offload_optimizer", "strategy.zero_optimization.offload_param"
WRONG: list[tuple[dict[str, Any], str]] = [
    (zero(2, offload_optimizer=dict(device="nvme", nvme_path="HERE")), f'{OPTIMIZER}.device: "nvme" needs stage=3, the stage is 2'),
    (zero(2, offload_param=dict(device="nvme", nvme_path="HERE")), f"{PARAM}: has no effect at stage 2, give stage=3 or leave it out"),
    (zero(offload_optimizer=dict(device="nvme")), f'{OPTIMIZER}.nvme_path: missing, device="nvme" needs a folder on a local disk'),
    (zero(offload_param=dict(device="nvme", nvme_path="HERE/none")), f'{PARAM}.nvme_path: "HERE/none" is no folder, create it on a local disk'),
    (zero(offload_optimizer=dict(device="nvme", nvme_path="/proc")), f'{OPTIMIZER}.nvme_path: "/proc" is not writable, No such file or directory'),
    (zero(offload_optimizer=dict(device="cpu", nvme_path="HERE")), f'{OPTIMIZER}.nvme_path: has no effect with device="cpu", give device="nvme" or leave it out'),
    (zero(offload_optimizer=dict(device="cpu", pipeline_read=True)), f'{OPTIMIZER}.pipeline_read: has no effect with device="cpu"'),
    (zero(offload_param=dict(device="cpu", max_in_cpu=5)), f'{PARAM}.max_in_cpu: has no effect with device="cpu"'),
    (zero(offload_optimizer=dict(device="nvme", nvme_path="HERE", fast_init=True)), f"{OPTIMIZER}.fast_init: True is not allowed"),
    (zero(offload_optimizer=dict(device="nvme", nvme_path="HERE", ratio=0.5)), f'{OPTIMIZER}.ratio: 0.5 is not allowed with device="nvme"'),
    (dict(aio=dict(block_size=2**20)), 'strategy.aio: has no effect without offloading to device="nvme", leave it out'),
    (dict(aio=dict(block_size=1000)), "strategy.aio.block_size: 1000 is not allowed, give a multiple of 512"),
    (dict(aio=dict(use_gds=True)), "strategy.aio.use_gds: True is not allowed"),
]  # fmt: skip


def put(options: Any, folder: Path) -> Any:
    """The options with the folder in place of HERE."""
    if isinstance(options, dict):
        return {key: put(value, folder) for key, value in options.items()}
    return options.replace("HERE", str(folder)) if isinstance(options, str) else options


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message[9:70] for _, message in WRONG])
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeepSpeedStrategy(**put(options, tmp_path))
    assert str(caught.value).startswith(put(message, tmp_path))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def on_files(folder: Path, **options: Any) -> dict[str, Any]:
    return zero(offload_optimizer=dict(device="nvme", nvme_path=str(folder), **options))


# What the compilation lacks


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without compiler, ninja and compiled extensions; the folder of its only programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(async_io, "_own_ninja", lambda: None)
    return programs


def add_program(folder: Path, name: str, status: int) -> None:
    (folder / name).write_text(f"#!/bin/sh\nexit {status}\n")
    (folder / name).chmod(0o755)


def test_what_is_missing_is_named_before_any_process_group(bare: Path, tmp_path: Path) -> None:
    lacks = 'strategy.zero_optimization: device="nvme" needs DeepSpeed\'s asynchronous input and output, whose compilation lacks '
    with pytest.raises(StrategyError) as caught:
        DeepSpeedStrategy(**on_files(tmp_path))
    assert str(caught.value) == (
        f'{lacks}a C++ compiler (apt-get install g++) and ninja (pip install ninja); or choose device="cpu"'
    )
    add_program(bare, "c++", 1)
    add_program(bare, "ninja", 0)
    with pytest.raises(StrategyError) as caught:
        DeepSpeedStrategy(**on_files(tmp_path))
    assert str(caught.value) == f'{lacks}the headers of libaio (apt-get install libaio-dev); or choose device="cpu"'
    add_program(bare, "c++", 0)
    assert async_io.what_is_missing() == []
    DeepSpeedStrategy(**zero(offload_optimizer=dict(device="cpu")))  # needs none of it


def test_a_compiled_extension_needs_no_headers(bare: Path, tmp_path: Path) -> None:
    from flextrain.core.torch_compat.torch_private import build_folder

    add_program(bare, "c++", 1)
    add_program(bare, "ninja", 0)
    assert async_io.what_is_missing() == ["the headers of libaio (apt-get install libaio-dev)"]
    folder = build_folder("async_io")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "async_io.so").touch()
    assert async_io.what_is_missing() == []


def test_a_compilation_that_fails_is_one_line(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    def fail(name: str, **options: Any) -> None:
        raise RuntimeError(f"Error building extension '{name}':\nerror: something")

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    # Where DeepSpeed keeps the extension that another test of this session has loaded.
    monkeypatch.setattr(sys, "_deepspeed_pin_memory_op_module", None, raising=False)
    monkeypatch.setattr("torch.utils.cpp_extension.load", fail)
    monkeypatch.setattr(swap_files, "check_async_io", lambda: None)
    add_program(bare, "c++", 0)
    add_program(bare, "ninja", 0)
    strategy = DeepSpeedStrategy(**on_files(tmp_path))
    with pytest.raises(StrategyError) as caught:
        strategy.join()
    assert "cannot be compiled: Error building extension 'pin_memory': error: something" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ninja_of_the_environment_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_program(tmp_path, "ninja", 0)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with async_io.ninja_on_path():
        assert subprocess.run(["ninja"], check=False).returncode == 0
    assert os.environ["PATH"] == "/nowhere"


# What does not fit


def test_too_little_memory_to_lock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (2**20, 2**20))
    monkeypatch.setattr(swap_files, "_may_lock_everything", lambda: False)
    swap_files._check_locked(2**20)
    with pytest.raises(
        StrategyError, match=r"need 3 MiB of page-locked memory, and the limit is 1 MiB; raise it \(ulimit -l"
    ):
        swap_files._check_locked(3 * 2**20)
    monkeypatch.setattr(swap_files, "_may_lock_everything", lambda: True)
    swap_files._check_locked(3 * 2**20)


def test_deepspeed_gets_a_folder_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_files, "check_async_io", lambda: None)
    monkeypatch.setattr(swap_files, "load_async_io", lambda patience_s: None)
    both = dict(device="nvme", nvme_path=str(tmp_path))
    strategy = DeepSpeedStrategy(
        **zero(offload_optimizer=both, offload_param={**both, "buffer_size": 1e6}), aio=dict(queue_depth=4)
    )
    files = swap_files.SwapFiles(strategy.config)
    files.open()
    files.prepare(nn.Linear(3, 2), 1)
    request = Request(torch.float32, 0.0, 1, {})
    keys = engine_config(
        strategy.config, request, stage=3, world_size=1, on_cpu=True, num_elements=8, checkpointing=None, files=files
    )
    (own,) = tmp_path.iterdir()
    zero_keys = keys["zero_optimization"]
    assert zero_keys["offload_optimizer"]["nvme_path"] == zero_keys["offload_param"]["nvme_path"] == str(own)
    assert zero_keys["offload_param"]["max_in_cpu"] == zero_keys["stage3_max_reuse_distance"] == 0
    assert zero_keys["offload_param"]["buffer_size"] == 10**6
    assert zero_keys["sub_group_size"] == 50_000_000
    assert keys["aio"] == dict(
        block_size=2**20, queue_depth=4, intra_op_parallelism=1, single_submit=False, overlap_events=True, use_gds=False
    )
    files.remove()
    assert not list(tmp_path.iterdir())


# Folders


@pytest.mark.full
@pytest.mark.processes
def test_folders_of_the_killed_are_removed_and_others_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import sys; from pathlib import Path; from flextrain.strategies.deepspeed.swap_files import SwapFolder\n"
        "folder = SwapFolder(Path(sys.argv[1])); (folder.path / 'x.swp').touch(); print(folder.path, flush=True)\n"
        "sys.stdin.read()"
    )

    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    killed, ending = (subprocess.Popen(command, **pipes) for _ in range(2))
    left, busy = (Path(process.stdout.readline().strip()) for process in (killed, ending))
    killed.kill()
    killed.wait()
    assert left.exists()
    logger = logging.getLogger("flextrain")
    logger.addHandler(caplog.handler)
    caplog.set_level("INFO", logger="flextrain")
    own = SwapFolder(tmp_path)
    assert (left.exists(), busy.exists(), own.path.exists()) == (False, True, True)
    assert f"Removed {left}, the swap files of a process that ended without removing them" in caplog.text
    logger.removeHandler(caplog.handler)
    second = SwapFolder(tmp_path)  # of the same process: both stay
    assert own.path != second.path
    assert own.path.exists()
    ending.communicate("")  # ends by itself
    assert not busy.exists()
    for folder in (own, second, own):
        folder.remove()
    assert not list(tmp_path.iterdir())
    for process in (killed, ending):
        for stream in (process.stdout, process.stdin):
            assert stream is not None
            stream.close()


def test_nothing_is_removed_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "flextrain_swap_elsewhere"
    left.mkdir()
    monkeypatch.setattr(FolderLock, "is_held", False)
    SwapFolder(tmp_path).remove()
    assert left.exists()
    monkeypatch.undo()
    SwapFolder(tmp_path).remove()
    assert not left.exists()


# What one of several processes finds


def test_processes_that_share_a_disk_share_its_room() -> None:
    def room(machine: str, free: int, needed: int, folder: str = "/disk") -> list[swap_files.Room]:
        return [swap_files.Room(machine, 5, f"{PARAM}.nvme_path", folder, free * 2**30, needed * 2**30)]

    swap_files.check_room([room("a", 10, 5), room("a", 10, 5), room("b", 6, 6)])
    with pytest.raises(StrategyError) as caught:
        swap_files.check_room([room("a", 10, 5), room("a", 10, 5, "/disk/b"), room("a", 9, 0)])
    assert str(caught.value) == f'{PARAM}.nvme_path: "/disk" has 9.0 GiB free, and 3 processes need about 10.0 GiB'
    with pytest.raises(StrategyError) as caught:
        swap_files.check_room([room("a", 10, 5), room("b", 4, 5)])
    assert str(caught.value) == f'{PARAM}.nvme_path: "/disk" has 4.0 GiB free on b, and 1 process need about 5.0 GiB'


def told(folder: Path, wrong: str) -> tuple[str, bool]:
    """What this process hears when rank 1 finds something wrong, and whether it would have written."""
    writes: list[Any] = []
    options = dict(device="nvme", nvme_path=str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap_files, "check_async_io", lambda: None)
        patch.setattr(swap_files, "load_async_io", lambda patience_s: None)
        patch.setattr("flextrain.strategies.deepspeed.swapping.renew_buffers", lambda *a: writes.append(a))
        strategy = DeepSpeedStrategy(device="cpu", **zero(offload_param=options))
        try:
            if detect_launch().rank == 1 and wrong == "compiler":
                patch.setattr(swap_files, "check_async_io", missing)
            strategy.join()
            if strategy.topology.rank == 1 and wrong == "disk":
                patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
            elif strategy.topology.rank == 1 and wrong == "memory":
                patch.setattr("resource.getrlimit", lambda _: (1, 1))
                patch.setattr(swap_files, "_may_lock_everything", lambda: False)
            strategy._files.fit(nn.Linear(2, 2), None, strategy.topology.world_size, torch.float32)
        except StrategyError as error:
            return str(error), bool(writes)
        finally:
            strategy.leave()
    return "", bool(writes)


def missing() -> None:
    raise StrategyError("no compiler here")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("nothing", ""),
        ("compiler", "no compiler here"),
        ("disk", "has 0.0 GiB free, and 2 processes need about"),
        ("memory", "of page-locked memory"),
    ],
)
def test_all_processes_hear_what_one_finds_before_any_writes(
    tmp_path: Path, workers2: WorkerGroup, wrong: str, message: str
) -> None:
    first, second = workers2.run(told, tmp_path, wrong)
    assert first == second
    assert message in first[0]
    assert first == ("", True) if wrong == "nothing" else first[0] and not first[1]
    assert not list(tmp_path.iterdir())
