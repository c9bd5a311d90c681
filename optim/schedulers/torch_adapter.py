"""TorchScheduler: the classes of torch.optim.lr_scheduler as ParamSchedulers."""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from ...core.base.errors import ConfigError
from ...core.base.registry import PARAM_SCHEDULERS
from .base import INF, HasParamGroups, ParamScheduler

_INSTEAD = {
    "ReduceLROnPlateau": 'use ReduceOnPlateauLR(monitor="...")',
    "SequentialLR": "give a list of schedulers, each with its begin and end",
    "ChainedScheduler": "give a list of schedulers",
}

# Each value depends on the step alone, and not on the value before.
_CYCLES = ("CyclicLR", "OneCycleLR")


class TorchScheduler(ParamScheduler):
    """Steps torch's scheduler of class ``scheduler``, set by `torch_scheduler`, while the step lies in [begin, end).

    ``options`` are the arguments of its constructor, which runs at step ``begin``; their numbers count steps from then.
    Only attributes that change while it runs are saved; functions come from the configuration again.

    Raises:
        ConfigError: torch refuses the options; the constructor raises it even if the window begins later.
    """

    scheduler: ClassVar[type[lr_scheduler.LRScheduler]]
    _unsaved = frozenset({"_options", "_inner", "_groups", "_fresh"})

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
        **options: Any,
    ) -> None:
        self._options = options
        self._inner: lr_scheduler.LRScheduler | None = None
        if begin > 0:
            self._start(_copies(optimizer.param_groups), last_step=-1)
            self._inner = None
        super().__init__(optimizer, "lr", begin=begin, end=end, last_step=last_step, by_epoch=by_epoch, verbose=verbose)

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments of torch's constructor."""
        return self._options

    @classmethod
    def in_iterations(cls, options: Mapping[str, Any], epoch_length: int) -> dict[str, Any]:
        """Raise ConfigError: it is unknown which of torch's options count steps."""
        name = cls.scheduler.__name__
        raise ConfigError(
            f"{name}.convert_to_iter_based: True is not allowed, give by_epoch=False and count in iterations"
        )

    def _get_value(self) -> list[float]:
        groups = self.optimizer.param_groups
        if self._inner is None:
            self._start(groups, self.last_step - 1)
        else:
            self._groups.param_groups = groups  # a torch optimizer replaces its groups when it loads a state
            self._inner.step()
        return self._values()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule, with the state of torch's scheduler under ``inner``."""
        return {**super().state_dict(), "inner": None if self._inner is None else self._progress(self._inner)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; the learning rates themselves are restored with the optimizer's state."""
        regrouped = state["base_values"] != self.base_values
        super().load_state_dict(state)
        inner, self._inner = vars(self).pop("inner"), None
        if inner is not None:
            # torch's constructor sets learning rates, which are restored already, so it gets copies of the groups.
            copies = _copies(self.optimizer.param_groups)
            started = self._start(copies, last_step=-1)
            # Otherwise its own hold: a cycle among other schedules has changed the groups' initial values.
            if regrouped or "base_lrs" not in inner:
                inner = {**inner, "base_lrs": [group["initial_lr"] for group in self.optimizer.param_groups]}
            started.load_state_dict({**started.state_dict(), **inner})
            for group, copied in zip(self.optimizer.param_groups, copies, strict=True):
                for name in copied.keys() - group.keys():
                    group[name] = copied[name]

    @property
    def is_cycle(self) -> bool:
        """Whether it sets the initial learning rates itself, whatever the optimizer's are."""
        return self.scheduler.__name__ in _CYCLES

    @property
    def sets_momentum(self) -> bool:
        """Whether it sets the momentum too."""
        return self.is_cycle and bool(self._options.get("cycle_momentum", True))

    def set_values(self, values: Sequence[float], base_values: Sequence[float]) -> None:
        """See ParamScheduler; of a cycle that has begun the initial values stay, and its momenta are set."""
        if self._inner is None or not self.is_cycle:
            super().set_values(values, base_values)
            return
        groups = self._groups.param_groups = self.optimizer.param_groups
        initial = [group["initial_lr"] for group in groups]
        super().set_values(values, self.base_values)
        for group, value in zip(groups, initial, strict=True):
            group["initial_lr"] = value
        with warnings.catch_warnings():  # torch expects the call within step()
            warnings.simplefilter("ignore")
            self._inner.get_lr()

    def start_from(self, initial: Sequence[float]) -> None:
        """Replace the initial learning rates of torch's scheduler, if it was started."""
        if self._inner is not None and hasattr(self._inner, "base_lrs") and not self.is_cycle:
            self._inner.base_lrs = list(initial)

    def skip(self, steps: int) -> int:
        """Leave out up to ``steps`` steps whose values do not matter to later ones; return the number left out."""
        if self.scheduler.__name__ not in (*_CYCLES, "LambdaLR") or self._inner is None:
            return 0
        self._inner.last_epoch += steps
        self.last_step += steps
        self._global_step += steps
        return steps

    def _start(self, groups: list[dict[str, Any]], last_step: int) -> lr_scheduler.LRScheduler:
        self._groups = _Groups(groups)
        if "base_lr" in self._options and last_step == -1:
            # CyclicLR prefers an existing initial_lr to its own base_lr.
            for group in groups:
                group.pop("initial_lr", None)
        try:
            resumed = {} if last_step == -1 else {"last_epoch": last_step}
            self._inner = self.scheduler(self._groups, **resumed, **self._options)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{self.scheduler.__name__}: {' '.join(str(error).split())}") from error
        self._groups.step()  # torch warns when a scheduler steps before the optimizer
        self._fresh = json.dumps(_plain_values(self._inner.state_dict()))
        return self._inner

    def _progress(self, inner: lr_scheduler.LRScheduler) -> dict[str, Any]:
        fresh = json.loads(self._fresh)
        state = _plain_values(inner.state_dict())
        return {name: value for name, value in state.items() if name == "base_lrs" or value != fresh.get(name)}


@functools.cache
def torch_scheduler(kind: type[lr_scheduler.LRScheduler]) -> type[TorchScheduler]:
    """Return the subclass of TorchScheduler for ``kind``; its signature has the arguments of both."""
    if kind.__name__ in _INSTEAD:
        raise ConfigError(f"{kind.__name__}: is not taken from torch, {_INSTEAD[kind.__name__]}")
    own = inspect.signature(TorchScheduler.__init__).parameters.values()
    window = {p.name: p for p in own if p.kind is not p.VAR_KEYWORD and p.name != "self"}
    merged = list(window.values())
    for p in inspect.signature(kind).parameters.values():
        if p.name not in window and p.name != "last_epoch":
            merged.append(p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY))
    return type(
        kind.__name__,
        (TorchScheduler,),
        {"scheduler": kind, "__signature__": inspect.Signature(merged), "__doc__": kind.__doc__},
    )


class _Groups(Optimizer):
    """An Optimizer that only holds parameter groups: torch's schedulers require one, and a wrapper is none."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        # Optimizer's constructor is not called, because it would copy the groups.
        self.param_groups = groups
        self.defaults = {name: value for name, value in groups[0].items() if name != "params"}

    def step(self, closure: Any = None) -> Any:
        return None


def _copies(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: v.clone() if isinstance(v, Tensor) else v for name, v in group.items()} for group in groups]


def _plain_values(state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``state`` that JSON keeps unchanged."""
    values = {}
    for name, value in state.items():
        try:
            if json.loads(json.dumps(value)) == value:
                values[name] = value
        except (TypeError, ValueError):
            continue
    return values


def _names() -> list[str]:
    return [name for name in lr_scheduler.__all__ if name not in ("LRScheduler", *_INSTEAD)]


def _find(name: str) -> Callable[..., Any] | None:
    known = name in lr_scheduler.__all__ and name != "LRScheduler"
    return torch_scheduler(getattr(lr_scheduler, name)) if known else None


PARAM_SCHEDULERS.add_lookup(_find, _names)
