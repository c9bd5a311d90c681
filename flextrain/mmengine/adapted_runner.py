"""FlexibleRunner for projects that keep MMEngine: translates the arguments, and adapts MMEngine's objects."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.logging import MessageHub as TheirHub
from mmengine.logging import MMLogger
from mmengine.visualization import Visualizer as TheirVisualizer
from torch import nn

from ..core.config import check_keywords
from ..core.config_files import Config as Ours
from ..core.config_files import located
from ..core.errors import ConfigError
from ..runner.build import build_model
from ..runner.configuration import ELSEWHERE
from ..runner.data.user_loaders import length_of
from ..runner.hooks import Hook
from ..runner.loops.base import BaseLoop
from ..runner.reporting.reporter import describe
from ..runner.runner import FlexibleRunner as Native
from .config import has_text, split
from .evaluation import AdaptedEvaluator, adapted_evaluator
from .hooks import AdaptedHook, adapted_hook
from .initialisation import initialise, use_device
from .instances import RunHub, RunLogger, current, in_scope, make_current, set_default_scope
from .log_processors import adapted_log_processor
from .translation import translated_arguments, translated_dataloader
from .visualizers import AdaptedVisualizer

_ARGUMENTS = [name for name in inspect.signature(Native.__init__).parameters if name != "self"]


class AdaptedRunner(Native):
    """flextrain's FlexibleRunner for MMEngine's configurations, registries and classes.

    All arguments are those of ``flextrain.FlexibleRunner``; these differ:

    Args:
        model: also a BaseModel or another module of MMEngine; its ``init_weights()`` is called before training.
        work_dir: folder for logs and checkpoints.
        default_scope: the scope in which names are looked up first, in the registry tree of MMEngine.
        cfg: the whole configuration, a Config or a dict: ``runner.cfg``.
        arguments: names in MMEngine's registries, and objects of its classes, are allowed wherever MMEngine's runner
            takes them. MMEngine's own hooks, loops, samplers, optimizer wrappers and schedulers are replaced by
            flextrain's of the same names.

    Raises:
        ConfigError: an argument is invalid, or is an object that works with MMEngine's own runner only.
    """

    _takes_mmengines_models = True

    def __init__(
        self,
        model: Any,
        work_dir: str | Path = "work_dirs",
        *,
        default_scope: str | None = "mmengine",
        cfg: Any = None,
        **arguments: Any,
    ) -> None:
        check_keywords(arguments, _ARGUMENTS, ELSEWHERE)
        config = Config() if cfg is None else split(cfg, _ARGUMENTS)[0]
        recorded = config if has_text(config) else Config()
        self._config, self._scope = config, default_scope
        set_default_scope(str(Path(work_dir).absolute()), default_scope)
        given = translated_arguments({"model": model, **arguments}, config, default_scope)
        self._recorded = recorded
        super().__init__(work_dir=work_dir, **given)
        if len(recorded) and self.rank == 0:
            self.dump_config()
        elif len(config):
            self.logger.info("The configuration holds objects that no file can hold, and is not written to work_dir")

    @classmethod
    def from_cfg(cls, cfg: Any) -> AdaptedRunner:
        """Build a runner from MMEngine's Config, a ConfigDict or a dict.

        Names that are no arguments of a runner are kept: ``runner.cfg.name``.

        Raises:
            ConfigError: a name is almost that of an argument, or a value is invalid.
        """
        if isinstance(cfg, Ours):
            with located(cfg):
                cfg.import_custom_modules()
                return cls.from_cfg(cfg.imported())
        config, given = split(cfg, _ARGUMENTS)
        if "model" not in given:
            raise ConfigError("model: missing, it must be given")
        return cls(**given, cfg=config)

    # What MMEngine's hooks and projects read

    @property
    def cfg(self) -> Any:
        """The configuration as MMEngine's Config; of a runner without one, its arguments as plain values."""
        if not len(self._config):
            self._config = Config(describe(super().cfg))
        return self._config

    @property
    def default_scope(self) -> str | None:
        """The default scope."""
        return self._scope

    def dump_config(self) -> None:
        """Write the configuration to the work directory, under its own file's name or that of the time."""
        source = self._config.filename
        name = Path(source).name if source else f"{self.timestamp}.py"
        self._config.dump(str(Path(self.work_dir) / name))

    def register_hook(self, hook: Any, priority: Any = None) -> None:
        """Add a hook, MMEngine's or flextrain's, after those of the same priority."""
        adapted = adapted_hook(hook, "hook")
        if isinstance(adapted, AdaptedHook):
            checked = adapted.priority
            with in_scope(self._scope):
                adapted.build()
            priority = adapted.priority if priority == checked else priority  # a constructor may choose another
        super().register_hook(adapted, priority)

    def build_dataloader(self, dataloader: Any, seed: int | None = None, diff_rank_seed: bool = False) -> Any:
        """See flextrain.FlexibleRunner; names are found in MMEngine's registries."""
        with in_scope(self._scope):
            return super().build_dataloader(translated_dataloader(dataloader, "dataloader"), seed, diff_rank_seed)

    def build_evaluator(self, evaluator: Any) -> Any:
        """See flextrain.FlexibleRunner; metrics of MMEngine are adapted."""
        return super().build_evaluator(adapted_evaluator(evaluator, "evaluator", self._scope))

    def build_log_processor(self, log_processor: Any) -> Any:
        """See flextrain.FlexibleRunner; LogProcessors of MMEngine are adapted."""
        return super().build_log_processor(adapted_log_processor(log_processor, "log_processor"))

    # How parts are built

    def _register_first(self, hooks: Iterable[tuple[Hook, int]]) -> None:
        self._their_logger = RunLogger(self.experiment_name, self.logger)
        self._their_hub = RunHub(self.experiment_name, self.message_hub)
        if isinstance(self.visualizer, AdaptedVisualizer):
            with in_scope(self._scope):
                self.visualizer.build(self.experiment_name, self.log_dir, self._recorded)
        for kind, instance in self._instances():
            make_current(kind, instance)
        super()._register_first(hooks)

    def _instances(self) -> Iterator[tuple[Any, Any]]:
        """(class of MMEngine, its instance of this run) for what code finds without being given it."""
        yield MMLogger, self._their_logger
        yield TheirHub, self._their_hub
        if isinstance(self.visualizer, AdaptedVisualizer):
            for kind in type(self.visualizer.theirs).__mro__:
                if issubclass(kind, TheirVisualizer):
                    yield kind, self.visualizer.theirs

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(super()._as_current())
            stack.enter_context(in_scope(self._scope))
            for kind, instance in self._instances():
                stack.enter_context(current(kind, instance))
            yield

    def _build_model(self) -> nn.Module:
        given = self._given
        model = build_model(given["model"], given["data_preprocessor"], self.strategy, for_training=False)
        if self._trains:
            initialise(model, self.strategy)
        return self._transformed(model)

    def _setup_model(self) -> None:
        if self._model is None:
            super()._setup_model()
            use_device(self.strategy.module, self.strategy.device)

    def _build_eval_loop(self, loop: Any, mode: str) -> BaseLoop:
        with in_scope(self._scope):
            built = super()._build_eval_loop(loop, mode)
        evaluator = getattr(built, "evaluator", None)
        if isinstance(evaluator, AdaptedEvaluator):
            length = length_of(getattr(built.loader, "dataset", None))
            evaluator.size = sys.maxsize if length is None else length
        return built

    def _build_dataloader(self, cfg: Any, where: str, training: bool, seed: int) -> Any:
        with in_scope(self._scope):
            return super()._build_dataloader(cfg, where, training, seed)
