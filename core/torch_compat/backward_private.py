"""Private interfaces of torch for a backward whose gradients of weights are computed apart, and around calls of compiled modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .torch_private import COMPILED, is_view


def backward_of_input(output: Tensor, grad: Tensor, leaf: Tensor, model: nn.Module) -> Callable[[], object]:
    """Add the gradient of ``leaf`` to it, not those of weights; return a function that adds these to the weights. 2.6, 2.15.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2024.
    """
    halves = importlib.import_module("torch.distributed.pipelining._backward")
    output = output.clone() if is_view(output) else output  # torch detaches it in place
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _, groups = halves.stage_backward_input([output], [grad], [leaf], iter(weights))
    owners = {get_gradient_edge(weight).node: weight for weight in weights}
    groups = _apart(groups)

    def finish() -> None:
        while groups:
            _add_gradients(groups.pop(0), owners)

    return finish


def _add_gradients(group: dict[str, Any], owners: Mapping[Any, Tensor]) -> None:
    """Add the gradients of a group of weights to them. Versions of torch before 2.15 count twice what one node gives another of a group."""
    parts = [*zip(group["intermediates"], group["grads"], strict=True)]
    ends = [(GradientEdge(node, i), one) for node, own in parts for i, one in enumerate(own) if one is not None]
    if not ends:
        return
    edges, grads = zip(*ends, strict=True)
    # Each node gets what it got in the first half, whatever comes from others.
    handles = [node.register_prehook(lambda _, own=own: own) for node, own in parts] if len(parts) > 1 else []
    try:
        leaves = [*group["params"]]
        found = torch.autograd.grad(edges, [GradientEdge(leaf, 0) for leaf in leaves], grads)
    finally:
        for handle in handles:
            handle.remove()
    for leaf, gradient in zip(leaves, found, strict=True):
        weight = owners[leaf]
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the groups of weights that have some in common, whose gradients would be added up once for each group."""
    found: list[dict[str, Any]] = []
    for group in groups:
        joined = [other for other in found if other["params"] & group["params"]]
        if joined:
            nodes = {
                node: grad
                for each in (*joined, group)
                for node, grad in zip(each["intermediates"], each["grads"], strict=True)
            }
            params = group["params"].union(*(other["params"] for other in joined))
            group = {"params": params, "intermediates": list(nodes), "grads": list(nodes.values())}
        found = [*(other for other in found if all(other is not one for one in joined)), group]
    return found


def call_first_by(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let ``around(call, *args, **kwargs)`` make the first call in training of a module that is compiled in place. 2.6, 2.15."""
    call = cast(Callable[..., Any], getattr(module, COMPILED))

    def first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        setattr(module, COMPILED, call)
        return around(call, *args, **kwargs)

    setattr(module, COMPILED, first)
