"""Apply transforms to a model that was built, and tell what they have changed."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...core.base.config import check_call
from ...core.base.errors import ConfigError, FlexTrainError, counted, one_line, one_of
from ...core.base.registry import TRANSFORMS
from ...core.base.tensors import is_quantised
from ...core.hugging_face.pretrained import pretrained_in
from ...core.model.base_model import BaseTTAModel
from ...core.model.deferred import LooksAtValues
from ...strategies.building import Builds, shape_of

# Build the transforms of a run from its argument ``transforms``, before there is a model.


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SHOWN = 80
_LIST = "give a list of functions, names, or dict(type=...)"


@dataclass(frozen=True)
class Transform:
    """A function that changes a model.

    Attributes:
        where: its key in the configuration: ``transforms[0]``.
        name: that of the function or class, for the log.
        function: takes the module; returns another one, or None if it has changed the module in place.
    """

    where: str
    name: str
    function: Callable[[nn.Module], nn.Module | None]

    @property
    def needs_values(self) -> bool:
        """Whether it computes with the model's values, and not with names, shapes and classes alone."""
        return bool(self._said("needs_values"))

    @property
    def quantises(self) -> bool:
        """Whether it stores parameters in a form that checkpoints cannot hold."""
        return bool(self._said("quantises"))

    @property
    def changes(self) -> str:
        """What it changes beside parameters and classes of modules, for the log; empty if it says nothing."""
        said = self._said("changes")
        return said if isinstance(said, str) else ""

    def _said(self, name: str) -> Any:
        function = self.function
        while isinstance(function, functools.partial):  # a function with its arguments
            function = function.func
        return getattr(function, name, None)


def build_transforms(given: Any) -> tuple[Transform, ...]:
    """Build the transforms, in their order.

    Args:
        given: a list of functions that take the module, of names, of ``dict(type=..., **arguments)``, and of ``peft.LoraConfig``,
            which stands for ``dict(type="LoRA", ...)`` with its arguments. A type
            that is a class is called with the arguments, and the object with the module. A type that is a function is called
            with the module first, and the arguments.

    Raises:
        ConfigError: an unknown name, or a wrong argument.
    """
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        shown = f'"{given}"' if isinstance(given, str) else type(given).__name__
        raise ConfigError(f"transforms: {shown} is not allowed, {_LIST}")
    return tuple(_built(item, f"transforms[{number}]") for number, item in enumerate(given))


def _built(item: Any, where: str) -> Transform:
    if isinstance(item, nn.Module):
        raise ConfigError(f"{where}: is a module ({type(item).__name__}), give a function that takes the model")
    if type(item).__name__ == "LoraConfig" and type(item).__module__.startswith("peft."):
        from .lora import options_of

        item = {"type": "LoRA", **options_of(item)}
    if not isinstance(item, (str, Mapping)) and not inspect.isclass(item):
        if not callable(item):
            if type(item).__name__ == "LoraConfig":
                raise ConfigError(f'{where}: is a LoraConfig, give dict(type="LoRA", r=8, ...) with the same options')
            shown = repr(item) if len(repr(item)) <= _SHOWN else type(item).__name__
            raise ConfigError(f"{where}: {shown} is not allowed, give a function, a name, or dict(type=...)")
        _check_takes_module(item, where, alone=True)
        return Transform(where, _name(item), item)
    config = TRANSFORMS.expand(item, where)
    kind = TRANSFORMS.resolve(config.pop("type"), where if isinstance(item, str) else f"{where}.type")
    if inspect.isclass(kind):
        if issubclass(kind, nn.Module):
            raise ConfigError(f"{where}.type: {kind.__name__} is a module, give a function that takes the model")
        if not any("__call__" in vars(each) for each in kind.__mro__):
            raise ConfigError(f"{where}.type: {kind.__name__} is not callable, define __call__(self, module)")
        built = TRANSFORMS.build({"type": kind, **config}, where)
        return Transform(where, _described(kind.__name__, config), built)
    first = _check_takes_module(kind, where)
    check_call(kind, config, where, (first,) if first else ())
    function = functools.partial(kind, **config) if config else kind
    return Transform(where, _described(_name(kind), config), function)


