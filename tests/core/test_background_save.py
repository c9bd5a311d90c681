"""Saving in the background: what is written is what was there at the call, and nothing that goes wrong is lost."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import (
    Checkpoint,
    FlatShard,
    Staging,
    directory,
    is_checkpoint,
    save_checkpoint,
    save_in_background,
)
from flextrain.core.checkpoint import save as saving
from flextrain.core.comm import collectives
from flextrain.testing import WorkerGroup

from ..waiting import wait_until


def load_all(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    found = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(found)
    return found


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No shard is written before the event that this gives."""
    may_write, write = threading.Event(), saving.write_shard

    def later(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(saving, "write_shard", later)
    try:
        yield may_write
    finally:
        may_write.set()


def test_what_changes_after_the_call_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {
        "model.w": torch.arange(6.0).view(2, 3),
        "model.view": torch.arange(12.0).view(3, 4).t()[1:],
        "model.scalar": torch.tensor(2.0),
        "loop": {"iter": 1, "history": [1, 2]},
    }
    expected = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    with held_back(monkeypatch) as may_write:
        pending = save_in_background(tmp_path / "a", state)
        assert not pending.is_done()
        assert not is_checkpoint(tmp_path / "a")
        for key in expected:
            state[key].fill_(-1)
        state["loop"]["history"].append(3)
        state["loop"]["iter"] = 2
        may_write.set()
        assert pending.wait() == tmp_path / "a"
    assert pending.is_done()
    found = load_all(tmp_path / "a")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert Checkpoint.open(tmp_path / "a").values == {"loop": {"iter": 1, "history": [1, 2]}}


def test_an_error_is_logged_and_raised_by_wait_and_the_old_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("flextrain"), "propagate", True)
    save_checkpoint(tmp_path / "a", {"model.w": torch.zeros(3)})

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_shard", full)
    pending = save_in_background(tmp_path / "a", {"model.w": torch.ones(3)})
    pending.join()
    assert "a: could not be saved on rank 0: [Errno 28] No space left on device" in caplog.text, (
        "nobody may wait for it"
    )
    with pytest.raises(CheckpointError, match="a: could not be saved on rank 0: .*No space left on device"):
        pending.wait()
    assert load_all(tmp_path / "a")["model.w"].tolist() == [0, 0, 0]


def test_what_was_written_wrong_does_not_become_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``verify`` reads what is there, and compares it with what was meant to be written."""
    write = saving.write_shard

    def lossy(path: Path, *args: Any) -> Any:
        entry = write(path, *args)
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        return entry

    monkeypatch.setattr(saving, "write_shard", lossy)
    with pytest.raises(CheckpointError, match=r"a: could not be saved on rank 0: .*its checksum is"):
        save_checkpoint(tmp_path / "a", {"model.w": torch.zeros(3)}, verify=True)
    assert not is_checkpoint(tmp_path / "a")
    save_checkpoint(tmp_path / "b", {"model.w": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="its checksum is"):
        load_all(tmp_path / "b")


CHANGES: dict[str, dict[str, Tensor]] = {
    "values": {"model.a": torch.ones(2, 3), "model.b": torch.ones(4)},
    "shape": {"model.a": torch.ones(3, 2), "model.b": torch.ones(4)},
    "dtype": {"model.a": torch.ones(2, 3, dtype=torch.bfloat16), "model.b": torch.ones(4)},
    "more": {"model.a": torch.ones(2, 3), "model.b": torch.ones(4), "model.c": torch.ones(5)},
    "fewer": {"model.b": torch.ones(4)},
    "order": {"model.b": torch.ones(4), "model.a": torch.ones(2, 3)},
    "larger": {"model.a": torch.ones(200, 3), "model.b": torch.ones(4)},
    "none": {},
}


@pytest.mark.parametrize("save", [save_checkpoint, save_in_background])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_for_the_next_save_does_not_hold_for_another_state(
    tmp_path: Path, save: Callable[..., Any], change: str
) -> None:
    staging, first = Staging(), {"model.a": torch.zeros(2, 3), "model.b": torch.zeros(4)}
    states = {"a": first, "b": CHANGES[change], "c": first}
    for number, (name, state) in enumerate(states.items()):
        per_rank = {"rng": number}
        saved = save(tmp_path / name, {**state, "iter": number}, per_rank=per_rank, staging=staging)
        if save is save_in_background:
            saved.wait()
    for number, (name, state) in enumerate(states.items()):
        found = load_all(tmp_path / name)
        assert found.keys() == state.keys()
        assert all(found[key].dtype == state[key].dtype and torch.equal(found[key], state[key]) for key in state)
        assert Checkpoint.open(tmp_path / name).values == {"iter": number, "rng": [number]}


@pytest.mark.processes
def test_the_interpreter_waits_for_it(tmp_path: Path) -> None:
    script = """
        import sys, time, torch
        from flextrain.core.checkpoint import save as saving
        write = saving.write_shard
        def slow(*args):
            time.sleep(0.5)
            return write(*args)
        saving.write_shard = slow
        saving.save_in_background(sys.argv[1], {"model.w": torch.ones(3)}, is_latest=True)
        raise SystemExit(3)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "a")], check=False)
    assert done.returncode == 3
    assert load_all(tmp_path / "a")["model.w"].tolist() == [1, 1, 1]
    assert (tmp_path / "latest").read_text() == "a"


