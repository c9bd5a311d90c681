"""DeepSpeed's asynchronous input and output: what its compilation lacks on this machine, and the compilation itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import StrategyError
from ...core.torch_private import build_folder
from .compiling import announced

_EXTENSION = "async_io"
_TRIAL = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"


def what_is_missing() -> list[str]:
    """Return what this machine lacks to compile the extension, each with the command that installs it.

    Needs the package deepspeed.
    """
    builder = _builder()
    if importlib.util.find_spec(builder.absolute_name()) is not None:  # compiled when DeepSpeed was installed
        return []
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    # torch asks both before it loads what is compiled already.
    missing = [] if compiler else ["a C++ compiler (apt-get install g++)"]
    if shutil.which("ninja") is None and _own_ninja() is None:
        missing.append("ninja (pip install ninja)")
    if (build_folder(_EXTENSION) / f"{_EXTENSION}.so").exists():
        return missing
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("the headers of Python (apt-get install python3-dev)")
    if compiler and not _links_libaio(compiler):
        missing.append("the headers of libaio (apt-get install libaio-dev)")
    if _accelerator() == "cuda" and importlib.import_module("torch.utils.cpp_extension").CUDA_HOME is None:
        missing.append("the CUDA toolkit (install it, and set CUDA_HOME)")
    return missing


def check_async_io() -> None:
    """Raise StrategyError if the extension is not compiled and cannot be."""
    if missing := what_is_missing():
        raise StrategyError(
            f'strategy.zero_optimization: device="nvme" needs DeepSpeed\'s asynchronous input and output, whose compilation '
            f'lacks {" and ".join(missing)}; or choose device="cpu"'
        )


def load_async_io(patience_s: float) -> None:
    """Load the extension, compiled if it is not yet.

    Args:
        patience_s: seconds to wait for another process that compiles it.

    Raises:
        StrategyError: it cannot be compiled or loaded.
    """
    with announced(patience_s), ninja_on_path():
        try:
            _builder().load(verbose=False)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            if isinstance(error, StrategyError):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StrategyError(
                f'strategy.zero_optimization: device="nvme" needs DeepSpeed\'s asynchronous input and output, which cannot be '
                f"compiled: {reason[:300]}"
            ) from error


@contextmanager
def ninja_on_path() -> Iterator[None]:
    """Let torch use the ninja of this Python's packages, also when its virtual environment is not activated.

    Another version of ninja would compile everything again.
    """
    before, folder = os.environ.get("PATH", ""), _own_ninja()
    if folder is not None:
        os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _own_ninja() -> Path | None:
    """Return the folder of a ninja that pip has installed for this Python; None if there is none."""
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    if importlib.util.find_spec("ninja") is not None:
        folders.append(Path(importlib.import_module("ninja").BIN_DIR))
    return next((folder for folder in folders if (folder / "ninja").exists()), None)


def _builder() -> Any:
    return importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()


def _accelerator() -> str:
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    return str(accelerator.device_name())


def _links_libaio(compiler: str) -> bool:
    command = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    return subprocess.run(command, input=_TRIAL, capture_output=True, text=True, check=False).returncode == 0
