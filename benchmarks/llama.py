"""How much of an accelerator's arithmetic the training of a Llama uses: flextrain, the loop by hand, and other trainers.

    python benchmarks/llama.py [--size 1b] [--length 4096] [--batch 1] [--processes 1] [--only flextrain-tuned by-hand]

The model is transformers' own code with random weights, the tokens are random too. Every run is a job of its own, so that
memory and compiled code of one contestant are not another's; within a round they come one after the other. A step's time
is that of all steps between two moments at which the device has nothing left to do, divided by their number.

MFU, model FLOPs utilisation (Chowdhery et al., "PaLM", 2022, appendix B): tokens per second and device, times 6 N + 12 L H T
operations per token for N parameters without the input embedding, L layers of width H, and T tokens in a sequence, divided
by the device's dense peak in bfloat16. Nothing is taken off for causal attention, nothing added for what is computed again.
Writes llama_<machine>.{json,md} to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RESULTS = Path(__file__).parent / "results"
WARM_UP = 5  # steps left out: compilation, the optimizer's state
ADAMW = {"lr": 1e-5, "weight_decay": 0.01}
# Width, layers, heads, heads of keys and values, width of the MLP, words.
SIZES = {
    "tiny": (64, 2, 4, 2, 192, 512),
    "0.1b": (768, 12, 12, 4, 2048, 32000),
    "0.5b": (1280, 24, 20, 4, 3456, 32000),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "3b": (3072, 28, 24, 8, 8192, 128256),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}
# Dense peaks in bfloat16 from the makers' data sheets, in 10^12 operations per second, by a part of the device's name.
PEAKS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "4090": 165.0,
}
ANCHORS = (
    "Elsewhere: torchtitan, Llama 3.1 8B on 8 H100, bfloat16 and compile: 6,667 tokens/s per device (33 to 39 % MFU by how it "
    "is counted), float8 8,532; NeMo Automodel, LoRA of an 8B on one H100: 12,473 (41 %)."
)


@dataclass
class Job:
    """What all contestants train, in one process of the job."""

    size: str
    length: int
    batch: int
    iterations: int
    device: str
    is_half: bool
    """Whether the weights are bfloat16; float32 otherwise, with bfloat16 for what is computed."""
    compiles: bool

    @property
    def steps(self) -> int:
        return WARM_UP + self.iterations


class Words(Dataset[dict[str, Tensor]]):
    """Random tokens; the labels are the tokens, as transformers' causal models expect."""

    def __init__(self, job: Job, processes: int) -> None:
        self.job, self.count = job, job.steps * job.batch * processes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(
            SIZES[self.job.size][-1], (self.job.length,), generator=torch.Generator().manual_seed(index)
        )
        return {"input_ids": words, "labels": words}


class Clock:
    """The time between two moments at which the device has nothing left to do; ``count`` is called after every step."""

    def __init__(self, job: Job) -> None:
        self.job, self.done, self.seconds, self._began = job, 0, 0.0, 0.0

    def count(self) -> None:
        self.done += 1
        if self.done in (WARM_UP, self.job.steps):
            if self.job.device != "cpu":
                torch.accelerator.synchronize()
            now = time.perf_counter()
            self._began, self.seconds = now, now - self._began


def llama(job: Job) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, groups, mlp, words = SIZES[job.size]
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=job.length,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16 if job.is_half else torch.float32)


def operations_per_token(model: nn.Module, job: Job) -> float:
    width, layers = SIZES[job.size][:2]
    counted = sum(p.numel() for p in model.parameters()) - SIZES[job.size][-1] * width
    return 6.0 * counted + 12.0 * layers * width * job.length


# The contestants. Each trains job.steps steps and calls clock.count() after each.


