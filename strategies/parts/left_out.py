"""The frozen parameters that checkpoints leave out: their tensors for whole exports, and fingerprints to recognise them by."""

from __future__ import annotations

from torch import Tensor

from ..base import Strategy, left_out


def state_left_out(strategy: Strategy) -> dict[str, Tensor]:
    """Return this process's entries ``model.<name>`` of the parameters that are left out, for exports of the whole model."""
    names = left_out(strategy)
    return {f"model.{name}": tensor for name, tensor in strategy.model_state().items() if name in names}


def fingerprints_of_left_out(strategy: Strategy) -> dict[str, str]:
    """Return a fingerprint for each parameter that is left out, on any process, by name; a collective.

    It depends on neither the strategy nor the number of processes, only on dtype, shape and values. It begins with the
    dtype, because a strategy may keep frozen parameters in half precision. Computed again after a parameter was written.
    """
    if not strategy.config.exclude_frozen_parameters:
        return {}
    names = left_out(strategy)
    return strategy.noted.frozen_prints.of({name: t for name, t in strategy.model_state().items() if name in names})


__all__ = ["fingerprints_of_left_out", "left_out", "state_left_out"]
