"""MessageHub: collects the scalars of a run, and copies them to the host only when they are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core.base.errors import ConfigError
from ...core.checkpoint.chunks import full_tensor
from ...core.comm.topology import Topology
from .history import HistoryBuffer, UnreadMean, fetch

# Shared: base class of objects that code finds without being given them, as in MMEngine.


T = TypeVar("T", bound="Shared")


class Shared:
    """An object that other code finds by name, or as the current one.

    The current one belongs to the runner that runs, or is being made, in this process; if a hook runs another runner
    meanwhile, to that one. While none runs, it is the one that was made or named last and still exists.

    Args:
        name: the name for ``get_instance``.
    """

    _active: ClassVar[list[Any]]
    _named: ClassVar[dict[str, Any]]
    _of_runners: ClassVar[weakref.WeakValueDictionary[str, Any]]
    _newest: ClassVar[weakref.WeakSet[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Shared in cls.__bases__:  # subclasses of it share these
            cls._active, cls._named = [], {}
            cls._of_runners, cls._newest = weakref.WeakValueDictionary(), weakref.WeakSet()

    def __init__(self, name: str) -> None:
        self._instance_name = name

    @property
    def instance_name(self) -> str:
        """The name that ``get_instance`` finds it by."""
        return self._instance_name

    @classmethod
    def get_instance(cls: type[T], name: str, **kwargs: Any) -> T:
        """Return the object with this name; if there is none, make it from ``kwargs`` and keep it.

        A runner's has the name of the experiment, and comes before one that was made with this name.
        """
        found: T | None = cls._of_runners.get(name, cls._named.get(name))
        if found is None:
            found = cls._named[name] = cls(name=name, **kwargs)
            found._becomes_newest()
        return found

    @classmethod
    def get_current_instance(cls: type[T]) -> T:
        """Return the one of the runner that runs; see the class."""
        if cls._active:
            return cls._active[-1]  # type: ignore[no-any-return]
        newest: T | None = next(iter(cls._newest), None)
        return cls._without_runner() if newest is None else newest

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """True if ``get_instance`` would find an object with this name."""
        return name in cls._named or name in cls._of_runners

    @classmethod
    def _without_runner(cls: type[T]) -> T:
        """Return the current object before any runner exists."""
        raise NotImplementedError

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this object the current one during the block."""
        self._active.append(self)
        try:
            yield
        finally:
            self._active.remove(self)  # compares by identity; runs may end in any order in threads

    def belong_to(self, name: str) -> None:
        """Give the object the name of a runner's experiment; the runner alone keeps it alive."""
        self._instance_name = name
        self._of_runners[name] = self
        self._becomes_newest()

    def _becomes_newest(self) -> None:
        self._newest.clear()
        self._newest.add(self)


AVERAGED = "train/loss"
"""The scalar that log lines show as the mean over the processes."""


