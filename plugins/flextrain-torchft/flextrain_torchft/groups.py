"""Groups: what the processes of one group need to find the other groups, and to add up with them what may fail midway."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from flextrain import StrategyError

START = "torchft_lighthouse --min_replicas 1 --bind 0.0.0.0:29510 --heartbeat_timeout_ms 3000"
_BUCKET = 32 << 20
"""Bytes of a message; what is sent has to be copied."""
_CONNECT_S = 3.0
"""Seconds in which the groups of a meeting connect, twice as many after each that failed. They come at the same time; who does
not was killed right then."""


class Member(NamedTuple):
    """What a group says of itself at a meeting.

    Attributes:
        step: the updates that it has made.
        head: a number that groups share whose updates were the same, see ``lineage``.
        group: a random number that this group has for as long as it is there.
        seed: the seed of its run.
        rounds: a number that groups share who exchange at the same updates, in the same way.
    """

    step: int
    head: int
    group: int
    seed: int
    rounds: int


def check_lighthouse(address: str, timeout_s: float = 5.0) -> None:
    """Raise StrategyError unless something listens at ``address``, such as ``http://host:29510``."""
    parts = urlsplit(address)
    try:
        if not (parts.hostname and parts.port):
            raise OSError("no http://host:port")
        socket.create_connection((parts.hostname, parts.port), timeout_s).close()
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"strategy.lighthouse: nothing answers at {address} ({error}), start it on one machine with `{START}`"
        ) from None


