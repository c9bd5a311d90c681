"""What a plan does to a model, in words for the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

_logger = logging.getLogger("flextrain")

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
