"""Disturb training at random moments, and compare its last weights with those of an undisturbed run.

    python benchmarks/chaos.py [--faults 20] [--only ddp fsdp zero2] [--seed 0] [--kinds kill_one ...]

For each strategy chaos_job.py trains twice under `flextrain run` on two processes: alone, and with the given number of
faults. Which fault comes, whom it hits and at which update is drawn from the seed, so that a failing sequence can be
repeated; the moment within the update is not. A fault comes after at least one update of the start that it hits.

    kill_one, kill_all     SIGKILL to one process, to all of them at once
    stop_one               SIGSTOP to one process, which the watchdog has to find
    term_one               SIGTERM to one process, as a scheduler would send it
    disk_full              the file system of the work directory (a tmpfs of its own, which needs root) is filled for one and
                           a half checkpoint intervals
    slow_storage           every fsync takes half a second longer, for one interval; one process is killed meanwhile

A run passes if it ends by itself with status 0, if no fault cost more updates than one interval, and if its weights are
those of the undisturbed run. Writes chaos.{md,json} to benchmarks/results/. Exit status: 0 if all pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flextrain.core.base.events import read_events
from flextrain.core.checkpoint import export_weights

JOB = Path(__file__).with_name("chaos_job.py")
RESULTS = Path(__file__).parent / "results"
KINDS = ("kill_one", "kill_all", "stop_one", "term_one", "disk_full", "slow_storage")
STRATEGIES = ("ddp", "fsdp", "zero2")
PROCESSES = 2
INTERVAL = 10
SECONDS_PER_UPDATE = 0.02
STALL_S = 4.0
SHUTDOWN_S = 10
"""Seconds after which torchrun's agent kills what does not end: a stopped process never does."""
PATIENCE_S = 240.0


class StuckError(Exception):
    """The run did not do what it should within PATIENCE_S, or ended before its time."""


class Training:
    """A run under `flextrain run`, and what it has recorded.

    Args:
        strategy: a key of chaos_job.STRATEGIES.
        work_dir: its work directory.
        record: an empty folder for its record.
        iterations: length of the training.
        max_restarts: of `flextrain run`.
        stall_s: of the watchdog; 0: its default.
    """

    def __init__(
        self, strategy: str, work_dir: Path, record: Path, iterations: int, max_restarts: int, stall_s: float
    ) -> None:
        self.work_dir, self.record = work_dir, record
        self.output = (record / "output").open("wb")
        job = [JOB, strategy, work_dir, record, iterations, INTERVAL, SECONDS_PER_UPDATE, stall_s]
        command = [
            sys.executable,
            "-m",
            "flextrain",
            "run",
            "--nproc-per-node",
            PROCESSES,
            "--max-restarts",
            max_restarts,
        ]
        self.process = subprocess.Popen(
            [str(word) for word in (*command, *job)],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)},  # older torch has no such option
        )

    def lines(self) -> list[tuple[str, int]]:
        """The record: ("start", iteration) and ("done", iteration)."""
        path = self.record / "updates"
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(kind, int(number)) for kind, number in words]

    def starts(self) -> int:
        """How often training has begun."""
        return sum(kind == "start" for kind, _ in self.lines())

    def done(self) -> int:
        """Updates done since the last start, and 0 before the first of them."""
        lines = self.lines()
        return lines[-1][1] if lines and lines[-1][0] == "done" else 0

    def pids(self) -> list[int]:
        """The process of each rank."""
        return [int((self.record / "pids" / str(rank)).read_text()) for rank in range(PROCESSES)]

    def wait(self, what: str, until: Callable[[], bool]) -> None:
        """Wait until something is so.

        Raises:
            StuckError: it did not become so, or the run has ended.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            if self.process.poll() is not None:
                raise StuckError(f"the run ended with status {self.process.returncode} while it should {what}")
            if time.monotonic() > deadline:
                raise StuckError(f"the run did not {what} within {PATIENCE_S:g} s")
            time.sleep(0.002)

    def finish(self) -> int:
        """Wait for the end; return the exit status."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise StuckError(f"the run did not end within {PATIENCE_S:g} s") from None

    def end(self) -> None:
        """End everything that is left; the agent ends its processes, which have sessions of their own."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(60)
        if self.process.poll() is None:
            self.process.kill()
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()


# Faults. Each returns when training goes on.


def _send(training: Training, number: signal.Signals, ranks: list[int]) -> None:
    before, pids = training.starts(), training.pids()
    for rank in ranks:
        os.kill(pids[rank], number)
    training.wait(f"start again after {number.name}", lambda: training.starts() > before)


def kill_one(training: Training, draw: random.Random) -> None:
    _send(training, signal.SIGKILL, [draw.randrange(PROCESSES)])


def kill_all(training: Training, draw: random.Random) -> None:
    _send(training, signal.SIGKILL, list(range(PROCESSES)))


def stop_one(training: Training, draw: random.Random) -> None:
    _send(training, signal.SIGSTOP, [draw.randrange(PROCESSES)])


def term_one(training: Training, draw: random.Random) -> None:
    _send(training, signal.SIGTERM, [draw.randrange(PROCESSES)])


def disk_full(training: Training, draw: random.Random) -> None:
    filler, began = training.work_dir / "filler", training.done()
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 * 1024))
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0")
    training.wait("go on with a full disk", lambda: training.done() >= began + INTERVAL * 3 // 2)
    filler.unlink()
    training.wait("save again", lambda: training.done() >= began + INTERVAL * 5 // 2 + 1)


def slow_storage(training: Training, draw: random.Random) -> None:
    flag, began = training.record / "slow", training.done()
    flag.touch()
    victim, after_s = draw.randrange(PROCESSES), draw.uniform(0, 2.0)
    training.wait("come to a save", lambda: training.done() >= (began // INTERVAL + 1) * INTERVAL)
    time.sleep(after_s)  # in the middle of the save, mostly
    try:
        _send(training, signal.SIGKILL, [victim])
    finally:
        flag.unlink()


FAULTS: dict[str, Callable[[Training, random.Random], None]] = {
    function.__name__: function for function in (kill_one, kill_all, stop_one, term_one, disk_full, slow_storage)
}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system there; tell whether that worked."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True
    )  # fails without root
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def weights(work_dir: Path, iterations: int, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint."""
    (file,) = export_weights(work_dir / f"iter_{iterations}", folder / "weights.safetensors")
    return load_file(file)


