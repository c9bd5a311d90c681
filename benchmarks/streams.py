"""Measure streams: the time to the first batch at a position among a billion samples, and what an iteration takes.

    python benchmarks/streams.py [--rounds 15] [--iterations 1000]

The billion samples are computed, and their lengths too; the index of a billion documents is a real file. In each trial the
dataset is built anew, its index is opened, and a batch is read at a random position, as after resuming.

Iterations are those of FlexibleRunner with a tiny model, in one process with one thread. A stream and a map-style dataset that
holds the same samples train in turn, in the same round; the ratio is that of their processor times in one round, on which other
programs have little effect. A second map-style run in each round shows the error of measurement.
Writes streams.{md,json} to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flextrain import FlexibleRunner
from flextrain.data import JsonlFiles, Mixture, PackedTokens, TokenFiles
from flextrain.runner import build_dataloader
from flextrain.runner.data.dataloaders import TrainData
from flextrain.runner.data.stream_orders import LocalOrder

RESULTS = Path(__file__).parent / "results"
BILLION = 10**9
BATCH_SIZE, LENGTH, TOKENS = 8, 128, 2_000_000
WARM_UP = 50


# The first batch at a position


class Billion:
    """A billion documents of 200 to 296 tokens, which are computed."""

    fingerprint = "a billion documents"

    def __len__(self) -> int:
        return BILLION

    def __getitem__(self, index: int) -> Any:
        return np.full(index % 97 + 200, index % 1000)

    def lengths(self) -> Lengths:
        return Lengths()


class Lengths:
    """The lengths of these documents."""

    def __len__(self) -> int:
        return BILLION

    def __getitem__(self, span: slice) -> Any:
        start, stop, _ = span.indices(BILLION)
        return np.arange(start, stop) % 97 + 200


class InBlocks(Billion):
    """The same, shuffled in blocks of 8192 neighbours, as Parquet files are."""

    def order_of_pass(self, seed: int, number: int, shuffle: bool) -> LocalOrder:
        ends = np.arange(8192, BILLION + 8192, 8192)
        ends[-1] = BILLION
        return LocalOrder(ends, seed, number)


def packed(index_dir: Path) -> PackedTokens:
    return PackedTokens(Billion(), 2048, shuffle_documents=True, index_dir=index_dir)


FIRST: dict[str, Callable[[Path], Any]] = {
    "samples, shuffled": lambda folder: Billion(),
    "samples, shuffled in blocks of 8192": lambda folder: InBlocks(),
    "packed into sequences of 2048, documents and sequences shuffled": packed,
    "mixture of all three by weights": lambda folder: Mixture([Billion(), InBlocks(), packed(folder)], [0.5, 0.3, 0.2]),
}


def first_batch_ms(build: Callable[[Path], Any], folder: Path, position: int, processes: int) -> float:
    begin = time.perf_counter()
    cfg = dict(dataset=build(folder), batch_size=BATCH_SIZE, sampler=dict(type="InfiniteSampler"), collate_fn=list)
    options = dict(training=True, seed=0, where="train_dataloader", logger=logging.getLogger("flextrain"))
    data = TrainData(build_dataloader(cfg, shard=(0, processes), **options), 1, seed=0, shard=(0, processes))
    window = data.resume_at(0, position)
    ((batch,),) = data.windows(0, window, window + 1)
    assert len(batch) == BATCH_SIZE
    return (time.perf_counter() - begin) * 1000


def measure_first(trials: int) -> dict[str, Any]:
    random = np.random.RandomState(0)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        packed(Path(folder))
        made = time.perf_counter() - begin
        rows = []
        for name, build in FIRST.items():
            for processes in (1, 64):
                times = [
                    first_batch_ms(build, Path(folder), int(random.randint(5 * BILLION)), processes)
                    for _ in range(trials)
                ]
                rows.append(
                    {"name": name, "processes": processes, "median_ms": float(np.median(times)), "max_ms": max(times)}
                )
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {"index_s": made, "index_mib": size / 2**20, "rows": rows}


# Iterations


class Vectors(Dataset[dict[str, Tensor]]):
    """Map-style data: vectors and labels in memory."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(size, 16, generator=generator), torch.randint(4, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Cut(Dataset[dict[str, Tensor]]):
    """Map-style data: a file of tokens cut into sequences, as one would write it by hand."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.tokens[index * LENGTH : (index + 1) * LENGTH].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


class Lines(Dataset[Any]):
    """Map-style data: lines of JSON, which were read at the start."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_bytes().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Any:
        return as_tensors(json.loads(self.lines[index].decode()))


def as_tensors(line: Any) -> dict[str, Tensor]:
    return {"x": torch.tensor(line["x"]), "y": torch.tensor(line["y"])}


