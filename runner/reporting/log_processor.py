"""LogProcessor: makes log lines and records from the scalars of the message hub."""

from __future__ import annotations

import datetime
import inspect
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from ...core.base.config import Config, PositiveInt, check_call, validate
from ...core.base.errors import ConfigError, suggest
from ...core.base.overriding import refuse_unused
from ...core.device.device import memory_mb, memory_source
from .history import HistoryBuffer, UnreadMean, check_statistic
from .message_hub import AVERAGED, MessageHub

if TYPE_CHECKING:
    from ..run import Run

logger = logging.getLogger("flextrain")

Mode = Literal["train", "val", "test"]


class CustomLog(Config):
    """One entry of ``custom_cfg``."""

    data_src: str
    """The scalar to read, such as ``loss``; ``train/loss`` reads it for training only."""
    method_name: str = "mean"
    """The statistic to compute: mean, min, max, current, or one of ``HistoryBuffer.register_statistics``."""
    log_name: str | None = None
    """The name in the log; default: the scalar's name, whose usual entry it replaces."""
    window_size: PositiveInt | Literal["epoch", "global"] | None = None
    """Number of iterations; "epoch": those of the current epoch; None and "global": all since the start."""
    arguments: dict[str, Any] = {}
    """Further arguments of a registered statistic, given as keys of the entry."""

    @property
    def is_registered(self) -> bool:
        """True if the statistic is not one of flextrain's."""
        return self.method_name in HistoryBuffer._statistics_methods

    @property
    def name(self) -> str:
        """The scalar's name without the mode."""
        return self.data_src.partition("/")[2] if self.mode else self.data_src

    @property
    def mode(self) -> str:
        """The mode that the entry is for; empty: all modes."""
        head, slash, _ = self.data_src.partition("/")
        return head if slash and head in ("train", "val", "test") else ""


@dataclass
class _Plan:
    """The scalars to show in one mode; valid while the hub holds ``size`` scalars."""

    hub: MessageHub
    size: int
    scalars: list[tuple[str, HistoryBuffer, bool]]
    """Name, values, and True if a mean is shown."""
    at: int | None = None
    """The iteration of the newest line."""
    before: dict[str, int] = field(default_factory=dict)
    """The number of updates of each scalar at the line before the newest."""
    seen: dict[str, int] = field(default_factory=dict)
    """The number of updates of each scalar at the newest line."""

    def updated(self, at: int) -> list[tuple[str, HistoryBuffer, bool]]:
        """Return the scalars updated since the line before ``at``; after resuming, old scalars may no longer be."""
        if at != self.at:  # a line may be made twice, for two callers
            self.at, self.before = at, self.seen
        self.seen = {name: buffer.updates for name, buffer, _ in self.scalars}
        return [scalar for scalar in self.scalars if self.seen[scalar[0]] != self.before.get(scalar[0], 0)]


