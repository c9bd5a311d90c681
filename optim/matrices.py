"""Which parameters of a model are matrices for Muon, in which parts, and which are left to another optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..core.base.errors import ConfigError, counted, listed, suggest
from ..core.device.precision import is_norm
from ..core.model.weight_layout import inputs_come_first
from .adapters import OF_OTHERS

_OF_MATRICES = ("stacked", "part_sizes", "part_dim", "transposed")
STRUCTURE = frozenset({OF_OTHERS, *_OF_MATRICES})
"""Settings of groups that follow from the model and the configuration; checkpoints do not have them."""

_HEADS = frozenset({"head", "heads", "lm_head", "classifier", "score", "embed_out", "logits", "fc_cls", "fc_reg"})
_logger = logging.getLogger("flextrain")


@dataclass(frozen=True)
class Role:
    """What an optimizer of matrices does with a parameter.

    Attributes:
        why_not: why it is no matrix to it, in words; empty if it is one.
        stacked: it has a matrix in every row, as stacks of experts have.
        part_sizes: rows of the matrices that are joined in it, or columns if ``part_dim`` is 1; empty: it is one.
        transposed: the outputs of its matrices are columns; otherwise they are rows.
    """

    why_not: str = ""
    stacked: bool = False
    part_sizes: tuple[int, ...] = ()
    part_dim: int = 0
    transposed: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its group."""
        if self.why_not:
            return {OF_OTHERS: True}
        return {name: getattr(self, name) for name in _OF_MATRICES}


