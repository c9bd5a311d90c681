"""Save, resume and load a run: the state of its strategy and of all other pieces of a checkpoint."""

from __future__ import annotations

import datetime
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module

from ...core.base.errors import (
    CheckpointError,
    ConfigError,
    FlexTrainError,
    StorageError,
    StrategyError,
    counted,
    the_user_s_line,
)
from ...core.base.events import job
from ...core.base.overriding import overridden
from ...core.base.tensors import nonfinite, parts_of, replica_of
from ...core.checkpoint import (
    Checkpoint,
    PendingSave,
    Staging,
    is_checkpoint,
    match_weights,
    open_weights_together,
    save_checkpoint,
    save_in_background,
    what_is_not_finite,
    without_prefix,
)
from ...core.checkpoint.chunks import is_ordinary
from ...core.checkpoint.load import TensorInfo
from ...core.checkpoint.participants import Participants
from ...core.checkpoint.weights import is_adapter
from ...core.comm.agreement import gather_differing, raising_together, told_by_rank_0
from ...core.hugging_face.pretrained import META_KEY
from ...core.model.module_state import own_loading
from ...core.random.generators import rng_state
from ...core.torch_compat.torch_private import storage_key
from ...core.version import __version__
from ...optim.canonical import FROZEN, OWN
from ...strategies.parts import (
    aliases,
    check_replicas,
    elsewhere,
    fingerprints_of_left_out,
    left_out,
    saves,
    state_left_out,
)
from ..options import Resume
from .data_position import begin_epoch_anew, check_counts, continue_epoch, data_facts, load_loader, load_random
from .resumed_schedules import (
    check_optimizer,
    first_values,
    frozen,
    load_schedulers,
    scheduler_states,
    schedules_anew,
    tell_frozen,
    telling_what_differs,
)
from .weights import (
    ADAPTERS,
    LATE,
    LEFT_OUT,
    adapter_configurations,
    averaged_name,
    check_adapters,
    check_left_out,
    check_not_quantised,
    extra_template,
    finish,
    keys_to_keep_finite,
    module_state,
    prepare,
    transposed_layers,
)

if TYPE_CHECKING:
    from ..run import Run

# Read one piece of a checkpoint after the other; an error says how to resume without the piece.


_WITHOUT = {
    "optimizer": "the optimizer's state then starts afresh",
    "param_scheduler": "schedules then start afresh",
    "random": "random numbers then come from the run's own seed",
    "hooks": "hooks then start afresh",
    "logs": "smoothed figures then start afresh",
    "data": "the epoch under way then begins anew",
}


def advice(*names: str | None) -> str:
    """Return how to resume without some pieces; None stands for a piece that every run needs."""
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return "load_from takes its weights alone"
    options, it = ", ".join(f"{name}=False" for name in known), "it" if len(known) == 1 else "them"
    return f"resume=dict({options}) leaves {it} out, {', '.join(_WITHOUT[name] for name in known)}"


@contextmanager
def piece(path: Path, key: str, name: str | None = None) -> Iterator[None]:
    """Name the piece of a checkpoint in every error of the block, and the option that leaves the piece out.

    Raises:
        CheckpointError: on one line, in place of any error that a damaged piece causes, or code of the user's that takes it.
    """
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {key} is damaged, {error}; {advice(name)}") from error
    except FlexTrainError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise CheckpointError(f"{path}: {reason}; {advice(name)}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        line = the_user_s_line(error)
        what = f"could not be restored, {line} raised" if line and "site-packages" not in line else "is damaged,"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"{path}: {key} {what} {reason}; {advice(name)}") from error


# The loop and the data


def check_hooks(
    runner: Run, saved: Mapping[str, Sequence[str]], present: Container[str], own: Mapping[str, Any]
) -> None:
    """Check that the saved state of all hooks is complete, and log which hooks are new and which are gone.

    Args:
        runner: the run with the hooks.
        saved: keys of the saved state, by the hook's name.
        present: the keys of the checkpoint.
        own: current states, by the hook's name.

    Raises:
        CheckpointError: a key is missing.
    """
    for name, keys in saved.items():
        if lost := next((key for key in keys if key not in present), None):
            raise CheckpointError(f"has no {lost}")
        if name not in own:
            runner.logger.info(f"The state of {name} is left out: the run has no such hook")
    for name, state in own.items():
        if state and name not in saved:
            runner.logger.info(f"{name} starts afresh: the checkpoint has no state of it")


