"""Find what other programs put before the names of weights, and remove it: ``model.``, ``module.``, ``_orig_mod.``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...comm.joint_errors import gather_differing
from ...errors import counted
from ..foreign.stored_tensors import MODEL
from ..saved_tensor import SavedTensor
from .checkpoint import Checkpoint

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
    for name in stored:
        entry = source.entries[MODEL + name]
        short = bare[name].removeprefix(prefix)
        if name in fits:
            by_prefix.setdefault(name, entry)
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
