"""Run a script in processes that torchrun's agent starts, watches and restarts."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.base.errors import ConfigError, LaunchError, counted
from ..core.base.events import JOB, PROGRESS, RESTARTS, append_event, read_events, read_progress
from ..doctor.report import SHARED_STORE
from .command_line import DEFAULT_SIGNALS, OWN, Options
from .starts import Fault, History, failure_elsewhere, failure_of, signal_name

_FAILED = 1
_SIGNALS = [signal.Signals[name] for name in DEFAULT_SIGNALS.split(",")]
_TOUCH_S = 1.0


class Supervisor:
    """Follows the starts of a job on one machine, and says when another one makes no sense.

    Args:
        work_dir: folder of ``events.jsonl``; empty: the work directory of the runner.
        folder: an empty folder for progress files.
        alive_file: touched about once a second while training gets on, and while there is none; None: no file is.
    """

    def __init__(self, work_dir: str, folder: Path, alive_file: Path | None = None) -> None:
        self.history = History()
        self.futile: str | None = None
        """Why there was no restart though one was left."""
        self.is_first_machine = True
        self.left_out = ""
        """Why this machine has left the job; empty if it has not."""
        self._ranks: set[int] = set()
        self._work_dir, self._folder, self._job = work_dir, folder, ""
        self._waiting: list[dict[str, Any]] = []  # events, while the work directory is not known
        self._began_at = time.time()
        self._alive_file, self._beat, self._touched = alive_file, "", -math.inf

    @property
    def work_dir(self) -> str:
        """The folder of ``events.jsonl``; empty while it is not known."""
        return self._work_dir

    def starting(self, group: Any) -> None:
        """Prepare the environment of the processes; see WatchesAgent."""
        number, self._job = self._agree(group)
        os.environ[JOB] = self._job
        os.environ[PROGRESS] = str(self._folder / f"{number}.json")
        if number:
            os.environ[RESTARTS] = str(number)
        self.is_first_machine = group.group_rank == 0
        self._ranks = {worker.global_rank for worker in group.workers} if group.group_world_size > 1 else set()
        processes = group.workers[0].world_size
        before = self.history.current if self.history.starts else None
        if before is not None and before.fault is None:
            before.elsewhere = failure_elsewhere(before.machines, group.group_world_size, self._own_events())
        self.history.begin(processes, group.group_world_size, number)
        self._began_at = time.time()
        if before is None and number == 0:
            self._tell("launched", job=self._job, processes=processes, machines=group.group_world_size)
            return
        reason = "this machine joined" if before is None else before.reason
        facts: dict[str, Any] = {} if before is None else {"iter": before.iter}
        if before is not None and before.fault is not None and before.fault.samples:
            facts["samples"] = list(before.fault.samples)
        counts = {"processes": processes, "machines": group.group_world_size}
        self._tell("restarted", job=self._job, restarts=number, reason=reason, **facts, **counts)
        self._say(f"restart {number} on {counted(processes, 'process', 'processes')}: {reason}")

    def looked(self, exits: Mapping[int, int] | None) -> None:
        """Follow the progress; see WatchesAgent."""
        progress = read_progress(os.environ[PROGRESS])
        self._touch(progress.beat)
        self.history.saw(progress.began, progress.iter, time.time())
        if progress.work_dir and not self._work_dir:
            self._work_dir = progress.work_dir
        if self._work_dir and self._waiting:
            self._flush()
        if exits is not None:  # torch names no process if its whole group is unhealthy
            self.history.current.fault = self._reason(exits or {0: _FAILED})

    def may_restart(self) -> bool:
        """Whether the last start gained something; see WatchesAgent."""
        self.futile = self.history.futile()
        return self.futile is None

    def leaves(self) -> str:
        """Whether a process of this machine alone has computed wrongly, and its run wants to go on without; see WatchesAgent."""
        told = [event for event in self._own_events() if event["event"] == "corrupted" and event.get("leaves")]
        if told and self._ranks.issuperset(told[-1]["ranks"]):
            self.left_out = str(told[-1]["reason"])
        return self.left_out

    @contextmanager
    def signals_wait(self) -> Iterator[None]:
        """Let signals wait for the end of the block: each would end the wait for processes that save, and take the store from them."""
        came: list[int] = []
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: found for number in _SIGNALS if is_main and callable(found := signal.getsignal(number))}
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for one in came[:1]:
            signal.raise_signal(one)

    def ended(self, event: str, **facts: Any) -> None:
        """Note the end of the job."""
        if PROGRESS in os.environ:
            self.looked(None)
        self.history.end(time.time())
        self._tell(event, **facts)
        self._flush()

    def _agree(self, group: Any) -> tuple[int, str]:
        """The number of starts that the job has had, and its identifier: the same on all machines."""
        own = {"starts": 0 if not self.history.starts else self.history.current.number + 1, "job": self._job}
        if not self._job:
            own["job"] = uuid.uuid4().hex
        store, key = group.store, "flextrain/agents/{}".format
        store.set(key(group.group_rank), json.dumps(own))
        all_of_them = [json.loads(store.get(key(rank))) for rank in range(group.group_world_size)]
        oldest = max(all_of_them, key=lambda one: one["starts"])  # the first of those that are equal
        return int(oldest["starts"]), str(oldest["job"])

    def how_it_ended(self) -> str:
        """Return how processes ended that all gave the status 0; with ``preemption.status=0`` a run may be incomplete."""
        self.looked(None)
        if "preempted" not in [event["event"] for event in self._own_events()]:
            return "finished"
        self.history.current.fault = self._reason({0: 0})
        return self.history.current.fault.reason

    def _own_events(self) -> list[dict[str, Any]]:
        """Those of this start; an evaluation in the same folder may have written others."""
        events = read_events(self._work_dir) if self._work_dir else []
        own = (event for event in events if event.get("job") == self._job and "agent" not in event)
        return [event for event in own if event["time"] >= self._began_at]

    def _reason(self, exits: Mapping[int, int]) -> Fault:
        return failure_of(exits, self._own_events())

    def _tell(self, event: str, **facts: Any) -> None:
        if self.is_first_machine:  # others would write the same
            self._waiting.append({"event": event, "time": time.time(), "agent": True, **facts})
            if self._work_dir:
                self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and self._work_dir and Path(self._work_dir).is_dir():
            for facts in waiting:
                append_event(self._work_dir, **facts)

    def _touch(self, beat: str) -> None:
        now = time.monotonic()
        if self._alive_file is not None and now - self._touched >= _TOUCH_S and (not beat or beat != self._beat):
            self._alive_file.touch()
            self._beat, self._touched = beat, now

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"flextrain run: {text}\n")
        sys.stderr.flush()


def launch_and_watch(options: Options) -> tuple[int, str, Supervisor]:
    """Run the script until it has ended well, or another start makes no sense.

    Returns:
        The exit status, how it ended in words, and what happened meanwhile.

    Raises:
        ConfigError: torch's version has no such option, or a value is not allowed.
        LaunchError: the machines did not find each other.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousError

    from ..core.torch_compat.torch_private import watched_agent

    arguments = _parsed(torchrun, options)
    if options.is_elastic:
        os.environ[SHARED_STORE] = "1"  # else no machine could join, see restarts_in_words
    if "OMP_NUM_THREADS" not in os.environ:
        # Each process would start a thread per core, or torchrun one alone with a banner.
        processes = int(arguments.nproc_per_node) if str(arguments.nproc_per_node).isdigit() else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    for name in (RESTARTS, JOB, PROGRESS):  # this may itself run under another one
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="flextrain-run-") as folder:
        watcher = Supervisor(options.work_dir, Path(folder), options.alive_file)
        try:
            with watched_agent(watcher), signals_as_they_came():
                torchrun.run(arguments)  # type: ignore[no-untyped-call]
        except SignalException as error:
            if watcher.left_out:
                watcher.ended("left", reason=watcher.left_out, status=_FAILED)
                return _FAILED, f"this machine has left the job, {watcher.left_out}", watcher
            number = int(signal.Signals(error.sigval))
            watcher.ended("ended", reason=f"{signal_name(number)} to flextrain run", status=128 + number)
            return 128 + number, f"ended by {signal_name(number)}", watcher
        except ChildFailedError:
            fault = watcher.history.current.fault or Fault("a process failed", _FAILED)
            if fault.is_asked:
                watcher.ended("ended", reason=fault.reason, status=fault.status)
                return fault.status, fault.reason, watcher
            why = watcher.futile or f"no restart of {arguments.max_restarts} is left"
            facts = {"samples": list(fault.samples)} if fault.samples else {}
            watcher.ended("gave_up", reason=fault.reason, why=why, status=fault.status, **facts)
            return fault.status, f"failed, {fault.reason}; not restarted: {why}", watcher
        except ValueError as error:  # of an option, which torch reads only now
            if watcher.history.starts:
                raise
            raise ConfigError(f"run: {' '.join(str(error).split())}") from error
        except RendezvousClosedError:
            watcher.ended("ended", reason="the job has ended on another machine", status=_FAILED)
            return _FAILED, "the job has ended on another machine, whose output says how", watcher
        except RendezvousConnectionError as error:
            if not watcher.history.starts:
                raise _not_found(error) from error
            # The machine with the store has left, because its processes may not be started again, or is lost.
            how = "the job has ended on the machine of --rdzv-endpoint, whose output says how, or that machine is lost"
            watcher.ended("ended", reason=how, status=_FAILED)
            return _FAILED, how, watcher
        except (RendezvousError, TimeoutError) as error:
            watcher.ended("gave_up", reason=str(error), status=_FAILED)
            raise _not_found(error) from error
        how = watcher.how_it_ended()
        watcher.ended("ended", reason=how, status=0)
        return 0, how, watcher


