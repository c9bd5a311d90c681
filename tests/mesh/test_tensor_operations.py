"""Operations on DTensors that torch's rules gather needlessly, refuse or get wrong: what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional

from flextrain.core.base.errors import StrategyError
from flextrain.core.torch_compat.dtensor_private import computes_strided_shards, strided_shard
from flextrain.runner.loops.step import Stepper
from flextrain.strategies.divided import register_divided
from flextrain.strategies.mesh.tensor import operations
from flextrain.strategies.mesh.tensor.operations import (
    DTensorFunctions,
    register_cpu_attention,
    register_gathering,
    register_whole_operations,
)
from flextrain.testing import WorkerGroup

from ..device import DEVICE
from .models import VOCABULARY, sample
from .parity import NEEDS_LAYOUTS, RECIPES, dtype_of, started

pytestmark = [pytest.mark.distributed, NEEDS_LAYOUTS]


def _rope(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 6:], x[..., :6]), -1) * x


def _written(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 2] = 0.0
    y[..., 1:3] = y[..., 1:3] * 2
    return y


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of squares": lambda x: functional.mse_loss(x, torch.ones_like(x)),
    "huber": lambda x: functional.smooth_l1_loss(x, torch.ones_like(x)),
    "groups": lambda x: functional.group_norm(x, 2),
    "convolution": lambda x: functional.conv1d(x, torch.linspace(-1, 1, 96).view(4, 8, 3), torch.ones(4), padding=1),
    "item": lambda x: x * x.detach().sum().item(),
    "condition": lambda x: x * 2 if (x.detach().sum() > 0).item() else x,
    "selection": lambda x: x[x > 0],
    "writing": _written,
    "writing to views": lambda x: functional.relu((x @ torch.eye(12)).view(4, 8, 12), inplace=True) * 2.0,
    "views": lambda x: x.reshape(6, 64),
    "joined": lambda x: x.view(4, 8, 6, 2).permute(2, 0, 1, 3),
    "attention": lambda x: functional.scaled_dot_product_attention(
        *(x.view(4, 8, 3, 4).transpose(1, 2),) * 3, attn_mask=torch.ones(8, 8).tril().bool()
    ),
    "attention, other masks for heads": lambda x: functional.scaled_dot_product_attention(
        *(x.view(4, 8, 2, 6).transpose(1, 2),) * 3, attn_mask=torch.ones(4, 2, 8, 8).tril().bool()
    ),
    "pooling": lambda x: functional.avg_pool2d(x, 2),
    "windows": lambda x: x.unfold(1, 3, 1),
    "rms": lambda x: functional.rms_norm(x, (12,)),
    "rotary": _rope,
    "classes": lambda x: functional.cross_entropy(x.flatten(0, 1), torch.arange(32) % 12, label_smoothing=0.1),
    "probabilities": lambda x: functional.cross_entropy(x.flatten(0, 1), torch.full((32, 12), 1 / 12)),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "random": lambda x: x * torch.rand_like(x),
    "rows, used twice": lambda x: (rows := functional.embedding(torch.arange(6) % 4, x[:, 0])) * rows + rows,
    "chunks": lambda x: torch.stack([part.sum(-1) for part in x.chunk(3, -1)]),
}


def computed_alike() -> list[str]:
    """In a worker: names of operations whose value or gradient differs from that of one device in any layout."""
    mesh, wrong = init_device_mesh(DEVICE, (2,)), []
    register_cpu_attention()
    register_divided()
    register_gathering()
    register_whole_operations()
    x = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layouts = [Replicate(), Shard(0), Shard(1), Shard(2)]
    if computes_strided_shards():
        layouts += [strided_shard(2, 2), strided_shard(2, 3)]
    x = x.to(DEVICE)
    with dtype_of(torch.float64), torch.device(DEVICE):
        for name, operation in OPERATIONS.items():
            torch.manual_seed(5)
            one = x.clone().requires_grad_()
            expected = operation(one)
            weights = torch.linspace(-1, 1, max(expected.numel(), 1)).view(expected.shape)
            (expected * weights).sum().backward()
            for layout in layouts:
                torch.manual_seed(5)
                with implicit_replication(), DTensorFunctions():
                    divided: Any = distribute_tensor(x, mesh, [layout], src_data_rank=None).requires_grad_()
                    try:
                        found: Any = operation(divided)
                        (found * weights).sum().backward()
                    except RuntimeError as error:
                        if "in-place operations that require placement changes" in str(error):
                            continue  # torch 2.11 refuses to write where newer ones gather
                        wrong.append(f"{name} of {layout}: {error}")
                        continue
                whole = found.full_tensor()
                gradient = divided.grad.full_tensor()
                if whole.shape != expected.shape or not (
                    torch.allclose(whole, expected, 1e-10) and torch.allclose(gradient, one.grad, 1e-10)
                ):
                    wrong.append(f"{name} of {layout}")
    return wrong


def test_operations_are_those_of_one_device_in_every_layout(workers2: WorkerGroup) -> None:
    assert workers2.run(computed_alike) == [[], []]


def written_views() -> str:
    """In a worker: the message for a write that would be lost."""
    mesh = init_device_mesh(DEVICE, (2,))
    divided: Any = distribute_tensor(torch.ones(4, 6, device=DEVICE), mesh, [Shard(1)], src_data_rank=None)
    with implicit_replication(), DTensorFunctions():
        divided[1].mul_(2.0)
        assert torch.equal(divided.full_tensor()[1], torch.full((6,), 2.0, device=DEVICE))
        try:
            divided[:, 2].mul_(2.0)
        except StrategyError as error:
            return str(error)
    return "nothing"


def test_a_write_that_would_be_lost_is_refused(workers2: WorkerGroup) -> None:
    for message in workers2.run(written_views):
        assert message.startswith("model: mul_ writes to a view of a tensor whose shards were gathered")


def renormalised() -> str:
    """In a worker: the message for a table that forward writes to."""
    table: Any = distribute_tensor(
        torch.ones(4, 6, device=DEVICE), init_device_mesh(DEVICE, (2,)), [Replicate()], src_data_rank=None
    )
    with implicit_replication(), DTensorFunctions():
        try:
            functional.embedding(torch.arange(4, device=DEVICE), table, max_norm=1.0)
        except StrategyError as error:
            return str(error)
    return "nothing"


def test_a_table_that_forward_writes_to_is_refused(workers2: WorkerGroup) -> None:
    for message in workers2.run(renormalised):
        assert message.startswith(
            "model: Embedding(max_norm=...) writes to its table in forward, which tensor parallelism"
        )


TABLES = {
    "own plan": (dict(), "llama"),
    "dtensor": (dict(plan={"embed": "embedding_rowwise"}, tp_kind="dtensor"), "plain"),
    "local": (dict(plan={"embed": "embedding_rowwise"}, tp_kind="local"), "plain"),
    "sequence": (dict(plan={"embed": "embedding_rowwise"}, sequence_parallel=True), "plain"),
}


def errors_of_lookups(options: dict[str, Any], name: str) -> list[str]:
    """In a worker: what is raised for indices that are not in a table, of one sample, in training and in evaluation."""
    found = []
    with started({"type": "MeshStrategy", "tp": 2, **options}, name, RECIPES["adamw"]) as session:
        model = session.model
        table = next(
            part for part in model.modules() if isinstance(part, nn.Embedding) and part.num_embeddings == VOCABULARY
        )
        assert cast(DTensor, table.weight).placements[-1].is_shard(0)
        for index in (VOCABULARY, -1, VOCABULARY - 1):
            batch = {key: value.to(DEVICE) for key, value in sample(name, 4, 0).items()}
            batch["input_ids"][2, 3] = index
            for is_training in (True, False):
                try:
                    if is_training:
                        Stepper(session.strategy, model, session.optim).train([batch])
                    else:
                        with torch.no_grad():
                            model.eval()(**batch)
                            model.train()
                    found.append("nothing")
                except IndexError as error:
                    found.append(str(error))
    return found


@pytest.mark.parametrize("case", TABLES)
def test_an_index_that_no_process_has_in_its_part_of_a_table(workers2: WorkerGroup, case: str) -> None:
    """Torch looks up zeros for what is not in a process's part, and so for what is in no part."""
    for found in workers2.run(errors_of_lookups, *TABLES[case]):
        assert found == ["index out of range in self"] * 4 + ["nothing"] * 2


