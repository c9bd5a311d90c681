"""A run that is interrupted in an epoch goes on with its next sample, on other processes and in other batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from flextrain import CheckpointError, FlexibleRunner
from flextrain.runner.data import TrainData, build_dataloader
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup

from .training import SGD, Net, Samples, SaveEvery, Stop, StopAt, Watch, fresh_group, make_runner

pytestmark = pytest.mark.usefixtures("quick")

Updates = list[list[int]]
DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap=["Linear"])


def setting(length: int, batch_size: int, accumulate: int = 1, **options: Any) -> dict[str, Any]:
    """How the data are taken: what may change between the parts of a run."""
    return dict(
        model=partial(Net, dropout=0.0),
        train_dataloader=dict(
            batch_size=batch_size, dataset=Samples(length), collate_fn="default_collate", **options
        ),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=accumulate),
    )  # fmt: skip


@contextmanager
def lines(level: int = logging.INFO) -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flextrain")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


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
    fresh_group()
    watch, facts = Watch(), Facts()
    hooks: list[Hook] = [watch, facts]
    if until is not None:
        hooks += [SaveEvery({until}), StopAt(until)]
    runner = make_runner(folder, **{"resume": True, "log_level": "INFO", **changes, **more}, custom_hooks=hooks)
    with lines() as said:
        try:
            runner.train()
        except Stop:
            pass
        finally:
            runner.strategy.teardown()
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
    return {**parts[0], "parts": [part["trained"] for part in parts]}


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


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("name", PLANS)
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
            assert inner <= last and ends == (inner == last)
        if until is None:
            assert part["facts"][-1][3], "the last update knows that it is the last"
            assert part["place"][1] == part["place"][2] == sum(map(len, found))
            assert [fact[3] for fact in part["facts"]].count(True) == 1
            assert part["epochs"][-1] == (epochs - 1, part["place"][1])
    check(found, [plan[0] for plan in PLANS[name]], whole, length, epochs)
