"""fully_shard with many processes: it looks at two chunks of a parameter, and makes no others."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flextrain.core.torch_compat.dtensor_private import ChunksOnDemand, chunks_on_demand
from flextrain.core.torch_compat.torch_private import TorchDispatchMode

PARAM = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.15"), reason="other versions of torch are left as they are"
)


@pytest.fixture
def rank3_of_7() -> Iterator[None]:
    dist.init_process_group("fake", rank=3, world_size=7, store=dist.HashStore())  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_chunks_are_torchs() -> None:
    for rows, number, dim in product(range(20), range(1, 9), (0, 1)):
        tensor = torch.arange(rows * 3.0).view(rows, 3).movedim(0, dim)
        expected = PARAM._chunk_with_empty(tensor, number, dim)
        for index, chunk in enumerate(expected):
            found = ChunksOnDemand(tensor, number, dim)[index]
            assert found.shape == chunk.shape, (rows, number, dim, index)
            assert found.stride() == chunk.stride()
            assert torch.equal(found, chunk)


class Views(TorchDispatchMode):
    """Counts the chunks that ``torch.chunk`` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        if "split" in str(function) or "chunk" in str(function):
            self.count += len(found)
        return found


@pytest.mark.usefixtures("rank3_of_7")
def test_shards_are_the_same_without_the_others() -> None:
    shards: list[list[Tensor]] = []
    counts = []
    for on_demand in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3), nn.LayerNorm(3))
        with Views() as views:
            if on_demand:
                with chunks_on_demand():
                    fully_shard(model, mesh=init_device_mesh("cpu", (7,)))
            else:
                fully_shard(model, mesh=init_device_mesh("cpu", (7,)))
        shards.append([parameter.to_local() for parameter in model.parameters()])  # type: ignore[attr-defined]
        counts.append(views.count)
    assert all(torch.equal(one, other) for one, other in zip(*shards, strict=True))
    assert counts[0] > 0
    assert counts[1] == 0