class MessageHub(Shared):
    """Scalars with their recent history, and named infos; one hub per runner, which ``get_current_instance`` finds.

    A scalar may be a tensor on any device. It stays there, unread, until ``fetch`` or a statistic of its buffer is
    called. ``fetch`` copies everything pending to the host, in one copy per device and dtype. An info may be a function
    that is called whenever the info is read.

    Args:
        name: the name for ``get_instance``; a runner's hub has that of the experiment.
        log_scalars, runtime_info: scalars and infos to begin with.
        resumed_keys: False for keys that checkpoints do not contain.
        history: number of values kept per key, unless ``retain`` asks for more.
        topology: this process's place among the others; default: every process trains on its own data.
    """

    def __init__(
        self,
        name: str = "flextrain",
        log_scalars: Mapping[str, HistoryBuffer] | None = None,
        runtime_info: Mapping[str, Any] | None = None,
        resumed_keys: Mapping[str, bool] | None = None,
        *,
        history: int = 100,
        topology: Topology | None = None,
    ) -> None:
        for key, value in (log_scalars or {}).items():
            if not isinstance(value, HistoryBuffer):
                raise ConfigError(f"MessageHub.log_scalars.{key}: {value!r} is not allowed, give a HistoryBuffer")
        for key in (resumed_keys or {}).keys() - (log_scalars or {}).keys() - (runtime_info or {}).keys():
            raise ConfigError(f"MessageHub.resumed_keys.{key}: is neither in log_scalars nor in runtime_info")
        super().__init__(name)
        self._history = history
        self.topology = topology or Topology()
        self._retained: dict[str, int | None] = {}
        self.log_scalars: dict[str, HistoryBuffer] = dict(log_scalars or {})
        """All scalars by key, in the order of their first value."""
        self._info: dict[str, Any] = dict(runtime_info or {})
        self._computed: dict[str, Callable[[], Any]] = {}
        self._not_resumed = {key for key, resumed in (resumed_keys or {}).items() if not resumed}
        self.reads_every_line = False
        """True if scalars must be read as soon as a line is due, even if lines are written several at a time."""
        self.waiting: list[UnreadMean] = []
        """Unread means of lines that are due; the next ``fetch`` for a log line reads them too."""
        self.readings = 0
        """How often the training scalars were read for a log line, on all processes together."""
        self.beside: Callable[[], Sequence[Any]] | None = None
        """Returns further values to check together with the averaged losses; see ``Witness``."""
        self.verdict = HistoryBuffer(max_length=1, name="verdict")
        """A number that is finite if all values of ``beside`` were finite, on all processes."""

    @property
    def runtime_info(self) -> Mapping[str, Any]:
        """All infos by key."""
        return {**self._info, **{key: function() for key, function in self._computed.items()}}

    def update_scalar(self, key: str, value: float | Tensor, count: int = 1, resumed: bool = True) -> None:
        """Append one value to a scalar.

        Args:
            key: by convention ``train/loss``, ``val/accuracy``.
            value: a number, or a one-element tensor that must not be changed in place later; a DTensor is made whole by all processes.
            count: number of items that ``value`` sums up; a mean divides by it.
            resumed: False keeps the scalar out of checkpoints; the newest call decides.
        """
        self.history(key).append(value if type(value) is float else _checked(key, value), count)
        self._resume(key, resumed)

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Append one value to each of several scalars; a value may be ``dict(value=..., count=...)``."""
        for key, value in log_dict.items():
            if isinstance(value, Mapping):
                if "value" not in value:
                    raise ConfigError(f"{key}: {dict(value)} is no scalar, give dict(value=..., count=...)")
                self.update_scalar(key, value["value"], value.get("count", 1), resumed)
            else:
                self.update_scalar(key, value, resumed=resumed)

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set an info; checkpoints contain it if JSON can represent it and ``resumed`` is True."""
        self._info[key] = value
        self._computed.pop(key, None)
        self._resume(key, resumed)

    def _resume(self, key: str, resumed: bool) -> None:
        (self._not_resumed.discard if resumed else self._not_resumed.add)(key)

    def compute_info(self, key: str, function: Callable[[], Any]) -> None:
        """Set an info that is computed by ``function`` whenever it is read; checkpoints do not contain it."""
        self._computed[key] = function

    def update_info_dict(self, info_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Set several infos."""
        for key, value in info_dict.items():
            self.update_info(key, value, resumed)

    def history(self, key: str) -> HistoryBuffer:
        """Return the history of a scalar, new if the scalar has no value yet; for appending in every iteration."""
        if key not in self.log_scalars:
            lengths = self._retained.get(key, 0), self._history
            self.log_scalars[key] = HistoryBuffer(max_length=None if None in lengths else max(lengths), name=key)  # type: ignore[type-var]
        return self.log_scalars[key]

    def get_scalar(self, key: str) -> HistoryBuffer:
        """Return the history of a scalar.

        Raises:
            KeyError: the scalar has no history yet.
        """
        if key not in self.log_scalars:
            raise KeyError(f"message hub: no scalar {key!r}, there are {sorted(self.log_scalars)}")
        return self.log_scalars[key]

    def get_info(self, key: str, default: Any = None) -> Any:
        """Return an info, or ``default`` if it is not set."""
        function = self._computed.get(key)
        return self._info.get(key, default) if function is None else function()

    def pop_info(self, key: str, default: Any = None) -> Any:
        """Remove an info and return it, or ``default`` if it is not set."""
        function = self._computed.pop(key, None)
        value = self._info.pop(key, default)
        return value if function is None else function()

    def retain(self, key: str, history: int | None) -> None:
        """Keep at least ``history`` values of ``key`` from now on; None: keep all.

        Tensors are read at every log line, so only a list of numbers grows.
        """
        before = self._retained.get(key, 0)
        self._retained[key] = None if before is None or history is None else max(before, history)
        if key in self.log_scalars:
            self.log_scalars[key].grow(history)

    def retain_all(self, history: int) -> None:
        """Keep at least ``history`` values of every key from now on."""
        self._history = max(self._history, history)
        for buffer in self.log_scalars.values():
            buffer.grow(history)

    def fetch(self, prefix: str = "", reduce: str | None = None) -> None:
        """Copy pending values to the host, in one copy per device and dtype.

        Args:
            prefix: read only keys that start with it.
            reduce: a key whose new values are replaced by their means over the processes; then this is a collective, and
                every process must have updated the key equally often.
        """
        waiting: list[UnreadMean] = []
        if reduce is not None:
            self.readings += 1
            waiting, self.waiting = self.waiting, waiting
            if reduce in self.log_scalars and not self.topology.is_alone:
                verdict = self.log_scalars[reduce].reduce(self.topology, self.beside() if self.beside else ())
                if verdict is not None:
                    self.verdict.append(verdict)
        fetch([self.verdict, *(buffer for key, buffer in self.log_scalars.items() if key.startswith(prefix))], waiting)

    def state_dict(self) -> dict[str, Any]:
        """Return the scalars, and those infos that JSON can represent."""
        self.fetch()
        return {
            "scalars": {k: buffer.state_dict() for k, buffer in self.log_scalars.items() if k not in self._not_resumed},
            "info": {k: v for k, v in self._info.items() if k not in self._not_resumed and _is_plain_value(v)},
        }

    def own_losses(self) -> list[float]:
        """Return this process's losses since the last log line, not yet averaged; this state differs by data shard."""
        return self.log_scalars[AVERAGED].own(self.topology) if AVERAGED in self.log_scalars else []

    def load_state_dict(self, state: Mapping[str, Any], own_losses: Sequence[Sequence[float]] = ((),)) -> None:
        """Continue from the result of ``state_dict``, and from ``own_losses`` of every data shard."""
        for key, saved in state["scalars"].items():
            history = self.history(key)
            history.grow(len(saved["values"]))  # ``retain`` may not have been called yet
            history.load_state_dict(saved)
        if own_losses[0]:
            self.log_scalars[AVERAGED].load_own(own_losses, self.topology)
        self._info.update(state["info"])

    @classmethod
    def _without_runner(cls) -> MessageHub:
        return cls.get_instance("flextrain")  # MMEngine has a hub at any time too, which tests of models use


def _checked(key: str, value: Any) -> float | Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(f"{key}: a tensor of shape {tuple(value.shape)} is no scalar, give one element")
        whole: Tensor = full_tensor(value) if isinstance(value, DTensor) else value
        return whole.detach() if whole.requires_grad else whole
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: {value!r} is no scalar, give a number or a tensor with one element") from None


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain_value(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain_value, value))
    return value is None or isinstance(value, (str, int, float, bool))
