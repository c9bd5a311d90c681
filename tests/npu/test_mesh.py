"""MeshStrategy on the simulated device trains as one device does.

``make test-npu`` runs the tests of meshes themselves on it.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed.tensor._random as of_dtensors
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from flextrain.core.torch_compat.dtensor_private import dtensor_handlers
from flextrain.runner.loops.step import Stepper
from flextrain.strategies.divided import register_divided
from flextrain.strategies.mesh.tensor.operations import register_attention
from flextrain.testing.loop import shard, train

from ..mesh import test_tensor
from ..mesh.models import MATRICES, MODELS, Plain, sample
from ..mesh.parity import RECIPES, compare, data, started
from ..mesh.test_leaving import train_and_leave

pytestmark = [pytest.mark.npu, pytest.mark.distributed]

MESH = dict(type="MeshStrategy")
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tp": (dict(tp=2, plan=MATRICES), "plain"),
    "tp on local tensors": (dict(tp=2, plan=MATRICES, tp_kind="local"), "plain"),
    "tp of transformers' plan": (dict(tp=2), "llama"),
    "pp": (dict(pp=2), "plain"),
    "pp that receives a gradient ahead": (dict(pp=2, pp_schedule="gpipe"), "plain"),
    "cp": (dict(cp=2), "llama"),
    "cp in a ring": (dict(cp=2, cp_kind="ring"), "plain"),
    "ep": (dict(ep=2, plan={"layers.*.experts": "experts"}), "mixture"),
    "dp_shard": (dict(dp_shard=2, wrap="blocks"), "plain"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.full) if case == "tp of transformers' plan" else case for case in CASES],
)
def test_parity(npu2: Any, case: str) -> None:
    options, model = CASES[case]
    npu2.run(compare, {**MESH, **options}, model, RECIPES["accumulate-clip"])


class Counts(Plain):
    """Logs a number that is on the host, beside a loss that is not."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        return {"count": torch.tensor(4.0), **cast(Any, super().forward(input_ids, labels, position_ids))}


def logged_beside_the_loss(spec: dict[str, Any]) -> float:
    """In a worker."""
    with patch.dict(MODELS, counts=Counts), started({**MESH, **spec}, "counts", RECIPES["adamw"]) as session:
        batch = shard(sample("plain", 4, 0), *session.strategy.topology.shard)
        outputs = Stepper(session.strategy, session.model, session.optim).train([batch])
    return float(outputs["count"])


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_a_value_of_the_host_is_logged_beside_the_loss(npu2: Any, axis: str) -> None:
    assert npu2.run(logged_beside_the_loss, {axis: 2}) == [4.0, 4.0]


def test_stages_send_complex_numbers(npu2: Any) -> None:
    npu2.run(compare, {**MESH, "pp": 2}, "turning", RECIPES["adamw"], updates=2)


def reads_of_routes(how: Any) -> list[str]:
    """In a worker: what the library reads from the device in the last three of four updates, of two layers and a micro-batch each."""
    import torch_npu

    seen: list[str] = []

    def note(what: str) -> None:
        own = [frame for frame in traceback.extract_stack() if "torch/" not in frame.filename][:-1]
        if "/tests/" not in own[-1].filename:  # the experts of the test look for their tokens
            seen.append(f"{what} at {Path(own[-1].filename).name}")

    spec = {**MESH, "ep": 2, "plan": {"layers.*.experts": "experts"}, "activation_checkpointing": how}
    with started(spec, "mixture", RECIPES["adamw"]) as session:
        stepper = Stepper(session.strategy, session.model, session.optim)
        for number, (batch,) in enumerate(data("mixture", RECIPES["adamw"], 4)):
            torch_npu.watch(note if number else None)
            stepper.train([shard(batch, *session.strategy.topology.shard)])
        torch_npu.watch(None)
    return seen


@pytest.mark.parametrize("how", [None, dict(every=1)], ids=["kept", "recomputed"])
def test_the_host_waits_once_for_a_mixture(npu2: Any, how: Any) -> None:
    for reads in npu2.run(reads_of_routes, how):
        assert reads == ["copy to host at experts.py"] * 6


def units_of(options: dict[str, Any], model: str) -> int:
    """In a worker."""
    with started({**MESH, **options}, model, RECIPES["adamw"]) as session:
        return sum(isinstance(module, FSDPModule) for module in session.strategy.module.modules())


HALF = dict(mixed_precision=dict(param_dtype="bfloat16"))  # FSDP's also where one process has all


