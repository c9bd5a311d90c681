"""Build a model with memory after all, where its constructor looks at values that a strategy builds it without."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from ..core.comm import collectives as dist
from ..core.deferred import LooksAtValues
from ..core.random_state import load_rng_state, rng_state
from ..core.rehearsing import rehearsing

_logger = logging.getLogger("flextrain")


def constructed(
    without: Callable[[], nn.Module], whole: Callable[[], nn.Module], device: torch.device, local_rank: int
) -> tuple[nn.Module, bool]:
    """Return the model that ``without`` builds, or if it raises LooksAtValues, that of ``whole``; a collective.

    For the latter the random generators of Python, NumPy, torch and the device are those of rank 0 before. The processes of a
    machine call it one after the other, so that it can free what another one needs.

    Args:
        without: builds without memory for all parameters.
        whole: builds with memory.
        local_rank: of this process on its machine.

    Returns:
        The model, and whether ``whole`` has built it.
    """
    if rehearsing():
        return without(), False
    state, looks, model = rng_state(device), "", None
    try:
        model = without()
    except LooksAtValues as found:
        looks = str(found)
    if not any(dist.all_gather_object(bool(looks))):
        assert model is not None
        return model, False
    del model
    _logger.warning(
        f"model: is built with memory, because it looks at values of its parameters while it is built ({looks}); the processes of "
        "a machine build it one after the other, and rank 0 keeps it whole until it is sharded"
    )
    first = dist.broadcast_object(state)
    load_rng_state(first, device)
    found_model = _in_turn(whole, local_rank)
    if state != first:
        load_rng_state(state, device)
    return found_model, True


def _in_turn(whole: Callable[[], nn.Module], local_rank: int) -> nn.Module:
    model, error = None, None
    for turn in range(max(dist.all_gather_object(local_rank)) + 1):
        if turn == local_rank:
            try:
                model = whole()
            except Exception as found:  # the others wait for this turn's end
                error = found
        if any(dist.all_gather_object(error is not None)):
            break
    if error is not None:
        raise error
    return whole() if model is None else model  # which fails too, since it has failed in another process
