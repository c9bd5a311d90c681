"""Put the facts, problems and strategies of a machine into a report, and show it as tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from .. import __version__
from ..core.base import errors as horovod
from .machine import AUTOLOAD, OPTIONAL, REQUIRED, Machine, look
from .package_probe import Facts

if TYPE_CHECKING:
    from rich.console import Group

# Find problems of a machine: missing, old or mismatched packages, and devices that torch does not find.


INSTALL_CANN = "install CANN and source its set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh)"


@dataclass(frozen=True)
class Finding:
    """A problem of this machine or Python.

    Attributes:
        level: "error" if the set-up is broken, "warning" if it works with less than the machine has.
        what: the problem.
        advice: what to do.
    """

    level: Literal["error", "warning"]
    what: str
    advice: str


def find_problems(machine: Machine) -> list[Finding]:
    """All problems, errors and warnings."""
    findings = [*_torch(machine), *_missing(machine), *_too_old(machine), *_torch_npu(machine), *_torchvision(machine)]
    return [*findings, *_deepspeed(machine), *_horovod(machine), *_hardware(machine)]


def count_devices(devices: Mapping[str, Sequence[str]], wanted: int) -> list[Finding]:
    """An error if there are not as many devices as a machine should have.

    Args:
        devices: names of devices by their type.
        wanted: how many accelerators there should be.
    """
    found = sum(map(len, devices.values()))
    if found == wanted:
        return []
    which = ", ".join(f"{len(names)} x {kind}" for kind, names in devices.items()) or "none"
    advice = "look at the driver's own tool, such as nvidia-smi, and at CUDA_VISIBLE_DEVICES"
    return [Finding("error", f"torch finds {found} accelerators ({which}) and --devices says {wanted}", advice)]


def _torch(machine: Machine) -> list[Finding]:
    if machine.versions["torch"] is None:
        return [Finding("error", "torch is not installed", "pip install torch, in the build for this machine")]
    said = machine.probes["torch"].get("error")
    if said is None:
        return []
    if machine.torch_alone is not None:
        # torch only says that the package failed; the package's own error says why.
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
                f"torch_npu {version} requires torch{wants}, but torch {torch} is installed",
                f"pip install torch_npu=={_release(torch)} if there is one, or torch=={_release(version)}",
            )
        )
    said = machine.probes["torch_npu"].get("error")
    if said is not None and machine.torch.get("cuda"):
        what = f"torch {torch} is built for CUDA, and torch_npu cannot be loaded with such a build"
        found.append(Finding("warning", what, "install torch's CPU build, which Ascend NPUs need"))
    if said is not None and machine.torch_alone is None:  # otherwise the error about torch says it
        fits = "source the set_env.sh of CANN, in the version that torch_npu requires"
        what = f"torch_npu {version} cannot be imported: {said}"
        found.append(Finding("warning", what, INSTALL_CANN if machine.cann is None else fits))
    if said is None and "npu" not in machine.devices:
        found.append(Finding("warning", "torch_npu finds no device", "see npu-smi info, and ASCEND_RT_VISIBLE_DEVICES"))
    return found


def _torchvision(machine: Machine) -> list[Finding]:
    version, torch, wants = machine.versions.get("torchvision"), machine.versions["torch"], machine.torchvision_wants
    if version is None or torch is None or wants is None or _belong_together(version, torch, wants):
        return []
    what = f"torchvision {version} requires torch{wants}, but torch {torch} is installed"
    return [Finding("warning", what, "pip install torch and torchvision together, in one command")]


def _belong_together(torch_npu: str, torch: str, wants: str | None) -> bool:
    """Whether a package of this version, which requires the torch ``wants``, fits the installed torch."""
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
        return []  # the error about torch comes first
    if said.startswith("KeyError") and "ASCEND_HOME_PATH" in said:
        return [Finding("error", "DeepSpeed needs ASCEND_HOME_PATH, which is not set", "source CANN's set_env.sh")]
    return [Finding("error", f"deepspeed {version} cannot be used: {said}", "pip install 'flextrain[deepspeed]'")]


def _horovod(machine: Machine) -> list[Finding]:
    if not machine.horovod:
        return []
    return [Finding("warning", f"no strategy uses Horovod ({machine.horovod}): {horovod.WHY}", horovod.INSTEAD)]


def _hardware(machine: Machine) -> list[Finding]:
    found = []
    if "error" in machine.torch:
        return []
    if "nvidia" in machine.hardware and "cuda" not in machine.devices:
        built = machine.torch.get("cuda")
        why = f"the driver may be too old for CUDA {built}" if built else "torch is a build without CUDA"
        found.append(
            Finding(
                "warning",
                f"there is an NVIDIA GPU that torch does not find, {why}",
                "install a matching build of torch",
            )
        )
    if "davinci" in machine.hardware and machine.versions["torch_npu"] is None:
        found.append(
            Finding("warning", "there is an Ascend NPU and torch_npu is not installed", "pip install 'flextrain[npu]'")
        )
    for kind in machine.strange:
        what = f"torch finds a device of type {kind}, which flextrain does not know: flextrain uses the CPU"
        found.append(Finding("warning", what, "call flextrain.register_device, see docs/devices.md"))
    return found


def _parsed(version: str | None) -> Version | None:
    try:
        return Version(version or "")
    except InvalidVersion:  # unknown, or a build with its own numbering
        return None


def _release(version: str) -> str:
    parsed = _parsed(version)
    return version if parsed is None else ".".join(map(str, parsed.release[:3]))


# Whether processes that torchrun restarts, and machines that join a job, find each other with the installed torch.


SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable of torchrun; "1" lets every start have a store of its own."""


