"""Find the arguments that a training script gives to its FlexibleRunner, by running the script up to that call."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import io
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .core.base.errors import ConfigError
from .core.base.registry import registrations_undone
from .core.config_files import SUFFIXES, Config, Origins, ValueOrigin, located, parse_options
from .core.model.base_model import BaseModel
from .core.model.deferred import DeferredInit
from .core.random.generators import kept_random_state
from .runner.config import check_everything
from .runner.parts import build_model
from .runner.runner import FlexibleRunner
from .runner.transforms.apply import Transform, transform
from .strategies.building import init_weights

# A configuration file with the options of a command line, and the runner for it.


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
        from .mmengine import FlexibleRunner as Adapted

        return Adapted
    from .runner.runner import FlexibleRunner

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


# Try the transforms of a configuration on its model, without memory for parameters, and tell what they change.


class _Building:
    """What builds and changes a model without memory, as a strategy does."""

    def __init__(self) -> None:
        self._context = DeferredInit()

    def building(self, model: nn.Module | None = None, draws: Tensor | None = None) -> AbstractContextManager[Any]:
        return self._context if draws is None else self._context.changing(draws)


@init_weights.register(_Building)
def _(strategy: _Building, model: BaseModel) -> None:
    """Do nothing: values are not looked at."""


def try_transforms(given: Mapping[str, Any], transforms: Sequence[Transform]) -> list[str]:
    """Return a line for each transform with what it changes.

    Those that need the model's values, and those after them, are not tried. A model that is given as an instance is changed.

    Args:
        given: the arguments of a runner.
        transforms: built from them.

    Raises:
        ConfigError: a transform does not fit the model.
    """
    number = next((index for index, each in enumerate(transforms) if each.needs_values), len(transforms))
    tried, building = transforms[:number], _Building()
    said: tuple[tuple[str, str], ...] = ()
    if tried:
        with kept_random_state(torch.device("cpu")):
            model = build_model(given["model"], given["data_preprocessor"], building, for_training=False)  # type: ignore[arg-type]
            _, said = transform(model, tried, building, seed=0)
    lines = [f"{each.where} {each.name}: {what}" for each, (_, what) in zip(tried, said, strict=True)]
    why = "is not tried, because {} the model's values"
    rest = [
        f"{each.where} {each.name}: {why.format('it needs' if each.needs_values else 'one before it needs')}"
        for each in transforms[number:]
    ]
    return [*lines, *rest]


NOT_CHECKED = (
    "Not checked: every dict(type=...) that the project's own classes build, such as the parts inside its model"
)


class _RunnerMade(BaseException):
    """Ends the script where it makes its runner. It is not an Exception, which the script might catch."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@contextlib.contextmanager
def runner_arguments(script: str, arguments: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The arguments that ``python SCRIPT ARGUMENTS`` would give to its first FlexibleRunner, by parameter.

    A configuration file stands for ``flextrain train SCRIPT ARGUMENTS``, see ``configured.is_config_file``.

    The script ends at that call: no runner is made. A script that makes no runner defines a dict of these arguments as
    ``cfg``, or a function without arguments named ``config`` that returns the dict. Inside the context the script is
    ``__main__``. Names that it registered are removed afterwards, so that it can run again.

    Raises:
        ConfigError: there is no such file, or it has no arguments of a runner.
    """
    path = Path(script).absolute()
    if not path.is_file():
        raise ConfigError(f"script: {script} is not a file")
    if is_config_file(path):
        yield _of_config(str(path), arguments)
        return
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    # Modules that the script imports do not run again, so names that they registered stay.
    with _as_main(module, [str(path), *arguments]), registrations_undone("__main__"):
        yield _found(module, path)


def _of_config(path: str, arguments: Sequence[str]) -> dict[str, Any]:
    name = f"flextrain train {Path(path).name}"
    parser = argparse.ArgumentParser(prog=name, add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--cfg-options", nargs="+", action="extend", default=[])
    parser.add_argument("--work-dir")
    try:
        options, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"script: {Path(path).name}: {error}") from None
    if unknown:
        raise ConfigError(
            f"script: {Path(path).name} is a configuration, {unknown[0]} is none of its options, "
            "--cfg-options KEY=VALUE and --work-dir DIR"
        )
    config = load(path, options.cfg_options, work_dir=options.work_dir)
    return arguments_given_by(lambda: runner_class(config).from_cfg(config))


def arguments_given_by(make: Callable[[], Any]) -> dict[str, Any]:
    """The arguments, by parameter, that ``make`` gives to a FlexibleRunner; no runner is made."""
    try:
        with _constructor_replaced():
            make()
    except _RunnerMade as made:
        return made.arguments
    raise ConfigError("script: makes no FlexibleRunner")


def check_config(config: Config) -> list[str]:
    """Check all that a runner checks before it trains; return what each transform changes in the model.

    Raises:
        ConfigError: something is wrong, with the file and line.
    """
    runner = runner_class(config)
    with located(config):
        given = arguments_given_by(lambda: runner.from_cfg(config))
        adapts = runner._kind_of_parts.takes_mmengines_models  # and names are those of MMEngine's registries
        checked = check_everything(given, takes_mmengines_models=adapts)
        return [NOT_CHECKED] if adapts else try_transforms(given, checked.transforms)


def _found(module: types.ModuleType, path: Path) -> dict[str, Any]:
    errors = io.StringIO()
    try:
        with _constructor_replaced(), contextlib.redirect_stderr(errors):
            exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
            config = getattr(module, "config", None)
            given = config() if inspect.isfunction(config) else getattr(module, "cfg", None)
    except _RunnerMade as made:
        return made.arguments
    except SystemExit as end:
        said = (errors.getvalue().strip().splitlines() or [""])[-1] or str(end.code)
        raise ConfigError(f"script: {path.name} ended before it made a FlexibleRunner: {said}") from None
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"script: {path.name} makes no FlexibleRunner and has no dict cfg or function config() that returns one"
        )
    return _by_parameter(**given)


def _by_parameter(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a FlexibleRunner, with defaults for missing ones."""
    try:
        bound = inspect.signature(FlexibleRunner).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"script: these are not arguments of FlexibleRunner, {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


@contextlib.contextmanager
def _constructor_replaced() -> Iterator[None]:
    original: Callable[..., None] = FlexibleRunner.__init__

    @functools.wraps(original)  # for its signature
    def take(self: FlexibleRunner, *args: Any, **kwargs: Any) -> None:
        FlexibleRunner.__init__ = original  # type: ignore[method-assign]
        raise _RunnerMade(_by_parameter(*args, **kwargs))

    FlexibleRunner.__init__ = take  # type: ignore[method-assign]
    try:
        yield
    finally:
        FlexibleRunner.__init__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _as_main(module: types.ModuleType, argv: list[str]) -> Iterator[None]:
    """``module`` as ``__main__``, with the import path that Python gives to a script, and the working directory last."""
    before = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"], sys.argv = module, argv
    sys.path[:] = [str(Path(argv[0]).parent), *sys.path, str(Path.cwd())]
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before


def without_workers(cfg: Any) -> Any:
    """``cfg`` without workers: data is read in the training process, whose random numbers are known."""
    if not isinstance(cfg, Mapping):
        return cfg
    of_workers = ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
    return {key: value for key, value in cfg.items() if key not in of_workers}
