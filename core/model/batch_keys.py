"""Keys of a batch that a model's forward does not take: removed, unless one of them is a misspelled one that it takes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..base.errors import ConfigError, nearest
from ..hugging_face import transformers_private as private
from .base_model import class_name
from .token_counts import NUMBER

logger = logging.getLogger("flextrain")


def taken_keys(model: nn.Module, *, says: bool = True) -> Callable[[Any], Any]:
    """Return a function that gives a batch with only those keys that become arguments of the model's forward.

    It changes mappings alone, and only for a forward without ``**kwargs`` that finds all that it needs in them.

    Args:
        says: log once which keys are left out.

    The function raises ConfigError for a key that is nearly an argument which the batch lacks.
    """
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # compiled code has none
        return _all_of_it
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return _all_of_it
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names, needed = {p.name for p in by_name}, {p.name for p in by_name if p.default is p.empty} - {NUMBER}
    said: set[str] = set()

    def taken(batch: Any) -> Any:
        if not isinstance(batch, Mapping) or batch.keys() <= names:
            return batch
        unused = [str(key) for key in batch if key not in names]
        for key in unused:
            if meant := nearest(key, names - batch.keys()):
                raise ConfigError(f"batch.{key}: is no argument of {class_name(model)}.forward, did you mean {meant}?")
        if not needed <= batch.keys() or not names & batch.keys():
            return batch  # forward says what is missing
        if says and not said.issuperset(unused):
            said.update(unused)
            logger.warning(
                f"batch: {class_name(model)}.forward does not take {', '.join(unused)}; left out of its arguments, metrics get them"
            )
        return {key: value for key, value in batch.items() if key in names}

    return taken


def _all_of_it(batch: Any) -> Any:
    return batch


# Keys of a batch that a model of transformers would take without a word, as ``**kwargs``, and not use.


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
    name, unknown = type(model).__name__, _unknown(model, _known_keys(model), batch)
    if unknown:
        logger.warning(f"batch: {name} makes no use of {', '.join(unknown)}; remove what no metric needs either")


def _known_keys(model: nn.Module) -> set[str]:
    """The keys that a part of the model takes."""
    known = {*inspect.signature(model.forward).parameters, *private.passed_arguments()} - {"kwargs"}
    for kind in {type(module) for module in model.modules()}:
        known.update(inspect.signature(kind.forward).parameters)
    return known


def _unknown(model: nn.Module, known: set[str], batch: Mapping[Any, Any]) -> list[str]:
    own = [name for name in inspect.signature(model.forward).parameters if name != "kwargs"]
    unknown = [str(key) for key in batch if key not in known]
    for key in unknown:
        if meant := nearest(key, own):
            raise ConfigError(f"batch.{key}: is no argument of {type(model).__name__}.forward, did you mean {meant}?")
    return unknown


# Keys of a batch for a model whose loss is a function outside of it, which takes the rest.


def input_keys(model: nn.Module) -> Callable[[Any], Any]:
    """Return a function that gives a batch with only those keys that the model takes, also for a model of transformers."""
    if not _takes_any_key(model):
        return taken_keys(model, says=False)
    known = _known_keys(model)

    def taken(batch: Any) -> Any:
        if not isinstance(batch, Mapping) or not _unknown(model, known, batch):
            return batch
        return {key: value for key, value in batch.items() if key in known}

    return taken
