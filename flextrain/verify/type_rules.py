"""Rules of types: along which axes of a mesh each element of each tensor differs, through operations and collectives.

A type is a whole number whose bits say, for every axis of the processes, how an element differs from its counterparts on the other
processes along that axis:

- OWN: it depends on data of this process alone; a reduction is due before all processes may use it as one value.
- PART: processes have different parts of something, or terms of one sum.
- TIMES: it was added up although all processes had the same, and is as many times too large.

No bit: the same on all of them (replicated). Types do not depend on numbers: a rehearsal finds them on tensors without values.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import math
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..core.base.errors import StrategyError
from ..core.base.tensors import parts_of
from ..core.model.logits import Logits
from ..core.torch_compat.torch_private import (
    TorchDispatchMode,
    apart,
    arguments_of,
    changed_by,
    has_values,
    tree_flatten,
    with_values,
)
from ..plan import ledger, update
from ..plan.rehearsing_private import collective_of, in_backward
from ..runner.loops import step as runner_step

MOST_AXES = 8
_OWN, _PART, _TIMES, _DATA = 0, MOST_AXES, 2 * MOST_AXES, 1 << 3 * MOST_AXES
_ALL = (1 << MOST_AXES) - 1
_LOOKED_AT = 4096
"""Numbers of a tensor with values, such as an offset, that are compared between processes."""


def own(axes: int) -> int:
    """The type of what depends on own data along these axes, given as bits."""
    return axes << _OWN | _DATA


def part(axes: int) -> int:
    """The type of a part along these axes."""
    return axes << _PART | _DATA


def owned(kind: int) -> int:
    """The axes along which a type is OWN."""
    return kind >> _OWN & _ALL


def parted(kind: int) -> int:
    """The axes along which a type is PART."""
    return kind >> _PART & _ALL


def times(kind: int) -> int:
    """The axes over which it was added up once too often."""
    return kind >> _TIMES & _ALL


def depends(kind: int) -> bool:
    """Whether it depends on parameters or data, and is no constant."""
    return bool(kind & _DATA)


@dataclass(frozen=True)
class Axes:
    """The axes of a job, such that every process group differs along whole ones.

    Attributes:
        names, sizes, strides: of each; the stride is the difference of rank between neighbours.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, world_size: int, sizes: Mapping[str, int]) -> Axes:
        """Return the axes of a topology: ``sizes`` outermost first, then those that divide the innermost processes anew.

        Raises:
            StrategyError: one that divides anew does not fit the others.
        """
        product, base, overlays = 1, dict[str, int](), dict[str, int]()
        for name, size in (sizes or {"data": world_size}).items():
            product *= size
            (base if product <= world_size else overlays)[name] = size
        starts: dict[str, tuple[int, int]] = {}
        stride = 1
        for name, size in reversed(base.items()):
            starts[name], stride = (stride, stride * size), stride * size
        cuts = sorted({1, world_size, *(end for _, end in starts.values()), *overlays.values()})
        found: list[tuple[str, int, int]] = []
        for low, high in itertools.pairwise(cuts):
            if high % low:
                given = ", ".join(f"{name}={size}" for name, size in overlays.items())
                raise StrategyError(f"verify.types: {given} ends inside of another axis, which types cannot follow")
            name = next(name for name, (start, end) in starts.items() if start <= low and high <= end)
            start, end = starts[name]
            inside = next((other for other, size in overlays.items() if high <= size), "")
            label = name if (start, end) == (low, high) else f"{name} (inside {inside})" if inside else f"{name} (rest)"
            found.append((label, high // low, low))
        if len(found) > MOST_AXES:
            raise StrategyError(f"verify.types: {len(found)} axes are more than the {MOST_AXES} that types can follow")
        found.reverse()
        return cls(*(tuple(column) for column in zip(*found, strict=True))) if found else cls((), (), ())

    def index(self, rank: int) -> tuple[int, ...]:
        """The index of a process along each axis."""
        return tuple(rank // stride % size for size, stride in zip(self.sizes, self.strides, strict=True))

    def along(self, ranks: Sequence[int], whole: bool = True) -> int:
        """The axes along which these processes differ, as bits; if ``whole``, 0 if they are not all processes along them.

        Of the stages of a pipeline, those that share a parameter are all.
        """
        found = [{*column} for column in zip(*(self.index(rank) for rank in ranks), strict=True)]
        differing = [i for i, indices in enumerate(found) if len(indices) > 1]
        count = math.prod(len(found[i]) if self.names[i] == "pp" else self.sizes[i] for i in differing)
        if whole and count != len(ranks):
            return 0
        return sum(1 << i for i in differing)

    def each(self, axes: int) -> list[int]:
        """The indices of axes given as bits."""
        return [i for i in range(len(self.names)) if axes >> i & 1]

    def words(self, axes: int) -> str:
        """The names of axes given as bits."""
        return " and ".join(self.names[i] for i in self.each(axes))


@dataclass
class Step:
    """An operation, as it was executed.

    Attributes:
        kind: the union of the types of its results.
        module: the innermost module whose forward it is part of; empty elsewhere.
        line: file and line of the code that called it in a forward.
        inputs: the steps whose results it took, with the union of the types of each, and whether its shape is the result's.
        sums_same: axes over which it added up what was the same.
        adds: it is a sum of two tensors.
        joins: axes along which it added what all processes have to what each has a part or term of.
        passes: it changes elements where they are, in the same way on all processes.
        share: axes by whose number of processes it has divided.
    """

    name: str
    kind: int
    module: str
    line: str
    inputs: list[tuple[int, int, bool]] = field(default_factory=list)
    sums_same: int = 0
    adds: bool = False
    joins: int = 0
    passes: bool = False
    share: int = 0

    @property
    def stem(self) -> str:
        """The name without namespace, overload and what says that it works in place."""
        return self.name.partition("::")[2].partition(".")[0].rstrip("_")


Operation = tuple[str, int]
"""The name of an operation, and a check sum of all that may differ between processes."""


def aligned(own: Sequence[Operation], other: Sequence[Operation]) -> list[Operation | None]:
    """Return for each operation of one rank that of another; None for those that only the one executes.

    The first operation after some that only the other executes is None too.
    """
    matcher = difflib.SequenceMatcher(None, [name for name, _ in own], [name for name, _ in other], autojunk=False)
    found: list[Operation | None] = [None] * len(own)
    at_other = 0
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            if i or block.b == at_other:
                found[block.a + i] = other[block.b + i]
        at_other = block.b + block.size
    return found


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that notes every operation of this thread with all that may differ between processes: numbers, shapes, offsets,
    and the state of the generator.

    Attributes:
        record: name and check sum, by operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record: list[Operation] = []
        self.is_on = False
        self._stack = ExitStack()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.inside: list[str] = []

    def name_modules(self, module: nn.Module) -> None:
        """Take the names of modules for messages."""
        self._names.update({each: name for name, each in module.named_modules()})

    def __enter__(self) -> Any:
        self._stack.callback(register_module_forward_pre_hook(self._enter).remove)
        self._stack.callback(register_module_forward_hook(self.leave, always_call=True).remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.inside.append(self._names.get(module, self.inside[-1] if self.inside else ""))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a module's forward has ended."""
        self.inside.pop()

    def end(self) -> None:
        """Say that the update has ended."""
        self.is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it takes itself apart, and its parts come here
        if not self.is_on or func.namespace == "prim":
            return func(*args, **kwargs)
        name = func.name()
        self.record.append((name, 0 if _is_sent(func) else self._sum_of(func, args, kwargs)))
        result = func(*args, **kwargs)
        self.typed(func, args, kwargs, result)
        return result

    def typed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called after every operation."""

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor's values were made by what was seen, so that they need no look."""
        return not has_values(tensor)

    def _sum_of(self, func: Any, args: Any, kwargs: Any) -> int:
        found: list[Any] = []
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor):
                found.append((tuple(leaf.shape), leaf.storage_offset()))
                if not self.knows(leaf) and leaf.numel() <= _LOOKED_AT:
                    with with_values():
                        found.append(
                            zlib.crc32(leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
                        )
            elif isinstance(leaf, (bool, int, float, str)):
                found.append(leaf)
        if torch.Tag.nondeterministic_seeded in func.tags:
            with with_values():
                found.append(zlib.crc32(torch.default_generator.get_state().numpy().tobytes()))
        return zlib.crc32(repr(found).encode())


def _is_sent(func: Any) -> bool:
    return func.namespace in ("c10d", "_c10d_functional", "_dtensor", "fsdp")


Mixed = Tensor
Kind = int | Mixed
"""The type of all elements, or one for each."""


class Types(OperationRecorder):  # type: ignore[no-untyped-call]
    """Context that gives every element of every tensor its type, see this module.

    Args:
        axes: of the processes.
        rank: of this one.
        others: by axis, what this rank's neighbour along it executes in place of each operation; None: nothing.

    Attributes:
        steps: all operations.
        outputs: by name of a module, the union of the types of what its forward returned last, and the step that made it.
        is_apart: a neighbour has executed another operation, and nothing was followed from there on.
        summed: steps whose results were added up, and over which axes: they were terms of a sum.
        late: the same of steps that are no sum's, such as a gelu of terms: the sum was due before.
    """

    data: int = _ALL
    """Axes along which processes have different data."""
    received: int = 0
    """The type of what another stage of a pipeline sends."""

    def __init__(self, axes: Axes, rank: int, others: Mapping[int, Sequence[Operation | None]]) -> None:
        super().__init__()
        self.axes, self.rank, self._others = axes, rank, others
        self.is_apart = False
        self.steps: list[Step] = []
        self.outputs: dict[str, tuple[int, int]] = {}
        self.summed: dict[int, int] = {}
        self.late: dict[int, int] = {}
        self._kinds: weakref.WeakKeyDictionary[torch.UntypedStorage, Kind] = weakref.WeakKeyDictionary()
        self._writers: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()
        self._groups: dict[Any, tuple[int, int, int, int]] = {}
        self._factors: list[tuple[float, int]] = [(float(size), 1 << i) for i, size in enumerate(axes.sizes)]

    # The type of a tensor

    def kind_of(self, tensor: Tensor) -> int:
        """The union of the types of a tensor's elements."""
        return _union(self.read(tensor))

    def read(self, tensor: Tensor) -> Kind:
        """The types of a tensor's elements."""
        kind = self._kinds.get(tensor.untyped_storage(), 0)
        if isinstance(kind, int):
            return kind
        if not self._fits(tensor, kind):
            return _union(kind)
        return _simple(kind.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))

    def write(self, tensor: Tensor, kind: Kind, by: int | None = None) -> None:
        """Set the types of a tensor's elements, in all views of them."""
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.itemsize == storage.nbytes()
        if by is not None:
            self._writers[storage] = [by] if whole else [*self._writers.get(storage, [])[-64:], by]
        if whole and isinstance(kind, int):
            self._kinds[storage] = kind
            return
        before = self._kinds.get(storage, 0)
        if isinstance(kind, int) and isinstance(before, int) and kind == before:
            return
        count = storage.nbytes() // tensor.itemsize
        if isinstance(before, int) or before.numel() != count:
            before = torch.full((count,), _union(before), dtype=torch.int32)
        if not self._fits(tensor, before):
            self._kinds[storage] = _union(before) | _union(kind)
            return
        view = before.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(kind, int):
            view.fill_(kind)
        else:
            view.copy_(kind)
        self._kinds[storage] = _simple(before)

    def _fits(self, tensor: Tensor, kind: Mixed) -> bool:
        if not tensor.numel():
            return True
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return bool(kind.numel() * tensor.itemsize == tensor.untyped_storage().nbytes() and last < kind.numel())

    def writers(self, tensor: Tensor) -> list[int]:
        """The steps that wrote a tensor."""
        return [*self._writers.get(tensor.untyped_storage(), [])]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """See OperationRecorder."""
        name = self.inside[-1]
        super().leave(module, args, output)
        if self.is_on and not in_backward():
            for leaf in tree_flatten(output)[0]:
                # A look would make all logits of ChunkedLoss.
                is_made = isinstance(leaf, Tensor) and not isinstance(leaf, Logits)
                for each in parts_of(leaf) if is_made else ():
                    with looking():
                        self.outputs[name] = (self.kind_of(each), next(iter(self.writers(each)[-1:]), -1))

    # Operations

    def typed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """See OperationRecorder."""
        differing = 0 if self.is_apart else self._differing()
        given, outs = _tensors((args, kwargs)), _tensors(result)
        if self.is_apart or (func.is_view and not _is_lifted(given, outs)):
            return
        with with_values():
            step = Step(func.name(), 0, self.inside[-1] if self.inside else "", "")
            for each in given:
                inside, shape = self.kind_of(each), bool(outs) and each.shape == outs[0].shape
                step.inputs += [(writer, inside, shape) for writer in self.writers(each) or [-1]]
            step.adds = step.stem in ("add", "sub", "rsub")
            step.passes = not differing and (torch.Tag.pointwise in func.tags or step.stem in _PASSING)
            self._number = len(self.steps)
            self.steps.append(step)
            if not self._sent(func, args, kwargs, result, step):
                self._computed(func, args, kwargs, result, part(differing) if differing else 0)
            if step.kind and not in_backward():
                step.line = _line()

    def _differing(self) -> int:
        """The axes along which the last operation has other numbers, shapes, offsets or random numbers, as bits."""
        at, found = len(self.record) - 1, 0
        name, own_sum = self.record[at]
        for i, other in self._others.items():
            theirs = other[at] if at < len(other) else ("", 0)
            if theirs is not None and name != theirs[0]:
                self.is_apart = True
            found |= (theirs is None or own_sum != theirs[1]) << i
        return found

    def end(self) -> None:
        """Say that the update has ended."""
        self.is_on = False
        self.is_apart |= any(len(other) > len(self.record) for other in self._others.values())

    def _computed(self, func: Any, args: Any, kwargs: Any, result: Any, extra: int) -> None:
        changed = changed_by(func, args, kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        if lists := _lists_of(name, args, kwargs):
            shared = [each for each in args if isinstance(each, Tensor)] + _tensors(kwargs)
            count = len(lists[0])
            for i in range(count):
                own_args = (*(each[i] for each in lists if len(each) == count), *shared)
                results = [result[i]] if isinstance(result, (tuple, list)) and len(result) == count else []
                kind = self._scaled(name, args, _either(self.kind_of(one) for one in own_args), own_args) | extra
                written = [one for one in changed if any(one is each[i] for each in lists if len(each) == count)]
                if name.startswith("_foreach_copy"):
                    kind = self.kind_of(lists[1][i]) | extra
                elif name.startswith("_foreach_zero"):
                    kind = 0
                for one in (*written, *results):
                    self._set(one, kind)
            return
        storages = {id(each.untyped_storage()) for each in changed}
        outs = [*changed, *(each for each in _tensors(result) if id(each.untyped_storage()) not in storages)]
        out_only = "out" in kwargs
        given = _tensors(args) if out_only else _tensors((args, kwargs))
        if name.endswith(("s_like", "full_like", "empty_like", "rand_like", "randn_like")) or name.startswith("new_"):
            given = []  # only its shape matters
        if name in ("fill_", "zero_", "zero") or name.startswith(("uniform", "normal_", "random_")):
            given = list(_tensors(args)[1:])
        if name == "copy_":
            given = given[1:2]
        if name in _MOVING and self._moved(func, args, kwargs, result, outs, extra):
            return
        kinds = [self.read(each) for each in given]
        self._note_terms(given, kinds)
        if all(isinstance(kind, int) for kind in kinds):
            found: Kind = _either(kinds)  # type: ignore[arg-type]
        elif (torch.Tag.pointwise in func.tags or name == "copy_") and len(outs) == 1:
            found = functools.reduce(
                torch.bitwise_or, [_spread(kind, one, outs[0].shape) for kind, one in zip(kinds, given, strict=True)]
            )
        else:
            found = _either(map(_union, kinds))
        found = self._scaled(name, args, found, given)
        for each in outs:
            value = found if isinstance(found, int) or found.shape == each.shape else _union(found)
            if each.dtype == torch.bool:  # of a comparison, as with zero
                value = value & ~(_ALL << _TIMES)
            self._set(each, value | extra)

    def _set(self, tensor: Tensor, kind: Kind) -> None:
        self.write(tensor, kind, self._number)
        self.steps[self._number].kind |= _union(kind)

    def _moved(self, func: Any, args: Any, kwargs: Any, result: Any, outs: list[Tensor], extra: int) -> bool:
        """Let elements keep their types where an operation moves them; False if they are not mixed."""
        given = _tensors(args)
        kinds = [self.read(each) for each in given]
        if all(isinstance(kind, int) for kind in kinds) and len({*kinds}) <= 1:
            return False
        name = func.name().partition("::")[2].partition(".")[0]
        filled = iter([kind if not isinstance(kind, int) else torch.full(one.shape, kind, dtype=torch.int32)
                       for kind, one in zip(kinds, given, strict=True)])  # fmt: skip
        moved = _replaced(args, filled)
        options = arguments_of(func, args, kwargs)
        if name in ("clone", "_to_copy", "wait_tensor"):
            found: Any = moved[0]
        elif "chunk_cat" in name:
            found = _chunk_cat(moved[0], options["dim"], options["num_chunks"])
        elif name == "split_with_sizes_copy":
            sizes: Any = options.get("split_sizes", options.get("all_gather_input_split_sizes"))
            found = list(torch.split(moved[0], sizes, options["dim"]))
        else:
            found = _MOVES[name](*moved, **{key: v for key, v in kwargs.items() if key not in ("out", "memory_format")})
        for one, kind in zip(outs, found if isinstance(found, (list, tuple)) else [found], strict=True):
            self._set(one, _simple(kind.reshape(one.shape)) | extra)
        return True

    def _scaled(self, name: str, args: Any, kind: Any, given: Sequence[Tensor]) -> Any:
        """Forget that a sum was too large where it is divided by as much, or by such another sum."""
        stem = name.removeprefix("_foreach_").rstrip("_")
        if stem not in ("mul", "div"):
            return kind
        for number in (each for each in args if isinstance(each, (int, float)) and not isinstance(each, bool)):
            for size, axes in self._factors:
                if math.isclose(number, size if stem == "div" else 1.0 / size):
                    self.steps[self._number].share |= axes
                    kind = kind & ~(axes << _TIMES)
        if stem == "div" and len(given) == 2:
            both = times(self.kind_of(given[0])) & times(self.kind_of(given[1]))
            kind = kind & ~(both << _TIMES)
        return kind

    # Terms of sums

    def _note_terms(self, given: Sequence[Tensor], kinds: Sequence[Kind]) -> None:
        """Note the axes along which an operation adds what all processes have to terms, see Step."""
        step = self.steps[self._number]
        shares = [_either(self.steps[at].share for at in self.writers(each)[-1:]) for each in given]
        if step.stem in _COPYING:
            step.share = _either(shares)
        parts = [parted(kind) & ~owned(kind) for kind in map(_union, kinds)]
        alike = [_alike(kind) for kind in map(_union, kinds)]
        if step.adds and len(kinds) == 2:
            step.joins = parts[0] & alike[1] & ~shares[1] | parts[1] & alike[0] & ~shares[0]
        elif step.stem in _WITH_BIAS and len(kinds) == 3:
            bias = _WITH_BIAS[step.stem]
            step.joins = alike[bias] & ~shares[bias] & parts[bias - 1] & parts[bias - 2]
        elif step.stem in _ADDING_UP and not isinstance(kinds[0], int):
            each = torch.unique(kinds[0]).tolist()
            step.joins = _either(parted(kind) & ~owned(kind) for kind in each) & _either(map(_alike, each))

    def _look_at_terms(self, tensor: Tensor, axis: int) -> bool:
        """Whether terms, which are about to be added up over an axis, hold what all have, as a bias that each has added.

        What was done to them since the product that made them is looked at.
        """
        joins, seen = False, set[int]()
        writers = self.writers(tensor)
        open_ = [(at, -1) for at in writers] if len(writers) == 1 else []  # of several, each has made some elements
        while open_:
            at, bent = open_.pop()
            if at < 0 or at in seen:
                continue
            seen.add(at)
            step = self.steps[at]
            joins |= bool(step.joins & axis)
            before = [i for i, kind, _ in step.inputs if parted(kind) & axis]
            if step.stem in _BENDING or (step.passes and (step.adds or len(before) == 1)):
                open_ += [(i, at if step.stem in _BENDING else bent) for i in before]
            elif bent >= 0 and step.stem in _PRODUCTS and len(before) > 1:
                self.late[bent] = self.late.get(bent, 0) | axis
        return joins

    # Collectives

    def _sent(self, func: Any, args: Any, kwargs: Any, result: Any, step: Step) -> bool:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace == "fsdp" and name == "all_gather_copy_in":
            inputs, output, _sizes, count, index = args
            own_part = output.narrow(0, count * index, count)
            kinds = [_flat(self.read(each), each.numel()) for each in inputs]
            if kinds:
                self._set(own_part, _simple(torch.cat(kinds)))
            return True
        found = collective_of(func, args, kwargs, result)
        if found is None:  # of those that wait, the result is another tensor without values
            return func.namespace in ("c10d", "_c10d_functional") and step.stem != "wait_tensor"
        kind, group, _, _other = found
        axes, _, index, _ = self._group(group)
        sources, targets = _sent_and_received(kind, arguments_of(func, args, kwargs), result)
        if kind == "send":
            step.kind = _either(map(self.kind_of, sources))
            return True
        if kind == "receive":
            for each in targets:
                self._set(each, self.received)
            return True
        for each in sources:
            for writer in self.writers(each):
                if kind in ("all_reduce", "reduce_scatter", "reduce"):
                    self.summed[writer] = self.summed.get(writer, 0) | axes
        op = _operation(arguments_of(func, args, kwargs)) if "reduce" in kind else ""
        if kind in ("all_gather", "all_reduce", "reduce", "reduce_scatter", "broadcast") and len(targets) >= len(
            sources
        ):
            copies = len(targets) // max(len(sources), 1)
            for i, target in enumerate(targets):
                self._set(target, self._after(kind, op, sources[i // copies], group, step, target, index))
            return True
        whole = _either(map(self.kind_of, sources or targets))
        if kind == "reduce_scatter":  # of lists
            count = len(sources) // len(targets)
            for i, target in enumerate(targets):
                self._set(target, self._after(kind, op, sources[i * count + index], group, step, target, 0))
            return True
        for target in targets:
            self._set(target, self._exchanged(whole, axes) if kind == "all_to_all" else whole | part(axes))
        return True

    def _after(self, kind: str, op: str, source: Tensor, group: Any, step: Step, target: Tensor, index: int) -> Kind:
        before, (axes, size, _, over) = self.read(source), self._group(group)
        if kind == "reduce_scatter" and not isinstance(before, int):
            flat = before.reshape(-1)
            if flat.numel() > target.numel():
                flat = flat[index * target.numel() : (index + 1) * target.numel()]
            before = _simple(flat.reshape(target.shape))
        cleared = before & ~(axes << _OWN | axes << _PART)
        if op == "sum":
            for bit in (1 << i for i in self.axes.each(over)):
                same = _where(before, functools.partial(_depends_equally, bit))
                if not _any(same) and not owned(_union(before)) & bit and self._look_at_terms(source, bit):
                    same = 1
                if _any(same):
                    step.sums_same |= bit
                    cleared = cleared | (same * (bit << _TIMES))
            if step.sums_same:
                self._factors.append((float(size), over))
        if kind in ("reduce", "reduce_scatter"):
            return cleared | part(axes)
        if kind == "all_gather" and not isinstance(cleared, int):
            return _simple(
                cleared.reshape(-1).repeat(max(1, target.numel() // max(1, cleared.numel()))).reshape(target.shape)
            )
        return cleared if isinstance(cleared, int) or cleared.shape == target.shape else _union(cleared)

    def _exchanged(self, kind: int, axes: int) -> int:
        """What was own data becomes a part of that of all, and comes back as own data."""
        if not depends(kind):
            return kind
        before = owned(kind) & axes, parted(kind) & axes
        rest = kind & ~(axes << _OWN | axes << _PART)
        return (
            rest
            | own(before[1] & self.data)
            | part(before[0] | before[1] & ~self.data | axes & ~(before[0] | before[1]))
        )

    def _group(self, group: Any) -> tuple[int, int, int, int]:
        """The whole axes of a process group, its size, this rank's index in it, and the axes that it has some processes of."""
        if group not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            found = self.axes.along(ranks), len(ranks), ranks.index(self.rank), self.axes.along(ranks, whole=False)
            self._groups[group] = found
        return self._groups[group]

    # Why

    def chain(self, start: Iterable[int], axes: Callable[[int], int]) -> list[int]:
        """The steps that led to those of ``start`` and whose types have one of the axes, in their order."""
        found, open_ = set[int](), [i for i in start if i >= 0]
        while open_:
            at = open_.pop()
            if at in found or not axes(self.steps[at].kind):
                continue
            found.add(at)
            open_ += [i for i, kind, _ in self.steps[at].inputs if i >= 0 and i < at and axes(kind)]
        return sorted(found)

    def where(self, step: int) -> str:
        """Module and line of a step."""
        found = self.steps[step]
        named = found.module or found.name
        return f"{named} ({found.line})" if found.line else named


# Small parts


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Context of operations on types, which no mode sees."""
    with apart(), with_values():
        yield


_COPYING = ("clone", "_to_copy", "copy", "wait_tensor")
_PASSING = (*_COPYING, "_unsafe_view", "native_dropout")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "convolution")
_WITH_BIAS = {"addmm": 0, "baddbmm": 0, "linear": 2, "convolution": 2}
"""Products that add a bias, and which argument it is."""
_ADDING_UP = ("sum", "linalg_vector_norm")
_BENDING = (
    *("relu", "gelu", "silu", "sigmoid", "tanh", "exp", "elu", "leaky_relu", "softplus", "mish", "hardswish"),
    *("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm"),
)
"""Operations of which a sum of results is not the result of the sum."""
_MOVES: dict[str, Callable[..., Any]] = {
    "cat": torch.cat,
    "stack": torch.stack,
    "repeat": lambda tensor, sizes: tensor.repeat(sizes),
    "constant_pad_nd": lambda tensor, pad, value=0: torch.constant_pad_nd(tensor, pad, 0),
    "flip": torch.flip,
    "roll": torch.roll,
}
_MOVING = {
    *_MOVES,
    "clone",
    "_to_copy",
    "wait_tensor",
    "_chunk_cat",
    "chunk_cat",
    "chunk_cat_mixed_dtype",
    "split_with_sizes_copy",
}


def _chunk_cat(tensors: Sequence[Tensor], dim: int, chunks: int) -> Tensor:
    rows = []
    for tensor in tensors:
        size = -(-tensor.shape[dim] // chunks) * chunks
        pad = [0, 0] * (tensor.ndim - dim - 1) + [0, size - tensor.shape[dim]]
        padded = torch.constant_pad_nd(tensor, pad, 0)
        rows.append(padded.reshape(*tensor.shape[:dim], chunks, -1))
    return torch.cat(rows, dim=dim + 1)


def _replaced(value: Any, by: Any) -> Any:
    if isinstance(value, Tensor):
        return next(by)
    return type(value)(_replaced(each, by) for each in value) if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _union(kind: Kind) -> int:
    if isinstance(kind, int):
        return kind
    return _either(torch.unique(kind).tolist())


def _either(kinds: Iterable[int]) -> int:
    return functools.reduce(lambda one, other: one | other, kinds, 0)


def _simple(kind: Mixed) -> Kind:
    """A number where all elements have the same type."""
    if not kind.numel():
        return 0
    low, high = torch.aminmax(kind)
    return int(low) if int(low) == int(high) else kind


def _spread(kind: Kind, tensor: Tensor, shape: torch.Size) -> Mixed:
    if isinstance(kind, int):
        return torch.tensor(kind, dtype=torch.int32).expand(shape)
    try:
        return kind.expand(shape)
    except RuntimeError:
        return torch.tensor(_union(kind), dtype=torch.int32).expand(shape)


def _flat(kind: Kind, count: int) -> Mixed:
    """The type of each of so many elements."""
    return torch.full((count,), kind, dtype=torch.int32) if isinstance(kind, int) else kind.reshape(-1)


def _depends_equally(bit: int, kind: int) -> bool:
    """Whether elements of this type depend on weights, and are the same along this axis."""
    return depends(kind) and not (owned(kind) | parted(kind)) & bit


def _where(kind: Kind, holds: Callable[[int], bool]) -> Any:
    """1 for elements whose type is so, 0 for others."""
    if isinstance(kind, int):
        return int(holds(kind))
    found = torch.zeros_like(kind)
    for each in torch.unique(kind).tolist():
        if holds(each):
            found |= (kind == each).int()
    return found


def _alike(kind: int) -> int:
    """The axes along which something of this type is the same on all processes, and no constant."""
    return _ALL & ~(owned(kind) | parted(kind)) if depends(kind) else 0


def _is_lifted(given: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    """Whether a view is of memory of its own: that of a tensor with values, which a rehearsal takes from here on."""
    known = {id(each.untyped_storage()) for each in given}
    return any(id(each.untyped_storage()) not in known for each in outs)


def _any(found: Any) -> bool:
    return bool(found.any()) if isinstance(found, Tensor) else bool(found)


def _lists_of(name: str, args: Any, kwargs: Any) -> list[list[Tensor]]:
    """The lists of tensors of an operation that computes one result of each place in them."""
    if not name.startswith(("_foreach_", "_fused_")):
        return []
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple)) and each]
    return [list(each) for each in lists if isinstance(each[0], Tensor)]


def _sent_and_received(kind: str, given: Mapping[str, Any], result: Any) -> tuple[list[Tensor], list[Tensor]]:
    def first(*names: str) -> list[Tensor]:
        return next((_tensors(given[name]) for name in names if given.get(name) is not None), [])

    targets = first("output_tensors", "output_lists", "output_tensor", "outputs", "output", "out")
    sources = first("input_tensors", "input_list", "input_tensor", "inputs", "input", "tensors")
    return sources, targets or (first("tensors") if "tensors" in given else _tensors(result))


def _operation(given: Mapping[str, Any]) -> str:
    """The kind of reduction; "sum" also with a factor."""
    op = given.get("reduce_op", "sum")
    if isinstance(op, str):
        return op.lower()
    unboxed: Any = dist.ReduceOp.unbox(op)
    for name in ("SUM", "AVG", "MAX", "MIN", "PREMUL_SUM"):
        if unboxed == getattr(dist.ReduceOp, name):
            return "sum" if name == "PREMUL_SUM" else name.lower()
    return "other"


def _line() -> str:
    """File and line of the innermost code outside of torch and the library; else of the library."""
    frame, inner = sys._getframe(1), ""
    while frame is not None:
        whose = _whose(frame.f_code.co_filename)
        if whose == "runner":
            break
        if whose != "torch":
            line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if whose == "user":
                return line
            inner = inner or line
        frame = frame.f_back  # type: ignore[assignment]
    return inner


@functools.cache
def _whose(path: str) -> str:
    """Whose a source file is: "torch" (or Python's, or this analysis), "library", "runner" (which calls the model), "user"."""
    if path.startswith("<") or Path(path).is_relative_to(Path(torch.__file__).parent):
        return "torch"
    if Path(path).parent == Path(__file__).parent or path in (functools.__file__, contextlib.__file__, ledger.__file__):
        return "torch"
    if path in (update.__file__, runner_step.__file__):
        return "runner"
    return "library" if any(Path(path).is_relative_to(home) for home in _library()) else "user"


@functools.cache
def _library() -> list[Path]:
    names = ("core", "optim", "strategies", "runner")
    package = __name__.partition(".")[0]
    return [Path(sys.modules[f"{package}.{name}"].__path__[0]) for name in names if f"{package}.{name}" in sys.modules]
