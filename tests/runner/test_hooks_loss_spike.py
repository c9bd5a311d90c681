"""LossSpikeHook: what a spike is, what is taken back and left out, and that a run then is one without these data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from flextrain import ConfigError, OptimWrapper
from flextrain.core.base.errors import LossSpikeError, NonFiniteError
from flextrain.core.base.events import read_events
from flextrain.core.checkpoint import Checkpoint, complete_ones, find_latest, remove_checkpoint
from flextrain.runner.hooks import Hook
from flextrain.runner.hooks.loss_spike import SpikeDetector
from flextrain.runner.resume.choose_checkpoint import GoBack
from flextrain.testing import WorkerGroup

from .training import At, SaveEvery, Stop, StopAt, Watch, differences, log_lines, make_runner, refuses, whole_state

pytestmark = pytest.mark.usefixtures("quick")
FULL = pytest.mark.full


# What a spike is


def test_a_spike_is_several_losses_far_above_the_median() -> None:
    detector = SpikeDetector(window=8, threshold=6.0, patience=3)
    calm = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.1]
    assert detector.find([9.0, *calm[:3]], 1) is None, "nothing is too high before half of the window is known"
    assert detector.find(calm, 5) is None
    limit = 1.0 + 6 * 1.4826 * 0.05
    assert detector.limit() == pytest.approx(limit)
    assert detector.find([limit + 0.01, limit + 0.01, 1.0], 13) is None, "two are no spike"
    assert detector.find([1.0, 5.0, 5.0], 16) is None
    assert detector.find([5.0], 19) == 17, "a spike goes on from one look to the next"


def test_nan_is_a_spike_at_once_unless_its_update_was_left_out() -> None:
    detector = SpikeDetector(window=8, threshold=6.0, patience=3)
    assert detector.find([1.0, math.nan], 1) == 2
    detector.tolerates_nonfinite = True
    assert detector.find([1.0, math.inf, 1.0], 3) is None


def test_equal_losses_have_no_spike_by_rounding() -> None:
    detector = SpikeDetector(window=4, threshold=6.0, patience=1)
    assert detector.find([2.0] * 4 + [2.0 + 1e-6], 1) is None


# What is taken back


class Poisoned(Dataset[dict[str, Any]]):
    """Samples of which some make the weights large, so that the loss stays high."""

    def __init__(self, length: int, bad: range, value: float = 300.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 6, generator=generator)
        self.bad, self.value = bad, value

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        y = self.x[index].sum(0, keepdim=True)
        return {"index": index, "x": self.x[index], "y": self.value if index in self.bad else y.item()}


class Regression(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, index: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x)[:, 0] - y.float()).square().mean()}


BAD = range(208, 216)  # updates 53 and 54 of four samples


def hook(**changes: Any) -> dict[str, Any]:
    return {**dict(type="LossSpikeHook", window=16, patience=2, margin=3, interval=5, threshold=8.0), **changes}


def settings(data: Dataset[Any], shards: int = 1, **changes: Any) -> dict[str, Any]:
    """Updates of four samples over all processes, in the order of the data, with a checkpoint after every ten of them."""
    loader = dict(batch_size=4 // shards, dataset=data, collate_fn="default_collate", shuffle=False)
    return {
        "model": Regression,
        "train_dataloader": loader,
        "optim_wrapper": dict(optimizer=dict(type="AdamW", lr=0.01)),
        "train_cfg": dict(by_epoch=False, max_iters=80),
        "default_hooks": dict(checkpoint=dict(by_epoch=False, interval=10)),
        "log_level": "WARNING",
        "custom_hooks": [hook()],
        **changes,
    }


def run(folder: Path, data: Dataset[Any], shards: int = 1, **changes: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """What was trained on, update by update, and the state at the end, whole; in a worker, or here."""
    watch = Watch()
    given = settings(data, shards, **changes)
    given["custom_hooks"] = [*given["custom_hooks"], watch]
    runner = make_runner(folder, **given)
    try:
        runner.train()
    except Stop:
        return watch.trained, {}
    state = whole_state(runner)
    runner.close()
    return watch.trained, state


def without(data: Dataset[Any], start: int, stop: int) -> Subset[Any]:
    return Subset(data, [*range(start), *range(stop, len(data))])  # type: ignore[arg-type]


def test_the_run_is_one_without_the_bad_data(tmp_path: Path) -> None:
    data = Poisoned(400, BAD)
    with log_lines() as lines:
        trained, found = run(tmp_path / "spike", data)
    (line,) = (line for line in lines if "loss spikes" in line)
    begins = r"Iteration 53: the loss spikes, up to 8\.9\d+e\+04 with a limit of [78]\.\d+, 1 of 3 times that a run may go back; training goes on from "
    assert re.match(begins, line)
    assert line.endswith(
        f"{tmp_path / 'spike' / 'iter_40'}, iteration 40, and leaves out samples 160 to 220 of epoch 1"
    )
    assert [index for update in trained for index in update] == [*range(220), *range(220, 380)]
    assert trained[:55] == [[*range(4 * i, 4 * i + 4)] for i in range(55)], "noticed after update 55"
    _, expected = run(tmp_path / "clean", without(data, 160, 220), custom_hooks=[])
    assert differences(found, expected) == []
    (event,) = (event for event in read_events(tmp_path / "spike") if event["event"] == "went_back")
    assert (event["iter"], event["back_to"]) == (55, 40)
    assert event["left_out"] == [dict(epoch=0, start=160, stop=220, counts="samples")]
    facts = Checkpoint.open(tmp_path / "spike" / "iter_60").values["data"]
    assert facts["left_out"] == event["left_out"]
    assert facts["position"] == 220 + 20 * 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite(tmp_path: Path, value: float) -> None:
    data = Poisoned(400, BAD, value)
    _, found = run(tmp_path / "spike", data)
    _, expected = run(tmp_path / "clean", without(data, 160, 220), custom_hooks=[])
    assert differences(found, expected) == []


def test_the_hook_of_nan_comes_first_where_it_acts(tmp_path: Path) -> None:
    data = Poisoned(400, BAD, math.nan)
    with refuses(NonFiniteError, begins="Iteration 53: loss is nan"):
        run(tmp_path / "raise", data, env_cfg=dict(nonfinite="raise"))
    trained, _ = run(tmp_path / "skip", data, env_cfg=dict(nonfinite="skip"))
    assert trained == [[*range(4 * i, 4 * i + 4)] for i in range(80)]


def test_a_checkpoint_in_the_bad_stretch_is_not_good(tmp_path: Path) -> None:
    """Saved after update 50: of the next updates one is bad already."""
    data = Poisoned(400, BAD)
    at = At("before_train", lambda runner: seen.append(sorted(p.name for p in complete_ones(tmp_path))))
    seen: list[list[str]] = []
    run(tmp_path, data, custom_hooks=[hook(), at])
    assert seen == [[], ["iter_10", "iter_20", "iter_30", "iter_40"]], "iter_50 is deleted"
    assert find_latest(tmp_path) == tmp_path / "iter_80"


def test_a_margin_that_the_checkpoint_has_is_enough(tmp_path: Path) -> None:
    _, _ = run(tmp_path, Poisoned(400, BAD), custom_hooks=[hook(margin=2)])
    (event,) = (event for event in read_events(tmp_path) if event["event"] == "went_back")
    assert event["back_to"] == 50


def test_by_epochs_over_the_end_of_one(tmp_path: Path) -> None:
    """The good checkpoint is in the first epoch; validations, schedules and counters are those of a run without the data."""
    data = Poisoned(200, range(0))
    spiked = Twice(data, 1, range(8, 16))
    schedule = [dict(type="StepLR", by_epoch=True, step_size=1, gamma=0.5)]
    cfg = dict(train_cfg=dict(by_epoch=True, max_epochs=3), param_scheduler=schedule)
    with log_lines() as lines:
        trained, found = run(tmp_path, spiked, **cfg)
    (line,) = (line for line in lines if "loss spikes" in line)
    assert line.endswith("leaves out samples 160 to the end of epoch 1, samples 0 to 20 of epoch 2")
    assert len(trained) == 55 + (50 - 5) + 50
    assert trained[55] == [20, 21, 22, 23]
    _, calm = run(tmp_path / "calm", data, **cfg)
    assert found["schedulers"] == calm["schedulers"]


class Twice(Dataset[Any]):
    """Samples that are bad in one epoch only."""

    def __init__(self, data: Poisoned, epoch: int, bad: range) -> None:
        self.data, self.bad_epoch, self.bad, self.epoch = data, epoch, bad, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        found = self.data[index]
        return {**found, "y": 300.0} if self.epoch == self.bad_epoch and index in self.bad else found


def test_it_ends_after_so_many_times(tmp_path: Path) -> None:
    class Always(Poisoned):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "y": math.nan if index >= 208 else 1.0}

    with refuses(LossSpikeError, matches=r"training has gone back 2 times already \(LossSpikeHook.times\)"):
        run(tmp_path, Always(4000, range(0)), custom_hooks=[hook(times=2)])


def test_without_a_good_checkpoint_it_warns_once(tmp_path: Path) -> None:
    with log_lines() as lines:
        trained, _ = run(tmp_path, Poisoned(400, range(32, 400)))
    assert len(trained) == 80, "those that were saved since the ninth update are not good"
    assert sum("there is no checkpoint of at most" in line for line in lines) == 1


def test_it_never_goes_back_to_another_run(tmp_path: Path) -> None:
    """Whose checkpoints are still there until the first one of this run replaces them."""
    run(tmp_path, Poisoned(400, range(0)), custom_hooks=[], train_cfg=dict(by_epoch=False, max_iters=40))
    late = dict(checkpoint=dict(by_epoch=False, interval=70, overwrite=True))
    with log_lines() as lines:
        trained, _ = run(tmp_path, Poisoned(400, BAD), default_hooks=late)
    assert len(trained) == 80
    assert sum("there is no checkpoint of at most" in line for line in lines) == 1
    assert not [event for event in read_events(tmp_path) if event["event"] == "went_back"]


def test_nor_to_its_own_former_course(tmp_path: Path) -> None:
    """It goes on from an earlier checkpoint, and the later ones that it knows nothing of are not replaced yet."""
    run(tmp_path, Poisoned(400, range(0)), custom_hooks=[], train_cfg=dict(by_epoch=False, max_iters=40))
    rare = dict(checkpoint=dict(by_epoch=False, interval=70))
    run(tmp_path, Poisoned(400, BAD), default_hooks=rare, resume=str(tmp_path / "iter_20"))
    (event,) = (event for event in read_events(tmp_path) if event["event"] == "went_back")
    assert event["back_to"] == 20


def test_an_end_of_training_that_came_of_the_spike_is_taken_back(tmp_path: Path) -> None:
    data, ended = Poisoned(400, BAD), []

    def end(runner: Any, *_: Any) -> None:
        if runner.iter == 54 and not ended:
            ended.append(runner.iter)
            runner.train_loop.stop_training = True

    ends = At("after_train_iter", end)
    trained, found = run(tmp_path / "spike", data, custom_hooks=[hook(interval=50), ends])
    assert len(trained) == 55 + 40
    _, expected = run(tmp_path / "clean", without(data, 160, 220), custom_hooks=[])
    assert differences(found, expected) == []


# Resuming


def test_resumed_runs_leave_them_out_too(tmp_path: Path) -> None:
    data = Poisoned(400, BAD)
    whole = run(tmp_path / "whole", data)
    run(tmp_path / "first", data, custom_hooks=[hook(), StopAt(65)])
    again, found = run(tmp_path / "first", data, resume=True)
    assert again == whole[0][-20:]
    assert differences(found, whole[1]) == []


def end_after_going_back(point: str) -> At:
    """Ends a process when training has gone back: while the checkpoint is loaded, or before anything is saved after it."""
    calls: list[str] = []

    def end(*_: Any, **__: Any) -> None:
        calls.append(point)
        if len(calls) == (2 if point == "before_train" else 1):
            raise Stop

    return At(point, end)


@pytest.mark.parametrize("point", ["before_train", "after_load_checkpoint"])
def test_a_process_that_ends_after_going_back_has_gone_back(tmp_path: Path, point: str) -> None:
    """The checkpoint that it went back to says nothing of it; the run is the same all the same."""
    data = Poisoned(400, BAD)
    whole = run(tmp_path / "whole", data)
    trained, _ = run(tmp_path / "first", data, custom_hooks=[hook(), end_after_going_back(point)])
    assert trained == whole[0][:55]
    again, found = run(tmp_path / "first", data, resume=True)
    assert again == whole[0][55:]
    assert differences(found, whole[1]) == []
    facts = Checkpoint.open(tmp_path / "first" / "iter_60").values["data"]
    assert facts == Checkpoint.open(tmp_path / "whole" / "iter_60").values["data"]


def test_the_best_checkpoint_of_the_same_update_does_not_hide_what_is_left_out(tmp_path: Path) -> None:
    """A validation after update 40, which is made again, saves it; the checkpoint of that update still knows of nothing."""

    def end(runner: Any) -> None:
        if runner.iter == 40:
            runner.save_checkpoint(runner.work_dir, "best_loss_iter_40", save_optimizer=False)
            raise Stop

    data = Poisoned(400, BAD)
    whole = run(tmp_path / "whole", data)
    run(tmp_path / "first", data, custom_hooks=[hook(), At("before_train", end)])
    again, found = run(tmp_path / "first", data, resume=True)
    assert again == whole[0][55:]
    assert differences(found, whole[1]) == []


def test_a_run_that_begins_anew_leaves_out_nothing_of_the_one_before(tmp_path: Path) -> None:
    """Its checkpoint in memory, of which events.jsonl says nothing, has the update to which the other run went back."""
    work, clean = tmp_path / "work", Poisoned(400, range(0))
    run(work, Poisoned(400, BAD))
    for path in work.glob("iter_*"):
        remove_checkpoint(path)
    (work / "latest").unlink()
    tier = dict(by_epoch=False, interval=70, fast_dir=tmp_path / "fast", fast_interval=40)
    options = dict(default_hooks=dict(checkpoint=tier))
    run(work, clean, **options, custom_hooks=[StopAt(45)])
    again, _ = run(work, clean, **options, custom_hooks=[], resume=True)
    assert again == [list(range(4 * i, 4 * i + 4)) for i in range(40, 80)]


class Late(OptimWrapper):
    """Updates after every second window; the gradients of both count."""

    windows = 0

    def should_update(self) -> bool:
        self.windows += super().should_update()
        return super().should_update() and self.windows % 2 == 0


def test_gradients_of_what_is_left_out_are_dropped(tmp_path: Path) -> None:
    """After update 55 there are gradients that no update has used."""
    seen: list[tuple[int, bool]] = []

    def look(runner: Any) -> None:
        seen.append((runner.iter, any(one.grad is not None for one in runner.strategy.module.parameters())))

    wrapper = Late(optimizer=dict(type="SGD", lr=0.01))
    run(tmp_path, Poisoned(400, BAD), custom_hooks=[hook(), At("before_train", look)], optim_wrapper=wrapper)
    assert seen == [(0, False), (40, False)]


def test_a_run_does_not_go_back_for_ever_over_restarts(tmp_path: Path) -> None:
    """Every process ends before the next checkpoint."""

    class Always(Poisoned):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "y": math.nan if index >= 208 else 1.0}

    def start(resume: bool) -> None:
        hooks = [hook(times=2), end_after_going_back("before_train")]
        run(tmp_path, Always(4000, range(0)), custom_hooks=hooks, resume=resume)

    start(resume=False)
    start(resume=True)
    with refuses(LossSpikeError, matches=r"training has gone back 2 times already \(LossSpikeHook.times\)"):
        start(resume=True)
    anew = dict(checkpoint=dict(by_epoch=False, interval=10, overwrite=True))
    trained, _ = run(tmp_path, Poisoned(4000, BAD), custom_hooks=[hook(times=1)], default_hooks=anew)
    assert len(trained) == 55 + 40, "a run that begins anew has its own count"


def test_a_look_that_spans_a_restart(tmp_path: Path) -> None:
    """The spike has begun before the checkpoint, and is noticed after it."""
    data = Poisoned(400, BAD)
    options = dict(custom_hooks=[hook(interval=9)], default_hooks=dict(checkpoint=dict(by_epoch=False, interval=13)))
    whole = run(tmp_path / "whole", data, **options)
    stopping = {**options, "custom_hooks": [hook(interval=9), StopAt(53)]}
    run(tmp_path / "first", data, **stopping)
    found = run(tmp_path / "first", data, **options, resume=True)
    assert differences(found[1], whole[1]) == []
    (event,) = (event for event in read_events(tmp_path / "first") if event["event"] == "went_back")
    assert event["left_out"] == [dict(epoch=0, start=39 * 4, stop=54 * 4, counts="samples")]


@pytest.mark.distributed
def test_processes_decide_alike_and_one_goes_on(tmp_path: Path, workers2: WorkerGroup) -> None:
    """The rest of the first epoch is still to be left out when one process goes on after it."""
    data = Poisoned(200, range(0))
    spiked = Twice(data, 1, range(8, 16))
    options: dict[str, Any] = dict(model=partial(Regression, 0.0), train_cfg=dict(by_epoch=True, max_epochs=3))
    saves = At("after_train_epoch", save_in_between, priority="LOWEST")
    whole = workers2.run(run, tmp_path / "whole", spiked, 2, strategy=dict(type="DDPStrategy"), **options)
    trained = [sorted(one + other) for one, other in zip(whole[0][0], whole[1][0], strict=True)]
    assert len(trained) == 55 + (50 - 5) + 50
    assert trained[55] == [20, 21, 22, 23]
    assert differences(whole[0][1], whole[1][1]) == []
    options["custom_hooks"] = [hook(), saves]
    workers2.run(run, tmp_path / "first", spiked, 2, strategy=dict(type="DDPStrategy"), **options)
    again, found = run(
        tmp_path / "one", spiked, **{**options, "custom_hooks": [hook()]}, resume=str(tmp_path / "between")
    )
    assert again == trained[55:]
    for key, tensor in whole[0][1].items():
        if key.startswith("model."):
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


def save_in_between(runner: Any) -> None:
    """After training went back, and before the data of the next epoch are left out."""
    if runner.iter == 40:
        runner.save_checkpoint(Path(runner.work_dir).parent, "between")
        raise Stop


MESH = dict(type="MeshStrategy")
STRATEGIES: list[Any] = [
    pytest.param(dict(type="FSDPStrategy", wrap=["Linear"]), 2, id="fsdp"),
    pytest.param(MESH | dict(tp=2, plan={"net.0": "colwise", "net.3": "rowwise"}), 1, id="tp2"),
    pytest.param(dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)), 2, id="zero2", marks=pytest.mark.deepspeed),
    pytest.param(dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)), 2, id="zero3", marks=pytest.mark.deepspeed),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("strategy, shards", STRATEGIES)
def test_strategies(tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any], shards: int) -> None:
    data = Poisoned(400, BAD)
    options = dict(model=partial(Regression, 0.0), strategy=strategy)
    spike = workers2.run(run, tmp_path / "spike", data, shards, **options)
    clean = workers2.run(run, tmp_path / "clean", without(data, 160, 220), shards, **options, custom_hooks=[])
    for (_, found), (_, expected) in zip(spike, clean, strict=True):
        assert differences(found, expected) == []


# Data whose order cannot be split


class Stream(IterableDataset[Any]):
    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return map(self.data.__getitem__, range(len(self.data)))  # type: ignore[arg-type]


class Placed(Stream):
    """A stream with a state."""

    at = 0

    def __iter__(self) -> Any:
        for index in range(self.at, len(self.data)):  # type: ignore[arg-type]
            self.at = index + 1
            yield self.data[index]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("kind", [Stream, Placed, DataLoader])
def test_streams_and_loaders(tmp_path: Path, kind: Any) -> None:
    data = Poisoned(400, BAD)
    clean = without(data, 160, 220)
    if kind is DataLoader:
        loaders = [DataLoader(each, batch_size=4, shuffle=False) for each in (data, clean)]
        options: list[dict[str, Any]] = [dict(train_dataloader=loader) for loader in loaders]
    else:
        of = partial(dict, batch_size=4, collate_fn="default_collate")
        options = [dict(train_dataloader=of(dataset=kind(each))) for each in (data, clean)]
    trained, found = run(tmp_path / "spike", data, **options[0])
    _, expected = run(tmp_path / "clean", clean, **options[1], custom_hooks=[])
    assert trained[55] == [220, 221, 222, 223]
    assert differences(found, expected) == []


class Back(Hook):
    """Goes back once, after an update of a later pass, to a checkpoint of the first one."""

    priority = "LOWEST"
    has_gone = False

    def __init__(self, at: int = 6) -> None:
        self.at = at

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter + 1 == self.at and not self.has_gone:
            self.has_gone = True
            raise GoBack(Path(runner.work_dir) / "iter_3", "a test")


@pytest.mark.parametrize("kind", [Stream, Placed, DataLoader])
def test_what_is_left_out_reaches_into_the_next_pass(tmp_path: Path, kind: Any) -> None:
    """A stream that goes on from its state stands in the middle of the first pass, of which nothing is left."""
    data = Poisoned(20, range(0))
    loader: Any = dict(batch_size=4, collate_fn="default_collate", dataset=kind(data))
    if kind is DataLoader:
        loader = DataLoader(data, batch_size=4, shuffle=False)
    options = dict(
        train_dataloader=loader, train_cfg=dict(by_epoch=False, max_iters=8), default_hooks=dict(checkpoint=None)
    )
    trained, _ = run(tmp_path, data, **options, custom_hooks=[SaveEvery({3}), Back()])
    assert [indices[0] for indices in trained] == [0, 4, 8, 12, 16, 0, 4, 8, 12, 16, 0]


class Turned(Placed):
    """Another order in every pass, which it counts in its state."""

    position = passes = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < 20:
            self.position += 1
            yield self.data[(self.position - 1 + 4 * self.passes) % 20]
        self.position, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.passes = state["position"], state["passes"]


def test_a_pass_that_is_left_out_is_counted(tmp_path: Path) -> None:
    """The second one; the third is gone on with after its second update."""
    options = dict(
        train_dataloader=dict(batch_size=4, collate_fn="default_collate", dataset=Turned(Poisoned(20, range(0)))),
        train_cfg=dict(by_epoch=False, max_iters=13),
        default_hooks=dict(checkpoint=None),
    )
    trained, _ = run(tmp_path, Poisoned(20, range(0)), **options, custom_hooks=[SaveEvery({3}), Back(12)])
    passes = [[0, 4, 8, 12, 16], [4, 8, 12, 16, 0], [8, 12, 16, 0, 4], [12, 16, 0, 4, 8], [16, 0]]
    assert [indices[0] for indices in trained] == [first for each in passes for first in each]


# What is refused


@pytest.mark.parametrize(
    ("options", "saves", "says"),
    [
        (dict(window=1), {}, "window: 1 is not allowed, give an integer of 2 or more"),
        (dict(times=0), {}, "times: 0 is not allowed, give an integer of 1 or more"),
        (dict(interval=2.5), {}, "interval: 2.5 is not allowed"),
        (dict(threshold=0), {}, "threshold: 0 is not allowed, give a number above 0"),
        (dict(treshold=3), {}, 'unknown key, did you mean "threshold"'),
        ({}, dict(interval=-1), "LossSpikeHook: needs checkpoints to go back to"),
        ({}, dict(save_optimizer=False), "LossSpikeHook: needs checkpoints to go back to"),
        ({}, dict(max_keep_ckpts=1), "CheckpointHook.max_keep_ckpts: with 1 .* give 3 or more"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: dict[str, Any], saves: dict[str, Any], says: str) -> None:
    checkpoint = dict(checkpoint={**dict(by_epoch=False, interval=10), **saves})
    with refuses(ConfigError, matches=says):
        run(tmp_path, Poisoned(400, BAD), custom_hooks=[hook(**options)], default_hooks=checkpoint)


class Silent(Regression):
    def forward(self, index: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"other": super().forward(index, x, y)["loss"]}

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        found = self(**data)
        optim_wrapper.update_params(found["other"])
        return found


def test_a_model_without_a_loss(tmp_path: Path) -> None:
    with refuses(ConfigError, says="LossSpikeHook: the model gives no loss"):
        make_runner(tmp_path, **settings(Poisoned(400, BAD), model=Silent)).train()
