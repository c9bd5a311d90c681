"""Parts: the components of a run, each built when it is first needed."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.base.config import check_call, validate
from ..core.base.errors import ConfigError, StrategyError
from ..core.base.registry import MODELS
from ..core.hugging_face.pretrained import Pretrained
from ..core.model.base_model import (
    BaseModel,
    BaseTTAModel,
    module_to_set_up,
    not_trainable,
    overrides,
    parts_to_initialise,
)
from ..core.model.token_counts import count_tokens
from ..core.torch_compat.torch_private import is_compiled_wrapper
from ..core.version import __version__
from ..optim.schedulers import build_param_schedulers
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict, build_optim_wrapper
from ..strategies.base import NOTHING, Strategy
from ..strategies.parts import construct, init_weights, shape_of
from .config import Checked, doubts, eval_loop_class, merging_model, train_loop_class
from .data.checks import AUTO
from .data.dataloaders import build_dataloader
from .data.first_batches import example_batch
from .data.user_loaders import batch_size
from .hooks import Hook, HookDispatcher
from .hooks.build import build_hook, priority_of
from .loops.base import BaseLoop
from .loops.step import Stepper
from .loops.train import VALIDATION_KEYS, TrainLoop
from .metrics.evaluator import Evaluator, build_evaluator, check_evaluator
from .options import AutoScaleLR, Environment, FixedOptions
from .reporting import MessageHub, Reporter, Visualizer, build_log_processor
from .reporting.model_outline import ModelOutline, outline
from .run_folders import recorded
from .transforms.apply import transform

if TYPE_CHECKING:
    from .health.watchdog import Watchdog

# Build parts of a run that need its process group: environment, model, schedulers.


logger = logging.getLogger("flextrain")


def apply_environment(env: Environment) -> None:
    """Apply the process-wide settings of ``env_cfg``."""
    if env.mp_cfg.mp_start_method is not None:
        multiprocessing.set_start_method(env.mp_cfg.mp_start_method, force=True)
    if env.mp_cfg.opencv_num_threads is not None:
        _limit_opencv(env.mp_cfg.opencv_num_threads)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(env.resource_limit, soft), hard), hard))
    torch.backends.cudnn.benchmark = env.cudnn_benchmark


def _limit_opencv(threads: int) -> None:
    try:
        import cv2
    except ModuleNotFoundError:  # OpenCV is optional, but every MMEngine configuration has this key
        return
    cv2.setNumThreads(threads)


@contextmanager
def _reading_nothing() -> Iterator[None]:
    """Context that says so if a model reads weights where the strategy builds it without any."""
    # Some models are built in spite of it, and fail when their values are made.
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    own = None if kind is None else vars(kind).get("from_pretrained")
    try:
        if own is not None:
            kind.from_pretrained = classmethod(_refuse_reading)
        yield
    except RuntimeError as error:  # StrategyError is one
        frames = traceback.walk_tb(error.__traceback__)
        if not any(frame.f_code.co_name == "from_pretrained" for frame, _ in frames):
            raise
        _refuse_reading(error=error)
    finally:
        if own is not None:
            kind.from_pretrained = own


def _refuse_reading(*given: Any, error: Exception | None = None, **options: Any) -> None:
    raise ConfigError(
        "model: from_pretrained reads weights, and this strategy builds a model without them; give "
        'dict(type="transformers:AutoModelForCausalLM", pretrained="folder"), with transforms=[...] for a model around it, or '
        "the model itself and no function"
    ) from error


def build_model(given: Any, preprocessor: Any, strategy: Strategy, *, for_training: bool) -> nn.Module:
    """Build the user's module from a module, a configuration or a function, in the strategy's ``building``."""
    if isinstance(given, nn.Module):
        _finish(given, preprocessor, strategy, for_training=for_training)
        return given
    if isinstance(given, Mapping) and preprocessor is not None:
        given, preprocessor = {"data_preprocessor": preprocessor, **given}, None
    reads_nothing = strategy.building() is not NOTHING

    def make() -> nn.Module:
        with _reading_nothing() if reads_nothing else NOTHING:
            if (pretrained := Pretrained.of(given, "model")) is not None:
                model: Any = pretrained.build()
            else:
                model = MODELS.build(given, "model") if isinstance(given, (Mapping, str)) else given()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: gave {type(model).__name__}, not a torch.nn.Module")
        return model

    finish = partial(_finish, preprocessor=preprocessor, strategy=strategy, for_training=for_training)
    return construct(strategy, make, finish)


def _finish(model: Any, preprocessor: Any, strategy: Strategy, *, for_training: bool) -> None:
    """Check a module, give it its preprocessor, and initialise it."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ConfigError(
            f"model: is wrapped in {type(model).__name__}, give the model itself (model.module); the strategy wraps it"
        )
    if is_compiled_wrapper(model):
        raise ConfigError("model: is compiled already, give the model itself, and compile=True")
    if preprocessor is not None:
        owner = model.module if isinstance(model, BaseTTAModel) else model
        if not hasattr(owner, "data_preprocessor"):
            raise ConfigError(f"data_preprocessor: {type(owner).__name__} has no attribute of this name to set")
        is_built = isinstance(preprocessor, nn.Module)
        owner.data_preprocessor = preprocessor if is_built else MODELS.build(preprocessor, "data_preprocessor")
    # MMEngine calls init_weights, so only its kind of model expects that. Other models call such a method themselves.
    if for_training and isinstance(model, BaseModel):
        parts = [name for name, _ in parts_to_initialise(model)]
        if overrides(model, "init_weights"):
            init_weights(strategy, model)
        elif parts:
            logger.info(f"Calling init_weights() of the model's {', '.join(parts)}")
            init_weights(strategy, model)
    if for_training:
        count_tokens(model)


