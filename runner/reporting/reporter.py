"""Reporter: base class of back ends that store the scalars and pictures of a run outside the process."""

from __future__ import annotations

import importlib
import struct
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...core.base.errors import ConfigError

# Pictures for reporters: checks, rendering of figures, PNG files, and writing in the background.


Picture = npt.NDArray[np.uint8]

_MOST_BYTES = 2**28
"""Bytes of pictures that wait for the writer before a call waits for it: 256 MiB."""


def checked_picture(image: Any, where: str) -> Picture:
    """Return a copy of an image of shape (height, width, 3), uint8, RGB.

    Raises:
        ConfigError: it has another type, shape or dtype; the message says how to convert it.
    """
    if not isinstance(image, np.ndarray):
        hint = "image.cpu().numpy()" if hasattr(image, "numpy") else "numpy.asarray(image)"
        raise ConfigError(f"{where}: {type(image).__name__} is not allowed, give a NumPy array, as {hint}")
    if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        if image.ndim == 3 and image.shape[0] == 3:
            hint = ", as image.transpose(1, 2, 0)"
        elif image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 1):
            hint = ", as numpy.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2)"
        else:
            hint = ""
        raise ConfigError(f"{where}: shape {image.shape} is not allowed, give (height, width, 3){hint}")
    if image.dtype != np.uint8:
        hint = ", as (image * 255).round().astype('uint8') from values of 0 to 1" if image.dtype.kind == "f" else ""
        raise ConfigError(f"{where}: dtype {image.dtype} is not allowed, give uint8{hint}")
    copy: Picture = image.copy()
    return copy


def check_figure(figure: Any, where: str) -> None:
    """Raise ConfigError if it is no Matplotlib figure."""
    if not (hasattr(figure, "savefig") and hasattr(figure, "set_canvas")):
        raise ConfigError(f"{where}: {type(figure).__name__} is not allowed, give a matplotlib.figure.Figure")


def render(figure: Any) -> Picture:
    """Return a Matplotlib figure as a picture, on white where it is transparent; the figure stays as it is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    before = figure.canvas
    try:
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        colours = np.asarray(canvas.buffer_rgba()).astype(np.float32)
    finally:
        figure.set_canvas(before)
    alpha = colours[..., 3:] / 255
    picture: Picture = (colours[..., :3] * alpha + 255 * (1 - alpha)).round().astype(np.uint8)
    return picture


def as_png(picture: Picture) -> bytes:
    """Return the bytes of a PNG file, as https://www.w3.org/TR/png-3/ describes it: 8 bits, RGB, no filter."""
    height, width, _ = picture.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter, 0
    rows[:, 1:] = picture.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


class PictureWriter:
    """Makes calls in a thread of its own, one after the other, so that training does not wait for encoders and networks.

    A call waits only when pictures of 256 MiB are not yet written. What was put is written before the program ends.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flextrain-pictures")
        self._waiting: deque[tuple[Future[None], int]] = deque()

    def put(self, write: Callable[[], None], size: int) -> None:
        """Call ``write`` in the background; it must not raise.

        Args:
            write: stores a picture.
            size: bytes of the picture.
        """
        while self._waiting and (self._waiting[0][0].done() or self._bytes + size > _MOST_BYTES):
            self._waiting.popleft()[0].result()
        self._waiting.append((self._thread.submit(write), size))

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._thread.shutdown()

    @property
    def _bytes(self) -> int:
        return sum(size for _, size in self._waiting)


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
