"""Schedulers do what MMEngine's do, number by number, and go on after a resume as if nothing had happened."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import ConfigError, OptimWrapper
from flextrain.optim import schedulers as library
from flextrain.optim.schedulers import build_param_schedulers

RECORDED = json.loads((Path(__file__).parent / "data" / "mmengine_schedulers.json").read_text())


def make_optimizer(case: dict[str, Any]) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in case["lrs"]]
    if case["optimizer"] == "Adam":
        return torch.optim.Adam(groups, betas=(0.9, 0.99), weight_decay=0.05)
    if case["initial"]:
        groups = [{**group, "initial_lr": 2 * group["lr"]} for group in groups]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05)


def read(group: dict[str, Any], key: str) -> float:
    return group["betas"][0] if key == "momentum" and "betas" in group else group[key]


class Training:
    """An optimizer, its schedulers, and the clock that moves them."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.optimizer = make_optimizer(case)
        cfgs = copy.deepcopy(case["schedulers"])
        self.schedulers = build_param_schedulers(cfgs, self.optimizer, epoch_length=case["epoch_length"])
        self.iteration = 0

    def values(self) -> list[float]:
        return [read(group, key) for key in self.case["keys"] for group in self.optimizer.param_groups]

    def run(self, num_iterations: int) -> list[list[float]]:
        rows = []
        for _ in range(num_iterations):
            rows.append(self.values())
            self.iteration += 1
            epoch, rest = divmod(self.iteration, self.case["epoch_length"])
            for scheduler in self.schedulers:
                if not scheduler.by_epoch or rest == 0:
                    scheduler.step()
            for scheduler in self.schedulers:
                if scheduler.need_val_args and rest == 0:
                    metric = torch.tensor(self.case["metrics"][epoch - 1], dtype=torch.float64)
                    scheduler.step({"loss": metric, "acc": metric})
        return rows

    def save(self) -> str:
        """Everything a checkpoint holds, as text: whatever is no plain value would not survive."""
        state = self.optimizer.state_dict()["param_groups"]
        return json.dumps([self.iteration, state, [s.state_dict() for s in self.schedulers]], allow_nan=False)

    def load(self, saved: str) -> None:
        self.iteration, groups, states = json.loads(saved)
        self.optimizer.load_state_dict({"state": {}, "param_groups": groups})
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)


def is_one_step(case: Any) -> bool:
    """A constant factor in a window of one step stays for ever in MMEngine; ours is removed, as in longer windows."""
    one = case["schedulers"][0]
    return one["type"].startswith("Constant") and one.get("end", 10**9) - one.get("begin", 0) == 1


@pytest.mark.parametrize("kind", dict.fromkeys(name.partition("-")[0] for name in RECORDED))
def test_values_are_those_of_mmengine_also_after_a_resume(kind: str) -> None:
    for name in (name for name in RECORDED if name.startswith(f"{kind}-")):
        case = RECORDED[name]
        rows = Training(case).run(100)
        if is_one_step(case):
            assert all(row == rows[0] for row in rows)
        else:
            for step, (ours, recorded) in enumerate(zip(rows, case["values"], strict=True)):
                assert ours == pytest.approx(recorded, rel=1e-9, abs=1e-16), f"{name} at step {step}"
        at = random.Random(name).randrange(1, 99)
        interrupted, resumed = Training(case), Training(case)
        interrupted.run(at)
        resumed.load(interrupted.save())
        last = [[s.get_last_value() for s in training.schedulers] for training in (interrupted, resumed)]
        assert last[0] == last[1], name
        assert resumed.run(100 - at) == rows[at:], name


def test_every_scheduler_has_recorded_configurations() -> None:
    recorded = {case["schedulers"][0]["type"] for name, case in RECORDED.items() if not name.startswith("chain")}
    assert recorded == {name for name in vars(library) if name.endswith(("LR", "Momentum"))}


def sgd(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs or (0.1,)], momentum=0.9)


def play(scheduler: Any, num_steps: int) -> list[float]:
    """The first group's value before each of the steps."""
    values = []
    for _ in range(num_steps):
        values += scheduler.get_last_value()[:1]
        scheduler.step()
    return values