def scale_lr(optim: OptimWrapper | OptimWrapperDict, batch_size: int | None, shards: int, base: int) -> str:
    """Scale learning rates linearly with the samples per update, and return a description for the log.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017.
    """
    if batch_size is None:
        raise ConfigError("auto_scale_lr: the batch size of train_dataloader is not known, scale the rate yourself")
    real = batch_size * shards * optim.accumulate
    for group in optim.param_groups:
        group["lr"] *= real / base
    return f"Learning rates times {real / base:.4g}: {real} samples per update, chosen for {base}"


def build_schedulers(given: Any, optim: OptimWrapper | OptimWrapperDict, loop: TrainLoop) -> dict[str, list[Any]]:
    """Build the parameter schedulers of each optimizer, by its name; ``given`` is for all, or a dict by name."""
    by_name = isinstance(given, Mapping) and "type" not in given
    return {
        name: build_param_schedulers(
            given.get(name) if by_name and name else given,
            wrapper,
            epoch_length=loop.data.epoch_length,
            max_epochs=loop.max_epochs if loop.by_epoch else None,
            max_iters=loop.max_iters,
            where=f"param_scheduler.{name}" if by_name and name else "param_scheduler",
        )
        for name, wrapper in optim.wrappers.items()
    }


# Names of MMEngine's runners that FlexibleRunner has not, and what to use instead.


_AT_FIRST_USE = "train(), val() and test() do it when they begin"
INSTEAD = {
    "build_strategy": "give strategy=... to the runner, and read runner.strategy",
    "build_message_hub": "read runner.message_hub",
    "build_visualizer": "give visualizer=... to the runner, and read runner.visualizer",
    "build_logger": "read runner.logger",
    "wrap_model": "the strategy wraps the model; read runner.model",
    "setup_env": "give env_cfg=... to the runner, which applies it when it is made",
    "set_randomness": "give randomness=dict(seed=...) to the runner",
    "load_or_resume": _AT_FIRST_USE,
    "register_default_hooks": "give default_hooks=dict(...) to the runner",
    "register_hooks": "give default_hooks and custom_hooks to the runner, or call register_hook",
    "dump_config": "the configuration is in the log folder and with the reporters; read runner.cfg",
}
"""Name to what to use."""


class MissingNameError(ConfigError, AttributeError):
    """A name of MMEngine's that is not here; ``hasattr`` is False."""


class _Missing:
    # Not __getattr__: that would also be called, and hide the reason, when a property of a runner ends with an AttributeError.
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, runner: object | None, kind: type) -> Any:
        if runner is None:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self._name!r}")
        raise MissingNameError(f"runner.{self._name}: is not here, {INSTEAD[self._name]}")


class MissingNames:
    """Answers with what to use when one of these names is asked for."""


for _name in INSTEAD:
    setattr(MissingNames, _name, _Missing(_name))


# AlsoOnClass: a method that can be called on the class, before there is an object.


