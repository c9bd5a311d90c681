"""Build the torch optimizer from a model and a configuration; its parameter groups come from a constructor."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import pydantic
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.base.config import Config, check_call, refuse_foreign, validate
from ..core.base.errors import ConfigError, counted, one_of, suggest
from ..core.base.overriding import refuse_misspelled, refuse_unused
from ..core.base.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from ..core.base.trees import tree_map_only
from ..core.device.precision import acts_as_norm
from ..core.torch_compat.torch_private import has_values
from .adapters import OF_OTHERS, has_own_adapter, updates_matrices

if TYPE_CHECKING:
    from .matrices import Role

# Parameter groups of a constructor: merged where they are equal, and held against the model's parameters.


def _noting(name: str, *, all_keys: bool = False) -> Any:
    """A method of dict that notes the key it is given as read, or all keys."""

    def method(self: NotedReads, *arguments: Any) -> Any:
        if all_keys:
            self._unread.clear()
        else:
            self._unread.discard(str(arguments[0]))
        return getattr(dict, name)(self, *arguments)

    return method


class NotedReads(dict[str, Any]):
    """A dict that knows which of its keys nobody has read; whoever goes through all of it has read them all."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._unread = set(given)

    @property
    def unread(self) -> list[str]:
        """The keys that nobody has read, sorted."""
        return sorted(self._unread)

    def unnoted(self) -> dict[str, Any]:
        """A copy, which counts as no reading."""
        return dict(dict.items(self))

    __getitem__, __contains__, get, pop = map(_noting, ("__getitem__", "__contains__", "get", "pop"))
    __iter__, keys, values, items, copy = (
        _noting(name, all_keys=True) for name in ("__iter__", "keys", "values", "items", "copy")
    )


def merged(groups: Any, where: str, kind: str) -> list[dict[str, Any]]:
    """Return the groups with those of one parameter and equal settings in one, in the order of their first parameters.

    An optimizer that updates many parameters at once does so group by group, and is slow with a group per parameter.
    """
    found: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {}
    for group in as_lists(groups, where, kind):
        if len(group["params"]) == 1:
            first = shared.setdefault(settings_of(group), group)
            if first is not group:
                first["params"] += group["params"]
                continue
        found.append(group)
    return found


def settings_of(group: Mapping[str, Any]) -> str:
    """Return the settings of a group as text, to compare them; a tensor's own text has four digits."""
    settings = {key: tree_map_only(Tensor, Tensor.tolist, value) for key, value in group.items() if key != "params"}
    return repr(sorted((key, repr(value)) for key, value in settings.items()))


def checked_groups(
    groups: Any, parameters: Mapping[str, nn.Parameter], model: nn.Module, where: str, kind: str, bypass: bool
) -> list[dict[str, Any]]:
    """Return groups in which every trainable parameter of the model is once.

    Args:
        groups: from a constructor.
        parameters: the model's parameters by name before the constructor saw it, each under all of its names.
        model: the module that the constructor saw.
        where: the configuration key of the wrapper.
        kind: the constructor's class, for messages.
        bypass: use the settings of the first name, if those of a tied parameter's names differ.

    Raises:
        ConfigError: a parameter is left out, is in several groups, or is no parameter of the model.
    """
    where, names = f"{where}.constructor", _names(parameters)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameters.get(name) is not parameter:
            raise ConfigError(f"{where}: {kind} replaces the model's parameter {name}, which others hold already")
    result: list[dict[str, Any]] = []
    seen: dict[int, tuple[int, str]] = {}
    for group in as_lists(groups, where, kind):
        settings = settings_of(group)
        kept: list[Any] = []
        for parameter in group["params"]:
            own = names.get(id(parameter))
            if own is None:
                shape = list(parameter.shape) if isinstance(parameter, Tensor) else type(parameter).__name__
                raise ConfigError(f"{where}: {kind} gives {shape}, which is no parameter of the model")
            times, before = seen.get(id(parameter), (0, settings))
            seen[id(parameter)] = times + 1, before
            if not times:
                kept.append(parameter)
            elif len(own) == 1:
                raise ConfigError(f"{where}: {kind} gives {own[0]} twice, a parameter belongs to one group")
            elif before != settings and not bypass:
                other = own[min(times, len(own) - 1)]
                raise ConfigError(
                    f"{where.removesuffix('constructor')}paramwise_cfg: {own[0]} and {other} are one parameter with two "
                    f"settings, give bypass_duplicate=True to use those of {own[0]}"
                )
        if kept:
            result.append({**group, "params": kept})
    left_out = [own[0] for key, own in names.items() if key not in seen and parameters[own[0]].requires_grad]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        raise ConfigError(
            f"{where}: {kind} leaves out {left_out[0]}{more}, which would never be trained; put it into a group, or freeze it "
            "with requires_grad_(False)"
        )
    return result


