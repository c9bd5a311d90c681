"""What a strategy needs on a machine, as data that `flextrain doctor` compares with what is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ANY_DEVICE = "an accelerator per process or the CPU"


@dataclass(frozen=True)
class Needs:
    """What has to be there for a strategy to run, besides torch.

    Attributes:
        distributed: the strategy needs ``torch.distributed``.
        packages: the optional packages that it imports, each with the command that installs it.
        device: the only type of device that it runs on; None: any accelerator, or the CPU.
        others: what cannot be looked up, in words.
    """

    distributed: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = ["torch.distributed" if self.distributed else "torch"]
        parts += [f"{package} ({command})" for package, command in self.packages.items()]
        return ", ".join((*parts, *self.others))
