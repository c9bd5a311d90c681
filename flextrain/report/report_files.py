"""Write a report: once, or again and again while runs train."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.base.errors import ConfigError
from ..pages import check_file, write_file
from ..runner.reporting.reporter import import_extra
from .recorded_run import RecordedRun, recorded_run
from .run_facts import markdown
from .run_page import page


def names_of(folders: Sequence[Path], given: str | None) -> list[str]:
    """Return a name for each run: the given one, or the shortest end of its path that tells it from the others.

    Raises:
        ConfigError: not as many names as runs, or two are equal; or a folder is given twice.
    """
    where = [folder.absolute() for folder in folders]
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        if len(names) != len(folders) or "" in names:
            raise ConfigError(f'report.names: "{given}" has {len(names)} names, give {len(folders)}, one for each run')
    else:
        depth, most = 1, max(len(path.parts) for path in where)
        names = [path.name for path in where]
        while len({*names}) < len(names) and depth < most:
            depth += 1
            names = ["/".join(path.parts[-depth:]) for path in where]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise ConfigError(f'report: "{twice}" is given twice, give each run once, and each a name of its own')
    return names


def recorded_runs(folders: Sequence[Path], names: Sequence[str]) -> list[RecordedRun]:
    """Read the runs."""
    return [recorded_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def write_report(runs: Sequence[RecordedRun], path: Path, *, refresh_s: int | None = None) -> None:
    """Write the page; there is never a part of it under this name.

    Raises:
        ConfigError: it cannot be written, or the package that draws is missing.
    """
    check_file(path, "report.output")
    import_extra("matplotlib.figure", "report", "report")
    write_file(path, page(runs, refresh_s=refresh_s))


def write_markdown(runs: Sequence[RecordedRun], path: Path | None) -> None:
    """Write Markdown to a file, or to standard output."""
    text = markdown(runs)
    if path is None:
        sys.stdout.write(text)
        return
    check_file(path, "report.output")
    write_file(path, text)


def watch(
    folders: Sequence[Path],
    names: Sequence[str],
    path: Path,
    interval_s: float,
    say: Callable[[str], None],
) -> None:
    """Write the page again whenever a run has written something, until all runs are over or somebody presses Ctrl-C.

    Args:
        folders, names: of the runs.
        path: the page.
        interval_s: seconds between two looks; also the browser's, which reads the page again as long as a run trains.
        say: prints a line.
    """
    before = None
    try:
        while True:
            seen = [_state(folder) for folder in folders]
            if seen != before:
                runs = recorded_runs(folders, names)
                is_over = all(run.is_over for run in runs)
                write_report(runs, path, refresh_s=None if is_over else max(round(interval_s), 1))
                if before is None:
                    say(f"Report: {path}, written again while the runs train; Ctrl-C ends it")
                if is_over:
                    say("All runs are over")
                    return
                before = seen
            time.sleep(interval_s)
    except KeyboardInterrupt:
        write_report(recorded_runs(folders, names), path)
        say(f"Report: {path}")


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """What tells that a run has written: names, sizes and times of the files that a report reads."""
    found = []
    patterns = ("events.jsonl", "*.log", "*/*.log", "vis_data/*", "*/vis_data/*")  # checkpoints may have many files
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        try:
            about = path.stat()
        except OSError:
            continue
        found.append((str(path), about.st_size, about.st_mtime_ns))
    return sorted(found)
