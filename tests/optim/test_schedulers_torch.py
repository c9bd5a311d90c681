"""torch.optim.lr_scheduler's own classes, in flextrain's windows, move as they do by themselves."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from flextrain.core.base.errors import ConfigError
from flextrain.optim.schedulers import StepLR, TorchScheduler, build_param_schedulers


class Decay:
    """A callable with a state of its own, which torch saves."""

    def __init__(self) -> None:
        self.rate = 0.9

    def __call__(self, step: int) -> float:
        return self.rate**step


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "LambdaLR": lambda: dict(lr_lambda=lambda step: 0.95**step),
    "LambdaLR-callable": lambda: dict(lr_lambda=Decay()),
    "MultiplicativeLR": lambda: dict(lr_lambda=lambda step: 0.97),
    "PolynomialLR": lambda: dict(total_iters=30, power=2.0),
    "CosineAnnealingWarmRestarts": lambda: dict(T_0=10, T_mult=2, eta_min=0.001),
    "CyclicLR": lambda: dict(base_lr=0.01, max_lr=0.2, step_size_up=7, mode="triangular2"),
    "CyclicLR-momentum": lambda: dict(base_lr=0.01, max_lr=0.2, step_size_up=9, cycle_momentum=True),
    "torch.optim.lr_scheduler:StepLR": lambda: dict(step_size=8, gamma=0.5),
    "torch.optim.lr_scheduler:MultiStepLR": lambda: dict(milestones=[10, 20], gamma=0.3),
    "torch.optim.lr_scheduler:CosineAnnealingLR": lambda: dict(T_max=25),
    "torch.optim.lr_scheduler:OneCycleLR": lambda: dict(max_lr=0.5, total_steps=60),
    "torch.optim.swa_utils:SWALR": lambda: dict(swa_lr=0.02, anneal_epochs=12),
}


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.1, 0.02)], momentum=0.9)


def values(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


def build(name: str, optimizer: torch.optim.Optimizer, **window: Any) -> TorchScheduler:
    cfg = dict(type=name.partition("-")[0], **CASES[name](), **window)
    (scheduler,) = build_param_schedulers(cfg, optimizer, epoch_length=10)
    assert isinstance(scheduler, TorchScheduler)
    return scheduler


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_values_are_those_of_torch(name: str) -> None:
    raw_optimizer, optimizer = sgd(), sgd()
    scheduler = build(name, optimizer)
    raw = scheduler.scheduler(raw_optimizer, **CASES[name]())
    for _ in range(50):
        assert values(optimizer) == values(raw_optimizer)
        assert scheduler.get_last_value() == raw.get_last_lr()
        raw_optimizer.step()
        raw.step()
        scheduler.step()


def test_a_window_shifts_torchs_schedule_and_cuts_it(name: str) -> None:
    whole_optimizer, optimizer = sgd(), sgd()
    untouched = values(optimizer)
    scheduler = build(name, optimizer, begin=5, end=25)
    for _ in range(5):
        assert values(optimizer) == untouched
        scheduler.step()
    whole = build(name, whole_optimizer)
    for _ in range(20):
        assert values(optimizer) == values(whole_optimizer)
        scheduler.step()
        last = values(whole_optimizer)
        whole.step()
    scheduler.step()
    assert values(optimizer) == last


def test_a_resumed_schedule_goes_on_exactly(name: str) -> None:
    def run(scheduler: TorchScheduler, steps: int) -> list[list[tuple[float, float]]]:
        rows = []
        for _ in range(steps):
            rows.append(values(scheduler.optimizer))  # type: ignore[arg-type]
            scheduler.step()
        return rows

    for begin, at in itertools.product((0, 6), (3, 13, 29)):
        whole = run(build(name, sgd(), begin=begin), 45)
        interrupted_optimizer, optimizer = sgd(), sgd()
        interrupted, resumed = build(name, interrupted_optimizer, begin=begin), build(name, optimizer, begin=begin)
        run(interrupted, at)
        optimizer.load_state_dict(interrupted_optimizer.state_dict())
        resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict(), allow_nan=False)))
        assert run(resumed, 45 - at) == whole[at:], (begin, at)


def test_a_wrapper_is_enough() -> None:
    class Wrapper:
        def __init__(self) -> None:
            self.param_groups = sgd().param_groups

    wrapper = Wrapper()
    (scheduler,) = build_param_schedulers(dict(type="LambdaLR", lr_lambda=lambda i: 0.5), wrapper, epoch_length=None)
    assert [group["lr"] for group in wrapper.param_groups] == [0.05, 0.01]
    assert scheduler.optimizer is wrapper


def test_mmengines_meaning_of_a_shared_name_wins() -> None:
    (scheduler,) = build_param_schedulers(dict(type="StepLR", step_size=2), sgd(), epoch_length=None)
    assert type(scheduler) is StepLR


def test_a_class_of_torch_is_taken_too() -> None:
    cfg = dict(type=lr_scheduler.ExponentialLR, gamma=0.5, by_epoch=False, begin=2)
    (scheduler,) = build_param_schedulers(cfg, sgd(), epoch_length=None)
    assert (scheduler.by_epoch, scheduler.begin) == (False, 2)


def test_torchs_options_are_not_converted_to_iterations() -> None:
    with pytest.raises(ConfigError, match=r"PolynomialLR.convert_to_iter_based.*by_epoch=False"):
        build("PolynomialLR", sgd(), convert_to_iter_based=True)


def test_torch_has_nothing_to_warn_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = build("LambdaLR", sgd())
        for _ in range(3):
            scheduler.step()


def test_the_base_of_a_cycle_counts_after_a_warm_up() -> None:
    optimizer = sgd()
    cycle = dict(type="CyclicLR", base_lr=0.01, max_lr=0.2, step_size_up=2, begin=3)
    schedulers = build_param_schedulers([dict(type="LinearLR", end=3), cycle], optimizer, epoch_length=None)
    rows = []
    for _ in range(8):
        rows.append(optimizer.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    assert rows[3:] == pytest.approx([0.01, 0.105, 0.2, 0.105, 0.01])


def test_a_third_partys_scheduler_may_take_any_option() -> None:
    class HalvingLR(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer, **options: float) -> None:
            self.rate = options["rate"]
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            return [base * self.rate**self.last_epoch for base in self.base_lrs]

    optimizer = sgd()
    (scheduler,) = build_param_schedulers(dict(type=HalvingLR, rate=0.5), optimizer, epoch_length=None)
    scheduler.step()
    assert scheduler.get_last_value() == pytest.approx([0.05, 0.01])
    with pytest.raises(ConfigError, match="param_scheduler: HalvingLR: 'rate'"):
        build_param_schedulers(dict(type=HalvingLR), optimizer, epoch_length=None)


def test_last_step_goes_on_without_a_saved_state() -> None:
    optimizer = sgd()
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    cfg = dict(type="LambdaLR", lr_lambda=lambda step: 0.5**step, last_step=2)
    build_param_schedulers(cfg, optimizer, epoch_length=None)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
