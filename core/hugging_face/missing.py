"""Values of parameters that a folder's files lack, such as a new head: as the model's constructor initialises them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from . import pretrained_private as private
from .pretrained import Pretrained


def initial_values(source: Pretrained, names: Collection[str], seed: int) -> dict[str, Tensor]:
    """Return the whole tensors of some parameters, on the CPU; the rest of the model takes no memory.

    Equal on every process, whatever the strategy, for the same names and seed.

    Args:
        source: the model.
        names: of parameters, as in the model that ``source`` builds.
        seed: of the random numbers.

    Raises:
        ConfigError: the model initialises one of them nowhere.
    """
    model = source.meta_model()
    found: dict[str, Tensor] = {}
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        like = model.get_parameter(name)
        # NaN tells afterwards what was not initialised.
        found[name] = torch.full(like.shape, torch.nan, dtype=like.dtype)
        model.get_submodule(path).register_parameter(leaf, nn.Parameter(found[name]))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        private.initialise(model)
    for name, tensor in found.items():
        if tensor.isnan().any():
            raise ConfigError(
                f"model.{name}: {source.folder} does not have it, and {type(model).__name__} does not initialise it"
            )
    return found
