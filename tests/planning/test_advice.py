"""Which changes are planned for a strategy that does not fit, in which order, and what is said of them."""

import dataclasses

import pytest

from flextrain.plan import per_strategy as advice
from flextrain.plan.per_strategy import advise, plan, plan_strategy, possible_changes
from flextrain.plan.plan import Moment, PlannedJob, RankPlan, Recipe, StrategyPlan, Traffic, Work, as_arguments

from .conftest import PLANS
from .real_runs import SCRIPT

FSDP = ["activation_checkpointing", "mixed_precision", "reshard_after_forward", "wrap"]
RECOMPUTING = ["matmuls", "every", "recompute", "offload"]
MESH = [*FSDP, "cp", "dp_shard", "sequence_parallel", "tp"]


def job(strategy="fsdp", **changes):
    return PlannedJob("train.py", strategy, 8, 2, changes=changes)


def planned(memory, *, options=None, axes=None, known=FSDP, flops=100, sent=100, repeated=0, **recipe):
    found = Recipe(
        known, ["Block"], **{"data_shards": 8, "batch_size": 4, "is_dict": True, "is_float32": True, **recipe}
    )
    work = [
        Work("forward", "float32", "matrix", 1, flops - repeated, 0),
        Work("recompute", "float32", "matrix", 1, repeated, 0),
    ]
    traffic = [Traffic("all_gather", "dp_shard", 8, 1, sent, sent // 2, sent - sent // 2, "forward")]
    peak = Moment("backward", "", "", sum(memory.values()), memory)
    rank = RankPlan(0, {}, peak, {}, traffic=traffic, work=work, samples=4)
    return StrategyPlan("fsdp", "planned", options=options or {}, axes=axes or {"data": 8}, ranks=[rank], recipe=found)


def kinds(plan, made=None):
    return list(dict.fromkeys(change.kind for change in possible_changes(plan, made or job())))


def search(base, answers, room, made=None):
    """Look for advice with made-up plans: ``answers`` gives a plan for what differs from the job, in the order of the asks."""
    asked = []

    def planner(changed):
        asked.append((changed.strategy, changed.changes))
        answer = answers[len(asked) - 1]
        return StrategyPlan("fsdp", "refused", answer) if isinstance(answer, str) else answer

    said = []
    found, notes = advise(base, made or job(), room, planner, said.append)
    assert said == [one.keys for one in found]
    return asked, found, notes


ACTIVATIONS = {"parameters": 10, "activations": 80, "communication": 10}


def test_the_kinds_of_changes_that_each_strategy_honours():
    assert kinds(planned(ACTIVATIONS)) == ["wrap", "accumulate", *RECOMPUTING, "tp", "cp", "precision"]
    of_words = kinds(planned(ACTIVATIONS, has_large_logits=True))
    assert of_words == ["wrap", "accumulate", "logits", *RECOMPUTING, "tp", "cp", "precision"]
    replicated = planned(ACTIVATIONS, known=["activation_checkpointing"])
    assert kinds(replicated) == ["accumulate", "type", *RECOMPUTING, "precision"]
    wrapped = {"wrap": "blocks", "reshard_after_forward": False, "mixed_precision": {"param_dtype": "bfloat16"}}
    assert kinds(planned(ACTIVATIONS, options=wrapped)) == ["reshard", "accumulate", *RECOMPUTING, "tp", "cp"]
    mesh = planned(ACTIVATIONS, options={"wrap": "blocks"}, axes={"dp_shard": 4, "tp": 2}, known=MESH, data_shards=4)
    assert kinds(mesh) == ["accumulate", *RECOMPUTING, "sequence", "tp", "cp", "precision"]


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"options": {"activation_checkpointing": {"classes": ["Block"]}}}, "recompute"),
        ({"repeated": 20}, "recompute"),  # the model does it itself
        ({"options": {"model_wrapper": {"auto_wrap_policy": "policy"}}}, "wrap"),
        ({"batch_size": None}, "accumulate"),
        ({"batch_size": 1}, "accumulate"),
        ({"is_dict": False}, "tp"),  # the samples of an update would be fewer
        ({"data_shards": 1}, "tp"),
        ({"is_float32": False}, "precision"),
    ],
)
def test_what_there_is_already_or_cannot_be_changed_is_not_proposed(changed, missing):
    assert missing in kinds(planned(ACTIVATIONS))
    assert missing not in kinds(planned(ACTIVATIONS, **changed))


WHOLE = {"classes": ["Block"]}
KEY = "strategy.activation_checkpointing"


