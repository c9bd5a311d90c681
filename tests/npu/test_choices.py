"""What is chosen for an accelerator where the user has chosen nothing: said in one line, and overruled by what the user says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .training import ADAMW, BATCH, Classifier, digits, make_runner

pytestmark = [pytest.mark.npu, pytest.mark.distributed]
OPEN = {key: value for key, value in ADAMW.items() if key != "fused"}
AMP = dict(type="AmpOptimWrapper", optimizer=OPEN)
ONE = dict(type="SingleDeviceStrategy", device="npu")
FSDP = dict(type="FSDPStrategy", device="npu")


class Blocks(nn.Module):
    """Two blocks, which are units, and a layer that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        x = images.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}


def chosen(folder: Path, strategy: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What a run of an epoch does, and the line in which it says so."""
    data = dict(
        batch_size=BATCH // 2,
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn="default_collate",
        **{"dataset": digits(2 * BATCH), **changes.pop("data", {})},
    )
    runner = make_runner(
        folder, strategy, 1, log_level="INFO", train_dataloader=data, train_cfg=dict(max_epochs=1), **changes
    )
    runner.train()
    strategy_ = runner.strategy
    optim = runner.optim_wrapper
    found = dict(
        fused=[group.get("fused") for group in optim.param_groups],
        dtype=str(strategy_.precision.compute),
        scales=getattr(optim, "loss_scaler", None) is not None,
        units=len(getattr(strategy_, "_units", [])),
        pins=runner.train_dataloader.pin_memory,
        lines=[
            line for file in sorted(folder.rglob("*.log")) for line in file.read_text().splitlines() if "Chosen" in line
        ],
    )
    strategy_.leave()
    return found


LINE = (
    'Chosen for npu, with what chooses otherwise: bfloat16 (optim_wrapper.dtype="float16"), '
    "one kernel per AdamW update (optim_wrapper.optimizer.fused=False), page-locked batches (train_dataloader.pin_memory=False)"
)


def test_one_line_says_what_was_chosen(npu1: Any, tmp_path: Path) -> None:
    (found,) = npu1.run(chosen, tmp_path, ONE, optim_wrapper=AMP, data=dict(num_workers=1))
    lines = found.pop("lines")
    assert found == dict(fused=[True], dtype="torch.bfloat16", scales=False, units=0, pins=True)
    assert [line.partition("INFO - ")[2] for line in lines] == [LINE]


def test_a_dataset_on_the_device_is_not_page_locked(npu1: Any, tmp_path: Path) -> None:
    (found,) = npu1.run(chosen_with_data_on_device, tmp_path)
    assert not found["pins"], "torch refuses to page-lock tensors of a device"
    assert all("page-locked" not in line for line in found["lines"])


def chosen_with_data_on_device(folder: Path) -> dict[str, Any]:
    tensors = [tensor.to("npu") for tensor in digits(2 * BATCH).tensors]
    return chosen(folder, ONE, optim_wrapper=dict(optimizer=OPEN), data=dict(dataset=TensorDataset(*tensors)))


def test_what_the_user_says_counts(npu1: Any, tmp_path: Path) -> None:
    amp = dict(type="AmpOptimWrapper", dtype="float16", optimizer={**OPEN, "fused": False})
    (found,) = npu1.run(chosen, tmp_path, ONE, optim_wrapper=amp, data=dict(num_workers=1, pin_memory=False))
    lines = found.pop("lines")
    assert found == dict(fused=[False], dtype="torch.float16", scales=True, units=0, pins=False)
    assert [line.rpartition(": ")[2] for line in lines] == ["nothing"]


@pytest.mark.parametrize(
    "optimizer", [{**OPEN, "foreach": True}, dict(type="RMSprop", lr=1e-3)], ids=["another way", "no kernel"]
)
def test_no_kernel_is_taken_beside_another_way_or_where_there_is_none(
    npu1: Any, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    (found,) = npu1.run(chosen, tmp_path, ONE, optim_wrapper=dict(optimizer=optimizer))
    assert found["fused"] in ([None], [False])


def with_table(sparse: bool) -> bool:
    from flextrain import OptimWrapper

    wrapper = OptimWrapper(dict(type="SGD", lr=0.1))
    wrapper.build(nn.Sequential(nn.Embedding(10, 10, sparse=sparse)).to("npu"))
    return wrapper.chose_fused


def test_no_kernel_is_taken_for_sparse_gradients(npu1: Any) -> None:
    assert npu1.run(with_table, sparse=True) == [False]
    assert npu1.run(with_table, sparse=False) == [True]


def test_a_loss_scale_means_float16(npu1: Any, tmp_path: Path) -> None:
    (found,) = npu1.run(chosen, tmp_path, ONE, optim_wrapper={**AMP, "loss_scale": "dynamic"})
    assert (found["dtype"], found["scales"]) == ("torch.float16", True)
    assert "float16" not in found["lines"][0], "the user has said it"


@pytest.mark.parametrize(
    "model, wrap, units",
    [
        pytest.param(Blocks, None, 2, id="blocks"),
        pytest.param(Blocks, "model", 0, id="one unit", marks=pytest.mark.full),
        pytest.param(Classifier, None, 0, id="no blocks"),
        pytest.param(Blocks, ["Linear"], 3, id="by class"),
    ],
)
def test_units_are_blocks(npu2: Any, tmp_path: Path, model: Any, wrap: Any, units: int) -> None:
    strategy = FSDP if wrap is None else {**FSDP, "wrap": wrap}
    for found in npu2.run(chosen, tmp_path, strategy, model=model, optim_wrapper=dict(optimizer=OPEN)):
        assert found["units"] == units
        assert found["fused"] == [True]
        is_default = wrap is None and units > 0
        assert all(('FSDP units by blocks (strategy.wrap="model")' in line) == is_default for line in found["lines"])


def resumed(folder: Path, before: Any, after: Any) -> tuple[list[float], list[str], float]:
    """Losses and devices of what an optimizer counts of a run whose second epoch has another way to update, and the losses of one run."""
    from .training import train

    saves = dict(default_hooks=dict(checkpoint=dict(interval=1)))
    begun, _ = train(folder / "two", ONE, optim_wrapper=before, train_cfg=dict(max_epochs=1), **saves)
    rest, _ = train(folder / "two", ONE, optim_wrapper=after, resume=True, **saves)
    whole, _ = train(folder / "one", ONE, optim_wrapper=before)
    return begun + rest, whole


@pytest.mark.parametrize("order", ["to fused", "from fused"])
def test_a_checkpoint_of_the_other_way_is_resumed(npu1: Any, tmp_path: Path, order: str) -> None:
    ways = dict(optimizer={**OPEN, "fused": False}), dict(optimizer=OPEN)
    before, after = ways if order == "to fused" else ways[::-1]
    ((losses, whole),) = npu1.run(resumed, tmp_path, before, after)
    assert len(losses) == 16
    assert torch.allclose(torch.tensor(losses), torch.tensor(whole), rtol=1e-5)


def test_float16_with_one_kernel_skips_an_update_and_asks_once(npu1: Any, tmp_path: Path) -> None:
    from .test_traffic import between_lines, waits

    amp = dict(type="AmpOptimWrapper", dtype="float16", optimizer=OPEN, clip_grad=dict(max_norm=0.5))
    (found,) = npu1.run(waits, tmp_path, ONE, optim_wrapper=amp)
    others = {update: each for update, each in between_lines(found).items() if update > 1}
    assert {len(each) for each in others.values()} == {1}
    assert all("amp.py" in each[0] for each in others.values())


def overflowing(strategy: dict[str, Any]) -> tuple[list[bool], bool, bool]:
    """Of two updates, the first with an infinite gradient: which were skipped, and whether weights changed."""
    from flextrain import STRATEGIES, AmpOptimWrapper

    built = STRATEGIES.build(strategy, "strategy")
    built.join()
    model, optim = built.setup(Blocks(), AmpOptimWrapper(OPEN, dtype="float16", loss_scale=8.0))
    skipped, moved, before = [], [], None
    for factor in (float("inf"), 1.0):
        before = {name: tensor.clone() for name, tensor in built.model_state().items()}
        images, labels = torch.ones(4, 64, device=built.device), torch.zeros(4, dtype=torch.long, device=built.device)
        with built.autocast():
            loss = model(images, labels)["loss"]
        optim.backward(loss * factor)
        skipped.append(optim.step().skipped)
        moved.append(any(not torch.equal(before[name], tensor) for name, tensor in built.model_state().items()))
    built.leave()
    return skipped, *moved


@pytest.mark.parametrize("strategy", [ONE, FSDP], ids=["one device", "FSDP"])
def test_an_overflow_skips_the_fused_update(npu1: Any, npu2: Any, strategy: dict[str, Any]) -> None:
    for found in (npu2 if strategy is FSDP else npu1).run(overflowing, strategy):
        assert found == ([True, False], False, True)
