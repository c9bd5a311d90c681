"""Save, resume and load a run: the state of its strategy and of all other pieces of a checkpoint."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
from ...core.checkpoint.export.exported_adapters import TRANSPOSED
from ...core.checkpoint.load.adapter_names import is_adapter
from ...core.checkpoint.participants import Participants
from ...core.comm.joint_errors import gather_differing, raising_together
from ...core.errors import CheckpointError, counted
from ...core.fingerprints import replica_of
from ...core.hugging_face.model_description import META_KEY
from ...core.module_state import own_loading
from ...core.random_state import rng_state
from ...core.supervision import job
from ...core.torch_private import storage_key
from ...optim.canonical import FROZEN
from ..finite_weights import averaged_name, keys_to_keep_finite
from ..options import Resume
from .adapter_settings import ADAPTERS, adapter_configurations, check_adapters, transposed_layers
from .data_position import begin_epoch_anew, check_counts, continue_epoch, data_facts, load_loader
from .frozen_weights import LEFT_OUT, check_left_out
from .hook_view import SavedView
from .model_extras import LATE, extra_template, finish, module_state, prepare
from .optimizer_settings import check_optimizer, frozen, telling_what_differs
from .pieces import advice, check_hooks, piece
from .random_states import load_random
from .scheduler_states import first_values, load_schedulers, scheduler_states, schedules_anew

if TYPE_CHECKING:
    from ..run import Run


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
    state: dict[str, Any] = strategy.state_dict()
    if not save_optimizer:
        state = {key: value for key, value in state.items() if not key.startswith("optim.")}
    elif runner.optim_wrapper is not None:
        state["optim.wrapper"] = runner.optim_wrapper.plain_values()
    if is_export:
        state |= strategy.state_left_out()
    if save_param_scheduler:
        state.update(scheduler_states(runner))
    trains = runner.optim_wrapper is not None
    if trains:  # a run without training may export its model
        state["loop"] = runner.train_loop.state_dict()
        state["data"] = data_facts(runner, state["loop"]).model_dump()
    state["processes"] = topology.data.count  # those with their own data shard, and so their own RNG state
    modules, late_buffers = module_state(runner)
    state.update(modules)
    state["aliases"] = strategy.aliases()  # exports write a tied tensor under each of its names
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
    hooks = {} if is_export else hook_states(runner)
    state.update({key: value for part in hooks.values() for key, value in part.items()})
    view = SavedView(state)
    runner.call_hook("before_save_checkpoint", checkpoint=view.checkpoint)
    state.update(_flatten(view.apply(), "extra"))
    # The averages of a buffer are saved by the process that saves the buffer.
    others = {name for name, _ in strategy.module.named_buffers() if not strategy.saves(name)}
    state = {key: value for key, value in state.items() if averaged_name(key) not in others}
    own: dict[str, Any] = {"rng": rng_state(strategy.device)}
    if trains:
        own["loader"] = runner.train_loop.data.loader_state()
    Participants(f"{path}: could not be saved").meet(path.name, float(strategy.config.timeout_s))
    if not is_export and (prints := strategy.fingerprints_of_left_out()):
        state[LEFT_OUT] = prints
    staging = staging or Staging()
    staging.compared = {key for key, tensor in strategy.check_replicas().items() if _is_same(state.get(key), tensor)}
    options: dict[str, Any] = dict(
        per_rank={"own_losses": runner.message_hub.own_losses()} if topology.reports else None,
        in_own_file=own if topology.reports else None,
        number=topology.data.index,
        joined={
            "hooks": {name: sorted(part) for name, part in hooks.items() if part},
            LATE: late_buffers,
            **({FROZEN: frozen(runner)} if save_optimizer else {}),
            **({TRANSPOSED: transposed_layers(strategy.module)} if found else {}),
        },
        written_by={"flextrain": runner.version, "strategy": type(strategy).__name__},
        is_latest=view.has_optimizer,  # without it a checkpoint cannot be resumed
        verify=verify,
        staging=staging,
        finite=keys_to_keep_finite(runner, state),
        timeout_s=float(strategy.config.timeout_s),
    )
    if in_background:
        return save_in_background(path, state, logs_failure=logs_failure, **options)
    save_checkpoint(path, state, **options)
    return None


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
            template = strategy.load_template(saved)
    absent = {f"model.{name}" for name in strategy.left_out()} - checkpoint.entries.keys()
    live = {key: tensor for key, tensor in _live_model(runner).items() if key not in absent}
    _, _, report = match_weights(checkpoint, live, strategy.aliases())
    if report := report.of_all():
        raise CheckpointError(f"{path}: does not fit the model: {report}")
    check_adapters(runner, checkpoint, path)
    check_left_out(runner, checkpoint)
    with piece(path, "loop"):
        check_counts(values["loop"])
        progress = begin_epoch_anew(loop.data, values["loop"])
    if options.data:
        with piece(path, "data", "data"):
            progress = continue_epoch(runner, values["data"], values["loop"])
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
            strategy.load_state_dict({**plain_values, **template})
            if options.optimizer and runner.optim_wrapper is not None:
                check_optimizer(runner, values)
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
        _load_hooks(runner, path, {**values, **hooks})
    if options.random:
        with piece(path, "rng", "random"):
            load_random(runner, values["rng"], values["processes"])


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
    """Return the tensors to load hook states into: those of the current states, and new ones for what hooks added."""
    states = hook_states(runner)
    with raising_together(), piece(checkpoint.path, "hooks", "hooks"):
        check_hooks(runner, checkpoint.values["hooks"], checkpoint.saved, states)
        saved = [key for name in states for key in checkpoint.values["hooks"].get(name, ())]
    own = {key: value for state in states.values() for key, value in state.items() if isinstance(value, Tensor)}
    elsewhere = runner.strategy.elsewhere()
    new = {
        key: torch.empty(info.shape, dtype=info.dtype)
        for key, info in checkpoint.tensors.items()
        if key.startswith(_EXTRA) or (key in saved and key not in own and averaged_name(key) not in elsewhere)
    }
    return {**{key: value for key, value in own.items() if key in checkpoint.entries}, **new}


def _load_hooks(runner: Run, path: Path, loaded: Mapping[str, Any]) -> None:
    with raising_together():
        for name, hook in named_hooks(runner):
            if found := _unflatten(loaded, f"hook.{name}"):
                with piece(path, f"hook.{name}", "hooks"):
                    hook.load_state_dict(found)
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
        names = [*runner.strategy.model_state(), *runner.strategy.aliases()]
        opened, line = without_prefix(opened, names, revise_keys)
        if line:
            runner.logger.info(line)
    prepare(runner, opened)
    opened, extra = extra_template(runner, opened, revise_keys)
    live, aliases = _live_model(runner), runner.strategy.aliases()
    source, fits, report = match_weights(opened, live, aliases, revise_keys, across_adapters=True)
    report = report.of_all()
    if report and (strict or not any(gather_differing(bool(fits)))):
        raise CheckpointError(f"{path}: does not fit the model: {report}")
    check_adapters(runner, opened, path)
    source.load(fits)
    opened.load(extra)
    runner.strategy.load_state_dict(fits)
    finish(runner, opened.values, extra)
    if report:
        runner.logger.warning(f"{path}: does not fit the model everywhere: {report}")
    if report.kept:
        what = "adapters" if is_adapter(report.kept[0]) else "the base"
        runner.logger.info(
            f"{path}: holds nothing of {what}; {counted(len(report.kept), 'parameter')} of {what} keep their values"
        )
    for name, hook in named_hooks(runner):
        own = _flatten(hook.state_dict(), f"hook.{name}") if hook.holds_weights else {}
        found = {key: tensor for key, tensor in own.items() if key in opened.tensors}
        fits_here = all(tuple(tensor.shape) == opened.tensors[key].shape for key, tensor in found.items())
        everywhere = gather_differing([bool(found), fits_here]) if hook.holds_weights else []
        if any(has_some for has_some, _ in everywhere) and all(fits for _, fits in everywhere):
            opened.load(found)
            hook.load_state_dict(_unflatten({**opened.values, **found}, f"hook.{name}"))
    check_left_out(runner, opened, refuses=False)
    _warn_of_averages(runner, opened)


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