class AlsoOnClass:
    """Decorator of a method whose ``self`` is None when it is called on the class.

    MMEngine has some static methods that need no runner; here they know more when there is one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return functools.update_wrapper(functools.partial(self._function, instance), self._function)


_logger = logging.getLogger("flextrain")


class Parts(MissingNames):
    """The components of a run and its counters; base class of FlexibleRunner.

    Args:
        given: the runner's arguments.
        checked: the checked arguments, and the parts built from them.
    """

    experiment_name: str
    timestamp: str
    work_dir: str
    log_dir: str
    config_text: str = ""
    seed: int
    logger: logging.Logger
    message_hub: MessageHub
    log_processor: Any
    visualizer: Visualizer

    def __init__(self, given: Mapping[str, Any], checked: Checked) -> None:
        self._given, self._trains, self._transforms = given, checked.trains, checked.transforms
        self.options: FixedOptions = checked.options
        self.strategy: Strategy = checked.strategy
        self.optim_wrapper: OptimWrapper | OptimWrapperDict | None = checked.optim_wrapper
        self.hook_calls = HookDispatcher()
        self.stop_check: Callable[[str], None] | None = None
        self.schedulers: dict[str, list[Any]] = {}
        self.late_parameters: list[str] = []  # those named in the log so far
        self.watchdog: Watchdog | None = None
        """What watches several processes; None for one."""
        self._changes: tuple[tuple[str, str], ...] = ()  # what transforms have done to the model
        self._model: nn.Module | None = None
        self._resumed_from: Path | None = None  # the checkpoint that resume() was given
        self._has_engine = False  # True if the strategy makes updates in a way of its own
        self._stepper: Stepper | None = None
        self._train_loop: TrainLoop | None = None
        self._val_loop: BaseLoop | None = None
        self._test_loop: BaseLoop | None = None

    # Properties

    @property
    def version(self) -> str:
        """flextrain's version."""
        return __version__

    @property
    def cfg(self) -> dict[str, Any]:
        """The runner's arguments and the seed in use, for the record."""
        own = {key: value for key, value in self._given.items() if value is not None and key != "cfg"}
        return recorded(own, self._given["cfg"], self.seed)

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        return self.strategy.topology.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.strategy.topology.world_size

    @property
    def distributed(self) -> bool:
        """True if there are several processes."""
        return self.world_size > 1

    @property
    def accumulate(self) -> int:
        """Micro-batches per update."""
        return 1 if self.optim_wrapper is None else self.optim_wrapper.accumulate

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._train_loop.epoch if self._train_loop else 0

    @property
    def iter(self) -> int:
        """Updates completed."""
        return self._train_loop.iter if self._train_loop else 0

    @property
    def max_epochs(self) -> int:
        """Total number of epochs."""
        return self.train_loop.max_epochs

    @property
    def max_iters(self) -> int:
        """Total number of updates."""
        return self.train_loop.max_iters

    @property
    def reporters(self) -> list[Reporter]:
        """The reporters of ``visualizer``."""
        return self.visualizer.reporters

    @property
    def hooks(self) -> list[Hook]:
        """The hooks in the order in which they run."""
        return self.hook_calls.hooks

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of checkpoints: the work directory, unless a hook saves them elsewhere."""
        return next((path for hook in self.hooks if (path := hook.checkpoint_dir(self))), Path(self.work_dir))

    @property
    def fast_checkpoint_dir(self) -> Path | None:
        """The folder of the second tier of checkpoints; None if no hook has one."""
        return next((path for hook in self.hooks if (path := hook.fast_checkpoint_dir(self))), None)

    @property
    def param_schedulers(self) -> Any:
        """The parameter schedulers: a list, or a dict of lists for several optimizers."""
        return self.schedulers if isinstance(self.optim_wrapper, OptimWrapperDict) else self.schedulers.get("", [])

    def progress(self) -> tuple[int, int, int]:
        """Numbers that change while the run gets on: updates, evaluation batches, micro-batches.

        The watchdog's thread reads them, so nothing is built here.
        """
        evaluations = (loop for loop in (self._val_loop, self._test_loop) if loop is not None)
        return (
            0 if self._train_loop is None else self._train_loop._steps(),
            sum(loop._steps() for loop in evaluations),
            0 if self._stepper is None else self._stepper.micro_batch,
        )

    def all_have_failed(self) -> bool:
        """Whether all processes end this run by errors of their own, so that on_exception may call a collective.

        If one has failed alone, the others are not there, and a collective would wait for them. Waits up to a second.
        """
        return self.watchdog is None or self.watchdog.all_have_failed()

    # Parts
    @property
    def model(self) -> nn.Module:
        """The callable of training: the user's module, or the strategy's wrapper around it."""
        self._setup_model()
        assert self._model is not None
        return self._model

    @property
    def stepper(self) -> Stepper:
        """The Stepper, which makes updates and predictions with the model."""
        if self._stepper is None:  # tested first, because every iteration comes here
            self._setup_model()
        assert self._stepper is not None
        return self._stepper

    @property
    def train_loop(self) -> TrainLoop:
        """The training loop; hooks may read it although the run only tests."""
        if self._train_loop is None:
            if self._given["train_cfg"] is None:
                self._check_trainable()
            self._train_loop = self.build_train_loop(self._given["train_cfg"])
        return self._train_loop

    def _check_trainable(self) -> None:
        """Raise ConfigError if the run cannot train."""
        if not self._trains:
            if (merging := merging_model(self._given["model"])) is not None:
                raise not_trainable(merging)
            raise ConfigError("train_cfg: missing, training needs train_dataloader, train_cfg and optim_wrapper")

    @property
    def val_loop(self) -> BaseLoop | None:
        """The validation loop; None if validation is not configured."""
        if self._val_loop is None and self._given["val_dataloader"] is not None:
            self._val_loop = self.build_val_loop(self._given["val_cfg"])
        return self._val_loop

    @property
    def test_loop(self) -> BaseLoop | None:
        """The test loop; None if testing is not configured."""
        if self._test_loop is None and self._given["test_dataloader"] is not None:
            self._test_loop = self.build_test_loop(self._given["test_cfg"])
        return self._test_loop

    @property
    def train_dataloader(self) -> Any:
        """The training data: a DataLoader, or another source of batches."""
        return self.train_loop.loader

    @property
    def val_dataloader(self) -> Any:
        """The validation data."""
        return self.val_loop.loader if self.val_loop else None

    @property
    def test_dataloader(self) -> Any:
        """The test data."""
        return self.test_loop.loader if self.test_loop else None

    @property
    def val_evaluator(self) -> Any:
        """The Evaluator of validation; None if validation is not configured."""
        return getattr(self.val_loop, "evaluator", None)

    @property
    def test_evaluator(self) -> Any:
        """The Evaluator of testing; None if testing is not configured."""
        return getattr(self.test_loop, "evaluator", None)

    @property
    def val_interval(self) -> int:
        """Epochs or iterations between validations."""
        return self.train_loop.val_interval

    @property
    def val_begin(self) -> int:
        """First epoch or iteration, counted from 1, after which validation may run."""
        return self.train_loop.val_begin

    @property
    def model_name(self) -> str:
        """The name of the model's class."""
        self._setup_model()
        return type(self.strategy.module).__name__

    @property
    def deterministic(self) -> bool:
        """Whether deterministic algorithms were asked for."""
        return self.options.randomness.deterministic

    def register_hook(self, hook: Hook | Mapping[str, Any], priority: int | str | None = None) -> None:
        """Add a hook, after those of the same priority."""
        built = build_hook(hook, "hook")
        self.hook_calls.register(built, priority_of(built, hook, "hook") if priority is None else priority)

    def _register_first(self, hooks: Iterable[tuple[Hook, int]]) -> None:
        """Add the hooks of the configuration; what they may look for exists."""
        for hook, priority in hooks:
            self.register_hook(hook, priority)

    def register_custom_hooks(self, hooks: Iterable[Hook | Mapping[str, Any]]) -> None:
        """Add several hooks, see ``register_hook``."""
        for hook in hooks:
            self.register_hook(hook)

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        """Make the message hub and the visualizer those that ``get_current_instance`` returns."""
        with self.message_hub.as_current(), self.visualizer.as_current():
            yield

    # How they are built, with MMEngine's names

    @AlsoOnClass
    def build_dataloader(
        self: Parts | None, dataloader: Any, seed: int | None = None, diff_rank_seed: bool = False
    ) -> Any:
        """Build a dataloader of training data, split over processes; loops of one's own may need a second one.

        ``FlexibleRunner.build_dataloader(...)`` does so before there is a run, as in MMEngine: the run that gets the
        result as ``train_dataloader`` splits it.

        Args:
            dataloader: see the runner's ``train_dataloader``.
            seed: seed of the order; default: the run's, without a run 0.
            diff_rank_seed: for MMEngine's callers; the order is the same on all processes either way.

        Raises:
            ConfigError: an invalid configuration.
        """
        if self is None:
            return build_dataloader(
                dataloader, training=True, seed=seed or 0, shard=None, where="dataloader", logger=_logger
            )
        return self._build_dataloader(dataloader, "dataloader", True, self.seed if seed is None else seed)

    def build_evaluator(self, evaluator: Any) -> Evaluator:
        """Build an Evaluator for the processes of this run.

        Args:
            evaluator: see the runner's ``val_evaluator``.
        """
        check_evaluator(evaluator, "evaluator")
        built = build_evaluator(evaluator, "evaluator")
        built.topology = self.strategy.topology
        built.to(self.strategy.device)
        return built

    def build_train_loop(self, loop: TrainLoop | Mapping[str, Any]) -> TrainLoop:
        """Build a training loop on the training data; ``loop`` is such a loop, or as ``train_cfg``."""
        if isinstance(loop, TrainLoop):
            return loop
        kind, kwargs = train_loop_class(loop)
        check_call(kind, kwargs, "train_cfg", ("runner", "dataloader"))
        # MMEngine's configurations have such keys even without validation.
        if self._given["val_dataloader"] is None and (idle := VALIDATION_KEYS & kwargs.keys()):
            names = ", ".join(f"train_cfg.{name}" for name in sorted(idle))
            self.logger.warning(f"{names}: without effect, there is no validation (val_dataloader)")
        given = self._given["train_dataloader"]
        if isinstance(given, Mapping) and given.get("batch_size") == AUTO:
            from .auto_batch_size import with_batch_size

            given = with_batch_size(self, given, self._resumed_from)
        loader = self._build_dataloader(given, "train_dataloader", True, self.seed)
        return kind(runner=self, dataloader=loader, **kwargs)  # type: ignore[no-any-return]

    def build_val_loop(self, loop: BaseLoop | Mapping[str, Any]) -> BaseLoop:
        """Build a loop on the validation data; ``loop`` is such a loop, or as ``val_cfg``."""
        return self._build_eval_loop(loop, "val")

    def build_test_loop(self, loop: BaseLoop | Mapping[str, Any]) -> BaseLoop:
        """Build one on the test data; ``loop`` as for ``build_val_loop``."""
        return self._build_eval_loop(loop, "test")

    def build_log_processor(self, log_processor: Any) -> Any:
        """Build a LogProcessor; the argument is as the runner's ``log_processor``."""
        return build_log_processor(log_processor, not self._trains or self.train_loop.by_epoch)

    def _build_dataloader(self, cfg: Any, where: str, training: bool, seed: int) -> Any:
        shard = self.strategy.topology.shard
        return build_dataloader(cfg, training=training, seed=seed, shard=shard, where=where, logger=self.logger)

    def _build_eval_loop(self, loop: BaseLoop | Mapping[str, Any], mode: str) -> BaseLoop:
        if isinstance(loop, BaseLoop):
            return loop
        kind, kwargs = eval_loop_class(loop, mode)
        evaluator, where = self._given[f"{mode}_evaluator"], f"{mode}_dataloader"
        loader = self._build_dataloader(self._given[where], where, False, self.seed)
        return kind(runner=self, dataloader=loader, evaluator=evaluator, **kwargs)  # type: ignore[no-any-return]

    def _build_model(self) -> nn.Module:
        """Build the user's module, with its initial weights, before the strategy distributes it."""
        given = self._given
        return build_model(given["model"], given["data_preprocessor"], self.strategy, for_training=self._trains)

    def _setup_model(self) -> None:
        """Build the model and set it up, with the optimizer, in the strategy; only once."""
        if self._model is not None:
            return
        with self._as_current():
            model = self._build_model()
        module = module_to_set_up(model, trains=self._trains)
        loaders = ["train_dataloader"] if self._trains else ["val_dataloader", "test_dataloader"]
        self.strategy.example = partial(example_batch, self, loaders)
        self.outline: ModelOutline = outline(
            module, partial(shape_of, self.strategy), self._changes
        )  # before it is distributed
        self._model, optim = self.strategy.setup(module, self.optim_wrapper)
        self._has_engine, self.optim_wrapper = optim is not self.optim_wrapper, optim
        if self._train_loop is not None:  # options of a strategy may set the number of micro-batches
            self._train_loop.data.accumulate = self.accumulate
        self._stepper = Stepper(self.strategy, self._model, optim)
        if isinstance(model, BaseTTAModel):
            self._stepper.merge_with(model)
        self.logger.info(f"Precision: {self.strategy.precision_report()}")
        scale = self.options.auto_scale_lr
        if optim is not None and scale is not None and scale.enable:
            size, shards = batch_size(self.train_dataloader), self.strategy.topology.data.count
            self.logger.info(scale_lr(optim, size, shards, scale.base_batch_size))

    def _setup_schedulers(self) -> None:
        # Before schedulers are built: an epoch may be shorter than this process's data.
        self.train_loop.data.compare_lengths(float(self.strategy.config.timeout_s))
        if not self.schedulers and self.optim_wrapper is not None:
            given = self._given
            self.schedulers = build_schedulers(given["param_scheduler"], self.optim_wrapper, self.train_loop)
            for line in doubts(
                given["train_cfg"],
                given["param_scheduler"],
                self.train_loop,
                self.optim_wrapper,
                self.schedulers,
                validates=given["val_dataloader"] is not None,
            ):
                self.logger.warning(line)


