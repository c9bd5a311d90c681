"""Measure the overhead of flextrain's strategies: step time and peak memory against a hand-written loop for the same engine.

    python benchmarks/strategies.py [--rounds 5] [--iterations 20] [--only ddp fsdp zero3] [--processes 2]

Every strategy is compared with a hand-written loop for the engine that it uses (DistributedDataParallel, fully_shard,
deepspeed.initialize; for meshes parallelize_module, that with fully_shard, and PipelineStage with a schedule), with the same
transformer, the same data and AdamW. Within a round the two run one after the other, and the order alternates, so that other load
on the machine affects both. The dataset of rank 0 takes the time when the first sample of each batch is fetched. A strategy's step
time is the median of all its iterations. A mesh of two axes has twice the processes.

The loops by hand do what an update needs and nothing else: no clipping, gradients set to None, micro-batches of equal size and
number, a schedule that keeps no outputs. flextrain does more: it agrees with all processes before every update that all have a
batch, sends a pipeline's loss to all of them, keeps losses for the log, reads these every ten updates, and compares the first batch
under tensor parallelism with local tensors with the same on DTensors.

Memory is the largest resident set of any process, less what of it is pages of files, in processes that do nothing else; both have
imported the same modules before they start. Pages of files are the code of libraries, which processes share: whoever calls more
of pydantic or torch has up to 8 MiB more of them, whatever the model. The .json has the whole resident set too.
Writes strategies.{md,png,json} to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from flextrain import FlexibleRunner
from flextrain.core.torch_compat.dtensor_private import forget_meshes
from flextrain.strategies.deepspeed.engine_internals import forget_process_groups
from flextrain.testing import WorkerGroup

RESULTS = Path(__file__).parent / "results"
PEAKS = 3  # number of memory measurements, each in new processes; the median counts
WARM_UP = 3  # updates left out: the first creates the optimizer's state
WIDTH, LAYERS, LENGTH, BATCH, WORDS = 256, 6, 64, 4, 512
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
SEED = 0
ACCUMULATE = 4  # micro-batches in an update of a pipeline


class Block(nn.Module):
    """Attention with a perceptron; it reads the number of heads off the width of its projections, as raw tensor parallelism asks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        heads = (f(h).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A transformer of 4.9 M parameters with the loss of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        x = self.embed(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), words[:, 1:].flatten())}