class Timed(nn.Module):
    """A tiny model that notes the processor time of the first call after the warm-up, and of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.calls, self.began, self.ended = 0, 0.0, 0.0

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == WARM_UP:
            self.began = time.process_time()
        self.ended = time.process_time() if self.calls % 100 == WARM_UP % 100 else self.ended
        x = batch["x"] if "x" in batch else batch["input_ids"][:, :16].float() / 1000
        return {"loss": self.layer(x).square().mean()}


def pairs(folder: Path) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: what gives map-style data, and what gives the stream of the same samples."""
    tokens = np.random.RandomState(0).randint(1, 1000, TOKENS).astype(np.uint16)
    tokens[np.random.RandomState(1).randint(0, TOKENS, TOKENS // 250)] = 0
    (folder / "cut").mkdir()
    tokens.tofile(folder / "cut" / "a.bin")
    (folder / "lines.jsonl").write_text(
        "".join(json.dumps({"x": [number / 7 % 1] * 16, "y": number % 4}) + "\n" for number in range(20_000))
    )
    sizes, files = (30_000, 10_000), TokenFiles(folder / "cut", end_token=0)
    return {
        "mixture of two datasets in memory, weights 3 to 1": (
            lambda: torch.utils.data.ConcatDataset([Vectors(size, size) for size in sizes]),
            lambda: Mixture([Vectors(size, size) for size in sizes], [3, 1]),
        ),
        "lines of JSON": (
            lambda: Lines(folder / "lines.jsonl"),
            lambda: JsonlFiles(folder / "lines.jsonl", transform=as_tensors),
        ),
        "token file, packed": (lambda: Cut(folder / "cut" / "a.bin"), lambda: PackedTokens(files, LENGTH)),
        "token file, packed, documents shuffled": (
            lambda: Cut(folder / "cut" / "a.bin"),
            lambda: PackedTokens(files, LENGTH, shuffle_documents=True),
        ),
    }


def iteration_us(dataset: Any, iterations: int) -> float:
    """Mean processor time of an iteration, with its share of computing the order of the samples."""
    model = Timed()
    gc.collect()
    with tempfile.TemporaryDirectory() as work_dir:
        FlexibleRunner(
            model=model,
            work_dir=work_dir,
            train_dataloader=dict(
                dataset=dataset,
                batch_size=BATCH_SIZE,
                collate_fn="default_collate",
                sampler=dict(type="InfiniteSampler"),
            ),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)),
            train_cfg=dict(by_epoch=False, max_iters=WARM_UP + iterations),
            log_level="ERROR",
        ).train()
    return (model.ended - model.began) / iterations * 1e6


def measure_iterations(rounds: int, iterations: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (map_style, stream) in pairs(Path(folder)).items():
            kinds = [map_style, stream, map_style]
            times: list[list[float]] = []
            iteration_us(stream(), 100)
            for number in range(rounds):
                found = {at % 3: iteration_us(kinds[at % 3](), iterations) for at in range(number, number + 3)}
                times.append([found[0], found[1], found[2]])
            first, own, second = np.array(times).T
            ratios, noise = 2 * own / (first + second), second / first
            rows.append(
                {
                    "name": name,
                    "map_us": float(np.median([first, second])),
                    "stream_us": float(np.median(own)),
                    "ratio": np.quantile(ratios, [0.25, 0.5, 0.75]).tolist(),
                    "noise": np.quantile(noise, [0.25, 0.5, 0.75]).tolist(),
                }
            )
    return rows


def markdown(report: dict[str, Any]) -> str:
    first = report["first"]
    lines = ["| a billion | processes | first batch, ms (median) | (longest) |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {row['name']} | {row['processes']} | {row['median_ms']:.1f} | {row['max_ms']:.1f} |"
        for row in first["rows"]
    ]
    lines += [
        "",
        f"From building the dataset to its first batch of {BATCH_SIZE} at random positions in the first five passes, on the first of that many "
        f"processes; {report['trials']} trials each. The index of a billion documents has {first['index_mib']:.1f} MiB and was made once "
        f"in {first['index_s']:.0f} s.",
        "",
        "| data | map-style, us per iteration | stream | ratio (quartiles) | ratio of two map-style runs (quartiles) |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in report["iterations"]:
        ratios = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in (row["ratio"], row["noise"])]
        lines.append(f"| {row['name']} | {row['map_us']:.0f} | {row['stream_us']:.0f} | {ratios[0]} | {ratios[1]} |")
    lines += [
        "",
        f"Processor time, batches of {BATCH_SIZE}; medians over {report['rounds']} interleaved rounds of {report['per_round']} iterations. "
        f"Python {report['python']}, torch {report['torch']}, {report['machine']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=1000, help="per run, a multiple of a hundred")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trials": arguments.trials,
        "rounds": arguments.rounds,
        "per_round": arguments.iterations,
        "first": measure_first(arguments.trials),
        "iterations": measure_iterations(arguments.rounds, arguments.iterations),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "streams.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "streams.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
