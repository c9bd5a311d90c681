"""Export weights to ``.safetensors``, to several of them with Hugging Face's index, or to ``.pth``.

A file has a temporary name until it is complete, and one tensor at a time is in memory.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...base.errors import CheckpointError, counted, one_of, suggest
from ...base.tensors import DTYPES, PAIRS
from ..foreign.weights_file import MODEL
from ..load import Checkpoint, reading, what_is_not_finite
from ..safetensors_file import write_safetensors
from ..weights import open_weights
from .files import ExportedTensor, Pending, check_free, claimed, extra_states, filled, local_target, write_torch

_logger = logging.getLogger("flextrain")

TORCH_SUFFIXES = (".pth", ".pt", ".bin")
_AVERAGED = re.compile(r"hook\.([^/]+)/averaged\.(.+)")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_STEM, _SUFFIX = "model", ".safetensors"
INDEX = f"{_STEM}{_SUFFIX}.index.json"
WEIGHT_FILES = (f"*{_SUFFIX}*",)
"""Patterns of files that keep a folder from being written to."""


def export_weights(
    checkpoint: Checkpoint | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    averaged: bool | str = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    tied: bool = True,
    replace: bool = False,
) -> list[Path]:
    """Write a model's weights to files for other programs; call it in one process.

    Args:
        checkpoint: a checkpoint directory of any strategy, or anything else that ``open_weights`` takes.
        path: ``x.safetensors``; ``x.pth``, ``x.pt`` or ``x.bin`` for ``torch.load(..., weights_only=True)``; or a
            folder (a name without extension, with a slash at its end, or of an existing folder) for
            ``model.safetensors``, or for several files with Hugging Face's index if ``max_shard_size`` requires it.
            Extensions may be in upper case.
        averaged: write EMAHook's averages instead of the weights; the hook's name if several hooks have averages.
        dtype: dtype of the floating-point tensors; default: unchanged, float32 where training had master weights.
        max_shard_size: largest size of a file, in bytes or as a number with KB, MB, GB, KiB, MiB or GiB; a larger
            tensor has a file of its own. Default: no limit.
        tied: write tied tensors under all of their names; False: under the first one, as Hugging Face does. In a
            ``.pth`` they share memory, in ``.safetensors`` each name has a copy.
        replace: replace an existing file; a folder with weights in it is never written to.

    Returns:
        The files that were written, the index last.

    Raises:
        CheckpointError: there are no such weights, the extension is unknown, or the file exists already.
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    suffix = _suffix(path)
    path = local_target(path)
    limit = parse_size(max_shard_size)
    if suffix and path.is_file() and not replace:
        raise CheckpointError(f"{path}: is there already, give another name, or replace=True (--force) to replace it")
    if suffix and limit is not None:
        raise CheckpointError(f"{path}: is one file, give a folder with max_shard_size={max_shard_size}")
    if suffix and path.is_dir():
        raise CheckpointError(f"{path}: is a directory")
    if not suffix:
        check_free(path, WEIGHT_FILES, f"{_SUFFIX}, {one_of(TORCH_SUFFIXES)}, or a folder")
    names = weights_to_export(source, averaged, dtype)
    _warn(source, path, names)
    if suffix in TORCH_SUFFIXES:
        aliases = aliases_of(source, {weight.name for weight in names}) if tied else {}
        with reading(source) as reader, Pending(path) as pending:
            write_torch(pending, names, aliases, _fetch(reader.read), extra_states(source, tied))
        return [path]
    tensors = in_safetensors(source, path, names, tied)
    if not suffix:
        with claimed(path), filled(path, INDEX, WEIGHT_FILES) as staged:
            written = write_shards(source, staged, tensors, limit)
        return [path / name for name in written]
    with reading(source) as reader, Pending(path) as pending:
        _write(pending, tensors, _fetch(reader.read))
    return [path]


