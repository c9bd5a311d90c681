"""Build parameter groups and the torch optimizer from a model and a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.config import Config, check_call, validate
from ..core.errors import ConfigError, one_of, suggest
from ..core.normalisation_layers import is_norm
from ..core.overriding import refuse_unused
from ..core.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS


@dataclass(frozen=True)
class OptimizerRecipe:
    """A checked configuration, from which the optimizer is created after the model is placed."""

    optimizer: Any
    constructor: Any
    where: str


class CustomKey(Config):
    """Multipliers for the parameters whose name contains the key; other entries are optimizer arguments for them."""

    model_config = {**Config.model_config, "extra": "allow"}
    lr_mult: float | int = 1.0
    decay_mult: float | int = 1.0


class ParamwiseConfig(Config):
    """The keys of ``paramwise_cfg``, with MMEngine's meaning; None leaves the optimizer's own value."""

    custom_keys: dict[str, dict[str, Any]] | None = None
    bias_lr_mult: float | int | None = None
    bias_decay_mult: float | int | None = None
    norm_decay_mult: float | int | None = None
    flat_decay_mult: float | int | None = None
    dwconv_decay_mult: float | int | None = None
    bypass_duplicate: bool = False
    """If the names of a tied parameter give different settings, use those of its first name."""


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Makes parameter groups by MMEngine's rules; parameters with equal settings share a group.

    ``custom_keys`` come first: of the keys contained in a parameter's full name the longest is used, and no other rule.
    Otherwise weight decay is multiplied by the first of these that is given and applies to the parameter:

    1. ``norm_decay_mult``: it belongs to a normalisation layer;
    2. ``bias_decay_mult``: it is called bias;
    3. ``dwconv_decay_mult``: it belongs to a depth-wise convolution;
    4. ``flat_decay_mult``: it has one dimension.

    The learning rate of a bias is multiplied by ``bias_lr_mult``, except in normalisation layers. RMSNorm, unknown to
    MMEngine, counts as a normalisation layer.

    A subclass overrides ``settings`` and is named in ``optim_wrapper=dict(constructor=...)``.

    Args:
        optim_wrapper_cfg: holds the optimizer's configuration under "optimizer", with the values to multiply.
        paramwise_cfg: see ParamwiseConfig.
    """

    def __init__(
        self,
        optim_wrapper_cfg: Mapping[str, Any],
        paramwise_cfg: Mapping[str, Any] | None = None,
        *,
        where: str = "optim_wrapper",
    ) -> None:
        self.where = where
        self.config = validate(ParamwiseConfig, paramwise_cfg or {}, f"{where}.paramwise_cfg")
        optimizer = optim_wrapper_cfg.get("optimizer")
        cfg: Mapping[str, Any] = optimizer if isinstance(optimizer, Mapping) else {}
        self.base_lr, self.base_wd = cfg.get("lr"), cfg.get("weight_decay")
        keys = self.config.custom_keys or {}
        self.custom_keys = {
            key: validate(CustomKey, keys[key], f"{where}.paramwise_cfg.custom_keys.{key}")
            for key in sorted(sorted(keys), key=len, reverse=True)
        }
        for key, custom in self.custom_keys.items():
            _check_extra(optimizer, custom.model_extra or {}, f"{where}.paramwise_cfg.custom_keys.{key}")
        lr_rules = self.config.bias_lr_mult is not None or any(key.lr_mult != 1 for key in self.custom_keys.values())
        wd_rules = any(
            getattr(self.config, f"{kind}_decay_mult") is not None for kind in ("bias", "norm", "flat", "dwconv")
        )
        wd_rules = wd_rules or any(key.decay_mult != 1 for key in self.custom_keys.values())
        if lr_rules and self.base_lr is None:
            raise ConfigError(f"{where}.optimizer.lr: missing, paramwise_cfg multiplies it")
        if wd_rules and self.base_wd is None:
            raise ConfigError(f"{where}.optimizer.weight_decay: missing, paramwise_cfg multiplies it")

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups for a torch optimizer, in the order of their first parameters.

        A tied parameter is in one group, under the first of its names.

        Raises:
            ConfigError: a custom key matches no parameter, or two names of a tied parameter give different settings and
                ``bypass_duplicate`` is False.
        """
        groups: dict[Any, dict[str, Any]] = {}
        seen: dict[int, tuple[str, dict[str, Any]]] = {}
        unused = set(self.custom_keys)
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, parameter in module.named_parameters(prefix, recurse=False):
                unused -= {key for key in unused if key in _matched(name)}
                settings = self.settings(name, parameter, module) if parameter.requires_grad else {}
                if id(parameter) in seen:
                    first, chosen = seen[id(parameter)]
                    if settings != chosen and not self.config.bypass_duplicate:
                        raise ConfigError(
                            f"{self.where}.paramwise_cfg: {first} and {name} are one parameter with two settings, give "
                            f"bypass_duplicate=True to use those of {first}"
                        )
                    continue
                seen[id(parameter)] = name, settings
                key = repr(sorted(settings.items()))
                groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
        if unused:
            key = min(unused)
            raise ConfigError(f"{self.where}.paramwise_cfg.custom_keys.{key}: no parameter's name contains it")
        return list(groups.values())

    def settings(self, name: str, parameter: nn.Parameter, module: nn.Module) -> dict[str, Any]:
        """Return the group settings of this parameter that differ from the optimizer's defaults."""
        for key, custom in self.custom_keys.items():
            if key in _matched(name):
                return self._scaled(custom.lr_mult, custom.decay_mult) | dict(custom.model_extra or {})
        cfg = self.config
        of_norm = is_norm(module)
        is_bias = name.rpartition(".")[2] == "bias"
        is_depthwise = isinstance(module, nn.Conv2d) and module.in_channels == module.groups
        lr_mult = cfg.bias_lr_mult if is_bias and not of_norm else None
        rules = (
            (of_norm, cfg.norm_decay_mult),
            (is_bias, cfg.bias_decay_mult),
            (is_depthwise, cfg.dwconv_decay_mult),
            (parameter.dim() == 1, cfg.flat_decay_mult),
        )
        decay_mult = next((mult for concerned, mult in rules if concerned and mult is not None), None)
        return self._scaled(lr_mult, decay_mult)

    def _scaled(self, lr_mult: float | None, decay_mult: float | None) -> dict[str, Any]:
        settings = {}
        if lr_mult is not None and lr_mult != 1 and self.base_lr is not None:
            settings["lr"] = self.base_lr * lr_mult
        if decay_mult is not None and decay_mult != 1 and self.base_wd is not None:
            settings["weight_decay"] = self.base_wd * decay_mult
        return settings