class Words(Dataset[Tensor]):
    """Random words; records the time at the first sample of every batch."""

    def __init__(self, iterations: int) -> None:
        self.words = torch.randint(WORDS, (iterations * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        self.stamps: list[float] = []

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Tensor:
        if len(self.stamps) * BATCH == index - index % BATCH and index % BATCH == 0:
            self.stamps.append(time.perf_counter())
        return self.words[index]


class Contestant(NamedTuple):
    """A strategy, and the loop by hand for its engine; ``stage`` is ZeRO's, ``times`` multiplies the number of processes."""

    by_hand: Callable[[DataLoader[Any], int], None]
    strategy: dict[str, Any]
    stage: int = 0
    accumulate: int = 1
    times: int = 1


# Hand-written loops. Every process reads the same batches, which takes as long as reading different ones.


def by_hand_ddp(loader: DataLoader[Any], stage: int) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Transformer())
    _plain_loop(model, torch.optim.AdamW(model.parameters(), **ADAMW), loader)


def by_hand_fsdp(loader: DataLoader[Any], stage: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _plain_loop(model, torch.optim.AdamW(model.parameters(), **ADAMW), loader)


def by_hand_tp(loader: DataLoader[Any], stage: int) -> None:
    dist.init_process_group("gloo")
    model = Transformer()
    _divide(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    _plain_loop(model, torch.optim.AdamW(model.parameters(), **ADAMW), loader)


def by_hand_dp_tp(loader: DataLoader[Any], stage: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = Transformer()
    _divide(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    _plain_loop(model, torch.optim.AdamW(model.parameters(), **ADAMW), loader)


def _divide(model: Transformer, mesh: DeviceMesh) -> None:
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    parallelize_module(model, mesh, {**plan, "blocks.*.out": RowwiseParallel(), "blocks.*.down": RowwiseParallel()})


class Stage(nn.Module):
    """Half of a Transformer, with the embedding or with the head."""

    def __init__(self, model: Transformer, is_first: bool) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.embed = model.embed if is_first else nn.Identity()
        self.blocks = model.blocks[:half] if is_first else model.blocks[half:]
        self.head = nn.Identity() if is_first else model.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def by_hand_pp(loader: DataLoader[Any], stage: int) -> None:
    """1F1B over two stages, with ACCUMULATE micro-batches in an update."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    part = Stage(Transformer(), rank == 0)
    optimizer = torch.optim.AdamW(part.parameters(), **ADAMW)
    piped = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(piped, ACCUMULATE, loss_fn=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()))
    batches = iter(loader)
    while window := list(itertools.islice(batches, ACCUMULATE)):
        inputs = [(words[:, :-1],) for words in window] if rank == 0 else None
        targets = [words[:, 1:] for words in window] if rank else None
        schedule.step(arg_mbs=inputs, target_mbs=targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    _end()


def _plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    for words in loader:
        model(words)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    _end()


def _end() -> None:
    dist.destroy_process_group()
    forget_meshes()  # DTensor would use the groups of this run in the next one


def by_hand_deepspeed(loader: DataLoader[Any], stage: int) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model = Transformer()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )
    for words in loader:
        engine.backward(engine(words)["loss"])
        engine.step()
    engine.destroy()
    dist.destroy_process_group()
    forget_process_groups()  # DeepSpeed would use the groups of this run in the next run


def through_flextrain(loader: DataLoader[Any], contestant: Contestant) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runner = FlexibleRunner(
            model=Transformer(),
            work_dir=folder,
            strategy={**contestant.strategy, "device": "cpu"},
            train_dataloader=DataLoader(loader.dataset, batch_size=BATCH, sampler=Same(loader.dataset)),
            optim_wrapper=dict(optimizer=dict(type="AdamW", **ADAMW), accumulative_counts=contestant.accumulate),
            train_cfg=dict(max_epochs=1),
            default_hooks=dict(checkpoint=None),
            randomness=dict(seed=SEED),
        )
        runner.train()
        runner.strategy.leave()


class Same(torch.utils.data.Sampler[int]):
    """All samples in order in every process, as in the hand-written loops."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset)))

    def __len__(self) -> int:
        return len(self.dataset)


PLAN = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")}
PLAN |= {"blocks.*.out": "rowwise", "blocks.*.down": "rowwise"}
MESH = dict(type="MeshStrategy", dp_shard=1)
CONTESTANTS = {
    "ddp": Contestant(by_hand_ddp, dict(type="DDPStrategy")),
    "fsdp": Contestant(by_hand_fsdp, dict(type="FSDPStrategy", wrap="blocks")),
    **{
        f"zero{stage}": Contestant(
            by_hand_deepspeed, dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)), stage
        )
        for stage in (1, 2, 3)
    },
    "mesh tp": Contestant(by_hand_tp, dict(MESH, tp=-1, plan=PLAN, tp_kind="local")),
    "mesh dp x tp": Contestant(
        by_hand_dp_tp, dict(MESH, dp_shard=2, tp=-1, plan=PLAN, tp_kind="local", wrap="blocks"), times=2
    ),
    "mesh pp": Contestant(by_hand_pp, dict(MESH, pp=-1), accumulate=ACCUMULATE),
}


def one_run(name: str, ours: bool, iterations: int) -> list[float]:
    """In a worker: seconds of each update after the warm-up."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    contestant = CONTESTANTS[name]
    dataset = Words((WARM_UP + iterations + 1) * contestant.accumulate)
    loader = DataLoader(dataset, batch_size=BATCH)
    with open(os.devnull, "w") as nowhere:
        saved, sys.stdout = sys.stdout, nowhere
        try:
            if ours:
                through_flextrain(loader, contestant)
            else:
                contestant.by_hand(loader, contestant.stage)
        finally:
            sys.stdout = saved
    return list(np.diff(dataset.stamps[:: contestant.accumulate][WARM_UP:]))


def peak(name: str, ours: bool, iterations: int) -> tuple[float, float]:
    """In a worker that does nothing else: the largest resident set in MiB, less pages of files, and with them."""
    one_run(name, ours, iterations)
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    # Of the end: an update touches all that it needs of a library in the first ones, and it stays.
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return whole - int(lines["RssFile"].split()[0]) / 1024, whole


# Freed memory is returned at once, so that the peak is the memory in use. Read when a process starts, not when it is forked.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def peaks(name: str, processes: int) -> dict[str, list[float]]:
    """The figures of ``peak`` of the process with the largest, "flextrain" and "by hand"; with exact memory, if started so."""
    found: dict[str, list[tuple[float, float]]] = {"by hand": [], "flextrain": []}
    for _ in range(PEAKS):
        for who, figures in found.items():
            with WorkerGroup(processes, timeout_s=600) as group:
                own, whole = zip(*group.run(peak, name, who == "flextrain", 5), strict=True)
                figures.append((max(own), max(whole)))
    return {who: [float(value) for value in np.median(figures, axis=0)] for who, figures in found.items()}


def exact_peaks(name: str, processes: int) -> dict[str, list[float]]:
    """``peaks`` in a process of its own, because the one that workers are forked from must have these settings too."""
    command = [sys.executable, __file__, "--peaks-of", name, "--processes", str(processes)]
    done = subprocess.run(command, env=os.environ | EXACT_MEMORY, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(names: list[str], rounds: int, iterations: int, processes: int) -> dict[str, Any]:
    rows = []
    for name in names:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        count = processes * CONTESTANTS[name].times
        with WorkerGroup(count, timeout_s=600) as group:
            for number in range(rounds):
                for ours in (True, False) if number % 2 else (False, True):
                    seconds[ours] += group.run(one_run, name, ours, iterations)[0]
        memory = exact_peaks(name, count)
        row = {
            "name": name,
            "processes": count,
            "by_hand_ms": 1e3 * float(np.median(seconds[False])),
            "flextrain_ms": 1e3 * float(np.median(seconds[True])),
            "by_hand_mib": memory["by hand"][0],
            "flextrain_mib": memory["flextrain"][0],
            "by_hand_mib_with_files": memory["by hand"][1],
            "flextrain_mib_with_files": memory["flextrain"][1],
        }
        row["time"] = row["flextrain_ms"] / row["by_hand_ms"]
        row["memory"] = row["flextrain_mib"] / row["by_hand_mib"]
        rows.append(row)
        print(f"{name}: time {row['time']:.3f}, memory {row['memory']:.3f} of the loop by hand", file=sys.stderr)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per process",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in Transformer().parameters()),
        "rounds": rounds,
        "iterations": iterations,
        "strategies": rows,
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "| strategy | processes | by hand, ms per step | flextrain | ratio | by hand, peak MiB | flextrain | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["strategies"]:
        times = f"{row['by_hand_ms']:.1f} | {row['flextrain_ms']:.1f} | {row['time']:.3f}"
        sizes = f"{row['by_hand_mib']:.0f} | {row['flextrain_mib']:.0f} | {row['memory']:.3f}"
        lines.append(f"| {row['name']} | {row['processes']} | {times} | {sizes} |")
    lines += [
        "",
        f"A transformer of {report['parameters'] / 1e6:.1f} M parameters, AdamW, float32; medians over {report['rounds']} "
        f"interleaved rounds of {report['iterations']} steps. Memory without pages of files. Python {report['python']}, torch {report['torch']}, "
        f"{report['machine']}.",
    ]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> Any:
    """Draw time and memory of every strategy, save the picture, and return Matplotlib's figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["strategies"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.8))
    for axes, key, title in ((panels[0], "ms", "ms per step"), (panels[1], "mib", "peak MiB per process")):
        places = np.arange(len(rows))
        axes.bar(places - 0.2, [row[f"by_hand_{key}"] for row in rows], 0.38, color="#8d99ae", label="by hand")
        axes.bar(places + 0.2, [row[f"flextrain_{key}"] for row in rows], 0.38, color="#d1495b", label="flextrain")
        axes.set_xticks(places, [row["name"] for row in rows], rotation=30, ha="right")
        axes.set_ylabel(title)
        axes.spines[["top", "right"]].set_visible(False)
    # Above both panels: inside there is no place that no bar reaches, whatever the figures are.
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=150)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20, help="steps per round")
    parser.add_argument(
        "--processes", type=int, default=2, help="of a strategy with one axis; one with two has twice as many"
    )
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only draw the picture again, from the recorded figures")
    parser.add_argument("--peaks-of", choices=list(CONTESTANTS), help="only print the peak memory of one, as JSON")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.peaks_of:
        print(json.dumps(peaks(arguments.peaks_of, arguments.processes)))
        return
    if arguments.draw:
        plot(json.loads((arguments.out / "strategies.json").read_text()), arguments.out / "strategies.png")
        return
    report = measure(arguments.only, arguments.rounds, arguments.iterations, arguments.processes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "strategies.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "strategies.md").write_text(markdown(report))
    plot(report, arguments.out / "strategies.png")
    print(markdown(report))


if __name__ == "__main__":
    main()
