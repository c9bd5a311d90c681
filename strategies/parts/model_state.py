"""A model's state beside its whole weights: names, buffers, what checkpoints leave out or write, and which parameters have no values yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import singledispatch

from torch import Tensor

from ...core.base.errors import StrategyError, counted, suggest
from ...core.checkpoint.replicas import FrozenPrints
from ...core.comm.collectives import floating_buffers
from ...core.model.module_state import tensor_names
from ..base import Strategy, left_out


def aliases(strategy: Strategy) -> dict[str, str]:
    """Return further names of tied parameters and modules with extra state, on any process, each with its first."""
    return strategy.noted.names.aliases(strategy.module)


def elsewhere(strategy: Strategy) -> frozenset[str]:
    """Return the names of the model's parameters and persistent buffers that only other processes hold."""
    return strategy.noted.names.elsewhere(strategy.module)


def keepers_elsewhere(strategy: Strategy) -> frozenset[str]:
    """Return the names of the model's modules with extra state that only other processes hold."""
    return strategy.noted.names.keepers_elsewhere(strategy.module)


def saves(strategy: Strategy, name: str) -> bool:
    """Return whether this process saves a buffer, or a module's extra state.

    These may differ between processes; the first process that has it saves it.
    """
    return strategy.noted.names.owner(name, strategy.module, strategy.topology.rank) == strategy.topology.rank


def appeared(strategy: Strategy) -> tuple[list[str], list[str]]:
    """Return the names of the parameters, and of the persistent buffers, that were added after ``setup``."""
    module, at_setup = strategy.module, strategy.noted.at_setup
    late = tensor_names(module) - at_setup if at_setup else frozenset()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)} if late else set()
    return sorted(late & parameters), sorted(late - parameters)


# The frozen parameters that checkpoints leave out: their tensors for whole exports, and fingerprints to recognise
# them by.


def state_left_out(strategy: Strategy) -> dict[str, Tensor]:
    """Return this process's entries ``model.<name>`` of the parameters that are left out, for exports of the whole model."""
    names = left_out(strategy)
    return {f"model.{name}": tensor for name, tensor in strategy.model_state().items() if name in names}


def fingerprints_of_left_out(strategy: Strategy, names: Collection[str] | None = None) -> dict[str, str]:
    """Return a fingerprint for each parameter that is left out, on any process, by name; a collective.

    It depends on neither the strategy nor the number of processes, only on dtype, shape and values. It begins with the
    dtype, because a strategy may keep frozen parameters in half precision. Computed again after a parameter was written.
    ``names`` are those that another run has left out; None: what this one leaves out.
    """
    if names is None and not strategy.config.exclude_frozen_parameters:
        return {}
    names, noted = left_out(strategy) if names is None else names, strategy.noted
    noted.frozen_prints = noted.frozen_prints or FrozenPrints()
    return noted.frozen_prints.of({name: t for name, t in strategy.model_state().items() if name in names})


__all__ = ["fingerprints_of_left_out", "left_out", "state_left_out"]


# Buffers, such as running statistics, that each process may have written on data of its own.


@singledispatch
def keep_own_buffers(strategy: Strategy) -> None:
    """Let running statistics follow what each process trains on, unless an option says otherwise; before training.

    Their means over the processes then stand for all data. Most strategies do so anyway.
    """


@singledispatch
def share_buffers(strategy: Strategy) -> None:
    """Give every process the floating-point buffers of the first data shard; a collective, before evaluation.

    Running statistics depend on a process's training data. With different ones, metrics would depend on which
    process evaluates which sample.
    """
    strategy.topology.data.share(floating_buffers(strategy.module))


@singledispatch
def average_buffers(strategy: Strategy) -> None:
    """Give every process the means of the floating-point buffers over the data shards; a collective."""
    strategy.topology.data.average(floating_buffers(strategy.module))


# The parameters that a model computes with, for who writes to frozen ones itself, such as a teacher's.


@singledispatch
def computed_with(strategy: Strategy) -> dict[str, Tensor]:
    """Return this process's live parameters as the model computes with them, not their masters, by name.

    Types give the layout, as in ``model_state``. Whoever writes to frozen ones calls ``take_written`` afterwards.
    """
    return {name: parameter.detach() for name, parameter in strategy.parameters()}


@singledispatch
def take_written(strategy: Strategy, names: Collection[str]) -> None:
    """Let the next forward use what was written to ``computed_with(strategy)[name]`` of frozen parameters; a collective.

    Args:
        names: of the parameters; those that other processes hold are not among them.
    """


# Which parameters have no values yet: nothing computes with them until something is loaded, or their owner says so.


def expect_values(strategy: Strategy, names: Collection[str]) -> None:
    """Take note of parameters that nothing has initialised, because their values are read after ``setup``; before it.

    Args:
        names: of parameters and buffers, in the user's model.
    """
    strategy.noted.read_later = frozenset(names)


def await_values(strategy: Strategy, names: Collection[str]) -> None:
    """Refuse to train until something has been loaded into these parameters, of which other processes may have some."""
    strategy.noted.uninitialised = {name for name, _ in strategy.parameters() if name in names}
    if strategy.noted.uninitialised:
        for wrapper in strategy.optim.wrappers.values() if strategy.optim is not None else ():
            wrapper.register_step_pre_hook(lambda _: check_initialised(strategy))  # for loops without a runner


@singledispatch
def check_initialised(strategy: Strategy) -> None:
    """Check that every parameter of this process has values, before anything is computed with them.

    Raises:
        StrategyError: parameters that were not initialised at set-up were not loaded since; see ``note_initialised``.
    """
    uninitialised = strategy.noted.uninitialised
    if uninitialised:
        names = [name for name, _ in strategy.parameters() if name in uninitialised]
        more = f" and {counted(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""
        raise StrategyError(
            f"strategy.skip_init_weights: nothing has given values to {names[0]}{more}, all are zero; give load_from or resume, "
            "leave skip_init_weights out, or, if your own code has filled them, call note_initialised(strategy) of "
            "flextrain.strategies.parts"
        )


def note_initialised(strategy: Strategy, names: Iterable[str] | None = None) -> None:
    """Say that your own code has given values to parameters which ``skip_init_weights`` left at zero.

    What a checkpoint or a file is loaded into need not be named.

    Args:
        names: of the parameters, in the user's model; None: all of them.

    Raises:
        StrategyError: the model has no parameter of this name.
    """
    uninitialised = strategy.noted.uninitialised
    if names is None:
        uninitialised.clear()
        return
    own, others = {name for name, _ in strategy.parameters()}, aliases(strategy)
    for name in [names] if isinstance(names, str) else names:
        first = others.get(name, name)
        if first not in own and first not in elsewhere(strategy):
            raise StrategyError(f"note_initialised: the model has no parameter {name}{suggest(name, sorted(own))}")
        uninitialised.discard(first)
