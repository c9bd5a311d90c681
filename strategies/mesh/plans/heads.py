"""Check that a plan which the user has given does not cut through heads: it would be right, and slower than without it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from torch import nn

from ....core.comm.joint_errors import raising_together
from ....core.errors import ConfigError
from ..config import MeshConfig
from .chosen import example_of
from .features import leaves
from .found import whole_dimension
from .own import smaller
from .recorder import Product
from .tracing import Traced, trace

_logger = logging.getLogger("flextrain")


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
