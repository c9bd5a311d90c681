"""Runs of the project in ``project/``, which keeps its imports of MMEngine, under MMEngine's runner and flextrain's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from flextrain.core.checkpoint import export_weights

PROJECT = Path(__file__).with_name("project")
TRAIN = "classifier_layer_decay.py"


def configuration(folder: Path | str, name: str = TRAIN, **changes: Any) -> Any:
    """A configuration file of the project, with a work directory and a seed."""
    if str(PROJECT) not in sys.path:
        sys.path.insert(0, str(PROJECT))
    from mmengine.config import Config

    cfg = Config.fromfile(str(PROJECT / "configs" / name))
    cfg.work_dir = str(folder)
    cfg.randomness = dict(seed=1)
    cfg.log_level = "ERROR"
    cfg.merge_from_dict(changes)
    return cfg


def journal_of(runner: Any) -> Any:
    """The project's hook that writes down losses and what it sees."""
    return next(hook for hook in (getattr(each, "hook", each) for each in runner.hooks) if hasattr(hook, "entries"))


def train(folder: str, batch_size: int, **changes: Any) -> tuple[list[float], list[Any], dict[str, Any]]:
    """Losses of every update, what the project's hook saw, and the metrics of testing."""
    from flextrain.mmengine import FlexibleRunner

    cfg = configuration(folder, **changes)
    cfg.train_dataloader.batch_size = batch_size
    runner = FlexibleRunner.from_cfg(cfg)
    runner.train()
    metrics = runner.test()
    hook = journal_of(runner)
    runner.strategy.leave()
    return hook.losses, hook.entries, metrics


def saved_weights(folder: Path, checkpoint: str = "epoch_3", averaged: bool = False) -> dict[str, Tensor]:
    """The weights of a checkpoint of flextrain."""
    target = folder / f"{checkpoint}_{averaged}.safetensors"
    if not target.exists():
        export_weights(folder / checkpoint, target, averaged=averaged)
    return load_file(target)


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected if torch.is_tensor(found[name]))


def with_tta(folder: Path | str, **changes: Any) -> Any:
    """The configuration for testing with several views of every sample, as MMEngine's projects make it."""
    cfg = configuration(folder, "classifier.py")
    cfg.model = dict(**cfg.tta_model, module=cfg.model)
    cfg.merge_from_dict(changes)
    for dataset in cfg.test_dataloader.dataset.datasets:
        dataset.pipeline = cfg.tta_pipeline
    training = ("train_dataloader", "train_cfg", "optim_wrapper", "param_scheduler")
    for key in (*training, "val_dataloader", "val_cfg", "val_evaluator"):
        cfg.pop(key)
    return cfg


def metrics_with_tta(folder: str, **changes: Any) -> dict[str, Any]:
    """The metrics of testing with several views."""
    from flextrain.mmengine import FlexibleRunner

    runner = FlexibleRunner.from_cfg(with_tta(folder, **changes))
    metrics = runner.test()
    runner.strategy.leave()
    return metrics
