"""Weights from checkpoints and from other programs' files, and names that do not quite agree."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...comm.together import gather_differing
from ...errors import CheckpointError, nearest
from ...module_state import EXTRA, module_of
from ..directory import is_checkpoint
from ..foreign import deepspeed, hugging_face
from ..foreign.single_file import open_file
from ..foreign.stored_tensors import MODEL
from ..manifest import TensorEntry
from ..paths import is_local, place
from .checkpoint import Checkpoint


def open_weights(path: str | os.PathLike[str]) -> Checkpoint:
    """A source of a model's weights under ``model.<name>``; nothing stored in it is executed.

    Every process that loads from it reads the parts that it needs, from files that are mapped and not copied.

    Args:
        path: a checkpoint directory; a ``.safetensors`` file; a file written by ``torch.save`` that holds a state dict,
            itself or under "state_dict", "model" or "module"; an index of Hugging Face (``model.safetensors.index.json``) or the
            folder that it is in; or a checkpoint directory of DeepSpeed, with or without its tag. A URL is that of a
            checkpoint directory.

    Raises:
        CheckpointError: no such file, or no weights in it that can be read safely.
    """
    return _with_extra_state(_open(place(path)))


def _open(path: Path) -> Checkpoint:
    if not is_local(path):
        return Checkpoint.open(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        # A checkpoint that is being replaced has no name for a moment, and its own way to get it back.
        return Checkpoint.open(path)
    return hugging_face.open_index(path) if path.name.endswith(".index.json") else open_file(path)


def _with_extra_state(source: Checkpoint) -> Checkpoint:
    """Tensors that are the extra state of a module, which others keep among the weights, where a checkpoint has them."""
    modules = {key: module_of(key.removeprefix(MODEL)) for key in source.entries if key.startswith(MODEL)}
    found = {key: EXTRA + module for key, module in modules.items() if module is not None}
    if not found:
        return source
    entries = {f"{found[key]}/0" if key in found else key: entry for key, entry in source.entries.items()}
    return source.renamed(entries, {**source.values, **{key: {"tensor": 0} for key in found.values()}})


def _open_directory(path: Path) -> Checkpoint:
    if is_checkpoint(path):
        return Checkpoint.open(path)
    if (found := deepspeed.find(path)) is not None:
        return deepspeed.open_directory(found)
    if (found := hugging_face.find(path)) is not None:
        return open_weights(found)
    if (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path}: was written by torch.distributed.checkpoint, whose index is a pickle and could execute code; "
            "save the state dict with torch.save"
        )
    return Checkpoint.open(path)  # which says what is missing


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

    def of_all(self) -> MatchReport:
        """The same for the names of all processes: what any misses, and what no process has; collective."""
        own = (self.missing, self.unexpected, dict(self.misshaped))
        missing, unexpected, misshaped = zip(*gather_differing(own), strict=True)
        lacking_everywhere = set.intersection(*map(set, unexpected))
        return MatchReport(
            missing=tuple(dict.fromkeys(name for names in missing for name in names)),
            unexpected=tuple(name for name in self.unexpected if name in lacking_everywhere),
            misshaped={name: shapes for found in misshaped for name, shapes in found.items()},
        )

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
    return source.renamed(entries), fits, report


def _listed(names: Sequence[str], others: Iterable[str], limit: int = 10) -> str:
    others = list(others)
    shown = []
    for name in names[:limit]:
        near = _with_other_prefix(name, others) or nearest(name, others)
        shown.append(f"{name} (like {near})" if near else name)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown) + more


def _with_other_prefix(name: str, others: Iterable[str]) -> str | None:
    """The same name below another module, which is farther from it in letters than its neighbours are."""
    return next((other for other in others if other.endswith(f".{name}") or name.endswith(f".{other}")), None)