def _check_takes_module(function: Any, where: str, *, alone: bool = False) -> str:
    """Return the name of the parameter that gets the module; empty if there is no signature to find it in.

    Args:
        function: of a transform.
        where: the configuration key, for messages.
        alone: whether it gets nothing but the module.

    Raises:
        ConfigError: it takes no argument, or alone and needs more.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ""
    first = next((p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)), None)
    if first is None:
        raise ConfigError(f"{where}: {_name(function)} takes no argument, it must take the model")
    more = [p.name for p in parameters if p is not first and p.default is p.empty and p.kind not in _ANY]
    if alone and more:
        raise ConfigError(
            f"{where}: {_name(function)} needs {one_of(more)} beside the model, give dict(type=function, {more[0]}=...)"
        )
    return "" if first.kind in (first.VAR_POSITIONAL, first.POSITIONAL_ONLY) else first.name


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _described(_name(function.func), function.keywords)
    return str(getattr(function, "__name__", type(function).__name__))


def _described(name: str, arguments: Mapping[str, Any]) -> str:
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{name}({text if len(text) <= 80 else text[:77] + '...'})" if text else name


# What a transform has changed: parameters added, removed, renamed, frozen or stored otherwise, and classes of
# modules.


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


def differences(before: ModelState, after: ModelState, changes: str = "") -> str:
    """Return in one line what is different after a transform, and what it says itself that it changes."""
    said = [
        *_of_the_model(before, after),
        *_of_modules(before, after),
        *_of_parameters(before.parameters, after.parameters),
        *([changes] if changes else ()),
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
    data = parameter.data if isinstance(parameter, nn.Parameter) else parameter
    return dtype if type(data) is torch.Tensor else f"{type(data).__name__}"


def transform(
    model: nn.Module, transforms: Sequence[Transform], strategy: Builds, seed: int, load_from: Any = None
) -> tuple[nn.Module, tuple[tuple[str, str], ...]]:
    """Apply transforms in their order.

    Args:
        model: as it was built, with initial weights or without memory; of a BaseTTAModel the model inside is changed.
        transforms: from ``build_transforms``.
        strategy: that will set the model up.
        seed: of the run. A transform draws from a seed made of it and the transform's index, under every strategy the same.
        load_from: of the run.

    Returns:
        The model, and for each transform its name and what it has changed.

    Raises:
        ConfigError: a transform needs values that the model does not have yet, or returns something else than a module.
    """
    if isinstance(model, BaseTTAModel):
        model.module, said = transform(model.module, transforms, strategy, seed, load_from)
        return model, said
    lines, shape = [], functools.partial(shape_of, strategy)
    for index, each in enumerate(transforms):
        _check_values(each, model, strategy, load_from)
        before = ModelState.of(model, shape)
        is_whole = _has_values(model, strategy)
        with strategy.building(model, _generator_state(seed, index)):
            changed = _call(each, model, is_whole)
        _check_read_later(each, model, changed)
        model = changed
        lines.append((each.name, differences(before, ModelState.of(model, shape), each.changes)))
    return model, tuple(lines)


def _call(each: Transform, model: nn.Module, is_whole: bool) -> nn.Module:
    heads = _chunked_heads(model)
    try:
        changed: object = each.function(model)
    except FlexTrainError:
        raise
    except (Exception, LooksAtValues) as error:
        if not is_whole and isinstance(error, (RuntimeError, NotImplementedError, LooksAtValues)):
            raise ConfigError(
                f"{each.where}: {each.name} failed on a model that the strategy has built without memory "
                f"({one_line(error)[:200]}); if it reads values, give the model as an instance"
            ) from error
        if hasattr(error, "add_note"):  # Python 3.11; the interpreter prints it below the traceback
            error.add_note(f"flextrain: failed in {each.where}, {each.name}")
        raise
    changed = model if changed is None else changed
    if not isinstance(changed, nn.Module):
        raise ConfigError(
            f"{each.where}: {each.name} gave {type(changed).__name__}, return a torch.nn.Module, or None if it was changed in place"
        )
    _check_chunked(each, heads, changed)
    return changed


def _check_values(each: Transform, model: nn.Module, strategy: Builds, load_from: Any) -> None:
    if not each.needs_values:
        return
    if not _has_values(model, strategy):
        raise ConfigError(
            f"{each.where}: {each.name} computes with the model's values, and the strategy builds this model without them; give "
            "the model as an instance, with its weights"
        )
    if any(True for _ in pretrained_in(model)):
        raise ConfigError(
            f"{each.where}: {each.name} computes with the model's values, which are read from model.pretrained afterwards; give the "
            "model as an instance, with its weights"
        )
    if load_from is not None:
        raise ConfigError(
            f"{each.where}: {each.name} computes with the model's values, which load_from would replace afterwards; give the model "
            "as an instance, with its weights, and leave load_from out"
        )


def _check_read_later(each: Transform, model: nn.Module, changed: nn.Module) -> None:
    """Raise ConfigError if a tensor whose values are still to be read was replaced by another of its name."""
    names = {name for name, _ in (*changed.named_parameters(), *changed.named_buffers())}
    for source in pretrained_in(changed):
        lost = {old for old in source.names.values() if old not in source.renamed_in(changed)} & names
        if lost:
            raise ConfigError(
                f"{each.where}: {each.name} replaces {min(lost)}, whose values are read from model.pretrained afterwards; take the "
                "parameter over as it is (new.weight = old.weight)"
            )


_Child = tuple[nn.Module, str, nn.Module]


def _chunked_heads(model: nn.Module) -> dict[_Child, str]:
    """The modules whose logits ChunkedLoss computes, each with its parent, and their names."""
    from ...core.model.logits import is_deferred  # a script without transforms does without it

    return {
        (parent, key, child): f"{name}.{key}" if name else key
        for name, parent in model.named_modules()
        for key, child in parent.named_children()
        if is_deferred(child)
    }


def _check_chunked(each: Transform, heads: Mapping[_Child, str], changed: nn.Module) -> None:
    """Raise ConfigError if a head of ChunkedLoss has something around it now, which would need logits that are not there."""
    if heads and (lost := heads.keys() - _chunked_heads(changed)):
        raise ConfigError(
            f"{each.where}: {each.name.partition('(')[0]} replaces {heads[lost.pop()]}, whose logits ChunkedLoss computes in chunks; give "
            "it before ChunkedLoss in the list"
        )


def _has_values(model: nn.Module, strategy: Builds) -> bool:
    """Whether this process has every parameter whole."""
    return all(
        not parameter.is_meta and tuple(shape_of(strategy, parameter)) == tuple(parameter.shape)
        for parameter in model.parameters()
        if not isinstance(parameter, nn.UninitializedParameter)
    )


def _generator_state(seed: int, index: int) -> Tensor:
    number = hashlib.sha256(f"transforms[{index}] {seed}".encode()).digest()[:8]
    return torch.Generator("cpu").manual_seed(int.from_bytes(number, "big") >> 1).get_state()


# Weights that a package stores in few bits, which checkpoints cannot hold: they are left out, and the base brings
# them.


def check_left_out(transforms: Sequence[Transform], model: Any, leaves_out: bool | None) -> None:
    """Check before anything is built that a run with quantised weights does not save them.

    Args:
        transforms: of the run.
        model: as it was given.
        leaves_out: ``exclude_frozen_parameters``.

    Raises:
        ConfigError: it would save them.
    """
    if leaves_out:
        return
    who = next((f"{each.where}: {each.name}" for each in transforms if each.quantises), "")
    if not who and isinstance(model, nn.Module):
        name = next((name for name, each in model.named_parameters() if is_quantised(each)), "")
        who = f"model.{name}: is quantised" if name else ""
    if who:
        raise ConfigError(
            f"{who.partition('(')[0]}, and checkpoints cannot hold quantised weights; leave them out, "
            "strategy=dict(type=..., exclude_frozen_parameters=True)"
        )
