"""Find the arguments that a training script gives to its FlexibleRunner, by running the script up to that call."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.config_files import Config, located
from ..core.errors import ConfigError
from ..core.registry import registrations_undone
from ..runner.arguments import check_everything
from ..runner.runner import FlexibleRunner
from .configured import is_config_file, load, runner_class
from .tried_transforms import try_transforms

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
    parser = argparse.ArgumentParser(prog=f"flextrain train {Path(path).name}", add_help=False, exit_on_error=False)
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
        adapts = runner._takes_mmengines_models  # and names are those of MMEngine's registries
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
