"""Names of transformers that are private or differ between its versions, for building and describing its models.

They were read in transformers 5.23, and ran in 5.0 and 5.23.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from ..errors import ConfigError
from ..initializers import ALL

OLDEST = "5.0.0"
_LEGACY = ((r"(^|\.)gamma$", r"\1weight"), (r"(^|\.)beta$", r"\1bias"))


def is_model_class(kind: Any) -> bool:
    """Whether ``kind`` is a class of models of transformers; nothing is imported: who has one has imported it."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(kind, type) and issubclass(kind, base)


def is_auto_class(kind: Any) -> bool:
    """Whether ``kind`` is a class such as ``AutoModelForCausalLM``, which chooses the model by the configuration."""
    base = getattr(sys.modules.get("transformers.models.auto.auto_factory"), "_BaseAutoModelClass", None)
    return base is not None and isinstance(kind, type) and issubclass(kind, base)


def has_class(name: str) -> bool:
    """Whether transformers, if it is installed, has a model of this name."""
    try:
        import transformers
    except ImportError:
        return False
    return isinstance(getattr(transformers, name, None), type)


def passed_arguments() -> set[str]:
    """Names of the keyword arguments that models pass on to their layers and losses."""
    module = sys.modules.get("transformers.utils.generic")
    return {*getattr(getattr(module, "TransformersKwargs", None), "__annotations__", ())}


def knows(kind: Any, config: Any) -> bool:
    """Whether an Auto class has a model for this configuration, without code of the folder."""
    return type(config) in kind._model_mapping


def from_config(kind: Any, config: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Build a model as ``from_pretrained`` would, without values."""
    make = kind.from_config if is_auto_class(kind) else kind._from_config
    # Before transformers 5.2 a model inside of the model takes its dtype from here, and not from the argument.
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if each is not None:
            each.dtype = dtype
    return make(config, dtype=dtype, **options)  # type: ignore[no-any-return]


def check_version(where: str) -> None:
    """Refuse transformers 4, which has other names for tied weights and leaves models in the dtype of their folder.

    Raises:
        ConfigError: in one line, with both versions.
    """
    import transformers

    if Version(transformers.__version__) < Version(OLDEST):
        raise ConfigError(f"{where}: needs transformers {OLDEST} or newer, {transformers.__version__} is installed")


def tied_names(model: Any) -> dict[str, str]:
    """Name of each parameter that is tied to another one, to that other name, under which files have it."""
    found = getattr(model, "all_tied_weights_keys", None)  # transformers 5
    return dict(found) if isinstance(found, dict) else {}


def computes_with_tying(model: Any) -> bool:
    """Whether a model computes something else if its configuration ties embeddings: some scale the head's input then."""
    return "config.tie_word_embeddings" in inspect.getsource(type(model).forward)


def dtype_of(config: Any) -> torch.dtype | None:
    """The dtype that a configuration names; None: it names none."""
    found = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return getattr(torch, found) if isinstance(found, str) else found


@contextmanager
def without_values() -> Iterator[None]:
    """Context in which layers and models do not initialise their parameters; tied ones are tied."""
    import transformers

    base: Any = transformers.PreTrainedModel

    def nothing(tensor: Any = None, *_: Any, **__: Any) -> Any:
        return tensor

    kept = {name: getattr(nn.init, name) for name in ALL}
    of_models = base._initialize_weights
    base._initialize_weights = nothing
    for name in kept:
        setattr(nn.init, name, nothing)
    try:
        yield
    finally:
        base._initialize_weights = of_models
        for name, function in kept.items():
            setattr(nn.init, name, function)


def initialise(model: Any) -> None:
    """Initialise what has memory of a model that is otherwise on the meta device, as its constructor would."""
    for module in model.modules():
        module._is_hf_initialized = False
    if hasattr(model, "initialize_weights"):
        model.initialize_weights()
    else:
        model.apply(model._initialize_weights)


def names_in_model(model: Any, keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Translate the names in a folder's files into those in a model, as ``from_pretrained`` does.

    Returns:
        Name in the file to name in the model, and the names of tensors that transformers would make others of.
    """
    own = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "")
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        transforms = mapping.get_model_conversion_mapping(model)
    except (ImportError, AttributeError):  # transformers 4 has none of it
        return {key: _with_prefix(_renamed(key), prefix, own) for key in keys}, []
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    found, converted = {}, []
    for key in keys:
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, own)
        if pattern is not None and key not in own:
            converted.append(key)
        found[key] = key if key in own else name
    return found, converted


def _renamed(key: str) -> str:
    import re

    for pattern, replacement in _LEGACY:
        key = re.sub(pattern, replacement, key)
    return key


def _with_prefix(key: str, prefix: str, own: dict[str, Any]) -> str:
    if prefix and key.startswith(f"{prefix}.") and key.removeprefix(f"{prefix}.") in own:
        return key.removeprefix(f"{prefix}.")
    return f"{prefix}.{key}" if prefix and key not in own and f"{prefix}.{key}" in own else key


def ignored(model: Any, names: Sequence[str], *, missing: bool) -> set[str]:
    """Those of the names that transformers does not speak of when they are missing in a file, or unexpected there."""
    import re

    kind = "missing" if missing else "unexpected"
    patterns = list(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    patterns += [] if missing else [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def published_class(model: Any) -> str:
    """The name of the model's class in transformers, for ``architectures``: of a class derived from it, its base.

    Raises:
        ConfigError: it is derived from none.
    """
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return str(kind.__name__)
    if getattr(type(model), "_auto_class", None) or is_model_class(type(model)):
        return type(model).__name__
    raise ConfigError(f"model: {type(model).__name__} is no model of transformers")
