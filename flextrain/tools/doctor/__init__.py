"""Report installed packages, the needs of each strategy, and what is missing."""

from __future__ import annotations

from .findings import INSTALL_CANN, count_devices
from .machine import OPTIONAL, REQUIRED, Machine, look
from .report import Diagnosis, diagnose, examine

__all__ = [
    "INSTALL_CANN",
    "OPTIONAL",
    "REQUIRED",
    "Machine",
    "Diagnosis",
    "count_devices",
    "diagnose",
    "examine",
    "look",
]
