"""Small file systems of a test's own, which become full or read-only."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


@contextmanager
def mounted(folder: Path, size: str = "4m") -> Iterator[Path]:
    """A file system of this size in memory; the test is skipped where it cannot be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield folder
    finally:
        while folder.is_mount():  # a test that failed may have left it read-only
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(folder: Path, free: int) -> Path:
    """A file that leaves so many bytes."""
    left = os.statvfs(folder)
    file = folder / "filler"
    file.write_bytes(bytes(left.f_bavail * left.f_frsize - free))
    return file


def turn_read_only(folder: Path) -> None:
    """Mount a folder over itself, read-only, until ``turn_writable``; files that are open already can be written to."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)


def turn_writable(folder: Path) -> None:
    """Undo ``turn_read_only``."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


def with_other_memory(folder: Path, function: Callable[[], T]) -> T:
    """Call a function in a thread that sees an empty file system of its own at ``folder``, as another machine would.

    Raises:
        OSError: only root may do this.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def alone() -> T:
        if libc.unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(alone).result()


_CLONE_NEWNS = 0x00020000
