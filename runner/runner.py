"""FlexibleRunner: checks the configuration of a run, builds its parts when they are needed, and trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..core.base.config import check_call, check_keywords, known_keywords, validate
from ..core.base.errors import ConfigError, NonFiniteError
from ..core.base.registry import HOOKS
from ..core.base.registry import RUNNER as OTHER_TRAINERS
from ..core.checkpoint import as_path, make_writable
from ..core.comm.agreement import raising_together
from ..core.config_files import Config, located
from ..core.random.generators import set_seed
from ..strategies.base import NOTHING, Strategy
from ..strategies.launchers import saying_why_this_process_leaves
from ..strategies.parts import hooks_of, meet
from .checkpoints import Checkpoints
from .config import ELSEWHERE, check_agreement, check_everything
from .data.checks import check_dataloader
from .data.user_loaders import Batches
from .health.oversight import Oversight, told_progress
from .health.termination import tell_how_it_ended
from .hooks import HookDispatcher, get_priority
from .loops.evaluate import TestLoop
from .options import Resume, apply_environment, early_preemption
from .parts import Parts
from .reporting import MessageHub, build_log_processor, close_logger, setup_logger
from .reporting.reporter import describe
from .resume.saver import check_on_error
from .run_folders import arguments_of, new_log_folder, occupied, write_record
from .runner_names import RunnerNames


class FlexibleRunner(RunnerNames):
    """Trains, validates and tests a model; a strategy distributes it over devices.

    The constructor checks all arguments; data, model and optimizer are built when they are first needed.

    Args:
        model: a module, ``dict(type=...)``, or a function without arguments that returns a module.
        work_dir: folder for logs and checkpoints.
        experiment_name: name for reporters and the log; default: the work directory's name and the time.
        train_dataloader: the training data: ``dict(dataset=..., batch_size=...)``, a DataLoader, a list of batches, another
            iterable of batches, or a function that returns such an iterable for every pass. Training needs it,
            ``optim_wrapper`` and ``train_cfg``.
        optim_wrapper: ``dict(optimizer=dict(type="AdamW", lr=1e-3))``, an OptimWrapper, or several by name.
        train_cfg: ``dict(by_epoch=True, max_epochs=..., val_interval=1)`` or ``dict(by_epoch=False, max_iters=...)``.
        val_dataloader: the validation data, as ``train_dataloader``. Validation needs it, ``val_cfg`` and ``val_evaluator``.
        val_cfg: ``dict()``, or arguments of the ValLoop.
        val_evaluator: the metrics of validation: one or a list, each ``dict(type=...)`` or an object.
        test_dataloader: the test data, as ``train_dataloader``. Testing needs it, ``test_cfg`` and ``test_evaluator``.
        test_cfg: ``dict()``, or arguments of the TestLoop.
        test_evaluator: the metrics of testing, as ``val_evaluator``.
        strategy: a Strategy, ``dict(type=...)``, or None: one device for one process, DDP for several.
        auto_scale_lr: ``dict(base_batch_size=...)`` scales learning rates by the number of samples per update.
        param_scheduler: one or a list; for several optimizers a dict of them by the optimizer's name.
        default_hooks: changes to the default hooks by name: runtime_info, timer, sampler_seed, logger, param_scheduler,
            nonfinite, checkpoint; None removes one.
        custom_hooks: further hooks.
        transforms: functions, names or ``dict(type=...)`` that change the model between its construction and its distribution over
            devices, in their order; see docs/how_to/transforms.md.
        data_preprocessor: for a model that is given as a configuration, or that has an attribute of this name.
        load_from: a checkpoint or file with weights to start from; with ``resume=True`` the checkpoint to resume. Where checkpoints
            have no frozen parameters (``exclude_frozen_parameters``), a resumed run takes them from this file.
        resume: True continues from the newest checkpoint with finite weights in ``work_dir``, if there is one; a path
            continues from that checkpoint. In ``dict(path=None, optimizer=True, param_scheduler=True, random=True,
            hooks=True, logs=True, data=True)`` False leaves a piece out.
        launcher: the program that started the processes; None detects it.
        env_cfg: ``dict(cudnn_benchmark=False, mp_cfg=..., dist_cfg=..., resource_limit=4096, nonfinite="warn",
            dry_run=True, preemption=dict(signals=("TERM", "USR1"), save=True, status=143, requeue=False,
            max_time=None), plan=None)``; NonFiniteHook explains the values of ``nonfinite``: "warn", "raise", "skip" or
            "ignore". ``dry_run`` is the number of validation batches tried before training, see DryPass; True: 2. With
            ``plan="plan.json"``, from `flextrain plan --json`, the log compares memory with the plan, see docs/planning_records.md.
        log_processor: the LogProcessor, or its arguments as a dict.
        log_level: level of the logger, such as "INFO".
        visualizer: reporters that store scalars, or MMEngine's ``dict(type='Visualizer', vis_backends=[...])``. JSON
            lines are always written, unless the list is empty or the dict says ``json_lines=False``.
        default_scope: None or "flextrain"; registries have no scopes.
        randomness: ``dict(seed=None, diff_rank_seed=False, deterministic=False)``.
        compile: True or arguments of ``torch.compile``; also as ``cfg=dict(compile=...)``.
        cfg: the whole configuration, for the record; only its ``compile`` is read. A Config is also written to
            ``config.py`` in ``work_dir``, and into checkpoints.

    Raises:
        ConfigError: an argument is invalid; all checks that need no process group and no model come first.
    """

    _kind_of_parts: type[Parts] = Parts

    @known_keywords({**OTHER_TRAINERS, **ELSEWHERE})
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
        transforms: Sequence[Any] | None = None,
        cfg: dict[str, Any] | Config | None = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self.message_hub = MessageHub()
        with saying_why_this_process_leaves(launcher):
            self.oversight = Oversight(early_preemption(env_cfg))  # first, because a signal may come at any time
        with self.oversight.preemption.forming(launcher):
            # A hook may look for the hub when it is made.
            with saying_why_this_process_leaves(launcher), self.message_hub.as_current():
                config = check_everything(given, takes_mmengines_models=self._kind_of_parts.takes_mmengines_models)
            # What the run owns beside its configuration: what is built of it, checkpoints, oversight, and reporting below.
            self.options, self.strategy = config.options, config.strategy
            self._parts = self._kind_of_parts(self, config, self._as_current)
            self._checkpoints = Checkpoints(self, self._parts)
            self.hook_calls = HookDispatcher()
            self.stop_check: Callable[[str], None] | None = None
            self.late_parameters: list[str] = []  # those named in the log so far
            self._ending: Exception | None = None  # what train() raises once the run has ended in order
            self._depth = 0  # nesting depth of runs: a hook may evaluate
            self.work_dir = str(Path(work_dir).absolute())  # before the start, because events are written there
            apply_environment(self.options.env_cfg)
            self.strategy.join()
            if self.distributed:
                self.oversight.watch_processes(self.options.env_cfg.watchdog_options)
            meet(self.strategy, "FlexibleRunner()")
            self.oversight.start(self)
        if self.distributed:
            check_agreement(config)
        more = [*hooks_of(self.strategy)]
        if (plan := self.options.env_cfg.plan) is not None:
            more.append(HOOKS.build({"type": "plan", "plan": plan}, "env_cfg.plan", strategy=self.strategy))
        make_writable(Path(self.work_dir), "work_dir")
        self.timestamp = new_log_folder(Path(self.work_dir))
        self.experiment_name = experiment_name or f"{Path(self.work_dir).name}_{self.timestamp}"
        self.log_dir = str(Path(self.work_dir) / self.timestamp)
        self.logger = setup_logger(log_level, Path(self.log_dir) / f"{self.timestamp}.log", self.rank)
        self.seed = set_seed(**dict(self.options.randomness), topology=self.strategy.topology)
        self.logger.info(
            f"{type(self.strategy).__name__} on {self.world_size} process{'es' if self.world_size > 1 else ''}, "
            f"device {self.strategy.device}, seed {self.seed}, work_dir {self.work_dir}"
        )
        if left_alone := self.oversight.preemption.left_alone:
            self.logger.info(left_alone)
        self.config_text = write_record(cfg, [self.work_dir, self.log_dir] if self.rank == 0 else [], self.logger)
        self.message_hub.topology = self.strategy.topology
        self.message_hub.belong_to(self.experiment_name)
        self.log_processor = build_log_processor(log_processor, config.by_epoch)
        self.visualizer = config.visualizer
        self.visualizer.belong_to_run(
            self.experiment_name, Path(self.log_dir) / "vis_data", describe(self.cfg), reports=self.rank == 0
        )
        self._register_first([*config.hooks, *((hook, get_priority(hook.priority)) for hook in more)])

    @classmethod
    def from_cfg(cls, cfg: Mapping[str, Any] | Config) -> FlexibleRunner:
        """Build a runner from one dict with the arguments as keys; the dict is kept as ``cfg`` for the record.

        A Config may have other names too, which ``runner.cfg`` keeps: ``runner.cfg.num_classes``.

        Raises:
            ConfigError: a key is not an argument, or a value is invalid; for a Config with file and line.
        """
        if isinstance(cfg, Config):
            with located(cfg):
                cfg.import_custom_modules()
                given, lines = arguments_of(cfg, inspect.signature(cls.__init__).parameters.keys() - {"self"})
                check_keywords(set(cfg) & ELSEWHERE.keys(), (), ELSEWHERE)
                runner = cls(**{"cfg": cfg, **given})
            for line in lines:
                runner.logger.warning(line)
            return runner
        if not isinstance(cfg, Mapping):
            raise ConfigError(f"from_cfg: {cfg!r} is not allowed, give a dict with the arguments as keys")
        check_keywords(cfg.keys() & ELSEWHERE, (), ELSEWHERE)
        check_call(cls, cfg, "")
        return cls(**{"cfg": dict(cfg), **cfg})

    # Methods for users

    def train(self) -> nn.Module:
        """Train, from the beginning or from the checkpoint to resume, and return the user's module."""
        meet(self.strategy, "train()")
        self._ending = None
        with self._watched():
            self._check_trainable()
            loop = self.train_loop
            self._parts.set_up()
            self._parts.set_up_schedulers()
            with occupied([Path(self.work_dir), self.checkpoint_dir], self.fast_checkpoint_dir), self._running():
                self._checkpoints.start_training()
                if loop.is_torn:  # train() was called again after an update failed midway
                    self.strategy.abort_update()
                    loop.is_torn = False
                with self.oversight.preemption.training(loop), told_progress(self):
                    self._checkpoints.train(loop)
                    if isinstance(self._ending, NonFiniteError):  # which has failed, whatever it has saved
                        raise self._ending
            self._parts.end_workers()
        if self._ending is not None:
            raise self._ending
        return self.strategy.module

    def val(self) -> dict[str, Any]:
        """Validate once, and return the metrics."""
        return self._evaluate("val")

    def test(self) -> dict[str, Any]:
        """Test once, and return the metrics."""
        return self._evaluate("test")

    def predict(
        self, dataloader: Batches | Mapping[str, Any], *, everywhere: bool = True, **options: Any
    ) -> list[Any] | None:
        """Return the model's prediction for every sample of a dataloader once, in the data set's order; a collective.

        Under every strategy and number of processes. A prediction is the sample's row of what the model returns: of a tensor, of
        each tensor of a dict or tuple, or an item of a list; on the CPU. What has no row for each sample, such as a loss, is left
        out, which the log says. Weights are those of ``load_from`` or ``resume`` before training, then those of now. For hooks it
        is a test without metrics; averages of EMAHook are used.

        Args:
            dataloader: as ``test_dataloader``; labels are not needed unless the model's forward needs them.
            everywhere: False: only rank 0 gets the predictions, and needs memory for them; the others get None.
            options: as ``test_cfg``: ``fp16``, ``full_weights``, ``memory_limit``.

        Raises:
            ConfigError: the order is random, or the model returns no row for each sample.
        """
        from .predictions import prediction_loop, predictions_of

        def build() -> TestLoop:
            check_dataloader(dataloader, "predict.dataloader", training=False)
            loader = self._parts.build_dataloader(dataloader, "predict.dataloader", False, self.seed)
            return prediction_loop(self, dataloader, loader, options)

        with self._with_weights("predict", build) as loop:
            before, self._parts.test_loop = self._parts.test_loop, loop
            try:
                return predictions_of(loop, everywhere)
            finally:
                loop._end_workers()
                self._parts.test_loop = before

    def generate(
        self,
        inputs: Any = None,
        *,
        seed: int | None = None,
        memory_limit: int | str | None = None,
        by_layer: bool = False,
        **options: Any,
    ) -> Any:
        """Return what the model's own ``generate`` gives for this process's inputs, with whole weights; a collective.

        Under every strategy the same as on one device. Processes may have different inputs, and generate unequally many
        tokens. Before training, weights are those of ``load_from`` or ``resume``; in a hook, those of now, with the running
        statistics that evaluation would use. Random states, flags, weights and buffers are afterwards as before.

        Args:
            inputs: a tensor, or a dict of arguments such as a tokenizer gives; moved to the device. None: this process has
                none, keeps no weights and gets None.
            seed: of torch's random numbers, for sampling: with equal inputs every strategy draws the same. None: go on
                from the random state of the process.
            memory_limit, by_layer: see ``WholeModel.open``.
            options: further arguments of the model's ``generate``, such as ``max_new_tokens=20``.

        Raises:
            ConfigError: the model has no ``generate``, or no process has inputs.
            StrategyError: more memory is needed than ``memory_limit``.
        """
        from .predictions import generate

        with self._with_weights("generate"):
            return generate(self.strategy, inputs, options, seed=seed, memory_limit=memory_limit, by_layer=by_layer)

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        async_save: bool = False,
        verify: bool = False,
        on_error: Literal["raise", "continue"] = "raise",
    ) -> str:
        """Write the checkpoint directory ``out_dir/filename``; a collective.

        If it has the optimizer state, and so can be resumed, ``latest`` names it from then on.

        Args:
            meta: plain values to save beside the state.
            async_save: return after the state is copied to the CPU, and write it in the background; see
                ``finish_saving``. The copy takes as much memory as this process writes, and is kept for the next save.
            verify: read back what was written before the checkpoint counts as complete.
            on_error: "continue" logs a warning when storage fails, and ``train()`` raises only if the last save has
                failed; ``save_failed`` tells. A process that is lost and state that cannot be saved raise in any case.

        Raises:
            CheckpointError: this save failed, or the previous one failed in the background.
            ConfigError: ``on_error`` is something else.
        """
        check_on_error(on_error, "save_checkpoint.on_error")
        path = as_path(out_dir) / filename
        self._checkpoints.saver.save(
            path,
            save_optimizer=save_optimizer,
            save_param_scheduler=save_param_scheduler,
            meta=meta,
            in_background=async_save,
            verify=verify,
            on_error=on_error,
        )
        return str(path)

    def load_checkpoint(
        self,
        filename: str | Path,
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
    ) -> None:
        """Load weights into the model; a collective.

        Args:
            filename: a path or URL that ``load_from`` accepts.
            strict: raise if any name or shape does not fit; otherwise this is logged.
            revise_keys: (pattern, replacement) pairs of ``re.sub``, applied in this order to all names of the file.

        Raises:
            ConfigError: ``strict`` is not a bool, or ``revise_keys`` are not such pairs; nothing was read.
            CheckpointError: nothing fits; with ``strict``, something does not fit; or the file cannot be read.
        """
        self._checkpoints.load(filename, strict, revise_keys)

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
        verify: bool = True,
    ) -> None:
        """Restore a run from a checkpoint, except the pieces that are left out; a collective.

        In the middle of an epoch the run continues with the next sample, on any number of processes and with any batch
        size. RNG states are restored for the same number of processes. For another number, every process uses a new
        seed made of the run's seed, the iteration and its rank.

        Args:
            filename: the checkpoint directory.
            resume_optimizer, resume_param_scheduler, random, hooks, logs, data, verify: see ``resume`` of the runner.

        Raises:
            CheckpointError: a piece is missing or damaged, or does not fit; the message says how to leave it out.
            ConfigError: an unknown keyword.
        """
        options = {"optimizer": resume_optimizer, "param_scheduler": resume_param_scheduler}
        options |= {"random": random, "hooks": hooks, "logs": logs, "data": data, "verify": verify}
        checked = validate(Resume, options, "resume")
        meet(self.strategy, "resume()")
        self._checkpoints.resume(as_path(filename), checked)

    def close(self) -> None:
        """Release what the run holds beyond memory: reporters, log files, threads, process groups; may be called again.

        For programs that make several runners; ``with FlexibleRunner(...) as runner:`` ends with it. The program's own group stays.
        """
        if self._parts.is_closed:
            return
        self._parts.is_closed = True
        with ExitStack() as stack:  # what comes last is released first, and all of it even if something raises
            stack.callback(close_logger, self.log_dir)
            stack.callback(self.strategy.leave)
            stack.callback(self.oversight.stop)
            stack.callback(self._parts.end_workers)
            stack.callback(self.visualizer.close)
            stack.callback(self.finish_saving)  # again, if a signal interrupts it: the save needs the process group
            self.finish_saving()
        self._parts.let_go()
        self._ending = None

    def __enter__(self) -> FlexibleRunner:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # logged, because it must not hide the first error
            self.logger.error(f"close(): {second}")

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        """Make the message hub and the visualizer those that ``get_current_instance`` returns."""
        with self.message_hub.as_current(), self.visualizer.as_current():
            yield

    def _evaluate(self, mode: str) -> dict[str, Any]:
        def build() -> Any:
            with raising_together():  # only rank 0 looks at the folders that metrics write to
                loop = self.val_loop if mode == "val" else self.test_loop
            if loop is None:
                parts = f"{mode}_dataloader, {mode}_cfg and {mode}_evaluator"
                raise ConfigError(f"{mode}_cfg: missing, runner.{mode}() needs {parts}")
            return loop

        with self._with_weights(mode, build) as loop:
            metrics: dict[str, Any] = loop.run()
        return metrics

    @contextmanager
    def _with_weights(self, call: str, build: Callable[[], Any] = lambda: None) -> Iterator[Any]:
        """Context of a call besides train(), in which the model is set up and loaded; gives what ``build`` returns."""
        meet(self.strategy, f"{call}()")
        with self._watched():
            built = build()
            self._parts.set_up()
            with self._running():
                self._checkpoints.start_evaluation()
                yield built

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Context of a call in which other processes learn of an error, and an error has its line of the configuration."""
        cfg, watchdog = self._parts.config.given["cfg"], self.oversight.watchdog
        watching = NOTHING if watchdog is None else self.oversight.watching(self, watchdog)
        with self._as_current(), watching, located(cfg) if isinstance(cfg, Config) else NOTHING:
            yield

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._depth:  # a hook evaluates during a run
            yield
            return
        self._depth = 1
        preemption = self.oversight.preemption
        with preemption.running():
            try:
                self._checkpoints.begin()
                yield
                self.finish_saving()
                self.call_hook("after_run")
                self.visualizer.close()  # a hook after LoggerHook may have added something, or there is no LoggerHook
                self._checkpoints.saver.failed.raise_last()
            except BaseException as error:
                reason = preemption.reason_of(error)
                tell_how_it_ended(self, reason, has_begun=self._checkpoints.started, watchdog=self.oversight.watchdog)
                if reason is error:
                    raise
                raise reason from error
            finally:
                self._checkpoints.has_begun, self._depth = False, 0
