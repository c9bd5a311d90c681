"""What needs an accelerator, in one command, with an interpreter that has torch already: ``make test-gpu PYTHON=...``.

    python tests/gpu/run.py [step ...] [pytest's arguments]

Installs nothing and needs no network: the package is found through links in build/gpu. The steps go from the most basic to
the most special, each in a process of its own under a time limit, so that a crash or a hang ends one step. The end is a
table with what passed, failed and was skipped, and the machine's name; all of it is kept in build/gpu too.
FLEXTRAIN_TEST_DEVICE=cpu runs the tests' logic where there is no accelerator.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "gpu"
NEEDED = ("torch", "pytest", "pydantic", "rich", "safetensors", "xxhash", "numpy", "packaging")
TOTAL_S = 600.0  # a verdict in ten minutes
# Name, what it runs, seconds that it may take.
STEPS: dict[str, tuple[str, float]] = {
    "device": ("tests/gpu/test_device.py", 90.0),
    "training": ("tests/gpu/test_training.py", 120.0),
    "precision": ("tests/gpu/test_precision.py", 120.0),
    "attention": ("tests/gpu/test_attention.py", 90.0),
    "saves": ("tests/gpu/test_saves.py", 90.0),
    "waits": ("tests/gpu/test_waits.py", 90.0),
    "strategies": ("tests/gpu/test_strategies.py", 200.0),
    "compile": ("tests/gpu/test_compile.py", 200.0),
    "benchmark": ("benchmarks/gpu.py", 120.0),
}
# What the machine is, in one line; torch alone is asked.
MACHINE = """
import platform, torch
found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
names = ["no accelerator"]
if found is not None:
    module = torch.get_device_module(found)
    names = [module.get_device_name(i) if hasattr(module, "get_device_name") else found.type for i in range(module.device_count())]
print(f"{len(names)} x {names[0]}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
"""
_LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)")
_OPEN = re.compile(r"^(\S+::\S.*?) ?$")


@dataclass
class Outcome:
    """How a step went."""

    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    is_good: bool = True


def missing() -> list[str]:
    """The packages that this interpreter lacks."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def link_package() -> None:
    """Make build/gpu/flextrain look as the installed package does, whose parts are folders at the root."""
    package = BUILD / "flextrain"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[tool.setuptools.package-dir]")[2].partition("\n[")[0]
    for name, folder in re.findall(r'^"([\w.]+)" = "(\w+)"$', table, re.MULTILINE):
        inner = name.partition(".")[2]
        if inner:
            (package / inner).symlink_to(ROOT / folder)
        else:
            for part in (ROOT / folder).iterdir():
                (package / part.name).symlink_to(part)


def environment() -> dict[str, str]:
    """The variables of a step."""
    path = os.pathsep.join(filter(None, [str(BUILD), os.environ.get("PYTHONPATH")]))
    # Set before CUDA begins, so that what is repeated is repeated bit for bit.
    return {**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}


def run(command: list[str], log: Path, limit_s: float) -> int | None:
    """Run a command with its output in a file; None: it had to be ended."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def read(text: str) -> Outcome:
    """What pytest has said of each test, as far as it came."""
    outcome, under_way = Outcome(), ""
    for line in text.splitlines():
        if found := _LINE.match(line):
            outcome.counts[found[2].lower()] = outcome.counts.get(found[2].lower(), 0) + 1
            under_way = ""
        elif line.startswith("="):  # the tests are over, or have not begun
            under_way = ""
        elif found := _OPEN.match(line):
            under_way = found[1]
        elif line.startswith(("FAILED ", "ERROR tests", "SKIPPED [")):
            outcome.notes.append(line[:300])
    if under_way:
        outcome.notes.append(f"ended in {under_way}")
    return outcome


def make(name: str, arguments: list[str], left_s: float) -> Outcome:
    """One step."""
    target, limit_s = STEPS[name]
    limit_s = min(limit_s, left_s)
    log = BUILD / f"{name}.log"
    begin = time.monotonic()
    if limit_s < 10:
        return Outcome(notes=["not begun, the ten minutes are over"], is_good=False)
    if target.endswith("gpu.py"):
        tried = os.environ.get("FLEXTRAIN_TEST_DEVICE")
        quick = ["--device", tried, "--out", str(BUILD), "--rounds", "1", "--iterations", "3"] if tried else []
        code = run([sys.executable, target, *quick], log, limit_s)
        outcome = Outcome(notes=log.read_text().splitlines()[-12:])
    else:
        command = [sys.executable, "-m", "pytest", target, "-v", "--tb=short", "-rfEs", "-p", "no:cacheprovider"]
        code = run([*command, *arguments], log, limit_s)
        outcome = read(log.read_text(errors="replace"))
    outcome.seconds, outcome.is_good = time.monotonic() - begin, code == 0
    if code is None:
        outcome.notes.append(f"ended after {limit_s:.0f} s, its limit")
    elif code < 0:
        outcome.notes.append(f"died of signal {-code}")
    elif code > 1:
        outcome.notes.append(f"exit code {code}, see {log.relative_to(ROOT)}")
    return outcome


def main(arguments: list[str]) -> int:
    if lacking := missing():
        print(
            f"make test-gpu: {sys.executable} lacks {', '.join(lacking)}; install them, or give another PYTHON, or a "
            "folder that has them in PYTHONPATH",
            file=sys.stderr,
        )
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    link_package()
    deadline = time.monotonic() + TOTAL_S
    code = run([sys.executable, "-c", MACHINE], BUILD / "machine.log", 100.0)
    machine = (BUILD / "machine.log").read_text().strip().splitlines()[-1:] or [f"exit code {code}"]
    device = os.environ.get("FLEXTRAIN_TEST_DEVICE", "the accelerator")
    lines = [f"{machine[0]}; tested: {device}"]
    print(lines[0], flush=True)
    chosen = [name for name in STEPS if name in arguments] or list(STEPS)
    arguments = [argument for argument in arguments if argument not in STEPS]
    outcomes = {}
    for name in chosen:
        print(f"{name} ...", end=" ", flush=True)
        outcomes[name] = outcome = make(name, arguments, deadline - time.monotonic())
        print(f"{'ok' if outcome.is_good else 'FAILED'} in {outcome.seconds:.0f} s", flush=True)
    for name, outcome in outcomes.items():
        lines += ["", f"{name}:", *(f"  {note}" for note in outcome.notes)] if outcome.notes else []
    kinds = ("passed", "failed", "error", "skipped")
    lines += ["", f"{'step':<12}{''.join(f'{kind:>9}' for kind in kinds)}{'seconds':>9}  verdict"]
    for name, outcome in outcomes.items():
        counts = "".join(f"{outcome.counts.get(kind, 0):>9}" for kind in kinds)
        lines.append(f"{name:<12}{counts}{outcome.seconds:>9.0f}  {'ok' if outcome.is_good else 'FAILED'}")
    lines.append(machine[0])
    (BUILD / "report.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[1:]))
    return 0 if all(outcome.is_good for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
