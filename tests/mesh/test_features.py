"""What a run has beside its updates goes with every mesh: metrics, averages, checkpoints, recomputation, compiling, precision."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flextrain import BaseMetric, FlexibleRunner
from flextrain.core.torch_compat.torch_private import is_compiled
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import alone
from flextrain.testing.models import TinyTransformer
from flextrain.testing.sessions import whole_model

from .models import build, sample
from .parity import RECIPES, started

pytestmark = pytest.mark.distributed

BATCH = 8
PLAN = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
MESH = dict(type="MeshStrategy", device="cpu", timeout_s=60)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {  # processes that read different samples, and options
    "tp2": (1, dict(MESH, tp=2, plan=PLAN)),
    "pp2": (1, dict(MESH, pp=2)),
    "cp2": (1, dict(MESH, cp=2, cp_keys={"x": 1, "y": 1}, cp_positions="where")),
    "tp2 found": (1, dict(MESH, tp=2)),  # the plan, by tracing with the first samples
}
ONE = dict(type="SingleDeviceStrategy", device="cpu")
# Options of the runner; "more" has further ones of the mesh.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "average": dict(custom_hooks=[dict(type="EMAHook", momentum=0.1)]),
    "recomputing": dict(more=dict(activation_checkpointing=dict(classes=["Block"]))),
    "compiled": dict(more=dict(wrap="blocks"), compile=dict(backend="eager")),
    "values": dict(
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=2e-2), clip_grad=dict(type="value", clip_value=0.01))
    ),
    "units": dict(more=dict(wrap="blocks", prefetch=1)),
    "asynchronous saves": dict(default_hooks=dict(checkpoint=dict(interval=1, async_save=True))),
}
QUICK = {"pp2": ("plain", "average", "values"), "tp2": ("values",), "cp2": ("plain",)}
Result = tuple[dict[str, Tensor], dict[str, Any]]


class Language(TinyTransformer):
    """Its positions may come with the batch; two divides its sequences."""

    length = 6

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss", where: Tensor | None = None) -> Any:
        hidden = self.tokens(x) + self.positions(self.order if where is None else where)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits.flatten(0, 1), y.flatten())}
        return logits.argmax(-1), y


class Correct(BaseMetric):
    """How many predictions are right, and of how many samples."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        predicted, target = data_samples
        self.results += (predicted == target).float().mean(1).tolist()

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"correct": round(sum(results), 4), "count": len(results)}


def loader(count: int, seed: int, batch_size: int, shuffle: bool) -> dict[str, Any]:
    batch = Language.sample(count, seed)
    items = [{name: values[i] for name, values in batch.items()} for i in range(count)]
    sampler = dict(type="DefaultSampler", shuffle=shuffle)
    return dict(batch_size=batch_size, dataset=items, sampler=sampler, collate_fn=dict(type="default_collate"))


def runner(strategy: Mapping[str, Any], folder: Path, shards: int, **options: Any) -> FlexibleRunner:
    given: dict[str, Any] = dict(
        model=Language,
        work_dir=folder,
        strategy=dict(strategy) | options.pop("more", {}),
        train_dataloader=loader(44, 0, BATCH // shards, shuffle=True),
        val_dataloader=loader(21, 1, 2, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=Correct),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.05), clip_grad=dict(max_norm=0.5)),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        randomness=dict(seed=7),
        default_hooks=dict(checkpoint=dict(interval=1)),
    )
    return FlexibleRunner(**given | options)


def run(strategy: Mapping[str, Any], folder: Path, shards: int, **options: Any) -> Result:
    made = runner(strategy, folder, shards, **options)
    try:
        made.train()
        return whole_model(made.strategy), made.val()
    finally:
        made.strategy.leave()


def assert_same(found: Result, expected: Result) -> None:
    same_tensors(found[0], expected[0], "final weights", 1e-5)  # float32
    assert found[1] == expected[1]
    assert found[1]["count"] == 21


@functools.cache
def of_one_device(feature: str) -> Result:
    """In a worker, once: the run of one process."""
    options = {key: value for key, value in FEATURES[feature].items() if key != "more"}
    with alone(), tempfile.TemporaryDirectory() as folder:
        return run(ONE, Path(folder), 1, **options)


