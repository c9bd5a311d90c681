"""Export the model of a run as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import remove_checkpoint
from ...core.checkpoint.directory import check_no_other_files, temporary
from ...core.checkpoint.export.hugging_face import check_target, write_hugging_face
from ...core.checkpoint.export.merged_weights import merged
from ...core.checkpoint.export.target import claimed
from ...core.checkpoint.load.checkpoint import Checkpoint
from ...core.comm.joint_errors import told_by_rank_0
from ...core.errors import CheckpointError
from . import run_state
from .adapter_settings import ADAPTERS

if TYPE_CHECKING:
    from ..run import Run


def export_model(run: Run, folder: Path, options: Mapping[str, Any]) -> list[Path]:
    """Write a folder that ``from_pretrained`` loads, by way of a checkpoint without an optimizer; a collective.

    Rank 0 holds the folder meanwhile, so that what another run has left beside it can be removed.

    Raises:
        CheckpointError: the model is none of transformers, or the folder holds one already.
    """
    if run.hugging_face is None:
        raise CheckpointError(
            f"{folder}: {type(run.strategy.module).__name__} is no model of transformers, nor does it have exactly one; "
            "save a checkpoint, and give flextrain checkpoint export"
        )
    weights = folder.with_name(f".{folder.name}.weights")
    with ExitStack() as stack:
        told_by_rank_0(lambda: _begin(stack, folder, weights, options))
        run_state.save(run, weights, save_optimizer=False, save_param_scheduler=False, is_export=True)
        return told_by_rank_0(lambda: _write(weights, folder, options))


def _begin(stack: ExitStack, folder: Path, weights: Path, options: Mapping[str, Any]) -> None:
    check_target(folder, **options)
    stack.enter_context(claimed(folder))
    check_no_other_files(weights)
    stack.callback(_remove, weights)


def _remove(weights: Path) -> None:
    """Remove the checkpoint beside the folder, also a part of one; it is in nobody's way if that fails."""
    with suppress(OSError):
        for path in (temporary(weights), weights):
            remove_checkpoint(path)


def _write(weights: Path, folder: Path, options: Mapping[str, Any]) -> list[Path]:
    source = Checkpoint.open(weights)
    with merged(source) if source.values.get(ADAPTERS) else nullcontext(source) as whole:
        return write_hugging_face(whole, folder, **options)
