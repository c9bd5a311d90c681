"""Selective activation checkpointing: which results of operations forward keeps, so that backward need not compute them again."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..core.base.errors import StrategyError
from ..core.base.tensors import parts_of
from ..core.torch_compat.torch_private import (
    Both,
    TorchDispatchMode,
    arguments_of,
    changed_by,
    contexts_of_repetition,
    is_functional,
    same_below_autograd,
    storage_key,
    tree_flatten,
    tree_unflatten,
    version_of,
)

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm"}
_GROUPED = "grouped_mm"
"""Part of the names of products with stacks of matrices, torch's and those of transformers."""


def keeps_attention(operation: Any) -> bool:
    """Whether an operation is an attention kernel: of torch's ``scaled_dot_product_attention``, flex attention, or a package's."""
    name = operation.name().lower()
    return ("attention" in name or "attn" in name) and "backward" not in name


def keeps_matmuls(operation: Any) -> bool:
    """Whether an operation is an attention kernel, a product of matrices, or a convolution."""
    name = operation.name().rpartition("::")[2].partition(".")[0]
    return name in _MATMULS or (_GROUPED in name and "backward" not in name) or keeps_attention(operation)


_KEEPS: dict[str, Callable[[Any], bool]] = {"attention": keeps_attention, "matmuls": keeps_matmuls}


def contexts_for(
    policy: str | Callable[[Any], bool], pack: Callable[[Tensor], Any] | None = None
) -> Callable[[], tuple[Any, Any]]:
    """Return the ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` that keeps results by a policy.

    Results that views or changes of other tensors are, and those of operations that draw random numbers, are never kept: what is
    drawn after a draw that backward leaves out would be other numbers than in forward.

    Args:
        policy: "attention", "matmuls", or a function that gets the operator and returns True to keep its results.
        pack: returns what stands for a result until it is needed, an object with ``unpack`` and ``settle``; None: the tensor itself.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    keeps = _KEEPS[policy] if isinstance(policy, str) else policy
    # torch.compile takes a partial of functions, and nothing with a state.
    return functools.partial(_contexts, functools.partial(_may_keep, keeps), pack)


def _may_keep(keeps: Callable[[Any], bool], operation: Any) -> bool:
    return is_functional(operation) and bool(keeps(operation))


def _is_kept(may_keep: Callable[[Any], bool], operation: Any, args: Any, kwargs: Any) -> bool:
    if not may_keep(operation):
        return False
    if not hasattr(operation, "tags"):  # a higher-order operator has no schema, and draws nothing
        return True
    given = arguments_of(operation, args, kwargs)
    if "dropout_p" in given:
        return not given["dropout_p"]
    return torch.Tag.nondeterministic_seeded not in operation.tags


def _policy(may_keep: Callable[[Any], bool], context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    kept = _is_kept(may_keep, operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(may_keep: Callable[[Any], bool], pack: Callable[[Tensor], Any] | None) -> tuple[Any, Any]:
    """The contexts of forward and of its repetition."""
    if torch.compiler.is_compiling() or get_proxy_mode() is not None:
        compiled: tuple[Any, Any] = create_selective_checkpoint_contexts(functools.partial(_policy, may_keep))  # type: ignore[no-untyped-call]
        return compiled
    results = _Results(functools.cache(may_keep), pack)
    forward, repetition = _Keeping(results), _Repeating(results)
    others = contexts_of_repetition()
    return (forward, repetition) if others is None else (Both(others[0], forward), Both(others[1], repetition))


# Torch's own contexts hand out what was changed in place since, and end after one backward. Therefore they are for compiled
# modules, in which nothing is changed in place, and these are for all others.


class _Result:
    """A kept result of one operation."""

    def __init__(self, operation: Any, value: Any, pack: Callable[[Tensor], Any] | None) -> None:
        self.operation, self._pack = operation, pack
        leaves, self._structure = tree_flatten(value)
        self._leaves = [same_below_autograd(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.storages = [storage_key(part) for tensor in self._tensors() for part in parts_of(tensor)]
        if pack is not None:
            self._leaves = [pack(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._versions = self._counted()

    def _tensors(self) -> list[Tensor]:
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    def _counted(self) -> list[int]:
        return [version_of(tensor) for tensor in self._tensors()]

    def copy(self) -> None:
        """Copy it, before somebody changes it in place."""
        self._leaves = [
            leaf.clone() if isinstance(leaf, Tensor) else leaf.settle() if hasattr(leaf, "settle") else leaf
            for leaf in self._leaves
        ]
        self.storages = [storage_key(part) for tensor in self._tensors() for part in parts_of(tensor)]
        self._versions = self._counted()

    def value(self) -> Any:
        """The result, as the operation gave it."""
        if self._versions != self._counted():
            raise StrategyError(
                f"strategy.activation_checkpointing.policy: the result of {self.operation}, which it keeps, was changed in place "
                "outside of the module that is recomputed; change a copy, or give a policy without this operation"
            )
        unpacked = [leaf.unpack() if hasattr(leaf, "unpack") else leaf for leaf in self._leaves]
        # Autograd gives what it gets a graph.
        same = [same_below_autograd(leaf) if isinstance(leaf, Tensor) else leaf for leaf in unpacked]
        return tree_unflatten(same, self._structure)


class _Results:
    """The kept results of one call, in order."""

    def __init__(self, may_keep: Callable[[Any], bool], pack: Callable[[Tensor], Any] | None) -> None:
        self.may_keep, self._pack = may_keep, pack
        self._results: list[_Result] = []
        self._of_storage: defaultdict[int, set[_Result]] = defaultdict(set)

    def add(self, operation: Any, value: Any) -> None:
        """Add the next one."""
        result = _Result(operation, value, self._pack)
        self._results.append(result)
        self._watch(result)

    def _watch(self, result: _Result) -> None:
        for storage in result.storages:
            self._of_storage[storage].add(result)

    def before(self, operation: Any, args: Any, kwargs: Any) -> None:
        """Copy what a call is about to change in place."""
        for changed in changed_by(operation, args, kwargs):
            for part in parts_of(changed):
                for result in self._of_storage.pop(storage_key(part), ()):
                    result.copy()

    def at(self, index: int, operation: Any) -> Any:
        """Return the result with this index, which has to be one of ``operation``."""
        found = self._results[index] if index < len(self._results) else None
        if found is None or found.operation is not operation:
            raise StrategyError(
                f"strategy.activation_checkpointing.policy: backward repeats forward with {operation} where forward had "
                f"{'nothing' if found is None else found.operation}; what is recomputed has to do the same each time"
            )
        self._watch(found)
        return found.value()


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context of forward: keeps results."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._results.before(func, args, kwargs)
        value = func(*args, **kwargs)
        if _is_kept(self._results.may_keep, func, args, kwargs):
            self._results.add(func, value)
        return value


class _Repeating(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context of the repetition: hands out what was kept, in the same order."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_kept(self._results.may_keep, func, args, kwargs):
            self._next += 1
            return self._results.at(self._next - 1, func)
        self._results.before(func, args, kwargs)
        return func(*args, **kwargs)
