"""A model that ``skip_init_weights`` left at zero is not trained, nor evaluated, before something has given it values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flextrain import FSDPStrategy, OptimWrapper
from flextrain.core.base.errors import FlexTrainError
from flextrain.strategies.parts import note_initialised, prepare
from flextrain.testing import WorkerGroup

from .training import Net, make_runner

pytestmark = pytest.mark.distributed
ZERO = dict(type="FSDPStrategy", device="cpu", skip_init_weights=True)


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except FlexTrainError as error:
        return str(error)
    return ""


def model() -> Net:
    return Net(dropout=0.0)


def fills(runner: Any, names: Any = None) -> None:
    """What a user's code does between set-up and training."""
    runner._parts.set_up()
    with torch.no_grad():
        for parameter in runner.model.parameters():
            nn.init.constant_(parameter, 0.1)
    note_initialised(runner.strategy, names)


def runs(folder: Path) -> dict[str, str]:
    """In a worker: what each way to begin says."""
    found = {}
    source = make_runner(folder / "source", model=model)
    source.train()
    source.save_checkpoint(folder / "source", "saved")
    weights = {name: p.detach().clone() for name, p in source.model.named_parameters()}
    save_file(weights, folder / "all.safetensors")
    first = next(iter(weights))
    save_file({name: p for name, p in weights.items() if name != first}, folder / "some.safetensors")
    cases: dict[str, dict[str, Any]] = {
        "train": {},
        "all": dict(load_from=folder / "all.safetensors"),
        "some": dict(load_from=folder / "some.safetensors"),
        "resume": dict(resume=True),
        "resume a path": dict(resume=str(folder / "source" / "saved")),
    }
    for name, options in cases.items():
        found[name] = said(make_runner(folder / name, model=model, strategy=ZERO, **options).train)
    runner = make_runner(folder / "filled", model=model, strategy=ZERO)
    fills(runner)
    found["filled"] = said(runner.train)
    runner = make_runner(folder / "half filled", model=model, strategy=ZERO)
    fills(runner, [name for name in weights if name != first])
    found["half filled"] = said(runner.train)
    found["misspelled"] = said(lambda: note_initialised(runner.strategy, f"{first}s"))
    note_initialised(runner.strategy, first)
    found["both halves"] = said(runner.train)
    shutil.rmtree(folder)
    return found


def test_runs_need_values(workers1: WorkerGroup, tmp_path: Path) -> None:
    (found,) = workers1.run(runs, tmp_path)
    names = [name for name, _ in model().named_parameters()]
    refused = f"strategy.skip_init_weights: nothing has given values to {names[0]}"
    every = f"{refused} and {len(names) - 1} other parameters, all are zero; give load_from or resume, "
    assert {name for name, message in found.items() if not message} == {"all", "resume a path", "filled", "both halves"}
    assert found["train"].startswith(every)
    assert found["resume"].startswith(every)
    assert found["some"].startswith(f"{refused}, all are zero; ")
    assert found["half filled"].startswith(f"{refused}, all are zero; ")
    assert found["misspelled"].startswith(
        f'note_initialised: the model has no parameter {names[0]}s, did you mean "{names[0]}"?'
    )
    assert not any("\n" in message for message in found.values())


def own_loop() -> tuple[str, str]:
    """In a worker: what an update says before the weights have values, and after they were loaded."""
    strategy = FSDPStrategy(device="cpu", skip_init_weights=True)
    wrapper: Any
    called, wrapper = prepare(
        strategy,
        dict(type=nn.Linear, in_features=3, out_features=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    )
    assert isinstance(wrapper, OptimWrapper)

    def update() -> None:
        wrapper.update_params(called(torch.ones(2, 3)).sum())

    first = said(update)
    strategy.load({f"model.{name}": tensor for name, tensor in strategy.model_state().items()})
    second = said(update)
    strategy.leave()
    return first, second


def test_loops_of_ones_own_need_values(workers1: WorkerGroup) -> None:
    ((first, second),) = workers1.run(own_loop)
    assert first.startswith("strategy.skip_init_weights: nothing has given values to weight and 1 other parameter,")
    assert second == ""