@pytest.mark.parametrize(
    "options, model, count",
    [
        pytest.param(dict(tp=2, plan=MATRICES, **HALF), "plain", 3, id="tp"),
        pytest.param(dict(tp=2, plan=MATRICES, wrap="model", **HALF), "plain", 1, id="one"),
        pytest.param(dict(pp=2, **HALF), "plain", 1, id="pp"),
        pytest.param(dict(cp=2), "llama", 3, id="cp", marks=pytest.mark.full),
    ],
)
def test_blocks_are_units_but_of_pipelines(npu2: Any, options: dict[str, Any], model: str, count: int) -> None:
    assert npu2.run(units_of, options, model) == [count] * 2


def test_no_process_group_lives_on(npu2: Any) -> None:
    """Backward has a thread of its own, whose layouts had the groups of every mesh."""
    for before, during, after in npu2.run(train_and_leave, {**MESH, "tp": 2}, "llama"):
        assert after <= before < during


# Random numbers: those of one device, whatever a process has of a tensor, without a message to all processes.


def drops_as_one_device(plan: dict[str, str], model: str, options: dict[str, Any]) -> None:
    """In a worker."""
    test_tensor.parity({**MESH, "tp": 2, "plan": plan, **options}, model, RECIPES["accumulate-clip"])
    assert of_dtensors._rng_tracker is None


@pytest.mark.parametrize(
    "plan, model, options",
    [
        pytest.param(test_tensor.CHUNKED, "dropping_heads", {}, id="heads"),
        pytest.param(MATRICES, "dropping", dict(sequence_parallel=True), id="positions"),
        pytest.param(test_tensor.GATHERED, "dropping", dict(tp_kind="local"), id="local tensors"),
    ],
)
def test_masks_are_those_of_one_device(npu2: Any, plan: dict[str, str], model: str, options: dict[str, Any]) -> None:
    npu2.run(drops_as_one_device, plan, model, options)


def drawn_beside_stages(options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """In a worker: losses of stages that draw at other times than each other."""
    assert test_tensor.MODELS["dropping"]  # importing it has registered them
    with started({**MESH, "tp": 2, "pp": 2, "plan": MATRICES, **options}, "dropping", RECIPES["adamw"]) as session:
        trace = train(session.strategy, session.model, session.optim, data("dropping", RECIPES["adamw"], 2))
    assert of_dtensors._rng_tracker is None
    return trace


def test_stages_draw_for_themselves(npu4: Any) -> None:
    first, *others = npu4.run(drawn_beside_stages)
    assert all(trace == first for trace in others)


def operations_left_to_torch() -> set[str]:
    """In a worker: those for which torch would make a tracker of random states, which begins with a broadcast to all."""
    register_divided()
    register_attention()
    return {str(each) for each in DTensor._op_dispatcher._random_ops - dtensor_handlers().keys()}


def test_every_operation_that_draws_is_ours(npu1: Any) -> None:
    (left,) = npu1.run(operations_left_to_torch)
    # The first two take no tensor, and nobody calls the third.
    assert left <= {"aten.rand.default", "aten.randn.default", "aten.randint_like.low_dtype_out"}


def attended() -> tuple[Any, Any, Any]:
    """In a worker: attention with dropout of equal heads, in one process and over two, and a number drawn after it."""
    mesh = init_device_mesh("npu", (2,))
    register_attention()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any, keeps: bool, rate: float) -> Any:
        """Stands for the kernel of an accelerator, which draws itself."""
        weights = functional.dropout(torch.softmax(q @ k.mT, -1), rate)
        return weights @ v, weights.logsumexp(-1), torch.zeros(()), torch.zeros(())

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", attend, "PrivateUse1")
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    ones = torch.ones(1, 4, 8, 8, device="npu")

    def on(layout: Any) -> Tensor:
        torch.manual_seed(0)
        given: Any = [distribute_tensor(ones, mesh, [layout], src_data_rank=None) for _ in range(3)]
        return cast(Any, kernel(*given, None, False, 0.5)[0]).full_tensor()

    divided, replicated = on(Shard(1)), on(Replicate())
    return divided, replicated, torch.rand(1, device="npu")


def test_kernels_that_draw_masks_themselves_draw_others_for_the_heads_of_every_process(npu2: Any) -> None:
    (divided, replicated, after), (_, also, too) = npu2.run(attended)
    assert not torch.equal(*divided.chunk(2, 1))
    assert torch.equal(replicated, also)
    assert torch.equal(after, too)
