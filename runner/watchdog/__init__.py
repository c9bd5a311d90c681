"""The watchdog: a run that stands still, or that a process has left, ends with a line that says who, where and why."""

from .limits import WatchdogOptions
from .watchdog import Watchdog

__all__ = ["Watchdog", "WatchdogOptions"]
