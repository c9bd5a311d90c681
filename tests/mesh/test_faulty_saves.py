"""Under a mesh: a process that is killed while all save, and files with a bit changed. What is resumed is a complete checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import find_latest, save_checkpoint
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import train
from flextrain.testing.sessions import load, save, whole_state
from flextrain.testing.workers import WorkerError

from .parity import RECIPES, data, dtype_of, started

pytestmark = [pytest.mark.distributed, pytest.mark.full]

MATRICES = {
    "layers.*.[qkv]": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
PLAN = {**MATRICES, "layers.*.experts": "experts"}
MESH = dict(type="MeshStrategy", plan=PLAN)
ON_MATRICES, ON_EXPERTS = dict(type="MeshStrategy", tp=2, plan=MATRICES), dict(MESH, ep=2)
# The model, the mesh that saves, and another one that resumes.
SAVING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2xep2": ("mixture", dict(MESH, tp=2, ep=2), ON_EXPERTS),
    "ep2": ("mixture", ON_EXPERTS, dict(type="MeshStrategy", pp=2)),
    "tp2": ("plain", ON_MATRICES, dict(type="MeshStrategy")),
    "cp2": ("plain", dict(type="MeshStrategy", cp=2), ON_MATRICES),
    "pp2": ("plain", dict(type="MeshStrategy", pp=2), ON_MATRICES),
    "dp2": ("plain", dict(type="MeshStrategy"), dict(type="MeshStrategy", pp=2)),
}
RECIPE = RECIPES["adamw-clip"]
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def die_while_saving(mesh: str, folder: Path, rank: int, step: int) -> bool:
    """In a worker: save twice; one process is killed in front of a step on disk of its second save. Whether none was."""
    torch.set_num_threads(1)
    model, spec, _ = SAVING[mesh]
    with dtype_of(torch.float64), started(spec, model, RECIPE) as session:
        for number, window in enumerate(data(model, RECIPE, 2), 1):
            train(session.strategy, session.model, session.optim, [window])
            state: dict[str, Any] = {
                **session.strategy.state(),
                "optim.wrapper": session.optim.plain_values(),
                "number": number,
            }
            if number == 2 and int(os.environ["RANK"]) == rank:
                _die_at(folder, step)
            save_checkpoint(folder / f"iter_{number}", state, is_latest=True)
    return True


def _die_at(folder: Path, step: int) -> None:
    steps = 0

    def watch(event: str, arguments: Any) -> None:
        nonlocal steps
        is_path = event in EVENTS and isinstance(arguments[0], (str, Path))
        if is_path and str(folder) in os.fspath(arguments[0]):
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def latest_is_whole(mesh: str, folder: Path) -> int:
    """In a worker, under another mesh: the latest checkpoint holds what the same training has after so many updates."""
    torch.set_num_threads(1)
    latest = find_latest(folder)
    assert latest is not None
    number = int(latest.name.removeprefix("iter_"))
    model, _, spec = SAVING[mesh]
    with dtype_of(torch.float64), started(spec, model, RECIPE) as session:
        train(session.strategy, session.model, session.optim, data(model, RECIPE, number))
        expected = whole_state(session.strategy)
        train(session.strategy, session.model, session.optim, data(model, RECIPE, 1))
        load(session, latest)
        same_tensors(whole_state(session.strategy), expected, "what was loaded", 1e-12)
    return number


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mesh", SAVING)
def test_killed_while_saving(tmp_path: Path, workers2: WorkerGroup, mesh: str, rank: int) -> None:
    found: list[int] = []
    with WorkerGroup(2, 60.0) as group:
        for step in range(1, 100, 3 if rank == 0 else 1):  # rank 0 has the most to do on disk
            folder = tmp_path / f"killed_{step}"
            folder.mkdir()
            try:
                group.run(die_while_saving, mesh, folder, rank, step)
                break
            except WorkerError:
                found.append(workers2.run(latest_is_whole, mesh, folder)[0])
    assert found
    assert found == sorted(found), "once the new one is there it stays"


def write(mesh: str, path: Path) -> None:
    """In a worker."""
    model, spec, _ = SAVING[mesh]
    with dtype_of(torch.float64), started(spec, model, RECIPE) as session:
        train(session.strategy, session.model, session.optim, data(model, RECIPE, 2))
        save(session, path)


def refused(mesh: str, path: Path) -> str:
    """In a worker, under the other mesh: what loading says."""
    model, _, spec = SAVING[mesh]
    with dtype_of(torch.float64), started(spec, model, RECIPE) as session:
        try:
            load(session, path)
        except CheckpointError as error:
            return str(error)
    return "was loaded"


@pytest.mark.parametrize("mesh", SAVING)
def test_a_bit_changed(tmp_path: Path, workers: Any, mesh: str) -> None:
    path = tmp_path / "iter_2"
    workers(4 if mesh == "ep2" else 2).run(write, mesh, path)  # 4: FSDP shards each expert too
    assert set(workers(2).run(refused, mesh, path)) == {"was loaded"}
    files = sorted(file for file in path.iterdir() if file.is_file())
    assert len(files) >= 4
    for file in files:
        content = file.read_bytes()
        middle = len(content) * 3 // 4
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        for said in workers(2).run(refused, mesh, path):
            assert file.name in said
        file.write_bytes(content)
    assert set(workers(2).run(refused, mesh, path)) == {"was loaded"}