# Several processes


@contextmanager
def group(timeout_s: float = 30, init_method: str = "env://", swapped: bool = False) -> Iterator[int]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank = world_size - 1 - rank if swapped else rank
    collectives.init_process_group(
        "gloo", rank=rank, world_size=world_size, init_method=init_method, timeout_s=timeout_s
    )
    try:
        yield rank
    finally:
        collectives.destroy_process_group()


def in_all_layouts(offset: float) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(15.0).view(5, 3) + offset
    begin, end = (0, 8) if dist.get_rank() == 0 else (8, 15)
    return {
        "plain": whole.clone(),
        "sharded": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
        "flat": FlatShard(whole.flatten()[begin:end].clone(), whole.shape, begin),
    }


def overwrite_at_once(path: Path) -> None:
    with group():
        state = in_all_layouts(0.0)
        pending = save_in_background(path, state)
        for tensor in state.values():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(-1.0)
        # Training talks over the main group meanwhile.
        for _ in range(50):
            dist.all_reduce(torch.ones(100))
        pending.wait()


@pytest.mark.distributed
def test_overwriting_in_place_changes_nothing_on_disk(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(overwrite_at_once, tmp_path / "a")
    expected = torch.arange(15.0).view(5, 3)
    assert all(torch.equal(found, expected) for found in load_all(tmp_path / "a").values())


def one_hangs(path: Path) -> None:
    """Rank 1 writes until rank 0 knows that something is wrong, which it does when the group's limit is over."""
    heard = path.with_suffix(".heard")
    with group(timeout_s=1) as rank, pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(saving, "write_shard", lambda *args: wait_until(heard.exists))
        with pytest.raises(CheckpointError, match="another process was lost"):
            save_checkpoint(path, in_all_layouts(0.0))
        heard.touch()


@pytest.mark.distributed
def test_the_limit_of_the_group_holds_for_saves(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(one_hangs, tmp_path / "a")
    assert not is_checkpoint(tmp_path / "a")


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("rank-*")} | {
        "index": str(sorted(Checkpoint.open(path).tensors.items())).encode()
    }


def thrice(folder: Path) -> tuple[list[int], bool]:
    """How many plans were made for three saves and one that knows of none before, and whether the last two wrote the same."""
    plans: list[int] = []
    make = saving.agree

    def counted(*args: Any) -> Any:
        plans[-1] += 1
        return make(*args)

    with group() as rank, pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "agree", counted)
        staging = Staging()
        for number in range(3):
            plans.append(0)
            state, per_rank = {**in_all_layouts(number), "iter": number}, {"rng": [number, rank]}
            if number == 1:
                save_checkpoint(folder / str(number), state, per_rank=per_rank, staging=staging)
            else:
                save_in_background(folder / str(number), state, per_rank=per_rank, staging=staging).wait()
        plans.append(0)
        save_checkpoint(folder / "anew", state, per_rank=per_rank)
        values = Checkpoint.open(folder / "2").values
        assert values == Checkpoint.open(folder / "anew").values == {"iter": 2, "rng": [[2, 0], [2, 1]]}
        return plans, files(folder / "2") == files(folder / "anew")


@pytest.mark.distributed
def test_a_plan_is_made_once(workers2: WorkerGroup, tmp_path: Path) -> None:
    assert workers2.run(thrice, tmp_path) == [([1, 0, 0, 1], True)] * 2


def in_chunks(whole: Tensor, column: int, mesh: DeviceMesh) -> DTensor:
    """Half of the rows of (4, 4), of a class that says itself which chunks it holds: those up to a column, and the rest."""
    begin = 2 * dist.get_rank()
    rows = whole[begin : begin + 2]
    local = LocalShardsWrapper([rows[:, :column].clone(), rows[:, column:].clone()], [(begin, 0), (begin, column)])
    # DTensor.from_local() would view the chunks as one first, which torch 2.6 cannot.
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


