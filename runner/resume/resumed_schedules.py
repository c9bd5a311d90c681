"""Restore parameter schedulers, start them again, or move them to the same position in schedules that have changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.base.errors import CheckpointError, counted
from ...core.comm.agreement import gather_differing, raising_together
from ...optim.canonical import FROZEN, GROUP, KIND, split_key
from ...optim.schedulers import ParamScheduler
from ...optim.schedulers.replay import (
    FUNCTION,
    TYPE,
    GroupValues,
    adopt,
    changes,
    described,
    replay,
    set_value,
    sets_initial_values,
    settings,
    shown,
    value_of,
)
from ...optim.schedulers.torch_adapter import TorchScheduler

if TYPE_CHECKING:
    from ..run import Run

# Go on at the position of a checkpoint in schedules that are others than the checkpoint's.


# The values of these do not depend on where their window ends, before it has ended.
_WITHOUT_END = (
    "Step",
    "MultiStep",
    "Exponential",
    "CosineAnnealing",
    "CosineRestart",
    "OneCycle",
    "ReduceOnPlateau",
    "torch.",
)
_NAMES = {"lr": "learning rate"}


@dataclass(frozen=True)
class Position:
    """Where the schedulers of an optimizer were in a checkpoint.

    Attributes:
        states: what their ``state_dict`` returned.
        then: their settings.
        loop: the state of the training loop.
        epoch_lengths: iterations in an epoch of the checkpoint's run and of this one; None: not known.
    """

    states: Sequence[Mapping[str, Any]]
    then: Sequence[Mapping[str, Any]]
    loop: Mapping[str, Any]
    epoch_lengths: tuple[int | None, int | None]

    def steps(self, by_epoch: bool) -> int:
        """Return the steps made: updates, or epochs. Loss scaling may have skipped some updates of the loop's."""
        pairs = zip(self.then, self.states, strict=True)
        made = [int(state["_global_step"]) for one, state in pairs if one["by_epoch"] is by_epoch]
        return max(made, default=int(self.loop["epoch" if by_epoch else "iter"]))

    def in_this_run(self, steps: int) -> int:
        """Return the steps after which this run has done as many epochs as ``steps`` updates were in the checkpoint's."""
        then, now = self.epoch_lengths
        return round(steps * now / then) if then and now else steps


def follow(runner: Run, name: str, first: GroupValues, position: Position, resumes_optimizer: bool) -> bool:
    """Move the schedulers of an optimizer to their position, if their settings or what they start from have changed; False: neither has.

    The values become those that a run with the new schedules alone has at this position, from the checkpoint's initial
    values. The counters stay. One warning says what has changed.

    Args:
        runner: the run; the state of its optimizer is loaded, or left out.
        name: of the optimizer; empty if it is the only one.
        first: the values of the groups when the schedulers were at step 0.
        position: the checkpoint's.
        resumes_optimizer: whether the optimizer's state was loaded.

    Raises:
        CheckpointError: schedules that depend on metrics have been added, replaced or combined with others that have changed.
    """
    group: Sequence[ParamScheduler] = runner.schedulers[name]
    then, now = position.then, [settings(scheduler) for scheduler in group]
    live = runner.optim_wrapper.wrappers[name].param_groups  # type: ignore[union-attr]
    if list(then) == now:
        if resumes_optimizer or not _start_elsewhere(group, position.states):
            return False
        iters, epochs = position.steps(by_epoch=False), position.steps(by_epoch=True)
        replay(group, first, iters=iters, epochs=epochs, epoch_length=position.epoch_lengths[1])
        adopt(group, first, live)
        return True
    what, by_end, follows_epochs = _differences(name, then, now, position)
    if by_end:
        runner.logger.info(f"{what}: the values so far are the same")
        return False
    if kinds := [type(scheduler).__name__ for scheduler in group if scheduler.need_val_args]:
        _check_metrics_alone(kinds, then, now, position)
        runner.logger.warning(
            f"{what}; what has been reduced so far stays, because {kinds[0]} depends on metrics of the past"
            f"{', and the best value of another metric is looked for anew' if _judge_anew(then, now) else ''}"
        )
        return False
    if any(scheduler.has_begun for scheduler in group):
        raise CheckpointError(
            f"{what}; its schedulers have made steps already and cannot follow: resume in a new runner"
        )
    old = _values_then(position, live, group)
    _restore_initial(first, live, group, position, resumes_optimizer)
    iters = position.steps(by_epoch=False)
    if follows_epochs:
        iters = position.in_this_run(iters)
    replay(group, first, iters=iters, epochs=position.steps(by_epoch=True), epoch_length=position.epoch_lengths[1])
    new = {key: value_of(first.param_groups[0], key) for key in old}
    same = all(math.isclose(old[key], value, rel_tol=1e-9, abs_tol=1e-15) for key, value in new.items())
    if same and _only_functions(then, now):
        return False
    adopt(group, first, live)
    for key in old.keys() - {scheduler.param_name for scheduler in group}:
        for own, initial in zip(live, first.param_groups, strict=True):
            set_value(own, key, value_of(initial, key))
    at = f"iteration {position.loop['iter']}"
    told = [
        f"the {_NAMES.get(key, key)} at {at} is {value:.4g} by the new schedule ({old[key]:.4g} in the checkpoint)"
        for key, value in new.items()
    ]
    since = ""
    if follows_epochs:
        since = f" because an epoch has {position.epoch_lengths[1]} iterations and had {position.epoch_lengths[0]}"
    runner.logger.warning(f"{what}{since}; {', '.join(told)}")
    return True


