"""Deferred initialisation: record what a constructor does to the parameters, and replay it one parameter at a time.

A strategy that shards a model builds it in ``DeferredInit()``. Every parameter that is registered there becomes one on
the meta device, and every operation that initialises it is recorded on a tape, before it draws random numbers.
``replay`` runs the tape in the constructor's order on whole ordinary tensors, one of them at a time. The values
are equal, bit for bit, to those of an ordinary construction with the same RNG state, and no process ever holds the
whole model. Buffers are real from the start. An operation that draws at once, such as ``torch.randn`` for a parameter
before it is registered, must draw after the recorded ones; they run before it, and their results are discarded. What
draws from a generator of the user's runs at once too, and is recorded with that generator's state.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..base.errors import StrategyError
from ..base.initializers import READ_VALUES, initializing_with
from ..base.trees import tree_map_only
from ..comm import collectives as dist
from ..random.generators import drawing_apart, load_rng_state, rng_state
from ..torch_compat.torch_private import (
    TorchDispatchMode,
    copy_gradient_hooks,
    mark_of,
    marked,
    storage_key,
    tree_flatten,
)

# LaggingDraws: the state of torch's generator on the CPU while operations that draw from it are put off.


Draw = Callable[[], Any]
"""Draws what an operation that was put off draws, and drops it."""


@dataclass
class _Series:
    """Operations that draw one after the other, and the state before the first."""

    start: Tensor
    draws: list[Draw] = field(default_factory=list)


class LaggingDraws:
    """Knows from which state each series of operations draws that was put off.

    While a series is open, the generator has a mark in place of its state. So it is seen when a constructor seeds the
    generator, or sets its state, also to one that it has read before.

    Args:
        end: called with the state before the first operation of a series when the generator goes on from another state.
    """

    def __init__(self, end: Callable[[Tensor], None]) -> None:
        self._end = end
        self._series: _Series | None = None
        self._marks: list[tuple[_Series, int]] = []

    @property
    def start(self) -> Tensor | None:
        """The state before the first operation of the open series."""
        return None if self._series is None else self._series.start

    def forget(self) -> None:
        """Begin a new series with the next operation, from the state that the generator has then."""
        self._series = None

    def put_off(self, draw: Draw) -> None:
        """Note an operation that draws and is put off."""
        self.follow()
        if self._series is None:
            self._series = _Series(torch.get_rng_state())
        self._series.draws.append(draw)
        self._marks.append((self._series, len(self._series.draws)))
        self._mark()

    def catch_up(self) -> None:
        """Advance the generator as if nothing had been put off."""
        self.follow()
        if (series := self._series) is not None:
            self._go_on(self._after(series, len(series.draws)))

    def follow(self) -> None:
        """Take note if the generator was given another state."""
        state = torch.get_rng_state()
        number = mark_of(state)
        if number is None:
            if self._series is not None:
                self._go_on(state)
        elif self._series is None or number != len(self._marks) - 1:
            self._go_on(self.meant_by(state))

    def meant_by(self, state: Tensor) -> Tensor:
        """Return a state, computed if it is a mark.

        Raises:
            StrategyError: it is the mark of another model.
        """
        if (number := mark_of(state)) is None:
            return state
        if number >= len(self._marks):
            raise StrategyError(
                "model: sets a state of torch's generator that the constructor of another model has read; give the model as "
                "an instance"
            )
        return self._after(*self._marks[number])

    def leave(self) -> None:
        """Give the generator the state before the open series, for code outside of the construction."""
        self.follow()
        if self._series is not None:
            torch.set_rng_state(self._series.start)

    def enter(self) -> None:
        """Begin again after ``leave``."""
        if self._series is not None:
            if torch.equal(torch.get_rng_state(), self._series.start):
                self._mark()
            else:
                self._go_on(torch.get_rng_state())

    def _mark(self) -> None:
        assert self._series is not None
        torch.set_rng_state(marked(self._series.start, len(self._marks) - 1))

    def _go_on(self, state: Tensor) -> None:
        if self._series is not None:
            self._end(self._series.start)
        self._series = None
        torch.set_rng_state(state)

    def _after(self, series: _Series, count: int) -> Tensor:
        """The state after some operations of a series; the generator is left anywhere."""
        torch.set_rng_state(series.start)
        for draw in series.draws[:count]:
            draw()
        return torch.get_rng_state()


@dataclass(frozen=True)
class Destination:
    """Functions that read and write the values of a parameter.

    Attributes:
        like: the parameter on the meta device, as the context left it.
        read: returns the whole tensor.
        write: takes the whole tensor, on the CPU.
        is_kept: what was written can be read.
    """

    like: Tensor
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]
    is_kept: bool = True

    @classmethod
    def elsewhere(cls, like: Tensor) -> Destination:
        """Return that of a parameter which only other processes hold: its values are made and dropped."""
        return cls(like, lambda: torch.zeros(like.shape, dtype=like.dtype), lambda whole: None, is_kept=False)


class LooksAtValues(BaseException):
    """A constructor needs the values of parameters that have none; not an Exception, which it could take for an answer."""


class _Looking(TorchFunctionMode):
    """Raises LooksAtValues where a function fails that was given a tensor without values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if any(map(_is_meta, tree_flatten((args, kwargs))[0])):
                raise LooksAtValues(f"{getattr(func, '__name__', func)}: {' '.join(str(error).split())}") from error
            raise


class DeferredInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that builds or initialises a module without memory for its parameters; it may be entered again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._drawn = 0  # index in the tape: the random numbers of earlier entries have a state of their own
        self._lag = LaggingDraws(self._begin_from)
        self._is_drawing = False  # an operation that was put off draws its numbers, to be dropped
        self._registered: list[Tensor] = []
        self._is_settled = False  # the tape itself says with which state of the generator it ends
        # Memory that is allocated and not written yet. The reference stays when the memory is freed, so that no other
        # memory gets the same key.
        self._fresh: dict[int, StorageWeakRef] = {}
        self._register: Any = None
        self._replacing: AbstractContextManager[None] | None = None
        self._looking = _Looking()
        self._generators: dict[torch.Generator, Tensor] = {}  # that were drawn from, with their states before
        self.tells_looks = False
        """Whether who entered this context handles LooksAtValues; otherwise it becomes a StrategyError."""

    def __enter__(self) -> DeferredInit:
        self._register = nn.Module.register_parameter
        nn.Module.register_parameter = self._registering(self._register)  # type: ignore[method-assign]
        self._replacing = initializing_with(self._putting_off)
        self._replacing.__enter__()
        self._lag.enter()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._looking.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._looking.__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        nn.Module.register_parameter = self._register  # type: ignore[method-assign]
        assert self._replacing is not None
        self._replacing.__exit__(None, None, None)
        self._lag.leave()
        if isinstance(found := exception[1], LooksAtValues) and not self.tells_looks:
            raise StrategyError(
                f"model: looks at values of parameters while it is built or changed without memory, {found}; give the model as an "
                "instance"
            ) from found

    def _putting_off(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def put_off(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not tensor.is_meta:
                return function(tensor, *args, **kwargs)
            self._record(function, (tensor.detach(), *args), kwargs, None)
            return tensor

        return put_off

    def _registering(self, register: Any) -> Any:
        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, param)
            if param is not None and param.is_meta:  # another package builds a module without memory, as torchao does
                self._registered.append(param.detach())
            # Lazy parameters stay unchanged: setup raises an error for them.
            if param is not None and not param.is_meta and not is_lazy(param):
                deferred = self._without_values(param)
                register(module, name, deferred)
                if storage_key(param) not in self._fresh:
                    self._tape.append((torch.ops.aten.copy_.default, (deferred.detach(), param.detach()), {}, None))

        return register_parameter

    def _without_values(self, parameter: nn.Parameter) -> nn.Parameter:
        empty = torch.empty_like(parameter, device="meta")
        deferred = type(parameter)(empty, requires_grad=parameter.requires_grad)
        deferred.__dict__.update(parameter.__dict__)
        copy_gradient_hooks(parameter, deferred)
        self._registered.append(deferred.detach())
        return deferred

    def take_values(self, model: nn.Module, *, keeps: bool) -> None:
        """Move the parameters of a model that has memory to the meta device; ``replay`` gives them rank 0's values.

        Args:
            keeps: whether this process keeps the values until then, which rank 0 has to do.
        """
        deferred: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                if parameter.is_meta or is_lazy(parameter):
                    continue
                if parameter not in deferred:
                    deferred[parameter] = self._without_values(parameter)
                    values = parameter.detach()
                    values = values if keeps else values.new_zeros(()).expand(values.shape)
                    self._tape.append((torch.ops.aten.copy_.default, (deferred[parameter].detach(), values), {}, None))
                module.register_parameter(name, deferred[parameter])

    def without_values(self, model: nn.Module) -> str | None:
        """Name of a buffer, or of an attribute that is no parameter, that was computed from values that there are not; or None."""
        parameters = {
            storage_key(parameter) for parameter in (*self._registered, *model.parameters()) if parameter.is_meta
        }
        for name, module in model.named_modules():
            buffers = {id(buffer) for buffer in module.buffers(recurse=False)}
            for key, value in (*module.named_buffers(recurse=False), *vars(module).items()):
                for tensor in filter(_is_meta, tree_flatten(value)[0]):
                    if id(tensor) in buffers or storage_key(tensor) not in parameters:
                        return f"{name}.{key}".lstrip(".")
        return None

    def set_generators_back(self) -> None:
        """Give the user's generators the states that they had before they were drawn from in this context."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_put_off = any(map(_is_meta, tree_flatten((args, kwargs))[0]))
        if not is_put_off and _draws(func) and not self._is_drawing and _generator_in(args, kwargs) is None:
            with self._drawing():
                self._lag.catch_up()
        if _draws(func) and (generator := _generator_in(args, kwargs)) is not None:
            self._generators.setdefault(generator, generator.get_state())
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if is_put_off:
                raise LooksAtValues(f"{func}: {' '.join(str(error).split())}") from error
            raise
        if is_put_off:
            # Views are not recorded: replay finds their memory by its storage key.
            if not func.is_view:
                self._record(func, args, kwargs, out)
        elif isinstance(out, Tensor) and not out.is_meta and not func.is_view:
            if func.overloadpacket in _ALLOCATE:
                self._fresh[storage_key(out)] = StorageWeakRef(out.untyped_storage())  # type: ignore[no-untyped-call]
            else:
                self._fresh.pop(storage_key(out), None)
        return out

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Put an operation on the tape, from which it runs with the random numbers that it would have drawn now."""
        args, kwargs, out = tree_map_only(Tensor, _as_it_is, (args, kwargs, out))
        if _draws(func):
            generator = _generator_in(args, kwargs)
            if generator is not None:
                self._generators.setdefault(generator, generator.get_state())
            with self._drawing():
                if generator is None:
                    self._lag.put_off(functools.partial(_draw, func, args, kwargs))
                elif generator.device.type == "cpu":
                    state = self._lag.meant_by(generator.get_state())
                    generator.set_state(state)
                    _draw(func, args, kwargs)
                    func, args = _FromState(func), (state.clone(), *args)
        self._tape.append((func, args, kwargs, out))

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False

    def _begin_from(self, state: Tensor) -> None:
        """Record the state with which the entries begin to draw that have none of their own; later ones have another."""
        self._tape.insert(self._drawn, _from_state(state))
        self._drawn = len(self._tape)

    @contextmanager
    def changing(self, state: Tensor, *, alone: bool = False) -> Iterator[None]:
        """Context like this one, for changes of a model that was built in it, which draw random numbers from ``state``.

        Here and in ``replay`` the generator goes on afterwards as if nothing had been drawn for them.

        Args:
            state: of torch's generator on the CPU.
            alone: forget what was recorded before, because something else will give its values.
        """
        own, kept = torch.get_rng_state(), list[Tensor]()
        if alone:
            self._tape, self._drawn = [], 0
        elif self._lag.start is not None and not torch.equal(own, self._lag.start):
            self._begin_from(self._lag.start)
        self._lag.forget()
        if not self._is_settled:
            self._tape.insert(self._drawn, _from_state(own))
        self._tape += [(lambda: kept.append(torch.get_rng_state()), (), {}, None), _from_state(state)]
        self._drawn = len(self._tape)
        with drawing_apart(state):
            with self:
                yield
            self._tape.insert(self._drawn, _from_state(torch.get_rng_state()))
            self._lag.forget()
        self._tape.append((lambda: torch.set_rng_state(kept.pop()), (), {}, None))
        self._drawn, self._is_settled = len(self._tape), True

    @property
    def recorded(self) -> dict[str, str]:
        """What was recorded, in words, by number."""
        return {
            f"operation {number} of its constructor": " ".join(
                [
                    getattr(func, "__name__", str(func)),
                    *(str(tuple(t.shape)) for t in filter(_is_meta, tree_flatten(args)[0])),
                ]
            )
            for number, (func, args, _, _) in enumerate(self._tape)
        }

    @property
    def touched(self) -> set[int]:
        """The ``storage_key`` of all memory that recorded operations use."""
        return {storage_key(t) for entry in self._tape for t in tree_flatten(entry[1:])[0] if _is_meta(t)}

    def replay(self, destinations: Mapping[int, Destination], *, without: Mapping[int, str] | None = None) -> set[int]:
        """Run the recorded operations; they draw from the random generators as the constructor would have.

        Args:
            destinations: one for each parameter, by the ``storage_key`` that it had in this context.
            without: names of the parameters that get their values later, by their ``storage_key``.

        Returns:
            The ``storage_key`` of all that gets its values later: of those parameters, and of their copies.

        Raises:
            StrategyError: an operation cannot be deferred.
        """
        replay = _Replay(destinations, {storage_key(parameter) for parameter in self._registered}, without or {})
        start, own, was_set = self._lag.start, torch.get_rng_state(), False
        if start is not None and not self._is_settled:
            start = _agreed(start)
            was_set = not torch.equal(start, own)  # since the construction
            self._tape.insert(self._drawn, _from_state(start))
        elif self._drawn and not self._is_settled:
            self._tape.insert(self._drawn, _from_state(own))
        tape, self._tape, self._drawn = self._tape, [], 0
        self._lag.forget()
        for func, args, kwargs, out in tape:
            replay.run(func, args, kwargs, out)
        replay.write_back()
        if was_set:
            torch.set_rng_state(own)
        return set(replay.without)


_ALLOCATE = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)

