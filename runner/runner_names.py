"""The names by which hooks, loops and projects for MMEngine read a run, and build more parts for it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..core.base.config import validate
from ..core.base.errors import ConfigError, StrategyError
from ..core.hugging_face.pretrained import Description
from ..core.model.base_model import not_trainable
from ..core.version import __version__
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict, build_optim_wrapper
from ..strategies.base import Strategy
from .checkpoints import Checkpoints
from .config import merging_model
from .data.dataloaders import build_dataloader
from .health.oversight import Oversight
from .hooks import Hook, HookDispatcher
from .hooks.build import build_hook, priority_of
from .loops.base import BaseLoop
from .loops.step import Stepper
from .loops.train import TrainLoop
from .metrics.evaluator import Evaluator, build_evaluator, check_evaluator
from .options import AutoScaleLR, FixedOptions
from .parts import Parts, build_model, build_schedulers
from .reporting import MessageHub, Reporter, Visualizer, build_log_processor
from .reporting.model_outline import ModelOutline
from .run_folders import recorded

if TYPE_CHECKING:
    import torch

    from .resume.publish import Target
    from .run import Run

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


def _reads(path: str, doc: str) -> Any:
    """A property that reads what a part of the runner has: ``strategy.topology.rank``."""
    return property(attrgetter(path), doc=doc)


def _of_parts(name: str, doc: str | None = None) -> Any:
    return property(attrgetter(f"_parts.{name}"), lambda self, value: setattr(self._parts, name, value), doc=doc)


class RunnerNames:
    """What FlexibleRunner has beside its own methods: each name asks the part of the runner that knows.

    The ``build_...`` methods make further parts, for loops and hooks of one's own: the runner neither updates nor saves them.
    Only its loops are made by them: a subclass may define these three anew.
    """

    experiment_name: str
    timestamp: str
    work_dir: str
    log_dir: str
    config_text: str = ""
    """The configuration file with all that it inherits, as Python; empty for a run that was not made from one."""
    seed: int
    logger: logging.Logger
    message_hub: MessageHub
    log_processor: Any
    visualizer: Visualizer
    options: FixedOptions
    strategy: Strategy
    hook_calls: HookDispatcher
    oversight: Oversight
    _ending: Exception | None
    _parts: Parts
    _checkpoints: Checkpoints

    # The run and its processes

    @property
    def version(self) -> str:
        """flextrain's version."""
        return __version__

    @property
    def cfg(self) -> dict[str, Any]:
        """The runner's arguments and the seed in use, for the record."""
        given = self._parts.config.given
        own = {key: value for key, value in given.items() if value is not None and key != "cfg"}
        return recorded(own, given["cfg"], self.seed)

    rank: int = _reads("strategy.topology.rank", "Index of this process, from 0.")
    world_size: int = _reads("strategy.topology.world_size", "Number of processes.")

    @property
    def distributed(self) -> bool:
        """True if there are several processes."""
        return self.world_size > 1

    @property
    def accumulate(self) -> int:
        """Micro-batches per update."""
        optim = self._parts.optim_wrapper
        return 1 if optim is None else optim.accumulate

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        loop = self._parts.train_loop
        return loop.epoch if loop else 0

    @property
    def iter(self) -> int:
        """Updates completed."""
        loop = self._parts.train_loop
        return loop.iter if loop else 0

    max_epochs: int = _reads("train_loop.max_epochs", "Total number of epochs.")
    max_iters: int = _reads("train_loop.max_iters", "Total number of updates.")
    reporters: list[Reporter] = _reads("visualizer.reporters", "The reporters of ``visualizer``.")
    hooks: tuple[Hook, ...] = _reads(
        "hook_calls.hooks", "The hooks in the order in which they run; ``register_hook`` adds one."
    )

    @property
    def checkpoint_dir(self: Run) -> Path:
        """The folder of checkpoints: the work directory, unless a hook saves them elsewhere."""
        return next((path for hook in self.hooks if (path := hook.checkpoint_dir(self))), Path(self.work_dir))

    @property
    def fast_checkpoint_dir(self: Run) -> Path | None:
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
        parts = self._parts
        return (
            0 if parts.train_loop is None else parts.train_loop._steps(),
            sum(loop._steps() for loop in (parts.val_loop, parts.test_loop) if loop is not None),
            0 if parts.stepper is None else parts.stepper.micro_batch,
        )

    def all_have_failed(self) -> bool:
        """Whether all processes end this run by errors of their own, so that on_exception may call a collective.

        If one has failed alone, the others are not there, and a collective would wait for them. Waits up to a second.
        """
        watchdog = self.oversight.watchdog
        return watchdog is None or watchdog.all_have_failed()

    def call_hook(self: Run, fn_name: str, **kwargs: Any) -> None:
        """Call every hook at the hook point ``fn_name``."""
        self.hook_calls.call(fn_name, self, **kwargs)

    def end_with(self, error: Exception) -> None:
        """Stop training after the current epoch or iteration; ``train()`` raises ``error`` when the run has been closed.

        For hooks, during training and on every process. The run ends in order: hooks are told of its end and not of an
        exception, logs are closed, and checkpoints complete. An error of that end is raised in place of ``error``.
        """
        self._ending = error
        self.train_loop.stop_training = True

    def request_stop(self, reason: str = "request_stop()") -> None:
        """Let all processes end as a signal would, see Preemption; one process is enough, and any thread may call it.

        For handlers of signals of the program's own, and where there can be none, as in workers of Ray. train() saves and
        raises Terminated, a SystemExit; so do val() and test(), and the next of these calls if none is in progress.

        Args:
            reason: one line for the log.
        """
        self.oversight.preemption.ask(reason)

    # Parts: what is not there yet is built

    @property
    def model(self) -> nn.Module:
        """The callable of training: the user's module, or the strategy's wrapper around it."""
        self._parts.set_up()
        assert self._parts.model is not None
        return self._parts.model

    @property
    def stepper(self) -> Stepper:
        """The Stepper, which makes updates and predictions with the model."""
        if self._parts.stepper is None:  # tested first, because every iteration comes here
            self._parts.set_up()
        assert self._parts.stepper is not None
        return self._parts.stepper

    outline: ModelOutline = _reads(
        "_parts.outline", "How many parameters the parts of the model have; after the model was set up."
    )

    def _set_optim_wrapper(self, wrapper: Any) -> None:
        if getattr(self._parts.train_loop, "has_begun", False) and wrapper is not self._parts.optim_wrapper:
            raise ConfigError(
                "runner.optim_wrapper: cannot be replaced now, the training loop makes its updates with the one that it has begun with; "
                "change that one's param_groups, or end this run, and load its weights in another one"
            )
        self._parts.optim_wrapper = wrapper

    optim_wrapper: OptimWrapper | OptimWrapperDict | None = property(  # type: ignore[assignment]
        attrgetter("_parts.optim_wrapper"),
        _set_optim_wrapper,
        doc="The optimizer wrapper, or several of them; None without training.",
    )
    schedulers: dict[str, list[Any]] = _reads(
        "_parts.schedulers", "The parameter schedulers of each optimizer, by its name."
    )

    @property
    def train_loop(self) -> TrainLoop:
        """The training loop; hooks may read it although the run only tests."""
        parts = self._parts
        if parts.train_loop is None:
            if parts.config.train is None:
                self._check_trainable()
            parts.train_loop = self.build_train_loop(parts.config.given["train_cfg"])
        return parts.train_loop

    def _check_trainable(self) -> None:
        """Raise ConfigError if the run cannot train."""
        config = self._parts.config
        if not config.trains:
            if (merging := merging_model(config.given["model"])) is not None:
                raise not_trainable(merging)
            raise ConfigError("train_cfg: missing, training needs train_dataloader, train_cfg and optim_wrapper")

    @property
    def val_loop(self) -> BaseLoop | None:
        """The validation loop; None if validation is not configured."""
        parts = self._parts
        if parts.val_loop is None and parts.config.val is not None:
            parts.val_loop = self.build_val_loop(parts.config.given["val_cfg"])
        return parts.val_loop

    @property
    def test_loop(self) -> BaseLoop | None:
        """The test loop; None if testing is not configured."""
        parts = self._parts
        if parts.test_loop is None and parts.config.test is not None:
            parts.test_loop = self.build_test_loop(parts.config.given["test_cfg"])
        return parts.test_loop

    # Hooks, log processors and projects of MMEngine use these; None before the first use.
    _train_loop = _of_parts("train_loop")
    _val_loop = _of_parts("val_loop")
    _test_loop = _of_parts("test_loop")

    train_dataloader: Any = _reads(
        "train_loop.loader", "The training data: a DataLoader, or another source of batches."
    )

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

    val_interval: int = _reads("train_loop.val_interval", "Epochs or iterations between validations.")
    val_begin: int = _reads(
        "train_loop.val_begin", "First epoch or iteration, counted from 1, after which validation may run."
    )

    @property
    def model_name(self) -> str:
        """The name of the model's class."""
        self._parts.set_up()
        return type(self.strategy.module).__name__

    deterministic: bool = _reads("options.randomness.deterministic", "Whether deterministic algorithms were asked for.")
    # Checkpoints

    hugging_face: Description | None = _reads(
        "_parts.hugging_face",
        "What exports have to know of a model of transformers; None for other models, and before it is built.",
    )
    resumed_from: Path | None = _reads(
        "_checkpoints.resumed_from", "The checkpoint that training went on from; None: it began anew."
    )

    def finish_saving(self, wait: bool = True) -> bool:
        """Wait for the save in progress in the background; with ``wait=False`` only ask whether it is complete.

        With ``wait=False`` one process may get True an iteration before another does.

        Returns:
            True if no save is in progress.

        Raises:
            CheckpointError: the save failed, and its ``on_error`` is "raise".
        """
        return self._checkpoints.saver.finish(wait)

    def was_marked(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path`` with NaN or infinity where values must be finite."""
        return self._checkpoints.saver.was_marked(path)

    def has_saved(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path``, and it was complete."""
        return self._checkpoints.saver.has_saved(path)

    def save_failed(self, path: str | Path) -> bool:
        """True if the last save of the checkpoint ``path`` failed; one before may have been complete."""
        return path in self._checkpoints.saver.failed

    def saved_here(self) -> Path | None:
        """The complete checkpoint of the present position in training, if this run saved one to go on from."""
        return self._checkpoints.saver.saved_here()

    saving_s: float = _reads("_checkpoints.saver.seconds", "Seconds that training has waited for saves so far.")

    def export_hugging_face(self, folder: str | Path, **options: Any) -> list[Path]:
        """Write the model of transformers that is trained to a folder which ``from_pretrained`` loads; a collective.

        Every process writes its own part beside the folder first, as in a checkpoint, so that none holds the whole model.
        Frozen parameters are always written, and adapters of LoRA are merged into their base. Before training, weights are
        those of ``load_from`` or ``resume``; the runner may be one that does not train.

        Args:
            folder: the folder to write, which every process reaches.
            options: ``tokenizer``, ``dtype`` and ``max_shard_size`` of ``export_hugging_face`` in flextrain.core.checkpoint.

        Returns:
            The files that were written.

        Raises:
            CheckpointError: the model is none of transformers, or the folder holds one already.
            ConfigError: an unknown option.
        """
        return self._checkpoints.export_hugging_face(folder, options)

    def publish(self, target: Target, *, dtype: str | torch.dtype | None = None) -> Any:
        """Give the whole weights, as they are now, to a target such as an inference engine; a collective, between two updates.

        Rank 0 calls ``target.publish(weights)`` with ``flextrain.LiveWeights``: the tensors, names and files of
        ``export_hugging_face``, or, of a model that is none of transformers, of ``export_weights``. What it reads is gathered one
        tensor at a time. The other processes wait and send what is asked for, at most ``timeout_s`` of the strategy from one
        tensor to the next. Adapters of LoRA are merged. Extra state of modules is not among the weights.

        Args:
            target: an object with a method ``publish``, such as those of the plug-in flextrain-publish.
            dtype: of floating-point tensors, such as "bfloat16"; default: their own, float32 where training has master weights.

        Returns:
            What ``target.publish`` has returned, on every process; it must be picklable.

        Raises:
            ConfigError: the target has no such method, or the dtype is unknown.
            CheckpointError: the weights do not make up the model or are quantised, adapters cannot be merged, or it is called in a
                forward of a model whose parameters are then elsewhere.
            FlexTrainError: on every process, if ``target.publish`` raises on rank 0; that one gets its own error.
        """
        return self._checkpoints.publish(target, dtype)

    def use_data_seed(self, seed: int) -> None:
        """Set the seed of the data order to that of the resumed run."""
        self.seed = seed
        self.train_loop.data.use_seed(seed)

    # Hooks

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

    # What may be built

    @AlsoOnClass
    def build_dataloader(
        self: RunnerNames | None, dataloader: Any, seed: int | None = None, diff_rank_seed: bool = False
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
                dataloader,
                training=True,
                seed=seed or 0,
                shard=None,
                where="dataloader",
                logger=logging.getLogger("flextrain"),
            )
        return self._parts.build_dataloader(dataloader, "dataloader", True, self.seed if seed is None else seed)

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
        return self._parts.build_train_loop(loop)

    def build_val_loop(self, loop: BaseLoop | Mapping[str, Any]) -> BaseLoop:
        """Build a loop on the validation data; ``loop`` is such a loop, or as ``val_cfg``."""
        return self._parts.build_eval_loop(loop, "val")

    def build_test_loop(self, loop: BaseLoop | Mapping[str, Any]) -> BaseLoop:
        """Build one on the test data; ``loop`` as for ``build_val_loop``."""
        return self._parts.build_eval_loop(loop, "test")

    def build_log_processor(self, log_processor: Any) -> Any:
        """Build a LogProcessor; the argument is as the runner's ``log_processor``."""
        return build_log_processor(log_processor, not self._parts.config.trains or self.train_loop.by_epoch)

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
        self._parts.set_up()
        if self._parts.has_engine or self.strategy.topology.model is not None:
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
        self._parts.set_up()
        optim = self.optim_wrapper
        built = build_schedulers(scheduler, optim, self._parts.compared_train_loop())
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
            self.logger.info(self._parts.scale_lr(optim_wrapper, options.base_batch_size))


for _name in INSTEAD:
    setattr(RunnerNames, _name, _Missing(_name))
