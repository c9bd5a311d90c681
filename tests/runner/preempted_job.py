"""Runs that get SIGTERM at random moments, forked from one warm process.

``python -m tests.runner.preempted_job FOLDER SEED STRATEGY:COUNT...`` prints a line of JSON for every trial. A trial in which
the process was over already is drawn again, and so is one in which it had not come to FlexibleRunner yet, where a signal ends
it as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from .training import Samples, make_runner, validation

TRIAL_S = 60.0
"""Seconds after which a process counts as hanging; a loaded machine needs some."""


class Slow(Samples):
    """So that a run takes some seconds, most of which are in an update or a validation."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.001)
        return super().__getitem__(index)


def train(folder: Path, strategy: str) -> None:
    parts = validation()
    parts["val_dataloader"]["dataset"] = Slow(40)
    make_runner(
        folder,
        strategy=dict(type=strategy, timeout_s=60),
        train_dataloader=dict(batch_size=4, dataset=Slow(80), collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        train_cfg=dict(by_epoch=False, max_iters=60, val_interval=15),
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=10, max_keep_ckpts=2)),
        log_level="INFO",
        **parts,
    ).train()


def rank_of_job(folder: Path, strategy: str, port: int, rank: int) -> int:
    """Fork one of two processes; return its number."""
    if pid := os.fork():
        return pid
    out = os.open(folder / f"out.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status: Any = 1
    try:
        train(folder, strategy)
        status = 0
        (folder / f"modules.{rank}").write_text("\n".join(sys.modules))
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def trial(folder: Path, strategy: str, after: float | None, targets: tuple[int, ...]) -> dict[str, Any]:
    """Run one job, with a signal ``after`` seconds; None: without one. Return statuses by rank, and the seconds since."""
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = {rank_of_job(folder, strategy, port, rank): rank for rank in range(2)}
    began = time.monotonic()
    status: dict[int, int | str] = {}

    def reap(until: float, anew: bool) -> None:
        while pids and time.monotonic() < until:
            pid, state = os.waitpid(-1, os.WNOHANG)
            if pid:
                status[pids.pop(pid)] = os.waitstatus_to_exitcode(state)
                if not anew and len(status) == 2:
                    return
            else:
                time.sleep(0.005)

    if after is not None:
        reap(began + after, anew=False)
    at_once = dict(status)
    sent = time.monotonic()
    for pid, rank in pids.items():
        if after is not None and rank in targets:
            os.kill(pid, signal.SIGTERM)
    if not any(at_once.get(rank) is not None for rank in targets):
        reap(sent + TRIAL_S, anew=True)
    seconds = time.monotonic() - sent
    for pid, rank in pids.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        status[rank] = "hangs"
    said = [line for line in (folder / "out.0").read_text().splitlines() if "Ended by" in line]
    found = dict(status=[status[0], status[1]], seconds=round(seconds, 2), said=said, targets=targets, after=after)
    return {**found, "over": bool(at_once), "folder": str(folder), "strategy": strategy}


def warm(modules: Path) -> None:
    """Import what a run has imported, so that the next ones need not."""
    for name in modules.read_text().split():
        if name.startswith(("torch.", "flextrain.", "deepspeed")) and name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def early(found: dict[str, Any]) -> bool:
    """Whether a process ended by the signal itself, before FlexibleRunner."""
    return any(found["status"][rank] == -signal.SIGTERM for rank in found["targets"])


def main(folder: Path, seed: int, plan: list[str]) -> None:
    torch.set_num_threads(1)
    draw = random.Random(seed)
    for strategy, _, count in (part.partition(":") for part in plan):
        for number in range(2):
            began = time.monotonic()
            whole = trial(folder / strategy / f"whole{number}", strategy, None, ())
            length = time.monotonic() - began
            assert whole["status"] == [0, 0], whole
            warm(folder / strategy / f"whole{number}" / "modules.0")
        done = drawn = 0
        while done < int(count):
            targets = draw.choice([(0,), (1,), (0, 1)])
            drawn += 1
            assert drawn < 10 * int(count), "the run is always over"
            found = trial(folder / strategy / str(drawn), strategy, draw.uniform(0, length), targets)
            if found["over"] or early(found) or all(found["status"][rank] == 0 for rank in targets):
                continue
            done += 1
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
