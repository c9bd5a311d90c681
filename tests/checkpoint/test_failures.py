"""Saves that fail: a full disk, a process that cannot write, does not come or is killed. All hear of it; the last one loads."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint, directory, find_latest, save_checkpoint, save_in_background
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup

from ..waiting import wait_until
from .disks import fill_up, mounted

pytestmark = pytest.mark.distributed

FORK = multiprocessing.get_context("fork")
ROWS, COLUMNS = 16, 2**14  # 1 MiB, in equal parts
PAGE = resource.getpagesize()


@contextmanager
def group(rank: int | None = None, world_size: int = 0, meet: str = "env://") -> Iterator[int]:
    if rank is None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=meet, timeout_s=30)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def state(number: float) -> dict[str, Any]:
    """A tensor that the processes hold in equal parts, and plain values of 64 KiB."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"x": distribute_tensor(torch.full((ROWS, COLUMNS), number), mesh, [Shard(0)]), "text": "-" * 2**16}


def attempt(path: Path, number: float, background: bool = False, **options: Any) -> str:
    """Save a state of this number; what this process got to hear."""
    content = state(number)
    try:
        if background:
            save_in_background(path, content, is_latest=True, **options).wait()
        else:
            save_checkpoint(path, content, is_latest=True, **options)
    except CheckpointError as error:
        return str(error)
    return "saved"


def number_in(folder: Path) -> float:
    """The number that the latest checkpoint is full of."""
    latest = find_latest(folder)
    assert latest is not None
    x = torch.zeros(ROWS, COLUMNS)
    Checkpoint.open(latest).load({"x": x})
    assert torch.equal(x, x[0, 0].expand_as(x))
    return float(x[0, 0])


# The disk is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(tmp_path / "disk") as folder:
        yield folder


def save_once(path: Path, number: float, background: bool = False) -> str:
    with group():
        return attempt(path, number, background)


@pytest.mark.parametrize(
    "free, background",
    [(0, True), (PAGE, False), (2**18, True), (2**20 + 4 * PAGE, False)],
    ids=["nothing", "for the header", "for a part", "for all tensors"],
)
def test_a_full_disk(small_disk: Path, workers2: WorkerGroup, free: int, background: bool) -> None:
    """Wherever the room ends: all are told, the checkpoint before loads, and with more room the next one is saved."""
    assert workers2.run(save_once, small_disk / "epoch_1", 1.0) == ["saved"] * 2
    filler = fill_up(small_disk, free)
    for heard in workers2.run(save_once, small_disk / "epoch_2", 2.0, background):
        assert f"{small_disk / 'epoch_2'}: could not be saved on rank " in heard
        assert os.strerror(errno.ENOSPC) in heard
    assert number_in(small_disk) == 1.0
    assert not list(small_disk.glob(".*")), "what was written takes up the room that there is"
    filler.unlink()
    assert workers2.run(save_once, small_disk / "epoch_2", 2.0, background) == ["saved"] * 2
    assert number_in(small_disk) == 2.0
    assert sorted(file.name for file in small_disk.iterdir()) == ["epoch_1", "epoch_2", "latest"]


def save_limited(path: Path, limited: Sequence[int], background: bool) -> list[str]:
    """Save while some processes can write no file of more than 64 KiB, and once more when they can."""
    with group() as rank:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank in limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
        try:
            heard = attempt(path, 2.0, background)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        dist.barrier()
        assert not directory.temporary(path).exists()
        return [heard, str(number_in(path.parent)), attempt(path, 3.0, background)]


@pytest.mark.parametrize(
    "limited, named, background", [([0], "rank 0", True), ([1], "rank 1", False), ([0, 1], "rank 0, 1", True)]
)
def test_a_process_that_cannot_write(
    tmp_path: Path, workers2: WorkerGroup, limited: list[int], named: str, background: bool
) -> None:
    """All are told which one it was; the checkpoint that has the name stays, and is replaced when it can be."""
    workers2.run(save_once, tmp_path / "epoch_1", 1.0)
    for heard, number, then in workers2.run(save_limited, tmp_path / "epoch_1", limited, background):
        assert heard.startswith(f"{tmp_path / 'epoch_1'}: could not be saved on {named}: ")
        assert os.strerror(errno.EFBIG) in heard
        assert (number, then) == ("1.0", "saved")
    assert number_in(tmp_path) == 3.0


# A process does not come


def some_save(path: Path, callers: Sequence[int], timeout_s: float) -> str:
    """Only these call ``save_checkpoint``; what they heard. The others come back when all of them have."""
    with group() as rank:
        content = state(2.0)
        dist.barrier()
        heard = ""
        if rank in callers:
            try:
                save_checkpoint(path, content, is_latest=True, timeout_s=timeout_s)
            except CheckpointError as error:
                heard = str(error)
            (path.parent / f"rank {rank} heard").touch()
        wait_until(lambda: len(list(path.parent.glob("rank * heard"))) == len(callers))
        return heard


@pytest.mark.parametrize("callers, missing", [([0], "rank 1, 2"), ([1, 2], "rank 0")])
def test_a_save_that_some_do_not_call(tmp_path: Path, workers3: WorkerGroup, callers: list[int], missing: str) -> None:
    workers3.run(save_once, tmp_path / "epoch_1", 1.0)
    answers = workers3.run(some_save, tmp_path / "epoch_2", callers, 1.0)
    for rank in callers:
        heard = answers[rank]
        assert f"epoch_2: could not be saved: {missing} did not" in heard
        assert "come within 1 s; every process has to save" in heard
    assert number_in(tmp_path) == 1.0
    assert workers3.run(save_once, tmp_path / "epoch_2", 2.0) == ["saved"] * 3


# A process is killed


def die_at(name: str) -> None:
    """Be killed in front of opening a file of this name."""

    def watch(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], (str, Path)) and Path(arguments[0]).name == name:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def save_until_killed(rank: int, world_size: int, folder: Path, dying: int, at: str) -> None:
    """In a process: save, of which one process does not see the end; the others write down what they hear."""
    torch.set_num_threads(1)
    with group(rank, world_size, f"file://{folder / 'meet'}"):
        heard = attempt(folder / "epoch_1", 1.0)
        assert heard == "saved"
        if rank == dying:
            die_at(at)
        heard = attempt(folder / "epoch_2", 2.0, timeout_s=5.0)
        (folder / f"heard_{rank}").write_text(heard)
        os._exit(0)  # the group cannot be left in peace


@pytest.mark.parametrize(
    "dying, at",
    [(1, "rank-00001.safetensors"), (0, "rank-00000.safetensors"), (0, "manifest.json"), (2, "rank-00002.safetensors")],
)
def test_a_process_that_is_killed_while_it_saves(tmp_path: Path, dying: int, at: str) -> None:
    """The others raise soon, instead of waiting for ever."""
    arguments = (3, tmp_path, dying, at)
    processes = [FORK.Process(target=save_until_killed, args=(rank, *arguments)) for rank in range(3)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hanging, f"rank {hanging} hangs"
    assert processes[dying].exitcode == -signal.SIGKILL
    for rank in {0, 1, 2} - {dying}:
        heard = (tmp_path / f"heard_{rank}").read_text()
        assert "epoch_2: could not be saved: another process was lost" in heard
    assert number_in(tmp_path) == 1.0
