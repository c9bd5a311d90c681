"""Bulletin: texts for all processes, while the main thread waits, anew for every bulletin, and lost with the store."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from flextrain.core.comm import collectives as dist
from flextrain.core.comm.agreement import Bulletin, StoreLostError
from flextrain.core.torch_compat.torch_private import default_store
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.distributed


def exchange(bulletin: Bulletin) -> list[object]:
    keys = [f"from {rank}" for rank in range(bulletin.world_size)]
    before = bulletin.read([f"from {bulletin.rank}", "nobody's"])
    bulletin.put(keys[bulletin.rank], f"text {bulletin.rank}")
    first = bulletin.put_first("first", "")
    dist.barrier()
    bulletin.count("sum", bulletin.rank + 1)
    dist.barrier()
    return [before, bulletin.read([*keys, "nobody's"]), bulletin.read(keys), first, bulletin.count("sum", 0)]


def join(init_method: str = "env://") -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=init_method, timeout_s=60)


def two_bulletins(init_method: str = "env://") -> list[list[object]]:
    join(init_method)
    return [exchange(Bulletin()) for _ in range(2)]


EXPECTED = [[None, None], ["text 0", "text 1", None], ["text 0", "text 1"], "", 3]


def test_all_read_what_one_has_put(workers2: WorkerGroup, tmp_path: Path) -> None:
    """A second bulletin of the same job begins empty."""
    assert workers2.run(two_bulletins) == [[EXPECTED, EXPECTED]] * 2
    assert workers2.run(two_bulletins, f"file://{tmp_path}/meet") == [[EXPECTED, EXPECTED]] * 2


def read_while_main_waits() -> list[str | None]:
    join()
    bulletin, shared, read = Bulletin(), default_store(), []

    def watch() -> None:
        while None in (found := bulletin.read(["news"])):
            time.sleep(0.01)
        read.extend(found)
        bulletin.put("was read", "")

    if dist.get_rank() == 1:
        thread = threading.Thread(target=watch)
        thread.start()
        shared.wait(["the end"])  # the connection that all of the process share is busy
        thread.join(30)
    else:
        bulletin.put("news", "came")
        deadline = time.monotonic() + 30
        while bulletin.read(["was read"]) == [None] and time.monotonic() < deadline:
            time.sleep(0.01)
        shared.set("the end", "")
    return read


def test_a_thread_reads_while_the_main_thread_waits_for_the_store(workers2: WorkerGroup) -> None:
    assert workers2.run(read_while_main_waits) == [[], ["came"]]


def use(bulletin: Bulletin, deadline: float) -> None:
    while time.monotonic() < deadline:
        bulletin.put("key", "text")
        time.sleep(0.01)


def use_until_lost(agent: int) -> str:
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(agent))
    join()
    bulletin = Bulletin()
    TCPStore("127.0.0.1", agent, is_master=False, wait_for_workers=False).add("ready", 1)
    with pytest.raises(StoreLostError) as lost:
        use(bulletin, time.monotonic() + 30)
    bulletin._store = None  # it is not used again: torch would write a stack of C++ functions for each call
    with pytest.raises(StoreLostError) as again:
        bulletin.read(["key"])
    assert str(again.value) == str(lost.value)
    return str(lost.value)


def test_a_lost_store_is_one_error(workers2: WorkerGroup) -> None:
    kept = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = kept[0].port

    def lose() -> None:
        deadline = time.monotonic() + 30
        while kept[0].add("ready", 0) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        kept.clear()

    thread = threading.Thread(target=lose)
    thread.start()
    told = workers2.run(use_until_lost, port)
    thread.join(30)
    assert all(text.startswith("the store of the job, which rank 0 or the launcher keeps, was lost (") for text in told)