def trained(mesh: str, feature: str, folder: Path) -> None:
    shards, spec = MESHES[mesh]
    expected = of_one_device(feature)
    assert_same(run(spec, folder, shards, **FEATURES[feature]), expected)


def pairs() -> list[Any]:
    return [
        pytest.param(mesh, feature, marks=[] if feature in QUICK.get(mesh, ()) else [pytest.mark.full])
        for mesh in MESHES
        for feature in FEATURES
    ]


@pytest.mark.parametrize("mesh, feature", pairs())
def test_feature(workers: Callable[[int], WorkerGroup], tmp_path: Path, mesh: str, feature: str) -> None:
    workers(2).run(trained, mesh, feature, tmp_path)


def resumed(mesh: str, folder: Path) -> None:
    shards, spec = MESHES[mesh]
    expected, is_first = of_one_device("plain"), os.environ["RANK"] == "0"
    made = runner(spec, folder / "mesh", shards, train_cfg=dict(by_epoch=True, max_epochs=1))
    made.train()
    made.strategy.leave()
    if is_first:
        with alone():
            assert_same(run(ONE, folder / "one", 1, resume=True, load_from=str(folder / "mesh" / "epoch_1")), expected)
    assert_same(run(spec, folder / "mesh", shards, resume=True), expected)


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_resumed_on_the_mesh_and_on_one_device(workers2: WorkerGroup, tmp_path: Path, mesh: str) -> None:
    workers2.run(resumed, mesh, tmp_path)


def evaluated(mesh: str, folder: Path) -> dict[str, Any]:
    """Validation of weights from a file, without any training."""
    shards, spec = MESHES[mesh]
    torch.manual_seed(1)
    model = Language()
    path = folder / f"weights{os.environ['RANK']}.pth"
    torch.save(model.state_dict(), path)
    with alone():
        made = runner(ONE, folder / f"one{path.stem}", 1, load_from=str(path))
        expected = made.val()
        made.strategy.leave()
    made = runner(spec, folder / "mesh", shards, load_from=str(folder / "weights0.pth"))
    try:
        found = made.val()
        same_tensors(whole_model(made.strategy), {f"model.{n}": p for n, p in model.named_parameters()}, "weights")
    finally:
        made.strategy.leave()
    assert found == expected
    return found


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_evaluated_from_a_file(workers2: WorkerGroup, tmp_path: Path, mesh: str) -> None:
    assert workers2.run(evaluated, mesh, tmp_path)[0]["count"] == 21


def called() -> tuple[list[str], float]:
    """A model called by the user, as for generating text: outside of an update, after one."""
    torch.set_num_threads(1)
    expected = build("plain")
    with started(
        dict(type="MeshStrategy", tp=2, plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}),
        "plain",
        RECIPES["adamw"],
    ) as session:
        ids = sample("plain", 2, 0)["input_ids"]
        outputs = [session.model(ids), session.model(ids, labels=ids)["loss"]]  # it makes the positions itself
        outputs[1].backward()
        with contextlib.suppress(TypeError):
            session.model()
        with torch.no_grad():
            difference = (session.model(ids) - expected(ids)).abs().max()
    return [type(output).__name__ for output in outputs], float(difference)


def test_called_outside_of_an_update(workers2: WorkerGroup) -> None:
    for names, difference in workers2.run(called):
        assert names == ["Tensor", "Tensor"]
        assert difference < 1e-6


def is_compiled_without_units(mesh: str, folder: Path) -> bool:
    _, spec = MESHES[mesh]
    made = runner(spec, folder, 1, compile=dict(backend="eager"), train_cfg=dict(by_epoch=False, max_iters=1))
    try:
        made.train()
        return is_compiled(made.strategy.module)
    finally:
        made.strategy.leave()


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2"])
def test_compiles_the_whole_model_without_units(workers2: WorkerGroup, tmp_path: Path, mesh: str) -> None:
    assert all(workers2.run(is_compiled_without_units, mesh, tmp_path))
