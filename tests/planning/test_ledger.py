"""Books on operations that are known."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flextrain.core.torch_compat.torch_private import fake_mode
from flextrain.plan.ledger import Ledger, Network

FLOAT = 4


def books():
    return Ledger(0, Network(1))


def test_memory_by_kind_and_flops_of_a_linear_layer():
    model, x = nn.Linear(64, 32, bias=False), torch.randn(16, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with books() as ledger:
        ledger.watch(model, [optimizer])
        ledger.memory.mark("inputs", [x])
        for _ in range(2):
            ledger.begin()
            loss = model(x).square().sum()
            loss.backward()
            assert ledger.memory.in_use()["gradients"] == 64 * 32 * FLOAT
            del loss
            ledger.update()
            optimizer.step()
            optimizer.zero_grad()
        assert ledger.memory.in_use() == {
            "parameters": 64 * 32 * FLOAT,
            "optimizer_state": 64 * 32 * FLOAT,
            "inputs": 16 * 64 * FLOAT,
        }
        work = {(row.phase, row.kind): row for row in ledger.books().as_work()}
    assert work["forward", "matrix"].flops == 2 * 16 * 64 * 32
    assert work["backward", "matrix"].flops == 2 * 16 * 64 * 32  # the input needs no gradient
    assert work["forward", "matrix"].moved == FLOAT * (16 * 64 + 64 * 32 + 16 * 32)
    assert ledger.peak.total == max(moment.total for moment in ledger.books().moments)


def test_work_without_values_is_that_of_real_tensors():
    def counted():
        model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.zeros(4, 8)
        with books() as ledger:
            ledger.begin()
            model(x).square().sum().backward()
            return ledger.books()

    real = counted()
    with fake_mode():  # in which torch asks for devices by operations
        planned = counted()
    assert planned.work == real.work
    assert "prim.device" not in {moment.operation for moment in planned.moments}


def test_recomputation_is_told_from_forward_and_backward():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    with books() as ledger:
        ledger.watch(model)
        ledger.begin()
        checkpoint(model, x, use_reentrant=False).sum().backward()
        flops = {}
        for row in ledger.books().as_work():
            flops[row.phase] = flops.get(row.phase, 0) + row.flops
    layer = 2 * 4 * 8 * 8
    assert flops["forward"] == 2 * layer
    assert flops["backward"] == 3 * layer
    # torch stops repeating when it has what backward needs: the output of the last layer is not among it.
    assert flops["recompute"] == layer


def test_storage_that_is_resized_counts_with_its_new_size():
    with books() as ledger:
        ledger.begin()
        tensor = torch.zeros(100)
        assert ledger.memory.total == 100 * FLOAT
        tensor.untyped_storage().resize_(0)
        assert ledger.memory.total == 0
        tensor.untyped_storage().resize_(100 * FLOAT)
        view = tensor[:10]
        assert ledger.memory.total == 100 * FLOAT
        del tensor
        assert ledger.memory.total == 100 * FLOAT
        del view
        assert ledger.memory.total == 0
    assert ledger.peak.total == 100 * FLOAT


def test_the_peak_is_that_of_updates_also_if_setup_needs_more():
    with books() as ledger:
        torch.zeros(1000)
        ledger.begin()
        kept = torch.zeros(100)
        ledger.begin()
        del kept
    assert ledger.peak.total == 100 * FLOAT
    assert ledger.peak.phase == "forward"


def test_the_peak_says_where_it_is():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 4000)

        def forward(self, x):
            return self.large(self.small(x)).sum()

    model = Net()
    with books() as ledger, torch.no_grad():
        ledger.watch(model)
        ledger.begin()
        model(torch.randn(100, 4))
    assert (ledger.peak.phase, ledger.peak.module) == ("forward", "large")


def test_tensors_on_the_meta_device_take_no_memory():
    with books() as ledger:
        ledger.begin()
        kept = torch.zeros(100, device="meta")
        assert ledger.memory.total == kept.sum().numel() - 1 == 0


@pytest.fixture
def rounding():
    """Set whether products and convolutions may use TF32."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision

    def set_precision(*precision):
        matmul.fp32_precision, convolution.fp32_precision = precision

    yield set_precision
    set_precision(*before)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has flags")
def test_a_product_has_the_dtype_that_is_multiplied(rounding):
    x, image = torch.randn(4, 8), torch.randn(1, 3, 8, 8)
    convolution = nn.Conv2d(3, 4, 3)

    def dtypes():
        with books() as ledger:
            ledger.begin()
            torch.mm(x.bfloat16(), x.bfloat16().T)
            torch.mm(x, x.T)
            convolution(image)
            return {row.dtype: row.operations for row in ledger.books().as_work() if row.kind == "matrix"}

    rounding("ieee", "tf32")  # torch's defaults
    assert dtypes() == {"bfloat16": 1, "float32": 1, "tfloat32": 1}
    rounding("tf32", "tf32")
    assert dtypes() == {"bfloat16": 1, "tfloat32": 2}
    rounding("ieee", "ieee")
    assert dtypes() == {"bfloat16": 1, "float32": 2}


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
def test_grouped_products_of_experts_are_counted():
    rows, experts = torch.randn(12, 8, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    ends = torch.tensor([5, 6, 12], dtype=torch.int32)
    with books() as ledger:
        ledger.begin()
        torch.nn.functional.grouped_mm(rows, experts, offs=ends).square().sum().backward()
        flops = {row.phase: row.flops for row in ledger.books().as_work() if row.kind == "matrix"}
    each = 2 * 12 * 8 * 16
    assert flops == {"forward": each, "backward": 2 * each}
