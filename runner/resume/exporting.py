"""Export the model of a run as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import export_hugging_face, remove_checkpoint
from ...core.comm.joint_errors import told_by_rank_0
from ...core.errors import CheckpointError
from . import run_state

if TYPE_CHECKING:
    from ..run import Run


def export_model(run: Run, folder: Path, options: Mapping[str, Any]) -> list[Path]:
    """Write a folder that ``from_pretrained`` loads, by way of a checkpoint without an optimizer; a collective.

    Raises:
        CheckpointError: the model is none of transformers, or the folder holds one already.
    """
    if run.hugging_face is None:
        raise CheckpointError(
            f"{folder}: {type(run.strategy.module).__name__} is no model of transformers, nor does it have exactly one; "
            "save a checkpoint, and give flextrain checkpoint export"
        )
    told_by_rank_0(lambda: _check_free(folder))
    weights = folder.with_name(f".{folder.name}.weights")
    run_state.save(run, weights, save_optimizer=False, save_param_scheduler=False)
    try:
        return told_by_rank_0(lambda: export_hugging_face(weights, folder, **options))
    finally:
        told_by_rank_0(lambda: remove_checkpoint(weights))


def _check_free(folder: Path) -> None:
    if (folder / "config.json").exists():
        raise CheckpointError(f"{folder / 'config.json'}: is there already, give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
