"""Visualizer: gives scalars and pictures to all reporters of a run, with MMEngine's names."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn

from ...core.base.errors import ConfigError, nearest, suggest
from ...core.base.overriding import overridden
from ...core.base.registry import REPORTERS, VISUALIZERS
from .jsonl import JsonLinesReporter
from .message_hub import Shared
from .reporter import Picture, PictureWriter, Reporter, check_figure, checked_picture, describe, render

# Build the reporters of a visualizer.


_OTHERS = ("ClearMLVisBackend", "NeptuneVisBackend", "DVCLiveVisBackend", "AimVisBackend")  # of MMEngine
REPORTERS.refuse(dict.fromkeys(_OTHERS, "write a subclass of flextrain.runner.reporting.Reporter for it"))


def build_reporters(
    given: Any = None,
    save_dir: str | Path = "vis_data",
    *,
    json_lines: bool = True,
    where: str = "visualizer.vis_backends",
) -> list[Reporter]:
    """Build reporters; they open nothing before ``on_start``.

    Args:
        given: a reporter, its configuration, or a list of them; None: JSON lines.
        save_dir: folder for reporters without a folder of their own.
        json_lines: add JSON lines unless they are in the list, or the list is empty.
        where: the configuration key, for messages.

    Raises:
        ConfigError: an invalid configuration, or a package that is not installed.
    """
    if given is None:
        given = [{"type": "JsonLinesReporter"}] if json_lines else []
    elif isinstance(given, (Mapping, Reporter)):
        given = [given]
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"{where}: {given!r} is not allowed, give a list of reporters")
    if len(given) > 1:
        _refuse_twice(given, where)
    reporters = [_build(cfg, f"{where}[{i}]", save_dir) for i, cfg in enumerate(given)]
    if reporters and json_lines and not any(isinstance(reporter, JsonLinesReporter) for reporter in reporters):
        reporters.append(JsonLinesReporter(save_dir))
    return reporters


def _refuse_twice(given: Sequence[Any], where: str) -> None:
    for i, cfg in enumerate(given):
        if isinstance(cfg, (str, Mapping)) and cfg in given[:i]:
            raise ConfigError(f"{where}[{i}]: is given twice, every record would be written twice; leave it out")


def _build(cfg: Any, where: str, save_dir: str | Path) -> Reporter:
    if isinstance(cfg, Reporter):
        return cfg
    own = isinstance(cfg, Mapping) and "save_dir" in cfg
    provided: dict[str, Any] = {} if own else {"save_dir": save_dir}
    reporter = REPORTERS.build(cfg, where, **provided)
    if not isinstance(reporter, Reporter):
        raise ConfigError(f"{where}.type: {type(reporter).__name__} is not allowed, give a subclass of Reporter")
    return reporter


logger = logging.getLogger("flextrain")

_DRAWING = (
    "draw with Matplotlib and call add_figure(name, figure, step), or with NumPy and call add_image(name, image, step)"
)


@VISUALIZERS.register_module()
class Visualizer(Shared):
    """Gives scalars, pictures and settings to every reporter of a run; ``runner.visualizer`` is one.

    On processes whose rank is not 0 the methods check their arguments and do nothing else. Pictures are encoded and
    written by a thread of their own; the call copies the picture and returns. A figure is rendered during the call,
    because Matplotlib works in one thread only.

    Args:
        name: the name for ``get_instance``; a runner gives it that of the experiment.
        vis_backends: reporters or their configurations; default: JSON lines only. An empty list: none.
        save_dir: folder for reporters without a folder of their own; default: ``vis_data`` in the run's log folder.
        json_lines: write JSON lines too, if ``vis_backends`` has only other reporters.
        image: the same as a call of ``set_image``.

    Raises:
        ConfigError: a reporter's configuration is invalid, or its package is not installed.
    """

    _where: ClassVar[str] = "visualizer.vis_backends"

    def __init__(
        self,
        name: str = "visualizer",
        vis_backends: Any = None,
        save_dir: str | Path | None = None,
        json_lines: bool = True,
        image: Picture | None = None,
    ) -> None:
        super().__init__(name)
        self.dataset_meta: Any = None
        """``metainfo`` of the dataset that is read; the runner sets it."""
        self._given, self._json_lines = vis_backends, json_lines
        self._save_dir = None if save_dir is None else Path(save_dir)
        self._reporters: list[Reporter] | None = None
        self._config: Mapping[str, Any] = {}
        self._reports, self._is_open, self._mode = True, False, "user"
        self._image: Picture | None = None
        self._writer: PictureWriter | None = None  # from a picture until the next close
        self._told: set[tuple[str, str]] = set()
        self._build(Path("vis_data"))  # finds what is wrong; it opens nothing
        if image is not None:
            self.set_image(image)

    # For the runner

    def belong_to_run(self, name: str, save_dir: Path, config: Mapping[str, Any], reports: bool) -> None:
        """Become the visualizer of a run.

        Args:
            name: the experiment's name.
            save_dir: folder for reporters, if none was given.
            config: the runner's arguments as plain values.
            reports: True on the process whose reporters write.
        """
        self.close()  # somebody may have used it before, or another run
        self.belong_to(name)
        self._config, self._reports = config, reports
        self._reporters = self._build(save_dir)

    @property
    def reporters(self) -> list[Reporter]:
        """The reporters; only those of rank 0 are called."""
        if self._reporters is None:
            self._reporters = self._build(Path("vis_data"))
        return self._reporters

    @property
    def record_dir(self) -> Path | None:
        """The folder of the JSON lines, for what a report needs beside them; None if none are written."""
        return next((each.save_dir for each in self.reporters if isinstance(each, JsonLinesReporter)), None)

    def open(self) -> None:
        """Open the reporters unless they are open; every other method does so too when it is needed."""
        if self._is_open or not self._reports:
            return
        self._is_open = True
        atexit.register(self.close)  # a program may add something after its run, and end
        for reporter in self.reporters:
            reporter.on_start(self._config)
        if overridden(self, "add_config"):
            self.add_config(self._config)

    def report(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Store the figures of a log line or of a validation: LoggerHook calls it on rank 0."""
        self._mode = mode
        try:
            self.add_scalars(dict(scalars), step)
        finally:
            self._mode = "user"

    def close(self) -> None:
        """Write what is pending and close the reporters; another call of any method opens them again."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        with contextlib.ExitStack() as parts:  # closes all of them even if one raises
            for reporter in reversed(self.reporters):
                parts.callback(reporter.close)
            writer, self._writer = self._writer, None
            if writer is not None:
                parts.callback(writer.close)

    # For users

    def add_config(self, config: Any, **kwargs: Any) -> None:
        """Store settings, a mapping, beside the runner's arguments, which are stored anyway."""
        _refuse(kwargs, "add_config", "config")
        config = config.to_dict() if hasattr(config, "to_dict") else config
        if not isinstance(config, Mapping):
            raise ConfigError(f"add_config: {type(config).__name__} is not allowed, give a dict")
        described = describe(config)
        for reporter in self._opened():
            if self._can(reporter, "on_config", "settings"):
                reporter.on_config(described)

    def add_scalar(self, name: str, value: float | Tensor, step: int = 0, **kwargs: Any) -> None:
        """Store one number; see ``add_scalars``."""
        self.add_scalars({name: value}, step, **kwargs)

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None, **kwargs: Any
    ) -> None:
        """Store numbers by name.

        A tensor is read at once, which waits for its device. ``runner.message_hub.update_scalar("train/name", tensor)``
        does not: it shows the number with the next log line.
        """
        _refuse(kwargs, "add_scalars", "scalar_dict", "step")
        if file_path is not None:
            raise ConfigError("add_scalars.file_path: has no meaning here, scalars go to the reporters; leave it out")
        if not isinstance(scalar_dict, Mapping):
            raise ConfigError(f"add_scalars: {type(scalar_dict).__name__} is not allowed, give a dict")
        scalars = scalar_dict if self._mode != "user" else {k: _number(k, v) for k, v in scalar_dict.items()}
        for reporter in self._opened():
            reporter.on_scalars(scalars, step, self._mode)

    def add_image(self, name: str, image: Picture, step: int = 0, **kwargs: Any) -> None:
        """Store a picture of shape (height, width, 3), uint8, RGB; ``name`` may contain slashes.

        Raises:
            ConfigError: another shape, dtype or type; the message says how to convert it.
        """
        _refuse(kwargs, "add_image", "name", "image", "step")
        picture = checked_picture(image, f'add_image("{name}")')
        for reporter in self._opened():
            if self._can(reporter, "on_image", "pictures"):
                self._later(reporter, name, picture, step)

    def add_figure(self, name: str, figure: Any, step: int = 0) -> None:
        """Store a Matplotlib figure as a picture; it may be closed afterwards.

        Raises:
            ConfigError: it is no figure.
        """
        check_figure(figure, f'add_figure("{name}")')
        picture: Picture | None = None
        for reporter in self._opened():
            if _has(reporter, "on_figure"):
                reporter.on_figure(name, figure, step)
            elif self._can(reporter, "on_image", "figures"):
                picture = render(figure) if picture is None else picture
                self._later(reporter, name, picture, step)

    def add_graph(self, model: nn.Module, data_batch: Any = None, **kwargs: Any) -> None:
        """Store the structure of a model: its modules as text. Nothing is computed, under any strategy."""
        _refuse(kwargs, "add_graph", "model", "data_batch")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"add_graph: {type(model).__name__} is not allowed, give a torch.nn.Module")
        for reporter in self._opened():
            if self._can(reporter, "on_graph", "graphs"):
                reporter.on_graph(model, data_batch)

    def add_datasample(self, name: str, image: Picture, data_sample: Any = None, **kwargs: Any) -> None:
        """Draw a sample with its labels and predictions: a subclass that knows the task overrides it."""
        raise ConfigError(
            f"add_datasample: {type(self).__name__} does not know what to draw of a {type(data_sample).__name__}, override it "
            f"in a subclass; {_DRAWING}"
        )

    def set_image(self, image: Picture) -> None:
        """Keep a picture for ``get_image``."""
        self._image = checked_picture(image, "set_image")

    def get_image(self) -> Picture:
        """Return the picture of ``set_image``."""
        if self._image is None:
            raise ConfigError("get_image: there is none, call set_image first")
        return self._image

    def get_backend(self, name: str) -> Reporter:
        """Return the reporter with this class name or registered name, such as ``TensorboardVisBackend``."""
        kind = REPORTERS.get(name) if name in REPORTERS else None
        for reporter in self.reporters:
            if type(reporter).__name__ == name or type(reporter) is kind:
                return reporter
        names = [type(reporter).__name__ for reporter in self.reporters]
        raise ConfigError(f'get_backend: "{name}" is none of the reporters, there are {names}{suggest(name, names)}')

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("draw_") or name == "show":
            raise AttributeError(f"Visualizer.{name}: this visualizer does not draw, {_DRAWING}")
        raise AttributeError(f"'Visualizer' object has no attribute {name!r}")

    # How it reaches the reporters

    def _build(self, save_dir: Path) -> list[Reporter]:
        folder = self._save_dir or save_dir
        return build_reporters(self._given, folder, json_lines=self._json_lines, where=self._where)

    def _opened(self) -> Sequence[Reporter]:
        """Return the reporters to call, which are open; none on processes that do not report."""
        self.open()
        return self.reporters if self._reports else ()

    def _can(self, reporter: Reporter, method: str, what: str) -> bool:
        """True if a reporter has a method; if not, the log says so once."""
        if _has(reporter, method):
            return True
        name = type(reporter).__name__
        if (name, what) not in self._told:
            self._told.add((name, what))
            logger.warning(f"visualizer: {name} cannot store {what}, it has no method {method}")
        return False

    def _later(self, reporter: Reporter, name: str, picture: Picture, step: int) -> None:
        self._writer = self._writer or PictureWriter()
        self._writer.put(lambda: _store(reporter, name, picture, step), picture.nbytes)

    @classmethod
    def _without_runner(cls) -> NoReturn:
        raise ConfigError(
            f"{cls.__name__}.get_current_instance: there is no runner yet, and get_instance(name) was not called"
        )


