"""Check before training that a checkpoint of the run could be written: otherwise the first save would end it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.checkpoint import is_local
from ...core.checkpoint.directory import to_json
from ...core.comm.joint_errors import raising_together
from ...core.errors import CheckpointError
from ...core.stored_dtypes import check_tensor
from .run_state import hook_states

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
        for part in hook_states(run).values():
            state.update(part)
        state["scheduler"] = {name: [s.state_dict() for s in group] for name, group in run.schedulers.items()}
        for key, value in state.items():
            if isinstance(value, Tensor):
                check_tensor(key, value)
            else:
                to_json(value, key)
        if run.rank == 0 and is_local(run.checkpoint_dir):
            _check_space(run.checkpoint_dir, [value for value in state.values() if isinstance(value, Tensor)])


def _check_space(folder: Path, tensors: list[Tensor]) -> None:
    """Raise CheckpointError if the folder's file system has no room for the tensors that exist already."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    total, _, free = shutil.disk_usage(existing)
    needed = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)  # whole, also of a shard
    if total and free < needed:
        raise CheckpointError(
            f"{folder}: has {free / 2**20:,.0f} MiB free, and a checkpoint takes {needed / 2**20:,.0f} MiB or more; make room, or "
            "give another folder as work_dir or CheckpointHook.out_dir"
        )
