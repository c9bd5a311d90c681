"""Open weights of checkpoints and of other programs' files, and match their names with those of a model."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, counted, nearest
from ..base.tensors import DTYPE_NAMES
from ..comm.agreement import gather_differing, raising_together, told_by_rank_0
from ..model.module_state import EXTRA, module_of
from ..torch_compat.torch_private import has_values
from .chunks import held_chunks
from .directory import check_no_pointer, is_a_folder_of_them, is_checkpoint, newest_in
from .folders import as_path, is_local
from .foreign import weights_file as hugging_face
from .foreign.weights_file import MODEL, open_file
from .load import Checkpoint, TensorInfo
from .manifest import SavedTensor
from .safetensors_file import Fetch

# Find what other programs put before the names of weights, and remove it: ``model.``, ``module.``, ``_orig_mod.``.


# What scripts and trainers name the model in a checkpoint.
_CONTAINERS = frozenset({"app", "model", "model_state_dict", "module", "state_dict", "weights"})
# What torch.compile, FSDP, activation checkpointing and Lightning put between the names of modules.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
# What scripts and trainers name the other parts of a checkpoint; a name of the model's own is not left out.
_OTHERS = re.compile(
    r"(optim|optimizer|optimizers|optimizer_states?|lr_schedulers?|schedulers?|dataloader|train_state|loops|callbacks|rng)"
    r"(_\d+)?"
)
# In their checkpoints the script chooses the word for the model.
_NAMED_BY_SCRIPTS = ("torch.distributed.checkpoint", "Lightning")
_SHOWN = 4


def without_prefix(
    source: Checkpoint, names: Iterable[str], revise_keys: Sequence[tuple[str, str]] = ()
) -> tuple[Checkpoint, str | None]:
    """Remove from the names of a foreign source what a trainer has put before them. A collective.

    The prefix is the one under which most names of the model are found, of those that begin with words such as "model"
    or "state_dict"; none if all are found without one. A model's own first module may have such a name.

    Args:
        source: from ``open_weights``.
        names: of the model's tensors on this process, with further names of tied ones.
        revise_keys: see ``match_weights``; a name that fits after them is not changed here.

    Returns:
        The source with its new names, and one line that says what was removed and what is not loaded; None if nothing.
    """
    own = set(names)
    stored = [key.removeprefix(MODEL) for key in source.entries if key.startswith(MODEL)]
    bare = {name: _unwrapped(name, own) for name in stored}
    known = _of_all(own)
    fits = {name for name in stored if _revised(name, revise_keys) in known}
    prefix = _chosen(bare, fits, known, source.origin in _NAMED_BY_SCRIPTS)
    entries: dict[str, SavedTensor] = {key: e for key, e in source.entries.items() if not key.startswith(MODEL)}
    left: list[str] = []
    wrapped: set[str] = set()
    by_prefix: dict[str, SavedTensor] = {}
    # Of two names that mean the same the one with the prefix counts; without any, the one that the model has.
    for name in sorted(stored, key=lambda name: (name in fits) == bool(prefix)):
        entry = source.entries[MODEL + name]
        short = bare[name].removeprefix(prefix)
        if by_prefix.get(short if name not in fits else name, entry) != entry:
            left.append(name)
        elif name in fits:
            by_prefix[name] = entry
        elif bare[name].startswith(prefix) and not (short not in known and _OTHERS.fullmatch(short.partition(".")[0])):
            by_prefix[short] = entry
            wrapped |= set(name.split(".")) - set(bare[name].split("."))
        else:
            left.append(name)
    entries |= {MODEL + name: entry for name, entry in by_prefix.items()}
    line = _line(source, prefix, wrapped, left)
    return (source.renamed(entries) if line else source), line


def _chosen(bare: Mapping[str, str], fits: Collection[str], known: Collection[str], any_word: bool) -> str:
    """The prefix under which most names of the model are found; ``any_word``: it may begin with a script's own word."""
    found: Counter[str] = Counter({"": len(fits)})
    for name in bare.keys() - fits:
        for prefix in _prefixes(bare[name], any_word):
            found[prefix] += bare[name].removeprefix(prefix) in known
    most = max(found.values())
    best = sorted((each for each in found if found[each] == most), key=len)
    usual = [each for each in best if not each or each.partition(".")[0] in _CONTAINERS]
    # Of equal ones the shortest, so that nothing is removed without need; between two words of a script nobody can choose.
    return next(iter(usual), best[0] if len({each.partition(".")[0] for each in best}) == 1 else "") if most else ""


