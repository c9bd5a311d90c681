"""The search over meshes: which there are, which are planned, and what is said of the others."""

import dataclasses
import math

import pytest

from flextrain.core.base.errors import ConfigError
from flextrain.plan.fit import axes_in, lines_on_search, name_of, ordered, products, search
from flextrain.plan.per_strategy import plan, plan_strategy
from flextrain.plan.plan import (
    Moment,
    PlannedJob,
    RankPlan,
    Recipe,
    StepTime,
    StrategyPlan,
    Traffic,
    TrainingPlan,
    read_plan,
)

from .real_runs import SCRIPT


def test_meshes_of_eight_processes():
    names = [name_of(mesh) for mesh in products(["pp", "dp_shard", "tp"], 8)]
    assert names[0] == "mesh:dp_shard8"
    assert sorted(names) == sorted(
        [
            "mesh:dp_shard8", "mesh:dp_shard4xtp2", "mesh:dp_shard2xtp4", "mesh:dp_shard1xtp8", "mesh:pp2xdp_shard4",
            "mesh:pp4xdp_shard2", "mesh:pp8xdp_shard1", "mesh:pp2xdp_shard2xtp2", "mesh:pp2xdp_shard1xtp4",
            "mesh:pp4xdp_shard1xtp2",
        ]
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 6, 12, 64])
def test_the_sizes_of_a_mesh_multiply_to_the_processes(world_size):
    meshes = products(["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"], world_size)
    assert len({name_of(mesh) for mesh in meshes}) == len(meshes)
    for mesh in meshes:
        assert math.prod(size for axis, size in mesh.items() if axis != "ep") == world_size
        assert (mesh["dp_shard"] * mesh.get("cp", 1) * mesh.get("tp", 1)) % mesh.get("ep", 1) == 0
    inside = [math.prod(mesh.get(axis, 1) for axis in ("pp", "cp", "tp")) for mesh in meshes]
    assert inside == sorted(inside)


def made_up(job, peak, sent, elements=100):
    """A plan of 400 bytes of parameters and optimizer state."""
    rank = RankPlan(
        0,
        {},
        Moment("backward", "", "", peak, {"activations": peak}),
        {"parameters": elements, "optimizer_state": 3 * elements},
        traffic=[Traffic("all_gather", "tp", 2, 1, sent, sent, 0, "forward")],
        parameters=elements,
        samples=8,
    )
    return StrategyPlan(
        job.name, "planned", ranks=[rank], whole_parameters=100, recipe=Recipe(accumulate=job.accumulate_times)
    )


def searched(axes, answers, *, world_size=8, nodes=2, memory=1000, limit=24):
    asked = []

    def planner(job):
        asked.append(job)
        answer = answers(job)
        return StrategyPlan(job.name, "refused", answer) if isinstance(answer, str) else made_up(job, *answer)

    whole = TrainingPlan("train.py", world_size, nodes, memory, "2.15", unseen=100)
    job = PlannedJob("train.py", "", world_size, nodes, ("--of-the", "script"))
    return asked, search(whole, job, axes_in(axes), planner, limit=limit)


def test_those_that_fit_come_first_and_of_them_those_that_send_the_least():
    plans = {"mesh:dp_shard8": (901, 1), "mesh:dp_shard4xtp2": (900, 9), "mesh:dp_shard2xtp4": (100, 5)}
    asked, found = searched("dp,tp", lambda job: plans[job.name])
    assert [one.strategy for one in found.strategies] == ["mesh:dp_shard2xtp4", "mesh:dp_shard4xtp2", "mesh:dp_shard8"]
    assert [found.fits(one) for one in found.strategies] == [True, True, False]
    assert found.exit_status == 0
    assert found.search.skipped == {"mesh:dp_shard1xtp8": "tp=8 is more than the 4 processes of a node"}
    # The samples of an update are those of eight data shards, and the script's own mesh has no say.
    assert [job.accumulate_times for job in asked] == [1, 2, 4]
    assert asked[1].changes == {"strategy.pp": 1, "strategy.dp_replicate": 1, "strategy.cp": 1, "strategy.ep": 1}
    assert asked[1].arguments == ("--of-the", "script")
    assert found.strategies[0].notes == ["with optim_wrapper=dict(accumulative_counts=4), for the samples of an update"]
    assert read_plan(found.as_json()) == found