# SavedView: the checkpoint as ``before_save_checkpoint`` hooks see and change it.


_WHERE = "before_save_checkpoint"
_MODEL, _OPTIMIZER = "model.", "optim."
_PLAIN_VALUES = {"meta": "meta", "param_schedulers": "scheduler", "message_hub": "message_hub"}
_OWN_KEY = 'give what is to be saved a key of its own: checkpoint["..."] = value'


class SavedView:
    """A dict in MMEngine's form with the state that is about to be saved.

    ``meta``, ``message_hub`` and ``param_schedulers`` (lists by the optimizer's name) are plain values, saved with the
    hooks' changes. ``state_dict`` has the live weights; of a sharded one, this process's shard. A plain tensor may be
    replaced by another one of the same shape, and names may be removed if the checkpoint has no optimizer.
    ``optimizer`` may only be removed as a whole.

    Args:
        state: the state by canonical key; changed by ``apply``.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.checkpoint: dict[str, Any] = {key: state[name] for key, name in _PLAIN_VALUES.items() if name in state}
        self._weights, self._optimizer = _part(state, _MODEL), _part(state, _OPTIMIZER)
        self.checkpoint["state_dict"] = dict(self._weights)
        if self._optimizer:
            self.checkpoint["optimizer"] = dict(self._optimizer)

    def apply(self) -> dict[str, Any]:
        """Apply the hooks' changes to the state, and return what the hooks added.

        Raises:
            CheckpointError: a change cannot be saved.
        """
        found = dict(self.checkpoint)
        for key, name in _PLAIN_VALUES.items():
            if key in found:
                self._state[name] = found.pop(key)
            else:
                self._state.pop(name, None)
        self._change_optimizer(found.pop("optimizer", None))
        self._change_weights(found.pop("state_dict", None))
        return found

    def _change_optimizer(self, found: Any) -> None:
        if found is None:
            for key in self._optimizer:
                del self._state[_OPTIMIZER + key]
        elif not self._optimizer or found.keys() != self._optimizer.keys() or _differing(found, self._optimizer):
            raise CheckpointError(
                f'{_WHERE}: a hook has changed checkpoint["optimizer"], which may only be removed as a whole; {_OWN_KEY}'
            )

    def _change_weights(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise CheckpointError(
                f'{_WHERE}: a hook has removed checkpoint["state_dict"], but a checkpoint needs its weights'
            )
        if new := sorted(found.keys() - self._weights.keys()):
            raise CheckpointError(f'{_WHERE}: a hook has added {new[0]} to checkpoint["state_dict"], {_OWN_KEY}')
        if lost := sorted(self._weights.keys() - found.keys()):
            if any(key.startswith(_OPTIMIZER) for key in self._state):
                raise CheckpointError(
                    f'{_WHERE}: a hook has removed {lost[0]} from checkpoint["state_dict"], which makes resuming '
                    "impossible; save_optimizer=False saves only weights, and strategy=dict(exclude_frozen_parameters=True) "
                    "leaves frozen parameters out"
                )
            for name in lost:
                del self._state[_MODEL + name]
        for name in _differing(found, self._weights):
            value, before = found[name], self._weights[name]
            if type(before) is not Tensor or type(value) is not Tensor or value.shape != before.shape:
                raise CheckpointError(
                    f'{_WHERE}: a hook has put {type(value).__name__} in the place of checkpoint["state_dict"]["{name}"], '
                    f"a {type(before).__name__} of shape {tuple(before.shape)}; only a plain tensor may be replaced, by one of "
                    "the same shape; change the model instead"
                )
            self._state[_MODEL + name] = value


def _part(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _differing(found: dict[str, Any], given: dict[str, Any]) -> list[str]:
    return [name for name, value in found.items() if value is not given[name]]


def save(
    runner: Run,
    path: Path,
    *,
    save_optimizer: bool = True,
    save_param_scheduler: bool = True,
    meta: Mapping[str, Any] | None = None,
    in_background: bool = False,
    staging: Staging | None = None,
    verify: bool = False,
    logs_failure: bool = True,
    is_export: bool = False,
) -> PendingSave | None:
    """Write the state of a run; a collective. With ``in_background`` the returned save is still in progress.

    With ``is_export`` frozen parameters are never left out, and the states of hooks always.
    """
    strategy, topology = runner.strategy, runner.strategy.topology
    if save_optimizer and any(parameter.grad is not None for parameter in strategy.module.parameters()):
        _tell_of_gradients(runner)
    state: dict[str, Any] = strategy.state()
    if strays := [key for key in state if not key.startswith((_MODEL, _OPTIMIZER))]:
        raise StrategyError(
            f'{type(strategy).__name__}.state(): "{strays[0]}" is no key for a strategy, name what is its own "{OWN}{strays[0]}"'
        )
    if not save_optimizer:
        state = {key: value for key, value in state.items() if not key.startswith("optim.")}
    elif runner.optim_wrapper is not None:
        state["optim.wrapper"] = runner.optim_wrapper.plain_values()
    if is_export:
        state |= state_left_out(strategy)
    if save_param_scheduler:
        state.update(scheduler_states(runner))
    trains = runner.optim_wrapper is not None
    data = runner.train_loop.data if trains else None  # a run without training may export its model
    if trains:
        state["loop"] = runner.train_loop.state_dict()
    if data is not None:  # an Engine is given its batches
        state["data"] = data_facts(runner, state["loop"]).model_dump()
    state["processes"] = topology.data.count  # those with their own data shard, and so their own RNG state
    modules, late_buffers = module_state(runner)
    state |= {**modules, "aliases": aliases(strategy)}  # exports write a tied tensor under each of its names
    if found := adapter_configurations(strategy.module):
        state[ADAPTERS] = found
    state["message_hub"] = runner.message_hub.state_dict()
    state["meta"] = {
        "experiment_name": runner.experiment_name,
        "seed": runner.seed,
        "time": datetime.datetime.now().isoformat(timespec="seconds"),
        **({key: state["loop"][key] for key in ("epoch", "iter")} if trains else {}),
        **({"job": job()} if job() else {}),
        **({"cfg": runner.config_text} if runner.config_text else {}),
        **({META_KEY: runner.hugging_face.values()} if runner.hugging_face else {}),
        **(meta or {}),
    }
    if runner.hook_calls["before_save_checkpoint"]:
        view = SavedView(state)
        runner.call_hook("before_save_checkpoint", checkpoint=view.checkpoint)
        state.update(_flatten(view.apply(), "extra"))
    hooks = {} if is_export else hook_states(runner)  # their own state may change in before_save_checkpoint
    state.update({key: value for part in hooks.values() for key, value in part.items()})
    state |= {SETTINGS: hook_settings(runner)} if len(set(map(type, runner.hooks))) < len(runner.hooks) else {}
    # The averages of a buffer are saved by the process that saves the buffer.
    if others := {name for name, _ in strategy.module.named_buffers() if not saves(strategy, name)}:
        state = {key: value for key, value in state.items() if averaged_name(key) not in others}
    own = {"rng": rng_state(strategy.device), **({} if data is None else {"loader": data.loader_state()})}
    Participants(f"{path}: could not be saved").meet(path.name, float(strategy.config.timeout_s))
    if strategy.config.exclude_frozen_parameters and not is_export and (prints := fingerprints_of_left_out(strategy)):
        state[LEFT_OUT] = prints
    staging = staging or Staging()
    if not topology.is_alone:
        compared = check_replicas(strategy)
        staging.compared = {key for key, tensor in compared.items() if _is_same(state.get(key), tensor)}
    options: dict[str, Any] = dict(
        per_rank={"own_losses": runner.message_hub.own_losses()} if topology.reports else None,
        in_own_file=own if topology.reports else None,
        number=topology.data.index,
        joined={
            "hooks": {name: sorted(part) for name, part in hooks.items() if part},
            LATE: late_buffers,
            **({FROZEN: frozen(runner)} if save_optimizer else {}),
            **(_transposed(strategy.module) if found else {}),
        },
        written_by={"flextrain": __version__, "strategy": type(strategy).__name__},
        is_latest=any(key.startswith(_OPTIMIZER) for key in state),  # without it a checkpoint cannot be resumed
        verify=verify,
        staging=staging,
        finite=keys_to_keep_finite(runner, state),
        timeout_s=float(strategy.config.timeout_s),
    )
    write: Any = partial(save_in_background, logs_failure=logs_failure) if in_background else save_checkpoint
    try:
        written = write(path, state, **options)
    except StorageError:  # which all processes have; after another error one may be missing
        runner.call_hook("after_save_checkpoint")
        raise
    runner.call_hook("after_save_checkpoint")
    return written if in_background else None


_TOLD: WeakSet[Any] = WeakSet()
"""Strategies of the runs that were told of gradients."""


def _tell_of_gradients(runner: Run) -> None:
    """Warn once of gradients that no update has used yet, as those that a generator's loss leaves in a discriminator."""
    optim, strategy = runner.optim_wrapper, runner.strategy
    if optim is None or strategy in _TOLD:
        return
    optimized = [parameter for group in optim.param_groups for parameter in group["params"]]
    kept = {id(p) for p in optimized if p.grad is not None and any(bool(part.any()) for part in parts_of(p.grad))}
    if kept and (names := [name for name, parameter in strategy.parameters() if id(parameter) in kept]):
        _TOLD.add(strategy)
        runner.logger.warning(
            f"{names[0]} ({counted(len(names), 'parameter')}) has a gradient that no update has used, and checkpoints hold none: "
            "a resumed run will differ; call requires_grad_(False) around a loss that is not for them, or zero_grad()"
        )