def restarts_in_words(torch: str | None, variables: Mapping[str, str]) -> str:
    """Return a line on restarts; empty without torch.

    Since torch 2.5 torchrun's agents make the store of the processes once for all starts (pytorch/pytorch#135712). What
    an old start has left in it does no harm, because flextrain gives every process group its own keys. But an agent that
    joins waits for an address that the first one has told before.
    """
    if torch is None:
        return ""
    if variables.get(SHARED_STORE) == "1":
        return f"torchrun (torch {torch}, {SHARED_STORE}=1) restarts processes, and machines may join and leave"
    return (
        f"torchrun (torch {torch}) restarts processes; machines may join a job (--nnodes MIN:MAX) only under `flextrain run`, or "
        f"with {SHARED_STORE}=1"
    )


# Decide which strategies can run on a machine, from the needs that each of them declares.


@dataclass(frozen=True)
class StrategyStatus:
    """Whether a strategy can run here.

    Attributes:
        short_names: what ``strategy=`` and `flextrain verify` take in place of the name.
        needs: what it needs, in words.
        reason: the device on which it runs, or why it cannot run.
    """

    name: str
    short_names: tuple[str, ...]
    needs: str
    usable: bool
    reason: str


def judge_strategies(machine: Machine) -> list[StrategyStatus]:
    """The status of every strategy, in the order of their names."""
    broken = machine.probes.get("torch", {"error": "not installed"}).get("error")
    if broken is not None:
        why = f"torch cannot be imported, see {AUTOLOAD} below" if machine.torch_alone else "torch cannot be imported"
        return [_status(name, facts, (False, why)) for name, facts in machine.strategies.items()]
    return [_status(name, facts, _can_run(facts, machine)) for name, facts in machine.strategies.items()]


def _status(name: str, facts: Facts, answer: tuple[bool, str]) -> StrategyStatus:
    return StrategyStatus(name, tuple(facts.get("short_names", ())), facts.get("needs", "torch"), *answer)


