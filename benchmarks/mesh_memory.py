"""Measure what each axis of MeshStrategy leaves of one device's memory, for the same model and the same samples in an update.

    python benchmarks/mesh_memory.py [--only tp2 pp2]

The ledger of `flextrain plan` adds up the storages of all tensors that exist, after every operation of a process, those inside
of DTensors, of backward and of the optimizer too. Its peak, from the first update to the last, is the figure of a process; the process with the
largest counts. "Kept" is what exists between two updates: parameters and optimizer state. The rest of the peak are gradients,
activations and what is gathered or sent. Not seen: memory inside of one operation, and what gloo copies. Libraries and Python
itself are left out, which a resident set cannot do. On one device the torch profiler's sum of all allocations gives the same
378 MB; over several processes it misses what gloo's threads free.
Writes mesh_memory.{md,png,json} to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flextrain import OptimWrapper, Strategy
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.comm import collectives as dist
from flextrain.plan.ledger import Ledger, Network
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

RESULTS = Path(__file__).parent / "results"
MB = 1e6
UPDATES, ACCUMULATE, BATCH = 2, 4, 4  # BATCH: sequences in a micro-batch of all processes
WIDTH, LAYERS, HEADS, EXPERTS, LENGTH, WORDS = 256, 6, 4, 4, 256, 512
SEED = 0


class Experts(nn.Module):
    """A stack of perceptrons; each token goes through some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            found = F.gelu(tokens[token] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, token, found * weights[token, choice, None])
        return out


class Block(nn.Module):
    """Attention, then a perceptron beside a mixture of experts, so that every axis has something to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        heads = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        weights, ids = self.router(h).flatten(0, 1).softmax(-1).topk(2)
        return x + self.down(F.gelu(self.up(h))) + self.experts(h.flatten(0, 1), ids, weights).view_as(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        x = self.embed(input_ids) + self.position(position_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


DIVIDED = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")}
DIVIDED |= {"blocks.*.out": "rowwise", "blocks.*.down": "rowwise"}
STACKED = {"blocks.*.experts": "experts"}
LAYOUTS: dict[str, dict[str, int]] = {
    "one device": {},
    "dp_replicate2": dict(dp_replicate=2, dp_shard=1),
    "dp2": dict(dp_shard=2),
    "tp2": dict(tp=2),
    "cp2": dict(cp=2),
    "dp2, ep2": dict(dp_shard=2, ep=2),
    "pp2": dict(pp=2),
    "dp2xtp2": dict(dp_shard=2, tp=2),
    "dp2xcp2": dict(dp_shard=2, cp=2),
    "dp2xpp2": dict(dp_shard=2, pp=2),
    "pp2xtp2": dict(tp=2, pp=2),
    "dp4": dict(dp_shard=4),
    "dp4, ep4": dict(dp_shard=4, ep=4),
    "pp2xdp2xtp2": dict(dp_shard=2, tp=2, pp=2),
}


def strategy_of(sizes: dict[str, int]) -> dict[str, Any]:
    """The strategy with these sizes."""
    if not sizes:
        return dict(type="SingleDeviceStrategy", device="cpu")
    plan = (DIVIDED if "tp" in sizes else {}) | (STACKED if "ep" in sizes else {})
    return dict(type="MeshStrategy", device="cpu", wrap="blocks", **sizes, **(dict(plan=plan) if plan else {}))


def processes_of(sizes: dict[str, int]) -> int:
    """The number of processes of these sizes; ``ep`` has none of its own."""
    return math.prod(size for axis, size in sizes.items() if axis != "ep")


def batch(seed: int) -> dict[str, Tensor]:
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": words[:, :-1].contiguous(), "labels": words[:, 1:].contiguous()}


def one_run(name: str) -> dict[str, float]:
    """In a worker: MB of a training of some updates."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    strategy: Strategy = STRATEGIES.build(strategy_of(LAYOUTS[name]), "strategy")
    window = [batch(seed) for seed in range(ACCUMULATE)]
    try:
        strategy.join()
        optim = OptimWrapper(dict(type="AdamW", lr=1e-4), accumulative_counts=ACCUMULATE)
        model, built = strategy.setup(Model(), optim)
        gc.collect()
        with Ledger(strategy.topology.rank, Network(strategy.topology.world_size)) as ledger:
            ledger.watch(strategy.module)
            ledger.begin()
            train(strategy, model, built, [window] * UPDATES)  # type: ignore[arg-type]
            gc.collect()
            return {"peak_mb": ledger.peak.total / MB, "kept_mb": ledger.memory.total / MB}
    finally:
        strategy.leave()
        dist.destroy_process_group()


