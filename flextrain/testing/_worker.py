"""The worker process of a WorkerGroup: it answers calls until its parent ends."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..core.base.errors import LaunchError

READY = b"ready"


@dataclass(frozen=True)
class Call:
    """One call, as it is sent to a worker.

    Attributes:
        payload: pickled (function, args, kwargs).
        modules: the modules that ``payload`` refers to, with their files, in case the worker cannot find them by name.
        environ: all environment variables during the call, including those that torchrun sets.
    """

    payload: bytes
    modules: dict[str, str]
    environ: dict[str, str]
    cwd: str
    path: list[str]


@dataclass(frozen=True)
class Answer:
    """The answer of a worker: a pickled result, or an error as text and, if it can be pickled, as an exception."""

    result: bytes | None = None
    error: str = ""
    traceback: str = ""
    exception: bytes | None = None
    raised_at: float = 0.0


def serve(connection: Connection, log_file: str, stack_file: str, imports: tuple[str, ...]) -> None:
    """Answer calls until the parent closes the connection or ends."""
    os.setsid()  # its children end with it, and Ctrl-C reaches only the parent
    _redirect_output(log_file)
    faulthandler.enable()
    stacks = Path(stack_file).open("w")  # noqa: SIM115 - must stay open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # modules are for ever: without them the collection after each call takes a tenth of the time
    connection.send_bytes(READY)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(pickle.dumps(_answer(request)))


def _redirect_output(log_file: str) -> None:
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The parent may have replaced these two with objects that capture output.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _answer(request: bytes) -> Answer:
    call: Call = pickle.loads(request)
    with _clean_state(call):
        try:
            for name, file in call.modules.items():
                _make_importable(name, file)
            function, args, kwargs = pickle.loads(call.payload)
            return Answer(result=pickle.dumps(function(*args, **kwargs)))
        except BaseException as error:  # also SystemExit and DCP's CheckpointException: the parent decides
            # The time is taken here, because leaving the process group below makes waiting ranks fail too.
            return Answer(
                raised_at=time.time(),
                error="".join(traceback.format_exception_only(error)).strip(),
                traceback="".join(traceback.format_exception(error)),
                exception=_pickled_exception(error),
            )


def _pickled_exception(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


@contextlib.contextmanager
def _clean_state(call: Call) -> Iterator[None]:
    """Reset the process before each call, and destroy its process group afterwards."""
    os.environ.clear()
    os.environ.update(call.environ)
    os.chdir(call.cwd)
    sys.path[:] = call.path
    logging.getLogger("flextrain").setLevel(logging.NOTSET)  # a runner sets it, on ranks other than 0 to be silent
    _reset_torch()
    modules = len(sys.modules)
    try:
        yield
    finally:
        _tear_down_strategies()
        _leave_process_group()
        _end_loader_workers()
        while gc.collect():  # what a finalizer lets go of is found by the next one
            pass
        if len(sys.modules) > modules:
            gc.freeze()


def _reset_torch() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if (
        torch.are_deterministic_algorithms_enabled()
    ):  # asked first: setting it imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(False)


def _tear_down_strategies() -> None:
    """End what the function left set up: engines keep process groups, whose threads wake a hundred times a second."""
    module = sys.modules.get("flextrain.strategies.base")
    if module is not None:
        for left in [each for each in gc.get_objects() if module.Strategy in type(each).__mro__]:
            left.leave()


def _leave_process_group() -> None:
    from ..core.comm.collectives import destroy_process_group

    destroy_process_group()


def _end_loader_workers() -> None:
    from ..core.torch_compat.torch_private import end_loader_workers

    end_loader_workers()


def _make_importable(name: str, file: str) -> None:
    """Import ``name``; from ``file`` if it is not on the path (test modules, scripts loaded by path)."""
    try:
        importlib.import_module(name)
        return
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(f"{missing}.")):
            raise
    root = _root_of(name, Path(file))
    if root is not None:
        sys.path.append(str(root))
        importlib.invalidate_caches()
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise LaunchError(f'WorkerGroup.run: module "{name}" cannot be imported from {file}')
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _root_of(name: str, file: Path) -> Path | None:
    """The folder to add to the path so that ``name`` can be imported; None if names and folders differ."""
    parts: list[Any] = name.split(".")
    if len(parts) < 2 or list(file.with_suffix("").parts[-len(parts) :]) != parts:
        return None
    return file.parents[len(parts) - 1]
