"""Find the extra state of modules in a checkpoint for an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...errors import CheckpointError
from ...json_values import taken_from, unpack
from ...module_state import EXTRA, torch_key
from ..load.checkpoint import Checkpoint


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor to export: its ``key`` in the checkpoint, its ``name`` in the exported file."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ExtraState:
    """The extra state of one module.

    Attributes:
        name: torch's key for it, ``layer._extra_state``.
        value: the encoded value of the checkpoint, see ``core.module_state``.
        tensors: the tensors that the value refers to by index.
    """

    name: str
    value: Any
    tensors: tuple[ExportedTensor, ...]


def extra_states(source: Checkpoint, tied: bool) -> list[ExtraState]:
    """The extra state of all modules; ``tied``: that of a module with several names under each name.

    Raises:
        CheckpointError: the extra state is damaged.
    """
    aliases = source.values.get("aliases", {})
    found = []
    for key, value in source.values.items():
        if not key.startswith(EXTRA):
            continue
        tensors: dict[int, ExportedTensor] = {}
        try:
            unpack(value, taken_from(partial(_noted, tensors, source, key)))
            ordered = tuple(tensors[i] for i in range(len(tensors)))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{source.path}: {key} is damaged, {error}") from None
        name = torch_key(key.removeprefix(EXTRA))
        names = [name]
        if tied and isinstance(aliases, Mapping):
            names += [alias for alias, first in aliases.items() if first == name]
        found += [ExtraState(each, value, ordered) for each in names]
    return found


def _noted(tensors: dict[int, ExportedTensor], source: Checkpoint, key: str, number: int) -> ExportedTensor:
    return tensors.setdefault(number, _tensor(source, f"{key}/{number}"))


def _tensor(source: Checkpoint, key: str) -> ExportedTensor:
    info = source.tensors[key]
    return ExportedTensor(key, key, info.shape, info.dtype)
