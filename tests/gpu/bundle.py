"""Collect the wheels that a machine without network may lack: what flextrain and its tests need, but for torch and NumPy.

    python tests/gpu/bundle.py FOLDER

For Python 3.10 to 3.13 on Linux, x86-64, with flextrain's own wheel: ``pip install --no-index --find-links FOLDER flextrain``
works there too. ``run.py --wheels FOLDER`` needs no pip: it unpacks what its interpreter lacks, and nothing else.
"""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LARGEST_MIB = 40
LEFT_OUT = {"torch", "numpy"}  # there, or nothing can be done
PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
LINUX = dict(os_name="posix", sys_platform="linux", platform_system="Linux", platform_machine="x86_64", extra="")


@dataclass(frozen=True)
class Wheel:
    """A file, and what its name and its metadata say; the last four are of ``packaging``'s classes."""

    path: Path
    name: str
    requires: tuple[str, ...]
    version: Any
    tags: Any
    pythons: Any


def needed() -> list[str]:
    """What flextrain and its tests require, as pyproject.toml says it."""
    text = (ROOT / "pyproject.toml").read_text()
    dependencies = text.partition("\ndependencies = [\n")[2].partition("\n]")[0]
    pytest = re.findall(r'^minversion = "(.*)"', text, re.MULTILINE)
    return [*re.findall(r'^ *"([^"]+)"', dependencies, re.MULTILINE), f"pytest>={pytest[0]}"]


def read(folder: Path) -> list[Wheel]:
    """The wheels in a folder, the newest first."""
    from packaging.specifiers import SpecifierSet
    from packaging.utils import parse_wheel_filename

    found = []
    for path in folder.glob("*.whl"):
        name, version, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (said,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(said))
        requires = tuple(metadata.get_all("Requires-Dist") or ())
        found.append(Wheel(path, name, requires, version, tags, SpecifierSet(metadata["Requires-Python"] or "")))
    return sorted(found, key=lambda wheel: wheel.version, reverse=True)


def choose(
    wheels: Collection[Wheel], python: tuple[int, int], tags: Collection[Any], has: Callable[[Any], bool]
) -> tuple[dict[str, Wheel], list[str]]:
    """Wheels for what is needed and not there, with what they need in turn; and the requirements that none of them meets.

    Args:
        wheels: to choose from, the newest first.
        python: the interpreter's version.
        tags: of ``packaging.tags``, those that it takes.
        has: whether a Requirement is met without wheels.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    version = f"{python[0]}.{python[1]}"
    machine = {**LINUX, "python_version": version, "python_full_version": f"{version}.0"}
    chosen: dict[str, Wheel] = {}
    lacking: list[str] = []
    wanted = [Requirement(text) for text in needed()]
    for one in wanted:  # grows as it goes
        name = canonicalize_name(one.name)
        if name in chosen or (one.marker is not None and not one.marker.evaluate(machine)) or has(one):
            continue
        fitting = (
            wheel
            for wheel in wheels
            if wheel.name == name and wheel.version in one.specifier and wheel.pythons.contains(f"{version}.0")
            and not wheel.tags.isdisjoint(tags)
        )  # fmt: skip
        wheel = next(fitting, None)
        if wheel is None:
            lacking.append(f"{one.name}{one.specifier}")
        else:
            chosen[name] = wheel
            wanted += map(Requirement, wheel.requires)
    return chosen, lacking


def is_installed(requirement: Any) -> bool:
    """Whether this interpreter has what a Requirement asks for."""
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(requirement.specifier.contains(found, prereleases=True))


def unpack(folder: Path | None, into: Path) -> list[str]:
    """Unpack the wheels of what this interpreter lacks; return what is still lacking then."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    if importlib.util.find_spec("packaging") is None:  # a wheel of Python alone can be imported as it is
        own = sorted(folder.glob("packaging-*.whl")) if folder else []
        if not own:
            return ["packaging"]
        sys.path.append(str(own[-1]))
    from packaging.tags import sys_tags

    chosen, lacking = choose(read(folder) if folder else [], sys.version_info[:2], set(sys_tags()), is_installed)
    for wheel in chosen.values():
        with zipfile.ZipFile(wheel.path) as archive:
            archive.extractall(into)
    return lacking


def collect(folder: Path) -> None:
    """Download wheels for every version of Python, until none of them lacks anything."""
    from packaging.tags import compatible_tags, cpython_tags

    for python in PYTHONS:
        version = f"{python[0]}.{python[1]}"
        tags = {*cpython_tags(python, platforms=PLATFORMS), *compatible_tags(python, platforms=PLATFORMS)}
        tried: list[str] = []
        while lacking := choose(read(folder), python, tags, lambda one: one.name in LEFT_OUT)[1]:
            if lacking == tried:
                raise SystemExit(f"Python {version}: no wheel meets {', '.join(lacking)}")
            platforms = [f"--platform={name}" for name in PLATFORMS]
            pip("download", "--no-deps", "--only-binary=:all:", f"--python-version={version}", *platforms,
                "--dest", str(folder), *lacking)  # fmt: skip
            tried = lacking


def build(folder: Path) -> None:
    """Build flextrain's own wheel, from a copy: what was built before in this folder must not come into it."""
    for old in folder.glob("flextrain-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as copy:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        for name in ("core", "flextrain", "optim", "runner", "strategies"):
            shutil.copytree(ROOT / name, Path(copy, name), ignore=shutil.ignore_patterns("__pycache__"))
        pip("wheel", "--no-deps", "--wheel-dir", str(folder), copy)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python tests/gpu/bundle.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build(folder)
    collect(folder)
    wheels = sorted(folder.glob("*.whl"))
    mib = sum(path.stat().st_size for path in wheels) / 2**20
    print(*(path.name for path in wheels), f"{len(wheels)} wheels, {mib:.1f} MiB (at most {LARGEST_MIB})", sep="\n")
    return 0 if mib <= LARGEST_MIB else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
