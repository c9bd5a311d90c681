"""From a model and a configuration to parameter groups and a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..core.config import Config, validate
from ..core.errors import ConfigError
from ..core.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS


@dataclass(frozen=True)
class OptimizerRecipe:
    """A checked configuration from which an optimizer is made once the model is placed."""

    optimizer: Any
    constructor: Any
    where: str


class CustomKey(Config):
    """Multipliers for the parameters whose name contains a key; further keys go into the parameter group as they are."""

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


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Parameter groups by MMEngine's rules; parameters with equal settings share a group.

    ``custom_keys`` come first: of the keys contained in a parameter's full name, the longest wins and the other rules are
    left out. Otherwise, for a parameter of

    - a normalisation layer: weight decay times ``norm_decay_mult``;
    - a depth-wise convolution: weight decay times ``dwconv_decay_mult``;
    - any other one-dimensional kind: weight decay times ``flat_decay_mult``;
    - any other bias: weight decay times ``bias_decay_mult``, learning rate times ``bias_lr_mult``.

    A subclass overrides ``settings`` and is named in ``optim_wrapper=dict(constructor=...)``.

    Args:
        optim_wrapper_cfg: the optimizer's configuration under "optimizer"; gives the values that are multiplied.
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
        """The groups for a torch optimizer, in the order in which their first parameter appears.

        Raises:
            ConfigError: a parameter appears twice and ``bypass_duplicate`` is False, or a custom key matches nothing.
        """
        groups: dict[Any, dict[str, Any]] = {}
        seen: set[int] = set()
        unused = set(self.custom_keys)
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, parameter in module.named_parameters(prefix, recurse=False):
                unused -= {key for key in unused if key in name}
                if id(parameter) in seen:
                    # A tied weight belongs to the group of its first name.
                    continue
                seen.add(id(parameter))
                settings = self.settings(name, parameter, module) if parameter.requires_grad else {}
                key = repr(sorted(settings.items()))
                groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
        if unused:
            key = min(unused)
            raise ConfigError(f"{self.where}.paramwise_cfg.custom_keys.{key}: no parameter's name contains it")
        return list(groups.values())

    def settings(self, name: str, parameter: nn.Parameter, module: nn.Module) -> dict[str, Any]:
        """What the group of this parameter sets differently from the optimizer's defaults."""
        for key, custom in self.custom_keys.items():
            if key in name:
                return self._scaled(custom.lr_mult, custom.decay_mult) | dict(custom.model_extra or {})
        cfg = self.config
        is_norm = isinstance(module, _NORMS)
        is_bias = name.rpartition(".")[2] == "bias"
        is_depthwise = isinstance(module, nn.Conv2d) and module.in_channels == module.groups > 1
        lr_mult = cfg.bias_lr_mult if is_bias and not is_norm else None
        if is_norm:
            decay_mult = cfg.norm_decay_mult
        elif is_depthwise and cfg.dwconv_decay_mult is not None:
            decay_mult = cfg.dwconv_decay_mult
        elif parameter.dim() == 1 and cfg.flat_decay_mult is not None:
            decay_mult = cfg.flat_decay_mult
        else:
            decay_mult = cfg.bias_decay_mult if is_bias else None
        return self._scaled(lr_mult, decay_mult)

    def _scaled(self, lr_mult: float | None, decay_mult: float | None) -> dict[str, Any]:
        settings = {}
        if lr_mult is not None and lr_mult != 1 and self.base_lr is not None:
            settings["lr"] = self.base_lr * lr_mult
        if decay_mult is not None and decay_mult != 1 and self.base_wd is not None:
            settings["weight_decay"] = self.base_wd * decay_mult
        return settings


def check_optimizer(optimizer: Any, paramwise_cfg: Any, constructor: Any, where: str) -> OptimizerRecipe:
    """Check everything about an optimizer that can be known without the model.

    Raises:
        ConfigError: an unknown optimizer, wrong arguments, or ``paramwise_cfg`` beside an optimizer that is already built.
    """
    if isinstance(optimizer, Optimizer):
        if paramwise_cfg is not None:
            raise ConfigError(f"{where}.paramwise_cfg: has no meaning for an optimizer that is already built")
    elif isinstance(optimizer, (Mapping, str)):
        OPTIMIZERS.check(optimizer, f"{where}.optimizer", provided=("params",))
    elif not callable(optimizer):
        raise ConfigError(f"{where}.optimizer: {optimizer!r} is not allowed, give dict(type=...) or an optimizer")
    groups = OPTIM_WRAPPER_CONSTRUCTORS.get(constructor, f"{where}.constructor")(
        optim_wrapper_cfg={"optimizer": optimizer}, paramwise_cfg=paramwise_cfg, where=where
    )
    return OptimizerRecipe(optimizer, groups, where)


def make_optimizer(recipe: OptimizerRecipe, model: nn.Module, replace: Callable[[Any], Any] | None = None) -> Optimizer:
    """The torch optimizer for the model's parameters.

    Args:
        recipe: from ``check_optimizer``.
        model: the user's module, placed.
        replace: gives the tensor to optimize for each parameter; default: the parameter itself.
    """
    groups = recipe.constructor.param_groups(model)
    if replace is not None:
        groups = [{**group, "params": [replace(parameter) for parameter in group["params"]]} for group in groups]
    if isinstance(recipe.optimizer, (Mapping, str)):
        optimizer: Optimizer = OPTIMIZERS.build(recipe.optimizer, f"{recipe.where}.optimizer", params=groups)
        return optimizer
    made = recipe.optimizer(groups)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"{recipe.where}.optimizer: the callable gave {type(made).__name__}, not a torch optimizer")
    return made
