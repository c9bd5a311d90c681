"""A run that is interrupted in an epoch goes on with its next sample, on other processes and in other batches."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info

from flextrain import CheckpointError, FlexibleRunner
from flextrain.runner.data import samplers
from flextrain.runner.data.dataloaders import TrainData
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup

from .training import (
    DDP,
    FSDP,
    At,
    Net,
    Samples,
    SaveEvery,
    Stop,
    StopAt,
    Watch,
    built_loader,
    change_values,
    log_lines,
    make_runner,
    refuses,
    zero,
)

pytestmark = pytest.mark.usefixtures("quick")

Updates = list[list[int]]


def setting(length: int, batch_size: int, accumulate: int = 1, **options: Any) -> dict[str, Any]:
    """How the data are taken: what may change between the parts of a run."""
    return dict(
        model=partial(Net, dropout=0.0),
        train_dataloader=dict(
            batch_size=batch_size, dataset=Samples(length), collate_fn="default_collate", **options
        ),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=accumulate),
    )  # fmt: skip


class Facts(Hook):
    """What hooks are told in every update: its number in the epoch, the epoch's length, and whether it is the last."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bool, bool]] = []
        self.epochs: list[tuple[int, int]] = []

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        length = runner.train_loop.epoch_length
        self.seen.append((batch_idx + 1, length, self.end_of_epoch(length, batch_idx), self.is_last_train_iter(runner)))

    def after_train_epoch(self, runner: FlexibleRunner) -> None:
        self.epochs.append((runner.epoch, runner.iter))


def train(folder: str, changes: dict[str, Any], until: int | None = None, **more: Any) -> dict[str, Any]:
    """What this process trained on, up to a crash after update ``until`` of the run, which is saved there."""
    watch, facts = Watch(), Facts()
    hooks: list[Hook] = [watch, facts]
    if until is not None:
        hooks += [SaveEvery({until}), StopAt(until)]
    runner = make_runner(folder, **{"resume": True, "log_level": "INFO", **changes, **more}, custom_hooks=hooks)
    with log_lines(logging.INFO) as said:
        try:
            runner.train()
        except Stop:
            pass
        finally:
            runner.strategy.leave()
    return {
        "trained": watch.trained,
        "losses": [float(loss) for loss in watch.losses],
        "facts": facts.seen,
        "epochs": facts.epochs,
        "place": (runner.epoch, runner.iter, runner.max_iters, runner.max_epochs),
        "said": said,
    }


def on(group: WorkerGroup | None, folder: Path, changes: dict[str, Any], until: int | None = None, **more: Any) -> Any:
    """The same on all processes of a group, or in this one: what each trained on, and the rest of it from the first."""
    parts = (
        group.run(train, str(folder), changes, until, **more) if group else [train(str(folder), changes, until, **more)]
    )
    losses = [sum(shares) / len(shares) for shares in zip(*(part["losses"] for part in parts), strict=True)]
    return {**parts[0], "losses": losses, "parts": [part["trained"] for part in parts]}


def together(parts: list[Updates]) -> Updates:
    """The samples of every update over all processes."""
    return [list(chain(*updates)) for updates in zip(*parts, strict=True)]


def check(parts: list[Updates], processes: list[int], whole: Updates, length: int, epochs: int) -> None:
    """Every update has the samples that come next in the epoch's order; only its end is filled up, from its beginning."""
    order = list(chain(*whole))
    epoch = place = 0
    for updates, count in zip(parts, processes, strict=True):
        for update in updates:
            own = order[epoch * length : (epoch + 1) * length]
            # Whichever process had which of them.
            assert sorted(update) == sorted((own + own)[place : place + len(update)])
            place += len(update)
            if place >= length:
                assert place - length < count
                epoch, place = epoch + 1, 0
    assert (epoch, place) == (epochs, 0)


