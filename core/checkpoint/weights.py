"""Weights from other programs: a ``.pth`` file, a ``.safetensors`` file, and names that do not quite agree."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, nearest
from .checkpoint import Checkpoint
from .layout import DTYPE_NAMES, DTYPES, Chunk, TensorEntry
from .storage import safetensors_source

MODEL = "model."


def open_weights(path: str | os.PathLike[str]) -> Checkpoint:
    """A source of a model's weights under ``model.<name>``; nothing stored in it is executed.

    Args:
        path: a checkpoint directory; a ``.safetensors`` file; or a file written by ``torch.save`` that holds a state dict,
            itself or under "state_dict" or "model".

    Raises:
        CheckpointError: no such file, or no weights in it that can be read safely.
    """
    path = Path(path)
    if path.is_dir():
        return Checkpoint.open(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist")
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path)


def _open_safetensors(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            entries = {
                MODEL + name: _whole(path, name, piece.get_dtype(), tuple(piece.get_shape()))
                for name, piece in slices.items()
            }
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is no safetensors file, {error}") from None
    source = safetensors_source(path.parent)
    return Checkpoint(path, entries, {}, lambda _: source(path.name))


def _open_torch(path: Path) -> Checkpoint:
    try:
        with torch.serialization.safe_globals([(_Inert, name) for name in _MMENGINE_LOG]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:  # pickle, zip and torch raise many types for one thing: the file cannot be read safely
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it holds {forbidden[1]}, and loading that would execute code; save the state dict alone"
            if forbidden
            else "it is damaged, or was not written by torch.save"
        )
        raise CheckpointError(f"{path}: cannot be read as weights, {reason}") from None
    for key in ("state_dict", "model", "module"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds {type(content).__name__} instead of a state dict")
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors by name")
    entries = {
        MODEL + name: _whole(path, name, DTYPE_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape))
        for name, t in tensors.items()
    }
    return Checkpoint(path, entries, {}, lambda _: nullcontext(lambda name, part: tensors[name][part]))


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


class _Inert:
    """Stands in a file for what is not looked at; whatever is done to it, nothing happens."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


# MMEngine's own checkpoints carry its log beside the weights, and these are what the log is pickled with.
_MMENGINE_LOG = (
    "mmengine.logging.history_buffer.HistoryBuffer",
    "builtins.getattr",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
)


def _whole(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} is of {dtype}, and tensors of that kind cannot be read")
    chunk = Chunk(offsets=(0,) * len(shape), shape=shape, file="rank-00000.safetensors", name=name)
    return TensorEntry(dtype=dtype, shape=shape, chunks=(chunk,))


@dataclass(frozen=True)
class MatchReport:
    """How the weights of a file fit a model.

    Attributes:
        missing: names of the model that the file lacks.
        unexpected: names of the file that the model lacks.
        misshaped: names of both whose shapes differ, with (file's, model's) shape.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def __bool__(self) -> bool:
        """Whether anything does not fit."""
        return bool(self.missing or self.unexpected or self.misshaped)

    def __str__(self) -> str:
        parts = []
        if self.missing:
            parts.append(f"missing {_listed(self.missing, self.unexpected)}")
        if self.unexpected:
            parts.append(f"unexpected {_listed(self.unexpected, self.missing)}")
        if self.misshaped:
            shapes = [f"{name} (file {saved}, model {own})" for name, (saved, own) in self.misshaped.items()]
            parts.append(f"other shape {_listed(shapes, ())}")
        return "; ".join(parts)


def match_weights(
    source: Checkpoint,
    template: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    revise_keys: Sequence[tuple[str, str]] = (),
) -> tuple[Checkpoint, dict[str, Tensor], MatchReport]:
    """Bring the names of a source to those of a model.

    Args:
        source: from ``open_weights``.
        template: ``model.<name>`` to the tensors to fill.
        aliases: further names of tied parameters, to the name in use.
        revise_keys: (pattern, replacement) pairs of ``re.sub`` for the source's names, in this order.

    Returns:
        The source under the model's names, the part of the template that it can fill, and what does not fit.
    """
    entries: dict[str, TensorEntry] = {}
    for key, entry in source.entries.items():
        if key.startswith(MODEL):
            name = key.removeprefix(MODEL)
            for pattern, replacement in revise_keys:
                name = re.sub(pattern, replacement, name)
            entries[MODEL + aliases.get(name, name)] = entry
    own = {key: tuple(tensor.shape) for key, tensor in template.items() if key.startswith(MODEL)}
    misshaped = {
        key.removeprefix(MODEL): (entries[key].shape, shape)
        for key, shape in own.items()
        if key in entries and entries[key].shape != shape
    }
    report = MatchReport(
        missing=tuple(key.removeprefix(MODEL) for key in own if key not in entries),
        unexpected=tuple(key.removeprefix(MODEL) for key in entries if key not in own),
        misshaped=misshaped,
    )
    fits = {key: template[key] for key, shape in own.items() if key in entries and entries[key].shape == shape}
    return Checkpoint(source.path, entries, source.values, source.source), fits, report


def _listed(names: Sequence[str], others: Iterable[str], limit: int = 10) -> str:
    others = list(others)
    shown = []
    for name in names[:limit]:
        near = nearest(name, others)
        shown.append(f"{name} (like {near})" if near else name)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown) + more
