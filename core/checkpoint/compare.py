"""Compare two checkpoints, and a checkpoint with its own index and checksums."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.tensors import DTYPE_NAMES, DTYPES, dtype_name
from .directory import check_file, read_manifest
from .load import Checkpoint, TensorReader, reading
from .manifest import SavedTensor, StoredChunk
from .safetensors_file import SafetensorsFile

_OF_THE_RUN = re.compile(
    r"message_hub\.scalars\.(\w+/)?((data_)?time|memory|max_memory|\w*_per_second|mfu)\..*"
    r"|message_hub\.info\.(last_ckpt|best_ckpt)|meta\.(experiment_name|time)"
)
# Number of elements that are compared at a time, in float64.
_BLOCK = 2**20


@dataclass(frozen=True)
class TensorDifference:
    """The differences between two tensors of one key.

    Attributes:
        key: key of both tensors.
        shapes: shapes of a and b.
        dtypes: names of the dtypes of a and b, such as ``float32``.
        absolute: the largest difference; infinite if one of the two values is NaN; None if the shapes differ.
        relative: the largest difference divided by the larger of the two magnitudes; None if the shapes differ.
        count: number of elements that differ; None if the shapes differ.
        numel: number of elements of a.
    """

    key: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    absolute: float | None
    relative: float | None
    count: int | None
    numel: int


@dataclass(frozen=True)
class Comparison:
    """The differences between two checkpoints.

    Attributes:
        only_a: keys of tensors and paths of plain values that only the first one has.
        only_b: keys of tensors and paths of plain values that only the second one has.
        tensors: the tensors that differ.
        values: path of a plain value that differs, to its values in the first and the second one.
        equal: number of equal tensors and plain values.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    equal: int = 0

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.only_a or self.only_b or self.tensors or self.values)


def compare(a: Checkpoint, b: Checkpoint, counts: Callable[[str], bool] = lambda key: True) -> Comparison:
    """Compare two checkpoints in one process, with one tensor of each in memory at a time.

    Args:
        a, b: open checkpoints.
        counts: whether to compare the tensor of a key, or the plain value of a path; default: compare all.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    values_a, values_b = (
        {path: value for path, value in _leaves(checkpoint.values) if counts(path)} for checkpoint in (a, b)
    )
    entries_a, entries_b = ([key for key in checkpoint.entries if counts(key)] for checkpoint in (a, b))
    tensors = []
    with ExitStack() as stack:
        readers = [stack.enter_context(reading(checkpoint)) for checkpoint in (a, b)]
        shared = [key for key in entries_a if key in b.entries]
        for key in shared:
            if (difference := _compare_tensor(key, *readers)) is not None:
                tensors.append(difference)
    paths = [path for path in values_a if path in values_b]
    values = {path: (values_a[path], values_b[path]) for path in paths if not _same(values_a[path], values_b[path])}
    keys_a, keys_b = [*entries_a, *values_a], [*entries_b, *values_b]
    in_a, in_b = set(keys_a), set(keys_b)
    return Comparison(
        only_a=tuple(key for key in keys_a if key not in in_b),
        only_b=tuple(key for key in keys_b if key not in in_a),
        tensors=tuple(tensors),
        values=values,
        equal=len(shared) + len(paths) - len(tensors) - len(values),
    )


def is_of_the_run(path: str) -> bool:
    """Whether a plain value says when, where or how fast a run was, which differs between two runs of equal numbers."""
    return _OF_THE_RUN.fullmatch(path) is not None


def _compare_tensor(key: str, a: TensorReader, b: TensorReader) -> TensorDifference | None:
    infos = (a.checkpoint.entries[key], b.checkpoint.entries[key])
    shapes = (infos[0].shape, infos[1].shape)
    dtypes = (dtype_name(DTYPES[infos[0].dtype]), dtype_name(DTYPES[infos[1].dtype]))
    numel = math.prod(shapes[0])
    if shapes[0] != shapes[1]:
        return TensorDifference(key, shapes, dtypes, None, None, None, numel)
    absolute, relative, count = difference_of(a.read(key), b.read(key))
    if not count and dtypes[0] == dtypes[1]:
        return None
    return TensorDifference(key, shapes, dtypes, absolute, relative, count, numel)


def difference_of(a: Tensor, b: Tensor) -> tuple[float, float, int]:
    """(largest absolute difference, largest relative one, number of different elements) of tensors of equal shape.

    Two NaN are equal; the difference of NaN and a number is infinite.
    """
    absolute = relative = 0.0
    count = 0
    for begin in range(0, a.numel(), _BLOCK):
        one, other = (tensor.reshape(-1)[begin : begin + _BLOCK] for tensor in (a, b))
        if one.is_complex() or other.is_complex():
            x, y = one.to(torch.complex128), other.to(torch.complex128)
        else:
            x, y = one.double(), other.double()
        # float64 cannot represent every integer beyond 2^53, so integers are compared exactly.
        is_exact = one.dtype == other.dtype and not (one.is_floating_point() or one.is_complex())
        same = (one == other) if is_exact else (x == y) | (x.isnan() & y.isnan())
        if bool(same.all()):
            continue
        distance = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
        magnitude = torch.maximum(x.abs(), y.abs())
        share = (distance / magnitude).nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
        absolute, relative = max(absolute, float(distance.max())), max(relative, float(share.max()))
        count += int((~same).sum())
    return absolute, relative, count


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, plain value); a list of plain values is one value."""
    items: Iterator[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping) and (value or not path):
        items = iter(value.items())
    elif isinstance(value, Sequence) and any(isinstance(item, (Mapping, list)) for item in value):
        items = iter(enumerate(value)) if not isinstance(value, str) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        # The key of the schedulers of a single optimizer is the empty string.
        yield from _leaves(item, f"{path}.{key}" if path and key != "" else path or str(key))


def _same(a: Any, b: Any) -> bool:
    # Two NaN are equal here, and 1, 1.0 and True are three different values.
    return a is b or repr(a) == repr(b)


# Verify a checkpoint: compare all files with its index and checksums.


def damages(path: Path) -> Iterator[str]:
    """Yield one sentence for each damage of the checkpoint at ``path``, with the file's name; every byte is read."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        yield str(error)
        return
    for file, written in manifest.files.items():
        try:
            check_file(path / file, written)
        except CheckpointError as error:
            yield str(error)
    by_file: dict[str, list[tuple[str, SavedTensor, StoredChunk]]] = {}
    for key, entry in manifest.entries.items():
        for chunk in entry.chunks:
            by_file.setdefault(chunk.file, []).append((key, entry, chunk))
    for file, chunks in by_file.items():
        yield from _file_damages(path / file, chunks)


def _file_damages(path: Path, chunks: list[tuple[str, SavedTensor, StoredChunk]]) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            tensors = SafetensorsFile(path, file).tensors
    except (CheckpointError, OSError) as error:
        yield str(error) if isinstance(error, CheckpointError) else f"{path}: cannot be read, {error.strerror or error}"
        return
    for key, entry, chunk in chunks:
        if chunk.name not in tensors:
            yield f"{path}: lacks {chunk.name}, a chunk of {key}"
            continue
        dtype, shape = DTYPE_NAMES[tensors[chunk.name][0]], tensors[chunk.name][1]
        if (dtype, shape) != (entry.dtype, chunk.shape):
            yield f"{path}: {chunk.name} is {dtype} {shape} instead of {entry.dtype} {chunk.shape}"


def size_of(path: Path) -> int:
    """Size of all files of a checkpoint directory, in bytes."""
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
