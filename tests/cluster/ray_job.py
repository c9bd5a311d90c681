"""A training on Ray, as a program of its own: python ray_job.py FOLDER SCENARIO; its last line is what came of it, as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flextrain import BaseMetric, FlexibleRunner, Hook
from flextrain.strategies.parts import meet

MAX_ITERS, INTERVAL, FAILS_AT = 30, 10, 17


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(x)
        return {"loss": F.cross_entropy(outputs, y), "right": (outputs.argmax(1) == y).float()}


class Accuracy(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_samples["right"].tolist()

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results)}


class FailOnce(Hook):
    """Ends one worker, as a machine does that is lost, at the first start; ``notes`` holds where each start began."""

    priority = "VERY_HIGH"

    def __init__(self, notes: str, removed: str = "", awaited: str = "", fails: bool = True) -> None:
        self.notes, self.removed, self.awaited = Path(notes), removed, awaited
        self.is_first = fails and not self.notes.exists()

    def before_train(self, runner: Any) -> None:
        meet(runner.strategy, "FailOnce.before_train()")  # all have looked for the notes
        if runner.rank == 0:
            with self.notes.open("a") as file:
                file.write(json.dumps([runner.iter, runner.world_size]) + "\n")

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.is_first and runner.iter == FAILS_AT and runner.rank == runner.world_size - 1:
            while self.awaited and not Path(self.awaited).exists():
                time.sleep(0.05)
            if self.removed:
                Path(self.removed).rename(f"{self.removed}.lost")
            os._exit(1)


class Slow(Hook):
    """Makes iterations last long enough for something to happen meanwhile; ``reached`` has how many are done."""

    def __init__(self, step_s: float, reached: str) -> None:
        self.step_s, self.reached = step_s, Path(reached)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        time.sleep(self.step_s)
        if runner.rank == 0:
            self.reached.write_text(str(runner.iter + 1))


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """What a runner is given, under Ray and elsewhere."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 16, generator=generator)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = dict(dataset=data, batch_size=4, collate_fn=dict(type="default_collate"))
    return dict(
        model=Net,
        strategy=config.get("strategy"),
        train_dataloader=dict(loader, sampler=dict(type="DefaultSampler", shuffle=True)),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-2)),
        train_cfg=dict(by_epoch=False, max_iters=MAX_ITERS, val_interval=INTERVAL),
        val_dataloader=dict(loader, batch_size=50, sampler=dict(type="DefaultSampler", shuffle=False)),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(
            logger=dict(interval=1),
            checkpoint=dict(by_epoch=False, interval=INTERVAL, async_save=True, max_keep_ckpts=1),
        ),
        randomness=dict(seed=0),
    )


def build(config: dict[str, Any]) -> Any:
    from flextrain.ray import RayReportHook

    given = arguments(config)
    given["custom_hooks"] = [RayReportHook(interval=INTERVAL // 2)]
    if config.get("notes"):
        given["custom_hooks"].append(FailOnce(config["notes"], config.get("removed", ""), config.get("awaited", "")))
    if config.get("step_s"):
        given["custom_hooks"] = [RayReportHook(interval=1, interval_s=0.5), Slow(config["step_s"], config["reached"])]
        given["custom_hooks"].append(FailOnce(config["notes"], fails=False))
    if config.get("work_dir"):
        given["work_dir"] = config["work_dir"]
    return FlexibleRunner(**given) if config.get("as_runner") else given


def trainer_of(folder: Path, scenario: str) -> Any:
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from flextrain.ray import train_loop

    storage = folder / "storage"
    storage.mkdir()
    config: dict[str, Any] = dict(notes=str(folder / "notes"))
    stored: dict[str, Any] = dict(storage_path=str(storage))
    backend = "gloo"
    workers: int | tuple[int, int] = 2
    if scenario == "machine":
        config |= dict(step_s=0.3, reached=str(folder / "reached"))
        workers = (1, 2)
    if scenario == "remote":
        # A storage that is no folder, and a work directory that is lost together with a machine. Ray makes a group without a
        # back end for CPU tensors, as it does with "nccl" for GPUs.
        stored = dict(storage_path="", storage_filesystem=SubTreeFileSystem(str(storage), LocalFileSystem()))
        config |= dict(work_dir=str(folder / "work"), removed=str(folder / "work"), as_runner=True)
        config |= dict(awaited=str(storage / "run" / "checkpoint_manager_snapshot.json"))
        backend = "cuda:gloo"
    return TorchTrainer(
        train_loop(build),
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        torch_config=TorchConfig(backend=backend, timeout_s=60),
        run_config=RunConfig(
            name="run",
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            **stored,
        ),
    )


def take_away(cluster: Any, node: Any, folder: Path) -> None:
    """Announce that a machine will go, as a cloud does, and let it go when a checkpoint was saved for that."""
    import ray
    from ray.core.generated import autoscaler_pb2

    reached, runs = folder / "reached", folder / "storage" / "run"
    while not reached.exists() or int(reached.read_text() or 0) < INTERVAL + 2:
        time.sleep(0.05)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 300) * 1000)
    ray._raylet.GcsClient(address=cluster.address).drain_node(node.node_id, reason, "test", deadline_ms)
    while all(path.name.endswith("0") for path in runs.glob("iter_*")):
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)


def main(folder: Path, scenario: str) -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    os.environ["RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as session:  # names of sockets must be short
        machine = dict(num_cpus=1, object_store_memory=100 * 2**20)
        cluster = Cluster(initialize_head=True, head_node_args=dict(machine, include_dashboard=False, temp_dir=session))
        try:
            second = cluster.add_node(**machine)
            ray.init(address=cluster.address)
            trainer = trainer_of(folder, scenario)
            if scenario == "machine":
                threading.Thread(target=take_away, args=(cluster, second, folder), daemon=True).start()
            result = trainer.fit()
            return dict(
                starts=[json.loads(line) for line in (folder / "notes").read_text().splitlines()],
                metrics=result.metrics,
                checkpoint=result.checkpoint.path,
                kept=[[checkpoint.path, metrics] for checkpoint, metrics in result.best_checkpoints],
                path=result.path,
            )
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
