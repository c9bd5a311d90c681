"""CUDA graphs: who may have recorded some, which write every replay's results to the same memory."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


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
