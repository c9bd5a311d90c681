"""build_param_schedulers: what a configuration may say, and what it hears when it is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flextrain.core.base.errors import CheckpointError, ConfigError
from flextrain.optim import schedulers as library
from flextrain.optim.schedulers import build_param_schedulers, check_param_schedulers


def sgd(num_groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(num_groups)], lr=0.1, momentum=0.9)


def build(cfgs: Any, **given: Any) -> list[library.ParamScheduler]:
    return build_param_schedulers(cfgs, given.pop("optimizer", None) or sgd(), **{"epoch_length": 10, **given})


def test_none_one_many_and_instances() -> None:
    made = library.StepLR(sgd(), 3)
    assert build(None) == []
    assert build(made) == [made]
    assert [type(s) for s in build([dict(type="LinearLR"), made, "ConstantMomentum", library.PolyLR])] == [
        library.LinearLR,
        library.StepLR,
        library.ConstantMomentum,
        library.PolyLR,
    ]


def test_the_optimizer_is_kept() -> None:
    optimizer = sgd()
    assert build(dict(type="StepLR", step_size=3), optimizer=optimizer)[0].optimizer is optimizer


@pytest.mark.parametrize(
    "cfg, end",
    [
        (dict(type="LinearLR"), 12),
        (dict(type="LinearLR", end=5), 5),
        (dict(type="LinearLR", by_epoch=False), 99),
        (dict(type="LinearLR", convert_to_iter_based=True), 120),
        (dict(type="LinearLR", end=3, convert_to_iter_based=True), 30),
    ],
)
def test_end_is_that_of_the_training_when_it_is_not_given(cfg: dict[str, Any], end: int) -> None:
    assert build(cfg, max_epochs=12, max_iters=99)[0].end == end


@pytest.mark.parametrize("length", [7, 10, 49, 120])
def test_a_converted_schedule_ends_with_a_training_by_iterations(length: int) -> None:
    """It had no end: PolyLR and LinearLR then stay where they begin."""
    for total in range(1, 120):
        cfg = dict(type="PolyLR", convert_to_iter_based=True)
        assert build(cfg, epoch_length=length, max_iters=total)[0].end == total
    with pytest.raises(ConfigError, match=r"param_scheduler.begin: 12 is not allowed, training ends at 9.9 and"):
        build(dict(type="PolyLR", begin=12, convert_to_iter_based=True), epoch_length=10, max_iters=99)


def test_end_is_open_when_the_training_has_none() -> None:
    assert build("LinearLR")[0].end == library.INF
    assert build(dict(type="LinearLR", convert_to_iter_based=True))[0].end == library.INF


def test_cosine_takes_the_length_of_its_window() -> None:
    cfg = dict(type="CosineAnnealingLR", begin=2, end=8)
    assert build(cfg)[0].T_max == 6  # type: ignore[attr-defined]
    assert build({**cfg, "convert_to_iter_based": True})[0].T_max == 60  # type: ignore[attr-defined]


def test_conversion_takes_parts_of_an_epoch() -> None:
    (scheduler,) = build(dict(type="LinearLR", begin=0.5, end=1.5, convert_to_iter_based=True))
    assert (scheduler.begin, scheduler.end, scheduler.by_epoch) == (5, 15, False)


def test_the_configuration_is_left_as_it_was() -> None:
    cfg = dict(type="MultiStepLR", milestones=[1, 2], convert_to_iter_based=True)
    build([cfg], max_epochs=3)
    assert cfg == dict(type="MultiStepLR", milestones=[1, 2], convert_to_iter_based=True)


WRONG: list[tuple[Any, str]] = [
    (dict(type="CosineAnealingLR"), 'param_scheduler.type: .*did you mean "CosineAnnealingLR"'),
    ([dict(type="LinearLR"), dict(type="StepLR", step_sizes=3)], r"param_scheduler\[1\].step_sizes: .*step_size"),
    (dict(type="StepLR"), "param_scheduler.step_size: missing"),
    (dict(type="StepLR", step_size="3"), "param_scheduler.step_size"),
    (dict(type="MultiStepLR", milestones=3), "param_scheduler.milestones"),
    (dict(type="LinearLR", by_epoch="yes"), "param_scheduler.by_epoch"),
    (dict(type="ReduceOnPlateauLR", rule="lesser"), "param_scheduler.rule"),
    (dict(type="OneCycleLR", eta_max=1.0, anneal_strategy="sin"), "param_scheduler.anneal_strategy"),
    (dict(type="LinearLR", optimizer=3), "param_scheduler.optimizer"),
    (dict(type="ConstantLR", param_name="lr"), "param_scheduler.param_name"),
    (dict(type=torch.nn.Linear), "param_scheduler.type: .* no parameter scheduler"),
    (dict(start_factor=0.1), r"param_scheduler: .* give dict\(type=...\)"),
    (3, r"param_scheduler: 3 is not allowed, give dict\(type=...\)"),
    (dict(type="LinearLR", by_epoch=False, convert_to_iter_based=True), "param_scheduler.convert_to_iter_based"),
    (dict(type="ReduceLROnPlateau"), "param_scheduler: .*ReduceOnPlateauLR"),
    (dict(type="SequentialLR"), "param_scheduler: .*list of schedulers"),
    (dict(type="LambdaLR", lr_lambda=abs, gama=2), "param_scheduler.gama: unknown key"),
    (dict(type="LambdaLR"), "param_scheduler.lr_lambda: missing"),
    ("cosin", 'param_scheduler.type: "cosin" is no known parameter scheduler, did you mean "cosine"'),
    (
        dict(type="cosine", warmup=1.5),
        "param_scheduler.warmup: 1.5 is not allowed, give a number of updates, or a share",
    ),
    ([dict(type="wsd", decay=-1)], r"param_scheduler\[0\].decay: -1 is not allowed"),
    (dict(type="linear", warmup_ratio=0.1), "param_scheduler.warmup_ratio: unknown key"),
    (dict(type="one_cycle", warmup=0.1), "param_scheduler.warmup: unknown key"),
    (dict(type="cosine", min_ratio=2.0), "param_scheduler.min_ratio: 2.0 is not allowed, give a number from 0 to 1"),
    (dict(type="cosine", run=3), "param_scheduler.run: is filled in by flextrain"),
]

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    (dict(type="LinearLR", begin=5, end=5), "LinearLR.end: 5 .* larger than begin=5"),
    (dict(type="LinearLR", begin=-1), "LinearLR.begin: -1"),
    (dict(type="LinearLR", last_step=-2), "LinearLR.last_step: -2"),
    (dict(type="LinearLR", last_step=3), "LinearLR.last_step: 3 needs initial_lr"),
    (dict(type="LinearLR", start_factor=1.5), "LinearLR.start_factor: 1.5"),
    (dict(type="LinearLR", end_factor=-0.5), "LinearLR.end_factor: -0.5"),
    (dict(type="ConstantMomentum", factor=2.0), "ConstantMomentum.factor: 2.0"),
    (dict(type="StepLR", step_size=0), "StepLR.step_size: 0"),
    (dict(type="MultiStepLR", milestones=[-1]), "MultiStepLR.milestones"),
    (dict(type="ExponentialLR", gamma=-1.0), "ExponentialLR.gamma"),
    (dict(type="PolyLR", power=-1.0), "PolyLR.power"),
    (dict(type="CosineAnnealingLR", T_max=0), "CosineAnnealingLR.T_max: 0"),
    (dict(type="CosineAnnealingLR", eta_min=0.1, eta_min_ratio=0.1), "CosineAnnealingLR: eta_min and eta_min_ratio"),
    (dict(type="CosineRestartLR", periods=[3, 0], restart_weights=[1, 1]), "CosineRestartLR.periods"),
    (dict(type="CosineRestartLR", periods=[3, 4]), "CosineRestartLR.restart_weights: .* 2 periods"),
    (dict(type="OneCycleLR", eta_max=0.0), "OneCycleLR.eta_max"),
    (dict(type="OneCycleLR", eta_max=[1.0, 2.0]), "OneCycleLR.eta_max"),
    (dict(type="OneCycleLR", eta_max=1.0, total_steps=0), "OneCycleLR.total_steps"),
    (dict(type="OneCycleLR", eta_max=1.0, pct_start=1.5), "OneCycleLR.pct_start"),
    (dict(type="OneCycleLR", eta_max=1.0, div_factor=0.0), "OneCycleLR.div_factor"),
    (dict(type="OneCycleLR", eta_max=1.0, final_div_factor=0.0), "OneCycleLR.final_div_factor"),
    (dict(type="OneCycleParamScheduler", param_name="momentum", eta_max=1.0), "OneCycleParamScheduler.param_name"),
    (dict(type="ReduceOnPlateauLR", factor=1.0), "ReduceOnPlateauLR.factor"),
    (dict(type="ReduceOnPlateauLR", by_epoch=False), "ReduceOnPlateauLR.by_epoch"),
    (dict(type="ReduceOnPlateauLR", convert_to_iter_based=True), "ReduceOnPlateauLR.convert_to_iter_based"),
    (dict(type="ReduceOnPlateauLR", min_value=[0.1, 0.1]), "ReduceOnPlateauLR.min_value"),
    (dict(type="ReduceOnPlateauLR", threshold=-1.0), "ReduceOnPlateauLR.threshold"),
    (dict(type="ReduceOnPlateauLR", patience=-1), "ReduceOnPlateauLR.patience"),
    (dict(type="ReduceOnPlateauLR", cooldown=-1), "ReduceOnPlateauLR.cooldown"),
    (dict(type="StepParamScheduler", param_name="lrs", step_size=3), 'StepParamScheduler.param_name: .*mean "lr"'),
    (dict(type="LambdaLR", lr_lambda=[abs, abs]), "LambdaLR: Expected 1"),
    (dict(type="LambdaLR", lr_lambda=[abs, abs], begin=5), "LambdaLR: Expected 1"),
]


@pytest.mark.parametrize("cfg, message", WRONG + IMPOSSIBLE)
def test_what_is_wrong_is_named_on_one_line(cfg: Any, message: str) -> None:
    """Names and types also without an optimizer."""
    for call in (build, check_param_schedulers) if (cfg, message) in WRONG else (build,):
        with pytest.raises(ConfigError, match=message) as caught:
            call(cfg)
        assert str(caught.value).startswith("param_scheduler")
        assert "\n" not in str(caught.value)


def test_what_is_right_passes_the_check() -> None:
    check_param_schedulers(None)
    check_param_schedulers([dict(type="StepLR", step_size=3, convert_to_iter_based=True), "LinearLR"])
    check_param_schedulers(dict(type="LinearLR", end=0.5, convert_to_iter_based=True))


UPDATES = 23
FORMULAS: dict[str, tuple[Any, Any]] = {  # the cosine and so on of transformers, which are these lines
    "cosine": ("cosine", lambda k: (1 + math.cos(math.pi * k / 23)) / 2),
    "cosine with a share": (
        dict(type="cosine", warmup=0.1, min_ratio=0.25),
        lambda k: k / 3 if k < 3 else 0.25 + 0.75 * (1 + math.cos(math.pi * (k - 3) / 20)) / 2,
    ),
    "linear": (dict(type="linear", warmup=4), lambda k: k / 4 if k < 4 else (23 - k) / 19),
    "linear with a minimum": (dict(type="linear", min_ratio=0.5), lambda k: 0.5 + 0.5 * (23 - k) / 23),
    "constant": (dict(type="constant", warmup=4), lambda k: min(k / 4, 1)),
    "constant alone": ("constant", lambda k: 1),
    "all of it": (dict(type="linear", warmup=1.0), lambda k: k / 23),
    "wsd": (dict(type="wsd", warmup=4, decay=6), lambda k: min(k / 4, 1, (23 - k) / 6)),
    "wsd with shares": (dict(type="wsd", warmup=0.1, min_ratio=0.1), lambda k: min(k / 3, 1, 0.1 + 0.9 * (23 - k) / 5)),
    "wsd, cosine": (
        dict(type="wsd", decay=6, shape="cosine"),
        lambda k: 1 if k < 17 else (1 + math.cos(math.pi * (k - 17) / 6)) / 2,
    ),
}


@pytest.mark.parametrize("cfg, formula", FORMULAS.values(), ids=FORMULAS)
def test_a_name_is_a_whole_schedule(cfg: Any, formula: Any) -> None:
    """At every update, for groups of different rates; the run is given in updates, or in epochs."""
    for length in (dict(max_iters=UPDATES), dict(max_epochs=1, epoch_length=UPDATES)):
        optimizer = sgd(2)
        optimizer.param_groups[1]["lr"] = 3.0
        found = []
        for made in [build(cfg, optimizer=optimizer, **length)] * UPDATES:
            found.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            for scheduler in made if len(found) < UPDATES else ():
                scheduler.step()
        for k, rates in enumerate(found):
            assert rates == pytest.approx([0.1 * formula(k), 3.0 * formula(k)], abs=1e-12), k


def test_one_cycle_is_torchs_with_the_optimizers_rate_as_its_peak() -> None:
    ours, theirs = sgd(), sgd()
    (scheduler,) = build(dict(type="one_cycle", pct_start=0.4), optimizer=ours, max_iters=UPDATES)
    torchs = torch.optim.lr_scheduler.OneCycleLR(theirs, 0.1, UPDATES, pct_start=0.4, cycle_momentum=False)
    for _ in range(UPDATES):
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        for optimizer, each in ((ours, scheduler), (theirs, torchs)):
            optimizer.step()
            each.step() if each is scheduler or torchs.last_epoch < UPDATES - 1 else None


def test_a_name_needs_a_run_that_it_fits_into() -> None:
    with pytest.raises(ConfigError, match="param_scheduler: needs the number of updates of the run, give max_iters"):
        build("cosine")
    with pytest.raises(ConfigError, match="warmup of 20 and decay of 5 updates do not fit into the 23 of the run"):
        build(dict(type="wsd", warmup=20), max_iters=UPDATES)


def test_conversion_needs_the_length_of_an_epoch() -> None:
    with pytest.raises(ConfigError, match="convert_to_iter_based: needs the length of an epoch"):
        build(dict(type="LinearLR", convert_to_iter_based=True), epoch_length=None)


def test_momentum_needs_an_optimizer_that_has_one() -> None:
    with pytest.raises(ConfigError, match="no momentum in the optimizer's group 0"):
        build("LinearMomentum", optimizer=torch.optim.Adagrad([torch.zeros(1)]))


def test_a_metric_that_is_not_there_is_named() -> None:
    (scheduler,) = build(dict(type="ReduceOnPlateauLR", monitor="acuracy"))
    with pytest.raises(ConfigError, match='"acuracy" is no metric of the validation, did you mean "accuracy"'):
        scheduler.step({"accuracy": 0.5, "loss": 1.0})  # type: ignore[call-arg]


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"StepLR: saved by another kind .* best, cooldown_counter"):
        library.StepLR(sgd(), 3).load_state_dict(library.ReduceOnPlateauLR(sgd()).state_dict())


@pytest.mark.parametrize(
    "cfg",
    [dict(type="CosineAnnealingLR", T_max=6), dict(type="LambdaLR", lr_lambda=lambda step: 1 / (step + 1))],
    ids=lambda cfg: cfg["type"],
)
def test_a_schedule_follows_settings_into_other_groups(cfg: dict[str, Any]) -> None:
    """Settings come back by the parameters' names, into whatever groups these are in now; so does where they began."""
    rates = {"a": 0.1, "b": 0.2}

    def started(names: str) -> tuple[torch.optim.Optimizer, library.ParamScheduler]:
        groups = [{"params": [torch.zeros(1)], "lr": rates[name]} for name in names]
        optimizer = torch.optim.SGD(groups)
        return optimizer, build(cfg, optimizer=optimizer)[0]

    def move(optimizer: torch.optim.Optimizer, scheduler: library.ParamScheduler) -> list[float]:
        optimizer.step()
        scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    before, schedule = started("ab")
    for _ in range(3):
        move(before, schedule)
    after, resumed = started("bba")
    for group, source in zip(after.param_groups, (1, 1, 0), strict=True):
        group |= {key: before.param_groups[source][key] for key in ("lr", "initial_lr")}
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(2):
        a, b = move(before, schedule)
        assert move(after, resumed) == pytest.approx([b, b, a], rel=1e-12)
