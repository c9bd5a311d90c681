"""Which parameters have no values yet: nothing computes with them until something is loaded, or their owner says so."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import singledispatch

from ...core.base.errors import StrategyError, counted, suggest
from ..base import Strategy
from .model_names import aliases, elsewhere


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
