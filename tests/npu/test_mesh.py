"""MeshStrategy on the simulated device trains as one CPU does."""

from __future__ import annotations

from typing import Any

import pytest

from ..mesh.parity import RECIPES, compare

pytestmark = [pytest.mark.npu, pytest.mark.distributed]

MESH = dict(type="MeshStrategy", device="npu")
PLAN = {"layers.*.[qkv]": "colwise", "layers.*.out": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tp": (dict(tp=2, plan=PLAN), "plain"),
    "tp on local tensors": (dict(tp=2, plan=PLAN, tp_kind="local"), "plain"),
    "tp of transformers' plan": (dict(tp=2), "llama"),
    "pp": (dict(pp=2), "plain"),
    "cp": (dict(cp=2), "llama"),
    "cp in a ring": (dict(cp=2, cp_kind="ring"), "plain"),
    "ep": (dict(ep=2, plan={"layers.*.experts": "experts"}), "mixture"),
    "dp_shard": (dict(dp_shard=2, wrap="blocks"), "plain"),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(npu2: Any, case: str) -> None:
    options, model = CASES[case]
    npu2.run(compare, {**MESH, **options}, model, RECIPES["accumulate-clip"])
