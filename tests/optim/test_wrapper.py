"""OptimWrapper: one update, whatever the window, and an optimizer from whatever describes one."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.base.registry import OPTIMIZERS
from flextrain.optim import OptimWrapper, StepInfo


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def built(model: nn.Module, **cfg: Any) -> OptimWrapper:
    cfg.setdefault("optimizer", dict(type="SGD", lr=0.1, momentum=0.9))
    wrapper = OptimWrapper(**cfg)
    wrapper.build(model)
    return wrapper


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


# Accumulation


def train(model: nn.Module, wrapper: OptimWrapper, windows: list[list[Tensor]]) -> None:
    """What a training loop does."""
    for window in windows:
        for index, x in enumerate(window):
            wrapper.begin(index, len(window))
            with wrapper.optim_context(model):
                loss = loss_of(model, x)
            wrapper.update_params(loss)


@pytest.mark.parametrize("clip_grad", [None, dict(max_norm=0.05), dict(type="value", clip_value=0.01)])
def test_a_window_is_as_good_as_a_large_batch(clip_grad: dict[str, Any] | None) -> None:
    model, large = net(), net()
    data = [batch(12, seed) for seed in range(3)]
    train(model, built(model, accumulative_counts=4, clip_grad=clip_grad), [list(x.split(3)) for x in data])
    train(large, built(large, clip_grad=clip_grad), [[x] for x in data])
    close(weights(model), weights(large))


def test_a_shorter_window_divides_by_its_own_length() -> None:
    model, large = net(), net()
    windows = [list(batch(12).split(3)), list(batch(6).split(3))]
    train(model, built(model, accumulative_counts=4), windows)
    train(large, built(large), [[batch(12)], [batch(6)]])
    close(weights(model), weights(large))


def test_the_update_comes_with_the_last_micro_batch() -> None:
    model = net()
    wrapper = built(model, accumulative_counts=3)
    before = weights(model)
    for index, x in enumerate(batch(3).split(1)):
        wrapper.begin(index, 3)
        assert wrapper.should_sync() is wrapper.should_update() is (index == 2)
        wrapper.update_params(loss_of(model, x))
        changed = any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
        assert changed is (index == 2)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_alone_as_in_mmengines_documentation() -> None:
    model, plain = net(), net()
    wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1))
    optimizer = SGD(plain.parameters(), lr=0.1)
    for x in batch(8).split(2):
        with wrapper.optim_context(model):
            loss = loss_of(model, x)
        wrapper.update_params(loss)
        optimizer.zero_grad()
        loss_of(plain, x).backward()
        optimizer.step()
    close(weights(model), weights(plain))


def test_alone_it_counts_its_micro_batches() -> None:
    model, large = net(), net()
    wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    for x in batch(8).split(2):
        wrapper.update_params(loss_of(model, x))
    train(large, built(large, optimizer=dict(type="SGD", lr=0.1)), [[x] for x in batch(8).split(4)])
    close(weights(model), weights(large))


def test_alone_the_last_window_may_be_shorter_if_the_end_is_known() -> None:
    model, large = net(), net()
    wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    wrapper.initialize_count_status(model, 0, 5)
    updates = []
    for x in batch(10).split(2):
        updates.append(wrapper.should_update())
        wrapper.update_params(loss_of(model, x))
    assert updates == [False, True, False, True, True]
    parts = batch(10).split(2)
    windows = [torch.cat(parts[:2]), torch.cat(parts[2:4]), parts[4]]
    train(large, built(large, optimizer=dict(type="SGD", lr=0.1)), [[x] for x in windows])
    close(weights(model), weights(large))


@pytest.mark.parametrize(
    ("start", "expected"), [(3, [False, False, True, True]), (4, [False, True, True]), (6, [True]), (7, [False])]
)
def test_alone_counting_continues_within_a_window(start: int, expected: list[bool]) -> None:
    wrapper = OptimWrapper(optimizer=SGD(net().parameters(), lr=0.1), accumulative_counts=3)
    wrapper.initialize_count_status(net(), start, 7)
    updates = []
    for _ in range(max(1, 7 - start)):
        updates.append(wrapper.should_update())
        wrapper.update_params(loss_of(net(), batch(2)))
    assert updates == expected


# One update


def test_the_norm_of_before_is_reported() -> None:
    model = net()
    wrapper = built(model, clip_grad=dict(max_norm=1e-3))
    loss_of(model, batch(4)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    info = wrapper.step()
    assert info.grad_norm is not None
    assert info.grad_norm.dim() == 0
    torch.testing.assert_close(info.grad_norm, expected)
    assert (info.skipped, wrapper.last_step) == (False, info)


@pytest.mark.parametrize("clip_grad", [None, dict(type="value", clip_value=1.0)])
def test_without_norm_clipping_no_norm_is_computed(clip_grad: dict[str, Any] | None) -> None:
    model = net()
    wrapper = built(model, clip_grad=clip_grad)
    assert wrapper.last_step == StepInfo(None, False)
    loss_of(model, batch(4)).backward()
    assert wrapper.step() == StepInfo(None, False)


@pytest.mark.parametrize(
    "clip_grad, largest",
    [
        (dict(max_norm=0.5), 0.4),
        (dict(type="norm", max_norm=0.5, norm_type=math.inf), 0.5),
        (dict(type="norm", max_norm=0.7, norm_type=1), 0.4),
        (dict(type="value", clip_value=0.25), 0.25),
        (dict(max_norm=100), 4.0),
    ],
)
def test_clipping(clip_grad: dict[str, Any], largest: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapper = built(model, optimizer=dict(type="SGD", lr=1.0), clip_grad=clip_grad)
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[3.0, -4.0]])
    wrapper.step()
    moved = (before - model.weight.detach()).abs()
    assert moved.max().item() == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_sparse_gradients_are_clipped_as_dense_ones(norm_type: float) -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 3, sparse=sparse), nn.Linear(3, 2))
        wrapper = built(model, optimizer=dict(type="SGD", lr=1.0), clip_grad=dict(max_norm=0.1, norm_type=norm_type))
        (model(torch.tensor([1, 1, 2, 1])) * torch.arange(8.0).view(4, 2)).sum().backward()  # a row several times
        wrapper.step()
        found.append(weights(model))
    close(found[1], found[0])


def test_sparse_gradients_are_not_clipped_by_value() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    wrapper = built(model, optimizer=dict(type="SGD", lr=1.0), clip_grad=dict(type="value", clip_value=0.1))
    model(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ConfigError, match=r'^clip_grad.type: "value" is not possible for sparse gradients'):
        wrapper.step()


def test_non_finite_gradients_raise_on_request() -> None:
    model = net()
    wrapper = built(model, clip_grad=dict(max_norm=1.0, error_if_nonfinite=True))
    before = weights(model)
    (loss_of(model, batch(2)) * math.inf).backward()
    with pytest.raises(RuntimeError, match="clip_grad: the total norm"):
        wrapper.step()
    close(weights(model), before)


@pytest.mark.parametrize("name", ["clip_grad", "clip_grad_kwargs"])
def test_clipping_may_be_changed_between_updates(name: str) -> None:
    model, other = net(), net()
    wrapper, expected = built(model, clip_grad=dict(max_norm=100.0)), built(other, clip_grad=dict(max_norm=0.05))
    setattr(wrapper, name, dict(max_norm=0.05))
    for each, its in ((model, wrapper), (other, expected)):
        train(each, its, [[batch(4)], [batch(4, 2)]])
    close(weights(model), weights(other))
    with pytest.raises(ConfigError, match=r"optim_wrapper.clip_grad.max_nrom: unknown key"):
        setattr(wrapper, name, dict(max_nrom=1.0))
    setattr(wrapper, name, None)
    train(model, wrapper, [[batch(4)]])
    assert wrapper.last_step.grad_norm is None


@pytest.mark.parametrize("name", ["accumulate", "accumulative_counts", "_accumulative_counts"])
def test_the_window_is_not_changed_while_a_loop_trains(name: str) -> None:
    wrapper = built(net())
    setattr(wrapper, name, 2)
    assert wrapper.accumulate == 2
    wrapper.begin(0, 2)
    with pytest.raises(ConfigError, match=r"optim_wrapper.accumulate: 2 cannot become 4 now"):
        setattr(wrapper, name, 4)


def test_hooks_come_before_clipping() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapper = built(model, clip_grad=dict(max_norm=1.0))

    def double(optim: OptimWrapper) -> None:
        assert optim is wrapper
        assert model.weight.grad is not None
        model.weight.grad.mul_(2)

    wrapper.register_step_pre_hook(double)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = wrapper.step().grad_norm
    assert norm is not None
    assert norm.item() == pytest.approx(10.0)


# The optimizer


@pytest.mark.parametrize(
    "optimizer",
    [
        dict(type="SGD", lr=0.5),
        dict(type=SGD, lr=0.5),
        dict(type="torch.optim:SGD", lr=0.5),
        functools.partial(SGD, lr=0.5),
        lambda groups: SGD(groups, lr=0.5),
    ],
)
def test_an_optimizer_is_made_when_the_model_is_there(optimizer: Any) -> None:
    wrapper = OptimWrapper(optimizer)
    assert not wrapper.is_built
    assert repr(wrapper) == "OptimWrapper(not built, accumulate=1)"
    with pytest.raises(StrategyError, match="^optim_wrapper: the optimizer is not built yet, Strategy.setup"):
        _ = wrapper.optimizer
    model = net()
    wrapper.build(model)
    assert wrapper.is_built
    assert type(wrapper.optimizer) is SGD
    assert [id(p) for group in wrapper.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]
    assert wrapper.get_lr() == {"lr": [0.5]}
    assert repr(wrapper) == "OptimWrapper(SGD, accumulate=1)"


def test_a_built_optimizer_must_hold_the_models_parameters() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    wrapper = OptimWrapper(optimizer)
    assert wrapper.is_built
    wrapper.build(model)
    assert wrapper.optimizer is optimizer
    with pytest.raises(StrategyError, match="^optim_wrapper.optimizer: holds parameters that are not the model's"):
        wrapper.build(copy.deepcopy(model))


def test_a_callable_must_give_an_optimizer() -> None:
    with pytest.raises(ConfigError, match="optimizer: the callable gave list, not a torch optimizer"):
        built(net(), optimizer=list)


OPTIONS: dict[str, dict[str, Any]] = {"Muon": dict(lr=0.01)}


# Others add theirs to the registry.
TORCHS = {name for name in OPTIMIZERS if hasattr(torch.optim, name)}


@pytest.mark.parametrize("name", sorted(TORCHS - {"LBFGS"}))
def test_every_torch_optimizer_by_name(name: str) -> None:
    model: nn.Module = nn.Linear(3, 2, bias=False)  # Muon takes matrices only
    loss = lambda: model(batch(4)).square().mean()  # noqa: E731
    if name == "SparseAdam":
        model = nn.Embedding(4, 3, sparse=True)
        loss = lambda: model(torch.tensor([1, 2])).square().mean()  # noqa: E731
    wrapper = built(model, optimizer=dict(type=name, **OPTIONS.get(name, {})))
    before = weights(model)
    wrapper.update_params(loss())
    wrapper.update_params(loss())
    assert not torch.equal(weights(model)[0], before[0])
    assert len(wrapper.get_lr()["lr"]) == len(wrapper.get_momentum()["momentum"]) == 1


def test_momentum_by_whatever_name() -> None:
    assert built(net()).get_momentum() == {"momentum": [0.9]}
    assert built(net(), optimizer=dict(type="Adam", betas=(0.7, 0.9))).get_momentum() == {"momentum": [0.7]}
    assert built(net(), optimizer=dict(type="Adagrad")).get_momentum() == {"momentum": [0.0]}


@pytest.mark.parametrize(
    "cfg, message",
    [
        (dict(optimizer=dict(type="SDG")), 'optimizer.type: "SDG" is no known optimizer, did you mean "SGD"?'),
        (dict(optimizer=dict(lr=0.1)), "optimizer.type: missing, say which optimizer"),
        (dict(optimizer=dict(type="SGD", lrr=0.1)), 'optimizer.lrr: unknown key, did you mean "lr"?'),
        (dict(optimizer=dict(type="SGD", lr="0.1")), 'optimizer.lr: "0.1" is not allowed, give a number'),
        (dict(optimizer=dict(type="SGD", params=[])), "optimizer.params: is filled in by flextrain, leave it out"),
        (dict(optimizer=dict(type="LBFGS")), "optimizer: LBFGS evaluates the loss several times per update"),
        (dict(optimizer=5), "optimizer: 5 is not allowed, give dict(type=...) or an optimizer"),
        (dict(accumulative_counts=0), "accumulative_counts: 0 is not allowed"),
        (dict(clip_grad=dict(max_nrom=1)), 'clip_grad.max_nrom: unknown key, did you mean "max_norm"?'),
        (dict(clip_grad=dict()), 'clip_grad.max_norm: missing, type="norm" needs it'),
        (dict(clip_grad=dict(type="value")), 'clip_grad.clip_value: missing, type="value" needs it'),
        (dict(clip_grad=dict(type="vlaue", clip_value=1)), 'clip_grad.type: "vlaue" is not allowed, choose "norm" or "value"'),
        (dict(clip_grad=dict(max_norm=0)), "clip_grad.max_norm: 0 is not allowed, give a number above 0"),
        (dict(clip_grad=dict(type="value", clip_value=-1)), "clip_grad.clip_value: -1 is not allowed"),
        (dict(clip_grad=dict(max_norm=1, clip_value=1)), 'clip_grad.clip_value: has no meaning with type="norm", leave it out'),
        (dict(clip_grad=dict(type="value", clip_value=1, max_norm=1)), 'clip_grad.max_norm: has no meaning with type="value"'),
        (dict(clip_grad=dict(type="value", clip_value=1, norm_type=1)), 'clip_grad.norm_type: has no meaning with type="value"'),
        (dict(clip_grad=dict(max_norm="1")), 'clip_grad.max_norm: "1" is not allowed, give a number'),
    ],
)  # fmt: skip
def test_wrong_configurations(cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimWrapper(**{"optimizer": dict(type="SGD", lr=0.1), **cfg})
    assert str(caught.value).startswith(f"optim_wrapper.{message}")
    assert "\n" not in str(caught.value)


def test_a_built_lbfgs_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times"):
        OptimWrapper(torch.optim.LBFGS([torch.zeros(1)]))


def test_messages_name_the_place_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"^optim_wrapper\.generator\.clip_grad\.max_norm"):
        OptimWrapper(dict(type="SGD"), clip_grad=dict(), where="optim_wrapper.generator")


def test_full_precision_has_no_state_of_its_own() -> None:
    wrapper = built(net(), optimizer=functools.partial(Adam, lr=0.1))
    assert wrapper.plain_values() == {}
    wrapper.load_plain_values({})
    assert wrapper.precision.compute is torch.float32
    assert wrapper.wrappers == {"": wrapper}


def test_an_optimizer_that_drops_gradients_its_own_way_is_asked_to() -> None:
    class Keeps(torch.optim.SGD):
        asked = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.asked += 1
            super().zero_grad(set_to_none=False)

    model = nn.Linear(2, 2)
    plain, own = OptimWrapper(dict(type="SGD", lr=0.1)), OptimWrapper(lambda groups: Keeps(groups, lr=0.1))
    for optim in (plain, own):
        optim.build(model)
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
        assert all((p.grad is None) if optim is plain else not p.grad.any() for p in model.parameters())
    assert own.optimizer.asked == 1
