"""Measure the overhead of training loops: time per iteration, reads from the device, and import time.

    python benchmarks/loop_overhead.py [--rounds 9] [--iterations 600] [--only flextrain ...]

All contestants (contestants.py) train the same tiny model on the same batches, in one process with one thread. They run one
after the other within a round, so that other load on the machine affects all of them. The dataset takes the time when the
first sample of each batch is fetched: set-up and the checkpoint at the end do not count, and no library is patched.
A contestant's time per iteration is the mean over a round, so that it includes log lines, also if several are written at a
time. What it adds to the loop by hand is the difference within a round; the median over the rounds leaves out interruptions.
Everything is measured three times: with an indexed dataset, with a stream, and with four batches per update.
Writes loop_overhead.{md,png,json} to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contestants import BASELINE, CONTESTANTS, LOG_INTERVAL, PACKAGES
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset

BATCH_SIZE = 4
# By name: whether the data is a stream, and the number of batches per update.
KINDS = {"map": (False, 1), "stream": (True, 1), "accumulate": (False, 4)}
WARM_UP = 100  # iterations left out of the mean: lazy imports, first log lines
RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
IMPORTS = {
    "import torch": "import torch",
    "import flextrain": "import flextrain",
    "from flextrain import FlexibleRunner": "from flextrain import FlexibleRunner",
    "from mmengine.runner import Runner": "from mmengine.runner import Runner",
    "import lightning.pytorch": "import lightning.pytorch",
    "import accelerate": "import accelerate",
}


class StampedDataset(Dataset[tuple[Tensor, Tensor]]):
    """Random samples; records the value of `clock` at the first sample of every batch."""

    def __init__(self, iterations: int, clock: Callable[[], float]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(iterations * BATCH_SIZE, 16, generator=generator)
        self.labels = torch.randint(4, (iterations * BATCH_SIZE,), generator=generator)
        self.clock = clock
        self.stamps: list[float] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index % BATCH_SIZE == 0:
            self.stamps.append(self.clock())
        return self.inputs[index], self.labels[index]


class StampedStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples, one after the other."""

    def __init__(self, dataset: StampedDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.dataset.__getitem__, range(len(self.dataset)))


