"""flextrain verify --types: planted faults are named, and what the mesh does at thousands of processes is not."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.linalg import vector_norm
from torch.nn.functional import gelu, linear

from flextrain import ConfigError
from flextrain.cli import main
from flextrain.core.base.errors import StrategyError
from flextrain.plan.rehearsing import rehearsal
from flextrain.testing import WorkerGroup
from flextrain.verify.type_rules import Axes, Types, aligned, owned, part, parted, times
from flextrain.verify.types import TypeFault, TypeReport, TypeRow, verify_types
from flextrain.verify.verify import verify

from .planning.conftest import PLANS

# A user's script, and what a developer of a mesh could have forgotten, by name.
SCRIPT = """
import argparse, sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from flextrain import FlexibleRunner
from tests.mesh.models import MATRICES, Plain, build, sample
from tests.planted import FAULTS

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {{key: value[index] for key, value in batch.items()}}

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--fault")
parser.add_argument("--strategy", default="{{}}")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--chunk", type=int)
given = parser.parse_args()
model = (lambda: Plain(dropout=given.dropout)) if given.dropout else (lambda: build(given.model))
if given.fault:
    model = FAULTS[given.fault](model) or model
batch = sample(given.model, 64, 1)
FlexibleRunner(
    model=model,
    strategy=dict(type="MeshStrategy", **eval(given.strategy)),
    transforms=[dict(type="ChunkedLoss", chunk=given.chunk, z_loss=1e-3)] if given.chunk else [],
    train_dataloader=dict(batch_size=4, dataset=Samples(), collate_fn=dict(type="default_collate"), sampler=dict(type="DefaultSampler", shuffle=True)),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=3e-3), clip_grad=dict(max_norm=0.1), accumulative_counts=given.accumulate),
    train_cfg=dict(max_epochs=50),
).train()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(root=str(Path(__file__).parents[1])))
    return str(path)


def typed(script: str, strategy: str, processes: int, *arguments: str) -> TypeRow:
    report = verify_types(script, [strategy], arguments=arguments, processes=processes)
    return report.rows[0]


PLAIN = ["plain", "--strategy", "{'tp_kind':'local','plan':MATRICES}"]
FOUND: dict[str, tuple[list[str], str, int, TypeFault]] = {
    "row_without_sum": (PLAIN, "mesh:tp2", 2, TypeFault("loss", "", "tp", "missing", "layers.0.out")),
    # Not planted: a plan that a real run refuses after it has compared numbers, since nobody gathers what the head returns.
    "": (["plain", "--strategy", "{'tp_kind':'local'}"], "mesh:tp2", 2, TypeFault("loss", "", "tp", "missing", "head")),
    "bias_of_each": (PLAIN, "mesh:tp2", 2, TypeFault("loss", "", "tp", "doubled", "layers.0.out")),
    "sum_after_activation": (PLAIN, "mesh:tp2", 2, TypeFault("activation", "layers.0.out", "tp", "late", "layers.0.out")),
    "row_summed_twice": (PLAIN, "mesh:tp2", 2, TypeFault("loss", "", "tp", "doubled", "layers.0.out")),
    "column_input_gradient_not_summed": (
        PLAIN, "mesh:tp2", 2, TypeFault("gradient", "embed.weight", "tp", "missing", "embed"),
    ),
    "gradient_not_averaged": (
        ["plain"], "mesh:dp_replicate64", 64, TypeFault("gradient", "embed.weight", "dp_replicate", "missing", "embed"),
    ),
    "gradient_summed_twice": (
        ["plain"], "mesh:dp_replicate64", 64, TypeFault("gradient", "embed.weight", "dp_replicate", "doubled"),
    ),
    "shards_not_reduced": (
        ["plain"], "mesh:dp64", 64, TypeFault("gradient", "embed.weight", "dp_shard", "missing", "embed"),
    ),
    "norm_gradient_not_summed": (
        ["plain", "--strategy", "{'sequence_parallel':True}"], "mesh:tp2", 2,
        TypeFault("gradient", "layers.0.norm1.weight", "tp", "missing", "layers.0.norm1"),
    ),
    "dropout_apart": (PLAIN, "mesh:tp2", 2, TypeFault("loss", "", "tp", "missing", "layers.0.drop")),
    "sequence_loss_not_summed": (["plain"], "mesh:cp4", 4, TypeFault("loss", "", "cp", "missing")),
    "expert_gradient_averaged": (
        ["mixtral"], "mesh:dp16xep4", 16,
        TypeFault("gradient", "model.layers.0.mlp.experts.gate_up_proj", "dp_shard (inside ep)", "averaged", "model.layers.0.mlp.experts"),
    ),
    "norm_of_own_shards": (PLAIN, "mesh:tp2", 2, TypeFault("gradient norm", "", "tp", "missing")),
    "norm_of_own_shards_and_shared": (PLAIN, "mesh:tp2", 2, TypeFault("gradient norm", "", "tp", "doubled")),
    "ties_not_summed": (
        ["plain_tied", "--accumulate", "2"], "mesh:pp2", 2,
        TypeFault("gradient", "embed.weight", "pp", "missing"),
    ),
    "buffer_of_own_samples": (
        ["plain"], "mesh:dp_replicate64", 64, TypeFault("buffer", "layers.0.drop.mean", "dp_replicate", "missing"),
    ),
    "update_by_rank": (["plain"], "mesh:dp_replicate64", 64, TypeFault("gradient", "embed.weight", "dp_replicate", "missing")),
    "update_by_tensor_of_rank": (
        ["plain"], "mesh:dp_replicate64", 64, TypeFault("gradient", "embed.weight", "dp_replicate", "missing"),
    ),
    "gradient_summed_over_pairs": (
        ["plain"], "mesh:dp_replicate64", 64, TypeFault("gradient", "embed.weight", "dp_replicate", "doubled"),
    ),
    "shard_of_a_buffer": (PLAIN, "mesh:tp2", 2, TypeFault("loss", "", "tp", "missing", "layers.0.drop")),
}  # fmt: skip
"""By planted fault: the script's arguments, strategy, processes, and what is reported; the place is the beginning of it."""
QUICK = ("row_without_sum", "gradient_summed_twice", "norm_gradient_not_summed")


