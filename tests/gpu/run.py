"""What needs an accelerator, in one command, with an interpreter that has torch already.

    python3 tests/gpu/run.py [--wheels FOLDER] [--steps NAME ...] [--seconds 600] [--report FILE] [pytest's arguments]
    python3 tests/gpu/run.py --record FILE

Needs no network and installs nothing: flextrain is found through links in build/gpu, and what the interpreter lacks is
unpacked there from wheels that ``bundle.py`` has collected. The steps go from the most basic to the most special, each in a
process of its own under a time limit, so that a crash or a hang ends one step. The report is whole after every test, also if
this process is killed then. FLEXTRAIN_TEST_DEVICE=cpu runs the tests' logic where there is no accelerator. ``--record``
puts a report into benchmarks/results and its table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import bundle

ROOT = bundle.ROOT
BUILD = ROOT / "build" / "gpu"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
TOTAL_S = 600.0  # a verdict in ten minutes
MARGIN_S = 3.0  # to end what runs
# Name, what it runs, seconds that it may take.
STEPS: dict[str, tuple[str, float]] = {
    "device": ("tests/gpu/test_device.py", 90.0),
    "training": ("tests/gpu/test_training.py", 120.0),
    "saves": ("tests/gpu/test_saves.py", 90.0),
    "precision": ("tests/gpu/test_precision.py", 120.0),
    "waits": ("tests/gpu/test_waits.py", 90.0),
    "strategies": ("tests/gpu/test_strategies.py", 200.0),
    "attention": ("tests/gpu/test_attention.py", 90.0),
    "sharing": ("tests/gpu/test_sharing.py", 300.0),
    "mesh": ("tests/gpu/test_mesh.py", 180.0),
    "compile": ("tests/gpu/test_compile.py", 200.0),
    "benchmark": ("benchmarks/gpu.py", 120.0),
    "llama": ("benchmarks/llama.py", 400.0),
}
# What the machine is, in one line, and the type of its accelerator; torch alone is asked.
MACHINE = """
import json, platform, torch
found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
names = []
if found is not None:
    module = torch.get_device_module(found)
    names = [module.get_device_name(i) if hasattr(module, "get_device_name") else found.type for i in range(module.device_count())]
with_nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if found is not None and found.type == "cuda" else ""
print(json.dumps([f"{len(names)} x {names[0]}" if names else platform.machine(),
    f"torch {torch.__version__}{with_nccl}, Python {platform.python_version()}, {platform.platform()}", found and found.type]))
"""
KINDS = ("passed", "failed", "skipped")


# "python -m pytest" would look here first, where the folder flextrain is a part of the package.
PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main())"


@dataclass
class Step:
    """How a step goes; ``text`` is what its tests said, ``tests`` has outcome and seconds of each."""

    name: str
    count: int = 0
    tests: dict[str, tuple[str, float]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    under_way: str = ""
    seconds: float = 0.0
    verdict: str = "under way"

    def take(self, line: str) -> str:
        """Note an event of ``conftest.py``, or a line of a script; return what is printed of it."""
        if STEPS[self.name][0].startswith("benchmarks/"):
            self.notes.append(line)
            return line
        event: dict[str, Any] = json.loads(line)
        self.count = event.get("count", self.count)
        self.under_way = event.get("begins", self.under_way)
        if "test" not in event:
            return ""
        name = event["test"].partition("::")[2]
        if event["outcome"] == "skipped":  # in a line with the reason
            name, event["text"] = f"{name}: {event['text']}", ""
        before, seconds = self.tests.get(name, ("passed", 0.0))
        outcome = event["outcome"] if before == "passed" else before
        self.tests[name] = (outcome, seconds + event["seconds"])
        if event["text"]:
            self.text[name] = event["text"]
        return f"{outcome:<7} {event['seconds']:6.1f} s  {name}"

    def row(self) -> str:
        counts = Counter(outcome for outcome, _ in self.tests.values())
        left = f", {self.count - len(self.tests)} of {self.count} not run" if self.count > len(self.tests) else ""
        cells = [self.name, *(str(counts[kind]) for kind in KINDS), f"{self.seconds:.0f}", f"{self.verdict}{left}"]
        return f"| {' | '.join(cells)} |"


@dataclass
class Report:
    """What is known so far, in a file that is replaced as a whole whenever more is."""

    path: Path
    title: str
    machine: str
    steps: list[Step] = field(default_factory=list)
    head: str = "| step | passed | failed | skipped | seconds | |\n| --- | ---: | ---: | ---: | ---: | --- |"

    def write(self) -> None:
        lines = [f"# {self.title}", "", self.machine, "", self.head, *(step.row() for step in self.steps)]
        for step in self.steps:
            lines += ["", f"## {step.name}", "", *step.notes]
            if step.under_way and step.verdict == "under way":
                lines += [f"- under way: {step.under_way}"]
            lines += [f"- {outcome}, {seconds:.1f} s: `{name}`" for name, (outcome, seconds) in step.tests.items()]
            lines += [f"\n`{name}`\n\n~~~\n{text}\n~~~" for name, text in step.text.items()]
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text("\n".join(lines) + "\n")
        part.replace(self.path)


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
    path = os.pathsep.join(filter(None, [str(BUILD), str(BUILD / "wheels"), os.environ.get("PYTHONPATH")]))
    # cuBLAS's workspace is set before CUDA begins, so that what is repeated is repeated bit for bit. Plugins of pytest
    # that happen to be on the machine have no part in this.
    more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **more, "PYTHONPATH": path}


def _ends_with_parent() -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(
    command: list[str], log: Path, limit_s: float, events: Path | None = None, take: Callable[[str], None] = print
) -> int | None:
    """Run a command with its output in a file, and take each line of it, or of ``events``; None: it had to be ended."""
    events = events or log
    events.write_text("")
    deadline = time.monotonic() + limit_s
    with log.open("w") as file, events.open() as lines:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT, preexec_fn=_ends_with_parent
        )
        rest = ""
        try:
            while True:
                code = process.poll()
                *whole, rest = (rest + lines.read()).split("\n")
                for line in whole:
                    take(line)
                if code is not None or time.monotonic() > deadline:
                    return code
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def make(step: Step, report: Report, arguments: list[str], left_s: float) -> None:
    """One step, in the report as it goes."""
    target, limit_s = STEPS[step.name]
    limit_s, log, begin = min(limit_s, left_s), BUILD / f"{step.name}.log", time.monotonic()

    def take(line: str) -> None:
        if said := step.take(line):
            print(f"  {said}", flush=True)
        step.seconds = time.monotonic() - begin
        report.write()

    if limit_s < 10:
        step.verdict = "not begun, the time is over"
        return
    events = None
    if not target.startswith("benchmarks/"):
        events = log.with_suffix(".events")
        os.environ["FLEXTRAIN_TEST_EVENTS"] = str(events)
        command = [sys.executable, "-c", PYTEST, target, "-q", "--tb=short", "-p", "no:cacheprovider", *arguments]
    else:
        tried = ["--rounds", "1", "--iterations", "3"] if os.environ["FLEXTRAIN_TEST_DEVICE"] == "cpu" else []
        command = [sys.executable, target, "--out", str(report.path.parent), *tried]
    code = run(command, log, limit_s, events, take)
    step.seconds = time.monotonic() - begin
    step.verdict = {0: "ok", 1: "FAILED"}.get(code, f"FAILED, exit code {code}") if code is not None else ""
    if code is None:
        step.verdict = f"FAILED, ended after {limit_s:.0f} s, its limit"
    if step.under_way:
        step.verdict += f", in {step.under_way.partition('::')[2]}"
    if code not in (0, None) and not step.text:
        step.text["output"] = "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def found_machine(limit_s: float) -> tuple[str, str, str | None]:
    """The machine's name, what else is said of it, and the type of its accelerator."""
    lines: list[str] = []
    code = run([sys.executable, "-c", MACHINE], BUILD / "machine.log", limit_s, take=lines.append)
    if code != 0:
        return "unknown", f"torch: exit code {code}, {' '.join(lines[-1:])}", None
    name, more, kind = json.loads(lines[-1])
    return name, more, kind


