"""Constructors of one's own: written as users of MMEngine write them, and what is refused of their groups."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import DefaultOptimWrapperConstructor, OptimWrapper, OptimWrapperDict
from flextrain.core.base.errors import ConfigError
from flextrain.core.base.registry import OPTIM_WRAPPER_CONSTRUCTORS
from flextrain.optim.param_groups import NotedReads

SGD = dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)


def depth(name: str) -> int:
    return 2 if name.startswith("head") else int(name.split(".")[1]) if name.startswith("blocks") else 0


class ByGroups(DefaultOptimWrapperConstructor):
    """Layer-wise decay as in segmentation and detection: one pass over all parameters, groups with names."""

    def add_params(self, params: list[Any], module: nn.Module, prefix: str = "", is_dcn_module: Any = None) -> None:
        rate, last = self.paramwise_cfg["decay_rate"], self.paramwise_cfg.get("num_layers")
        groups: dict[str, Any] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            decays = parameter.ndim > 1 and not name.endswith("token")
            group = f"layer_{depth(name)}_{'decay' if decays else 'no_decay'}"
            scale = rate ** (last - depth(name))
            groups.setdefault(
                group,
                dict(
                    params=[],
                    param_names=[],
                    group_name=group,
                    lr_scale=scale,
                    lr=self.base_lr * scale,
                    weight_decay=self.base_wd if decays else 0.0,
                ),
            )
            groups[group]["params"].append(parameter)
            groups[group]["param_names"].append(name)
        params.extend(groups.values())


class ByModule(DefaultOptimWrapperConstructor):
    """The same as in classification: it calls itself for every submodule, with names that end with a dot."""

    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:  # as MMEngine has it, without where
        super().__init__(optim_wrapper_cfg, paramwise_cfg)

    def add_params(self, params: list[Any], module: nn.Module, prefix: str = "", **_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            group: dict[str, Any] = {"params": [parameter]}
            if parameter.requires_grad and not self._is_in(group, params):
                full = f"{prefix}{name}"
                scale = self.paramwise_cfg["decay_rate"] ** (self.paramwise_cfg["num_layers"] - depth(full))
                decays = parameter.ndim > 1 and not full.endswith("token")
                group |= dict(lr=self.base_lr * scale, weight_decay=self.base_wd if decays else 0.0)
                params.append(group)
        for name, child in module.named_children():
            self.add_params(params, child, prefix=f"{prefix}{name}.")


def test_a_configuration_that_is_no_dict() -> None:
    with pytest.raises(ConfigError, match=r"^optim_wrapper: \[\] is not allowed, give a dict$"):
        DefaultOptimWrapperConstructor([])  # type: ignore[arg-type]


def built(model: nn.Module, **cfg: Any) -> OptimWrapper:
    wrapper = OptimWrapper(**cfg)
    wrapper.build(model)
    return wrapper


def settings(model: nn.Module, wrapper: OptimWrapper) -> dict[str, tuple[float, float]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (round(group["lr"], 9), group["weight_decay"])
        for group in wrapper.param_groups
        for parameter in group["params"]
    }


DECAY = dict(decay_rate=0.5, num_layers=2)
EXPECTED = {
    "token": (0.025, 0.0),
    "blocks.0.norm.weight": (0.025, 0.0),
    "blocks.0.norm.bias": (0.025, 0.0),
    "blocks.0.linear.weight": (0.025, 0.01),
    "blocks.0.linear.bias": (0.025, 0.0),
    "blocks.1.norm.weight": (0.05, 0.0),
    "blocks.1.norm.bias": (0.05, 0.0),
    "blocks.1.linear.weight": (0.05, 0.01),
    "blocks.1.linear.bias": (0.05, 0.0),
    "head.weight": (0.1, 0.01),
    "head.bias": (0.1, 0.0),
}


@pytest.mark.parametrize("constructor", [ByGroups, ByModule])
def test_layer_wise_decay(constructor: type, warnings: list[str]) -> None:
    model = Net()
    wrapper = built(model, optimizer=SGD, constructor=constructor, paramwise_cfg=DECAY)
    assert settings(model, wrapper) == EXPECTED
    assert len(wrapper.param_groups) == 6
    assert warnings == []


def test_groups_keep_their_own_entries() -> None:
    wrapper = built(Net(), optimizer=SGD, constructor=ByGroups, paramwise_cfg=DECAY)
    first = wrapper.param_groups[0]
    assert (first["group_name"], first["lr_scale"]) == ("layer_0_no_decay", 0.25)
    assert first["param_names"][:2] == ["token", "blocks.0.norm.weight"]


def test_frozen_parameters_may_be_left_out() -> None:
    model = Net()
    model.head.requires_grad_(False)
    wrapper = built(model, optimizer=SGD, constructor=ByGroups, paramwise_cfg=DECAY)
    assert settings(model, wrapper) == {name: value for name, value in EXPECTED.items() if "head" not in name}


def test_an_override_that_leaves_the_rest_to_the_base() -> None:
    class NoBackbone(DefaultOptimWrapperConstructor):
        def add_params(self, params: Any, module: nn.Module, prefix: str = "", is_dcn_module: Any = None) -> None:
            if prefix == "blocks":
                params.append({"params": list(module.parameters()), "lr": 0.0})
            else:
                super().add_params(params, module, prefix, is_dcn_module)

    model = Net()
    paramwise = dict(norm_decay_mult=0.0, custom_keys={"head": dict(lr_mult=2.0)})
    wrapper = built(model, optimizer=SGD, constructor=NoBackbone, paramwise_cfg=paramwise)
    assert [group["lr"] for group in wrapper.param_groups] == [0.1, 0.0, 0.2]
    assert [len(group["params"]) for group in wrapper.param_groups] == [1, 8, 2]


def test_settings_decide_parameter_by_parameter() -> None:
    class LayerDecay(DefaultOptimWrapperConstructor):
        def settings(self, name: str, parameter: nn.Parameter, module: nn.Module) -> dict[str, Any]:
            return {"lr": self.base_lr * 0.5 ** int(name.partition(".")[0])}

    OPTIM_WRAPPER_CONSTRUCTORS.register_module(module=LayerDecay)
    try:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        wrapper = built(model, optimizer=SGD, constructor="LayerDecay")
        assert [group["lr"] for group in wrapper.param_groups] == [0.1, 0.05]
        with pytest.raises(
            ConfigError, match='optim_wrapper.constructor: "LayerDcay" is no known .*, did you mean "LayerDecay"'
        ):
            OptimWrapper(SGD, constructor="LayerDcay")
    finally:
        del OPTIM_WRAPPER_CONSTRUCTORS._modules["LayerDecay"]


def test_a_class_that_is_no_subclass() -> None:
    class Foreign:
        def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any) -> None:
            assert optim_wrapper_cfg["accumulative_counts"] == 3
            self.lr = optim_wrapper_cfg["optimizer"]["lr"]

        def add_params(self, params: Any, module: nn.Module) -> None:
            params += [{"params": module.weight, "lr": self.lr / 2}, {"params": [("bias", module.bias)]}]

    wrapper = built(nn.Linear(1, 1), optimizer=SGD, constructor=Foreign, accumulative_counts=3)
    assert [group["lr"] for group in wrapper.param_groups] == [0.05, 0.1]


def test_each_of_several_optimizers_has_its_own() -> None:
    model = nn.ModuleDict({"generator": Net(), "critic": nn.Linear(4, 1)})
    several = OptimWrapperDict(
        generator=OptimWrapper(SGD, constructor=ByGroups, paramwise_cfg=DECAY, where="optim_wrapper.generator"),
        critic=OptimWrapper(SGD),
    )
    several.build(model)
    assert settings(model["generator"], several["generator"]) == EXPECTED  # names are those in the generator


def test_what_a_constructor_has_as_in_mmengine() -> None:
    seen: dict[str, Any] = {}

    class Looks(DefaultOptimWrapperConstructor):
        def add_params(self, params: Any, module: nn.Module, prefix: str = "", is_dcn_module: Any = None) -> None:
            seen.update(optimizer=self.optimizer_cfg, wrapper=self.optim_wrapper_cfg, own=dict(self.paramwise_cfg))
            seen.update(lr=self.base_lr, wd=self.base_wd)
            params.append({"params": list(module.parameters())})

    built(Net(), optimizer=SGD, constructor=Looks, paramwise_cfg=dict(mine=1), clip_grad=dict(max_norm=2.0))
    assert seen == dict(
        optimizer=SGD,
        wrapper=dict(type="OptimWrapper", accumulative_counts=1, clip_grad=dict(max_norm=2.0)),
        own=dict(mine=1),
        lr=0.1,
        wd=0.01,
    )


def test_deformable_convolutions_of_mmcv_are_known_by_name() -> None:
    class Deformable(nn.Conv2d):
        """Stands for mmcv's: its offsets are a convolution inside of it."""

        def __init__(self) -> None:
            super().__init__(2, 2, 1)
            self.conv_offset = nn.Conv2d(2, 2, 1)

    Deformable.__name__, Deformable.__module__ = "ModulatedDeformConv2d", "mmcv.ops.modulated_deform_conv"
    model = nn.Sequential(Deformable(), nn.Conv2d(2, 2, 1))
    rules = dict(dcn_offset_lr_mult=0.1, bias_lr_mult=2.0, bias_decay_mult=0.0, flat_decay_mult=0.5)
    found = settings(model, built(model, optimizer=SGD, paramwise_cfg=rules))
    assert found["0.conv_offset.weight"] == found["0.conv_offset.bias"] == (0.01, 0.01)
    assert found["0.bias"] == found["1.bias"] == (0.2, 0.0)
    with pytest.raises(ConfigError, match="optimizer.lr: missing, paramwise_cfg multiplies it"):
        OptimWrapper(dict(type="AdamW"), paramwise_cfg=dict(dcn_offset_lr_mult=0.1))


