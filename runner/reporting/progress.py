"""ProgressBar: the state of training, on an interactive terminal."""

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from .console import console_handler
from .opening import samples_per_iteration

if TYPE_CHECKING:
    from ..run import Run


class ProgressBar:
    """One line at the bottom of the terminal: epoch, iteration, loss, learning rate, samples per second, time left.

    A separate thread draws it from the runner's counters, so it costs nothing per iteration. Log lines appear above it.
    """

    def __init__(self, runner: Run, console: Console | None = None) -> None:
        self._runner = runner
        self._batch_size = samples_per_iteration(runner)
        self._tag: Mapping[str, Any] = {}
        self._evaluation: tuple[str, int, int] | None = None
        self._live = Live(
            console=console or Console(markup=False, emoji=False),
            get_renderable=self._draw,
            refresh_per_second=5,
            transient=True,
        )

    def start(self) -> None:
        """Show the bar."""
        _protect_forks()
        self._live.start()
        handler = console_handler()
        if handler is not None:
            handler.live = self._live.console

    def stop(self) -> None:
        """Remove the bar and restore the terminal."""
        handler = console_handler()
        if handler is not None:
            handler.live = None
        self._live.stop()

    def update(self, tag: Mapping[str, Any]) -> None:
        """Show the scalars of the newest log line."""
        self._tag = tag

    def evaluate(self, mode: str, done: int, total: int) -> None:
        """Show the progress of validation or testing; after its last batch, that of training again."""
        self._evaluation = (mode, done, total) if done < total else None

    def _draw(self) -> Table:
        runner = self._runner
        fields: list[str] = []
        if self._evaluation is not None:
            mode, done, total = self._evaluation
            head = mode
        elif runner.train_loop.by_epoch:
            total = runner.train_loop.epoch_length
            epoch = min(runner.epoch, runner.max_epochs - 1)
            done = total if runner.epoch > epoch else min(runner.train_loop.inner, total)
            head = f"Epoch {epoch + 1}/{runner.max_epochs}"
        else:
            done, total, head = runner.iter, runner.max_iters, "train"
        if self._evaluation is None:
            fields = list(self._figures())
        eta = runner.message_hub.get_info("eta")
        if eta is not None:
            fields.append(f"eta {datetime.timedelta(seconds=int(eta))}")
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True)
        row.add_row(
            Text(head, style="bold"),
            Bar(total=total, completed=done),
            Text(f"{done}/{total}", style="progress.percentage"),
            Text("  ".join(fields)),
        )
        return row

    def _figures(self) -> list[str]:
        tag = {key.removeprefix("train/"): value for key, value in self._tag.items()}
        figures = [f"{key} {tag[key]:{form}}" for key, form in (("loss", ".4f"), ("lr", ".2e")) if key in tag]
        if self._batch_size and tag.get("time"):
            figures.append(f"{self._batch_size / tag['time']:.0f} samples/s")
        return figures


@functools.cache
def _protect_forks() -> None:
    """Hide the bar from forked dataloader workers: a thread that they do not have might hold its lock forever."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_bar)


def _forget_bar() -> None:
    handler = console_handler()
    if handler is not None:
        handler.live = None
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)