def _transposed(model: Module) -> dict[str, Any]:
    from ...core.checkpoint.export.peft_adapters import TRANSPOSED

    return {TRANSPOSED: transposed_layers(model)}


def _is_same(saved: Any, compared: Tensor) -> bool:
    """Whether what is saved is what was compared; a hook may have put something else in its place."""
    replica = replica_of(saved) if isinstance(saved, Tensor) else None
    return replica is not None and storage_key(replica[0]) == storage_key(compared)


def resume(runner: Run, path: Path, options: Resume) -> None:
    """Restore a run from a checkpoint; a collective.

    Args:
        runner: the run.
        path: the checkpoint.
        options: the pieces to leave out, which are not read.

    Raises:
        CheckpointError: a piece is missing or damaged, or does not fit the model, the optimizer or the data; the
            message names the option that leaves the piece out.
    """
    strategy, loop = runner.strategy, runner.train_loop
    checkpoint = Checkpoint.open_together(path, verify=options.verify)
    if skipped := checkpoint.unverified:
        size = sum(entry.size for entry in skipped.values()) / 2**30
        runner.logger.warning(
            f"{path}: verify=False, the checksums of {counted(len(skipped), 'file')} with tensors ({size:.3f} GiB) are not compared; "
            "their sizes, the index and the plain values are"
        )
    with raising_together():
        _warn_if_marked(runner, checkpoint)
        values = checkpoint.values
        missing = {name: key for name, keys in _wanted(runner, options) for key in reversed(keys) if key not in values}
        if missing:
            lacks = " and no ".join(missing.values())
            raise CheckpointError(f"{path}: cannot be resumed, it has no {lacks}; {advice(*missing)}")
        saved = {k: v for k, v in checkpoint.saved.items() if options.optimizer or not k.startswith("optim.")}
        prepare(runner, checkpoint)
        with piece(path, "optim", "optimizer"):
            template = strategy.template(saved)
    _tell_what_is_left(runner, path, saved, template)
    _tell_what_is_rounded(runner, path, saved, template)
    absent = {f"model.{name}" for name in left_out(strategy)} - checkpoint.entries.keys()
    live = {key: tensor for key, tensor in _live_model(runner).items() if key not in absent}
    matched, _, report = match_weights(checkpoint, live, aliases(strategy))
    report = report.with_untied(matched, live).of_all()
    check_adapters(runner, checkpoint, path, with_shapes=bool(report.misshaped))
    if report:
        raise CheckpointError(f"{path}: does not fit the model: {report}")
    check_left_out(runner, checkpoint)
    with piece(path, "loop"):
        check_counts(values["loop"])
        progress = dict(values["loop"])
        if loop.data is not None:  # an Engine is given its batches
            loop.data.begin_anew()
            progress = begin_epoch_anew(loop.data, values["loop"])
    if options.data:
        from .going_back import left_out_since  # a run that begins does without

        since = told_by_rank_0(lambda: left_out_since(runner, path, values["loop"]["iter"]))
        with piece(path, "data", "data"):
            progress = continue_epoch(runner, values["data"], values["loop"], since)
            load_loader(runner, values.get("loader", ()), progress)

    hooks = _hook_tensors(runner, checkpoint) if options.hooks else {}
    source, extra = extra_template(runner, checkpoint)
    source.load({**template, **hooks, **extra})

    first = first_values(runner)
    with telling_what_differs(runner):
        with piece(path, "optim", "optimizer"), nullcontext() if options.param_scheduler else schedules_anew(runner):
            plain_values = {
                key: value for key, value in values.items() if options.optimizer and key.startswith("optim.")
            }
            strategy.load({**plain_values, **template})
            if options.optimizer and runner.optim_wrapper is not None:
                check_optimizer(runner, values)
                loop.before_first = partial(tell_frozen, runner, values.get(FROZEN))
                runner.optim_wrapper.load_plain_values(values["optim.wrapper"])
        if options.param_scheduler:
            with piece(path, "scheduler", "param_scheduler"):
                load_schedulers(runner, values, first, resumes_optimizer=options.optimizer)
    finish(runner, source.values, extra)
    with piece(path, "loop"):
        loop.load_state_dict(progress)
    if options.logs:
        with piece(path, "message_hub", "logs"):
            runner.message_hub.load_state_dict(values["message_hub"], values["own_losses"])
    if options.hooks:
        _load_hooks(runner, checkpoint, {**values, **hooks})
    if options.random:
        with piece(path, "rng", "random"):
            load_random(runner, values["rng"], values["processes"])