_OF_SHAPES = (
    *_ALLOCATE,
    torch.ops.aten.zeros_like,
    torch.ops.aten.ones_like,
    torch.ops.aten.full_like,
    torch.ops.aten.rand_like,
    torch.ops.aten.randn_like,
    torch.ops.aten.new_zeros,
    torch.ops.aten.new_ones,
    torch.ops.aten.new_full,
)
"""Operations whose result does not depend on the values of the tensor that they are given."""


def _draws(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return func in READ_VALUES.values() or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _generator_in(args: Any, kwargs: Any) -> torch.Generator | None:
    """The generator that an operation is given, if it is not torch's own on the CPU."""
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
    return next((generator for generator in given if generator is not torch.default_generator), None)


def _draw(func: Any, args: Any, kwargs: Any) -> None:
    """Draw the random numbers of an operation that is put off."""
    args, kwargs = tree_map_only(Tensor, _zeros, (args, kwargs))
    func(*args, **_on_cpu(kwargs))


class _FromState:
    """An operation that draws from a generator of the user's: it takes that generator's state as its first argument."""

    def __init__(self, func: Any) -> None:
        self._func, self.overloadpacket = func, getattr(func, "overloadpacket", None)

    def __str__(self) -> str:
        return str(self._func)

    def __call__(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        generator = torch.Generator()
        generator.set_state(state)
        args, kwargs = tree_map_only(torch.Generator, lambda _: generator, (args, kwargs))
        return self._func(*args, **kwargs)


def _from_state(state: Tensor) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """A tape entry that sets the RNG state of the CPU to ``state``."""
    return torch.set_rng_state, (state,), {}, None


def _zeros(like: Tensor) -> Tensor:
    """Zeros on the CPU with the strides of ``like``, because the number of draws depends on them."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_() if like.is_meta else like


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` with the meta device replaced by the CPU."""
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") == torch.device("meta") else kwargs


def _flat(tensor: Tensor) -> Tensor:
    """Memory on the CPU, 1-D, for the whole storage of a tensor on the meta device."""
    return torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype)


def _as_it_is(tensor: Tensor) -> Tensor:
    """Memory or values that stay: ``module.double()`` gives a parameter other memory, constructors change what they copied."""
    return tensor.detach() if tensor.is_meta else tensor.clone()


def _agreed(tensor: Tensor) -> Tensor:
    """Rank 0's values of a tensor that every process has made, possibly from its own random numbers."""
    if dist.is_alone() or tensor.numel() == 0:
        return tensor
    values = tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(values.view(-1).view(torch.uint8))  # as bytes, because back ends do not support every dtype
    return values


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


class _Replay:
    def __init__(
        self, destinations: Mapping[int, Destination], registered: set[int], without: Mapping[int, str]
    ) -> None:
        self._destinations = destinations
        self.without = dict(without)
        self._replaced = registered - destinations.keys()  # parameters that were replaced by others
        self._written: set[int] = set()
        self._held: dict[int, Tensor] = {}  # memory of the current parameters, 1-D
        self._others: dict[int, Tensor] = {}  # memory of intermediate results

    def run(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = {storage_key(value) for value in tree_flatten((args, kwargs))[0] if _is_meta(value)}
        if (absent := given & self.without.keys()) and func.overloadpacket not in _OF_SHAPES:
            self._pass_on(func, args, out, self.without[min(absent)])
            return
        lost = {key for key in given & self._written if not self._destinations[key].is_kept} - self._held.keys()
        if lost and len(given) > 1:
            raise StrategyError(
                f"model: its initialisation calls {func} with a parameter that another process has made; give the model as an "
                "instance"
            )
        if not self._held.keys() <= given:
            self.write_back()
        try:
            real_args, real_kwargs = tree_map_only(Tensor, self._real, (args, kwargs))
            result = func(*real_args, **_on_cpu(real_kwargs))
        except (RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise StrategyError(
                f"model: its initialisation calls {func}, which cannot be deferred, {reason}; give the model as an instance"
            ) from error
        for meta, real in zip(tree_flatten(out)[0], tree_flatten(result)[0], strict=False):
            if _is_meta(meta) and (key := storage_key(meta)) not in given:
                if key in self._destinations:  # a copy of a parameter became one
                    self._real(meta).copy_(real)
                else:
                    self._others[key] = _flat(meta)
                    self._real(meta).copy_(real)
        self._written |= self._held.keys()

    def _pass_on(self, func: Any, args: Any, out: Any, name: str) -> None:
        """Note that the result of an operation gets its values later, because it is a copy of what does.

        Raises:
            StrategyError: the operation computes with the values.
        """
        if func is torch.ops.aten.clone.default:
            self.without[storage_key(out)] = name
        elif func is torch.ops.aten.copy_.default:
            self.without[storage_key(args[0])] = name
        else:
            raise StrategyError(
                f"transforms: {func} needs the values of {name}, which strategy.skip_init_weights leaves to load_from; take "
                "the parameter over as it is, or leave skip_init_weights out"
            )

    def write_back(self) -> None:
        """Write the current parameters to their destinations, and release the memory."""
        for key, flat in self._held.items():
            like = self._destinations[key].like
            self._destinations[key].write(flat.as_strided(like.shape, like.stride()))
        self._held = {}

    def _real(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return _agreed(tensor)
        if storage_key(tensor) in self.without:
            return _zeros(tensor)
        return self._memory(tensor).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _memory(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        for known in (self._others, self._held):
            if key in known:
                return known[key]
        if key not in self._destinations and key not in self._replaced:
            raise StrategyError("model: its constructor computes with a tensor on the meta device that is no parameter")
        flat = _flat(tensor)
        if key not in self._destinations:
            self._others[key] = flat
            return flat
        destination = self._destinations[key]
        if key in self._written:
            flat.as_strided(destination.like.shape, destination.like.stride()).copy_(destination.read())
        self._held[key] = flat
        return flat


# Build a model with memory after all, where its constructor looks at values that a strategy builds it without.


_logger = logging.getLogger("flextrain")


def constructed(
    without: Callable[[], nn.Module], whole: Callable[[], nn.Module], device: torch.device, local_rank: int
) -> nn.Module:
    """Return the model that ``without`` builds, or if it raises LooksAtValues, that of ``whole``; a collective.

    For the latter the random generators of Python, NumPy, torch and the device are those of rank 0 before. The processes of a
    machine call it one after the other, so that it can free what another one needs.

    Args:
        without: builds without memory for all parameters.
        whole: builds with memory.
        local_rank: of this process on its machine.
    """
    state, looks, model = rng_state(device), "", None
    try:
        model = without()
    except LooksAtValues as found:
        looks = str(found)
    if not any(dist.all_gather_object(bool(looks))):
        assert model is not None
        return model
    del model
    _logger.warning(
        f"model: is built with memory, because it looks at values of its parameters while it is built ({looks}); the processes of "
        "a machine build it one after the other, and rank 0 keeps it whole until it is sharded"
    )
    first = dist.broadcast_object(state)
    load_rng_state(first, device)
    found_model = _in_turn(whole, local_rank)
    if state != first:
        load_rng_state(state, device)
    return found_model


def _in_turn(whole: Callable[[], nn.Module], local_rank: int) -> nn.Module:
    model, error = None, None
    for turn in range(max(dist.all_gather_object(local_rank)) + 1):
        if turn == local_rank:
            try:
                model = whole()
            except Exception as found:  # the others wait for this turn's end
                error = found
        if any(dist.all_gather_object(error is not None)):
            break
    if error is not None:
        raise error
    return whole() if model is None else model  # which fails too, since it has failed in another process