def settings_by_name(recipe: OptimizerRecipe, model: nn.Module) -> dict[str, str]:
    """Return the settings that the constructor gives each parameter of a model, as text, under each of its names; empty without one."""
    if recipe.constructor is None:
        return {}
    recipe = dataclasses.replace(recipe, constructor=copy.deepcopy(recipe.constructor))  # it may count its calls
    settings = {}
    for group in _constructed(recipe, model, says=False):
        of_group = settings_of({key: value for key, value in group.items() if key != "param_names"})
        settings.update({id(parameter): of_group for parameter in group["params"]})
    named = model.named_parameters(remove_duplicate=False)
    return {name: settings[id(parameter)] for name, parameter in named if id(parameter) in settings}


def _names(parameters: Mapping[str, nn.Parameter]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    return names


def as_lists(groups: Any, where: str, kind: str) -> list[dict[str, Any]]:
    """Return the groups with lists of tensors; torch also takes one tensor, and pairs of a name and a tensor."""
    found = []
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise ConfigError(f"{where}: {kind} gives a group without params, give dict(params=[...], ...)")
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        found.append({**group, "params": [member[1] if isinstance(member, tuple) else member for member in members]})
    return found


# DefaultOptimWrapperConstructor: parameter groups by MMEngine's rules, to use or to make a subclass of.


def _finite(factor: float) -> float:
    if not 0 <= factor < math.inf:
        raise ValueError(f"{factor} is not allowed, give a finite number, 0 or more")
    return factor


Factor = Annotated[float | int, pydantic.AfterValidator(_finite)]


class CustomKey(Config):
    """Multipliers for the parameters whose name contains the key; other entries are optimizer arguments for them."""

    model_config = {**Config.model_config, "extra": "allow"}
    lr_mult: Factor = 1.0
    """Factor of the learning rate."""
    decay_mult: Factor = 1.0
    """Factor of the weight decay."""


class ParamwiseConfig(Config):
    """The keys of ``paramwise_cfg``, with MMEngine's meaning; None leaves the optimizer's own value."""

    custom_keys: dict[str, dict[str, Any]] | None = None
    """Settings by a part of the parameter's name: ``{"head": dict(lr_mult=10, decay_mult=0)}``; they come first."""
    bias_lr_mult: Factor | None = None
    """Factor of the learning rate of biases, except in normalisation layers."""
    bias_decay_mult: Factor | None = None
    """Factor of the weight decay of biases, except in normalisation layers."""
    norm_decay_mult: Factor | None = None
    """Factor of the weight decay in normalisation layers, also in those that a model library wrote, as LlamaRMSNorm."""
    flat_decay_mult: Factor | None = None
    """Factor of the weight decay of other parameters with one dimension."""
    dwconv_decay_mult: Factor | None = None
    """Factor of the weight decay in depth-wise convolutions."""
    dcn_offset_lr_mult: Factor | None = None
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
    sees the user's module, with the names and the whole shapes that its parameters have without a strategy; in a pipeline
    those of its stages, and settings that depend on others are refused.

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
            # A frozen parameter too, for when it is thawed; MMEngine gives it the optimizer's own values then, and no rule.
            params.append({"params": [parameter], **self.settings(full_name, parameter, module)})
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
        custom = self.custom_keys.get(_key_of(name, self.custom_keys))
        by_kind = self._by_kind(name, parameter, module)
        if custom is None:
            return by_kind
        if "decay_mult" not in custom.model_fields_set and "weight_decay" in by_kind:
            self.overruled.append(name)
        return self._scaled(custom.lr_mult, custom.decay_mult) | dict(custom.model_extra or {})

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


def _key_of(name: str, custom_keys: Iterable[str]) -> str:
    """Return the custom key, of those from the longest to the shortest, whose settings a parameter has; "" if it has none."""
    return next((key for key in custom_keys if key in searched(name)), "")


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
    others = ("params", *getattr(factory, "of_all_groups", ()))
    known = ["lr_mult", "decay_mult", *(name for name in parameters if name not in others)]
    for name in extra:
        if name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            hint = suggest(name, known) or f", choose {one_of(known)}"
            raise ConfigError(f"{where}.{name}: unknown key{hint}")
    check_call(factory, {**{k: v for k, v in cfg.items() if k != "type"}, **extra}, where, ("params",))
    _check_kind(factory, {**cfg, **extra}, where)


_logger = logging.getLogger("flextrain")


@dataclass(frozen=True)
class OptimizerRecipe:
    """A checked configuration, from which the optimizer is created after the model is placed.

    Attributes:
        rules: of an optimizer of matrices, which parameters are such, as ``find_roles`` takes it; otherwise None.
        others: of an optimizer of matrices, the recipe for all else.
    """

    optimizer: Any
    constructor: Any
    where: str
    rules: Mapping[str, Any] | None = None
    others: OptimizerRecipe | None = None


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
    _check_kind(kind, optimizer, f"{where}.optimizer")
    cfg = {**(wrapper_cfg or {}), "optimizer": optimizer}
    if isinstance(optimizer, (Mapping, str)) and inspect.isclass(kind) and updates_matrices(kind):
        given = {"type": optimizer} if isinstance(optimizer, str) else optimizer
        return _recipe_with_others(given, kind, cfg, paramwise_cfg, constructor, where)
    return OptimizerRecipe(optimizer, _constructor(constructor, cfg, paramwise_cfg, where), where)


def _check_kind(kind: Any, given: Any, where: str) -> None:
    """Raise ConfigError for a class that no training loop can step, or for a value that it does not take."""
    if _needs_closure(kind):
        raise ConfigError(
            f"{where}: {kind.__name__} evaluates the loss several times per update, a training loop that computes "
            "it once cannot offer that; choose another optimizer"
        )
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}.{name}: {value} is not allowed, give a finite number")
    if isinstance(given, (Mapping, str)):
        _try(kind, given, where)