def test_values_are_left_alone_outside_of_the_window() -> None:
    optimizer = sgd()
    scheduler = library.ExponentialLR(optimizer, 0.5, begin=3, end=5)
    optimizer.param_groups[0]["lr"] = 7.0
    values = []
    for _ in range(8):
        scheduler.step()
        values.append(optimizer.param_groups[0]["lr"])
    assert values == [7, 7, 7, 3.5, 3.5, 3.5, 3.5, 3.5]
    assert scheduler.last_step == 1


def test_a_warm_up_may_start_from_zero() -> None:
    assert play(library.LinearLR(sgd(), start_factor=0.0, end=5), 6) == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1])
    assert play(library.ConstantLR(sgd(), factor=0.0, end=3), 4) == pytest.approx([0, 0, 0.1, 0.1])


# The values at steps 0, 1, 2 and 3 of windows of one and of two steps, as shares of the initial value.
SHORT = {
    "Constant": (dict(factor=0.5), [1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0]),
    "Linear": (dict(start_factor=0.1, end_factor=0.8), [0.8, 0.8, 0.8, 0.8], [0.1, 0.8, 0.8, 0.8]),
    "Poly": (dict(eta_min=0.0), [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]),
    "CosineAnnealing": (dict(), [1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 0.5, 0.5]),
    "CosineRestart": (dict(periods=[1]), [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
    "Step": (dict(step_size=1), [1.0, 1.0, 1.0, 1.0], [1.0, 0.1, 0.1, 0.1]),
    "MultiStep": (dict(milestones=[0, 1]), [0.1, 0.1, 0.1, 0.1], [0.1, 0.01, 0.01, 0.01]),
    "Exponential": (dict(gamma=0.5), [1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 0.5, 0.5]),
}


@pytest.mark.parametrize("name", SHORT)
def test_windows_of_one_and_two_steps(name: str) -> None:
    options, *expected = SHORT[name]
    for length, begin in itertools.product((1, 2), (0, 1)):
        scheduler = getattr(library, f"{name}LR")(sgd(), begin=begin, end=begin + length, **options)
        base = scheduler.base_values[0]
        shares = [*[1.0] * begin, *expected[length - 1]][:4]
        assert play(scheduler, 4) == pytest.approx([base * share for share in shares])


def test_a_warm_up_of_one_step_lets_the_next_schedule_begin_from_the_peak() -> None:
    optimizer = sgd()
    warm_up = library.LinearLR(optimizer, start_factor=0.1, end=1)
    cosine = library.CosineAnnealingLR(optimizer, begin=1, T_max=4)
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        warm_up.step()
        cosine.step()
    assert seen == pytest.approx([0.1, 0.1, 0.0853553, 0.05, 0.0146447], rel=1e-5)


def test_one_cycle_stays_at_its_end() -> None:
    values = play(library.OneCycleLR(sgd(), eta_max=0.5, total_steps=10), 20)
    assert values[9:] == pytest.approx([0.5 / 25 / 1e4] * 11)
    assert max(values) == pytest.approx(0.5)


def test_one_cycle_takes_a_peak_for_each_group() -> None:
    optimizer = sgd(0.1, 0.2)
    library.OneCycleLR(optimizer, eta_max=[1.0, 2.0], end=20, div_factor=10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.2])


def test_one_cycle_tells_that_one_peak_makes_groups_equal(caplog: pytest.LogCaptureFixture) -> None:
    """As in MMEngine, ``lr_mult`` of paramwise_cfg is lost then."""
    for optimizer, peak in ((sgd(0.1, 0.2), [1.0, 2.0]), (sgd(0.1, 0.1), 1.0), (sgd(0.1, 0.2), 1.0)):
        assert not caplog.messages
        library.OneCycleLR(optimizer, eta_max=peak, end=20)
    (line,) = caplog.messages
    assert "eta_max: 1.0 is the peak of all 2 groups, so their learning rates, 0.1 to 0.2 by paramwise_cfg" in line


def test_last_step_goes_on_inside_the_window() -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["initial_lr"] = 0.1
    scheduler = library.ExponentialLR(optimizer, 0.5, begin=10, end=13, last_step=1)
    assert play(scheduler, 3) == [0.05, 0.05, 0.05]


def test_a_first_metric_that_is_no_number_is_no_improvement() -> None:
    scheduler = library.ReduceOnPlateauLR(sgd(), patience=0, factor=0.5)
    for _ in range(2):
        scheduler.step()
        scheduler.step({"loss": math.nan})
    assert scheduler.get_last_value() == pytest.approx([0.025])


@pytest.mark.parametrize("rule, endless", [("less", -math.inf), ("greater", math.inf), ("less", math.inf)])
def test_a_metric_without_bounds_is_no_best_value(rule: str, endless: float) -> None:
    scheduler = library.ReduceOnPlateauLR(sgd(), rule=rule, patience=1, factor=0.5)
    for metric in (endless, 1.0, 2.0 if rule == "greater" else 0.5):
        scheduler.step({"loss": metric})
    assert scheduler.best == (2.0 if rule == "greater" else 0.5)
    assert scheduler.num_bad_epochs == 0


def test_a_tensor_learning_rate_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=rate, capturable=True)
    schedulers = [library.LinearLR(optimizer, end=10), library.CosineAnnealingLR(optimizer, T_max=20, begin=10)]
    plain = [cls(sgd(), **kw) for cls, kw in ((library.LinearLR, {"end": 10}),)]
    for _ in range(9):
        for scheduler in schedulers + plain:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(plain[0].get_last_value()[0])
    json.dumps([scheduler.state_dict() for scheduler in schedulers])


