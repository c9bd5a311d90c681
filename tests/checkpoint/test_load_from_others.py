"""load_from under every strategy, from what plain torch, torchtitan, Lightning and Accelerate write on two processes."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion

from flextrain import FlexibleRunner
from flextrain.testing.sessions import whole_model
from tests.mesh.models import MODELS

from ..conftest import NO_CPU_SHARDS, WorkerFactory
from .test_sources import same

pytestmark = pytest.mark.distributed
State = dict[str, Tensor]


def trained(model: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model under FSDP2 of plain torch after one update, in processes that have a group."""
    torch.manual_seed(7)
    net: Any = MODELS[model]()
    mesh = init_device_mesh("cpu", (2,))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    ids = torch.randint(0, 8, (2, 6))
    net(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return net, optimizer


@dataclasses.dataclass
class Step:
    """A counter as trainers have it: saved as bytes, which are a pickle."""

    step: int = 3

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "note": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def write(folder: Path, model: str, lightning: bool) -> None:
    """In each of two processes."""
    net, optimizer = trained(model)
    weights, moments = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "plain")
    dcp.save({**weights, "optimizer": moments, "train_state": Step()}, checkpoint_id=folder / "titan")
    dcp.save({"model": weights}, checkpoint_id=folder / "accelerate" / "pytorch_model_fsdp_0")
    if lightning:
        from lightning.fabric.strategies.model_parallel import _save_checkpoint

        state = {"net": net, "optimizer": optimizer, "step": 3}
        rank = torch.distributed.get_rank()
        _save_checkpoint(path=folder / "fabric", state=state, full_state_dict=False, rank=rank)
        from lightning.fabric.strategies.fsdp import _distributed_checkpoint_save

        # As strategies/fsdp.py of its Trainer does, whose FSDP needs a GPU; the weights have the module's name there.
        module = {f"model.{name}": value for name, value in weights.items()}
        _distributed_checkpoint_save({"model": module, "optimizer_0": moments}, folder / "trainer")
        if rank == 0:
            torch.save({"epoch": 0, "hyper_parameters": {"lr": 0.1}}, folder / "trainer" / "meta.pt")
    whole = {name: value.full_tensor().clone() for name, value in weights.items()}
    if torch.distributed.get_rank() == 0:
        torch.save(whole, folder / "whole.pth")
    torch.distributed.barrier()


def skip_without_shards() -> None:
    if TorchVersion(torch.__version__) < "2.7":
        pytest.skip(f"torch {torch.__version__} {NO_CPU_SHARDS}")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, workers: WorkerFactory) -> Path:
    skip_without_shards()
    folder = tmp_path_factory.mktemp("others")
    workers(2).run(write, folder, "llama", False)
    return folder


@pytest.fixture(scope="module")
def sources_of_lightning(tmp_path_factory: pytest.TempPathFactory, workers: WorkerFactory) -> Path:
    pytest.importorskip("lightning")
    skip_without_shards()
    folder = tmp_path_factory.mktemp("lightning")
    workers(2).run(write, folder, "llama", True)
    return folder


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, dict(type="SingleDeviceStrategy")),
    "ddp": (2, dict(type="DDPStrategy")),
    "fsdp": (2, dict(type="FSDPStrategy", wrap=["LlamaDecoderLayer"])),
    "fsdp3": (3, dict(type="FSDPStrategy", wrap=["LlamaDecoderLayer"])),
    "zero1": (2, dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1))),
    "zero3": (2, dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3))),
    "tp2": (2, dict(type="MeshStrategy", tp=2)),
    "pp2": (2, dict(type="MeshStrategy", pp=2)),
}
QUICK = ("fsdp", "zero3")
SAYS = {
    "plain": '"model." is removed from the names of its weights; not loaded: optimizer (',
    "titan": "not loaded: optimizer (",
    "accelerate": '(Accelerate): "model." is removed from the names of its weights',
    "fabric": '(Lightning): "net." is removed from the names of its weights; not loaded: optimizer (',
    "trainer": '(Lightning): "model.model." is removed from the names of its weights; not loaded: optimizer_0 (',
}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def runner_of(folder: Path, strategy: dict[str, Any], model: str) -> FlexibleRunner:
    ids = torch.randint(0, 8, (8, 6))
    return FlexibleRunner(
        model=MODELS[model],
        work_dir=folder,
        strategy=strategy,
        train_dataloader=dict(dataset=[dict(input_ids=row, labels=row) for row in ids], batch_size=2),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1)),
        train_cfg=dict(max_epochs=1),
        log_level="INFO",
    )


def loaded(folder: Path, strategy: dict[str, Any], model: str, paths: dict[str, Path]) -> dict[str, tuple[State, str]]:
    """In a worker: the weights after loading each source, and what was said."""
    runner = runner_of(folder, strategy, model)
    found = {}
    for name, path in paths.items():
        with torch.no_grad():
            runner._parts.set_up()
            for value in runner.strategy.model_state().values():
                value.zero_()
        lines = Lines()
        runner.logger.addHandler(lines)
        runner.load_checkpoint(path, strict=True)
        runner.logger.removeHandler(lines)
        state = {key.removeprefix("model."): value for key, value in whole_model(runner.strategy).items()}
        found[name] = state, "\n".join(line for line in lines.lines if str(path) in line)
    runner.strategy.leave()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            name,
            marks=[pytest.mark.full] * (name not in QUICK) + [pytest.mark.deepspeed] * name.startswith("zero"),
        )
        for name in LAYOUTS
    ],
)
def test_every_source_under_every_strategy(sources: Path, workers: WorkerFactory, tmp_path: Path, layout: str) -> None:
    check_all(sources, workers, tmp_path, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "fsdp", "zero3", "tp2", "pp2"])
def test_every_source_of_lightning(
    sources_of_lightning: Path, workers: WorkerFactory, tmp_path: Path, layout: str
) -> None:
    check_all(sources_of_lightning, workers, tmp_path, layout)


def check_all(sources: Path, workers: WorkerFactory, folder: Path, layout: str) -> None:
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    expected = torch.load(sources / "whole.pth")
    paths = {name: sources / name for name in SAYS if (sources / name).exists()}
    processes, strategy = LAYOUTS[layout]
    for found in workers(processes).run(loaded, folder, strategy, "llama", paths):
        assert found.keys() == paths.keys()
        for state, _ in found.values():
            own = {name: value for name, value in expected.items() if name in state}
            same(state, own)
            assert layout == "pp2" or own.keys() == expected.keys()
    for name, (_, says) in found.items():
        if says:  # the other processes are silent
            assert SAYS[name] in says
