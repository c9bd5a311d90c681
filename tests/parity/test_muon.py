"""Muon under every strategy makes the training run of one device, with two messages per update and each matrix once in them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from flextrain import OptimWrapper

from ..conftest import WorkerFactory
from ..mesh.models import MATRICES
from ..mesh.parity import Recipe, compare
from ..mesh.test_parity import EXPERTS, OF_MIXTURES

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class OfMatrices(Recipe):
    """Muon in float64, so that rounding is not magnified, and AdamW for the rest."""

    lr: float = 0.01
    parts: int | None = None
    bucket_mb: float = 128.0
    paramwise: bool = False

    def optim(self) -> OptimWrapper:
        options: dict[str, Any] = dict(type="Muon", lr=self.lr, weight_decay=0.05, ns_dtype="float64", bucket_mb=self.bucket_mb)
        options["others"] = dict(type="AdamW", lr=3e-3, weight_decay=0.05)
        if self.parts is not None:
            options["parts"] = {"layers.*.qkv": self.parts}
        more: dict[str, Any] = {} if self.clip is None else dict(clip_grad=dict(max_norm=self.clip))
        if self.paramwise:
            keys = {"layers.0": dict(lr_mult=0.5), "embed": dict(lr_mult=3.0, betas=(0.8, 0.9)), "down": dict(momentum=0.8)}
            more["paramwise_cfg"] = dict(custom_keys=keys, norm_decay_mult=0.0, bias_lr_mult=2.0)
        return OptimWrapper(options, accumulative_counts=self.accumulate, **more)


RECIPE = OfMatrices(accumulate=2)
STRATEGIES: dict[str, tuple[int, dict[str, Any], str, OfMatrices]] = {
    "ddp": (2, dict(type="DDPStrategy"), "plain", RECIPE),
    "fsdp": (2, dict(type="FSDPStrategy", wrap="blocks"), "fused", dataclasses.replace(RECIPE, parts=3)),
    "small buckets": (2, dict(type="FSDPStrategy"), "plain_tied", dataclasses.replace(RECIPE, bucket_mb=0.05, paramwise=True)),
    "one at a time": (2, dict(type="FSDPStrategy"), "plain", dataclasses.replace(RECIPE, bucket_mb=1e-6, clip=None)),
    "tp2": (2, dict(type="MeshStrategy", tp=2, plan=MATRICES), "plain", RECIPE),
    "pp2": (2, dict(type="MeshStrategy", pp=2), "plain_tied", RECIPE),
    "ep2": (2, dict(type="MeshStrategy", dp_shard=2, ep=2, plan=EXPERTS), "mixture", RECIPE),
    "fsdp4": (4, dict(type="FSDPStrategy"), "fused", dataclasses.replace(RECIPE, parts=3, paramwise=False)),
    "hsdp": (4, dict(type="FSDPStrategy", replicate_size=2), "plain", RECIPE),
    "tp2xfsdp2": (4, dict(type="MeshStrategy", tp=2, dp_shard=2, plan=MATRICES), "plain", RECIPE),
    "tp2xep2": (4, dict(type="MeshStrategy", tp=2, dp_shard=2, ep=2, plan={**OF_MIXTURES, **EXPERTS}), "mixture", RECIPE),
    "ep2xfsdp2": (4, dict(type="MeshStrategy", dp_shard=4, ep=2, plan=EXPERTS), "mixture", RECIPE),
    "pp2xfsdp2": (4, dict(type="MeshStrategy", pp=2, dp_shard=2), "plain_tied", RECIPE),
    "replicate2xtp2": (4, dict(type="MeshStrategy", dp_replicate=2, tp=2, plan=MATRICES), "plain", RECIPE),
}  # fmt: skip
QUICK = ("fsdp", "small buckets", "tp2", "ep2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in STRATEGIES]
)
def test_trains_as_on_one_device(workers: WorkerFactory, name: str) -> None:
    size, options, model, recipe = STRATEGIES[name]
    traces = workers(size).run(compare, options, model, recipe, tolerance=1e-10)
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])