@contextmanager
def signals_as_they_came() -> Iterator[None]:
    """Context in which a signal that comes before torch looks at the clock, in its timing of a method, stays a SignalException."""
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        yield
    except UnboundLocalError as error:
        if isinstance(error.__context__, SignalException):
            raise error.__context__ from None
        raise


def _not_found(error: Exception) -> LaunchError:
    return LaunchError(f"run: the machines did not find each other, {' '.join(str(error).split())}")


def _take_as_sigterm(number: signal.Signals) -> None:
    """For torch before 2.9, whose agent such a signal would end, and leave the processes behind."""
    signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def _parsed(torchrun: Any, options: Options) -> Any:
    parser = torchrun.get_args_parser()
    known = {name for action in parser._actions for name in action.option_strings}
    words = options.for_torchrun()
    for name in options.given.keys() - known - set(OWN):
        raise ConfigError(f"run: this version of torch has no {name}")
    if "--signals-to-handle" not in known:
        _take_as_sigterm(signal.SIGUSR1)
    elif "--signals-to-handle" not in options.given:
        words.insert(0, f"--signals-to-handle={DEFAULT_SIGNALS}")
    try:
        return parser.parse_args(words)
    except SystemExit:  # argparse has said why
        raise ConfigError("run: torchrun refuses the options") from None