def _tell_what_is_left(runner: Run, path: Path, saved: Mapping[str, Any], template: Container[str]) -> None:
    """Log which tensors another strategy has saved as its own, that this one does not take over; a collective."""
    own = sorted(key for key, info in saved.items() if key.startswith(OWN) and hasattr(info, "shape"))
    if not own:
        return
    taken = {key for part in gather_differing(tuple(key for key in own if key in template)) for key in part}
    if left := [key for key in own if key not in taken]:
        more = f" and {counted(len(left) - 1, 'other tensor')}" if len(left) > 1 else ""
        runner.logger.warning(
            f"{path}: {type(runner.strategy).__name__} does not take over {left[0]}{more}, which the strategy that saved it had of its own"
        )


def _tell_what_is_rounded(runner: Run, path: Path, saved: Mapping[str, Any], template: Mapping[str, Any]) -> None:
    """Warn if weights or moments have a dtype here that cannot hold what the checkpoint has."""
    pairs = {
        key: (getattr(saved.get(key), "dtype", None), getattr(own, "dtype", None)) for key, own in template.items()
    }
    rounded = [key for key, (there, here) in pairs.items() if there != here and _loses(there, here)]
    if rounded:
        there, here = (str(dtype).removeprefix("torch.") for dtype in pairs[rounded[0]])
        more = f" and {counted(len(rounded) - 1, 'other tensor')}" if len(rounded) > 1 else ""
        runner.logger.warning(
            f"{path}: is rounded to {here}, {rounded[0]} ({there}){more}, because this run has another dtype than the one that saved it"
        )


