"""The functions of ``nn.init`` that read values while they initialise, so that tensors without values need others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..torch_compat.torch_private import INITIALIZERS

READ_VALUES: dict[str, Callable[..., Tensor]] = {
    name: getattr(nn.init, name)
    for name in ("orthogonal_", "dirac_", "sparse_", "trunc_normal_", *INITIALIZERS)
    if hasattr(nn.init, name)
}
"""They do nothing to a tensor on the meta device; not every torch has the private ones."""

ALL = tuple(name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_"))
"""The names of the functions that initialise a tensor in place."""


@contextmanager
def initializing_with(
    replacement: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
) -> Iterator[None]:
    """Context in which these functions of nn.init are what ``replacement`` gives for them, wherever they were imported by name."""
    put_off = {function: replacement(function) for name in READ_VALUES if callable(function := getattr(nn.init, name))}
    replaced = list(_mentions(put_off))
    for namespace, name, function in replaced:
        namespace[name] = put_off[function]
    try:
        yield
    finally:
        for namespace, name, function in replaced:
            namespace[name] = function


def _mentions(functions: Mapping[Any, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(namespace, name, function) for nn.init, and for every module that has imported one of the functions by name."""
    wanted = {id(function) for function in functions}
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        if wanted.isdisjoint(map(id, list(namespace.values()))):  # thousands of modules, few of which mention one
            continue
        for name, value in list(namespace.items()):
            if id(value) in wanted:
                yield namespace, name, value
