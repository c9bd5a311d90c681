"""TorchFTStrategy: a strategy in each of several groups of processes, which average their gradients while groups come and go."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flextrain import (
    STRATEGIES,
    ConfigError,
    FSDPStrategy,
    Hook,
    ResumeFrom,
    SingleDeviceStrategy,
    Strategy,
    StrategyError,
)
from flextrain.strategies import StrategyConfig
from flextrain.strategies.parts import cannot_repeat, hooks_of

from . import record
from .groups import START, Groups, Member, check_lighthouse
from .rows import rows_in, some_rows, span_of

INNER = (SingleDeviceStrategy, FSDPStrategy)
_FAILURES = 100
"""Meetings in a row that may fail before a group gives up."""


class TorchFTHook(Hook):
    """Gives the strategy its run, and keeps the number that tells which updates the weights are made of. The strategy adds it.

    Args:
        strategy: the strategy.
    """

    priority = "VERY_HIGH"  # the record of an update comes before whatever may end the process

    def __init__(self, strategy: _InGroups) -> None:
        self.strategy = strategy

    def before_run(self, runner: Any) -> None:
        self.strategy.run = runner

    def before_train(self, runner: Any) -> None:
        self.strategy.begin_training()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.strategy.is_due = True

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.rank == 0 and self.strategy.made is not None:
            record.append(runner.work_dir, self.strategy.made)
        self.strategy.made = None

    def after_train(self, runner: Any) -> None:
        self.strategy.end_training()

    def state_dict(self) -> dict[str, int | None]:
        return {"head": self.strategy.head}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        self.strategy.head = state["head"]


class _InGroups(Strategy):
    """What TorchFTStrategy adds to the strategy within a group, which comes after this class among the bases.

    Attributes:
        groups_config: the options of TorchFTStrategy.
        run: the runner.
        head: names the updates that the weights are made of, the same on all processes of the group; None: not yet, see ``_meet``.
        is_due: whether the next window is that of an update, and not one that is run again to look at it.
        made: the record of the last update; None: none was made since the last was written.
    """

    groups_config: TorchFTStrategy.Config
    run: Any = None
    head: int | None = None
    is_due = False
    made: dict[str, Any] | None = None
    groups: Groups | None = None

    def join(self) -> None:
        super().join()
        if self.groups_config.lighthouse is None:
            raise ConfigError(
                f"strategy.lighthouse: missing, give http://host:port or set TORCHFT_LIGHTHOUSE; `{START}` starts one"
            )
        check_lighthouse(self.groups_config.lighthouse)

    def setup(self, model: nn.Module, optim: Any = None) -> tuple[nn.Module, Any]:
        for name, part in model.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                raise StrategyError(
                    f"TorchFTStrategy: {name or 'the model'} is a {type(part).__name__}, whose running statistics would differ "
                    "between groups, give nn.GroupNorm or nn.LayerNorm"
                )
        return super().setup(model, optim)

    def leave(self) -> None:
        if self.groups is not None:
            self.groups.close()
            self.groups = None
        self.run = None
        super().leave()

    # An update

    def run_window(self, window: Sequence[Any], step: Any) -> dict[str, Tensor]:
        if not self.is_due:
            return super().run_window(window, step)
        self.is_due = False
        assert self.optim is not None
        rows = [self._rows_in(batch) for batch in window]
        if callable(getattr(self.module, "loss_weight", None)):
            raise StrategyError(
                "TorchFTStrategy: model.loss_weight is not supported, a loss has to be a mean over samples"
            )
        while True:
            members = self._meet(lambda members: len(members) >= self.groups_config.min_replicas)
            assert self.groups is not None
            parts = [
                self._micro_batch(batch, count, i, step)
                for i, (batch, count) in enumerate(zip(window, rows, strict=True))
            ]
            was_added = self._add(parts, rows)
            if self.groups.commit() and was_added:
                break
            self.optim.zero_grad()  # whole gradients, which no strategy keeps elsewhere: all micro-batches have run
            self.run.logger.warning("A group was lost in the middle of an update, which is made again")
        parent = members[self.groups.rank].head
        self.head = record.next_head(parent, self.run.iter, [member.group for member in members])
        self.made = dict(
            update=self.run.iter + 1, epoch=self.run.epoch, batch=self.run.train_loop.inner, rows=rows,
            groups=len(members), group=self.groups.rank, head=self.head, parent=parent,
        )  # fmt: skip
        return step.mean(parts)  # type: ignore[no-any-return]

    def _rows_in(self, batch: Any) -> int:
        loader = self.run.train_loop.dataloader
        found, most = rows_in(batch), getattr(loader, "batch_size", None)
        if getattr(getattr(loader, "collate_fn", None), "__name__", "") == "pseudo_collate":
            raise StrategyError(
                'train_dataloader.collate_fn: pseudo_collate makes lists of samples, give "default_collate", or a function that '
                "makes tensors with a row for each sample"
            )
        if isinstance(most, int) and found > most:
            raise StrategyError(
                f"train_dataloader: a batch of {most} samples has tensors of {found} rows, and TorchFTStrategy divides rows"
            )
        return found

    def _micro_batch(self, batch: Any, rows: int, index: int, step: Any) -> dict[str, Tensor]:
        """Run forward and backward of this group's samples, and return what to log of them, as terms of the mean over all."""
        assert self.groups is not None
        reduces = step.begin(index)
        start, stop = span_of(rows, self.groups.rank, self.groups.count)
        share = (stop - start) / rows
        if start == stop:  # the processes of a group run equally many forwards
            start, stop = 0, 1
        with self.grad_sync(reduces):
            loss, values = step.forward(batch if stop - start == rows else some_rows(batch, start, stop))
            step.backward(loss if share == 1 else loss * share, index)
        return {name: value.detach() * share for name, value in values.items()}

    def _add(self, parts: list[dict[str, Tensor]], rows: list[int]) -> bool:
        """Replace gradients and values to log by their sums over the groups."""
        assert self.groups is not None
        if self.groups.count == 1:
            return True
        trained = [
            parameter
            for wrapper in (self.optim.wrappers.values() if self.optim is not None else ())
            for group in wrapper.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        is_used = [float(p.grad is not None) for p in trained]
        # In float64 on the host: counts are exact, and values of any dtype are.
        values = [(part, name) for part in parts for name in sorted(part)]
        shape = torch.tensor([*map(float, rows), float(len(values)), *is_used], dtype=torch.float64)
        own = shape.clone()
        logged = [part[name].double() for part, name in values]
        message = [shape, torch.stack(logged).cpu()] if logged else [shape]
        if not self.groups.add(message):
            return False
        same = len(rows) + 1
        if not torch.equal(shape[:same], own[:same] * self.groups.count):
            raise StrategyError(
                f"TorchFTStrategy: this group has micro-batches of {rows} samples and {len(values)} values to log, and other groups "
                "have others; give all the same data, batch_size, accumulation and seed"
            )
        if not self.groups.add(
            [g.to_local() if isinstance(g, DTensor) else g for g in (one.detach() for one in gradients)]
        ):
            return False
        for parameter, gradient, users in zip(trained, gradients, shape[same:].tolist(), strict=True):
            parameter.grad = gradient if users else None  # what no group has used does not decay
        for (part, name), value in zip(values, message[-1].tolist(), strict=True) if values else ():
            part[name] = torch.as_tensor(value, dtype=part[name].dtype, device=part[name].device)
        return True

    # Meetings

    def begin_training(self) -> None:
        """Forget a checkpoint that was received; called when it is loaded."""
        if self.run.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            record.begin(self.run.work_dir)

    def end_training(self) -> None:
        """Wait until every group has the last update, because one that lacks it may need this one."""
        if self.groups is not None and self.groups.count > 1:
            try:
                self._meet(lambda members: True)
            except StrategyError as error:
                self.run.logger.info(f"The other groups have ended already: {error}")

    @property
    def _folder(self) -> Path:
        return Path(self.run.work_dir) / "from_another_group"

    def _meet(self, is_enough: Callable[[list[Member]], bool]) -> list[Member]:
        """Meet the other groups until all have the same updates; one that is behind is given a checkpoint.

        Raises:
            ResumeFrom: this group is behind, and has got one.
        """
        options = self.groups_config
        if self.groups is None:
            self.groups = Groups(
                str(options.lighthouse), options.min_replicas, options.quorum_timeout_s, options.exchange_timeout_s,
                self.topology.rank, self.topology.world_size,
            )  # fmt: skip
        if self.head is None:  # nothing says yet that another group has the same weights
            self.head = self.groups.group
        groups, has_told = self.groups, False
        while groups.failures < _FAILURES:
            members = groups.meet(self.run.iter, self.head, self.run.seed)
            if members is None:
                groups.commit()  # tells the lighthouse that connections have to be made anew
                continue
            if len(seeds := {member.seed for member in members}) > 1:
                raise StrategyError(
                    f"randomness.seed: groups have the seeds {', '.join(map(str, sorted(seeds)))}, give all the same"
                )
            furthest = max(member.step for member in members)
            source = next(i for i, member in enumerate(members) if member.step == furthest)
            if any(member[:2] != members[source][:2] for member in members):
                self._bring_up(members, source)
            elif is_enough(members):
                return members
            elif not has_told:
                has_told = True
                self.run.logger.info(
                    f"Waits for groups: {len(members)} of {options.min_replicas} are here (strategy.min_replicas)"
                )
            else:
                time.sleep(0.5)
        raise StrategyError(
            f"TorchFTStrategy: {_FAILURES} meetings with the other groups have failed one after the other"
        )

    def _bring_up(self, members: list[Member], source: int) -> None:
        """Give a checkpoint of group ``source`` to those that have other weights; each of them leaves by ResumeFrom."""
        assert self.groups is not None
        name = f"iter_{members[source].step}"
        if self.groups.rank == source:
            self.run.save_checkpoint(self._folder, name)
        was_given = self.groups.give(self._folder, source)
        is_behind = members[self.groups.rank][:2] != members[source][:2]
        if was_given and is_behind:
            raise ResumeFrom(
                self._folder / name, f"Got iteration {members[source].step} from another of {len(members)} groups"
            )
        if self.run.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        if not was_given:
            self.groups.commit()


class TorchFTStrategy(Strategy):
    """Groups of processes that train one model together, each by an ``inner`` strategy, and leave and join at any time.

    Every group is a job of its own, with its own launcher and ``work_dir``, and the same configuration and seed. A dataloader gives
    the global batch of an update, as if there was one group; each group computes its share of the rows, by its number among the
    groups that are there, and the gradients are added. An update counts if no group was lost during it, otherwise it is made again by those
    that are left: whoever is there, every sample of an epoch is trained once, and updates are those of one group. A group that
    has joined, or has missed an update, gets a checkpoint from another one and goes on from there.

    The class of what this makes is a subclass of the inner strategy's.

    Args:
        options: the fields of ``Config``.

    Raises:
        ConfigError: an unknown or wrongly typed option, or an inner strategy other than SingleDeviceStrategy and FSDPStrategy.
    """

    class Config(StrategyConfig):
        """Options; those of StrategyConfig belong to ``inner``."""

        inner: dict[str, Any]
        """The strategy of a group: ``dict(type="FSDPStrategy", ...)``, or ``dict(type="SingleDeviceStrategy")``."""
        min_replicas: int = 1
        """No update is made by fewer groups than these."""
        lighthouse: str | None = None
        """Address of torchft's lighthouse, ``http://host:29510``; None: that of the variable TORCHFT_LIGHTHOUSE."""
        quorum_timeout_s: float | int = 600.0
        """Seconds to wait for the other groups before an update; the longest validation or save has to fit in."""
        exchange_timeout_s: float | int = 60.0
        """Seconds after which a group that does not answer within an update counts as lost; one that was killed does at once."""

    def __new__(cls, **options: Any) -> Any:
        """Return a strategy of a class that is made of ``inner``'s."""
        if not isinstance(options.get("inner"), Mapping):
            raise ConfigError(
                'strategy.inner: missing, give dict(type="SingleDeviceStrategy") or dict(type="FSDPStrategy")'
            )
        given = dict(options.pop("inner"))
        for name in set(options) & set(StrategyConfig.model_fields):  # the runner's own keys are among them
            if given.setdefault(name, options[name]) != options.pop(name):
                raise ConfigError(
                    f"strategy.{name}: disagrees with strategy.inner.{name}={given[name]!r}, give one of them"
                )
        kind = STRATEGIES.resolve(given.pop("type", "SingleDeviceStrategy"), "strategy.inner.type")
        if kind not in INNER:
            allowed = " or ".join(each.__name__ for each in INNER)
            raise ConfigError(
                f"strategy.inner.type: {getattr(kind, '__name__', kind)} is not supported, give {allowed}"
            )
        config = _checked({**options, "inner": given})
        made: Any = type("TorchFTStrategy", (_InGroups, kind), {"__doc__": cls.__doc__, "__module__": cls.__module__})(
            **given
        )
        made.groups_config = config
        return made


def _checked(options: dict[str, Any]) -> Any:
    """Return the options of the groups; they are checked as every strategy's are."""

    class Options(Strategy):
        Config = TorchFTStrategy.Config

    found: Any = Options(**options).config
    for name, least in (("min_replicas", 1), ("quorum_timeout_s", 1), ("exchange_timeout_s", 1)):
        if getattr(found, name) < least:
            raise ConfigError(f"strategy.{name}: {getattr(found, name)} is not allowed, give {least} or more")
    if found.lighthouse is None:
        found = found.model_copy(update={"lighthouse": os.environ.get("TORCHFT_LIGHTHOUSE")})
    return found


@hooks_of.register(_InGroups)
def _(strategy: _InGroups) -> Sequence[Any]:
    return [TorchFTHook(strategy)]


@cannot_repeat.register(_InGroups)
def _(strategy: _InGroups) -> str:
    return "its window includes the exchange with other groups"