def record(path: Path) -> None:
    """Copy a report and the figures beside it to the results, and put the tables of all reports there on the page."""
    text = path.read_text()
    name = "tests_" + re.sub(r"\W+", "-", text.splitlines()[0].partition(" on ")[2]).strip("-").lower()
    (RESULTS / f"{name}.md").write_text(text)
    for figures in (*path.parent.glob("gpu_*.*"), *path.parent.glob("llama_*.*")):
        shutil.copy(figures, RESULTS)
    shown = []
    for each in sorted(RESULTS.glob("tests_*.md")):
        title, _, machine, _, *rest = each.read_text().splitlines()
        table = "\n".join(rest[: rest.index("")] if "" in rest else rest)
        shown.append(
            f"{title.partition(' on ')[2]}, {machine} ([report](../benchmarks/results/{each.name})).\n\n{table}\n"
        )
    begin, end = (f"<!-- accelerators {word} -->" for word in ("begin", "end"))
    before, _, tail = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{before}{begin}\n\n{chr(10).join(shown)}\n{end}{tail.partition(end)[2]}")
    print(f"{name}.md is in benchmarks/results, its table in docs/benchmarks.md")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=__doc__.split("\n\n")[1].strip())
    parser.add_argument("--wheels", type=Path, help="a folder that bundle.py has filled")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME", help=", ".join(STEPS))
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="after which this ends, whatever runs")
    parser.add_argument("--report", type=Path, default=BUILD / "report.md", help="default: build/gpu/report.md")
    parser.add_argument("--record", type=Path, metavar="FILE", help="a report to keep; nothing is tested")
    given, for_pytest = parser.parse_known_args(arguments)
    if given.record:
        record(given.record)
        return 0
    deadline = time.monotonic() + given.seconds - MARGIN_S
    BUILD.mkdir(parents=True, exist_ok=True)
    if lacking := bundle.unpack(given.wheels, BUILD / "wheels"):
        print(
            f"{sys.executable} lacks {', '.join(lacking)}; give --wheels with a folder that tests/gpu/bundle.py has "
            "filled, or another interpreter",
            file=sys.stderr,
        )
        return 2
    link_package()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the step
    name, more, kind = found_machine(min(100.0, given.seconds))
    tested = os.environ.setdefault("FLEXTRAIN_TEST_DEVICE", kind or "")
    if not tested:
        print(f"{name}, {more}: no accelerator here; FLEXTRAIN_TEST_DEVICE=cpu runs the tests' logic", file=sys.stderr)
        return 2
    report = Report(given.report.resolve(), f"Tests on {tested}: {name}", more)
    report.path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{report.title}, {more}; the report is {report.path}", flush=True)
    for chosen in [each for each in STEPS if each in given.steps]:
        step = Step(chosen)
        report.steps.append(step)
        print(chosen, flush=True)
        try:
            make(step, report, for_pytest, deadline - time.monotonic())
        finally:
            report.write()
    print(report.head, *(step.row() for step in report.steps), sep="\n")
    return 0 if all(step.verdict == "ok" for step in report.steps) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