def _recipe_with_others(
    given: Mapping[str, Any], kind: Any, cfg: Mapping[str, Any], paramwise_cfg: Any, constructor: Any, where: str
) -> OptimizerRecipe:
    """Return the recipe of an optimizer of matrices, and of the one that it leaves all else to."""
    rules = {key: given[key] for key in ("matrices", "leave", "parts") if given.get(key)}
    others, key = given.get("others"), f"{where}.optimizer.others"
    if others is None:
        return OptimizerRecipe(given, _constructor(constructor, cfg, paramwise_cfg, where), where, rules)
    their_kind = OPTIMIZERS.check(others, key, provided=("params",))
    if not (inspect.isclass(their_kind) and issubclass(their_kind, Optimizer)):
        raise ConfigError(f"{key}.type: {their_kind!r} is no class of an optimizer, choose AdamW")
    if has_own_adapter(their_kind):
        raise ConfigError(
            f"{key}.type: {their_kind.__name__} cannot update what is no matrix beside Muon, choose AdamW"
        )
    _check_kind(their_kind, others, key)
    own = _constructor(constructor, cfg, _known_to(kind, their_kind, paramwise_cfg), where)
    try:
        their_cfg = {**cfg, "optimizer": {"type": others} if isinstance(others, str) else others}
        theirs = _constructor(constructor, their_cfg, _known_to(their_kind, kind, paramwise_cfg), where)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{where}.optimizer.", f"{key}.", 1)) from None
    return OptimizerRecipe(given, own, where, rules, OptimizerRecipe(others, theirs, where))


def _known_to(kind: Any, other: Any, paramwise_cfg: Any) -> Any:
    """Return ``paramwise_cfg`` without settings in custom keys that only the other of two optimizers has."""
    keys = paramwise_cfg.get("custom_keys") if isinstance(paramwise_cfg, Mapping) else None
    if not isinstance(keys, Mapping):
        return paramwise_cfg
    without = inspect.signature(other).parameters.keys() - inspect.signature(kind).parameters.keys()
    kept = {
        key: {name: value for name, value in own.items() if name not in without} if isinstance(own, Mapping) else own
        for key, own in keys.items()
    }
    return {**paramwise_cfg, "custom_keys": kept}