def _refuse(given: Mapping[str, Any], where: str, *known: str) -> None:
    """Raise ConfigError for arguments that only a subclass may know: its methods may have more than these."""
    for name in given:
        raise ConfigError(f"{where}.{name}: unknown argument{suggest(name, known) or ', leave it out'}")


def _has(reporter: Reporter, method: str) -> bool:
    return getattr(type(reporter), method) is not getattr(Reporter, method) or method in vars(reporter)


def _store(reporter: Reporter, name: str, picture: Picture, step: int) -> None:
    try:
        reporter.on_image(name, picture, step)
    except Exception as error:  # a back end may raise anything; it runs in a thread, whose errors nobody sees otherwise
        kind = type(reporter).__name__
        logger.error(f'{kind}: the picture "{name}" of step {step} is lost: {type(error).__name__}: {error}')


def _number(name: str, value: Any) -> float | int:
    if isinstance(value, (int, float)):
        return value
    try:
        return float(value.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise ConfigError(f'add_scalars("{name}"): {value!r} is no number, nor a tensor with one element') from None


def build_visualizer(given: Any = None) -> Visualizer:
    """Build the visualizer of a run from the runner's argument.

    Args:
        given: ``dict(type='Visualizer', vis_backends=[...])`` as in MMEngine, where ``type`` may be a subclass; a
            Visualizer; a list of reporters or their configurations; or None: JSON lines.

    Raises:
        ConfigError: an invalid configuration, or a package that is not installed.
    """
    where = "visualizer"
    if isinstance(given, Visualizer):
        return given
    if isinstance(given, Mapping):
        if "type" not in given and (meant := nearest("type", given, 0.75)):
            raise ConfigError(f'{where}.{meant}: unknown key, did you mean "type"?')
        kind = given.get("type", "Visualizer")
        if isinstance(kind, type) and not issubclass(kind, (Visualizer, Reporter)):
            raise ConfigError(f"{where}.type: {kind.__name__} is no Visualizer and no Reporter")
        if (isinstance(kind, str) and kind in REPORTERS) or (isinstance(kind, type) and issubclass(kind, Reporter)):
            given = [given]
        else:
            built = VISUALIZERS.build(given, where, default_args={"type": "Visualizer", "name": "visualizer"})
            if not isinstance(built, Visualizer):
                raise ConfigError(f"{where}.type: {type(built).__name__} is no Visualizer and no Reporter")
            return built
    if given is not None and not isinstance(given, (list, tuple)):
        raise ConfigError(f"{where}: {given!r} is not allowed, give a dict, a list of reporters, or None")
    return _OfList(vis_backends=given)


class _OfList(Visualizer):
    _where = "visualizer"
