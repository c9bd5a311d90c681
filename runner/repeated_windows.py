"""Replay: runs forward and backward of a window twice from one state, and finds what differs in a bit, and on which rank."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.base.errors import StrategyError, counted
from ..core.base.snapshot import Snapshot
from ..core.base.tensors import of_bits, of_bytes, parts_of
from ..core.base.trees import tensors_in
from ..core.comm.agreement import all_same
from ..core.comm.collectives import all_gather_object, side_group
from ..core.device.device import synchronize
from ..core.model.module_state import buffers_of
from ..core.random.generators import load_rng_state, rng_state
from ..core.torch_compat.torch_private import is_compiled, version_of, without_function_modes
from ..optim.wrapper import OptimWrapper, StepInfo
from .loops.step import RunWindow as RunWindow
from .loops.step import Stepper, UpdateLeftOut

_Restore = Callable[[], None]
_What = tuple[int, str]
"""A kind, and a name."""

# What is compared, in the order in which a fault reaches it. Where a window makes updates itself, each has its gradients.
_FORWARD, _BACKWARD, _VALUE, _GRADIENT, _WEIGHT, _BUFFER, _STATE = range(7)
_SAID = (
    "the output of {} in forward",
    "the gradient of the output of {}",
    "the value {}",
    "the gradient of {}",
    "the weight {}",
    "the buffer {}",
    "the optimizer's state of {}",
)
_FACTOR = 16
"""What does not repeat may differ by so many times what was measured."""
_MOST = 0.05
"""Relative difference above which it is not the order of a sum in which two runs differ."""
_MOST_PAIRS = 12
_SHOWN = 8


class _Key(NamedTuple):
    kind: int
    name: str
    number: int
    """How many of this kind and name came before."""

    @property
    def what(self) -> _What:
        return self.kind, self.name


def words(kind: int, name: str) -> str:
    """What a tensor is: ``the gradient of net.0.weight``."""
    return _SAID[kind].format(name or "the model")


class Mismatch(NamedTuple):
    """What differed when a window was run again.

    Attributes:
        ranks: those on which it began, as far as they tell.
        what: the first tensor that differs there, in words.
        more: how many others differ there.
        may_be_sent: whether a collective may have brought it to these ranks from another one.
        stays: whether it is in a weight, which only an earlier checkpoint has as it was.
    """

    ranks: tuple[int, ...]
    what: str
    more: int
    may_be_sent: bool
    stays: bool

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:_SHOWN])) + (", ..." if len(self.ranks) > _SHOWN else "")
        more = f" (and {counted(self.more, 'tensor')} more)" if self.more else ""
        sent = ", which a collective may have brought from another rank" if self.may_be_sent else ""
        how = "has changed by itself" if self.stays else "has other bits when forward and backward are run again"
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks}: {self.what}{more} {how}{sent}"


# Traces: hashes of what a window computes.


class _Trace:
    """Hashes of tensors, in the order in which they come; those of a device are read together at the end.

    Args:
        kept: of what values are kept too.
    """

    def __init__(self, kept: Mapping[_What, float]) -> None:
        self.values: dict[_Key, Tensor] = {}
        self._kept = kept
        self._count = Counter[_What]()
        self._hashes: dict[_Key, int] = {}
        self._on_device: dict[torch.device, dict[_Key, Tensor]] = {}

    def note(self, kind: int, name: str, value: Tensor) -> None:
        """Take the hash of a tensor as it is now; of a sharded one that of this process's shard."""
        with torch.no_grad(), without_function_modes():
            for tensor in _in_memory(value):
                key = _Key(kind, name, self._count[kind, name])
                self._count[key.what] += 1
                if key.what in self._kept and kind > _BACKWARD:
                    self.values[key] = tensor.detach().clone()
                if tensor.device.type == "cpu":
                    self._hashes[key] = of_bytes(tensor)
                else:
                    self._hashes[key] = 0  # for its place in the order
                    self._on_device.setdefault(tensor.device, {})[key] = of_bits(tensor)

    def hashes(self) -> dict[_Key, int]:
        """Return the hashes; the host waits for the device."""
        for device, pending in self._on_device.items():
            synchronize(device)  # backward runs on the streams of forward
            self._hashes.update(zip(pending, torch.stack(list(pending.values())).cpu().tolist(), strict=True))
        self._on_device.clear()
        return self._hashes


