"""Where a model can have this process's features as ordinary tensors, and where it needs DTensors: found by tracing it twice.

The first trace follows the features that a plan divides. In the second one each planned module makes the width of one process.
Where an operation then makes another shape than a process's part has, or needs more than its features, DTensors are needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....core.base.trees import tree_map_only
from ....core.torch_compat.torch_private import TorchDispatchMode, arguments_of, tree_flatten
from ..plans.tracing import RULES, Features, Recorder, leaves, without_memory
from .styles import Style, divided_inputs, makes_shards

_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
"""The same values: one trace has them where another has not, by its strides."""


def needs_dtensors(model: nn.Module, batch: Any, styles: Mapping[str, Style], tp: int) -> dict[str, str]:
    """Return the modules whose outputs have to be DTensors, each with the reason; nothing is computed, and nothing changes.

    Args:
        model: one that ``trace`` can follow; raises whatever it raises otherwise.
        batch: as the dataloader gives it.
        styles: by full name of a module.
        tp: number of processes.
    """
    seen = _followed(model, batch, styles)
    divided = {name: _divided_by(name, style, seen) for name, style in styles.items()
               if makes_shards(style, model.get_submodule(name))}  # fmt: skip
    found = {name: "it is not seen" for name, axis in divided.items() if axis is None}
    found |= {name: f"tp={tp} divides no heads of it" for name, axis in divided.items() if axis and axis.size % tp}
    while True:
        axes = {id(axis): name for name, axis in divided.items() if axis is not None and name not in found}
        failed = _needed_by(seen, axes)
        if failed is None and axes:
            made = [name for name in divided if name not in found]
            failed = _misfit(model, batch, _Widths(styles, tp, made), seen, axes)
        if failed is None:
            return found
        name, why = failed
        # What one block needs, all need: a model of many layers is not traced as often.
        same = {id(divided[other]) for other in divided if _pattern(other) == _pattern(name)}
        found |= {other: why for other, axis in divided.items() if id(axis) in same and other not in found}


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


# The first trace: what happens between planned modules.


@dataclass(frozen=True)
class _Event:
    """An operation outside of planned modules.

    Attributes:
        numbers: its arguments that are no sizes.
        draws: it draws random numbers.
        trained: those of its inputs that are computed from trained parameters.
    """

    name: str
    numbers: list[Any]
    inputs: list[Tensor]
    outputs: list[Tensor]
    draws: bool
    trained: list[Tensor]


class _Followed(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that notes the operations between planned modules."""

    def __init__(self, parameters: Mapping[str, Tensor], trained: Collection[str]) -> None:
        super().__init__(parameters, RULES)
        self.events: list[_Event] = []
        self.returned: list[Tensor] = []
        self.is_inside = False
        self._trained = {id(tensor) for name, tensor in parameters.items() if name in trained}
        self._kept: list[Tensor] = []  # so that no other object gets their ids

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        trained = [tensor for tensor in inputs if id(tensor) in self._trained]
        if trained:
            self._trained.update(map(id, outputs))
        self._kept += outputs
        if not self.is_inside and outputs and func not in _COPIES:
            numbers, draws = _numbers(func, args, kwargs), _draws(func, args, kwargs)
            self.events.append(_Event(_name(func), numbers, inputs, outputs, draws, trained))
        return out

    def axes_of(self, tensor: Tensor) -> list[tuple[Features, ...]]:
        """Return the axes of every dimension of a tensor; none for one that no rule has seen."""
        return [leaves(label) for label in self.labels(tensor)] if self.is_known(tensor) else []


def _followed(model: nn.Module, batch: Any, styles: Mapping[str, Style]) -> _Followed:
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with without_memory(model, batch) as (parameters, run):
        seen = _Followed(parameters, trained)
        with _Widths(styles).around(model, seen), seen:
            result = run()
    seen.returned = _tensors(dict(result) if isinstance(result, Mapping) else result)
    return seen


def _divided_by(name: str, style: Style, seen: _Followed) -> Features | None:
    """Return the features of which each process has a part in what a module returns; None: they are not known."""
    product = next((each for each in seen.products if each.name.rpartition(".")[0] == name), None)
    matrices = getattr(style, "count", 1)
    for axis in leaves(product.outputs) if product is not None else ():
        if matrices == 1:
            return axis
        if matrices % axis.size:
            break
        matrices //= axis.size
    return None


