"""What a checkpoint is made of, piece by piece: each comes back, can be left out by its name, and is missed when it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import CheckpointError, ConfigError, FlexibleRunner, SingleDeviceStrategy, StrategyError
from flextrain.core.checkpoint import Checkpoint
from flextrain.runner.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, Hook

from .training import (
    SGD,
    At,
    SaveEvery,
    change_values,
    differences,
    log_lines,
    make_runner,
    refuses,
    validation,
    whole_state,
)

pytestmark = pytest.mark.usefixtures("quick")

PIECES = ("optimizer", "param_scheduler", "random", "hooks", "logs", "data")
CONFIG: dict[str, Any] = dict(
    optim_wrapper=dict(type="AmpOptimWrapper", optimizer=SGD, dtype="float16", loss_scale=dict(init_scale=8.0, growth_interval=3)),
    param_scheduler=dict(type="LinearLR", by_epoch=False, start_factor=0.1, end=20),
)  # fmt: skip


DEFAULT_HOOKS = dict(checkpoint=dict(interval=50, save_last=False, save_best="accuracy"))


def hooks() -> list[Any]:
    return [EMAHook(momentum=0.1), EarlyStoppingHook("accuracy", patience=50)]


def resumed(folder: Path, path: Path, **options: Any) -> FlexibleRunner:
    runner = make_runner(
        folder, **CONFIG, **validation(), default_hooks=DEFAULT_HOOKS, custom_hooks=hooks(), randomness=dict(seed=2)
    )
    runner.resume(path, **options)
    return runner


def hook(runner: FlexibleRunner, kind: type[Hook]) -> Any:
    return next(found for found in runner.hooks if isinstance(found, kind))


def found(runner: FlexibleRunner) -> dict[str, bool]:
    """Which pieces came back."""
    optim = runner.optim_wrapper
    assert optim is not None
    state = optim.plain_values()["scaler"]
    ema, stopping, best = (hook(runner, kind).state_dict() for kind in (EMAHook, EarlyStoppingHook, CheckpointHook))
    pieces = {
        "optimizer": {bool(optim.optimizer.state), state["scale"] > 8.0},
        "param_scheduler": {runner.param_schedulers[0].last_step == 10, optim.param_groups[0]["lr"] > 0.011},
        "random": {float(torch.rand(())) == DRAWN[0], float(np.random.rand()) == DRAWN[1]},
        "hooks": {ema["updates"] == 10, stopping["best_score"] > 0, "accuracy" in best["best"]},
        "logs": {len(runner.message_hub.history("train/loss")) == 10},
        "data": {runner.seed == 1, runner.train_loop.inner == 3},
    }
    for name, facts in pieces.items():
        assert len(facts) == 1, f"{name} came back in part: {facts}"
    return {name: facts.pop() for name, facts in pieces.items()}


DRAWN: list[float] = []


class Draw(Hook):
    """What is drawn after the checkpoint."""

    priority = "LOWEST"

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter + 1 == 10:
            runner.save_checkpoint(runner.work_dir, "iter_10")
            DRAWN[:] = [float(torch.rand(())), float(np.random.rand())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    runner = make_runner(
        tmp_path / "run", **CONFIG, **validation(), default_hooks=DEFAULT_HOOKS, custom_hooks=[*hooks(), Draw()]
    )
    runner.train()
    return tmp_path / "run" / "iter_10"


def test_everything_comes_back(tmp_path: Path, path: Path) -> None:
    runner = resumed(tmp_path, path)
    assert found(runner) == dict.fromkeys(PIECES, True)
    assert (runner.epoch, runner.iter) == (1, 10)


OPTIONS = {"optimizer": "resume_optimizer", "param_scheduler": "resume_param_scheduler"}
KEYS = {
    "optimizer": ("optim.wrapper", "optim.group.net.0.weight.lr"),
    "param_scheduler": ("scheduler",),
    "random": ("rng", "processes"),
    "hooks": ("hooks", "hook.EMAHook/updates", "hook.EarlyStoppingHook/wait_count", "hook.CheckpointHook/best"),
    "logs": ("message_hub",),
    "data": ("data",),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_that_is_left_out_is_not_even_read(tmp_path: Path, path: Path, name: str) -> None:
    change_values(path, lambda values: [values.update({key: "nonsense"}) for key in KEYS[name]])
    with pytest.raises(CheckpointError):
        resumed(tmp_path / "whole", path)
    runner = resumed(tmp_path / "rest", path, **{OPTIONS.get(name, name): False})
    assert found(runner) == {piece: piece != name for piece in PIECES}
    assert (runner.epoch, runner.iter) == (1, 10)
    runner.train()
    assert runner.epoch == 3


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_that_is_left_out_may_be_missing(tmp_path: Path, path: Path, name: str) -> None:
    change_values(path, lambda values: [values.pop(key) for key in KEYS[name]])
    with refuses(
        CheckpointError,
        begins=f"{path}: cannot be resumed, it has no {KEYS[name][0]}; resume=dict({name}=False) leaves",
    ):
        resumed(tmp_path / "whole", path)
    options = dict(path=str(path), **{name: False})
    runner = make_runner(tmp_path / "rest", **CONFIG, **validation(), custom_hooks=hooks(), resume=options)
    runner.train()
    assert runner.epoch == 3


def test_all_missing_pieces_are_named_at_once(tmp_path: Path, path: Path) -> None:
    change_values(path, lambda values: [values.pop(key) for key in ("optim.wrapper", "scheduler")])
    with refuses(
        CheckpointError,
        exactly=f"{path}: cannot be resumed, it has no optim.wrapper and no scheduler; resume=dict(optimizer=False, "
        "param_scheduler=False) leaves them out, the optimizer's state then starts afresh, schedules then start afresh",
    ):
        resumed(tmp_path / "whole", path)
    change_values(path, lambda values: values.pop("loop"))
    with pytest.raises(CheckpointError, match=r"no loop and no optim\.wrapper and no scheduler; load_from"):
        resumed(tmp_path / "whole", path)


@pytest.mark.parametrize(
    ("key", "name"), [(key, name) for name in PIECES for key in KEYS[name] if key not in ("processes", "hooks")]
)
def test_a_damaged_piece_is_named_with_how_to_leave_it_out(tmp_path: Path, path: Path, key: str, name: str) -> None:
    change_values(path, lambda values: values.update({key: ["nonsense"]}))
    with refuses(CheckpointError, f"; resume=dict({name}=False) leaves it out, "):
        resumed(tmp_path / "rest", path)


def test_a_missing_tensor_of_a_hook_is_named(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Checkpoint.open_together

    def without(where: Path, *, verify: bool = True) -> Checkpoint:
        checkpoint = opened(where, verify=verify)
        del checkpoint.entries["hook.EMAHook/averaged.net.0.bias"]
        return checkpoint

    monkeypatch.setattr(Checkpoint, "open_together", without)
    with pytest.raises(CheckpointError, match=r"has no hook.EMAHook/averaged.net.0.bias; resume=dict\(hooks=False\)"):
        resumed(tmp_path / "rest", path)


SCHEDULES: dict[str, Any] = {
    "warm-up that is over": dict(type="LinearLR", by_epoch=False, start_factor=0.1, end=4),
    "cosine": dict(type="CosineAnnealingLR", by_epoch=False, T_max=30),
    "step that was made": dict(type="MultiStepLR", by_epoch=False, milestones=[5]),
    "in epochs and in updates": [
        dict(type="StepLR", step_size=1, gamma=0.5),
        dict(type="LinearLR", by_epoch=False, start_factor=0.1, end=15),
    ],
    "momentum": [
        dict(type="LinearMomentum", by_epoch=False, start_factor=0.5, end=15),
        dict(type="ExponentialLR", by_epoch=False, gamma=0.9),
    ],
    "torch's": dict(type="CyclicLR", by_epoch=False, base_lr=0.05, max_lr=0.4, step_size_up=7, cycle_momentum=False),
    "one cycle": dict(type="OneCycleLR", by_epoch=False, eta_max=0.4, total_steps=40),
}


class Rates(Hook):
    """The learning rate and the momentum of every group, update by update."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[float, float]]] = {}

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        assert runner.optim_wrapper is not None
        self.seen[runner.iter] = [(group["lr"], group["momentum"]) for group in runner.optim_wrapper.param_groups]