# What is refused


def groups_of(function: Any) -> type:
    class Mine(DefaultOptimWrapperConstructor):
        def add_params(self, params: Any, module: Any, prefix: str = "", is_dcn_module: Any = None) -> None:
            params += function(module)

    return Mine


def replaced(model: Any) -> list[Any]:
    model.head.bias = nn.Parameter(torch.zeros(2))
    return [{"params": list(model.parameters())}]


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda m: [{"params": list(m.blocks.parameters())}], "Mine leaves out token and 2 more, which would never be trained"),
        (lambda m: [{"params": [m.token, *m.blocks.parameters(), m.head.weight]}], "Mine leaves out head.bias, which"),
        (lambda m: [{"params": [*m.parameters(), m.head.bias]}], "Mine gives head.bias twice, a parameter belongs to one group"),
        (lambda m: [{"params": m.parameters()}, {"params": [m.token], "lr": 1}], "Mine gives token twice"),
        (lambda m: [{"params": [*m.parameters(), torch.zeros(3)]}], r"Mine gives \[3\], which is no parameter of the model"),
        (lambda m: [{"params": [*m.parameters(), "head"]}], "Mine gives str, which is no parameter of the model"),
        (replaced, "Mine replaces the model's parameter head.bias, which others hold already"),
        (lambda m: [list(m.parameters())], "Mine gives a group without params"),
        (lambda m: [{"lr": 0.1}], "Mine gives a group without params"),
    ],
)  # fmt: skip
def test_groups_that_are_refused(function: Any, message: str) -> None:
    wrapper = OptimWrapper(SGD, constructor=groups_of(function), where="optim_wrapper.generator")
    with pytest.raises(ConfigError, match=rf"^optim_wrapper\.generator\.constructor: {message}") as caught:
        wrapper.build(Net())
    assert "\n" not in str(caught.value)


