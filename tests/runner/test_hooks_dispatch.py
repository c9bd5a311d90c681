"""Hook points: who is called where, in which order, and with what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from flextrain import ConfigError, FlexibleRunner, Hook
from flextrain.core.checkpoint import Checkpoint, find_latest
from flextrain.core.checkpoint import save as saving
from flextrain.runner.hooks import (
    DEFAULT_HOOKS,
    POINTS,
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    HookDispatcher,
    IterTimerHook,
    Priority,
    get_priority,
)
from flextrain.runner.hooks.hook import check_methods


def named(name: str, priority: Any, log: list[str]) -> Hook:
    class Named(Hook):
        def before_train(self, runner: Any) -> None:
            log.append(name)

    hook = Named()
    hook.priority = priority
    return hook


def test_priorities_decide_and_the_first_registered_goes_first_among_equals() -> None:
    log: list[str] = []
    dispatcher = HookDispatcher(
        [named("normal 1", "NORMAL", log), named("last", "LOWEST", log), named("normal 2", 50, log)]
    )
    dispatcher.register(named("early", Priority.VERY_HIGH, log))
    dispatcher.register(named("normal 3", "VERY_LOW", log), priority="normal")
    dispatcher.call("before_train", None)  # type: ignore[arg-type]
    assert log == ["early", "normal 1", "normal 2", "normal 3", "last"]


def test_names_and_numbers_of_priorities() -> None:
    assert [get_priority(name) for name in Priority.__members__] == [0, 10, 30, 40, 50, 60, 70, 90, 100]
    assert get_priority(Priority.LOW) == get_priority("low") == get_priority(70)
    for wrong in ("NORMALL", -1, 101, 5.0, True, None):
        with pytest.raises(ConfigError, match="priority: "):
            get_priority(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='did you mean "NORMAL"'):
        get_priority("NORMALL")


class AnyOrder(Hook):
    """Takes the arguments of hook points as they may be written for MMEngine, which gives them by name."""

    seen: ClassVar[list[Any]] = []

    def before_train_iter(self, runner: Any, **named: Any) -> None:  # type: ignore[override]
        self.seen.append(named)

    def after_train_iter(self, runner: Any, outputs: Any = None, data_batch: Any = None, batch_idx: Any = 0) -> None:  # type: ignore[override]
        self.seen.append((batch_idx, data_batch, outputs))

    def before_val_iter(self, runner: Any, number: int, batch: Any) -> None:  # type: ignore[override]
        self.seen.append((number, batch))

    def after_val_iter(self, *given: Any, **named: Any) -> None:  # type: ignore[override]
        self.seen.append((given, named))

    def after_test_iter(self, runner: Any, data_batch: Any, *, outputs: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.seen.append((batch_idx, data_batch, outputs))


def test_arguments_come_by_name_where_their_order_is_another() -> None:
    runner, dispatcher = object(), HookDispatcher([AnyOrder()])
    for point in ("before_train_iter", "after_train_iter", "before_val_iter", "after_val_iter", "after_test_iter"):
        values: dict[str, Any] = {"batch_idx": 3, "data_batch": "batch", "outputs": "outputs"}
        if point.startswith("before"):
            del values["outputs"]
        dispatcher[point][0](runner, *values.values())
        if point not in ("before_val_iter", "after_val_iter"):
            dispatcher.call(point, runner, **values)  # type: ignore[arg-type]
    whole = (3, "batch", "outputs")
    assert AnyOrder.seen == [
        {"batch_idx": 3, "data_batch": "batch"},
        {"batch_idx": 3, "data_batch": "batch"},
        whole,
        whole,
        (3, "batch"),
        ((runner, *whole), {}),
        whole,
        whole,
    ]


def test_a_point_that_nobody_overrides_is_empty() -> None:
    dispatcher = HookDispatcher([Hook(), Hook()])
    assert all(dispatcher[point] == () for point in POINTS)
    assert len(POINTS) == 24


def test_a_hook_says_at_which_points_it_does_something() -> None:
    class Own(Hook):
        def after_train(self, runner: Any) -> None: ...

        def before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None: ...

    assert Hook().get_triggered_stages() == []
    assert sorted(Own().get_triggered_stages()) == [
        "after_train",
        "before_test_iter",
        "before_train_iter",
        "before_val_iter",
    ]


def test_a_hook_that_is_registered_later_is_called_from_then_on() -> None:
    log: list[str] = []
    dispatcher = HookDispatcher()
    dispatcher.call("before_train", None)  # type: ignore[arg-type]
    dispatcher.register(named("late", "NORMAL", log))
    dispatcher.call("before_train", None)  # type: ignore[arg-type]
    assert log == ["late"]
    assert len(dispatcher["before_train"]) == 1


def test_unknown_points_and_things_that_are_no_hooks() -> None:
    with pytest.raises(ConfigError, match='"after_train_iteration" is no hook point, did you mean "after_train_iter"'):
        HookDispatcher().call("after_train_iteration", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give an instance of a subclass of Hook"):
        HookDispatcher().register(Hook)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["", "_"])
def test_group_forms_are_called_for_every_mode(prefix: str) -> None:
    log: list[Any] = []

    def record(self: Hook, runner: Any, *args: Any, **kwargs: Any) -> None:
        log.append((args, kwargs))

    for when in ("before", "after"):
        for what in ("epoch", "iter"):
            hook = type("Group", (Hook,), {f"{prefix}{when}_{what}": record})()
            dispatcher = HookDispatcher([hook])
            own = {f"{when}_{mode}_{what}" for mode in ("train", "val", "test")}
            assert {point for point in POINTS if dispatcher[point]} == own
            for mode in ("train", "val", "test"):
                kwargs: dict[str, Any] = {"batch_idx": 3, "data_batch": "batch"} if what == "iter" else {}
                if (when, what) == ("after", "iter"):
                    kwargs["outputs"] = {"loss": 1.0}
                if (when, what) == ("after", "epoch") and mode != "train":
                    kwargs["metrics"] = {}
                log.clear()
                dispatcher.call(f"{when}_{mode}_{what}", "runner", **kwargs)  # type: ignore[arg-type]
                expected = [value for key, value in kwargs.items() if key != "metrics"]
                assert log == [(tuple(expected), {"mode": mode})]


def test_a_point_hides_the_group_form_unless_it_calls_on() -> None:
    log: list[str] = []

    class Both(Hook):
        def after_epoch(self, runner: Any, mode: str = "train") -> None:
            log.append(mode)

        def after_train_epoch(self, runner: Any) -> None:
            log.append("own")

    class CallsOn(Both):
        def after_train_epoch(self, runner: Any) -> None:
            super(Both, self).after_train_epoch(runner)

    for kind, expected in ((Both, ["own", "val"]), (CallsOn, ["train", "val"])):
        log.clear()
        dispatcher = HookDispatcher([kind()])
        dispatcher.call("after_train_epoch", None)  # type: ignore[arg-type]
        dispatcher.call("after_val_epoch", None, metrics={})  # type: ignore[arg-type]
        assert log == expected


def test_helpers_count_from_one_and_from_a_start(runner: Any) -> None:
    hook = Hook()

    def epochs(n: int, start: int = 0) -> list[int]:
        return [runner.epoch for runner.epoch in range(8) if hook.every_n_epochs(runner, n, start)]

    def iterations(n: int, start: int = 0) -> list[int]:
        return [runner.iter for runner.iter in range(8) if hook.every_n_train_iters(runner, n, start)]

    assert epochs(3) == iterations(3) == [2, 5]
    assert epochs(2, start=5) == iterations(2, start=5) == [4, 6]
    assert epochs(-1) == iterations(0) == []
    assert [i for i in range(6) if hook.every_n_inner_iters(i, 2)] == [1, 3, 5]
    assert (
        [i for i in range(6) if hook.end_of_epoch([0] * 4, i)]
        == [3]
        == [i for i in range(6) if hook.end_of_epoch(4, i)]
    )
    runner.epoch, runner.iter = runner.max_epochs - 1, runner.max_iters - 1
    assert hook.is_last_train_epoch(runner)
    assert hook.is_last_train_iter(runner)
    runner.epoch, runner.iter = 0, 0
    assert not hook.is_last_train_epoch(runner)
    assert not hook.is_last_train_iter(runner)


def test_default_hooks_run_in_mmengines_order(new_run: Callable[..., FlexibleRunner]) -> None:
    run = new_run(default_hooks=None)
    assert [type(hook).__name__ for hook in run.hooks] == [
        "RuntimeInfoHook",
        "IterTimerHook",
        "DistSamplerSeedHook",
        "LoggerHook",
        "ParamSchedulerHook",
        "NonFiniteHook",
        "CheckpointHook",
    ]
    assert list(DEFAULT_HOOKS) == [
        "runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "nonfinite", "checkpoint"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, nearest, how",
    [
        ("after_train_itr", "after_train_iter", "class"),
        ("before_validation", "before_val_iter", "instance"),
        ("after_work_is_finished_and_done", None, "dict"),
        ("_before_epcoh", "_before_epoch", "attribute"),
        ("on_exeption", "on_exception", "later"),
    ],
)
def test_what_is_named_like_a_point_and_is_none(
    new_run: Callable[..., FlexibleRunner], name: str, nearest: str | None, how: str
) -> None:
    """Misspelled, it would never be called, and nobody would know."""
    kind: Any = type("Typo", (Hook,), {} if how == "attribute" else {name: lambda self, runner: None})
    hook = kind if how == "class" else dict(type=kind) if how == "dict" else kind()
    if how == "attribute":
        setattr(hook, name, lambda runner: None)
    key = "hook" if how == "later" else r"custom_hooks\[0\]"
    meant = f', did you mean "{nearest}"\\?' if nearest else "; give it another"
    register = new_run().register_hook if how == "later" else lambda hook: new_run(custom_hooks=[hook])
    with pytest.raises(ConfigError, match=f"^{key}: Typo.{name} is no hook point and would never be called{meant}"):
        register(hook)


def test_helpers_and_values_may_be_called_so() -> None:
    class Fine(Hook):
        after_iters = 3
        _after_it_all = _before_saving = on_trace_ready = lambda self: None

    check_methods(Fine(), "custom_hooks[0]")


def test_a_state_that_would_be_loaded_but_is_not_saved() -> None:
    class Counting(Hook):
        def sate_dict(self) -> dict[str, Any]:
            return {"count": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    with pytest.raises(
        ConfigError, match=r"^custom_hooks\[0\]: Counting.load_state_dict .* is sate_dict meant to be it\?$"
    ):
        check_methods(Counting(), "custom_hooks[0]")

    class Right(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

    check_methods(Right(), "custom_hooks[0]")


def test_a_function_that_a_hook_is_given_is_called(new_run: Callable[..., FlexibleRunner]) -> None:
    hook, seen = Hook(), []
    runner = new_run(custom_hooks=[hook], train_cfg=dict(max_epochs=1))
    hook.after_train_iter = lambda *args: seen.append(args[1])  # type: ignore[method-assign]
    runner.train()
    assert seen == list(range(10))


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_save_is_between_its_two_points(
    new_run: Callable[..., FlexibleRunner], monkeypatch: pytest.MonkeyPatch, fails: bool, async_save: bool
) -> None:
    """Once for each save, also for one that fails, there or later in the background, and without which training goes on."""
    log: list[float] = []
    write = saving.write_shard

    def written(path: Path, *args: Any) -> Any:
        if fails and path.parent.name == ".epoch_1.tmp":
            raise OSError(28, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(saving, "write_shard", written)

    class Doubles(Hook):
        """Has other weights in the checkpoint than in the model."""

        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            self.scale(runner, 2)

        def after_save_checkpoint(self, runner: Any) -> None:
            self.scale(runner, 0.5)
            log.append(next(runner.model.parameters()).sum().item())

        @staticmethod
        def scale(runner: Any, by: float) -> None:
            with torch.no_grad():
                next(runner.model.parameters()).mul_(by)

    checkpoint = dict(type="CheckpointHook", interval=1, async_save=async_save, on_error="continue")
    run = new_run(custom_hooks=[Doubles()], default_hooks=dict(checkpoint=checkpoint))
    run.train()
    name, weight = next((name, torch.zeros_like(one)) for name, one in run.model.named_parameters())
    latest = find_latest(run.checkpoint_dir)
    assert latest is not None
    Checkpoint.open(latest).load({f"model.{name}": weight})
    assert len(log) == run.epoch
    assert weight.sum().item() == pytest.approx(2 * log[-1])


def test_a_group_form_below_a_hook_that_defines_the_point(new_run: Callable[..., FlexibleRunner]) -> None:
    """MMEngine's IterTimerHook has _after_iter where this one has after_train_iter; the timer runs on, too."""
    seen: list[str] = []

    class Timer(IterTimerHook):
        def _after_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
        ) -> None:
            assert runner.message_hub.get_scalar("train/time").current() > 0
            seen.append(mode)

    runner = new_run(default_hooks=dict(timer=dict(type=Timer), checkpoint=None), train_cfg=dict(max_epochs=1))
    runner.train()
    assert seen == ["train"] * 10 + ["val"] * 10