def find_roles(
    model: nn.Module,
    where: str,
    matrices: Sequence[str] = (),
    leave: Sequence[str] = (),
    parts: Mapping[str, Any] | None = None,
) -> dict[str, Role]:
    """Return the role of every parameter, under each of its names.

    Matrices are parameters of two dimensions, and stacks of experts: parameters of three dimensions of a module whose
    ``num_experts`` is the first size. Not vectors of experts beside such a stack, embeddings, by class or name, nor layers of normalisation, nor output heads: what ``get_output_embeddings`` of
    transformers' models returns, and what is called ``head``, ``classifier`` and such outside of numbered layers. A tied parameter
    is left to the other optimizer if it is by one of its names.

    Args:
        model: the whole model, before it is distributed.
        where: the configuration key of the optimizer.
        matrices, leave, parts: as in ``Muon``.

    Raises:
        ConfigError: a name that no parameter has, or a parameter that cannot be what is asked for.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    heads = _heads(model)
    found: dict[int, Role] = {}
    for name, parameter in named.items():
        role = _role(name, parameter, _holder(model, name), parameter in heads)
        if id(parameter) not in found or not found[id(parameter)].why_not:
            found[id(parameter)] = role
    chosen = set()
    for rule, own in _matching(matrices, named, f"{where}.matrices"):
        for name, parameter in own:
            if parameter.ndim < 2 or parameter.is_complex():
                what = "of complex numbers" if parameter.is_complex() else f"{_shape(parameter)}, no matrix"
                raise ConfigError(f'{where}.matrices: "{rule}" names {name}, which is {what}')
            holder = _holder(model, name)
            is_stack = parameter.ndim == 3 and not isinstance(holder, (nn.Conv1d, nn.ConvTranspose1d))
            found[id(parameter)] = Role(stacked=is_stack, transposed=inputs_come_first(holder))
            chosen.add(id(parameter))
    for rule, own in _matching(leave, named, f"{where}.leave", whole_modules=True):
        for name, parameter in own:
            if id(parameter) in chosen:
                raise ConfigError(f'{where}.leave: "{rule}" names {name}, which {where}.matrices names too')
            found[id(parameter)] = Role("named in leave")
    divided: dict[int, str] = {}
    for (rule, own), given in zip(
        _matching([*(parts or {})], named, f"{where}.parts"), (parts or {}).values(), strict=True
    ):
        for name, parameter in own:
            key = f'{where}.parts["{rule}"]'
            if (other := divided.setdefault(id(parameter), rule)) != rule:
                raise ConfigError(f'{key}: names {name}, which "{other}" names too; give one of them')
            if why_not := found[id(parameter)].why_not:
                raise ConfigError(f"{key}: {name} is {why_not}, and not a matrix that has parts")
            found[id(parameter)] = _divided(found[id(parameter)], given, name, parameter, key)
    return {name: found[id(parameter)] for name, parameter in named.items()}


def _heads(model: nn.Module) -> set[Tensor]:
    """Return the parameters of output layers that models of transformers name."""
    found: set[Tensor] = set()
    for module in model.modules():
        get: Callable[[], Any] | None = getattr(module, "get_output_embeddings", None)
        head = get() if callable(get) else None
        if isinstance(head, nn.Module):
            found.update(head.parameters())
    return found


def _holder(model: nn.Module, name: str) -> nn.Module:
    """Return the module whose parameter this is, also where ``nn.utils.parametrize`` holds it in modules between."""
    owner, is_parametrised, _ = name.partition("parametrizations.")
    return model.get_submodule(owner.rstrip(".") if is_parametrised else name.rpartition(".")[0])


def _role(name: str, parameter: Tensor, holder: nn.Module, is_head: bool) -> Role:
    *path, own = name.split(".")
    is_adapter = any(part.startswith("lora_embedding_") for part in path)
    if isinstance(holder, (nn.Embedding, nn.EmbeddingBag)) or "embed" in own or is_adapter:
        return Role("an embedding")
    if parameter.ndim < 2 or (1 in parameter.shape[-2:] and parameter.ndim == 2):
        return Role("a vector" if parameter.ndim else "a number")
    if is_norm(holder):
        return Role("of a normalisation layer")
    if parameter.is_complex():
        return Role("of complex numbers")
    first = next((i for i, part in enumerate(path) if part.isdecimal()), len(path))
    if is_head or any(part in _HEADS or part.endswith("_head") for part in path[:first]):
        return Role("of an output head")
    experts = getattr(holder, "num_experts", None)
    if experts == parameter.shape[0] and parameter.ndim == 2 and _has_stack(holder, experts):
        return Role("a vector for each expert")
    if experts == parameter.shape[0] and parameter.ndim == 3:
        return Role(stacked=True, transposed=inputs_come_first(holder))
    return Role(f"of {parameter.ndim} dimensions") if parameter.ndim > 2 else Role(transposed=inputs_come_first(holder))


def _has_stack(holder: nn.Module, experts: int) -> bool:
    """Whether a module has a matrix for each expert, beside which a parameter of two dimensions is a bias, and no router."""
    return any(own.ndim == 3 and own.shape[0] == experts for own in holder.parameters(recurse=False))


def _matching(
    rules: Sequence[str], named: Mapping[str, nn.Parameter], where: str, *, whole_modules: bool = False
) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """Yield each rule with the parameters that it names, also by their module; of a module only what has two dimensions."""
    for rule in rules:
        own = [
            (name, p)
            for name, p in named.items()
            if fnmatchcase(name, rule) or (fnmatchcase(name.rpartition(".")[0], rule) and (whole_modules or p.ndim > 1))
        ]
        if not own:
            raise ConfigError(f'{where}: "{rule}" names no parameter of the model{suggest(rule, named)}')
        if not any(p.requires_grad for _, p in own):
            _logger.warning(f'{where}: "{rule}" has no effect, it names only frozen parameters: {own[0][0]}')
        yield rule, own


def _divided(role: Role, given: Any, name: str, parameter: Tensor, key: str) -> Role:
    """Return the role with the parts that are asked for."""
    options = given if isinstance(given, Mapping) else {"sizes": given}
    for unknown in options.keys() - {"sizes", "dim"}:
        raise ConfigError(f"{key}.{unknown}: unknown key{suggest(str(unknown), ('sizes', 'dim'))}")
    sizes, dim = options.get("sizes"), options.get("dim", 0)
    if dim not in (0, 1) or isinstance(dim, bool):
        raise ConfigError(f"{key}.dim: {dim!r} is not allowed, give 0 for rows or 1 for columns")
    if dim and parameter.ndim - role.stacked != 2:
        raise ConfigError(f"{key}.dim: {name} is {_shape(parameter)}, and has parts of rows only")
    length, what = parameter.shape[dim + role.stacked], ("rows", "columns")[dim]
    if isinstance(sizes, int) and not isinstance(sizes, bool) and sizes > 0:
        if length % sizes:
            raise ConfigError(f"{key}: {name} has {length} {what}, which {sizes} does not divide")
        sizes = [length // sizes] * sizes
    if not isinstance(sizes, (list, tuple)) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"{key}: {sizes!r} is not allowed, give a number of parts or a list of {what}")
    if sum(sizes) != length:
        raise ConfigError(f"{key}: {' + '.join(map(str, sizes))} is {sum(sizes)}, and {name} has {length} {what}")
    return replace(role, part_sizes=tuple(sizes), part_dim=dim)


def _shape(parameter: Tensor) -> str:
    return f"of shape {tuple(parameter.shape)}" if parameter.ndim else "a number"


def check_roles(roles: Mapping[str, Role], model: nn.Module, where: str, others: str | None) -> None:
    """Raise ConfigError if a trained parameter has no optimizer, or there is no matrix; log who updates what.

    Args:
        others: the name of the optimizer of what is no matrix; None if there is none.
    """
    trained = {name: roles[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    left = [name for name, role in trained.items() if role.why_not]
    if left and others is None:
        more = f", like {counted(len(left) - 1, 'other')}" if left[1:] else ""
        raise ConfigError(
            f"{where}.others: missing, Muon updates matrices and {left[0]} is {trained[left[0]].why_not}{more}; give "
            'others=dict(type="AdamW", lr=...)'
        )
    if len(left) == len(trained):
        raise ConfigError(f"{where}: Muon updates matrices, and {type(model).__name__} trains none; choose AdamW")
    if not left:
        more = f"; {where}.others has none and may be left out" if others else ""
        _logger.info(f"Muon updates every trained parameter ({len(trained)}){more}")
        return
    kinds = {trained[name].why_not: 0 for name in left}
    why = "; ".join(f"{kind}: {listed([n for n in left if trained[n].why_not == kind], 3)}" for kind in kinds)
    _logger.info(
        f"Muon updates {counted(len(trained) - len(left), 'parameter')}, {others} the other {len(left)}: {why}"
    )


def matrices_of(shape: torch.Size, group: Mapping[str, Any]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield begin and length, in each dimension, of the matrices of a parameter in this group."""
    stacked = int(group["stacked"])
    for row in range(shape[0]) if stacked else (None,):
        first = [] if row is None else [(row, 1)]
        rest = [(0, size) for size in shape[stacked:]]
        begin = 0
        for size in group["part_sizes"] or (rest[group["part_dim"]][1],):
            rest[group["part_dim"]] = (begin, size)
            begin += size
            yield (*first, *rest)
