"""Parts: the model, the optimizer, the data, the loops and the schedules of a run, each built when it is first needed."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..core.base.errors import ConfigError
from ..core.base.registry import MODELS
from ..core.hugging_face.pretrained import Description, Pretrained, describe, pretrained_in
from ..core.model.base_model import BaseModel, BaseTTAModel, module_to_set_up, overrides, parts_to_initialise
from ..core.model.token_counts import count_tokens
from ..core.torch_compat.torch_private import is_compiled_wrapper
from ..optim.schedulers import build_param_schedulers
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..strategies.base import NOTHING, Strategy
from ..strategies.parts import construct, expect_values, init_weights, shape_of
from .config import RunConfig, doubts
from .data.checks import AUTO
from .data.dataloaders import build_dataloader
from .data.first_batches import example_batch
from .data.user_loaders import batch_size
from .loops.base import BaseLoop
from .loops.step import Stepper
from .loops.train import VALIDATION_KEYS, EvalConfig, TrainConfig, TrainLoop
from .reporting.model_outline import ModelOutline, outline
from .resume.weights import ToRead, read_pretrained
from .transforms.apply import transform

if TYPE_CHECKING:
    from .run import Run, TrainingProgress

logger = logging.getLogger("flextrain")


class Parts:
    """What a run is built of. ``set_up`` builds the model and the optimizer, once; the loops are None until they are asked for.

    Args:
        run: the runner, which loops get.
        config: the checked configuration.
        as_current: context in which what the run has one of is found without being given.

    Attributes:
        model: the callable of training, the user's module or the strategy's wrapper around it.
        outline: how many parameters the parts of the model have.
        has_engine: whether the strategy makes updates in a way of its own.
        hugging_face: what exports have to know of a model of transformers; None for other models, and before it is built.
        schedulers: the parameter schedulers of each optimizer, by its name.
        resumed_from: the checkpoint that the runner's ``resume`` was given.
        is_closed: whether the run has ended for good, so that nothing is built any more.
    """

    takes_mmengines_models = False
    """Whether subclasses of MMEngine's BaseModel are called as they expect."""

    outline: ModelOutline

    def __init__(self, run: Run, config: RunConfig, as_current: Callable[[], AbstractContextManager[None]]) -> None:
        self._run, self.config, self._as_current = run, config, as_current
        self.optim_wrapper: OptimWrapper | OptimWrapperDict | None = config.optim_wrapper
        self.model: nn.Module | None = None
        self.stepper: Stepper | None = None
        self.train_loop: TrainLoop | None = None
        self.val_loop: BaseLoop | None = None
        self.test_loop: BaseLoop | None = None
        self.schedulers: dict[str, list[Any]] = {}
        self.has_engine = False
        self.hugging_face: Description | None = None
        self.resumed_from: Path | None = None
        self.is_closed = False

    def set_up(self) -> None:
        """Build the model and set it up, with the optimizer, in the strategy; only once."""
        if self.is_closed:
            raise ConfigError("FlexibleRunner: this run is closed, make another runner")
        if self.model is not None:
            return
        run, strategy, trains = self._run, self._run.strategy, self.config.trains
        with self._as_current():
            whole = self.build_model()
            model: nn.Module = whole
            changes: tuple[tuple[str, str], ...] = ()
            if self.config.transforms:
                model, changes = transform(whole, self.config.transforms, strategy, run.seed, run.options.load_from)
        pretrained: list[ToRead] = []
        if "transformers" in sys.modules:  # what makes a model of transformers has imported it
            self.hugging_face = describe(model)  # before a strategy changes the configuration
            pretrained = [ToRead(source, model) for source in pretrained_in(model)]
        expect_values(strategy, {name for part in pretrained for name in part.names.values()})
        module = module_to_set_up(model, trains=trains)
        loaders = ["train_dataloader"] if trains else ["val_dataloader", "test_dataloader"]
        strategy.example = partial(example_batch, run, loaders)
        self.outline = outline(module, partial(shape_of, strategy), changes)  # before it is distributed
        self.model, optim = strategy.setup(module, self.optim_wrapper)
        self.has_engine, self.optim_wrapper = optim is not self.optim_wrapper, optim
        if self.train_loop is not None:  # options of a strategy may set the number of micro-batches
            self.train_loop.data.accumulate = run.accumulate
        self.stepper = Stepper(strategy, self.model, optim)
        if isinstance(model, BaseTTAModel):
            self.stepper.merge_with(model)
        run.logger.info(f"Precision: {strategy.precision_report()}")
        if trains and strategy.device.type != "cpu":
            self._tell_choices()
        scale = run.options.auto_scale_lr
        if optim is not None and scale is not None and scale.enable:
            run.logger.info(self.scale_lr(optim, scale.base_batch_size))
        for part in pretrained:
            read_pretrained(run, part)

    def build_model(self) -> nn.Module:
        """Build the user's module, with its initial weights, before it is transformed and distributed."""
        given = self.config.given
        return build_model(
            given["model"], given["data_preprocessor"], self._run.strategy, for_training=self.config.trains
        )

    def set_up_schedulers(self) -> None:
        """Build the schedulers of the training loop, once, and log what the configuration rarely means."""
        loop = self.compared_train_loop()
        if not self.schedulers and self.optim_wrapper is not None:
            given = self.config.given["param_scheduler"]
            none: dict[str, list[Any]] = {name: [] for name in self.optim_wrapper.wrappers}
            self.schedulers = none if given is None else build_schedulers(given, self.optim_wrapper, loop)
            for line in doubts(self.config, loop, self.optim_wrapper, self.schedulers):
                self._run.logger.warning(line)

    def build_dataloader(self, cfg: Any, where: str, training: bool, seed: int) -> Any:
        """Build a dataloader of one process's share of the data; ``where`` is the key, for messages."""
        strategy, logger = self._run.strategy, self._run.logger
        pins = strategy.device.type != "cpu" and self._can_pin()
        return build_dataloader(
            cfg, training=training, seed=seed, shard=strategy.topology.shard, where=where, logger=logger, pins=pins
        )

    def _tell_choices(self) -> None:
        from .reporting.choices import tell_choices

        tell_choices(self._run, self.config.given["train_dataloader"], self._can_pin())

    def _can_pin(self) -> bool:
        from ..core.device.accelerator import can_pin

        return can_pin(self._run.strategy.device.type)

    def build_train_loop(self, loop: Any) -> TrainLoop:
        """Build a training loop on the training data; ``loop`` is such a loop, or as ``train_cfg``."""
        if isinstance(loop, TrainLoop):
            return loop
        run, given = self._run, self.config.given
        config = self.config.train if loop is given["train_cfg"] else None
        config = config or TrainConfig.read(loop)
        # MMEngine's configurations have such keys even without validation.
        if not self.config.validates and (idle := VALIDATION_KEYS & config.arguments.keys()):
            names = ", ".join(f"train_cfg.{name}" for name in sorted(idle))
            run.logger.warning(f"{names}: without effect, there is no validation (val_dataloader)")
        data = given["train_dataloader"]
        if isinstance(data, Mapping) and data.get("batch_size") == AUTO:
            from .auto_batch_size import with_batch_size

            data = with_batch_size(run, self, data)
        loader = self.build_dataloader(data, "train_dataloader", True, run.seed)
        return config.loop(runner=run, dataloader=loader, **config.arguments)  # type: ignore[no-any-return]

    def build_eval_loop(self, loop: Any, mode: str) -> BaseLoop:
        """Build a loop on the validation or test data; ``loop`` is such a loop, or as ``val_cfg``."""
        if isinstance(loop, BaseLoop):
            return loop
        given = self.config.given
        config = (self.config.val if mode == "val" else self.config.test) if loop is given[f"{mode}_cfg"] else None
        config = config or EvalConfig.read(loop, mode)
        evaluator, where = given[f"{mode}_evaluator"], f"{mode}_dataloader"
        loader = self.build_dataloader(given[where], where, False, self._run.seed)
        return config.loop(  # type: ignore[no-any-return]
            runner=self._run, dataloader=loader, evaluator=evaluator, **config.arguments
        )

    def compared_train_loop(self) -> TrainingProgress:
        """Return the training loop, whose lengths of all processes are known: an epoch may be shorter than their data."""
        loop = self._run.train_loop
        loop.data.compare_lengths(float(self._run.strategy.config.timeout_s), self._run.strategy.topology)
        return loop

    def scale_lr(self, optim: OptimWrapper | OptimWrapperDict, base: int) -> str:
        """Scale learning rates linearly with the samples per update, and return a description for the log.

        Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017.
        """
        size = batch_size(self._run.train_dataloader)
        if size is None:
            raise ConfigError("auto_scale_lr: the batch size of train_dataloader is not known, scale the rate yourself")
        real = size * self._run.strategy.topology.data.count * optim.accumulate
        for group in optim.param_groups:
            group["lr"] = group["lr"] * (real / base)  # groups may share a tensor
        return f"Learning rates times {real / base:.4g}: {real} samples per update, chosen for {base}"

    def end_workers(self) -> None:
        """End workers that dataloaders keep between passes, which the garbage collector does in five seconds each."""
        for loop in (self.train_loop, self.val_loop):
            if loop is not None:
                loop._end_workers()

    def let_go(self) -> None:
        """Release the memory of what was built."""
        self.model = self.stepper = self.optim_wrapper = None
        self.schedulers = {}


