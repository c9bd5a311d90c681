"""Training goes on while a checkpoint is written."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint, find_latest, is_checkpoint, save_in_background
from flextrain.core.checkpoint import save as saving
from flextrain.runner.health import monitor as last_words
from flextrain.runner.hooks import Hook
from flextrain.strategies.parts import check_replicas
from flextrain.testing import WorkerGroup

from ..waiting import wait_until
from .training import Watch, make_runner, whole_state

pytestmark = pytest.mark.usefixtures("quick")

EPOCHS = dict(max_epochs=4)
write_shard = saving.write_shard


def hooks(**options: Any) -> dict[str, Any]:
    return dict(checkpoint=dict(type="CheckpointHook", interval=1, **options))


def content(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint.open(path)
    tensors = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(tensors)
    return tensors


def test_the_checkpoints_are_the_same(tmp_path: Path) -> None:
    for name, in_background in (("a", False), ("b", True)):
        make_runner(tmp_path / name, train_cfg=EPOCHS, default_hooks=hooks(async_save=in_background)).train()
    for epoch in range(1, 5):
        ours, theirs = (content(tmp_path / name / f"epoch_{epoch}") for name in "ba")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert find_latest(tmp_path / "b") == tmp_path / "b" / "epoch_4"


def slow(seconds: float, monkeypatch: pytest.MonkeyPatch, fail_at: str | None = None) -> list[str]:
    """Make writing slow, or fail for a checkpoint of this name; gives the names in the order of their beginning."""
    write, names = saving.write_shard, []

    def later(path: Path, *args: Any) -> Any:
        names.append(path.parent.name)
        time.sleep(seconds)
        if path.parent.name == f".{fail_at}.tmp":
            raise OSError(28, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(saving, "write_shard", later)
    return names


def test_one_goes_only_when_its_successor_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(0.2, monkeypatch)
    seen: list[set[str]] = []

    class Look(Watch):
        def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            seen.append({path.name for path in tmp_path.glob("epoch_*") if is_checkpoint(path)})

    options = hooks(async_save=True, max_keep_ckpts=1, keep_every=2)
    make_runner(tmp_path, train_cfg=EPOCHS, default_hooks=options, custom_hooks=[Look()]).train()
    first = next(i for i, names in enumerate(seen) if names)
    assert all(names for names in seen[first:]), "there was a moment without a complete checkpoint"
    assert {path.name for path in tmp_path.glob("epoch_*")} == {"epoch_2", "epoch_4"}


def test_the_next_iteration_raises_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(0.0, monkeypatch, fail_at="epoch_2")

    class Wait(Watch):
        def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            super().before_train_iter(runner, *args, **kwargs)
            time.sleep(0.05)

    watch = Wait()
    runner = make_runner(tmp_path, train_cfg=EPOCHS, default_hooks=hooks(async_save=True), custom_hooks=[watch])
    with pytest.raises(CheckpointError, match=r"epoch_2: could not be saved on rank 0: .*No space left on device"):
        runner.train()
    assert runner.epoch == 2
    assert runner.iter < 3 * 7 - 1, "it was noticed before the next save"
    assert find_latest(tmp_path) == tmp_path / "epoch_1"
    resumed = make_runner(tmp_path / "x", train_cfg=EPOCHS, resume=str(tmp_path / "epoch_1"))
    resumed.train()
    assert resumed.epoch == 4


def test_the_end_of_training_waits_and_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(0.3, monkeypatch, fail_at="epoch_4")
    with pytest.raises(CheckpointError, match="epoch_4: could not be saved"):
        make_runner(tmp_path, train_cfg=EPOCHS, default_hooks=hooks(async_save=True)).train()
    assert find_latest(tmp_path) == tmp_path / "epoch_3"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a program: sessions of pytest-xdist ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("call", ["train", "close"])
def test_ctrl_c_in_the_wait_for_it_leaves_the_checkpoint_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    names = slow(1.0, monkeypatch)
    own = hooks(async_save=True) if call == "train" else dict(checkpoint=None)
    runner = make_runner(tmp_path, train_cfg=dict(max_epochs=1), default_hooks=own)

    def interrupt() -> None:
        wait_until(lambda: bool(names))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    if call == "close":
        runner.train()
        runner.save_checkpoint(tmp_path, "epoch_1", async_save=True)
    with pytest.raises(KeyboardInterrupt):
        getattr(runner, call)()
    assert is_checkpoint(tmp_path / "epoch_1")


def test_an_exception_in_training_leaves_the_checkpoint_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(0.3, monkeypatch)

    class Fail(Watch):
        def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            if runner.epoch == 1:
                raise RuntimeError("the disk of somebody else")

    with pytest.raises(RuntimeError, match="somebody else"):
        make_runner(tmp_path, default_hooks=hooks(async_save=True), custom_hooks=[Fail()]).train()
    assert is_checkpoint(tmp_path / "epoch_1")


def trained_in_parts(folder: Path, strategy: dict[str, Any], async_save: bool) -> dict[str, Any]:
    for epochs in (2, 4):
        runner = make_runner(
            folder, train_cfg=dict(max_epochs=epochs), strategy=strategy, resume=epochs == 4,
            default_hooks=hooks(async_save=async_save),
        )  # fmt: skip
        runner.train()
        state = whole_state(runner)
        runner.strategy.leave()
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(dict(type="DDPStrategy"), marks=pytest.mark.full),
        dict(type="FSDPStrategy", wrap=["Linear"]),
        pytest.param(dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)), marks=pytest.mark.deepspeed),
    ],
    ids=lambda strategy: strategy["type"],
)
def test_on_two_processes_with_resuming(workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any]) -> None:
    expected = workers2.run(trained_in_parts, tmp_path / "a", strategy, False)[0]
    found = workers2.run(trained_in_parts, tmp_path / "b", strategy, True)[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class ChecksMeanwhile(Hook):
    """Compares replicas while the first save is being written: rank 0 has written its shard, rank 1 begins after this."""

    def __init__(self) -> None:
        self.has_written, self.has_compared = threading.Event(), threading.Event()

    def write(self, *args: Any) -> Any:
        if os.environ["RANK"] == "1":
            assert self.has_compared.wait(60)
        written = write_shard(*args)
        self.has_written.set()
        return written

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 1:
            if runner.rank == 0:
                assert self.has_written.wait(60)
                time.sleep(0.2)  # for the message of the thread that writes, with which this one must not be mixed up
            check_replicas(runner.strategy)
            self.has_compared.set()


def compared_while_saving(folder: str) -> list[int]:
    hook = ChecksMeanwhile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_shard", hook.write)
        cfg = dict(by_epoch=False, max_iters=3)
        checkpoint = dict(by_epoch=False, interval=1, async_save=True)
        runner = make_runner(
            folder, train_cfg=cfg, strategy="ddp", default_hooks=dict(checkpoint=checkpoint), custom_hooks=[hook]
        )
        runner.train()
        runner.strategy.leave()
    return [Checkpoint.open(Path(folder) / f"iter_{done}").values["loop"]["iter"] for done in (1, 2, 3)]


@pytest.mark.distributed
def test_messages_of_training_and_of_a_save_are_not_mixed_up(workers2: WorkerGroup, tmp_path: Path) -> None:
    assert workers2.run(compared_while_saving, str(tmp_path)) == [[1, 2, 3]] * 2


# The last words of a process that a thread ends


def test_a_save_in_the_background_ends_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    goes_on, write = threading.Event(), saving.write_shard

    def write_late(*args: Any) -> Any:
        goes_on.wait()
        return write(*args)

    monkeypatch.setattr(saving, "write_shard", write_late)
    pending = save_in_background(tmp_path / "iter_1", {"a": torch.zeros(3)})
    leaving = threading.Thread(target=last_words.leave, args=(75,))
    leaving.start()
    leaving.join(1.2)
    assert statuses == [], "the save has not ended"
    goes_on.set()
    leaving.join()
    assert (statuses, pending.is_done()) == ([75], True)
    assert pending.wait().is_dir()


def test_a_log_that_is_stuck_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the main thread is killed while it writes: its lock is never released."""
    monkeypatch.setattr(last_words, "_LOGGING_S", 0.05)
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger("flextrain"), "handlers", [handler])
    handler.acquire()
    leaving = threading.Thread(target=last_words.leave, args=(143,))
    leaving.start()
    wait_until(lambda: statuses)
    assert statuses == [143]
    handler.release()
    leaving.join()
