"""What is installed, what each strategy needs, and what keeps it from running here.

Nothing here imports torch: an installed torch_npu without CANN makes that fail, which is one of the things to find out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from .. import __version__
from .markup import add_row
from .package_probe import Facts, ask

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
TIMEOUT_S = 120.0  # a cold import on a busy machine
# With the oldest version that will do; tests/test_doctor.py holds them against pyproject.toml.
REQUIRED = {"torch": "2.6", "numpy": "1.24", "pydantic": "2", "safetensors": "0.4", "xxhash": "3"}
OPTIONAL = {"torch_npu": "2.6", "deepspeed": "0.17", "torchvision": "0", "torchmetrics": "1"}
OWN_DEVICES = ("cpu", "cuda", "npu", "xpu", "mps")
CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
INSTALL_CANN = "install CANN and source its set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh)"
_STYLES = {"error": "bold red", "warning": "yellow"}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong or odd.

    Attributes:
        level: "error" for a set-up that is broken, "warning" for one that does less than it might.
        what: what was found.
        advice: what to do.
    """

    level: Literal["error", "warning"]
    what: str
    advice: str


@dataclass(frozen=True)
class StrategyStatus:
    """Whether a strategy can run here.

    Attributes:
        needs: what it needs.
        reason: on what it runs, or why it cannot.
    """

    name: str
    needs: str
    usable: bool
    reason: str


