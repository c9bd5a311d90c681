"""State of processes that hold different names: saved once, checked over all, loaded by any strategy and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy
from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint, export_weights, find_latest
from flextrain.core.comm import collectives as dist
from flextrain.core.comm.agreement import raising_together
from flextrain.runner.resume.weights import nonfinite_weights
from flextrain.testing import WorkerGroup

from .split import Net, SplitStrategy, make_runner

pytestmark = pytest.mark.distributed

Workers = Callable[[int], WorkerGroup]
HALF, ALL = 3, 6
KINDS: dict[str, type[Strategy]] = {
    "one": SingleDeviceStrategy, "split": SplitStrategy, "ddp": DDPStrategy, "fsdp": FSDPStrategy,
}  # fmt: skip


def train(folder: Path, kind: str, iters: int, resume: Path | None = None) -> Path:
    """Train up to ``iters``; where the checkpoint is then."""
    strategy = KINDS[kind](device="cpu", timeout_s=60)
    options = dict(resume=dict(path=str(resume), data=False, random=False)) if resume else {}
    runner = make_runner(folder, strategy, iters, **options)
    runner.train()
    strategy.leave()
    found = find_latest(runner.work_dir)
    assert found is not None
    return found


def tensors(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    found = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(found)
    return found


def check_alike(path: Path, expected: Path) -> None:
    """All that one device's checkpoint has, once, with the same values; plain ones too."""
    found, wanted = tensors(path), tensors(expected)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.allclose(found[key], tensor, rtol=1e-5, atol=1e-6), key
    values, others = Checkpoint.open(path).values, Checkpoint.open(expected).values
    assert values.keys() == others.keys()
    for key in values:
        if key.startswith(("optim.", "extra_state", "aliases", "late", "hooks")):
            assert values[key] == others[key] or sorted(values[key]) == sorted(others[key]), key


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of one device after half of the updates and after all."""
    folder = tmp_path_factory.mktemp("one")
    return train(folder / "half", "one", HALF), train(folder / "all", "one", ALL)


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_with_different_layers_save_what_one_device_saves(
    workers: Workers, tmp_path: Path, one_device: tuple[Path, Path], world_size: int
) -> None:
    half, end = one_device
    path = workers(world_size).run(train, tmp_path / "split", "split", HALF)[0]
    check_alike(path, half)
    check_alike(train(tmp_path / "on", "one", ALL, path), end)  # to one device
    resumed = workers(world_size).run(train, tmp_path / "back", "split", ALL, half)[0]  # and back
    check_alike(resumed, end)
    export_weights(path, tmp_path / "x.pth")
    export_weights(half, tmp_path / "expected.pth")
    exported, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("x.pth", "expected.pth"))
    assert exported.keys() == expected.keys() >= Net().state_dict().keys()
    assert exported["head.weight"].data_ptr() == exported["embed.weight"].data_ptr()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_other_strategies_go_on_and_back(
    workers: Workers, tmp_path: Path, one_device: tuple[Path, Path], kind: str
) -> None:
    _, end = one_device
    path = workers(4).run(train, tmp_path / "split", "split", HALF)[0]
    check_alike(workers(2).run(train, tmp_path / "on", kind, ALL, path)[0], end)
    path = workers(2).run(train, tmp_path / "other", kind, HALF)[0]
    check_alike(workers(4).run(train, tmp_path / "back", "split", ALL, path)[0], end)


def spoiled(folder: Path) -> tuple[list[str], list[str], str]:
    """What is found once a weight of the last process is not a number, and what a save says once its tied weight strays."""
    strategy = SplitStrategy(device="cpu", timeout_s=60)
    runner = make_runner(folder, strategy, 1)
    runner.train()
    is_last = strategy.topology.rank == strategy.topology.world_size - 1
    for name, parameter in strategy.parameters():
        if name == "layers.3.linear.bias":
            parameter.data[0] = torch.nan
    found = nonfinite_weights(runner)
    runner.save_checkpoint(folder, "spoiled")
    marked = list(Checkpoint.open(folder / "spoiled").nonfinite)
    for name, parameter in strategy.parameters():
        if name == "embed.weight" and is_last:
            parameter.data += 1
    heard = hear(lambda: runner.save_checkpoint(folder, "astray"))
    strategy.leave()
    return found, marked, heard


def test_what_is_wrong_on_one_process_is_seen_on_all(workers: Workers, tmp_path: Path) -> None:
    for found, marked, heard in workers(2).run(spoiled, tmp_path):
        assert found == ["layers.3.linear.bias"]
        assert marked == ["model.layers.3.linear.bias"]
        assert "model.embed.weight differs between processes, rank 1 from rank 0" in heard


def hear(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "nothing"


def load(folder: Path, file: Path) -> str:
    strategy = SplitStrategy(device="cpu", timeout_s=60)
    runner = make_runner(folder, strategy, 1)
    heard = hear(lambda: runner.load_checkpoint(str(file), strict=True))
    strategy.leave()
    return heard


def test_what_one_process_misses_is_an_error_on_all(workers: Workers, tmp_path: Path) -> None:
    weights = {k: v for k, v in Net().state_dict().items() if isinstance(v, Tensor)}
    del weights["layers.3.linear.bias"], weights["head.weight"]
    torch.save(weights, tmp_path / "missing.pth")
    torch.save({**weights, "layers.3.linear.bias": torch.zeros(5), "stray": torch.ones(1)}, tmp_path / "stray.pth")
    torch.save({**weights, "layers.3.linear.bias": torch.zeros(4)}, tmp_path / "other.pth")
    for name, reason in (
        ("missing", "missing layers.3.linear.bias"),
        ("stray", "unexpected stray"),
        ("other", "other shape layers.3.linear.bias (file (4,), model (5,))"),
    ):
        for heard in workers(2).run(load, tmp_path / name, tmp_path / f"{name}.pth"):
            assert heard == f"{tmp_path / name}.pth: does not fit the model: {reason}"


def load_in_parts(path: Path) -> list[str]:
    """Templates of other keys on each process, none on the first, and one that the checkpoint lacks on the last."""
    strategy = SplitStrategy(device="cpu", timeout_s=60)
    strategy.join()
    last, rank = dist.get_world_size() - 1, dist.get_rank()
    checkpoint = Checkpoint.open(path)
    target = {f"model.layers.{rank}.linear.bias": torch.zeros(5)} if rank else {}
    heard = [hear(lambda: checkpoint.load(target))]
    assert all(tensor.any() for tensor in target.values())
    heard.append(hear(lambda: checkpoint.load({"model.none": torch.zeros(1)} if rank == last else target)))

    def fail() -> None:
        with raising_together():
            if rank:
                raise CheckpointError(f"on {rank}")

    heard.append(hear(fail))
    strategy.leave()
    return heard


def test_loads_of_different_keys_end_alike(workers: Workers, tmp_path: Path, one_device: tuple[Path, Path]) -> None:
    path = one_device[0]
    for heard in workers(4).run(load_in_parts, path):
        assert heard == ["nothing", f"{path}: has no tensor model.none", "on 1"]