def _needed_by(seen: _Followed, axes: Mapping[int, str]) -> tuple[str, str] | None:
    """Return a module whose features are not treated each by itself, or beside what every process has, and why."""
    for event in seen.events:
        for axis in _axes_in(seen, (*event.inputs, *event.outputs), axes):
            why = None
            if axis.classes:
                why = "a cross entropy takes its classes"
            elif axis.whole:
                why = "an operation takes all of its features"
            elif event.draws:
                why = "the masks of dropout are those of one device"
            elif not event.inputs:
                why = f"{event.name} makes values for all of its features"
            elif any(each.is_floating_point() and not _axes_in(seen, (each,), axes) for each in event.trained):
                why = f"{event.name} joins it with trained values that every process has"
            if why is not None:
                return axes[id(axis)], why
    for axis in _axes_in(seen, seen.returned, axes):
        return axes[id(axis)], "they are returned"
    return None


def _axes_in(seen: _Followed, tensors: Sequence[Tensor], axes: Mapping[int, str]) -> list[Features]:
    return [axis for tensor in tensors for dim in seen.axes_of(tensor) for axis in dim if id(axis) in axes]


# The second trace: with the width of one process.


class _Widths:
    """What is around planned modules in a trace: they take and make the width of one process.

    Args:
        styles: by full name.
        tp: number of processes; 1: nothing changes but that what is inside of the modules is not noted.
        made: the modules that return features of one process.
    """

    def __init__(self, styles: Mapping[str, Style], tp: int = 1, made: Collection[str] = ()) -> None:
        self._styles, self.tp, self._made = styles, tp, made

    @contextmanager
    def around(self, model: nn.Module, mode: _Followed | _Shapes) -> Iterator[None]:
        """Context for a forward."""
        handles = []
        try:
            for name, style in self._styles.items():
                module = model.get_submodule(name)
                whole = divided_inputs(style, module)
                handles.append(module.register_forward_pre_hook(partial(self._enter, mode, whole), with_kwargs=True))
                handles.append(module.register_forward_hook(partial(self._leave, mode, name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, mode: _Followed | _Shapes, whole: int | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
        mode.is_inside = True

        def widen(tensor: Tensor) -> Tensor:
            if self.tp == 1 or not tensor.ndim or tensor.shape[-1] * self.tp != whole:
                return tensor
            return tensor.new_empty((*tensor.shape[:-1], whole))

        return tree_map_only(Tensor, widen, args), tree_map_only(Tensor, widen, kwargs)

    def _leave(self, mode: _Followed | _Shapes, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        def narrow(tensor: Tensor) -> Tensor:
            return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] // self.tp))

        found = tree_map_only(Tensor, narrow, output) if name in self._made else output
        mode.is_inside = False
        return found


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares operations with those of the first trace, and raises at the first that differs in more than its width."""

    def __init__(self, seen: _Followed, axes: Mapping[int, str], tp: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._axes, self._tp = seen, axes, tp
        self.count, self.is_inside = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = _tensors(out)
        if not self.is_inside and outputs and func not in _COPIES:
            event = self._seen.events[self.count]
            same = event.name == _name(func) and event.numbers == _numbers(func, args, kwargs)
            if not same or not all(map(self._fits, event.outputs, outputs)):
                raise ValueError(event.name)
            self.count += 1
        return out

    def _fits(self, whole: Tensor, found: Tensor) -> bool:
        if not self._seen.is_known(whole):
            return True
        expected = list(whole.shape)
        for dim, axes in enumerate(self._seen.axes_of(whole)):
            if any(id(axis) in self._axes for axis in axes):
                expected[dim] //= self._tp
        return expected == list(found.shape)


def _misfit(
    model: nn.Module, batch: Any, widths: _Widths, seen: _Followed, axes: Mapping[int, str]
) -> tuple[str, str] | None:
    """Return a module after which an operation makes another shape than a process's part has, and why."""
    ended = False
    with without_memory(model, batch) as (_, run):
        mode = _Shapes(seen, axes, widths.tp)
        with suppress(Exception), widths.around(model, mode), mode:  # shapes that do not fit raise anything
            run()
            ended = True
    for event in seen.events[mode.count :]:  # or a later one, which shows whose features it has spoilt
        for axis in _axes_in(seen, (*event.outputs, *event.inputs), axes):
            return axes[id(axis)], f"{event.name} has a size of its own"
    same = ended and mode.count == len(seen.events)
    return None if same else (next(iter(axes.values())), "it is called in another way")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]


def _numbers(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the numbers among the arguments that are not sizes: what a model has computed from a width."""
    kinds = (int, float) if torch.Tag.pointwise in func.tags else float
    return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, kinds)]


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    given = arguments_of(func, args, kwargs or {})
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    return torch.Tag.nondeterministic_seeded in func.tags and bool(given.get("p", True))


def _name(func: Any) -> str:
    """Return the name of an operation; of ``reshape``, which copies by its strides, the same in every case."""
    name: str = func.name().partition("::")[2].partition(".")[0]
    return "view" if name == "_unsafe_view" else name
