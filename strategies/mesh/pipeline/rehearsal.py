"""Rehearsal: the forward of a whole model without memory, to see whether its layers can be computed by several processes."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....core.base.errors import FlexTrainError, StrategyError
from ....core.base.trees import tensors_in, tree_map_only
from ....core.random.generators import kept_random_state
from ....core.torch_compat.torch_private import (
    TorchDispatchMode,
    apart,
    arguments_of,
    changed_by,
    fake_mode_of,
    is_mutable,
    makes_views,
    storage_key,
    tree_flatten,
    version_of,
)
from .chain import Chain, stage_of, stages_of

# Following: tensors through a rehearsal, to see on which stages each of them is right.


# Operations whose results depend on no values of tensors, but on shapes only.
_OF_SHAPES = frozenset(f"{kind}_like" for kind in ("rand", "randn", "randint", "empty", "zeros", "ones")) | {
    "new_empty",
    "new_zeros",
    "new_ones",
}
# Operations that draw as many numbers as values of tensors say.
_BY_VALUES = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet"})
_RATES = ("dropout_p", "dropout")  # arguments of attention and of recurrent layers, which draw nothing if it is 0
_OVERWRITING = frozenset({"copy_", "fill_", "zero_"})  # what was there before does not matter


@dataclass
class Plan:
    """What a rehearsal has found out about calls with one kind of arguments.

    Attributes:
        draws: the forward draws random numbers.
        draws_inside: the layers do, or what comes after them.
        apart: names of the submodules that do so before the layers, and that not every stage has.
        draws_on_host: it draws from Python's or NumPy's generator, somewhere.
        forms: by layer, what stands for the rest of the tuple that it returns: NaN for numbers, else None. No entry: a tensor.
        changes: the layers that give another shape or dtype than they get.
        overwrites: the layers that change in place what they get.
    """

    draws: bool = False
    draws_inside: bool = False
    draws_on_host: bool = False
    apart: set[str] = field(default_factory=set)
    forms: dict[int, tuple[float | None, ...]] = field(default_factory=dict)
    changes: set[int] = field(default_factory=set)
    overwrites: set[int] = field(default_factory=set)


def chained(args: Any, kwargs: Any) -> Tensor:
    """Return the argument of a layer that the layer before has computed: its first."""
    found = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(found, Tensor):
        raise StrategyError(
            f"model: a layer of a pipeline is called with {type(found).__name__} first, it has to be the tensor that the layer "
            "before it returned"
        )
    return found


def note(tensor: Tensor, right: frozenset[int], origin: str) -> None:
    """Note on which stages a tensor is right, and what it was computed from."""
    tensor.__dict__["_pipeline"] = (right, origin)


def right_on(tensor: Tensor) -> frozenset[int] | None:
    """Return the stages on which a tensor is right; None if that was not noted, as of one from the batch alone: all."""
    found = tensor.__dict__.get("_pipeline")
    return None if found is None else found[0]


class Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors through a forward: on which stages they are right, and what they were computed from."""

    def __init__(self, chain: Chain, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = Plan()
        self._chain, self._spans = chain, spans
        self._next = 0
        self._inside: int | None = None
        self._last: Tensor | None = None
        self._version = 0  # of the input when its layer was called, then of the last one when it was returned
        self._written: dict[int, list[_Written]] = {}  # by memory
        self._input: Tensor | None = None
        self.path: list[nn.Module] = []
        """The modules under way, from the layer on."""
        self._parts: list[str] = []  # the submodules under way that the first or the last stage alone has
        self._host = _host_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known: list[tuple[frozenset[int], str]] = []
        name = func.overloadpacket.__name__
        if name not in _OF_SHAPES:
            known = [t.__dict__["_pipeline"] for t in tree_flatten((args, kwargs))[0] if _is_known(t)]
            known += self._read(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            drawn = self._has_drawn()
            if not drawn and name in _BY_VALUES:
                self._check_agreement(name, known)
            known += drawn
        out = func(*args, **kwargs)
        if known:
            found = self._combine(known, out)
            if is_mutable(func):
                self._write(changed_by(func, args, kwargs), *found)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any) -> list[tuple[frozenset[int], str]]:
        """Return what other tensors, such as rows of theirs, have written into the memory of the arguments."""
        if not self._written or makes_views(func):
            return []
        read = args[1:] if func.overloadpacket.__name__ in _OVERWRITING else args
        return [found for t in tree_flatten((read, kwargs))[0] if isinstance(t, Tensor) for found in self._found_in(t)]

    def _found_in(self, tensor: Tensor) -> Iterator[tuple[frozenset[int], str]]:
        if _has_memory(tensor):
            span = _bytes_of(tensor)
            for each in self._written.get(storage_key(tensor), ()):
                if each.span[0] < span[1] and span[0] < each.span[1]:
                    yield each.right, each.origin

    def _write(self, changed: Sequence[Tensor], right: frozenset[int], origin: str) -> None:
        for tensor in filter(_has_memory, changed):
            written = _Written(tensor, _bytes_of(tensor), right, origin)
            self._written.setdefault(storage_key(tensor), []).append(written)

    def _check_agreement(self, name: str, known: Sequence[tuple[frozenset[int], str]]) -> None:
        for right, origin in known:
            if len(right) < len(self._spans):
                raise StrategyError(
                    f"strategy.pp: {name.strip('_')} draws as many random numbers as {origin} says, which some stages lack, so that "
                    "stages would go on with different ones; draw before the layers from the batch only"
                )

    def _combine(self, known: Sequence[tuple[frozenset[int], str]], out: Any) -> tuple[frozenset[int], str]:
        """Note where the results of an operation are right, and what they were computed from; return both."""
        stage = len(self._spans) - 1 if self._inside is None else self._stage_of(self._inside)
        right, origin = known[0]
        for other, name in known[1:]:
            if stage in right and not right <= other:  # otherwise what that stage lacks is known already
                origin = name
            right = right & other
        if self._inside is not None and stage not in right:
            raise StrategyError(
                f"strategy.pp: {self._chain.layers[self._inside]} on stage {stage} needs what was computed from {origin}, which "
                "another stage has; only the tensor that layers hand on is sent"
            )
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                note(tensor, right, origin)
        return right, origin

    def pass_over(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand for a module whose operations cannot be followed: it depends on all of its arguments and parameters."""
        own = (*module.parameters(), *module.buffers())
        known = [t.__dict__["_pipeline"] for t in (*tree_flatten((args, kwargs))[0], *own) if _is_known(t)]
        out = torch.empty_like(chained(args, kwargs))
        if module.training:  # it may draw, such as the noise of routers
            known += self._has_drawn()
        if known:
            self._combine(known, out)
        return out

    def _has_drawn(self) -> list[tuple[frozenset[int], str]]:
        """Note that numbers were drawn; return where they are right, unless everywhere, and what they are."""
        self.plan.draws = True
        names, last = self._chain.layers, len(self._spans) - 1
        if self._inside is not None:
            stage, where = self._stage_of(self._inside), f"in {names[self._inside]}"
            self.plan.draws_inside = True
        elif self._next:
            stage = self._stage_of(self._next) if self._next < len(names) else last
            where = f"after {names[self._next - 1]}"
            self.plan.draws_inside = True
        elif self._parts:
            stage, where = 0 if self._parts[0] in self._chain.before else last, f"in {self._parts[0]}"
            self.plan.apart.add(self._parts[0])
        else:
            return []
        return [(frozenset({stage}), f"random numbers drawn {where}")]

    def _look_at_host(self) -> None:
        """Find what was drawn from Python's and NumPy's generators since the last time."""
        before, self._host = self._host, _host_state()
        if before != self._host:
            self.plan.draws_on_host = True
            self._has_drawn()

    def enter_part(self, name: str, module: nn.Module, args: Any) -> None:
        """A submodule is called that the first or the last stage alone has."""
        self._look_at_host()
        self._parts.append(name)

    def leave_part(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has returned."""
        self._look_at_host()
        self._parts.pop()

    def enter(self, number: int, args: Any, kwargs: Any) -> None:
        """A layer is called."""
        self._look_at_host()
        names = self._chain.layers
        if number != self._next or self._inside is not None:
            expected = f"{names[self._next]} comes next" if self._next < len(names) else "all layers had been called"
            raise StrategyError(
                f"strategy.pp: {names[number]} is called where {expected}; the layers of a pipeline are called once, in their order"
            )
        value = chained(args, kwargs)
        begins = number and self._stage_of(number) != self._stage_of(number - 1)
        if begins and (value is not self._last or version_of(value) != self._version):
            raise StrategyError(
                f"strategy.pp: {names[number]} is called with another tensor than {names[number - 1]} returned, and a stage begins "
                "with it; give pp_split so that it does not"
            )
        self._inside, self._input, self._version = number, value, version_of(value)

    def leave(self, number: int, output: Any) -> None:
        """A layer has returned."""
        self._look_at_host()
        value = output[0] if isinstance(output, tuple) and output else output
        name = self._chain.layers[number]
        if not isinstance(value, Tensor):
            raise StrategyError(
                f"strategy.pp: {name} returned {type(output).__name__}, a layer of a pipeline returns a tensor, or a tuple that "
                "begins with it"
            )
        stage = self._stage_of(number)
        assert self._input is not None
        if version_of(self._input) != self._version:
            self.plan.overwrites.add(number)
        self._inside, self._next, self._last, self._version = None, number + 1, value, version_of(value)
        if isinstance(output, tuple):
            # A number, such as a weight of a penalty, would be missing unnoticed.
            self.plan.forms[number] = tuple(math.nan if type(other) in (int, float) else None for other in output[1:])
        if value.shape != self._input.shape or value.dtype != self._input.dtype:
            self.plan.changes.add(number)
        if value is self._input and right_on(value) is None:  # is of the batch, and right everywhere
            return
        after = {self._stage_of(number + 1)} if number + 1 < len(self._chain.layers) else set()
        note(value, frozenset({stage, *after}), name)

    def check_result(self, result: Any, model: str) -> None:
        """The forward has returned; raise StrategyError if a result is not right on the last stage."""
        self._look_at_host()
        names, last = self._chain.layers, len(self._spans) - 1
        if self._next < len(names):
            raise StrategyError(
                f"strategy.pp: {names[self._next]} is not called by the forward of {model}; name the layers that follow each other "
                "in pp_layers"
            )
        for tensor in tensors_in(result):
            known = [tensor.__dict__["_pipeline"]] if _is_known(tensor) else []
            for right, origin in (*known, *self._found_in(tensor)):
                if last not in right:
                    raise StrategyError(
                        f"strategy.pp: what {model} returns was computed from {origin}, which the last stage lacks; only the tensor "
                        "that layers hand on is sent to it"
                    )

    def _stage_of(self, layer: int) -> int:
        return stage_of(layer, self._spans)


@dataclass(frozen=True)
class _Written:
    """What stands in some memory: where it is right, and what it was computed from; the tensor keeps the memory."""

    tensor: Tensor
    span: tuple[int, int]
    right: frozenset[int]
    origin: str


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the one after its last."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first) * tensor.itemsize, int(last + 1) * tensor.itemsize


def _draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw random numbers does."""
    arguments = arguments_of(operation, args, kwargs)
    return all(arguments[name] > 0 for name in _RATES if name in arguments)


def _host_state() -> Any:
    state: Any = np.random.get_state(legacy=True)
    return random.getstate(), state[1].tobytes(), state[2:]


def _is_known(value: Any) -> bool:
    return isinstance(value, Tensor) and "_pipeline" in value.__dict__


def kind_of(values: Any, *others: Hashable) -> Hashable:
    """Return what a rehearsal depends on: everything of the arguments but sizes and contents of tensors."""
    leaves, shape = tree_flatten(values)
    return tuple(_described(leaf, False) for leaf in leaves), str(shape), others


def signature_of(values: Any, *others: Hashable) -> Hashable | None:
    """Return what shapes depend on: everything of the arguments but contents of tensors; None if it cannot be told."""
    leaves, shape = tree_flatten(values)
    if any(not isinstance(leaf, (Tensor, bool, int, float, str, type(None))) for leaf in leaves):
        return None
    return tuple(_described(leaf, True) for leaf in leaves), str(shape), others


def _described(leaf: Any, sizes: bool) -> Hashable:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, tuple(leaf.shape) if sizes else leaf.ndim)
    found: Any = leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
    return found  # type: ignore[no-any-return]


class Rehearsal:
    """Runs a copy of the whole model without memory, once for each kind of arguments, the same on every process.

    Every tensor is followed to the parameters from which it was computed. It is right on the stages that have all of these,
    and on the stage that it is sent to. What a layer or the result needs has to be right where it is computed.

    Args:
        model: the whole model, before it is cut.
        chain: its layers.
        spans: first layer, and first layer after it, of every stage.
        device: on which the model computes.
        dtype: in which FSDP computes; None: that of the parameters.
        is_repeated: a process calls the model several times for a batch, because it has several stages.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        spans: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        is_repeated: bool = False,
    ) -> None:
        self._chain, self._spans, self._device = chain, spans, device
        self._is_repeated = is_repeated
        self._mode = fake_mode_of((*model.parameters(), *model.buffers()))
        self._name = type(model).__name__
        self._common: list[tuple[nn.Module, str, str]] = []  # saved buffers of every stage: module, key, name
        self._whole = self._without_memory(model, dtype)
        self._layers = [self._whole.get_submodule(name) for name in chain.layers]
        self._plans: dict[Hashable, Plan] = {}
        self._plan = Plan()
        self._stand_ins: dict[Hashable, Any] = {}
        self._passed_over: set[type[nn.Module]] = set()

    @apart()
    def _without_memory(self, model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(memo[id(tensor)], tensor.requires_grad)
        try:
            whole = copy.deepcopy(model, memo)
        except Exception as error:  # a model may hold anything
            reason = " ".join(str(error).split())
            raise StrategyError(
                f"strategy.pp: {self._name} cannot be copied, which cutting it needs ({reason})"
            ) from error
        saved = whole.state_dict().keys()
        made: dict[int, nn.Parameter] = {}
        stages = frozenset(range(len(self._spans)))
        for path, module in whole.named_modules():
            every = stages_of(path, self._chain, self._spans)
            tensors = [*module.named_parameters(recurse=False, remove_duplicate=False)]
            for key, parameter in tensors:
                name = f"{path}.{key}".lstrip(".")
                if id(parameter) not in made:
                    floating = dtype is not None and parameter.is_floating_point()
                    fake = self._fake(parameter, dtype if floating else None)
                    made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                found = made[id(parameter)]
                held = stages_of(name, self._chain, self._spans)
                note(found, (right_on(found) or frozenset()) | held, name)
                setattr(module, key, found)
            for key, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                fake = self._fake(buffer, None)
                name = f"{path}.{key}".lstrip(".")
                note(fake, every, name)
                if every == stages and name in saved:
                    self._common.append((module, key, name))
                setattr(module, key, fake)
        return whole

    def _fake(self, like: Tensor, dtype: torch.dtype | None) -> Tensor:
        with self._mode:
            return torch.empty(like.shape, dtype=dtype or like.dtype, device=self._device)

    # One rehearsal

    def plan(self, args: Any, kwargs: Any, training: bool) -> Plan:
        """Return what is known of calls with such arguments; the first time, run the whole model.

        Raises:
            StrategyError: the model's forward cannot be cut between its layers.
        """
        kind = kind_of((args, kwargs), training, torch.is_grad_enabled(), torch.is_autocast_enabled(self._device.type))
        if kind not in self._plans:
            self._plan = self._rehearse(args, kwargs, training)
            self._plans[kind] = self._plan
        self._plan = self._plans[kind]
        return self._plan

    @apart()
    def _rehearse(self, args: Any, kwargs: Any, training: bool) -> Plan:
        self._whole.train(training)
        before = [(getattr(module, key), version_of(getattr(module, key))) for module, key, _ in self._common]
        numbers = self._numbers()
        following, result = self._followed(args, kwargs)
        following.check_result(result, self._name)
        for (module, key, name), (buffer, version) in zip(self._common, before, strict=True):
            if getattr(module, key) is not buffer or version_of(buffer) != version:
                raise StrategyError(
                    f"strategy.pp: the forward of {self._name} changes the buffer {name}, which every stage has a copy of and would "
                    "change as often as it runs; keep it in a submodule that forward calls, or change it in a hook"
                )
        if self._is_repeated and (after := self._numbers()) != numbers:
            self._followed(args, kwargs)  # what is set to the same again is right
            if changed := [name for name, number in self._numbers().items() if number != after.get(name)]:
                raise StrategyError(
                    f"strategy.pp: the forward of {self._name} changes the number {changed[0]}, and a process with several stages "
                    "runs it several times for a batch; change it in a hook, or choose a pp_schedule with 1 stage per process"
                )
        return following.plan

    def _numbers(self) -> dict[str, Any]:
        """The numbers that are attributes of modules which every stage has."""
        stages = frozenset(range(len(self._spans)))
        return {
            f"{path}.{key}".lstrip("."): value
            for path, module in self._whole.named_modules()
            if stages_of(path, self._chain, self._spans) == stages
            for key, value in vars(module).items()
            if type(value) in (bool, int, float)
        }

    def _followed(self, args: Any, kwargs: Any) -> tuple[Following, Any]:
        """Run the whole model once; return what has followed it, and its result."""
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
        learns = torch.is_grad_enabled()
        while True:
            following = Following(self._chain, self._spans)
            try:
                with (
                    torch.set_grad_enabled(learns),
                    kept_random_state(self._device),
                    self._watched(following),
                    following,
                ):
                    result = self._whole(*args, **kwargs)
                break
            except FlexTrainError:
                raise
            except Exception as error:  # the model's own code
                if self._pass_over(following.path):
                    continue
                if learns:  # it may read values in updates only, to count samples in a buffer
                    learns = False
                    continue
                reason = " ".join(str(error).split())
                raise StrategyError(
                    f"strategy.pp: the forward of {self._name} cannot be followed through its layers, {type(error).__name__}: "
                    f"{reason}"
                ) from error
        return following, result

    def _pass_over(self, path: Sequence[nn.Module]) -> bool:
        """Take the innermost module that fails, and all of its class, for one that gives what looks like its first argument.

        Shapes inside of some, such as experts, depend on values. Return False if there is none inside of a layer.
        """
        inside = [module for module in path[1:] if type(module) not in self._passed_over]
        if not inside:
            return False
        self._passed_over.add(type(inside[-1]))
        return True

    @contextmanager
    def _watched(self, following: Following) -> Iterator[None]:
        handles: list[Any] = []
        for number, layer in enumerate(self._layers):

            def enter(module: nn.Module, args: Any, kwargs: Any, number: int = number) -> None:
                following.enter(number, args, kwargs)

            def leave(module: nn.Module, args: Any, output: Any, number: int = number) -> None:
                following.leave(number, output)

            handles += [
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                layer.register_forward_hook(leave),
            ]
            for part in layer.modules():
                handles += [
                    part.register_forward_pre_hook(lambda module, _: following.path.append(module)),
                    part.register_forward_hook(lambda *_: following.path.__delitem__(-1)),
                ]
                if type(part) in self._passed_over:
                    part.forward = partial(following.pass_over, part)
        for name in (*self._chain.before, *self._chain.after):
            part = self._whole.get_submodule(name)
            handles += [
                part.register_forward_pre_hook(partial(following.enter_part, name)),
                part.register_forward_hook(following.leave_part),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for part in self._whole.modules():
                if type(part) in self._passed_over:
                    vars(part).pop("forward", None)

    # Stand-ins

    def changes_shape(self, layer: int) -> bool:
        """Return whether a layer gives another shape or dtype than it gets."""
        return layer in self._plan.changes

    def overwrites(self, layer: int) -> bool:
        """Return whether a layer changes in place what it gets."""
        return layer in self._plan.overwrites

    def as_given(self, layer: int, value: Tensor) -> Any:
        """Return a tensor in the form in which a layer returns it; what else it returned is NaN or None."""
        others = self._plan.forms.get(layer)
        return value if others is None else (value, *others)

    def stand_in(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return what a submodule would give for arguments of these shapes, with NaN in it, which takes no memory if it is contiguous."""
        key = signature_of((name, args, kwargs), torch.is_autocast_enabled(self._device.type))
        if key is None or key not in self._stand_ins:
            with apart(), kept_random_state(self._device), torch.no_grad():
                fake = self._whole.get_submodule(name)(*args, **kwargs)
            self._stand_ins[key] = tree_map_only(Tensor, self._form, fake)
        return tree_map_only(_Form, lambda form: form.unknown(self._device), self._stand_ins[key])

    def attribute(self, name: str, key: str) -> Any:
        """Return an attribute of a submodule that another process has; for a tensor NaN, as ``stand_in`` gives it.

        A rehearsal has seen where the values of such tensors are needed, and that is not here: a branch that a later batch
        takes, and that needs them, gives NaN and no wrong number.

        Returns:
            NotImplemented for a submodule, which has attributes itself.

        Raises:
            AttributeError: there is none, or it is something to call.
        """
        found = getattr(self._whole.get_submodule(name), key)
        if isinstance(found, nn.Module):
            return NotImplemented
        if callable(found):
            raise AttributeError(self.elsewhere(f"{name}.{key}", name))
        return tree_map_only(Tensor, lambda tensor: self._form(tensor).unknown(self._device), found)

    def elsewhere(self, used: str, name: str) -> str:
        """Return what to say of a call that the stage under way cannot make."""
        return (
            f"strategy.pp: {self._name} uses {used} where another stage has {name}; let its forward do this, or call it where that "
            "stage computes"
        )

    @staticmethod
    def _form(tensor: Tensor) -> _Form:
        return _Form(tuple(tensor.shape), tensor.dtype, None if tensor.is_contiguous() else tuple(tensor.stride()))


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None

    def unknown(self, device: torch.device) -> Tensor:
        value = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        if self.strides is not None:  # numbers are drawn in the order of memory
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device).fill_(value)
        return torch.full((), value, dtype=self.dtype, device=device).expand(self.shape)
