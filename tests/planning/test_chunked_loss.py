"""ChunkedLoss: what the loss of a large vocabulary needs, beside whole logits; by torch's allocator, and by a plan."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain.plan.per_strategy import plan_strategy
from flextrain.plan.plan import PlannedJob
from flextrain.runner.transforms.chunked_loss import ChunkedLoss
from flextrain.testing import WorkerGroup

from .allocator import COMPILER, counting
from .conftest import PLANS

TOKENS, WORDS, WIDTH = 2048, 8000, 128
SHARE = 0.06
"""Of what whole logits need; a chunk has 1/32 of the tokens, as 1,024 of 32,768."""


class Head(nn.Module):
    """The loss part of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(hidden).float(), labels)


def peak_of_loss(chunk: int | None, dtype: torch.dtype, autocast: bool, z_loss: float) -> int:
    """In a worker: bytes that torch's allocator has given out for a loss and its backward, beyond what is left afterwards."""
    torch.set_num_threads(1)
    model = Head().to(dtype)
    if chunk is not None:
        ChunkedLoss(chunk, "head", z_loss=z_loss)(model)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(WORDS, (TOKENS,))
    counted = counting()
    gc.collect()
    counted.forget_peak()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(hidden, labels)
    loss.backward()
    return int(counted.bytes_peak() - counted.bytes_live())


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, to count what torch's allocator gives out")
@pytest.mark.parametrize(
    ("dtype", "autocast", "z_loss"),
    [
        pytest.param(torch.float32, False, 0.0, id="float32"),
        pytest.param(torch.bfloat16, False, 0.0, id="bfloat16", marks=pytest.mark.full),
        pytest.param(torch.float32, True, 0.0, id="autocast"),
        pytest.param(torch.float32, False, 1e-4, id="z-loss", marks=pytest.mark.full),
    ],
)
def test_a_loss_by_rows_needs_a_part_of_whole_logits(
    workers1: WorkerGroup, dtype: torch.dtype, autocast: bool, z_loss: float
) -> None:
    (whole,) = workers1.run(peak_of_loss, None, dtype, autocast, 0.0)
    (by_rows,) = workers1.run(peak_of_loss, TOKENS // 32, dtype, autocast, z_loss)
    assert whole > 2 * TOKENS * WORDS * 4
    assert by_rows < SHARE * whole, f"{by_rows / whole:.1%}"


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from flextrain import FlexibleRunner

class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(128_000, 512), nn.Linear(512, 128_000, bias=False)

    def forward(self, input_ids, labels):
        return {"loss": functional.cross_entropy(self.head(self.table(input_ids)).flatten(0, 1), labels.flatten())}

data = [dict(input_ids=torch.zeros(4096, dtype=torch.long), labels=torch.zeros(4096, dtype=torch.long))] * 16
FlexibleRunner(
    model=Speaker(),
    work_dir="work_dirs",
    train_dataloader=dict(batch_size=8, dataset=data, collate_fn=dict(type="default_collate")),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    train_cfg=dict(by_epoch=True, max_epochs=1),
).train()
"""


@PLANS
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_plan_of_32768_tokens_and_128000_words(tmp_path: Path, strategy: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = []
    for transforms in ([], [dict(type="ChunkedLoss", chunk=1024, head="head")]):
        planned = plan_strategy(PlannedJob(str(script), strategy, 2, 1, (), dict(transforms=transforms)))
        peak = planned.highest.peak
        found.append(sum(peak.by_kind.get(kind, 0) for kind in ("activations", "temporary")))
    whole, by_rows = found
    assert whole > 2 * 32_768 * 128_000 * 4
    assert by_rows < SHARE * whole, f"{by_rows / whole:.1%}"