# BuildMethods: MMEngine's ``build_...`` methods of a runner that make a second model, optimizer or schedule for it.


class BuildMethods(Parts):
    """Builds more parts for a run, for loops and hooks of one's own; the run's own are made without them.

    The runner neither updates nor saves what these methods return.
    """

    def _build_model(self) -> nn.Module:
        return self._transformed(super()._build_model())

    def _transformed(self, model: nn.Module) -> nn.Module:
        """Apply the run's transforms to its model."""
        load_from = self.options.load_from
        model, self._changes = transform(model, self._transforms, self.strategy, self.seed, load_from)
        return model

    def build_model(self, model: Any) -> nn.Module:
        """Build a module as the runner builds its own, without initial weights of ``init_weights``.

        Args:
            model: see the runner's ``model``; the strategy neither moves nor wraps the module.
        """
        if not (isinstance(model, (nn.Module, Mapping, str)) or callable(model)):
            raise ConfigError(
                f"model: {model!r} is not allowed, give a module, a dict or a function that returns a module"
            )
        return build_model(model, None, self.strategy, for_training=False)

    def build_optim_wrapper(self, optim_wrapper: Any) -> OptimWrapper | OptimWrapperDict:
        """Build an OptimWrapper with an optimizer of its own for the run's model, after the strategy has placed it.

        Args:
            optim_wrapper: see the runner's ``optim_wrapper``; a built optimizer may hold any parameters.

        Raises:
            StrategyError: the strategy's own engine makes the updates, or other processes have other parameters.
        """
        built = build_optim_wrapper(optim_wrapper)
        self._setup_model()
        if self._has_engine or self.strategy.topology.model is not None:
            raise StrategyError(
                f"build_optim_wrapper: {type(self.strategy).__name__} updates one optimizer, the runner's; give several by "
                "name in the runner's optim_wrapper"
            )
        built.attach(self.strategy.device, self.strategy.autocast)
        if not all(wrapper.is_built for wrapper in built.wrappers.values()):
            built.build(self.strategy.module)
        return built

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Build schedulers for ``runner.optim_wrapper``; ``end`` and units come from the training loop.

        Args:
            scheduler: see the runner's ``param_scheduler``.

        Returns:
            A list; for several optimizers a dict of lists.
        """
        if not isinstance(self.optim_wrapper, (OptimWrapper, OptimWrapperDict)):
            kind = type(self.optim_wrapper).__name__
            raise ConfigError(f"runner.optim_wrapper: is {kind}, give build_param_scheduler's runner an OptimWrapper")
        self._setup_model()
        optim = self.optim_wrapper
        self.train_loop.data.compare_lengths(float(self.strategy.config.timeout_s))
        built = build_schedulers(scheduler, optim, self.train_loop)
        return built if isinstance(optim, OptimWrapperDict) else built[""]

    def scale_lr(self, optim_wrapper: OptimWrapper | OptimWrapperDict, auto_scale_lr: Any = None) -> None:
        """Scale the learning rates of a built wrapper, as ``auto_scale_lr`` of the runner does; None scales nothing.

        Args:
            auto_scale_lr: ``dict(base_batch_size=..., enable=True)``.
        """
        if auto_scale_lr is None:
            return
        options = validate(AutoScaleLR, auto_scale_lr, "auto_scale_lr")
        if options.enable:
            size, shards = batch_size(self.train_dataloader), self.strategy.topology.data.count
            self.logger.info(scale_lr(optim_wrapper, size, shards, options.base_batch_size))
