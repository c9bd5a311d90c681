"""Clipping gives what torch gives for whole tensors, whatever the layout of the gradients."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flextrain.core.comm import collectives as dist
from flextrain.optim.gradients import clip_by_norm, clip_by_value, gradients, total_norm
from flextrain.testing import WorkerGroup

SHAPES = [(3, 5), (7,), (), (1, 1), (0, 2), (5, 2)]


def make(dtypes: list[torch.dtype] | None = None, scale: float = 1.0) -> list[Tensor]:
    """Gradients of several shapes, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    dtypes = dtypes or [torch.float32]
    grads = [torch.randn(shape, generator=generator) * scale for shape in SHAPES]
    return [grad.to(dtypes[i % len(dtypes)]) for i, grad in enumerate(grads)]


def clipped_by_torch(grads: list[Tensor], *args: Any) -> tuple[list[Tensor], Tensor]:
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    # torch cannot tell the largest element of an empty tensor, which changes no norm.
    norm = nn.utils.clip_grad_norm_([parameter for parameter in parameters if parameter.numel()], *args)
    return gradients([{"params": parameters}]), norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=["one", "mixed"])
def test_clip_by_norm_is_torchs(norm_type: float, max_norm: float, dtypes: list[torch.dtype]) -> None:
    grads = make(dtypes)
    expected, expected_norm = clipped_by_torch(grads, max_norm, norm_type)
    norm = clip_by_norm(grads, max_norm, norm_type)
    torch.testing.assert_close(norm, expected_norm, rtol=0, atol=0)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def test_the_norm_is_that_of_before_and_small_gradients_stay() -> None:
    grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    norm = clip_by_norm(grads, max_norm=1.0)
    assert norm is not None
    assert norm.item() == pytest.approx(5.0)
    assert total_norm(grads).item() == pytest.approx(1.0, rel=1e-5)
    before = [grad.clone() for grad in grads]
    clip_by_norm(grads, max_norm=2.0)
    assert grads == before


def test_without_gradients_there_is_no_norm() -> None:
    assert clip_by_norm([], 1.0) is None
    parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    parameters[1].grad = torch.ones(1)
    assert gradients([{"params": parameters[:1]}, {"params": parameters[1:]}]) == [parameters[1].grad]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_norms(bad: float) -> None:
    grads = [torch.ones(2), torch.tensor([bad])]
    with pytest.raises(RuntimeError, match=r"^clip_grad: the total norm of order 2.0 is (inf|nan), gradients were not"):
        clip_by_norm(grads, 1.0, error_if_nonfinite=True)
    assert grads[0].tolist() == [1.0, 1.0]
    norm = clip_by_norm(grads, 1.0)
    assert norm is not None
    assert not norm.isfinite()


def test_clip_by_value() -> None:
    grads = [torch.tensor([-3.0, 0.1, 3.0]), torch.tensor(9.0), torch.tensor([-5.0], dtype=torch.bfloat16)]
    clip_by_value(grads, 0.5)
    assert [grad.tolist() for grad in grads] == [[-0.5, pytest.approx(0.1), 0.5], 0.5, [-0.5]]


def layouts(norm_type: float, by_value: bool) -> tuple[float | None, list[Tensor]]:
    """Clip DTensors of two meshes and several placements together with plain tensors; whole gradients as a result."""
    world_size = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=30)
    mesh = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("outer", "inner"))
    placements: list[Any] = [
        (mesh, [Shard(0)]),
        None,
        (mesh, [Replicate()]),
        (mesh, [Shard(1)]),
        None,
        (grid, [Replicate(), Shard(0)]),
    ]
    grads = [
        grad if place is None else distribute_tensor(grad, *place)
        for grad, place in zip(make(scale=3.0), placements, strict=True)
    ]
    norm = clip_by_value(grads, 0.5) if by_value else clip_by_norm(grads, 0.7, norm_type, error_if_nonfinite=True)
    assert not isinstance(norm, DTensor)
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return None if norm is None else norm.item(), whole


def check_layouts(workers: WorkerGroup, norm_type: float) -> None:
    expected, expected_norm = clipped_by_torch(make(scale=3.0), 0.7, norm_type)
    for norm, whole in workers.run(layouts, norm_type, by_value=False):
        assert norm == pytest.approx(expected_norm.item(), rel=1e-6)
        torch.testing.assert_close(whole, expected, rtol=1e-6, atol=0)


@pytest.mark.distributed
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_sharded_and_whole_gradients_have_one_norm(workers2: WorkerGroup, norm_type: float) -> None:
    check_layouts(workers2, norm_type)


@pytest.mark.distributed
def test_clip_by_value_of_sharded_gradients(workers2: WorkerGroup) -> None:
    for norm, whole in workers2.run(layouts, 2.0, by_value=True):
        assert norm is None
        torch.testing.assert_close(whole, [grad.clamp(-0.5, 0.5) for grad in make(scale=3.0)], rtol=0, atol=0)


def sums() -> tuple[float, Tensor]:
    """Clip a gradient that is the sum of what the processes hold, [3, 4] times their number; the norm and the whole."""
    world_size = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=30)
    grad = DTensor.from_local(torch.tensor([3.0, 4.0]), init_device_mesh("cpu", (world_size,)), [Partial()])
    norm = clip_by_norm([grad], 1.0)
    assert norm is not None
    return norm.item(), grad.full_tensor()


@pytest.mark.distributed
def test_gradients_that_are_not_summed_up_yet(workers2: WorkerGroup) -> None:
    """torch.nn.utils.clip_grads_with_norm_ of torch 2.6 leaves them as they are."""
    for norm, whole in workers2.run(sums):
        assert norm == pytest.approx(10.0)
        torch.testing.assert_close(whole, torch.tensor([0.6, 0.8]))