PLANS = {
    # (processes, batch size, accumulation) until the update of the run with this number
    "processes": [(2, 3, 1, 2), (3, 2, 1, 5), (1, 4, 1, None)],
    "batches": [(1, 5, 1, 3), (1, 2, 1, 7), (1, 7, 1, None)],
    "accumulation": [(1, 2, 3, 2), (1, 2, 1, 5), (1, 3, 2, None)],
    "everything": [(3, 1, 2, 3), (1, 6, 1, 4), (2, 2, 2, None)],
    "with more": [(1, 3, 1, 5), (3, 1, 1, 8), (2, 5, 1, None)],
    "later epoch": [(1, 4, 1, 12), (2, 3, 1, 14), (3, 2, 2, None)],
    "unchanged in between": [(1, 5, 1, 1), (1, 3, 1, 3), (1, 3, 1, 7), (2, 1, 1, None)],
}


def with_zero(*values: Any, id: str) -> Any:
    """A case that needs DeepSpeed."""
    return pytest.param(*values, id=id, marks=pytest.mark.deepspeed)


# DeepSpeed's engine is slow to start: the plans in which the number of processes falls, rises, and does both.
CASES = [
    *(pytest.param(name, DDP, id=f"{name}-ddp") for name in PLANS),
    *(pytest.param(name, FSDP, id=f"{name}-fsdp") for name in PLANS),
    *(with_zero(name, zero(1), id=f"{name}-zero1") for name in ("processes", "everything")),
    *(with_zero(name, zero(3), id=f"{name}-zero3") for name in ("processes", "with more")),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_an_interrupted_epoch_has_every_sample_once(
    tmp_path: Path, workers: Any, name: str, strategy: dict[str, Any]
) -> None:
    """37 samples, which neither the processes nor the batches divide; only the end of an epoch is filled up."""
    length, epochs = 37, 2
    loop = dict(train_cfg=dict(by_epoch=True, max_epochs=epochs), strategy=strategy)
    whole = train(str(tmp_path / "whole"), setting(length, 4), strategy=None, train_cfg=loop["train_cfg"])["trained"]
    found: list[Updates] = []
    for processes, batch_size, accumulate, until in PLANS[name]:
        group = workers(processes) if processes > 1 else None
        own = loop if group else {**loop, "strategy": None}
        part = on(group, tmp_path / "parts", setting(length, batch_size, accumulate), until, **own)
        found.append(together(part["parts"]))
        for inner, last, ends, _ in part["facts"]:
            assert inner <= last
            assert ends == (inner == last)
        if until is None:
            assert part["facts"][-1][3], "the last update knows that it is the last"
            assert part["place"][1] == part["place"][2] == sum(map(len, found))
            assert [fact[3] for fact in part["facts"]].count(True) == 1
            assert part["epochs"][-1] == (epochs - 1, part["place"][1])
    check(found, [plan[0] for plan in PLANS[name]], whole, length, epochs)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(DDP, id="ddp"),
        pytest.param(FSDP, id="fsdp"),
        with_zero(zero(1), id="zero1"),
        with_zero(zero(3), id="zero3"),
    ],
)
def test_losses_go_on_while_the_global_batch_stays(tmp_path: Path, workers: Any, strategy: dict[str, Any]) -> None:
    """Six samples per update throughout: one process of six, two of three, three of two, one of three twice."""
    loop: dict[str, Any] = dict(
        train_cfg=dict(max_epochs=2),
        param_scheduler=dict(type="LinearLR", start_factor=0.1, end=2, convert_to_iter_based=True),
    )
    whole = train(str(tmp_path / "whole"), setting(36, 6), **loop)
    losses: list[float] = []
    for processes, batch_size, accumulate, until in [(2, 3, 1, 2), (3, 2, 1, 5), (1, 3, 2, 8), (2, 3, 1, None)]:
        group = workers(processes) if processes > 1 else None
        options = {**loop, "strategy": strategy if group else None}
        part = on(group, tmp_path / "parts", setting(36, batch_size, accumulate), until, **options)
        assert not [line for line in part["said"] if line.startswith("An epoch has")]
        losses += part["losses"]
    assert losses == pytest.approx(whole["losses"], rel=1e-6)


