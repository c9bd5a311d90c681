"""A train_step that works with gradients and weights itself has those of one device under every strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flextrain import OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.strategies import gradient_hooks
from flextrain.testing import WorkerGroup

from ..runner.training import FSDP, Net, Samples, make_runner, whole_state

pytestmark = pytest.mark.distributed
TP = dict(type="mesh", tp=2, plan={"net.0": "colwise", "net.3": "rowwise"})
STRATEGIES: dict[str, Any] = {"single": dict(type="single"), "ddp": "ddp", "fsdp": FSDP, "whole": "fsdp", "tp": TP}


def clip(parameters: list[Tensor]) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.05)


def bound(parameters: list[Tensor]) -> Tensor:
    nn.utils.clip_grad_value_(parameters, 0.01)
    return torch.zeros(())


def sign(parameters: list[Tensor]) -> Tensor:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sign()
    return torch.zeros(())


def by_their_norms(parameters: list[Tensor]) -> Tensor:
    norms = [parameter.grad.norm() for parameter in parameters if parameter.grad is not None]
    for parameter, norm in zip(parameters, norms, strict=True):
        assert parameter.grad is not None
        parameter.grad.div_(norm + 1e-6)
    return sum(norms, start=torch.zeros(()))


def look(parameters: list[Tensor]) -> Tensor:
    return torch.tensor(sum(parameter.grad.norm().item() for parameter in parameters if parameter.grad is not None))


CHANGES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    change.__name__: change for change in (clip, bound, sign, by_their_norms, look)
}


class ByHand(Net):
    """Changes gradients before the update; with ``twice``, they come from two calls of ``backward``, of one forward if it is "retained"."""

    def __init__(self, change: str, twice: bool | str) -> None:
        super().__init__(dropout=0.0)
        self.change, self.twice = change, twice

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self(**data, mode="loss")["loss"]
        for _ in range(1 + bool(self.twice)):
            optim_wrapper.backward(loss, retain_graph=self.twice == "retained")
            if self.twice != "retained":
                loss = self(**data, mode="loss")["loss"] * 0.5
        seen = torch.zeros(())
        if optim_wrapper.should_update():
            seen = CHANGES[self.change]([*self.parameters()])
            optim_wrapper.step()
        return {"loss": loss.detach(), "seen": seen}


def trained(
    folder: str,
    strategy: str,
    change: str,
    twice: bool | str = False,
    accumulate: int = 1,
    model: Any = None,
    wrapper: type[OptimWrapper] = OptimWrapper,
) -> dict[str, Any]:
    runner = make_runner(
        folder,
        model=model or (lambda: ByHand(change, twice)),
        strategy=STRATEGIES[strategy],
        optim_wrapper=dict(
            type=wrapper, optimizer=dict(type="SGD", lr=0.1, momentum=0.9), accumulative_counts=accumulate
        ),
        train_cfg=dict(by_epoch=False, max_iters=3 * accumulate),
        log_level="WARNING",
        train_dataloader=dict(
            batch_size=8 // (2 if strategy in ("ddp", "fsdp", "whole") else 1) // accumulate,
            dataset=Samples(8),
            collate_fn="default_collate",
        ),
    )
    try:
        runner.train()
        seen = runner.message_hub.get_scalar("train/seen").current()
        return {name: each for name, each in whole_state(runner).items() if name.startswith("model.")} | {"seen": seen}
    finally:
        runner.strategy.leave()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_after_backward_are_those_of_one_device(
    tmp_path: Path, workers1: WorkerGroup, workers2: WorkerGroup, strategy: str, change: str
) -> None:
    (expected,) = workers1.run(trained, str(tmp_path / "one"), "single", change)
    for found in workers2.run(trained, str(tmp_path / "two"), strategy, change):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", dict(twice=True)),
        ("ddp", dict(accumulate=2)),
        ("ddp", dict(twice="retained")),
        ("fsdp", dict(twice="retained")),
    ],
    ids=str,
)
def test_after_several_backwards_too(
    tmp_path: Path, workers1: WorkerGroup, workers2: WorkerGroup, strategy: str, options: dict[str, Any]
) -> None:
    (expected,) = workers1.run(run_with, str(tmp_path / "one"), "single", options)
    for found in workers2.run(run_with, str(tmp_path / "two"), strategy, options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class InStep(OptimWrapper):
    def step(self, **options: Any) -> Any:
        clip([parameter for group in self.param_groups for parameter in group["params"]])
        return super().step(**options)


class InBackward(OptimWrapper):
    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        clip([parameter for group in self.param_groups for parameter in group["params"]])


class Updates(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def loss_of(self, data: Any) -> Tensor:
        return self(**data, mode="loss")["loss"]  # type: ignore[no-any-return]

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self.loss_of(data)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach(), "seen": torch.zeros(())}


class Penalised(Updates):
    """With the size of its gradient for the input, as WGAN-GP has it."""

    def loss_of(self, data: Any) -> Tensor:
        x = data["x"].clone().requires_grad_(True)
        loss = super().loss_of({**data, "x": x})
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + (gradient * len(x)).square().sum(1).mean()


class OnlyPenalised(Updates):
    """Trained by its gradient for the input alone."""

    def loss_of(self, data: Any) -> Tensor:
        x = data["x"].clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()


class Decaying(Updates):
    """With the size of its weights, and the distance to the first ones."""

    def loss_of(self, data: Any) -> Tensor:
        if not hasattr(self, "first"):
            self.first = [parameter.detach().clone() for parameter in self.parameters()]
        loss = super().loss_of(data)
        loss += 0.1 * sum(parameter.square().sum() for parameter in self.parameters())
        far = [(now - first).square().sum() for now, first in zip(self.parameters(), self.first, strict=True)]
        return torch.stack([loss, *far]).sum()


@pytest.mark.parametrize(
    "strategy, model",
    [
        ("tp", Penalised),
        ("ddp", Penalised),
        ("fsdp", Penalised),
        ("fsdp", OnlyPenalised),
        ("whole", OnlyPenalised),
        ("tp", Decaying),
        ("ddp", Decaying),
    ],
)
def test_a_loss_of_gradients_or_weights(
    tmp_path: Path, workers1: WorkerGroup, workers2: WorkerGroup, strategy: str, model: type[Updates]
) -> None:
    (expected,) = workers1.run(run_with, str(tmp_path / "one"), "single", dict(model=model))
    for found in workers2.run(run_with, str(tmp_path / "two"), strategy, dict(model=model)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class PastWrapper(Updates):
    """Asks autograd itself, and clips what it gets."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self.loss_of(data)
        loss.backward()  # type: ignore[no-untyped-call]
        clip([*self.parameters()])
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return {"loss": loss.detach(), "seen": torch.zeros(())}


