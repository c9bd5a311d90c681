"""OptimWrapperDict: each optimizer has its part of the model, and one window and one precision are shared."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from flextrain.core.base.errors import CheckpointError, ConfigError, StrategyError
from flextrain.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from flextrain.optim.wrapper import StepInfo
from flextrain.strategies import SingleDeviceStrategy


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic, self.shared = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x)).mean()  # type: ignore[no-any-return]


def several(**cfg: Any) -> OptimWrapperDict:
    return OptimWrapperDict(
        generator=OptimWrapper(dict(type="SGD", lr=0.1, momentum=0.5), **cfg),
        critic=OptimWrapper(dict(type="Adam", lr=0.2, betas=(0.7, 0.9)), **cfg),
    )


def test_each_optimizer_takes_the_part_of_its_name() -> None:
    model, optim = Gan(), several()
    optim.build(model)
    for name in ("generator", "critic"):
        held = {id(p) for group in optim[name].param_groups for p in group["params"]}
        assert held == {id(p) for p in getattr(model, name).parameters()}
    assert len(optim.param_groups) == 2


def test_it_is_a_mapping() -> None:
    optim = several()
    assert (list(optim), len(optim), "critic" in optim) == (["generator", "critic"], 2, True)
    assert dict(optim) == optim.wrappers
    with pytest.raises(KeyError, match='did you mean "critic"'):
        optim["crtic"]
    assert optim.get("crtic") is None
    assert repr(optim) == (
        "OptimWrapperDict(generator=OptimWrapper(not built, accumulate=1), critic=OptimWrapper(not built, accumulate=1))"
    )


def test_mmengines_names_of_the_wrappers_and_of_their_counting() -> None:
    model = nn.Linear(1, 1)
    wrapper = OptimWrapper(SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    both = OptimWrapperDict(only=wrapper)
    assert both.optim_wrappers == {"only": wrapper}
    both.initialize_count_status(model, 1, 3)
    assert wrapper.should_update()


def test_a_built_optimizer_may_hold_any_of_the_models_parameters() -> None:
    model = Gan()
    parameters = [*model.generator.parameters(), *model.shared.parameters()]
    optim = OptimWrapperDict(
        generator=OptimWrapper(SGD(parameters)), other=OptimWrapper(SGD(model.critic.parameters()))
    )
    optim.build(model)
    with pytest.raises(StrategyError, match="optimizer: holds parameters that are not the model's"):
        optim.build(Gan())


def test_a_name_that_the_model_lacks() -> None:
    optim = OptimWrapperDict(genrator=OptimWrapper(dict(type="SGD")))
    message = '^optim_wrapper.genrator: the model has no submodule of this name, did you mean "generator"\\?$'
    with pytest.raises(StrategyError, match=message):
        optim.build(Gan())


def test_one_is_updated_and_the_other_stays() -> None:
    model, optim = Gan(), several()
    optim.build(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with optim.optim_context(model):
        loss = model(torch.ones(3, 2))
    optim["critic"].update_params(loss)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"critic.weight", "critic.bias"}
    assert model.generator.weight.grad is not None
    optim.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["update_params", "step", "backward"])
def test_which_one_must_be_said(name: str) -> None:
    with pytest.raises(
        StrategyError, match=r"has 2 optimizers, update one: optim_wrapper\[name\].update_params\(loss\)"
    ):
        getattr(several(), name)(torch.ones(1))


def test_figures_carry_the_names() -> None:
    optim = several()
    optim.build(Gan())
    assert optim.get_lr() == {"generator.lr": [0.1], "critic.lr": [0.2]}
    assert optim.get_momentum() == {"generator.momentum": [0.5], "critic.momentum": [0.7]}


def test_all_know_their_place_in_the_window() -> None:
    optim = several(accumulative_counts=3)
    assert optim.accumulate == 3
    optim.begin(1, 2)
    assert all(wrapper.should_sync() for wrapper in optim.values())
    optim.begin(0, 2)
    assert not any(wrapper.should_sync() for wrapper in optim.values())


@pytest.mark.parametrize("skipped, expected", [((True, True), True), ((True, False), False), ((False, False), False)])
def test_the_clock_stands_still_only_if_all_skipped(skipped: tuple[bool, bool], expected: bool) -> None:
    optim = several()
    for wrapper, value in zip(optim.values(), skipped, strict=True):
        wrapper.last_step = StepInfo(None, value)
    assert optim.last_step == StepInfo(None, expected)


def half() -> OptimWrapperDict:
    make = lambda: AmpOptimWrapper(dict(type="SGD", lr=0.1), dtype="float16")  # noqa: E731
    return OptimWrapperDict(generator=make(), critic=make())


def test_each_has_its_loss_scale_and_the_state_goes_by_name() -> None:
    model, optim = Gan(), half()
    SingleDeviceStrategy(device="cpu").setup(model, optim)
    optim["critic"].update_params(model(torch.ones(1, 2)) * math.inf)
    state = optim.plain_values()
    assert [state[name]["scaler"]["scale"] for name in optim] == [2.0**16, 2.0**15]
    other = half()
    SingleDeviceStrategy(device="cpu").setup(Gan(), other)
    other.load_plain_values(state)
    assert other.plain_values() == state
    with pytest.raises(CheckpointError, match="the checkpoint's optimizers are critic, other, the configuration's gen"):
        other.load_plain_values({"critic": state["critic"], "other": {}})


def test_alone_every_loss_is_scaled() -> None:
    model, optim = Gan(), half()
    optim.build(model)
    for name in optim:
        with optim.optim_context(model):
            loss = model(torch.ones(1, 2))
        optim[name].update_params(loss * math.inf)
        assert optim[name].last_step.skipped, name


@pytest.mark.parametrize(
    "wrappers, message",
    [
        ({}, "optim_wrapper: an OptimWrapperDict needs at least one optimizer"),
        ({"a": SGD([torch.zeros(1)])}, "optim_wrapper.a: SGD is not allowed, give an OptimWrapper"),
        (
            {"a": OptimWrapper(dict(type="SGD")), "b": OptimWrapper(dict(type="SGD"), accumulative_counts=2)},
            "optim_wrapper.b.accumulative_counts: differs from that of optim_wrapper.a",
        ),
        (
            {"a": OptimWrapper(dict(type="SGD")), "b": AmpOptimWrapper(dict(type="SGD"))},
            "optim_wrapper.b.type: differs from that of optim_wrapper.a",
        ),
    ],
)
def test_wrong_configurations(wrappers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        OptimWrapperDict(**wrappers)
