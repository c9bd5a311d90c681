"""Run MMEngine's own tests with flextrain in MMEngine's place, and compare with expected.txt.

The tests come from the source distribution of onedl-mmengine, a fork that goes on with MMEngine's code and, unlike MMEngine's own
packages, has the tests in it. rules.py translates them; bridge.py gives them flextrain's names.

    python tests/mmengine/upstream/run.py             # all, and compare
    python tests/mmengine/upstream/run.py test_hooks  # some: arguments are those of pytest
    python tests/mmengine/upstream/run.py --write     # write the results into expected.txt; new ones need a reason there
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import rules  # noqa: E402

PACKAGE = "onedl-mmengine==0.10.12"
HELPERS = ["parameterized==0.9.0"]
"""What the tests import besides MMEngine."""
AREAS = {
    "optimizers": "test_optim/test_optimizer/*.py",
    "schedulers": "test_optim/test_scheduler/*.py",
    "hooks": "test_hooks/*.py",
    "evaluator": "test_evaluator/*.py",
    "message hub": "test_logging/test_[mh]*.py",
    "samplers": "test_dataset/test_sampler.py",
    "log processor": "test_runner/test_log_processor.py",
    "checkpoints": "test_runner/test_checkpoint.py",
    "runner and loops": "test_runner/test_[apr]*.py",
}
"""The files of each part; test_logger.py is about MMLogger, for which there is Python's logging."""
EXPECTED = HERE / "expected.txt"
KINDS = ("differs", "refused", "instead", "internals", "newer", "needs")
"""Kinds of reasons in expected.txt; docs/mmengine_keywords.md explains them."""
NOT_AVAILABLE = 77
"""The exit status if the sources cannot be downloaded."""


class Result(NamedTuple):
    """What became of a test, and why it did not pass."""

    outcome: str
    why: str


class NotAvailable(Exception):
    """The sources cannot be downloaded here."""


def fetch(folder: Path) -> Path:
    """The folder of the sources, downloaded once.

    Raises:
        NotAvailable: pip cannot get them.
    """
    found = folder / PACKAGE.replace("==", "-").replace("-", "_", 1)
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        download = [*pip, "download", "--no-deps", "--no-binary", ":all:", "-d", str(folder), PACKAGE]
        helpers = [*pip, "install", "--no-deps", "--target", str(folder / "helpers"), *HELPERS]
        for command in (download, helpers):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise NotAvailable(done.stderr.strip().splitlines()[-1])
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        (folder / "complete").touch()
    return found


def translate(sources: Path, to: Path) -> None:
    """Write the translated tests; a rule that finds nothing is an error."""
    shutil.rmtree(to, ignore_errors=True)
    files = [
        (path, path.relative_to(sources / "tests"))
        for area in AREAS.values()
        for path in (sources / "tests").glob(area)
    ]
    files.append((sources / "mmengine" / "testing" / rules.CASE, Path(rules.CASE)))
    used: set[rules.Rule] = set()
    for path, name in files:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(rules.translate(name.name, path.read_text(), used))
    unused = [rule.old for rule in rules.RULES if rule not in used]
    assert not unused, f"rules that find nothing: {unused}"


def run(tests: Path, helpers: Path, arguments: list[str]) -> dict[str, Result]:
    """The result of every test by its name; a test whose teardown fails has failed."""
    log = tests / "results.jsonl"
    path = os.pathsep.join([str(HERE), str(helpers)])
    environment = {**os.environ, "PYTHONPATH": path, "FLEXTRAIN_UPSTREAM": str(tests), "OMP_NUM_THREADS": "1"}
    options = [
        "-q",
        "-p",
        "bridge",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        "--tb=short",
        "-c",
        os.devnull,
    ]
    command = [sys.executable, "-m", "pytest", *options, "--import-mode=importlib", "--rootdir", str(tests), *arguments]
    with (tests / "output.txt").open("w") as output:
        code = subprocess.run(command, cwd=tests, env=environment, stdout=output, stderr=output).returncode
    assert code in (0, 1), f"pytest ended with status {code}, see {tests / 'output.txt'}"
    results: dict[str, Result] = {}
    for line in log.read_text().splitlines():
        name, outcome, why = json.loads(line)
        if name not in results or results[name].outcome == "passed":
            results[name] = Result(outcome, " ".join(why.split()))
    return results


def expected() -> dict[str, tuple[str, str]]:
    """Outcome and reason of every test that does not pass, by name."""
    found = {}
    for line in EXPECTED.read_text().splitlines():
        if line and not line.startswith("#"):
            name, outcome, reason = line.split(" ", 2)
            found[name] = (outcome, reason)
    return found


def differences(results: dict[str, Result], known: dict[str, tuple[str, str]]) -> list[str]:
    """One line for every test that has another result than expected."""
    lines = []
    for name, result in sorted(results.items()):
        outcome, _ = known.get(name, ("passed", ""))
        if result.outcome != outcome:
            lines.append(f"{name}: {result.outcome}, expected {outcome}; {result.why}")
    return lines


def area_of(name: str) -> str:
    """The part that a test belongs to."""
    file = Path(name.split("::")[0])
    return next(area for area, pattern in AREAS.items() if file.match(pattern))


def table(results: dict[str, Result], known: dict[str, tuple[str, str]]) -> str:
    """Rows of a Markdown table: per part, how many there are, pass, are skipped, and the reasons of the others."""
    lines = []
    for area in [*AREAS, "all"]:
        own = {name: result for name, result in results.items() if area in ("all", area_of(name))}
        if not own:
            continue
        reasons = Counter(
            known[name][1].split(":")[0] for name, r in own.items() if r.outcome != "passed" and name in known
        )
        passed = sum(result.outcome == "passed" for result in own.values())
        lines.append(
            f"| {area} | {len(own)} | {passed} | {', '.join(f'{why}: {n}' for why, n in reasons.most_common())} |"
        )
    return "\n".join(lines)


def write(results: dict[str, Result], known: dict[str, tuple[str, str]]) -> None:
    """Write the results into expected.txt; reasons, and the lines of tests that were not run, stay."""
    head = [line for line in EXPECTED.read_text().splitlines() if line.startswith("#")] if EXPECTED.exists() else []
    lines = [f"{name} {outcome} {reason}" for name, (outcome, reason) in known.items() if name not in results]
    for name, result in results.items():
        if result.outcome != "passed":
            outcome, reason = known.get(name, ("", ""))
            lines.append(f"{name} {result.outcome} {reason if outcome == result.outcome else '?: ' + result.why[:160]}")
    EXPECTED.write_text("\n".join([*head, *sorted(lines)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/upstream"), help="where sources and translated tests go"
    )
    parser.add_argument("--write", action="store_true", help="write the results into expected.txt")
    arguments, others = parser.parse_known_args()
    folder = arguments.folder.resolve()
    try:
        sources = fetch(folder / "sources")
    except NotAvailable as error:
        print(f"{PACKAGE} cannot be downloaded here: {error}")
        return NOT_AVAILABLE
    translate(sources, folder / "tests")
    results = run(folder / "tests", folder / "sources" / "helpers", others or ["."])
    known = expected() if EXPECTED.exists() else {}
    if arguments.write:
        write(results, known)
        known = expected()
    print(table(results, known))
    others_than = differences(results, known)
    if not others:
        others_than += [f"{name}: is not collected" for name in known if name not in results]
    print("\n".join(others_than) or "as expected")
    return 1 if others_than else 0


if __name__ == "__main__":
    sys.exit(main())
