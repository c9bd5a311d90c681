"""What a transform has changed: parameters added, removed, renamed, frozen or stored otherwise, and classes of modules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...core.errors import counted

_LISTED = 4


@dataclass(frozen=True)
class _Parameter:
    itself: Tensor
    numel: int
    kind: str
    trained: bool


@dataclass(frozen=True)
class ModelState:
    """Names, sizes and kinds of a model's parameters, and the classes of its modules, at one time.

    Attributes:
        model: which it is.
        parameters: by name.
        modules: the class of each module, by name.
    """

    model: nn.Module
    parameters: dict[str, _Parameter]
    modules: dict[str, type[nn.Module]]

    @classmethod
    def of(cls, model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> ModelState:
        """Return that of a model.

        Args:
            model: which no strategy has set up yet.
            shape_of: returns the whole shape of a parameter, which may be sharded already.
        """
        parameters = {
            name: _Parameter(
                parameter,
                0 if is_lazy(cast(Any, parameter)) else math.prod(shape_of(parameter)),
                _kind(parameter),
                parameter.requires_grad,
            )
            for name, parameter in model.named_parameters()
        }
        return cls(model, parameters, {name: type(module) for name, module in model.named_modules()})


def differences(before: ModelState, after: ModelState) -> str:
    """Return in one line what is different after a transform."""
    said = [
        *_of_the_model(before, after),
        *_of_modules(before, after),
        *_of_parameters(before.parameters, after.parameters),
    ]
    return "; ".join(said) or "no parameter and no class of a module is another than before"


def _of_the_model(before: ModelState, after: ModelState) -> Iterator[str]:
    if after.model is not before.model:
        yield f"another model ({_class(type(after.model))})"


def _of_modules(before: ModelState, after: ModelState) -> Iterator[str]:
    changed = Counter(
        (_class(kind), _class(after.modules[name]))
        for name, kind in before.modules.items()
        if name and name in after.modules and after.modules[name] is not kind
    )
    for (old, new), count in changed.most_common(_LISTED):
        yield f"{count} x {old} to {new}"
    if (more := len(changed) - _LISTED) > 0:
        yield f"{counted(more, 'other class', 'other classes')} of modules replaced"


def _of_parameters(before: dict[str, _Parameter], after: dict[str, _Parameter]) -> Iterator[str]:
    held = {id(each.itself): name for name, each in before.items()}
    renamed = [name for name, each in after.items() if name not in before and id(each.itself) in held]
    former = {held[id(after[name].itself)] for name in renamed}
    added = [name for name in after.keys() - before.keys() if name not in renamed]
    removed = [name for name in before.keys() - after.keys() if name not in former]
    yield from _counted("added", added, after)
    yield from _counted("removed", removed, before)
    pairs = [(before[name], after[name], name) for name in after if name in before]
    replaced = [name for old, new, name in pairs if old.itself is not new.itself]
    yield from _counted("replaced", replaced, after)
    pairs += [(before[held[id(after[name].itself)]], after[name], name) for name in renamed]
    yield from _counted("frozen", [name for old, new, name in pairs if old.trained and not new.trained], after)
    yield from _counted("thawed", [name for old, new, name in pairs if new.trained and not old.trained], after)
    kinds = Counter((old.kind, new.kind) for old, new, _ in pairs if old.kind != new.kind)
    for (old_kind, new_kind), count in kinds.most_common(_LISTED):
        yield f"{counted(count, 'parameter')} from {old_kind} to {new_kind}"
    trained = sum(each.numel for each in after.values() if each.trained)
    if trained != sum(each.numel for each in before.values() if each.trained):
        yield f"{trained:,} of {sum(each.numel for each in after.values()):,} values are trained"


def _counted(what: str, names: Iterable[str], parameters: dict[str, _Parameter]) -> Iterator[str]:
    found = list(names)
    if found:
        yield f"{counted(len(found), 'parameter')} {what} ({sum(parameters[name].numel for name in found):,} values)"


def _class(kind: type) -> str:
    """The name of a class with its package where the name alone may be another's: ``peft.Linear``."""
    package = kind.__module__.partition(".")[0]
    own = kind.__module__.startswith("torch.nn.") or package in ("__main__", "builtins")
    return kind.__qualname__.rpartition(".")[2] if own else f"{package}.{kind.__qualname__.rpartition('.')[2]}"


def _kind(parameter: Tensor) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return dtype if type(parameter) in (Tensor, nn.Parameter) else _kind_of_subclass(parameter, dtype)


def _kind_of_subclass(parameter: Tensor, dtype: str) -> str:
    data = parameter.data if isinstance(parameter, nn.Parameter) else parameter
    return dtype if type(data) is torch.Tensor else f"{type(data).__name__}"
