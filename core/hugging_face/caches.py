"""Caches of keys and values, which generation needs and training does not."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import pretrained_private as private


def train_without_cache(model: nn.Module) -> list[str]:
    """Set ``use_cache=False`` in the configurations of all models of transformers; return the classes of those that had it.

    Generation has a setting of its own, in ``generation_config``, and keeps its cache.
    """
    found: dict[str, None] = {}
    for module in model.modules():
        if not private.is_model_class(type(module)):
            continue
        config: Any = module.config
        for one in (config, config.get_text_config()):
            if getattr(one, "use_cache", False):
                one.use_cache = False
                found.setdefault(type(module).__name__)
    return list(found)
