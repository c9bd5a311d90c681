"""Names of parameters in models with adapters of the package peft, in its files of adapters, and in the model without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