def test_groups_that_share_a_tensor_are_reduced_once() -> None:
    groups = [dict(params=[torch.zeros(1)], weight_decay=decay) for decay in (0.0, 0.1, 0.2)]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(1.0))
    assert len({id(group["lr"]) for group in optimizer.param_groups}) == 1
    scheduler = library.ReduceOnPlateauLR(optimizer, monitor="loss", factor=0.5, patience=0)
    for _ in range(2):
        scheduler.step()
        scheduler.step({"loss": 1.0})
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5] * 3


def test_momentum_of_adam_is_its_first_beta() -> None:
    optimizer = torch.optim.Adam([torch.zeros(1)], betas=(0.9, 0.95))
    library.ConstantMomentum(optimizer, factor=0.5)
    assert optimizer.param_groups[0]["betas"] == (0.45, 0.95)
    assert "momentum" not in optimizer.param_groups[0]


def test_configuration_counts_after_a_resume() -> None:
    first = library.StepLR(sgd(), step_size=3, gamma=0.1)
    second = library.StepLR(sgd(), step_size=3, gamma=0.5)
    second.load_state_dict(first.state_dict())
    assert second.gamma == 0.5


def test_verbose_says_what_is_set(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="flextrain"):
        library.ConstantLR(sgd(), factor=0.5, verbose=True)
    assert caplog.messages == ["ConstantLR: lr is 5.0000e-02 from step 0 on"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_before_the_optimizer_s_is_warned_of_once(wrapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Right orders, also that of a resumed state, are silent, and leave no hook on the optimizer."""
    torch_optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer: Any = OptimWrapper(torch_optimizer) if wrapped else torch_optimizer
    early, right, resumed = (library.ExponentialLR(optimizer, gamma=0.5) for _ in range(3))
    early.step()
    early.step()
    assert caplog.text.count("ExponentialLR.step: called before the optimizer's first step") == 1
    resumed.load_state_dict(early.state_dict())
    resumed.step()
    torch_optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    right.step()
    assert caplog.text.count("called before") == 1
    assert not torch_optimizer._optimizer_step_post_hooks


def test_a_scheduler_of_ones_own_needs_a_formula_only() -> None:
    class HalvingLR(library.ParamScheduler):
        def __init__(self, optimizer: Any, floor: float, **window: Any) -> None:
            self.floor = floor
            super().__init__(optimizer, param_name="lr", **window)

        def _get_value(self) -> list[float]:
            return [max(group["lr"] / 2, self.floor) for group in self.optimizer.param_groups]

    (scheduler,) = build_param_schedulers(dict(type=HalvingLR, floor=0.02), sgd(), epoch_length=None)
    assert play(scheduler, 4) == [0.05, 0.025, 0.02, 0.02]


def test_something_without_groups_is_named() -> None:
    with pytest.raises(ConfigError, match="^StepLR.optimizer: str is not allowed, give an OptimWrapper or"):
        library.StepLR("optimizer", step_size=1)  # type: ignore[arg-type]


def test_metrics_that_are_none_are_named() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = library.ReduceOnPlateauLR(optimizer, monitor="loss")
    with pytest.raises(ConfigError, match="^ReduceOnPlateauLR.step: tuple is not allowed, give a dict of metrics$"):
        scheduler.step(("loss", 1.0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss"):
        scheduler.step({1: 2.0, "los": 1.0})  # type: ignore[dict-item]
