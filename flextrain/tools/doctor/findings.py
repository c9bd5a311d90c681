"""Find problems of a machine: missing, old or mismatched packages, and devices that torch does not find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ...core import horovod
from .machine import AUTOLOAD, OPTIONAL, REQUIRED, Machine

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
