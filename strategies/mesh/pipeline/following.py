"""Following: tensors through a rehearsal, to see on which stages each of them is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....core.errors import StrategyError
from ....core.torch_private import TorchDispatchMode, arguments_of, tree_flatten
from ....core.trees import tensors_in
from .chain import Chain

# Operations whose results depend on no values of tensors, but on shapes only.
_OF_SHAPES = frozenset(f"{kind}_like" for kind in ("rand", "randn", "randint", "empty", "zeros", "ones")) | {
    "new_empty",
    "new_zeros",
    "new_ones",
}
# Operations that draw as many numbers as values of tensors say.
_BY_VALUES = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet"})
_RATES = ("dropout_p", "dropout")  # arguments of attention and of recurrent layers, which draw nothing if it is 0


@dataclass
class Plan:
    """What a rehearsal has found out about calls with one kind of arguments.

    Attributes:
        draws: the forward draws random numbers.
        draws_inside: the layers do, or what comes after them.
        apart: names of the submodules that do so before the layers, and that not every stage has.
        draws_on_host: it draws from Python's or NumPy's generator, somewhere.
        forms: by layer, the length of the tuple that it returns; 0 for a tensor.
        changes: the layers that give another shape or dtype than they get.
    """

    draws: bool = False
    draws_inside: bool = False
    draws_on_host: bool = False
    apart: set[str] = field(default_factory=set)
    forms: dict[int, int] = field(default_factory=dict)
    changes: set[int] = field(default_factory=set)


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
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            drawn = self._has_drawn()
            if not drawn and name in _BY_VALUES:
                self._check_agreement(name, known)
            known += drawn
        out = func(*args, **kwargs)
        if known:
            self._combine(known, out)
        return out

    def _check_agreement(self, name: str, known: Sequence[tuple[frozenset[int], str]]) -> None:
        for right, origin in known:
            if len(right) < len(self._spans):
                raise StrategyError(
                    f"strategy.pp: {name.strip('_')} draws as many random numbers as {origin} says, which some stages lack, so that "
                    "stages would go on with different ones; draw before the layers from the batch only"
                )

    def _combine(self, known: Sequence[tuple[frozenset[int], str]], out: Any) -> None:
        """Note where the results of an operation are right."""
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
        if begins and value is not self._last:
            raise StrategyError(
                f"strategy.pp: {names[number]} is called with another tensor than {names[number - 1]} returned, and a stage begins "
                "with it; give pp_split so that it does not"
            )
        self._inside, self._input = number, value

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
        self._inside, self._next, self._last = None, number + 1, value
        if isinstance(output, tuple):
            self.plan.forms[number] = len(output)
        assert self._input is not None
        if value.shape != self._input.shape or value.dtype != self._input.dtype:
            self.plan.changes.add(number)
        if right_on(value) is None:  # was computed from the batch alone, and is right everywhere
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
            if _is_known(tensor) and last not in tensor.__dict__["_pipeline"][0]:
                raise StrategyError(
                    f"strategy.pp: what {model} returns was computed from {tensor.__dict__['_pipeline'][1]}, which the last stage "
                    "lacks; only the tensor that layers hand on is sent to it"
                )

    def _stage_of(self, layer: int) -> int:
        return next(stage for stage, (start, end) in enumerate(self._spans) if start <= layer < end)


def _draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw random numbers does."""
    arguments = arguments_of(operation, args, kwargs)
    return all(arguments[name] > 0 for name in _RATES if name in arguments)


def _host_state() -> Any:
    state: Any = np.random.get_state(legacy=True)
    return random.getstate(), state[1].tobytes(), state[2:]


def _is_known(value: Any) -> bool:
    return isinstance(value, Tensor) and "_pipeline" in value.__dict__