@PLANS
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in FOUND],
)
def test_a_planted_fault_is_named(script: str, name: str) -> None:
    arguments, strategy, processes, expected = FOUND[name]
    row = typed(script, strategy, processes, *arguments, *(["--fault", name] if name else []))
    assert row.status == "faulty", row
    same = [
        fault
        for fault in row.faults
        if (fault.what, fault.axis, fault.kind) == (expected.what, expected.axis, expected.kind)
    ]
    assert len(same) == 1, row
    assert not expected.name or same[0].name == expected.name, row
    assert same[0].where.startswith(expected.where), row


SOUND = {
    "data and tensor parallelism of thousands": (PLAIN, "mesh:dp_replicate32xdp_shard64xtp2", 4096),
    "dtensors": (["plain", "--strategy", "{'tp_kind':'dtensor'}"], "mesh:dp64xtp2", 128),
    "sequences": (["plain", "--strategy", "{'sequence_parallel':True}"], "mesh:dp64xtp2", 128),
    "context": (["plain"], "mesh:cp4xdp16", 64),
    "context and tensors": (PLAIN, "mesh:cp2xdp16xtp2", 64),
    "experts": (["mixtral"], "mesh:dp16xep4", 16),
    "replicas": (["plain"], "mesh:dp_replicate64", 64),
    "replicas of shards, accumulated": (["plain", "--accumulate", "2"], "mesh:dp_replicate8xdp_shard8", 64),
    "stages": (["plain_tied", "--accumulate", "2"], "mesh:pp2xdp_replicate32", 64),
    "logits by chunks": (["llama", "--chunk", "20"], "mesh:dp8xtp2", 16),
    "dropout": ([*PLAIN, "--dropout", "0.1"], "mesh:dp64xtp2", 128),
}


@PLANS
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "replicas" else pytest.mark.full) for name in SOUND]
)
def test_what_the_mesh_does_is_sound(script: str, name: str) -> None:
    arguments, strategy, processes = SOUND[name]
    row = typed(script, strategy, processes, *arguments)
    assert (row.status, row.faults) == ("sound", []), row
    assert row.operations > 100
    assert row.types["gradient"].keys() == row.types["parameter"].keys()


@PLANS
@pytest.mark.parametrize(
    "name", ["mask", *(pytest.param(name, marks=pytest.mark.full) for name in ("nonzero", "branch"))]
)
def test_what_depends_on_values_is_one_line(script: str, name: str) -> None:
    row = typed(script, "mesh:tp2", 2, *PLAIN, "--fault", name)
    assert row.status == "not run"
    assert re.match(r"the computation depends on values at layers\.1\.drop \(\S+planted\.py:\d+\), which", row.message)
    assert row.message.endswith("or compare numbers with flextrain verify --simulate")
    assert "\n" not in row.message


