"""Parameters as users made them: hooks and attributes stay when a strategy wraps a model; later changes that it would miss raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_

from torch import Tensor, nn

from ..core.base.errors import StrategyError
from ..core.comm.agreement import raising_together
from ..core.comm.topology import Topology
from ..core.torch_compat.torch_private import gradient_hooks, gradient_state, tables_of, users_gradient_hooks
from .gradient_hooks import Hooked
from .names import tied


class ParametersAsMade:
    """What parameters have besides values, noted before a model is wrapped.

    Args:
        model: the user's model.
        shape_of: returns the shape of a whole parameter.
    """

    def __init__(self, model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> None:
        self._shape_of, self._tied = shape_of, {name for pair in tied(model).items() for name in pair}
        self._made = {
            name: (parameter, tuple(shape_of(parameter)))
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if vars(parameter) or gradient_hooks(parameter) or is_subclass(parameter)
        }
        found = {id(made): users_gradient_hooks(made) for made, _ in self._made.values()}  # engines have hooks too
        self._hooked = {key: hooks for key, hooks in found.items() if hooks}

    def give(self, module: nn.Module, strategy: str, topology: Topology) -> dict[str, Hooked]:
        """Give attributes to the parameters that are there now; return those that have hooks, by name, with these.

        A hook may read its parameter. So that of one which is another object by now is refused.

        Raises:
            StrategyError: on every process, if hooks would not be called as on one device, or a class of the user's is lost.
        """
        held = dict(module.named_parameters(remove_duplicate=False))
        if self._hooked or any(is_subclass(made) for made, _ in self._made.values()):  # then on every process
            with raising_together():
                self._check(held, strategy, topology)
        for made, own in {made: held[name] for name, (made, _) in self._made.items() if name in held}.items():
            if own is not made:
                vars(own).update({key: value for key, value in vars(made).items() if key not in vars(own)})
        hooked = {
            held[name]: name for name, (made, _) in self._made.items() if name in held and id(made) in self._hooked
        }
        return {name: (parameter, self._hooked[id(parameter)]) for parameter, name in hooked.items()}

    def _check(self, held: Mapping[str, nn.Parameter], strategy: str, topology: Topology) -> None:
        for name, (made, shape) in self._made.items():
            if name in held and is_subclass(made) and type(held[name]) is not type(made):
                raise StrategyError(
                    f"model.{name}: is a {type(made).__name__}, a subclass of torch.nn.Parameter, and {strategy} divides it into "
                    "plain ones; set an attribute on it instead, which stays, or choose DDPStrategy"
                )
            if name not in held or id(made) not in self._hooked:
                continue
            # Otherwise two processes may have it, and add up; or backward runs in parts, in an order of its own.
            is_whole = topology.model is None or (name not in self._tied and topology.data.count == 1)
            if held[name] is not made or tuple(self._shape_of(made)) != shape or not is_whole:
                raise StrategyError(
                    f"model.{name}: has a gradient hook (register_hook, register_post_accumulate_grad_hook), and {strategy} divides the "
                    f"parameter, so that it would not be called; {_INSTEAD}"
                )


_INSTEAD = (
    "change the gradient in the model's forward, as weight * mask + (weight * (1 - mask)).detach() does for rows that stay, or "
    "choose DDPStrategy"
)


def is_subclass(parameter: Tensor) -> bool:
    """Whether a parameter is of a class of the user's."""
    return type(parameter) is not nn.Parameter and nn.Parameter in type(parameter).__mro__


@dataclass(frozen=True)
class Arranged:
    """Why a change after set-up is refused, as the second half of a message; empty: it is not.

    Attributes:
        thawed: a parameter that was frozen is trainable.
        frozen: a parameter that was trainable is frozen.
        hooked: a parameter has another gradient hook.
    """

    thawed: str = ""
    frozen: str = ""
    hooked: str = ""


class AsAtSetup:
    """The parameters when training was set up, and a check before every update that it will not miss what changed since.

    The check compares lists in C, without a call of Python for a module or a parameter, until something has changed.

    Args:
        module: returns the user's model, as it is between updates.
        arranged: what is refused besides parameters that were replaced.
    """

    def __init__(self, module: Callable[[], nn.Module], arranged: Arranged) -> None:
        self._module, self._arranged = module, arranged
        self._named = list(module().named_parameters())
        self._trained = {id(parameter) for _, parameter in self._named if parameter.requires_grad}
        self._at_setup = [(name, p, p.requires_grad, gradient_hooks(p)) for name, p in self._named]
        self._watched = [p for _, p in self._named] if arranged != Arranged() else []
        self._note_tables()
        self._note_states()

    def check(self) -> None:
        """Raise StrategyError if something has changed."""
        # dict's own method, because DeepSpeed's subclass looks at every value.
        held = [*chain.from_iterable(map(dict.values, self._tables))]
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._check_parameters()
        if self._watched and (
            [*map(gradient_state, self._watched)] != self._states or [*map(len, self._hooks)] != self._hook_counts
        ):
            self._check_states()

    def _check_parameters(self) -> None:
        now = dict(self._module().named_parameters())
        if gone := self._trained - set(map(id, now.values())):
            name = next(name for name, parameter in self._named if id(parameter) in gone)
            raise replaced(now, self._trained, name)
        self._note_tables()

    def _check_states(self) -> None:
        for name, parameter, was_trained, hooks in self._at_setup:
            if parameter.requires_grad is not was_trained and (why := self._why_not(was_trained)):
                states = "is frozen now and was trainable" if was_trained else "is trainable now and was frozen"
                raise StrategyError(
                    f"model: {name} {states} when training was set up, {why}; use "
                    'strategy="fsdp", or end this run and begin another with load_from'
                )
            if gradient_hooks(parameter) > hooks and self._arranged.hooked:
                raise StrategyError(
                    f"model.{name}: has a gradient hook that was registered after set-up, {self._arranged.hooked}"
                )
        self._note_states()

    def _why_not(self, was_trained: bool) -> str:
        return self._arranged.frozen if was_trained else self._arranged.thawed

    def _note_tables(self) -> None:
        self._tables = [table for part in self._module().modules() for table in tables_of(part)]
        self._held = [*chain.from_iterable(map(dict.values, self._tables))]

    def _note_states(self) -> None:
        self._states = [*map(gradient_state, self._watched)]
        self._hooks = [table for _, *own in self._states for table in own if table is not None]
        self._hook_counts = [*map(len, self._hooks)]


def replaced(parameters: Mapping[str, nn.Parameter], known: set[int], gone: str = "a removed one") -> StrategyError:
    """Return the error to raise if parameters that are trained are no longer the model's.

    Args:
        parameters: the model's.
        known: ids of those that are trained.
        gone: name of one that the model had, if it has no new one.
    """
    strange = [name for name, parameter in parameters.items() if id(parameter) not in known]
    new = [name for name in strange if parameters[name].requires_grad] or [gone]
    return StrategyError(
        f"model: {new[0]} is not the parameter that the optimizer has, it was replaced or removed after set-up, as by "
        "model.head = ...; change values in place (copy_), or make the model so before the runner is made"
    )