def by_hand(job: Job, clock: Clock, folder: Path) -> None:
    """What flextrain-tuned does, without a library: FSDP2 over several processes, one device otherwise."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.data import DataLoader, DistributedSampler

    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(job.device) if job.device == "cpu" else torch.device(job.device, rank)
    model: Any = llama(job)
    cast = torch.autocast(device.type, torch.bfloat16, enabled=not job.is_half and processes == 1)
    if job.compiles:
        for layer in model.model.layers:
            layer.compile()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    if processes > 1:
        dist.init_process_group()
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in (*model.model.layers, model):
            fully_shard(unit, mp_policy=precision)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type != "cpu", **ADAMW)
    words = Words(job, processes)
    sampler = DistributedSampler(words) if processes > 1 else None
    loader = DataLoader(words, batch_size=job.batch, sampler=sampler, pin_memory=device.type != "cpu")
    model.train()
    for batch in loader:
        with cast:
            loss = model(**{key: value.to(device, non_blocking=True) for key, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.count()
    if processes > 1:
        dist.destroy_process_group()


def _through_flextrain(job: Job, clock: Clock, folder: Path, strategy: Mapping[str, Any], wrapper: Any) -> None:
    from flextrain import FlexibleRunner, Hook

    class Timer(Hook):
        priority = "LOWEST"

        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            clock.count()

    processes = int(os.environ.get("WORLD_SIZE", 1))
    FlexibleRunner(
        model=llama(job),
        work_dir=str(folder),
        strategy=dict(type="FSDPStrategy" if processes > 1 else "SingleDeviceStrategy", device=job.device, **strategy),
        train_dataloader=dict(batch_size=job.batch, dataset=Words(job, processes), collate_fn="default_collate"),
        optim_wrapper=wrapper,
        train_cfg=dict(max_epochs=1),
        default_hooks=dict(checkpoint=None),
        custom_hooks=[Timer()],
        log_level="ERROR",
        randomness=dict(seed=0),
    ).train()


def flextrain_defaults(job: Job, clock: Clock, folder: Path) -> None:
    """The two lines that everybody writes: a strategy and AmpOptimWrapper."""
    kind = "OptimWrapper" if job.is_half else "AmpOptimWrapper"
    _through_flextrain(job, clock, folder, {}, dict(type=kind, optimizer=dict(type="AdamW", **ADAMW)))


def flextrain_tuned(job: Job, clock: Clock, folder: Path) -> None:
    """The same engine as the loop by hand."""
    strategy: dict[str, Any] = {"compile": {}} if job.compiles else {}
    fused = {"fused": True} if job.device != "cpu" else {}
    wrapper: dict[str, Any] = dict(optimizer=dict(type="AdamW", **ADAMW, **fused))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        strategy |= dict(wrap="blocks", mixed_precision=dict(param_dtype="bfloat16", reduce_dtype="float32"))
    elif not job.is_half:
        wrapper |= dict(type="AmpOptimWrapper", dtype="bfloat16")
    _through_flextrain(job, clock, folder, strategy, wrapper)


def hugging_face(job: Job, clock: Clock, folder: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Timer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.count()

    processes = int(os.environ.get("WORLD_SIZE", 1))
    sharded: dict[str, Any] = (
        dict(fsdp=["full_shard", "auto_wrap"], fsdp_config=dict(version=2)) if processes > 1 else {}
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=job.batch,
        max_steps=job.steps,
        bf16=not job.is_half,
        optim="adamw_torch_fused" if job.device != "cpu" else "adamw_torch",
        learning_rate=ADAMW["lr"],
        weight_decay=ADAMW["weight_decay"],
        max_grad_norm=0.0,
        use_cpu=job.device == "cpu",
        torch_compile=job.compiles,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **sharded,
    )
    Trainer(llama(job), arguments, train_dataset=Words(job, processes), callbacks=[Timer()]).train()


def lightning(job: Job, clock: Clock, folder: Path) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    processes = int(os.environ.get("WORLD_SIZE", 1))

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = llama(job)
                if job.compiles:
                    for layer in self.model.model.layers:  # type: ignore[union-attr]
                        layer.compile()
                if processes > 1:
                    from torch.distributed.fsdp import fully_shard

                    for unit in (*self.model.model.layers, self.model):  # type: ignore[union-attr, misc]
                        fully_shard(unit, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), fused=job.device != "cpu", **ADAMW)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.count()

    trainer = pl.Trainer(
        max_steps=job.steps,
        precision="bf16-true" if job.is_half else "bf16-mixed",
        accelerator="cpu" if job.device == "cpu" else "auto",
        devices=processes if processes > 1 else 1,
        strategy=pl.strategies.ModelParallelStrategy() if processes > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
    )
    trainer.fit(Module(), DataLoader(Words(job, processes), batch_size=job.batch, pin_memory=job.device != "cpu"))


CONTESTANTS: dict[str, Callable[[Job, Clock, Path], None]] = {
    "by-hand": by_hand,
    "flextrain-tuned": flextrain_tuned,
    "flextrain-defaults": flextrain_defaults,
    "hugging-face-trainer": hugging_face,
    "lightning": lightning,
}


# A job, and all of them.


def one_process(name: str, job: Job, report: Path) -> None:
    """Train one contestant, in a process of its job; rank 0 writes seconds per step and the peak of its memory."""
    clock = Clock(job)
    with tempfile.TemporaryDirectory() as folder:
        CONTESTANTS[name](job, clock, Path(folder))
    assert clock.done == job.steps, f"{name} made {clock.done} steps of {job.steps}"
    if int(os.environ.get("RANK", 0)) == 0:
        counts = job.device != "cpu" and hasattr(torch.get_device_module(job.device), "max_memory_allocated")
        peak = torch.get_device_module(job.device).max_memory_allocated() if counts else 0
        report.write_text(json.dumps({"seconds": clock.seconds / job.iterations, "bytes": peak}))


def launched(name: str, job: Job, processes: int) -> dict[str, float] | str:
    """Run a contestant; a text says why it has no result."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        own = [str(Path(__file__)), "--child", name, json.dumps(asdict(job)), str(report)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(torchrun if processes > 1 else []), *own]
        ended = subprocess.run(command, capture_output=True, text=True)
        if report.exists():
            return json.loads(report.read_text())  # type: ignore[no-any-return]
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        errors = [line for line in said if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|assert)", line)]
        return (errors or said or [f"ended without a word, exit code {ended.returncode}"])[-1][:200]


