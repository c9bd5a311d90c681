"""The single device that everything is compared with is a plain training loop, written out here in torch's own words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import AmpOptimWrapper, FlexibleRunner, Hook, OptimWrapper
from flextrain.core.device.device import to_device
from flextrain.testing.loop import Trace, train, windows
from flextrain.testing.models import Batch, ConvNet, HalfFrozen, Mlp, SmallModel, TinyTransformer
from flextrain.testing.sessions import SEED, single_device

from ..device import DEVICE

ADAMW = dict(type="AdamW", lr=2e-3, weight_decay=0.05)
MOMENTUM = dict(type="SGD", lr=0.02, momentum=0.9, weight_decay=1e-3)
UPDATES = 12

OnDevice = Callable[..., Any]


def plain_loop(
    model: nn.Module,
    optimizer: dict[str, Any],
    data: Sequence[Sequence[Batch]],
    clip_grad: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Trace:
    arguments = {key: value for key, value in optimizer.items() if key != "type"}
    optim = getattr(torch.optim, optimizer["type"])(model.to(DEVICE).parameters(), **arguments)
    trace = Trace()
    model.train()
    for window in to_device(data, torch.device(DEVICE)):
        total = sum(int((batch["y"] != -100).sum()) for batch in window)
        loss_of_window = 0.0
        for batch in window:
            with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(**batch)["loss"]
            loss = loss * (int((batch["y"] != -100).sum()) / total)
            loss.backward()
            loss_of_window += loss.item()
        trace.losses.append(loss_of_window)
        if clip_grad and "max_norm" in clip_grad:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip_grad["max_norm"], clip_grad.get("norm_type", 2.0))
            trace.grad_norms.append(norm.item())
        elif clip_grad:
            nn.utils.clip_grad_value_(model.parameters(), clip_grad["clip_value"])
        optim.step()
        optim.zero_grad()
    return trace


@pytest.mark.parametrize(
    "optimizer, clip",
    [
        (ADAMW, None),
        (MOMENTUM, dict(max_norm=0.1)),
        (ADAMW, dict(max_norm=0.1, norm_type=3)),
        (MOMENTUM, dict(clip_value=0.01)),
    ],
    ids=["plain", "norm", "norm3", "value"],
)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("model_class", [Mlp, ConvNet, TinyTransformer, HalfFrozen])
def test_single_device_is_a_plain_loop(
    on_device: OnDevice,
    model_class: type[SmallModel],
    accumulate: int,
    optimizer: dict[str, Any],
    clip: dict[str, Any] | None,
) -> None:
    on_device(compare, model_class, accumulate, optimizer, clip)


def compare(
    model_class: type[SmallModel], accumulate: int, optimizer: dict[str, Any], clip: dict[str, Any] | None
) -> None:
    epoch = windows([model_class.sample(count, seed) for seed, count in enumerate((8, 8, 8, 8, 8, 3))], accumulate)
    data = (epoch * UPDATES)[:UPDATES]
    torch.manual_seed(SEED)
    model = model_class()
    expected = plain_loop(model, optimizer, data, clip)
    kind = {} if clip is None or "max_norm" in clip else dict(type="value")
    wrapper = OptimWrapper(
        optimizer, accumulative_counts=accumulate, clip_grad=None if clip is None else {**kind, **clip}
    )
    with single_device(wrapper, model_class, device=DEVICE) as session:
        found = train(session.strategy, session.model, session.optim, data)
        # The loop here weighs a micro-batch with one factor, the other one with two: they round differently.
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        if expected.grad_norms:
            assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
        for (name, ours), theirs in zip(session.strategy.module.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_bfloat16_is_torchs_autocast(on_device: OnDevice) -> None:
    found, expected = on_device(losses_in_bfloat16)
    assert found == expected


def losses_in_bfloat16() -> tuple[list[float], list[float]]:
    """Found, and those of torch's autocast."""
    data = [[TinyTransformer.sample(8, seed)] for seed in range(UPDATES)]
    torch.manual_seed(SEED)
    model = TinyTransformer()
    expected = plain_loop(model, ADAMW, data, dtype=torch.bfloat16)
    with single_device(AmpOptimWrapper(ADAMW, dtype="bfloat16"), TinyTransformer, device=DEVICE) as session:
        found = train(session.strategy, session.model, session.optim, data)
    return found.losses, expected.losses


class Unweighted(TinyTransformer):
    """Without ``loss_weight``: every micro-batch of a window counts the same, a smaller one too."""

    loss_weight = None  # type: ignore[assignment]


class Losses(Hook):
    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.lrs: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.values.append(outputs["loss"])
        self.lrs.append(runner.optim_wrapper.param_groups[0]["lr"])


def test_the_runner_is_a_plain_loop(on_device: OnDevice, tmp_path: Path) -> None:
    on_device(compare_runner, tmp_path)


def compare_runner(folder: Path) -> None:
    samples = Unweighted.sample(43, 0)
    items = [{name: values[i] for name, values in samples.items()} for i in range(43)]
    torch.manual_seed(SEED)
    model, twin = Unweighted(), Unweighted()
    twin.load_state_dict(model.state_dict())
    hook = Losses()
    runner = FlexibleRunner(
        model=twin,
        work_dir=folder,
        strategy=dict(type="SingleDeviceStrategy", device=DEVICE),
        # Six batches, the last of three samples, in windows of four and two.
        train_dataloader=dict(dataset=items, batch_size=8, shuffle=False, collate_fn=dict(type="default_collate")),
        # Nothing that forgets the size of a gradient: neither Adam nor clipping.
        optim_wrapper=dict(optimizer=MOMENTUM, accumulative_counts=4),
        param_scheduler=dict(type="ExponentialLR", gamma=0.9, by_epoch=False),
        train_cfg=dict(by_epoch=True, max_epochs=5),
        default_hooks=dict(checkpoint=None),
        custom_hooks=[hook],
    )
    runner.train()

    optim = torch.optim.SGD(model.to(DEVICE).parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    decay = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
    batches = [{name: values[i : i + 8].to(DEVICE) for name, values in samples.items()} for i in range(0, 43, 8)]
    expected, lrs = [], []
    for window in (batches[:4], batches[4:]) * 5:
        losses = [model(**batch)["loss"] for batch in window]
        loss = torch.stack(losses).mean()
        loss.backward()
        lrs.append(optim.param_groups[0]["lr"])
        optim.step()
        optim.zero_grad()
        decay.step()
        expected.append(loss.item())
    assert [value.item() for value in hook.values] == pytest.approx(expected, rel=1e-6)
    assert hook.lrs == pytest.approx(lrs)
    for (name, ours), theirs in zip(twin.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