def test_with_a_machine_the_shortest_step_comes_first():
    _, found = searched("dp,tp", lambda job: (100, {"mesh:dp_shard8": 1, "mesh:dp_shard4xtp2": 2}.get(job.name, 3)))
    uppers = {"mesh:dp_shard8": 3.0, "mesh:dp_shard4xtp2": 2.0, "mesh:dp_shard2xtp4": 1.0}
    timed = [
        dataclasses.replace(one, time=StepTime(0, uppers[one.strategy], 0, 0, 0, 0, (0, 0))) for one in found.strategies
    ]
    assert [one.strategy for one in found.strategies] == [*uppers]
    assert [one.strategy for one in ordered(found, timed)] == [*uppers][::-1]


def test_nothing_is_dropped_without_a_word():
    refusing = "strategy.tp: 2 does not divide the 3 heads"
    asked, found = searched("tp,cp,pp", lambda job: refusing if "tp2" in job.name else (2000, 1), limit=5)
    looked_at = found.search
    assert looked_at.candidates == len(products(["tp", "cp", "pp"], 8)) == 20
    assert len(asked) == 5 == len(found.strategies) + list(looked_at.refused.values()).count(refusing)
    assert "pp: 2 is not possible with strategy.cp=2" in looked_at.refused["mesh:pp2xdp_shard2xcp2"]  # and not planned
    every = [one.strategy for one in found.strategies], looked_at.skipped, looked_at.refused, looked_at.not_planned
    assert len(set().union(*every)) == sum(map(len, every)) == 20
    assert found.exit_status == 1
    first, *others = lines_on_search(found)
    assert first.startswith("20 meshes of pp, cp, tp: 0 fit, ")
    assert any(line.startswith("not planned, more than the limit: ") for line in others)
    assert any(line.endswith(refusing) for line in others)


def test_a_mesh_whose_shards_are_too_large_is_not_planned():
    # 400 bytes: two shards have 200 each, which 150 are too few for.
    asked, found = searched("dp_replicate", lambda job: (90, 1), memory=250)
    assert [job.name for job in asked] == ["mesh:dp_shard8", "mesh:dp_replicate2xdp_shard4"]
    why = "parameters and optimizer state, in 2 shards, are more than a device has"
    assert found.search.skipped["mesh:dp_replicate4xdp_shard2"] == why


@pytest.mark.parametrize(
    ("axes", "memory", "limit", "says"),
    [
        ("tp,shard", 9, 1, 'plan.fit: "shard" is not allowed, choose '),
        (" ,", 9, 1, "plan.fit: is empty"),
        ("tp", None, 1, "plan.fit: what has to fit is not known, give --device-memory"),
        ("tp", 9, 0, "plan.fit_limit: 0 is not allowed"),
    ],
)
def test_wrong_arguments(axes, memory, limit, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        searched(axes, lambda job: (1, 1), memory=memory, limit=limit)


@pytest.mark.full
@pytest.mark.processes
def test_it_is_what_planning_each_by_hand_gives():
    changes = {"optim_wrapper.accumulative_counts": 2, "train_dataloader.batch_size": 2}
    sizes = [
        (8, 1, 1),
        (4, 2, 1),
        (2, 4, 1),
        (1, 8, 1),
        (4, 1, 2),
        (2, 1, 4),
        (1, 1, 8),
        (2, 2, 2),
        (1, 4, 2),
        (1, 2, 4),
    ]
    by_hand = {}
    for shard, tensor, pipeline in sizes:
        more = {**changes, "optim_wrapper.accumulative_counts": 2 * tensor * pipeline}
        one = plan_strategy(PlannedJob(SCRIPT, f"mesh:dp{shard}xtp{tensor}xpp{pipeline}", 8, 1, ("llama",), more))
        if one.highest is not None:
            by_hand[shard, tensor, pipeline] = (one.highest.peak.total, one.sent)
            assert one.samples == 8 * 4
    # No 8 key/value heads, and no 8 layers.
    assert by_hand.keys() == set(sizes) - {(1, 8, 1), (1, 1, 8)}
    room = sorted(peak for peak, _ in by_hand.values())[len(by_hand) // 2]
    memory = int(room / 0.95) + 1
    found = plan(
        SCRIPT, world_size=8, arguments=("llama",), device_memory=memory, changes=changes, fit_axes=["tp", "pp"]
    )
    searched = {}
    for one in found.strategies:
        key = tuple(one.axes.get(axis, 1) for axis in ("dp_shard", "tp", "pp"))
        searched[key] = (one.highest.peak.total, one.sent)
    assert searched == by_hand
    fitting = sorted((sent, peak) for peak, sent in by_hand.values() if peak <= memory - found.unseen)
    best = [(one.sent, one.highest.peak.total) for one in found.strategies if found.fits(one)]
    assert [sent for sent, _ in best] == [sent for sent, _ in fitting]
    assert 0 < len(best) < len(by_hand)
    assert len(found.search.refused) == 2
