"""Groups of processes that train one model together, and leave and join without a restart of the others."""

from .record import lineage
from .strategy import TorchFTStrategy

__all__ = ["TorchFTStrategy", "lineage"]