# Rules


def rules() -> dict[str, tuple[int, int, int, int]]:
    """By computation on four processes, of which the first is followed: whether the result is own, a part, times too large, late."""
    with rehearsal(0, 4) as found, Types(Axes(("tp",), (4,), (1,)), 0, {}) as types, found.without_values():
        pair = dist.new_group([0, 1])
        x, weight, same, mask = torch.ones(2, 4), torch.ones(4, 4), torch.ones(4), torch.ones(2, 4) > 0
        for each in (x, weight, mask):
            types.write(each, part(1))
        for each in (same, whole := torch.ones(2, 4)):
            types.write(each, part(0))
        types.is_on = True

        def total(term: Tensor, group: Any = None) -> Tensor:
            dist.all_reduce(term := term.clone(), group=group)
            return term

        def to_one(value: Tensor) -> Tensor:
            dist.reduce(value := value.clone(), 0)
            dist.broadcast(value, 0)
            return value

        def norm(*tensors: Tensor) -> Tensor:
            return total(vector_norm(torch.stack([vector_norm(each) for each in tensors])) ** 2)

        computed: dict[str, Callable[[], Tensor]] = {
            "part": lambda: x.relu(),
            "sum of terms": lambda: total(x @ weight) + same,
            "sum, by a functional collective, of a sum": lambda: total(all_reduce(x @ weight, "sum", dist.group.WORLD)),
            "sum of the same": lambda: total(same),
            "sum of the same, divided": lambda: total(same) / 4,
            "sum of the same, multiplied": lambda: total(same) * 4,
            "sum of the same over a pair": lambda: total(same, pair),
            "sum of the same in one process": lambda: to_one(same),
            "bias in each product": lambda: total(linear(x, weight, same)),
            "bias of each": lambda: total((x @ weight + same).to(torch.float64) * 2),
            "bias of each, a share": lambda: total(x @ weight + (same / 4).to(torch.float64)),
            "bias of a part": lambda: total((x + same) @ weight),
            "bias of what is chosen": lambda: total((x[:, 0] - same[0]).masked_fill(mask[:, 0], 0.0)),
            "norm of parts and the same": lambda: norm(x, same),
            "norm of parts": lambda: norm(x, weight),
            "activation of terms": lambda: total(gelu(x @ weight) * 2),
            "activation of a part": lambda: total(gelu(whole @ weight) @ weight),
        }
        answers = {}
        for name, compute in computed.items():
            types.late.clear()
            kind = types.kind_of(compute())
            answers[name] = owned(kind), parted(kind), times(kind), len(types.late)
        types.end()
    return answers


@PLANS
def test_rules_tell_terms_from_parts() -> None:
    with WorkerGroup(1, imports=[__name__]) as group:
        (found,) = group.run(rules)
    twice = {
        *(
            "sum of the same",
            "sum of the same, multiplied",
            "sum of the same over a pair",
            "sum of the same in one process",
        ),
        *(
            "bias in each product",
            "bias of each",
            "norm of parts and the same",
            "sum, by a functional collective, of a sum",
        ),
    }
    assert found == {
        name: (0, int(name == "part"), int(name in twice), int(name == "activation of terms")) for name in found
    }


def test_axes_are_cut_where_another_axis_ends() -> None:
    axes = Axes.of(64, {"dp_shard": 16, "tp": 4, "ep": 8})
    assert axes == Axes(("dp_shard (rest)", "dp_shard (inside ep)", "tp"), (8, 2, 4), (8, 4, 1))
    assert axes.index(45) == (5, 1, 1)
    assert axes.words(axes.along([0, 1, 2, 3])) == "tp"
    assert axes.words(axes.along(range(8))) == "dp_shard (inside ep) and tp"
    assert axes.along([0, 1]) == 0  # some of an axis only
    assert Axes.of(8, {}) == Axes(("data",), (8,), (1,))
    with pytest.raises(StrategyError, match="^verify.types: ep=6 ends inside of another axis"):
        Axes.of(24, {"dp_shard": 6, "tp": 4, "ep": 6})