class LogProcessor:
    """Makes log lines, and records for reporters, from the scalars that were updated since the last line.

    Args:
        window_size: number of iterations that a mean covers.
        by_epoch: write ``Epoch(train) [1][ 10/196]`` rather than ``Iter(train) [  10/1000]``.
        custom_cfg: more statistics, ``[dict(data_src='loss', log_name='loss_epoch', window_size='epoch')]``.
        num_digits: digits after the decimal point.
        log_with_hierarchy: name scalars ``train/loss`` in records, rather than ``loss``.
        mean_pattern: regular expression; a scalar whose name it finds shows a mean, others their newest value.
    """

    _is_validated = False
    _sought: frozenset[tuple[str, str]] = frozenset()
    """Entries of ``custom_cfg``, and modes, whose scalars have been looked for."""

    def __init__(
        self,
        window_size: int = 10,
        by_epoch: bool = True,
        custom_cfg: list[dict[str, Any]] | None = None,
        num_digits: int = 4,
        log_with_hierarchy: bool = False,
        mean_pattern: str = r"loss|\b(time|data_time|grad_norm)\b",
    ) -> None:
        if window_size < 1:
            raise ConfigError(f"log_processor.window_size: {window_size} is not allowed, give 1 or more")
        if num_digits < 0:
            raise ConfigError(f"log_processor.num_digits: {num_digits} is not allowed, give 0 or more")
        self.window_size = window_size
        self.by_epoch = by_epoch
        self.num_digits = num_digits
        self.log_with_hierarchy = log_with_hierarchy
        try:
            self.mean_pattern = re.compile(mean_pattern)
        except re.error as error:
            why = f'log_processor.mean_pattern: "{mean_pattern}" is no regular expression, {error}'
            raise ConfigError(why) from None
        self.custom = [_custom_log(cfg, i, by_epoch) for i, cfg in enumerate(custom_cfg or [])]
        names = [(cfg.log_name or cfg.name, cfg.mode) for cfg in self.custom]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ConfigError(f'log_processor.custom_cfg[{i}]: "{name[0]}" is logged twice, give another log_name')
        self._plans: dict[str, _Plan] = {}
        self._memory, self._memory_read = 0, -math.inf

    def prepare(self, runner: Run, mode: Mode) -> None:
        """Make the message hub keep as many values as the statistics of ``mode`` need."""
        hub, length = runner.message_hub, self._length(runner, mode)
        self._is_validated = runner.val_loop is not None if mode == "train" else self._is_validated
        hub.retain_all(self.window_size)
        for name in ("time", "data_time") if mode != "train" else ():
            hub.retain(f"{mode}/{name}", length)
        for cfg in self.custom:
            if cfg.mode in ("", mode) and cfg.method_name != "current":
                size = length if cfg.window_size == "epoch" else cfg.window_size
                hub.retain(f"{mode}/{cfg.name}", size if isinstance(size, int) else None)

    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: Mode) -> tuple[dict[str, Any], str]:
        """Return the record and the line of an iteration; in training a collective, which all processes call alike.

        The training loss is the mean over the processes; all other scalars are this process's own.
        """
        return self._take_figures(runner, batch_idx, mode)()

    def later_log_after_iter(self, runner: Run, batch_idx: int, mode: Mode) -> Callable[[], tuple[dict[str, Any], str]]:
        """Return a function that makes the record and line of ``get_log_after_iter`` from the current scalars.

        Training scalars may stay on the device until it is called, to be read together with those of other lines.
        """
        if type(self).get_log_after_iter is not LogProcessor.get_log_after_iter:
            log = self.get_log_after_iter(runner, batch_idx, mode)
            return lambda: log
        means = self._unread(runner) if mode == "train" else None
        if means is None:
            return self._take_figures(runner, batch_idx, mode)
        return self._log_of(runner, batch_idx, mode, partial(_read, runner.message_hub, means))

    def _take_figures(self, runner: Run, batch_idx: int, mode: Mode) -> Callable[[], tuple[dict[str, Any], str]]:
        hub = runner.message_hub
        hub.fetch(f"{mode}/", reduce=AVERAGED if mode == "train" else None)
        plan = self._plan(hub, mode)
        # Validation has its own line at the end, so every scalar is shown here.
        scalars = plan.updated(runner.iter) if mode == "train" else plan.scalars
        tag = self._figures(hub, scalars, mode, batch_idx, self.window_size)
        return self._log_of(runner, batch_idx, mode, lambda: tag)

    def _unread(self, runner: Run) -> dict[str, UnreadMean] | None:
        """Return the unread scalars of a training line by name; None if they must be read now."""
        hub = runner.message_hub
        if self.custom or hub.reads_every_line or not hub.topology.is_alone:  # the loss is averaged when it is read
            return None
        scalars = self._plan(hub, "train").updated(runner.iter)
        means = {}
        for name, buffer, is_mean in scalars:
            mean = buffer.unread_mean(self.window_size if is_mean else 1)
            if mean is None:
                return None
            means[name] = mean
        hub.waiting += means.values()
        return means

    def _log_of(
        self, runner: Run, batch_idx: int, mode: Mode, figures: Callable[[], dict[str, float]]
    ) -> Callable[[], tuple[dict[str, Any], str]]:
        eta = runner.message_hub.get_info("eta")
        return partial(self._log_of_iter, runner, mode, batch_idx, figures, runner.iter, self._epoch(runner, mode), eta)

    def _log_of_iter(
        self,
        runner: Run,
        mode: Mode,
        batch_idx: int,
        figures: Callable[[], dict[str, float]],
        iteration: int,
        epoch: int,
        eta: float | None,
    ) -> tuple[dict[str, Any], str]:
        tag = dict(figures())
        record = self._record(tag, mode)
        if self.by_epoch and mode != "test":
            record["epoch"] = epoch
        record["iter"] = iteration + 1
        record["memory"] = self._peak_memory(runner)

        digits = self.num_digits
        rates = [f"{name}: {tag.pop(name):.{digits}e}" for name in list(tag) if name.endswith("lr")]
        fields = ["  ".join(rates)]
        if "time" in tag and "data_time" in tag:
            if eta is not None:
                fields.append(f"eta: {datetime.timedelta(seconds=int(eta))}")
            fields += [f"{name}: {tag.pop(name):.{digits}f}" for name in ("time", "data_time")]
        fields.append(f"memory: {record['memory']}")
        if mode == "train":
            fields += self._fields(tag)
        done = iteration + 1 if mode == "train" and not self.by_epoch else batch_idx + 1
        return record, f"{self._header(runner, mode, done, epoch)}  {'  '.join(fields)}"

    def get_log_after_epoch(
        self, runner: Any, batch_idx: int, mode: Mode, with_non_scalar: bool = False
    ) -> tuple[dict[str, Any], str]:
        """Return the record and the line of a validation or test pass of ``batch_idx`` batches."""
        hub = runner.message_hub
        hub.fetch(f"{mode}/")
        # Metrics come once per pass: a mean over the last ten values would cover ten epochs.
        tag = self._figures(hub, self._plan(hub, mode).updated(runner.iter), mode, batch_idx - 1, window=1)
        custom = {cfg.log_name or cfg.name for cfg in self.custom}
        times: dict[str, float] = {name: tag.pop(name) for name in ("data_time", "time") if name in tag}
        for name in times.keys() - custom:
            times[name] = hub.get_scalar(f"{mode}/{name}").mean(batch_idx)
        others = {k.removeprefix(f"{mode}/"): v for k, v in hub.runtime_info.items() if k.startswith(f"{mode}/")}
        fields = [*self._fields(tag), *self._fields(others), *self._fields(times)]
        record = self._record({**tag, **(others if with_non_scalar else {}), **times}, mode)
        head = self._header(runner, mode, self._length(runner, mode), self._epoch(runner, mode))
        return record, f"{head}    {'  '.join(fields)}"

    # Parts of a line

    def _peak_memory(self, runner: Run) -> int:
        """Return the peak memory in MiB, queried once per second because that takes longer than the rest of a line."""
        now = time.monotonic()
        if now - self._memory_read > 1:
            self._memory, self._memory_read = int(memory_mb(runner.strategy.device)), now
        return self._memory

    def _header(self, runner: Run, mode: Mode, done: int, epoch: int) -> str:
        length = runner.max_iters if mode == "train" and not self.by_epoch else self._length(runner, mode)
        at = f"[{done:>{len(str(length))}}/{length}]"
        if not self.by_epoch:
            return f"Iter({mode}) {at}"
        if mode == "test":
            return f"Epoch(test) {at}"
        return f"Epoch({mode}) [{epoch}]{at}"

    def _epoch(self, runner: Run, mode: Mode) -> int:
        # Validation runs after its epoch was counted.
        return runner.epoch + 1 if mode == "train" else runner.epoch

    def _fields(self, values: Mapping[str, Any]) -> Iterator[str]:
        digits = self.num_digits
        for name, value in values.items():
            yield f"{name}: {value:.{digits}f}" if isinstance(value, float) else f"{name}: {_shown(value)}"

    def _record(self, tag: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
        if not self.log_with_hierarchy:
            return dict(tag)
        return {f"{mode}/{name}": value for name, value in tag.items()}

    # Scalars

    def _figures(
        self, hub: MessageHub, scalars: list[tuple[str, HistoryBuffer, bool]], mode: Mode, batch_idx: int, window: int
    ) -> dict[str, float]:
        tag = {name: buffer.mean(window) if is_mean else buffer.current() for name, buffer, is_mean in scalars}
        if not self.custom:
            return tag
        values = dict(tag)
        for i, cfg in enumerate(self.custom):
            self._warn_of_missing(hub, i, cfg, mode)
            if cfg.name in values and cfg.mode in ("", mode):
                size = batch_idx + 1 if cfg.window_size == "epoch" else cfg.window_size
                buffer = hub.get_scalar(f"{mode}/{cfg.name}")
                size = min(size, len(buffer)) if isinstance(size, int) else None
                tag[cfg.log_name or cfg.name] = _statistic(buffer, cfg, size)
        return tag

    def _warn_of_missing(self, hub: MessageHub, i: int, cfg: CustomLog, mode: Mode) -> None:
        """Say at the first line of a mode that an entry for it has no scalar; of all modes, at the first line of the last."""
        is_due = cfg.mode == mode or (not cfg.mode and not (mode == "train" and self._is_validated))
        if (cfg.data_src, mode) in self._sought or not is_due:
            return
        self._sought |= {(cfg.data_src, mode)}
        modes = (mode,) if cfg.mode else ("train", "val", "test")
        known = {key.partition("/")[2] for key in hub.log_scalars if key.startswith(modes)}
        if cfg.name not in known:
            hint = suggest(cfg.name, known) or f", there are {', '.join(sorted(known))}"
            logger.warning(f'log_processor.custom_cfg[{i}].data_src: no scalar "{cfg.data_src}" so far{hint}')

    def _plan(self, hub: MessageHub, mode: Mode) -> _Plan:
        """Return which scalars to show and how; computed again only when the hub has a new scalar."""
        plan, scalars = self._plans.get(mode), hub.log_scalars
        if plan is None or plan.hub is not hub or plan.size != len(scalars):
            own = [(key[len(mode) + 1 :], buffer) for key, buffer in scalars.items() if key.startswith(f"{mode}/")]
            shown = [(name, buffer, self.mean_pattern.search(name) is not None) for name, buffer in own if len(buffer)]
            # A scalar without a value yet must be looked up again at the next line.
            size = len(scalars) if len(shown) == len(own) else -1
            if plan is None or plan.hub is not hub:
                plan = self._plans[mode] = _Plan(hub, size, shown)
            plan.size, plan.scalars = size, shown
        return plan

    def _length(self, runner: Run, mode: Mode) -> int:
        if mode == "train":
            return runner.train_loop.epoch_length
        return num_batches(runner, mode)


def _read(hub: MessageHub, means: Mapping[str, UnreadMean]) -> dict[str, float]:
    """Return the scalars of a line; the first pending line reads those of all."""
    if hub.waiting:
        hub.fetch("train/", reduce=AVERAGED)
    return {name: mean.mean() for name, mean in means.items()}


def units(runner: Run) -> str:
    """Return the line that says what the figures of log lines mean."""
    several = _of_several(runner) if runner.world_size > 1 else ""
    return (
        "In the lines below: time and data_time in seconds per iteration, memory in MiB "
        f"({memory_source(runner.strategy.device)}){several}"
    )


def _of_several(runner: Run) -> str:
    # Processes with the same samples have the same loss.
    shares = runner.strategy.topology.data.count > 1
    mean = f" loss is the mean over the {runner.world_size} processes," if shares else ""
    return f";{mean} times and memory are those of rank 0"


def num_batches(runner: Run, mode: str) -> int:
    """Return the number of batches of this process in a pass over the validation or test data."""
    loop = runner.val_loop if mode == "val" else runner.test_loop
    if loop is None:  # only a loop of the user's can call hooks of a pass that there is not
        raise ConfigError(f"call_hook: hooks of {mode} are called, but there is no {mode}_dataloader")
    return int(loop.num_batches)


_LINES = "override get_log_after_iter or get_log_after_epoch"
_NEVER_CALLED = dict.fromkeys(
    ("_collect_scalars", "_collect_non_scalars", "_get_max_memory", "_get_iter", "_get_epoch", "_parse_windows_size"),
    _LINES,
)
"""Methods of MMEngine's LogProcessor that are never called here."""


def build_log_processor(cfg: Any, by_epoch: bool) -> LogProcessor:
    """Build the log processor from ``cfg``; without ``by_epoch`` in it, lines count as the training loop does.

    Raises:
        ConfigError: an unknown or invalid argument.
    """
    if isinstance(cfg, LogProcessor):
        refuse_unused(cfg, _NEVER_CALLED, "log_processor")
        return cfg
    if cfg is None:
        return LogProcessor(by_epoch=by_epoch)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"log_processor: {cfg!r} is not allowed, give a dict or a LogProcessor")
    kwargs = {"by_epoch": by_epoch, **cfg}
    kind = kwargs.pop("type", LogProcessor)
    if kind == "LogProcessor":
        kind = LogProcessor
    if not (isinstance(kind, type) and issubclass(kind, LogProcessor)):
        raise ConfigError(f"log_processor.type: {kind!r} is not allowed, give LogProcessor or a subclass of it")
    refuse_unused(kind, _NEVER_CALLED, "log_processor.type")
    check_call(kind, kwargs, "log_processor")
    return kind(**kwargs)


