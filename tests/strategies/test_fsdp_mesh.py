"""FSDP over tensor parallelism: a model that is built without memory begins as any other, and is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flextrain import FSDPStrategy
from flextrain.core.checkpoint import Checkpoint, save_checkpoint
from flextrain.core.checkpoint.chunks import full_tensor
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Widths that neither two nor four processes can share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(5)
        self.down = nn.Linear(7, 5)


class Mesh(FSDPStrategy):
    """Two processes share every layer, and fully_shard spreads what each of them has over the others."""

    def _mesh(self) -> DeviceMesh:
        return self.both["dp"]

    def _wrap(self, model: nn.Module) -> nn.Module:
        self.both = init_device_mesh("cpu", (self.topology.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, self.both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return super()._wrap(model)


def prepared(deferred: bool) -> Mesh:
    strategy = Mesh(device="cpu", timeout_s=60)
    strategy.join()
    torch.manual_seed(0)
    if deferred:
        with strategy.building():
            model = Net()
        assert all(parameter.is_meta for parameter in model.parameters())
    else:
        model = Net()
    strategy.setup(model)
    return strategy


def whole(strategy: Mesh) -> dict[str, Tensor]:
    state = strategy.model_state()
    return {name: full_tensor(t) if isinstance(t, DTensor) else t.clone() for name, t in state.items()}


def weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    strategy = prepared(deferred=False)
    given = whole(strategy)
    strategy.leave()
    strategy = prepared(deferred=True)
    built = whole(strategy)
    save_checkpoint(path, strategy.state())
    template = strategy.template(Checkpoint.open(path).saved)
    for tensor in template.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(9)
    Checkpoint.open(path).load(template)
    loaded = whole(strategy)
    strategy.leave()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in built.items())
    return given, built


def test_a_model_without_memory_begins_as_any_other(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = dict(Net().named_parameters())
    for found in workers(4).run(weights, tmp_path / "a"):
        for state in found:
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    target = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in expected.items()}
    Checkpoint.open(tmp_path / "a").load(target)
    assert all(torch.equal(target[f"model.{name}"], tensor) for name, tensor in expected.items())
