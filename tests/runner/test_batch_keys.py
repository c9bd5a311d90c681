"""Keys of a batch that a model's forward does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import BaseDataPreprocessor, BaseMetric, ConfigError, FlexibleRunner

from .training import refuses


class Net(nn.Module):
    def __init__(self, preprocessor: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        if preprocessor is not None:
            self.data_preprocessor = preprocessor

    def forward(self, x: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean() * scale}


class Scaled(BaseDataPreprocessor):
    """Takes a key away that the model does not take, and adds another one."""

    def forward(self, data: Any, training: bool = False) -> Any:
        data = dict(super().forward(data, training))
        factor = data.pop("factor")
        return {**data, "x": data["x"] * factor, "seen": True}


class Ids(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_batch["id"]

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"ids": results}


def run(tmp_path: Path, batch: dict[str, Any], model: nn.Module | None = None) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    runner = FlexibleRunner(
        model=model or Net(),
        work_dir=tmp_path,
        train_dataloader=[batch] * 2,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=2),
        val_dataloader=[batch],
        val_cfg={},
        val_evaluator=Ids(),
        default_hooks=dict(checkpoint=None),
    )
    runner.train()
    return runner.strategy.module, runner.val()


BATCH = {"x": torch.ones(2, 2), "scale": 2.0}


@pytest.mark.parametrize("preprocessor", [None, Scaled])
def test_unused_keys_are_left_out_and_said_once(tmp_path: Path, preprocessor: Any) -> None:
    factor = {} if preprocessor is None else {"factor": 1.0}
    torch.manual_seed(1)
    trained, metrics = run(
        tmp_path / "more", {**BATCH, "id": ["a"], "text": ["b"], **factor}, Net(preprocessor and preprocessor())
    )
    assert metrics == {"ids": ["a"]}, "metrics have the whole batch"
    (log,) = (tmp_path / "more").glob("*/*.log")
    (line,) = [line for line in log.read_text().splitlines() if "does not take" in line]
    assert (f"batch: Net.forward does not take id, text{', seen' if factor else ''}; left out") in line
    torch.manual_seed(1)
    same, _ = run(tmp_path / "exact", {**BATCH, "id": ["a"], **factor}, Net(preprocessor and preprocessor()))
    assert torch.equal(same.layer.weight, trained.layer.weight)


@pytest.mark.parametrize(
    "batch, error, message",
    [
        ({"xs": torch.ones(2, 2)}, ConfigError, "batch.xs: is no argument of Net.forward, did you mean x?"),
        (
            {**BATCH, "label": torch.ones(2)},
            ConfigError,
            "batch.label: is no argument of Net.forward, did you mean labels?",
        ),
        ({"inputs": torch.ones(2, 2), "id": 1}, TypeError, "unexpected keyword argument"),
        ({"scale": 2.0, "id": 1}, TypeError, "unexpected keyword argument"),
    ],
)
def test_a_misspelled_key_raises(tmp_path: Path, batch: dict[str, Any], error: Any, message: str) -> None:
    with refuses(error, message):
        run(tmp_path, batch)


def test_a_key_like_one_that_is_there_is_no_misspelling(tmp_path: Path) -> None:
    run(tmp_path, {**BATCH, "labels": torch.ones(2), "label": torch.ones(2), "id": ["a"]})


def test_models_with_a_mode_are_called_as_ever(tmp_path: Path) -> None:
    class WithMode(Net):
        def forward(self, x: Tensor, mode: str = "loss") -> Any:  # type: ignore[override]
            return {"loss": self.layer(x).mean()}

    with pytest.raises(TypeError, match="unexpected keyword argument 'id'"):
        run(tmp_path, {"x": torch.ones(2, 2), "id": ["a"]}, WithMode())
