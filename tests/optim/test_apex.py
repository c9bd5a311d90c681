"""ApexOptimWrapper: what each level stores and computes in, and that O2 is training with float32 masters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.checkpoint import Checkpoint, save_checkpoint
from flextrain.optim import ApexOptimWrapper, build_optim_wrapper
from flextrain.strategies import SingleDeviceStrategy

HALF, FULL = torch.float16, torch.float32
SGD = dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.computed: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.norm(self.first(x)).relu())
        self.computed = out.dtype
        return out


def batches() -> list[Tensor]:
    return list(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).split(8))


def prepared(level: str, **cfg: Any) -> tuple[Net, ApexOptimWrapper, SingleDeviceStrategy]:
    wrapper = ApexOptimWrapper(**{"optimizer": SGD, "opt_level": level, **cfg})
    strategy = SingleDeviceStrategy(device="cpu")
    model = Net()
    strategy.setup(model, wrapper)
    return model, wrapper, strategy


def update(model: nn.Module, wrapper: ApexOptimWrapper, x: Tensor, times: float = 1.0) -> float:
    with wrapper.optim_context(model):
        out = model(x)
    assert out.dtype is (HALF if wrapper.opt_level == "O1" else FULL)
    loss = (out.float() - 1).square().mean()
    wrapper.update_params(loss * times)
    return loss.item()


def dtypes_of(model: Net) -> tuple[torch.dtype, torch.dtype]:
    """Of the linear layers and of the normalisation layer."""
    (linear,) = {p.dtype for part in (model.first, model.last) for p in part.parameters()}
    (norm,) = {p.dtype for p in model.norm.parameters()}
    return linear, norm


@pytest.mark.parametrize(
    "level, cfg, linear, norm, computed, masters, scaled",
    [
        ("O0", {}, FULL, FULL, FULL, FULL, False),
        ("O1", {}, FULL, FULL, HALF, FULL, True),
        ("O2", {}, HALF, FULL, HALF, FULL, True),
        ("O2", dict(keep_batchnorm_fp32=False), HALF, HALF, HALF, FULL, True),
        ("O3", {}, HALF, HALF, HALF, HALF, False),
        ("O3", dict(keep_batchnorm_fp32=True), HALF, FULL, HALF, HALF, False),
        ("O2", dict(enabled=False), FULL, FULL, FULL, FULL, False),
    ],
)
def test_levels(
    level: str, cfg: Any, linear: Any, norm: Any, computed: torch.dtype, masters: torch.dtype, scaled: bool
) -> None:
    model, wrapper, strategy = prepared(level, **cfg)
    losses = [update(model, wrapper, x) for _ in range(4) for x in batches()]
    assert losses[-1] < losses[0] / 2
    assert dtypes_of(model) == (linear, norm)
    assert model.computed is computed
    optimized = [p for group in wrapper.param_groups for p in group["params"]]
    assert optimized[0].dtype is masters
    assert wrapper.optimizer.state[optimized[0]]["momentum_buffer"].dtype is masters
    assert bool(wrapper.plain_values()) is scaled
    report = strategy.precision_report()
    assert report.parameters == tuple(sorted({linear, norm}, key=str))
    assert report.optimizer_state == tuple(sorted({masters, norm if level == "O3" else FULL}, key=str))


def by_hand(clip: float | None) -> dict[str, Tensor]:
    """Float32 masters, a half-precision model with normalisation in float32, a loss scale of 128: O2 written out."""
    torch.manual_seed(0)
    model = Net()
    masters = {name: parameter.detach().half().float() for name, parameter in model.named_parameters()}
    masters |= {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("norm")}
    optimizer = torch.optim.SGD(masters.values(), lr=0.1, momentum=0.9, weight_decay=0.01)
    model.first.half()
    model.last.half()
    for x in batches():
        for parameter in model.parameters():
            parameter.grad = None
        out = model.last(model.norm(model.first(x.half()).float()).half().relu())
        loss = (out.float() - 1).square().mean()
        (loss * 128).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float() / 128
        if clip is not None:
            nn.utils.clip_grad_norm_(masters.values(), clip)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


@pytest.mark.parametrize("clip", [None, 0.05])
def test_o2_is_training_with_float32_masters(clip: float | None) -> None:
    model, wrapper, strategy = prepared("O2", loss_scale=128, clip_grad=clip and dict(max_norm=clip))
    for x in batches():
        update(model, wrapper, x)
    expected = by_hand(clip)
    masters = {name: wrapper.master(parameter).detach() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(masters, expected, rtol=1e-6, atol=1e-7)
    assert {master.dtype for master in masters.values()} == {FULL}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name].to(parameter.dtype)), name
    torch.testing.assert_close(strategy.model_state(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_update(level: str) -> None:
    model, wrapper, _ = prepared(level)
    x = batches()[0]
    update(model, wrapper, x)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scale = wrapper.plain_values()["scaler"]["scale"]
    update(model, wrapper, x, times=math.inf)
    assert wrapper.last_step.skipped
    assert wrapper.plain_values()["scaler"]["scale"] == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    update(model, wrapper, x)
    assert not wrapper.last_step.skipped


def test_a_checkpoint_holds_the_masters(tmp_path: Path) -> None:
    model, wrapper, strategy = prepared("O2")
    for x in batches():
        update(model, wrapper, x)
    state = strategy.state()
    assert {value.dtype for key, value in state.items() if key.startswith(("model.", "optim.state."))} == {FULL}
    assert not torch.equal(state["model.first.weight"], model.first.weight)  # it has digits that half precision lacks
    path = save_checkpoint(tmp_path / "a", state)

    twin, twin_wrapper, twin_strategy = prepared("O2")
    twin_wrapper.load_plain_values(wrapper.plain_values())
    saved = Checkpoint.open(path)
    template = twin_strategy.template(saved.saved)
    saved.load(template)
    twin_strategy.load({**saved.values, **template})
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(wrapper.master(a), twin_wrapper.master(b))
    x = batches()[0]
    assert update(model, wrapper, x) == update(twin, twin_wrapper, x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_masters_belong_to_parameters() -> None:
    model, wrapper, _ = prepared("O2")
    parameter = model.first.weight
    master = wrapper.master(parameter)
    assert master is not parameter
    assert wrapper.model_parameter(master) is parameter
    assert wrapper.master(model.norm.weight) is model.norm.weight  # stored in float32, needs none
    with torch.no_grad():
        master.fill_(0.5)
    wrapper.refresh()
    assert set(parameter.flatten().tolist()) == {0.5}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_level_needs_a_strategy(level: Any) -> None:
    model = Net()
    wrapper = ApexOptimWrapper(SGD, opt_level=level)
    with pytest.raises(StrategyError, match=f'^optim_wrapper.opt_level: "{level}" is carried out by a strategy'):
        wrapper.optim_context(model)
    with ApexOptimWrapper(torch.optim.SGD(model.parameters()), opt_level="O0").optim_context(model):
        pass


def test_o2_makes_its_own_optimizer() -> None:
    model = Net()
    wrapper = ApexOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2")
    with pytest.raises(ConfigError, match=r"optimizer: O2 makes its own float32 masters, give dict\(type=...\)"):
        SingleDeviceStrategy(device="cpu").setup(model, wrapper)


@pytest.mark.parametrize(
    "cfg, message",
    [
        (dict(opt_level="O4"), 'opt_level: "O4" is not allowed, choose "O0", "O1", "O2" or "O3"'),
        (dict(opt_level="O0", loss_scale=128), 'loss_scale: has no meaning with opt_level="O0"'),
        (dict(opt_level="O3", loss_scale="dynamic"), 'loss_scale: has no meaning with opt_level="O3"'),
        (dict(opt_level="O1", master_weights=True), 'master_weights: True is not allowed with opt_level="O1"'),
        (dict(opt_level="O2", master_weights=False), 'master_weights: False is not allowed with opt_level="O2"'),
        (dict(opt_level="O1", keep_batchnorm_fp32=True), 'keep_batchnorm_fp32: has no meaning with opt_level="O1"'),
        (dict(num_losses=2), "num_losses: 2 is not allowed, use an OptimWrapperDict"),
        (dict(cast_model_type=1), "cast_model_type: has no meaning here, the level decides it"),
        (dict(patch_torch_functions=True), "patch_torch_functions: has no meaning here, autocast takes its place"),
        (dict(cast_model_outputs=1), "cast_model_outputs: has no meaning here, outputs are float32"),
        (dict(min_loss_scale=1), "min_loss_scale: has no meaning here, torch's GradScaler has no bounds"),
        (dict(max_loss_scale=1), "max_loss_scale: has no meaning here, torch's GradScaler has no bounds"),
    ],
)
def test_what_cannot_be_honoured_is_refused(cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optim_wrapper(dict(type="ApexOptimWrapper", optimizer=SGD, **cfg))
    assert str(caught.value).startswith(f"optim_wrapper.{message}")


@pytest.mark.parametrize(
    "cfg",
    [dict(opt_level="O0", loss_scale=1), dict(opt_level="O2", master_weights=True), dict(opt_level="O1", verbosity=0)],
)
def test_what_the_level_does_anyway_may_be_said(cfg: dict[str, Any]) -> None:
    ApexOptimWrapper(SGD, **cfg)
