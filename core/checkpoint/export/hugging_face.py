"""Export a folder that ``from_pretrained`` of transformers loads: weights, configurations, and the tokenizer's files."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...base.errors import CheckpointError
from ...hugging_face import transformers_private as private
from ...hugging_face.pretrained import CONFIG, GENERATION, META_KEY, Description, meta_model, of_folder, tokenizer_files
from ..foreign.weights_file import MODEL
from ..load import Checkpoint, reading, what_is_not_finite
from ..manifest import SavedTensor
from ..weights import open_weights
from .files import ExportedTensor, Pending, check_free, claimed, filled, local_folder
from .peft_adapters import KEY as ADAPTERS
from .weights import WEIGHT_FILES, in_safetensors, parse_size, weights_to_export, write_shards

_logger = logging.getLogger("flextrain")


def export_hugging_face(
    checkpoint: Checkpoint | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    config: str | os.PathLike[str] | None = None,
    averaged: bool | str = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = "5GB",
) -> list[Path]:
    """Write a folder that ``from_pretrained`` loads from a checkpoint of a model of transformers; call it in one process.

    Source of the layout: ``save_pretrained`` of transformers.

    Args:
        checkpoint: a checkpoint directory of any strategy, with or without an optimizer.
        folder: the folder to write, which holds no model yet.
        tokenizer: a folder with the files of one, or an object with ``save_pretrained``. None: the folder that the model was
            built from, if it is still there.
        config: a folder with ``config.json``, for a checkpoint that does not describe its model. None: what the checkpoint says.
        averaged, dtype, max_shard_size: see ``export_weights``.

    Returns:
        The files that were written.

    Raises:
        CheckpointError: the checkpoint does not say which model of transformers it is of, or does not have its weights; or
            the folder holds a model already.
    """
    target = local_folder(folder)
    check_target(target, tokenizer=tokenizer, max_shard_size=max_shard_size)
    with claimed(target):
        return write_hugging_face(
            checkpoint,
            target,
            tokenizer=tokenizer,
            config=config,
            averaged=averaged,
            dtype=dtype,
            max_shard_size=max_shard_size,
        )


def check_target(folder: Path, *, tokenizer: Any = None, max_shard_size: int | str | None = None, **_: Any) -> None:
    """Check what can be checked before there are weights; the arguments are those of ``export_hugging_face``.

    Raises:
        CheckpointError: the folder holds a model already, or an argument is wrong.
    """
    check_free(folder, (CONFIG, *WEIGHT_FILES))
    parse_size(max_shard_size)
    _given_tokenizer(tokenizer)


def write_hugging_face(
    checkpoint: Checkpoint | str | os.PathLike[str],
    folder: Path,
    *,
    tokenizer: Any = None,
    config: str | os.PathLike[str] | None = None,
    averaged: bool | str = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = "5GB",
) -> list[Path]:
    """``export_hugging_face`` to a folder that the caller has ``claimed``."""
    check_target(folder, tokenizer=tokenizer, max_shard_size=max_shard_size)
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    described = _description(source, None if config is None else Path(config))
    if source.values.get(ADAPTERS):
        raise CheckpointError(
            f"{source.path}: has adapters, which {described.architecture} has not; merge them with --merge, or write them alone "
            "with --peft"
        )
    files_of_tokenizer = _tokenizer(tokenizer, described)
    named, weights, is_untied = named_weights(source, described, averaged, dtype)
    if bad := [weight.name for weight in weights if weight.key in named.nonfinite]:
        _logger.warning(
            f"{source.path}: NaN or infinity is in {what_is_not_finite(bad, 'weight')}, and in {folder} too"
        )
    tensors = in_safetensors(named, folder, weights, tied=False)
    # config.json is last: without it, no half-written folder is loaded.
    with filled(folder, CONFIG, (CONFIG, *WEIGHT_FILES)) as staged:
        written = write_shards(named, staged, tensors, parse_size(max_shard_size))
        written += _write_beside(staged, described, files_of_tokenizer, dtype or _dtype_of(weights), is_untied)
    return [folder / name for name in dict.fromkeys(written)]


def named_weights(
    source: Checkpoint, described: Description, averaged: bool | str = False, dtype: torch.dtype | None = None
) -> tuple[Checkpoint, list[ExportedTensor], bool]:
    """The weights of a model without adapters as transformers reads them.

    Returns:
        The checkpoint with the names of transformers, its tensors to export, and whether the model has to be one that ties none.

    Raises:
        CheckpointError: they are not those of such a model.
    """
    named = _under_its_names(source, described, averaged)
    return named, *_untied(named, weights_to_export(named, averaged, dtype), described)


def write_configuration(
    folder: Path, weights: Iterable[ExportedTensor], described: Description, dtype: torch.dtype | None, is_untied: bool
) -> list[str]:
    """Write what ``from_pretrained`` reads beside the weights that ``named_weights`` has returned; return the files' names."""
    return _write_beside(folder, described, _own_tokenizer(described), dtype or _dtype_of(weights), is_untied)


