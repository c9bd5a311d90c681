"""Collect facts about a machine: installed packages, whether they can be imported, devices and drivers.

Nothing here imports torch. That import may fail (a torch_npu without CANN makes it fail), and doctor must report it.
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

from .. import __all__ as PUBLIC_NAMES
from .package_probe import STRATEGIES, Facts, ask

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
TIMEOUT_S = 120.0  # a cold import on a busy machine
# Each with the oldest allowed version; tests/test_doctor.py compares them with pyproject.toml.
REQUIRED = {
    "torch": "2.6",
    "numpy": "1.24",
    "pydantic": "2.5",
    "safetensors": "0.4.5",
    "xxhash": "3",
    "rich": "13",
    "pyyaml": "6.0.1",
    "shtab": "1.13",
}
_MODULES = {"pyyaml": "yaml"}  # those of another name than their package
OPTIONAL = {"torch_npu": "2.6", "deepspeed": "0.19.8", "torchvision": "0", "torchmetrics": "1.1"}
OWN_DEVICES = ("cpu", "cuda", "npu", "xpu", "mps")
CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")


@dataclass(frozen=True)
class Machine:
    """Facts about a machine and its Python, without conclusions.

    Attributes:
        versions: versions by package; None for a package that is not installed.
        probes: facts by installed package, or ``{"error": why}`` if its import failed.
        strategies: the declarations of each strategy by name, or ``{"error": why}`` if it cannot be loaded.
        autoload: whether torch imports the packages of devices by itself.
        torch_alone: facts about torch with autoload off, if its import with autoload failed.
        backends: packages of devices that torch imports by itself.
        torch_npu_wants: the version of torch that torch_npu's metadata requires.
        torchvision_wants: the version of torch that torchvision's metadata requires.
        cann: the version of CANN, or its folder; None if CANN was not found.
        hardware: names of device files in /dev, whether or not torch finds the device: "nvidia", "davinci".
        plug_ins: types of devices that installed packages add to flextrain.
        horovod: where Horovod was found, its package or a variable; empty if it was not.
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
    horovod: str = ""

    @property
    def torch(self) -> Facts:
        """Facts about torch; with autoload off if its import fails otherwise."""
        return self.torch_alone or self.probes.get("torch", {"error": "not installed"})

    @property
    def devices(self) -> dict[str, list[str]]:
        """Names of usable accelerators, by type."""
        parts = (self.torch, self.probes.get("torch_npu", {}))
        return {kind: names for part in parts for kind, names in part.get("devices", {}).items() if names}

    @property
    def strange(self) -> list[str]:
        """Types of accelerators that torch finds and flextrain does not know."""
        return [kind for kind in self.devices if kind not in (*OWN_DEVICES, *self.plug_ins)]


def look(variables: Mapping[str, str]) -> Machine:
    """Find installed packages, and ask each of them for facts in its own process.

    Args:
        variables: environment variables to examine; the processes get them too.
    """
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    installed = [name for name in ("torch", "torch_npu", "deepspeed") if versions[name] is not None]
    without = {**variables, AUTOLOAD: "0"}
    with ThreadPoolExecutor() as pool:
        # torch_npu without autoload: with autoload, its failure would look like torch's.
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
        horovod=_horovod(variables),
    )


def _strategy_names() -> list[str]:
    """Names of strategies that are known without importing their modules."""
    own = [name for name in PUBLIC_NAMES if name.endswith("Strategy") and name != "Strategy"]
    return [*own, *(point.name for point in importlib.metadata.entry_points(group="flextrain.strategies"))]


def _version(package: str) -> str | None:
    if importlib.util.find_spec(_MODULES.get(package, package)) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _wanted_torch(package: str) -> str | None:
    """The version of torch that a package's metadata requires, such as "==2.14.0.*"."""
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


def _horovod(variables: Mapping[str, str]) -> str:
    """The installed version of Horovod, or the first of its variables; empty if there is neither."""
    version = _version("horovod")
    named = sorted(name for name in variables if name.startswith("HOROVOD_"))
    return f"version {version} is installed" if version else f"{named[0]} is set" if named else ""


def _cann(variables: Mapping[str, str]) -> str | None:
    """CANN's version from its version file, or else its folder; None if CANN is not found."""
    given = [variables[name] for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if variables.get(name)]
    for folder in map(Path, (*given, *CANN_FOLDERS)):
        if not folder.is_dir():
            continue
        for file in (*folder.glob("version.*"), *folder.glob("*/version.info")):
            if found := re.search(r"^Version=(\S+)", file.read_text(errors="replace"), flags=re.MULTILINE):
                return found.group(1)
        return str(folder)
    return None