def _constructor(given: Any, cfg: Mapping[str, Any], paramwise_cfg: Any, where: str) -> Any:
    """Return the constructor, made and checked; None if no setting tells parameters apart."""
    key = f"{where}.constructor"
    maker: Any = OPTIM_WRAPPER_CONSTRUCTORS.resolve(given, key)
    if maker is DefaultOptimWrapperConstructor and paramwise_cfg is None:
        return None
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
    """Construct torch's own optimizers, and Muon, for a dummy parameter, because only the constructor checks the ranges."""
    if not updates_matrices(kind) and not getattr(kind, "__module__", "").startswith("torch.optim."):
        return  # other packages' constructors may look for a device or start a compiler
    group: dict[str, Any] = {"params": [nn.Parameter(torch.zeros(1, 1))]}
    try:  # with what a configuration's groups have of Muon
        OPTIMIZERS.build(cfg, where, params=[{**group, "stacked": False} if updates_matrices(kind) else group])
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None


def _needs_closure(kind: Any) -> bool:
    """Return whether ``step()`` of an optimizer class needs a closure."""
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        return False
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


Roles = Mapping[str, "Role"]
"""By name, what an optimizer of matrices does with each parameter."""


def roles_of(recipe: OptimizerRecipe, model: nn.Module) -> Roles | None:
    """Return what an optimizer of matrices does with each parameter; None for all other optimizers.

    Args:
        recipe: from ``check_optimizer``.
        model: the user's whole module, before it is distributed.

    Raises:
        ConfigError: the configuration does not fit the model.
    """
    if recipe.rules is None:
        return None
    where = f"{recipe.where}.optimizer"
    from .matrices import check_roles, find_roles  # which most scripts do without

    roles = find_roles(model, where, **recipe.rules)
    others = recipe.others
    name = None if others is None else OPTIMIZERS.resolve(_type(others.optimizer)).__name__
    check_roles(roles, model, where, name)
    return roles


def _type(optimizer: Any) -> Any:
    return optimizer["type"] if isinstance(optimizer, Mapping) else optimizer


def make_groups(recipe: OptimizerRecipe, model: nn.Module, roles: Roles | None = None) -> list[dict[str, Any]]:
    """Return the parameter groups that the constructor makes of a model; log what it may have missed.

    Args:
        recipe: from ``check_optimizer``.
        model: the user's module.
        roles: from ``roles_of``; None: they are found in ``model``.

    Raises:
        ConfigError: a parameter is left out, is in several groups, or is no parameter of the model.
    """
    if recipe.rules is None:
        return _constructed(recipe, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if roles is None or not roles.keys() >= {*names.values()}:
        roles = cast(Roles, roles_of(recipe, model))
    found: list[dict[str, Any]] = []
    for group in _constructed(recipe, model):
        own: dict[Role, list[Any]] = {}
        for parameter in group["params"]:
            own.setdefault(roles[names[id(parameter)]], []).append(parameter)
        found += [{**group, **role.settings, "params": own[role]} for role in own if not role.why_not]
    if recipe.others is not None:
        _warn_of_other(recipe, recipe.others, roles)
        for group in _constructed(recipe.others, model, says=False):  # the same would be said again
            if theirs := [parameter for parameter in group["params"] if roles[names[id(parameter)]].why_not]:
                found.append({**group, OF_OTHERS: True, "params": theirs})
    return found


def _warn_of_other(recipe: OptimizerRecipe, others: OptimizerRecipe, roles: Roles) -> None:
    """Log settings of custom keys that one of two optimizers has, and that name only parameters of the other."""
    makers, kinds = (recipe.constructor, others.constructor), (recipe.optimizer, others.optimizer)
    if not all(isinstance(maker, DefaultOptimWrapperConstructor) for maker in makers):
        return
    updates: dict[str, set[bool]] = {}
    for name, role in roles.items():
        updates.setdefault(_key_of(name, makers[0].custom_keys), set()).add(bool(role.why_not))
    for key in sorted(makers[0].custom_keys.keys() & updates.keys()):
        known = [maker.custom_keys[key].model_extra or {} for maker in makers]
        for theirs in {False, True} - updates[key]:
            who = OPTIMIZERS.resolve(_type(kinds[not theirs])).__name__
            for name in sorted(known[theirs].keys() - known[not theirs].keys()):
                _logger.warning(
                    f"{recipe.where}.paramwise_cfg.custom_keys.{key}.{name}: has no effect, {who} updates every parameter that the key "
                    f"names, and has no {name}"
                )


def _constructed(recipe: OptimizerRecipe, model: nn.Module, says: bool = True) -> list[dict[str, Any]]:
    maker, where = recipe.constructor, recipe.where
    if maker is None:
        parameters = list(model.parameters())
        return [{"params": parameters}] if parameters else []
    before = dict(model.named_parameters(remove_duplicate=False))
    if hasattr(maker, "param_groups"):
        groups = maker.param_groups(model)
    else:
        groups = []
        maker.add_params(groups, model)
    given = getattr(maker, "paramwise_cfg", None) or {}
    bypass = bool(given.get("bypass_duplicate"))
    groups = checked_groups(groups, before, model, where, type(maker).__name__, bypass)
    if says and isinstance(given, NotedReads):
        _warn(maker, given, before, where)
    return groups


def _warn(maker: Any, given: NotedReads, parameters: Mapping[str, nn.Parameter], where: str) -> None:
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
    for key in given.unnoted().get("custom_keys") or ():
        found = [name for name in parameters if str(key) in searched(name)]
        if not found:
            parts = {part for name in parameters for part in (name, *name.split("."))}
            _logger.warning(
                f"{where}.paramwise_cfg.custom_keys.{key}: no parameter's name contains it{suggest(str(key), parts)}"
            )
        elif not any(parameters[name].requires_grad for name in found):
            _logger.warning(
                f"{where}.paramwise_cfg.custom_keys.{key}: has no effect unless they are thawed, it names only frozen parameters: {found[0]}"
            )


def make_optimizer(recipe: OptimizerRecipe, model: nn.Module, roles: Roles | None = None) -> Optimizer:
    """Create the torch optimizer for the model's parameters.

    Args:
        recipe: from ``check_optimizer``.
        model: the user's module, on its device.
        roles: as in ``make_groups``.
    """
    groups = make_groups(recipe, model, roles)
    on_cpu = not groups or groups[0]["params"][0].device.type == "cpu"
    if recipe.others is not None and not on_cpu:
        theirs = [group for group in groups if group.get(OF_OTHERS)]
        for group in theirs:
            group.update(_implementation(recipe.others.optimizer, theirs, model))
    return make_for(recipe, groups, {} if on_cpu else _implementation(recipe.optimizer, groups, model))


_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}
_FUSED = ("Adam", "AdamW", "SGD")


