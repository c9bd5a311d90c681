"""Compare the ledger of GoodputHook with what a killed job writes down itself.

    python benchmarks/goodput.py [--kills 8] [--seconds 0.2] [--seed 0]

A job trains under `flextrain run`, and this program kills it at random moments. The job notes the clock around every update and
every validation, this program the moments of its kills: from both follows, without the hook's record, what the seconds went into.
Also measures what the hook adds to an iteration. Writes goodput.{md,json} to benchmarks/results/.
"""
# ruff: noqa: E402

from __future__ import annotations

import time

BEGAN = time.time()

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flextrain import BaseMetric, FlexibleRunner, Hook, read_events

PLUGIN = Path(__file__).parents[1] / "plugins" / "flextrain-goodput"
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(PLUGIN))

from flextrain_goodput import GoodputHook, ledger_of

UPDATES_PER_EPOCH = 20
VALIDATION_S = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor, mode: str = "loss") -> Any:
        return {"loss": self.layer(x).square().mean()}


class Count(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: list[int]) -> dict[str, float]:
        return {"batches": float(len(results))}


class Notes(Hook):
    """Makes updates and validations take their time, and notes in a file when which began and ended."""

    priority = "HIGHEST"

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.seconds = file, seconds

    def note(self, what: str, number: int, when: float | None = None) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([when or time.time(), os.getpid(), what, number]) + "\n")

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.note("update", runner.iter)
        time.sleep(self.seconds)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.note("updated", runner.iter)

    def before_val(self, runner: Any) -> None:
        self.note("validation", runner.iter)

    def before_val_epoch(self, runner: Any) -> None:
        time.sleep(VALIDATION_S)

    def after_val(self, runner: Any) -> None:
        self.note("validated", runner.iter)


def job(folder: Path, epochs: int, seconds: float) -> None:
    """What is killed."""
    data = dict(dataset=TensorDataset(torch.ones(UPDATES_PER_EPOCH, 8)), batch_size=1, collate_fn="default_collate")
    notes = Notes(folder / "notes", seconds)
    notes.note("start", 0, BEGAN)
    FlexibleRunner(
        model=Net,
        work_dir=str(folder / "run"),
        train_dataloader=data,
        val_dataloader=data,
        val_cfg=dict(),
        val_evaluator=dict(type=Count),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=epochs),
        custom_hooks=[notes, GoodputHook(interval_s=1.0)],
    ).train()


def killed(folder: Path, epochs: int, seconds: float, kills: int, seed: int) -> list[float]:
    """Run the job, and return when it was killed."""
    command = [
        sys.executable,
        "-m",
        "flextrain",
        "run",
        "--max-restarts",
        str(kills),
        "--nproc-per-node",
        "1",
        __file__,
    ]
    command += ["--job", str(folder), str(epochs), str(seconds)]
    draws, moments = random.Random(seed), []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        for number in range(kills):
            wait = draws.uniform(0.5, 1.5) * epochs * UPDATES_PER_EPOCH * seconds / (kills + 1)
            while (
                len(starts := of_kind(notes_of(folder), "update")) < 1 or len({pid for _, pid, *_ in starts}) <= number
            ):
                time.sleep(0.02)  # until it trains again
            time.sleep(wait)
            if run.poll() is not None:
                break
            os.kill(starts[-1][1], signal.SIGKILL)
            moments.append(time.time())
        error = run.communicate()[1]
        if run.returncode:
            raise SystemExit(error.decode())
    return moments


def notes_of(folder: Path) -> list[list[Any]]:
    file = folder / "notes"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def of_kind(notes: Sequence[Sequence[Any]], kind: str) -> list[Any]:
    return [note for note in notes if note[2] == kind]


def truth(notes: Sequence[Sequence[Any]], kills: Sequence[float]) -> dict[str, float]:
    """Seconds by kind from the job's notes: an update lasts until the next thing begins in its process, or until the kill."""
    found = dict.fromkeys(("useful", "thrown away", "evaluation", "starting"), 0.0)
    by_process: dict[int, list[Any]] = {}
    for note in notes:
        by_process.setdefault(note[1], []).append(note)
    starts = list(by_process.values())
    for own, killed_at, after in zip(starts, [*kills, None], [*starts[1:], None], strict=True):
        ends = killed_at if killed_at is not None else own[-1][0]
        kept = of_kind(after, "update")[0][3] if after is not None else float("inf")
        found["starting"] += own[1][0] - own[0][0] + (after[0][0] - killed_at if after is not None else 0.0)
        for note, following in zip(own, [*own[1:], [ends]], strict=True):
            if note[2] in ("update", "updated"):
                found["useful" if note[3] < kept else "thrown away"] += following[0] - note[0]
            elif note[2] == "validation":
                found["evaluation"] += following[0] - note[0]
            elif note[2] == "validated":
                found["useful"] += following[0] - note[0]
    return found


def told(folder: Path) -> dict[str, float]:
    """The ledger's seconds by the same kinds: what a save takes and waiting for data belong to the updates here."""
    seconds = ledger_of(read_events(folder / "run")).seconds
    return {
        "useful": sum(seconds[kind] for kind in ("useful", "waiting for data", "saving", "compiling")),
        "thrown away": seconds["repeated"] + seconds["lost"],
        "evaluation": seconds["evaluation"],
        "starting": seconds["start-up"] + seconds["restarting"] + seconds["queue"],
    }


def nanoseconds() -> float:
    """What the hook adds to an iteration between two records: one call."""
    hook = GoodputHook()
    hook._due = time.monotonic() + 1e6
    number = 200_000
    return min(timeit.repeat(lambda: hook.after_train_iter(None, 0), number=number, repeat=5)) / number * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.2, help="of an update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job(Path(arguments.job[0]), int(arguments.job[1]), float(arguments.job[2]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kills = killed(folder, arguments.epochs, arguments.seconds, arguments.kills, arguments.seed)
        expected, found = truth(notes_of(folder), kills), told(folder)
    whole = sum(expected.values())

    report = {
        "kills": len(kills),
        "seconds": arguments.seconds,
        "noted": expected,
        "ledger": found,
        "added_ns": nanoseconds(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    lines = ["| what | the job's own notes, s | ledger, s | difference, of the whole |", "| --- | ---: | ---: | ---: |"]
    for kind, seconds in [*expected.items(), ("all", whole)]:
        ours = found.get(kind, sum(found.values()))
        lines.append(f"| {kind} | {seconds:.1f} | {ours:.1f} | {100 * (ours - seconds) / whole:+.2f} % |")
    lines += [
        "",
        f"{len(kills)} kills (SIGKILL) at random moments of a job of {arguments.epochs * UPDATES_PER_EPOCH} updates of {arguments.seconds:g} s, "
        f"a record every second, a checkpoint every {UPDATES_PER_EPOCH} updates. Thrown away is repeated and lost, starting is start-up "
        f"and restarting. Between two records the hook adds {report['added_ns']:.0f} ns to an iteration. Python {report['python']}, torch "
        f"{report['torch']}.",
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "goodput.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "goodput.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
