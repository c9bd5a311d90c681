"""Copies between host and device: batches on a stream of their own, checkpoints through page-locked memory of bounded size."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flextrain import BaseDataPreprocessor
from flextrain.core.checkpoint import Checkpoint, Staging, save_checkpoint, save_in_background
from flextrain.core.device import device as devices
from flextrain.core.device.device import host_slices, to_device

from .training import make_runner

pytestmark = [pytest.mark.npu, pytest.mark.distributed]


class Pair(NamedTuple):
    """A named tuple in a dataclass."""

    left: Tensor
    right: Tensor


@dataclass
class Sample:
    """A dataclass in a list."""

    pair: Pair
    name: str


class Encoding(dict[str, Tensor]):
    """Moves itself, as a batch encoding of transformers does."""

    def to(self, device: Any, *, non_blocking: bool = False) -> Encoding:
        return Encoding({key: value.to(device, non_blocking=non_blocking) for key, value in self.items()})


class Old(dict[str, Tensor]):
    """Moves itself, and knows no more than where to."""

    def to(self, device: Any) -> Old:
        return Old({key: value.to(device) for key, value in self.items()})


def moved() -> tuple[list[list[float]], list[str], int, list[str]]:
    """What arrived of a batch, in what ways the host waited, for how many tensors memory was kept; the types."""
    import torch_npu

    numbers = [torch.full((3,), float(n)).pin_memory() for n in range(5)]
    batch = [Sample(Pair(*numbers[:2]), "a"), {"tensor": numbers[2]}, Encoding(a=numbers[3])]
    seen: list[str] = []
    before = torch_npu._sim.recorded_streams()
    torch_npu.watch(seen.append)
    found = to_device(batch, torch.device("npu", 0))
    torch_npu.watch(None)
    kept = torch_npu._sim.recorded_streams() - before
    old = to_device(Old(a=numbers[4]), torch.device("npu", 0))
    tensors = [*found[0].pair, found[1]["tensor"], found[2]["a"], old["a"]]
    totals = [
        tensor.sum() for tensor in tensors
    ]  # all of them before one is read, which would wait for what has not arrived
    sums = [[float(total)] for total in totals]
    return sums, seen, kept, [type(one).__name__ for one in (found[0], found[0].pair, found[1], found[2], old)]


def test_batches_are_copied_beside_the_work_of_the_device(npu1: Any) -> None:
    ((sums, seen, kept, types),) = npu1.run(moved)
    assert sums == [[0.0], [3.0], [6.0], [9.0], [12.0]]
    assert seen == []
    assert kept == 3  # all but those that move themselves
    assert types == ["Sample", "Pair", "dict", "Encoding", "Old"]


class Keys(nn.Module):
    """Sums what it is given, over batches that a preprocessor of the library moves."""

    def __init__(self) -> None:
        super().__init__()
        self.data_preprocessor = BaseDataPreprocessor()
        self.layer = nn.Linear(1, 1)

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        return {"loss": self.layer(images.mean().view(1, 1)).sum()}


def streams_of_a_run(folder: Path, model: Any, strategy: Any) -> int:
    import torch_npu

    before = torch_npu._sim.recorded_streams()
    changes = {} if model is None else {"model": model}
    runner = make_runner(folder, strategy, 1, train_cfg=dict(max_epochs=1), **changes)
    runner.train()
    runner.strategy.leave()
    return int(torch_npu._sim.recorded_streams() - before)


NPU, FSDP = dict(type="NPUStrategy"), dict(type="FSDPStrategy", device="npu")


@pytest.mark.parametrize(
    "strategy, model",
    [(NPU, None), (NPU, Keys), (FSDP, Keys), (FSDP, Keys()), ({**FSDP, "cpu_offload": True}, Keys)],
    ids=["without preprocessor", "with one", "fsdp", "fsdp, instance", "fsdp, parameters on the host"],
)
def test_a_run_copies_its_batches_on_their_own_stream(
    npu1: Any, tmp_path: Path, model: Any, strategy: dict[str, Any]
) -> None:
    assert npu1.run(streams_of_a_run, tmp_path, model, strategy) == [16]  # two tensors of each of eight batches


def state(seed: int) -> dict[str, Tensor]:
    """More than a few slices: a large tensor, many small ones, of the device and the host, some in another order of memory."""
    generator = torch.Generator().manual_seed(seed)
    small = {f"small.{n}": torch.randn(5, generator=generator).to("npu") for n in range(10)}
    large = torch.randn(40, 10, generator=generator)
    return {
        **small,
        "large": large.to("npu"),
        "columns": large.to("npu")[:, ::2],
        "host": large[:3],
        "none": torch.empty(0, device="npu"),
        "half": large.to("npu").half(),
        "complex": torch.complex(large, -large).to("npu"),
        "number": torch.tensor(3, device="npu"),
    }


def content(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    found = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(found)
    return found


def blocking(folder: Path, limit: int) -> tuple[list[str], Counter[str], list[int]]:
    """Which tensors a save has written wrongly, how often the host waited in it, and which buffers it used."""
    import torch_npu

    devices._SLICE_BYTES = limit
    tensors = state(1)
    seen: list[str] = []
    sizes: set[int] = set()
    copy = devices.HostBuffer.copy

    def noted(self: Any, given: Any) -> Any:
        copies = copy(self, given)
        assert all(block.is_pinned() for block in self._blocks)
        sizes.update(block.numel() for block in self._blocks)
        return copies

    devices.HostBuffer.copy = noted  # type: ignore[method-assign]
    torch_npu.watch(seen.append)
    try:
        path = save_checkpoint(folder / "saved", tensors)
    finally:
        torch_npu.watch(None)
        devices.HostBuffer.copy = copy  # type: ignore[method-assign]
        devices._SLICE_BYTES = 2**26
    written = content(path)
    different = [key for key, tensor in tensors.items() if not torch.equal(written[key], tensor.cpu())]
    return different, Counter(seen), sorted(sizes)


def test_a_save_that_waits_copies_many_tensors_at_once(npu1: Any, tmp_path: Path) -> None:
    ((different, seen, _),) = npu1.run(blocking, tmp_path, 2**26)
    assert different == []
    assert seen == {"synchronize": 1}


def test_its_memory_is_bounded(npu1: Any, tmp_path: Path) -> None:
    ((different, seen, sizes),) = npu1.run(blocking, tmp_path, 256)
    assert different == []
    assert seen["copy to host"] == 0
    assert max(sizes) <= 512


def reused() -> list[list[float]]:
    """Slices of three buffers' worth of tensors, each changed on the device once it was asked for, read late."""
    devices._SLICE_BYTES = 64
    tensors = [torch.full((16,), float(n), device="npu") for n in range(6)]
    found = []
    for number, one in host_slices(tensors):
        tensors[number].zero_()  # the copies of the next ones were begun before
        found.append(one.tolist())
    devices._SLICE_BYTES = 2**26
    return found