# The summary at the end of `flextrain run`.


def summary(status: int, how: str, watched: Supervisor) -> str:
    """What happened to a job, in a few lines: starts, restarts with their reasons, what they cost, and what to do."""
    history = watched.history
    reasons = Counter(start.reason for start in history.starts[:-1])
    lines = [f"{how}; exit status {status}"]
    if history.starts:
        last = history.current
        lines.append(
            f"{counted(len(history.starts), 'start')}, {counted(len(history.starts) - 1, 'restart')}; the last on "
            f"{counted(last.processes, 'process', 'processes')} of {counted(last.machines, 'machine')}, {last.iter} iterations"
        )
    lines += [f"  {number} x {reason}" if number > 1 else f"  {reason}" for reason, number in reasons.items()]
    if reasons:
        lines.append(f"{counted(history.repeated, 'update')} repeated, {history.lost_s:.1f} s lost by restarts")
    if advice := _advice(status, watched):
        lines.append(advice)
    return "\n".join(f"flextrain run: {line}" for line in lines)


def _advice(status: int, watched: Supervisor) -> str:
    where = f" {watched.work_dir}/events.jsonl has all events." if watched.work_dir else ""
    fault = watched.history.current.fault if watched.history.starts else None
    is_preemption = fault is not None and fault.is_preemption
    if status == 0 and not is_preemption:
        return ""
    if status in (130, 143) or is_preemption:
        return f"To go on: the same command, with resume=True in the script.{where}"
    if watched.futile:
        or_leave = ", or leave such samples out" if fault is not None and fault.samples else ""
        return f"To do: mend what fails{or_leave}; then the same command with resume=True.{where}"
    return f"To do: see the first error above; the same command with resume=True in the script goes on.{where}"