def _warn(source: Checkpoint, path: Path, weights: Sequence[ExportedTensor]) -> None:
    """Say what the files hold or lack that nobody may expect."""
    if bad := [weight.name for weight in weights if weight.key in source.nonfinite]:
        _logger.warning(f"{source.path}: NaN or infinity is in {what_is_not_finite(bad, 'weight')}, and in {path} too")
    warn_of_left_out(source, path)


def warn_of_left_out(source: Checkpoint, path: Path) -> None:
    """Warn if the checkpoint was saved without its frozen parameters, which the export lacks then."""
    left_out = source.values.get("left_out")
    if isinstance(left_out, Mapping) and left_out:
        merge = "; --merge --base PATH adds them" if source.values.get("adapters") else ""
        _logger.warning(
            f"{source.path}: was saved without {counted(len(left_out), 'frozen parameter')}, which {path} does not have either{merge}"
        )


def in_safetensors(
    source: Checkpoint, path: Path, weights: Sequence[ExportedTensor], tied: bool
) -> list[ExportedTensor]:
    """What a folder or file of this format holds of the weights: tensors under all names, and extra state that is a tensor.

    Raises:
        CheckpointError: safetensors has no such dtype.
    """
    _check_in_format(weights, path)
    aliases = aliases_of(source, {weight.name for weight in weights}) if tied else {}
    return _with_aliases([*weights, *_bare(source, path, tied)], aliases)


def _bare(source: Checkpoint, path: Path, tied: bool) -> list[ExportedTensor]:
    """Extra state that is a single tensor, because safetensors can hold no other; a warning names the rest."""
    found, left_out = [], []
    for state in extra_states(source, tied):
        if state.value == {"tensor": 0}:
            (tensor,) = state.tensors
            found.append(ExportedTensor(state.name, tensor.key, tensor.shape, tensor.dtype))
        else:
            left_out.append(state.name)
    if left_out:
        _logger.warning(f"{path}: can hold only tensors, {', '.join(left_out)} is left out; export to .pth to keep it")
    return found


def _suffix(path: str | os.PathLike[str]) -> str:
    """The extension of the file to write, in lower case; "" for a folder.

    Raises:
        CheckpointError: the extension is unknown.
    """
    known = (_SUFFIX, *TORCH_SUFFIXES)
    suffix = "" if os.fspath(path).endswith("/") else Path(path).suffix.lower()
    if suffix in ("", *known):
        return suffix
    if not Path(path).is_dir():
        raise CheckpointError(
            f'{path}: "{suffix}" is not allowed, give {one_of(known)}, or a folder with "/" at its end{suggest(suffix, known)}'
        )
    return ""


def weights_to_export(source: Checkpoint, averaged: bool | str, dtype: torch.dtype | None) -> list[ExportedTensor]:
    """Return the tensors to export, under the model's names."""
    keys = {key.removeprefix(MODEL): key for key in source.entries if key.startswith(MODEL)}
    if averaged:
        keys |= _averages(source, averaged, keys)
    if not keys:
        raise CheckpointError(f"{source.path}: holds no weights of a model")
    weights = []
    for name, key in keys.items():
        own = DTYPES[source.entries[key].dtype]
        target = dtype if dtype is not None and own.is_floating_point else own
        weights.append(ExportedTensor(name, key, source.entries[key].shape, target))
    return weights


def _check_in_format(weights: Sequence[ExportedTensor], path: Path) -> None:
    """Raise CheckpointError if safetensors has no such dtype."""
    for weight in weights:
        if weight.dtype in PAIRS and weight.dtype is not torch.complex64:
            raise CheckpointError(
                f"{path}: {weight.name} is {str(weight.dtype).removeprefix('torch.')}, and of the complex dtypes "
                "safetensors has only complex64; export to .pth"
            )