def _in_memory(value: Tensor) -> Iterator[Tensor]:
    """The ordinary tensors in which this process holds a tensor of any kind."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if hasattr(value, "trigger_wait"):  # the result of a collective that is under way
        value = value.clone()
    for part in parts_of(value):
        if part.layout is torch.strided:
            yield part
        elif part.layout is torch.sparse_coo:
            whole = part.coalesce()
            yield from (whole.indices(), whole.values())


@contextmanager
def _watching(module: nn.Module, trace: _Trace) -> Iterator[None]:
    """Context in which outputs of modules, and the gradients of these, go into the trace."""
    from ..core.model.logits import Logits  # here, because few runs need it

    last: list[Any] = [lambda: None, 0]  # the output of a container is that of its last module

    def watch(name: str) -> Any:
        def look(_: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                # A look would make all logits of ChunkedLoss; the loss says what they are.
                if isinstance(tensor, Logits):
                    continue
                if last[0]() is tensor and last[1] == version_of(tensor):
                    continue
                last[:] = ref(tensor), version_of(tensor)
                trace.note(_FORWARD, name, tensor)
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(lambda gradient: trace.note(_BACKWARD, name, gradient))  # type: ignore[no-untyped-call]

        return look

    parts = [(name, part) for name, part in module.named_modules() if not isinstance(part, torch.jit.ScriptModule)]
    handles = [part.register_forward_hook(watch(name)) for name, part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# The state before a window.


class _Before:
    """What a window may change, as it is now.

    Args:
        stepper: makes the updates.
        written: names of the parameters that forward writes to.
    """

    def __init__(self, stepper: Stepper, written: set[str]) -> None:
        assert stepper.optim is not None
        self._device = stepper.strategy.device
        self._random = rng_state(self._device)
        named = dict(stepper.strategy.parameters())
        changing = named if stepper.updates_itself else {name: named[name] for name in written}
        self._restore: list[_Restore] = [Snapshot([stepper.module]).restore, buffers_of(stepper.module)]
        self._restore += [_of_gradient(parameter) for parameter in named.values()]
        self._restore += [_of_values(parameter.detach()) for parameter in changing.values()]
        for wrapper in stepper.optim.wrappers.values():
            self._restore += _of_wrapper(wrapper, stepper.updates_itself)

    def restore(self) -> None:
        """Make all as it was, except random generators."""
        with torch.no_grad():
            for restore in self._restore:
                restore()

    def again(self) -> None:
        """Make all as it was."""
        self.restore()
        load_rng_state(self._random, self._device)


def _of_gradient(parameter: Tensor) -> _Restore:
    """A function that gives a parameter the gradient that it has now: mostly none."""
    gradient = parameter.grad
    put_back = None if gradient is None else _of_values(gradient.detach())

    def restore() -> None:
        parameter.grad = gradient
        if put_back is not None:
            put_back()

    return restore


def _of_values(tensor: Tensor) -> _Restore:
    """A function that gives a tensor the values that it has now, without a trace."""
    copy = tensor.clone()

    def restore() -> None:
        tensor.data.copy_(copy)

    return restore


def _of_wrapper(wrapper: OptimWrapper, updates: bool) -> Iterator[_Restore]:
    """Yield what restores a wrapper; with ``updates`` also its optimizer and the loss scale."""
    for one in (wrapper, wrapper.guard):
        if one is not None:
            yield _of_attributes(vars(one))
    if not updates:
        return
    values = wrapper.plain_values()
    yield lambda: wrapper.load_plain_values(values)
    optimizers = [wrapper.optimizer, *(one for one in vars(wrapper.optimizer).values() if isinstance(one, Optimizer))]
    for optimizer in optimizers:
        yield from _of_optimizer(optimizer)


def _of_attributes(held: dict[str, Any]) -> _Restore:
    before = {key: list(value) if isinstance(value, list) else value for key, value in held.items()}

    def restore() -> None:
        for key in held.keys() - before.keys():
            del held[key]
        for key, value in before.items():
            if isinstance(value, list) and isinstance(held.get(key), list):
                held[key][:] = value
            else:
                held[key] = value

    return restore


def _of_optimizer(optimizer: Optimizer) -> Iterator[_Restore]:
    numbers = {
        key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, int, float, type(None)))
    }
    yield lambda: vars(optimizer).update(numbers)
    for group in optimizer.param_groups:
        yield _of_entries(group)
    state = optimizer.state
    before = {parameter: (kept, _of_entries(kept)) for parameter, kept in state.items() if isinstance(kept, dict)}

    def restore() -> None:
        for parameter in list(state):
            if parameter not in before:
                del state[parameter]
        for parameter, (kept, put_back) in before.items():
            put_back()
            state[parameter] = kept

    yield restore


def _of_entries(held: dict[str, Any]) -> _Restore:
    """A function that restores a dict, and the values of the tensors in it."""
    before = dict(held)
    values = [
        _of_values(value.detach()) for key, value in held.items() if key != "params" for value in tensors_in(value)
    ]

    def restore() -> None:
        held.clear()
        held.update(before)
        for put_back in values:
            put_back()

    return restore


def _counts_of(module: nn.Module) -> dict[str, str]:
    """Where each ``itertools.count`` stands that modules hold, by name."""
    held = ((name, vars(part).items()) for name, part in module.named_modules())
    return {
        f"{name}.{key}".lstrip("."): repr(value)
        for name, items in held
        for key, value in items
        if type(value) is itertools.count
    }


# Replay.


class Replay:
    """Runs windows twice: ``Stepper.run_windows_by(replay)``.

    Before the second run everything is as it was before the first: random generators of the host and the device, gradients,
    buffers, attributes of modules that are values or generators, weights that forward writes to. Where a window makes its
    updates itself, as a model's own ``train_step`` does, also weights, optimizers and loss scales. The last run is the one that
    counts.

    Every process compares outputs of modules in forward and their gradients in backward (not of a compiled model), values to
    log, gradients, weights and buffers; of updates within a window also their gradients, and the optimizer's state.

    Args:
        stepper: makes the updates.
        trials: how many pairs of runs have to show nothing new before it is known what repeats bit by bit.

    Attributes:
        bounds: what does not repeat, on any process, with the largest relative difference that was measured; inf: it is
            not compared.
        compared: how many tensors of each kind this process has compared.
        finding: what the last window has shown; the same on every process.
        has_seen_one: whether a window was run before, once.
        is_tried: whether it is known what repeats.
    """

    def __init__(self, stepper: Stepper, trials: int) -> None:
        self.bounds: dict[_What, float] = {}
        self.compared = Counter[str]()
        self.finding: Mismatch | None = None
        self.is_tried = False
        self._stepper, self._trials = stepper, trials
        self._written: set[str] | None = None
        self._before: _Before | None = None

    def __call__(self, run_window: RunWindow, window: list[Any], step: Any) -> dict[str, Tensor]:
        """Run a window, and return what its last run gave.

        The first window is run once, to see which weights it writes to, and because engines settle in it. The second one is
        run until it is known what repeats. All others are run twice.

        Raises:
            StrategyError: on every process, if a window cannot be run twice, or nothing is compared.
        """
        self.finding = None
        if self._written is None:
            return self._look(run_window, window, step)
        self._before = before = _Before(self._stepper, self._written)
        weights = {} if self._stepper.updates_itself else self._weights()
        counts = {} if self.is_tried else _counts_of(self._stepper.module)
        pairs, quiet = 0, 0
        while True:
            _, first = self._run(run_window, [_copied(batch) for batch in window], step)
            before.again()
            second_window = window if self.is_tried else [_copied(batch) for batch in window]
            outputs, second = self._run(run_window, second_window, step)
            differing = _differing(first, second)
            hashes = first.hashes()
            moved = [key for key, value in weights.items() if key.name not in self._written and hashes[key] != value]
            differing += [key for key in moved if key not in differing]
            if self.is_tried:
                wrong = [key for key in differing if not self._is_tolerated(key, first, second)]
                self.finding = _agreed(wrong, moved, self._stepper.module)
                return outputs
            self._check_moved(moved)
            self._check_counts(counts)
            pairs, quiet = pairs + 1, quiet + 1
            if self._learn(differing, first, second):
                quiet = 0
            if quiet == self._trials or pairs == _MOST_PAIRS:
                self._note_compared(second)
                self.is_tried = True
                return outputs
            before.again()

    @property
    def has_seen_one(self) -> bool:
        return self._written is not None

    def restore(self) -> None:
        """Make everything as it was before the last window, except random generators."""
        assert self._before is not None
        self._before.restore()

    def leave_out(self, outputs: dict[str, Tensor]) -> NoReturn:
        """End the update without a change of weights, as when loss scaling skips it; after ``restore``.

        Args:
            outputs: the values to log.
        """
        assert self._stepper.optim is not None
        self._stepper.optim.zero_grad()
        for wrapper in self._stepper.optim.wrappers.values():
            wrapper.last_step = StepInfo(skipped=True)
        raise UpdateLeftOut(outputs)

    def forget(self) -> None:
        """Let go of copies."""
        self._before = None

    def _look(self, run_window: RunWindow, window: list[Any], step: Any) -> dict[str, Tensor]:
        if self._stepper.updates_itself:  # then all weights are put back
            self._written = set()
            return run_window(window, step)
        before = self._weights()
        outputs = run_window(window, step)
        self._written = {key.name for key, value in self._weights().items() if before[key] != value}
        return outputs

    def _weights(self) -> dict[_Key, int]:
        trace = _Trace({})
        for name, parameter in self._stepper.strategy.parameters():
            trace.note(_WEIGHT, name, parameter)
        return trace.hashes()

    def _run(self, run_window: RunWindow, window: list[Any], step: Any) -> tuple[dict[str, Tensor], _Trace]:
        stepper = self._stepper
        stepper.repetitions += 1
        trace, named = _Trace(self.bounds), dict(stepper.strategy.parameters())
        with ExitStack() as stack:
            if not (stepper.strategy.config.compile or is_compiled(stepper.module)):
                stack.enter_context(_watching(stepper.module, trace))
            if stepper.updates_itself:
                stack.enter_context(self._watching_updates(named, trace))
            outputs = run_window(window, step)
        for name, value in outputs.items():
            trace.note(_VALUE, name, value)
        _note_gradients(named, trace)
        for name, parameter in named.items():
            trace.note(_WEIGHT, name, parameter)
        for name, buffer in stepper.module.named_buffers():
            trace.note(_BUFFER, name, buffer)
        if stepper.updates_itself:
            self._note_state(named, trace)
        trace.hashes()
        return outputs, trace

    @contextmanager
    def _watching_updates(self, named: Mapping[str, Tensor], trace: _Trace) -> Iterator[None]:
        """Context in which the gradients of every update go into the trace."""
        names = {id(parameter): name for name, parameter in named.items()}
        handles: list[Callable[[], None]] = []
        assert self._stepper.optim is not None

        def note(wrapper: OptimWrapper) -> None:
            own = (parameter for group in wrapper.param_groups for parameter in group["params"])
            _note_gradients({names.get(id(parameter), "another parameter"): parameter for parameter in own}, trace)

        for wrapper in self._stepper.optim.wrappers.values():
            handles.append(wrapper.register_step_pre_hook(note))
        try:
            yield
        finally:
            for remove in handles:
                remove()

    def _note_state(self, named: Mapping[str, Tensor], trace: _Trace) -> None:
        assert self._stepper.optim is not None
        for wrapper in self._stepper.optim.wrappers.values():
            own = {id(parameter) for group in wrapper.param_groups for parameter in group["params"]}
            for name, parameter in named.items():
                for value in tensors_in(dict(wrapper.adapter.state_of(parameter))) if id(parameter) in own else ():
                    trace.note(_STATE, name, value)

    # What repeats

    def _check_moved(self, moved: Sequence[_Key]) -> None:
        """Raise StrategyError, on every process, if this window has written to other weights than the first; a collective."""
        if named := [key.name for own in _everyones(moved) for key in own]:
            raise StrategyError(
                f"ReplayHook: forward or backward has written to the weight {named[0]}, and did not in the update before; write to it in "
                "every update, keep it in a buffer, or leave the hook out"
            )

    def _check_counts(self, before: Mapping[str, str]) -> None:
        """Raise StrategyError, on every process, if this window has advanced what cannot be set back; a collective."""
        now = _counts_of(self._stepper.module)
        if named := [
            name for own in _everyones([name for name in before if now.get(name) != before[name]]) for name in own
        ]:
            raise StrategyError(
                f"ReplayHook: forward or backward has advanced {named[0]}, an itertools.count, which cannot be set back to run them again; "
                "count with an integer or a buffer, or leave the hook out"
            )

    def _is_tolerated(self, key: _Key, first: _Trace, second: _Trace) -> bool:
        if (measured := self.bounds.get(key.what)) is None:
            return False
        if key.kind <= _BACKWARD or math.isinf(measured):
            return True
        one, other = first.values.get(key), second.values.get(key)
        if one is None or other is None:
            return False
        return _relative(one, other) <= _FACTOR * max(measured, _epsilon(one.dtype))

    def _learn(self, differing: Sequence[_Key], first: _Trace, second: _Trace) -> bool:
        """Note what does not repeat, and by how much it differs; return whether anything is new; a collective.

        Raises:
            StrategyError: on every process, if it differs by more than the order of a sum can.
        """
        own: dict[_What, float] = {}
        for key in differing:
            one, other = first.values.get(key), second.values.get(key)
            measured = 0.0 if one is None or other is None else _relative(one, other)
            own[key.what] = max(own.get(key.what, 0.0), measured)
        is_new = False
        for rank, found in enumerate(_everyones(own)):
            for what, measured in found.items():
                is_new |= what not in self.bounds
                if what[0] == _VALUE and what[1] != "loss" and measured > _MOST:
                    measured = math.inf  # a time, perhaps
                elif measured > _MOST:
                    raise StrategyError(
                        f"ReplayHook: {words(*what)} differs by {measured:.0%} on rank {rank} when forward and backward are run "
                        "again: the model, or what it calls, keeps state where nothing puts it back, or a device is faulty; keep "
                        "it in buffers or attributes of modules, or leave the hook out"
                    )
                self.bounds[what] = max(self.bounds.get(what, 0.0), measured)
        return is_new

    def _note_compared(self, trace: _Trace) -> None:
        """Count what is compared; a collective.

        Raises:
            StrategyError: on every process, if no process has a gradient.
        """
        kinds = Counter(key.kind for key in trace.hashes() if not math.isinf(self.bounds.get(key.what, 0.0)))
        if not any(all_gather_object(kinds[_GRADIENT], side_group())) and not self._stepper.updates_itself:
            raise StrategyError("ReplayHook: no parameter has a gradient after backward, and nothing could be compared")
        names = ("output", "gradient of an output", "value", "gradient", "weight", "buffer", "optimizer state")
        self.compared = Counter({names[kind]: number for kind, number in sorted(kinds.items())})


def _copied(batch: Any) -> Any:
    """A batch for one run, which a preprocessor or the model may change in place, objects in it too."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if type(batch) in (tuple, list):
        return type(batch)(map(_copied, batch))
    if type(batch) is dict:
        return {key: _copied(value) for key, value in batch.items()}
    try:
        return copy.deepcopy(batch)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise StrategyError(
            f"ReplayHook: a batch has a {type(batch).__name__}, which cannot be copied, {error}; give tensors, or leave the hook out"
        ) from error


