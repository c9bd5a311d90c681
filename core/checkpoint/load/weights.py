"""Open weights of checkpoints and of other programs' files, and match their names with those of a model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...comm.joint_errors import gather_differing, raising_together, told_by_rank_0
from ...errors import CheckpointError, nearest
from ...module_state import EXTRA, module_of
from ..directory import is_checkpoint
from ..foreign import accelerate, dcp, deepspeed, hugging_face
from ..foreign.stored_tensors import MODEL
from ..foreign.weights_file import open_file
from ..paths import as_path, is_local
from ..saved_tensor import SavedTensor
from .adapter_names import COPIES, copies_of, missing_adapters, renamed_sources
from .checkpoint import Checkpoint


def open_weights(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a source of a model's weights, under the keys ``model.<name>``; no stored code is executed.

    Every process that loads from it reads only the parts that it needs, from mapped files.

    Args:
        path: a checkpoint directory or its URL; a ``.safetensors`` file; a ``torch.save`` file with a state dict, at
            the top or under "state_dict", "model_state_dict", "model" or "module"; an index of Hugging Face
            (``model.safetensors.index.json``) or its folder; a checkpoint directory of DeepSpeed, with or without its
            tag; a directory of torch.distributed.checkpoint, as plain scripts, torchtitan and Lightning write it; a
            folder of Accelerate's ``save_state``. Only the first may be a URL.

    Raises:
        CheckpointError: the file does not exist, or has no weights that can be read safely.
    """
    return _with_extra_state(_open(as_path(path)))


def open_weights_together(path: str | os.PathLike[str]) -> Checkpoint:
    """Like ``open_weights`` on every process; of a checkpoint rank 0 alone reads the index. A collective.

    Raises:
        CheckpointError: on every process, if any of them raises.
    """
    found = as_path(path)
    if not is_local(found) or told_by_rank_0(lambda: is_checkpoint(found)):
        return _with_extra_state(Checkpoint.open_together(found))
    with raising_together():
        return open_weights(found)


