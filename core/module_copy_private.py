"""Private names of torch for a copy of a model's modules, whose tensors take no memory until they are filled.

The dicts of ``nn.Module`` were checked with torch 2.6 to 2.15.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_VALUES = (bool, int, float, str, type(None))
_LARGEST = 10_000  # elements of a container in which modules are looked for; larger ones are vocabularies and the like
_DEPTH = 4  # of containers and objects inside of each other
_COMPILED = "_compiled_call_impl"


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers, also those that are not persistent, each under the first of its names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def copy_modules(model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> nn.Module:
    """Return a copy of the modules, with tensors on the meta device that nothing is computed for."""
    known: dict[int, Any] = {}
    for module in model.modules():
        known[id(module)] = object.__new__(type(module))
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in known:
                known[id(parameter)] = nn.Parameter(_without_memory(parameter, shape_of), requires_grad=False)
        for buffer in module.buffers(recurse=False):
            if id(buffer) not in known:
                known[id(buffer)] = _without_memory(buffer, shape_of)
    for module in model.modules():
        own = vars(known[id(module)])
        for key, value in vars(module).items():
            if key.startswith("_") and isinstance(value, dict) and _is_of_module(key):
                own[key] = type(value)((name, _mapped(one, known, _DEPTH)) for name, one in value.items())
            elif key == "_non_persistent_buffers_set":
                own[key] = set(value)
            else:
                own[key] = None if key == _COMPILED else _mapped(value, known, _DEPTH)
    found: nn.Module = known[id(model)]
    return found


def _is_of_module(key: str) -> bool:
    return key in ("_modules", "_parameters", "_buffers") or key.endswith(
        ("_hooks", "_hooks_with_kwargs", "_always_called")
    )


def _without_memory(tensor: Tensor, shape_of: Callable[[Tensor], Sequence[int]]) -> Tensor:
    return torch.empty(tuple(shape_of(tensor)), dtype=tensor.dtype, device="meta")


def _mapped(value: Any, known: dict[int, Any], depth: int) -> Any:
    """Return a value with the copies of all modules and tensors that are in it; the value itself if there are none."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, (*_VALUES, Tensor, nn.Module, type, types.ModuleType)) or depth == 0:
        return value
    inner = functools.partial(_mapped, known=known, depth=depth - 1)
    kind = type(value)
    if kind in (list, tuple, set, dict, OrderedDict):
        if len(value) > _LARGEST:
            return value
        if isinstance(value, dict):
            pairs = [(key, inner(one)) for key, one in value.items()]
            changed = any(one is not value[key] for key, one in pairs)
            return kind(pairs) if changed else value
        parts = [inner(one) for one in value]
        changed = any(new is not old for new, old in zip(parts, value, strict=True))
        return kind(parts) if changed else value
    if kind is types.MethodType:
        owner = inner(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if kind is functools.partial:
        parts = inner([value.func, *value.args])
        words = inner(value.keywords)
        if parts[0] is value.func and words is value.keywords and all(map(_same, parts[1:], value.args)):
            return value
        return functools.partial(parts[0], *parts[1:], **words)
    if kind is types.FunctionType:
        return _function(value, inner)
    return _object(value, known, inner)


def _same(one: Any, other: Any) -> bool:
    return one is other


def _function(function: types.FunctionType, inner: Callable[[Any], Any]) -> types.FunctionType:
    """Return a function whose closure has the copies."""
    cells = function.__closure__ or ()
    try:
        found = [cell.cell_contents for cell in cells]
    except ValueError:  # a cell that nothing was written to yet
        return function
    parts = [inner(one) for one in found]
    if all(map(_same, parts, found)):
        return function
    closure = tuple(types.CellType(part) for part in parts)
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _object(value: Any, known: dict[int, Any], inner: Callable[[Any], Any]) -> Any:
    """Return an object of the user's whose attributes have the copies."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return value
    known[id(value)] = value  # objects may have each other
    mapped = {key: inner(one) for key, one in attributes.items()}
    if all(mapped[key] is one for key, one in attributes.items()):
        del known[id(value)]
        return value
    made = object.__new__(type(value))
    made.__dict__.update(mapped)
    known[id(value)] = made
    return made


def replace_tensor(model: nn.Module, tensor: Tensor, by: Tensor | None) -> None:
    """Put another tensor, or None, in the place of a parameter or buffer, in every module that has it."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, one in held.items():
                if one is tensor:
                    held[key] = by  # type: ignore[assignment]


def take_buffers(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives all modules the buffers that they have now, also those that are None."""
    taken = [
        (module, dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]

    def give_back() -> None:
        for module, buffers, passing in taken:
            if {key: id(one) for key, one in module._buffers.items()} != {key: id(one) for key, one in buffers.items()}:
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set = passing

    return give_back
