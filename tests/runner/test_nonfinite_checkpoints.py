"""Checkpoints of weights that are not finite: marked, never the best, never in the place of a good one."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import FlexibleRunner, Hook
from flextrain.cli import main
from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import export_weights
from flextrain.core.checkpoint.directory import keep_finite

from .conftest import Scores
from .nonfinite import Poison, saved, train_badly, warnings_in
from .training import At, Net, Stop, StopAt, make_runner, validation

pytestmark = pytest.mark.usefixtures("quick")


def by_iter(folder: Path, *hooks: Hook, iters: int = 20, **options: Any) -> FlexibleRunner:
    """Twenty iterations, with a checkpoint after every second, of which two are kept."""
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=2, max_keep_ckpts=2) | options.pop("hook", {})
    changes = dict(
        train_cfg=dict(by_epoch=False, max_iters=iters),
        default_hooks=dict(checkpoint=checkpoint),
        custom_hooks=list(hooks),
    )
    return make_runner(folder, **{**changes, **options})


@pytest.mark.parametrize("async_save", [False, True])
def test_good_checkpoints_survive(tmp_path: Path, async_save: bool) -> None:
    train_badly(by_iter(tmp_path, Poison(7), hook=dict(async_save=async_save)))
    assert saved(tmp_path) == {"iter_4": False, "iter_6": False, "iter_20": True}
    assert (tmp_path / "latest").read_text() == "iter_6"


def test_a_row_of_marked_ones_is_one_warning(tmp_path: Path) -> None:
    train_badly(by_iter(tmp_path, Poison(7, until=11), Poison(15), log_level="INFO"))
    said = [line.split()[1] for line in warnings_in(tmp_path) if line.startswith("Checkpoint ")]
    assert said == ["iter_8", "iter_16"]


def test_by_epoch_too(tmp_path: Path) -> None:
    checkpoint = dict(interval=1, max_keep_ckpts=1)
    train_badly(make_runner(tmp_path, default_hooks=dict(checkpoint=checkpoint), custom_hooks=[Poison(10)]))
    assert saved(tmp_path) == {"epoch_1": False, "epoch_3": True}


def test_weights_that_became_finite_again_count(tmp_path: Path) -> None:
    train_badly(by_iter(tmp_path, Poison(7, until=11)))
    assert saved(tmp_path) == {"iter_10": True, "iter_18": False, "iter_20": False}
    assert (tmp_path / "latest").read_text() == "iter_20"


def test_keep_every(tmp_path: Path) -> None:
    train_badly(by_iter(tmp_path, Poison(7), hook=dict(keep_every=4)))
    assert saved(tmp_path) == {"iter_12": True, "iter_16": True, "iter_20": True, "iter_4": False, "iter_6": False,
                               "iter_8": True}  # fmt: skip


class Masked(Net):
    """Infinite on purpose where nothing is trained, and a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.full((2,), -math.inf))
        self.frozen = nn.Parameter(torch.tensor([math.nan]), requires_grad=False)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return super().forward(index, self.norm(x), y, mode)


@pytest.mark.parametrize("name, marked", [("mask", False), ("frozen", False), ("norm.running_var", True)])
def test_what_training_changes_counts(tmp_path: Path, name: str, marked: bool) -> None:
    train_badly(by_iter(tmp_path, Poison(3, name, math.inf), iters=4, model=Masked))
    assert saved(tmp_path) == {"iter_2": False, "iter_4": marked}


class PoisonMoments(Hook):
    """As a gradient does that overflows when it is squared."""

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter == 3:
            state = next(iter(runner.optim_wrapper.optimizer.state.values()))
            state["exp_avg_sq"].fill_(math.inf)


def test_the_optimizers_state_counts(tmp_path: Path) -> None:
    train_badly(by_iter(tmp_path, PoisonMoments(), iters=4, optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1))))
    assert saved(tmp_path) == {"iter_2": False, "iter_4": True}


class PoisonAverage(Hook):
    priority = "LOW"

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter == 3:
            (ema,) = (hook for hook in runner.hooks if hook.holds_weights)
            ema.state_dict()["averaged.net.0.bias"].fill_(math.nan)


def test_averages_count(tmp_path: Path) -> None:
    train_badly(by_iter(tmp_path, dict(type="EMAHook"), PoisonAverage(), iters=4))
    assert saved(tmp_path) == {"iter_2": False, "iter_4": True}
    manifest = json.loads((tmp_path / "iter_4" / "manifest.json").read_text())
    assert manifest["nonfinite"] == ["hook.EMAHook/averaged.net.0.bias"]


# Resuming


def test_resuming_passes_them_over_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_badly(by_iter(tmp_path, Poison(7), iters=9))
    assert saved(tmp_path) == {"iter_4": False, "iter_6": False, "iter_9": True}
    caplog.clear()
    runner = by_iter(tmp_path, iters=12, resume=True, log_level="INFO")
    train_badly(runner)
    assert f"iter_9 in {tmp_path}: skipped, their weights hold NaN or infinity" in caplog.text
    assert f"Resumed from {tmp_path / 'iter_6'}: epoch 0, iteration 6" in caplog.text
    assert runner.iter == 12
    assert saved(tmp_path) == {"iter_10": False, "iter_12": False, "iter_9": True}


