"""Measure saving and loading of a model with its optimizer: flextrain against other libraries and engines.

    python benchmarks/checkpoint.py [--rounds 3] [--megabytes 500] [--only single fsdp zero3] [--folder DIR]

All save the same model and AdamW in the same processes, one after the other in alternating order. The time of a save ends
when the files are on disk: if a library does not flush them, they are flushed after the save, and that time counts. Files are
read right after they were written, from the system's file cache, by all contestants. Memory is the growth of the largest
resident set of any process during the call. The stall is the duration of the call of an asynchronous save. Times are those of
the slowest process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from flextrain import OptimWrapper
from flextrain.core.checkpoint import Staging, save_in_background
from flextrain.core.comm.collectives import barrier
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train
from flextrain.testing.sessions import Session, load, save, started

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
WIDTH, WORDS = 768, 8192
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, dict(type="SingleDeviceStrategy", device="cpu")),
    "fsdp": (2, dict(type="FSDPStrategy", wrap=["Block"], device="cpu")),
    "zero3": (2, dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3), device="cpu")),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """An embedding of 25 MB, which is the largest tensor, and ``blocks`` blocks of 19 MB."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, words: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        return {"loss": self.blocks(self.embed(words)).square().mean()}


def num_blocks(megabytes: int) -> int:
    """The number of blocks for weights and the two moments of AdamW of this size."""
    block = sum(p.numel() for p in Block().parameters())
    return max(2, round((megabytes * 1e6 / 12 - WORDS * WIDTH) / block))


# The contestants: by name, functions that save to and load from a folder. Libraries that are missing are left out.

Action = Callable[[Path], None]
Contestants = dict[str, tuple[Action, Action]]


def contestants(layout: str, session: Session) -> Contestants:
    module, optimizer = session.strategy.module, session.optim.optimizer
    found: Contestants = {"flextrain": (partial(save, session), partial(load, session))}
    if layout == "zero3":
        return found | {"DeepSpeed save_checkpoint": _deepspeed(session.model)}
    found["raw DCP"] = partial(_dcp_save, module, optimizer), partial(_dcp_load, module, optimizer)
    found["torch.save on rank 0"] = partial(_torch_save, module, optimizer), partial(_torch_load, module, optimizer)
    if layout == "single":
        for name, prepare in (("Fabric save", _fabric), ("Accelerate save_state", _accelerate)):
            try:
                found[name] = prepare(module, optimizer)
            except ImportError as error:
                print(f"{name} is left out, {error}", file=sys.stderr)
    return found


