"""Micro-batches without an item to count contribute exactly nothing, wherever they are."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flextrain import ConfigError
from flextrain.core.comm.topology import Topology
from flextrain.runner.loops.losses import Weighing, weighted_mean
from flextrain.testing import WorkerGroup

from .training import Samples, Watch, make_runner, whole_state

pytestmark = pytest.mark.usefixtures("quick")

ADAMW = dict(type="AdamW", lr=0.02, weight_decay=0.1)
EMPTY = {1, 3, 8, 10, 12, 14, *range(16, 24)}
"""With two samples in a batch and eight in an update: a batch of the second process in the first update, both of the first
process's in the second update, and all of the third."""


class Masked(nn.Module):
    """The mean over the samples that are not masked: 0/0 where all are, and so are all gradients then."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.recompute = recompute

    def forward(self, index: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = x.requires_grad_(self.recompute)
        logits = checkpoint(self.net, x, use_reentrant=True) if self.recompute else self.net(x)
        mask = kept(index).to(logits)
        losses = functional.cross_entropy(logits.float(), y, reduction="none")
        right = (logits.argmax(1) == y).float()
        return {"loss": (losses * mask).sum() / mask.sum(), "accuracy": (right * mask).sum() / mask.sum()}

    def loss_weight(self, data_batch: Any) -> Any:
        return kept(data_batch["index"]).sum()


def kept(index: Tensor) -> Tensor:
    return torch.tensor([int(i) not in EMPTY for i in index])


class Outputs(Watch):
    """The other figures, too."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[dict[str, float]] = []
        self.skipped: list[bool] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        self.outputs.append({name: float(value) for name, value in outputs.items()})
        self.skipped.append(runner.optim_wrapper.last_step.skipped)


def run(folder: str | Path, batch_size: int, accumulate: int, samples: Any = None, **changes: Any) -> dict[str, Any]:
    watch = Outputs()
    data = Samples(32) if samples is None else [Samples(32)[i] for i in samples]
    loader = dict(
        batch_size=batch_size, dataset=data, sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn="default_collate",
    )  # fmt: skip
    wrapper = dict(optimizer=ADAMW, accumulative_counts=accumulate, clip_grad=dict(max_norm=0.5))
    settings = dict(
        model=Masked, train_dataloader=loader, optim_wrapper=wrapper, train_cfg=dict(max_epochs=1),
        param_scheduler=dict(type="LinearLR", start_factor=0.1, end=4, by_epoch=False),
        custom_hooks=[watch, dict(type="EMAHook", momentum=0.1)],
    )  # fmt: skip
    runner = make_runner(folder, **{**settings, **changes})
    runner.train()
    state = whole_state(runner)
    runner.strategy.leave()
    return {
        "state": {key: value for key, value in state.items() if isinstance(value, Tensor)},
        "losses": [float(loss) for loss in watch.losses],
        "outputs": watch.outputs,
        "rates": watch.rates,
        "skipped": watch.skipped,
    }


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected["state"].items():
        torch.testing.assert_close(found["state"][key], value, rtol=1e-5, atol=1e-6, msg=lambda text, k=key: k + text)
    assert found["rates"] == expected["rates"]
    assert found["skipped"] == [False, False, True, False]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("batch_size, accumulate", [(2, 4), (4, 2), (1, 8)])
def test_empty_micro_batches_on_one_process(tmp_path: Path, batch_size: int, accumulate: int, recompute: bool) -> None:
    whole = run(tmp_path / "whole", 8, 1)
    parts = run(tmp_path / "parts", batch_size, accumulate, model=partial(Masked, recompute))
    check(parts, whole)
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    for one, other in zip(parts["outputs"], whole["outputs"], strict=True):
        assert one == pytest.approx(other, rel=1e-5), "every figure is a mean over the items"


def test_updates_of_nothing_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flextrain")
    logger.addHandler(caplog.handler)
    try:
        found = run(tmp_path, 2, 4, samples=[*range(16, 24), *range(8), *range(16, 24)], log_level="WARNING")
    finally:
        logger.removeHandler(caplog.handler)
    assert found["skipped"] == [True, False, True]
    said = [line for line in caplog.messages if line.startswith("model.loss_weight: ")]
    assert said == [
        "model.loss_weight: an update had no items on any process and was skipped; later ones are skipped without a warning"
    ]