ITERATIONS = dict(by_epoch=False, max_iters=16)


@pytest.mark.parametrize("infinite", [True, False])
def test_iterations_go_on_with_the_next_sample(tmp_path: Path, infinite: bool) -> None:
    sampler = dict(sampler=dict(type="InfiniteSampler")) if infinite else {}
    whole = train(str(tmp_path / "whole"), setting(20, 1, **sampler), train_cfg=dict(by_epoch=False, max_iters=60))
    order = list(chain(*whole["trained"]))
    parts = [(3, 1, 2), (2, 2, 6), (5, 1, 9), (1, 1, None)]
    found: list[int] = []
    for batch_size, accumulate, until in parts:
        part = train(
            str(tmp_path / "parts"), setting(20, batch_size, accumulate, **sampler), until, train_cfg=ITERATIONS
        )
        found += chain(*part["trained"])
        assert part["place"][1:3] == (until - 1 if until else 16, 16)
    # 6, then 16 (the epoch of a DefaultSampler ends with 2 of 4), then 15, then 7.
    assert found == order[: len(found)]
    assert len(found) == (6 + 16 + 15 + 7 if infinite else 6 + 14 + 15 + 7)


@pytest.mark.parametrize("by_epoch", [True, False])
def test_saved_again_before_an_update(tmp_path: Path, by_epoch: bool) -> None:
    """Four samples are less than an update of 13: the resumed run is at update 0 of the epoch, and not at its beginning."""
    cfg = dict(by_epoch=True, max_epochs=2) if by_epoch else dict(by_epoch=False, max_iters=5)

    def run(batch_size: int, *hooks: Hook) -> FlexibleRunner:
        data = dict(batch_size=batch_size, dataset=Samples(26), collate_fn="default_collate")
        return make_runner(tmp_path, train_dataloader=data, train_cfg=cfg, custom_hooks=[*hooks])

    first, rest = Watch(), Watch()
    with pytest.raises(Stop):
        run(4, first, SaveEvery({1}), StopAt(1)).train()
    resumed = run(13)
    resumed.resume(tmp_path / "iter_1")
    resumed.save_checkpoint(tmp_path, "again")
    last = run(13, rest)
    last.resume(tmp_path / "again")
    last.train()
    assert [len(batch) for batch in rest.trained] == [13, 9, 13, 13]
    assert sorted(chain(*first.trained, *rest.trained[:2])) == list(range(26))


def test_resumed_at_the_beginning_of_an_epoch_after_its_middle(tmp_path: Path) -> None:
    """In one process: of the first checkpoint nothing is left."""
    watch = Watch()
    with pytest.raises(Stop):
        make_runner(
            tmp_path, custom_hooks=[At("before_train", save_at_the_beginning), SaveEvery({1}), StopAt(1)]
        ).train()
    data = dict(batch_size=13, dataset=Samples(26), collate_fn="default_collate")
    last = make_runner(tmp_path, train_dataloader=data, train_cfg=dict(max_epochs=1), custom_hooks=[watch])
    last.resume(tmp_path / "iter_1")
    last.resume(tmp_path / "begin")
    last.train()
    assert sorted(chain(*watch.trained)) == list(range(26))


def save_at_the_beginning(runner: Any) -> None:
    runner.save_checkpoint(runner.work_dir, "begin")


