"""A run resumed with other schedules goes on at its position with the values that the new schedules alone have there."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import CheckpointError, ConfigError, FlexibleRunner
from flextrain.optim.schedulers import ExponentialLR, ParamScheduler, build_param_schedulers
from flextrain.optim.schedulers.replay import GroupValues, adopt, changes, replay, settings
from flextrain.runner.hooks import Hook

from .training import At, Net, Samples, SaveEvery, change_values, log_lines, make_runner, validation

pytestmark = pytest.mark.usefixtures("quick")

WARM_UP: dict[str, Any] = dict(type="LinearLR", by_epoch=False, start_factor=0.1, end=3)
COSINE: dict[str, Any] = dict(type="CosineAnnealingLR", by_epoch=False, begin=3, T_max=17, eta_min=0.001)
POLY: dict[str, Any] = dict(type="PolyLR", by_epoch=False, begin=3, end=21, eta_min=0.002)
STEP: dict[str, Any] = dict(type="StepLR", step_size=1, gamma=0.5)
PLATEAU: dict[str, Any] = dict(type="ReduceOnPlateauLR", monitor="accuracy", rule="greater", patience=0)
TORCH = "torch.optim.lr_scheduler:"
SECOND_CYCLE: dict[str, Any] = dict(type="OneCycleLR", eta_max=0.1, by_epoch=False, begin=12, end=21)
CASES: dict[str, tuple[Any, Any]] = {
    "longer": ([WARM_UP, COSINE], [WARM_UP, COSINE | dict(T_max=40)]),
    "higher-end": (COSINE, COSINE | dict(eta_min=0.05)),
    "other-class": ([WARM_UP, COSINE], [WARM_UP, POLY]),
    "two-at-a-time": ([WARM_UP, COSINE], [WARM_UP | dict(end=15), WARM_UP | dict(end=18)]),
    "shorter-warm-up": ([WARM_UP | dict(end=15)], [WARM_UP]),
    "added": (STEP, [WARM_UP, COSINE]),
    "first": (None, COSINE),
    "fewer": ([WARM_UP, STEP], STEP),
    "by-epoch": ([WARM_UP, STEP], [WARM_UP, STEP | dict(gamma=0.7)]),
    "later": (POLY, POLY | dict(begin=15)),
    "constant": (dict(type="ConstantLR", factor=0.5, end=2), dict(type="ConstantLR", factor=0.25, end=3)),
    "restarts": (COSINE, dict(type="CosineRestartLR", periods=[6, 30], restart_weights=[1.0, 0.5], by_epoch=False)),
    "one-cycle": (dict(type="OneCycleLR", eta_max=0.3, by_epoch=False), dict(type="OneCycleLR", eta_max=0.6, by_epoch=False)),
    "first-of-two-cycles": ([dict(type="OneCycleLR", eta_max=0.3, by_epoch=False, end=12), SECOND_CYCLE],
                            [dict(type="OneCycleLR", eta_max=0.6, by_epoch=False, end=12), SECOND_CYCLE]),
    "second-of-two-cycles": ([dict(type="OneCycleLR", eta_max=0.3, by_epoch=False, end=12), SECOND_CYCLE],
                             [dict(type="OneCycleLR", eta_max=0.3, by_epoch=False, end=12), SECOND_CYCLE | dict(eta_max=0.2)]),
    "warm-up-before-a-cycle": ([WARM_UP | dict(start_factor=0.0, end=15), SECOND_CYCLE | dict(begin=15)],
                               [WARM_UP | dict(start_factor=0.0, end=14), SECOND_CYCLE | dict(begin=15)]),
    "from-one-cycle": (dict(type="OneCycleLR", eta_max=0.3, by_epoch=False), COSINE),
    "momentum": (
        [COSINE, dict(type="LinearMomentum", by_epoch=False, end=9)],
        [COSINE, dict(type="CosineAnnealingMomentum", by_epoch=False, T_max=30)],
    ),
    "momentum-left-out": ([COSINE, dict(type="LinearMomentum", by_epoch=False, end=30)], COSINE),
    "multi-step": (dict(type="MultiStepLR", milestones=[1]), dict(type="MultiStepLR", milestones=[1, 1], gamma=0.5)),
    "function": (
        dict(type="LambdaLR", lr_lambda=lambda at: 1 / (at + 1), by_epoch=False),
        dict(type="LambdaLR", lr_lambda=lambda at: 0.5 / (at + 1), by_epoch=False),
    ),
    "torch": (COSINE, dict(type=TORCH + "CosineAnnealingLR", T_max=30, by_epoch=False)),
    "torch-cycle": (COSINE, dict(type="CyclicLR", base_lr=0.01, max_lr=0.2, step_size_up=4, by_epoch=False)),
    "torch-later": (dict(type=TORCH + "ExponentialLR", gamma=0.9, begin=2, by_epoch=False),
                    dict(type=TORCH + "ExponentialLR", gamma=0.8, begin=4, by_epoch=False)),
}  # fmt: skip


class Values(Hook):
    """The learning rate and momentum of every group at each update."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        assert runner.optim_wrapper is not None
        self.seen[runner.iter] = [
            (group["lr"], group["momentum"]) for w in runner.optim_wrapper.wrappers.values() for group in w.param_groups
        ]


