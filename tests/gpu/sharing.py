"""Two processes on one device, so that one accelerator shows what goes between processes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from flextrain import DDPStrategy
from flextrain.testing import WorkerError, WorkerGroup

# Back end, and variables of each process. NCCL refuses two processes on one device unless they seem to be on several
# machines, or unless it is told to (2.28, which torch 2.11 has, cannot be). gloo copies to the host and back.
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "nccl-host-ids": ("nccl", {"NCCL_HOSTID": "process{rank}", "NCCL_IB_DISABLE": "1"}),
    "nccl-many-ranks": ("nccl", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
    "gloo": ("gloo", {"GLOO_SOCKET_IFNAME": "lo"}),
}


class Sharing(WorkerGroup):
    """Processes that may share devices; ``options`` are what their strategies need for it.

    Args:
        world_size: number of processes.
        kind: the type of the device.
        way: one of ``WAYS``; None: every process has a device of its own, or all are on the CPU.
        timeout_s: see WorkerGroup.
    """

    def __init__(self, world_size: int, kind: str, way: str | None, timeout_s: float = 100.0) -> None:
        super().__init__(world_size, timeout_s, accelerators=kind != "cpu")
        backend, self.variables = WAYS[way] if way else (None, {})
        self.options = {"backend": backend} if backend else {}

    def _environ(self, rank: int, port: int) -> dict[str, str]:
        more = {name: value.format(rank=rank) for name, value in self.variables.items()}
        if (several := torch.accelerator.device_count()) > 1 and more:
            more["CUDA_VISIBLE_DEVICES"] = str(rank % several)
        return {**super()._environ(rank, port), **more}


def exchange(operation: str, kind: str, options: dict[str, Any]) -> list[float]:
    """In one of two workers, each with [r, r + 1]: what an operation of torch.distributed leaves there."""
    strategy = DDPStrategy(device=kind, timeout_s=20, **options)
    strategy.join()
    try:
        rank = dist.get_rank()
        mine = torch.tensor([rank, rank + 1.0], device=strategy.device)
        got = torch.zeros_like(mine)
        if operation == "all_reduce":
            dist.all_reduce(mine)
            got = mine
        elif operation == "broadcast":
            dist.broadcast(mine, 1)
            got = mine
        elif operation == "all_gather":
            got = torch.zeros(4, device=strategy.device)
            dist.all_gather_into_tensor(got, mine)
        elif operation == "reduce_scatter":
            got = torch.zeros(1, device=strategy.device)
            dist.reduce_scatter_tensor(got, mine)
        elif operation == "all_to_all":
            dist.all_to_all_single(got, mine)
        else:
            work = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
            for each in dist.batch_isend_irecv(work):
                each.wait()
        return got.tolist()  # type: ignore[no-any-return]
    finally:
        strategy.leave()


EXCHANGED: dict[str, list[list[float]]] = {
    "all_reduce": [[1, 3], [1, 3]],
    "broadcast": [[1, 2], [1, 2]],
    "all_gather": [[0, 1, 1, 2], [0, 1, 1, 2]],
    "reduce_scatter": [[1], [3]],
    "all_to_all": [[0, 1], [1, 2]],
    "send_and_receive": [[1, 2], [0, 1]],
}


@functools.cache
def way_to_share(kind: str) -> str | None:
    """The first way in which two processes that share a device can send to each other; None: there is none."""
    for way in WAYS:
        with Sharing(2, kind, way, timeout_s=40.0) as group:
            try:
                if group.run(exchange, "send_and_receive", kind, group.options) == EXCHANGED["send_and_receive"]:
                    return way
            except WorkerError as error:
                print(f"{way}: {error}"[:2000])
    return None
