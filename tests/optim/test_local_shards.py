"""Elementwise optimizers step on local shards of DTensors, beside ordinary tensors, with the values and state of one device."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flextrain.core.comm import collectives as dist
from flextrain.core.comm.topology import DataShard
from flextrain.core.torch_compat.dtensor_private import laid_out_as
from flextrain.optim.gradients import average
from flextrain.optim.wrapper import adapter_for
from flextrain.testing import WorkerGroup

pytestmark = pytest.mark.distributed

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adagrad": {}, "Adam": dict(amsgrad=True), "AdamW": dict(fused=True), "Adamax": {}, "NAdam": {},
    "RAdam": {}, "RMSprop": dict(momentum=0.9, centered=True), "Rprop": {}, "SGD": dict(momentum=0.9),
}  # fmt: skip
SHAPES = (
    (5, 3),
    (1, 4),
    (),
    (6,),
)  # uneven, empty on the second process, a number, and one that stays an ordinary tensor


def _gradient(shape: tuple[int, ...], number: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def stepped(name: str, options: dict[str, Any]) -> None:
    """In a worker: steps on shards and those of one device, with state loaded in between."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="env://", timeout_s=60)
    mesh = init_device_mesh("cpu", (2,))
    whole = [nn.Parameter(_gradient(shape, 90 + i)) for i, shape in enumerate(SHAPES)]
    layouts = [[Shard(0)], [Shard(0)], [Replicate()], None]
    parts = [
        nn.Parameter(distribute_tensor(p.data.clone(), mesh, to) if to else p.data.clone())
        for p, to in zip(whole, layouts, strict=True)
    ]
    kind = getattr(torch.optim, name)
    given = options if "fused" in options else {**options, "foreach": True}
    expected, optimizer = kind(whole, lr=0.05, **given), kind(parts, lr=0.05, **given)
    adapter = adapter_for(optimizer, "optim_wrapper")
    for step in range(4):
        for i, (one, part, to) in enumerate(zip(whole, parts, layouts, strict=True)):
            grad = one.grad = _gradient(tuple(one.shape), 10 * step + i)
            part.grad = distribute_tensor(grad.clone(), mesh, to) if to else grad.clone()
            if to == [Replicate()]:  # as autograd may leave a sum over the processes
                part.grad = DTensor.from_local(grad / 2, mesh, [Partial()])
        expected.step()
        with adapter.stepping():
            optimizer.step()
        if step == 1:
            for one in (expected, optimizer):
                one.load_state_dict(copy.deepcopy(one.state_dict()))
    for one, part, to in zip(whole, parts, layouts, strict=True):
        found = {"value": part, **optimizer.state[part]}
        for key, value in {"value": one, **expected.state[one]}.items():
            assert isinstance(found[key], DTensor) == (
                to is not None and key not in ("step", "mu_product", "eta", "mu")
            )
            own = found[key].full_tensor() if isinstance(found[key], DTensor) else found[key]
            torch.testing.assert_close(own, value, rtol=1e-12, atol=1e-14, msg=key)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parts, strict=True))
    assert {id(parameter) for parameter in optimizer.state} <= {id(parameter) for parameter in parts}
    dist.destroy_process_group()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_as_on_one_device(workers2: WorkerGroup, name: str) -> None:
    workers2.run(stepped, name, OPTIMIZERS[name])


def _clip(optimizer: Any, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)


def _bound(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_(0.9 / parameter.norm())


def hooked(everywhere: bool) -> None:
    """In a worker: hooks that are registered after a step, and compute with norms of gradients and weights."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="env://", timeout_s=60)
    mesh = init_device_mesh("cpu", (2,))
    whole = [nn.Parameter(_gradient(shape, 90 + i)) for i, shape in enumerate(SHAPES[:2])]
    parts = [nn.Parameter(distribute_tensor(one.data.clone(), mesh, [Shard(0)])) for one in whole]
    optimizers = [torch.optim.AdamW(parameters, lr=0.05) for parameters in (whole, parts)]
    adapter, handles = adapter_for(optimizers[1], "optim_wrapper"), []
    for step in range(3):
        for i, (one, part) in enumerate(zip(whole, parts, strict=True)):
            one.grad = _gradient(tuple(one.shape), 10 * step + i)
            part.grad = distribute_tensor(one.grad.clone(), mesh, [Shard(0)])
        optimizers[0].step()
        with adapter.stepping():
            optimizers[1].step()
        if not step and everywhere:
            handles = [register_optimizer_step_pre_hook(_clip), register_optimizer_step_post_hook(_bound)]
        elif not step:
            for optimizer in optimizers:
                optimizer.register_step_pre_hook(_clip)
                optimizer.register_step_post_hook(_bound)
    for handle in handles:
        handle.remove()
    for one, part in zip(whole, parts, strict=True):  # norms of DTensors have fewer digits in torch 2.6
        torch.testing.assert_close(cast(DTensor, part.detach()).full_tensor(), one.detach(), rtol=1e-6, atol=1e-6)
    dist.destroy_process_group()


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_of_an_optimizer_have_whole_parameters(workers2: WorkerGroup, everywhere: bool) -> None:
    workers2.run(hooked, everywhere)


def called(function: Callable[[], Any], *parts: str) -> list[str]:
    """The functions of files with such names that a call of ``function`` calls."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in parts):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def calls_of_a_step(count: int) -> tuple[list[str], list[str]]:
    """In a worker: what the library calls in a step of so many parameters after the first; what making a gradient calls of torch."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="env://", timeout_s=60)
    mesh = init_device_mesh("cpu", (2,))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    adapter = adapter_for(optimizer, "optim_wrapper")

    def step() -> None:
        with adapter.stepping():
            optimizer.step()

    made: list[str] = []
    for _ in range(3):
        for parameter in parameters:
            made = called(lambda to=parameter: laid_out_as(to, torch.ones(2, 2)), "torch/distributed/", "typing")  # type: ignore[misc]
            parameter.grad = laid_out_as(parameter, torch.ones(2, 2))
        found = called(step, "/optim/local_shards", "/torch_compat/", "typing")
    dist.destroy_process_group()
    return found, made


def test_known_parameters_are_stepped_without_a_call_for_each(workers2: WorkerGroup) -> None:
    few, many = (workers2.run(calls_of_a_step, count)[0] for count in (2, 20))
    assert few == many
    assert many[1] in ([], ["__new__"]), "DTensor's own constructor, in Python before torch 2.10"


def averaged_with_none() -> Any:
    """In a worker of four: the mean of a pending sum over two shards of the data, of which one has used the parameter."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=4, init_method="env://", timeout_s=60)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    bias = nn.Parameter(distribute_tensor(torch.zeros(3), mesh["tp"], [Replicate()]))
    if mesh.get_local_rank("data") == 0:
        summand = torch.full((3,), 1.0 + mesh.get_local_rank("tp"))
        bias.grad = DTensor.from_local(summand, mesh["tp"], [Partial()])  # type: ignore[assignment]
    average([bias], DataShard(mesh.get_local_rank("data"), 2, mesh.get_group("data")))
    found = bias.grad.full_tensor().tolist()  # type: ignore[union-attr]
    dist.destroy_process_group()
    return found


def test_a_pending_sum_is_averaged_with_processes_that_have_none(workers: Callable[[int], WorkerGroup]) -> None:
    assert workers(4).run(averaged_with_none) == [[1.5] * 3] * 4
