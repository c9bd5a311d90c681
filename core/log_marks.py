"""Marks of log records that the console and the log file treat differently; give them as ``extra={MARK: True}``."""

from __future__ import annotations

ONLY_IN_FILE = "only_in_file"
"""The record is long and for reference: the console leaves it out."""
TRACEBACK_IN_FILE = "traceback_in_file"
"""The record says how a process ended: every process writes it to its log file, and the console leaves out the traceback."""
ON_TERMINAL = "on_terminal"
"""What a console shows in place of the record's text if it is a terminal; it has ``drawn()``, which returns it for rich."""
