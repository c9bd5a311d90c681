"""Runs in which something goes wrong on one rank, in processes forked from one that has imported everything."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from flextrain import BaseMetric, FlexibleRunner, Hook
from flextrain.runner.hooks import EMAHook
from flextrain.strategies.parts import meet

from ..ports import reserved_port

STALL_S = 2.0
AT = 4
"""Updates after which the fault comes."""
TIMEOUT_S = 60.0
"""After which a collective fails; longer than a scenario may take."""
KEEPER = "FLEXTRAIN_TEST_KEEPER"
"""Names the process that keeps the store, if no rank does."""


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Samples, one of which may take for ever."""

    def __init__(self, stuck_at: int | None = None) -> None:
        self.stuck_at, self.read = stuck_at, 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        if self.read == self.stuck_at:
            time.sleep(10000)  # stuck in the dataset
        return torch.full((6,), index % 7 / 7.0), torch.tensor(index % 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits, y)} if mode == "loss" else logits


class Count(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(len(data_samples))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"count": len(results)}


class Fault(Hook):
    """Does something on one rank before an update."""

    def __init__(self, does: Callable[[Any], None], rank: int = 1) -> None:
        self.does, self.rank = does, rank

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.rank == self.rank and runner.iter == AT:
            self.does(runner)


class InValidation(Hook):
    def __init__(self, does: Callable[[Any], None], rank: int = 1) -> None:
        self.does, self.rank = does, rank

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.rank == self.rank and batch_idx == 1 and runner.iter > 0:
            self.does(runner)


class AtTheEnd(Hook):
    """Fails while the run ends because of another error."""

    def on_exception(self, runner: Any, exception: BaseException) -> None:
        if runner.rank == 1:
            raise KeyError("in on_exception")


