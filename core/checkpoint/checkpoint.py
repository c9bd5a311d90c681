"""Saving and opening checkpoints, on all processes together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..distributed import all_gather_object, gather_object, get_world_size
from ..errors import CheckpointError
from . import layout
from .layout import DTYPES, TensorEntry
from .planners import ShardLoadPlanner, ShardSavePlanner
from .storage import ChunkReader, ShardWriter, Source, safetensors_source
from .untrusted import read_json


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def save_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    per_rank: Mapping[str, Any] | None = None,
    written_by: Mapping[str, str | int] | None = None,
) -> Path:
    """Write a checkpoint directory; every process must call it, and writes its own part.

    Args:
        path: the directory; a checkpoint of this name is replaced once the new one is complete.
        state: key to tensor (plain: equal on all processes that offer it; DTensor and FlatShard: each process's part) or
            JSON-able value (rank 0's counts).
        per_rank: JSON-able values that differ by process; read back as a list by rank.
        written_by: facts for people, such as the strategy's name.

    Raises:
        CheckpointError: on every process, if any failed; a checkpoint that was there before still is.
    """
    path = Path(path).absolute()
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    values: dict[str, Any] = {key: value for key, value in state.items() if key not in tensors}
    problems = all_gather_object(_not_plain(per_rank or {}))
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"{path}: could not be saved on rank {rank}: {problem}")
    gathered = {key: gather_object(value) for key, value in (per_rank or {}).items()}
    facts = {"torch": torch.__version__, "world_size": get_world_size(), **(written_by or {})}
    with _own_errors(path, "could not be saved"):
        save(
            tensors,
            storage_writer=ShardWriter(path, values | gathered, facts),
            planner=ShardSavePlanner(),
        )
    return path


def _not_plain(values: Mapping[str, Any]) -> str | None:
    """What is wrong with values that are to be sent to rank 0, where one that cannot be sent would be waited for."""
    try:
        layout.to_json(dict(values), "per_rank")
    except CheckpointError as error:
        return str(error)
    return None


class Checkpoint:
    """A source of tensors by key, and plain values; reading it executes nothing that was stored.

    Args:
        path: where it comes from, for messages.
        entries: the tensors and their pieces.
        values: everything that is not a tensor.
        source: opens the files that hold the pieces.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, TensorEntry],
        values: Mapping[str, Any],
        source: Source,
    ) -> None:
        self.path, self.entries, self.values, self.source = path, dict(entries), dict(values), source

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in a directory that ``save_checkpoint`` wrote; tensors are not read yet.

        Raises:
            CheckpointError: it is missing, incomplete or damaged.
        """
        path = Path(path).absolute()
        manifest = layout.read_manifest(path)
        values = read_json(path / layout.VALUES)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path / layout.VALUES}: is damaged, it is no mapping")
        return cls(path, manifest.tensors, values, safetensors_source(path))

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, by key."""
        return {key: TensorInfo(entry.shape, DTYPES[entry.dtype]) for key, entry in self.entries.items()}

    @property
    def saved(self) -> dict[str, Any]:
        """What ``Strategy.load_template`` takes: shape and dtype of the tensors, and the values."""
        return {**self.values, **self.tensors}

    def load(self, template: Mapping[str, Tensor]) -> None:
        """Fill the tensors of a template in place, each process its own part; collective.

        Raises:
            CheckpointError: a key is not in the checkpoint, a shape differs, or bytes cannot be read.
        """
        for key, tensor in template.items():
            if key not in self.entries:
                raise CheckpointError(f"{self.path}: has no tensor {key}")
            if tuple(tensor.shape) != self.entries[key].shape:
                raise CheckpointError(
                    f"{self.path}: {key} has shape {self.entries[key].shape}, shape {tuple(tensor.shape)} is needed"
                )
        if not template:
            return
        reader = ChunkReader({key: self.entries[key] for key in template}, self.source)
        with _own_errors(self.path, "could not be read"):
            load(dict(template), storage_reader=reader, planner=ShardLoadPlanner())


@contextmanager
def _own_errors(path: Path, what: str) -> Iterator[None]:
    """Turn what DCP raises into CheckpointError, with the ranks that failed."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")  # DCP's word for one process
            yield
    except CheckpointException as error:  # derives from BaseException, which `except Exception` does not see
        # DCP gives (exception, stack summary) by rank.
        reasons = {rank: failure[0] for rank, failure in error.failures.items()}
        first = min(reasons)
        ranks = ", ".join(map(str, sorted(reasons)))
        raise CheckpointError(f"{path}: {what} on rank {ranks}: {_one_line(reasons[first])}") from reasons[first]
    except OSError as error:
        raise CheckpointError(f"{path}: {what}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
