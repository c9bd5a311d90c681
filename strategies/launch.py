"""launch: start processes on this machine from Python, without torchrun."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from ..core.base.errors import ConfigError, LaunchError


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    start_method: Literal["spawn", "fork"] = "spawn",
    **kwargs: Any,
) -> Any:
    """Run ``fn(*args, **kwargs)`` in ``nprocs`` processes of this machine like torchrun; return rank 0's result.

    For notebooks and scripts without torchrun. With "spawn", ``fn`` must be importable by the new processes; a function
    defined in a notebook needs "fork", and the accelerator must not have been used before.

    Args:
        fn: the function.
        nprocs: number of processes.
        args, kwargs: its arguments; with "spawn" they must be picklable.
        start_method: how Python starts the processes.

    Raises:
        LaunchError: a process failed; the message has its rank and traceback, the other processes are stopped.
    """
    if nprocs < 1:
        raise ConfigError(f"nprocs: {nprocs} is not allowed, give 1 or more")
    # The store listens in this process, as in torchrun: another program could take a port that is only looked up.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        job = (fn, args, kwargs, nprocs, store.port, str(result))
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _run_as_rank, job, nprocs=nprocs, join=True, start_method=start_method
            )
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise LaunchError(f"process {error.error_index} of {nprocs} failed: {error}") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            advice = 'define it in a module that can be imported, or give start_method="fork"'
            raise LaunchError(f"fn: cannot be sent to another process, {error}; {advice}") from None
        # Safe to unpickle: our own process has just written it in a temporary folder.
        return pickle.loads(result.read_bytes())


def _run_as_rank(
    rank: int, fn: Callable[..., Any], args: Any, kwargs: Any, nprocs: int, port: int, result: str
) -> None:
    # A forked process has the parent's handler, which Python calls only when torch's waiting for the others returns: the
    # parent then waits for half a minute before it kills.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nprocs),
        LOCAL_WORLD_SIZE=str(nprocs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if "OMP_NUM_THREADS" not in os.environ:
        # By default each process starts one thread per core, and the threads compete for the cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // nprocs))
    value = fn(*args, **kwargs)
    if rank == 0:
        Path(result).write_bytes(pickle.dumps(value))
