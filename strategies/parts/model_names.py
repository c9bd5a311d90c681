"""The names of the whole model: of tied tensors, of what other processes hold, and of what was added since set-up."""

from __future__ import annotations

from ...core.model.module_state import tensor_names
from ..base import Strategy


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
