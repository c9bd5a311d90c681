"""The compiled part of the device: built once for a version of torch, Python and its own source, then kept."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("device.cpp")
# Variables that cannot be told apart later: one cache for all versions would give one of them the other's library.
CACHE = Path(os.environ.get("NPU_SIM_CACHE", Path(__file__).parents[4] / "build" / "npu_sim"))


def path() -> Path:
    """Where the library is, or would be."""
    sources = [each.read_bytes() for each in sorted(SOURCE.parent.glob("*.[ch]pp"))]
    key = hashlib.sha256(b"\0".join([*sources, torch.__version__.encode(), sys.version.encode()])).hexdigest()
    return CACHE / f"device-{key[:16]}.so"


def load() -> ModuleType:
    """The library, built first where it is not there yet (half a minute)."""
    library = path()
    if not library.exists():
        build(library)
    spec = importlib.util.spec_from_file_location("npu_sim", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(library: Path) -> None:
    """Compile without optimisation, and put the library into its place in one move: others may be building it too."""
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        extension = CppExtension("npu_sim", [str(SOURCE)], extra_compile_args=["-O0", "-g0"])
        command = BuildExtension(Distribution({"ext_modules": [extension]}), use_ninja=False)
        command.build_lib, command.build_temp = folder, folder
        command.ensure_finalized()
        command.run()
        built = Path(folder) / f"npu_sim{sysconfig.get_config_var('EXT_SUFFIX')}"
        built.replace(library)