# Build a model, and the schedulers of a training loop.


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


def _tell_of_two(model: Mapping[str, Any], preprocessor: Any) -> None:
    if "data_preprocessor" in model and repr(model["data_preprocessor"]) != repr(preprocessor):
        logger.warning(
            "data_preprocessor: model.data_preprocessor is another and is used, as in MMEngine; give one of them"
        )


def build_model(given: Any, preprocessor: Any, strategy: Strategy, *, for_training: bool) -> nn.Module:
    """Build the user's module from a module, a configuration or a function, in the strategy's ``building``."""
    if isinstance(given, nn.Module):
        _finish(given, preprocessor, strategy, for_training=for_training)
        return given
    if isinstance(given, Mapping) and preprocessor is not None:
        _tell_of_two(given, preprocessor)
        given, preprocessor = {"data_preprocessor": preprocessor, **given}, None
    reads_nothing = strategy.building() is not NOTHING

    def make() -> nn.Module:
        with _reading_nothing() if reads_nothing else NOTHING:
            if not isinstance(given, (Mapping, str)):
                model: Any = given()
            elif (pretrained := Pretrained.of(given, "model")) is not None:
                model = pretrained.build()
            else:
                model = MODELS.build(given, "model")
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


def build_schedulers(
    given: Any, optim: OptimWrapper | OptimWrapperDict, loop: TrainingProgress
) -> dict[str, list[Any]]:
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
