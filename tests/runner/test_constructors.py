"""Constructors of one's own in whole runs: under every strategy the groups, losses and checkpoints of one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flextrain import ConfigError, DefaultOptimWrapperConstructor
from flextrain.testing import WorkerGroup

from .training import SGD, Net, Samples, SaveEvery, Watch, make_runner

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

SINGLE = dict(type="SingleDeviceStrategy", device="cpu")
STRATEGIES = [
    pytest.param("ddp", id="ddp"),
    pytest.param(dict(type="fsdp", wrap=["Linear"]), id="fsdp"),
    pytest.param("zero1", id="zero1", marks=pytest.mark.deepspeed),
    pytest.param(dict(type="zero3"), id="zero3", marks=pytest.mark.deepspeed),
]


class LayerDecay(DefaultOptimWrapperConstructor):
    """The further from the head, the slower; no decay for parameters of one dimension; groups have names."""

    seen: dict[str, tuple[str, int]]

    def add_params(self, params: list[Any], module: nn.Module, **_: Any) -> None:
        LayerDecay.seen, groups = {}, dict[str, Any]()
        owners = {f"{prefix}.": type(part).__name__ for prefix, part in module.named_modules()}
        for name, parameter in module.named_parameters():
            kind = owners[name.rpartition(".")[0] + "."].removeprefix("FSDP")
            self.seen[name] = kind, parameter.numel()
            layer, decays = int(name.split(".")[1]), parameter.ndim > 1
            scale = self.paramwise_cfg["decay_rate"] ** (3 - layer)
            group = dict(lr=self.base_lr * scale, weight_decay=self.base_wd if decays else 0.0, lr_scale=scale)
            key = f"layer_{layer}_{'decay' if decays else 'no_decay'}"
            groups.setdefault(key, {"params": [], "group_name": key, **group})["params"].append(parameter)
        params.extend(groups.values())


OPTIMIZER = dict(type="AdamW", lr=0.02, weight_decay=0.1)
SETTINGS: dict[str, Any] = dict(
    model=partial(Net, dropout=0.0),
    optim_wrapper=dict(constructor=LayerDecay, paramwise_cfg=dict(decay_rate=0.5), optimizer=OPTIMIZER),
    param_scheduler=dict(type="LinearLR", start_factor=0.5, end=4, by_epoch=False),
    train_cfg=dict(max_epochs=2),
)


def trained(folder: str, strategy: Any, batch_size: int, **changes: Any) -> dict[str, Any]:
    watch = Watch()
    data = dict(batch_size=batch_size, dataset=Samples(24), collate_fn="default_collate", shuffle=False)
    hooks = [watch, SaveEvery({3})]
    runner = make_runner(
        folder, **{**SETTINGS, "strategy": strategy, "train_dataloader": data, "custom_hooks": hooks, **changes}
    )
    runner.train()
    state = runner.strategy.state()
    groups = {key: value for key, value in state.items() if key.startswith("optim.group.")}
    result = {
        "losses": [float(loss) for loss in watch.losses],
        "groups": {key: value for key, value in groups.items() if key.split(".")[-1] in KEYS},
        "seen": dict(LayerDecay.seen),
    }
    runner.strategy.leave()
    return result


KEYS = ("lr", "weight_decay", "lr_scale", "group_name")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_and_losses_are_those_of_one_device(tmp_path: Path, workers2: WorkerGroup, strategy: Any) -> None:
    expected = trained(str(tmp_path / "single"), SINGLE, 8)
    assert expected["groups"]["optim.group.net.0.bias.group_name"] == "layer_0_no_decay"
    assert expected["groups"]["optim.group.net.0.weight.weight_decay"] == 0.1
    found = workers2.run(trained, str(tmp_path / "several"), strategy, 4)
    for one in found:
        assert one["seen"] == expected["seen"]
        assert one["groups"] == pytest.approx(expected["groups"])
    means = [sum(both) / 2 for both in zip(*(one["losses"] for one in found), strict=True)]
    assert means == pytest.approx(expected["losses"], rel=1e-5)
    # A checkpoint of one goes on with the other.
    resumed = dict(resume=str(tmp_path / "several" / "iter_3"))
    rest = trained(str(tmp_path / "rest"), SINGLE, 8, **resumed)
    assert rest["losses"] == pytest.approx(expected["losses"][3:], rel=1e-5)


class Forgets(DefaultOptimWrapperConstructor):
    def add_params(self, params: list[Any], module: nn.Module, **_: Any) -> None:
        params.append({"params": [parameter for name, parameter in module.named_parameters() if "3" not in name]})


def refused(folder: str, strategy: Any) -> str:
    runner = make_runner(
        folder,
        model=partial(Net, dropout=0.0),
        strategy=strategy,
        optim_wrapper=dict(constructor=Forgets, optimizer=SGD),
    )
    with pytest.raises(ConfigError) as caught:
        runner.train()
    runner.strategy.leave()
    return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_left_out_is_named(tmp_path: Path, workers2: WorkerGroup, strategy: Any) -> None:
    for found in workers2.run(refused, str(tmp_path), strategy):
        assert found.startswith(
            "optim_wrapper.constructor: Forgets leaves out net.3.weight and 1 more, which would never"
        )
