"""Weights that a package stores in few bits, which checkpoints cannot hold: they are left out, and the base brings them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...core.errors import ConfigError
from ...strategies.sharded_parameters import QUANTISERS
from .build import Transform


def needs_leaving_out(value: Tensor) -> bool:
    """Whether a tensor is quantised in a way that cannot be written to a checkpoint."""
    return type(value).__module__.partition(".")[0] in QUANTISERS and hasattr(value, "__tensor_flatten__")


def check_left_out(transforms: Sequence[Transform], model: Any, leaves_out: bool | None) -> None:
    """Check before anything is built that a run with quantised weights does not save them.

    Args:
        transforms: of the run.
        model: as it was given.
        leaves_out: ``exclude_frozen_parameters``.

    Raises:
        ConfigError: it would save them.
    """
    if leaves_out:
        return
    who = next((f"{each.where}: {each.name}" for each in transforms if each.quantises), "")
    if not who and isinstance(model, nn.Module):
        name = next((name for name, each in model.named_parameters() if needs_leaving_out(each)), "")
        who = f"model.{name}: is quantised" if name else ""
    if who:
        raise ConfigError(
            f"{who.partition('(')[0]}, and checkpoints cannot hold quantised weights; leave them out, "
            "strategy=dict(type=..., exclude_frozen_parameters=True)"
        )