def _open(path: Path) -> Checkpoint:
    if not is_local(path):
        return Checkpoint.open(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        # A checkpoint that is being replaced is missing for a moment; Checkpoint.open recovers it.
        return Checkpoint.open(path)
    if dcp.is_part(path):
        raise CheckpointError(f"{path}: is one file of a directory of torch.distributed.checkpoint, give {path.parent}")
    return hugging_face.open_index(path) if path.name.endswith(".index.json") else open_file(path)


def _with_extra_state(source: Checkpoint) -> Checkpoint:
    """Move tensors that are extra state of a module from the weights to the keys that a checkpoint has for them."""
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
    if (saved := accelerate.find(path)) is not None:
        found, beside = saved
        return _open(found).from_program("Accelerate", beside)
    if (found := hugging_face.find(path)) is not None:
        return open_weights(found)
    if (found := dcp.find(path)) is not None:
        return dcp.open_directory(found)
    if (newest := _newest_in(path)) is not None:
        raise CheckpointError(
            f"{path}: is no checkpoint, but a folder of checkpoints, give one of them, such as {newest}"
        )
    return Checkpoint.open(path)  # its error says what is missing


def _newest_in(path: Path) -> Path | None:
    """The folder in it with the highest number that other programs number their checkpoints with."""
    found = {folder: _NUMBERED.fullmatch(folder.name) for folder in path.iterdir() if folder.is_dir()}
    numbers = {folder: int(match[1]) for folder, match in found.items() if match}
    return max(numbers, key=lambda folder: numbers[folder], default=None)


_NUMBERED = re.compile(r"(?:checkpoint|step|epoch|iter)[-_](\d+)")


@dataclass(frozen=True)
class MatchReport:
    """Names and shapes in which the weights of a file do not match a model.

    Attributes:
        missing: names that only the model has.
        unexpected: names that only the file has.
        misshaped: names whose shapes differ, to (shape in the file, shape in the model).
        kept: names that only the model has, and rightly: of adapters if the file has a base, of the base if it has adapters.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    kept: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any mismatch."""
        return bool(self.missing or self.unexpected or self.misshaped)

    def of_all(self) -> MatchReport:
        """Combine the reports of all processes: names missing on any, unexpected on all; a collective."""
        own = (self.missing, self.unexpected, dict(self.misshaped), self.kept)
        missing, unexpected, misshaped, kept = zip(*gather_differing(own), strict=True)
        lacking_everywhere = set.intersection(*map(set, unexpected))
        return MatchReport(
            missing=tuple(dict.fromkeys(name for names in missing for name in names)),
            unexpected=tuple(name for name in self.unexpected if name in lacking_everywhere),
            misshaped={name: shapes for found in misshaped for name, shapes in found.items()},
            kept=tuple(dict.fromkeys(name for names in kept for name in names)),
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
    *,
    across_adapters: bool = False,
) -> tuple[Checkpoint, dict[str, Tensor], MatchReport]:
    """Rename the tensors of a source to the names of a model.

    Args:
        source: from ``open_weights``.
        template: ``model.<name>`` to the tensor to fill.
        aliases: further names of tied parameters, to the name in use.
        revise_keys: (pattern, replacement) pairs of ``re.sub`` for the source's names, in this order.
        across_adapters: let names with and without what peft adds to them mean the same, so that a base loads into a model with
            adapters and the other way round.

    Returns:
        The source under the model's names, the part of the template that it can fill, and the mismatches.
    """
    entries: dict[str, SavedTensor] = {}
    for key, entry in source.entries.items():
        if key.startswith(MODEL):
            name = key.removeprefix(MODEL)
            for pattern, replacement in revise_keys:
                name = re.sub(pattern, replacement, name)
            entries[MODEL + aliases.get(name, name)] = entry
    own = {key: tuple(tensor.shape) for key, tensor in template.items() if key.startswith(MODEL)}
    from_file = {key.removeprefix(MODEL) for key in entries}
    if across_adapters:
        entries = _across_adapters(entries, own, aliases)
    misshaped = {
        key.removeprefix(MODEL): (entries[key].shape, shape)
        for key, shape in own.items()
        if key in entries and entries[key].shape != shape
    }
    missing = [key.removeprefix(MODEL) for key in own if key not in entries]
    kept = set(missing_adapters(missing, from_file)) if across_adapters else set()
    report = MatchReport(
        missing=tuple(name for name in missing if name not in kept),
        unexpected=tuple(key.removeprefix(MODEL) for key in entries if key not in own),
        misshaped=misshaped,
        kept=tuple(name for name in missing if name in kept),
    )
    fits = {key: template[key] for key, shape in own.items() if key in entries and entries[key].shape == shape}
    return source.renamed(entries), fits, report


def _across_adapters(
    entries: Mapping[str, SavedTensor], own: Mapping[str, object], aliases: Mapping[str, str]
) -> dict[str, SavedTensor]:
    """The entries under the names that a model has for them, if it or the file has adapters of peft."""
    there = {key.removeprefix(MODEL): entry for key, entry in entries.items()}
    wanted = [key.removeprefix(MODEL) for key in own]
    found = renamed_sources(dict.fromkeys([*wanted, *aliases]), there)
    used = {name for name in found.values() if name not in wanted}
    result = {MODEL + name: entry for name, entry in there.items() if name not in used}
    # The first name of a tied parameter comes last, so that it counts if the file has both.
    for name in sorted(found, key=lambda name: name not in aliases):
        entry = there[found[name]]
        if result.setdefault(MODEL + aliases.get(name, name), entry) is not entry and COPIES in found[name].split("."):
            result[MODEL + found[name]] = entry  # a trained copy has no place in a model that ties the two: it is told
    # A copy of a tied parameter begins with it, which the file may have under another name alone.
    for copy, original in copies_of([*wanted, *aliases], wanted).items():
        if (first := MODEL + aliases.get(original, original)) in result:
            result.setdefault(MODEL + copy, result[first])
    return result


def _listed(names: Sequence[str], others: Iterable[str], limit: int = 10) -> str:
    others = list(others)
    shown = []
    for name in names[:limit]:
        near = _with_other_prefix(name, others) or nearest(name, others)
        shown.append(f"{name} (like {near})" if near else name)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown) + more


def _with_other_prefix(name: str, others: Iterable[str]) -> str | None:
    """The same name in another module; ``nearest`` may prefer an unrelated name with more common letters."""
    return next((other for other in others if other.endswith(f".{name}") or name.endswith(f".{other}")), None)
