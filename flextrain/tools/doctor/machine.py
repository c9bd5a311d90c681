"""Look at a machine: installed packages, what they say when they are imported, devices and drivers.

Nothing here imports torch: that may fail (an installed torch_npu without CANN makes it fail), and doctor has to say so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from ... import __all__ as PUBLIC_NAMES
from .package_probe import STRATEGIES, Facts, ask

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
TIMEOUT_S = 120.0  # a cold import on a busy machine
# With the oldest version that will do; tests/test_doctor.py holds them against pyproject.toml.
REQUIRED = {"torch": "2.6", "numpy": "1.24", "pydantic": "2", "safetensors": "0.4", "xxhash": "3"}
OPTIONAL = {"torch_npu": "2.6", "deepspeed": "0.17", "torchvision": "0", "torchmetrics": "1"}
OWN_DEVICES = ("cpu", "cuda", "npu", "xpu", "mps")
CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")


@dataclass(frozen=True)
class Machine:
    """Facts about a machine and its Python, without conclusions.

    Attributes:
        versions: of installed packages; None where a package is not installed.
        probes: by package, what it said when it was imported, or ``{"error": why}``; only for installed ones.
        strategies: by name, what a strategy declares, or ``{"error": why}`` where it cannot be loaded.
        autoload: whether torch imports the packages of devices by itself.
        torch_alone: what torch said with autoload off, where its import had failed.
        backends: packages of devices that torch imports by itself.
        torch_npu_wants: the torch that torch_npu's metadata ask for.
        torchvision_wants: the torch that torchvision's metadata ask for.
        cann: the version of CANN, or the folder where it was found; None where it was not.
        hardware: makers' names of devices that have a file in /dev, whatever torch sees: "nvidia", "davinci".
        plug_ins: types of devices that installed packages make known to flextrain.
    """

    versions: Mapping[str, str | None]
    probes: Mapping[str, Facts]
    strategies: Mapping[str, Facts] = field(default_factory=dict)
    autoload: bool = True
    torch_alone: Facts | None = None
    backends: tuple[str, ...] = ()
    torch_npu_wants: str | None = None
    torchvision_wants: str | None = None
    cann: str | None = None
    hardware: tuple[str, ...] = ()
    plug_ins: tuple[str, ...] = ()

    @property
    def torch(self) -> Facts:
        """What torch said, with autoload off where it fails otherwise."""
        return self.torch_alone or self.probes.get("torch", {"error": "not installed"})

    @property
    def devices(self) -> dict[str, list[str]]:
        """Accelerators that can be used, by type."""
        parts = (self.torch, self.probes.get("torch_npu", {}))
        return {kind: names for part in parts for kind, names in part.get("devices", {}).items() if names}

    @property
    def strange(self) -> list[str]:
        """Types of accelerators that torch finds and flextrain knows nothing of."""
        return [kind for kind in self.devices if kind not in (*OWN_DEVICES, *self.plug_ins)]


def look(variables: Mapping[str, str]) -> Machine:
    """Find out what is installed, and ask each package what it can do, in a process of its own.

    Args:
        variables: the environment variables to look at, which the processes get too.
    """
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    installed = [name for name in ("torch", "torch_npu", "deepspeed") if versions[name] is not None]
    without = {**variables, AUTOLOAD: "0"}
    with ThreadPoolExecutor() as pool:
        # torch_npu by itself: with autoload its failure would be torch's.
        asked = {
            name: pool.submit(ask, name, without if name == "torch_npu" else variables, TIMEOUT_S)
            for name in (*installed, STRATEGIES)
        }
        probes = {name: answer.result() for name, answer in asked.items()}
    autoload = variables.get(AUTOLOAD, "1") == "1"
    backends = tuple(point.value.partition(":")[0] for point in importlib.metadata.entry_points(group="torch.backends"))
    alone = ask("torch", without, TIMEOUT_S) if autoload and "error" in probes.get("torch", {}) else None
    if alone and "error" in alone:
        alone = None
    declared = probes.pop(STRATEGIES)
    if alone is not None and "error" in declared:
        declared = ask(STRATEGIES, without, TIMEOUT_S)
    strategies = declared.get("strategies") or {name: dict(declared) for name in _strategy_names()}
    for package in {
        package for facts in strategies.values() for package in facts.get("packages", ())
    } - versions.keys():
        versions[package] = _version(package)
        if versions[package] is not None:
            probes[package] = ask(package, variables, TIMEOUT_S)
    return Machine(
        versions=versions,
        probes=probes,
        strategies=strategies,
        autoload=autoload,
        torch_alone=alone,
        backends=backends,
        torch_npu_wants=_wanted_torch("torch_npu"),
        torchvision_wants=_wanted_torch("torchvision"),
        cann=_cann(variables),
        hardware=tuple(name for name in ("nvidia", "davinci") if any(Path("/dev").glob(f"{name}[0-9]*"))),
        plug_ins=tuple(point.name for point in importlib.metadata.entry_points(group="flextrain.devices")),
    )


def _strategy_names() -> list[str]:
    """Names of strategies that are known where their modules cannot be imported."""
    own = [name for name in PUBLIC_NAMES if name.endswith("Strategy") and name != "Strategy"]
    return [*own, *(point.name for point in importlib.metadata.entry_points(group="flextrain.strategies"))]


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _wanted_torch(package: str) -> str | None:
    """The specifier of torch in a package's metadata, such as "==2.14.0.*"."""
    try:
        lines = importlib.metadata.requires(package) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name == "torch":
            return str(requirement.specifier) or None
    return None


def _cann(variables: Mapping[str, str]) -> str | None:
    """CANN's version, from the file that it brings along, or else its folder."""
    given = [variables[name] for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if variables.get(name)]
    for folder in map(Path, (*given, *CANN_FOLDERS)):
        if not folder.is_dir():
            continue
        for file in (*folder.glob("version.*"), *folder.glob("*/version.info")):
            if found := re.search(r"^Version=(\S+)", file.read_text(errors="replace"), flags=re.MULTILINE):
                return found.group(1)
        return str(folder)
    return None