class ScalarReads(TorchDispatchMode):
    """Counts how often a number is read from the device: `.item()`, `float()`, `bool()`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


class ListReads(TorchFunctionMode):
    """Also counts reads of whole tensors by `.tolist()` or `.numpy()`, once each, which are not operators."""

    def __init__(self, reads: ScalarReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            self.reads.count += 1
        return func(*args, **(kwargs or {}))


def train(name: str, iterations: int, clock: Callable[[], float], kind: str = "map") -> np.ndarray[Any, Any]:
    """The differences of `clock` between batches after the warm-up, in one run of a contestant."""
    is_stream, accumulate = KINDS[kind]
    dataset = StampedDataset(WARM_UP + iterations + 1, clock)
    loader: DataLoader[Any] = DataLoader(StampedStream(dataset) if is_stream else dataset, batch_size=BATCH_SIZE)
    gc.collect()
    with tempfile.TemporaryDirectory() as work_dir, quiet():
        CONTESTANTS[name](loader, Path(work_dir), accumulate)
    # The loader is read in order. A library that adds its own sampler still fetches every batch once.
    assert len(dataset.stamps) == WARM_UP + iterations + 1, f"{name} fetched {len(dataset.stamps)} batches"
    return np.diff(dataset.stamps[WARM_UP:])


def microseconds(rounds: list[np.ndarray[Any, Any]], accumulate: int = 1) -> np.ndarray[Any, Any]:
    """Mean time per update in each round."""
    return np.array([float(run.mean()) for run in rounds]) * 1e6 * accumulate


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard stdout and stderr at the level of the system, so that the speed of the terminal does not count."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def count_reads(name: str, iterations: int) -> float:
    with ScalarReads() as reads, ListReads(reads):
        return float(train(name, iterations, lambda: reads.count).mean())


def import_seconds(statement: str, repeats: int = 5) -> float | None:
    """Median time of `statement` in a fresh interpreter, without the start of the interpreter; None if it fails."""
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    times = []
    for _ in range(repeats + 1):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tempfile.gettempdir())
        if done.returncode:
            return None
        times.append(float(done.stdout.split()[-1]))
    return statistics.median(times[1:])  # the first run fills the file cache


def installed(names: list[str]) -> list[str]:
    """The contestants whose library can be imported; the others are reported on stderr."""
    found = []
    for name in names:
        try:
            train(name, LOG_INTERVAL, time.perf_counter)
            found.append(name)
        except ImportError as error:
            print(f"left out: {name} ({error})", file=sys.stderr)
    return found


def measure(names: list[str], rounds: int, iterations: int) -> dict[str, Any]:
    seconds: dict[str, dict[str, list[np.ndarray[Any, Any]]]] = {kind: {name: [] for name in names} for kind in KINDS}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for kind in KINDS:
                seconds[kind][name].append(train(name, iterations, time.perf_counter, kind))
        print(f"round {number + 1}/{rounds}", file=sys.stderr)

    def added(name: str, kind: str = "map") -> np.ndarray[Any, Any]:
        """The quartiles over the rounds."""
        own, base = (microseconds(seconds[kind][who], KINDS[kind][1]) for who in (name, BASELINE))
        return np.quantile(own - base, [0.25, 0.5, 0.75])

    rows = []
    for name in names:
        low, middle, high = map(float, added(name))
        rows.append(
            {
                "name": name,
                "version": metadata.version(PACKAGES[name]) if name in PACKAGES else "",
                "iteration_us": float(np.median(microseconds(seconds["map"][name]))),
                "added_us": middle,
                "added_us_quartiles": [low, high],
                "added_us_stream": float(added(name, "stream")[1]),
                "added_us_accumulate": float(added(name, "accumulate")[1]),
                "reads_per_iteration": count_reads(name, 20 * LOG_INTERVAL),
            }
        )
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": rounds,
        "iterations": iterations,
        "loops": rows,
    }


def markdown(report: dict[str, Any]) -> str:
    by_name = {row["name"]: row for row in report["loops"]}
    reference = by_name.get("MMEngine FlexibleRunner")
    lines = [
        "| loop | version | us per iteration | added to the hand-written loop (quartiles) | of MMEngine's | added with a stream | "
        f"added per update of {KINDS['accumulate'][1]} batches | reads off the device per iteration |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["loops"]:
        low, high = row["added_us_quartiles"]
        added = f"{row['added_us']:.0f} us ({low:.0f} to {high:.0f})"
        share = f"{row['added_us'] / reference['added_us']:.1%}" if reference else ""
        stream, accumulated = (f"{row[f'added_us_{kind}']:.0f} us" for kind in ("stream", "accumulate"))
        if row["name"] == BASELINE:
            added = share = stream = accumulated = ""
        cells = [row["name"], row["version"], f"{row['iteration_us']:.0f}", added, share, stream, accumulated]
        lines.append("| " + " | ".join([*cells, f"{row['reads_per_iteration']:.2f}"]) + " |")
    lines += [
        "",
        f"Medians over {report['rounds']} interleaved rounds of {report['iterations']} iterations, loss logged every "
        f"{LOG_INTERVAL} iterations, the libraries' defaults otherwise (the hand-written loop logs nothing). "
        f"Python {report['python']}, torch {report['torch']}, {report['machine']}.",
    ]
    imports = {statement: seconds for statement, seconds in report["imports"].items() if seconds is not None}
    if imports:
        lines += ["", "| import, fresh interpreter, median of 5 | seconds | of torch's |", "| --- | ---: | ---: |"]
    for statement, seconds in imports.items():
        lines.append(f"| `{statement}` | {seconds:.3f} | {seconds / imports['import torch']:.2f} |")
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted((row for row in report["loops"] if row["name"] != BASELINE), key=lambda row: -row["added_us"])
    names = [row["name"] for row in rows]
    added = [row["added_us"] for row in rows]
    spread = [[abs(row["added_us"] - row["added_us_quartiles"][side]) for row in rows] for side in (0, 1)]
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(rows) + 1.4))
    colors = ["#d1495b" if name == "flextrain" else "#8d99ae" for name in names]
    bars = axes.barh(names, added, xerr=spread, color=colors, error_kw={"ecolor": "#2b2d42", "capsize": 3})
    axes.bar_label(bars, labels=[f"{value:.0f}" for value in added], padding=14)
    axes.set_xlim(0, max(row["added_us_quartiles"][1] for row in rows) * 1.15)
    axes.set_xlabel("microseconds per iteration over a hand-written loop (bars: medians, lines: quartiles)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def update_page(table: str) -> None:
    text = PAGE.read_text()
    start, end = (text.index(f"<!-- loop_overhead {place} -->") for place in ("begins", "ends"))
    PAGE.write_text(f"{text[:start]}<!-- loop_overhead begins -->\n\n{table}\n{text[end:]}")


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    Console(markup=False, emoji=False).print(Markdown(markdown(report)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--iterations", type=int, default=600, help="batches per contestant and round, a multiple of forty"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(CONTESTANTS), help="contestants in addition to the hand-written loop"
    )
    parser.add_argument("--skip-imports", action="store_true", help="do not measure import times")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/benchmarks.md")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    chosen = [name for name in CONTESTANTS if not arguments.only or name in (BASELINE, *arguments.only)]
    imports = {} if arguments.skip_imports else {text: import_seconds(code) for text, code in IMPORTS.items()}
    report = measure(installed(chosen), arguments.rounds, arguments.iterations)
    report["imports"] = imports
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "loop_overhead.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "loop_overhead.md").write_text(markdown(report))
    plot(report, arguments.out / "loop_overhead.png")
    if arguments.docs:
        update_page(markdown(report))
    show(report)


if __name__ == "__main__":
    main()
