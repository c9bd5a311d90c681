"""What a checkpoint of a run holds beside the strategy's state, and bringing a run back to it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.checkpoint import Checkpoint, match_weights, open_weights, save_checkpoint
from ..core.errors import CheckpointError, FlexTrainError
from ..core.seed import load_rng_state, rng_state
from .checks import batch_size

if TYPE_CHECKING:
    from .runner import FlexibleRunner


def save(
    runner: FlexibleRunner,
    path: Path,
    *,
    save_optimizer: bool = True,
    save_param_scheduler: bool = True,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write the state of a run; every process must call it."""
    strategy = runner.strategy
    state: dict[str, Any] = strategy.state_dict()
    if not save_optimizer:
        state = {key: value for key, value in state.items() if not key.startswith("optim.")}
    elif runner.optim_wrapper is not None:
        state["optim.wrapper"] = runner.optim_wrapper.state_dict()
    if save_param_scheduler:
        state["scheduler"] = {name: [s.state_dict() for s in group] for name, group in runner.schedulers.items()}
    state["loop"] = runner.train_loop.state_dict()
    state["data"] = _data_facts(runner)
    state["aliases"] = dict(strategy.aliases())  # exports write tied tensors under all of their names
    state["message_hub"] = runner.message_hub.state_dict()
    state["meta"] = {
        "experiment_name": runner.experiment_name,
        "seed": runner.seed,
        "time": datetime.datetime.now().isoformat(timespec="seconds"),
        **(meta or {}),
    }
    for name, hook in _named_hooks(runner):
        state.update(_flatten(hook.state_dict(), f"hook.{name}"))
    extra: dict[str, Any] = {}
    runner.call_hook("before_save_checkpoint", checkpoint=extra)
    state.update(_flatten(extra, "extra"))
    return save_checkpoint(
        path,
        state,
        per_rank={"rng": rng_state()},
        written_by={"flextrain": runner.version, "strategy": type(strategy).__name__},
    )


def resume(runner: FlexibleRunner, path: Path, *, optimizer: bool = True, param_scheduler: bool = True) -> None:
    """Bring a run to where the checkpoint was written; every process must call it.

    Raises:
        CheckpointError: a part is missing, or does not fit the model, the optimizer or the data.
    """
    checkpoint = Checkpoint.open(path)
    values, strategy = checkpoint.values, runner.strategy
    for key in ("loop", "rng", "data", "message_hub", *(("optim.wrapper",) if optimizer else ())):
        if key not in values:
            raise CheckpointError(f"{path}: cannot be resumed, it has no {key}; use load_from for its weights")
    saved = {k: v for k, v in checkpoint.saved.items() if optimizer or not k.startswith("optim.")}
    template = strategy.load_template(saved)
    absent = {f"model.{name}" for name in strategy.left_out()} - checkpoint.entries.keys()
    live = {key: tensor for key, tensor in _live_model(runner).items() if key not in absent}
    _, _, report = match_weights(checkpoint, live, strategy.aliases())
    if report:
        raise CheckpointError(f"{path}: does not fit the model: {report}")
    with _damage(path, "data"):
        _check_data(runner, values["data"], values["loop"], path)

    hooks = {f"hook.{name}": _flatten(hook.state_dict(), f"hook.{name}") for name, hook in _named_hooks(runner)}
    own = {key: value for part in hooks.values() for key, value in part.items() if isinstance(value, Tensor)}
    extra = {k: torch.empty(i.shape, dtype=i.dtype) for k, i in checkpoint.tensors.items() if k.startswith(_EXTRA)}
    others = {key: value for key, value in own.items() if key in checkpoint.entries} | extra
    checkpoint.load({**template, **others})

    with _damage(path, "optim"):
        plain = {key: value for key, value in values.items() if optimizer and key.startswith("optim.")}
        strategy.load_state_dict({**plain, **template})
        if optimizer and runner.optim_wrapper is not None:
            runner.optim_wrapper.load_state_dict(values["optim.wrapper"])
    if param_scheduler:
        with _damage(path, "scheduler"):
            _load_schedulers(runner, values.get("scheduler", {}), path)
    with _damage(path, "loop"):
        runner.train_loop.load_state_dict(values["loop"])
    with _damage(path, "message_hub"):
        runner.message_hub.load_state_dict(values["message_hub"])
    for name, hook in _named_hooks(runner):
        found = _unflatten({**values, **others}, f"hook.{name}")
        if found:
            with _damage(path, f"hook.{name}"):
                hook.load_state_dict(found)
    runner.call_hook("after_load_checkpoint", checkpoint=_unflatten({**values, **extra}, "extra"))
    with _damage(path, "rng"):
        _load_rng(runner, values, path)


