"""Training mode after an evaluation: each module is in the mode of before, by its own ``train``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import Engine, FlexibleRunner
from flextrain.runner.hooks import Hook

from .training import Accuracy, At, Net, Samples, log_lines

SGD = dict(type="SGD", lr=0.1)


class Merging(nn.Linear):
    """A layer with an adapter that evaluation adds to the weight, and training takes off again, as loralib's does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(2, inputs) * 0.3)
        self.up = nn.Parameter(torch.randn(outputs, 2) * 0.3)
        self.is_merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.is_merged is mode:
            with torch.no_grad():
                self.weight.add_(self.up @ self.down, alpha=-1.0 if mode else 1.0)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if self.is_merged else found + x @ self.down.T @ self.up.T


class Adapted(Net):
    """A classifier with such a layer."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.net[3] = Merging(8, 2)


def adapted() -> Adapted:
    torch.manual_seed(3)
    return Adapted()


def loader(length: int) -> dict[str, Any]:
    sampler = dict(type="DefaultSampler", shuffle=False)
    return dict(dataset=Samples(length), batch_size=4, collate_fn=dict(type="default_collate"), sampler=sampler)


def run(folder: Path, model: nn.Module, **changes: Any) -> FlexibleRunner:
    validation = dict(val_dataloader=loader(8), val_cfg={}, val_evaluator=Accuracy)
    given = dict(
        model=model, work_dir=str(folder), train_dataloader=loader(8), train_cfg=dict(by_epoch=False, max_iters=6, val_interval=2),
        optim_wrapper=dict(optimizer=SGD), visualizer=[],
    )  # fmt: skip
    runner = FlexibleRunner(**{**given, **validation, **changes})
    runner.train()
    return runner


def by_hand(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Samples(8)
    for update in range(6):
        rows = slice(0, 4) if update % 2 == 0 else slice(4, 8)
        optimizer.zero_grad()
        functional.cross_entropy(model.net(data.x[rows]), data.y[rows]).backward()  # type: ignore[operator]
        optimizer.step()
    return model


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_model_that_changes_its_weights_for_evaluation_has_them_back(tmp_path: Path, dry_run: bool) -> None:
    model = run(tmp_path, adapted(), env_cfg=dict(dry_run=dry_run)).strategy.module
    expected = by_hand(adapted())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-5, msg=name)


def test_so_it_has_after_forward_of_an_engine() -> None:
    engine, batch = Engine(adapted(), optim_wrapper=dict(optimizer=SGD), seed=0), Samples(4)[:]
    before = copy.deepcopy(engine.model.state_dict())
    engine.forward(batch)
    torch.testing.assert_close(engine.model.state_dict(), before, rtol=0, atol=1e-6)


class Frozen(Hook):
    """Puts dropout into evaluation mode, once."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def before_train_epoch(self, runner: Any) -> None:
        runner.strategy.module.net[2].eval()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.seen.append(runner.strategy.module.net[2].training)


def test_a_part_that_a_hook_has_put_into_evaluation_mode_stays_so(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, hook = Net(), Frozen()
    expected = by_hand_without_dropout(copy.deepcopy(model))
    found = run(tmp_path, model, custom_hooks=[hook]).strategy.module
    assert hook.seen == [False] * 6
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)


def by_hand_without_dropout(model: Net) -> nn.Module:
    model.net[2].eval()
    return by_hand(model)


@pytest.mark.parametrize("part", [True, False])
def test_a_model_that_a_hook_leaves_in_evaluation_mode_is_told(tmp_path: Path, part: bool) -> None:
    """As after predictions in a hook; the rest of the epoch, or of a run by iterations, was trained so without a word."""

    def predict(runner: Any, *_: Any, **__: Any) -> None:
        module = runner.strategy.module
        (module.net[2] if part else module).eval()

    with log_lines() as said:
        run(tmp_path, Net(), custom_hooks=[At("after_train_iter", predict)])
    lines = [line for line in said if "evaluation mode" in line]
    assert len(lines) == (not part)
    assert all(
        "in evaluation mode in the update after iteration 1, so it trains without dropout" in one for one in lines
    )
