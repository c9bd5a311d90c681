"""What a strategy notes when a model is set up, for its parts: names, places and whole shapes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.base.errors import StrategyError
from ..core.checkpoint.replicas import FrozenPrints
from ..core.comm.agreement import gather_differing, raising_together
from ..core.comm.collectives import is_main
from ..core.comm.replica_check import ReplicaCheck
from ..core.comm.topology import Topology
from ..core.model.base_model import class_name
from ..core.model.module_state import extra_aliases, keepers, tensor_names, torch_key
from ..core.torch_compat.torch_private import (
    copy_modules,
    gradient_hooks,
    gradient_state,
    replace_tensor,
    tables_of,
    tensors_of,
    users_gradient_hooks,
)
from ..optim.schedulers.base import HasParamGroups
from .gradient_hooks import Hooked

# Names: parameter and buffer names of the whole model, their aliases, and which process holds and saves each.


class Names:
    """The names of a model, of which a process may hold only some after the strategy has wrapped it.

    Names are those in the model as it was built. A tied parameter has the first of its names, also on a process that
    holds it only under another name, such as the last stage of a pipeline.

    Args:
        model: the model as it was built, equal on every process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._aliases = {**tied(model), **extra_aliases(model)}
        self._all = tensor_names(model)
        self._keepers = frozenset(name for name, _ in keepers(model))
        self._owners: dict[str, int] = {}

    def gather(self, module: nn.Module) -> None:
        """Exchange which process holds which name; a collective, called after the model was wrapped."""
        own = sorted({*(name for name, _ in module.named_buffers()), *(_part(m, n) for n, m in module.named_modules())})
        everyones = gather_differing(own)
        if all(names == own for names in everyones):
            return  # rank 0 has everything
        for rank, names in enumerate(everyones):
            for name in names:
                self._owners.setdefault(name, rank)

    def owner(self, name: str, module: nn.Module, own: int) -> int:
        """Return the first rank that holds the buffer or submodule ``name`` of ``module``.

        Args:
            own: this process's rank, returned for modules that were added later.
        """
        if name in self._owners or not self._owners:
            return self._owners.get(name, 0)
        while name:  # a buffer added during training belongs to its module's owner
            try:
                return self._owners.get(_part(module.get_submodule(name), name), own)
            except AttributeError:
                name = name.rpartition(".")[0]
        return self._owners.get(_part(module, ""), own)

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters with their names in the model."""
        if not self._aliases:
            yield from module.named_parameters()
            return
        own = dict(module.named_parameters())
        for name, parameter in own.items():
            yield self._first(name, own), parameter

    def aliases(self, module: nn.Module) -> dict[str, str]:
        """Return further names of tied parameters and modules with extra state, on any process, each with its first."""
        now = {**tied(module), **extra_aliases(module)}
        if not self._aliases:
            return now
        held = dict(module.named_parameters(remove_duplicate=False))
        names = {*held, *(torch_key(name) for name, _ in keepers(module, every_name=True))}
        elsewhere = {alias: name for alias, name in self._aliases.items() if not {alias, name} <= names}
        return {**elsewhere, **{alias: self._first(name, names) for alias, name in now.items()}}

    def elsewhere(self, module: nn.Module) -> frozenset[str]:
        """Return the names of parameters and persistent buffers that only other processes hold."""
        return self._all - tensor_names(module) - {name for name, _ in self.parameters(module)}

    def keepers_elsewhere(self, module: nn.Module) -> frozenset[str]:
        """Return the names of modules with extra state that only other processes hold."""
        return self._keepers - {name for name, _ in keepers(module, every_name=True)}

    def _first(self, name: str, held: Container[str]) -> str:
        first = self._aliases.get(name, name)
        return name if first in held else first


def tied(model: nn.Module) -> dict[str, str]:
    """Return further names of tied parameters, each with its first."""
    first: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _part(module: nn.Module, name: str) -> str:
    """Return a module's name and class; a placeholder for another process's module differs by its class."""
    return f"{name}: {type(module).__name__}"


# Blueprint: the user's model as it was built, without memory for its tensors, to be filled with whole weights.


EMPTY: Mapping[str, bool] = MappingProxyType({})
_VALUES = (bool, int, float, str, type(None))


class Blueprint:
    """The structure of a model before a strategy changed it: classes, attributes, ties, and hooks of the user.

    A copy has modules of its own. What is neither module nor parameter nor buffer is shared with the model: a configuration,
    a dict that forward fills.

    Args:
        model: the model as the user has built it.
        shape_of: returns the whole shape of a parameter or buffer.
    """

    def __init__(self, model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> None:
        self.problem = _problem(model)
        """Why the model cannot be copied; None if it can."""
        self.shapes = {name: torch.Size(shape_of(tensor)) for name, tensor in tensors_of(model).items()}
        """The whole shapes of the parameters and buffers, by name."""
        self.buffers = frozenset(name for name, _ in model.named_buffers())
        """The names of the buffers."""
        self._live = [weakref.ref(module) for module in model.modules()]
        self._before: list[Mapping[str, Any]] = []
        self._model = model if self.problem else copy_modules(model, shape_of)

    def follow(self) -> None:
        """Take note that the strategy has changed the model: later changes of plain attributes are the user's."""
        self._before = [_values(module()) for module in self._live]

    def build(
        self, late: Mapping[str, bool] = EMPTY, gone: Collection[str] = ()
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return a copy of the model, and its parameters and buffers by name, on the meta device.

        A tied parameter has the first of its names. Attributes that are numbers, texts or flags, and were changed since
        ``follow``, are as the live model has them now; so is the training flag of every module.

        Args:
            late: names of buffers that were added since set-up, each with True if it is persistent.
            gone: names of buffers that have become None since.

        Raises:
            StrategyError: the model cannot be copied.
        """
        if self.problem is not None:
            raise StrategyError(f"full_weights: {self.problem}")
        model = copy_modules(self._model, lambda tensor: tensor.shape)
        for copy, live, before in zip(model.modules(), self._live, self._before, strict=True):
            for key, value in _values(live()).items():
                if key == "training" or (key in before and value != before[key]):
                    vars(copy)[key] = value
        for name, tensor in tensors_of(model).items():
            if name in gone:
                replace_tensor(model, tensor, None)
        for name, persistent in late.items():
            _add_buffer(model, name, persistent)
        return model, tensors_of(model)


def _add_buffer(model: nn.Module, name: str, persistent: bool) -> None:
    owner, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError as error:
        raise StrategyError(
            f"full_weights: model.{name} is in a module that was added after set-up; make the model so before the runner is made"
        ) from error
    vars(module).pop(key, None)
    module.register_buffer(key, torch.empty(0, device="meta"), persistent)


def _values(module: nn.Module | None) -> Mapping[str, Any]:
    return {} if module is None else {key: value for key, value in vars(module).items() if isinstance(value, _VALUES)}


def _problem(model: nn.Module) -> str | None:
    """Return why a model cannot be copied."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"model.{name}" if name else "model"
            return f"{where} is a ScriptModule, of which there is no copy with whole weights; give {class_name(model)} as Python"
    return None


# Parameters as users made them: hooks and attributes stay when a strategy wraps a model; later changes that it would
# miss raise.


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
        added: there is a new parameter, whether it is trained or not.
    """

    thawed: str = ""
    frozen: str = ""
    hooked: str = ""
    added: str = ""


class AsAtSetup:
    """The parameters when training was set up, and a check before every update that it will not miss what changed since.

    The check compares lists in C, without a call of Python for a module or a parameter, until something has changed.

    Args:
        module: returns the user's model, as it is between updates.
        arranged: what is refused besides parameters that were replaced, and those of no optimizer that were thawed.
        optim: has the groups of all optimizers.
    """

    def __init__(self, module: Callable[[], nn.Module], arranged: Arranged, optim: HasParamGroups) -> None:
        self._module, self._arranged, self._optim = module, arranged, optim
        self._named = list(module().named_parameters())
        self._trained = {id(parameter) for _, parameter in self._named if parameter.requires_grad}
        self._at_setup = [(name, p, p.requires_grad, gradient_hooks(p)) for name, p in self._named]
        known = {id(p) for group in optim.param_groups for p in group["params"]} | self._trained
        self._watched = [p for _, p in self._named if arranged != Arranged() or id(p) not in known]
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

    def checking_hooks(self, model: nn.Module) -> Callable[[Tensor], None]:
        """Return a hook for an optimizer wrapper, which checks the parameters that stand in the model before every backward."""
        tables = [tables_of(module)[0] for module in model.modules()]
        return lambda _: self.check_hooks(tables)

    def check_hooks(self, tables: Iterable[Mapping[str, nn.Parameter | None]] = ()) -> None:
        """Raise StrategyError if a parameter has a new gradient hook, also one of ``tables``, that stands for a parameter of set-up."""
        if not self._arranged.hooked:
            return
        standing = (parameter for table in tables for parameter in table.values() if parameter is not None)
        parameters = chain((parameter for _, parameter in self._named), standing)
        if not (hooked := [parameter for parameter in parameters if gradient_hooks(parameter)]):
            return  # nearly always, and before every backward of a train_step
        known = {id(parameter): hooks for _, parameter, _, hooks in self._at_setup}
        for parameter in hooked:
            if gradient_hooks(parameter) > known.get(id(parameter), 0):
                name = next(
                    name for name, one in chain(self._named, self._module().named_parameters()) if one is parameter
                )
                raise StrategyError(
                    f"model.{name}: has a gradient hook that was registered after set-up, {self._arranged.hooked}"
                )

    def _check_parameters(self) -> None:
        now = dict(self._module().named_parameters())
        if gone := self._trained - set(map(id, now.values())):
            name = next(name for name, parameter in self._named if id(parameter) in gone)
            raise replaced(now, self._trained, name)
        self._check_new(now)
        self._note_tables()

    def _check_new(self, now: Mapping[str, nn.Parameter]) -> None:
        """Warn of new parameters that no optimizer has, a hook may train its own; refuse them where an engine has all that is trained."""
        known = {id(parameter) for _, parameter in self._named}
        optimized = {id(parameter) for group in self._optim.param_groups for parameter in group["params"]}
        for name, parameter in now.items():
            if id(parameter) in known or not (parameter.requires_grad or self._arranged.added):
                continue
            if id(parameter) in optimized and self._arranged.thawed:
                raise StrategyError(
                    f"model: {name} was given to the optimizer after set-up (add_param_group), {self._arranged.thawed}; make it in the model's "
                    "__init__, or end this run and begin another with load_from"
                )
            if self._arranged.added:
                raise StrategyError(
                    f"model: {name} was added when training was set up already, {self._arranged.added}; make it in the model's __init__ or in "
                    "a transform"
                )
            if id(parameter) not in optimized and is_main():
                logging.getLogger("flextrain").warning(
                    f"model: {name} was added when training was set up already, and no optimizer of the run has it: no update changes it; make it "
                    "in the model's __init__, or give it to the optimizer (add_param_group)"
                )

    def _check_states(self) -> None:
        optimized = {id(p) for group in self._optim.param_groups for p in group["params"]}
        for name, parameter, was_trained, _ in self._at_setup:
            if parameter.requires_grad is not was_trained and (why := self._why_not(was_trained)):
                states = "is frozen now and was trainable" if was_trained else "is trainable now and was frozen"
                raise StrategyError(
                    f"model: {name} {states} when training was set up, {why}; use "
                    'strategy="fsdp", or end this run and begin another with load_from'
                )
            if parameter.requires_grad and not was_trained and id(parameter) not in optimized:
                raise StrategyError(
                    f"model: {name} is trainable now, and no optimizer has it: it was frozen when training was set up, and left out of "
                    "every group of optim_wrapper; put it into one, or thaw it before the runner is made"
                )
        self.check_hooks()
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


class Noted:
    """What is known of a model besides its tensors: as it was built, at set-up, and since.

    Attributes:
        names: of the whole model.
        at_setup: names of the parameters and persistent buffers at set-up; empty before it, and without an optimizer.
        blueprint: the model as it was before the strategy changed it; None: no copy of it can be made.
        unchanged: the parameters when training was set up.
        uninitialised: names of parameters that are zero until something is loaded into them.
        read_later: names of parameters and buffers that nothing initialises, because their values are read after set-up.
        is_whole: whether a context with whole weights is open.
        frozen_prints, replica_check: what was computed before, for the next time.
    """

    def __init__(self) -> None:
        self.names = Names(nn.Module())
        self.at_setup: frozenset[str] = frozenset()
        self.blueprint: Blueprint | None = None
        self.unchanged: AsAtSetup | None = None
        self.uninitialised: set[str] = set()
        self.read_later: frozenset[str] = frozenset()
        self.is_whole = False
        self.frozen_prints: FrozenPrints | None = None
        self.replica_check: ReplicaCheck | None = None

    def check_unchanged(self) -> None:
        """Raise StrategyError if parameters were changed since ``setup`` in a way that training would miss; before every update."""
        if self.unchanged is not None:
            self.unchanged.check()

    def drop_model(self) -> None:
        """Keep nothing that keeps the model's memory."""
        self.blueprint = self.unchanged = None
