"""The dry pass where one of several processes fails while the others are in a collective: it says its own error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from flextrain import Hook
from flextrain.runner.loops import dry_pass
from flextrain.testing import WorkerError, WorkerGroup

from .training import DDP, FSDP, Accuracy, make_runner, validation

pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.distributed]


class Fails(nn.Module):
    """Cannot predict on some ranks, before any layer; can do so once it is ready."""

    is_ready = False

    def __init__(self, ranks: str) -> None:
        super().__init__()
        self.ranks, self.net = ranks, nn.Linear(6, 2)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        if mode == "loss":
            return {"loss": functional.cross_entropy(self.net(x), y)}
        if os.environ["RANK"] in self.ranks and not self.is_ready:
            raise KeyError("scores")
        return {"index": index, "logits": self.net(x), "y": y}


class FailsIn(Accuracy):
    """Fails on rank 1 in one of its methods, which sums over all processes on the others."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.sum_in("process")
        super().process(data_batch, data_samples)

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        self.sum_in("evaluate")
        return super().evaluate(size)

    def sum_in(self, where: str) -> None:
        if self.where == where:
            if os.environ["RANK"] == "1":
                raise KeyError("scores")
            dist.all_reduce(torch.ones(1))


class Prepares(Hook):
    """What the model needs before it is validated."""

    def before_val(self, runner: Any) -> None:
        runner.strategy.module.is_ready = True


def outcome(folder: str, strategy: dict[str, Any], **changes: Any) -> str:
    """What training raised, or its number of updates."""
    once = dict(train_cfg=dict(max_epochs=1), log_level="INFO")
    runner = make_runner(folder, strategy=strategy, **validation(), **once, **changes)
    try:
        runner.train()
        return str(runner.iter)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runner.strategy.leave()


def end_without_rank_0(folder: str, strategy: dict[str, Any], **changes: Any) -> None:
    """Train until rank 1 fails and its process ends, which rank 0 notices."""
    dry_pass.PATIENCE_S = 0.5  # the processes of this call are not used again
    runner = make_runner(folder, strategy=strategy, **{**validation(), **changes})
    try:
        runner.train()
    except Exception:
        if runner.rank == 1:
            os._exit(1)
        raise


def lines_of(folder: Path) -> list[str]:
    (file,) = (file for file in folder.glob("2*/*.log") if "_rank" not in file.name)
    return file.read_text().splitlines()


@pytest.mark.parametrize(
    ("strategy", "changes", "where"),
    [
        (FSDP, dict(model=Fails("1")), "in forward of model (Fails) in the dry pass"),
        (FSDP, dict(model=Fails("1"), custom_hooks=[Prepares()]), "in forward of model (Fails) in the dry pass"),
        (DDP, dict(val_evaluator=FailsIn("process")), "in val_evaluator (FailsIn.process) in the dry pass"),
        (DDP, dict(val_evaluator=FailsIn("evaluate")), "in val_evaluator (FailsIn.compute) in the dry pass"),
    ],
    ids=["forward", "forward with a hook", "process", "evaluate"],
)
def test_a_process_that_the_others_wait_for_in_a_collective_says_its_own_error(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any], changes: dict[str, Any], where: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        workers2.run(end_without_rank_0, str(tmp_path), strategy, **changes)
    assert not caught.value.timed_out
    lines = lines_of(tmp_path)
    (own,) = (line for line in lines if " - ERROR - rank 1 - Failed " in line)
    assert where in own
    assert "KeyError: 'scores'" in own
    (other,) = (line for line in lines if " - ERROR - Failed because rank 1 failed: KeyError: 'scores'" in line)
    assert "noticed on rank 0 after epoch 0, iteration 0" in other
    assert "in the dry pass" in other.partition("noticed")[2], "it was in the collective, and did not abort"


def test_what_a_hook_makes_possible_is_no_mistake_if_all_fail_alike(tmp_path: Path, workers2: WorkerGroup) -> None:
    changes = dict(model=Fails("01"), custom_hooks=[Prepares()])
    assert workers2.run(outcome, str(tmp_path), FSDP, **changes) == ["4", "4"]
    (line,) = (line for line in lines_of(tmp_path) if "Dry pass" in line)
    assert "KeyError: 'scores' (" in line
    assert "; Prepares may be needed before it, and was not called; env_cfg" in line


def test_forward_that_fails_on_one_process_ends_all_whatever_hooks_there_are(
    tmp_path: Path, workers2: WorkerGroup
) -> None:
    """On an accelerator, forward of the other process may have returned with its collectives still open."""
    changes = dict(model=Fails("1"), custom_hooks=[Prepares()])
    first, second = workers2.run(outcome, str(tmp_path), DDP, **changes)
    assert second == "KeyError: 'scores'"
    assert first.startswith("LaunchError: another process failed in the dry pass: KeyError: 'scores' (")
