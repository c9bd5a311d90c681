"""Whole runs under a sharding strategy: the same as under DDP, hooks included, and each goes on from the other's checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flextrain.testing import WorkerGroup

from .training import SGD, Net, Samples, SaveEvery, Watch, fresh_group, make_runner, validation, whole_state

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap=["Linear"])
SETTINGS: dict[str, Any] = dict(
    model=partial(Net, dropout=0.0),
    train_dataloader=dict(batch_size=2, dataset=Samples(26), collate_fn="default_collate"),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=2, clip_grad=dict(max_norm=0.5)),
    param_scheduler=dict(type="LinearLR", start_factor=0.1, end=2, convert_to_iter_based=True),
    custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    **validation(),
)


def trained(folder: str, strategy: dict[str, Any], more: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Everything that training has changed, whole, and what was seen on the way."""
    fresh_group()
    watch = Watch()
    hooks = [*SETTINGS["custom_hooks"], watch, *(more or [])]
    runner = make_runner(folder, **{**SETTINGS, "strategy": strategy, **changes, "custom_hooks": hooks})
    runner.train()
    metrics = runner.val()
    state = {
        key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in whole_state(runner).items()
    }
    state = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    runner.strategy.teardown()
    losses = [float(loss) for loss in watch.losses]
    return {"state": state, "accuracy": metrics["accuracy"], "losses": losses, "trained": watch.trained}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        torch.testing.assert_close(
            found["state"][key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert found["accuracy"] == expected["accuracy"]


def test_a_run_is_the_same_under_both(tmp_path: Path, workers2: WorkerGroup) -> None:
    ddp = workers2.run(trained, str(tmp_path / "ddp"), DDP)
    fsdp = workers2.run(trained, str(tmp_path / "fsdp"), FSDP)
    for one, other in zip(fsdp, ddp, strict=True):
        same(one, other)
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert one["trained"] == other["trained"]
    assert any(key.startswith("hook.") for key in ddp[0]["state"]), "averages are compared too"


@pytest.mark.parametrize(("saved", "resumed"), [(DDP, FSDP), (FSDP, DDP), (FSDP, FSDP)], ids=["to", "from", "itself"])
def test_each_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, workers2: WorkerGroup, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    whole = workers2.run(trained, str(tmp_path / "whole"), saved, [SaveEvery({5})])
    rest = workers2.run(trained, str(tmp_path / "rest"), resumed, resume=str(tmp_path / "whole" / "iter_5"))
    for found, expected in zip(rest, whole, strict=True):
        same(found, expected)
        assert found["trained"] == expected["trained"][5:]
        assert found["losses"] == pytest.approx(expected["losses"][5:], rel=1e-5)


def test_weights_of_a_file_are_dealt_out(tmp_path: Path, workers2: WorkerGroup) -> None:
    torch.manual_seed(7)
    weights = Net(dropout=0.0).state_dict()
    torch.save(weights, tmp_path / "weights.pth")
    changes = dict(load_from=str(tmp_path / "weights.pth"), optim_wrapper=dict(optimizer={**SGD, "lr": 0.0}))
    for found in workers2.run(trained, str(tmp_path / "run"), FSDP, **changes):
        for name, value in weights.items():
            assert torch.equal(found["state"][f"model.{name}"], value)