def _statistic(buffer: HistoryBuffer, cfg: CustomLog, size: int | None) -> Any:
    if cfg.method_name == "current":
        return buffer.current()
    if not cfg.is_registered:
        return buffer.statistics(cfg.method_name, size)
    window = {"window_size": size} if "window_size" in cfg.model_fields_set else {}
    return buffer.statistics(cfg.method_name, **window, **cfg.arguments)


def _custom_log(cfg: Any, i: int, by_epoch: bool) -> CustomLog:
    where = f"log_processor.custom_cfg[{i}]"
    method = HistoryBuffer._statistics_methods.get(str(cfg.get("method_name"))) if isinstance(cfg, Mapping) else None
    if method is not None:
        first, *_ = inspect.signature(method).parameters
        arguments = {key: value for key, value in cfg.items() if key not in CustomLog.model_fields}
        window = {"window_size": None} if "window_size" in cfg else {}
        check_call(method, {**arguments, **window}, where, (first,))
        cfg = {**{key: value for key, value in cfg.items() if key not in arguments}, "arguments": arguments}
    custom = validate(CustomLog, cfg, where)
    check_statistic(custom.method_name, f"{where}.method_name")
    if custom.window_size == "epoch" and not by_epoch:
        raise ConfigError(
            f'log_processor.custom_cfg[{i}].window_size: "epoch" has no meaning with by_epoch=False, give a number or "global"'
        )
    return custom


def _shown(value: Any) -> str:
    # A table of numbers starts on a new line.
    return f"\n{value}\n" if isinstance(value, (Tensor, np.ndarray)) else str(value)
