"""Checks of models that sequences are to be cut for, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from ....core.errors import ConfigError, StrategyError
from ....core.model import class_name, overrides
from ....core.normalisation_layers import running_statistics


def check_without_cut(model: nn.Module, count: int) -> None:
    """Raise StrategyError for a model whose training a cut of its sequences would change; ``count`` processes."""
    if overrides(model, "train_step"):
        raise StrategyError(
            f"model: {class_name(model)} defines its own train_step, whose loss strategy.cp cannot weigh over the processes of a "
            "sequence; define forward only"
        )
    if found := next(iter(running_statistics(model)), None):
        raise StrategyError(
            f"model.{found}: strategy.cp={count} would keep statistics of a process's positions only; use LayerNorm, GroupNorm or "
            "RMSNorm"
        )


def attention_kind(config: Any, models: Sequence[Any]) -> str:
    """Return "ring" or "ulysses"; with "auto" the latter, whose kernels are torch's, if the heads are known to divide."""
    if config.cp_kind != "auto":
        return str(config.cp_kind)
    heads = [getattr(found, "num_attention_heads", 1) for found in map(_settings, models)]
    return "ulysses" if heads and all(number % (config.cp * config.tp) == 0 for number in heads) else "ring"


def check_positions(model: nn.Module, positions: str | None) -> None:
    """Raise ConfigError for a model that has to count positions itself, from 0 on every process."""
    if positions is None:
        return
    parameters = inspect.signature(model.forward).parameters
    if positions not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(
            f"strategy.cp_positions: {class_name(model)}.forward has no parameter {positions}, and would count positions from 0 on "
            "every process; add it, name another one, or give None if it needs no positions"
        )


def check_of_transformers(model: Any, config: Any, kind: str) -> None:
    """Raise ConfigError for a model of transformers that context parallelism does not fit."""
    name, settings = class_name(model), _settings(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"strategy.cp: {config.cp} is not possible for {name}, an encoder and a decoder have two sequences"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"strategy.cp: {config.cp} is not possible for {name}, whose forward has no position_ids and counts positions from 0"
        )
    if getattr(settings, "output_router_logits", False):
        raise ConfigError(
            f"model.config.output_router_logits: True is not possible with strategy.cp={config.cp}, the balancing loss is no "
            "mean over positions; set it to False"
        )
    # In version 5 by kind of layer, where there are several.
    found = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None) or {}
    for each in (found, *(value for value in found.values() if isinstance(value, dict))):
        if (rope := each.get("rope_type", each.get("type"))) in ("dynamic", "longrope"):
            raise ConfigError(
                f'model.config: rotary positions of type "{rope}" depend on the length of a sequence, of which each of strategy.cp='
                f"{config.cp} processes has some; choose another type, such as yarn"
            )
    heads = getattr(settings, "num_attention_heads", None)
    if kind == "ulysses" and heads is not None and heads % (config.cp * config.tp):
        raise ConfigError(
            f'strategy.cp_kind: "ulysses" needs a number of heads that cp * tp = {config.cp * config.tp} divides, {name} has '
            f'{heads}; choose "ring"'
        )
    dropout = next((key for key in ("attention_dropout", "attn_pdrop") if getattr(settings, key, 0.0)), None)
    if kind == "ring" and dropout is not None:
        raise ConfigError(
            f'model.config.{dropout}: {getattr(settings, dropout)} is not possible with strategy.cp_kind="ring"; choose '
            '"ulysses", or set it to 0'
        )


def _settings(model: Any) -> Any:
    return model.config.get_text_config()