def test_one_that_has_replaced_the_latest_under_its_name_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(runner: Any, *_: Any, **__: Any) -> None:
        if runner.iter + 1 in (3, 5):
            runner.save_checkpoint(tmp_path, "last")

    train_badly(
        by_iter(
            tmp_path, Poison(4), At("after_train_iter", save), iters=5, hook=dict(save_last=False), log_level="INFO"
        )
    )
    assert (tmp_path / "latest").read_text() == "last"
    assert saved(tmp_path) == {"iter_2": False, "iter_4": True, "last": True, "last.finite": False}
    assert "no older one is deleted for it; that of this name is last.finite now" in caplog.text
    caplog.clear()
    train_badly(by_iter(tmp_path, iters=6, resume=True, log_level="INFO"))
    assert f'{tmp_path / "latest"}: names "last", which holds NaN or infinity; last.finite is resumed' in caplog.text
    assert f"Resumed from {tmp_path / 'last.finite'}: epoch 0, iteration 3" in caplog.text


def test_files_under_the_name_of_the_finite_one_are_not_deleted(tmp_path: Path) -> None:
    last, other = tmp_path / "last", tmp_path / "last.finite"
    last.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt: is no part of a checkpoint"):
        keep_finite(last)
    assert last.is_dir()
    assert (other / "notes.txt").read_text() == "mine"


def test_none_to_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Stop):
        by_iter(tmp_path, Poison(1), StopAt(3), iters=4, log_level="INFO").train()
    assert "; resume=True begins anew, iter_2 holds NaN or infinity, or no optimizer\n" in caplog.text
    caplog.clear()
    train_badly(by_iter(tmp_path, iters=2, resume=True, log_level="INFO"))
    assert "iter_2 in" in caplog.text
    assert "Nothing to resume" in caplog.text


def test_a_path_resumes_one_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_badly(by_iter(tmp_path, Poison(7), iters=8))
    caplog.clear()
    train_badly(by_iter(tmp_path, iters=16, resume=str(tmp_path / "iter_8"), log_level="WARNING"))
    assert f"{tmp_path / 'iter_8'}: holds NaN or infinity in 8 tensors (model.net.0.bias, " in caplog.text
    assert saved(tmp_path) == {"iter_16": True, "iter_4": False, "iter_6": False}, "and it did not count as a good one"


def test_weights_are_loaded_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_badly(by_iter(tmp_path / "a", Poison(7), iters=8))
    train_badly(by_iter(tmp_path / "b", iters=1, load_from=str(tmp_path / "a" / "iter_8"), log_level="WARNING"))
    assert f"{tmp_path / 'a' / 'iter_8'}: holds NaN or infinity in" in caplog.text


# The best


def with_scores(folder: Path, scores: list[float], *hooks: Hook, **hook: Any) -> FlexibleRunner:
    class Given(Scores):
        def process(self, data_batch: Any, data_samples: Any) -> None:
            pass

        def evaluate(self, size: int | None = None) -> dict[str, float]:
            return {"accuracy": next(self.values)}

    checkpoint = dict(save_best="accuracy", **hook)
    parts = {**validation(), "val_evaluator": Given(scores)}
    return make_runner(folder, default_hooks=dict(checkpoint=checkpoint), custom_hooks=list(hooks), **parts)


@pytest.mark.parametrize("async_save", [False, True])
def test_never_the_best(tmp_path: Path, async_save: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "flextrain")
    train_badly(with_scores(tmp_path, [0.5, 0.6, 0.7], Poison(10), async_save=async_save))
    assert [name for name in saved(tmp_path) if name.startswith("best")] == ["best_accuracy_epoch_1"]


@pytest.mark.parametrize(
    "scores, best", [([0.5, math.nan, 0.4], 1), ([0.5, math.inf, 0.6], 3), ([-math.inf, math.nan, 0.1], 3)]
)
def test_a_score_that_is_no_number(tmp_path: Path, scores: list[float], best: int) -> None:
    train_badly(with_scores(tmp_path, scores))
    assert [name for name in saved(tmp_path) if name.startswith("best")] == [f"best_accuracy_epoch_{best}"]


# The command


def test_the_command_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_badly(by_iter(tmp_path, Poison(7), iters=8))
    capsys.readouterr()

    def run(*arguments: str) -> str:
        assert main(["checkpoint", *arguments]) == 0
        return capsys.readouterr().out

    listing = {row["name"]: row for row in json.loads(run("ls", str(tmp_path), "--json"))}
    assert (listing["iter_6"]["nonfinite"], listing["iter_6"]["latest"]) == ([], True)
    assert len(listing["iter_8"]["nonfinite"]) == 8
    lines = run("ls", str(tmp_path)).splitlines()
    assert [line for line in lines if "NaN or infinity" in line] == [line for line in lines if "iter_8" in line]
    path = str(tmp_path / "iter_8")
    assert "NaN or infinity in 8 tensors (model.net.0.bias," in run("show", path)
    assert json.loads(run("show", path, "model.net.0.bias", "--json"))["nonfinite"] == ["model.net.0.bias"]
    assert "is complete, with NaN or infinity in 8 tensors (" in run("verify", path)
    assert json.loads(run("verify", path, "--json"))["nonfinite"] == listing["iter_8"]["nonfinite"]
    assert "NaN" not in run("verify", str(tmp_path / "iter_6"))


def test_an_export_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_badly(by_iter(tmp_path, Poison(7), iters=8))
    caplog.clear()
    caplog.set_level(logging.WARNING, "flextrain")
    export_weights(tmp_path / "iter_6", tmp_path / "good.safetensors")
    assert caplog.text == ""
    export_weights(tmp_path / "iter_8", tmp_path / "bad.safetensors")
    assert (
        "iter_8: NaN or infinity is in 4 weights (net.0.weight, net.0.bias, net.3.weight and 1 more), and in "
        in caplog.text
    )