def test_operations_of_two_ranks_are_aligned() -> None:
    one, two, three, more = (("aten::mm", 1), ("aten::add", 2), ("aten::sum", 3), ("aten::mul", 4))
    assert aligned([one, two, three], [one, two, three]) == [one, two, three]
    assert aligned([one, more, three], [one, three]) == [one, None, three]
    assert aligned([one, two, three], [one, more, two, three]) == [one, None, three]


def test_elements_keep_their_types_where_they_are_moved() -> None:
    with Types(Axes(("dp", "tp"), (4, 2), (2, 1)), 0, {}) as types:
        shard, same, other = (torch.ones(2) for _ in range(3))
        types.write(shard, part(0b10))
        types.write(same, part(0))
        types.is_on = True
        flat = torch.cat([shard, same]).mul_(2.0)
        first, second = flat.split(2)
        product = first * second
        second.copy_(shard)
        other.add_(same.sum())
        types.end()
    assert [parted(types.kind_of(each)) for each in (first, second, product, other)] == [0b10, 0b10, 0b10, 0]
    assert types.kind_of(other) == part(0)
    assert [step.name for step in types.steps][:2] == ["aten::cat", "aten::mul_.Tensor"]


def test_a_report_says_what_it_does_not_see() -> None:
    fault = TypeFault("gradient", "norm.weight", "tp", "missing", "norm (model.py:3)", 2)
    row = TypeRow("mesh:tp2", "faulty", {"tp": 2}, [fault], {"gradient": {"norm.weight": {"tp": "part"}}})
    report = TypeReport("train.py", 2, [row])
    text = str(report)
    assert (
        "mesh:tp2: gradient of norm.weight differs along tp by what each process has of its own: a reduction over tp is missing, "
        "at norm (model.py:3); 2 more"
    ) in text
    assert "Not seen: factors" in text
    assert "1 part (tp)" in text
    assert report.exit_status == 1
    assert json.loads(json.dumps(report.as_json()))["rows"][0]["faults"][0]["axis"] == "tp"
    assert TypeReport("train.py", 2, [TypeRow("ddp", "not run")]).exit_status == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--processes", "1"], "verify.processes: 1 is not allowed, give 2 or more"),
        (["--steps", "3"], "verify.steps: 3 has no effect with --types, which trains nothing; leave it out"),
        (["--simulate", "4"], "verify.simulate: 4 has no effect with --types, which trains nothing; leave it out"),
        (["--device", "cuda"], "verify.device: cuda has no effect with --types, which trains nothing; leave it out"),
        (
            ["--tolerance", "0.1"],
            "verify.tolerance: 0.1 has no effect with --types, which trains nothing; leave it out",
        ),
        (["--processes", "-4"], "verify.processes: -4 is not allowed, give 2 or more"),
        (["--processes", "4", "--simulate", "4"], "verify.processes: 4 was given with --simulate 4, give one of them"),
        (["--strategies", ","], "verify.strategies: is empty, give names with commas between them"),
        (["--strategies", "ddp,ddp"], 'verify.strategies: "ddp" is there twice, leave one out'),
        (["--timeout", "0"], "verify.timeout: 0 is not allowed, give a number of seconds above 0"),
        (["--timeout", "nan"], "verify.timeout: nan is not allowed, give a number of seconds above 0"),
    ],
)
def test_bad_input_is_one_line(
    script: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", script, "--types", *arguments]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("asked", [verify, verify_types])
@pytest.mark.parametrize(
    "strategies, options, message",
    [
        ([], {}, "verify.strategies: [] is not allowed, give a list of names"),
        ("mesh:tp2", {}, "verify.strategies: 'mesh:tp2' is not allowed, give a list of names"),
        (["ddp"], dict(processes="4"), "verify.processes: 4 is not allowed, give 2 or more"),
        (["ddp"], dict(processes=2.5), "verify.processes: 2.5 is not allowed, give 2 or more"),
        (["ddp"], dict(timeout_s=-1.0), "verify.timeout: -1 is not allowed, give a number of seconds above 0"),
    ],
)
def test_what_nothing_would_be_verified_with(
    script: str, asked: Any, strategies: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(script, strategies, **options)
    assert str(caught.value) == message


def test_a_script_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^verify.script: .* is not a file"):
        verify_types(str(tmp_path), ["mesh:tp2"], processes=2)
    with pytest.raises(ConfigError, match="^verify.script: .*train.py is not a file"):
        verify_types(str(tmp_path / "train.py"), ["mesh:tp2"], processes=2)
