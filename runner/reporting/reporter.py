"""Reporter: a place outside the process that keeps the scalars of a run."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...core.errors import ConfigError

# A dataset may be given as a list, and has no place in a record.
_LONGEST = 50


class Reporter(ABC):
    """Base of the back ends that keep scalars.

    Every process builds its reporters, so that a wrong configuration is found everywhere; only rank 0 calls the methods.
    A constructor therefore opens nothing. After ``close`` there may be another ``on_start``, which goes on with the same
    record.

    Args:
        save_dir: folder for what the back end writes; it may not exist yet.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        self.save_dir = Path(save_dir or "vis_data")

    def on_start(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Open the record; ``config`` says in plain values what the runner was built from."""

    @abstractmethod
    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Keep one record.

        Args:
            scalars: figures by name; numbers.
            step: the iteration in training; else the epoch, or the iteration for loops without epochs.
            mode: train or val.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Write what is pending and let go of files and connections."""


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """An optional package.

    Raises:
        ConfigError: it is not installed; says what to type.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{needed_by}: needs the package {package} ({error}), pip install flextrain[{extra}]"
        ) from None


def numbers(scalars: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are numbers."""
    return {key: float(value) for key, value in scalars.items() if isinstance(value, (int, float))}


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: arrays as lists, what is unknown as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return value.tolist() if hasattr(value, "tolist") else str(value)


def describe(value: Any) -> Any:
    """A configuration in plain values: objects are named by their class, long lists by their length."""
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [describe(item) for item in value] if len(value) <= _LONGEST else f"{len(value)} items"
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (Path, torch.dtype, torch.device)):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
