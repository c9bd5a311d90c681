"""Decide which strategies can run on a machine, from the needs that each of them declares."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import AUTOLOAD, Machine
from .package_probe import Facts


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