def _prefixes(name: str, any_word: bool) -> list[str]:
    """All prefixes of a name that consist of words for a container, from none on."""
    found, prefix = [""], ""
    for number, word in enumerate(name.split(".")[:-1]):
        if word not in _CONTAINERS and not (any_word and number == 0):
            break
        prefix += f"{word}."
        found.append(prefix)
    return found


def _unwrapped(name: str, own: Collection[str]) -> str:
    if name in own or not any(word in name for word in _WRAPPERS):
        return name
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _revised(name: str, revise_keys: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in revise_keys:
        name = re.sub(pattern, replacement, name)
    return name


def _of_all(own: Collection[str]) -> set[str]:
    """The names that any process has; under a pipeline each has others."""
    return {name for names in gather_differing(sorted(own)) for name in names}


def _line(source: Checkpoint, prefix: str, wrapped: Collection[str], left: Sequence[str]) -> str | None:
    removed = [f'"{prefix}"'] * bool(prefix) + [f'"{word}."' for word in sorted(wrapped)]
    parts = [f"{' and '.join(removed)} is removed from the names of its weights"] if removed else []
    other = [*left, *source.not_read]
    if other:
        groups = Counter(name.partition(".")[0] for name in other)
        shown = [
            name if count == 1 else f"{name} ({counted(count, 'entry', 'entries')})" for name, count in groups.items()
        ]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        parts.append(f"not loaded: {', '.join(shown[:_SHOWN])}{more}")
    if not parts:
        return None
    return f"{source.path} ({source.origin}): {'; '.join(parts)}"


# Names of parameters in models with adapters of the package peft, in its files of adapters, and in the model without
# them.


PREFIX = "base_model.model."
"""What names in peft's files, and in a model that ``get_peft_model`` has wrapped, begin with."""
BASE, ORIGINAL, COPIES = "base_layer", "original_module", "modules_to_save"
_ENDS = ("weight", "bias")


def is_adapter(name: str) -> bool:
    """Whether a name is that of a matrix of an adapter, and not of the model around it."""
    return any(part.startswith("lora_") for part in name.split("."))


def is_peft_file(names: Iterable[str]) -> bool:
    """Whether these are the names of a file of adapters, which has neither the model nor the adapter's own name."""
    found = list(names)
    return (
        bool(found) and all(name.startswith(PREFIX) for name in found) and not any(BASE in n.split(".") for n in found)
    )


def name_in_base(name: str) -> str:
    """Return a name without what peft has added: that of a base's parameter in the model without adapters.

    Of a matrix of an adapter it is the name without the adapter's own: ``layers.0.lora_A.weight``.
    """
    # A module that get_peft_model has wrapped may be a part of the model.
    parts = f".{name}".replace(f".{PREFIX}", ".", 1).removeprefix(".").split(".")
    kept: list[str] = []
    index = 0
    while index < len(parts):
        part = parts[index]
        if part in (BASE, ORIGINAL):
            pass
        elif part == COPIES:
            index += 1  # and the adapter's name
        else:
            kept.append(part)
            if part.startswith("lora_") and index + 1 < len(parts) and parts[index + 1] not in _ENDS:
                index += 1
        index += 1
    return ".".join(kept)


def sources_of(wanted: Iterable[str], there: Sequence[str]) -> dict[str, str]:
    """Return for names of a model the names of a file that mean the same; a name that both have is not looked at.

    Of a module that peft has copied, a file of a run has the untrained original and the trained copy.

    Args:
        wanted: names of the model that the file does not have.
        there: names in the file that the model does not have, or that a copy may share.
    """
    by_base_name: dict[str, list[str]] = {}
    for name in there:
        by_base_name.setdefault(name_in_base(name), []).append(name)
    found: dict[str, str] = {}
    for name in wanted:
        candidates = by_base_name.get(name_in_base(name), [])
        if candidates:
            is_original = ORIGINAL in name.split(".")
            found[name] = min(candidates, key=lambda each: (ORIGINAL in each.split(".")) != is_original)
    return found


def copies_of(originals: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return for each name of a copy that an adapter trains that of the original."""
    by_base_name = {name_in_base(name): name for name in originals if ORIGINAL in name.split(".")}
    copies = [name for name in names if COPIES in name.split(".")] if by_base_name else []
    return {name: by_base_name[name_in_base(name)] for name in copies if name_in_base(name) in by_base_name}


def missing_adapters(missing: Iterable[str], there: Iterable[str]) -> list[str]:
    """Return which missing names are no mistake: those of adapters if a file has none, all others if it has only adapters."""
    names = list(there)
    if is_peft_file(names):
        return [name for name in missing if not is_adapter(name)]
    return [] if any(map(is_adapter, names)) else [name for name in missing if is_adapter(name)]


def renamed_sources(own: Mapping[str, object], there: Mapping[str, object]) -> dict[str, str]:
    """As ``sources_of``, for two mappings by name; empty unless one of them has names of peft's."""
    if not any(name != name_in_base(name) for name in (*own, *there)):
        return {}
    return sources_of([name for name in own if name not in there], [*there])


def open_weights(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a source of a model's weights, under the keys ``model.<name>``; no stored code is executed.

    Every process that loads from it reads only the parts that it needs.

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


def computed(
    path: Path, tensors: Mapping[str, TensorInfo], values: Mapping[str, Any], read: Callable[[str], Tensor]
) -> Checkpoint:
    """Return a checkpoint without files, for one process.

    Args:
        path: its origin, for messages.
        tensors: shape and dtype of every tensor, by key.
        values: everything that is not a tensor.
        read: returns a tensor by its key; called whenever somebody reads it.
    """
    entries = {key: hugging_face.whole(path, key, DTYPE_NAMES[info.dtype], info.shape) for key, info in tensors.items()}
    fetch = Fetch(path, lambda key, slices: read(key)[slices])

    @contextmanager
    def source(file: str) -> Iterator[Fetch]:
        yield fetch

    return Checkpoint(path, entries, values, source)


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
    from .foreign import dcp

    check_no_pointer(path)
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
    from .foreign import dcp, deepspeed

    if (found := deepspeed.find(path)) is not None:
        return deepspeed.open_directory(found)
    if (saved := dcp.find_accelerate(path)) is not None:
        found, beside = saved
        return _open(found).from_program("Accelerate", beside)
    if (found := hugging_face.find(path)) is not None:
        return open_weights(found)
    if (found := dcp.find(path)) is not None:
        return dcp.open_directory(found)
    if newest_in(path) is None and (newest := _newest_of_others(path)) is not None:
        raise is_a_folder_of_them(path, newest)
    return Checkpoint.open(path)  # its error says what is missing


def _newest_of_others(path: Path) -> Path | None:
    """The checkpoint of another program in it that has the highest number, of those that can be opened."""
    found = {folder: _NUMBERED.fullmatch(folder.name) for folder in path.iterdir() if folder.is_dir()}
    numbers = {folder: int(match[1]) for folder, match in found.items() if match}
    newest_first = sorted(numbers, key=lambda folder: numbers[folder], reverse=True)
    return next((folder for folder in newest_first if _can_be_opened(folder)), None)


def _can_be_opened(folder: Path) -> bool:
    try:
        _open_directory(folder)
    except CheckpointError:
        return False
    return True


_NUMBERED = re.compile(r"(?:checkpoint|step|epoch|iter)[-_](\d+)")


@dataclass(frozen=True)
class MatchReport:
    """Names and shapes in which the weights of a file do not match a model.

    Attributes:
        missing: names that only the model has.
        unexpected: names that only the file has.
        misshaped: names whose shapes differ, to (shape in the file, shape in the model).
        kept: names that only the model has, and rightly: of adapters if the file has a base, of the base if it has adapters,
            and what a checkpoint has left out.
        second: what the file has of a tensor besides what is loaded, by the name there: the model's key, and the entry. The model
            ties both, or ``revise_keys`` makes one name of them.
        untied: names of these that ``with_untied`` has found to have other values, to the name in the model.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    kept: tuple[str, ...] = ()
    second: Mapping[str, tuple[str, SavedTensor]] = field(default_factory=dict)
    untied: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is any mismatch."""
        return bool(self.missing or self.unexpected or self.misshaped or self.untied)

    def of_all(self) -> MatchReport:
        """Combine the reports of all processes: names missing on any, unexpected on all; a collective."""
        own = (self.missing, self.unexpected, dict(self.misshaped), self.kept, dict(self.untied))
        missing, unexpected, misshaped, kept, untied = zip(*gather_differing(own), strict=True)
        lacking_everywhere = set.intersection(*map(set, unexpected))
        return MatchReport(
            missing=tuple(dict.fromkeys(name for names in missing for name in names)),
            unexpected=tuple(name for name in self.unexpected if name in lacking_everywhere),
            misshaped={name: shapes for found in misshaped for name, shapes in found.items()},
            kept=tuple(dict.fromkeys(name for names in kept for name in names)),
            untied={name: first for found in untied for name, first in found.items()},
        )

    def keeping(self, names: Collection[str]) -> MatchReport:
        """Return the report with these names among those that the model keeps rightly, and no longer missing."""
        lacking = tuple(name for name in self.missing if name not in names)
        kept = (*self.kept, *(name for name in self.missing if name in names))
        return replace(self, missing=lacking, kept=kept)

    def with_untied(self, source: Checkpoint, template: Mapping[str, Tensor]) -> MatchReport:
        """Compare what the file has under several names of a tied parameter; a collective, which reads what may differ.

        Args:
            source: what ``match_weights`` returned with this report.
            template: as for ``match_weights``; its tensors stay as they are.
        """
        if not any(gather_differing(bool(self.second))):
            return self
        entries: dict[str, SavedTensor] = {}
        pairs: dict[str, tuple[str, Tensor, Tensor]] = {}
        untied: dict[str, str] = {}
        for name, (key, entry) in self.second.items():
            tensor, loaded = template.get(key), source.entries[key]
            if entry.shape != loaded.shape:
                untied[name] = key.removeprefix(MODEL)
            elif tensor is not None and has_values(tensor) and tuple(tensor.shape) == entry.shape:
                pairs[name] = (key, tensor.detach().clone(), tensor.detach().clone())
                entries |= {f"loaded {name}": loaded, f"second {name}": entry}
        wanted = {f"loaded {name}": loaded for name, (_, loaded, _) in pairs.items()}
        wanted |= {f"second {name}": second for name, (_, _, second) in pairs.items()}
        source.renamed(entries).load(wanted)
        for name, (key, *both) in pairs.items():
            held = zip(*(held_chunks(key, each).values() for each in both), strict=True)
            if not all(torch.equal(one, other) for one, other in held):
                untied[name] = key.removeprefix(MODEL)
        return replace(self, untied=untied)

    def __str__(self) -> str:
        parts = []
        if self.missing:
            parts.append(f"missing {_listed(self.missing, self.unexpected)}")
        if self.unexpected:
            parts.append(f"unexpected {_listed(self.unexpected, self.missing)}")
        if self.misshaped:
            shapes = [f"{name} (file {saved}, model {own})" for name, (saved, own) in self.misshaped.items()]
            parts.append(f"other shape {_listed(shapes, ())}")
        parts += [
            f"{name} has other values than {first}, and the model has one tensor for both"
            for name, first in self.untied.items()
        ]
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
    stored = {key.removeprefix(MODEL): entry for key, entry in source.entries.items() if key.startswith(MODEL)}
    revised = {name: _revised(name, revise_keys) for name in stored}
    last = {new: name for name, new in revised.items()}
    there = {new: stored[name] for new, name in last.items()}
    # The first name of a tied parameter comes last, so that it counts if the file has both.
    names = sorted(there, key=lambda name: name not in aliases)
    entries = {MODEL + aliases.get(name, name): there[name] for name in names}
    second = {name: (MODEL + aliases.get(name, name), there[name]) for name in names}
    own = {key: tuple(tensor.shape) for key, tensor in template.items() if key.startswith(MODEL)}
    lost = {name: MODEL + aliases.get(new, new) for name, new in revised.items() if last[new] != name}
    second |= {name: (key, stored[name]) for name, key in lost.items() if key in own}
    from_file = {key.removeprefix(MODEL) for key in entries}
    if across_adapters:
        entries, more = _across_adapters(entries, own, aliases)
        second |= more
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
        second={name: (key, entry) for name, (key, entry) in second.items() if entries.get(key, entry) != entry},
    )
    fits = {key: template[key] for key, shape in own.items() if key in entries and entries[key].shape == shape}
    return source.renamed(entries), fits, report


def _across_adapters(
    entries: Mapping[str, SavedTensor], own: Mapping[str, object], aliases: Mapping[str, str]
) -> tuple[dict[str, SavedTensor], dict[str, tuple[str, SavedTensor]]]:
    """The entries under the names that a model has for them, if it or the file has adapters of peft; and ``second``."""
    there = {key.removeprefix(MODEL): entry for key, entry in entries.items()}
    wanted = [key.removeprefix(MODEL) for key in own]
    found = renamed_sources(dict.fromkeys([*wanted, *aliases]), there)
    used = {name for name in found.values() if name not in wanted}
    result = {MODEL + name: entry for name, entry in there.items() if name not in used}
    second: dict[str, tuple[str, SavedTensor]] = {}
    # The first name of a tied parameter comes last, so that it counts if the file has both.
    for name in sorted(found, key=lambda name: name not in aliases):
        entry, key = there[found[name]], MODEL + aliases.get(name, name)
        if result.setdefault(key, entry) is entry:
            continue
        if COPIES in found[name].split("."):
            result[MODEL + found[name]] = entry  # a trained copy has no place in a model that ties the two: it is told
        else:
            second[found[name]] = (key, entry)
    # A copy of a tied parameter begins with it, which the file may have under another name alone.
    for copy, original in copies_of([*wanted, *aliases], wanted).items():
        if (first := MODEL + aliases.get(original, original)) in result:
            result.setdefault(MODEL + copy, result[first])
    return result, second


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
