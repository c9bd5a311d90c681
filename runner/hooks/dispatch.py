"""HookDispatcher: which hooks have something to do at a point, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, nearest, suggest
from .hook import Hook
from .priority import Priority, get_priority

if TYPE_CHECKING:
    from ..run import Run

HookCall = Callable[..., None]

_MODES = ("train", "val", "test")
# Each point with the group forms that it falls back to.
_POINTS: dict[str, tuple[str, ...]] = {
    **{f"{when}_run": () for when in ("before", "after")},
    **{f"{when}_{mode}": () for when in ("before", "after") for mode in _MODES},
    **{
        f"{when}_{mode}_{what}": (f"_{when}_{what}", f"{when}_{what}")
        for when in ("before", "after")
        for mode in _MODES
        for what in ("epoch", "iter")
    },
    "on_exception": (),
    "before_save_checkpoint": (),
    "after_load_checkpoint": (),
}
POINTS = tuple(_POINTS)
_NAMES = (*POINTS, *dict.fromkeys(name for groups in _POINTS.values() for name in groups))


def check_points(hook: Hook, where: str) -> None:
    """See that whatever is named like a hook point is one.

    A public method of a hook, or a function that an instance has as an attribute, may not begin with ``before_`` or
    ``after_`` otherwise; one with an underscore in front, or with ``on_``, may, unless it is a point misspelled.

    Raises:
        ConfigError: with the nearest name.
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
    """Hooks in order of priority, and for each point the methods that do something there.

    ``dispatcher[point]`` is a tuple of bound methods: a loop may call them itself, which saves the argument passing of
    ``call``. Registering a hook makes new tuples, so look them up anew at every epoch.
    """

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._entries: list[tuple[int, Hook]] = []
        self._table: dict[str, tuple[HookCall, ...]] = {}
        for hook in hooks:
            self._insert(hook, get_priority(hook.priority, f"{type(hook).__name__}.priority"))
        self.refresh()

    @property
    def hooks(self) -> list[Hook]:
        """The hooks in the order in which they run at every point."""
        return [hook for _, hook in self._entries]

    def register(self, hook: Hook, priority: int | str | Priority | None = None) -> None:
        """Add ``hook`` behind those of the same priority; ``priority`` takes the place of the hook's own.

        Raises:
            ConfigError: no Hook, or an unknown priority.
        """
        if not isinstance(hook, Hook):
            raise ConfigError(f"register_hook: {hook!r} is not allowed, give an instance of a subclass of Hook")
        given = hook.priority if priority is None else priority
        self._insert(hook, get_priority(given, f"{type(hook).__name__}.priority"))
        self.refresh()

    def call(self, point: str, runner: Run, **kwargs: Any) -> None:
        """Run every hook that overrides ``point``."""
        for method in self[point]:
            method(runner, **kwargs)

    def __getitem__(self, point: str) -> tuple[HookCall, ...]:
        try:
            return self._table[point]
        except KeyError:
            raise ConfigError(f'call_hook: "{point}" is no hook point{suggest(point, POINTS)}') from None

    def _insert(self, hook: Hook, priority: int) -> None:
        at = sum(1 for other, _ in self._entries if other <= priority)
        self._entries.insert(at, (priority, hook))

    def refresh(self) -> None:
        """Look again which points the hooks override; one may have got a function as an attribute meanwhile."""
        self._table = {
            point: tuple(call for _, hook in self._entries for call in _calls(hook, point, groups))
            for point, groups in _POINTS.items()
        }
        # Two that are needed in every iteration of the training.
        self.before_train_iter = self._table["before_train_iter"]
        self.after_train_iter = self._table["after_train_iter"]


def _calls(hook: Hook, point: str, groups: tuple[str, ...]) -> Iterator[HookCall]:
    """What a hook does at a point.

    A hook that defines the point itself does not come to its group forms; a subclass of it that defines one of those, as
    it would in MMEngine, is called at both.
    """
    group = min((_depth(hook, name) for name in groups), default=_NOWHERE)
    own = _depth(hook, point)
    if own < _NOWHERE:
        yield getattr(hook, point)
    if group < own:
        yield MethodType(getattr(Hook, point), hook)


def _depth(hook: Hook, name: str) -> int:
    """How near to the object a method is defined; ``_NOWHERE`` if only by Hook."""
    if name in vars(hook):
        return 0
    return next(
        (i for i, kind in enumerate(type(hook).__mro__, 1) if kind is not Hook and name in vars(kind)), _NOWHERE
    )


_NOWHERE = 1000
