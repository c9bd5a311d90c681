"""Parameter groups: MMEngine's rules, parameter by parameter, and what is refused."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain.core.base.errors import ConfigError
from flextrain.optim import OptimWrapper

RECORDER = Path(__file__).parent / "record_mmengine_paramwise.py"


def recorder() -> Any:
    spec = importlib.util.spec_from_file_location(RECORDER.stem, RECORDER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MMENGINE = recorder()
RECORDED = json.loads(MMENGINE.DATA.read_text())


def built(model: nn.Module, **cfg: Any) -> OptimWrapper:
    wrapper = OptimWrapper(**cfg)
    wrapper.build(model)
    return wrapper


# What MMEngine does


def test_the_record_is_complete() -> None:
    assert RECORDED.keys() == MMENGINE.CASES.keys()


@pytest.mark.parametrize("name", MMENGINE.CASES)
def test_settings_are_those_of_mmengine(name: str) -> None:
    case = dict(MMENGINE.CASES[name])
    model = MMENGINE.MODELS[case.pop("model", "zoo")]()
    ours = MMENGINE.settings(model, built(model, **case).optimizer)
    assert ours.keys() == RECORDED[name].keys()
    for parameter, recorded in RECORDED[name].items():
        assert ours[parameter] == recorded, parameter


# What we do beyond it


SGD = MMENGINE.SGD


def test_parameters_with_equal_settings_share_a_group() -> None:
    model = MMENGINE.Zoo()
    wrapper = built(model, optimizer=SGD, paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0))
    assert sorted(group["weight_decay"] for group in wrapper.param_groups) == [0.0, 0.01]
    assert sum(len(group["params"]) for group in wrapper.param_groups) == len(list(model.parameters()))
    assert len(built(model, optimizer=SGD).param_groups) == 1


def test_rates_in_tensors_that_look_alike_are_not_equal() -> None:
    cfg = dict(custom_keys={"0": dict(lr_mult=0.81), "1": dict(lr_mult=0.78)})
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapper = built(model, optimizer=dict(type="Adam", lr=torch.tensor(1e-3)), paramwise_cfg=cfg)
    assert [float(group["lr"]) for group in wrapper.param_groups] == pytest.approx([0.81e-3, 0.78e-3])


def test_groups_stand_in_the_order_of_their_first_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    wrapper = built(model, optimizer=SGD, paramwise_cfg=dict(norm_decay_mult=0.0))
    assert [group["weight_decay"] for group in wrapper.param_groups] == [0.01, 0.0]
    assert wrapper.param_groups[0]["params"][0] is model[0].weight


def test_frozen_parameters_are_there_for_when_they_are_thawed() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    wrapper = built(model, optimizer=SGD)
    assert {id(p) for p in wrapper.param_groups[0]["params"]} == {id(model.weight), id(model.bias)}


def test_rules_are_for_frozen_parameters_too() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    wrapper = built(model, optimizer=SGD, paramwise_cfg=dict(bias_lr_mult=0.5))
    lrs = {id(p): group["lr"] for group in wrapper.param_groups for p in group["params"]}
    assert lrs[id(model.bias)] == 0.5 * lrs[id(model.weight)]


def test_rms_norm_is_a_normalisation_layer() -> None:
    wrapper = built(nn.Sequential(nn.RMSNorm(4)), optimizer=SGD, paramwise_cfg=dict(norm_decay_mult=0.0))
    assert [group["weight_decay"] for group in wrapper.param_groups] == [0.0]


def test_a_tied_parameter_is_in_one_group() -> None:
    model = MMENGINE.Tied()
    (group,) = built(model, optimizer=SGD, paramwise_cfg=dict(norm_decay_mult=0.0)).param_groups
    assert len(group["params"]) == len({id(p) for p in group["params"]}) == len(list(model.parameters()))


def test_a_tied_parameter_with_two_settings_needs_a_decision() -> None:
    paramwise = dict(custom_keys={"decoder.head": dict(lr_mult=0.1)})
    message = (
        "^optim_wrapper.paramwise_cfg: encoder.embed.weight and decoder.head.weight are one parameter with two settings, "
        "give bypass_duplicate=True to use those of encoder.embed.weight$"
    )
    with pytest.raises(ConfigError, match=message):
        built(MMENGINE.Tied(), optimizer=SGD, paramwise_cfg=paramwise)
    model = MMENGINE.Tied()
    wrapper = built(model, optimizer=SGD, paramwise_cfg=paramwise | {"bypass_duplicate": True})
    assert MMENGINE.settings(model, wrapper.optimizer)["decoder.head.weight"][0] == 0.1


# What is refused


@pytest.mark.parametrize(
    "optimizer, paramwise_cfg, message",
    [
        (SGD, dict(norm_decay=0), 'paramwise_cfg.norm_decay: unknown key, did you mean "norm_decay_mult"?'),
        (SGD, dict(bias_lr_mult="2"), 'paramwise_cfg.bias_lr_mult: "2" is not allowed, give a number'),
        (SGD, dict(custom_keys=["head"]), "paramwise_cfg.custom_keys: ['head'] is not allowed, give a dict"),
        (SGD, dict(custom_keys={"head": 0.1}), "paramwise_cfg.custom_keys.head: 0.1 is not allowed, give a dict"),
        (SGD, dict(custom_keys={"head": dict(lr_mult="x")}), 'custom_keys.head.lr_mult: "x" is not allowed, give a number'),
        (SGD, dict(custom_keys={"head": dict(lr_mul=0.1)}), 'custom_keys.head.lr_mul: unknown key, did you mean "lr_mult"?'),
        (SGD, dict(custom_keys={"head": dict(decay=0.1)}), "custom_keys.head.decay: unknown key, "),
        (SGD, dict(custom_keys={"head": dict(betas=(0.1, 0.2))}), "custom_keys.head.betas: unknown key, choose lr_mult, decay_mult, lr, "),
        (SGD, dict(custom_keys={"head": dict(params=[])}), "custom_keys.head.params: unknown key"),
        (SGD, dict(custom_keys={"head": dict(momentum="big")}), 'custom_keys.head.momentum: "big" is not allowed, give a number'),
        (torch.optim.SGD, dict(custom_keys={"head": dict(momentun=0.1)}), 'custom_keys.head.momentun: unknown key, did you mean "momentum"?'),
        ("SGD", dict(bias_lr_mult=2.0), "optimizer.lr: missing, paramwise_cfg multiplies it"),
        (dict(type="SGD", lr=0.1), dict(norm_decay_mult=0), "optimizer.weight_decay: missing, paramwise_cfg multiplies it"),
        (dict(type="SGD", lr=0.1), dict(flat_decay_mult=0), "optimizer.weight_decay: missing, paramwise_cfg multiplies it"),
        (dict(type="SGD", lr=0.1), dict(custom_keys={"a": dict(decay_mult=0)}), "optimizer.weight_decay: missing, paramwise_cfg"),
        (torch.optim.SGD([torch.zeros(1)]), dict(norm_decay_mult=0), "paramwise_cfg: has no meaning for an optimizer that is already built"),
    ],
)  # fmt: skip
def test_wrong_configurations_are_refused_before_there_is_a_model(
    optimizer: Any, paramwise_cfg: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimWrapper(optimizer, paramwise_cfg=paramwise_cfg)
    assert str(caught.value).startswith("optim_wrapper.")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_known_of_what_a_callable_takes() -> None:
    factory = functools.partial(torch.optim.SGD, lr=0.1)
    wrapper = built(nn.Linear(1, 1), optimizer=factory, paramwise_cfg=dict(custom_keys={"bias": dict(lr=0.5)}))
    assert [group["lr"] for group in wrapper.param_groups] == [0.1, 0.5]
