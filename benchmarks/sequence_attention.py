"""Count the operations of attention over a sequence that two processes share, and time them, for one layer on the CPU.

    python benchmarks/sequence_attention.py [--length 4096] [--only ring "ring, documents"]

Operations are those that torch dispatches on one process in forward and in forward and backward, views and messages among them:
on an accelerator each of them costs the host some microseconds. Times are the processor's for forward and backward, the least of the repetitions
on the slower process. Writes sequence_attention.{md,json} to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flextrain import MeshStrategy
from flextrain.core.comm import collectives as dist
from flextrain.core.torch_compat.torch_private import TorchDispatchMode
from flextrain.strategies.mesh.context.attention import SequenceAttention
from flextrain.strategies.mesh.context.masks import CAUSAL, Mask
from flextrain.testing import WorkerGroup

RESULTS = Path(__file__).parent / "results"
PROCESSES, SAMPLES, HEADS, HEADS_OF_KEYS, WIDTH, DOCUMENT, REPETITIONS = 2, 1, 8, 2, 64, 1024, 5
CASES = {f"{kind}{what}": (kind, what) for kind in ("ring", "ulysses") for what in ("", ", documents")}


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def one_layer(name: str, length: int) -> dict[str, float]:
    """In a worker: operations and seconds of one layer."""
    torch.set_num_threads(1)
    kind, what = CASES[name]
    strategy = MeshStrategy(device="cpu", cp=PROCESSES)
    strategy.join()
    attention = SequenceAttention(kind, strategy.layout.over("cp"))
    torch.manual_seed(0)
    own = length // PROCESSES
    given = [
        torch.randn(SAMPLES, heads, own, WIDTH).requires_grad_() for heads in (HEADS, HEADS_OF_KEYS, HEADS_OF_KEYS)
    ]
    mask = Mask(CAUSAL, documents=(torch.arange(length) // DOCUMENT)[None] if what else None)

    def forward() -> Tensor:
        return attention(given[0], given[1], given[2], mask, None, 0.0, "benchmark")

    gradient = torch.randn_like(forward())
    with Count() as first:
        found = forward()
    with Count() as second:
        torch.autograd.grad(found, given, gradient)
    seconds = []
    for _ in range(REPETITIONS):
        dist.barrier()
        start = time.process_time()
        torch.autograd.grad(forward(), given, gradient)
        seconds.append(time.process_time() - start)
    strategy.leave()
    dist.destroy_process_group()
    return {"forward": first.count, "both": first.count + second.count, "ms": 1000 * min(seconds)}


def measure(names: list[str], length: int) -> dict[str, Any]:
    rows = []
    with WorkerGroup(PROCESSES, timeout_s=600) as group:
        for name in names:
            found = group.run(one_layer, name, length)
            rows.append({"name": name, **{key: max(one[key] for one in found) for key in found[0]}})
            print(rows[-1], file=sys.stderr)
    return {"python": platform.python_version(), "torch": torch.__version__, "length": length, "rows": rows}


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "| attention | operations, forward | forward and backward | processor, ms |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [f"| {row['name']} | {row['forward']} | {row['both']} | {row['ms']:.0f} |" for row in report["rows"]]
    lines += [
        "",
        f"One layer, {report['length']:,} positions over {PROCESSES} processes, {SAMPLES} sample, {HEADS} heads of queries and {HEADS_OF_KEYS} of keys "
        f"of width {WIDTH}, float32, causal; documents of {DOCUMENT:,} positions. One thread for each process. Python {report['python']}, torch "
        f"{report['torch']}, on the CPU.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = measure(arguments.only, arguments.length)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sequence_attention.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "sequence_attention.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
