"""Activation checkpointing of a model: of chosen submodules, or by the model's own switch."""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch import nn

from ..core.errors import ConfigError
from ..core.hugging_face.caches import train_without_cache
from ..core.transforms import checkpoint_activations, module_filter
from .config import ActivationCheckpointing

_logger = logging.getLogger("flextrain")
_WHERE = "strategy.activation_checkpointing"
_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing")
"""Of transformers from 5.2x on, of transformers and diffusers before, and of timm."""


def recompute(model: nn.Module, how: ActivationCheckpointing | Literal["model"], *, trains: bool) -> None:
    """Let backward compute activations again, in place.

    Args:
        model: before it is wrapped.
        how: the option of the strategy.
        trains: whether the model is trained; a model of transformers then has no cache of keys and values.

    Raises:
        ConfigError: nothing is chosen, or the model has no switch of its own.
    """
    if how == "model":
        _by_own_switch(model)
    else:
        chooser = how.check_fn or how.classes or ()
        if not checkpoint_activations(model, module_filter(chooser, model, f"{_WHERE}.classes")):
            raise ConfigError(f"{_WHERE}.check_fn: accepts no submodule of the model")
    if trains and (names := train_without_cache(model)):
        _logger.info(
            f"{_WHERE}: {' and '.join(names)} trains with use_cache=False, because layers that are computed again would add to the "
            "cache of keys and values a second time"
        )


def _by_own_switch(model: nn.Module) -> None:
    switched: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in switched)
        switch = next((one for one in _SWITCHES if callable(getattr(module, one, None))), None)
        if switch is not None and not inside:
            _switch_on(module, switch)
            switched.append(name)
    if not switched:
        raise ConfigError(
            f'{_WHERE}: "model" needs a model with gradient_checkpointing_enable, which {type(model).__name__} does not have; '
            "give dict(classes=[...])"
        )


def _switch_on(module: Any, switch: str) -> None:
    try:
        if switch == "set_grad_checkpointing":
            module.set_grad_checkpointing(True)
        elif switch == "activation_checkpointing_enable":
            module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f'{_WHERE}: "model" is refused by {type(module).__name__}, {reason}') from error
    # Without re-entrance, inputs need no gradients; with frozen embeddings they would only cost time.
    if hasattr(module, "disable_input_require_grads") and getattr(module, "_require_grads_hook", None) is not None:
        module.disable_input_require_grads()