def test_what_is_dropped_at_the_end_is_less_than_an_update_of_the_resumed_run(tmp_path: Path) -> None:
    drop = dict(train_cfg=dict(max_epochs=2))
    train(str(tmp_path / "run"), setting(26, 4, drop_last=True), 4, **drop)
    rest = train(str(tmp_path / "run"), setting(26, 3, drop_last=True), **drop)
    assert [len(update) for update in rest["trained"]] == [3] * (3 + 8)
    assert rest["place"] == (2, 4 + 3 + 8, 4 + 3 + 8, 2)
    train(str(tmp_path / "other"), setting(26, 4, drop_last=True), 5, **drop)
    rest = train(str(tmp_path / "other"), setting(26, 8, drop_last=True), **drop)
    assert len(rest["trained"]) == 3, "six are left, too few for a batch of eight: the epoch is at its end"
    assert rest["place"] == (2, 5 + 3, 5 + 3, 2)
    assert [epoch for epoch, _ in rest["epochs"]] == [0, 1], "and it does end"


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("by_epoch", [True, False])
def test_an_epoch_that_is_over_stays_over(tmp_path: Path, by_epoch: bool, drop_last: bool) -> None:
    """Saved after its last update, before the hooks of its end."""
    loop = dict(train_cfg=dict(max_epochs=2) if by_epoch else dict(by_epoch=False, max_iters=20))
    length = 6 if drop_last else 7
    first = train(str(tmp_path / "run"), setting(26, 4, drop_last=drop_last), length, **loop)
    assert len(first["trained"]) == length
    rest = train(str(tmp_path / "run"), setting(26, 1, drop_last=drop_last), **loop)
    assert len(rest["trained"]) == (26 if by_epoch else 20 - length)
    whole = train(str(tmp_path / "whole"), setting(26, 1), train_cfg=dict(max_epochs=2))
    assert rest["trained"] == whole["trained"][26 : 26 + len(rest["trained"])]
    if by_epoch:
        assert rest["place"] == (2, length + 26, length + 26, 2)
        assert rest["epochs"] == [(0, length), (1, length + 26)]


def test_the_log_says_where_the_epoch_goes_on_and_how_long_it_is(tmp_path: Path) -> None:
    schedule = dict(param_scheduler=dict(type="LinearLR", by_epoch=False, end=100))
    train(str(tmp_path / "run"), setting(26, 4), 3, **schedule)
    rest = train(
        str(tmp_path / "run"), setting(26, 5), default_hooks=dict(checkpoint=None, logger=dict(interval=1)), **schedule
    )
    said = "\n".join(rest["said"])
    assert (
        "An epoch has 6 iterations now, it had 7 (batch_size 4 -> 5): schedules by iteration continue from their own count"
        in said
    )
    assert "Epoch 1 continues after 12 samples; with the current batches its next update is number 3" in said
    heads = [line[:20] for line in rest["said"] if line.startswith("Epoch(train)")]
    assert heads[:4] == [f"Epoch(train) {place}" for place in ("[1][3/5", "[1][4/5", "[1][5/5", "[2][1/6")]
    assert rest["place"] == (3, 3 + 3 + 2 * 6, 18, 3)
    assert [fact for fact in rest["facts"] if fact[2]] == [(5, 5, True, False), (6, 6, True, False), (6, 6, True, True)]


@pytest.mark.parametrize("was_large", [True, False])
def test_an_order_goes_on_as_it_was_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_large: bool) -> None:
    """Also where the checkpoint is of a time when no order was computed by index."""
    monkeypatch.setattr(samplers, "LARGE", 10 if was_large else 100)
    whole = train(str(tmp_path / "whole"), setting(26, 4))["trained"]
    train(str(tmp_path / "run"), setting(26, 4), 3)
    monkeypatch.setattr(samplers, "LARGE", 100 if was_large else 10)
    if not was_large:
        change_values(
            tmp_path / "run" / "iter_3", lambda values: [values["data"].pop(k) for k in ("by_index", "workers")]
        )
    assert train(str(tmp_path / "run"), setting(26, 4))["trained"] == whole[3:]
    monkeypatch.undo()
    assert (train(str(tmp_path / "small"), setting(26, 4))["trained"] == whole) is not was_large


class Numbers(IterableDataset[dict[str, Any]]):
    """A stream that workers share out."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info, samples = get_worker_info(), Samples(26)
        return (samples[i] for i in range(info.id if info else 0, 26, info.num_workers if info else 1))

    def __len__(self) -> int:
        return 26


class Backwards(BatchSampler):
    """The batches of another sampler, last sample first."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[::-1]


def own_sampler(batch_size: int) -> DataLoader[Any]:
    samples = Samples(26)
    return DataLoader(samples, batch_size=batch_size, sampler=RandomSampler(samples, replacement=True))


