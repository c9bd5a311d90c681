"""Build the torch optimizer from a model and a configuration; its parameter groups come from a constructor."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.errors import ConfigError, counted, suggest
from ..core.foreign_classes import refuse_foreign
from ..core.overriding import refuse_misspelled, refuse_unused
from ..core.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from .constructor import DefaultOptimWrapperConstructor, ParamwiseConfig, searched
from .group_checks import NotedReads, checked_groups

_logger = logging.getLogger("flextrain")


@dataclass(frozen=True)
class OptimizerRecipe:
    """A checked configuration, from which the optimizer is created after the model is placed."""

    optimizer: Any
    constructor: Any
    where: str


def check_optimizer(
    optimizer: Any,
    paramwise_cfg: Any,
    constructor: Any,
    where: str,
    wrapper_cfg: Mapping[str, Any] | None = None,
) -> OptimizerRecipe:
    """Return the recipe for an optimizer, after all checks that need no model.

    Args:
        wrapper_cfg: further arguments of the wrapper, for the constructor to see.

    Raises:
        ConfigError: an unknown optimizer, wrong arguments, or ``paramwise_cfg`` beside an optimizer that is already built.
    """
    kind: Any = optimizer
    if isinstance(optimizer, Optimizer):
        if paramwise_cfg is not None:
            raise ConfigError(f"{where}.paramwise_cfg: has no meaning for an optimizer that is already built")
        kind = type(optimizer)
    elif isinstance(optimizer, (Mapping, str)):
        kind = OPTIMIZERS.check(optimizer, f"{where}.optimizer", provided=("params",))
    elif not callable(optimizer):
        raise ConfigError(f"{where}.optimizer: {optimizer!r} is not allowed, give dict(type=...) or an optimizer")
    if _needs_closure(kind):
        raise ConfigError(
            f"{where}.optimizer: {kind.__name__} evaluates the loss several times per update, a training loop that computes "
            "it once cannot offer that; choose another optimizer"
        )
    for name, value in optimizer.items() if isinstance(optimizer, Mapping) else ():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}.optimizer.{name}: {value} is not allowed, give a finite number")
    if isinstance(optimizer, (Mapping, str)):
        _try(kind, optimizer, f"{where}.optimizer")
    cfg = {**(wrapper_cfg or {}), "optimizer": optimizer}
    return OptimizerRecipe(optimizer, _constructor(constructor, cfg, paramwise_cfg, where), where)


def _constructor(given: Any, cfg: Mapping[str, Any], paramwise_cfg: Any, where: str) -> Any:
    """Return the constructor, made and checked."""
    key = f"{where}.constructor"
    maker: Any = OPTIM_WRAPPER_CONSTRUCTORS.resolve(given, key)
    refuse_foreign(maker, key, "flextrain.DefaultOptimWrapperConstructor", OPTIM_WRAPPER_CONSTRUCTORS)
    if inspect.isclass(maker):
        _refuse_other_ways(maker, maker.__name__, key)
    parameters = inspect.signature(maker).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {"optim_wrapper_cfg": cfg, "paramwise_cfg": paramwise_cfg, "where": where}
    for name in ("optim_wrapper_cfg", "paramwise_cfg"):
        if name not in parameters and not takes_any:
            raise ConfigError(f"{key}: {getattr(maker, '__name__', maker)} does not take {name}, which it is made with")
    if "where" not in parameters:
        del arguments["where"]
    made = maker(**arguments)
    _refuse_other_ways(made, type(made).__name__, key)
    if isinstance(made, DefaultOptimWrapperConstructor):
        made.where = where  # a constructor written for MMEngine does not take it
    return made


def _refuse_other_ways(maker: Any, name: str, where: str) -> None:
    """Raise ConfigError if a constructor, or its class, does not say which parameters are in which group."""
    if not any(callable(getattr(maker, method, None)) for method in ("param_groups", "add_params")):
        raise ConfigError(
            f"{where}: {name} has no add_params(params, module), make it a subclass of DefaultOptimWrapperConstructor"
        )
    refuse_unused(maker, _NEVER_CALLED, where)
    kind = maker if isinstance(maker, type) else type(maker)
    if issubclass(kind, DefaultOptimWrapperConstructor):
        refuse_misspelled(kind, where)


_NEVER_CALLED = {
    "__call__": "override add_params(params, module), and give several optimizers as "
    "optim_wrapper=dict(<name>=dict(optimizer=...), ...)",
}


def _try(kind: Any, cfg: Mapping[str, Any] | str, where: str) -> None:
    """Construct torch's own optimizers for a dummy parameter, because only the constructor checks the ranges."""
    if not getattr(kind, "__module__", "").startswith("torch.optim."):
        return  # other packages' constructors may look for a device or start a compiler
    try:
        OPTIMIZERS.build(cfg, where, params=[nn.Parameter(torch.zeros(1, 1))])
    except ValueError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None