def test_an_update_of_nothing_is_none(tmp_path: Path) -> None:
    """Bit for bit: no decay of weights, no movement of moments, averages or schedules."""
    with_it = run(tmp_path / "with", 2, 4)
    without = run(tmp_path / "without", 2, 4, samples=[*range(16), *range(24, 32)])
    assert with_it["state"].keys() == without["state"].keys()
    for key, value in without["state"].items():
        assert torch.equal(with_it["state"][key], value), key
    assert with_it["outputs"][2] == {"loss": 0.0}
    assert with_it["rates"] == [*without["rates"][:3], without["rates"][2]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_empty_micro_batches_under_autocast(tmp_path: Path, dtype: str) -> None:
    """An overflow is no excuse: the scale stays, because zeros are finite."""

    def wrapper(accumulate: int) -> dict[str, Any]:
        scaling = dict(loss_scale=dict(init_scale=1024.0)) if dtype == "float16" else {}
        return dict(
            type="AmpOptimWrapper", optimizer=ADAMW, dtype=dtype, accumulative_counts=accumulate, **scaling
        )  # fmt: skip

    whole = run(tmp_path / "whole", 8, 1, optim_wrapper=wrapper(1))
    parts = run(tmp_path / "parts", 2, 4, optim_wrapper=wrapper(4))
    assert parts["skipped"] == whole["skipped"] == [False, False, True, False]
    for key, value in whole["state"].items():
        if key.startswith("model."):
            torch.testing.assert_close(parts["state"][key], value, rtol=1e-2, atol=1e-2, msg=key)


def test_any_function_may_weigh(tmp_path: Path) -> None:
    model = Masked()
    model.loss_weight = partial(Masked.loss_weight, model)  # type: ignore[method-assign]
    found = run(tmp_path / "partial", 2, 4, model=model)
    assert found["skipped"] == [False, False, True, False]


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_weights_that_are_no_numbers_of_items(tmp_path: Path, wrong: float) -> None:
    class Wrong(Masked):
        def loss_weight(self, data_batch: Any) -> float:
            return wrong

    with pytest.raises(ConfigError, match=rf"^model.loss_weight: gave {wrong}, give the number of items, 0 or more$"):
        run(tmp_path, 2, 1, model=Wrong)


STRATEGIES = [
    pytest.param(dict(type="DDPStrategy"), id="ddp"),
    pytest.param(dict(type="DDPStrategy", find_unused_parameters=True, gradient_as_bucket_view=True), id="ddp-view"),
    pytest.param(dict(type="FSDPStrategy", wrap=["Linear"]), id="fsdp"),
    *(
        pytest.param(
            dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)),
            id=f"zero{stage}",
            marks=[pytest.mark.deepspeed, *([pytest.mark.full] if stage < 2 else [])],
        )
        for stage in (0, 1, 2, 3)
    ),
]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_empty_micro_batches_on_one_of_two_processes(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any]
) -> None:
    whole = run(tmp_path / "whole", 8, 1)
    results = workers2.run(run, str(tmp_path / "parts"), 2, 2, strategy=strategy)
    for found in results:
        check(found, whole)
    means = [sum(losses) / 2 for losses in zip(*(found["losses"] for found in results), strict=True)]
    assert means == pytest.approx(whole["losses"], rel=1e-5), "the log's loss is the mean over processes"
    assert "accuracy" not in results[0]["outputs"][1], "the first process had no item, and so no figure"


def test_weights_are_numbers_of_the_host_whatever_device_is_the_default() -> None:
    weighing = Weighing(len, torch.device("cpu"), Topology())
    with torch.device("meta"):
        assert weighing.weigh([[1, 2], [3]])
    assert weighing.factors == [2 / 3, 1 / 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_process_without_items_gives_a_loss_of_the_dtype_of_all(dtype: torch.dtype) -> None:
    """Processes add up their losses: messages of other sizes end them."""
    part = {"loss": torch.full((), torch.nan, dtype=dtype)}
    loss = weighted_mean([part], [0.0], [0.0])["loss"]
    assert (loss.dtype, loss.item()) == (dtype, 0.0)
