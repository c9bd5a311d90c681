"""A configuration file with the options of a command line, and the runner for it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..core.config_files import SUFFIXES, Config, Origins, ValueOrigin, parse_options

_DATA = tuple(suffix for suffix in SUFFIXES if suffix != ".py")
_OWN_SCOPES = (None, "flextrain", "mmengine")


def load(path: str, options: Sequence[str] = (), *, for_runner: bool = True, **flags: Any) -> Config:
    """Read a configuration file as the command line says.

    Args:
        path: the file.
        options: ``key=value``, set after all that the file inherits.
        for_runner: whether ``work_dir`` gets a value where the file has none: work_dirs/ and the file's name.
        flags: further values by key, which come from an option of the same name with dashes; None: not given.

    Raises:
        ConfigError: the file or an option is wrong.
    """
    if str(Path.cwd()) not in sys.path:  # as for python -m; the modules of a project stand there
        sys.path.append(str(Path.cwd()))
    config = Config.fromfile(path)
    values, origins = parse_options(options)
    config.merge_from_dict(values, origins=origins)
    for key, value in flags.items():
        if value is not None:
            config.merge_from_dict({key: value}, origins={key: Origins(ValueOrigin(f"--{key.replace('_', '-')}"))})
    if for_runner and config.get("work_dir") is None:
        config.merge_from_dict({"work_dir": str(Path("work_dirs") / Path(path).stem)})
    return config


def runner_class(config: Config) -> Any:
    """The runner for a configuration: that of flextrain.mmengine if it has a scope of MMEngine's registries.

    "mmengine" is such a scope only where MMEngine is installed, because its names are flextrain's too.
    """
    scope = config.get("default_scope")
    if scope not in _OWN_SCOPES or (scope == "mmengine" and find_spec("mmengine")):
        from ..mmengine import FlexibleRunner as Adapted

        return Adapted
    from ..runner.runner import FlexibleRunner

    return FlexibleRunner


def is_config_file(path: Path) -> bool:
    """Whether a file is a configuration, and no script that makes a runner.

    A Python file is one if it says ``_base_ = ...`` or ``with read_base()``, or gives ``model`` a value and has neither
    the name FlexibleRunner nor ``cfg`` or ``config``.
    """
    if path.suffix != ".py":
        return path.suffix in _DATA
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    if "FlexibleRunner" in used or {"cfg", "config"} & (used | defined):
        return False
    given = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return bool({"_base_", "model"} & given) or "read_base" in used
