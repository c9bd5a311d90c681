"""Whole runs on every mesh are those of one device, in float64: what a runner has beside its updates, alone and together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain.core.base.errors import FlexTrainError
from flextrain.core.checkpoint import export_weights
from flextrain.core.checkpoint.compare import damages
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import alone, train
from flextrain.testing.sessions import whole_model

from ..device import DEVICE
from ..waiting import wait_until
from . import graded
from .graded import EVALUATED, MESHES, Correct, Graded, Merge, Outcome, loader, on_one_device, optim, run
from .models import VOCABULARY, build, sample
from .parity import RECIPES, data, dtype_of, started

pytestmark = pytest.mark.distributed

PARTS = {"embed": dict(lr_mult=0.1), "layers.1": dict(lr_mult=0.5, decay_mult=2.0)}
PARAMWISE = dict(bias_decay_mult=0.0, norm_decay_mult=0.0, custom_keys=PARTS)
WARM_UP = dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=3)
TESTED = dict(test_dataloader=loader(EVALUATED, 1, 2), test_cfg=dict(), test_evaluator=dict(type=Correct))
NOT_VALIDATED: dict[str, Any] = dict.fromkeys(("val_dataloader", "val_cfg", "val_evaluator"))
# Options of the runner; "more" are options of the mesh.
FEATURES: dict[str, dict[str, Any]] = {
    "average": dict(custom_hooks=[dict(type="EMAHook", momentum=0.1)]),
    "recomputing": dict(more=dict(activation_checkpointing=dict(classes=["PlainBlock"]))),
    "recomputing some": dict(more=dict(activation_checkpointing="matmuls")),
    "compiled": dict(more=dict(wrap="blocks"), compile=dict(backend="eager")),
    "values": dict(optim_wrapper=optim(clip_grad=dict(type="value", clip_value=0.001))),
    "units": dict(more=dict(wrap="blocks")),
    "asynchronous saves": dict(default_hooks=dict(checkpoint=dict(interval=1, async_save=True))),
    "groups": dict(optim_wrapper=optim(paramwise_cfg=PARAMWISE)),
    "first frozen": dict(graded=dict(frozen=("embed", "position", "layers.0"))),  # all of the first stage
    "last frozen": dict(graded=dict(frozen=("norm", "head", "layers.1"))),
    "some frozen": dict(graded=dict(frozen=("layers.0.q", "layers.0.attention.q", "layers.1.norm", "head"))),
    "tied": dict(graded=dict(tied=True)),
    "schedules": dict(param_scheduler=[WARM_UP, dict(type="CosineAnnealingLR", by_epoch=True, T_max=3, begin=1)]),
    "plateau": dict(
        param_scheduler=dict(type="ReduceOnPlateauLR", monitor="correct", rule="greater", patience=0, threshold=9.0)
    ),
    "early end": dict(
        custom_hooks=[dict(type="EarlyStoppingHook", monitor="correct", rule="greater", patience=0, min_delta=9.0)]
    ),
    "three": dict(optim_wrapper=optim(accumulative_counts=3)),
    "steps": dict(kind=graded.Steps, **TESTED),
    "calls of forward": dict(kind=graded.CallsForward),
    "forward of its own": dict(kind=graded.RunsForward),
    "two calls": dict(kind=graded.CallsTwice),
    "parts": dict(kind=graded.CallsParts, optim_wrapper=optim(clip_grad=None)),
    "augmented": dict(
        kind=graded.Separate,
        **NOT_VALIDATED,
        **{**TESTED, "test_dataloader": loader(EVALUATED, 1, 2, collate=graded.with_another)},
        custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=dict(type=Merge))],
    ),
    "torchmetrics": dict(val_evaluator=[dict(type=Correct), dict(type="MulticlassAccuracy", num_classes=VOCABULARY)]),
}
TOGETHER = dict(
    custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    default_hooks=dict(checkpoint=dict(interval=1, async_save=True)),
    optim_wrapper=optim(paramwise_cfg=PARAMWISE),
    param_scheduler=FEATURES["schedules"]["param_scheduler"],
    graded=dict(frozen=("layers.0",)),
    train_cfg=dict(by_epoch=True, max_epochs=2),
    **TESTED,
)
REFUSED = {
    (
        "two calls",
        "pp",
    ): "model: CallsTwice is called twice for one batch, a pipeline sends each through its stages once",
    ("parts", "pp"): "strategy.pp: CallsParts defines its own train_step, but no process of a pipeline can run it",
    ("parts", "cp"): "model: CallsParts defines its own train_step, whose loss strategy.cp cannot weigh",
    # Parameters are sharded while the whole model is not called.
    ("calls of forward", "cp"): "mixed torch.Tensor and DTensor",
    ("calls of forward", "ep"): "mixed torch.Tensor and DTensor",
    ("calls of forward", "dp"): "mixed torch.Tensor and DTensor",
}
SAID: dict[tuple[str, str], str | None] = {  # other than REFUSED
    ("calls of forward", "dp2xtp2"): "",
    ("calls of forward", "pp2xtp2"): "",
    ("calls of forward", "ep2xtp2"): None,
}
QUICK = ("pp2", "cp2")


def same(found: Outcome, expected: Outcome) -> None:
    same_tensors(found[0], expected[0], "final weights", 1e-12)
    assert found[0].keys() == expected[0].keys()
    assert found[1:] == expected[1:]


def trained(mesh: str, options: Mapping[str, Any], folder: Path) -> None:
    """In a worker."""
    torch.set_num_threads(1)
    _, shards, sparse, spec = MESHES[mesh]
    with dtype_of(torch.float64):
        expected = on_one_device(sparse, **options)
        found = run(spec, folder, shards, sparse, **options)
    same(found, expected)
    assert {metrics["count"] for metrics in found[1:3] if metrics} == {EVALUATED}  # no sample was counted twice


def together(mesh: str, folder: Path) -> None:
    """In a worker: to the end; and from the first epoch on, on the mesh, and on one device."""
    torch.set_num_threads(1)
    _, shards, sparse, spec = MESHES[mesh]
    with dtype_of(torch.float64):
        expected = on_one_device(sparse, **TOGETHER)
        found = run(spec, folder / "mesh", shards, sparse, **TOGETHER)
        same(found, expected)
        start = dict(resume=True, load_from=str(folder / "mesh" / "epoch_1"))
        same(run(spec, folder / "again", shards, sparse, **TOGETHER, **start), expected)
        if os.environ["RANK"] == "0":
            same(on_one_device(sparse, **TOGETHER, **start), expected)


def four(mesh: str) -> Any:
    return pytest.param(mesh, marks=[] if mesh in QUICK else pytest.mark.full)


@pytest.mark.parametrize("mesh", [four(mesh) for mesh in MESHES])
def test_together(workers: Callable[[int], WorkerGroup], tmp_path: Path, mesh: str) -> None:
    workers(MESHES[mesh][0]).run(together, mesh, tmp_path)


@pytest.mark.parametrize(
    "mesh, feature",
    [
        pytest.param(mesh, feature, marks=[] if (mesh, feature) == ("tp2", "values") else pytest.mark.full)
        for mesh in MESHES
        for feature in FEATURES
    ],
)
def test_feature(workers: Callable[[int], WorkerGroup], tmp_path: Path, mesh: str, feature: str) -> None:
    axes = [axis for axis in ("pp", "cp", "ep", "dp") if axis in mesh]
    said = next((REFUSED[feature, axis] for axis in axes if (feature, axis) in REFUSED), None)
    said = SAID.get((feature, mesh), said)
    if said is None:
        workers(MESHES[mesh][0]).run(trained, mesh, FEATURES[feature], tmp_path)
        return
    with pytest.raises(FlexTrainError) as caught:
        workers(MESHES[mesh][0]).run(trained, mesh, FEATURES[feature], tmp_path)
    assert said in str(caught.value)


def test_a_frozen_stage_has_no_gradients_of_weights(workers2: WorkerGroup, tmp_path: Path) -> None:
    split = dict(more=dict(pp_schedule="zero_bubble"))
    workers2.run(trained, "pp2", FEATURES["first frozen"] | split, tmp_path)


def distance(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    return max(float((weights[name] - other).norm() / other.norm()) for name, other in others.items())


def precise(mesh: str, wrapper: Mapping[str, Any], more: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """In a worker: how far a run in bfloat16 is from that of one device, and both from float32."""
    torch.set_num_threads(1)
    _, shards, sparse, spec = MESHES[mesh]
    one = dict(type="FSDPStrategy", device=DEVICE, **more) if more else graded.ONE
    mine = folder / f"one{os.environ['RANK']}"
    with alone():
        expected = run(one, mine, 1, sparse, optim_wrapper=optim(**wrapper))[0]
    exact = on_one_device(sparse)[0]
    found = run({**spec, **more}, folder / "mesh", shards, sparse, optim_wrapper=optim(**wrapper))[0]
    return {
        "apart": distance(found, expected),
        "from float32": distance(found, exact),
        "of one device": distance(expected, exact),
    }


AUTOCAST = dict(type="AmpOptimWrapper", dtype="bfloat16")
POLICY = dict(mixed_precision=dict(param_dtype="bfloat16"))


@pytest.mark.full
@pytest.mark.parametrize(
    "wrapper, more",
    [(AUTOCAST, {}), ({}, POLICY), ({}, POLICY | dict(wrap="blocks"))],
    ids=["autocast", "policy", "units"],
)
@pytest.mark.parametrize("mesh", MESHES)
def test_bfloat16(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, mesh: str, wrapper: dict[str, Any], more: dict[str, Any]
) -> None:
    for found in workers(MESHES[mesh][0]).run(precise, mesh, wrapper, more, tmp_path):
        if mesh == "pp2":  # the same operations
            assert found["apart"] < 1e-3
        assert found["of one device"] > 1e-3
        assert found["from float32"] < 2.0 * found["of one device"]  # sums are rounded once more per process


def handed_over(mesh: str, tied: bool, folder: Path) -> None:
    """In a worker: train from weights of a file, and export what was trained."""
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    _, shards, sparse, spec = MESHES[mesh]
    mine, is_first = folder / f"one{os.environ['RANK']}", os.environ["RANK"] == "0"
    options: dict[str, Any] = dict(
        custom_hooks=FEATURES["average"]["custom_hooks"], train_cfg=dict(by_epoch=True, max_epochs=1)
    )
    options["graded"] = dict(tied=tied)
    with dtype_of(torch.float64):
        on_one_device(sparse, folder=mine, **options)
        weights = mine / "weights.safetensors"
        export_weights(mine / "epoch_1", weights, averaged=True, tied=False)
        expected = on_one_device(sparse, folder=mine / "next", load_from=str(weights), **options)
        given = folder / "one0" / weights.name
        wait_until((folder / "one0" / "next" / "epoch_1").exists)  # the first process has written it
        more = dict(skip_init_weights=True)
        same(run(spec, folder / "mesh", shards, sparse, load_from=str(given), more=more, **options), expected)
        if not is_first:
            return
        assert not list(damages(folder / "mesh" / "epoch_1"))
        for averaged in (False, True):
            for tied_twice in (False, True):
                name = f"{averaged}{tied_twice}.safetensors"
                found, wanted = (
                    load_file(export_weights(place / "epoch_1", place / name, averaged=averaged, tied=tied_twice)[0])
                    for place in (folder / "mesh", mine / "next")
                )
                assert found.keys() == wanted.keys()
                same_tensors(found, wanted, "exported weights", 1e-12)
        Graded(sparse, tied=tied).load_state_dict(load_file(folder / "mesh" / "FalseTrue.safetensors"))


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_handed_over(workers: Callable[[int], WorkerGroup], tmp_path: Path, mesh: str, tied: bool) -> None:
    workers(MESHES[mesh][0]).run(handed_over, mesh, tied, tmp_path)


def dumped(mesh: str, folder: Path) -> None:
    """In a worker: predictions in a file, once for every sample."""
    torch.set_num_threads(1)
    _, shards, sparse, spec = MESHES[mesh]
    options: dict[str, Any] = dict(train_cfg=dict(by_epoch=True, max_epochs=1), **TESTED)
    files = [folder / f"one{os.environ['RANK']}.pt", folder / "mesh.pt"]
    with dtype_of(torch.float64):
        on_one_device(sparse, **options | dict(test_evaluator=dict(type="DumpResults", out_file_path=str(files[0]))))
        dump = dict(type="DumpResults", out_file_path=str(files[1]))
        run(spec, folder, shards, sparse, **options | dict(test_evaluator=dump))
    if os.environ["RANK"] == "0":
        wanted, found = (sorted(row.tolist() for row in torch.cat(torch.load(file))) for file in files)
        assert found == wanted
        assert len(found) == 2 * EVALUATED  # predictions, and targets


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_dumped(workers: Callable[[int], WorkerGroup], tmp_path: Path, mesh: str) -> None:
    workers(MESHES[mesh][0]).run(dumped, mesh, tmp_path)


def called(options: Mapping[str, Any], name: str) -> list[float]:
    """In a worker: the model is called by the user, before and after an update; how far from one device."""
    torch.set_num_threads(1)
    expected, ids, found = build(name).eval(), sample(name, 2, 3)["input_ids"], []
    with started(dict(type="MeshStrategy", **options), name, RECIPES["adamw"]) as session:
        for update in range(2):
            if update:
                train(session.strategy, session.model, session.optim, data(name, RECIPES["adamw"], 1))  # type: ignore[arg-type]
                weights = whole_model(session.strategy)
                expected.load_state_dict({key.removeprefix("model."): value for key, value in weights.items()})
            session.model.eval()
            with torch.no_grad():
                for length in (ids.shape[1], ids.shape[1] // 2):
                    outputs = session.model(input_ids=ids[:, :length].to(DEVICE)).logits.cpu()
                    found.append(float((outputs - expected(input_ids=ids[:, :length]).logits).abs().max()))
            session.model.train()
    return found


@pytest.mark.parametrize(
    "options, name",
    [
        pytest.param(dict(cp=2), "llama", id="cp2", marks=pytest.mark.full),
        pytest.param(dict(cp=2, cp_kind="ring"), "llama", id="cp2-ring", marks=pytest.mark.full),
        pytest.param(dict(ep=2), "mixtral", id="ep2", marks=pytest.mark.full),
        pytest.param(dict(tp=2), "llama", id="tp2"),
    ],
)
def test_called_by_the_user(workers2: WorkerGroup, options: dict[str, Any], name: str) -> None:
    for found in workers2.run(called, options, name):
        assert max(found) < 1e-5
