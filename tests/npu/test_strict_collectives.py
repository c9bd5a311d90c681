"""What goes wrong with NCCL goes wrong on the simulated device too, and says so."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flextrain.testing import WorkerError
from flextrain.testing.loop import train

from ..mesh import test_tensor
from ..mesh.models import MATRICES
from ..mesh.parity import RECIPES, data, started
from .test_mesh import MESH

pytestmark = [pytest.mark.npu, pytest.mark.distributed]


def numbers(*values: complex) -> Tensor:
    return torch.tensor(values, device="npu") * 1.0


def of_the_host(rank: int) -> None:
    found = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(found, numbers(1, 2))


def of_no_dtype_of_it(rank: int) -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int16, device="npu"))


def not_contiguous(rank: int) -> None:
    dist.all_reduce(torch.ones(4, 4, device="npu").t()[:2])


def complex_message(rank: int) -> None:
    group: Any = dist.group.WORLD
    tensor = numbers(1j, 2j)
    (group.send if rank == 0 else group.recv)([tensor], 1 - rank, 0).wait()


def in_another_order(rank: int) -> None:
    calls: list[Callable[[], Any]] = [lambda: dist.all_reduce(numbers(1, 2)), lambda: dist.broadcast(numbers(1), 1)]
    for call in calls if rank == 0 else reversed(calls):
        call()


def of_another_size(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + rank, device="npu"))


def both_send_first(rank: int) -> None:
    dist.send(numbers(1, 2), 1 - rank)
    dist.recv(numbers(0, 0), 1 - rank)


def changed_too_early(rank: int) -> None:
    tensor = numbers(1, 2)
    work = dist.all_reduce(tensor, async_op=True)
    tensor += 1
    work.wait()


def by_another_thread(rank: int) -> None:
    dist.all_reduce(numbers(1))
    errors: list[BaseException] = []

    def call() -> None:
        try:
            dist.all_reduce(numbers(1))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="saver")
    thread.start()
    thread.join()
    raise errors[0]


def first_messages_in_a_circle(rank: int) -> None:
    groups = [dist.new_group(timeout=timedelta(seconds=2)) for _ in range(2)]
    for group in groups if rank == 0 else groups[::-1]:
        dist.irecv(numbers(0), 1 - rank, group=group)


def error_of(function: Callable[[int], None]) -> str:
    """In a worker: the first line of the error."""
    dist.init_process_group("cpu:gloo,npu:hccl", timeout=timedelta(seconds=30))
    torch.npu.set_device(dist.get_rank())
    try:
        function(dist.get_rank())
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    finally:
        dist.destroy_process_group()
    return "nothing"


WRONG: list[tuple[Callable[[int], None], str, str]] = [
    (of_the_host, *["hccl works on npu tensors, got one on cpu"] * 2),
    (of_no_dtype_of_it, *["Input tensor data type is not supported for hccl: Short"] * 2),
    (not_contiguous, *["Tensors must be contiguous"] * 2),
    (complex_message, *["Input tensor data type is not supported for hccl: ComplexFloat"] * 2),
    (
        in_another_order,
        "hccl: rank 0 calls all_reduce sum Float[2], and rank 1 calls broadcast from 1 Float[1] on the same communicator",
        "hccl: rank 1 calls broadcast from 1 Float[1], and rank 0 calls all_reduce sum Float[2] on the same communicator",
    ),
    (
        of_another_size,
        "hccl: rank 0 calls all_reduce sum Float[2], and rank 1 calls all_reduce sum Float[3] on the same communicator",
        "hccl: rank 1 calls all_reduce sum Float[3], and rank 0 calls all_reduce sum Float[2] on the same communicator",
    ),
    (
        both_send_first,
        "hccl: rank 0 sends Float[2] and receives, and rank 1 sends Float[2] and receives on the same communicator",
        "hccl: rank 1 sends Float[2] and receives, and rank 0 sends Float[2] and receives on the same communicator",
    ),
    (
        changed_too_early,
        *[
            "npu: aten::add on the default stream touches memory that all_reduce sum on stream * writes, and does not wait for it"
        ]
        * 2,
    ),
    (
        first_messages_in_a_circle,
        "hccl: rank 0 waits for the first call on a communicator of others: rank 1",
        "hccl: rank 1 waits for the first call on a communicator of others: rank 0",
    ),
    (by_another_thread, *["hccl: thread saver calls all_reduce sum Float[1] on a communicator of thread MainThread"] * 2),
]  # fmt: skip


@pytest.mark.parametrize("function, first, second", WRONG, ids=[case[0].__name__ for case in WRONG])
def test_what_is_wrong_is_said(npu2: Any, function: Callable[[int], None], first: str, second: str) -> None:
    found = [re.sub(r"stream \d+", "stream *", error) for error in npu2.run(error_of, function)]
    assert found == [first, second]


def read_before_and_after() -> tuple[str, list[float]]:
    """In a worker: what is said of a sum over the processes that is read before the wait, and the sum after it."""
    dist.init_process_group("cpu:gloo,npu:hccl")
    tensor = numbers(1, 2)
    work: Any = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    with pytest.raises(RuntimeError) as error:
        tensor.tolist()
    work.wait()
    return str(error.value).partition("\n")[0], tensor.tolist()


def test_nothing_has_arrived_before_somebody_waits(npu2: Any) -> None:
    for error, found in npu2.run(read_before_and_after):
        assert error.startswith("npu: a download on the default stream touches memory that all_reduce sum on stream ")
        assert found == [2.0, 4.0]


def broadcast_by_a_stage() -> None:
    """In a worker: the first stage broadcasts to all processes, as torch does when a DTensor first draws there."""
    assert test_tensor.MODELS["dropping"]
    spec = {**MESH, "tp": 2, "pp": 2, "plan": MATRICES, "timeout_s": 10}
    with started(spec, "dropping", RECIPES["adamw"]) as session:
        if session.strategy.topology.axes["pp"][0] == 0:
            state = torch.zeros(16, dtype=torch.uint8, device="npu")
            session.strategy.module.layers[0].register_forward_hook(lambda *_: dist.broadcast(state, 0))
        train(session.strategy, session.model, session.optim, data("dropping", RECIPES["adamw"], 2))


@pytest.mark.full
def test_a_broadcast_to_all_processes_by_those_of_a_stage(npu4: Any) -> None:
    with pytest.raises(WorkerError, match="hccl: "):
        npu4.run(broadcast_by_a_stage)