def moved(path: Path, case: str) -> None:
    """Save, change what the plan follows from in some processes, and save again."""
    with group() as rank:
        staging, whole, place, column = Staging(), torch.arange(16.0).view(4, 4), rank, 1
        mesh = in_order = init_device_mesh("cpu", (2,))
        bounds, placement = (0, 8, 16) if case == "as long, elsewhere" else (0, 6, 16), Shard(0)
        # Shared out by size, so that it depends on the large one who writes the others.
        alike = {"p": torch.ones(8), "q": torch.ones(8)}
        large = {"large": torch.ones(1000)} if rank == 0 else {}

        def state() -> dict[str, Tensor]:
            begin, end = bounds[place : place + 2]
            half = whole.chunk(2, dim=placement.dim)[rank if mesh is in_order else 1 - rank]
            return {
                **large,
                **alike,
                "flat": FlatShard(whole.flatten()[begin:end].clone(), whole.shape, begin),
                "sharded": DTensor.from_local(half.clone(), mesh, [placement], run_check=False),
                "in chunks": in_chunks(whole, column, in_order),
            }

        save_in_background(path, state(), staging=staging).wait()
        if case == "shorter and longer":
            bounds = (0, 4, 16)
        elif case == "as long, elsewhere":
            place = 1 - rank
        elif case == "placement":
            placement = Shard(1)
        elif case == "mesh":
            mesh = DeviceMesh("cpu", [1, 0])
        elif case == "in other chunks":
            column = 3
        elif case == "one has less":
            large = {}
        elif case == "one forgot":
            staging = Staging() if rank == 1 else staging
        elif case == "one has another plan":
            kept, staging, large = (staging, large), Staging(), {}
            save_in_background(path, state(), staging=staging).wait()
            if rank == 0:
                staging, large = kept
        whole = whole + 100
        save_in_background(path, state(), staging=staging).wait()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        "shorter and longer",
        "as long, elsewhere",
        "placement",
        "mesh",
        "in other chunks",
        "one has less",
        "one forgot",
        "one has another plan",
    ],
)
def test_a_plan_is_made_anew_by_all_if_one_needs_it(workers2: WorkerGroup, tmp_path: Path, case: str) -> None:
    workers2.run(moved, tmp_path / "a", case)
    found = load_all(tmp_path / "a")
    assert found.keys() == {"flat", "sharded", "in chunks", "p", "q", *(["large"] if case != "one has less" else [])}
    expected = torch.arange(100.0, 116).view(4, 4)
    assert all(torch.equal(found[key], expected) for key in ("flat", "sharded", "in chunks"))


def in_another_group(folder: Path) -> None:
    staging, state = Staging(), {"p": torch.ones(8), "q": torch.ones(8)}
    for name in ("first", "swapped"):
        with group(init_method=f"file://{folder}/{name}.store", swapped=name == "swapped"):
            save_checkpoint(folder / name, state, staging=staging)
    save_checkpoint(folder / f"alone-{os.environ['RANK']}", state, staging=staging)


@pytest.mark.distributed
def test_a_plan_does_not_hold_in_another_group(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(in_another_group, tmp_path)
    for name in ("first", "swapped", "alone-0", "alone-1"):
        assert {key: value.tolist() for key, value in load_all(tmp_path / name).items()} == {"p": [1] * 8, "q": [1] * 8}


def one_cannot_copy(path: Path, has_plan: bool) -> tuple[str, bool]:
    """What is raised, and whether anything is left of it."""
    with group() as rank:
        staging = Staging()
        if has_plan:
            save_in_background(path, in_all_layouts(0.0), staging=staging).wait()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(staging.memory, "copy", lambda tensors: 1 / 0)
            with pytest.raises(CheckpointError) as caught:
                save_in_background(path, in_all_layouts(50.0), staging=staging)
        dist.barrier()
        left = directory.temporary(path).exists()
        dist.barrier()
        save_in_background(path, in_all_layouts(100.0), staging=staging).wait()
        return str(caught.value), left


@pytest.mark.distributed
@pytest.mark.parametrize("has_plan", [False, True])
def test_all_raise_what_one_could_not_copy(workers2: WorkerGroup, tmp_path: Path, has_plan: bool) -> None:
    expected = (f"{tmp_path / 'a'}: could not be saved on rank 1: division by zero", False)
    assert workers2.run(one_cannot_copy, tmp_path / "a", has_plan) == [expected, expected]
    assert all(torch.equal(found, torch.arange(100.0, 115).view(5, 3)) for found in load_all(tmp_path / "a").values())


def overlapping(path: Path) -> tuple[str, bool]:
    with group() as rank:
        begin, end = ((0, 10), (8, 15))[rank]
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(path, {"w": FlatShard(torch.ones(end - begin), (15,), begin)})
        dist.barrier()
        return str(caught.value), directory.temporary(path).exists()


@pytest.mark.distributed
def test_nothing_is_left_of_what_could_not_be_planned(workers2: WorkerGroup, tmp_path: Path) -> None:
    for message, left in workers2.run(overlapping, tmp_path / "a"):
        assert (
            "a: could not be saved on rank 0, 1: w: two of its chunks overlap; rank 0 has elements 0 to 10, rank 1 has"
            in message
        )
        assert not left
