"""Find a plan for tensor parallelism in what was seen of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from .tracing import Features, Label, Product, Traced, leaves

_LARGEST_PACK = 8  # so many matrices in one parameter are believed


@dataclass
class _Use:
    """A matrix that an axis divides: by the features that it makes, or by those that it takes."""

    product: Product
    makes: bool
    count: int  # matrices in one parameter, of each of which the axis is a dimension

    @property
    def style(self) -> str:
        if self.product.chooses:
            return "embedding_colwise" if self.makes else "embedding_rowwise"
        name = "colwise" if self.makes else "rowwise"
        return name if self.count == 1 else f"packed_{name}:{self.count}"


@dataclass
class _Candidate:
    """An axis that can be divided, with all that it divides."""

    axis: Features
    order: int
    uses: list[_Use] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {use.product.name for use in self.uses}


def find_plan(model: nn.Module, seen: Traced, tp: int) -> dict[str, str]:
    """Return styles by module name, with ``*`` for the numbers of repeated blocks; empty if there is nothing to divide.

    A pair of matrices is divided where one makes features that another takes, and what is between them treats each
    feature, or each head of an attention, by itself. A table of embeddings and the matrix that makes logits are divided
    by the vocabulary. The larger pair wins where a matrix belongs to several.

    Args:
        model: as it was traced.
        tp: number of processes; only what it divides is divided.
    """
    sizes = dict(model.named_parameters())
    owners = _owners(model)
    candidates = [
        candidate for candidate in _candidates(seen, tp) if all(_is_alone(owners, name) for name in candidate.names)
    ]
    pairs = [candidate for candidate in candidates if _is_pair(candidate)]
    logits = [found for candidate in candidates if (found := _of_vocabulary(candidate, seen))]
    chosen: dict[str, str] = {}
    taken: set[str] = set()

    def weight(candidate: _Candidate) -> tuple[int, int]:
        return -sum(sizes[name].numel() for name in candidate.names), candidate.order

    for candidate in sorted(pairs, key=weight):
        if not taken & candidate.names:
            taken |= candidate.names
            for use in candidate.uses:
                chosen[_module_of(owners, use.product)] = use.style
    vocabularies = {0}
    for use, gathers in logits:
        if use.product.name not in taken:
            chosen[_module_of(owners, use.product)] = "colwise_gather_output" if gathers else use.style
            taken.add(use.product.name)
            vocabularies.add(_size(use.product.outputs))
    for product in seen.products:
        is_large = product.name in taken or _size(product.inputs) in vocabularies
        if product.chooses and is_large and _is_alone(owners, product.name) and _size(product.inputs) % tp == 0:
            chosen.setdefault(_module_of(owners, product), "embedding_rowwise")
    names = [name for name, _ in model.named_modules() if name]
    return with_globs({name: chosen[name] for name in names if name in chosen}, names)


def _candidates(seen: Traced, tp: int) -> list[_Candidate]:
    """Return the axes that matrices make or take, in the order in which they occur."""
    found: dict[int, _Candidate] = {}
    unfit: set[int] = set()
    for order, product in enumerate(seen.products):
        for makes, label in ((True, product.outputs), (False, product.inputs)):
            if product.chooses and not makes:
                continue  # rows of a table are no features
            axes = leaves(label)
            dimension = whole_dimension(seen, product, axes)
            for axis in axes:
                before = dimension[: dimension.index(axis)]
                count = math.prod(outer.size for outer in before)
                whole = all(outer.whole for outer in before)
                if axis.whole or axis.size % tp or not whole or count > _LARGEST_PACK:
                    unfit.add(id(axis))
                candidate = found.setdefault(id(axis), _Candidate(axis, order))
                if (product.name, makes) not in {(use.product.name, use.makes) for use in candidate.uses}:
                    candidate.uses.append(_Use(product, makes, count))
    return [candidate for key, candidate in found.items() if key not in unfit]


def whole_dimension(seen: Traced, product: Product, axes: Label) -> Label:
    """Return the axes of the dimension of the whole parameter, of which a product may use a slice."""
    for dim in (0, 1):
        whole = leaves(seen.label(product.name, dim))
        if axes and all(axis in whole for axis in axes):
            return whole
    return axes


def _is_pair(candidate: _Candidate) -> bool:
    makes = {use.product.name for use in candidate.uses if use.makes}
    takes = {use.product.name for use in candidate.uses if not use.makes}
    return bool(makes and takes) and not makes & takes and not any(use.product.chooses for use in candidate.uses)


def _of_vocabulary(candidate: _Candidate, seen: Traced) -> tuple[_Use, bool] | None:
    """Return the matrix that makes logits, and whether its outputs have to be gathered; None if it is something else."""
    uses = [use for use in candidate.uses if not use.product.chooses]
    if (
        len(uses) != 1
        or not uses[0].makes
        or uses[0].count != 1
        or leaves(uses[0].product.outputs) != (candidate.axis,)
    ):
        return None
    returned = any(candidate.axis in leaves(label) for label in seen.outputs)
    return (uses[0], not candidate.axis.classes) if candidate.axis.classes or returned else None


def _size(label: Label) -> int:
    return math.prod(axis.size for axis in leaves(label))


def _owners(model: nn.Module) -> dict[str, list[tuple[str, nn.Module, int]]]:
    """Return, by first name of a parameter, the modules that have it, each with its number of matrices."""
    first: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[tuple[str, nn.Module, int]]] = {}
    for name, module in model.named_modules():
        own: Sequence[Tensor] = [*module.parameters(recurse=False)]
        for parameter in own:
            entry = (name, module, sum(each.ndim > 1 for each in own))
            found.setdefault(first[id(parameter)], []).append(entry)
    return found


def _is_alone(owners: Mapping[str, list[tuple[str, nn.Module, int]]], name: str) -> bool:
    """Whether a rule for a parameter's module is for this parameter only, and its bias."""
    return all(module and matrices == 1 for module, _, matrices in owners[name])


def _module_of(owners: Mapping[str, list[tuple[str, nn.Module, int]]], product: Product) -> str:
    """Return the module that uses a parameter, which may be tied to that of another module."""
    found = owners[product.name]
    fitting = [name for name, module, _ in found if isinstance(module, nn.Embedding) == product.chooses]
    return (fitting or [name for name, _, _ in found])[0]


def with_globs(styles: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the same styles with ``*`` for numbers in names, where this names no other module.

    Args:
        styles: by full name.
        names: of all modules.
    """
    plan: dict[str, str] = {}
    for name, style in styles.items():
        rule = next((glob for glob in _globs(name) if _fits(glob, style, styles, names)), name)
        plan.setdefault(rule, style)
    return plan


def _globs(name: str) -> Iterator[str]:
    if (glob := re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)) != name:
        yield glob
    # In a block that is a Sequential, only the outermost number is that of the block.
    if (glob := re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name, count=1)) != name:
        yield glob
    if (glob := re.sub(r"_\d+(?=\.)", "_*", name, count=1)) != name:
        yield glob


def _fits(glob: str, style: str, styles: Mapping[str, str], names: Collection[str]) -> bool:
    return all(styles.get(name) == style for name in names if fnmatchcase(name, glob))