@dataclass(frozen=True)
class Machine:
    """What was found out, before anything is concluded from it.

    Attributes:
        versions: of installed packages; None where a package is not installed.
        probes: by package, what it said when it was imported, or ``{"error": why}``; only for installed ones.
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


@dataclass
class Report:
    """The diagnosis; printing it with rich gives tables."""

    versions: dict[str, str | None]
    devices: dict[str, list[str]]
    strategies: list[StrategyStatus] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """1 if the set-up is broken, else 0: what is not installed is no error."""
        return int(any(finding.level == "error" for finding in self.findings))

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "broken": bool(self.exit_status)}

    def __rich__(self) -> Group:
        versions = Table("package", "version", title="Versions", title_justify="left")
        for package, version in self.versions.items():
            add_row(versions, package, version or Text("not installed", style="dim"))
        # Commands are to be copied: they are folded, never cut.
        name, why, needs = (
            Column("strategy", no_wrap=True),
            Column("why", overflow="fold"),
            Column("needs", overflow="fold"),
        )
        strategies = Table(name, "runs here", why, needs, title="Strategies", title_justify="left")
        for status in self.strategies:
            answer = Text("yes", style="green") if status.usable else Text("no", style="yellow")
            add_row(strategies, status.name, answer, status.reason, status.needs)
        lines = [Text.assemble((f"{f.level}: ", _STYLES[f.level]), f"{f.what}; {f.advice}") for f in self.findings]
        return Group(versions, strategies, *(lines or [Text("No problem was found.", style="green")]))


def diagnose(variables: Mapping[str, str] | None = None) -> Report:
    """Look at this machine and this Python.

    Args:
        variables: the environment to look at; default: ``os.environ``.
    """
    return examine(look(os.environ if variables is None else variables))


# Looking


def look(variables: Mapping[str, str]) -> Machine:
    """What is installed, and what it says when it is imported, each in a process of its own."""
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    installed = [name for name in ("torch", "torch_npu", "deepspeed") if versions[name] is not None]
    without = {**variables, AUTOLOAD: "0"}
    with ThreadPoolExecutor() as pool:
        # torch_npu by itself: with autoload its failure would be torch's.
        asked = {
            name: pool.submit(ask, name, without if name == "torch_npu" else variables, TIMEOUT_S) for name in installed
        }
        probes = {name: answer.result() for name, answer in asked.items()}
    autoload = variables.get(AUTOLOAD, "1") == "1"
    backends = tuple(point.value.partition(":")[0] for point in importlib.metadata.entry_points(group="torch.backends"))
    alone = ask("torch", without, TIMEOUT_S) if autoload and "error" in probes.get("torch", {}) else None
    if alone and "error" in alone:
        alone = None
    return Machine(
        versions=versions,
        probes=probes,
        autoload=autoload,
        torch_alone=alone,
        backends=backends,
        torch_npu_wants=_wanted_torch("torch_npu"),
        torchvision_wants=_wanted_torch("torchvision"),
        cann=_cann(variables),
        hardware=tuple(name for name in ("nvidia", "davinci") if any(Path("/dev").glob(f"{name}[0-9]*"))),
        plug_ins=tuple(point.name for point in importlib.metadata.entry_points(group="flextrain.devices")),
    )


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


# Concluding


def examine(machine: Machine) -> Report:
    """What follows from what was found out."""
    versions: dict[str, str | None] = {"flextrain": __version__, "python": platform.python_version()}
    versions |= {**machine.versions, "CUDA (of torch)": machine.torch.get("cuda"), "NCCL": machine.torch.get("nccl")}
    versions |= {"ROCm (of torch)": machine.torch.get("hip"), "CANN": machine.cann}
    findings = [*_torch(machine), *_missing(machine), *_too_old(machine), *_torch_npu(machine), *_torchvision(machine)]
    findings += [*_deepspeed(machine), *_hardware(machine)]
    return Report(versions, machine.devices, _strategies(machine), findings)


def _torch(machine: Machine) -> list[Finding]:
    if machine.versions["torch"] is None:
        return [Finding("error", "torch is not installed", "pip install torch, in the build for this machine")]
    said = machine.probes["torch"].get("error")
    if said is None:
        return []
    if machine.torch_alone is not None:
        # torch says that the package failed, the package itself says why.
        said = next((why for name in machine.backends if (why := machine.probes.get(name, {}).get("error"))), said)
        culprits = " and ".join(machine.backends) or "a device package"
        advice = f"set {AUTOLOAD}=0 to use torch without it, or pip uninstall {' '.join(machine.backends)}"
        if "torch_npu" in machine.backends:
            advice = f"{INSTALL_CANN}, or {advice}"
        return [Finding("error", f"import torch fails because of {culprits}: {said}", advice)]
    return [Finding("error", f"torch {machine.versions['torch']} cannot be imported: {said}", "install torch again")]


def _missing(machine: Machine) -> list[Finding]:
    missing = [name for name in REQUIRED if name != "torch" and machine.versions.get(name, "") is None]
    return [Finding("error", f"{name} is not installed", f"pip install '{name}>={REQUIRED[name]}'") for name in missing]


def _too_old(machine: Machine) -> list[Finding]:
    found = []
    for name, oldest in {**REQUIRED, **OPTIONAL}.items():
        version = _parsed(machine.versions.get(name))
        if version is not None and version < Version(oldest):
            found.append(
                Finding("error", f"{name} {version} is too old for flextrain", f"pip install '{name}>={oldest}'")
            )
    return found


def _torch_npu(machine: Machine) -> list[Finding]:
    version, torch = machine.versions["torch_npu"], machine.versions["torch"]
    if version is None or torch is None:
        return []
    found = []
    if not _belong_together(version, torch, machine.torch_npu_wants):
        wants = machine.torch_npu_wants or f"=={_release(version)}.*"
        found.append(
            Finding(
                "error",
                f"torch_npu {version} is made for torch{wants} and torch is {torch}",
                f"pip install torch_npu=={_release(torch)} if there is one, or torch=={_release(version)}",
            )
        )
    said = machine.probes["torch_npu"].get("error")
    if said is not None and machine.torch.get("cuda"):
        what = f"torch {torch} is built for CUDA, and beside such a build torch_npu does not load"
        found.append(Finding("warning", what, "install torch's CPU build, which Ascend NPUs need"))
    if said is not None and machine.torch_alone is None:  # where torch cannot be imported that was said already
        fits = "source the set_env.sh of CANN, in the version that torch_npu asks for"
        what = f"torch_npu {version} cannot be imported: {said}"
        found.append(Finding("warning", what, INSTALL_CANN if machine.cann is None else fits))
    if said is None and "npu" not in machine.devices:
        found.append(Finding("warning", "torch_npu finds no device", "see npu-smi info, and ASCEND_RT_VISIBLE_DEVICES"))
    return found


def _torchvision(machine: Machine) -> list[Finding]:
    version, torch, wants = machine.versions.get("torchvision"), machine.versions["torch"], machine.torchvision_wants
    if version is None or torch is None or wants is None or _belong_together(version, torch, wants):
        return []
    what = f"torchvision {version} is made for torch{wants} and torch is {torch}"
    return [Finding("warning", what, "pip install torch and torchvision together, in one command")]


def _belong_together(torch_npu: str, torch: str, wants: str | None) -> bool:
    ours, theirs = _parsed(torch_npu), _parsed(torch)
    if ours is None or theirs is None:
        return True
    if wants is not None:
        return Requirement(f"torch{wants}").specifier.contains(theirs.base_version, prereleases=True)
    return ours.release[:2] == theirs.release[:2]


def _deepspeed(machine: Machine) -> list[Finding]:
    version = machine.versions["deepspeed"]
    if version is None:
        return []
    said = machine.probes["deepspeed"].get("error")
    if said is None or "error" in machine.torch or machine.torch_alone is not None:
        return []  # it cannot do without torch
    if said.startswith("KeyError") and "ASCEND_HOME_PATH" in said:
        return [Finding("error", "DeepSpeed needs ASCEND_HOME_PATH, which is not set", "source CANN's set_env.sh")]
    return [Finding("error", f"deepspeed {version} cannot be used: {said}", "pip install 'flextrain[deepspeed]'")]


def _hardware(machine: Machine) -> list[Finding]:
    found = []
    if "error" in machine.torch:
        return []
    if "nvidia" in machine.hardware and "cuda" not in machine.devices:
        built = machine.torch.get("cuda")
        why = f"the driver may be too old for CUDA {built}" if built else "torch is a build without CUDA"
        found.append(
            Finding("warning", f"there is an NVIDIA GPU and torch does not see it, {why}", "install a torch that fits")
        )
    if "davinci" in machine.hardware and machine.versions["torch_npu"] is None:
        found.append(
            Finding("warning", "there is an Ascend NPU and torch_npu is not installed", "pip install 'flextrain[npu]'")
        )
    for kind in machine.strange:
        what = f"torch finds a device of type {kind}, of which flextrain knows nothing: it takes the CPU"
        found.append(Finding("warning", what, "call flextrain.register_device, see docs/devices.md"))
    return found


def _strategies(machine: Machine) -> list[StrategyStatus]:
    broken = machine.probes.get("torch", {"error": "not installed"}).get("error")
    if broken is not None:
        why = f"torch cannot be imported, see {AUTOLOAD} below" if machine.torch_alone else "torch cannot be imported"
        return [StrategyStatus(name, needs, False, why) for name, needs in NEEDS.items()]
    devices = {kind: names for kind, names in machine.devices.items() if kind not in machine.strange}
    place = ", ".join(f"{len(names)} x {kind}" for kind, names in devices.items()) or "the CPU"
    grouped = bool(machine.torch.get("distributed"))
    spread = f"on {place}, one per process" if devices else "on the CPU, any number of processes"
    no_group = "this build of torch has no torch.distributed"
    answers = {
        "SingleDeviceStrategy": (True, f"on {place}"),
        "DDPStrategy": (grouped, spread if grouped else no_group),
        "FSDPStrategy": (grouped, spread if grouped else no_group),
        "DeepSpeedStrategy": _can_deepspeed(machine) if grouped else (False, no_group),
        "NPUStrategy": _can_npu(machine),
    }
    return [StrategyStatus(name, needs, *answers[name]) for name, needs in NEEDS.items()]


NEEDS = {
    "SingleDeviceStrategy": "torch",
    "DDPStrategy": "torch.distributed; an accelerator per process, or the CPU",
    "FSDPStrategy": "torch.distributed; an accelerator per process, or the CPU",
    "DeepSpeedStrategy": "deepspeed (pip install 'flextrain[deepspeed]')",
    "NPUStrategy": "torch_npu (pip install 'flextrain[npu]'), CANN, an Ascend NPU per process",
}


def _can_deepspeed(machine: Machine) -> tuple[bool, str]:
    if machine.versions["deepspeed"] is None:
        return False, "deepspeed is not installed: pip install 'flextrain[deepspeed]'"
    said = machine.probes["deepspeed"]
    if "error" in said:
        return False, f"deepspeed cannot be used: {said['error']}"
    return True, f"on {said['accelerator']}"


def _can_npu(machine: Machine) -> tuple[bool, str]:
    if machine.versions["torch_npu"] is None:
        return False, "torch_npu is not installed: pip install 'flextrain[npu]', on a machine with Ascend NPUs and CANN"
    said = machine.probes["torch_npu"]
    if "error" in said:
        return False, f"torch_npu cannot be imported: {said['error']}"
    count = len(machine.devices.get("npu", ()))
    return count > 0, f"on {count} x npu" if count else "torch_npu finds no device"


def _parsed(version: str | None) -> Version | None:
    try:
        return Version(version or "")
    except InvalidVersion:  # not known, or of a build with a numbering of its own
        return None


def _release(version: str) -> str:
    parsed = _parsed(version)
    return version if parsed is None else ".".join(map(str, parsed.release[:3]))