def rates_of(folder: Path, schedule: Any, *, lr: float = 0.1, groups: Any = None, **options: Any) -> Rates:
    rates = Rates()
    optim_wrapper = dict(optimizer=dict(SGD, lr=lr), **({"paramwise_cfg": groups} if groups else {}))
    runner = make_runner(
        folder, optim_wrapper=optim_wrapper, param_scheduler=schedule, custom_hooks=[rates, SaveEvery({10})]
    )
    if options:
        runner.resume(**options)
    runner.train()
    return rates


def close(found: Any, expected: Any) -> bool:
    return torch.allclose(torch.tensor(list(found)), torch.tensor(list(expected)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_without_the_state_of_the_optimizer(tmp_path: Path, schedule: str) -> None:
    whole = rates_of(tmp_path / "whole", SCHEDULES[schedule])
    rest = rates_of(
        tmp_path / "rest", SCHEDULES[schedule], filename=tmp_path / "whole" / "iter_10", resume_optimizer=False
    )
    assert rest.seen == {at: values for at, values in whole.seen.items() if at >= 10}


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULES["cosine"],
        dict(type="CosineAnnealingLR", by_epoch=False, T_max=9, end=9, eta_min=0.05),  # is over, and has left eta_min
        dict(type="CosineRestartLR", by_epoch=False, periods=[6, 15], restart_weights=[1.0, 0.5], eta_min=0.05),
    ],
)
@pytest.mark.parametrize("lr, groups", [(0.3, dict(bias_lr_mult=2.0)), (0.1, None)], ids=["rate", "groups"])
def test_a_schedule_goes_on_for_an_optimizer_that_starts_elsewhere(
    tmp_path: Path, schedule: dict[str, Any], lr: float, groups: Any
) -> None:
    rates_of(tmp_path / "whole", schedule, groups=dict(bias_lr_mult=2.0))
    path, without = tmp_path / "whole" / "iter_10", dict(resume_optimizer=False)
    rest = rates_of(tmp_path / "rest", schedule, groups=groups, lr=lr, filename=path, **without)
    whole = rates_of(tmp_path / "other", schedule, groups=groups, lr=lr)
    assert all(close(rest.seen[at], whole.seen[at]) for at in range(10, 21))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_starts_afresh_beside_the_state_of_the_optimizer(tmp_path: Path, schedule: str) -> None:
    rates_of(tmp_path / "whole", SCHEDULES[schedule])
    path = tmp_path / "whole" / "iter_10"
    rest = rates_of(tmp_path / "rest", SCHEDULES[schedule], filename=path, resume_param_scheduler=False)
    neither = dict(resume_param_scheduler=False, resume_optimizer=False)
    assert rest.seen == rates_of(tmp_path / "neither", SCHEDULES[schedule], filename=path, **neither).seen