class AtOnce(PastWrapper):
    """Updates in every micro-batch, past ``accumulative_counts``, and past the wrapper too."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self.loss_of(data)
        optim_wrapper.backward(loss)
        optim_wrapper.optimizer.step()
        return {"loss": loss.detach(), "seen": torch.zeros(())}


class PenalisedPast(OnlyPenalised, PastWrapper):
    """Whose graph of gradients FSDP does not see either."""


class HooksForOneBackward(Updates):
    """Registers its gradient hooks in every step, and removes them again."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        handles = [parameter.register_hook(torch.sign) for parameter in self.parameters()]  # type: ignore[no-untyped-call]
        logs = super().train_step(data, optim_wrapper)
        for handle in handles:
            handle.remove()
        return logs


class HooksAfterForward(HooksForOneBackward):
    """Has forward come before that."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        self.loss = super().loss_of(data)
        return super().train_step(data, optim_wrapper)

    def loss_of(self, data: Any) -> Tensor:
        return self.loss


def refused(folder: str, strategy: str, model: type[Updates], accumulate: int = 1) -> str:
    with pytest.raises(StrategyError) as caught:
        trained(folder, strategy, "clip", accumulate=accumulate, model=model)
    return str(caught.value)


@pytest.mark.parametrize("strategy, model", [("ddp", AtOnce), ("fsdp", AtOnce), ("fsdp", PastWrapper)])
def test_an_update_within_a_window_is_refused(
    tmp_path: Path, workers2: WorkerGroup, strategy: str, model: type[Updates]
) -> None:
    for message in workers2.run(refused, str(tmp_path), strategy, model, 2):
        assert message.startswith("optim_wrapper.accumulative_counts: train_step updates in a micro-batch that is not")


@pytest.mark.parametrize(
    "strategy, model, said",
    [
        (
            "whole",
            PenalisedPast,
            "model: train_step computes gradients of gradients (create_graph=True) past optim_wrapper",
        ),
        ("ddp", HooksForOneBackward, "model.net.0.weight: has a gradient hook that was registered after set-up"),
        ("fsdp", HooksForOneBackward, "model.net.0.weight: has a gradient hook that was registered after set-up"),
        ("whole", HooksAfterForward, "model.net.0.weight: has a gradient hook that was registered after set-up"),
    ],
)
def test_gradients_of_one_process_are_refused(
    tmp_path: Path, workers2: WorkerGroup, strategy: str, model: type[Updates], said: str
) -> None:
    for message in workers2.run(refused, str(tmp_path), strategy, model):
        assert message.startswith(said)


class Messages(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def told(folder: str, model: type[Updates]) -> list[str]:
    messages = Messages(logging.WARNING)
    logging.getLogger("flextrain").addHandler(messages)
    try:
        trained(folder, "ddp", "clip", model=model)
    finally:
        logging.getLogger("flextrain").removeHandler(messages)
    return [text for text in messages.texts if "past optim_wrapper" in text]


def test_gradients_past_the_wrapper_are_told_once(tmp_path: Path, workers2: WorkerGroup) -> None:
    first, second = workers2.run(told, str(tmp_path / "past"), PastWrapper)
    (text,) = first
    assert "call optim_wrapper.backward(loss)" in text
    assert not second
    assert workers2.run(told, str(tmp_path / "usual"), Updates) == [[], []]


@pytest.mark.parametrize("wrapper", [InStep, InBackward])
def test_an_optimizer_wrapper_that_clips_itself(
    tmp_path: Path, workers1: WorkerGroup, workers2: WorkerGroup, wrapper: type[OptimWrapper]
) -> None:
    options = dict(model=Updates, wrapper=wrapper)
    (expected,) = workers1.run(run_with, str(tmp_path / "one"), "single", options)
    for found in workers2.run(run_with, str(tmp_path / "two"), "ddp", options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def run_with(folder: str, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    return trained(folder, strategy, "clip", **options)


def averagings(folder: str, change: str) -> int:
    """How often gradients were sent in three updates."""
    with mock.patch.object(gradient_hooks, "average_used", wraps=gradient_hooks.average_used) as average:
        trained(folder, "ddp", change)
    return average.call_count


def test_what_nobody_changes_is_averaged_once(tmp_path: Path, workers2: WorkerGroup) -> None:
    assert workers2.run(averagings, str(tmp_path), "look") == [3, 3]
    assert workers2.run(averagings, str(tmp_path), "bound") == [6, 6]
