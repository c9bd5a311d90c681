"""The check `lasting_errors` tells gradients that are compressed with error feedback, or at random without bias, from those of which a part is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from flextrain import DDPStrategy, OptimWrapper, Strategy
from flextrain.optim.gradients import average
from flextrain.testing import ConformanceError, WorkerGroup, check_strategy

pytestmark = pytest.mark.distributed


def top(gradient: Tensor) -> Tensor:
    """A tenth of the elements, the largest; the same ones each time if nothing is added."""
    kept = gradient.abs().flatten().topk(max(1, gradient.numel() // 10)).values
    return torch.where(gradient.abs() >= kept[-1], gradient, 0.0)


def largest(gradient: Tensor) -> Tensor:
    """One element."""
    return torch.where(gradient.abs() == gradient.abs().max(), gradient, 0.0)


def signs(gradient: Tensor) -> Tensor:
    """One bit for each element, and their mean magnitude."""
    return gradient.sign() * gradient.abs().mean()


def low_rank(gradient: Tensor) -> Tensor:
    """Rank 1 of a matrix, by one power iteration from a random vector."""
    if gradient.dim() < 2:
        return gradient
    left = nn.functional.normalize(gradient @ torch.randn(gradient.shape[1]), dim=0)
    return torch.outer(left, gradient.t() @ left)


def some(gradient: Tensor) -> Tensor:
    """A quarter of the elements, at random: a quarter of the gradient on average."""
    return gradient * (torch.rand_like(gradient) < 0.25)


def scaled(gradient: Tensor) -> Tensor:
    """A quarter of the elements, at random, four times as large: the gradient on average."""
    return 4 * some(gradient)


def eight_bits(gradient: Tensor) -> Tensor:
    """Every element rounded to one of 255 values."""
    unit = gradient.abs().max().clamp_min(1e-30) / 127
    return (gradient / unit).round() * unit


def added(gradient: Tensor, residual: Tensor, compress: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Error feedback: what is sent, and the residual for the next update."""
    whole = gradient + residual
    return (sent := compress(whole)), whole - sent


def never_added(gradient: Tensor, residual: Tensor, compress: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return (sent := compress(gradient)), residual + gradient - sent


def reset(gradient: Tensor, residual: Tensor, compress: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return added(gradient, residual.zero_(), compress)


def subtracted(gradient: Tensor, residual: Tensor, compress: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    whole = gradient - residual
    return (sent := compress(whole)), whole - sent


def of_the_gradient_alone(
    gradient: Tensor, residual: Tensor, compress: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """What the last residual lacked is forgotten."""
    return (sent := compress(gradient + residual)), gradient - sent


class Compresses(Strategy):
    """Each process compresses its gradients, which are then averaged."""

    def __init__(self, compress: Callable[[Tensor], Tensor], feedback: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.compress, self.feedback = compress, feedback
        self.residuals: dict[object, Tensor] = {}

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        optim.register_step_pre_hook(self.before_step)
        return model, optim

    def before_step(self, optim: OptimWrapper) -> None:
        parameters = [p for group in optim.param_groups for p in group["params"] if p.grad is not None]
        for p in parameters:
            residual = self.residuals.setdefault(p, torch.zeros_like(p))
            p.grad, self.residuals[p] = self.feedback(p.grad, residual, self.compress)
        average(parameters, self.topology.data)


class CompressesAsOne(Compresses):
    """Compresses all gradients as one vector: most signs stand for far less than the mean magnitude, and need many updates."""

    def before_step(self, optim: OptimWrapper) -> None:
        parameters = [p for group in optim.param_groups for p in group["params"] if p.grad is not None]
        whole = torch.cat([p.grad.flatten() for p in parameters])
        residual = self.residuals.get(optim, torch.zeros_like(whole))
        sent, self.residuals[optim] = self.feedback(whole, residual, self.compress)
        for p, part in zip(parameters, sent.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        average(parameters, self.topology.data)


class PowerSGD(DDPStrategy):
    """torch's PowerSGD, of rank 1."""

    feedback = True

    def _wrap(self, model: nn.Module) -> nn.Module:
        wrapped: Any = super()._wrap(model)
        state = PowerSGDState(None, 1, start_powerSGD_iter=2, use_error_feedback=self.feedback)
        wrapped.register_comm_hook(state, powerSGD_hook)
        return wrapped  # type: ignore[no-any-return]


class PowerSGDWithoutFeedback(PowerSGD):
    feedback = False


def case(compress: Callable[[Tensor], Tensor], feedback: Any, *, daily: bool = False) -> Any:
    strategy = partial(Compresses, compress, feedback)
    marks = () if daily else pytest.mark.full
    return pytest.param(strategy, id=f"{compress.__name__}-{feedback.__name__}", marks=marks)


@pytest.mark.parametrize(
    "strategy",
    [
        case(top, added, daily=True), case(largest, added), case(signs, added), case(low_rank, added), case(some, added), case(eight_bits, added),
        case(scaled, never_added, daily=True), case(eight_bits, never_added),
        pytest.param(partial(CompressesAsOne, signs, added), marks=pytest.mark.full, id="as-one"),
        pytest.param(PowerSGD, marks=pytest.mark.full), pytest.param(dict(type="DDPStrategy", comm_hook="bf16_compress"), marks=pytest.mark.full, id="bf16"),
    ],
)  # fmt: skip
def test_errors_that_later_updates_make_good(workers2: WorkerGroup, strategy: Any) -> None:
    assert check_strategy(strategy, workers=workers2, only=["lasting_errors"]).passed


@pytest.mark.parametrize(
    "strategy",
    [
        case(top, never_added, daily=True), case(top, reset), case(top, subtracted), case(top, of_the_gradient_alone),
        case(signs, never_added), case(signs, subtracted), case(low_rank, never_added), case(low_rank, subtracted),
        case(some, never_added), case(some, subtracted), case(scaled, added),  # the last one diverges
        pytest.param(PowerSGDWithoutFeedback, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_errors_that_stay(workers2: WorkerGroup, strategy: Any) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_strategy(strategy, workers=workers2, only=["lasting_errors"])
    failed = caught.value.report.failed["lasting_errors"]
    assert "after 256 updates" in failed
    assert failed.endswith("what an update leaves out is lost, add it to the next one")
    assert "\n" not in failed
