"""Choose the plan of a model that the user has given none for: its own, or one that is found by tracing it."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ....core.base.errors import ConfigError, suggest
from ....core.comm.agreement import gather_differing, raising_together
from ....core.hugging_face.transformers_private import dummy_batch
from ..config import MeshConfig
from .found import find_plan, whole_dimension
from .own import OwnPlan, smaller
from .tracing import GIVE, Product, Traced, leaves, trace

_logger = logging.getLogger("flextrain")
_GIVEN = "given"


@dataclass(frozen=True)
class Choice:
    """The plan for a model.

    Attributes:
        rules: styles by glob over the names of modules; empty with ``own``.
        own: the model's own plan, which transformers applies.
        origin: where it is from, for the log.
    """

    rules: Mapping[str, str]
    origin: str
    own: OwnPlan | None = None

    @property
    def is_given(self) -> bool:
        """Whether it is the user's."""
        return self.origin == _GIVEN


def choose_plan(config: MeshConfig, model: nn.Module, tp: int, example: Callable[[], Any] | None) -> Choice:
    """Return the plan of a model, which the user has given, the model has, or tracing finds; a collective.

    Raises:
        ConfigError: the plan does not fit the model, or none can be found.
    """
    if isinstance(config.plan, Mapping):
        return Choice(config.plan, _GIVEN)
    if config.plan is None:
        raise ConfigError(f'strategy.plan: None is not allowed with tp={tp}, give "auto", or {GIVE[5:]}')
    own = OwnPlan.of(model, tp, tp if config.ep > 1 else 1)
    if own is not None:
        for name in own.left_whole:
            _logger.info(f"strategy.plan: {name} is tied, and the plan divides it in one place only; it stays whole")
        if config.sequence_parallel:
            return Choice(own.as_rules(), f"of {own.authors}")
        return Choice({}, f"of {own.authors}", own)
    found: dict[str, str] = {}
    with raising_together():
        found = _found(config, model, tp, example)
    found = gather_differing(found)[0]  # samples, and so shapes, may differ
    _logger.info(f"strategy.plan: found for {type(model).__name__} by tracing it: plan={as_text(found)}")
    return Choice(found, "found by tracing")


def _found(config: MeshConfig, model: nn.Module, tp: int, example: Callable[[], Any] | None) -> dict[str, str]:
    plan = find_plan(model, trace(model, example_of(config, model, example)), tp)
    if not plan:
        raise ConfigError(
            f"strategy.plan: tracing {type(model).__name__} found no two matrices that follow each other and that tp={tp} "
            f"divides; {GIVE}, or choose another axis than tp"
        )
    return plan


def example_of(config: MeshConfig, model: nn.Module, example: Callable[[], Any] | None) -> Any:
    """Return a batch to trace a model with: the one of the options, of the data, or of a model of transformers.

    Raises:
        ConfigError: there is none, or reading it raised.
    """
    given = config.plan_example
    if given is not None and not callable(given):
        return given
    where = "strategy.plan_example" if given is not None else "strategy.plan: the first samples of the data"
    read = given if given is not None else example
    if read is not None:
        try:
            batch = read()
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{where} gave no batch to find one with ({type(error).__name__}: {text}); {GIVE}"
            ) from error
        if batch is not None:
            return batch
    batch = dummy_batch(model)
    if batch is None:
        raise ConfigError(
            f'strategy.plan_example: missing, {type(model).__name__} has no plan of its own, and "auto" needs a batch to find '
            f"one by tracing; give it, or {GIVE}"
        )
    return batch


def as_text(plan: Mapping[str, str]) -> str:
    """Return a plan as Python writes it, to paste into a configuration."""
    return "{" + ", ".join(f'"{name}": "{style}"' for name, style in plan.items()) + "}"


# Check that a plan which the user has given does not cut through heads: it would be right, and slower than without
# it.


def check_heads_given(
    config: MeshConfig, model: nn.Module, styles: Mapping[str, str], tp: int, example: Callable[[], Any] | None
) -> None:
    """Check a given plan against the views that the model makes of divided features; a collective.

    A model that cannot be traced, or of whose batches no example is there, is not checked.

    Args:
        styles: by full name.

    Raises:
        ConfigError: on every process, if ``tp`` does not divide the heads that a module makes.
    """
    seen: Traced | None = None
    try:
        seen = trace(model, example_of(config, model, example))
    except ConfigError as error:
        _logger.debug(f"strategy.plan: heads are not checked: {error}")
    with raising_together():
        for product in seen.products if seen is not None else ():
            _check_heads(styles, product, seen, tp)


def _check_heads(styles: Mapping[str, str], product: Product, seen: Traced | None, tp: int) -> None:
    name = product.name.rpartition(".")[0]
    style = styles.get(name, "")
    if seen is None or product.chooses or style.partition(":")[0] not in ("colwise", "packed_colwise"):
        return
    heads = heads_of(seen, product)
    if heads and heads % tp:
        raise ConfigError(
            f'strategy.plan: tp={tp} does not divide the {heads} heads of {name}, for which it says "{style}"; '
            f"{smaller(heads, tp)}leave it out"
        )


def heads_of(seen: Traced, product: Product) -> int:
    """Return the number of heads that a matrix makes, in one of the matrices that it may be joined of; 0: it makes none.

    Heads are features that are treated each by itself, outside of features that an operation needs all of.
    """
    axes = list(whole_dimension(seen, product, leaves(product.outputs)))
    while axes and axes[0].whole:  # such as queries, keys and values
        axes.pop(0)
    heads = [*takewhile(lambda axis: not axis.whole, axes)]
    return math.prod(axis.size for axis in heads) if len(heads) < len(axes) else 0


# Checks of a plan that the user has given, beyond the names of styles and modules.


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


# What a plan does to a model, in words for the log.


FEW = 0.1
"""A plan that divides a smaller share of the parameters is warned of."""


def counted_styles(styles: Mapping[str, str]) -> str:
    """Return how many modules have which style, as ``4 x colwise, 2 x rowwise``.

    Args:
        styles: by name of a module or of a parameter, which counts if its module has none.
    """
    counts = Counter(style for name, style in styles.items() if name.rpartition(".")[0] not in styles)
    return ", ".join(f"{count} x {style}" for style, count in counts.most_common())


def divided_share(model: nn.Module) -> float:
    """Return the share of the parameters, from 0 to 1, of which a process holds only its shard."""
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        divided = isinstance(parameter, DTensor) and not all(p.is_replicate() for p in parameter.placements)
        sizes[divided] += parameter.numel()
    return sizes[True] / max(1, sum(sizes.values()))


def described(model: nn.Module, styles: Mapping[str, str], origin: str) -> str:
    """Return what a plan divides, and warn if that is little.

    Args:
        model: after the plan was applied, and before FSDP shards it.
        styles: by full name.
        origin: where the plan is from, such as "of LlamaForCausalLM itself".
    """
    share = divided_share(model)
    if share < FEW:
        _logger.warning(
            f"strategy.plan: divides {share:.1%} of the parameters only, so that tensor parallelism costs communication and "
            "saves little; name more modules, or choose another axis"
        )
    return f"{share:.0%} of the parameters, by the plan {origin}: {counted_styles(styles)}"
