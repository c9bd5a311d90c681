"""Step times that are fitted to a measured one."""

import dataclasses
import json

import pytest

from flextrain.cli import main
from flextrain.core.base.errors import ConfigError
from flextrain.plan.plan import StrategyPlan, Traffic, TrainingPlan, read_plan
from flextrain.plan.step_time import Measured, fit, measured_in, with_times

from .test_step_time import ROUND, a_plan, a_rank, matrix, shown


def a_training_plan(**changes):
    """DDP computes 2 s and sends 1 s; the other one computes 2 s and sends 3 s."""
    ranks = [
        a_rank(
            matrix("forward", 2),
            traffic=[Traffic("all_reduce", "data", 4, 1, 0, round(seconds * 1e11), 0, "backward")],
        )
        for seconds in (1, 3)
    ]
    other = StrategyPlan("fsdp", "planned", ranks=[ranks[1]])
    refused = StrategyPlan("zero3", "refused", "strategy.type: is not possible")
    return TrainingPlan("train.py", 4, 1, None, "2.15", [a_plan(ranks[0]), other, refused], **changes)


def times(plan):
    return {one.strategy: (one.time.lower, one.time.upper) for one in plan.strategies if one.time is not None}


def test_without_a_measured_step():
    assert times(with_times(a_training_plan(), ROUND)) == {"ddp": (2, 3), "fsdp": (3, 5)}


def test_each_end_is_fitted_on_its_own_assumption():
    found = with_times(a_training_plan(), ROUND, Measured("ddp", 5.0, "5s"))
    assert found.calibration.overlapped == pytest.approx(2 / 5)
    assert found.calibration.apart == pytest.approx(2 / 4)  # 1 s of the 5 was sending
    assert times(found)["ddp"] == (pytest.approx(5), pytest.approx(5))
    assert times(found)["fsdp"] == (pytest.approx(5), pytest.approx(4 + 3))
    assert "calibrated by ddp in 5 s on 4 processes to 40 to 50 % of its rates for computing" in shown(found)
    assert found.as_json()["calibration"]["seconds"] == 5


def test_ends_that_turn_around():
    # fsdp in 10 s: it computed in 10 s or in 7 s. Then DDP, which sends less, takes 10 s or 7 + 1.
    found = with_times(a_training_plan(), ROUND, Measured("fsdp", 10.0, ""))
    assert times(found)["ddp"] == (pytest.approx(8), pytest.approx(10))


def test_a_step_that_overlapped_says_nothing_of_the_upper_end():
    found = with_times(a_training_plan(), ROUND, Measured("ddp", 2.5, ""))
    assert found.calibration.overlapped == pytest.approx(0.8)
    assert found.calibration.apart == 1
    assert "2.5 s is less than 3 s, which it takes at the peak without any overlap" in shown(found)


def test_of_another_plan():
    other = a_training_plan()
    found = fit(
        a_training_plan(),
        ROUND,
        Measured("ddp", 5.0, "", TrainingPlan("train.py", 2, 1, None, "2.15", other.strategies)),
    )
    assert (found.world_size, found.overlapped) == (2, pytest.approx(0.4))


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (
            Measured("ddp", 1.9, ""),
            "plan.calibrate: 1.9 s for ddp is less than the 2 s that round takes at its peak on 4 processes; check the unit",
        ),
        (
            Measured("ddpp", 5, ""),
            'plan.calibrate: "ddpp" is not planned, choose ddp, fsdp or zero3, did you mean "ddp"?',
        ),
        (Measured("zero3", 5, ""), "plan.calibrate: zero3 is refused: strategy.type: is not possible"),
    ],
    ids=["fast", "name", "refused"],
)
def test_what_cannot_be_fitted(measured, says):
    with pytest.raises(ConfigError) as raised:
        fit(a_training_plan(), ROUND, measured)
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "strategy", "seconds"),
    [
        ("ddp=1.84s", "ddp", 1.84),
        ("ddp=1.84", "ddp", 1.84),
        ("mesh:tp=2,pp=2=250ms", "mesh:tp=2,pp=2", 0.25),
        ("mesh:tp8=3e-1 s", "mesh:tp8", 0.3),
    ],
)
def test_what_is_measured(text, strategy, seconds):
    found = measured_in(text)
    assert (found.strategy, found.seconds, found.plan) == (strategy, pytest.approx(seconds), None)


def test_the_log_of_a_run(tmp_path):
    lines = [
        {"loss": 1.0, "iter": 10, "time": 9.0, "data_time": 1.0},  # with what happens once
        {"loss": 1.0, "iter": 20, "time": 2.5, "data_time": 0.5},
        {"accuracy": 0.5, "time": 0.1, "data_time": 0.1, "step": 1},  # validation
        {"loss": 1.0, "iter": 30, "time": 2.0, "data_time": 0.5},
        {"loss": 1.0, "iter": 40, "time": 3.0},
    ]
    log = tmp_path / "scalars.json"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured_in(f"fsdp={log}") == Measured("fsdp", 2.0, str(log))


def test_a_plan_of_other_processes(tmp_path):
    (tmp_path / "few.json").write_text(json.dumps(a_training_plan().as_json()))
    found = measured_in(f"{tmp_path}/few.json:ddp=2s")
    assert found.plan == a_training_plan()
    with pytest.raises(ConfigError, match='"dpp" is not planned'):
        measured_in(f"{tmp_path}/few.json:dpp=2s")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1.84", '"1.84" is not allowed, give STRATEGY=SECONDS'),
        ("ddp=", '"ddp=" is not allowed'),
        ("ddp=soon", '"soon" are no seconds and no log file'),
        ("ddp=-1s", '"-1s" are no seconds'),
        ("ddp=0s", "0s is not allowed, give more than 0 seconds"),
        ("ddp=1e999", "1e999 is not allowed"),
        ("ddp=none/scalars.json", "none/scalars.json cannot be read, No such file"),
    ],
)
def test_what_is_no_measured_step(text, says):
    with pytest.raises(ConfigError) as raised:
        measured_in(text)
    assert str(raised.value).startswith(f"plan.calibrate: {says}")


def test_logs_without_times(tmp_path):
    log = tmp_path / "scalars.json"
    log.write_text('{"loss": 1.0, "iter": 1, "time": 1.0}\n')
    with pytest.raises(ConfigError, match="has 1 lines of training with a time, 2 or more"):
        measured_in(f"ddp={log}")
    log.write_text("Epoch(train)")
    with pytest.raises(ConfigError, match="is no log of scalars"):
        measured_in(f"ddp={log}")


def test_a_saved_plan_is_timed_without_planning_again(capsys, tmp_path):
    plan, machine = tmp_path / "plan.json", tmp_path / "round.json"
    plan.write_text(json.dumps(a_training_plan().as_json()))
    machine.write_text(json.dumps(dataclasses.asdict(ROUND)))
    arguments = ["plan", "--from", str(plan), "--machine", str(machine), "--calibrate", "ddp=5s"]
    assert main(arguments) == 1  # one is refused
    assert "calibrated by ddp in 5 s on 4 processes" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 1
    assert read_plan(json.loads(capsys.readouterr().out)) == with_times(
        a_training_plan(), ROUND, Measured("ddp", 5.0, "5s")
    )
    assert main(["plan", "--from", str(plan), "--calibrate", "ddp=5s"]) == 2
    assert "plan.calibrate: has no meaning without a machine" in capsys.readouterr().err