def _needs_closure(kind: Any) -> bool:
    """Return whether ``step()`` of an optimizer class needs a closure."""
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        return False
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def make_groups(recipe: OptimizerRecipe, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups that the constructor makes of a model; log what it may have missed.

    Args:
        recipe: from ``check_optimizer``.
        model: the user's module.

    Raises:
        ConfigError: a parameter is left out, is in several groups, or is no parameter of the model.
    """
    maker, where = recipe.constructor, recipe.where
    before = dict(model.named_parameters(remove_duplicate=False))
    if hasattr(maker, "param_groups"):
        groups = maker.param_groups(model)
    else:
        groups = []
        maker.add_params(groups, model)
    given = getattr(maker, "paramwise_cfg", None) or {}
    bypass = bool(given.get("bypass_duplicate"))
    groups = checked_groups(groups, before, model, where, type(maker).__name__, bypass)
    if isinstance(given, NotedReads):
        _warn(maker, given, before, where)
    return groups


def _warn(maker: Any, given: NotedReads, names: Iterable[str], where: str) -> None:
    """Log keys of ``paramwise_cfg`` that have no effect."""
    known = ParamwiseConfig.model_fields
    for key in given.unread:
        if key not in known or not maker.uses_rules:
            hint = "" if key in known else suggest(key, known)
            _logger.warning(f"{where}.paramwise_cfg.{key}: {type(maker).__name__} has not read it{hint}")
    if overruled := [*dict.fromkeys(getattr(maker, "overruled", ()))]:
        others = f" and {counted(len(overruled) - 1, 'other parameter')}" if overruled[1:] else ""
        _logger.info(
            f"{where}.paramwise_cfg.custom_keys: come before the rules for norms and biases, so {overruled[0]}{others} decay "
            "in full; a longer key with decay_mult=0.0 changes that"
        )
    custom = given.unnoted().get("custom_keys")
    unmatched = [key for key in custom or () if not any(str(key) in searched(name) for name in names)]
    for key in unmatched:
        parts = {part for name in names for part in (name, *name.split("."))}
        _logger.warning(
            f"{where}.paramwise_cfg.custom_keys.{key}: no parameter's name contains it{suggest(str(key), parts)}"
        )


def make_optimizer(recipe: OptimizerRecipe, model: nn.Module, replace: Callable[[Any], Any] | None = None) -> Optimizer:
    """Create the torch optimizer for the model's parameters.

    Args:
        recipe: from ``check_optimizer``.
        model: the user's module, on its device.
        replace: returns the tensor to optimize for each parameter; default: the parameter itself.
    """
    groups = make_groups(recipe, model)
    if replace is not None:
        groups = [{**group, "params": [replace(parameter) for parameter in group["params"]]} for group in groups]
    return make_for(recipe, groups)


def make_for(recipe: OptimizerRecipe, groups: list[dict[str, Any]]) -> Optimizer:
    """Create the torch optimizer for these groups; for a built optimizer, another with the same settings."""
    if isinstance(built := recipe.optimizer, Optimizer):
        known = inspect.signature(type(built)).parameters
        return type(built)(groups, **{key: value for key, value in built.defaults.items() if key in known})
    if isinstance(recipe.optimizer, (Mapping, str)):
        where = f"{recipe.where}.optimizer"
        try:
            optimizer: Optimizer = OPTIMIZERS.build(recipe.optimizer, where, params=groups)
        except ValueError as error:  # the parameters do not fit: torch's Muon accepts only matrices
            raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
        return optimizer
    made = recipe.optimizer(groups)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"{recipe.where}.optimizer: the callable gave {type(made).__name__}, not a torch optimizer")
    return made
