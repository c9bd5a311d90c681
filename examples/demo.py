"""Train the same classifier under every strategy that this machine can run, and compare the results. `make demo` runs it.

Every run starts examples/train_classifier.py as a user would. All runs train on the same samples in the same global batches,
so their loss curves should coincide.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flextrain import STRATEGIES

EXAMPLES = Path(__file__).parent
STARTED = time.perf_counter()
GLOBAL_BATCH = 64
ENOUGH = 97.0  # percent of the validation digits


@dataclass(frozen=True)
class Run:
    name: str
    strategy: str
    processes: int
    flags: tuple[str, ...] = ()
    needs: str | None = None  # an optional package

    def missing(self) -> str | None:
        """Why this machine cannot do this run; None when it can."""
        if self.strategy not in STRATEGIES:
            return f"this version has no {self.strategy}"
        if self.needs and find_spec(self.needs) is None:
            return f"needs pip install flextrain[{self.needs}]"
        return None


# The others are compared with the first.
RUNS = [
    Run("SingleDevice", "SingleDeviceStrategy", 1),
    Run("DDP", "DDPStrategy", 2, ("--use-ddp",)),
    Run("FSDP", "FSDPStrategy", 2, ("--use-fsdp",)),
    *(
        Run(f"ZeRO-{stage}", "DeepSpeedStrategy", 2, ("--use-deepspeed", "--zero-stage", str(stage)), "deepspeed")
        for stage in (1, 2, 3)
    ),
]


@dataclass
class Outcome:
    run: Run
    seconds: float
    accuracy: float
    losses: dict[int, float]  # iteration -> training loss
    samples_per_second: float


def carry_out(run: Run, epochs: int, work_dir: Path) -> Outcome:
    """Train in a separate process, or several.

    Raises:
        SystemExit: the training failed; its output is in the message.
    """
    shutil.rmtree(work_dir, ignore_errors=True)
    start = [sys.executable]
    if run.processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.processes)]
    script = [str(EXAMPLES / "train_classifier.py"), "--epochs", str(epochs), "--work-dir", str(work_dir)]
    command = [*start, *script, "--batch-size", str(GLOBAL_BATCH // run.processes), *run.flags]
    # One thread per process, as is torchrun's default: two processes use two cores, one process uses one.
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(
            f"{run.name} failed with exit status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return read_log(run, seconds, work_dir)


def read_log(run: Run, seconds: float, work_dir: Path) -> Outcome:
    (log,) = work_dir.glob("*/vis_data/scalars.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    train = [line for line in lines if "loss" in line]
    return Outcome(
        run,
        seconds,
        accuracy=[line["accuracy"] for line in lines if "accuracy" in line][-1],
        losses={line["iter"]: line["loss"] for line in train},
        samples_per_second=GLOBAL_BATCH / median(line["time"] for line in train[1:]),
    )


def table(outcomes: list[Outcome]) -> Table:
    reference = outcomes[0]
    shown = Table(
        title="The same training under every strategy",
        caption=f"loss diff: largest difference between a logged loss and that of {reference.run.name}",
    )
    shown.add_column("strategy")
    for column in ("processes", "val accuracy", "final loss", "loss diff", "samples/s", "seconds"):
        shown.add_column(column, justify="right")
    for outcome in outcomes:
        gap = max(abs(loss - reference.losses[step]) for step, loss in outcome.losses.items())
        shown.add_row(
            outcome.run.name,
            str(outcome.run.processes),
            f"{outcome.accuracy:.2f} %",
            f"{list(outcome.losses.values())[-1]:.4f}",
            "" if outcome is reference else f"{gap:.0e}",
            f"{outcome.samples_per_second:,.0f}",
            f"{outcome.seconds:.1f}",
        )
    return shown


def plot(outcomes: list[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    styles = ["-", "--", ":", "-."]
    for number, outcome in enumerate(outcomes):
        label = f"{outcome.run.name}, {outcome.run.processes} process{'es' * (outcome.run.processes > 1)}"
        # Equal curves hide each other: the first is wide and pale, the others are drawn on top.
        look = {"linewidth": 5, "alpha": 0.35} if number == 0 else {"linewidth": 1.5}
        axes.plot(outcome.losses.keys(), outcome.losses.values(), styles[number % len(styles)], label=label, **look)
    axes.set_yscale("log")
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss")
    axes.set_title("Handwritten digits, global batch of 64")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/demo"))
    names = [run.name for run in RUNS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="runs to start; default: all")
    arguments = parser.parse_args()
    # A pipe has no width, so the table gets one.
    console = Console(width=None if sys.stdout.isatty() else 100, markup=False, emoji=False)
    outcomes = []
    for run in (run for run in RUNS if run.name in arguments.only):
        if reason := run.missing():
            console.print(f"left out: {run.name} ({reason})")
            continue
        with console.status(Text(f"{run.name}: training on {run.processes} process(es)")):
            outcomes.append(carry_out(run, arguments.epochs, arguments.work_dir / run.name))
        console.print(f"{run.name}: {outcomes[-1].seconds:.1f} s")
        if len(outcomes) == 1:
            after = time.perf_counter() - STARTED
            console.print(
                f"The first model is trained, {after:.1f} s after the demo began: {arguments.work_dir / run.name}"
            )
    picture = arguments.work_dir / "loss_curves.png"
    plot(outcomes, picture)
    console.print(table(outcomes))
    console.print(f"Loss curves: {picture}")
    if low := [outcome.run.name for outcome in outcomes if outcome.accuracy <= ENOUGH]:
        raise SystemExit(f"validation accuracy is not above {ENOUGH} % for {', '.join(low)}")


if __name__ == "__main__":
    main()
