"""Pictures for reporters: checks, rendering of figures, PNG files, and writing in the background."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.errors import ConfigError

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
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()

    def put(self, write: Callable[[], None], size: int) -> None:
        """Call ``write`` in the background; it must not raise.

        Args:
            write: stores a picture.
            size: bytes of the picture.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="flextrain-pictures")
        while self._waiting and (self._waiting[0][0].done() or self._bytes + size > _MOST_BYTES):
            self._waiting.popleft()[0].result()
        self._waiting.append((self._thread.submit(write), size))

    def close(self) -> None:
        """Wait until everything is written, and end the thread; ``put`` starts it again."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._waiting.clear()

    @property
    def _bytes(self) -> int:
        return sum(size for _, size in self._waiting)
