"""The repeated blocks of a model: its layers, as they are gathered, divided or counted one by one."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules, with children, that a ModuleList or Sequential has several of, by class."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and container not in inside:
            kinds = [type(child) for child in container]
            blocks = [c for c in container if kinds.count(type(c)) > 1 and any(True for _ in c.children())]
            found += blocks
            inside.update(part for block in blocks for part in block.modules())
    return [block for block in found if any(True for _ in block.parameters())]
