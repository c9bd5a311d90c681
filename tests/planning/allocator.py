"""What torch's allocator of the CPU has given out: counted in C++, on the threads of gloo too."""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which("c++")


@functools.cache
def counting():
    """Return the library that counts from now on: ``bytes_live()``, ``bytes_peak()``, ``forget_peak()``."""
    found = ctypes.CDLL(str(compiled()))
    for name in ("bytes_live", "bytes_peak"):
        getattr(found, name).restype = ctypes.c_int64
    found.count_allocations()
    return found


def compiled():
    """Return the library's file, made once for this version of torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    file = Path(tempfile.gettempdir()) / f"flextrain-allocator-{key}.so"
    if not file.exists():
        root = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", str(SOURCE), "-o", str(made)]
            paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
            subprocess.run([*command, *paths], check=True, capture_output=True, text=True)
            made.replace(file)
    return file
