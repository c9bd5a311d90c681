"""env_cfg.plan: which plan is that of a run, and what is refused."""

import json
from pathlib import Path

import pytest

from flextrain import ConfigError, FlexibleRunner, SingleDeviceStrategy
from flextrain.core.comm.topology import Topology
from flextrain.plan import planned_memory as module
from flextrain.plan.plan import Moment, RankPlan, StrategyPlan, TrainingPlan
from flextrain.plan.planned_memory import planned_memory
from flextrain.strategies.mesh import MeshStrategy

from .training import SGD, Net, Samples, refuses

MIB = 2**20
AC = dict(classes=["Block"])


def planned(name, options, axes, ranks=(0,)):
    peaks = [Moment("forward", "", "", (rank + 1) * MIB, {"activations": (rank + 1) * MIB}) for rank in ranks]
    plans = [RankPlan(rank, {}, peak, {}, [peak]) for rank, peak in zip(ranks, peaks, strict=True)]
    return StrategyPlan(name, "planned", options=options, axes=axes, ranks=plans)


def a_plan(*strategies, world_size=1, script="train.py"):
    return TrainingPlan(script, world_size, 1, None, "2.15", list(strategies)).as_json()


ONE = planned("single", {"type": "SingleDeviceStrategy", "device": "cpu"}, {"data": 1})


def mesh(**options):
    """A strategy that is one process of 16, without the others."""
    strategy = MeshStrategy(tp=2, pp=4, **options)
    axes = {"pp": (0, 4), "dp_shard": (1, 2), "tp": (1, 2), "cp": (0, 1)}
    strategy.topology = Topology(axes=axes, rank=5, world_size=16)
    return strategy


MESH = {"type": "MeshStrategy", "tp": 2, "pp": 4, "device": "cpu"}
AXES = {"pp": 4, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}


@pytest.mark.parametrize("kind", ["path", "values", "plan"])
def test_a_plan_is_a_file_or_its_values(tmp_path, kind):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(a_plan(ONE)))
    found = planned_memory({"path": str(file), "values": a_plan(ONE), "plan": file}[kind], SingleDeviceStrategy())
    assert (found.name, found.of(0).total, found.of(0).by_kind) == ("single", MIB, {"activations": MIB})


def test_a_rank_is_as_the_planned_one_of_its_stage():
    own = planned("mesh:tp2xpp4", MESH, AXES, ranks=(0, 4, 12))
    found = planned_memory(a_plan(planned("fsdp", {"type": "FSDPStrategy"}, {}), own, world_size=16), mesh())
    assert [found.of(rank).total // MIB for rank in (0, 3, 4, 11, 12, 15)] == [1, 1, 5, 5, 13, 13]


def test_the_plan_with_this_runs_options_is_taken():
    plain, other = planned("mesh", MESH, AXES), planned("recomputed", {**MESH, "activation_checkpointing": AC}, AXES)
    for options, name in [({}, "mesh"), ({"activation_checkpointing": AC}, "recomputed")]:
        found = planned_memory(a_plan(other, plain, world_size=16), mesh(**options))
        assert found.name == name
    with pytest.raises(
        ConfigError, match=r'"recomputed" there has another strategy\.activation_checkpointing, .*plan again'
    ):
        planned_memory(a_plan(other, world_size=16), mesh())


REFUSED = StrategyPlan("mesh:tp2xpp4", "refused", "strategy.pp: 4 stages need as many layers")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (a_plan(ONE), "is for a world size of 1 and this run has 16; plan again"),
        (a_plan(planned("fsdp", {"type": "FSDPStrategy"}, {"data": 16}), world_size=16),
         'has "fsdp", and this run has MeshStrategy, pp=4, dp_shard=2, tp=2; plan it too'),
        (a_plan(planned("m", MESH, {**AXES, "tp": 4}), world_size=16), 'has "m", and this run has MeshStrategy, pp=4'),
        (a_plan(REFUSED, world_size=16), '"mesh:tp2xpp4" was refused there: strategy.pp: 4 stages need as many layers'),
        (a_plan(world_size=16), "has no strategy, and this run has MeshStrategy"),
        ({**a_plan(ONE), "schema": 9}, " has version 9, this flextrain reads 1; plan again"),
        ({"schema": 1}, " is no plan, script: Field required"),
        ("none.json", "none.json: cannot be read, No such file or directory"),
    ],
    ids=["size", "strategy", "axes", "refused", "empty", "version", "values", "file"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(plan, says):
    with refuses(ConfigError, says, begins="env_cfg.plan:"):
        planned_memory(plan, mesh())


def test_another_script_is_refused(monkeypatch, tmp_path):
    assert planned_memory(a_plan(ONE), SingleDeviceStrategy()).name == "single"  # pytest is no script of the user's
    main = type(json)("__main__")
    monkeypatch.setitem(module.sys.modules, "__main__", main)
    for name, fits in [("train.py", True), ("eval.py", False)]:
        main.__file__ = str(tmp_path / name)
        if fits:
            assert planned_memory(a_plan(ONE), SingleDeviceStrategy()).name == "single"
            continue
        with pytest.raises(ConfigError, match=r"^env_cfg\.plan: is for train\.py and this is eval\.py; plan again$"):
            planned_memory(a_plan(ONE), SingleDeviceStrategy())


def runner_with(plan, folder):
    return FlexibleRunner(
        model=Net(),
        work_dir=folder,
        train_dataloader=dict(dataset=Samples(32), batch_size=4, collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=SGD),
        train_cfg=dict(by_epoch=False, max_iters=4),
        strategy=dict(type="SingleDeviceStrategy", device="cpu"),
        default_hooks=dict(checkpoint=None),
        env_cfg=dict(plan=plan),
    )


def test_on_the_cpu_the_log_says_once_that_nothing_is_compared(tmp_path):
    runner = runner_with(TrainingPlan("train.py", 1, 1, None, "2.15", [ONE]), tmp_path)
    calls = runner.hook_calls["after_train_iter"]
    runner.train()
    log = Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    assert log.count("Memory is not compared with the plan: torch does not count it on cpu") == 1
    assert runner.hook_calls["after_train_iter"] == calls


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (17, "env_cfg.plan: 17 is not allowed, give "),
        ({"schema": 1}, "env_cfg.plan: is no plan, script: Field required"),
        ("nowhere.json", "env_cfg.plan: nowhere.json: cannot be read"),
    ],
    ids=["type", "values", "file"],
)
def test_a_runner_refuses_a_wrong_plan_when_it_is_made(tmp_path, plan, says):
    with refuses(ConfigError, begins=says):
        runner_with(plan, tmp_path)