def _write_beside(
    folder: Path, described: Description, tokenizer: Any, dtype: torch.dtype, is_untied: bool
) -> list[str]:
    written = []
    if described.generation_config is not None:
        written.append(_write(folder / GENERATION, described.generation_config).name)
    if isinstance(tokenizer, list):
        written += [Path(shutil.copy(file, folder)).name for file in tokenizer]
    elif tokenizer is not None:
        saved = tokenizer.save_pretrained(folder)
        written += [os.path.relpath(file, folder) for file in saved or () if Path(file).is_file()]
    return [*written, _write(folder / CONFIG, _config(described, dtype, is_untied)).name]


def _dtype_of(weights: Iterable[ExportedTensor]) -> torch.dtype:
    """The dtype of most numbers, in which ``from_pretrained`` reads all of them."""
    numbers: Counter[torch.dtype] = Counter()
    for weight in weights:
        if weight.dtype.is_floating_point:
            numbers[weight.dtype] += math.prod(weight.shape)
    return max(numbers, key=lambda kind: numbers[kind], default=torch.float32)


def _description(source: Checkpoint, config: Path | None) -> Description:
    meta = source.values.get("meta")
    kept = meta.get(META_KEY) if isinstance(meta, dict) else None
    if config is not None:
        given = of_folder(config)
        return (
            given
            if kept is None
            else dataclasses.replace(given, prefix=Description.of_values(kept, source.path).prefix)
        )
    if kept is None:
        raise CheckpointError(
            f"{source.path}: does not say which model of transformers its weights are of; give the folder of its configuration, "
            "config= (--config FOLDER)"
        )
    return Description.of_values(kept, source.path)


def _under_its_names(source: Checkpoint, described: Description, averaged: bool | str) -> Checkpoint:
    """The weights of the model under the names that transformers reads.

    Raises:
        CheckpointError: they are not those of such a model.
    """
    model: Any = meta_model(described)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = private.tied_names(model)
    entries, aliases = dict(source.entries), source.values.get("aliases", {})
    known = {weight.name for weight in weights_to_export(source, averaged, None)}
    other_names: dict[str, set[str]] = {}
    for alias, first in aliases.items() if isinstance(aliases, dict) else ():
        other_names.setdefault(str(first), set()).add(str(alias))
    found: dict[str, tuple[int, ...]] = {}
    own_names: dict[str, str] = {}
    for key in [key for key in entries if key.startswith(MODEL)]:
        entry = entries.pop(key)
        name = key.removeprefix(MODEL)
        if not name.startswith(described.prefix) or name not in known:
            continue
        own = name.removeprefix(described.prefix)
        if own in tied and f"{described.prefix}{tied[own]}" in other_names.get(name, ()):
            own = tied[own]
        entries[MODEL + own] = entry
        found[own], own_names[name] = tuple(entry.shape), own
    lacking = [name for name in wanted if name not in found and name not in tied]
    lacking = sorted(set(lacking) - private.ignored(model, lacking, missing=True))
    if lacking:
        raise CheckpointError(
            f"{source.path}: lacks {lacking[0]}{f' and {len(lacking) - 1} others' if len(lacking) > 1 else ''} of "
            f"{described.architecture}{_why(source, lacking[0], known)}"
        )
    for name, shape in found.items():
        if name in wanted and wanted[name] != shape:
            raise CheckpointError(
                f"{source.path}: {described.prefix}{name} has shape {shape}, and {wanted[name]} by its configuration; give the right "
                "one, config= (--config FOLDER)"
            )
    extra = sorted(found.keys() - wanted.keys())
    if extra:
        _logger.warning(
            f"{source.path}: {', '.join(extra[:6])} is exported too, {described.architecture} has no such tensor"
        )
    return source.renamed(_averages_too(entries, own_names))


