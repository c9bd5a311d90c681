"""Faults that the fuzzer has to find, planted into the library while a run lasts: the kinds that users have met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from flextrain import DDPStrategy, FSDPStrategy, OptimWrapper, Strategy
from flextrain.optim import gradients

from .layers import Branch, TinyScale


def _norm_of_own_shards(norm: Any) -> Any:
    """Clipping by the norm of what this process holds."""
    return lambda grads, norm_type: norm(
        [getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads], norm_type
    )


def _mean_over_full_window(backward: Any) -> Any:
    """The losses of a window that ends early are divided by the size of the others."""
    return lambda self, loss: backward(self, loss * self._size / self.accumulate)


def _without_hooks(setup: Any) -> Any:
    """Gradient hooks of parameters are dropped when the model is placed."""

    def changed(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for parameter in model.parameters():
            parameter._backward_hooks = None
        return setup(self, model, *args, **kwargs)

    return changed


def _without_moments(load: Any) -> Any:
    """A resumed optimizer begins with empty state."""

    def changed(self: Any, state: Mapping[str, Any]) -> None:
        found = {
            key: torch.zeros_like(value) if key.startswith("optim.state") and isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        load(self, found)

    return changed


def _mean_over_users(run: Any) -> Any:
    """The gradients of a branch are averaged over the processes that have samples for it."""
    return _scaling(run, Branch, 2.0)


def _hardly_moving(run: Any) -> Any:
    """A layer whose output may count for a millionth gets half of its gradient."""
    return _scaling(run, TinyScale, 0.5)


def _scaling(run: Any, kind: type[nn.Module], factor: float) -> Any:
    def changed(self: Any, *args: Any) -> Any:
        found = run(self, *args)
        for module in self.module.modules():
            for parameter in module.parameters() if isinstance(module, kind) else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return found

    return changed


# By name: the strategy with which it is looked for, the object, its attribute, and what it becomes.
FAULTS: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "norm of own shards": ("fsdp", gradients, "_norm", _norm_of_own_shards),
    "mean over full window": ("ddp", OptimWrapper, "backward", _mean_over_full_window),
    "without hooks": ("ddp", DDPStrategy, "setup", _without_hooks),
    "without moments": ("fsdp", FSDPStrategy, "load", _without_moments),
    "mean over users": ("ddp", Strategy, "run_window", _mean_over_users),
    "hardly moving": ("ddp", Strategy, "run_window", _hardly_moving),
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant the fault of that name, or none."""
    if name is None:
        yield
        return
    _, home, attribute, change = FAULTS[name]
    with mock.patch.object(home, attribute, change(getattr(home, attribute))):
        yield
