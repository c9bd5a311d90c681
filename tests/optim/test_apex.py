"""ApexOptimWrapper: what each level computes in, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import ConfigError
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


@pytest.mark.parametrize(
    "level, cfg, computed", [("O0", {}, FULL), ("O1", {}, HALF), ("O1", dict(enabled=False), FULL)]
)
def test_levels(level: str, cfg: Any, computed: torch.dtype) -> None:
    model, wrapper, strategy = prepared(level, **cfg)
    losses = [update(model, wrapper, x) for _ in range(4) for x in batches()]
    assert losses[-1] < losses[0] / 2
    assert model.computed is computed
    assert bool(wrapper.plain_values()) is (computed is HALF)
    report = strategy.precision_report()
    assert (report.parameters, report.optimizer_state) == ((FULL,), (FULL,))


@pytest.mark.parametrize("level, computed", [("O0", FULL), ("O1", HALF)])
def test_a_loop_of_ones_own(level: Any, computed: torch.dtype) -> None:
    model = Net()
    scale = None if level == "O0" else 8.0
    wrapper = ApexOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, loss_scale=scale)
    before = model.first.weight.clone()
    update(model, wrapper, batches()[0])
    assert model.computed is computed
    assert not torch.equal(before, model.first.weight)


@pytest.mark.parametrize(
    "cfg, message",
    [
        (dict(opt_level="O4"), 'opt_level: "O4" is not allowed, choose "O0", "O1", "O2" or "O3"'),
        (dict(opt_level="O0", loss_scale=128), 'loss_scale: has no meaning with opt_level="O0"'),
        (
            dict(opt_level="O2"),
            'opt_level: "O2" is not allowed, parameters stay in float32; choose O1, or strategy="zero1"',
        ),
        (dict(opt_level="O3"), 'opt_level: "O3" is not allowed'),
        (dict(opt_level="O1", master_weights=True), 'master_weights: True is not allowed with opt_level="O1"'),
        (dict(keep_batchnorm_fp32=True), "keep_batchnorm_fp32: has no meaning here, normalisation layers are float32"),
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
    [dict(opt_level="O0", loss_scale=1), dict(opt_level="O2", enabled=False), dict(opt_level="O1", verbosity=0)],
)
def test_what_the_level_does_anyway_may_be_said(cfg: dict[str, Any]) -> None:
    ApexOptimWrapper(SGD, **cfg)
