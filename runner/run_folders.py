"""Folders of a run: a new log folder, and locks against a second run in the same folder."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..core.base.errors import ConfigError, nearest
from ..core.checkpoint import is_local
from ..core.checkpoint.folders import FolderLock, OccupiedError, remove_if_empty
from ..core.comm.collectives import broadcast_object, is_main
from ..core.config_files import Config, ConfigDict


def new_log_folder(work_dir: Path) -> str:
    """Make a log folder named by the time, with a number if another run began in the same second; return its name.

    A collective: every process gets the name from rank 0.
    """
    name = ""
    if is_main():
        stamp, number = time.strftime("%Y%m%d_%H%M%S"), 1
        name = stamp
        while not _is_new(work_dir / name):
            number += 1
            name = f"{stamp}_{number}"
    return broadcast_object(name)


def _is_new(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


@contextmanager
def occupied(folders: Sequence[Path], fast: Path | None = None) -> Iterator[None]:
    """Lock the folders against other runs during the block; a collective, rank 0 holds the locks.

    ``fast``, the folder of the second tier of checkpoints, is locked too, and removed if it is empty afterwards.

    Remote storage without a file system has no locks and is skipped.

    Raises:
        ConfigError: on every process, if another run trains in one of the folders.
    """
    with ExitStack() as stack:
        problem = None
        if is_main():
            if fast is not None:
                stack.callback(remove_if_empty, fast)
            given = (*folders, fast) if fast is not None else folders
            for folder in dict.fromkeys(folder for folder in given if is_local(folder)):
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    stack.callback(FolderLock(folder).release)
                except OccupiedError as owner:
                    problem = f"{folder} is where another run trains at the moment: {owner}"
                    break
                except OSError:
                    pass  # whether it is writable is checked before checkpoints are saved
        if problem := broadcast_object(problem):
            raise ConfigError(f"work_dir: {problem}; give another one, or wait until that has ended")
        yield


# A runner made from a configuration file: its arguments, its other names, and the record of it.


RESOLVED = "config.py"
"""Name of the file in the work directory."""
_NEAR = 0.86
# Names that MMEngine's configurations have beside the runner's arguments, some of them spelled like these.
_NO_MISTAKES = {
    "custom_imports",
    "data_preprocessor",
    "dataset_type",
    "model_wrapper_cfg",
    "test_pipeline",
    "train_pipeline",
    "val_pipeline",
    "vis_backends",
}


def arguments_of(config: Config, names: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the runner's arguments in ``config``, and lines for the log about names that only look like one.

    Args:
        config: the configuration; all other names stay in it.
        names: those of the runner's arguments.

    Raises:
        ConfigError: a name is almost that of an argument, or ``model`` is missing.
    """
    given = config.imported()
    lines = []
    for name in other_names(given, names):
        if start := next((each for each in names if name.startswith(each)), None):
            lines.append(f"{name} is no argument of the runner, as {start} is; only runner.cfg.{name} has it")
    if "model" not in given:
        raise ConfigError(f"model: missing in {config.filename or 'the configuration'}, it must be given")
    return {name: given[name] for name in given if name in names}, lines


def other_names(given: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return the names of values in a configuration that are neither arguments nor imports.

    Raises:
        ConfigError: one is almost that of an argument.
    """
    others = []
    for name, value in given.items():
        if name in names or name in _NO_MISTAKES or callable(value) or inspect.ismodule(value):
            continue
        meant = nearest(str(name), names, _NEAR)
        if meant is not None:
            raise ConfigError(f'{name}: unknown key, did you mean "{meant}"? Else give it another name')
        others.append(name)
    return others


def recorded(own: Mapping[str, Any], cfg: Config | Mapping[str, Any] | None, seed: int) -> dict[str, Any]:
    """Return ``runner.cfg``: the arguments, the whole configuration, and the seed in use."""
    if isinstance(cfg, Config):
        return ConfigDict({**own, **cfg.imported(), "seed": seed})
    return {**own, **(cfg or {}), "seed": seed}


def write_record(cfg: Any, folders: Sequence[str], logger: logging.Logger) -> str:
    """Write a resolved configuration to the folders, the work directory and that of the log, and return it as text.

    The text is empty for what is no Config, and for one that no file can hold, which the log says.
    """
    if not isinstance(cfg, Config):
        return ""
    try:
        text = cfg.pretty_text
    except ConfigError as error:
        logger.info(f"The configuration is not written to work_dir: {error}")
        return ""
    for folder in folders if text else ():
        Path(folder, RESOLVED).write_text(text, encoding="utf-8")
    return text
