"""Read the weights of a running model on rank 0 as if they were a checkpoint: the other processes send what rank 0 asks for."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ..base.errors import CheckpointError
from ..base.events import heartbeat
from ..base.tensors import DTYPES
from ..comm.agreement import told_by_rank_0
from ..comm.collectives import get_world_size, is_main, side_group
from .chunks import held_chunks
from .load import Checkpoint, TensorInfo
from .manifest import Box
from .participants import Participants
from .save import agree
from .save_plan import SharedPlan
from .weights import computed

T = TypeVar("T")
_END = -1


@torch.no_grad()
def read_on_rank_0(
    name: str,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    use: Callable[[Checkpoint], T],
    *,
    timeout_s: float,
) -> T:
    """Call ``use`` on rank 0 with a checkpoint of live tensors; return its result on every process. A collective.

    Whenever ``use`` reads a tensor, each process sends the chunks of it that rank 0 lacks, through the host. So rank 0 holds
    what ``use`` keeps and one tensor, and another process a copy of one chunk.

    Args:
        name: of what is read, for messages.
        tensors: this process's tensors by key, of any layout; they must not change meanwhile.
        values: plain values of the checkpoint; those of rank 0 count.
        use: its result must be picklable. What it raises is raised on every process.
        timeout_s: seconds that the others wait for rank 0 to ask again, or to end.

    Raises:
        CheckpointError: on every process, if what they hold does not fit together.
    """
    participants = Participants(f"{name}: could not be read", side_group())
    plan = agree(participants, tensors)
    asking = _Asking(plan, tensors, side_group(timeout_s, "weights of a running model"))
    infos = {key: TensorInfo(tensor.shape, DTYPES[tensor.dtype]) for key, tensor in plan.tensors.items()}

    def call() -> T:
        try:
            result = use(computed(Path(name), infos, values, asking.read))
            pickle.dumps(result)  # what cannot be sent is an error on every process
            return result
        finally:
            asking.end()

    if not is_main():
        asking.answer()
    return told_by_rank_0(call)


class _Asking:
    """Rank 0 asks the others for chunks, by a message with the number of a tensor and the offsets in it."""

    def __init__(self, plan: SharedPlan, tensors: Mapping[str, Tensor], group: Any) -> None:
        self._plan, self._own, self._group = plan, tensors, group
        self._keys = list(plan.tensors)
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        self._length = 1 + max((len(tensor.shape) for tensor in plan.tensors.values()), default=0)
        self._has_ended = False

    def read(self, key: str) -> Tensor:
        """The whole tensor, on the host.

        Raises:
            CheckpointError: the others do not wait for questions any more.
        """
        if self._has_ended:
            raise CheckpointError(
                f"{key}: was asked for too late, the weights of a running model can be read during the call only"
            )
        planned = self._plan.tensors[key]
        found = torch.empty(planned.shape, dtype=DTYPES[planned.dtype], device="cpu")
        own = held_chunks(key, self._own[key]) if key in self._own else {}
        for position, box in planned.layout.chunks(planned.shape):
            offsets, sizes = box
            target = found[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            mine = own.get(offsets)
            if mine is not None and tuple(mine.shape) == tuple(sizes):
                target.copy_(mine)
            elif target.numel():
                target.copy_(self._asked(position + planned.rank, key, box, found.dtype))
        heartbeat()
        return found

    def _asked(self, rank: int, key: str, box: Box, dtype: torch.dtype) -> Tensor:
        offsets, sizes = box
        dist.send(self._message(self._numbers[key], *offsets), rank, group=self._group)
        chunk = torch.empty(sizes, dtype=dtype, device="cpu")
        dist.recv(_as_bytes(chunk), rank, group=self._group)
        return chunk

    def _message(self, *numbers: int) -> Tensor:
        return torch.tensor([*numbers, *[0] * (self._length - len(numbers))], device="cpu")

    def end(self) -> None:
        """Tell the others, on rank 0, that nothing more is asked for."""
        self._has_ended = True
        for rank in range(1, get_world_size()):
            dist.send(self._message(_END), rank, group=self._group)

    def answer(self) -> None:
        """Send what rank 0 asks for, until it ends."""
        message = self._message()
        while True:
            dist.recv(message, 0, group=self._group)
            number, *offsets = message.tolist()
            if number == _END:
                return
            key = self._keys[number]
            chunk = held_chunks(key, self._own[key])[tuple(offsets[: self._own[key].dim()])]
            dist.send(_as_bytes(chunk.cpu().contiguous()), 0, group=self._group)
            heartbeat()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