class Groups:
    """The groups that train together, seen from a process of one of them.

    From the first meeting on the lighthouse expects this group: it is made right before. Every method but ``close`` is a collective
    of the group's processes. Where it gives None or False, it does so on all of them, and the groups have to meet again.

    Args:
        lighthouse: address of torchft's lighthouse.
        min_replicas: groups without which no update counts.
        quorum_timeout_s: seconds to wait for enough groups.
        exchange_timeout_s: seconds after which a group that is alive and does not answer counts as lost.
        rank, world_size: of this process in its group.

    Attributes:
        group: a random number, the same on all processes of this group.
        rank: this group's number among those of the last meeting.
        count: how many these are.
        failures: how many meetings in a row have failed.
    """

    def __init__(
        self,
        lighthouse: str,
        min_replicas: int,
        quorum_timeout_s: float,
        exchange_timeout_s: float,
        rank: int,
        world_size: int,
    ) -> None:
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        self.rank, self.count, self.failures = 0, 1, 0
        self._several = world_size > 1
        self._leads = rank == 0
        self._lighthouse, self._quorum_timeout_s = lighthouse, quorum_timeout_s
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False) if self._leads else None
        port = 0 if self._store is None else self._store.port
        shared = [(socket.gethostname(), port, random.SystemRandom().getrandbits(62))]
        if self._several:
            dist.broadcast_object_list(shared)
        host, port, self.group = shared[0]
        self._timeout = timedelta(seconds=exchange_timeout_s)
        self._pg = ProcessGroupGloo(timeout=self._timeout)
        self._manager = Manager(
            pg=self._pg,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=min_replicas,
            use_async_quorum=False,
            timeout=self._timeout,
            quorum_timeout=timedelta(seconds=quorum_timeout_s),
            rank=rank,
            world_size=world_size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=lighthouse,
            init_sync=False,  # whole checkpoints are given to a newcomer, see ``give``
        )

    def meet(self, step: int, head: int, seed: int, rounds: int) -> list[Member] | None:
        """Wait for all groups that are alive, and return what each says, in their order; None if one is lost meanwhile.

        Raises:
            StrategyError: too few came in time, or the lighthouse is gone.
        """
        manager = self._manager
        seconds = min(self._timeout.total_seconds(), _CONNECT_S * 2**self.failures)
        self._pg.set_timeout(timedelta(seconds=seconds))
        manager.load_state_dict({"step": step, "batches_committed": manager.batches_committed()})
        try:
            manager.start_quorum(allow_heal=False)
        except (RuntimeError, TimeoutError) as error:
            raise StrategyError(
                f"TorchFTStrategy: the lighthouse at {self._lighthouse} has brought no groups together within strategy.quorum_timeout_s="
                f"{self._quorum_timeout_s:g}: {str(error).strip().splitlines()[0]}"
            ) from error

        def exchange() -> list[Member]:
            self.rank, self.count = self._pg.parent.rank(), self._pg.parent.size()
            mine = Member(step, head, self.group, seed, rounds)
            table = torch.zeros(self.count, len(mine), dtype=torch.int64)
            table[self.rank] = torch.tensor(mine)
            return [Member(*row) for row in self._sum(table).tolist()]

        found: list[Member] | None = self._try(exchange)
        self.failures = self.failures + 1 if found is None else 0
        return found

    def add(self, tensors: Sequence[Tensor]) -> bool:
        """Replace the tensors, which are alike in all groups, by their sums over the groups; False: they hold anything."""
        return self._try(lambda: self._add(tensors)) is not None

    def commit(self) -> bool:
        """Return whether what was added since the meeting counts: nothing was lost, on no process of this group."""
        return bool(self._manager.should_commit())

    def give(self, folder: Path, source: int) -> bool:
        """Copy the files of group ``source`` below ``folder`` into the same folder of every other group."""
        return self._try(lambda: self._give(folder, source) if self._leads else True) is not None

    def close(self) -> None:
        """Leave the other groups."""
        self._manager.shutdown(wait=False)
        self._pg.shutdown()

    def _try(self, exchange: Callable[[], Any]) -> Any:
        """Return what ``exchange`` gives, or None, on every process of the group, if it has failed on one."""
        found = None
        if self._manager.errored() is None:
            try:
                found = exchange()
            except RuntimeError as error:
                self._manager.report_error(error)
        went_well = torch.tensor([found is not None], dtype=torch.int64)
        if self._several:
            dist.all_reduce(went_well, dist.ReduceOp.MIN)
        if went_well.item():
            return found
        self._pg.abort()  # so that groups that still wait for this one see an error too, rather than wait until their time is up
        if self._manager.errored() is None:
            self._manager.report_error(RuntimeError("another process of this group has lost the other groups"))
        return None

    def _sum(self, tensor: Tensor) -> Tensor:
        from torch.distributed.distributed_c10d import AllreduceOptions

        if self.count > 1:
            options = AllreduceOptions()
            options.timeout = self._timeout
            self._pg.allreduce([tensor], options).wait()
        return tensor

    def _add(self, tensors: Iterable[Tensor]) -> bool:
        if self.count == 1:
            return True
        by_dtype: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                by_dtype.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in by_dtype.values():
            for bucket in _buckets(alike):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    self._sum(bucket[0])
                    continue
                message = self._sum(torch.cat([tensor.reshape(-1) for tensor in bucket]))
                for tensor, part in zip(bucket, message.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))
        return True

    def _give(self, folder: Path, source: int) -> bool:
        gives = self.rank == source
        paths = sorted(path for path in folder.rglob("*") if path.is_file()) if gives else []
        listed = json.dumps([(str(path.relative_to(folder)), path.stat().st_size) for path in paths]).encode()
        length = self._from(source, torch.tensor([len(listed)]))
        text = self._from(source, _bytes(listed if gives else b"", int(length)))
        if not gives:
            shutil.rmtree(folder, ignore_errors=True)
        for name, size in json.loads(bytes(text.tolist())):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "rb" if gives else "wb") as file:
                for start in range(0, size, _BUCKET):
                    count = min(_BUCKET, size - start)
                    sent = self._from(source, _bytes(file.read(count) if gives else b"", count))
                    if not gives:
                        file.write(sent.numpy().tobytes())
        return True

    def _from(self, source: int, tensor: Tensor) -> Tensor:
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.timeout = source, self._timeout
        self._pg.broadcast([tensor], options).wait()
        return tensor


def _bytes(given: bytes, count: int) -> Tensor:
    """The bytes as a tensor, or as many zeros to receive some in."""
    return torch.frombuffer(bytearray(given), dtype=torch.uint8) if given else torch.zeros(count, dtype=torch.uint8)


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
