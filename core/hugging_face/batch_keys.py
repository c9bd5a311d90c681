"""Keys of a batch that a model of transformers would take without a word, as ``**kwargs``, and not use."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError, nearest
from . import pretrained_private as private

logger = logging.getLogger("flextrain")


def looking_at_keys(preprocess: Callable[[Any, bool], Any], model: nn.Module) -> Callable[[Any, bool], Any]:
    """Return a function that does as ``preprocess``, and looks at the keys of the first batch if the model needs it."""
    if not _takes_any_key(model):
        return preprocess
    seen: list[bool] = []

    def look_and_preprocess(data: Any, training: bool) -> Any:
        if not seen:
            seen.append(True)
            check_batch_keys(model, data)
        return preprocess(data, training)

    return look_and_preprocess


def _takes_any_key(model: nn.Module) -> bool:
    """Whether a model is one of transformers whose forward takes any keyword argument."""
    if not private.is_model_class(type(model)):
        return False
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def check_batch_keys(model: nn.Module, batch: Any) -> None:
    """Look for keys of a batch that no part of the model takes.

    Args:
        model: of transformers, whose forward takes any keyword argument.
        batch: anything; only a mapping has keys.

    Raises:
        ConfigError: a key is nearly the name of an argument; others are warned of, because a metric may need them.
    """
    if not isinstance(batch, Mapping):
        return
    own = [name for name in inspect.signature(model.forward).parameters if name != "kwargs"]
    known = {*own, *private.passed_arguments()}
    for kind in {type(module) for module in model.modules()}:
        known.update(inspect.signature(kind.forward).parameters)
    unknown = [str(key) for key in batch if key not in known]
    name = type(model).__name__
    for key in unknown:
        if meant := nearest(key, own):
            raise ConfigError(f"batch.{key}: is no argument of {name}.forward, did you mean {meant}?")
    if unknown:
        logger.warning(f"batch: {name} makes no use of {', '.join(unknown)}; remove what no metric needs either")
