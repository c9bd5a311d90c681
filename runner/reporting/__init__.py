"""Output of a run: log lines, the progress bar, and reporters that store scalars."""

from __future__ import annotations

from .console import check_log_level, close_logger, is_interactive, setup_logger
from .history import HistoryBuffer
from .jsonl import JsonLinesReporter
from .log_processor import LogProcessor, build_log_processor
from .message_hub import MessageHub
from .progress import ProgressBar
from .reporter import Reporter
from .trackers import MlflowReporter, TensorboardReporter, WandbReporter
from .visualizer import Visualizer, build_reporters, build_visualizer

__all__ = [
    "HistoryBuffer",
    "JsonLinesReporter",
    "LogProcessor",
    "MessageHub",
    "MlflowReporter",
    "ProgressBar",
    "Reporter",
    "TensorboardReporter",
    "Visualizer",
    "WandbReporter",
    "build_log_processor",
    "build_reporters",
    "build_visualizer",
    "check_log_level",
    "close_logger",
    "is_interactive",
    "setup_logger",
]