@pytest.mark.parametrize(
    ("given", "proposed"),
    [
        (None, [{KEY: {**WHOLE, "policy": "matmuls"}}, {KEY: {**WHOLE, "every": 2}}, {KEY: WHOLE}, {KEY: {**WHOLE, "offload": True}}]),
        (WHOLE, [{f"{KEY}.offload": True}]),
        ({"policy": "matmuls", "every": 3}, [{f"{KEY}.policy": None, f"{KEY}.every": 1}, {f"{KEY}.policy": None, f"{KEY}.every": 1, f"{KEY}.offload": True}]),
        ({"offload": True, "recompute": False}, [{f"{KEY}.recompute": True}]),
        ({"offload": True}, []),
        ("attention", [{KEY: WHOLE}, {KEY: {**WHOLE, "offload": True}}]),
        ("model", [{KEY: {**WHOLE, "offload": True}}]),
        ({"partition_activations": True}, []),
    ],
    ids=["none", "all", "some", "offloaded", "both", "attention", "own switch", "of an engine"],
)  # fmt: skip
def test_recomputation_and_offloading_go_on_from_what_is_given(given, proposed):
    base = planned(ACTIVATIONS, options={"wrap": "blocks", "activation_checkpointing": given})
    assert [one.changes for one in possible_changes(base, job()) if one.kind in RECOMPUTING] == proposed


def test_axes_stay_within_a_node_and_keep_the_samples_of_an_update():
    changes = [one.changes for one in possible_changes(planned(ACTIVATIONS, accumulate=3), job()) if one.kind == "tp"]
    assert changes == [
        {"strategy.type": "mesh:tp2", "optim_wrapper.accumulative_counts": 6},
        {"strategy.type": "mesh:tp4", "optim_wrapper.accumulative_counts": 12},
    ]
    mesh = planned(ACTIVATIONS, options={"dp_shard": 4}, axes={"dp_shard": 4, "tp": 2}, known=MESH, data_shards=4)
    sizes = {one.kind: one.changes for one in possible_changes(mesh, job("mesh:dp4xtp2"))}
    assert sizes["tp"] == {"strategy.tp": 4, "strategy.dp_shard": -1, "optim_wrapper.accumulative_counts": 2}
    assert sizes["cp"] == {"strategy.cp": 2, "strategy.dp_shard": -1, "optim_wrapper.accumulative_counts": 2}


def test_the_cheapest_change_that_could_suffice_comes_first_and_the_first_that_fits_ends_the_search():
    # Units cannot free more than 10, so they are not planned; smaller micro-batches could by two are too few.
    base = planned(ACTIVATIONS)
    asked, found, notes = search(base, [planned({"parameters": 30}, sent=150, flops=110)], room=50)
    assert asked == [("fsdp", {"train_dataloader.batch_size": 1, "optim_wrapper.accumulative_counts": 4})]
    (only,) = found
    assert only.keys == "train_dataloader=dict(batch_size=1), optim_wrapper=dict(accumulative_counts=4)"
    assert (only.peak, only.fits, only.flops, only.sent) == (30, True, pytest.approx(1.1), pytest.approx(1.5))
    assert notes == []
    asked, _, _ = search(base, [planned({"parameters": 5})], room=91)
    assert asked == [("fsdp", {"strategy.wrap": "blocks"})]


def test_changes_that_do_not_suffice_alone_are_combined():
    base = planned(ACTIVATIONS, options={"wrap": "blocks"}, batch_size=2)
    recomputing = {"wrap": "blocks", "activation_checkpointing": {"classes": ["Block"]}}
    less = planned({"parameters": 10, "activations": 35}, options=recomputing, batch_size=2)
    asked, found, _ = search(base, [less, less, planned({"parameters": 10, "activations": 18})], room=30)
    classes = {"strategy.activation_checkpointing": {"classes": ["Block"]}}
    assert asked[0] == ("fsdp", classes)
    assert asked[1] == ("fsdp", {KEY: {**WHOLE, "offload": True}})
    assert asked[2] == ("fsdp", {**classes, "train_dataloader.batch_size": 1, "optim_wrapper.accumulative_counts": 2})
    assert [one.fits for one in found] == [False, False, True]
    assert found[2].keys == (
        'strategy=dict(activation_checkpointing=dict(classes=["Block"])), train_dataloader=dict(batch_size=1), '
        "optim_wrapper=dict(accumulative_counts=2)"
    )


def test_what_is_refused_or_does_not_help_is_not_tried_again():
    base = planned({"parameters": 80, "activations": 20}, options={"wrap": "blocks"}, batch_size=1)
    asked, found, notes = search(base, ["not possible", base, base, base, base], room=1)
    assert [(strategy, *changes) for strategy, changes in asked] == [
        ("fsdp", "strategy.activation_checkpointing"),
        ("fsdp", "strategy.activation_checkpointing"),
        ("mesh:tp4", "optim_wrapper.accumulative_counts"),
        ("mesh:cp4", "optim_wrapper.accumulative_counts"),
        ("fsdp", "strategy.mixed_precision"),
    ]
    assert found[0].message == "not possible"
    assert not any(one.fits for one in found)
    assert notes == []


