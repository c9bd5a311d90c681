"""Hook: base class of code that runs at named points of training, validation and testing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from enum import IntEnum
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from ...core.base.errors import ConfigError, nearest, one_of, suggest
from ...core.base.overriding import refuse_unused
from ...core.base.registry import HOOKS

if TYPE_CHECKING:
    from ..run import Run

# The points at which hooks are called, and which of them a hook overrides.


_MODES = ("train", "val", "test")
HOOK_POINTS: dict[str, tuple[str, ...]] = {
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
    "after_save_checkpoint": (),
    "after_load_checkpoint": (),
}
"""Each hook point with the group forms that it falls back to."""
POINTS = tuple(HOOK_POINTS)
NOWHERE = 1000


def depth(hook: object, name: str, base: type) -> int:
    """Return the position in the method resolution order that defines ``name``; ``NOWHERE`` if only ``base`` does."""
    if name in vars(hook):
        return 0
    return next((i for i, kind in enumerate(type(hook).__mro__, 1) if kind is not base and name in vars(kind)), NOWHERE)


def overridden_points(hook: object, base: type) -> list[str]:
    """Return the points at which ``hook`` does something that ``base`` does not, itself or by a group form."""
    return [
        point
        for point, groups in HOOK_POINTS.items()
        if any(depth(hook, name, base) < NOWHERE for name in (point, *groups))
    ]


# Priority: the order in which hooks run at one hook point.


class Priority(IntEnum):
    """Named priorities: a hook with a lower number runs earlier."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


def get_priority(priority: int | str | Priority, where: str = "priority") -> int:
    """Return the number from 0 (first) to 100 (last) for ``priority``.

    Raises:
        ConfigError: unknown name, or a number outside 0 to 100.
    """
    if isinstance(priority, str):
        names = Priority.__members__
        if priority.upper() not in names:
            raise ConfigError(f'{where}: "{priority}" is not allowed, choose {one_of(names)}{suggest(priority, names)}')
        return int(names[priority.upper()])
    if type(priority) not in (int, Priority) or not 0 <= priority <= 100:
        raise ConfigError(f"{where}: {priority!r} is not allowed, give a name or a number from 0 to 100")
    return int(priority)


