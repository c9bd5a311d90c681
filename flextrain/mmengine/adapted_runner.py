"""FlexibleRunner for projects that keep MMEngine: translates the arguments, and adapts MMEngine's objects."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.logging import MessageHub as TheirHub
from mmengine.logging import MMLogger
from mmengine.model import BaseDataPreprocessor, BaseModel, base_module, weight_init
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer as TheirVisualizer
from torch import nn

from ..core.base.config import check_keywords
from ..core.base.errors import ConfigError
from ..core.config_files import Config as Ours
from ..core.config_files import located
from ..core.model.base_model import add_base_model
from ..runner.config import ELSEWHERE
from ..runner.data.user_loaders import length_of
from ..runner.hooks import Hook, get_priority
from ..runner.loops.base import BaseLoop
from ..runner.parts import Parts, build_model
from ..runner.reporting import MessageHub
from ..runner.reporting.reporter import describe
from ..runner.run_folders import other_names
from ..runner.runner import FlexibleRunner as Native
from ..strategies.base import Strategy
from ..strategies.parts import init_weights, keep_own_buffers
from .evaluation import AdaptedEvaluator, adapted_evaluator
from .hooks import AdaptedHook, adapted_hook
from .translation import adapted_log_processor, translated_arguments, translated_dataloader
from .visualizers import AdaptedVisualizer

# MMEngine's Config as the arguments of a runner.


# It has all the methods of one; flextrain looks for this when it writes the configuration to a record.
Mapping.register(Config)


def split(cfg: Any, arguments: Collection[str]) -> tuple[Config, dict[str, Any]]:
    """Return a copy of ``cfg`` as a Config, and those of its entries that are arguments of a runner.

    All other names stay in the Config, from which projects read them. Built parts are not copied.

    Raises:
        ConfigError: it is no configuration, or a name is almost that of an argument.
    """
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"from_cfg: {cfg!r} is not allowed, give MMEngine's Config or a dict")
    own = _copy(cfg) if isinstance(cfg, Config) else Config(_copy(dict(cfg)))
    other_names(own, arguments)
    return own, {name: own[name] for name in own if name in arguments}


def _copy(cfg: Any) -> Any:
    return copy.deepcopy(cfg, {id(built): built for built in _built_parts(cfg)})


def _built_parts(value: Any) -> Iterator[Any]:
    """Objects in a configuration that are no part of its structure: models, datasets, functions."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _built_parts(item)
    elif type(value) in (list, tuple) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for item in value:
            yield from _built_parts(item)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        yield value


def has_text(config: Config) -> bool:
    """Whether the configuration can be written to a file; one that holds objects cannot."""
    try:
        return bool(config.pretty_text)
    except SyntaxError:  # MMEngine formats it as Python
        return False


# What code finds without being given it: MMEngine's default scope, and the current MMLogger and MessageHub of a run.


class RunLogger(MMLogger):  # type: ignore[misc]
    """An MMLogger that writes to the log of a run.

    Args:
        name: the experiment's name.
        logger: the run's logger, whose handlers it uses.
    """

    def __init__(self, name: str, logger: logging.Logger) -> None:
        super().__init__(name, logger_name=logger.name, log_level=logger.level)
        self.handlers = logger.handlers  # the same list, also when it changes
        self.setLevel(logger.level)
        files = (each.baseFilename for each in self.handlers if isinstance(each, logging.FileHandler))
        self._log_file = next(files, None)


class RunHub(TheirHub):  # type: ignore[misc]
    """MMEngine's MessageHub over the message hub of a run.

    Args:
        name: the experiment's name.
        hub: the run's message hub; scalars may be tensors there, which are read when a statistic is asked for.
    """

    def __init__(self, name: str, hub: MessageHub) -> None:
        super().__init__(name)
        self.hub = hub

    log_scalars = property(attrgetter("hub.log_scalars"))
    runtime_info = property(attrgetter("hub.runtime_info"))
    update_scalar = property(attrgetter("hub.update_scalar"))
    update_scalars = property(attrgetter("hub.update_scalars"))
    update_info = property(attrgetter("hub.update_info"))
    pop_info = property(attrgetter("hub.pop_info"))
    get_scalar = property(attrgetter("hub.get_scalar"))
    get_info = property(attrgetter("hub.get_info"))
    state_dict = property(attrgetter("hub.state_dict"))
    load_state_dict = property(attrgetter("hub.load_state_dict"))


