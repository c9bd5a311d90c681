"""Private interfaces of torch for a backward whose gradients of weights are computed apart."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .torch_private import is_view


def backward_of_input(output: Tensor, grad: Tensor, leaf: Tensor, model: nn.Module) -> Callable[[], object]:
    """Add the gradient of ``leaf`` to it, not those of weights; return a function that adds these to the weights. 2.6, 2.15.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2024.
    """
    halves = importlib.import_module("torch.distributed.pipelining._backward")
    output = output.clone() if is_view(output) else output  # torch detaches it in place
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _, groups = halves.stage_backward_input([output], [grad], [leaf], iter(weights))
    groups = _apart(groups)
    return lambda: halves.stage_backward_weight(iter(weights), groups)


def _apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the groups of weights that have some in common, whose gradients torch would add up once for each group."""
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
