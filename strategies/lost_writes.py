"""Forwards that write to parameters whose values a strategy has elsewhere, and what uses those that it has replaced: both raise."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.base.errors import StrategyError
from ..core.base.tensors import has_memory, parts_of
from ..core.device.precision import running_statistics
from ..core.torch_compat.torch_private import has_values, storage_key, tables_of, version_of
from ..optim.param_groups import DefaultOptimWrapperConstructor, settings_by_name

if TYPE_CHECKING:
    from ..optim.wrapper import OptimWrapper

_logger = logging.getLogger("flextrain")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replaced:
    """The parameters of a model, some of which are about to be replaced; whoever keeps one of these has values that never change.

    Args:
        model: as it is before that.
    """

    def __init__(self, model: nn.Module) -> None:
        # Those of the meta device take no memory, and are filled by swap_tensors: it takes no tensor that has a weak reference.
        self._before: list[tuple[str, Callable[[], nn.Parameter | None]]] = [
            (name, partial(_same, parameter) if parameter.is_meta else weakref.ref(parameter))
            for name, parameter in model.named_parameters()
        ]

    def refuse(self, model: nn.Module, strategy: str) -> None:
        """Let every use of a replaced parameter raise StrategyError from now on, and make the values of trained ones NaN.

        What shares their memory, as ``parameter.data`` that somebody keeps, is read as NaN, not as what it was once.

        Args:
            model: as it is now.
            strategy: whose name is in the message.
        """
        now = {id(parameter) for parameter in model.parameters()}
        memory = {storage_key(_local(parameter)) for parameter in model.parameters()}
        for name, reference in self._before:
            before = reference()  # None if nobody keeps it
            if before is None or id(before) in now:
                continue
            if before.requires_grad and has_values(before) and storage_key(before) not in memory:
                before.detach().fill_(math.nan)
            if type(before) is nn.Parameter:
                before.__class__ = type("Replaced", (_Gone,), {"name_in_model": name, "by": strategy})


def settings_of(wrappers: Mapping[str, OptimWrapper], model: nn.Module) -> dict[str, dict[str, str]]:
    """Return, for each wrapper, the settings that its constructor gives the parameters of ``model``, see ``settings_by_name``."""
    parts = {"": model, **dict(model.named_children())}
    return {name: settings_by_name(each._recipe, parts[name]) for name, each in wrappers.items() if name in parts}


def settings_given(optim: Any, model: nn.Module) -> dict[str, dict[str, str]]:
    """``settings_of`` constructors of the user's alone; without one that looks at values, which a model without memory lacks."""
    found: dict[str, dict[str, str]] = {}
    for name, wrapper in optim.wrappers.items() if optim is not None else ():
        if type(wrapper._recipe.constructor) is not DefaultOptimWrapperConstructor:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                found |= settings_of({name: wrapper}, model)
    return found


def refuse_other_settings(optim: Any, model: nn.Module, before: Mapping[str, Mapping[str, str]], strategy: str) -> None:
    """Raise StrategyError if a constructor gives a parameter other settings than ``before``, when it was another object."""
    for wrapper, settings in settings_given(optim, model).items() if any(before.values()) else ():
        given = before.get(wrapper, {})
        for name, text in settings.items() if given.keys() == settings.keys() else ():  # else of a stage
            if given[name] != text:
                raise StrategyError(
                    f"{optim.wrappers[wrapper].where}.constructor: {name} has other settings than before {strategy} replaced the model's "
                    "parameters; decide by names and modules, and not by parameters, or their id(), that were kept from before"
                )


def _same(parameter: nn.Parameter) -> nn.Parameter:
    return parameter


_ALWAYS_TRUE = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "is_leaf", "requires_grad", "grad_fn", "is_meta"}
)
_ALWAYS_TRUE_METHODS = frozenset(
    {"__repr__", "__len__", "size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size"}
)


class _Gone(nn.Parameter):
    """A parameter that a strategy has replaced: only what the new one has in common with it is told."""

    name_in_model = by = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        attribute = getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__") else ""
        if name in _ALWAYS_TRUE_METHODS or (name == "__get__" and attribute in _ALWAYS_TRUE):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise StrategyError(
            f"model.{cls.name_in_model}: {attribute or name} of the parameter that {cls.by} has replaced, which something has kept since before "
            "set-up, in a list, a dict or a closure; its values stay as they were, and what is written to it is lost; take it from its "
            "module where it is used"
        )

    def __deepcopy__(self, memo: Any) -> _Gone:
        return self


