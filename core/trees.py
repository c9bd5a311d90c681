"""tree_map_only: maps over the tensors in nested arguments, as torch's private function, but faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch_private import tree_map_only as torch_tree_map_only

_LEAVES = frozenset({type(None), bool, int, float, str})


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with what ``function`` returns in place of every leaf of a kind.

    Arguments of modules are mostly a tuple of tensors. Torch's function, which knows all other containers, takes ten times as
    long for it, and every call leaves cycles for the garbage collector.
    """
    if isinstance(tree, kind):
        return function(tree)
    container = type(tree)
    if container is tuple or container is list:
        return container([tree_map_only(kind, function, each) for each in tree])
    if container is dict:
        return {key: tree_map_only(kind, function, each) for key, each in tree.items()}
    if container in _LEAVES:
        return tree
    return torch_tree_map_only(kind, function, tree)
