"""How long a step takes: cases that are worked out by hand."""

import io

import pytest
from rich.console import Console

from flextrain.plan.ledger import Network
from flextrain.plan.machines import MACHINES, Link, MachineKind
from flextrain.plan.plan import Moment, PipelineOrder, RankPlan, StrategyPlan, Traffic, TrainingPlan, Work, read_plan
from flextrain.plan.report import interval, report
from flextrain.plan.step_time import others_inside, run_orders, step_time
from flextrain.strategies.mesh.pipeline.orders import SCHEDULES, orders_of

ROUND = MachineKind(  # figures that are easy to reckon with
    "round",
    "a round machine",
    {"float32": 1e12, "bfloat16": 10e12},
    10**9,
    1e12,
    4,
    Link("inside", 100e9),
    Link("between", 10e9),
)


def a_rank(*work, traffic=(), index=None, **changes):
    moment = Moment("update", "", "", 1, {"parameters": 1})
    return RankPlan(0, index or {}, moment, {}, traffic=list(traffic), work=list(work), **changes)


def a_plan(*ranks, **changes):
    return StrategyPlan("ddp", "planned", ranks=list(ranks), **changes)


def matrix(phase, seconds, dtype="bfloat16", moved=0):
    """A row of products that takes this long on the round machine."""
    return Work(phase, dtype, "matrix", 1, round(seconds * ROUND.peak[dtype]), moved)


def sent(collective, ranks, payload, network, phase="backward"):
    inside, between = network.sent(collective, ranks, payload)
    return Traffic(collective, "data", len(ranks), 1, payload, round(inside), round(between), phase)


def test_an_all_reduce_over_eight_in_a_node():
    # Each sends 2 * 7/8 of 4.5 GB over 450 GB/s.
    traffic = sent("all_reduce", range(8), 4_500_000_000, Network(8, 1))
    time = step_time(a_plan(a_rank(matrix("forward", 0), traffic=[traffic])), MACHINES["h100"])
    assert (time.inside, time.between) == (pytest.approx(0.0175), 0)
    assert (time.lower, time.upper) == (pytest.approx(0.0175), pytest.approx(0.0175))


def test_an_all_gather_over_two_nodes():
    # Each sends 7/8 of 8 GB: two of eight hops leave the node, shared by the devices of it.
    traffic = sent("all_gather", range(8), 8_000_000_000, Network(8, 2), "forward")
    time = step_time(a_plan(a_rank(matrix("forward", 0.1), traffic=[traffic])), ROUND)
    assert (time.inside, time.between) == (pytest.approx(5.25 / 100), pytest.approx(1.75 / 10))
    assert (time.lower, time.upper) == (pytest.approx(0.175), pytest.approx(0.1 + 0.0525 + 0.175))


def test_computing_and_memory_as_bounds():
    bound = a_rank(matrix("forward", 2.0, moved=10**12), Work("update", "float32", "other", 5, 0, 3 * 10**12))
    time = step_time(a_plan(bound), ROUND)
    assert time.lower == time.computing == pytest.approx(2 + 3)  # the longer of 2 and 1 s, then memory alone
    assert time.upper == pytest.approx(2 + 1 + 3)
    memory = step_time(a_plan(a_rank(matrix("forward", 2.0, moved=5 * 10**12))), ROUND)
    assert (memory.lower, memory.upper) == (5, 7)


def test_dtypes_have_their_own_rates():
    both = a_rank(matrix("forward", 1.0), matrix("forward", 3.0, "float32"))
    assert step_time(a_plan(both), ROUND).lower == pytest.approx(4)
    rounded = a_rank(Work("forward", "tfloat32", "matrix", 1, 494_700_000_000, 0))
    assert step_time(a_plan(rounded), MACHINES["h100"]).lower == pytest.approx(1e-3)
    unknown = step_time(a_plan(a_rank(Work("forward", "float64", "matrix", 1, 10**15, 10**12))), ROUND)
    assert unknown.lower == 1
    assert unknown.notes == ["round has no figure for float64, only what is read and written counts"]


def test_useful_operations_leave_out_recomputation_and_the_update():
    work = [matrix("forward", 1.0), matrix("recompute", 1.0), matrix("backward", 2.0), matrix("update", 1.0)]
    traffic = [Traffic("all_reduce", "data", 4, 1, 0, 5 * 10**11, 0, "backward")]
    time = step_time(a_plan(a_rank(*work, traffic=traffic)), ROUND)
    assert (time.lower, time.upper) == (5, 10)
    assert time.utilisation == (pytest.approx(0.3), pytest.approx(0.6))


def test_nothing_known_is_no_time():
    assert step_time(a_plan(a_rank()), ROUND) is None
    assert step_time(StrategyPlan("zero3", "refused", "strategy.type: is not possible"), ROUND) is None


@pytest.mark.parametrize(
    ("collective", "ranks", "others"),
    [
        ("all_reduce", range(8), 7),
        ("all_gather", range(16), 7),  # eight on each of two nodes
        ("all_to_all", range(16), 7),
        ("all_gather", (0, 1, 8, 9), 1),
        ("all_to_all", (0, 1, 8, 9), 1),
    ],
)
def test_others_in_the_node_from_the_bytes(collective, ranks, others):
    assert others_inside(sent(collective, ranks, 10**9, Network(16, 2 if max(ranks) > 7 else 1))) == others


