"""Replace the forward of a module, inside of activation checkpointing if that was applied to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give ``module`` the forward that ``make`` returns for the one that it has; what recomputes it recomputes that."""
    before = module.__dict__.get("forward")
    if isinstance(before, functools.partial):
        module.forward = functools.partial(before.func, make(before.args[0]), *before.args[1:], **before.keywords)
    else:
        module.forward = make(module.forward)