def _note_gradients(named: Mapping[str, Tensor], trace: _Trace) -> None:
    for name, parameter in named.items():
        if parameter.grad is not None:
            trace.note(_GRADIENT, name, parameter.grad)


def _differing(first: _Trace, second: _Trace) -> list[_Key]:
    """The keys whose hashes differ, in the order of the first trace; those that only the second has come last."""
    one, other = first.hashes(), second.hashes()
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def _relative(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors by their largest finite value; 0 where both are equal or NaN."""
    if one.shape != other.shape:
        return math.inf
    a, b = (torch.view_as_real(t.cpu()) if t.is_complex() else t.cpu() for t in (one, other))
    a, b = a.double(), b.double()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(math.inf, math.inf)
    if not apart.numel() or not (largest := float(apart.max())):
        return 0.0
    scale = float(torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0).max())
    return largest / scale if scale else math.inf


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _everyones(own: Any) -> list[Any]:
    """What every process has, by rank; nothing if no process has anything. A collective, of one number in the usual case."""
    if all_same(bool(own).to_bytes(8, "little"), side_group()) and not own:
        return []
    return all_gather_object(own, side_group())


def _agreed(wrong: Sequence[_Key], moved: Sequence[_Key], module: nn.Module) -> Mismatch | None:
    """What differs, and on which ranks it began; the same on every process; a collective."""
    own: tuple[Any, ...] | None = None
    if wrong:
        first = next((key for key in wrong if key in moved), wrong[0])  # what has changed by itself made all others
        order = (-1, 0) if first in moved else (first.kind, 0)
        if first.kind <= _BACKWARD:  # data pass through modules in about the order in which the model names them
            at = [name for name, _ in module.named_modules()].index(first.name)
            order = (first.kind, at if first.kind == _FORWARD else -at)
        own = (order, words(*first.what), len(wrong) - 1, first.kind, first in moved)
    found = {rank: one for rank, one in enumerate(_everyones(own)) if one is not None}
    if not found:
        return None
    earliest = min(order for order, *_ in found.values())
    ranks = tuple(rank for rank, one in found.items() if one[0] == earliest)
    _, what, more, kind, stays = found[ranks[0]]
    return Mismatch(ranks, what, more, kind in (_GRADIENT, _STATE) and len(found) > 1, stays)
