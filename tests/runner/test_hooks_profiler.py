"""ProfilerHook: what is recorded for how long, and where it goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import ConfigError, FlexibleRunner, Hook
from flextrain.runner.hooks import ProfilerHook

from .training import refuses


def count_steps(path: Path) -> int:
    """Optimizer steps in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(1 for event in events if event.get("name") == "Optimizer.step#SGD.step")


def test_the_first_epoch_is_traced(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    path = tmp_path / "traces" / "run.json"
    new_run(custom_hooks=[{"type": "ProfilerHook", "json_trace_path": str(path)}]).train()
    assert count_steps(path) == 10


def test_so_many_iterations_are_traced_also_beyond_an_epoch(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    hook = ProfilerHook(by_epoch=False, profile_times=12, json_trace_path=str(tmp_path / "run.json"))
    new_run(custom_hooks=[hook]).train()
    assert count_steps(tmp_path / "run.json") == 12


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_schedule_leaves_a_trace_per_cycle(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    path = str(tmp_path / "run.json")
    new_run(custom_hooks=[ProfilerHook(schedule=schedule, json_trace_path=path)]).train()
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["run.json", "run_2.json"]
    assert count_steps(tmp_path / "run.json") == count_steps(tmp_path / "run_2.json") == 2


def test_a_table_goes_to_the_log(new_run: Callable[..., FlexibleRunner]) -> None:
    trace = {"type": "log_trace", "sort_by": "self_cpu_time_total", "row_limit": 5}
    run = new_run(custom_hooks=[ProfilerHook(by_epoch=False, profile_times=2, on_trace_ready=trace)])
    run.train()
    assert "Self CPU time total" in (Path(run.log_dir) / f"{run.timestamp}.log").read_text()


def test_a_trace_for_tensorboard(new_run: Callable[..., FlexibleRunner]) -> None:
    trace = {"type": "tb_trace", "dir_name": "tb", "worker_name": "me"}
    run = new_run(custom_hooks=[ProfilerHook(by_epoch=False, profile_times=2, on_trace_ready=trace)])
    run.train()
    (file,) = (Path(run.log_dir) / "tb").iterdir()
    assert file.name.startswith("me.")


def test_a_function_gets_the_profile(new_run: Callable[..., FlexibleRunner]) -> None:
    got: list[Any] = []
    run = new_run(custom_hooks=[ProfilerHook(by_epoch=False, profile_times=2, on_trace_ready=got.append)])
    run.train()
    assert len(got) == 1
    assert got[0].key_averages()


def test_what_was_recorded_is_written_when_training_fails(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    class Failing(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            if batch_idx == 3:
                raise RuntimeError("in training")

    path = tmp_path / "run.json"
    run = new_run(custom_hooks=[ProfilerHook(json_trace_path=str(path)), Failing()])
    with pytest.raises(RuntimeError, match="in training"):
        run.train()
    assert count_steps(path) == 4
    with torch.profiler.profile():
        pass  # torch refuses a second profiler while one runs


def test_other_ranks_add_their_number(tmp_path: Path, new_runner: Callable[..., Any]) -> None:
    runner = new_runner(rank=2)
    hook = ProfilerHook(json_trace_path=str(tmp_path / "run.json"))
    hook.before_train(runner)
    hook.after_train(runner)
    assert [path.name for path in tmp_path.glob("*.json")] == ["run_rank2.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile_times": 0}, "ProfilerHook.profile_times: 0 is not allowed"),
        ({"profile_times": 2}, "ProfilerHook.profile_times: 2 is not allowed with by_epoch=True"),
        ({"schedule": {"wait": 1}}, "ProfilerHook.schedule."),
        (
            {"schedule": {"wait": 1, "warmup": 1, "activ": 1}},
            'ProfilerHook.schedule.activ: unknown key, did you mean "active"',
        ),
        ({"on_trace_ready": {"type": "print"}}, "ProfilerHook.on_trace_ready: {'type': 'print'} is not allowed"),
        ({"on_trace_ready": 5}, "ProfilerHook.on_trace_ready: 5 is not allowed"),
        ({"activity_with_cpu": False}, "ProfilerHook.activity_with_cpu: nothing is left to record"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, message):
        ProfilerHook(**options)


def test_more_iterations_than_there_are(runner: Any) -> None:
    with pytest.raises(ConfigError, match=r"profile_times: 21 is not allowed, training has 20"):
        ProfilerHook(by_epoch=False, profile_times=21).before_train(runner)