def _implementation(optimizer: Any, groups: Iterable[Mapping[str, Any]], model: nn.Module) -> dict[str, bool]:
    """Return ``fused=True`` if a kernel of the device makes the update and the user has not chosen how; otherwise nothing.

    No fused kernel takes the gradients of layers with ``sparse=True``.
    """
    from ..core.device.accelerator import is_fused

    given = {"type": optimizer} if isinstance(optimizer, str) else optimizer
    if not isinstance(given, Mapping) or _IMPLEMENTATIONS & {*given, *(key for group in groups for key in group)}:
        return {}
    kind = OPTIMIZERS.resolve(given["type"])
    if kind not in [getattr(torch.optim, name) for name in _FUSED] or any(
        getattr(module, "sparse", False) is True for module in model.modules()
    ):
        return {}
    parameters = [parameter for group in groups for parameter in group["params"]]
    can = all(p.is_floating_point() and has_values(p) and is_fused(kind.__name__, p.device) for p in parameters)
    return {"fused": True} if can else {}


def make_for(recipe: OptimizerRecipe, groups: list[dict[str, Any]], more: Mapping[str, Any] | None = None) -> Optimizer:
    """Create the torch optimizer for these groups; for a built optimizer, another with the same settings.

    Args:
        recipe: from ``check_optimizer``.
        groups: the parameter groups.
        more: arguments that a configuration has not.
    """
    built = recipe.optimizer
    if isinstance(built, Optimizer) and updates_matrices(type(built)):
        another: Optimizer = cast(Any, built).another(groups)
        return another
    if isinstance(built, Optimizer):
        known = inspect.signature(type(built)).parameters
        return type(built)(groups, **{key: value for key, value in built.defaults.items() if key in known})
    if isinstance(recipe.optimizer, (Mapping, str)):
        where = f"{recipe.where}.optimizer"
        try:
            optimizer: Optimizer = OPTIMIZERS.build(recipe.optimizer, where, params=groups, **(more or {}))
        except ConfigError:
            raise
        except ValueError as error:  # the parameters do not fit: torch's Muon accepts only matrices
            raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
        return optimizer
    made = recipe.optimizer(groups)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"{recipe.where}.optimizer: the callable gave {type(made).__name__}, not a torch optimizer")
    return made