def test_a_pair_of_a_machine_with_links_in_pairs():
    traffic = sent("all_reduce", (0, 1), 64_000_000_000, Network(8, 1))
    time = step_time(a_plan(a_rank(matrix("forward", 0), traffic=[traffic])), MACHINES["mi300x"])
    assert time.inside == pytest.approx(1)  # one of seven links


# Pipelines


def test_1f1b_of_four_stages_and_eight_micro_batches():
    # Forward 1 s and backward 2 s of each micro-batch: (8 + 3) * 3 s, of which each process waits 3 * 3.
    ends = run_orders(orders_of("1f1b", 4, 1, 8), 4, [{"F": 1.0, "B": 2.0}] * 4)
    assert ends == [33, 31, 29, 27]  # the first one has the last backward
    stages = [a_rank(matrix("forward", 8), matrix("backward", 16), index={"pp": i}, micro_batches=8) for i in range(4)]
    plan = a_plan(*stages, axes={"pp": 4, "dp_shard": 2}, pipeline=PipelineOrder("1f1b", 1))
    time = step_time(plan, ROUND)
    assert (time.lower, time.upper) == (pytest.approx(33), pytest.approx(33))
    assert time.waiting == pytest.approx(3 / 11)
    assert time.utilisation == (pytest.approx(8 / 11), pytest.approx(8 / 11))


@pytest.mark.parametrize(
    ("schedule", "each"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zbv", 2)]
)
def test_every_schedule_waits_no_more_than_gpipe(schedule, each):
    durations = {"F": 1.0 / each, "B": 2.0 / each, "I": 1.0 / each, "W": 1.0 / each}
    last = max(run_orders(orders_of(schedule, 4, each, 8), 4 * each, [durations] * 4))
    least = {
        "gpipe": 33,
        "1f1b": 33,
        "interleaved_1f1b": 24 + 9 / 2,
    }  # Megatron-LM: the bubble is divided by the stages
    assert last == least.get(schedule, last)
    assert 24 <= last <= 33
    assert SCHEDULES.keys() == {"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"}


def test_the_slowest_stage_decides_and_sending_delays():
    slow = a_rank(matrix("forward", 8), matrix("backward", 16), index={"pp": 1}, micro_batches=8)
    messages = [Traffic("send", "pp", 2, 8, 8, 8 * 10**10, 0, "forward")]  # 0.1 s for each micro-batch
    fast = a_rank(matrix("forward", 4), matrix("backward", 8), index={"pp": 0}, micro_batches=8, traffic=messages)
    plan = a_plan(fast, slow, axes={"pp": 2}, pipeline=PipelineOrder("1f1b", 1))
    time = step_time(plan, ROUND)
    assert time.lower == pytest.approx(
        0.5 + 24 + 1
    )  # first forward of the fast one, all of the slow one, last backward
    assert time.upper == pytest.approx(0.5 + 0.1 + 24 + 1)
    assert time.inside == pytest.approx(0.8)


def test_the_update_comes_after_the_pipeline():
    work = [matrix("forward", 2), matrix("update", 3)]
    stages = [a_rank(*work, index={"pp": i}, micro_batches=2) for i in range(2)]
    plan = a_plan(*stages, axes={"pp": 2}, pipeline=PipelineOrder("gpipe", 1))
    assert step_time(plan, ROUND).lower == pytest.approx(3 + 3)


def test_stages_that_were_not_planned_are_as_the_second():
    def stage(index, seconds):
        return a_rank(matrix("forward", seconds), index={"pp": index}, micro_batches=1)

    plan = a_plan(stage(0, 1), stage(1, 2), stage(7, 5), axes={"pp": 8}, pipeline=PipelineOrder("gpipe", 1))
    assert step_time(plan, ROUND).lower == pytest.approx(1 + 6 * 2 + 5)


def test_an_order_that_is_not_known_is_said():
    stages = [a_rank(matrix("forward", 2), index={"pp": i}, micro_batches=2) for i in range(2)]
    for order in (None, PipelineOrder("other", 1)):
        time = step_time(a_plan(*stages, axes={"pp": 2}, pipeline=order), ROUND)
        assert time.lower == 2
        assert time.notes == ["the order of the pipeline is not known: waiting for other stages is not counted"]


# Report


def test_seconds_for_people():
    assert interval(1.234, 3.456) == "1.23 to 3.46 s"
    assert interval(0.0123, 0.5) == "12.3 to 500 ms"
    assert interval(2e-6, 2e-6) == "2 us"
    assert interval(900, 12345) == "900 to 12,345 s"


def shown(plan):
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(report(plan))
    return console.export_text()


def test_the_report_has_a_step_only_with_a_machine():
    from flextrain.plan.step_time import with_times

    rank = a_rank(matrix("forward", 1), traffic=[Traffic("all_reduce", "data", 4, 1, 0, 2 * 10**11, 0, "backward")])
    refused = StrategyPlan("fsdp", "refused", "strategy.type: is not possible")
    plan = TrainingPlan("train.py", 4, 1, None, "2.15", [a_plan(rank), refused])
    assert "step" not in shown(plan)
    timed = with_times(plan, ROUND)
    text = shown(timed)
    assert "ddp: a step takes 2 to 3 s: computing 1 s, sending 2 s inside of nodes; 33.3 to 50 % of the peak" in text
    assert "A step on a round machine, at the full rates of its data sheet" in text
    assert read_plan(timed.as_json()) == timed
    assert timed.as_json()["machine"]["inside"] == {"name": "inside", "bytes_per_s": 1e11, "to_one": None, "source": ""}