def values_of(
    folder: Path,
    schedule: Any,
    resume: Any = False,
    *,
    lr: float = 0.1,
    warnings: list[str] | None = None,
    **changes: Any,
) -> dict[int, Any]:
    """Train 21 updates in 3 epochs and save at the 10th; the groups have three learning rates."""
    values = Values()
    optimizer = dict(type="SGD", lr=lr, momentum=0.9)
    runner = make_runner(
        folder,
        **{
            "optim_wrapper": dict(optimizer=optimizer, paramwise_cfg=dict(bias_lr_mult=2.0)),
            "param_scheduler": schedule,
            "custom_hooks": [values, SaveEvery({10})],
            "resume": resume,
            "log_level": "WARNING",
            **changes,
        },
    )
    with log_lines() as said:
        runner.train()
    if warnings is not None:
        warnings += [line for line in said if "param_scheduler" in line and "was " in line]
    return values.seen


@pytest.mark.parametrize(
    "case, optimizer",
    [*((case, True) for case in CASES), *((case, False) for case in ("longer", "momentum", "one-cycle"))],
)
def test_the_new_schedule_goes_on_at_the_same_position(tmp_path: Path, case: str, optimizer: bool) -> None:
    before, after = CASES[case]
    values_of(tmp_path / "run", before)
    lines: list[str] = []
    resume = dict(path=tmp_path / "run" / "iter_10", optimizer=optimizer)
    rest = values_of(tmp_path / "rest", after, resume, warnings=lines)
    alone = values_of(tmp_path / "alone", after)
    assert rest == {at: values for at, values in alone.items() if at >= 10}
    (line,) = lines
    assert "at iteration 10 is" in line


def test_what_has_changed_is_told_with_both_values(tmp_path: Path) -> None:
    values_of(tmp_path / "run", [WARM_UP, COSINE])
    lines: list[str] = []
    path = str(tmp_path / "run" / "iter_10")
    values_of(tmp_path / "rest", [WARM_UP, COSINE | dict(T_max=40)], path, warnings=lines)
    assert lines == [
        "param_scheduler[1].T_max: was 17, is 40; the learning rate at iteration 10 is 0.09271 by the new schedule (0.06405 in "
        "the checkpoint)"
    ]


CYCLE: dict[str, Any] = dict(type="CyclicLR", base_lr=0.01, max_lr=0.2, step_size_up=4, by_epoch=False)
MOMENTA: dict[str, Any] = {
    "cycle": CYCLE,
    "one-cycle": dict(type=TORCH + "OneCycleLR", max_lr=0.2, total_steps=25, by_epoch=False),
    "later-cycle": CYCLE | dict(begin=4),
    "own": dict(type="LinearMomentum", by_epoch=False, end=30),
}


@pytest.mark.parametrize(
    "optimizer", [dict(type="SGD", lr=0.1, momentum=0.9), dict(type="AdamW", lr=0.1)], ids=["sgd", "adamw"]
)
@pytest.mark.parametrize("case", MOMENTA)
def test_a_momentum_that_a_schedule_sets_is_no_difference(tmp_path: Path, case: str, optimizer: dict[str, Any]) -> None:
    def said(folder: str, given: dict[str, Any], resume: Any = False) -> list[str]:
        runner = make_runner(
            tmp_path / folder,
            optim_wrapper=dict(optimizer=given),
            param_scheduler=MOMENTA[case],
            custom_hooks=[SaveEvery({10})],
            resume=resume,
            log_level="WARNING",
        )
        with log_lines() as lines:
            runner.train()
        return [line for line in lines if "continues with the checkpoint's settings" in line]

    said("run", optimizer)
    path = tmp_path / "run" / "iter_10"
    assert said("rest", optimizer, path) == []
    other = dict(weight_decay=0.3) if optimizer["type"] == "SGD" else dict(betas=(0.9, 0.9))
    (line,) = said("other", optimizer | other, path)
    assert "weight_decay 0 instead of 0.3" in line if optimizer["type"] == "SGD" else ", 0.999) instead of (" in line


