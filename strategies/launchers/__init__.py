"""Who started this process, and how its processes find each other: one file per family of launchers."""

from .detect import LAUNCHERS, detect_launch
from .facts import Launch
from .leaving import say_that_the_end_was_asked, saying_why_this_process_leaves

__all__ = ["LAUNCHERS", "Launch", "detect_launch", "say_that_the_end_was_asked", "saying_why_this_process_leaves"]