def stop(runner: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(runner: Any) -> None:
    if runner.rank == 0:
        time.sleep(1)  # it takes the store along: only what the others know by then can be said
    os.kill(os.getpid(), signal.SIGKILL)


def fail(runner: Any) -> None:
    raise ValueError("a fault of its own")


def leave(runner: Any) -> None:
    sys.exit(3)


def leave_well(runner: Any) -> None:
    sys.exit(0)


def finish(runner: Any) -> None:
    runner.train_loop.stop_training = True


def mismatch(runner: Any) -> None:
    dist.barrier()


def sleep(runner: Any) -> None:
    time.sleep(10000)


def meet_nobody(runner: Any) -> None:
    """Wait in the store, where nothing tells of a process that has left."""
    meet(runner.strategy, "a call that rank 1 does not make")


class StoreEnds(Hook):
    """Ends or stops the process that keeps the store, and then lets all ranks wait for the store."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == AT and runner.rank == 1:
            os.kill(int(os.environ[KEEPER]), self.number)
        if runner.iter >= AT:  # the signal takes effect a moment later
            meet(runner.strategy, "a call of all ranks")


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        status: its exit status, negative for a signal; None if it had to be killed.
        seconds: how long it lived.
        output: what it wrote.
    """

    status: int | None
    seconds: float
    output: str


def configuration(folder: str, rank: int, fault: str) -> dict[str, Any]:
    """The arguments of the runner; rank 1 is the one with the fault, unless the fault's name ends in 0."""
    culprit, name = (0, fault[:-1]) if fault.endswith("0") else (1, fault)
    stuck = 4 * AT + 2 if name == "dataset" and rank == culprit else None
    config: dict[str, Any] = dict(
        model=Net,
        work_dir=folder,
        train_dataloader=dict(dataset=Data(stuck), batch_size=4, collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(by_epoch=False, max_iters=1000, val_interval=AT + 1),
        strategy=dict(type="DDPStrategy", timeout_s=TIMEOUT_S),
        env_cfg=dict(watchdog=dict(stall_s=STALL_S, first_s=30)),
        default_hooks=dict(checkpoint=None),
        log_level="WARNING",
        randomness=dict(seed=0),
    )
    does = {
        "stop": stop,
        "kill": kill,
        "raise": fail,
        "store_apart_stop": stop,
        "exit": leave,
        "exit_well": leave_well,
        "finish": finish,
        "finish_and_stay": finish,
        "mismatch": mismatch,
        "on_exception": fail,
    }
    hooks: list[Hook] = [Fault(does[name], culprit)] if name in does else []
    if name == "on_exception":
        hooks.append(AtTheEnd())
    if name == "unnoticed":
        hooks = [Fault(fail), Fault(meet_nobody, rank=0)]
    if name == "worker":
        config["train_dataloader"]["num_workers"] = 2
        config["train_dataloader"]["dataset"] = Data(stuck_at=11 if rank == culprit else None)
    if name in ("store_ends", "store_stops"):
        hooks = [StoreEnds(signal.SIGKILL if name == "store_ends" else signal.SIGSTOP)]
    if name == "ema":
        config["strategy"] = dict(
            type="DeepSpeedStrategy", device="cpu", zero_optimization=dict(stage=3), timeout_s=TIMEOUT_S
        )
        config["optim_wrapper"] |= dict(type="AmpOptimWrapper", dtype="bfloat16")
    if name in ("validation", "validation_raises", "ema"):
        hooks = [InValidation(sleep if name == "validation" else fail)]
        config |= dict(
            val_dataloader=dict(dataset=Data(), batch_size=400, collate_fn="default_collate"),
            val_cfg={},
            val_evaluator=dict(type=Count),
        )
    if name == "build":
        config["model"] = Unbuildable
    if name == "ema":
        hooks.append(EMAHook())
    return {**config, "custom_hooks": hooks}


class Unbuildable(Net):
    def __init__(self) -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("cannot be built here")
        super().__init__()


def run_rank(folder: str, rank: int, fault: str) -> None:
    config = configuration(folder, rank, fault)
    FlexibleRunner(**config).train()
    if fault == "finish_and_stay":
        time.sleep(10000)


def scenario(folder: str, fault: str, size: int = 2, limit_s: float = 40.0) -> list[Outcome]:
    """Run a scenario in forked processes, and return how each rank ended; ranks that stay stopped are killed."""
    with reserved_port() as port:
        return _outcomes(folder, fault, size, limit_s, port)


def _outcomes(folder: str, fault: str, size: int, limit_s: float, port: int) -> list[Outcome]:
    keeper = _keep_store(port) if fault.startswith("store") else None
    began, pids = time.monotonic(), {}
    paths = [Path(folder, f"output.{rank}") for rank in range(size)]
    for rank, path in enumerate(paths):
        if not (pid := os.fork()):
            _child(folder, rank, fault, size, port, path)
        pids[pid] = rank
    ended: dict[int, tuple[int | None, float]] = {}
    while len(ended) < size and time.monotonic() - began < limit_s:
        for pid, rank in pids.items():
            if rank not in ended and (found_pid := os.waitpid(pid, os.WNOHANG))[0]:
                ended[rank] = os.waitstatus_to_exitcode(found_pid[1]), time.monotonic() - began
        # A stopped rank never ends by itself.
        if fault.removesuffix("0").endswith("stop") and len(ended) == size - 1:
            break
        time.sleep(0.02)
    for pid, rank in pids.items():
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ended[rank] = None, time.monotonic() - began
    if keeper is not None:
        os.environ.pop(KEEPER)
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
    return [Outcome(*ended[rank], paths[rank].read_text()) for rank in range(size)]


def _keep_store(port: int) -> int:
    """Keep the store in a process of its own, as torchrun's agent does; return the process."""
    begun, begins = os.pipe()
    if not (keeper := os.fork()):
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        os.write(begins, b"x")
        while store is not None:
            signal.pause()
    os.read(begun, 1)
    os.close(begun)
    os.close(begins)
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", KEEPER: str(keeper)})
    return keeper


def _child(folder: str, rank: int, fault: str, size: int, port: int, path: Path) -> None:
    status = 0
    try:
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        run_rank(folder, rank, fault)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
