"""Measure what the watchdog and preemption add to an iteration: the same training with both, and with neither.

    python benchmarks/oversight.py [--rounds 20] [--iterations 400] [--only single ddp fsdp]

A tiny model, so that the loop takes most of the time, with all default hooks and a log line every ten iterations. Within a
round the two run one after the other in the same processes, and the order alternates, so that other load on the machine
affects both. Each round gives one ratio of medians; the figures are the median of these ratios and their quartiles, and for
the noise the same ratio between two runs of a round that both have neither.
Writes oversight.{md,json} to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contestants import LOG_INTERVAL, layers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from flextrain import FlexibleRunner
from flextrain.testing import WorkerGroup

RESULTS = Path(__file__).parent / "results"
WARM_UP = 10 * LOG_INTERVAL  # iterations left out: lazy imports, and the first answers of the other process
BATCH = 4
STRATEGIES = {"single": ("SingleDeviceStrategy", 1), "ddp": ("DDPStrategy", 2), "fsdp": ("FSDPStrategy", 2)}
ON, OFF, OFF_AGAIN = "with both", "with neither", "with neither, again"


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The same sample again and again; records the time at the first one of every batch."""

    def __init__(self, length: int) -> None:
        self.length, self.fetched = length, 0
        self.sample = torch.randn(16), torch.tensor(1)
        self.stamps: list[float] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.fetched % BATCH == 0:
            self.stamps.append(time.perf_counter())
        self.fetched += 1
        return self.sample


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layers(inputs), labels)}


def one_run(strategy: str, watched: bool, iterations: int) -> list[float]:
    """In a worker: seconds of each iteration after the warm-up."""
    torch.set_num_threads(1)
    name, processes = STRATEGIES[strategy]
    data = Samples((WARM_UP + iterations + 1) * BATCH * processes)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        saved, sys.stdout = sys.stdout, nowhere
        try:
            runner = FlexibleRunner(
                model=Net(),
                work_dir=folder,
                strategy=dict(type=name, device="cpu"),
                train_dataloader=dict(batch_size=BATCH, dataset=data, collate_fn="default_collate"),
                optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e-3)),
                train_cfg=dict(max_epochs=1),
                default_hooks=dict(logger=dict(interval=LOG_INTERVAL), checkpoint=None),
                env_cfg=dict(watchdog=watched, preemption=watched),
                randomness=dict(seed=0),
            )
            runner.train()
            runner.strategy.leave()
        finally:
            sys.stdout = saved
    assert len(data.stamps) == WARM_UP + iterations + 1
    return list(np.diff(data.stamps[WARM_UP:]))


def microseconds(seconds: list[float]) -> float:
    """The median at each position in the log interval, averaged over the positions."""
    return float(np.median(np.reshape(seconds, (-1, LOG_INTERVAL)), axis=0).mean() * 1e6)


def measure(strategy: str, rounds: int, iterations: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {kind: [] for kind in (ON, OFF, OFF_AGAIN)}
    kinds = list(times)
    with WorkerGroup(STRATEGIES[strategy][1], timeout_s=600) as group:
        group.run(one_run, strategy, True, LOG_INTERVAL)
        for number in range(rounds):
            for kind in kinds[number % 3 :] + kinds[: number % 3]:
                times[kind].append(microseconds(group.run(one_run, strategy, kind == ON, iterations)[0]))
    on, off, again = (np.array(times[kind]) for kind in kinds)
    low, ratio, high = np.quantile(2 * on / (off + again), [0.25, 0.5, 0.75])
    noise_low, noise, noise_high = np.quantile(again / off, [0.25, 0.5, 0.75])
    return {
        "name": strategy,
        "processes": STRATEGIES[strategy][1],
        "with_us": float(np.median(on)),
        "without_us": float(np.median([off, again])),
        "ratio": [float(low), float(ratio), float(high)],
        "noise": [float(noise_low), float(noise), float(noise_high)],
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "| strategy | processes | watchdog and preemption, us per iteration | neither | ratio (quartiles) "
        "| ratio of two runs with neither (quartiles) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["strategies"]:
        ratios = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in (row["ratio"], row["noise"])]
        times = f"{row['with_us']:.0f} | {row['without_us']:.0f}"
        lines.append(f"| {row['name']} | {row['processes']} | {times} | {ratios[0]} | {ratios[1]} |")
    lines += [
        "",
        f"Medians over {report['rounds']} interleaved rounds of {report['iterations']} iterations; a single process has no "
        f"watchdog. Python {report['python']}, torch {report['torch']}, {report['machine']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=400, help="per run, a multiple of ten")
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, processes of one thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": arguments.rounds,
        "iterations": arguments.iterations,
        "strategies": [measure(name, arguments.rounds, arguments.iterations) for name in arguments.only],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "oversight.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "oversight.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