def _can_run(facts: Facts, machine: Machine) -> tuple[bool, str]:
    """Whether a strategy with these needs can run, and the device, or why it cannot."""
    if "error" in facts:
        return False, f"it cannot be loaded: {facts['error']}"
    for package, command in facts["packages"].items():
        if machine.versions.get(package) is None:
            return False, f"{package} is not installed: {command}"
        if "error" in machine.probes[package]:
            return False, f"{package} cannot be used: {machine.probes[package]['error']}"
    if facts["distributed"] and not machine.torch.get("distributed"):
        return False, "this build of torch has no torch.distributed"
    devices = {kind: names for kind, names in machine.devices.items() if kind not in machine.strange}
    if facts["device"] is not None:
        devices = {kind: names for kind, names in devices.items() if kind == facts["device"]}
        if not devices:
            return False, f"no device of type {facts['device']} was found"
    for package in facts["packages"]:
        if where := machine.probes[package].get("accelerator"):  # the package chooses the device by itself
            return True, "; ".join((f"on {where}", *machine.probes[package].get("notes", ())))
    where = ", ".join(f"{len(names)} x {kind}" for kind, names in devices.items()) or "the CPU"
    if not facts["distributed"]:
        return True, f"on {where}"
    return True, f"on {where}, one per process" if devices else f"on {where}, any number of processes"


_STYLES = {"error": "bold red", "warning": "yellow"}


@dataclass
class Diagnosis:
    """The diagnosis; printing it with rich gives tables."""

    versions: dict[str, str | None]
    devices: dict[str, list[str]]
    strategies: list[StrategyStatus] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    restarts: str = ""
    """What torchrun can do after failures."""

    @property
    def exit_status(self) -> int:
        """1 if the set-up is broken, else 0. A missing optional package is no error."""
        return int(any(finding.level == "error" for finding in self.findings))

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "broken": bool(self.exit_status)}

    def __str__(self) -> str:
        """The report as plain lines, for a Python without rich."""
        lines = [f"{package}: {version or 'not installed'}" for package, version in self.versions.items()]
        for status in self.strategies:
            answer = "runs here" if status.usable else "does not run here"
            lines.append(f"{status.name} {answer}: {status.reason}; it needs {status.needs}")
        lines += [f"restarts: {self.restarts}"] if self.restarts else []
        lines += [f"{finding.level}: {finding.what}; {finding.advice}" for finding in self.findings]
        return "\n".join(lines)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        from ..tables import FittedTable, add_row

        versions = FittedTable("package", "version", title="Versions", title_justify="left")
        for package, version in self.versions.items():
            add_row(versions, package, version or Text("not installed", style="dim"))
        # Users copy commands from here: long ones are wrapped, never cut off.
        strategies = FittedTable("strategy", "runs here", "why", "needs", title="Strategies", title_justify="left")
        for status in self.strategies:
            answer = Text("yes", style="green") if status.usable else Text("no", style="yellow")
            names = Text.assemble(
                status.name, ("\n" + ", ".join(status.short_names), "dim") if status.short_names else ""
            )
            add_row(strategies, names, answer, status.reason, status.needs)
        lines = [Text.assemble((f"{f.level}: ", _STYLES[f.level]), f"{f.what}; {f.advice}") for f in self.findings]
        restarts = [Text(f"Restarts: {self.restarts}")] if self.restarts else []
        return Group(versions, strategies, *restarts, *(lines or [Text("No problem was found.", style="green")]))


def diagnose(variables: Mapping[str, str] | None = None) -> Diagnosis:
    """Examine this machine and this Python.

    Args:
        variables: environment variables to examine; default: ``os.environ``.
    """
    given = os.environ if variables is None else variables
    return examine(look(given), given)


def examine(machine: Machine, variables: Mapping[str, str] | None = None) -> Diagnosis:
    """The report that follows from the facts, and from environment variables."""
    versions: dict[str, str | None] = {"flextrain": __version__, "python": platform.python_version()}
    versions |= {**machine.versions, "CUDA (of torch)": machine.torch.get("cuda"), "NCCL": machine.torch.get("nccl")}
    versions |= {"ROCm (of torch)": machine.torch.get("hip"), "CANN": machine.cann}
    restarts = restarts_in_words(machine.versions["torch"], variables or {})
    return Diagnosis(versions, machine.devices, judge_strategies(machine), find_problems(machine), restarts)
