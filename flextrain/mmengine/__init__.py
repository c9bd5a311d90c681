"""For projects that keep MMEngine and swap the runner: ``from flextrain.mmengine import FlexibleRunner``.

The runner takes MMEngine's configurations, registries and classes, and trains with flextrain's strategies. It translates
the arguments and adapts objects; the rest of flextrain knows nothing of MMEngine. Nothing of this is imported by
``import flextrain``. It needs the package mmengine (``pip install flextrain[mmengine]``), except for reading configuration
files, which is flextrain's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..core.config_files import Config as Config
from ..core.config_files import ConfigDict as ConfigDict
from ..core.config_files import DictAction as DictAction
from ..core.config_files import read_base as read_base

if TYPE_CHECKING:
    from .adapted_runner import AdaptedRunner as FlexibleRunner
    from .patching import Patch as Patch
    from .patching import patch as patch
    from .patching import unpatch as unpatch

# Public name -> module, and the name there.
_HOME_OF = {
    "FlexibleRunner": ("adapted_runner", "AdaptedRunner"),
    "Patch": ("patching", "Patch"),
    "patch": ("patching", "patch"),
    "unpatch": ("patching", "unpatch"),
}

__all__ = ["Config", "ConfigDict", "DictAction", "FlexibleRunner", "Patch", "patch", "read_base", "unpatch"]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("mmengine")
    except ModuleNotFoundError as error:
        if error.name != "mmengine":
            raise
        raise ModuleNotFoundError(
            "flextrain.mmengine needs the package mmengine, pip install flextrain[mmengine]", name="mmengine"
        ) from None
    module, own_name = _HOME_OF[name]
    return getattr(import_module(f".{module}", __name__), own_name)
