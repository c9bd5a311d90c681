"""Worker processes for tests: started once, used for many calls, and unable to hang the caller."""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from ..core.base.errors import FlexTrainError
from ._worker import READY, Answer, Call, _end_with_parent, serve
from .loop import environ

T = TypeVar("T")

START_TIMEOUT_S = 180.0  # a cold import of torch on a busy machine
_SHORTEST_WAIT_S = 0.05  # less than this is no reason to wait for an answer once more
_MOST_GLOO_THREADS = 8  # of one process: each wakes a hundred times a second
GRACE_S = 2.0  # how long the others may take once one rank has failed
NO_ACCELERATORS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}

__all__ = ["WorkerError", "WorkerGroup", "run_distributed"]


class WorkerError(FlexTrainError, RuntimeError):
    """A process raised, died or hung; the message has its traceback, or the stack of every process that hung.

    Attributes:
        rank: the rank that failed first.
        timed_out: whether it was ended because it did not answer in time.

    ``__cause__`` is the exception of that rank, if it can be pickled.
    """

    def __init__(self, message: str, rank: int, timed_out: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.timed_out = timed_out


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    log: Path
    stacks: Path
    log_start: int = 0

    def gloo_threads(self) -> int:
        """Threads that serve process groups of gloo's, those that nobody uses any more included; 0 without Linux or before torch 2.11."""
        count = 0
        for name in Path(f"/proc/{self.process.pid}/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # one that has ended meanwhile
                count += name.read_text() == "pt_gloo_runloop\n"
        return count

    def output(self, last_chars: int = 4000) -> str:
        """The tail of what the process printed during this call."""
        if not self.log.exists():
            return ""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace")
        # Python ends the stacks of a crash with a list of modules, which may be longer than the rest.
        return re.sub(r"\n+Extension modules: .*", "", text)[-last_chars:].strip()


class WorkerGroup:
    """Processes on this machine with the environment that torchrun would give them.

    Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, and
    otherwise the variables, folder and import path that the caller has at the time of the call. The processes start at
    the first ``run`` and are used again until ``close``; each computes with one thread. They are forked from one process
    that has imported torch. Processes that see accelerators start anew, because accelerators do not work after a fork.
    Where calls have left many process groups of gloo's behind, whose threads take a processor's time while they wait, the
    next ``run`` starts new processes; torch's compiler keeps the groups that compiled code has used.

    Args:
        world_size: number of processes.
        timeout_s: largest number of seconds for one ``run``. On Linux those in which a process waits for a busy processor do not
            count.
        accelerators: whether the processes see CUDA and Ascend devices. Without them, every machine behaves alike.
        imports: modules that all processes will import. If the first group names them, they are imported once for all groups.
    """

    def __init__(
        self, world_size: int, timeout_s: float = 60.0, *, accelerators: bool = False, imports: Sequence[str] = ()
    ) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.accelerators = accelerators
        self.imports = tuple(imports)
        self._workers: list[_Worker] = []
        self._folder: Path | None = None

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """The results of ``function(*args, **kwargs)`` on every process, ordered by rank.

        The function must be importable (no lambda, no function inside a function), arguments and results picklable.
        A process group that the function leaves is destroyed.

        Raises:
            WorkerError: a rank raised, died, or did not answer within ``timeout_s``. The processes are then ended, and the
                next call starts new ones. Those that see accelerators, which start slowly, stay if all have answered.
        """
        payload, modules = _pack(function, args, kwargs)
        self._start()
        port = _free_port()
        try:
            for rank, worker in enumerate(self._workers):
                worker.log_start = worker.log.stat().st_size
                call = Call(payload, modules, self._environ(rank, port), str(Path.cwd()), list(sys.path))
                worker.connection.send_bytes(pickle.dumps(call))
            answers = self._collect(self.timeout_s)
        except BaseException:  # such as Ctrl-C: the next call would get the answers to this one
            self._kill()
            raise
        if self._failed(answers):
            self._raise(answers, getattr(function, "__name__", str(function)))
        return [pickle.loads(answers[rank].result or b"") for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes. The next ``run`` starts new ones. May be called twice."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(timeout=GRACE_S)
        self._kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        if self._workers and all(w.process.is_alive() and w.gloo_threads() < _MOST_GLOO_THREADS for w in self._workers):
            return
        self._kill()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="flextrain-workers-"))
            # Registered after multiprocessing's own handler, so it runs before that one waits for the processes.
            atexit.register(self.close)
        get_context = multiprocessing.get_context
        context = get_context("spawn") if self.accelerators else get_context("forkserver")
        context.set_forkserver_preload([serve.__module__, *self.imports])
        for rank in range(self.world_size):
            log, stacks = self._folder / f"rank{rank}.log", self._folder / f"rank{rank}.stacks"
            log.write_bytes(b"")
            ours, theirs = context.Pipe()
            # Not a daemon, because data loaders in it start child processes.
            process = context.Process(
                target=serve, args=(theirs, str(log), str(stacks), self.imports), name=f"flextrain-rank{rank}"
            )
            # Read by libraries when they are imported, which the process does that the others are forked from.
            with environ(OMP_NUM_THREADS="1", **({} if self.accelerators else NO_ACCELERATORS)):
                process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, log, stacks))
        answers = self._collect(START_TIMEOUT_S, expect_ready=True)
        if self._failed(answers):
            self._raise(answers, "start")

    def _environ(self, rank: int, port: int) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **({} if self.accelerators else NO_ACCELERATORS),
        }

    def _collect(self, timeout_s: float, expect_ready: bool = False) -> dict[int, Answer]:
        """The answers that arrived in time. For a rank that died, the answer has its exit code."""
        answers: dict[int, Answer] = {}
        deadline, before, granted_s = time.monotonic() + timeout_s, self._queued_s(), 0.0
        while len(answers) < self.world_size:
            pending = {rank: w for rank, w in enumerate(self._workers) if rank not in answers}
            watched = [end for w in pending.values() for end in (w.connection, w.process.sentinel)]
            if not wait(watched, timeout=max(0.0, deadline - time.monotonic())):
                queued_s = max((s - before.get(pid, 0.0) for pid, s in self._queued_s().items()), default=0.0)
                if queued_s - granted_s < _SHORTEST_WAIT_S or any(answer.result is None for answer in answers.values()):
                    break
                deadline, granted_s = time.monotonic() + queued_s - granted_s, queued_s
            for rank, worker in pending.items():
                answer = _receive(worker, expect_ready)
                if answer is not None:
                    answers[rank] = answer
                    if answer.result is None:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _queued_s(self) -> dict[int, float]:
        """Seconds that each process, and each that it has started, has waited for a busy processor; empty without Linux.

        Source: https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat
        """
        groups = {worker.process.pid for worker in self._workers}
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # one that has ended meanwhile
                if os.getpgid(pid := int(path.name)) in groups:
                    found[pid] = int((path / "schedstat").read_text().split()[1]) / 1e9
        return found

    def _failed(self, answers: dict[int, Answer]) -> bool:
        return len(answers) < self.world_size or any(answer.result is None for answer in answers.values())

    def _raise(self, answers: dict[int, Answer], what: str) -> None:
        failures = {rank: answer for rank, answer in answers.items() if answer.result is None}
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        dead = [rank for rank, worker in enumerate(self._workers) if not worker.process.is_alive()]
        parts: list[str] = []
        cause = None
        if failures:
            first = min(failures, key=lambda rank: (_is_consequence(failures[rank]), failures[rank].raised_at))
            answer = failures[first]
            parts += [f"{what}: rank {first} of {self.world_size} failed, {answer.error}", answer.traceback.rstrip()]
            parts += [f"rank {rank} then failed too, {failures[rank].error}" for rank in failures if rank != first]
            cause = pickle.loads(answer.exception) if answer.exception else None
        else:
            first = silent[0]
            ranks = ", ".join(map(str, silent))
            parts.append(f"{what}: no answer from rank {ranks} of {self.world_size} within {self.timeout_s:g} s")
        parts += [f"rank {rank} was at\n{self._stack(rank)}" for rank in silent]
        printed = {rank: worker.output() for rank, worker in enumerate(self._workers)}
        parts += [f"rank {rank} printed\n{text}" for rank, text in printed.items() if text]
        if silent or dead or not self.accelerators:
            self._kill()
        raise WorkerError("\n".join(parts), first, timed_out=not failures) from cause

    def _stack(self, rank: int) -> str:
        """The Python stack of every thread of a rank that still runs."""
        worker = self._workers[rank]
        if worker.process.pid is None or not worker.process.is_alive():
            return "(ended)"
        # The signal would end a process that does not handle it yet; such a process has no stack to report.
        if worker.stacks.exists():
            os.kill(worker.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, text = text, worker.stacks.read_text() if worker.stacks.exists() else ""
            if text and text == before:
                break
        threads = [thread for thread in text.strip().split("\n\n") if f"in {_end_with_parent.__name__}" not in thread]
        return "\n\n".join(threads) or "(no stack could be read)"

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.process.is_alive() and worker.process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.kill()  # it may not lead a process group yet
            worker.process.join()
            worker.connection.close()
        self._workers = []


def run_distributed(
    function: Callable[..., T], world_size: int, timeout_s: float, *args: Any, **kwargs: Any
) -> list[T]:
    """The results of ``function`` on every process, in new processes that end after this call; see ``WorkerGroup.run``.

    Args:
        function: a function that the new processes can import.
        world_size: number of processes.
        timeout_s: seconds after which a process that has not answered counts as hung.
        args, kwargs: arguments of the function.
    """
    with WorkerGroup(world_size, timeout_s) as group:
        return group.run(function, *args, **kwargs)


def _is_consequence(answer: Answer) -> bool:
    """Whether a rank failed only because another one left. Its error may arrive before that of the other rank."""
    return any(
        words in answer.error for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    )


def _receive(worker: _Worker, expect_ready: bool) -> Answer | None:
    try:
        if worker.connection.poll():
            data = worker.connection.recv_bytes()
            if expect_ready:
                return Answer(result=data) if data == READY else Answer(error="did not start", raised_at=time.time())
            return pickle.loads(data)  # type: ignore[no-any-return]
    except (EOFError, OSError):
        worker.process.join(timeout=GRACE_S)
    if worker.process.is_alive():
        return None
    return Answer(error=f"the process ended with exit code {worker.process.exitcode}", raised_at=time.time())


class _Pickler(pickle.Pickler):
    """A pickler that records the modules of pickled functions and classes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)):
            module = sys.modules.get(value.__module__)
            file = getattr(module, "__file__", None)
            if file and value.__module__ != "__main__":
                self.modules[value.__module__] = file
        return NotImplemented


def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump((function, args, kwargs))
    return buffer.getvalue(), pickler.modules


def _free_port() -> int:
    """A free port outside of the range from which the system chooses ports."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the sequence of ports is infinite")


# Below the ports of connections (32768 and above on Linux), one of which could take the port before rank 0 does. Test
# sessions that run at the same time start at distant ports.
_FIRST_PORT, _PORT_COUNT = 16000, 16000
_PORTS = (_FIRST_PORT + (os.getpid() * 617 + number) % _PORT_COUNT for number in itertools.count())