def test_a_tied_parameter_may_be_named_twice() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    rates = iter((0.1, 0.1, 0.1, 0.2))

    class Mine(DefaultOptimWrapperConstructor):
        def add_params(self, params: Any, module: Any, prefix: str = "", is_dcn_module: Any = None) -> None:
            params += [{"params": [part.weight], "lr": next(rates)} for part in (module["embed"], module["head"])]

    (group,) = built(model, optimizer=SGD, constructor=Mine).param_groups
    assert len(group["params"]) == 1
    with pytest.raises(
        ConfigError, match="^optim_wrapper.paramwise_cfg: embed.weight and head.weight are one parameter"
    ):
        built(model, optimizer=SGD, constructor=Mine)


@pytest.mark.parametrize(
    "constructor, paramwise_cfg, message",
    [
        (ByGroups, dict(norm_decay_mult="0"), 'paramwise_cfg.norm_decay_mult: "0" is not allowed, give a number'),
        *(
            (
                DefaultOptimWrapperConstructor,
                {"norm_decay_mult": value},
                f"paramwise_cfg.norm_decay_mult: {value} is not allowed, give a finite number",
            )
            for value in (-1, -0.5, math.nan, math.inf)
        ),
        (
            ByGroups,
            dict(custom_keys={"head": dict(lr_mult=-2.0)}),
            "paramwise_cfg.custom_keys.head.lr_mult: -2.0 is not allowed",
        ),
        (
            ByGroups,
            dict(custom_keys={"a": dict(decay_mult=math.nan)}),
            "paramwise_cfg.custom_keys.a.decay_mult: nan is not allowed",
        ),
        (ByGroups, 5, "paramwise_cfg: 5 is not allowed, give a dict"),
        (
            lambda optim_wrapper_cfg: None,
            None,
            "constructor: <lambda> does not take paramwise_cfg, which it is made with",
        ),
        (lambda **_: object(), None, "constructor: object has no add_params(params, module), make it a subclass of"),
    ],
)
def test_what_is_refused_before_there_is_a_model(constructor: Any, paramwise_cfg: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimWrapper(SGD, constructor=constructor, paramwise_cfg=paramwise_cfg)
    assert str(caught.value).startswith(f"optim_wrapper.{message}")


# What is said once


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What is logged as a warning; a run of another test may have silenced the logger."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flextrain")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield said
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_custom_keys_that_nothing_contains(warnings: list[str]) -> None:
    keys = {"haed": dict(lr_mult=0.1), "head": dict(lr_mult=0.1), ".token": dict(lr_mult=0.1), "xyz": dict(lr_mult=1.0)}
    built(Net(), optimizer=SGD, paramwise_cfg=dict(custom_keys=keys))
    assert warnings == [
        'optim_wrapper.paramwise_cfg.custom_keys.haed: no parameter\'s name contains it, did you mean "head"?',
        "optim_wrapper.paramwise_cfg.custom_keys.xyz: no parameter's name contains it",
    ]