def dtype_under_autocast() -> torch.dtype:
    """In a worker: the dtype of the cross entropy of divided logits of half precision."""
    logits: Any = distribute_tensor(
        torch.ones(4, 6, device=DEVICE), init_device_mesh(DEVICE, (2,)), [Shard(1)], src_data_rank=None
    )
    with implicit_replication(), DTensorFunctions(), torch.autocast(DEVICE, torch.bfloat16):
        loss: Tensor = functional.cross_entropy(logits.bfloat16(), torch.arange(4, device=DEVICE))
    return loss.dtype


def gradient_dtype() -> bool:
    """In a worker: whether the gradient of divided logits is right where another dtype is the default."""
    logits = torch.linspace(-1, 1, 24, device=DEVICE).view(4, 6)
    divided: Any = distribute_tensor(logits, init_device_mesh(DEVICE, (2,)), [Shard(1)], src_data_rank=None)
    with dtype_of(torch.float64):
        for each in (logits, divided):
            each.requires_grad_()
            with implicit_replication(), DTensorFunctions():
                functional.cross_entropy(each, torch.arange(4, device=DEVICE), label_smoothing=0.1).backward()
    whole = divided.grad.full_tensor()
    return whole.dtype == torch.float32 and torch.allclose(whole, logits.grad)


def test_cross_entropy_of_another_dtype_than_the_default(workers2: WorkerGroup) -> None:
    assert workers2.run(gradient_dtype) == [True, True]


def test_cross_entropy_under_autocast_is_float32(workers2: WorkerGroup) -> None:
    assert workers2.run(dtype_under_autocast) == [torch.float32, torch.float32]


def test_gradients_of_gradients_need_a_torch_that_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=True)
    monkeypatch.setattr(operations, "differentiates_twice", lambda: False)
    with DTensorFunctions():
        torch.autograd.grad(x.square().sum(), x)
        for ask in (lambda: torch.autograd.grad(x.square().sum(), x, create_graph=True),
                    lambda: x.square().sum().backward(create_graph=True)):  # fmt: skip
            with pytest.raises(StrategyError, match="^model: asks for gradients of gradients .*; take torch 2.15"):
                ask()
