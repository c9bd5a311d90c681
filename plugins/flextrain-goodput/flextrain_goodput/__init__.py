"""What the seconds of a training job went into, over all its starts."""

from .hook import GoodputHook
from .ledger import Ledger, ledger_of

__all__ = ["GoodputHook", "Ledger", "ledger_of"]