def streamed(workers: int) -> dict[str, Any]:
    changes = setting(26, 4, num_workers=workers)
    return {**changes, "train_dataloader": {**changes["train_dataloader"], "dataset": Numbers()}}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            dict(train_dataloader=own_sampler(4)),
            dict(train_dataloader=own_sampler(2)),
            "batch_size=4, it is 2 now, and the order of a RandomSampler cannot be split again; resume from the end of an "
            "epoch to change it; resume=dict(data=False) leaves it out, the epoch under way then begins anew",
        ),
        (
            setting(26, 4, batch_sampler=dict(type=Backwards)),
            setting(26, 4, 2, batch_sampler=dict(type=Backwards)),
            "accumulate=1, it is 2 now, and the order of a Backwards cannot be split again; resume from the end",
        ),
        (
            setting(26, 4, sampler=dict(type="DefaultSampler", seed=3)),
            setting(26, 4, sampler=dict(type="DefaultSampler", seed=4)),
            "sampler_seed=3, it is 4 now; resume from the end of an epoch to change it",
        ),
        (
            setting(26, 4),
            {**setting(26, 4), "train_dataloader": own_sampler(4)},
            "sampler=DefaultSampler, it is RandomSampler now; resume from the end of an epoch to change it",
        ),
        (
            streamed(2),
            streamed(1),
            "workers=2, it is 1 now, and the order of a Numbers cannot be split again; resume from the end",
        ),
        (
            setting(26, 4),
            setting(27, 4),
            "num_samples=26, it is 27 now; resume from the end of an epoch to change it",
        ),
    ],
    ids=["own sampler", "own batches", "another order", "another sampler", "workers of a stream", "other data"],
)
def test_what_cannot_be_split_anew_is_refused(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], says: str
) -> None:
    train(str(tmp_path), before, 3)
    with refuses(CheckpointError, says, begins=f"{tmp_path / 'iter_3'}: was saved in the middle of an epoch with "):
        train(str(tmp_path), after)
    # Begun anew, the epoch under way has all of its updates once more.
    rest = train(str(tmp_path), after, resume=dict(data=False), train_cfg=dict(max_epochs=1))
    assert len(rest["trained"]) == rest["place"][1] - 3 == rest["place"][2] - 3 == rest["facts"][0][1]


def draws(folder: str, name: str) -> list[float]:
    """What this process draws first after resuming, from each generator."""
    runner = make_runner(folder, **setting(26, 2))
    runner.resume(Path(folder) / name)
    runner.strategy.leave()
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.distributed
def test_among_other_processes_each_draws_its_own_numbers_and_the_same_ones_again(
    tmp_path: Path, workers2: WorkerGroup
) -> None:
    train(str(tmp_path), setting(26, 4), 3)
    first, second = workers2.run(draws, str(tmp_path), "iter_3")
    assert not set(first) & set(second)
    assert workers2.run(draws, str(tmp_path), "iter_3") == [first, second]
    train(str(tmp_path), setting(26, 4), 4)
    later, _ = workers2.run(draws, str(tmp_path), "iter_4")
    assert not set(later) & set(first), "a run that is resumed later does not draw the same again"


def test_windows_of_a_resumed_epoch() -> None:
    """Every combination of a position and new windows: what is left, in order, and counted right."""
    samples = list(range(11))
    for position, batch_size, accumulate in product(range(1, 11), (1, 2, 3, 5, 12), (1, 2, 4)):
        loader = built_loader(dict(dataset=samples, batch_size=batch_size, shuffle=False))
        data = TrainData(loader, accumulate, seed=0)
        start = data.resume_at(3, position)
        windows = list(data.windows(3, start))
        assert [i for window in windows for batch in window for i in batch] == samples[position:]
        assert start == position // (batch_size * accumulate)
        assert data.length(3) == start + len(windows)
        assert data.position(3, start) == position
        assert data.position(3, start + len(windows)) == 11
        assert data.length(4) == data.epoch_length == len(list(data.windows(4)))
