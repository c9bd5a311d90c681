"""Checks of a plan that the user has given, beyond the names of styles and modules."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from torch import nn

from ....core.errors import ConfigError, suggest

_logger = logging.getLogger("flextrain")
_DIVIDES = ("colwise", "rowwise", "packed_", "embedding_")
_WHOLE = ("replicate", "replicated", "replicated_with_grad_allreduce", "sequence", "sequence_parallel")


def nearest_rule(rule: str, model_names: Collection[str]) -> str:
    """Return the end of an error about a rule that names no module: the rule that may be meant; empty if none is near.

    Args:
        rule: a glob, or the name of a parameter.
        model_names: the names of the modules.
    """
    owner = rule.rpartition(".")[0]
    if owner and rule.endswith((".weight", ".bias")) and any(fnmatchcase(name, owner) for name in model_names):
        return f', rules are for modules, did you mean "{owner}"?'
    for name in model_names:
        if fnmatchcase(name, f"*.{rule}"):  # in a model that has this one inside of it
            inner = next(n for n in range(name.count(".") + 1) if fnmatchcase(name.split(".", n)[-1], rule))
            return f', did you mean "{".".join([*name.split(".")[:inner], rule])}"?'
        _, dot, rest = rule.partition(".")
        # of transformers' model that has this one inside of it
        if dot and not rest.startswith("*") and fnmatchcase(name, rest):
            return f', did you mean "{rest}"?'
    globs = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in model_names)
    return suggest(rule, [*globs, *model_names])


def check_styles_given(styles: Mapping[str, str], model: nn.Module) -> None:
    """Check the styles of a plan that the user has given against the modules that they are for.

    Args:
        styles: by full name.

    Raises:
        ConfigError: nothing is divided, or a style divides parameters of a module that has none of its own.
    """
    if all(style in _WHOLE for style in styles.values()):
        raise ConfigError('strategy.plan: divides nothing, give styles such as "colwise" and "rowwise", or "auto"')
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not style.startswith(_DIVIDES) or next(module.parameters(recurse=False), None) is not None:
            continue
        inner = next((inner for inner, each in module.named_modules() if inner and _has_own(each)), None)
        instead = f"name what is in it, such as {name}.{inner}" if inner else "leave it out"
        raise ConfigError(
            f'strategy.plan: "{style}" for {name}, a {type(module).__name__} without parameters of its own; {instead}'
        )
    for name in without_rowwise(styles):
        _logger.info(
            f'slow: strategy.plan: {name} is "{styles[name]}", but nothing in its block is "rowwise": its outputs are gathered'
        )


def without_rowwise(styles: Mapping[str, str]) -> list[str]:
    """Return modules whose outputs are divided, one of each block in which no module takes divided inputs.

    A block is what has the number of a module in a list, such as ``layers.0``, and has more than one layer.
    """
    blocks: dict[str, dict[str, list[str]]] = {}
    for name, style in styles.items():
        block = re.match(r"(.*?\.)??\d+(?=\.)", name)
        kinds = blocks.setdefault(block[0] if block else "", {"col": [], "row": []})
        if style.startswith(("colwise", "packed_colwise")) and style not in ("colwise_gather_output", "colwise_rep"):
            kinds["col"].append(name)
        elif style.startswith(("rowwise", "packed_rowwise")):
            kinds["row"].append(name)
    # A matrix that makes logits, after all blocks, needs none: a cross entropy takes what is divided.
    return [kinds["col"][0] for block, kinds in blocks.items() if block and kinds["col"] and not kinds["row"]]


def _has_own(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
