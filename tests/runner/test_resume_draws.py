"""A resumed run ends as the uninterrupted one does, bit for bit, when samples are augmented at random.

Also when other numbers of workers read them before and after. The resumed run is configured with another seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.testing import WorkerGroup

from .training import SGD, Samples, SaveEvery, Watch, data_workers, differences, make_runner, whole_state

pytestmark = pytest.mark.usefixtures("quick")

LENGTH, BATCH_SIZE = 60, 2
PARTS = 5  # of the second epoch, at the beginning of each of which the run is interrupted


def places(processes: int, accumulate: int) -> list[int]:
    """After which updates checkpoints are saved."""
    epoch = LENGTH // (processes * BATCH_SIZE * accumulate)
    return [epoch + epoch * part // PARTS for part in range(PARTS)]


def train(
    folder: str, workers: int, accumulate: int, resume: str | None = None, save: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Samples by update, losses, and everything that training has changed."""
    watch, hooks = Watch(), [SaveEvery(set(save))]
    loader: dict[str, Any] = dict(
        batch_size=BATCH_SIZE, dataset=Samples(LENGTH, noisy=True), collate_fn="default_collate"
    )
    if workers:
        loader |= dict(**data_workers(workers), persistent_workers=workers == 2)
    runner = make_runner(
        folder,
        train_dataloader=loader,
        optim_wrapper=dict(optimizer=SGD, accumulative_counts=accumulate),
        train_cfg=dict(max_epochs=2),
        custom_hooks=[watch, *hooks],
        resume=resume,
        randomness=dict(seed=1 if resume is None else 2),
    )
    runner.train()
    runner.train_loop.data.close()
    state = whole_state(runner)
    runner.strategy.leave()
    return {"trained": watch.trained, "losses": torch.stack(watch.losses), "state": state}


def on(group: WorkerGroup | None, *args: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = group.run(train, *args) if group else [train(*args)]
    return found


ALL = [(processes, accumulate, before) for processes in (1, 2) for accumulate in (1, 3) for before in (0, 1, 2)]
USUAL = {(1, 1, 1)}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("processes", "accumulate", "before"),
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.full, id="p{}-a{}-w{}".format(*case))
        for case in ALL
    ],
)
def test_resuming_augments_as_the_uninterrupted_run(
    tmp_path: Path, workers: Any, processes: int, accumulate: int, before: int
) -> None:
    group = workers(processes) if processes > 1 else None
    at = tuple(places(processes, accumulate))
    whole = on(group, str(tmp_path / "whole"), before, accumulate, None, at)
    assert len({float(loss) for part in whole for loss in part["losses"]}) > 2 * len(at)
    for after in (0, 1, 2):
        for place in at:
            where = f"{after} workers after update {place}"
            rest = on(group, str(tmp_path / "rest"), after, accumulate, str(tmp_path / "whole" / f"iter_{place}"))
            for found, expected in zip(rest, whole, strict=True):
                assert found["trained"] == expected["trained"][place:], where
                assert torch.equal(found["losses"], expected["losses"][place:]), f"other losses: {where}"
                assert not differences(found["state"], expected["state"]), f"another result: {where}"
