"""Find checkpoints of other runs that a run would replace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint import as_path, is_checkpoint
from ...core.checkpoint.paths import reaching
from ...core.comm.collectives import broadcast_object
from ...core.comm.joint_errors import raising_together
from ...core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from ..run import Run


def keep_others(
    runner: Run, folder: Path, templates: Sequence[str], last: int, *, own: Sequence[Path], overwrite: bool
) -> None:
    """Raise ConfigError if checkpoints of another run would be replaced without ``overwrite``; a collective.

    If the folder cannot be listed, every process raises CheckpointError.

    A run with ``resume`` that found no checkpoint to start from continues with its own folder.

    Args:
        runner: the run, which is about to train.
        folder: where it saves.
        templates: the names that it will use, with one ``{}`` for the number; ``*`` stands for any text.
        last: the highest number.
        own: folders with checkpoints of this run; resuming from one of them is no reason to ask.
        overwrite: warn instead.
    """
    looks = runner.rank == 0 and (runner.iter == 0 or comes_from_elsewhere(runner, *own))
    found_here: list[str] = []
    with raising_together():
        if looks:
            found_here = _listed(folder, templates, last)
    names = broadcast_object(found_here)
    if not names:
        return
    found = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    if not overwrite and (runner.options.resume_options is None or runner.iter > 0):
        raise ConfigError(
            f"work_dir: {folder} holds checkpoints of another run ({found}), which this one would replace; resume=True "
            "continues that run, another work_dir keeps it, default_hooks=dict(checkpoint=dict(overwrite=True)) "
            "replaces it"
        )
    runner.logger.warning("%s holds checkpoints of another run (%s), which will be replaced", folder, found)


def _listed(folder: Path, templates: Sequence[str], last: int) -> list[str]:
    """As ``_in_the_way``; raise StorageError if the folder cannot be looked into."""
    try:
        with reaching(folder):
            return _in_the_way(folder, templates, last)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be looked into, {error.strerror or error}") from error


def _in_the_way(folder: Path, templates: Sequence[str], last: int) -> list[str]:
    """Return the existing checkpoints with these names, in the order of their numbers."""
    numbers: dict[str, int] = {}
    for template in templates:
        before, after = (".+".join(map(re.escape, part.split("*"))) for part in template.split("{}"))
        for path in folder.glob(template.format("*")):
            if match := re.fullmatch(rf"{before}(\d+){after}", path.name):
                numbers[path.name] = int(match[1])
    reached = sorted((name for name, number in numbers.items() if number <= last), key=lambda name: numbers[name])
    return [name for name in reached if is_checkpoint(folder / name)]


def comes_from_elsewhere(runner: Run, *folders: Path) -> bool:
    """Return True if the run resumed from a checkpoint outside ``folders``, so those in them are not its own."""
    resumed = runner.options.resume_options
    source = None if resumed is None else resumed.path or runner.options.load_from
    return source is not None and as_path(source).parent.resolve() not in {folder.resolve() for folder in folders}
