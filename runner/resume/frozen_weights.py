"""Frozen parameters that a checkpoint leaves out: the resumed run must have those of the run that saved it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint import Checkpoint
from ...core.comm.joint_errors import told_by_rank_0
from ...core.errors import CheckpointError, counted

if TYPE_CHECKING:
    from ..run import Run

LEFT_OUT = "left_out"


_MOST = 0.5


def frozen_advice(runner: Run) -> str:
    """Return a line for the log if most of what checkpoints hold is frozen, and nobody has said that it shall be; else empty."""
    whole = runner.outline.whole
    if runner.strategy.config.exclude_frozen_parameters is not None or not whole.total:
        return ""
    share = 1 - whole.trained / whole.total
    if share <= _MOST:
        return ""
    return (
        f"{100 * share:.3g} % of the parameters are frozen, and in every checkpoint; "
        "strategy=dict(type=..., exclude_frozen_parameters=True) leaves them out, and load_from brings them when the run goes on"
    )


def leaves_out(path: Path) -> bool:
    """Return whether a checkpoint was saved without its frozen parameters; a collective."""
    return told_by_rank_0(lambda: bool(Checkpoint.open(path).values.get(LEFT_OUT)))


def check_left_out(runner: Run, checkpoint: Checkpoint, *, refuses: bool = True) -> None:
    """Compare the model's frozen parameters with the fingerprints in a checkpoint, if it has any; a collective.

    Args:
        refuses: whether other values are an error; else they are a warning.

    Raises:
        CheckpointError: on every process; it names the first parameter with other values.
    """
    saved = checkpoint.values.get(LEFT_OUT)
    if not isinstance(saved, dict):  # the checkpoint has all parameters, or an older version has saved it
        return
    own = runner.strategy.fingerprints_of_left_out()
    here = {name: value for name, value in own.items() if name in saved and f"model.{name}" not in checkpoint.entries}
    other_dtype = [name for name, value in here.items() if value.split()[0] != str(saved[name]).split()[0]]
    different = [name for name, value in here.items() if value != saved[name] and name not in other_dtype]
    if different:
        line = (
            f"{checkpoint.path}: was saved without its frozen parameters, and {_some(different)} not as in that run; build the model "
            "with the same weights or seed as then, or give the file with these weights as load_from"
        )
        if refuses:
            raise CheckpointError(line)
        runner.logger.warning(line)
    if other_dtype:
        runner.logger.warning(
            f"{checkpoint.path}: was saved without its frozen parameters; {_some(other_dtype)} not compared with those of that run, "
            f"because their dtype is another: {here[other_dtype[0]].split()[0]}, and {str(saved[other_dtype[0]]).split()[0]} then"
        )


def _some(names: list[str]) -> str:
    more = f" and {counted(len(names) - 1, 'other')} are" if len(names) > 1 else " is"
    return names[0] + more
