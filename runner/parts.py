"""Parts: the components of a run, each built when it is first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..core.config import check_call
from ..core.errors import ConfigError
from ..core.tta_model import BaseTTAModel, module_to_set_up, not_trainable
from ..core.version import __version__
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..strategies.base import Strategy
from .also_on_class import AlsoOnClass
from .arguments import Checked
from .auto_batch_size import with_batch_size
from .build import build_model, build_schedulers, scale_lr
from .configuration import eval_loop_class, merging_model, train_loop_class
from .data.dataloaders import build_dataloader
from .data.example import example_batch
from .data.user_loaders import batch_size
from .doubts import doubts
from .from_files import recorded
from .hooks import Hook, HookDispatcher
from .hooks.build import build_hook, priority_of
from .loops.base import BaseLoop
from .loops.step import Stepper
from .loops.train import VALIDATION_KEYS, TrainLoop
from .metrics.evaluator import Evaluator, build_evaluator, check_evaluator
from .missing_names import MissingNames
from .options import FixedOptions
from .reporting import MessageHub, Reporter, Visualizer, build_log_processor
from .reporting.model_outline import ModelOutline, outline
from .watchdog import Watchdog

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
        return self.strategy.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.strategy.world_size

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
        given = with_batch_size(self, self._given["train_dataloader"], self._resumed_from)
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
        self.outline: ModelOutline = outline(module, self.strategy.shape_of, self._changes)  # before it is distributed
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
