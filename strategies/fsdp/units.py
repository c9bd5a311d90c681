"""FSDP units, the submodules that are gathered and freed as a whole: choice, checks, prefetching."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...core.base.errors import ConfigError, StrategyError
from ...core.model.base_model import overrides
from ...core.model.logits import is_deferred
from ..recomputation import module_filter, repeated_blocks
from .config import FSDPConfig

_NO_FORWARD = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def choose_roots(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called directly: the model, or its children if it has its own ``train_step``.

    Raises:
        StrategyError: a model with its own ``train_step`` has parameters that belong to no child, or to two of them.
    """
    if not overrides(model, "train_step"):
        return [model]
    own = next((name for name, _ in model.named_parameters(recurse=False)), None)
    if own is not None:
        raise StrategyError(
            f"model.{own}: belongs to {type(model).__name__} itself, whose train_step calls its children only; "
            "move it into one of them"
        )
    roots = [child for child in _called(model) if any(True for _ in child.parameters())]
    _refuse_ties(model, roots)
    return roots


def _refuse_ties(model: nn.Module, roots: Sequence[nn.Module]) -> None:
    """Refuse parameters of two roots: each root would have its own, and train it apart from the other's."""
    users: dict[nn.Parameter, list[str]] = {}
    names = {module: name for name, module in model.named_modules()}
    for root in roots:
        for parameter in root.parameters():
            users.setdefault(parameter, []).append(names[root])
    for name, parameter in model.named_parameters():
        found = users.get(parameter, [])
        if len(found) > 1 and parameter.ndim:  # one without dimensions is not sharded
            raise StrategyError(
                f"model.{name}: is shared by {found[0]} and {found[1]}, which FSDP shards apart, because train_step of "
                f"{type(model).__name__} calls them one by one; move both into one child, or choose another strategy"
            )


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that can be called; of those that only contain others, these."""
    for child in module.children():
        if type(child).forward in _NO_FORWARD and "forward" not in vars(child):
            yield from _called(child)
        else:
            yield child


def choose_units(
    model: nn.Module, config: FSDPConfig, default: Literal["blocks", "model"] = "model"
) -> list[nn.Module]:
    """Return the units besides the whole model, inner ones first.

    Args:
        model: the user's module.
        config: the options of the strategy.
        default: what is done if these do not say it; a model without blocks is one unit.

    Raises:
        ConfigError: the configured policy accepts no submodule.
    """
    wrapper, wrap = config.model_wrapper, config.wrap
    policy = wrapper.auto_wrap_policy if wrapper else None
    if policy is not None:
        where, units = "strategy.model_wrapper.auto_wrap_policy", list(_by_policy(model, policy)[0])
    elif wrap == "blocks":
        where, units = "strategy.wrap", repeated_blocks(model)
    elif wrap in (None, "model"):
        return _without_ties(model, repeated_blocks(model)) if wrap is None and default == "blocks" else []
    else:
        where = "strategy.wrap"
        accepts = module_filter(cast(Any, wrap), model, where)
        units = [module for module in reversed(list(model.modules())) if module is not model and accepts(module)]
    if not units:
        sizes = [(_numel(module), type(module).__name__) for module in model.modules() if module is not model]
        size, name = max(sizes, default=(0, "none"))
        raise ConfigError(
            f"{where}: accepts no submodule of {type(model).__name__}, the largest is a {name} with {size:,} parameters; "
            'give strategy.wrap=["<name of a class>"], or "model" to make the model one unit'
        )
    for unit in units:
        if isinstance(unit, (nn.ModuleList, nn.ModuleDict)) and type(unit).forward in _NO_FORWARD:
            raise ConfigError(
                f"{where}: accepts a {type(unit).__name__}, which is never called itself; choose the modules in it"
            )
    return _without_ties(model, [unit for unit in units if any(True for _ in unit.parameters())])


def check_one_dtype(unit: nn.Module) -> None:
    """Raise StrategyError if the parameters of a unit differ in dtype, because FSDP gathers them together."""
    kinds = {parameter.dtype for parameter in unit.parameters()}
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        some = [next(name for name, parameter in unit.named_parameters() if parameter.dtype == kind) for kind in kinds]
        raise StrategyError(
            f"model: {type(unit).__name__} has parameters of {names}, as {' and '.join(sorted(some))}, FSDP needs one dtype; cast them before "
            "the runner is made, or choose DDPStrategy"
        )


def described(units: Iterable[nn.Module]) -> str:
    """Return the units as text for a log line: number, class and parameters of equal units."""
    counts: dict[tuple[str, int], int] = {}
    for unit in units:
        name = type(unit).__name__.removeprefix("FSDP")
        counts[name, _numel(unit)] = counts.get((name, _numel(unit)), 0) + 1
    return ", ".join(f"{number} x {name} ({size:,})" for (name, size), number in counts.items())


def prefetch(model: nn.Module, units: Sequence[nn.Module], ahead: int) -> None:
    """Make FSDP gather the next ``ahead`` units while a unit computes, in forward and in backward."""
    # The order of the submodules is the order of forward in all but unusual models.
    order = [cast(FSDPModule, m) for m in model.modules() if any(m is unit for unit in units)]
    for i, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + ahead])
        unit.set_modules_to_backward_prefetch(order[max(0, i - ahead) : i][::-1])


def _without_ties(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return the units that no module outside needs the parameters of; shared ones, and a deferred head's, belong to an outer unit."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(module)
    inside = [unit for unit in units if not is_deferred(unit)]
    return [unit for unit in inside if all(owners[id(p)] <= set(unit.modules()) for p in unit.parameters())]


def _by_policy(module: nn.Module, policy: Callable[..., bool]) -> tuple[list[nn.Module], int]:
    """Return the submodules that a policy of torch.distributed.fsdp.wrap accepts, inner ones first, and their elements.

    The policy is called with ``recurse=True`` to decide whether to look into a module, and with ``recurse=False`` to
    decide whether the module is a unit, given the number of its parameter elements that are in no inner unit.
    """
    size = _numel(module)
    if not policy(module=module, recurse=True, nonwrapped_numel=size):
        return [], 0
    units: list[nn.Module] = []
    taken = 0
    for child in module.children():
        inner, numel = _by_policy(child, policy)
        units += [unit for unit in inner if unit not in units]
        taken += numel
    if policy(module=module, recurse=False, nonwrapped_numel=size - taken):
        return [*units, module], size
    return units, taken


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def freed_after_forward(given: bool | int | None, size: int, *, is_root: bool, is_own_mesh: bool) -> bool | int:
    """Return what ``fully_shard`` gets as ``reshard_after_forward``; torch 2.6 does not accept None.

    Args:
        given: the option.
        size: number of processes that shard the unit.
        is_root: the unit is called directly, and backward begins with it.
        is_own_mesh: the unit is sharded over other processes than the model. Groups that are not possible over them are
            those of all of them.

    Raises:
        ConfigError: ``size`` processes are no groups of ``given``.
    """
    if given is None:
        return not is_root
    if isinstance(given, bool) or (given > 0 and size % given == 0):
        return given
    if is_own_mesh and given > 0:
        return True
    raise ConfigError(
        f"strategy.reshard_after_forward: {given} does not divide the {size} processes that shard the model; give a divisor, "
        "True or False"
    )