def watch_forward(
    module: nn.Module,
    parameters: Mapping[str, tuple[nn.Module, str]],
    why: str,
    instead: str = "write to it after the update, in a hook, or make it a buffer",
    *,
    is_compiled: bool = False,
) -> None:
    """Raise in every forward with gradients that writes to one of the parameters, as a moving average of another network is.

    Torch counts writes in place, which waits for nothing. It does not count those to ``.data``. Therefore the first forward in training
    compares values too: it costs no memory, and waits for the device. A write to ``.data`` that begins later, or that changes nothing
    at first as the average of two networks that begin alike, is not seen.

    Args:
        module: whose forward is watched; its hooks of before have made the parameters what forward computes with.
        parameters: by name, the module that has the parameter, and its name there.
        why: the write would be lost, as a part of the message.
        instead: what to do, its last part.
        is_compiled: whether the module is, or is a part of one that is; values are not compared then.
    """
    # Now, because a stage of a pipeline that is under way lets nobody go through its parameters.
    positions = [(name, tables_of(owner)[0], key) for name, (owner, key) in parameters.items()]
    if not positions or not all(has_values(table[key]) for _, table, key in positions):
        return
    before: dict[str, tuple[Tensor, int]] = {}
    sums: dict[str, Tensor] = {}
    compares = not is_compiled

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal compares
        before.clear()
        sums.clear()  # of a forward that an error has ended
        if not torch.is_grad_enabled():
            return
        before.update(
            (name, (held, version_of(held))) for name, table, key in positions if (held := table.get(key)) is not None
        )
        if compares and module.training:
            compares = False
            sums.update((name, _sums(_local(held))) for name, (held, _) in before.items() if has_memory(held))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        # What another module has too may be another tensor by now.
        same = {name for name, table, key in positions if name in before and table.get(key) is before[name][0]}
        changed = {name for name in same if version_of(before[name][0]) != before[name][1]}
        if sums:
            both = [(name, _local(held)) for name in same & sums.keys() if has_memory(held := before[name][0])]
            if both:
                differ = torch.stack([(_sums(local) != sums[name]).any() for name, local in both]).tolist()
                changed.update(name for (name, _), is_other in zip(both, differ, strict=True) if is_other)
            sums.clear()
        before.clear()
        if changed:
            first = next(name for name, _, _ in positions if name in changed)
            raise StrategyError(f"model.{first}: forward writes to it, which would be lost, {why}; {instead}")

    hidden: Callable[[Any], Any] = torch.compiler.disable if is_compiled else lambda hook: hook
    module.register_forward_pre_hook(hidden(begin))
    module.register_forward_hook(hidden(end), prepend=True)


def tell_of_writes(model: nn.Module) -> None:
    """Say it if the first forward of training writes to parameters, which processes with other samples may do otherwise."""
    before: dict[str, int] = {}

    def begin(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            before.update((name, version_of(parameter)) for name, parameter in module.named_parameters())

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not before:
            return
        for handle in handles:
            handle.remove()
        for name, parameter in module.named_parameters():
            if before.get(name) not in (None, version_of(parameter)):
                _logger.warning(
                    f"model.{name}: forward writes to it, on every process by samples of its own; if what it writes depends on these, as with "
                    "max_norm of functional.embedding, processes train different weights: write after the update, in a hook"
                )
                break

    handles = model.register_forward_pre_hook(begin), model.register_forward_hook(end, prepend=True)


def tell_of_buffers(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled module, and say it if that writes to buffers, other than running statistics, in place.

    torch (2.15) may compute again in backward what forward has made of a buffer, which has another value by then:
    https://github.com/pytorch/pytorch/pull/197039
    """
    statistics = running_statistics(module)
    buffers = {name: each for name, each in module.named_buffers() if name not in statistics and _can_be_summed(each)}
    before = {name: _sums(each) for name, each in buffers.items()}
    result = call(*args, **kwargs)
    now = dict(module.named_buffers())
    for name, sums in before.items():
        if now.get(name) is buffers[name] and not torch.equal(_sums(buffers[name]), sums):
            _logger.warning(
                f"strategy.compile: forward of {type(module).__name__} writes to its buffer {name} in place; where the loss depends on the "
                "buffer, torch may compute wrong gradients of compiled modules, without an error: assign it anew (self.count = "
                "self.count + 1), or leave compile out"
            )
            break
    return result


def _can_be_summed(each: Tensor) -> bool:
    is_dense = type(each) is Tensor and each.layout is torch.strided and each.dtype.itemsize in _WORDS
    return is_dense and each.numel() > 0 and has_values(each)


def _local(parameter: Tensor) -> Tensor:
    return next(parts_of(parameter), parameter).detach()


@torch.no_grad()
def _sums(local: Tensor) -> Tensor:
    """The sums of the bits of a tensor."""
    words = local.contiguous().view(-1).view(_WORDS[local.dtype.itemsize])
    # Also of every second word, and of every third: the same values in another order have the same sum.
    return torch.stack([words[::step].sum() for step in (1, 2, 3)])