def repeated(lines: list[tuple[str, int]]) -> list[int]:
    """For every restart, how many updates were done a second time."""
    found, last = [], None
    for kind, number in lines:
        if kind == "start" and last is not None:
            found.append(max(0, last - number))
        last = number
    return found


def disturb(strategy: str, kinds: list[str], faults: int, seed: int) -> dict[str, Any]:
    """Train undisturbed and disturbed, and compare."""
    iterations = INTERVAL * 3 * (faults + 1)
    draw = random.Random(f"{seed} {strategy}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, small_disk(Path(name) / "disk") as is_mounted:
        folder = Path(name)
        if not is_mounted:
            kinds = [kind for kind in kinds if kind != "disk_full"]
        (folder / "calm").mkdir()
        calm = Training(strategy, folder / "calm" / "work", folder / "calm", iterations, 0, 0.0)
        try:
            if (status := calm.finish()) != 0:
                raise SystemExit((folder / "calm" / "output").read_text()[-3000:])
        finally:
            calm.end()
        expected = weights(calm.work_dir, iterations, calm.record)

        record = folder / "record"
        record.mkdir()
        sequence = [draw.choice(kinds) for _ in range(faults)]
        came, problem, began = list[str](), "", time.monotonic()
        training = Training(
            strategy, folder / "disk" / "work", record, iterations, faults + 5, STALL_S * ("stop_one" in kinds)
        )
        try:
            for kind in sequence:
                training.wait("make an update", lambda: training.done() > 0)
                target = training.done() + draw.randrange(1, INTERVAL * 3 // 2)
                training.wait("train", lambda target=target: training.done() >= target)  # type: ignore[misc]
                print(f"{strategy}: {kind} after update {training.done()}", flush=True)
                came.append(kind)
                FAULTS[kind](training, draw)
            status = training.finish()
        except StuckError as error:
            status, problem = training.process.poll() or -1, str(error)
        finally:
            training.end()
        lines, events = training.lines(), read_events(training.work_dir) if training.work_dir.exists() else []
        again = repeated(lines)
        found: dict[str, Any] = dict(
            strategy=strategy,
            seed=seed,
            faults=len(came),
            kinds=dict(Counter(came)),
            sequence=came,
            iterations=iterations,
            status=status,
            restarts=training.starts() - 1,
            repeated=again,
            most_repeated=max(again, default=0),
            seconds=round(time.monotonic() - began, 1),
            events=dict(Counter(event["event"] for event in events)),
            left_out=[] if is_mounted else ["disk_full: no tmpfs could be mounted"],
        )
        if status == 0:
            actual = weights(training.work_dir, iterations, record)
            differences = [(actual[key] - expected[key]).abs().max().item() for key in expected]
            found["largest_difference"] = max(differences)
            found["is_equal"] = all(torch.equal(actual[key], expected[key]) for key in expected)
            if max(differences) > 1e-6:
                problem = "the weights differ"
            if found["most_repeated"] > INTERVAL:
                problem = f"{found['most_repeated']} updates were repeated after one fault"
        if problem or status:
            found["problem"] = problem or f"status {status}"
            found["output"] = (record / "output").read_text(errors="replace")[-6000:]
        return found


def table(rows: list[dict[str, Any]]) -> str:
    """The report as Markdown."""
    total = sum(row["faults"] for row in rows)
    passed = sum("problem" not in row for row in rows)
    strategies = [name for name in STRATEGIES if any(row["strategy"] == name for row in rows)]
    counts = {name: Counter[str]() for name in strategies}
    for row in rows:
        counts[row["strategy"]].update(row["kinds"])
    again = [number for row in rows for number in row["repeated"]]
    # A full disk is survived without a restart, every other fault takes one.
    unexplained = sum(row["restarts"] - row["faults"] + row["kinds"].get("disk_full", 0) for row in rows)
    lines = [
        "# Faults under `flextrain run`",
        "",
        f"Written by `benchmarks/chaos.py`, which explains the faults: {total} in {len(rows)} runs of two processes, {passed} of "
        f"which passed. A checkpoint every {INTERVAL} updates. torch {torch.__version__}, {os.cpu_count()} CPUs, "
        f"{platform.system()}.",
        "",
        f"{len(again)} restarts, of which {unexplained} without a fault. A restart repeated {sum(again) / max(1, len(again)):.1f} "
        f"updates in the mean and {max(again, default=0)} at most.",
        "",
        f"| fault | {' | '.join(strategies)} | all |",
        f"| --- | {'---: | ' * len(strategies)}---: |",
        *(
            f"| {kind} | {' | '.join(str(counts[name][kind]) for name in strategies)} | "
            f"{sum(counts[name][kind] for name in strategies)} |"
            for kind in KINDS
        ),
        f"| all | {' | '.join(str(counts[name].total()) for name in strategies)} | {total} |",
        "",
        "| strategy | seed | faults | restarts | most updates repeated after one | weights | seconds | ended |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for row in rows:
        equal = (
            "equal to the bit"
            if row.get("is_equal")
            else f"differ by {row.get('largest_difference', float('nan')):.1e}"
        )
        lines.append(
            f"| {row['strategy']} | {row['seed']} | {row['faults']} | {row['restarts']} | {row['most_repeated']} | "
            f"{equal if row['status'] == 0 else '-'} | {row['seconds']:.0f} | {row.get('problem', 'by itself, status 0')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="faults per run")
    parser.add_argument("--runs", type=int, default=1, help="runs per strategy, with seeds one after the other")
    parser.add_argument("--only", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="add to the runs that are in the results already")
    arguments = parser.parse_args()
    file = arguments.out / "chaos.json"
    rows = json.loads(file.read_text())["runs"] if arguments.add and file.exists() else []
    new = []
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        for strategy in arguments.only:
            new.append(disturb(strategy, list(arguments.kinds), arguments.faults, seed))
            print(json.dumps({key: value for key, value in new[-1].items() if key != "output"}), flush=True)
            if "problem" in new[-1]:
                print(new[-1]["output"], flush=True)
            file.write_text(json.dumps({"interval": INTERVAL, "runs": rows + new}, indent=1) + "\n")
            (arguments.out / "chaos.md").write_text(table(rows + new))
    return int(any("problem" in row for row in new))


if __name__ == "__main__":
    sys.exit(main())