@pytest.mark.parametrize("case", ["cycle", "warm-up", "later-cycle"])
def test_what_torchs_cycles_set_without_the_optimizer_or_anew(tmp_path: Path, case: str) -> None:
    """They set the momentum and the initial learning rates, which are the optimizer's otherwise."""
    schedule = (MOMENTA | {"warm-up": MOMENTA["one-cycle"] | dict(total_steps=45)})[case]
    whole, saved = values_of(tmp_path / "run", schedule), tmp_path / "run" / "iter_10"
    rest = values_of(tmp_path / "rest", schedule, dict(path=saved, optimizer=False))
    assert rest == {at: values for at, values in whole.items() if at >= 10}
    anew = values_of(tmp_path / "anew", schedule, dict(path=saved, param_scheduler=False))
    assert list(anew.values()) == [whole[at] for at in range(11)]


@pytest.mark.parametrize("case", ["longer", "by-epoch", "one-cycle", "function", "torch"])
def test_an_equal_schedule_goes_on_as_it_was_left(tmp_path: Path, case: str) -> None:
    """Also where a hook has changed the learning rate: the checkpoint's value is the one to go on from."""

    class Halve(Hook):
        def after_train_iter(
            self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            if runner.iter == 5:
                for group in runner.optim_wrapper.param_groups:  # type: ignore[union-attr]
                    group["lr"] /= 2

    _, schedule = CASES[case]
    values, lines = Values(), []  # type: ignore[var-annotated]
    values_of(tmp_path / "run", schedule, custom_hooks=[values, Halve(), SaveEvery({10})])
    rest = values_of(tmp_path / "rest", schedule, str(tmp_path / "run" / "iter_10"), warnings=lines)
    assert rest == {at: seen for at, seen in values.seen.items() if at >= 10}
    assert lines == []


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "first",
    [
        dict(type="OneCycleLR", eta_max=0.3),
        dict(type="CosineAnnealingLR", eta_min_ratio=0.1),
        dict(type="LambdaLR", lr_lambda=lambda at: 1 / (at + 1)),
    ],
    ids=lambda first: str(first["type"]),
)
def test_a_schedule_before_a_cycle_goes_on_from_its_own_start(
    tmp_path: Path, first: dict[str, Any], groups: int
) -> None:
    """The groups have the initial rate of the cycle, from which the schedule before it does not start."""
    schedule = [first | dict(by_epoch=False, end=12), SECOND_CYCLE]
    wrapper = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.1))
    whole = values_of(tmp_path / "run", schedule, optim_wrapper=wrapper)
    divided = wrapper | (dict(paramwise_cfg=dict(bias_decay_mult=0.5)) if groups == 2 else {})
    rest = values_of(tmp_path / "rest", schedule, str(tmp_path / "run" / "iter_10"), optim_wrapper=divided)
    for at in range(10, 21):
        assert rest[at] == [pytest.approx(whole[at][0], rel=1e-12)] * groups


