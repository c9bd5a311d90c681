"""State of modules besides weights: extra state, and buffers that were registered during training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.checkpoint import Checkpoint
from ...core.module_state import (
    EXTRA,
    extra_state,
    keeper_of,
    keepers,
    make_buffers,
    set_extra_state,
    tell_loaded,
    torch_key,
)

if TYPE_CHECKING:
    from ..run import Run

LATE = "late_buffers"
_MODEL = "model."


def module_state(runner: Run) -> tuple[dict[str, Any], list[str]]:
    """Return the modules' extra state, and the names of buffers registered after setup."""
    strategy = runner.strategy
    # Every process calls this, because ``get_extra_state`` of a module may run a collective.
    state = extra_state(strategy.module)
    parameters, buffers = strategy.appeared()
    if parameters != runner.late_parameters:
        runner.late_parameters = parameters
        runner.logger.warning(
            f"The model has registered parameters after the run was set up: {', '.join(parameters)}; no optimizer "
            "trains them, and a resumed run does not have them; create them in the constructor"
        )
    saved = {name for name, _ in keepers(strategy.module) if strategy.saves(name)}
    own = {k: v for k, v in state.items() if not isinstance(v, Tensor) or keeper_of(k) in saved}
    return own, buffers


def prepare(runner: Run, checkpoint: Checkpoint) -> None:
    """Register the buffers of a checkpoint that appear only during training, as the model will do later."""
    names = checkpoint.values.get(LATE, ())
    tensors = checkpoint.tensors
    shapes = {
        name: (tensors[_MODEL + name].shape, tensors[_MODEL + name].dtype)
        for name in (names if isinstance(names, list) else ())
        if isinstance(name, str) and _MODEL + name in tensors
    }
    make_buffers(runner.strategy.module, shapes, runner.strategy.device)


def extra_template(
    runner: Run, checkpoint: Checkpoint, revise_keys: Sequence[tuple[str, str]] = ()
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return the checkpoint with its extra state under the model's module names, and tensors to load that into."""
    module = runner.strategy.module
    other_names, wanted = runner.strategy.aliases(), {torch_key(name): name for name, _ in keepers(module)}
    found: dict[str, str] = {}
    for key in checkpoint.values:
        if key.startswith(EXTRA):
            name = torch_key(key.removeprefix(EXTRA))
            for pattern, replacement in revise_keys:
                name = re.sub(pattern, replacement, name)
            found[other_names.get(name, name)] = key
    for name in wanted.keys() - found.keys():
        runner.logger.warning(f"{checkpoint.path}: has no {name}, the model keeps its current extra state")
    elsewhere = {torch_key(name) for name in runner.strategy.keepers_elsewhere()}
    for name in found.keys() - wanted.keys() - elsewhere:
        runner.logger.warning(f"{checkpoint.path}: {name} is left out, the model has no such extra state")
    renamed = {found[name]: EXTRA + wanted[name] for name in found.keys() & wanted.keys()}
    values = {key: value for key, value in checkpoint.values.items() if not key.startswith(EXTRA)}
    values |= {new: checkpoint.values[old] for old, new in renamed.items()}
    entries = {}
    for key, entry in checkpoint.entries.items():
        module_key, _, number = key.rpartition("/")
        if not key.startswith(EXTRA):
            entries[key] = entry
        elif module_key in renamed:
            entries[f"{renamed[module_key]}/{number}"] = entry
    source = checkpoint.renamed(entries, values)
    live = extra_state(module) if found else {}
    template = {
        key: torch.empty(info.shape, dtype=info.dtype, device=_device(live.get(key), runner.strategy.device))
        for key, info in source.tensors.items()
        if key.startswith(EXTRA)
    }
    return source, template


def _device(live: Any, otherwise: torch.device) -> torch.device:
    return live.device if isinstance(live, Tensor) else otherwise


def finish(runner: Run, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Give the modules their extra state, after the weights were loaded, and notify them that they are loaded."""
    set_extra_state(runner.strategy.module, values, tensors)
    tell_loaded(runner.strategy.module)
