"""ParamScheduler, the base class of all schedulers: the window [begin, end), the step counter, the state."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ...core.base.errors import CheckpointError, ConfigError, counted, suggest

# StepOrder: notices a scheduler that steps before its optimizer has made an update.


logger = logging.getLogger("flextrain")


class StepOrder:
    """Warns if the first step of a scheduler comes before an update of its optimizer: a value would never be used.

    The runner keeps the order; a loop of one's own may not. Nothing is known of optimizers that are not torch's.

    Args:
        optimizer: an OptimWrapper or a torch optimizer; it has a hook until ``close``.
    """

    def __init__(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        self._is_early = isinstance(inner, Optimizer)
        self._handle = inner.register_step_post_hook(self._has_updated) if self._is_early else None

    def _has_updated(self, *_: Any) -> None:
        self._is_early = False

    def check(self, scheduler: str) -> None:
        """Warn if there was no update so far, and close; called at the first step after that of the constructor."""
        self.close()
        if self._is_early:
            logger.warning(
                f"{scheduler}.step: called before the optimizer's first step, so a value is never used; call "
                "optimizer.step() before scheduler.step()"
            )

    def close(self) -> None:
        """Take the hook off the optimizer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


# No `from __future__ import annotations` here: the fields' types must be objects, because configurations are checked
# against the constructors that dataclass generates for subclasses in other modules.


INF = int(1e9)
"""The ``end`` of a window without end."""


SchedulerT = TypeVar("SchedulerT", bound="ParamScheduler")


