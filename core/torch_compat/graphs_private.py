"""Compiled modules: around their calls, and who may have recorded CUDA graphs, which write every replay's results to the same memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn


def may_have_graphs(options: bool | Mapping[str, Any]) -> bool:
    """Whether ``torch.compile`` with these options may record CUDA graphs; without options the user has compiled, and it may. 2.11."""
    if not options:
        return True
    given = {} if options is True else options
    chosen = given.get("options") or {}
    by_default = importlib.import_module("torch._inductor.config").triton.cudagraphs
    return bool(
        given.get("mode") in ("reduce-overhead", "max-autotune")
        or given.get("backend") == "cudagraphs"
        or chosen.get("triton.cudagraphs", by_default)
    )


def call_first_by(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let ``around(call, *args, **kwargs)`` make the first call in training of a module that is compiled in place. 2.6, 2.15."""
    call = cast(Callable[..., Any], module._compiled_call_impl)

    def first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        module._compiled_call_impl = call
        return around(call, *args, **kwargs)

    module._compiled_call_impl = first
