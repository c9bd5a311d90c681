"""Reporter: base class of back ends that store the scalars and pictures of a run outside the process."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from .pictures import Picture

# A dataset may be given as a list, which is too long for a record.
_LONGEST = 50


class Reporter(ABC):
    """Base class of the back ends that store scalars and, if they can, pictures.

    Every process builds its reporters, so that every process finds an invalid configuration; only rank 0 calls the
    methods. So a constructor must open nothing. After ``close`` there may be another ``on_start``, which continues the
    same record. What a back end cannot store it does not override; ``runner.visualizer`` then says so once.

    Args:
        save_dir: folder that the back end writes to; it may not exist yet.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        self.save_dir = Path(save_dir or "vis_data")

    def on_start(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Open the record; ``config`` holds the runner's arguments as plain values."""

    @abstractmethod
    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Store one record.

        Args:
            scalars: numbers by name.
            step: in training the iteration; otherwise the epoch, or the iteration for loops without epochs.
            mode: train or val; "user" for scalars that the user gave to ``runner.visualizer``.
        """

    def on_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Store settings beside those of ``on_start``; they are plain values."""

    def on_image(self, name: str, image: Picture, step: int) -> None:  # noqa: B027 - optional
        """Store a picture; called in a thread of its own, while the training thread may call ``on_scalars``.

        Args:
            name: may contain slashes, as in ``val/sample``.
            image: (height, width, 3), uint8, RGB.
            step: the number that the user gave.
        """

    def on_figure(self, name: str, figure: Any, step: int) -> None:  # noqa: B027 - optional
        """Store a Matplotlib figure, which the user may change or close afterwards.

        Without this method ``on_image`` gets the rendered figure.
        """

    def on_graph(self, model: nn.Module, data_batch: Any) -> None:  # noqa: B027 - optional
        """Store the structure of a model.

        Only rank 0 calls this. A forward of a sharded model would wait for the other processes, so it must make none.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Write pending data and close files and connections."""


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ConfigError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{needed_by}: needs the package {package} ({error}), pip install flextrain[{extra}]"
        ) from None


def numbers(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are numbers."""
    return {key: float(value) for key, value in scalars.items() if isinstance(value, (int, float))}


def plain_value(value: Any) -> Any:
    """Return ``value`` as JSON can represent it: arrays as lists, unknown objects as text."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain_value(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return value.tolist() if hasattr(value, "tolist") else str(value)


def describe(value: Any) -> Any:
    """Return a configuration as plain values: objects by their class name, long lists by their length."""
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
