"""DefaultOptimWrapperConstructor: parameter groups by MMEngine's rules, to use or to make a subclass of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..core.config import Config, check_call, validate
from ..core.errors import ConfigError, one_of, suggest
from ..core.normalisation_layers import acts_as_norm
from ..core.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from .group_checks import NotedReads, merged


class CustomKey(Config):
    """Multipliers for the parameters whose name contains the key; other entries are optimizer arguments for them."""

    model_config = {**Config.model_config, "extra": "allow"}
    lr_mult: float | int = 1.0
    """Factor of the learning rate."""
    decay_mult: float | int = 1.0
    """Factor of the weight decay."""


class ParamwiseConfig(Config):
    """The keys of ``paramwise_cfg``, with MMEngine's meaning; None leaves the optimizer's own value."""

    custom_keys: dict[str, dict[str, Any]] | None = None
    """Settings by a part of the parameter's name: ``{"head": dict(lr_mult=10, decay_mult=0)}``; they come first."""
    bias_lr_mult: float | int | None = None
    """Factor of the learning rate of biases, except in normalisation layers."""
    bias_decay_mult: float | int | None = None
    """Factor of the weight decay of biases, except in normalisation layers."""
    norm_decay_mult: float | int | None = None
    """Factor of the weight decay in normalisation layers, also in those that a model library wrote, as LlamaRMSNorm."""
    flat_decay_mult: float | int | None = None
    """Factor of the weight decay of other parameters with one dimension."""
    dwconv_decay_mult: float | int | None = None
    """Factor of the weight decay in depth-wise convolutions."""
    dcn_offset_lr_mult: float | int | None = None
    """Factor of the learning rate of the offsets of deformable convolutions."""
    bypass_duplicate: bool = False
    """If the names of a tied parameter give different settings, use those of its first name."""


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Makes parameter groups by MMEngine's rules; parameters with equal settings share a group.

    ``custom_keys`` come first: of the keys contained in a parameter's full name the longest is used, and no other rule, as
    in MMEngine; for no decay of norms in a layer with a rate of its own, add a longer key with ``decay_mult=0.0``.
    Otherwise weight decay is multiplied by the first of these that is given and applies to the parameter:

    1. ``norm_decay_mult``: it belongs to a normalisation layer;
    2. ``bias_decay_mult``: it is called bias;
    3. ``dwconv_decay_mult``: it belongs to a depth-wise convolution;
    4. ``flat_decay_mult``: it has one dimension.

    The learning rate of a bias is multiplied by ``bias_lr_mult``, except in normalisation layers, and that of a deformable
    convolution's offsets by ``dcn_offset_lr_mult``. RMSNorm, unknown to MMEngine, counts as a normalisation layer. So does
    a module of somebody's own with "Norm" in the name of its class, if no parameter that it holds itself has more than one
    dimension: LlamaRMSNorm, T5LayerNorm.

    A subclass is named in ``optim_wrapper=dict(constructor=...)``. It overrides ``settings`` to decide parameter by
    parameter, or ``add_params``, as in MMEngine, to make groups of its own. ``paramwise_cfg`` may hold keys of its own. It
    sees the user's module, with the names and the whole shapes that its parameters have without a strategy.

    Args:
        optim_wrapper_cfg: holds the optimizer's configuration under "optimizer", with the values to multiply.
        paramwise_cfg: factors of learning rates and weight decay by kind and name of parameter; the keys are those of
            ParamwiseConfig.

    Attributes:
        optimizer_cfg: the optimizer's configuration.
        optim_wrapper_cfg: that of the wrapper, without the optimizer.
        paramwise_cfg: as given, or empty.
        overruled: names of parameters whose decay is that of a custom key, though a rule by kind would change it.
        base_lr, base_wd: the optimizer's ``lr`` and ``weight_decay``; None if they are not in its configuration.
    """

    def __init__(
        self,
        optim_wrapper_cfg: Mapping[str, Any],
        paramwise_cfg: Mapping[str, Any] | None = None,
        *,
        where: str = "optim_wrapper",
    ) -> None:
        self.where = where
        if not isinstance(optim_wrapper_cfg, Mapping):
            raise ConfigError(f"{where}: {optim_wrapper_cfg!r} is not allowed, give a dict")
        optimizer = optim_wrapper_cfg.get("optimizer")
        self.optimizer_cfg = dict(optimizer) if isinstance(optimizer, Mapping) else {"type": optimizer}
        self.optim_wrapper_cfg = {key: value for key, value in optim_wrapper_cfg.items() if key != "optimizer"}
        given: Any = {} if paramwise_cfg is None else paramwise_cfg
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where}.paramwise_cfg: {given!r} is not allowed, give a dict")
        self.paramwise_cfg = NotedReads(given)
        self.base_lr, self.base_wd = self.optimizer_cfg.get("lr"), self.optimizer_cfg.get("weight_decay")
        self.config = ParamwiseConfig()
        self.custom_keys: dict[str, CustomKey] = {}
        self.overruled: list[str] = []
        self.uses_rules = False  # True once the rules have been asked for a parameter, which a subclass may never do
        self._in_deformable = False
        self._validate_cfg()

    def _validate_cfg(self) -> None:
        """Check ``paramwise_cfg``; keys that only a subclass knows are left to it.

        Raises:
            ConfigError: a wrong or unknown key, or no value in the optimizer's configuration to multiply.
        """
        where, given = self.where, self.paramwise_cfg.unnoted()
        if type(self) is not DefaultOptimWrapperConstructor:
            given = {key: value for key, value in given.items() if key in ParamwiseConfig.model_fields}
        self.config = validate(ParamwiseConfig, given, f"{where}.paramwise_cfg")
        keys = self.config.custom_keys or {}
        self.custom_keys = {
            key: validate(CustomKey, keys[key], f"{where}.paramwise_cfg.custom_keys.{key}")
            for key in sorted(sorted(keys), key=len, reverse=True)
        }
        for key, custom in self.custom_keys.items():
            _check_extra(self.optimizer_cfg, custom.model_extra or {}, f"{where}.paramwise_cfg.custom_keys.{key}")
        lr_rules = self.config.bias_lr_mult is not None or self.config.dcn_offset_lr_mult is not None
        lr_rules = lr_rules or any(key.lr_mult != 1 for key in self.custom_keys.values())
        wd_rules = any(
            getattr(self.config, f"{kind}_decay_mult") is not None for kind in ("bias", "norm", "flat", "dwconv")
        )
        wd_rules = wd_rules or any(key.decay_mult != 1 for key in self.custom_keys.values())
        if lr_rules and self.base_lr is None:
            raise ConfigError(f"{where}.optimizer.lr: missing, paramwise_cfg multiplies it")
        if wd_rules and self.base_wd is None:
            raise ConfigError(f"{where}.optimizer.weight_decay: missing, paramwise_cfg multiplies it")

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups for a torch optimizer: those of ``add_params``, of which equal ones are merged.

        Only groups of one parameter are. A tied parameter may be in several, and is trained once; see ``add_params``.
        """
        groups: list[dict[str, Any]] = []
        self.add_params(groups, model)
        return merged(groups, f"{self.where}.constructor", type(self).__name__)

    def add_params(
        self,
        params: list[dict[str, Any]],
        module: nn.Module,
        prefix: str = "",
        is_dcn_module: int | float | None = None,
    ) -> None:
        """Append groups with all parameters of ``module`` and of its submodules, for which it calls itself.

        Args:
            params: the groups so far; changed in place.
            prefix: the module's name in the model; empty for the model itself.
            is_dcn_module: whether the module is directly inside a deformable convolution.
        """
        for name, parameter in module.named_parameters(recurse=False):
            self._in_deformable = bool(is_dcn_module)
            full_name = f"{prefix}.{name}" if prefix else name
            # A frozen parameter is there for when it is thawed, with the optimizer's own values.
            settings = self.settings(full_name, parameter, module) if parameter.requires_grad else {}
            params.append({"params": [parameter], **settings})
        for name, child in module.named_children():
            self.add_params(
                params,
                child,
                prefix=f"{prefix}.{name}" if prefix else name,
                is_dcn_module=_is_deformable(module),
            )

    def _is_in(self, param_group: Mapping[str, Any], param_group_list: list[dict[str, Any]]) -> bool:
        """Whether one of the group's parameters is in one of the groups of the list; for subclasses, as in MMEngine."""
        there = {id(parameter) for group in param_group_list for parameter in group["params"]}
        return any(id(parameter) in there for parameter in param_group["params"])

    def settings(self, name: str, parameter: nn.Parameter, module: nn.Module) -> dict[str, Any]:
        """Return the group settings of this parameter that differ from the optimizer's defaults.

        Args:
            name: its name in the model.
            module: the module that holds it.
        """
        self.uses_rules = True
        for key, custom in self.custom_keys.items():
            if key in searched(name):
                if "decay_mult" not in custom.model_fields_set and "weight_decay" in self._by_kind(
                    name, parameter, module
                ):
                    self.overruled.append(name)
                return self._scaled(custom.lr_mult, custom.decay_mult) | dict(custom.model_extra or {})
        return self._by_kind(name, parameter, module)

    def _by_kind(self, name: str, parameter: nn.Parameter, module: nn.Module) -> dict[str, Any]:
        cfg, of_dcn = self.config, self._in_deformable
        of_norm = acts_as_norm(module)
        is_bias = name.rpartition(".")[2] == "bias"
        is_depthwise = isinstance(module, nn.Conv2d) and module.in_channels == module.groups
        lr_mult = cfg.bias_lr_mult if is_bias and not of_norm and not of_dcn else None
        if of_dcn and cfg.dcn_offset_lr_mult is not None and isinstance(module, nn.Conv2d) and "conv_offset" in name:
            lr_mult = cfg.dcn_offset_lr_mult
        rules = (
            (of_norm, cfg.norm_decay_mult),
            (is_bias and not of_dcn, cfg.bias_decay_mult),
            (is_depthwise, cfg.dwconv_decay_mult),
            (parameter.dim() == 1 and not of_dcn, cfg.flat_decay_mult),
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


def searched(name: str) -> str:
    """Return the name to search for custom keys: keys like ".cls_token" match the model's own parameters too."""
    return name if "." in name else f".{name}"


def _is_deformable(module: nn.Module) -> bool:
    """Whether it is one of MMCV's deformable convolutions, which are recognised by name: flextrain needs no MMCV."""
    names = ("DeformConv2d", "ModulatedDeformConv2d")
    return any(base.__name__ in names and base.__module__.startswith("mmcv.") for base in type(module).__mro__)


def _check_extra(cfg: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the optimizer does not accept the other entries of a custom key."""
    if not extra or not (isinstance(cfg.get("type"), str) or inspect.isclass(cfg.get("type"))):
        return  # the signature of the optimizer behind a callable is unknown
    factory = OPTIMIZERS.resolve(cfg["type"], where)
    parameters = inspect.signature(factory).parameters
    known = ["lr_mult", "decay_mult", *(name for name in parameters if name != "params")]
    for name in extra:
        if name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            hint = suggest(name, known) or f", choose {one_of(known)}"
            raise ConfigError(f"{where}.{name}: unknown key{hint}")
    check_call(factory, {**{k: v for k, v in cfg.items() if k != "type"}, **extra}, where, ("params",))