def make_current(kind: Any, instance: Any) -> None:
    """Make an object the newest instance of one of MMEngine's classes, under its own name."""
    known = kind._instance_dict
    known[instance.instance_name] = instance
    known.move_to_end(instance.instance_name)


@contextmanager
def current(kind: Any, instance: Any) -> Iterator[None]:
    """Context in which an object is the newest instance of one of MMEngine's classes."""
    before = next(reversed(kind._instance_dict), None)
    make_current(kind, instance)
    try:
        yield
    finally:
        if before in kind._instance_dict:
            kind._instance_dict.move_to_end(before)


@contextmanager
def in_scope(scope: str | None) -> Iterator[None]:
    """Context with a default scope for look-ups in MMEngine's registries; None: the current one."""
    with DefaultScope.overwrite_default_scope(scope):
        yield


def set_default_scope(name: str, scope: str | None) -> None:
    """Make ``scope`` the default scope from now on, as MMEngine's runner does."""
    if scope is not None:
        DefaultScope._instance_dict.pop(name, None)
        DefaultScope.get_instance(name, scope_name=scope)


# MMEngine's models: their own initialisation, and the device of their data preprocessors.


add_base_model(BaseModel)

_RECORD = "_params_init_info"


def initialise(model: Any, strategy: Strategy) -> None:
    """Call ``init_weights()`` of a model that has it, as MMEngine's runner does before training."""
    if not callable(getattr(model, "init_weights", None)):
        return
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    with _without_record(model) if is_meta else nullcontext():
        init_weights(strategy, model)


@contextmanager
def _without_record(model: nn.Module) -> Iterator[None]:
    """Context in which BaseModule does not record who initialised which parameter.

    It compares the means of parameters, which have no values on the meta device.
    """
    modules = [base_module, weight_init]
    originals = [module.update_init_info for module in modules]
    for part in model.modules():
        setattr(part, _RECORD, {})
    for module in modules:
        module.update_init_info = lambda *args, **kwargs: None
    try:
        with warnings.catch_warnings():
            # torch does not see that the copies are recorded, and are made once there is memory.
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.update_init_info = original
        for part in model.modules():
            part.__dict__.pop(_RECORD, None)


def use_device(model: nn.Module, device: torch.device) -> None:
    """Tell the model's data preprocessors the device to which they move a batch.

    They learn it from ``model.to()`` only; strategies that build a model without memory, or in parts, never call that.
    """
    for part in model.modules():
        if isinstance(part, BaseDataPreprocessor):
            part.to(device)  # its own method notes the device


_ARGUMENTS = [name for name in inspect.signature(Native.__init__).parameters if name != "self"]


class AdaptedParts(Parts):
    """Parts whose names are those of MMEngine's registries, and whose model may be MMEngine's."""

    takes_mmengines_models = True

    def __init__(self, run: AdaptedRunner, *given: Any) -> None:
        super().__init__(run, *given)
        self._scope = run.default_scope

    def set_up(self) -> None:
        """See Parts; data preprocessors learn the device."""
        is_new, strategy = self.model is None, self._run.strategy
        super().set_up()
        if is_new:
            use_device(strategy.module, strategy.device)
            keep_own_buffers(strategy)  # as under MMEngine's runner

    def build_model(self) -> nn.Module:
        """See Parts; ``init_weights`` is MMEngine's."""
        given, strategy = self.config.given, self._run.strategy
        model = build_model(given["model"], given["data_preprocessor"], strategy, for_training=False)
        if self.config.trains:
            initialise(model, strategy)
        return model

    def build_eval_loop(self, loop: Any, mode: str) -> BaseLoop:
        """See Parts; metrics of MMEngine learn how many samples there are."""
        with in_scope(self._scope):
            built = super().build_eval_loop(loop, mode)
        evaluator = getattr(built, "evaluator", None)
        if isinstance(evaluator, AdaptedEvaluator):
            length = length_of(getattr(built.loader, "dataset", None))
            evaluator.size = sys.maxsize if length is None else length
        return built

    def build_dataloader(self, cfg: Any, where: str, training: bool, seed: int) -> Any:
        """See Parts."""
        with in_scope(self._scope):
            return super().build_dataloader(cfg, where, training, seed)


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

    _kind_of_parts = AdaptedParts

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
            checked = get_priority(adapted.priority)
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