def _loses(there: torch.dtype | None, here: torch.dtype | None) -> bool:
    if there is None or here is None or not (there.is_floating_point and here.is_floating_point):
        return False
    return torch.finfo(there).eps < torch.finfo(here).eps or torch.finfo(there).max > torch.finfo(here).max


def _wanted(runner: Run, options: Resume) -> Iterator[tuple[str | None, tuple[str, ...]]]:
    """Yield the pieces that a run needs from a checkpoint: the option that leaves each out, and its keys."""
    yield None, ("loop",)
    if options.data:
        yield "data", ("data",)
    if options.random:
        yield "random", ("rng", "processes")
    if options.logs:
        yield "logs", ("message_hub", "own_losses")
    if options.optimizer:
        yield "optimizer", ("optim.wrapper",)
    if options.param_scheduler and any(runner.schedulers.values()):
        yield "param_scheduler", ("scheduler",)
    if options.hooks:
        yield "hooks", ("hooks",)


def _hook_tensors(runner: Run, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors to load hook states into: new ones, but for averages of weights.

    What a hook has now may be the model's own weights, or have another dtype or shape than what it had when it was saved. A
    hook that takes no state is given what it had by filling it.
    """
    hooks = hooks_as_saved(runner, checkpoint)
    states = {name: hook_state(name, hook) for name, hook in hooks}
    with raising_together(), piece(checkpoint.path, "hooks", "hooks"):
        check_hooks(runner, checkpoint.values["hooks"], checkpoint.saved, states)
        saved = [key for name in states for key in checkpoint.values["hooks"].get(name, ())]
    tensors, own = checkpoint.tensors, dict[str, Tensor]()
    for name, hook in hooks:
        in_place = hook.holds_weights or not overridden(hook, "load_state_dict")
        for key, value in states[name].items():
            if isinstance(value, Tensor) and key in tensors:
                own[key] = value if in_place else _new_one_like(value, tensors[key])
    others = elsewhere(runner.strategy)
    new = {
        key: torch.empty(info.shape, dtype=info.dtype)
        for key, info in tensors.items()
        if key.startswith(_EXTRA) or (key in saved and key not in own and averaged_name(key) not in others)
    }
    return {**own, **new}


def _new_one_like(value: Tensor, saved: TensorInfo) -> Tensor:
    if is_ordinary(value):
        return torch.empty(saved.shape, dtype=saved.dtype, device=value.device)
    return torch.empty_like(value, dtype=saved.dtype)


def _load_hooks(runner: Run, checkpoint: Checkpoint, loaded: Mapping[str, Any]) -> None:
    _tell_if_unsure(runner, checkpoint)
    hooks = hooks_as_saved(runner, checkpoint)
    with raising_together():
        for name, hook in hooks:
            if found := _unflatten(loaded, f"hook.{name}"):
                with piece(checkpoint.path, f"hook.{name}", "hooks"):
                    hook.load_state_dict(found)
                takes_none = type(hook).load_state_dict.__qualname__ == "Hook.load_state_dict"
                if takes_none and (lost := [key for key in found if not _has_tensor(found[key])]):
                    runner.logger.warning(
                        f"{name} starts afresh: its state_dict() has {lost[0]}, and it defines no load_state_dict(state)"
                    )
    added = _unflatten(loaded, "extra")
    runner.call_hook("after_load_checkpoint", checkpoint={"meta": loaded.get("meta", {}), **added})


def load_weights(runner: Run, path: Path, *, strict: bool, revise_keys: Sequence[tuple[str, str]]) -> None:
    """Load the weights of a file or checkpoint into the model; a collective.

    Raises:
        CheckpointError: with ``strict``, if any name or shape does not fit; in any case, if nothing fits.
    """
    opened = open_weights_together(path)
    _warn_if_marked(runner, opened)
    if (methods := own_loading(runner.strategy.module)) and not is_checkpoint(path):
        runner.logger.warning(
            f"{path}: is read by names and shapes, the model's own code for older files is not called: {', '.join(methods)}"
        )
    if opened.origin:
        names = [*runner.strategy.model_state(), *aliases(runner.strategy)]
        opened, line = without_prefix(opened, names, revise_keys)
        if line:
            runner.logger.info(line)
    prepare(runner, opened)
    opened, extra = extra_template(runner, opened, revise_keys)
    live = _live_model(runner)
    source, fits, report = match_weights(opened, live, aliases(runner.strategy), revise_keys, across_adapters=True)
    report = report.with_untied(source, live).of_all().keeping(check_left_out(runner, source, refuses=strict))
    is_refused = bool(report) and (strict or not any(gather_differing(bool(fits))))
    check_adapters(runner, source, path, with_shapes=is_refused and bool(report.misshaped))
    if is_refused:
        raise CheckpointError(f"{path}: does not fit the model: {report}")
    check_not_quantised(runner, source, fits)
    source.load(fits)
    _tell_what_overflows(runner, source, fits)
    opened.load(extra)
    runner.strategy.load(fits)
    finish(runner, opened.values, extra)
    if report:
        runner.logger.warning(f"{path}: does not fit the model everywhere: {report}")
    if report.kept:
        what = "adapters" if is_adapter(report.kept[0]) else "the base"
        runner.logger.info(
            f"{path}: holds nothing of {what}; {counted(len(report.kept), 'parameter')} of {what} keep their values"
        )
    for name, hook in hooks_as_saved(runner, opened):
        own = _flatten(hook.state_dict(), f"hook.{name}") if hook.holds_weights else {}
        found = {key: tensor for key, tensor in own.items() if key in opened.tensors}
        fits_here = all(tuple(tensor.shape) == opened.tensors[key].shape for key, tensor in found.items())
        everywhere = gather_differing([bool(found), fits_here]) if hook.holds_weights else []
        if any(has_some for has_some, _ in everywhere) and all(fits for _, fits in everywhere):
            opened.load(found)
            hook.load_state_dict(_unflatten({**opened.values, **found}, f"hook.{name}"))
    _warn_of_averages(runner, opened)


def _tell_what_overflows(runner: Run, source: Checkpoint, loaded: Mapping[str, Tensor]) -> None:
    """Warn if parameters are infinite here, in a dtype of a smaller range than that of the file; a collective."""
    stored, parameters = source.tensors, {f"{_MODEL}{name}" for name, _ in runner.strategy.parameters()}
    smaller = {
        key: tensor
        for key, tensor in loaded.items()
        if key in parameters
        and (stored[key].dtype.is_floating_point and tensor.is_floating_point())
        and torch.finfo(tensor.dtype).max < torch.finfo(stored[key].dtype).max
    }
    found = sorted({key for keys in gather_differing(nonfinite(smaller)) for key in keys})
    if found:
        runner.logger.warning(
            f"{source.path}: has values beyond the range of this model's parameters, {what_is_not_finite(found)} holds NaN or infinity now"
        )


def _warn_of_averages(runner: Run, checkpoint: Checkpoint) -> None:
    """Say it if that run was validated with other weights than those that were loaded here."""
    here = {name for name, hook in named_hooks(runner) if hook.holds_weights}
    kinds = {key.removeprefix("hook.").split(_SEPARATOR)[0] for key in checkpoint.tensors if averaged_name(key)}
    # Before the first update averages have no meaning, and validation did not use them.
    left = sorted(kind for kind in kinds - here if checkpoint.values.get(f"hook.{kind}/updates"))
    if left:
        runner.logger.warning(
            f"{checkpoint.path}: the averages of {', '.join(left)} are not loaded, this run has no such hook; the run that "
            "saved them was validated with them, so its scores are not those of the weights loaded here. Add the hook, or "
            "load what flextrain checkpoint export --averaged writes"
        )


def _warn_if_marked(runner: Run, checkpoint: Checkpoint) -> None:
    if checkpoint.nonfinite:
        runner.logger.warning(
            f"{checkpoint.path}: holds NaN or infinity in {what_is_not_finite(checkpoint.nonfinite)}, it was marked when it "
            "was saved"
        )


def _live_model(runner: Run) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in runner.strategy.model_state().items()}


def named_hooks(runner: Run) -> Iterator[tuple[str, Any]]:
    """Yield the hooks, each with the name of its state: its class, numbered from the second of a class on."""
    seen: dict[str, int] = {}
    for hook in runner.hooks:
        kind = type(hook).__name__
        number = seen[kind] = seen.get(kind, -1) + 1
        yield (f"{kind}_{number}" if number else kind), hook


def hook_states(runner: Run) -> dict[str, dict[str, Any]]:
    """Return the flat states of all hooks, by the hooks' names."""
    return {name: hook_state(name, hook) for name, hook in named_hooks(runner)}


def hook_state(name: str, hook: Any) -> dict[str, Any]:
    """Return the flat state of one hook, by its name in checkpoints."""
    return _flatten(hook.state_dict(), f"hook.{name}")


# Which of several hooks of one class a state belongs to, should they be listed in another order: by their settings.


SETTINGS = "hook_settings"


def hook_settings(runner: Run) -> dict[str, list[str]]:
    """Return what tells hooks of one class apart, by the name of the class, in the order of the hooks."""
    found: dict[str, list[str]] = {}
    for hook in runner.hooks:
        found.setdefault(type(hook).__name__, []).append(_settings_of(hook))
    return found


def hooks_as_saved(runner: Run, checkpoint: Checkpoint) -> list[tuple[str, Any]]:
    """Return the hooks, each with the name of its state in a checkpoint; a collective."""
    saved = checkpoint.values.get(SETTINGS, {})  # older ones have none
    # Arguments may differ between processes, a folder for example; positions may not.
    own = told_by_rank_0(lambda: hook_settings(runner)) if saved else hook_settings(runner)
    positions = {kind: iter(_positions(settings, saved.get(kind, settings))) for kind, settings in own.items()}
    numbered = [(kind := type(hook).__name__, next(positions[kind])) for hook in runner.hooks]
    names = [f"{kind}_{number}" if number else kind for kind, number in numbered]
    return list(zip(names, runner.hooks, strict=True))


def _positions(own: Sequence[str], saved: Sequence[str]) -> list[int]:
    """Return for each hook the number of the saved one with the same settings; others take what is left, in order."""
    left, positions = list(range(len(saved))), dict[int, int]()
    for alike in (True, False):
        for number, settings in enumerate(own):
            fit = [position for position in left if saved[position] == settings or not alike]
            if number not in positions and fit:
                positions[number] = number if number in fit else fit[0]
                left.remove(positions[number])
    fresh = (number for number in range(len(saved), len(saved) + len(own)))
    return [positions[number] if number in positions else next(fresh) for number in range(len(own))]


def _tell_if_unsure(runner: Run, checkpoint: Checkpoint) -> None:
    """Warn if hooks of a class cannot be told apart by their settings, because several have others now."""
    saved = checkpoint.values.get(SETTINGS, {})
    for kind, own in hook_settings(runner).items():
        now, then = Counter(own), Counter(saved.get(kind, own))
        new, gone = (now - then).total(), (then - now).total()
        if new and gone and new + gone > 2 and kind in checkpoint.values["hooks"]:
            runner.logger.warning(
                f"{checkpoint.path}: which {kind} has which of their states cannot be told, because the settings of several are others "
                "now; they are taken in the order of the hooks"
            )


def _settings_of(hook: Any) -> str:
    """A digest of the class of a hook, and of the arguments that it keeps under their names; not as text, which may be secret."""
    kind = type(hook)
    made_by = [vars(base).get("__init__") for base in kind.__mro__]
    names = {name for init in made_by if inspect.isfunction(init) for name in inspect.signature(init).parameters}
    held = {key.lstrip("_"): value for key, value in vars(hook).items()}
    kept = {name: _comparable(held[name]) for name in sorted(names & held.keys())}
    return hashlib.sha256(json.dumps([kind.__module__, kind.__qualname__, kept]).encode()).hexdigest()[:16]


_MOST_ITEMS = 1000


def _comparable(value: Any) -> Any:
    """The same value for the same argument in another process; of an object only its class."""
    if isinstance(value, (list, tuple, Mapping)) and len(value) <= _MOST_ITEMS:
        return [_comparable(item) for item in (value.items() if isinstance(value, Mapping) else value)]
    if isinstance(value, (type(None), bool, int, float, str, Path)):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Mapping) and any(map(_has_tensor, value.values())))


_SEPARATOR = "/"
_EXTRA = "extra/"
# A slash in a key is escaped as in JSON pointers (RFC 6901).
_ESCAPED = (("~", "~0"), ("/", "~1"))


def _flatten(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Flatten nested mappings down to tensors and plain values; keys are joined by slashes, because names have dots."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{prefix}[{key!r}]: cannot be saved, keys have to be text, not {type(key).__name__}")
        for raw, escaped in _ESCAPED:
            key = key.replace(raw, escaped)
        path = f"{prefix}{_SEPARATOR}{key}"
        if isinstance(item, Mapping) and _has_tensor(item):
            flat.update(_flatten(item, path))
        else:
            flat[path] = item
    return flat


def _unescape(key: str) -> str:
    for raw, escaped in reversed(_ESCAPED):
        key = key.replace(escaped, raw)
    return key


def _unflatten(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        if path.startswith(prefix + _SEPARATOR):
            *outer, last = map(_unescape, path.removeprefix(prefix + _SEPARATOR).split(_SEPARATOR))
            inner = nested
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = value
    return nested
