"""Needs: the requirements of a strategy, which `flextrain doctor` compares with the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ANY_DEVICE = "an accelerator per process or the CPU"


@dataclass(frozen=True)
class Needs:
    """The requirements of a strategy, besides torch.

    Attributes:
        distributed: the strategy needs ``torch.distributed``.
        packages: the optional packages that it imports, each with the command that installs it.
        device: the only type of device that it supports; None: any accelerator, or the CPU.
        others: requirements that cannot be checked, as text.
        processes: why its ranks must be real processes, and can be neither threads nor one rank of many; empty if they can.
    """

    distributed: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    others: tuple[str, ...] = ()
    processes: str = ""

    def __str__(self) -> str:
        parts = ["torch.distributed" if self.distributed else "torch"]
        parts += [f"{package} ({command})" for package, command in self.packages.items()]
        return ", ".join((*parts, *self.others))
