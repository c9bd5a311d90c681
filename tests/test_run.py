"""flextrain run: options, what a history says of another start, and a job that comes back."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.metrics import api as metrics_api
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from flextrain.cli import main
from flextrain.core.base.errors import ConfigError
from flextrain.core.base.events import (
    JOB,
    PROGRESS,
    RESTARTS,
    Progress,
    ProgressFile,
    append_event,
    read_events,
    read_progress,
)
from flextrain.core.torch_compat.torch_private import watched_agent
from flextrain.elastic.command_line import DEFAULT_RESTARTS, OPTIONS, OWN, misplaced, read_options
from flextrain.elastic.launching import Supervisor, _parsed, signals_as_they_came, summary
from flextrain.elastic.starts import Fault, History, failure_elsewhere, failure_of

# Options


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_what_follows_the_script_is_the_script_s(script: str) -> None:
    found = read_options(["--nproc_per_node=2", "-t", "3", script, "--max-restarts", "9", "--", "-x", "--help"])
    assert found.given == {"--nproc-per-node": "2", "--tee": "3"}
    assert (found.script, found.arguments) == (script, ["--max-restarts", "9", "--", "-x", "--help"])
    assert found.for_torchrun()[-5:] == ["--max-restarts", "9", "--", "-x", "--help"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--nproc-per-nod", "2"], '"--nproc-per-nod" is not an option, did you mean "--nproc-per-node"?'),
        (["--nproc", "2"], '"--nproc" is not an option, did you mean "--nproc-per-node"?'),
        (["--nproc-per-node", "0"], '--nproc-per-node "0" is not allowed, give 1 or more'),
        (["--max-restart=2"], 'did you mean "--max-restarts"?'),
        (["--max-restarts", "-1"], '--max-restarts "-1" is not allowed, give a whole number from 0 on'),
        (["--max-restarts"], "--max-restarts needs a value, N"),
        (["--standalone=1"], "--standalone takes no value, '1' was given"),
        (["--nnodes", "4:1"], '--nnodes "4:1" is not allowed, 1 <= MIN <= MAX'),
        (["--nnodes", "two"], '--nnodes "two" is not allowed, give a number or MIN:MAX'),
        (["--nnodes", "1:4"], "--nnodes 1:4 needs --rdzv-endpoint HOST:PORT"),
        (["--start-method", "fork"], "--start-method has no meaning here"),
        (["--work-dir", ""], "no script was given"),
    ],
)
def test_bad_options(script: str, given: list[str], message: str) -> None:
    rest = [] if "needs a value" in message or "no script" in message else [script]
    with pytest.raises(ConfigError) as caught:
        read_options([*given, *rest])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_processes_that_are_asked_for_behind_the_script(script: str) -> None:
    assert not misplaced(read_options(["--nproc-per-node=2", script, "--lr", "1"]))
    found = misplaced(read_options([script, "--nproc_per_node=2"]))
    assert (
        found
        == f"flextrain run: --nproc-per-node comes after {script}, so it is an argument of the script; give it before"
    )


def test_a_script_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nproc-per-node", "2", "nowhere.py"]) == 2
    assert "nowhere.py is not a file" in capsys.readouterr().err


def test_a_value_that_torch_refuses_is_one_line(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nproc-per-node", "many", script]) == 2
    assert capsys.readouterr().err == "flextrain: run: Unsupported nproc_per_node value: many\n"


def test_options_are_torchrun_s(script: str) -> None:
    from torch.distributed.run import get_args_parser

    known = {name for action in get_args_parser()._actions for name in action.option_strings}
    newer = {"--virtual-local-rank", "--numa-binding", "--signals-to-handle", "--shutdown-timeout"} | {
        "--duplicate-stdout-filters",
        "--duplicate-stderr-filters",
        "--log-line-prefix-template",
        "--event-log-handler",
    }
    assert OPTIONS.keys() - newer - set(OWN) <= known
    parsed = get_args_parser().parse_args(read_options([script, "--lr", "1"]).for_torchrun())
    assert parsed.max_restarts == DEFAULT_RESTARTS
    assert parsed.training_script_args == ["--lr", "1"]
    assert parsed.standalone, "two jobs on one machine do not meet, with any version of torch"
    for own in (["--rdzv-endpoint", "node1:29400"], ["--master-port", "1234"], ["--node-rank", "0"]):
        assert not get_args_parser().parse_args(read_options([*own, script]).for_torchrun()).standalone
    elastic = read_options(["--nnodes=1:4", "--rdzv-endpoint", "node1:29400", script])
    assert elastic.is_elastic
    assert get_args_parser().parse_args(elastic.for_torchrun()).rdzv_backend == "c10d"


def test_usr1_ends_the_job_after_a_save_with_every_version_of_torch(script: str) -> None:
    """Before torch 2.9 the agent itself would end, and leave its processes behind."""
    older = argparse.ArgumentParser()
    older.add_argument("--standalone", action="store_true")
    older.add_argument("--max-restarts", type=int)
    older.add_argument("script")
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        parsed = _parsed(SimpleNamespace(get_args_parser=lambda: older), read_options([script]))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (parsed.script, came) == (script, [signal.SIGTERM])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_help_explains_what_a_restart_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in OPTIONS)
    assert "newest checkpoint that this job has saved" in " ".join(shown.split())


# Progress


def test_progress_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert read_progress(path) == Progress()
    file = ProgressFile(path)
    assert read_progress(path) == Progress()
    for progress in (Progress("a" * 60, 5, 100000), Progress("b", 5, 7)):  # nothing is left of the longer one
        file.write(progress)
        assert read_progress(path) == progress
    file.close()


# History


def history(*starts: tuple[int | None, int, Fault | None]) -> History:
    found = History()
    for number, (began, done, failure) in enumerate(starts):
        found.begin(2, 1, number)
        found.saw(began, done, float(number))
        found.current.fault = failure
    return found


KILLED, RAISED = Fault("rank 1 was ended by SIGKILL", 137), Fault("rank 1 failed: ValueError: no", 1)


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ([(0, 64, RAISED)], None),
        ([(None, 0, RAISED)], None),  # the first may have met a bad moment
        ([(0, 64, RAISED), (50, 60, RAISED)], None),
        ([(0, 64, RAISED), (50, 70, RAISED)], None),
        ([(0, 64, None), (50, 50, RAISED)], None),  # machines changed
        ([(0, 64, KILLED), (50, 64, RAISED)], "iteration 65 failed twice"),
        ([(0, 64, RAISED), (50, 50, RAISED)], "the restart made no update, iteration 51 failed at once"),
        ([(0, 64, RAISED), (None, 0, RAISED)], "the restart made no update, training was not reached"),
        ([(None, 0, RAISED), (None, 0, RAISED)], "training was not reached twice"),
        ([(0, 0, RAISED), (0, 0, RAISED)], "iteration 1 failed twice"),
        ([(0, 64, KILLED), (50, 64, KILLED)], None),  # by chance, perhaps
        ([(0, 64, KILLED), (50, 50, KILLED)], None),
        ([(0, 64, KILLED), (50, 64, KILLED), (50, 64, KILLED)], "iteration 65 failed three times"),
        (
            [(0, 64, KILLED), (50, 50, KILLED), (None, 0, KILLED)],
            "two restarts made no update, training was not reached",
        ),
        ([(0, 64, KILLED), (50, 50, KILLED), (50, 52, KILLED)], None),
        ([(None, 0, KILLED)] * 3, "training was not reached three times"),
    ],
)
def test_no_restart_when_the_last_one_gained_nothing(starts: Any, reason: str | None) -> None:
    assert history(*starts).futile() == reason


def test_the_iteration_that_fails_twice_is_named_with_its_samples() -> None:
    broken = Fault("rank 0 failed: ValueError: broken", 1, (7, 77))
    found = history((0, 64, broken), (50, 64, broken)).futile()
    assert found == "iteration 65 failed twice, with samples 7, 77 of the dataset"


def test_repeated_updates_and_lost_time() -> None:
    found = History()
    found.begin(2, 1, 0)
    for now, done in ((0.0, 0), (10.0, 64)):
        found.saw(0, done, now)
    found.current.fault = KILLED
    found.begin(2, 1, 1)
    for now, done in ((17.0, 50), (18.0, 60), (20.0, 65), (30.0, 100)):
        found.saw(50, done, now)
    found.end(30.0)
    assert found.repeated == 14
    assert found.lost_s == 10.0  # from update 64 until 65


# Failures


@pytest.mark.parametrize(
    ("exits", "events", "reason", "status"),
    [
        ({1: -9, 0: 1}, [{"event": "failed", "rank": 0, "reason": "closed", "follows": True}], "rank 1 was ended by SIGKILL", 137),
        ({0: 1, 1: 1}, [{"event": "failed", "rank": 0, "reason": "closed", "follows": True},
                        {"event": "failed", "rank": 1, "reason": "ValueError: no", "follows": False}], "rank 1 failed: ValueError: no", 1),
        ({0: 1}, [{"event": "failed", "rank": 0, "reason": "closed", "follows": True}], "rank 0 lost another process", 1),
        ({0: -6, 1: 1}, [{"event": "failed", "rank": 1, "reason": "ValueError: no", "follows": False}], "rank 1 failed: ValueError: no", 1),
        ({0: 75}, [], "rank 0 ended with status 75 (a stall)", 75),
        ({1: -15}, [], "rank 1 was ended by SIGTERM", 143),
        # What rank 0 says of rank 1, which the agent knows better, also if both have ended when it looks.
        ({0: 1, 1: -9}, [{"event": "failed", "rank": 1, "reason": "gone", "follows": False, "killed": True},
                         {"event": "failed", "rank": 0, "reason": "closed", "follows": True}], "rank 1 was ended by SIGKILL", 137),
        ({0: 1, 1: 3}, [{"event": "failed", "rank": 1, "reason": "gone", "follows": False, "killed": True},
                        {"event": "failed", "rank": 0, "reason": "closed", "follows": True}], "rank 1 ended with status 3", 3),
        ({0: -6, 1: -9}, [{"event": "failed", "rank": 0, "reason": "closed", "follows": True}], "rank 1 was ended by SIGKILL", 137),
        ({0: 1}, [{"event": "failed", "rank": 8, "reason": "rank 8 (node2) is gone", "follows": False, "killed": True}],
         "rank 8 (node2) is gone", 1),
        ({0: 143, 1: 143}, [{"event": "preempted", "rank": 0, "on_rank": 1, "by": "SIGTERM"}], "rank 1 was preempted, SIGTERM", 143),
        ({0: 85, 1: 85}, [{"event": "preempted", "rank": 0, "on_rank": 1, "by": "max_time"}], "the run was stopped, max_time", 85),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure(exits: dict[int, int], events: list[Any], reason: str, status: int) -> None:
    found = failure_of(exits, [{"time": float(i), **event} for i, event in enumerate(events)])
    assert (found.reason, found.status) == (reason, status)


@pytest.mark.parametrize(("event", "outside"), [("preempted", True), ("failed", False)])
def test_a_preemption_is_from_outside_whatever_its_status(event: str, outside: bool) -> None:
    events = [{"event": event, "rank": 0, "time": 0.0}]
    assert failure_of({0: 85, 1: 85}, events).is_from_outside is outside


def test_a_process_of_another_machine_that_was_killed_is_no_reason_to_give_up_at_once() -> None:
    event = {"event": "failed", "time": 0.0, "rank": 8, "reason": "gone", "follows": False, "killed": True}
    assert failure_of({0: 1}, [event]).is_from_outside
    assert not failure_of({8: 3}, [event]).is_from_outside


def test_what_was_asked_to_stop_is_not_started_again() -> None:
    """Each start would have the whole of max_time again."""
    for by, again in (("SIGTERM", True), ("max_time", False), ("loss is low enough", False)):
        found = History()
        found.begin(2, 1, 0)
        found.saw(0, 10, 1.0)
        found.current.fault = failure_of({0: 143}, [{"event": "preempted", "by": by, "time": 0.0}])
        assert (found.futile() is None) is again


# The agent's side, with a store and without processes


def group(store: Any, rank: int = 0, machines: int = 1) -> Any:
    workers = [SimpleNamespace(world_size=2 * machines, global_rank=2 * rank + local) for local in (0, 1)]
    return SimpleNamespace(store=store, group_rank=rank, group_world_size=machines, workers=workers)


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables of a start, now and afterwards."""
    for name in (JOB, PROGRESS, RESTARTS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_job")
def test_what_the_processes_of_each_start_get(tmp_path: Path) -> None:
    folder, work_dir = tmp_path / "progress", tmp_path / "work"
    folder.mkdir()
    work_dir.mkdir()
    watched = Supervisor("", folder)
    watched.starting(group(HashStore()))
    first = os.environ[JOB]
    assert RESTARTS not in os.environ
    file = ProgressFile(os.environ[PROGRESS])
    file.write(Progress(str(work_dir), 0, 12))
    append_event(work_dir, "failed", rank=0, iter=12, reason="ValueError: broken", samples=[3, 4], follows=False)
    watched.looked(None)
    watched.looked({0: 1})
    assert watched.may_restart()
    watched.starting(group(HashStore()))
    assert (os.environ[JOB], os.environ[RESTARTS]) == (first, "1")
    assert read_progress(os.environ[PROGRESS]) == Progress()  # a file of its own
    restarted = read_events(work_dir)[-1]
    assert restarted["event"] == "restarted"
    assert (restarted["reason"], restarted["samples"]) == ("rank 0 failed: ValueError: broken", [3, 4])
    watched.looked({0: 1})
    assert not watched.may_restart()
    watched.ended("gave_up", why=watched.futile)
    assert [event["event"] for event in read_events(work_dir)] == ["failed", "launched", "restarted", "gave_up"]


@pytest.mark.parametrize(
    ("before", "events", "reason"),
    [
        (2, [{"event": "failed", "rank": 1, "reason": "broken"}], "rank 1 failed: broken"),
        (2, [{"event": "failed", "rank": 0, "reason": "lost", "follows": True}, {"event": "stalled", "rank": 1}], "rank 1 stalled"),
        (2, [{"event": "failed", "rank": 1, "reason": "rank 1 is gone", "killed": True}], "rank 1 is gone"),
        (2, [{"event": "failed", "rank": 0, "reason": "lost", "follows": True}], "another machine started again"),
        (2, [], "another machine started again"),
        (3, [{"event": "failed", "rank": 1, "reason": "broken"}], "the number of machines changed"),
    ],
)  # fmt: skip
def test_why_a_machine_starts_again_of_which_no_process_failed(before: int, events: list[Any], reason: str) -> None:
    assert failure_elsewhere(before, 2, [{"time": float(i), **event} for i, event in enumerate(events)]) == reason


@pytest.mark.usefixtures("no_job")
def test_the_first_machine_names_the_failure_of_another_one(tmp_path: Path) -> None:
    store, watched = HashStore(), Supervisor("", tmp_path)
    for starts in (0, 1):
        other = json.dumps({"starts": starts, "job": "job"})
        store.set("flextrain/agents/1", other)
        watched.starting(group(store, 0, 2))
        ProgressFile(os.environ[PROGRESS]).write(Progress(str(tmp_path), 0, 12))
        watched.looked(None)
        append_event(tmp_path, "failed", rank=1, iter=12, reason="ValueError: broken", follows=False)
    restarted = next(event for event in read_events(tmp_path) if event["event"] == "restarted")
    assert restarted["reason"] == "rank 1 failed: ValueError: broken"
    assert "  rank 1 failed: ValueError: broken" in summary(0, "finished", watched)


@pytest.mark.usefixtures("no_job")
def test_what_another_run_says_in_the_folder_is_not_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an evaluation that comes to its time limit: the job would neither be finished, nor start again."""
    watched = Supervisor(str(tmp_path), tmp_path)
    watched.starting(group(HashStore()))
    with monkeypatch.context() as patch:
        patch.delenv(JOB)
        append_event(tmp_path, "preempted", rank=0, by="max_time", status=143)
    assert watched.how_it_ended() == "finished"
    watched.looked({0: 1})
    assert watched.may_restart()
    append_event(tmp_path, "preempted", rank=0, by="max_time", status=0)
    assert watched.how_it_ended() == "the run was stopped, max_time"


@pytest.mark.parametrize(("samples", "advised"), [(None, False), ([3], True)])
def test_samples_are_left_out_only_if_a_batch_could_not_be_read(tmp_path: Path, samples: Any, advised: bool) -> None:
    watched = Supervisor("", tmp_path)
    watched.history.begin(2, 1, 0)
    watched.history.current.fault = Fault("rank 1 failed: StorageError", 1, samples)
    watched.futile = "iteration 102 failed twice"
    said = summary(1, "failed", watched)
    assert ("leave such samples out" in said) is advised
    assert "To do: mend what fails" in said


@pytest.mark.usefixtures("no_job")
def test_a_machine_that_joins_later_goes_on_with_the_job(tmp_path: Path) -> None:
    old, new, store = Supervisor("", tmp_path), Supervisor("", tmp_path), HashStore()
    old.starting(group(HashStore()))
    job = os.environ.pop(JOB)
    # Both come to the next start; what one waits for, the other has put into the store.
    store.set("flextrain/agents/1", json.dumps({"starts": 1, "job": job}))
    new.starting(group(store, 0, 2))
    assert (os.environ.pop(JOB), os.environ.pop(RESTARTS)) == (job, "1")
    old.starting(group(store, 1, 2))
    assert (os.environ[JOB], os.environ[RESTARTS]) == (job, "1")


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize(
    "ranks, wanted, machines, leaves",
    [([2], True, 2, True), ([2, 3], True, 2, True), ([1], True, 2, False), ([1, 2], True, 2, False), ([2], False, 2, False), ([2], True, 1, False)],
)  # fmt: skip
def test_a_machine_leaves_whose_device_computes_wrongly(
    tmp_path: Path, ranks: list[int], wanted: bool, machines: int, leaves: bool
) -> None:
    """If the fault is its own alone, the run wants it, and another machine is there."""
    store, work_dir, folder = HashStore(), tmp_path / "work", tmp_path / "progress"
    work_dir.mkdir()
    folder.mkdir()
    store.set("flextrain/agents/0", json.dumps({"starts": 0, "job": "a"}))
    watched = Supervisor(str(work_dir), folder)
    watched.starting(group(store, 1 if machines == 2 else 0, machines))
    append_event(
        work_dir, "corrupted", rank=ranks[0], ranks=ranks, iter=4, reason="rank 2: the output of head", leaves=wanted
    )
    watched.looked({2: 1})
    assert watched.leaves() == ("rank 2: the output of head" if leaves else "")


def test_a_signal_in_torchs_timing_stays_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch subtracts a time that it has not taken yet; its error ended `flextrain run` with status 1."""

    def come() -> float:
        raise SignalException("came", signal.SIGTERM)

    monkeypatch.setattr(metrics_api, "time", SimpleNamespace(time=come))
    with pytest.raises(SignalException), signals_as_they_came():
        metrics_api.prof(lambda: None)()


def test_a_restart_heeds_the_shutdown_timeout() -> None:
    """A stopped process never ends; torch would wait for it for 30 s before every restart, whatever was asked for."""
    launcher = importlib.import_module("torch.distributed.launcher.api")
    waited: list[tuple[Any, ...]] = []
    with watched_agent(Supervisor("", Path())):
        agent_class: Any = launcher.LocalElasticAgent
        if "shutdown_timeout" not in inspect.signature(agent_class.__init__).parameters:
            pytest.skip("this version of torch has no such option")
        spec = WorkerSpec("trainer", 1, SimpleNamespace(), entrypoint="true")  # type: ignore[arg-type]
        agent = agent_class(spec, DefaultLogsSpecs(), shutdown_timeout=7)
    agent._pcontext = SimpleNamespace(close=lambda *arguments: waited.append(arguments))
    agent._stop_workers(agent._worker_group)  # before a restart
    agent._shutdown(signal.SIGINT, timeout=5)  # at the end
    assert waited == [(signal.SIGTERM, 7), (signal.SIGINT, 5)]


def test_further_signals_wait_until_the_processes_have_saved() -> None:
    """The third one ended the agent, and with it the store: the processes, which were saving, could not."""
    launcher = importlib.import_module("torch.distributed.launcher.api")
    told: list[Any] = []

    def close(*_: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        told.append("saved")

    with watched_agent(Supervisor("", Path())):
        spec = WorkerSpec("trainer", 1, SimpleNamespace(shutdown=lambda: None), entrypoint="true")
        agent: Any = launcher.LocalElasticAgent(spec, DefaultLogsSpecs())
    agent._pcontext = SimpleNamespace(close=close)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in before:
            signal.signal(number, lambda number, _: told.append(number))
        agent._shutdown(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert told == ["saved", signal.SIGTERM]


# Real processes

JOB_SCRIPT = """
    import os, signal, sys
    import torch
    from torch import nn
    from flextrain import FlexibleRunner, Hook

    work_dir, kind, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, i):
            if kind == "raise-at-once" or kind == "raise" and i == 33:
                raise ValueError("sample 33 is broken")
            return dict(x=torch.full((4,), float(i)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
        def forward(self, x):
            return dict(loss=self.layer(x / 64).square().mean())

    class Killer(Hook):
        def after_train_iter(self, runner, *args, **kwargs):
            if kind == "kill" and runner.iter + 1 == 7 and rank == 1 and "FLEXTRAIN_RESUME" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind.startswith("stop") and runner.iter + 1 == 7 and rank == 1:
                runner.request_stop("enough")
        def before_train_iter(self, runner, *args, **kwargs):
            if kind == "faulty" and runner.iter + 1 == 8 and rank == 1:
                # In the first of two runs only.
                self.handle = runner.strategy.module.layer.register_forward_hook(self.spoil)
        def spoil(self, module, args, output):
            self.handle.remove()
            return output * 2

    runner = FlexibleRunner(
        model=Net, work_dir=work_dir, train_dataloader=dict(dataset=Data(), batch_size=2, collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        # The processes agree on an update to stop at, which needs some on a busy machine.
        train_cfg=dict(by_epoch=False, max_iters=400 if kind.startswith("stop") else 12),
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=3), logger=dict(interval=1)),
        env_cfg=dict(preemption=dict(status=int(kind.removeprefix("stop")))) if kind.startswith("stop") else None,
        custom_hooks=[Killer(), *([dict(type="ReplayHook", interval=4, on_mismatch="leave")] if kind == "faulty" else [])],
        randomness=dict(seed=0))
    runner.train()
    if rank == 0:
        print("weights", [round(float(p), 6) for p in runner.strategy.module.parameters() for p in p.flatten()])
"""


def run(tmp_path: Path, name: str, kind: str) -> tuple[int, str, list[dict[str, Any]]]:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB_SCRIPT))
    command = [
        sys.executable,
        "-m",
        "flextrain",
        "run",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path / name),
        kind,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    return done.returncode, done.stdout, read_events(tmp_path / name)


@pytest.mark.full
@pytest.mark.processes
def test_a_killed_process_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    """The script says neither resume=True nor anything of a second start."""
    status, shown, events = run(tmp_path, "killed", "kill")
    assert status == 0, shown
    assert [event["event"] for event in events if event.get("agent")] == ["launched", "restarted", "ended"]
    assert [event["iter"] for event in events if event["event"] == "started"] == [0, 6]
    assert "resumes this job's newest checkpoint" in shown
    assert "2 starts, 1 restart" in shown
    assert "rank 1 was ended by SIGKILL" in shown
    calm = run(tmp_path, "calm", "")[1]
    assert [line for line in shown.splitlines() if line.startswith("weights")] == [
        line for line in calm.splitlines() if line.startswith("weights")
    ]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("status", [0, 85])
def test_a_run_that_asked_for_its_end_has_one_start_and_is_not_finished(tmp_path: Path, status: int) -> None:
    ended_with, shown, events = run(tmp_path, "stopped", f"stop{status}")
    assert ended_with == status, shown
    assert [event["event"] for event in events if event.get("agent")] == ["launched", "ended"]
    assert "flextrain run: the run was stopped, enough; exit status" in shown
    assert "To go on: the same command" in shown


@pytest.mark.full
@pytest.mark.processes
def test_a_broken_sample_is_named_after_the_second_time(tmp_path: Path) -> None:
    status, shown, events = run(tmp_path, "broken", "raise")
    assert status == 1, shown
    last = events[-1]
    assert last["event"] == "gave_up"
    assert 33 in last["samples"]
    assert "failed twice, with samples" in last["why"]
    assert last["why"] in shown


@pytest.mark.full
@pytest.mark.processes
def test_a_machine_whose_job_was_given_up_elsewhere_says_so(tmp_path: Path) -> None:
    """The other one has the rendezvous's store, and leaves with it."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB_SCRIPT))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "flextrain", "run", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}"]
    command += ["--rdzv-id", tmp_path.name, str(script), str(tmp_path / "work")]

    def start(kind: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, kind], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def listens() -> bool:
        with socket.socket() as to:
            return to.connect_ex(("localhost", port)) == 0

    with start("raise-at-once") as first:
        while not listens():
            assert first.poll() is None
            time.sleep(0.1)
        with start("") as second:
            shown = [job.communicate(timeout=300)[0] for job in (first, second)]
            assert (first.returncode, second.returncode) == (1, 1), shown
    assert "not restarted" in shown[0]
    assert "flextrain run: the job has ended on" in shown[1]
    assert "did not find each other" not in shown[1]


@pytest.mark.full
@pytest.mark.processes
def test_a_job_goes_on_without_a_machine_that_computes_wrongly(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB_SCRIPT))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "flextrain", "run", "--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{port}"]
    command += [
        "--rdzv-id",
        tmp_path.name,
        "--rdzv-conf",
        "last_call_timeout=20",
        str(script),
        str(tmp_path / "work"),
        "faulty",
    ]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with start() as first:
        time.sleep(1.0)  # so that it has rank 0 and the store
        with start() as second:
            shown = [job.communicate(timeout=300)[0] for job in (first, second)]
            assert (first.returncode, second.returncode) == (0, 1), shown
    assert "this machine has left the job, rank 1: the output of layer in forward" in shown[1]
    events = read_events(tmp_path / "work")
    assert [event["processes"] for event in events if event["event"] == "started"] == [2, 1]
    assert next(event for event in events if event["event"] == "corrupted")["iter"] == 8
    assert next(event for event in events if event["event"] == "restarted")["iter"] == 7
    assert events[-1]["event"] == "ended"


# Probes


@pytest.mark.usefixtures("no_job")
def test_the_file_for_probes_is_touched_unless_training_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of training nothing is known, and the machine counts as alive."""
    now = [100.0]
    monkeypatch.setattr("flextrain.elastic.launching.time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    alive, folder = tmp_path / "alive", tmp_path / "progress"
    folder.mkdir()
    watched = Supervisor("", folder, alive)
    watched.starting(group(HashStore()))
    file = ProgressFile(os.environ[PROGRESS])

    def is_touched(beat: str | None, after_s: float = 1.0) -> bool:
        if beat is not None:
            file.write(Progress(str(tmp_path), 0, 1, beat))
        now[0] += after_s
        alive.touch()
        os.utime(alive, (0, 0))
        watched.looked(None)
        return alive.stat().st_mtime > 0

    assert is_touched(None)
    assert is_touched(""), "before training"
    assert is_touched("0 1 0")
    assert not is_touched("0 1 0"), "it stands still"
    assert is_touched("0 2 0")
    assert not is_touched("0 3 0", after_s=0.1), "a file is not touched ten times a second"
    assert is_touched("0 3 0"), "and what came meanwhile is not lost"
    assert is_touched(""), "training is over, and the script does something else"


def test_the_file_for_probes_needs_a_folder(script: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--alive-file .*/none/alive has no folder, give one that exists"):
        read_options(["--alive-file", str(tmp_path / "none" / "alive"), script])
    assert "--alive-file" not in " ".join(
        read_options(["--alive-file", str(tmp_path / "alive"), script]).for_torchrun()
    )