def test_no_buffer_is_used_again_before_its_content_was_taken(npu1: Any) -> None:
    assert npu1.run(reused) == [[[float(n)] * 16 for n in range(6)]]


def background(folder: Path) -> tuple[list[tuple[str, str]], list[float]]:
    """What the host waited for while replicas were saved in the background and training went on; what was saved."""
    import torch_npu

    from flextrain import NPUStrategy

    strategy = NPUStrategy()
    strategy.join()
    weights = torch.arange(1000.0, device=strategy.device)
    staging = Staging()
    for number in range(2):  # the second one finds plan and memory
        waits: list[tuple[str, str]] = []
        torch_npu.watch(lambda what, to=waits: to.append((threading.current_thread().name, what)))
        try:
            pending = save_in_background(folder / f"iter_{number}", {"weights": weights}, staging=staging)
            weights.add_(1)
            pending.wait()
        finally:
            torch_npu.watch(None)
    saved = content(folder / "iter_1")["weights"]
    strategy.leave()
    return waits, [float(saved[0]), float(saved[-1])]


def test_hashes_of_replicas_hold_nobody_up(npu2: Any, tmp_path: Path) -> None:
    for waits, saved in npu2.run(background, tmp_path):
        assert {thread for thread, _ in waits} == {"flextrain-save"}
        assert saved == [1.0, 1000.0]


def diverged(folder: Path, in_background: bool) -> str:
    from flextrain import CheckpointError, NPUStrategy

    strategy = NPUStrategy()
    strategy.join()
    weights = torch.arange(1000.0, device=strategy.device)
    weights[7] += strategy.topology.rank
    try:
        if in_background:
            save_in_background(folder / "saved", {"weights": weights}).wait()
        else:
            save_checkpoint(folder / "saved", {"weights": weights})
        return "saved"
    except CheckpointError as error:
        return str(error)
    finally:
        strategy.leave()


@pytest.mark.parametrize("in_background", [True, False])
def test_replicas_that_differ_are_found(npu2: Any, tmp_path: Path, in_background: bool) -> None:
    for found in npu2.run(diverged, tmp_path, in_background):
        assert "weights differs between processes" in found