def measure(names: list[str]) -> dict[str, Any]:
    rows = []
    for name in names:
        processes = processes_of(LAYOUTS[name])
        with WorkerGroup(processes, timeout_s=600) as group:
            found = group.run(one_run, name)
        most = max(found, key=lambda figures: figures["peak_mb"])
        rows.append({"name": name, "processes": processes, **most, "each": found})
        print(f"{name}: {most['peak_mb']:.1f} MB, {most['kept_mb']:.1f} of them kept", file=sys.stderr)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in Model().parameters()),
        "tokens": ACCUMULATE * BATCH * LENGTH,
        "layouts": rows,
    }


def markdown(report: dict[str, Any]) -> str:
    lines = ["| layout | processes | peak, MB per process | of one device | kept between updates, MB |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    whole = report["layouts"][0]["peak_mb"]
    for row in report["layouts"]:
        share = f"{row['peak_mb'] / whole:.0%}" if report["layouts"][0]["name"] == "one device" else ""
        lines.append(f"| {row['name']} | {row['processes']} | {row['peak_mb']:.0f} | {share} | {row['kept_mb']:.0f} |")
    lines += [
        "",
        f"A transformer of {report['parameters'] / 1e6:.1f} M parameters with a mixture of experts in each of {LAYERS} layers, AdamW, "
        f"float32; {report['tokens']:,} tokens in an update, in {ACCUMULATE} micro-batches over all processes. The process with the "
        f"most counts. Python {report['python']}, torch {report['torch']}, on the CPU.",
    ]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> Any:
    """Draw the memory of every layout, save the picture, and return Matplotlib's figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["layouts"]
    # A gap before the layouts of more processes.
    places = [i + 0.6 * len({r["processes"] for r in rows[: i + 1]}) for i in range(len(rows))]
    kept, peaks = [row["kept_mb"] for row in rows], [row["peak_mb"] for row in rows]
    figure, axes = plt.subplots(figsize=(9, 4))
    axes.bar(places, kept, 0.8, color="#2a6f97", label="kept between updates: parameters, optimizer state")
    rest = [peak - low for peak, low in zip(peaks, kept, strict=True)]
    axes.bar(places, rest, 0.8, bottom=kept, color="#a9cce3", label="rest of the peak: gradients, activations, buffers")
    for place, peak in zip(places, peaks, strict=True):
        axes.annotate(f"{peak:.0f}", (place, peak), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(places, [row["name"] for row in rows], rotation=35, ha="right")
    axes.set_ylabel("MB per process")
    for processes in sorted({row["processes"] for row in rows}):
        own = [place for place, row in zip(places, rows, strict=True) if row["processes"] == processes]
        text = f"{processes} process{'es' if processes > 1 else ''}"
        axes.annotate(text, (sum(own) / len(own), max(peaks) * 1.08), ha="center", fontsize=8, color="#555555")
    axes.set_ylim(0, max(peaks) * 1.16)
    axes.spines[["top", "right"]].set_visible(False)
    # Above the panel: inside there is no place that no bar reaches, whatever the figures are.
    figure.legend(*axes.get_legend_handles_labels(), loc="upper center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=150)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only draw the picture again, from the recorded figures")
    arguments = parser.parse_args()
    if arguments.draw:
        plot(json.loads((arguments.out / "mesh_memory.json").read_text()), arguments.out / "mesh_memory.png")
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    report = measure(arguments.only)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "mesh_memory.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "mesh_memory.md").write_text(markdown(report))
    plot(report, arguments.out / "mesh_memory.png")
    print(markdown(report))


if __name__ == "__main__":
    main()
