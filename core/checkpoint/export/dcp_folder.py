"""Export to a folder that ``torch.distributed.checkpoint.load`` reads: weights, and the optimizer's state if asked for.

One tensor at a time is in memory. torch's own writer keeps all tensors of a file until the file is complete.

Source of the format: torch 2.15, ``torch/distributed/checkpoint/filesystem.py``
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...base.errors import CheckpointError
from ...base.events import heartbeat
from ...base.json_values import taken_from, unpack
from ..dcp_private import bytes_in_file
from ..foreign.dcp import INDEX
from ..load import Checkpoint, TensorReader, reading, what_is_not_finite
from ..weights import open_weights
from .files import check_free, claimed, extra_states, filled, local_folder
from .weights import aliases_of, warn_of_left_out, weights_to_export

_logger = logging.getLogger("flextrain")

Items = Mapping[tuple[str | int, ...], Callable[[TensorReader], Any]]
"""Paths in torch's state of an optimizer to functions that read what is there."""
MODEL_KEY, OPTIMIZER_KEY = "model", "optimizer"
_ANY = ("*",)
_FILE_BYTES = 4 * 2**30


def export_dcp(
    checkpoint: Checkpoint | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    key: str | None = None,
    optimizer: Callable[[Checkpoint], Items] | None = None,
    averaged: bool | str = False,
    dtype: torch.dtype | None = None,
    tied: bool = True,
) -> list[Path]:
    """Write a folder for ``torch.distributed.checkpoint.load`` in a script without flextrain; call it in one process.

    Args:
        checkpoint: a checkpoint directory of any strategy, or anything else that ``open_weights`` takes.
        folder: the folder to write, which must not exist, or be empty.
        key: the script's key of the model, as in ``load({"model": model.state_dict()}, ...)``. Default: none, for
            ``load(model.state_dict(), ...)``; with ``optimizer`` "model".
        optimizer: ``torch_items`` of ``flextrain.optim.canonical``, to write the optimizer's state too, under the key "optimizer", as
            torch's ``get_optimizer_state_dict`` names it, with ``StateDictOptions(flatten_optimizer_state_dict=True)`` or without.
        averaged: write EMAHook's averages instead of the weights; the hook's name if several hooks have averages.
        dtype: dtype of the model's floating-point tensors; default: unchanged.
        tied: write tied tensors under all of their names, which takes no space; False: under the first one.

    Returns:
        The files that were written, the index last.

    Raises:
        CheckpointError: there are no such weights, the optimizer is none of torch's, or the folder is not empty.
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    path = local_folder(folder).absolute()
    check_free(path, _ANY, "the name of a folder")
    key = (MODEL_KEY if optimizer else "") if key is None else key
    if optimizer and key == OPTIMIZER_KEY:
        raise CheckpointError(f'key: "{key}" is that of the optimizer, give another one')
    weights = weights_to_export(source, averaged, dtype)
    if bad := [weight.name for weight in weights if weight.key in source.nonfinite]:
        _logger.warning(f"{source.path}: NaN or infinity is in {what_is_not_finite(bad, 'weight')}, and in {path} too")
    warn_of_left_out(source, path)
    aliases = aliases_of(source, {weight.name for weight in weights}) if tied else {}
    state = optimizer(source) if optimizer else {}
    inside = (key,) if key else ()
    with claimed(path), filled(path, INDEX, _ANY) as staged, reading(source) as reader, _Writer(staged, path) as writer:
        for weight in weights:
            item = writer.tensor((*inside, weight.name), reader.read(weight.key, weight.dtype))
            for alias in (alias for alias, name in aliases.items() if name == weight.name):
                writer.again((*inside, alias), item)
        for extra in extra_states(source, tied):
            value = unpack(extra.value, taken_from(lambda i, e=extra: reader.read(e.tensors[i].key)))  # type: ignore[misc]
            writer.add((*inside, extra.name), value)
        for name, value in state.items():
            writer.add((OPTIMIZER_KEY, *name), value(reader))
    return [path / name for name in writer.files]


# The files


@dataclasses.dataclass(frozen=True)
class _Item:
    """What the index says of an item, and where the item is."""

    described: TensorStorageMetadata | BytesStorageMetadata
    offsets: tuple[int, ...] | None
    info: Any


class _Writer:
    """Writes items to files of at most 4 GiB, or one item, and the index at the end; an error leaves it out."""

    def __init__(self, folder: Path, shown: Path) -> None:
        self.folder, self.shown = folder, shown
        self.files: list[str] = []
        self._file: IO[bytes] | None = None
        self._described: dict[str, Any] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._infos: dict[MetadataIndex, Any] = {}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close()
        if kind is None:
            self._write_index()

    def add(self, path: tuple[str | int, ...], value: Any) -> None:
        """Write a tensor, or a value as a pickle, as torch does."""
        if isinstance(value, Tensor):
            self.tensor(path, value)
        else:
            data = io.BytesIO()
            torch.save(value, data)
            self.again(path, _Item(BytesStorageMetadata(), None, self._written(data.getvalue())))

    def tensor(self, path: tuple[str | int, ...], tensor: Tensor) -> _Item:
        """Write a tensor; return its item for further names."""
        # Of a view torch.save writes the whole memory that it is in.
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        data = tensor.clone() if is_view else tensor
        shape = tuple(data.shape)
        file = self._next_file()
        begin = file.tell()
        torch.save(data, file)
        info = bytes_in_file(self.files[-1], begin, file.tell() - begin)
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=torch.Size(shape))
        properties = TensorProperties.create_from_tensor(data)
        described = TensorStorageMetadata(properties=properties, size=torch.Size(shape), chunks=[chunk])
        item = _Item(described, (0,) * len(shape), info)
        self.again(path, item)
        heartbeat()
        return item

    def again(self, path: tuple[str | int, ...], item: _Item) -> None:
        """Give an item a name, its first or a further one.

        Raises:
            CheckpointError: two items would have the same name.
        """
        name = ".".join(map(str, path))
        if name in self._described:
            raise CheckpointError(f'{self.shown}: two items would be "{name}", give another key')
        self._described[name], self._paths[name] = item.described, path
        self._infos[MetadataIndex(name, item.offsets)] = item.info

    def _written(self, data: bytes) -> Any:
        file = self._next_file()
        begin = file.tell()
        file.write(data)
        return bytes_in_file(self.files[-1], begin, len(data))

    def _next_file(self) -> IO[bytes]:
        if self._file is None or self._file.tell() > _FILE_BYTES:
            self._close()
            self.files.append(f"__0_{len(self.files)}.distcp")
            self._file = (self.folder / self.files[-1]).open("wb")
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _write_index(self) -> None:
        known = {field.name for field in dataclasses.fields(Metadata)}
        version: Mapping[str, Any] = {"version": "1.0.0"} if "version" in known else {}
        index = Metadata(self._described, planner_data=self._paths, storage_data=self._infos, **version)
        with (self.folder / INDEX).open("wb") as file:
            pickle.dump(index, file)
            file.flush()
            os.fsync(file.fileno())
        self.files.append(INDEX)
