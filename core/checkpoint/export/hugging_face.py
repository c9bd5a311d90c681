"""Export a folder that ``from_pretrained`` of transformers loads: weights, configurations, and the tokenizer's files."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...hugging_face import pretrained_private as private
from ...hugging_face.folder import CONFIG, GENERATION, tokenizer_files
from ...hugging_face.model_description import META_KEY, Description, meta_model, of_folder
from ...stored_dtypes import DTYPES
from ..directory import sync_directory
from ..foreign.stored_tensors import MODEL
from ..load.checkpoint import Checkpoint
from ..load.weights import open_weights
from .files import Pending
from .weights import export_weights, weights_to_export

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
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    target = Path(folder)
    if (target / CONFIG).exists():
        raise CheckpointError(f"{target / CONFIG}: is there already, give another folder")
    described = _description(source, None if config is None else Path(config))
    files_of_tokenizer = _tokenizer(tokenizer, described)
    named = _under_its_names(source, described, averaged)
    target.mkdir(parents=True, exist_ok=True)
    written = export_weights(
        named, f"{target}/", averaged=averaged, dtype=dtype, max_shard_size=max_shard_size, tied=False
    )
    kinds = {DTYPES[entry.dtype] for key, entry in named.entries.items() if key.startswith(MODEL)}
    held = dtype or next((kind for kind in kinds if kind.is_floating_point), torch.float32)
    if described.generation_config is not None:
        written.append(_write(target / GENERATION, described.generation_config))
    if isinstance(files_of_tokenizer, list):
        written += [Path(shutil.copy(file, target)) for file in files_of_tokenizer]
    elif files_of_tokenizer is not None:
        saved = files_of_tokenizer.save_pretrained(target)
        written += [Path(file) for file in saved or () if Path(file).is_file()]
    # The last one: without it, no half-written folder is loaded.
    written.append(_write(target / CONFIG, _config(described, held)))
    sync_directory(target)
    return written


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
    other_names = {first: alias for alias, first in aliases.items()} if isinstance(aliases, dict) else {}
    found: dict[str, tuple[int, ...]] = {}
    for key in [key for key in entries if key.startswith(MODEL)]:
        entry = entries.pop(key)
        name = key.removeprefix(MODEL)
        if not name.startswith(described.prefix) or name not in known:
            continue
        own = name.removeprefix(described.prefix)
        if own in tied and other_names.get(name, "").removeprefix(described.prefix) == tied[own]:
            own = tied[own]
        entries[MODEL + own] = entry
        found[own] = tuple(entry.shape)
    lacking = [name for name in wanted if name not in found and name not in tied]
    lacking = sorted(set(lacking) - private.ignored(model, lacking, missing=True))
    if lacking:
        raise CheckpointError(
            f"{source.path}: lacks {lacking[0]}{f' and {len(lacking) - 1} others' if len(lacking) > 1 else ''} of "
            f"{described.architecture}; a checkpoint without frozen parameters, or of adapters, cannot be exported this way"
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
    return _averages_too(source, source.renamed(entries), described.prefix)


def _averages_too(source: Checkpoint, renamed: Checkpoint, prefix: str) -> Checkpoint:
    """Remove the prefix from the names of EMAHook's averages too."""
    if not prefix:
        return renamed
    return renamed.renamed({key.replace(f"/averaged.{prefix}", "/averaged."): e for key, e in renamed.entries.items()})


def _tokenizer(given: Any, described: Description) -> list[Path] | Any | None:
    """Files to copy, or an object that saves itself; None if there is no tokenizer."""
    if given is not None and not isinstance(given, (str, os.PathLike)):
        if not callable(getattr(given, "save_pretrained", None)):
            raise CheckpointError(
                f"tokenizer: {type(given).__name__} is not allowed, give a folder or an object with save_pretrained"
            )
        return given
    folder = Path(given) if given is not None else Path(described.folder) if described.folder else None
    files = list(tokenizer_files(folder)) if folder is not None and folder.is_dir() else []
    if given is not None and not files:
        raise CheckpointError(f"tokenizer: {given} has no files of a tokenizer")
    if not files:
        _logger.info("No tokenizer is known for the export; tokenizer= (--tokenizer FOLDER) adds its files")
    return files or None


def _config(described: Description, dtype: torch.dtype) -> dict[str, Any]:
    kept = {
        key: value for key, value in described.config.items() if key not in ("_name_or_path", "torch_dtype", "dtype")
    }
    name = str(dtype).removeprefix("torch.")
    return {**kept, "architectures": [described.architecture], private.dtype_key(): name}


def _write(path: Path, content: Iterable[Any] | dict[str, Any]) -> Path:
    with Pending(path) as pending:
        pending.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return path
