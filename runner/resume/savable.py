"""Check before training that a checkpoint of the run could be written: otherwise the first save would end it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.byte_sizes import size_text
from ...core.checkpoint import is_local
from ...core.checkpoint.directory import to_json
from ...core.checkpoint.untrusted import one_line
from ...core.comm.joint_errors import raising_together
from ...core.errors import CheckpointError
from ...core.stored_dtypes import check_tensor
from ..transforms.quantised import needs_leaving_out
from .run_state import hook_state, named_hooks
from .scheduler_states import scheduler_states

if TYPE_CHECKING:
    from ..run import Run


def check_can_be_saved(run: Run) -> None:
    """Check the states of model, optimizer, schedules and hooks, and the free space of the folder; a collective.

    State that appears only during training is not known yet, and what hooks add in ``before_save_checkpoint``.

    Raises:
        CheckpointError: on every process, if a value cannot be saved on one of them, or there is too little space.
    """
    with raising_together():
        state: dict[str, Any] = dict(run.strategy.state_dict())
        for name, hook in named_hooks(run):
            state.update(_state_of(run, name, hook))
        state.update(scheduler_states(run))
        for key, value in state.items():
            if isinstance(value, Tensor):
                if needs_leaving_out(value):
                    raise CheckpointError(
                        f"{key}: is quantised ({type(value).__name__}), and checkpoints cannot hold quantised weights; leave them out, "
                        "strategy=dict(type=..., exclude_frozen_parameters=True)"
                    )
                check_tensor(key, value)
            else:
                to_json(value, key)
        folders = {
            "work_dir or CheckpointHook.out_dir": run.checkpoint_dir,
            "CheckpointHook.fast_dir": run.fast_checkpoint_dir,
        }
        for key, folder in folders.items():
            if run.rank == 0 and folder is not None and is_local(folder):
                _check_space(folder, key, [value for value in state.values() if isinstance(value, Tensor)])


def _state_of(run: Run, name: str, hook: Any) -> dict[str, Any]:
    try:
        return hook_state(name, hook)
    except CheckpointError:
        raise
    except Exception as error:  # it may exist only after the first update; a save will raise what is then wrong
        run.logger.warning(
            f"{type(hook).__name__}.state_dict: fails before training, {type(error).__name__}: {one_line(error)}; it is called "
            "there when a run is resumed, give the state its first value in __init__"
        )
        return {}


def _check_space(folder: Path, key: str, tensors: list[Tensor]) -> None:
    """Raise CheckpointError if the folder's file system has no room for the tensors that exist already."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    total, _, free = shutil.disk_usage(existing)
    needed = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)  # whole, also of a shard
    if total and free < needed:
        raise CheckpointError(
            f"{folder}: has {size_text(free)} free, and a checkpoint takes {size_text(needed)} or more; make room, or give "
            f"another folder as {key}"
        )