class Hook:
    """Base class of all hooks; every hook point does nothing until a subclass overrides it.

    Unless overridden, a hook point of one mode (``before_train_iter``) calls the group form (``before_iter``) with the
    mode. Hook points that no hook overrides cost nothing at run time.

    ``runner`` is the FlexibleRunner. Its type is Any, so that a hook may annotate it as FlexibleRunner or as ``Run``.

    In ``after_train_iter`` of the first iteration ``runner.iter`` is 0. An iteration is one optimizer update; with
    gradient accumulation ``data_batch`` is the list of its micro-batches.
    """

    priority: int | str | Priority = "NORMAL"
    holds_weights: bool = False
    """True if the hook's state is weights of the model, which ``load_from`` loads together with the model's own."""

    def checkpoint_dir(self, runner: Any) -> Path | None:
        """Return the folder of this hook's checkpoints, in which ``resume=True`` looks; None: it saves none."""
        return None

    def fast_checkpoint_dir(self, runner: Any) -> Path | None:
        """Return the folder of this hook's second tier of checkpoints, where ``resume=True`` looks too; None: no tier."""
        return None

    def check_folders(self, runner: Any) -> None:
        """Raise ConfigError, on every process, if this hook would write over what belongs to another run.

        Called where training begins or goes back to, before an event says so and before any hook's ``before_train``.
        """

    def check_metrics(self, runner: Any, names: Collection[str]) -> None:
        """Raise ConfigError if a metric that this hook needs is not in ``names``; called by the dry pass of validation.

        Args:
            names: the metrics of a few validation batches.
        """

    # The whole run

    def before_run(self, runner: Any) -> None:
        """Before anything is loaded; the model and the optimizer exist already."""

    def after_run(self, runner: Any) -> None:
        """At the very end of train(), val() or test()."""

    def on_exception(self, runner: Any, exception: BaseException) -> None:
        """Instead of the remaining hook points, when train(), val() or test() ends with ``exception``."""

    def before_train(self, runner: Any) -> None:
        """After loading and resuming, before the first iteration."""

    def after_train(self, runner: Any) -> None:
        """After the last iteration and its validation."""

    def before_val(self, runner: Any) -> None:
        """Before each pass over the validation data."""

    def after_val(self, runner: Any) -> None:
        """After each pass over the validation data."""

    def before_test(self, runner: Any) -> None:
        """Before the pass over the test data."""

    def after_test(self, runner: Any) -> None:
        """After the pass over the test data."""

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """On every process, before ``checkpoint`` is written; a hook may add plain values and tensors under its own keys.

        It also holds ``meta``, ``message_hub``, ``state_dict`` and, where they are saved, ``optimizer`` and
        ``param_schedulers``; ``SavedView`` says which of them may be changed. The weights are the live ones.
        """

    def after_save_checkpoint(self, runner: Any) -> None:
        """On every process, once a checkpoint's tensors are copied, though files may still be written; also if storage fails."""

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """On every process, after resuming; ``checkpoint`` holds ``meta`` and what hooks added when it was saved."""

    # Epochs

    def before_train_epoch(self, runner: Any) -> None:
        """Before the first iteration of an epoch; a loop without epochs calls it once."""
        self._before_epoch(runner, mode="train")

    def after_train_epoch(self, runner: Any) -> None:
        """After the last iteration of an epoch, before ``runner.epoch`` increases."""
        self._after_epoch(runner, mode="train")

    def before_val_epoch(self, runner: Any) -> None:
        """Before the first validation batch."""
        self._before_epoch(runner, mode="val")

    def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        """After the last validation batch, with the metrics, which are equal on every process."""
        self._after_epoch(runner, mode="val")

    def before_test_epoch(self, runner: Any) -> None:
        """Before the first test batch."""
        self._before_epoch(runner, mode="test")

    def after_test_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        """After the last test batch, with the metrics, which are equal on every process."""
        self._after_epoch(runner, mode="test")

    # Iterations

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before an update.

        ``batch_idx`` counts updates from the start of the epoch; in training by iterations, from that of training.
        """
        self._before_iter(runner, batch_idx, data_batch, mode="train")

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """After an update; ``outputs`` holds 0-dim tensors that are still on the device."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="train")

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before a validation batch."""
        self._before_iter(runner, batch_idx, data_batch, mode="val")

    def after_val_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        """After a validation batch, with the model's predictions."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="val")

    def before_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before a test batch."""
        self._before_iter(runner, batch_idx, data_batch, mode="test")

    def after_test_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        """After a test batch, with the model's predictions."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="test")

    # Group forms, for all three modes. The names with an underscore come from MMEngine.

    def before_epoch(self, runner: Any, mode: str = "train") -> None:
        """Before every epoch; ``mode`` is train, val or test."""

    def after_epoch(self, runner: Any, mode: str = "train") -> None:
        """After every epoch; ``mode`` is train, val or test."""

    def before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """Before every iteration; ``mode`` is train, val or test."""

    def after_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """After every iteration; ``mode`` is train, val or test."""

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self.before_epoch(runner, mode=mode)

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        self.after_epoch(runner, mode=mode)

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        self.before_iter(runner, batch_idx, data_batch, mode=mode)

    def _after_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        self.after_iter(runner, batch_idx, data_batch, outputs, mode=mode)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: plain values and tensors. Empty: nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``."""

    def get_triggered_stages(self) -> list[str]:
        """Return the hook points at which this hook does something."""
        return overridden_points(self, Hook)

    # Helpers for intervals

    def every_n_epochs(self, runner: Run, n: int, start: int = 0) -> bool:
        """True if the ending epoch is the n-th, 2n-th, ... counted from ``start``; never for n < 1."""
        count = runner.epoch + 1 - start
        return n > 0 and count >= 0 and count % n == 0

    def every_n_train_iters(self, runner: Run, n: int, start: int = 0) -> bool:
        """True if the ending iteration is the n-th, 2n-th, ... counted from ``start``; never for n < 1."""
        count = runner.iter + 1 - start
        return n > 0 and count >= 0 and count % n == 0

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """True if the iteration is the n-th, 2n-th, ... of its epoch, or in training by iterations of training.

        Never for n < 1.
        """
        return n > 0 and (batch_idx + 1) % n == 0

    def end_of_epoch(self, dataloader: Sized | int, batch_idx: int) -> bool:
        """True if the iteration is the last of its epoch.

        Args:
            dataloader: the dataloader of the loop, or the number of iterations. In training give
                ``runner.train_loop.epoch_length``: with gradient accumulation the dataloader is longer.
            batch_idx: index of the iteration, from 0.
        """
        return (batch_idx + 1) % (dataloader if isinstance(dataloader, int) else len(dataloader)) == 0

    def is_last_train_epoch(self, runner: Run) -> bool:
        """True if training ends with this epoch."""
        return runner.epoch + 1 == runner.max_epochs

    def is_last_train_iter(self, runner: Run) -> bool:
        """True if training ends with this iteration."""
        return runner.iter + 1 == runner.max_iters


# HookDispatcher: finds once which hooks override each hook point, and calls them.


HookCall = Callable[..., None]
PACKAGE = __name__.partition(".")[0]


class _Table(dict[str, tuple[HookCall, ...]]):
    """The methods to call at each hook point."""

    def __missing__(self, point: str) -> NoReturn:
        raise ConfigError(f'call_hook: "{point}" is no hook point{suggest(point, POINTS)}')


_NAMES = (*POINTS, *dict.fromkeys(name for groups in HOOK_POINTS.values() for name in groups))


def check_methods(hook: Hook, where: str) -> None:
    """Raise ConfigError if a method would never be called: it looks like a hook point, or loads a state that nobody saves.

    A public method of a hook, or a function set as an attribute of an instance, may not begin with ``before_`` or ``after_``
    unless it is a hook point. Names with ``_before_``, ``_after_`` or ``on_`` are refused if they are near one.
    """
    for name in sorted({*dir(type(hook)), *vars(hook)} - {*_NAMES, *dir(Hook)}):
        looks_alike = name.startswith(("before_", "after_"))
        meant = nearest(name, _NAMES, 0.8) if name.startswith(("_before_", "_after_", "on_")) else None
        if (looks_alike or meant) and callable(getattr(hook, name)):
            raise ConfigError(
                f"{where}: {type(hook).__name__}.{name} is no hook point and would never be called"
                f"{suggest(name, _NAMES) or '; give it another name'}"
            )
    if depth(hook, "load_state_dict", Hook) < NOWHERE and depth(hook, "state_dict", Hook) == NOWHERE:
        near = nearest("state_dict", sorted({*dir(type(hook))} - {*dir(Hook)}))
        raise ConfigError(
            f"{where}: {type(hook).__name__}.load_state_dict would never be called, because the hook has no state_dict() and checkpoints "
            f"would hold nothing of it{f'; is {near} meant to be it?' if near else ''}"
        )
    refuse_methods(hook, where)


class HookDispatcher:
    """Hooks in order of priority, and for each hook point the methods that override it.

    ``dispatcher[point]`` is a tuple of bound methods. A loop may call them directly, which avoids passing the arguments
    through ``call``. Registering a hook makes new tuples, so a loop looks them up again at every epoch.

    Attributes:
        hooks: the hooks in the order in which they run at every hook point; no list, which code would add to in vain.
    """

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._entries: list[tuple[int, Hook, _Table]] = []
        for hook in hooks:
            self.register(hook)
        self._join()

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
        at = sum(1 for other, _, _ in self._entries if other <= given)
        self._entries.insert(at, (given, hook, _table_of(hook)))
        self._join()

    def call(self, point: str, runner: Run, **kwargs: Any) -> None:
        """Call every hook that overrides ``point``."""
        for method in self._table[point]:
            method(runner, **kwargs)

    def __getitem__(self, point: str) -> tuple[HookCall, ...]:
        return self._table[point]

    def refresh(self) -> None:
        """Find again which hook points are overridden; a hook may have a function as a new attribute."""
        self._entries = [(priority, hook, _table_of(hook)) for priority, hook, _ in self._entries]
        self._join()

    def _join(self) -> None:
        self.hooks = tuple(hook for _, hook, _ in self._entries)
        self._table = _Table(
            {point: tuple(call for *_, own in self._entries for call in own[point]) for point in POINTS}
        )
        # These two are called in every training iteration.
        self.before_train_iter = self._table["before_train_iter"]
        self.after_train_iter = self._table["after_train_iter"]


def _table_of(hook: Hook) -> _Table:
    """Return the methods of a hook to call at each hook point.

    One that overrides the point does not reach the group forms; a subclass that overrides such a form gets both calls.
    """
    table = _Table()
    for point, groups in HOOK_POINTS.items():
        group, own = min((depth(hook, name, Hook) for name in groups), default=NOWHERE), depth(hook, point, Hook)
        of_point = (getattr(hook, point),) if own < NOWHERE else ()
        if of_point and point.endswith("_iter") and type(hook).__module__.partition(".")[0] != PACKAGE:
            of_point = (_in_any_order(of_point[0], point),)
        table[point] = (*of_point, MethodType(getattr(Hook, point), hook)) if group < own else of_point
    return table


def _in_any_order(method: HookCall, point: str) -> HookCall:
    """Return a user's method, called by the names of its arguments, as in MMEngine, if their order is another one."""
    names = ("batch_idx", "data_batch", "outputs")[: 2 if point.startswith("before") else 3]
    parameters = [*inspect.signature(method).parameters.values()]
    in_order = [one.name for one in parameters[1:] if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    kinds = {one.kind for one in parameters}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds or {*names} <= {one.name for one in parameters}
    if not takes_all or in_order[: len(names)] == [*names] or inspect.Parameter.VAR_POSITIONAL in kinds:
        return method
    return lambda runner, *values, **named: method(runner, **dict(zip(names, values, strict=False)), **named)


# Arguments and methods of MMEngine's hooks that flextrain refuses.


_REASONS = {
    "file_client_args": "files are written to mounted file systems only",
    "backend_args": "files are written to mounted file systems only",
    "published_keys": "a checkpoint needs no cleaning before it is shared, load_from reads only the weights in it",
}


def refuse(where: str, **arguments: Any) -> None:
    """Raise ConfigError with the reason if one of ``arguments`` is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{where}.{name}: has no meaning here, {_REASONS[name]}; leave it out")


HOOKS.refuse(
    {
        "NaiveVisualizationHook": "call runner.visualizer.add_image in after_test_iter of a hook of your own",
        "NPUProfilerHook": "choose ProfilerHook, or call torch_npu.profiler in a hook of your own",
    }
)

_METHODS = {
    "CheckpointHook": {
        "_get_metric_score": "give save_best the metric's name, or override _save_best_checkpoint(runner, metrics)",
        "_init_rule": "give rule, greater_keys or less_keys",
        "_publish_model": "load_from reads only the weights of a checkpoint",
    },
    "EarlyStoppingHook": {
        "_check_stop_condition": "override after_val_epoch(runner, metrics)",
        "_init_rule": "give rule",
    },
    "EMAHook": {
        "_swap_ema_parameters": "override before_val_epoch and its kin",
        "_swap_ema_state_dict": "override before_save_checkpoint",
    },
}


def refuse_methods(hook: object, where: str) -> None:
    """Raise ConfigError if a subclass of a hook overrides a method that only MMEngine's hook calls."""
    for base in type(hook).__mro__:
        refuse_unused(hook, _METHODS.get(base.__name__, {}), where)