def _averages(source: Checkpoint, averaged: bool | str, names: Iterable[str]) -> dict[str, str]:
    """Name of each weight to the key of its average."""
    found: dict[str, dict[str, str]] = {}
    for key in source.entries:
        if match := _AVERAGED.fullmatch(key):
            found.setdefault(match[1], {})[match[2]] = key
    if not found:
        raise CheckpointError(f"{source.path}: holds no averaged weights, the training had no EMAHook")
    hook = averaged if isinstance(averaged, str) else next(iter(found))
    if hook not in found:
        raise CheckpointError(f'averaged: "{hook}" is not allowed, give {one_of(found)}{suggest(hook, found)}')
    if averaged is True and len(found) > 1:
        raise CheckpointError(f"{source.path}: holds averages of several hooks, give averaged={one_of(found)}")
    if not source.values.get(f"hook.{hook}/updates"):
        raise CheckpointError(f"{source.path}: {hook} had not started averaging")
    known = set(names)
    return {name: key for name, key in found[hook].items() if name in known}


def aliases_of(source: Checkpoint, names: set[str]) -> dict[str, str]:
    """Further names of tied tensors, to the name under which they are stored."""
    aliases = source.values.get("aliases", {})
    if not isinstance(aliases, Mapping) or not all(isinstance(name, str) for pair in aliases.items() for name in pair):
        raise CheckpointError(f"{source.path}: aliases is damaged, it is no mapping of names")
    return {alias: name for alias, name in aliases.items() if name in names and alias not in names}


def _with_aliases(weights: Sequence[ExportedTensor], aliases: Mapping[str, str]) -> list[ExportedTensor]:
    by_name = {weight.name: weight for weight in weights}
    twice = [ExportedTensor(alias, by_name[n].key, by_name[n].shape, by_name[n].dtype) for alias, n in aliases.items()]
    return [*weights, *twice]


def _fetch(read: Callable[[str, torch.dtype], Tensor]) -> Callable[[ExportedTensor], Tensor]:
    return lambda weight: read(weight.key, weight.dtype)


def _write(path: Path, weights: Sequence[ExportedTensor], fetch: Callable[[ExportedTensor], Tensor]) -> None:
    # Transformers reads only files whose metadata has a format.
    tensors = {weight.name: (weight.dtype, weight.shape) for weight in weights}
    write_safetensors(path, tensors, map(fetch, weights), {"format": "pt"}, pairs=False)


def write_shards(source: Checkpoint, folder: Path, weights: Sequence[ExportedTensor], limit: int | None) -> list[str]:
    """Write files of at most ``limit`` bytes, or one tensor, with Hugging Face's names; return these, the index last."""
    shards = divided(weights, limit)
    files = [folder / _shard_name(number, len(shards)) for number in range(len(shards))]
    with reading(source) as reader:
        for file, shard in zip(files, shards, strict=True):
            with Pending(file) as pending:
                _write(pending, shard, _fetch(reader.read))
    if len(shards) > 1:
        total = sum(weight.nbytes for weight in weights)
        file_of = {weight.name: file.name for file, shard in zip(files, shards, strict=True) for weight in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2)
        with Pending(folder / INDEX) as pending:
            pending.write_bytes(text.encode())
        files.append(folder / INDEX)
    return [file.name for file in files]


def divided(weights: Sequence[ExportedTensor], limit: int | None) -> list[list[ExportedTensor]]:
    """Divide the weights into shards of at most ``limit`` bytes, in their order."""
    shards: list[list[ExportedTensor]] = [[]]
    filled = 0
    for weight in weights:
        if limit is not None and shards[-1] and filled + weight.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.nbytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"{_STEM}{_SUFFIX}" if count == 1 else f"{_STEM}-{number + 1:05d}-of-{count:05d}{_SUFFIX}"


def parse_size(given: int | str | None, name: str = "max_shard_size") -> int | None:
    """Parse a size, the argument ``name``; return bytes.

    Raises:
        CheckpointError: it is not a size.
    """
    if given is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B)?\s*", str(given).upper())
    size = int(float(match[1]) * _UNITS[match[2] or "B"]) if match and (match[2] or "B") in _UNITS else 0
    if size < 1:
        raise CheckpointError(f'{name}: "{given}" is not allowed, give bytes or a number with one of KB to GiB')
    return size