def _start_elsewhere(group: Sequence[ParamScheduler], states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the groups start from other values than those in the checkpoint, or are others, and what follows can be computed."""
    if any(scheduler.need_val_args or scheduler.has_begun for scheduler in group):
        return False
    return any(s.base_values != state["base_values"] for s, state in zip(group, states, strict=True))


def _differences(
    name: str, then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], position: Position
) -> tuple[str, bool, bool]:
    """Return what has changed, whether only ends that do not matter have, and whether only the length of an epoch did."""
    where = f"param_scheduler.{name}" if name else "param_scheduler"
    if [one.get(TYPE) for one in then] != [one[TYPE] for one in now]:
        return f"{where}: was {described(then)}, is {described(now)}", False, False
    found, by_end, scaled = [], True, True
    lengths = position.epoch_lengths
    for i, (before, after) in enumerate(zip(then, now, strict=True)):
        here = f"{where}[{i}]" if len(now) > 1 else where
        changed = changes(before, after)
        found += [f"{here}.{setting}: was {shown(was)}, is {shown(new)}" for setting, (was, new) in changed.items()]
        by_end = by_end and changed.keys() <= {"end"} and (not changed or _has_no_end(after, changed["end"], position))
        scaled = scaled and all(
            _is_scaled(was, new, *lengths) or (_is_the_window(key, before) and _is_the_window(key, after))
            for key, (was, new) in changed.items()
        )
        scaled = scaled and not (changed and after["by_epoch"])
    return ", ".join(found), by_end, scaled


def _has_no_end(one: Mapping[str, Any], ends: Sequence[int], position: Position) -> bool:
    """Whether a schedule has the same values up to here for both ends of its window."""
    return str(one[TYPE]).startswith(_WITHOUT_END) and position.steps(one["by_epoch"]) < min(ends)


def _is_scaled(was: Any, new: Any, then: int | None, now: int | None) -> bool:
    """Whether a number of iterations is the same number of epochs in both runs."""
    if not then or not now or then == now:
        return False
    if isinstance(was, list) and isinstance(new, list):
        return len(was) == len(new) and all(
            a == b or _is_scaled(a, b, then, now) for a, b in zip(was, new, strict=True)
        )
    if type(was) is not int or type(new) is not int:
        return False
    return abs(was / then - new / now) <= 1 / min(then, now)


def _is_the_window(key: str, one: Mapping[str, Any]) -> bool:
    """Whether a setting is the length of the window, its default."""
    return key in ("T_max", "total_steps") and one[key] == one["end"] - one["begin"]


def _only_functions(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> bool:
    """Whether only functions differ; their code may be compiled otherwise by another version of Python."""
    if len(then) != len(now):
        return False
    pairs = [pair for before, after in zip(then, now, strict=True) for pair in changes(before, after).values()]
    return all(all(str(value).startswith(FUNCTION) for value in pair) for pair in pairs)


def _check_metrics_alone(
    kinds: Sequence[str], then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], position: Position
) -> None:
    """Raise CheckpointError unless all that has changed are the settings of schedulers that depend on metrics."""
    others = len(then) != len(now)
    for before, after in zip(then, now, strict=False):
        changed = changes(before, after)
        is_free = TYPE not in changed and (
            str(after[TYPE]) in kinds
            or (changed.keys() <= {"end"} and (not changed or _has_no_end(after, changed["end"], position)))
        )
        others = others or not is_free
    if others:
        raise CheckpointError(
            f"has the schedules {described(then)}, the configuration has {described(now)}: the values of the new ones here "
            f"are not known, because {kinds[0]} depends on metrics of the past; give the former ones"
        )


def _values_then(
    position: Position, live: Sequence[Mapping[str, Any]], group: Sequence[ParamScheduler]
) -> dict[str, float]:
    """Return the checkpoint's values of the first group, by the names of what its schedulers set or those of now."""
    if not live:  # this process updates no parameter
        return {}
    saved = {
        one["param_name"]: float(state["values"][0])
        for one, state in zip(position.then, position.states, strict=True)
        if state["values"]
    }
    return {**{scheduler.param_name: value_of(live[0], scheduler.param_name) for scheduler in group}, **saved}


def _restore_initial(
    first: GroupValues,
    live: Sequence[Mapping[str, Any]],
    group: Sequence[ParamScheduler],
    position: Position,
    resumes_optimizer: bool,
) -> None:
    """Let the schedules start from the checkpoint's initial values, as all settings of a resumed optimizer do."""
    if not resumes_optimizer or any(map(sets_initial_values, (*position.then, *map(settings, group)))):
        return  # a schedule that sets initial values leaves nothing of the optimizer's own
    scheduled_then = {one["param_name"] for one in position.then}
    for name in {scheduler.param_name for scheduler in group} | scheduled_then:
        initial = f"initial_{name}"
        is_kept = name in scheduled_then
        values = [float(own[initial]) if is_kept and initial in own else value_of(own, name) for own in live]
        first.start_from(name, values)
        if name not in {scheduler.param_name for scheduler in group}:
            for own, value in zip(first.param_groups, values, strict=True):
                set_value(own, name, value)


def _judge_anew(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the schedules that compare another metric than before, or otherwise: its best value says nothing."""
    pairs = enumerate(zip(then, now, strict=False))
    return [i for i, (was, new) in pairs if any(was.get(key) != new.get(key) for key in ("monitor", "rule"))]


SETTINGS = "schedules"
"""Key of a checkpoint: the settings of the parameter schedulers, by the optimizer's name."""
DUE = "schedules_due"
"""Key of a checkpoint that a hook has saved before the schedulers have stepped: the steps that are still to come."""


def scheduler_states(runner: Run) -> dict[str, Any]:
    """Return the checkpoint's entries of all schedulers: their states, their settings, and the steps that are due."""
    hooks = runner.hooks if any(runner.schedulers.values()) else ()
    due = [unit for hook in hooks for unit in getattr(hook, "due_steps", ())]
    return {
        **({DUE: due} if due else {}),
        "scheduler": {name: [s.state_dict() for s in group] for name, group in runner.schedulers.items()},
        SETTINGS: {name: [settings(s) for s in group] for name, group in runner.schedulers.items()},
    }


def first_values(runner: Run) -> dict[str, GroupValues]:
    """Return the values in the groups of each optimizer; called before its state is loaded, when schedulers are at step 0."""
    optim = runner.optim_wrapper
    return {} if optim is None else {name: GroupValues(each.param_groups) for name, each in optim.wrappers.items()}


def load_schedulers(
    runner: Run, values: Mapping[str, Any], first: Mapping[str, GroupValues], *, resumes_optimizer: bool
) -> None:
    """Restore every scheduler. If the settings are others than in the checkpoint, go on at its position in the new schedules.

    Args:
        runner: the run; the state of its optimizer is loaded, or left out.
        values: the checkpoint's plain values.
        first: what `first_values` returned.
        resumes_optimizer: False: also set the saved learning rates and momenta, because the optimizer's state is left out.

    Raises:
        CheckpointError: the number of schedulers differs and the checkpoint is older than their settings, the changed
            schedules depend on metrics of the past, or a state does not fit.
    """
    saved, then = values.get("scheduler", {}), values.get(SETTINGS)
    for name, group in runner.schedulers.items():
        states = saved.get(name, [])
        if then is not None:
            position = Position(states, then.get(name, []), values["loop"], _epoch_lengths(runner, values))
            if follow(runner, name, first[name], position, resumes_optimizer):
                continue
        elif len(states) != len(group):
            kinds = ", ".join(type(scheduler).__name__ for scheduler in group)
            optimizer = f" for the optimizer {name}" if name else ""
            raise CheckpointError(
                f"has {counted(len(states), 'parameter scheduler')}{optimizer}, the configuration has {len(group)}"
                f"{f' ({kinds})' if kinds else ''}, and was written by an older version, without their settings; resume all "
                "of them or none"
            )
        anew = _judge_anew(then.get(name, []), [settings(each) for each in group]) if then is not None else []
        has_cycle = any(sets_initial_values(settings(each)) for each in group)
        for number, (scheduler, state) in enumerate(zip(group, states, strict=True)):
            own = scheduler.base_values
            scheduler.load_state_dict({**state, "best": None, "num_bad_epochs": 0} if number in anew else state)
            if has_cycle and own != state["base_values"]:
                # The groups have the initial value of the last cycle, and not the others'.
                scheduler.base_values = own
                if isinstance(scheduler, TorchScheduler):
                    scheduler.start_from(own)
            if not resumes_optimizer:
                scheduler.set_values(state["values"], state["base_values"])
    for scheduler in [each for group in runner.schedulers.values() for each in group]:
        if ("epoch" if scheduler.by_epoch else "iter") in values.get(DUE, ()):
            scheduler.step()
    if then is None and any(runner.schedulers.values()):
        runner.logger.info(
            "The checkpoint was written by an older version, without the settings of param_scheduler: schedules go on from its "
            "values; if their settings have changed, these are not the values of the new ones"
        )


def _epoch_lengths(runner: Run, values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    data = values.get("data")
    then = data.get("epoch_length") if isinstance(data, Mapping) else None
    loop = runner.train_loop
    return (
        then if loop.by_epoch else None,
        loop.data.epoch_length,
    )  # the position of other loops is a number of iterations


@contextmanager
def schedules_anew(runner: Run) -> Iterator[None]:
    """Keep the values set by schedulers while the optimizer's state is loaded, because schedules start again."""
    own = [(scheduler, scheduler.get_values()) for group in runner.schedulers.values() for scheduler in group]
    cycles = [scheduler for scheduler, _ in own if isinstance(scheduler, TorchScheduler) and scheduler.sets_momentum]
    momenta = [[value_of(group, "momentum") for group in each.optimizer.param_groups] for each in cycles]
    yield
    for scheduler, kept in zip(cycles, momenta, strict=True):
        for group, momentum in zip(scheduler.optimizer.param_groups, kept, strict=True):
            set_value(group, "momentum", momentum)
    for scheduler, values in own:
        scheduler.set_values(values, scheduler.base_values)


# Compare the settings of an optimizer with those of a checkpoint.


def check_optimizer(runner: Run, values: Mapping[str, Any]) -> None:
    """Check that every parameter can get the settings that the checkpoint has under its name, in its current group.

    Raises:
        CheckpointError: parameters in one group have different settings in the checkpoint, or it lacks a parameter.
    """
    now = _hyper_parameters(runner)
    then = {key: value for key, value in values.items() if key.startswith(GROUP)}
    frozen_then, frozen_now = values.get(FROZEN, ()), set(frozen(runner))
    with raising_together():
        _check_settings(then, now, frozen_then if isinstance(frozen_then, list) else ())
    lacking = set.intersection(*map(set, gather_differing(sorted(then.keys() - now.keys()))))  # on all processes
    gone = sorted({name for key in lacking if (name := _optimized(key))} - frozen_now)
    if gone:
        runner.logger.warning(f"The optimizer state of {', '.join(gone)} is left out: they are not optimized now")


def frozen(runner: Run) -> list[str]:
    """Return the names of this process's frozen parameters, of which a checkpoint has no settings."""
    return sorted(name for name, parameter in runner.strategy.parameters() if not parameter.requires_grad)


def tell_frozen(runner: Run, then: Any) -> None:
    """Warn if other parameters are frozen than in the checkpoint, as after a hook that has frozen some in the middle of training.

    Args:
        then: the names that were frozen; something else in older checkpoints.
    """
    if not isinstance(then, list) or runner.stepper.custom_train:  # a train_step may change it in each update
        return
    every, now = {name for name, _ in runner.strategy.parameters()}, set(frozen(runner))
    for what, names in (
        ("is trained now, and was frozen", every.intersection(then) - now),
        ("is frozen now, and was trained", now.difference(then)),
    ):
        if names:
            runner.logger.warning(
                f"{min(names)} ({counted(len(names), 'parameter')}) {what} when the checkpoint was saved, which keeps no requires_grad: a hook "
                "that changes it in the middle of training has to do so again when a run goes on"
            )


def _check_settings(then: Mapping[str, Any], now: Mapping[str, Any], frozen_then: Collection[str]) -> None:
    for key in now:
        if key not in then and (lost := _optimized(key)) and lost not in frozen_then:
            raise CheckpointError(f"has no optimizer state of {lost}, which was not optimized then")
    for key, value in then.items():
        if key in now and not _same(value, now[key]):
            _, name, setting = split_key(key)
            raise CheckpointError(
                f"{name} has {setting}={value}, and shares a group now with parameters that have {now[key]}; give each of "
                "them a group of its own"
            )


def _hyper_parameters(runner: Run) -> dict[str, Any]:
    return {key: value for key, value in runner.strategy.state().items() if key.startswith(GROUP)}


def _optimized(key: str) -> str:
    """Return the parameter if the key is one that every optimized parameter has; otherwise an empty string."""
    _, parameter, item = split_key(key)
    return parameter if item == KIND else ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # a value may have been stored as a float32 tensor
    return bool(one == other)


def _unscheduled(setting: str, value: Any) -> Any:
    """What a schedule of the momentum, which is the first of ``betas`` too, leaves of a setting."""
    return None if setting == "momentum" else value[1:] if setting == "betas" else value


@contextmanager
def telling_what_differs(runner: Run) -> Iterator[None]:
    """Warn if the optimizer's settings in the checkpoint differ from those in the configuration."""
    before = _hyper_parameters(runner)
    yield
    after = _hyper_parameters(runner)
    own = any(sets_initial_values(settings(each)) for group in runner.schedulers.values() for each in group)
    replaced: dict[str, str] = {}
    for key, value in after.items():
        parameter, _, setting = key.rpartition(".")
        given = before.get(key, value)
        # What a schedule sets is no setting of the optimizer's; of others the initial value is compared instead.
        if f"{parameter}.initial_{setting}" in before or (own and setting == "initial_lr"):
            continue
        is_set = f"{parameter}.initial_momentum" in before or (own and f"{parameter}.base_momentum" in after)
        if not _same(*(_unscheduled(setting, each) if is_set else each for each in (value, given))):
            replaced.setdefault(setting.removeprefix("initial_"), f"{value} instead of {given}")
    if replaced:
        runner.logger.warning(
            f"The optimizer continues with the checkpoint's settings, not the configuration's: "
            f"{', '.join(f'{setting} {values}' for setting, values in replaced.items())}; "
            "resume=dict(optimizer=False) starts with the configuration's"
        )
