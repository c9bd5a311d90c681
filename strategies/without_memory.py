"""Build a model on the meta device; initialise each process's shards with the values of an ordinary construction."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.base.errors import StrategyError
from ..core.comm import collectives as dist
from ..core.comm.agreement import first_difference
from ..core.model.deferred import DeferredInit, Destination, LooksAtValues, constructed
from ..core.random.generators import drawing_from
from ..core.torch_compat.torch_private import keep_gradient_hooks, storage_key


class ModelWithoutMemory:
    """Builds a model on the meta device, and gives its parameters memory after they were sharded.

    Args:
        keep_zeros: leave the parameters at zero, because a checkpoint will be loaded.
    """

    def __init__(self, keep_zeros: bool) -> None:
        self.context = DeferredInit()
        """Context for building and initialising the model."""
        self.has_memory = False
        """Whether a model is built with memory at the moment."""
        self._keep_zeros = keep_zeros
        self.left_at_zero: frozenset[str] = frozenset()
        """Names of the parameters that are not initialised, because a checkpoint will be loaded."""
        self._built: dict[str, Tensor] = {}
        self._names: dict[str, list[str]] = {}
        self._before: dict[int, str] = {}  # with keep_zeros, the parameters that no transform has added

    def build(self, make: Callable[[], nn.Module], device: torch.device, local_rank: int) -> nn.Module:
        """Return the model that ``make`` builds in ``context``, or with memory if it looks at values, see ``constructed``."""

        def without() -> nn.Module:
            self.context.tells_looks = True
            model = make()
            self.context.tells_looks = False
            if (name := self.context.without_values(model)) is not None:
                raise LooksAtValues(f"for {name}")
            return model

        def whole() -> nn.Module:
            self.context.set_generators_back()
            self.context, self.has_memory = DeferredInit(), True
            model = make()
            self.has_memory = False
            self.context.take_values(model, keeps=dist.is_main())
            return model

        return constructed(without, whole, device, local_rank)

    def building(
        self, model: nn.Module | None, draws: Tensor | None, otherwise: Callable[[], AbstractContextManager[Any]]
    ) -> AbstractContextManager[Any]:
        """Return the context of ``Strategy.building``; ``otherwise`` gives that for a model which has memory."""
        if model is None:
            return nullcontext() if self.has_memory else self.context
        if not any(parameter.is_meta for parameter in model.parameters()):
            return otherwise()
        return self.context if draws is None else self._changing(model, draws)

    def _changing(self, model: nn.Module, state: Tensor) -> AbstractContextManager[None]:
        """Return the context for changing a model that ``context`` has built; see ``DeferredInit.changing``."""
        if self._keep_zeros and not self._before:
            self._before = {storage_key(p): name for name, p in model.named_parameters() if p.is_meta}
            return self.context.changing(state, alone=True)
        return self.context.changing(state)

    def note(self, model: nn.Module) -> None:
        """Record the parameters that are on the meta device; call it before they are sharded, or some are taken away."""
        self._built = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.is_meta}
        if self._keep_zeros:
            self.left_at_zero = frozenset(self._built)
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(first[id(parameter)], []).append(name)

    def check_initialised(self, read_later: Collection[str]) -> None:
        """Raise StrategyError if a parameter on the meta device is never initialised, nor read after set-up."""
        if self._keep_zeros:
            return
        touched = self.context.touched
        untouched = {name for name, built in self._built.items() if storage_key(built) not in touched}.difference(
            read_later
        )
        if untouched:
            raise StrategyError(
                f"model.{min(untouched)}: is built without memory and nothing initialises it, do it in the constructor "
                "or BaseModel's init_weights, or give the model as an instance"
            )

    def initialise(
        self,
        model: nn.Module,
        read: Callable[[nn.Parameter], Tensor],
        write: Callable[[nn.Parameter, Tensor], None],
    ) -> None:
        """Give the parameters the values that the constructor has computed for them; a collective.

        Args:
            model: the model, of which other processes may hold some parameters.
            read: returns the whole of a parameter that was written.
            write: takes the whole of one, on the CPU.

        Raises:
            StrategyError: the constructors of two processes have done other things.
        """
        if not self._built:
            return
        if found := first_difference(self.context.recorded):
            raise StrategyError(f"model: {found}; every process has to build the same model")
        held = dict(model.named_parameters(remove_duplicate=False))
        destinations: dict[int, Destination] = {}
        for name, built in self._built.items():
            own = next((held[one] for one in self._names.get(name, [name]) if one in held), None)
            destinations[storage_key(built)] = (
                Destination.elsewhere(built)
                if own is None
                else Destination(built, partial(read, own), partial(write, own))
            )
        if not self._keep_zeros or self._before:
            with drawing_from(dist.broadcast(torch.get_rng_state())):
                later = self.context.replay(destinations, without=self._before)
            if self._keep_zeros:
                keys = {name: storage_key(built) for name, built in self._built.items()}
                self.left_at_zero = frozenset(name for name, key in keys.items() if key in later)
        self._built = {}


def give_memory(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter on the meta device values; in place, because several modules may share it."""
    real = nn.Parameter(values, requires_grad=parameter.requires_grad)
    real.__class__ = type(parameter)
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
    keep_gradient_hooks(parameter)