class HasParamGroups(Protocol):
    """The object that a scheduler changes: an OptimWrapper or a torch optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(eq=False)
class ParamScheduler:
    """Sets ``param_name`` in every parameter group, once per `step`, while the step lies in [begin, end).

    The constructor makes step 0. Subclasses compute in `_next` a value from the value before, so several schedulers may
    act on one optimizer, at the same time or in successive windows. The values are in the optimizer's groups and are
    saved with them; `state_dict` holds the position in the schedule and no configuration: after `load_state_dict` the
    arguments given to the constructor apply from there on. A runner goes on with the values of its own arguments.

    Args:
        optimizer: an OptimWrapper or a torch optimizer.
        param_name: key in the groups; "momentum" stands for the first of ``betas`` where a group has no momentum.
        begin: first step at which the values are set.
        end: first step after the window, at which the values are no longer set; default: the window has no end.
        last_step: the last step made inside the window, to continue without a saved state.
        by_epoch: steps are epochs; otherwise iterations, which are updates of the optimizer.
        verbose: log every value that is set.

    Raises:
        ConfigError: a value out of range, or an optimizer without ``param_name``.
    """

    optimizer: HasParamGroups = field(repr=False)
    param_name: str
    _: KW_ONLY
    begin: int = 0
    end: int = INF
    last_step: int = -1
    by_epoch: bool = True
    verbose: bool = False
    _order: StepOrder | None = field(default=None, init=False, repr=False)

    need_val_args: ClassVar[bool] = False
    """Whether `step` needs the metrics of a validation epoch."""
    _counts: ClassVar[tuple[str, ...]] = ()
    """The arguments, besides the window, that count steps."""
    _unsaved: ClassVar[frozenset[str]] = frozenset()
    """Attributes that are not saved, besides the constructor's arguments."""

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "param_groups"):
            given = type(self.optimizer).__name__
            raise ConfigError(
                f"{self._where('optimizer')}: {given} is not allowed, give an OptimWrapper or a torch optimizer"
            )
        self._prepare()
        initial = f"initial_{self.param_name}"
        for i, group in enumerate(self.optimizer.param_groups):
            if self.last_step >= 0 and initial not in group:
                raise ConfigError(f"{self._where('last_step')}: {self.last_step} needs {initial} in param_groups[{i}]")
            group.setdefault(initial, float(self._read(group)))
        self.base_values = [float(group[initial]) for group in self.optimizer.param_groups]
        self._global_step = -1 if self.last_step < 0 else self.begin + self.last_step
        self._last_value = self._values()
        self.step()
        if not self.need_val_args:  # a validation may come before the first update
            self._order = StepOrder(self.optimizer)

    @classmethod
    def build_iter_from_epoch(
        cls: type[SchedulerT], *args: Any, epoch_length: int | None = None, by_epoch: bool = True, **options: Any
    ) -> SchedulerT:
        """Return a scheduler that steps every iteration, from arguments in epochs of ``epoch_length`` iterations."""
        if not by_epoch:
            raise ConfigError(
                f"{cls.__name__}.by_epoch: False is not allowed, only epochs can be converted to iterations"
            )
        if epoch_length is None or epoch_length <= 0:
            raise ConfigError(f"{cls.__name__}.epoch_length: {epoch_length} is not allowed, give a positive int")
        return cls(*args, **cls.in_iterations(options, epoch_length))

    @classmethod
    def in_iterations(cls, options: Mapping[str, Any], epoch_length: int) -> dict[str, Any]:
        """Return the constructor's arguments ``options`` with epochs (also fractions) replaced by iterations."""
        counts = ("begin", "end", *cls._counts)
        return {
            **{name: _scaled(value, epoch_length) if name in counts else value for name, value in options.items()},
            "by_epoch": False,
        }

    def step(self) -> None:
        """Advance by one step and set the values if it lies in the window."""
        self._global_step += 1
        if self._order is not None:
            self._order.check(type(self).__name__)
            self._order = None
        if self.begin <= self._global_step < self.end:
            self.last_step += 1
            if len(self.base_values) != len(self.optimizer.param_groups):
                raise ConfigError(
                    f"{type(self).__name__}: began with {counted(len(self.base_values), 'parameter group')}, and the optimizer has "
                    f"{len(self.optimizer.param_groups)} now; give all groups from the start, with frozen parameters if they are to be "
                    "trained later"
                )
            for group, value in zip(self.optimizer.param_groups, self._get_value(), strict=True):
                self._write(group, value)
        self._last_value = self._values()

    def expect_step(self) -> None:
        """Take the next `step` as it comes, also if it is the first and the optimizer has made no update."""
        if self._order is not None:
            self._order.close()
            self._order = None

    def note_values(self) -> None:
        """Take the present values as those after the last step."""
        self._last_value = self._values()

    @property
    def has_begun(self) -> bool:
        """Whether steps have been made since step 0."""
        return self._global_step > 0

    def check_metrics(self, names: Collection[str]) -> None:
        """Raise ConfigError if `step` needs a metric that is not in ``names``."""

    def get_last_value(self) -> list[float]:
        """Return the values after the last step, one per group."""
        return [float(value) for value in self._last_value]

    def get_values(self) -> list[float]:
        """Return the current values, one per group, whichever scheduler set them."""
        return [float(value) for value in self._values()]

    def set_values(self, values: Sequence[float], base_values: Sequence[float]) -> None:
        """Set ``values``, one per group; scaled if a group's initial value differs from ``base_values``.

        Raises:
            CheckpointError: the number of groups differs.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(values):
            raise CheckpointError(
                f"{type(self).__name__}: has {self.param_name} of {len(values)} groups, the optimizer has {len(groups)}"
            )
        for group, own, value, base in zip(groups, self.base_values, values, base_values, strict=True):
            self._write(group, value if own == base or base == 0 else value * own / base)
            group[f"initial_{self.param_name}"] = own
        self._last_value = self._values()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule and the current values, without the constructor's arguments."""
        configuration = {f.name for f in fields(self)} - {"last_step"} | self._unsaved
        state = {name: value for name, value in vars(self).items() if name not in configuration}
        return {**state, "_last_value": self.get_last_value(), "values": self.get_values()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; the values themselves are restored with the optimizer's state, or by `set_values`.

        If the state was saved for other groups, the initial values are read from the present groups.

        Raises:
            CheckpointError: another kind of scheduler saved the state.
        """
        name, expected = type(self).__name__, self.state_dict()
        if differing := sorted(set(state) ^ set(expected)):
            raise CheckpointError(
                f"{name}: saved by another kind of scheduler, the states differ in {', '.join(differing)}"
            )
        self.expect_step()  # the state may be that of an epoch's end, where a step is due before any update
        regrouped = state["base_values"] != self.base_values
        vars(self).update({name: value for name, value in state.items() if name != "values"})
        if regrouped:
            initial = f"initial_{self.param_name}"
            self.base_values = [float(group[initial]) for group in self.optimizer.param_groups]
            self._last_value = self._values()

    def _get_value(self) -> list[float]:
        """Return the value of every group at `last_step`; subclasses override this or `_next`."""
        return [self._next(value, base) for value, base in zip(self._values(), self.base_values, strict=True)]

    def _next(self, value: float, base: float) -> float:
        """Return the value after ``value`` at `last_step`, in a group with the initial value ``base``.

        ``value`` may be a 0-dim tensor (a capturable optimizer's lr); plain arithmetic does not wait for its device.
        """
        raise NotImplementedError

    def _prepare(self) -> None:
        """Raise ConfigError for arguments out of range, and compute the defaults; subclasses extend this."""
        self._require(self.begin >= 0, "begin", "an int from 0 on")
        self._require(self.end > self.begin, "end", f"an int larger than begin={self.begin}")
        self._require(self.last_step >= -1, "last_step", "an int from -1 on")
        for i, group in enumerate(self.optimizer.param_groups):
            if self.param_name not in group and not self._is_beta(group):
                known = [key for key in group if key != "params"]
                hint = suggest(self.param_name, known) or f", it has {', '.join(known)}"
                raise ConfigError(
                    f"{self._where('param_name')}: no {self.param_name} in the optimizer's group {i}{hint}"
                )

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"{self._where(name)}: {getattr(self, name)!r} is not allowed, give {wanted}")

    def _where(self, name: str) -> str:
        return f"{type(self).__name__}.{name}"

    def _is_beta(self, group: dict[str, Any]) -> bool:
        return self.param_name == "momentum" and "momentum" not in group and "betas" in group

    def _read(self, group: dict[str, Any]) -> Any:
        return group["betas"][0] if self._is_beta(group) else group[self.param_name]

    def _write(self, group: dict[str, Any], value: float) -> None:
        if self._is_beta(group):
            group["betas"] = (value, *group["betas"][1:])
        elif isinstance(group[self.param_name], Tensor):
            group[self.param_name].fill_(value)
        else:
            group[self.param_name] = value
        if self.verbose:
            logger.info(
                "%s: %s is %.4e from step %d on", type(self).__name__, self.param_name, value, self._global_step
            )

    def _values(self) -> list[Any]:
        values = [self._read(group) for group in self.optimizer.param_groups]
        return [value.clone() if isinstance(value, Tensor) else value for value in values]


@dataclass(eq=False)
class LRScheduler(ParamScheduler):
    """Mixin that sets ``param_name`` to "lr"."""

    param_name: str = field(default="lr", init=False)


@dataclass(eq=False)
class MomentumScheduler(ParamScheduler):
    """Mixin that sets ``param_name`` to "momentum": SGD's momentum, or the first of Adam's ``betas``."""

    param_name: str = field(default="momentum", init=False)


def _scaled(value: Any, epoch_length: int) -> Any:
    """Convert epochs to iterations; a value that is no number stays, and the check of the arguments refuses it."""
    if isinstance(value, (list, tuple)):
        return [_scaled(item, epoch_length) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value == INF:
        return value
    return int(value * epoch_length)
