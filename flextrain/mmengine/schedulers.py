"""Schedulers that projects derive from MMEngine's, as schedulers of flextrain."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from mmengine.optim.scheduler.param_scheduler import _ParamScheduler as Theirs
from torch.optim import Optimizer

from ..core.errors import ConfigError
from ..optim.schedulers import INF, ParamScheduler
from ..optim.schedulers.base import HasParamGroups

_WINDOW = ("begin", "end", "last_step", "by_epoch", "verbose")


class AdaptedScheduler(ParamScheduler):
    """Sets the values that ``_get_value`` of a project's scheduler gives, which it computes from step and groups.

    A subclass, made by ``adapted_scheduler``, says which scheduler. It has its arguments.
    """

    kind: ClassVar[type[Theirs]]
    _unsaved = frozenset({"_theirs", "_options"})

    def __init__(self, optimizer: HasParamGroups, **options: Any) -> None:
        self._become(optimizer, self._made(self.kind, optimizer, options), options)

    @classmethod
    def build_iter_from_epoch(
        cls, *args: Any, epoch_length: int | None = None, by_epoch: bool = True, **options: Any
    ) -> AdaptedScheduler:
        """See ParamScheduler; the project's own method converts its arguments."""
        optimizer = args[0] if args else options.pop("optimizer")
        convert = functools.partial(cls.kind.build_iter_from_epoch, epoch_length=epoch_length, by_epoch=by_epoch)
        scheduler = cls.__new__(cls)
        scheduler._become(optimizer, cls._made(convert, optimizer, options), options)
        return scheduler

    @classmethod
    def _made(cls, make: Any, optimizer: HasParamGroups, options: Mapping[str, Any]) -> Theirs:
        """MMEngine's scheduler, whose constructor sets the values of copies."""
        try:
            return make(optimizer=_Groups([copy.copy(group) for group in optimizer.param_groups]), **options)
        except (AssertionError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{cls.kind.__name__}: {' '.join(str(error).split())}") from error

    def _become(self, optimizer: HasParamGroups, theirs: Theirs, options: Mapping[str, Any]) -> None:
        self._theirs, self._options = theirs, {key: value for key, value in options.items() if key not in _WINDOW}
        window = {"begin": theirs.begin, "end": min(theirs.end, INF), "by_epoch": theirs.by_epoch}
        window |= {"last_step": options.get("last_step", -1), "verbose": theirs.verbose}
        super().__init__(optimizer, theirs.param_name, **window)

    def _get_value(self) -> list[float]:
        theirs = self._theirs
        theirs.optimizer.param_groups = self.optimizer.param_groups
        theirs.last_step, theirs._global_step, theirs.base_values = self.last_step, self._global_step, self.base_values
        return list(theirs._get_value())

    def __getattr__(self, name: str) -> Any:
        if name in (options := vars(self).get("_options", {})):
            return options[name]
        raise AttributeError(name)


@functools.cache
def adapted_scheduler(kind: type[Theirs]) -> type[AdaptedScheduler] | None:
    """The subclass of AdaptedScheduler for ``kind``; None if ``kind`` has a way of its own to make a step."""
    if any(getattr(kind, name) is not getattr(Theirs, name) for name in ("step", "state_dict", "load_state_dict")):
        return None
    named = {
        p.name: p.replace(kind=p.KEYWORD_ONLY)
        for base in reversed(kind.__mro__)
        if "__init__" in vars(base) and base is not object
        for p in inspect.signature(vars(base)["__init__"]).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in ("self", "param_name")
    }
    own = {"kind": kind, "__signature__": inspect.Signature(list(named.values())), "__doc__": kind.__doc__}
    return type(kind.__name__, (AdaptedScheduler,), own)


class _Groups(Optimizer):
    """An Optimizer that only holds parameter groups: MMEngine's schedulers require one."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        # Optimizer's constructor is not called, because it would copy the groups.
        self.param_groups = groups
        self.defaults = {}

    def step(self, closure: Any = None) -> Any:
        return None
