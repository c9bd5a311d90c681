"""TorchFTStrategy: a strategy in each of several groups of processes, which average gradients or weights while groups come and go."""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flextrain import (
    HOOKS,
    STRATEGIES,
    ConfigError,
    FSDPStrategy,
    Hook,
    ResumeFrom,
    SingleDeviceStrategy,
    Strategy,
    StrategyError,
)
from flextrain.runner.hooks import CheckpointHook
from flextrain.strategies import StrategyConfig
from flextrain.strategies.parts import cannot_repeat, hooks_of

from . import record
from .groups import START, Groups, Member, check_lighthouse
from .outer import OuterOptimizer
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
        self.strategy.end_update()

    def before_train_epoch(self, runner: Any) -> None:
        self.strategy.check_start()

    def after_train_epoch(self, runner: Any) -> None:
        self.strategy.end_round()  # of an epoch that was left early

    def before_val(self, runner: Any) -> None:
        self.strategy.check_validation()

    def after_train(self, runner: Any) -> None:
        self.strategy.end_training()

    def state_dict(self) -> dict[str, int | None]:
        return {"head": self.strategy.head, "round_start": self.strategy.round_start}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        self.strategy.head, self.strategy.round_start = state["head"], state.get("round_start")


class _InGroups(Strategy):
    """What TorchFTStrategy adds to the strategy within a group, which comes after this class among the bases.

    Attributes:
        groups_config: the options of TorchFTStrategy.
        run: the runner.
        head: names the updates that the weights are made of, the same on all processes of the group; None: not yet, see ``_meet``.
            Within a round it is that of the round's start.
        is_due: whether the next window is that of an update, and not one that is run again to look at it.
        made: the record of the updates since the last that counts.
        outer: updates the weights after a round, if there are rounds; None: gradients are exchanged at every update.
        round_start: how many updates were made before the round that the weights are in the middle of; None: they are not.
    """

    groups_config: TorchFTStrategy.Config
    run: Any = None
    head: int | None = None
    is_due = False
    made: list[dict[str, Any]]
    groups: Groups | None = None
    outer: OuterOptimizer | None = None
    round_start: int | None = None

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
        if self.outer is not None:
            if self.round_start is None:
                self._begin_round()
            self._check_equal(rows)
            parts = self._micro_batches(window, rows, step)
            if not any(self._own_rows(rows)):
                self.optim.zero_grad()  # no update of this group, rather than one by a gradient of zero
            assert self.round_start is not None
            self._note(rows, round=self.round_start + 1)
            return step.mean(parts)  # type: ignore[no-any-return]
        while True:
            self._members = self._meet()
            assert self.groups is not None
            parts = self._micro_batches(window, rows, step)
            was_added = self._add(parts, rows)
            if self.groups.commit() and was_added:
                break
            self.optim.zero_grad()  # whole gradients, which no strategy keeps elsewhere: all micro-batches have run
            self.run.logger.warning("A group was lost in the middle of an update, which is made again")
        self._note(rows)
        self.head = self.made[-1]["head"]
        return step.mean(parts)  # type: ignore[no-any-return]

    def _check_equal(self, rows: list[int]) -> None:
        """Raise StrategyError if processes of the group have different numbers of samples: some would have none, and others some."""
        sampler = getattr(self.run.train_loop.dataloader, "sampler", None)
        if self.topology.world_size == 1 or getattr(sampler, "round_up", False):
            return
        most = torch.tensor([*rows, *(-count for count in rows)], device=self.device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        if most.tolist() != [*rows, *(-count for count in rows)]:
            raise StrategyError(
                "train_dataloader: processes of a group have batches of different sizes, strategy.sync_every needs equal ones; give drop_last=True"
            )

    def _note(self, rows: list[int], **more: int) -> None:
        """Write down of what an update is made."""
        assert self.groups is not None
        parent = self.made[-1]["head"] if self.made else self.head
        head = record.next_head(parent, self.run.iter, [member.group for member in self._members])
        line = dict(
            update=self.run.iter + 1, epoch=self.run.epoch, batch=self.run.train_loop.inner, rows=rows,
            groups=len(self._members), group=self.groups.rank, head=head, parent=parent,
        )  # fmt: skip
        self.made.append({**line, **more})

    def _count(self) -> None:
        """Let what was noted count, and write it into the record."""
        for line in self.made:
            self.head = line["head"]
            if self.run.rank == 0:
                record.append(self.run.work_dir, line)
        self.made = []

    def end_update(self) -> None:
        """Write the record of an update, or end the round with it; called after every update."""
        if self.outer is None:
            self._count()
        elif self.round_start is not None and self._ends_round():
            self.end_round()

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

    def _own_rows(self, rows: list[int]) -> list[int]:
        """Return how many rows of each micro-batch are this group's."""
        assert self.groups is not None
        spans = [span_of(count, self.groups.rank, self.groups.count) for count in rows]
        return [stop - start for start, stop in spans]

    def _micro_batches(self, window: Sequence[Any], rows: list[int], step: Any) -> list[dict[str, Tensor]]:
        """Run forward and backward of this group's samples, and return what to log of each micro-batch.

        Losses and values are terms of the mean over all groups; in a round their mean over the micro-batches is that of the group.
        """
        own = self._own_rows(rows)
        if self.outer is None:
            shares = [a / b for a, b in zip(own, rows, strict=True)]
        else:
            filled = sum(map(bool, own)) or 1
            shares = [len(own) / filled if count else 0.0 for count in own]
        triples = zip(window, rows, shares, strict=True)
        return [self._micro_batch(batch, count, share, i, step) for i, (batch, count, share) in enumerate(triples)]

    def _micro_batch(self, batch: Any, rows: int, share: float, index: int, step: Any) -> dict[str, Tensor]:
        assert self.groups is not None
        reduces = step.begin(index)
        start, stop = span_of(rows, self.groups.rank, self.groups.count)
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
        trained = self._trained()
        gradients = [torch.zeros_like(p) if p.grad is None else _laid_out_as(p, p.grad) for p in trained]
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
        if not self.groups.add(_local(gradients)):
            return False
        for parameter, gradient, users in zip(trained, gradients, shape[same:].tolist(), strict=True):
            parameter.grad = gradient if users else None  # what no group has used does not decay
        for (part, name), value in zip(values, message[-1].tolist(), strict=True) if values else ():
            part[name] = torch.as_tensor(value, dtype=part[name].dtype, device=part[name].device)
        return True

    def _trained(self) -> list[Tensor]:
        return [
            parameter
            for wrapper in (self.optim.wrappers.values() if self.optim is not None else ())
            for group in wrapper.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    # A round of updates that each group makes by itself

    def _begin_round(self) -> None:
        """Save where the round begins, because all groups go back there if one is lost before its end."""
        assert self.outer is not None
        self._members = self._meet()
        name = f"iter_{self.run.iter}"
        self.run.save_checkpoint(self._rounds, name)
        if self.run.rank == 0:
            for path in self._rounds.iterdir():
                if path.is_dir() and path.name != name:
                    shutil.rmtree(path)
        self.outer.begin(self._trained_by_name())
        self._buffers = {name: buffer.clone() for name, buffer in self.buffers().items()}
        self.round_start = self.run.iter

    def _trained_by_name(self) -> dict[str, Tensor]:
        trained = set(map(id, self._trained()))
        return {name: parameter for name, parameter in self.parameters() if id(parameter) in trained}

    def _ends_round(self) -> bool:
        """Whether the update whose hooks are running is the last one of a round."""
        loop, every = self.run.train_loop, self.groups_config.sync_every
        now = loop.state_dict()
        if loop.by_epoch:
            return now["inner"] % every == 0 or now["left"] == 0
        return now["iter"] % every == 0 or now["iter"] >= loop.max_iters

    def end_round(self) -> None:
        """Let the outer optimizer update the weights by what all groups have done since the round began, if they have.

        Raises:
            ResumeFrom: a group was lost; the round is made again.
        """
        if self.outer is None or self.round_start is None:
            return
        assert self.groups is not None
        for name, buffer in self.buffers().items():
            if not torch.equal(buffer, self._buffers[name]):
                raise StrategyError(
                    f"TorchFTStrategy: the buffer {name} has changed in training, and groups have different values; "
                    "strategy.sync_every is for models whose buffers stay"
                )
        done = torch.tensor([float(self.made[-1]["update"])], dtype=torch.float64)
        expected = done * self.groups.count
        was_added = self.groups.add([done])
        if was_added and self.groups.count > 1 and not torch.equal(done, expected):
            raise StrategyError(
                f"TorchFTStrategy: this group ends a round after update {self.made[-1]['update']}, and other groups after another "
                "one; give all the same data, batch_size and accumulation, and no hook that ends one alone"
            )
        was_added = was_added and self.groups.add(_local(self.outer.pseudo_gradients()))
        if not (self.groups.commit() and was_added):
            raise self._back("A group was lost in the middle of a round, which is made again")
        self.outer.step(self.groups.count)
        for wrapper in self.optim.wrappers.values() if self.optim is not None else ():
            wrapper.refresh()
        self.round_start = None
        self._count()

    def _back(self, why: str) -> ResumeFrom:
        return ResumeFrom(self._rounds / f"iter_{self.round_start}", why)

    def check_validation(self) -> None:
        """Raise StrategyError in the middle of a round, where groups have different weights."""
        if self.round_start is not None:
            raise StrategyError(
                f"TorchFTStrategy: a validation after update {self.run.iter} is in the middle of a round, where groups have "
                f"different weights; validate every multiple of strategy.sync_every={self.groups_config.sync_every} updates"
            )

    def _check_rounds(self) -> None:
        """Raise ConfigError if hooks or the training loop need weights in the middle of a round."""
        run, loop, every = self.run, self.run.train_loop, self.groups_config.sync_every
        asked: list[tuple[str, int]] = []
        if not loop.by_epoch and run.val_loop is not None:
            asked.append(("train_cfg.val_interval", loop.val_interval))
        for hook in run.hooks:
            kind = type(hook).__name__
            if hook.holds_weights:
                raise ConfigError(
                    f"{kind}: is not supported with strategy.sync_every, its averages of weights would differ between groups"
                )
            if isinstance(hook, HOOKS.resolve("LossSpikeHook")):
                raise ConfigError(
                    f"{kind}: is not supported with strategy.sync_every, each group has losses of its own"
                )
            if isinstance(hook, CheckpointHook):
                if not hook.by_epoch and hook.interval > 0:
                    asked += [(f"{kind}.interval", hook.interval), (f"{kind}.save_begin", hook.save_begin)]
                if hook.fast_interval is not None:
                    asked.append((f"{kind}.fast_interval", hook.fast_interval))
        for key, count in asked:
            if count % every:
                raise ConfigError(
                    f"{key}: {count} is in the middle of a round of strategy.sync_every={every} updates, give a multiple of {every}"
                )
            if count and loop.by_epoch and (loop.epoch_length is None or loop.epoch_length % every):
                raise ConfigError(
                    f"{key}: {count} is in the middle of a round, which ends after {every} updates (strategy.sync_every) and with the "
                    f"epoch of {loop.epoch_length or 'unknown length'}; save by_epoch=True"
                )
        sampler = getattr(loop.dataloader, "sampler", None)
        if self.topology.world_size > 1 and getattr(sampler, "round_up", True) is False:
            raise ConfigError(
                "train_dataloader.sampler.round_up: False is not supported with strategy.sync_every and several processes in a group, "
                "give True"
            )

    # Checkpoints

    def state(self) -> dict[str, Any]:
        return super().state() | (self.outer.entries() if self.outer is not None else {})

    def template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        found = super().template(saved)
        return found if self.outer is None else found | self.outer.template(saved, dict(self.parameters()))

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        if self.outer is not None:
            self.outer.load(state)

    # Meetings

    def begin_training(self) -> None:
        """Forget a checkpoint that was received; called when it is loaded."""
        self.made = []
        if self.outer is not None:
            self._check_rounds()
        if self.run.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            record.begin(self.run.work_dir)

    def check_start(self) -> None:
        """Go back to the start of a round if the weights are those of a checkpoint of its middle.

        Raises:
            ResumeFrom: to the round's start.
            StrategyError: it is gone.
        """
        if self.round_start is None or self.made:
            return
        back = self._back("The weights are those of one group in the middle of a round, which is made again")
        if not back.path.exists():
            raise StrategyError(
                f"{self.run.resumed_from}: was saved in the middle of a round of strategy.sync_every updates, and the round's start, "
                f"{back.path}, is gone; resume from another checkpoint"
            )
        raise back

    def end_training(self) -> None:
        """Wait until every group has the last update, because one that lacks it may need this one."""
        self.check_start()
        self.end_round()  # of a training that was stopped early
        if self.groups is not None and self.groups.count > 1:
            try:
                self._meet(least=1)
            except StrategyError as error:
                self.run.logger.info(f"The other groups have ended already: {error}")
        if self.run.rank == 0:
            shutil.rmtree(self._rounds, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return Path(self.run.work_dir) / "from_another_group"

    @property
    def _rounds(self) -> Path:
        return Path(self.run.work_dir) / "round_start"

    def _meet(self, least: int | None = None) -> list[Member]:
        """Meet the other groups until ``min_replicas``, or ``least``, have the same updates; one that is behind is given a checkpoint.

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
        groups, has_told, least = self.groups, False, options.min_replicas if least is None else least
        while groups.failures < _FAILURES:
            members = groups.meet(self.run.iter, self.head, self.run.seed, self._rounds_number())
            if members is None:
                groups.commit()  # tells the lighthouse that connections have to be made anew
                continue
            if len(seeds := {member.seed for member in members}) > 1:
                raise StrategyError(
                    f"randomness.seed: groups have the seeds {', '.join(map(str, sorted(seeds)))}, give all the same"
                )
            if len({member.rounds for member in members}) > 1:
                raise StrategyError(
                    "strategy.sync_every, strategy.outer_optimizer: groups have different ones, give all the same"
                )
            furthest = max(member.step for member in members)
            source = next(i for i, member in enumerate(members) if member.step == furthest)
            if any(member[:2] != members[source][:2] for member in members):
                self._bring_up(members, source)
            elif len(members) >= least:
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

    def _rounds_number(self) -> int:
        """Return a number that groups share whose rounds are alike."""
        if self.outer is None:
            return 0
        alike = json.dumps([self.groups_config.sync_every, self.outer.options], sort_keys=True, default=str)
        return zlib.crc32(alike.encode())

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

    With ``sync_every`` the unit is a round of so many updates, which each group makes by its own rows alone. Then the weights become their
    mean over the groups (LocalSGD), or ``outer_optimizer`` updates them (DiLoCo). If a group was lost meanwhile, those that are left
    make the round again from its start.

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
        sync_every: int | None = None
        """Updates that each group makes by itself before weights are exchanged; the end of an epoch ends a round too. None: gradients
        are exchanged at every update."""
        outer_optimizer: dict[str, Any] | None = None
        """What updates the weights at the end of a round: options of SGD, which are ``lr=0.7, momentum=0.9, nesterov=True`` otherwise, or
        ``dict(type="AdamW", lr=...)``, the type one of SGD, Adam and AdamW. None: they become the mean."""

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
        made.groups_config, made.made = config, []
        if config.sync_every is not None:
            made.outer = OuterOptimizer(config.outer_optimizer)
        return made


def _checked(options: dict[str, Any]) -> Any:
    """Return the options of the groups; they are checked as every strategy's are."""

    class Options(Strategy):
        Config = TorchFTStrategy.Config

    found: Any = Options(**options).config
    for name, least in (("min_replicas", 1), ("quorum_timeout_s", 1), ("exchange_timeout_s", 1), ("sync_every", 1)):
        if (value := getattr(found, name)) is not None and value < least:
            raise ConfigError(f"strategy.{name}: {value} is not allowed, give {least} or more")
    if found.sync_every is None and found.outer_optimizer is not None:
        raise ConfigError("strategy.outer_optimizer: has no meaning without strategy.sync_every, give both")
    if found.lighthouse is None:
        found = found.model_copy(update={"lighthouse": os.environ.get("TORCHFT_LIGHTHOUSE")})
    return found


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's shards."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in (one.detach() for one in tensors)]


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A parameter's gradient; one that is a pending sum over the processes of a group is summed up."""
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


@hooks_of.register(_InGroups)
def _(strategy: _InGroups) -> Sequence[Any]:
    return [TorchFTHook(strategy)]


@cannot_repeat.register(_InGroups)
def _(strategy: _InGroups) -> str:
    return "its window includes the exchange with other groups"