@contextmanager
def _damage(path: Path, key: str) -> Iterator[None]:
    """Say which part of a checkpoint is not what was saved there."""
    try:
        yield
    except FlexTrainError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: {key} is damaged, {type(error).__name__}: {reason}") from error


def load_weights(runner: FlexibleRunner, path: Path, *, strict: bool, revise_keys: Sequence[tuple[str, str]]) -> None:
    """Fill the model with the weights of a file or checkpoint; every process must call it.

    Raises:
        CheckpointError: with ``strict``, if any name or shape does not fit; always, if nothing fits.
    """
    opened = open_weights(path)
    source, fits, report = match_weights(opened, _live_model(runner), runner.strategy.aliases(), revise_keys)
    if report and (strict or not fits):
        raise CheckpointError(f"{path}: does not fit the model: {report}")
    source.load(fits)
    runner.strategy.load_state_dict(fits)
    if report:
        runner.logger.warning(f"{path}: does not fit the model everywhere: {report}")
    for name, hook in _named_hooks(runner):
        own = _flatten(hook.state_dict(), f"hook.{name}") if hook.holds_weights else {}
        found = {key: tensor for key, tensor in own.items() if key in opened.tensors}
        if found and all(tuple(tensor.shape) == opened.tensors[key].shape for key, tensor in found.items()):
            opened.load(found)
            hook.load_state_dict(_unflatten({**opened.values, **found}, f"hook.{name}"))


def _live_model(runner: FlexibleRunner) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in runner.strategy.model_state().items()}


def _named_hooks(runner: FlexibleRunner) -> Iterator[tuple[str, Any]]:
    """Hooks with a name for their state: the class, numbered from the second of its kind on."""
    seen: dict[str, int] = {}
    for hook in runner.hooks:
        kind = type(hook).__name__
        number = seen[kind] = seen.get(kind, -1) + 1
        yield (f"{kind}_{number}" if number else kind), hook


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Mapping) and any(map(_has_tensor, value.values())))


_SEPARATOR = "/"
_EXTRA = "extra/"


def _flatten(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested mappings as one, down to tensors and plain values; names of parameters have dots, so parts get slashes."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        path = f"{prefix}{_SEPARATOR}{key}"
        if isinstance(item, Mapping) and _has_tensor(item):
            flat.update(_flatten(item, path))
        else:
            flat[path] = item
    return flat


def _unflatten(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        if path.startswith(prefix + _SEPARATOR):
            *outer, last = path.removeprefix(prefix + _SEPARATOR).split(_SEPARATOR)
            place = nested
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = value
    return nested


def _data_facts(runner: FlexibleRunner) -> dict[str, Any]:
    """How the position in the data is to be read: the batch size and over how many processes it was split."""
    return {
        "seed": runner.seed,
        "processes": runner.world_size,
        "shards": runner.strategy.data_shard[1],
        "batch_size": batch_size(runner.train_dataloader),
        "accumulate": runner.accumulate,
        "epoch_length": runner.train_loop.data.epoch_length,
    }


def _check_data(runner: FlexibleRunner, saved: Mapping[str, Any], loop: Mapping[str, int], path: Path) -> None:
    """Refuse to continue in the middle of an epoch whose batches would be others."""
    now = _data_facts(runner)
    for key in ("shards", "batch_size", "accumulate", "epoch_length"):
        if saved.get(key) != now[key] and loop["inner"] > 0:
            raise CheckpointError(
                f"{path}: was saved in the middle of an epoch with {key}={saved.get(key)}, it is {now[key]} now; "
                "resume from the end of an epoch to change it"
            )
    if saved.get("seed") != now["seed"]:
        runner.logger.info(f"The data order continues with the checkpoint's seed {saved.get('seed')}")
        runner.use_data_seed(saved["seed"])


def _load_schedulers(runner: FlexibleRunner, saved: Mapping[str, list[Any]], path: Path) -> None:
    for name, group in runner.schedulers.items():
        states = saved.get(name, [])
        if len(states) != len(group):
            raise CheckpointError(
                f"{path}: has {len(states)} parameter schedulers, the configuration has {len(group)}; "
                "resume(..., resume_param_scheduler=False) starts them anew"
            )
        for scheduler, state in zip(group, states, strict=True):
            scheduler.load_state_dict(state)


def _load_rng(runner: FlexibleRunner, values: Mapping[str, Any], path: Path) -> None:
    states, world_size, saved = values["rng"], runner.world_size, values["data"]["processes"]
    if len(states) != saved:
        raise CheckpointError(f"{path}: was written by {saved} processes and has random states of {len(states)}")
    if saved != world_size:
        runner.logger.warning(
            f"The checkpoint was written by {len(states)} processes and there are {world_size}: "
            "random states are not restored, dropout and augmentation draw other numbers"
        )
        return
    load_rng_state(states[runner.rank])