@pytest.mark.parametrize("point", ["before_train", "after_train_iter", "before_train_epoch"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_schedule_that_a_hook_adds_is_stepped(tmp_path: Path, point: str, by_name: bool) -> None:
    """As in MMEngine; one that was added after the start of training stayed where it was."""

    def add(runner: FlexibleRunner, *_: Any, **__: Any) -> None:
        schedulers: Any = runner.param_schedulers["net"] if by_name else runner.param_schedulers
        if runner.iter in (0, 7) and len(schedulers) < 2:
            schedulers.append(ExponentialLR(schedulers[0].optimizer, gamma=0.5, by_epoch=False))

    wrapper: Any = dict(optimizer=dict(type="SGD", lr=0.1))
    schedule: Any = dict(type="StepLR", step_size=100)
    values = Values()
    runner = make_runner(
        tmp_path,
        model=Several if by_name else Net,
        optim_wrapper=dict(net=wrapper) if by_name else wrapper,
        param_scheduler=dict(net=schedule) if by_name else schedule,
        custom_hooks=[values, At(point, add)],
    )
    runner.train()
    assert [values.seen[at][0][0] for at in range(4)] == [0.1, 0.05, 0.025, 0.0125]


def test_a_schedule_that_a_hook_adds_may_be_the_first_one_and_of_the_torch_optimizer(tmp_path: Path) -> None:
    def add(runner: FlexibleRunner, *_: Any, **__: Any) -> None:
        if runner.iter == 1:
            inner = runner.optim_wrapper.optimizer  # type: ignore[union-attr]
            runner.param_schedulers.append(ExponentialLR(inner, gamma=0.5, by_epoch=False))

    values = Values()
    runner = make_runner(
        tmp_path,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[values, At("after_train_iter", add)],
    )
    runner.train()
    assert [values.seen[at][0][0] for at in range(4)] == [0.1, 0.1, 0.05, 0.025]


class Several(Net):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        losses = self(**data, mode="loss")
        optim_wrapper["net"].update_params(losses["loss"])
        return losses  # type: ignore[no-any-return]


def test_a_group_that_a_hook_adds_has_no_schedule(tmp_path: Path) -> None:
    def add(runner: FlexibleRunner, *_: Any, **__: Any) -> None:
        if runner.iter == 2:
            runner.optim_wrapper.optimizer.add_param_group(dict(params=[torch.zeros(1)]))  # type: ignore[union-attr]

    runner = make_runner(
        tmp_path,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        param_scheduler=STEP | dict(by_epoch=False),
        custom_hooks=[At("before_train_iter", add)],
    )
    with pytest.raises(
        ConfigError, match="StepLR: began with 1 parameter group, and the optimizer has 2 now; give all"
    ):
        runner.train()


def test_the_second_resume_finds_the_new_schedule(tmp_path: Path) -> None:
    new = [WARM_UP, COSINE | dict(T_max=40)]
    values_of(tmp_path / "run", [WARM_UP, COSINE])
    hooks = [SaveEvery({15})]
    values_of(tmp_path / "second", new, str(tmp_path / "run" / "iter_10"), custom_hooks=hooks)
    lines: list[str] = []
    rest = values_of(tmp_path / "third", new, str(tmp_path / "second" / "iter_15"), warnings=lines)
    alone = values_of(tmp_path / "alone", new)
    assert rest == {at: values for at, values in alone.items() if at >= 15}
    assert lines == []


def test_the_peak_is_the_checkpoints_unless_the_optimizer_begins_anew(tmp_path: Path) -> None:
    new, path = [WARM_UP, COSINE | dict(T_max=40)], tmp_path / "run" / "iter_10"
    values_of(tmp_path / "run", [WARM_UP, COSINE])
    kept = values_of(tmp_path / "kept", new, str(path), lr=0.3)
    alone = values_of(tmp_path / "alone", new)
    assert all(torch.allclose(torch.tensor(kept[at]), torch.tensor(alone[at]), rtol=1e-9) for at in range(10, 21))
    own = values_of(tmp_path / "own", new, dict(path=path, optimizer=False), lr=0.3)
    assert own == {at: v for at, v in values_of(tmp_path / "higher", new, lr=0.3).items() if at >= 10}


def test_the_moments_of_the_optimizer_stay(tmp_path: Path) -> None:
    values_of(tmp_path / "run", COSINE)
    runner = make_runner(tmp_path / "rest", optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9),
                         paramwise_cfg=dict(bias_lr_mult=2.0)), param_scheduler=POLY)  # fmt: skip
    runner.resume(tmp_path / "run" / "iter_10")
    assert runner.optim_wrapper is not None
    moments = [state["momentum_buffer"] for state in runner.optim_wrapper.optimizer.state.values()]  # type: ignore[union-attr]
    assert moments
    assert all(moment.abs().sum() > 0 for moment in moments)
    assert runner.param_schedulers[0]._global_step == 10