def test_custom_keys_of_frozen_parameters_alone(warnings: list[str]) -> None:
    model = Net()
    model.head.weight.requires_grad_(False)
    built(
        model, optimizer=SGD, paramwise_cfg=dict(custom_keys={"head.w": dict(lr_mult=0.1), "head": dict(lr_mult=0.2)})
    )
    assert warnings == [
        "optim_wrapper.paramwise_cfg.custom_keys.head.w: has no effect unless they are thawed, it names only frozen parameters: head.weight"
    ]


def test_keys_that_a_constructor_has_not_read(warnings: list[str]) -> None:
    paramwise = DECAY | dict(decay_typ="layer", norm_decay_mult=0.0, bias_decay_mul=0.0)
    built(Net(), optimizer=SGD, constructor=ByGroups, paramwise_cfg=paramwise)
    assert warnings == [
        'optim_wrapper.paramwise_cfg.bias_decay_mul: ByGroups has not read it, did you mean "bias_decay_mult"?',
        "optim_wrapper.paramwise_cfg.decay_typ: ByGroups has not read it",
        "optim_wrapper.paramwise_cfg.norm_decay_mult: ByGroups has not read it",
    ]


@pytest.mark.parametrize(
    "read, unread",
    [
        (lambda given: given["a"], ["b"]),
        (lambda given: given.get("a"), ["b"]),
        (lambda given: given.pop("a"), ["b"]),
        (lambda given: "a" in given, ["b"]),
        (lambda given: given.get("c"), ["a", "b"]),
        (lambda given: {**given}, []),
        (dict, []),
        (list, []),
        (lambda given: given.items(), []),
        (lambda given: given.values(), []),
        (lambda given: given.copy(), []),
        (lambda given: json.dumps(given), []),
        (lambda given: given.unnoted(), ["a", "b"]),
    ],
)
def test_reading_is_noted(read: Any, unread: list[str]) -> None:
    given = NotedReads({"a": 1, "b": 2})
    copied = copy.deepcopy(given.unnoted())
    read(given)
    assert given.unread == unread
    assert copied == {"a": 1, "b": 2}


def test_norms_that_a_custom_key_takes_from_their_rule_are_told(caplog: pytest.LogCaptureFixture) -> None:
    keys = {
        "blocks.0": dict(lr_mult=0.5),
        "blocks.1": dict(lr_mult=0.5),
        "blocks.1.norm": dict(lr_mult=0.5, decay_mult=0.0),
    }
    model = Net()
    with caplog.at_level("INFO", "flextrain"):
        wrapper = OptimWrapper(SGD, paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys=keys))
        wrapper.build(model)
    lines = [line for line in caplog.messages if "come before the rules" in line]
    assert [line.partition(", so ")[2].partition(" decay in")[0] for line in lines] == [
        "blocks.0.norm.weight and 1 other parameter"
    ]
    found = {id(p): (group["lr"], group["weight_decay"]) for group in wrapper.param_groups for p in group["params"]}
    norms = [found[id(model.blocks[number].norm.weight)] for number in (0, 1)]
    assert norms == [(0.05, 0.01), (0.05, 0.0)]
