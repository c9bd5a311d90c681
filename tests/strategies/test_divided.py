"""What a hook computes with parameters of which processes have shards is what it computes on one device, or it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flextrain import FSDPStrategy, StrategyError
from flextrain.strategies.divided import register_divided
from flextrain.testing import WorkerGroup

from ..runner.training import FSDP, At, Net, Samples, make_runner, whole_state

pytestmark = pytest.mark.distributed
TP = dict(type="mesh", tp=2, plan={"net.0": "colwise", "net.3": "rowwise"})
STRATEGIES: dict[str, Any] = {"single": dict(type="single"), "fsdp": FSDP, "tp": TP}


def noise(parameter: Tensor) -> None:
    parameter.add_(torch.randn_like(parameter), alpha=0.1)


def drop(parameter: Tensor) -> None:
    parameter.mul_(torch.bernoulli(torch.full_like(parameter, 0.5)))


def by_its_norm(parameter: Tensor) -> None:
    parameter.div_(1 + parameter.norm().item())


def by_its_sum(parameter: Tensor) -> None:
    parameter.mul_(float(parameter.abs().sum()))


def by_a_copy(parameter: Tensor) -> None:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()
    whole[3:] = 0.5
    parameter.copy_(whole)


def by_data(parameter: Tensor) -> None:
    parameter.data = parameter.data * 0.5


def by_whole_data(parameter: Tensor) -> None:
    parameter.data = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "normal_": lambda parameter: nn.init.normal_(parameter),
    "uniform_": lambda parameter: parameter.uniform_(-1, 1),
    "trunc_normal_": lambda parameter: nn.init.trunc_normal_(parameter),
    **{change.__name__: change for change in (noise, drop, by_its_norm, by_its_sum, by_a_copy, by_data, by_whole_data)},
}


def changed(folder: str, strategy: str, change: str) -> dict[str, Tensor]:
    """Weights after an update, a change by a hook, and another update."""

    def hook(runner: Any, *_: Any, **__: Any) -> None:
        if runner.iter == 1:
            torch.manual_seed(3)
            with torch.no_grad():
                for parameter in runner.strategy.module.parameters():
                    CHANGES[change](parameter)

    runner = make_runner(
        folder,
        model=lambda: Net(dropout=0.0),
        strategy=STRATEGIES[strategy],
        custom_hooks=[At("before_train_iter", hook)],
        train_cfg=dict(by_epoch=False, max_iters=2),
        train_dataloader=dict(
            batch_size=4 if strategy == "fsdp" else 8, dataset=Samples(8), collate_fn="default_collate"
        ),
    )
    try:
        runner.train()
        return {name: value for name, value in whole_state(runner).items() if name.startswith("model.")}
    finally:
        runner.strategy.leave()


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_hook_changes_weights_as_on_one_device(
    tmp_path: Path, workers1: WorkerGroup, workers2: WorkerGroup, strategy: str, change: str
) -> None:
    (expected,) = workers1.run(changed, str(tmp_path / "one"), "single", change)
    for found in workers2.run(changed, str(tmp_path / "two"), strategy, change):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def row(parameter: Tensor) -> None:
    parameter[-1] = 0.0


def rows(parameter: Tensor) -> None:
    parameter.data[1:].mul_(0.0)


def drawn(parameter: Tensor) -> None:
    parameter[0].normal_()


def a_view(parameter: Tensor) -> None:
    parameter.view(-1)[:3].zero_()


def another_dtype(parameter: Tensor) -> None:
    parameter.data = parameter.data.double()


LOST: dict[str, Callable[[Tensor], object]] = {change.__name__: change for change in (row, rows, drawn, a_view)}


def refusal(folder: str, strategy: str, change: str) -> str:
    CHANGES[change] = another_dtype if change == "another_dtype" else LOST[change]
    try:
        changed(folder, strategy, change)
    except StrategyError as error:
        return str(error)
    finally:
        del CHANGES[change]
    return "nothing"


@pytest.mark.parametrize("change", LOST)
def test_a_write_to_some_rows_is_refused(tmp_path: Path, workers2: WorkerGroup, change: str) -> None:
    for said in workers2.run(refusal, str(tmp_path), "fsdp", change):
        assert (
            " writes to a view of a tensor whose shards were gathered for it, and would not change that tensor" in said
        )
        assert "whole = p.full_tensor(), p.copy_(whole)" in said


def columns(folder: str, strategy: str) -> dict[str, Tensor]:
    CHANGES["columns"] = lambda parameter: parameter[..., 1:2].zero_() if parameter.ndim == 2 else None
    return changed(folder, strategy, "columns")


def test_what_each_process_has_a_part_of_may_be_written_to(
    tmp_path: Path, workers1: WorkerGroup, workers2: WorkerGroup
) -> None:
    (expected,) = workers1.run(columns, str(tmp_path / "one"), "single")
    for found in workers2.run(columns, str(tmp_path / "two"), "fsdp"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class LogsOfStep(Net):
    """Logs what its own train_step computes from parameters."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self(**data, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss, "step_norm": self.net[0].weight.norm()}


def logged(folder: str, strategy: str) -> dict[str, Any]:
    """Numbers of the log, and one in a text."""
    texts = []

    def hook(runner: Any, *_: Any, **__: Any) -> None:
        norm = sum(p.detach().square().sum() for p in runner.strategy.module.parameters()).sqrt()
        runner.message_hub.update_scalar("train/norm", norm)
        texts.append(f"{float(norm):.4f}")

    runner = make_runner(
        folder,
        model=lambda: LogsOfStep(dropout=0.0),
        strategy=STRATEGIES[strategy],
        custom_hooks=[At("after_train_iter", hook)],
        train_cfg=dict(by_epoch=False, max_iters=2),
        train_dataloader=dict(
            batch_size=4 if strategy == "fsdp" else 8, dataset=Samples(8), collate_fn="default_collate"
        ),
    )
    try:
        runner.train()
        names = ("train/norm", "train/step_norm", "train/loss")
        return {name: runner.message_hub.get_scalar(name).current() for name in names} | {"text": float(texts[-1])}
    finally:
        runner.strategy.leave()


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_norms_of_parameters_are_logged_whole(
    tmp_path: Path, workers1: WorkerGroup, workers2: WorkerGroup, strategy: str
) -> None:
    (expected,) = workers1.run(logged, str(tmp_path / "one"), "single")
    for found in workers2.run(logged, str(tmp_path / "two"), strategy):
        assert found == pytest.approx(expected, rel=1e-4)


def test_data_keeps_its_dtype(tmp_path: Path, workers2: WorkerGroup) -> None:
    for said in workers2.run(refusal, str(tmp_path), "fsdp", "another_dtype"):
        assert (
            ".data of a divided tensor becomes float64 of shape (8, 6), which must stay float32 of shape (8, 6)" in said
        )


def written() -> list[Tensor]:
    """In a worker: a tensor of no DTensor, after writes of what was computed with DTensors."""
    strategy = FSDPStrategy(device="cpu")
    try:
        strategy.join()
        register_divided()
        divided = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), (Shard(0),))
        found = torch.ones(4)
        found.add_(divided, alpha=2.0)
        found.div_(divided.sum())
        return [found]
    finally:
        strategy.leave()


def test_what_is_divided_is_written_to_what_is_not(workers2: WorkerGroup) -> None:
    for (found,) in workers2.run(written):
        torch.testing.assert_close(found, torch.tensor([1.0, 3.0, 5.0, 7.0]) / 6)