def test_what_a_schedule_that_starts_afresh_began_with_is_its_own(tmp_path: Path) -> None:
    rates_of(tmp_path / "whole", SCHEDULES["cosine"])
    runner = make_runner(
        tmp_path / "rest", optim_wrapper=dict(optimizer=dict(SGD, lr=0.3)), param_scheduler=SCHEDULES["cosine"]
    )
    runner.resume(tmp_path / "whole" / "iter_10", resume_param_scheduler=False)
    assert runner.optim_wrapper is not None
    assert runner.optim_wrapper.param_groups[0]["initial_lr"] == 0.3


@pytest.mark.parametrize("schedule", [None, SCHEDULES["cosine"]], ids=["constant", "cosine"])
def test_settings_of_the_configuration_that_do_not_count_are_told(
    tmp_path: Path, schedule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def resumed_with(**changes: Any) -> list[str]:
        caplog.clear()
        optim_wrapper = dict(optimizer=dict(SGD, **changes))
        runner = make_runner(
            tmp_path / "rest", optim_wrapper=optim_wrapper, param_scheduler=schedule, log_level="WARNING"
        )
        runner.logger.addHandler(caplog.handler)
        runner.resume(tmp_path / "whole" / "iter_10")
        runner.logger.removeHandler(caplog.handler)
        return [record.message for record in caplog.records if "settings" in record.message]

    rates_of(tmp_path / "whole", schedule)
    assert resumed_with() == []
    (line,) = resumed_with(lr=0.2, weight_decay=0.01)
    assert all(part in line for part in ("lr 0.1 instead of 0.2", "weight_decay 0 instead of 0.01"))


class Notes(Hook):
    """Its state has keys in which there is a slash, as in the path of a file or the name of a metric."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_keys_of_hooks_may_have_slashes(tmp_path: Path) -> None:
    notes, again = Notes(), Notes()
    notes.state = {
        "val/loss": 1.5,
        "val": {"loss": torch.ones(2)},
        "a/b": {"c/d": torch.zeros(3), "e~1f/~0": 1},
        "plain": {"i/j": 2},
    }
    runner = make_runner(tmp_path, custom_hooks=[notes])
    runner.train()
    path = runner.save_checkpoint(tmp_path, "a")
    make_runner(tmp_path, custom_hooks=[again]).resume(path)
    torch.testing.assert_close(again.state, notes.state, rtol=0, atol=0)


class Forgets(Hook):
    """Saves a number, and does not take it."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}


def test_a_hook_that_does_not_take_its_state_is_told(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, custom_hooks=[Forgets()])
    runner.train()
    path = runner.save_checkpoint(tmp_path, "a")
    with log_lines() as lines:
        make_runner(tmp_path, custom_hooks=[Forgets()], log_level="WARNING").resume(path)
    assert lines == ["Forgets starts afresh: its state_dict() has count, and it defines no load_state_dict(state)"]


class Best(Notes):
    """Keeps the best weights, which are the model's own before there are any, and a number whose dtype changes."""

    def before_run(self, runner: Any) -> None:
        self.state = {"weights": runner.strategy.module.state_dict(), "loss": torch.tensor(0), "seen": torch.zeros(0)}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter == 1:
            weights = {name: tensor.clone() for name, tensor in runner.strategy.module.state_dict().items()}
            self.state = {"weights": weights, "loss": outputs["loss"].detach(), "seen": torch.ones(3)}


class Counting(Hook):
    """Has a state, and relies on its being filled."""

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


def test_what_a_hook_has_before_it_is_loaded_is_not_written_to(tmp_path: Path) -> None:
    """It may be the model's own, and need not have the dtype or shape that it had later."""
    best, again, counting = Best(), Best(), Counting()
    runner = make_runner(tmp_path, custom_hooks=[best, Counting()])
    runner.train()
    resumed = make_runner(tmp_path, custom_hooks=[again, counting])
    resumed.resume(runner.save_checkpoint(tmp_path, "a"))
    assert differences(whole_state(resumed), whole_state(runner)) == []
    torch.testing.assert_close(again.state, best.state, rtol=0, atol=0)
    assert counting.count.tolist() == [21]


def test_keys_of_hooks_have_to_be_text(tmp_path: Path) -> None:
    notes = Notes()
    notes.state = {"by_layer": {3: torch.ones(2)}}
    says = r"hook.Notes/by_layer\[3\]: cannot be saved, keys have to be text, not int"
    with pytest.raises(CheckpointError, match=says):
        make_runner(tmp_path, custom_hooks=[notes, SaveEvery({5})]).train()


def test_tensors_that_are_left_out_are_not_read(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    load = Checkpoint.load

    def noted(self: Checkpoint, template: dict[str, Tensor]) -> None:
        read.update(template)
        load(self, template)

    monkeypatch.setattr(Checkpoint, "load", noted)
    resumed(tmp_path / "rest", path, resume_optimizer=False, hooks=False)
    assert read == {f"model.net.{i}.{kind}" for i in (0, 3) for kind in ("weight", "bias")}
    resumed(tmp_path / "whole", path)
    assert {key.split(".")[0] for key in read} == {"model", "optim", "hook"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(optimiser=False), 'resume.optimiser: unknown key, did you mean "optimizer"?'),
        (dict(optimizer=0), "resume.optimizer: 0 is not allowed, give True or False"),
        (dict(path="nowhere"), 'resume: "nowhere" does not exist'),
        (dict(path=3), "resume.path: 3 is not allowed"),
    ],
    ids=str,
)
def test_wrong_options(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    with refuses(ConfigError, says):
        make_runner(tmp_path, resume=given)


def test_a_mistyped_keyword_of_resume(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ConfigError, match='hook: unknown key, did you mean "hooks"'):
        resumed(tmp_path / "rest", path, hook=False)


@pytest.mark.parametrize("given", [dict(), dict(path=None), dict(data=True), True], ids=str)
def test_without_a_path_the_newest_is_resumed(tmp_path: Path, given: Any) -> None:
    changes: dict[str, Any] = dict(default_hooks=dict(checkpoint=dict(interval=1)), train_cfg=dict(max_epochs=1))
    assert make_runner(tmp_path, **changes, resume=given).train() is not None
    runner = make_runner(tmp_path, **{**changes, "train_cfg": dict(max_epochs=2)}, resume=given)
    runner.train()
    assert runner.train_loop.start_iter == 7


# Parameters by their names


class Layers(nn.Module):
    """Two layers in any order."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 2)}
        for name in order or made:
            self.add_module(name, made[name])

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.get_submodule("second")(self.get_submodule("first")(x).tanh())
        return {"loss": functional.cross_entropy(logits, y)} if mode == "loss" else logits


def grouped(*keys: tuple[str, float]) -> dict[str, Any]:
    custom = {key: dict(lr_mult=factor) for key, factor in keys}
    return dict(optimizer=dict(type="Adam", lr=0.01), paramwise_cfg=dict(custom_keys=custom))


def by_name(runner: FlexibleRunner) -> dict[str, Any]:
    return {key: value for key, value in whole_state(runner).items() if key.startswith(("optim.", "model."))}


@pytest.mark.parametrize(
    "changes",
    [
        dict(model=lambda: Layers("second", "first")),
        # The rates in force are the checkpoint's, whatever the configuration says now.
        dict(optim_wrapper=grouped(("first.weight", 2.0), ("first.bias", 3.0), ("second", 1.0))),
    ],
    ids=["reordered", "regrouped"],
)
def test_parameters_keep_their_moments_and_settings_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    schedule = dict(type="CosineAnnealingLR", T_max=21, by_epoch=False)
    config: dict[str, Any] = dict(
        model=Layers, optim_wrapper=grouped(("first", 0.5), ("second", 1.0)), param_scheduler=schedule
    )
    whole = make_runner(tmp_path / "whole", **config, custom_hooks=[SaveEvery({9})])
    whole.train()
    rest = make_runner(tmp_path / "rest", **{**config, **changes}, resume=str(tmp_path / "whole" / "iter_9"))
    rest.train()
    assert not differences(by_name(rest), by_name(whole))


def test_one_group_cannot_hold_two_rates(tmp_path: Path) -> None:
    config: dict[str, Any] = dict(model=Layers, optim_wrapper=grouped(("first", 0.5), ("second", 1.0)))
    make_runner(tmp_path, **config, custom_hooks=[SaveEvery({9})]).train()
    config["optim_wrapper"] = dict(optimizer=dict(type="Adam", lr=0.01))
    with refuses(
        CheckpointError, "first.weight has lr=0.005, and shares a group now with parameters that have 0.01; give"
    ):
        make_runner(tmp_path / "rest", **config, resume=str(tmp_path / "iter_9")).train()


# What is a strategy's own


class Remembers(SingleDeviceStrategy):
    """Has a tensor and a plain value of its own."""

    tensor, value = "optim.own.rest", "optim.own.sent"

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        self.rest, self.sent = torch.zeros(3), 0
        return super().setup(model, optim)

    def state(self) -> dict[str, Any]:
        return super().state() | {self.tensor: self.rest, self.value: self.sent}

    def template(self, saved: Any) -> dict[str, Tensor]:
        return super().template(saved) | ({self.tensor: self.rest} if self.tensor in saved else {})

    def load(self, state: Any) -> None:
        super().load(state)
        self.sent = state.get(self.value, 0)


def test_what_is_a_strategys_own_belongs_to_the_optimizer(tmp_path: Path) -> None:
    def remembered(**options: Any) -> tuple[float, int]:
        runner = make_runner(tmp_path / "again", strategy=Remembers())
        runner.resume(tmp_path / "whole" / "iter_3", **options)
        return float(runner.strategy.rest.sum()), runner.strategy.sent

    runner = make_runner(tmp_path / "whole", strategy=Remembers())
    runner.train()
    runner.strategy.rest.fill_(2.0)
    runner.strategy.sent = 4
    runner.save_checkpoint(tmp_path / "whole", "iter_3")
    runner.save_checkpoint(tmp_path / "whole", "weights", save_optimizer=False)
    assert not {Remembers.tensor, Remembers.value} & Checkpoint.open(tmp_path / "whole" / "weights").saved.keys()
    assert remembered() == (6.0, 4)
    assert remembered(resume_optimizer=False) == (0.0, 0)
    another = make_runner(tmp_path / "another", log_level="WARNING")
    with log_lines() as lines:
        runner.resume(tmp_path / "whole" / "iter_3")
        another.resume(tmp_path / "whole" / "iter_3", resume_optimizer=False)
        assert not lines
        another.resume(tmp_path / "whole" / "iter_3")
    assert lines == [
        f"{tmp_path}/whole/iter_3: SingleDeviceStrategy does not take over optim.own.rest, which the strategy that saved it "
        "had of its own"
    ]


def test_a_name_that_no_strategy_may_use(tmp_path: Path) -> None:
    class Strays(Remembers):
        tensor = "rest"

    runner = make_runner(tmp_path, strategy=Strays())
    runner.train()
    says = 'Strays.state(): "rest" is no key for a strategy, name what is its own "optim.own.rest"'
    with refuses(StrategyError, exactly=says):
        runner.save_checkpoint(tmp_path, "saved")


@pytest.mark.parametrize(
    "at, frozen, says",
    [
        (2, False, "is trained now, and was frozen"),  # trained on without a word
        (2, True, "is frozen now, and was trained"),
        (None, False, ""),
    ],
)
def test_what_a_hook_has_frozen_in_the_middle_is_told(tmp_path: Path, at: int | None, frozen: bool, says: str) -> None:
    """A checkpoint keeps no requires_grad; a hook that sets it whenever an epoch begins does so in a resumed run too."""

    def freeze(runner: FlexibleRunner, freezes: bool = True) -> None:
        runner.strategy.module.net[0].requires_grad_(not freezes)  # type: ignore[index, union-attr]

    def after(runner: FlexibleRunner, *_: Any, **__: Any) -> None:
        if runner.iter == at:
            freeze(runner, not frozen)

    hooks = [At("before_train", freeze)] if frozen else []
    hooks += [At("before_train_epoch", freeze)] if at is None else [At("after_train_iter", after)]
    make_runner(tmp_path, custom_hooks=[*hooks, SaveEvery({5})]).train()
    runner = make_runner(tmp_path, custom_hooks=hooks, resume=str(tmp_path / "iter_5"), log_level="WARNING")
    with log_lines() as said:
        runner.train()
    told = [line for line in said if "requires_grad" in line]
    assert len(told) == bool(says)
    assert all(f"net.0.bias (2 parameters) {says} when the checkpoint was saved" in line for line in told)
