"""A recipe of examples/ trained in this process at tiny size: the losses, metrics and whole weights that it ends with."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flextrain import FlexibleRunner, Hook
from flextrain.core.checkpoint import FlatShard

EXAMPLES = Path(__file__).parents[2] / "examples"


class Watch(Hook):
    """The losses of all updates, and the metrics of all validations; ends training after the update ``stop``.

    With the usual eps of 1e-8, AdamW makes a full step of a gradient that is rounding, and processors round differently.
    """

    priority = "LOWEST"

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.losses: list[Tensor] = []
        self.metrics: list[dict[str, Any]] = []

    def before_train(self, runner: Any) -> None:
        for group in runner.optim_wrapper.param_groups:
            if "eps" in group:
                group["eps"] = 1e-5

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        self.losses.append(outputs["loss"])
        if runner.iter + 1 == self.stop:
            runner.save_checkpoint(runner.work_dir, f"iter_{self.stop}")
            raise KeyboardInterrupt

    def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        self.metrics.append(dict(metrics or {}))


@functools.cache
def recipe(name: str) -> ModuleType:
    """The script as a module, which it is once in a process, because it may register names."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


def make(name: str, folder: Path, flags: Sequence[str]) -> FlexibleRunner:
    module = recipe(name)
    runner: FlexibleRunner = module.make_runner(module.parse_arguments([*flags, "--work-dir", str(folder)]))
    return runner


def trained(name: str, folder: Path, flags: Sequence[str], stop: int | None = None) -> dict[str, Any]:
    """Train, to the end or to the update ``stop``, which is saved.

    Returns:
        ``losses``, ``metrics``, ``weights`` (whole tensors of all parameters), ``optimized`` (names of those with optimizer
        state).
    """
    runner = make(name, folder, flags)
    runner.register_hook(watch := Watch(stop))
    try:
        try:
            runner.train()
        except KeyboardInterrupt:
            assert stop is not None
        names = {name for name, _ in runner.strategy.parameters()}
        state = runner.strategy.model_state()
        weights = {name: whole(state[name]) for name in names}
        optimized = {
            key.removeprefix("optim.state.").rpartition(".")[0]
            for key in runner.strategy.state()
            if key.startswith("optim.state.")
        }
    finally:
        runner.strategy.leave()
    losses = [float(loss) for loss in watch.losses]
    return {"losses": losses, "metrics": watch.metrics, "weights": weights, "optimized": optimized}


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, (DTensor, FlatShard)) else tensor.detach().clone()


def means(found: Sequence[dict[str, Any]]) -> list[float]:
    """The losses of the updates, each the mean over the processes."""
    return [sum(losses) / len(found) for losses in zip(*(one["losses"] for one in found), strict=True)]


def same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(
            found["weights"][name],
            weight,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert found["optimized"] == expected["optimized"]
    assert len(found["metrics"]) == len(expected["metrics"])