def test_the_number_of_plans_is_bounded_and_said(monkeypatch):
    monkeypatch.setattr(advice, "PLANS", 2)
    base = planned(ACTIVATIONS, options={"wrap": "blocks"})
    ever_less = [dataclasses.replace(planned({"activations": 80 - i}, options={"wrap": "blocks"})) for i in range(3)]
    asked, _, notes = search(base, ever_less, room=20)
    assert len(asked) == 2
    assert notes == ["advice: ended after 2 changes, others were not planned"]


def test_another_strategy_keeps_what_was_given_to_this_one():
    base = planned({"parameters": 99, "activations": 1}, known=["activation_checkpointing"], batch_size=None)
    given = {"type": "ddp", "activation_checkpointing": {"classes": ["Block"]}}
    asked, found, _ = search(base, [planned({"parameters": 13})], 50, PlannedJob("train.py", given, 8))
    assert asked == [({**given, "type": "fsdp"}, {"strategy.wrap": "blocks"})]
    assert found[0].keys == 'strategy=dict(type="fsdp", wrap="blocks")'


def test_changes_as_python_text():
    changes = {"strategy.type": "mesh:tp2", "strategy.activation_checkpointing": {"classes": ["A", "B"]}, "a.b": None}
    text = as_arguments(changes)
    assert text == 'strategy=dict(type="mesh:tp2", activation_checkpointing=dict(classes=["A", "B"])), a=dict(b=None)'
    assert eval(f"dict({text})")["strategy"]["activation_checkpointing"] == {"classes": ["A", "B"]}
    further = {"a.b": {"c": 1}, "a.b.d": 2}
    assert as_arguments(further) == "a=dict(b=dict(c=1, d=2))"
    assert further == {"a.b": {"c": 1}, "a.b.d": 2}


def test_without_a_change_that_could_help_none_is_planned():
    # There are changes, but none divides parameters that are sharded already.
    asked, found, notes = search(planned({"parameters": 9, "optimizer_state": 9}), [], room=1)
    assert (asked, found) == ([], [])
    assert notes == ["advice: no change of its options is known that needs less memory"]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero3", marks=pytest.mark.deepspeed)])
def test_the_new_peak_is_that_of_the_change_planned_by_hand(strategy):
    memory = {"world_size": 8, "arguments": ("llama",)}
    whole = plan(SCRIPT, [strategy], **memory).strategies[0].highest.peak
    rest = whole.total - whole.by_kind["activations"]
    room = int((rest + whole.by_kind["activations"] // 4) / 0.95)  # more than half of the samples at once do not fit
    found = plan(SCRIPT, [strategy], device_memory=room, advice=True, **memory)
    (base,) = found.strategies
    assert found.fits(base) is False
    last = base.advice[-1]
    assert last.fits
    assert not any(one.fits for one in base.advice[:-1])
    by_hand = plan_strategy(PlannedJob(SCRIPT, strategy, 8, 1, ("llama",), last.changes))
    assert by_hand.highest.peak.total == last.peak <= room
    assert by_hand.samples == base.samples
    assert by_hand.sent == pytest.approx(last.sent * base.sent)


MANY_WORDS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from flextrain import FlexibleRunner

model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))
data = [dict(input_ids=torch.zeros(64, dtype=torch.long), labels=torch.zeros(64, dtype=torch.long))] * 8
FlexibleRunner(
    model=model,
    work_dir="work_dirs",
    train_dataloader=dict(batch_size=4, dataset=data, collate_fn=dict(type="default_collate")),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    train_cfg=dict(by_epoch=True, max_epochs=1),
).train()
"""


@PLANS
@pytest.mark.full
@pytest.mark.processes
def test_logits_by_chunks_are_proposed_once(tmp_path):
    pytest.importorskip("transformers", reason="needs pip install flextrain[hf]")
    script = tmp_path / "train.py"
    script.write_text(MANY_WORDS)
    by_chunks = dict(transforms=[dict(type="ChunkedLoss", chunk=16)])
    before, after = (plan_strategy(PlannedJob(str(script), "ddp", 2, 1, (), changes)) for changes in ({}, by_chunks))
    assert (before.recipe.has_large_logits, after.recipe.has_large_logits) == (True, False)
    assert after.highest.peak.total < before.highest.peak.total / 2