def _dcp_save(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model, optim = get_state_dict(module, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)  # flushes its files


def _dcp_load(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model, optim = get_state_dict(module, optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=optim)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _torch_save(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model, optim = get_state_dict(module, optimizer, options=FULL)
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir()
        torch.save({"model": model, "optim": optim}, folder / "state.pth")
        flush(folder)


def _torch_load(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = torch.load(folder / "state.pth", map_location="cpu")
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"],
        options=StateDictOptions(full_state_dict=True),
    )  # fmt: skip


def _deepspeed(engine: Any) -> tuple[Action, Action]:
    def write(folder: Path) -> None:
        engine.save_checkpoint(str(folder), tag="step")
        barrier()
        if dist.get_rank() == 0:
            flush(folder)

    return write, lambda folder: engine.load_checkpoint(str(folder), tag="step")


def _fabric(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Action, Action]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optim = fabric.setup(module, optimizer)
    state = {"model": model, "optim": optim}

    def write(folder: Path) -> None:
        fabric.save(folder / "state.ckpt", state)
        flush(folder)

    return write, lambda folder: fabric.load(folder / "state.ckpt", state)  # type: ignore[return-value]


def _accelerate(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Action, Action]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(module, optimizer)

    def write(folder: Path) -> None:
        accelerator.save_state(str(folder))
        flush(folder)

    return write, lambda folder: accelerator.load_state(str(folder))


def flush(folder: Path) -> None:
    """Flush all files in a folder to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


# Measuring, in the workers


def memory(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measured(action: Callable[..., Any], *arguments: Any) -> tuple[float, int, Any]:
    """Seconds in this process, growth of its resident set in bytes, and the result of ``action``."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is kept for reuse would hide new allocations
    Path("/proc/self/clear_refs").write_text("5")  # reset the largest resident set
    before = memory("VmRSS")
    barrier()
    begin = time.perf_counter()
    result = action(*arguments)
    seconds = time.perf_counter() - begin
    barrier()
    return seconds, memory("VmHWM") - before, result


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def cleared(folder: Path) -> Iterator[Path]:
    """A path that does not exist before and after."""
    yield folder
    barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(folder)
    barrier()


def rounds_of(layout: str, blocks: int, rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """In a worker: the measurements of every round, by contestant and quantity."""
    torch.set_num_threads(1)
    figures: dict[str, dict[str, list[float]]] = {}

    def note(name: str, **values: float) -> None:
        for key, value in values.items():
            figures.setdefault(name, {}).setdefault(key, []).append(value)

    optim = OptimWrapper(dict(type="AdamW", lr=1e-4))
    with redirect_stdout(sys.stderr), started(LAYOUTS[layout][1], optim, partial(Net, blocks)) as session:  # type: ignore[arg-type]
        train(session.strategy, session.model, session.optim, [[{"words": torch.arange(16).view(4, 4)}]])
        actions = contestants(layout, session)
        names, in_background = list(actions), asynchronous(layout, session)
        for number in range(
            rounds + 1
        ):  # the first round does not count: it imports modules and allocates memory that is kept
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with cleared(folder / f"{number}-{name}") as path:
                    write, read = actions[name]
                    save_s, save_bytes, _ = measured(write, path)
                    on_disk = size(path)
                    load_s, load_bytes, _ = measured(read, path)
                if number:
                    note(name, save_s=save_s, save_bytes=save_bytes, load_s=load_s, load_bytes=load_bytes)
                    note(name, disk_bytes=on_disk)
            for name, begin in in_background.items():
                with cleared(folder / f"{number}-{name}-asynchronous") as path:
                    stall_s, stall_bytes, wait = measured(begin, path)
                    done_s, _, _ = measured(wait)
                note(name, stall_bytes=stall_bytes)  # also of the first round, because its copies' memory is kept
                if number:
                    note(name, stall_s=stall_s, background_s=done_s)
    return figures


def asynchronous(layout: str, session: Session) -> dict[str, Callable[[Path], Callable[[], Any]]]:
    """By name, functions that start a save and return a function that waits for it."""

    staging = Staging()  # reused for all saves, as in the runner

    def ours(path: Path) -> Callable[[], Any]:
        state = {**session.strategy.state(), "optim.wrapper": session.optim.plain_values()}
        return save_in_background(path, state, staging=staging).wait

    group = (
        dist.new_group(backend="gloo") if layout == "fsdp" else None
    )  # the group of the training would mix up messages

    def raw(path: Path) -> Callable[[], Any]:
        model, optim = get_state_dict(session.strategy.module, session.optim.optimizer)
        future = dcp.async_save({"model": model, "optim": optim}, checkpoint_id=path, process_group=group)
        return future.result  # type: ignore[union-attr]

    return {"flextrain": ours, "raw DCP": raw} if layout == "fsdp" else {"flextrain": ours}


# Reporting


def measure(names: list[str], rounds: int, megabytes: int, folder: Path) -> dict[str, Any]:
    rows = []
    blocks = num_blocks(megabytes)
    state_bytes = 12 * sum(p.numel() for p in Net(blocks).parameters())
    largest = 4 * WORDS * WIDTH
    for layout in names:
        processes = LAYOUTS[layout][0]
        with WorkerGroup(processes, timeout_s=600) as group, tempfile.TemporaryDirectory(dir=folder) as place:
            by_rank = group.run(rounds_of, layout, blocks, rounds, Path(place))
        for name, first in by_rank[0].items():
            row: dict[str, Any] = {"layout": layout, "processes": processes, "name": name}
            for key in first:
                # Of every round the worst process; then the worst round for memory, the median for time.
                worst = np.max([figures[name][key] for figures in by_rank], axis=0)
                row[key] = int(worst.max()) if key.endswith("_bytes") else float(np.median(worst))
            row["allowed_bytes"] = state_bytes / processes + 1.2 * largest
            rows.append(row)
            print(f"{layout}: {row}", file=sys.stderr)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per process",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": rounds,
        "state_bytes": state_bytes,
        "largest_tensor_bytes": largest,
        "rows": rows,
    }


COLUMNS: list[tuple[str, str, float]] = [
    ("save, s", "save_s", 1),
    ("load, s", "load_s", 1),
    ("stall, s", "stall_s", 1),
    ("on disk, MiB", "disk_bytes", MIB),
    ("memory of save, MiB", "save_bytes", MIB),
    ("memory of load, MiB", "load_bytes", MIB),
    ("of asynchronous save", "stall_bytes", MIB),
]


def markdown(report: dict[str, Any]) -> str:
    titles = " | ".join(title for title, _, _ in COLUMNS)
    lines = [f"| | | {titles} |", f"| --- | --- {'| ---: ' * len(COLUMNS)}|"]
    for row in report["rows"]:
        cells = ["" if key not in row else f"{row[key] / unit:.{2 if unit == 1 else 0}f}" for _, key, unit in COLUMNS]
        lines.append(f"| {row['layout']} x{row['processes']} | {row['name']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"{report['state_bytes'] / 1e6:.0f} MB of float32 weights and AdamW's moments, the largest tensor "
        f"{report['largest_tensor_bytes'] / 1e6:.0f} MB; times are medians of {report['rounds']} interleaved rounds and end "
        "when the files are on disk. Memory is the largest amount that any process needed in addition to the training. Stalls are "
        "those of saves after the first: flextrain reuses its plan and the memory of its copies, DCP by default neither. "
        f"Python {report['python']}, torch {report['torch']}, {report['machine']}.",
    ]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["rows"]
    places = np.arange(len(rows))[::-1]
    colors = ["#d1495b" if row["name"] == "flextrain" else "#8d99ae" for row in rows]
    figure, panels = plt.subplots(1, 4, figsize=(13, 0.5 + 0.35 * len(rows)), sharey=True)
    for axes, (title, key, unit) in zip(panels, [COLUMNS[i] for i in (0, 1, 4, 5)], strict=True):
        axes.barh(places, [row[key] / unit for row in rows], color=colors)
        axes.set_xlabel(title)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(places, [f"{row['layout']} x{row['processes']}, {row['name']}" for row in rows])
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=500, help="weights and AdamW's moments together")
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--folder", type=Path, help="folder to save to; default: the system's folder for temporary files"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = measure(arguments.only, arguments.rounds, arguments.megabytes, arguments.folder)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "checkpoint.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "checkpoint.md").write_text(markdown(report))
    plot(report, arguments.out / "checkpoint.png")
    print(markdown(report))


if __name__ == "__main__":
    main()
