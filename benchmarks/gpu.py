"""What flextrain costs on an accelerator: step time and peak memory beside a loop written by hand, and what a save holds up.

    python benchmarks/gpu.py [--device cuda] [--rounds 3] [--iterations 20] [--out benchmarks/results]

A causal transformer with AdamW, on one device: float32, bfloat16 under autocast, and FSDP in a world of one. Within a round
both come one after the other, in turn first; a step's time is that of all iterations between two moments at which the device
has nothing left to do, divided by their number. Memory is what the allocator held at most. Writes gpu_<device>.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from flextrain import FlexibleRunner, Hook
from flextrain.core.checkpoint import Staging, save_checkpoint, save_in_background
from flextrain.core.device.accelerator import is_fused
from flextrain.core.device.device import DEVICES, device_spec, memory_mb, synchronize

RESULTS = Path(__file__).parent / "results"
WARM_UP = 5  # iterations left out: the first makes the optimizer's state
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
SIZES = {"cpu": (64, 2, 32, 4)}  # width, layers, length and batch, where the usual ones would take for ever
USUAL = (1024, 12, 512, 8)
WORDS = 8192


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """The loss is that of the next word."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        x = self.embed(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1).float(), words[:, 1:].flatten())}


class Clock:
    """Seconds between two moments at which the device has nothing left to do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0

    def start(self) -> None:
        synchronize(self.device)
        self.began = time.perf_counter()

    def stop(self) -> None:
        synchronize(self.device)
        self.seconds = time.perf_counter() - self.began


class Timer(Hook):
    """Starts the clock after the warm-up."""

    priority = "LOWEST"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        if batch_idx + 1 == WARM_UP:
            self.clock.start()

    def after_train_epoch(self, runner: Any) -> None:
        self.clock.stop()


def by_hand(kind: str, device: torch.device, model: nn.Module, loader: DataLoader[Any], clock: Clock) -> None:
    cast: AbstractContextManager[Any] = nullcontext()
    if kind == "fsdp":
        dist.init_process_group(DEVICES[device.type].group_backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        mesh = init_device_mesh(device.type, (1,))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model.to(device)
    if kind == "bfloat16":
        cast = torch.autocast(device.type, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused("AdamW", device), **ADAMW)
    for i, (words,) in enumerate(loader):
        with cast:
            loss = model(words.to(device, non_blocking=True))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i + 1 == WARM_UP:
            clock.start()
    clock.stop()
    if kind == "fsdp":
        dist.destroy_process_group()


def through_flextrain(kind: str, device: torch.device, model: nn.Module, loader: DataLoader[Any], clock: Clock) -> None:
    strategy = dict(type="FSDPStrategy", wrap="blocks") if kind == "fsdp" else dict(type="SingleDeviceStrategy")
    amp = dict(type="AmpOptimWrapper", dtype="bfloat16") if kind == "bfloat16" else {}
    with tempfile.TemporaryDirectory() as folder:
        runner = FlexibleRunner(
            model=model,
            work_dir=folder,
            strategy={**strategy, "device": device.type},
            train_dataloader=loader,
            optim_wrapper=dict(optimizer=dict(type="AdamW", **ADAMW), **amp),
            train_cfg=dict(max_epochs=1),
            default_hooks=dict(checkpoint=None),
            custom_hooks=[Timer(clock)],
            log_level="ERROR",
            randomness=dict(seed=0),
        )
        runner.train()
        runner.strategy.leave()


def one_run(kind: str, ours: bool, device: torch.device, iterations: int) -> tuple[float, float]:
    """Milliseconds per step, and peak memory in MiB."""
    width, layers, length, batch = SIZES.get(device.type, USUAL)
    torch.manual_seed(0)
    words = torch.randint(WORDS, ((WARM_UP + iterations) * batch, length + 1))
    module = DEVICES[device.type].module
    if hasattr(module, "reset_peak_memory_stats"):
        module.empty_cache()
        module.reset_peak_memory_stats()
    clock = Clock(device)
    run = through_flextrain if ours else by_hand
    run(kind, device, Transformer(width, layers), DataLoader(TensorDataset(words), batch_size=batch), clock)
    return 1e3 * clock.seconds / iterations, memory_mb(device)


def saves(device: torch.device) -> dict[str, float]:
    """Seconds that a checkpoint of a model with AdamW's moments takes, and that one in the background holds up."""
    width, layers, _, _ = SIZES.get(device.type, USUAL)
    model = Transformer(width, layers).to(device)
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    state |= {f"{key}.{moment}": torch.zeros_like(p) for key, p in list(state.items()) for moment in "ab"}
    found = {"mib": sum(p.nbytes for p in state.values()) / 2**20}
    staging, clock = Staging(), Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        clock.start()
        save_checkpoint(Path(folder) / "waited", state)
        clock.stop()
        found["waited_s"] = clock.seconds
        for name in ("first_s", "second_s", "third_s"):
            synchronize(device)
            began = time.perf_counter()
            pending = save_in_background(Path(folder) / name, state, staging=staging)
            found[name] = time.perf_counter() - began
            clock.start()  # a device that is still copying holds up what comes next
            pending.wait()
    return found


def measure(device: torch.device, rounds: int, iterations: int) -> Iterator[dict[str, Any]]:
    for kind in ("float32", "bfloat16", "fsdp"):
        times: dict[bool, list[float]] = {True: [], False: []}
        memory: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            for ours in (True, False) if number % 2 else (False, True):
                milliseconds, peak = one_run(kind, ours, device, iterations)
                times[ours].append(milliseconds)
                memory[ours].append(peak)
        hand, own = (statistics.median(times[ours]) for ours in (False, True))
        hand_mib, own_mib = (statistics.median(memory[ours]) for ours in (False, True))
        yield {
            "name": kind,
            "by_hand_ms": hand,
            "flextrain_ms": own,
            "time": own / hand,
            "by_hand_mib": hand_mib,
            "flextrain_mib": own_mib,
            "memory": own_mib / hand_mib,
        }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "| | by hand, ms per step | flextrain | ratio | by hand, peak MiB | flextrain | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["rows"]:
        times = f"{row['by_hand_ms']:.2f} | {row['flextrain_ms']:.2f} | {row['time']:.3f}"
        sizes = f"{row['by_hand_mib']:.0f} | {row['flextrain_mib']:.0f} | {row['memory']:.3f}"
        lines.append(f"| {row['name']} | {times} | {sizes} |")
    held = report["saves"]
    lines += [
        "",
        f"A checkpoint of {held['mib']:.0f} MiB takes {held['waited_s']:.2f} s; in the background it holds up the host for "
        f"{held['first_s']:.3f} s, the next ones for {held['second_s']:.3f} and {held['third_s']:.3f} s.",
        "",
        f"{report['machine']}, torch {report['torch']}, Python {report['python']}; medians of {report['rounds']} rounds of "
        f"{report['iterations']} steps.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="kind of device; default: the accelerator that is here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20, help="steps per round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    spec = device_spec(arguments.device)
    device = torch.device(spec.type) if spec.type == "cpu" else torch.device(spec.type, 0)
    named = getattr(spec.module, "get_device_name", None)
    machine = named(0) if named and spec.type != "cpu" else f"{spec.type} ({platform.machine()})"
    report: dict[str, Any] = {
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rounds": arguments.rounds,
        "iterations": arguments.iterations,
        "rows": list(measure(device, arguments.rounds, arguments.iterations)),
        "saves": saves(device),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "gpu_" + re.sub(r"\W+", "-", machine).strip("-").lower()
    (arguments.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / f"{name}.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