def _matched(name: str) -> str:
    """Return the name to search for custom keys: keys like ".cls_token" match the model's own parameters too."""
    return name if "." in name else f".{name}"


def _check_extra(optimizer: Any, extra: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the optimizer does not accept the other entries of a custom key."""
    cfg = optimizer if isinstance(optimizer, Mapping) else {"type": optimizer}
    if not extra or not (isinstance(cfg.get("type"), str) or inspect.isclass(cfg.get("type"))):
        return  # the signature of the optimizer behind a callable is unknown
    factory = OPTIMIZERS.get(cfg["type"], where)
    parameters = inspect.signature(factory).parameters
    known = ["lr_mult", "decay_mult", *(name for name in parameters if name != "params")]
    for name in extra:
        if name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            hint = suggest(name, known) or f", choose {one_of(known)}"
            raise ConfigError(f"{where}.{name}: unknown key{hint}")
    check_call(factory, {**{k: v for k, v in cfg.items() if k != "type"}, **extra}, where, ("params",))


def check_optimizer(optimizer: Any, paramwise_cfg: Any, constructor: Any, where: str) -> OptimizerRecipe:
    """Return the recipe for an optimizer, after all checks that need no model.

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
    if isinstance(optimizer, (Mapping, str)):
        _try(kind, optimizer, f"{where}.optimizer")
    maker: Any = OPTIM_WRAPPER_CONSTRUCTORS.get(constructor, f"{where}.constructor")
    if inspect.isclass(maker) and not callable(getattr(maker, "param_groups", None)):
        raise ConfigError(
            f"{where}.constructor: {maker.__name__} has no param_groups(model), make it a subclass of "
            "DefaultOptimWrapperConstructor"
        )
    refuse_unused(maker, _NEVER_CALLED, f"{where}.constructor")
    groups = maker(optim_wrapper_cfg={"optimizer": optimizer}, paramwise_cfg=paramwise_cfg, where=where)
    return OptimizerRecipe(optimizer, groups, where)


_NEVER_CALLED = {
    "add_params": "override settings(name, parameter, module)",
    "__call__": "override param_groups(model)",
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


def make_optimizer(recipe: OptimizerRecipe, model: nn.Module, replace: Callable[[Any], Any] | None = None) -> Optimizer:
    """Create the torch optimizer for the model's parameters.

    Args:
        recipe: from ``check_optimizer``.
        model: the user's module, on its device.
        replace: returns the tensor to optimize for each parameter; default: the parameter itself.
    """
    groups = recipe.constructor.param_groups(model)
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