@pytest.mark.parametrize(
    ("base", "method"),
    [
        (CheckpointHook, "_get_metric_score"),
        (CheckpointHook, "_publish_model"),
        (EMAHook, "_swap_ema_parameters"),
        (EarlyStoppingHook, "_check_stop_condition"),
    ],
)
def test_a_method_that_only_mmengine_calls(new_run: Callable[..., FlexibleRunner], base: Any, method: str) -> None:
    kind = type("Own", (base,), {method: lambda self, *args: None})
    cfg = dict(type=kind, monitor="accuracy") if base is EarlyStoppingHook else dict(type=kind)
    with pytest.raises(ConfigError, match=rf"^custom_hooks\[0\]: Own.{method} is never called here, "):
        new_run(custom_hooks=[cfg])


def test_a_hook_shows_the_priority_that_it_was_given() -> None:
    dispatcher, log = HookDispatcher(), list[str]()
    given, own = named("given", "LOW", log), named("own", "LOW", log)
    dispatcher.register(given, "VERY_HIGH")
    dispatcher.register(own)
    assert [get_priority(hook.priority) for hook in dispatcher.hooks] == [Priority.VERY_HIGH, Priority.LOW]
    assert (given.priority, own.priority, Hook.priority) == (10, "LOW", "NORMAL")


def test_hooks_are_added_by_register_hook_alone(new_run: Callable[..., FlexibleRunner]) -> None:
    """What was appended to ``runner.hooks`` was never called, and what was removed was called on."""
    runner = new_run()
    with pytest.raises(AttributeError, match="append"):
        runner.hooks.append(Hook())  # type: ignore[attr-defined]
