"""A process that is killed while it saves: what is resumed is a complete checkpoint, and training ends as if nothing was."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import FlexibleRunner
from flextrain.core.checkpoint import Checkpoint, find_latest
from flextrain.runner.hooks import Hook

from ..runner.training import SaveEvery, differences, make_runner

FORK = multiprocessing.get_context("fork")
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def resumed(folder: Path, *hooks: Hook, **changes: Any) -> FlexibleRunner:
    runner = make_runner(folder, resume=True, custom_hooks=list(hooks), **changes)
    runner.train()
    return runner


def in_a_process(folder: Path, *hooks: Hook, **changes: Any) -> Any:
    process = FORK.Process(target=resumed, args=(folder, *hooks), kwargs=changes)
    process.start()
    return process


def weights(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint.open(path)
    template = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(template)
    return template


class DieWhileSaving(Hook):
    """Saves after the third update, and is killed in front of one of the steps on disk that this takes."""

    priority = "LOWEST"

    def __init__(self, name: str, step: int, background: bool) -> None:
        self.name, self.step, self.background = name, step, background

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter + 1 != 3:
            return
        steps, folder = 0, runner.work_dir

        def watch(event: str, arguments: Any) -> None:
            nonlocal steps
            if event in EVENTS and isinstance(arguments[0], (str, Path)) and folder in os.fspath(arguments[0]):
                steps += 1
                if steps == self.step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        runner.save_checkpoint(folder, self.name, async_save=self.background)
        runner.finish_saving()
        os._exit(0)


@pytest.mark.processes
@pytest.mark.parametrize("name, background", [("iter_3", True), ("iter_2", False)], ids=["new", "replaced"])
def test_killed_at_every_step_of_a_save(tmp_path: Path, name: str, background: bool) -> None:
    """Killed before the first, the second, ... step on disk: the checkpoint before is there, or the new one is."""
    base = tmp_path / "base"
    make_runner(base, custom_hooks=[SaveEvery({2, 3})]).train()
    expected = {2: weights(base / "iter_2"), 3: weights(base / "iter_3")}
    shutil.rmtree(base / "iter_3")
    (base / "latest").write_text("iter_2")
    found: list[int] = []
    while True:
        folder = tmp_path / f"killed_{len(found) + 1}"
        shutil.copytree(base, folder)
        process = in_a_process(folder, DieWhileSaving(name, len(found) + 1, background))
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        latest = find_latest(folder)
        assert latest is not None
        done = Checkpoint.open(latest).values["loop"]["iter"]
        assert not differences(weights(latest), expected[done])
        found.append(done)
    assert len(found) > 10
    assert found == sorted(found), "once the new one is there it stays"
    assert set(found) == {2, 3}
