"""Stacks of experts: modules whose parameters have an expert in every row; which ones a model has, and whether they fit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ....core.errors import ConfigError, StrategyError, suggest

STYLE = "experts"
"""The style in ``strategy.plan`` for a stack of experts."""
_STYLE_OF_TRANSFORMERS = "ep_dispatch_experts"


def find_stacks(model: nn.Module, plan: Any, size: int) -> dict[str, nn.Module]:
    """Return the stacks of experts by name: those of the plan, else those of the plan that the model has of its own.

    Args:
        plan: ``strategy.plan``.
        size: ``strategy.ep``.

    Raises:
        ConfigError: there is no plan for experts, or a module of it is no stack of experts.
        StrategyError: the experts of a stack cannot be divided over ``size`` processes.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    given = [rule for rule, style in plan.items() if style == STYLE] if isinstance(plan, Mapping) else []
    kind = type(model).__name__
    sources = [(rule, f'strategy.plan["{rule}"]') for rule in given]
    if not given:
        sources = [(rule, f'strategy.ep: the plan of {kind} has "{rule}", and') for rule in _own_rules(model)]
    found: dict[str, nn.Module] = {}
    for rule, source in sources:
        matching = {name: module for name, module in modules.items() if fnmatchcase(name, rule)}
        if not matching and given:
            raise ConfigError(f"{source}: names no module of the model{suggest(rule, modules)}")
        for name, module in matching.items():
            if problem := why_no_stack(name, module):
                raise ConfigError(f"{source}: {problem}" if given else f"{source} {problem}")
        found |= matching
    if not found:
        raise ConfigError(f"strategy.ep: {kind} has no plan for experts, give {_suggested(modules)}, or leave ep out")
    for name, module in found.items():
        if problem := _why_not_divided(name, module, model, size):
            raise StrategyError(f"strategy.ep: {problem}")
    return found


def why_no_stack(name: str, module: nn.Module) -> str:
    """Return what a module lacks to be a stack of experts, in words; empty if nothing."""
    kind = f"{name} is a {type(module).__name__}"
    inner = next((inner for inner, _ in module.named_parameters() if "." in inner), None)
    if inner is not None:
        return (
            f"{kind} with parameters in submodules ({inner}), and a stack of experts has its own only, each with a row for "
            "every expert; stack them"
        )
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int):
        return f"{kind} without num_experts, name the module whose parameters have a row for every expert"
    for key, tensor in module.named_parameters():
        if tensor.ndim == 0 or tensor.shape[0] != count:
            return f"{kind} of {count} experts, but {key} has the shape {tuple(tensor.shape)}; its first size must be {count}"
    if not any(True for _ in module.parameters()):
        return f"{kind} without parameters, name the module whose parameters have a row for every expert"
    for key, buffer in module.named_buffers():
        if buffer.ndim and buffer.shape[0] == count:
            return f"{kind} whose buffer {key} has a row for every expert; move it out of this module, or make it a parameter"
    given = _arguments(module)
    if given is not None and len(given) != 3:
        return (
            f"{kind} whose forward takes {', '.join(given) or 'nothing'}; it must take tokens, expert ids and weights"
        )
    return ""


def _why_not_divided(name: str, module: nn.Module, model: nn.Module, size: int) -> str:
    count = int(module.num_experts)  # type: ignore[arg-type]
    if count % size:
        return f"{size} does not divide the {count} experts of {name}, choose one of {_divisors(count)}"
    own = {id(parameter): key for key, parameter in module.named_parameters()}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and other.rpartition(".")[0] != name:
            return (
                f"{name}.{own[id(parameter)]} is {other} too, and shared parameters cannot be divided; make it a copy"
            )
    return ""


def _arguments(module: nn.Module) -> list[str] | None:
    """Return the names that ``forward`` must be called with; None if it takes any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional and p.default is p.empty]


def _own_rules(model: nn.Module) -> Iterator[str]:
    """Yield the globs of transformers' models, which may be parts of the model, for their stacks of experts."""
    inside: set[str] = set()
    for name, module in model.named_modules():
        plan = getattr(module, "ep_plan", None)
        if isinstance(plan, Mapping) and not any(name.startswith(outer) for outer in inside):
            prefix = f"{name}." if name else ""
            inside.add(prefix)
            yield from (f"{prefix}{rule}" for rule, style in plan.items() if style == _STYLE_OF_TRANSFORMERS)


def _suggested(modules: Mapping[str, nn.Module]) -> str:
    """Return what to give in ``plan``: the stacks that are there, else an example."""
    there = [name for name, module in modules.items() if not why_no_stack(name, module)]
    if not there:
        return (
            'a model with a module of stacked weights, and strategy.plan={"layers.*.experts": "experts"} with its name'
        )
    rules = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in there)
    plan = ", ".join(f'"{rule}": "{STYLE}"' for rule in rules)
    return f"strategy.plan={{{plan}}}"


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
