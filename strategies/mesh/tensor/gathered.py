"""Say once where a model gathers activations that its plan has divided: right, and slower than it could be."""

from __future__ import annotations

import functools
import logging
import sys
from types import FrameType
from typing import Any

from torch import nn

from ....core.dtensor_private import relax_views, replicate_without_rule

_logger = logging.getLogger("flextrain")
_told: set[tuple[str, str]] = set()


@functools.cache
def register_gathering() -> None:
    """Let operations on DTensors gather what they cannot keep divided; once in a process."""
    relax_views(_tell_view)
    replicate_without_rule(_tell_no_rule)


def _tell_view(schema: Any) -> None:
    shape, wanted = tuple(schema.args_schema[0].shape), schema.args_schema[1]
    tell_gathered(f"views {shape} as {tuple(wanted)}, which its plan cuts elsewhere", "another style")


def _tell_no_rule(schema: Any) -> None:
    tell_gathered(f"uses {schema.op}, which torch divides in no way", "another style")


def tell_gathered(what: str, instead: str) -> None:
    """Log that a module communicates because of what it does with divided features; once for each class of module.

    Args:
        what: what it does, after the name of the module.
        instead: the style of a plan with which it might not.
    """
    where = _calling_module()
    if (where, what) not in _told:
        _told.add((where, what))
        _logger.warning(f"plan: {where} {what}; right but slow, activations are gathered, {instead} may be faster")


def _calling_module() -> str:
    """Return the class and line of the innermost ``forward`` that is running and is not torch's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            return f"{type(owner).__name__}.{frame.f_code.co_name} (line {frame.f_lineno})"
        frame = frame.f_back
    return "backward"
