"""HookDispatcher: finds once which hooks override each hook point, and calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, nearest, suggest
from .hook import Hook
from .points import HOOK_POINTS, NOWHERE, POINTS, depth
from .priority import Priority, get_priority

if TYPE_CHECKING:
    from ..run import Run

HookCall = Callable[..., None]
_Table = dict[str, tuple[HookCall, ...]]

_NAMES = (*POINTS, *dict.fromkeys(name for groups in HOOK_POINTS.values() for name in groups))


def check_points(hook: Hook, where: str) -> None:
    """Raise ConfigError if a name looks like a hook point but is not one.

    A public method of a hook, or a function set as an attribute of an instance, may not begin with ``before_`` or
    ``after_`` unless it is a hook point. Names with ``_before_``, ``_after_`` or ``on_`` are refused if they are near
    one.

    Raises:
        ConfigError: with the nearest hook point.
    """
    for name in sorted({*dir(type(hook)), *vars(hook)} - {*_NAMES, *dir(Hook)}):
        looks_alike = name.startswith(("before_", "after_"))
        meant = nearest(name, _NAMES, 0.8) if name.startswith(("_before_", "_after_", "on_")) else None
        if (looks_alike or meant) and callable(getattr(hook, name)):
            raise ConfigError(
                f"{where}: {type(hook).__name__}.{name} is no hook point and would never be called"
                f"{suggest(name, _NAMES) or '; give it another name'}"
            )


class HookDispatcher:
    """Hooks in order of priority, and for each hook point the methods that override it.

    ``dispatcher[point]`` is a tuple of bound methods. A loop may call them directly, which avoids passing the arguments
    through ``call``. Registering a hook makes new tuples, so a loop looks them up again at every epoch.
    """

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._entries: list[tuple[int, Hook, _Table]] = []
        self._table: _Table = {}
        for hook in hooks:
            self._insert(hook, get_priority(hook.priority, f"{type(hook).__name__}.priority"))
        self._join()

    @property
    def hooks(self) -> list[Hook]:
        """The hooks in the order in which they run at every hook point."""
        return [hook for _, hook, _ in self._entries]

    def register(self, hook: Hook, priority: int | str | Priority | None = None) -> None:
        """Add ``hook`` after those of the same priority; ``priority`` overrides the hook's own.

        Raises:
            ConfigError: ``hook`` is not a Hook, or the priority is unknown.
        """
        if not isinstance(hook, Hook):
            raise ConfigError(f"register_hook: {hook!r} is not allowed, give an instance of a subclass of Hook")
        where = f"{type(hook).__name__}.priority"
        own = get_priority(hook.priority, where)
        given = own if priority is None else get_priority(priority, where)
        if given != own:
            hook.priority = given  # who asks the hook is told what holds
        self._insert(hook, given)
        self._join()

    def call(self, point: str, runner: Run, **kwargs: Any) -> None:
        """Call every hook that overrides ``point``."""
        for method in self[point]:
            method(runner, **kwargs)

    def __getitem__(self, point: str) -> tuple[HookCall, ...]:
        try:
            return self._table[point]
        except KeyError:
            raise ConfigError(f'call_hook: "{point}" is no hook point{suggest(point, POINTS)}') from None

    def _insert(self, hook: Hook, priority: int) -> None:
        at = sum(1 for other, _, _ in self._entries if other <= priority)
        self._entries.insert(at, (priority, hook, _table_of(hook)))

    def refresh(self) -> None:
        """Find again which hook points are overridden; a hook may have a function as a new attribute."""
        self._entries = [(priority, hook, _table_of(hook)) for priority, hook, _ in self._entries]
        self._join()

    def _join(self) -> None:
        self._table = {point: tuple(call for _, _, own in self._entries for call in own[point]) for point in POINTS}
        # These two are called in every training iteration.
        self.before_train_iter = self._table["before_train_iter"]
        self.after_train_iter = self._table["after_train_iter"]


def _table_of(hook: Hook) -> _Table:
    return {point: tuple(_calls(hook, point, groups)) for point, groups in HOOK_POINTS.items()}


def _calls(hook: Hook, point: str, groups: tuple[str, ...]) -> Iterator[HookCall]:
    """Yield the methods of a hook to call at a hook point.

    Hook's own method calls the group forms, so a hook that overrides the point does not reach them. A subclass of it
    that overrides a group form gets both calls, as in MMEngine.
    """
    group = min((depth(hook, name, Hook) for name in groups), default=NOWHERE)
    own = depth(hook, point, Hook)
    if own < NOWHERE:
        yield getattr(hook, point)
    if group < own:
        yield MethodType(getattr(Hook, point), hook)