def _why(source: Checkpoint, name: str, known: Iterable[str]) -> str:
    """Why a checkpoint may lack a tensor, as the end of a message."""
    if longer := next((each for each in known if each.endswith(f".{name}")), None):
        return f", and has {longer}; give weights whose names do not begin with {longer.removesuffix(name)}"
    if source.values.get("left_out"):
        return ", it was saved without its frozen parameters; runner.export_hugging_face() writes the whole model"
    return "; give the folder of the right configuration, config= (--config FOLDER)"


def _averages_too(entries: Mapping[str, SavedTensor], names: Mapping[str, str]) -> dict[str, SavedTensor]:
    """Give EMAHook's averages the names of their weights, and leave out those of other weights."""
    found: dict[str, SavedTensor] = {}
    for key, entry in entries.items():
        hook, mark, name = key.partition("/averaged.")
        if not mark:
            found[key] = entry
        elif name in names:
            found[f"{hook}{mark}{names[name]}"] = entry
    return found


def _given_tokenizer(given: Any) -> list[Path] | Any | None:
    """The files of a folder that was given, or the object; None if nothing was.

    Raises:
        CheckpointError: it is neither.
    """
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        if not callable(getattr(given, "save_pretrained", None)):
            raise CheckpointError(
                f"tokenizer: {type(given).__name__} is not allowed, give a folder or an object with save_pretrained"
            )
        return given
    files = list(tokenizer_files(Path(given))) if Path(given).is_dir() else []
    if not files:
        raise CheckpointError(f"tokenizer: {given} has no files of a tokenizer")
    return files


def _tokenizer(given: Any, described: Description) -> list[Path] | Any | None:
    """Files to copy, or an object that saves itself; None if there is no tokenizer."""
    if given is not None:
        return _given_tokenizer(given)
    files = _own_tokenizer(described)
    if not files:
        _logger.info("No tokenizer is known for the export; tokenizer= (--tokenizer FOLDER) adds its files")
    return files or None


def _own_tokenizer(described: Description) -> list[Path]:
    """The files of the tokenizer in the folder that the model was built from."""
    folder = Path(described.folder) if described.folder else None
    return list(tokenizer_files(folder)) if folder is not None and folder.is_dir() else []


def _untied(
    source: Checkpoint, weights: list[ExportedTensor], described: Description
) -> tuple[list[ExportedTensor], bool]:
    """Leave out second names of tied tensors, unless one has other values, as after training an adapter of the head.

    Returns:
        The tensors to write, and whether the model has to be one that ties none.

    Raises:
        CheckpointError: the class ties them always, or computes otherwise without.
    """
    by_name = {weight.name: weight for weight in weights}
    tied = {name: first for name, first in private.tied_names(meta_model(described)).items() if first in by_name}
    with reading(source) as reader:
        differ = [
            name
            for name, first in tied.items()
            if name in by_name and not torch.equal(*(reader.read(by_name[each].key) for each in (name, first)))
        ]
    if not differ:
        return [weight for weight in weights if weight.name not in tied], False
    untied = meta_model(dataclasses.replace(described, config={**described.config, "tie_word_embeddings": False}))
    if private.tied_names(untied) or private.computes_with_tying(untied):
        raise CheckpointError(
            f"{source.path}: {differ[0]} and {tied[differ[0]]} have other values since an adapter was merged, and {described.architecture} "
            "cannot be written without tying them; write the adapter alone with --peft"
        )
    more = [dataclasses.replace(by_name[first], name=name) for name, first in tied.items() if name not in by_name]
    return [*weights, *more], True


def _config(described: Description, dtype: torch.dtype, is_untied: bool) -> dict[str, Any]:
    kept = {
        key: value for key, value in described.config.items() if key not in ("_name_or_path", "torch_dtype", "dtype")
    }
    if is_untied:
        kept["tie_word_embeddings"] = False
    name = str(dtype).removeprefix("torch.")
    return {**kept, "architectures": [described.architecture], "dtype": name}


def _write(path: Path, content: Iterable[Any] | dict[str, Any]) -> Path:
    with Pending(path) as pending:
        pending.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return path
