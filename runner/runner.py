"""FlexibleRunner: takes the configuration of a run, builds its parts when they are needed, and trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..core.checkpoint import (
    PendingSave,
    Staging,
    find_latest,
    make_writable,
    passed_over,
    place,
    what_is_not_finite,
)
from ..core.comm.collectives import broadcast_object
from ..core.config import check_call, check_keywords, known_keywords, validate
from ..core.errors import CheckpointError, ConfigError
from ..core.registry import LOOPS
from ..core.seed import set_seed
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..strategies.base import Strategy
from . import configuration
from .arguments import check_everything
from .build import apply_environment, build_model, build_schedulers, scale_lr
from .data.dataloaders import build_dataloader
from .data.user_loaders import Batches, batch_size
from .ending import say_how_it_ended, terminable
from .hooks import Hook, HookDispatcher
from .hooks.build import build_hook, priority_of
from .loops.evaluate import EvalLoop
from .loops.step import Stepper
from .loops.train import VALIDATION_KEYS, TrainLoop
from .reporting import MessageHub, build_log_processor, build_reporters, setup_logger
from .resume import checkpoint
from .run_folders import new_log_folder, occupied
from .same_configuration import check_agreement


class FlexibleRunner:
    """Trains, validates and tests a model; a strategy says how it is spread over devices.

    Everything is checked when the runner is made; data, model and optimizer are built when they are first needed.

    Args:
        model: a module, ``dict(type=...)``, or a function without arguments that gives a module.
        work_dir: folder for logs and checkpoints.
        experiment_name: default: the work directory's name and the time.
        train_dataloader, optim_wrapper, train_cfg: training; all three or none. ``train_cfg`` is
            ``dict(by_epoch=True, max_epochs=..., val_interval=1)`` or ``dict(by_epoch=False, max_iters=...)``. Dataloaders
            are ``dict(dataset=..., batch_size=...)``, a DataLoader, a list of batches, or anything else that gives batches
            when it is iterated over, or a function that returns it for every pass.
        val_dataloader, val_cfg, val_evaluator: validation; all three or none.
        test_dataloader, test_cfg, test_evaluator: testing; all three or none.
        strategy: a Strategy, ``dict(type=...)``, or None: one device for one process, DDP for several.
        auto_scale_lr: ``dict(base_batch_size=...)`` scales learning rates by the number of samples per update.
        param_scheduler: one or a list; for several optimizers a dict of them by the optimizer's name.
        default_hooks: changes to the default hooks by name: runtime_info, timer, sampler_seed, logger, param_scheduler,
            nonfinite, checkpoint; None leaves one out.
        custom_hooks: further hooks.
        data_preprocessor: of a model that is given as a configuration, or has an attribute of this name.
        load_from: a checkpoint or file with weights to start from; with ``resume=True`` the checkpoint to resume.
        resume: True continues from the newest checkpoint with finite weights in ``work_dir``, if there is one; a path from that one.
            ``dict(path=None, optimizer=True, param_scheduler=True, random=True, hooks=True, logs=True, data=True)`` says
            what of it is left out.
        launcher: who started the processes; None finds out.
        env_cfg: ``dict(cudnn_benchmark=False, mp_cfg=..., dist_cfg=..., resource_limit=4096, nonfinite="warn")``; what
            ``nonfinite`` may be, "warn", "raise", "skip" or "ignore", NonFiniteHook explains.
        log_processor: what log lines show.
        log_level: "INFO" and so on.
        visualizer: where scalars are kept: reporters, or MMEngine's ``dict(type='Visualizer', vis_backends=[...])``. JSON
            lines are always written, unless the list is empty or the dict says ``json_lines=False``.
        default_scope: None or "flextrain"; registries have no scopes.
        randomness: ``dict(seed=None, diff_rank_seed=False, deterministic=False)``.
        compile: True or arguments of ``torch.compile``; also as ``cfg=dict(compile=...)``.
        cfg: the whole configuration, for the record; of what MMEngine takes from there, only ``compile`` is.

    Raises:
        ConfigError: anything that can be known to be wrong before a process group or a model exists.
    """

    @known_keywords(configuration.ELSEWHERE)
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | Mapping[str, Any],
        work_dir: str | Path = "work_dirs",
        experiment_name: str | None = None,
        train_dataloader: Batches | Mapping[str, Any] | None = None,
        optim_wrapper: Any = None,
        train_cfg: Mapping[str, Any] | None = None,
        val_dataloader: Batches | Mapping[str, Any] | None = None,
        val_cfg: Mapping[str, Any] | None = None,
        val_evaluator: Any = None,
        test_dataloader: Batches | Mapping[str, Any] | None = None,
        test_cfg: Mapping[str, Any] | None = None,
        test_evaluator: Any = None,
        strategy: Strategy | Mapping[str, Any] | str | type[Strategy] | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
        param_scheduler: Any = None,
        default_hooks: Mapping[str, Any] | None = None,
        custom_hooks: Sequence[Any] | None = None,
        data_preprocessor: nn.Module | Mapping[str, Any] | None = None,
        load_from: str | Path | None = None,
        resume: bool | str | Path | Mapping[str, Any] = False,
        launcher: str | None = None,
        env_cfg: Mapping[str, Any] | None = None,
        log_processor: Any = None,
        log_level: str | int = "INFO",
        visualizer: Any = None,
        default_scope: str | None = None,
        randomness: Mapping[str, Any] | None = None,
        compile: bool | dict[str, Any] | None = None,
        cfg: dict[str, Any] | None = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        checked = check_everything(given)
        self.options = options = checked.options
        self.optim_wrapper: OptimWrapper | OptimWrapperDict | None = checked.optim_wrapper
        self.strategy: Strategy = checked.strategy
        self._trains = checked.trains
        self._given = given
        apply_environment(options.env_cfg)
        self.strategy.setup_environment()
        self.strategy.meet("FlexibleRunner()")
        check_agreement(given, checked)
        self.work_dir = str(Path(work_dir).absolute())
        make_writable(Path(self.work_dir), "work_dir")
        self.timestamp = new_log_folder(Path(self.work_dir))
        self.experiment_name = experiment_name or f"{Path(self.work_dir).name}_{self.timestamp}"
        self.log_dir = str(Path(self.work_dir) / self.timestamp)
        self.logger = setup_logger(log_level, Path(self.log_dir) / f"{self.timestamp}.log", self.rank)
        randomness_options = options.randomness
        self.seed = set_seed(
            randomness_options.seed,
            diff_rank_seed=randomness_options.diff_rank_seed,
            deterministic=randomness_options.deterministic,
        )
        self.logger.info(
            f"{type(self.strategy).__name__} on {self.world_size} process{'es' if self.world_size > 1 else ''}, "
            f"device {self.strategy.device}, seed {self.seed}, work_dir {self.work_dir}"
        )
        self.message_hub = MessageHub()
        self.log_processor = build_log_processor(log_processor, checked.by_epoch)
        self.reporters = build_reporters(visualizer, Path(self.log_dir) / "vis_data")
        self.hook_calls = HookDispatcher()
        for hook, priority in checked.hooks:
            self.register_hook(hook, priority)

        self.late_parameters: list[str] = []  # those that the log has named
        self._model: nn.Module | None = None
        self._stepper: Stepper | None = None
        self._train_loop: TrainLoop | None = None
        self._val_loop: EvalLoop | None = None
        self._test_loop: EvalLoop | None = None
        self.schedulers: dict[str, list[Any]] = {}
        self._started = False  # whether training has what it begins with
        self._has_weights = False  # whether the model has, which is enough for evaluation
        self._has_begun = False
        self._depth = 0
        self._pending_save: PendingSave | None = None
        self._staging = Staging()
        self._marked: set[str] = set()  # paths of checkpoints with NaN or infinity
        self._last_is_good = True

    @classmethod
    def from_cfg(cls, cfg: Mapping[str, Any]) -> FlexibleRunner:
        """A runner from one dict with the arguments as keys; the dict is kept as ``cfg`` for the record.

        Raises:
            ConfigError: a key that is no argument, or a wrong value.
        """
        if not isinstance(cfg, Mapping):
            raise ConfigError(f"from_cfg: {cfg!r} is not allowed, give a dict with the arguments as keys")
        check_keywords(cfg.keys() & configuration.ELSEWHERE, (), configuration.ELSEWHERE)
        check_call(cls, cfg, "")
        return cls(**{"cfg": dict(cfg), **cfg})

    # Facts

    @property
    def version(self) -> str:
        """flextrain's version."""
        from .. import __version__

        return __version__

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.strategy.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.strategy.world_size

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world_size > 1

    @property
    def accumulate(self) -> int:
        """Micro-batches per update."""
        return self.optim_wrapper.accumulate if self.optim_wrapper else 1

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self._train_loop.epoch if self._train_loop else 0

    @property
    def iter(self) -> int:
        """Updates done."""
        return self._train_loop.iter if self._train_loop else 0

    @property
    def max_epochs(self) -> int:
        """Epochs to do."""
        return self.train_loop.max_epochs

    @property
    def max_iters(self) -> int:
        """Updates to do."""
        return self.train_loop.max_iters

    @property
    def hooks(self) -> list[Hook]:
        """The hooks in the order in which they run."""
        return self.hook_calls.hooks

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints are saved: the work directory, unless a hook saves them elsewhere."""
        return next((path for hook in self.hooks if (path := hook.checkpoint_dir(self))), Path(self.work_dir))

    @property
    def param_schedulers(self) -> Any:
        """The parameter schedulers: a list, or a dict of lists for several optimizers."""
        return self.schedulers if isinstance(self.optim_wrapper, OptimWrapperDict) else self.schedulers.get("", [])

    # Parts, built when they are first asked for

    @property
    def model(self) -> nn.Module:
        """What is called in training: the user's module, or the strategy's wrapper of it."""
        self._setup_model()
        assert self._model is not None
        return self._model

    @property
    def stepper(self) -> Stepper:
        """Calls the model the way it wants to be called."""
        self._setup_model()
        assert self._stepper is not None
        return self._stepper

    @property
    def train_loop(self) -> TrainLoop:
        """The training loop."""
        if self._train_loop is None:
            if not self._trains:
                raise ConfigError("train_cfg: missing, training needs train_dataloader, train_cfg and optim_wrapper")
            loader = self._build_dataloader("train")
            kind, kwargs = configuration.train_loop_class(self._given["train_cfg"])
            # MMEngine's configurations have such keys whether there is validation or not.
            if self._given["val_dataloader"] is None and (idle := VALIDATION_KEYS & kwargs.keys()):
                names = ", ".join(f"train_cfg.{name}" for name in sorted(idle))
                self.logger.warning(f"{names}: without effect, there is no validation (val_dataloader)")
            self._train_loop = kind(runner=self, dataloader=loader, **kwargs)
        return self._train_loop

    @property
    def val_loop(self) -> EvalLoop | None:
        """The validation loop; None when validation is not configured."""
        if self._val_loop is None and self._given["val_dataloader"] is not None:
            self._val_loop = self._build_eval_loop("val")
        return self._val_loop

    @property
    def test_loop(self) -> EvalLoop | None:
        """The test loop; None when testing is not configured."""
        if self._test_loop is None and self._given["test_dataloader"] is not None:
            self._test_loop = self._build_eval_loop("test")
        return self._test_loop

    @property
    def train_dataloader(self) -> Any:
        """The training data: a DataLoader, or what was given in its place."""
        return self.train_loop.dataloader

    @property
    def val_dataloader(self) -> Any:
        """The validation data."""
        return self.val_loop.dataloader if self.val_loop else None

    @property
    def test_dataloader(self) -> Any:
        """The test data."""
        return self.test_loop.dataloader if self.test_loop else None

    # What users call

    def train(self) -> nn.Module:
        """Train, from the beginning or from the checkpoint to resume; returns the user's module."""
        self.strategy.meet("train()")
        loop = self.train_loop
        self._setup_model()
        self._setup_schedulers()
        with occupied([Path(self.work_dir), self.checkpoint_dir]), self._running():
            self._load_or_resume()
            self._say_if_done()
            if loop.is_torn:  # train() was called again, and its update begins anew
                self.strategy.drop_gradients()
                loop.is_torn = False
            loop.run()
        return self.strategy.module

    def val(self) -> dict[str, Any]:
        """Validate once; returns the metrics."""
        return self._evaluate("val")

    def test(self) -> dict[str, Any]:
        """Test once; returns the metrics."""
        return self._evaluate("test")

    def register_hook(self, hook: Hook | Mapping[str, Any], priority: int | str | None = None) -> None:
        """Add a hook; behind those of the same priority."""
        built = build_hook(hook, "hook")
        self.hook_calls.register(built, priority_of(built, hook, "hook") if priority is None else priority)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Run every hook at the point ``fn_name``."""
        self.hook_calls.call(fn_name, self, **kwargs)

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        async_save: bool = False,
        verify: bool = False,
    ) -> str:
        """Write the checkpoint directory ``out_dir/filename``; every process must call it.

        One that can be resumed, with the optimizer, becomes what ``latest`` names.

        Args:
            meta: plain values to put beside the state.
            async_save: return as soon as the state is copied to the CPU, and write it in the background; see
                ``finish_saving``. The copy takes as much memory as this process writes, which is kept for the next one.
            verify: read what was written, before it counts as complete.

        Raises:
            CheckpointError: it could not be saved, or the one before could not, in the background.
        """
        self.finish_saving()
        path = place(out_dir) / filename
        self._pending_save = checkpoint.save(
            self,
            path,
            save_optimizer=save_optimizer,
            save_param_scheduler=save_param_scheduler,
            meta=meta,
            in_background=async_save,
            staging=self._staging,
            verify=verify,
        )
        if not async_save:
            self._note_saved(path)
        return str(path)

    def finish_saving(self, wait: bool = True) -> bool:
        """Wait for the checkpoint that is being written in the background; ``wait=False`` only looks whether it is done.

        With ``wait=False`` one process may find it done an iteration before another does.

        Returns:
            Whether nothing is being written any more.

        Raises:
            CheckpointError: it could not be saved; every process has logged the reason when it happened.
        """
        pending = self._pending_save
        if pending is None:
            return True
        if not wait and not pending.is_done():
            return False
        pending.join()  # if that is interrupted, it is still under way
        self._pending_save = None
        pending.wait()
        self._note_saved(pending.path)
        self.logger.info(f"Checkpoint {pending.path.name} is complete, written in {pending.seconds:.1f} s")
        return True

    def _note_saved(self, path: Path) -> None:
        """Remember whether the checkpoint that is complete now is marked; known on every process."""
        keys, was_good = self._staging.nonfinite, self._last_is_good
        self._last_is_good = not keys
        if not keys:
            self._marked.discard(str(path))
            return
        self._marked.add(str(path))
        self.logger.log(
            logging.WARNING if was_good else logging.INFO,  # once in a row is enough
            f"Checkpoint {path.name} holds NaN or infinity in {what_is_not_finite(keys)}: it is marked, resume=True "
            "passes it over, and no older one is deleted for it",
        )

    def is_marked(self, path: str | Path) -> bool:
        """Whether the checkpoint that this run has saved to ``path`` holds NaN or infinity where it should not."""
        return str(path) in self._marked

    def load_checkpoint(
        self,
        filename: str | Path,
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
    ) -> None:
        """Fill the model with weights; every process must call it.

        Args:
            filename: whatever ``load_from`` takes.
            strict: raise if any name or shape does not fit, which is logged otherwise.
            revise_keys: (pattern, replacement) pairs of ``re.sub``, each applied to all names of the file in this order.

        Raises:
            ConfigError: ``strict`` is no bool, or ``revise_keys`` no such pairs; nothing has been read then.
            CheckpointError: nothing fits, or, with ``strict``, not everything; or the file cannot be read.
        """
        configuration.check_loading(strict, revise_keys)
        self.strategy.meet("load_checkpoint()")
        self._setup_model()
        self._begin()
        checkpoint.load_weights(self, place(filename), strict=strict, revise_keys=revise_keys)
        self._has_weights = True
        self.logger.info(f"Loaded the weights of {filename}")

    @known_keywords()
    def resume(
        self,
        filename: str | Path,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        *,
        random: bool = True,
        hooks: bool = True,
        logs: bool = True,
        data: bool = True,
    ) -> None:
        """Bring everything to where the checkpoint was written, but for what is left out; every process must call it.

        In the middle of an epoch the run goes on with the next sample, on any number of processes and in batches of any
        size. Random states come back among the same number of processes; among another, every process draws from a seed
        made of the run's, the iteration and its rank.

        Args:
            filename: the checkpoint directory.
            resume_optimizer, resume_param_scheduler, random, hooks, logs, data: see ``resume`` of the runner.

        Raises:
            CheckpointError: a piece is missing or damaged, or does not fit this run; it says how to leave the piece out.
            ConfigError: an unknown keyword.
        """
        options = {"optimizer": resume_optimizer, "param_scheduler": resume_param_scheduler}
        options |= {"random": random, "hooks": hooks, "logs": logs, "data": data}
        checked = validate(configuration.Resume, options, "resume")
        self.strategy.meet("resume()")
        self._resume(place(filename), checked)

    def _resume(self, path: Path, options: configuration.Resume) -> None:
        self._setup_model()
        self._setup_schedulers()
        self._begin()
        checkpoint.resume(self, path, options)
        self._started = True
        left_out = [name for name, value in options if value is False]
        but = f", without {', '.join(left_out)}" if left_out else ""
        self.logger.info(f"Resumed from {path}{but}: epoch {self.epoch}, iteration {self.iter}")

    def use_data_seed(self, seed: int) -> None:
        """Order the training data by another seed, that of a run which is continued."""
        self.seed = seed
        self.train_loop.data.use_seed(seed)

    # How parts are built

    def _build_dataloader(self, mode: str) -> Any:
        return build_dataloader(
            self._given[f"{mode}_dataloader"],
            training=mode == "train",
            seed=self.seed,
            shard=self.strategy.data_shard,
            where=f"{mode}_dataloader",
            logger=self.logger,
        )

    def _build_eval_loop(self, mode: str) -> EvalLoop:
        loader, cfg = self._build_dataloader(mode), dict(self._given[f"{mode}_cfg"])
        kind = LOOPS.get(cfg.pop("type", "ValLoop" if mode == "val" else "TestLoop"), f"{mode}_cfg.type")
        loop: EvalLoop = kind(runner=self, dataloader=loader, evaluator=self._given[f"{mode}_evaluator"], **cfg)
        return loop

    def _setup_model(self) -> None:
        """Build the model and hand it, with the optimizer, to the strategy; once."""
        if self._model is not None:
            return
        given = self._given
        model = build_model(given["model"], given["data_preprocessor"], self.strategy, for_training=self._trains)
        self._model, optim = self.strategy.setup(model, self.optim_wrapper)
        self.optim_wrapper = optim
        if self._train_loop is not None:  # a strategy may have options that say how many micro-batches an update has
            self._train_loop.data.accumulate = self.accumulate
        self._stepper = Stepper(self.strategy, self._model, optim)
        self.logger.info(f"Precision: {self.strategy.precision_report()}")
        scale = self.options.auto_scale_lr
        if optim is not None and scale is not None and scale.enable:
            size, shards = batch_size(self.train_dataloader), self.strategy.data_shard[1]
            self.logger.info(scale_lr(optim, size, shards, scale.base_batch_size))

    def _setup_schedulers(self) -> None:
        # An epoch may be shorter than this process's data.
        self.train_loop.data.meet(float(self.strategy.config.timeout_s))
        if not self.schedulers and self.optim_wrapper is not None:
            self.schedulers = build_schedulers(self._given["param_scheduler"], self.optim_wrapper, self.train_loop)

    def _source(self) -> tuple[str | Path | None, configuration.Resume | None]:
        """The checkpoint or file to begin with, and what is to be resumed of it; None: it gives weights."""
        resumed, load_from = self.options.resume_options, self.options.load_from
        if resumed is None:
            return load_from, None
        return resumed.path or load_from or self._newest(), resumed

    def _newest(self) -> Path | None:
        """The newest checkpoint as rank 0 sees it: other machines' view of a shared folder may be seconds old."""
        found, wrong, marked = None, None, []
        if self.rank == 0:
            try:
                found = find_latest(self.checkpoint_dir)
                marked = passed_over(self.checkpoint_dir, found)
            except CheckpointError as error:
                wrong = str(error)
        # As text, because not everything that behaves like a path can be sent.
        name, wrong = broadcast_object((found and str(found), wrong))
        if wrong:
            raise CheckpointError(wrong)
        if marked:  # on rank 0, which is the one that is heard
            self.logger.warning(
                f"{', '.join(marked)} in {self.checkpoint_dir}: passed over, with NaN or infinity in the weights; "
                f'resume="path" takes one of them all the same'
            )
        return place(name) if name else None

    def _load_or_resume(self) -> None:
        if self._started:
            return
        source, resumed = self._source()
        if source is not None and resumed:
            self._resume(place(source), resumed)
        elif source is not None:
            if not self._has_weights:
                self.load_checkpoint(source)
        elif resumed:
            self.logger.info(f"Nothing to resume in {self.checkpoint_dir}, training starts from the beginning")
        self._started = True

    def _say_if_done(self) -> None:
        loop = self.train_loop
        key, done, goal = (
            ("max_epochs", loop.epoch, loop.max_epochs) if loop.by_epoch else ("max_iters", loop.iter, loop.max_iters)
        )
        if done >= goal:
            self.logger.info(f"Nothing is left to train: {done} of {key}={goal} are done")

    def _evaluate(self, mode: str) -> dict[str, Any]:
        loop = self.val_loop if mode == "val" else self.test_loop
        if loop is None:
            parts = f"{mode}_dataloader, {mode}_cfg and {mode}_evaluator"
            raise ConfigError(f"{mode}_cfg: missing, runner.{mode}() needs {parts}")
        self.strategy.meet(f"{mode}()")
        self._setup_model()
        with self._running():
            source, _ = self._source()
            if source is not None and not self._started and not self._has_weights:
                self.load_checkpoint(source)  # train() may have more to take from it
            metrics: dict[str, Any] = loop.run()
        return metrics

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._depth:  # a hook evaluates in the middle of a run
            yield
            return
        self._depth = 1
        with terminable() as termination:
            try:
                self._begin()
                yield
                self.finish_saving()
                self.call_hook("after_run")
            except BaseException as error:
                reason = termination.end(error)
                self._on_exception(reason)
                if reason is error:
                    raise
                raise reason from error
            finally:
                self._has_begun, self._depth = False, 0

    def _on_exception(self, error: BaseException) -> None:
        """Tell the log and every hook, also when another one fails at it; the first error is the one that is raised."""
        try:
            self.finish_saving()
        except CheckpointError as second:
            self.logger.error(str(second))
        for method in (self._log_exception, *self.hook_calls["on_exception"]):
            try:
                method(self, exception=error)
            except Exception as second:  # reported, and must not hide the error that it follows
                self.logger.error(f"{type(method.__self__).__name__}.on_exception: {second}", exc_info=second)  # type: ignore[attr-defined]

    def _log_exception(self, runner: FlexibleRunner, exception: BaseException) -> None:
        say_how_it_ended(runner, exception, has_place=self._started)

    def _begin(self) -> None:
        """Let hooks make what a checkpoint is loaded into, once per run."""
        if not self._has_begun:
            self._has_begun = True
            self.hook_calls.refresh()
            self.call_hook("before_run")

    @property
    def cfg(self) -> dict[str, Any]:
        """What the runner was given, and the seed in use, for the record."""
        own = {key: value for key, value in self._given.items() if value is not None and key != "cfg"}
        return {**own, **(self._given["cfg"] or {}), "seed": self.seed}
