"""Find checkpoints of other runs that a run would replace."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint import as_path, is_checkpoint
from ...core.checkpoint.paths import reaching
from ...core.comm.collectives import broadcast_object
from ...core.comm.joint_errors import raising_together
from ...core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from ..run import Run


def keep_others(runner: Run, folder: Path, template: str, *, own: Sequence[Path], overwrite: bool) -> list[str]:
    """Return the names of another run's checkpoints that go with ``overwrite``; raise ConfigError without; a collective.

    Whatever their names are: ``latest`` would leave them, or lead back to them. If the folder cannot be listed, every process
    raises CheckpointError. A run with ``resume`` that found no checkpoint to start from continues with its own folder.

    Args:
        runner: the run, which is about to train, and to save.
        folder: where it saves.
        template: the names that it will use, with one ``{}`` for the number.
        own: folders with checkpoints of this run; resuming from one of them is no reason to ask.
        overwrite: the user has said that they may go.
    """
    goes_on = runner.iter > 0 and not comes_from_elsewhere(runner, *own)
    beyond = (
        {"epoch_{}": runner.epoch, "iter_{}": runner.iter} if goes_on else {template: 0, "epoch_{}": 0, "iter_{}": 0}
    )
    found: list[str] = []
    with raising_together():
        if runner.rank == 0:
            found = _listed(folder, beyond, best=not goes_on)
    found = broadcast_object(found)
    if not found:
        return []
    if goes_on:
        runner.logger.warning(
            f"{folder} holds {_in_words(found)}, of which this run, going on at iteration {runner.iter}, knows nothing: a newer "
            "checkpoint of this run takes their place as the latest"
        )
        return []
    source = runner.options.load_from
    if overwrite:
        names = [name for name in found if source is None or (folder / name).resolve() != as_path(source).resolve()]
        if names:
            runner.logger.warning(
                f"{folder} holds checkpoints of another run: {', '.join(names)} will be replaced by the first one that this run saves"
            )
        return names
    if runner.options.resume_options is None or runner.iter > 0:
        raise ConfigError(
            f"work_dir: {folder} holds checkpoints of another run ({_in_words(found)}), which this one would replace; resume=True "
            "continues that run, another work_dir keeps it, default_hooks=dict(checkpoint=dict(overwrite=True)) replaces it"
        )
    runner.logger.warning(f"{folder} holds checkpoints of another run ({_in_words(found)}), which may be replaced")
    return []


def _in_words(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _listed(folder: Path, beyond: Mapping[str, int], best: bool) -> list[str]:
    """Return the checkpoints with the names of these templates and higher numbers, in their order; ``best``: and best ones.

    Raises:
        StorageError: the folder cannot be looked into.
    """
    numbers: dict[str, tuple[bool, int]] = {}
    try:
        with reaching(folder):
            for template, number in beyond.items():
                before, after = map(re.escape, template.split("{}"))
                for path in folder.glob(f"*{template.format('*')}"):
                    match = re.fullmatch(rf"(best_.+_)?{before}(\d+){after}", path.name)
                    if match and int(match[2]) > number and (best or not match[1]) and is_checkpoint(path):
                        numbers[path.name] = (match[1] is not None, int(match[2]))
    except OSError as error:
        raise StorageError(f"{folder}: cannot be looked into, {error.strerror or error}") from error
    return sorted(numbers, key=lambda name: numbers[name])


def comes_from_elsewhere(runner: Run, *folders: Path) -> bool:
    """Return True if the run resumed from a checkpoint outside ``folders``, so those in them are not its own."""
    source = runner.resumed_from
    return source is not None and source.parent.resolve() not in {folder.resolve() for folder in folders}