def test_schedules_that_depend_on_metrics(tmp_path: Path) -> None:
    val = validation()
    values_of(tmp_path / "run", PLATEAU, **val)
    path, lines = str(tmp_path / "run" / "iter_10"), []  # type: ignore[var-annotated]
    values_of(tmp_path / "rest", PLATEAU | dict(patience=3), path, warnings=lines, **val)
    assert lines == [
        "param_scheduler.patience: was 0, is 3; what has been reduced so far stays, because ReduceOnPlateauLR depends on metrics "
        "of the past"
    ]
    lines.clear()
    other = dict(custom_hooks=[At("before_train", lambda runner: bests.append(runner.param_schedulers[0].best))])
    bests: list[Any] = []
    values_of(tmp_path / "other", PLATEAU | dict(rule="less"), path, warnings=lines, **val, **other)
    values_of(tmp_path / "same", PLATEAU, path, **val, **other)
    assert bests[0] is None
    assert isinstance(bests[1], float)
    assert lines[0].endswith("of the past, and the best value of another metric is looked for anew")
    with pytest.raises(
        CheckpointError, match=r"has the schedules ReduceOnPlateauLR\(.*are not known, because .*False\) leaves"
    ):
        values_of(tmp_path / "more", [WARM_UP, PLATEAU], path, **val)
    rest = values_of(tmp_path / "without", COSINE, path)
    assert rest == {at: v for at, v in values_of(tmp_path / "alone", COSINE).items() if at >= 10}


def test_a_checkpoint_without_settings(tmp_path: Path) -> None:
    values_of(tmp_path / "run", COSINE)
    path, lines = tmp_path / "run" / "iter_10", []  # type: ignore[var-annotated]
    change_values(path, lambda values: values.pop("schedules"))
    rest = values_of(tmp_path / "rest", COSINE, str(path), warnings=lines)
    assert rest == {at: v for at, v in values_of(tmp_path / "alone", COSINE).items() if at >= 10}
    assert lines == []
    with pytest.raises(
        CheckpointError, match="and was written by an older version, without their settings; resume all"
    ):
        values_of(tmp_path / "more", [WARM_UP, COSINE], str(path))


@pytest.mark.parametrize(
    "schedule",
    [dict(type="CosineAnnealingLR", by_epoch=False), dict(type="LinearLR", convert_to_iter_based=True, end=3)],
    ids=str,
)
def test_a_schedule_made_from_epochs_keeps_its_place_in_them(tmp_path: Path, schedule: Any) -> None:
    """With batches twice as large an epoch has half of the iterations, and the schedule too."""
    data = dict(dataset=Samples(24), collate_fn="default_collate")
    batches = [dict(batch_size=size, **data) for size in (2, 4)]
    values_of(tmp_path / "run", schedule, train_dataloader=batches[0], custom_hooks=[SaveEvery({18})])
    lines: list[str] = []
    path = str(tmp_path / "run" / "iter_18")
    rest = values_of(tmp_path / "rest", schedule, path, train_dataloader=batches[1], warnings=lines)
    alone = values_of(tmp_path / "alone", schedule, train_dataloader=batches[1])
    assert list(rest.values()) == [alone[at] for at in range(9, 18)]
    assert "because an epoch has 6 iterations and had 12" in lines[0]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "one_cycle"])
def test_a_schedule_by_name_keeps_its_share_of_the_run(tmp_path: Path, name: str) -> None:
    """Also where a resumed run makes half as many updates of an epoch."""
    schedule = name if name == "one_cycle" else dict(type=name, warmup=0.2)
    data = dict(dataset=Samples(40), batch_size=2, collate_fn=dict(type="default_collate"))
    optim = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9))
    twice = dict(train_dataloader=data, optim_wrapper=dict(**optim, accumulative_counts=2))
    values_of(tmp_path / "run", schedule, train_dataloader=data, optim_wrapper=optim)
    again = values_of(tmp_path / "run", schedule, resume=True, train_dataloader=data, optim_wrapper=optim)
    alone = values_of(tmp_path / "alone", schedule, train_dataloader=data, optim_wrapper=optim)
    assert again == {update: values for update, values in alone.items() if update >= 10}
    resumed = list(values_of(tmp_path / "run", schedule, resume=True, **twice).values())
    anew = list(values_of(tmp_path / "twice", schedule, **twice).values())
    assert resumed == [[pytest.approx(group) for group in each] for each in anew[-len(resumed) :]]


