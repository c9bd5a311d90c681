"""Measure what keeping ZeRO-3's state in host memory or in files saves, and what it costs.

    python benchmarks/offloading.py [--layers 24] [--updates 3] [--folder DIR]

Each layout trains the same model in two processes of its own, on the CPU: "memory" keeps everything where it is computed,
"optimizer in files" and "both in files" keep state with device="nvme" in DIR. The model is built in shards. Resident memory
is what a process has more than before it built the model, the largest of all processes: its own (anonymous and locked
pages), and with pages of mapped files, which the system takes back when it needs memory. The files are on the disk of DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flextrain import OptimWrapper
from flextrain.core.checkpoint import save_checkpoint
from flextrain.strategies import DeepSpeedStrategy
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
WIDTH = 2048
# The same in all layouts, so that what is gathered at a time does not differ.
COMMON = dict(stage=3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=WIDTH * WIDTH)
BUCKETS = dict(COMMON, reduce_bucket_size=WIDTH * WIDTH, sub_group_size=WIDTH * WIDTH)


class Net(nn.Module):
    """Linear layers of 16 MiB."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def forward(self, x: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


def layouts(folder: str) -> dict[str, dict[str, Any]]:
    """ZeRO's options of each layout."""
    optimizer = dict(offload_optimizer=dict(device="nvme", nvme_path=folder))
    param = dict(offload_param=dict(device="nvme", nvme_path=folder, buffer_size=WIDTH * WIDTH))
    return {"memory": {}, "optimizer in files": optimizer, "both in files": optimizer | param}


def resident() -> tuple[float, float]:
    """This process's own resident memory, and that with mapped files, in MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024, int(fields["VmRSS"].split()[0]) / 1024


class Peak:
    """The largest resident memory while the context is open, looked at every few milliseconds."""

    def __enter__(self) -> Peak:
        self.own = self.all = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            own, everything = resident()
            self.own, self.all = max(self.own, own), max(self.all, everything)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(zero: dict[str, Any], layers: int, updates: int, checkpoint: Path) -> dict[str, Any]:
    """In a worker that does nothing else: memory in MiB, and seconds of each update and of a save."""
    aio = dict(aio=dict(block_size=MIB)) if zero else {}
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=BUCKETS | zero, **aio)
    strategy.join()
    own, everything = resident()
    found: dict[str, Any] = {}

    def note(name: str, peak: Peak) -> None:
        found[name] = [round(peak.own - own), round(peak.all - everything)]

    with Peak() as peak:
        torch.manual_seed(0)
        with strategy.building():
            module = Net(layers)
        model, optim = strategy.setup(module, OptimWrapper(dict(type="AdamW", lr=1e-4)))
    note("setup", peak)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    times = []
    with Peak() as peak:
        for _ in range(updates):
            began = time.perf_counter()
            found["losses"] = [*found.get("losses", []), *train(strategy, model, optim, [[{"x": x}]]).losses]  # type: ignore[arg-type]
            times.append(time.perf_counter() - began)
    note("training", peak)
    found["update_s"] = statistics.median(times[1:])
    with Peak() as peak:
        began = time.perf_counter()
        save_checkpoint(checkpoint, strategy.state())
        found["save_s"] = time.perf_counter() - began
    note("save", peak)
    strategy.leave()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    # glibc keeps freed blocks of this size otherwise, in which no difference would be seen; the workers inherit it.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, zero in layouts(folder).items():
            with WorkerGroup(2, timeout_s=1800) as workers:
                answers = workers.run(measure, zero, options.layers, options.updates, Path(folder) / "checkpoint")
            shutil.rmtree(Path(folder) / "checkpoint")
            left = [path.name for path in Path(folder).iterdir()]
            assert not left, left
            found[name] = {
                key: [max(answer[key][i] for answer in answers) for i in (0, 1)]
                for key in ("setup", "training", "save")
            } | {key: round(max(answer[key] for answer in answers), 2) for key in ("update_s", "save_s")}
            found[name]["losses"] = answers[0]["losses"]
            print(name, found[name], flush=True)
    assert all(each["losses"] == found["memory"]["losses"] for each in found.values())
    elements = sum(parameter.numel() for parameter in Net(1).parameters()) * options.layers
    about = dict(
        elements=elements, python=platform.python_version(), torch=torch.__version__, machine=platform.machine()
    )
    (options.out / "offloading.json").write_text(json.dumps({"about": about, "layouts": found}, indent=2) + "\n")
    (options.out / "offloading.md").write_text(table(found, about))


def table(found: dict[str, Any], about: dict[str, Any]) -> str:
    lines = [
        "| ZeRO-3, 2 processes | setup, MiB | training, MiB | save, MiB | update, s | save, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, each in found.items():
        memory = " | ".join(f"{each[key][0]} ({each[key][1]})" for key in ("setup", "training", "save"))
        lines.append(f"| {name} | {memory} | {each['update_s']} | {each['save_s']} |")
    shard = about["elements"] * 4 / 2 / MIB
    text = (
        f"A model of {about['elements'] / 1e6:.0f} million float32 weights with AdamW: {shard:.0f} MiB of weights, as much of "
        f"gradients and twice as much of moments in each process. Memory is what a process has more than before the model was "
        "built, the largest of both: its own pages, and in brackets with pages of mapped files, which the system takes back "
        "when it needs memory. Freed memory goes back to the system at once (MALLOC_MMAP_THRESHOLD_). Gradients stay in host memory. The losses of all three are equal in every digit. Python "
        f"{about['python']}, torch {about['torch']}, {about['machine']}, one thread per process; times of a machine that had other work too."
    )
    return "\n".join([*lines, "", text, ""])


if __name__ == "__main__":
    main()
