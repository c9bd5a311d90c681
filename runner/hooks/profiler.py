"""ProfilerHook: profiles the first iterations with torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import profiler

from ...core.base.config import check_call
from ...core.base.errors import ConfigError
from ...core.base.registry import HOOKS
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run

_WHERE = "ProfilerHook"


@HOOKS.register_module()
class ProfilerHook(Hook):
    """Runs torch.profiler at the beginning of training.

    Args:
        by_epoch: ``profile_times`` counts epochs rather than iterations.
        profile_times: epochs or iterations to profile; only 1 with by_epoch, because larger profiles are unusable.
        activity_with_cpu, activity_with_cuda, activity_with_xpu: the activities to record.
        schedule: ``dict(wait=1, warmup=1, active=3, repeat=1)``, in iterations; default: record all.
        on_trace_ready: ``dict(type='log_trace', sort_by=..., row_limit=...)`` writes a table to the log,
            ``dict(type='tb_trace', dir_name=..., worker_name=...)`` a trace for TensorBoard; or a function of the profile.
        record_shapes, profile_memory, with_stack, with_flops: see ``torch.profiler.profile``.
        json_trace_path: file for a Chrome trace; ranks other than 0, and cycles of a schedule after the first, append
            their number to its name.
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        *,
        by_epoch: bool = True,
        profile_times: int = 1,
        activity_with_cpu: bool = True,
        activity_with_cuda: bool = False,
        activity_with_xpu: bool = False,
        schedule: dict[str, int] | None = None,
        on_trace_ready: Callable[[Any], None] | dict[str, Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        json_trace_path: str | None = None,
    ) -> None:
        if profile_times < 1:
            raise ConfigError(f"{_WHERE}.profile_times: {profile_times} is not allowed, give 1 or more")
        if by_epoch and profile_times > 1:
            raise ConfigError(f"{_WHERE}.profile_times: {profile_times} is not allowed with by_epoch=True, give 1")
        if schedule is not None:
            check_call(profiler.schedule, schedule, f"{_WHERE}.schedule")
        self.by_epoch = by_epoch
        self.profile_times = profile_times
        asked = {"CPU": activity_with_cpu, "CUDA": activity_with_cuda, "XPU": activity_with_xpu}
        self._activities = [getattr(profiler.ProfilerActivity, name) for name, wanted in asked.items() if wanted]
        if not self._activities:
            raise ConfigError(f"{_WHERE}.activity_with_cpu: nothing is left to record, set one activity to True")
        self._schedule = None if schedule is None else profiler.schedule(**schedule)
        self._on_trace_ready = _check_trace(on_trace_ready)
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        self.json_trace_path = json_trace_path
        self.profiler: profiler.profile | None = None
        self._done = 0
        self._traces = 0

    def before_train(self, runner: Run) -> None:
        """Start recording."""
        limit = runner.max_epochs if self.by_epoch else runner.max_iters
        if self.profile_times > limit:
            raise ConfigError(f"{_WHERE}.profile_times: {self.profile_times} is not allowed, training has {limit}")
        self._done = self._traces = 0
        self.profiler = profiler.profile(
            activities=self._activities,
            schedule=self._schedule,
            on_trace_ready=self._trace_handler(runner),
            **self._options,
        )
        self.profiler.start()
        runner.logger.info("The profiler is recording, which slows training down")

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Mark the end of an iteration."""
        if self.profiler is None:
            return
        self._done += 1
        self.profiler.step()
        if not self.by_epoch and self._done == self.profile_times:
            self._stop()

    def after_train_epoch(self, runner: Run) -> None:
        """Stop after the first epoch, if epochs are counted."""
        if self.by_epoch:
            self._stop()

    def after_train(self, runner: Run) -> None:
        """Stop if training was shorter than expected."""
        self._stop()

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Stop and write what was recorded so far."""
        self._stop()

    def _stop(self) -> None:
        if self.profiler is not None:
            running, self.profiler = self.profiler, None
            running.stop()

    def _trace_handler(self, runner: Run) -> Callable[[Any], None]:
        handler = self._make_handler(runner)

        def on_trace_ready(profile: Any) -> None:
            self._traces += 1
            if self.json_trace_path is not None:
                path = _numbered(Path(self.json_trace_path), runner.rank, self._traces)
                path.parent.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(str(path))
            if handler is not None:
                handler(profile)

        return on_trace_ready

    def _make_handler(self, runner: Run) -> Callable[[Any], None] | None:
        if not isinstance(self._on_trace_ready, dict):
            return self._on_trace_ready
        options = {key: value for key, value in self._on_trace_ready.items() if key != "type"}
        if self._on_trace_ready["type"] == "log_trace":
            return lambda profile: runner.logger.info("\n%s", profile.key_averages().table(**options))
        folder = Path(runner.log_dir) / options.pop("dir_name", "tf_tracing_logs")
        runner.logger.info("Traces will be written to %s", folder)
        handler: Callable[[Any], None] = profiler.tensorboard_trace_handler(str(folder), **options)  # type: ignore[no-untyped-call,unused-ignore]
        return handler


def _check_trace(given: Any) -> Callable[[Any], None] | dict[str, Any] | None:
    where = f"{_WHERE}.on_trace_ready"
    if given is None or (callable(given) and not isinstance(given, Mapping)):
        return given  # type: ignore[no-any-return,unused-ignore]
    if not isinstance(given, Mapping) or given.get("type") not in ("log_trace", "tb_trace"):
        raise ConfigError(f'{where}: {given!r} is not allowed, give a function or dict(type="log_trace" or "tb_trace")')
    return dict(given)


def _numbered(path: Path, rank: int, trace: int) -> Path:
    suffix = (f"_rank{rank}" if rank else "") + (f"_{trace}" if trace > 1 else "")
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")