def peak_of(machine: str) -> tuple[float, str]:
    """The device's peak in operations per second, and where it is from."""
    for part, tera in PEAKS.items():
        if part in machine:
            return tera * 1e12, f"{tera:g} Tflop/s, dense bfloat16 by the maker's data sheet"
    size = 1024
    a = torch.randn(size, size)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    found = 2 * size**3 / min(times)
    return found, f"{found / 1e12:.3g} Tflop/s, a product of two matrices in float32 on this machine"


def measured(names: list[str], job: Job, rounds: int, processes: int) -> dict[str, dict[str, float] | str]:
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in failed:
                continue
            found = launched(name, job, processes)
            if isinstance(found, str):
                failed[name] = found
            else:
                results[name].append(found)
            print(f"round {number + 1}: {name}: {found}", file=sys.stderr, flush=True)
    return {
        name: failed.get(name)
        or {
            "seconds": statistics.median(one["seconds"] for one in results[name]),
            "bytes": max(one["bytes"] for one in results[name]),
        }
        for name in names
    }


def markdown(report: dict[str, Any]) -> str:
    base = report["rows"].get("by-hand")
    lines = [
        "| | tokens/s per device | MFU | step, of the loop by hand | peak GiB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, row in report["rows"].items():
        if isinstance(row, str):
            lines.append(f"| {name} | {row} | | | |")
            continue
        ratio = f"{row['seconds'] / base['seconds']:.3f}" if isinstance(base, dict) else ""
        memory = f"{row['bytes'] / 2**30:.1f}" if row["bytes"] else ""
        lines.append(f"| {name} | {row['tokens_per_s']:,.0f} | {row['mfu']:.1%} | {ratio} | {memory} |")
    return "\n".join([*lines, "", report["what"], "", ANCHORS]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, help="default: 1b, on the CPU tiny")
    parser.add_argument("--length", type=int, help="tokens in a sequence; default: 4096, on the CPU 128")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a process in a step")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=20, help="steps that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--half", action="store_true", help="weights and optimizer state in bfloat16 too, as an 8B on one device needs"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=3, metavar=("CONTESTANT", "JOB", "REPORT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        one_process(given.child[0], Job(**json.loads(given.child[1])), Path(given.child[2]))
        return
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = "cpu" if found is None else found.type
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    machine = named(0) if named and device != "cpu" else f"{device} ({platform.machine()})"
    size, length = given.size or ("tiny" if found is None else "1b"), given.length or (128 if found is None else 4096)
    job = Job(size, length, given.batch, given.iterations, device, given.half, not given.no_compile)
    with torch.device("meta"):
        operations = operations_per_token(llama(job), job)
    peak, source = peak_of(machine)
    rows = measured(given.only, job, given.rounds, given.processes)
    for row in rows.values():
        if isinstance(row, dict):
            row["tokens_per_s"] = job.batch * job.length / row["seconds"]
            row["mfu"] = row["tokens_per_s"] * operations / peak
    what = (
        f"Llama {size} with {'bfloat16' if job.is_half else 'float32'} weights, {job.batch} x {job.length} tokens on each of "
        f"{given.processes} x {machine}; {'compiled' if job.compiles else 'not compiled'}. {operations / 1e9:.3g} Gflop per token "
        f"(6 N + 12 L H T), peak {source}. torch {torch.__version__}, Python {platform.python_version()}; medians of "
        f"{given.rounds} rounds of {job.iterations} steps."
    )
    report = {"machine": machine, "what": what, "job": asdict(job), "processes": given.processes, "rows": rows}
    given.out.mkdir(parents=True, exist_ok=True)
    name = "llama_" + re.sub(r"\W+", "-", machine).strip("-").lower()
    (given.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.out / f"{name}.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