def test_a_million_steps_take_seconds() -> None:
    groups = [dict(params=[nn.Parameter(torch.zeros(1))], lr=0.1 * 0.9**i) for i in range(3)]
    optimizer = torch.optim.SGD(groups)
    given = [dict(WARM_UP, end=2000), dict(COSINE, begin=2000, T_max=10**6)]
    schedulers = build_param_schedulers(given, optimizer, epoch_length=None, max_iters=10**6)
    values, began = GroupValues(optimizer.param_groups), time.process_time()
    replay(schedulers, values, iters=300_000, epochs=0, epoch_length=None)
    assert time.process_time() - began < 6
    adopt(schedulers, values, optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(
        0.001 + 0.099 * (1 + torch.cos(torch.tensor(0.298 * torch.pi))) / 2
    )


def test_settings_of_a_scheduler() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    class Own(ParamScheduler):
        def __init__(self, optimizer: Any, *, depth: tuple[int, ...] = (1, 2), **options: Any) -> None:
            self.depth = depth
            super().__init__(optimizer, "lr", **options)

        def _next(self, value: float, base: float) -> float:
            return value

    window = dict(param_name="lr", begin=0, end=10**9, by_epoch=True)
    assert settings(Own(optimizer)) == {"type": "Own", "depth": [1, 2], **window}
    assert changes(settings(Own(optimizer)), settings(Own(optimizer, depth=(3,)))) == {"depth": ([1, 2], [3])}
    (one,) = build_param_schedulers(dict(type="LambdaLR", lr_lambda=lambda at: at), optimizer, epoch_length=None)
    (other,) = build_param_schedulers(dict(type="LambdaLR", lr_lambda=lambda at: at + 1), optimizer, epoch_length=None)
    assert settings(one) == settings(one) != settings(other)


def test_several_optimizers(tmp_path: Path) -> None:
    def by_name(**schedules: Any) -> dict[str, Any]:
        sgd = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9))
        return dict(optim_wrapper=dict(first=sgd, second=sgd), model=Two, param_scheduler=schedules)

    values_of(tmp_path / "run", None, **by_name(first=COSINE, second=POLY))
    new, lines = by_name(first=COSINE, second=[WARM_UP, POLY]), []  # type: ignore[var-annotated]
    rest = values_of(tmp_path / "rest", None, str(tmp_path / "run" / "iter_10"), warnings=lines, **new)
    assert rest == {at: v for at, v in values_of(tmp_path / "alone", None, **new).items() if at >= 10}
    assert lines[0].startswith("param_scheduler.second: was PolyLR(")
    assert len(lines) == 1


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Any, y: Any = None, mode: str = "tensor") -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        optim_wrapper["first"].update_params(self.first(data["x"]).square().mean())
        loss = self.second(self.first(data["x"]).detach()).square().mean()
        optim_wrapper["second"].update_params(loss)
        return {"loss": loss}


@pytest.mark.parametrize("sampler", ["InfiniteSampler", "DefaultSampler"])
def test_another_number_of_samples_in_an_update_is_told(tmp_path: Path, sampler: str) -> None:
    def with_batches(size: int, length: int = 24, **more: Any) -> dict[str, Any]:
        data = dict(dataset=Samples(length), sampler=dict(type=sampler), collate_fn="default_collate", batch_size=size)
        return dict(train_dataloader=data, train_cfg=dict(by_epoch=False, max_iters=12), **more)

    values_of(tmp_path / "run", COSINE, **with_batches(8, custom_hooks=[SaveEvery({4})]))
    path = str(tmp_path / "run" / "iter_4")
    sgd = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), paramwise_cfg=dict(bias_lr_mult=2.0))
    runner = make_runner(
        tmp_path / "rest", optim_wrapper=sgd, param_scheduler=COSINE, resume=path, log_level="INFO", **with_batches(3)
    )
    with log_lines(logging.INFO) as found:
        runner.train()
    assert [line for line in found if "An update has" in line] == [
        "An update has 3 samples now, it had 8 (batch_size 8 -> 3): schedules and intervals by iteration go on at iteration 4, "
        "whose updates had the former size"
    ]
    assert not [line for line in found if "update is number" in line or "own count" in line]
    says = (
        "give the former data, these have no end of an epoch"
        if sampler == "InfiniteSampler"
        else "resume from the end of an epoch"
    )
    with pytest.raises(CheckpointError, match=f"num_samples=24, it is 30 now; {says} to change it; resume=dict"):
        values_of(tmp_path / "more", COSINE, path, **with_batches(8, 30))
