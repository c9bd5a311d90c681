"""RecordedRun: the figures, events and settings that a run has left in its work directory, over all of its starts."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ..core.base.errors import ConfigError, counted
from ..core.base.events import read_events
from ..runner.reporting.opening import FILE

# Read the files that a run has written, as far as they are whole.


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; what a killed run or a full disk has cut off is left out."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    with file:
        for line in file:
            try:
                found = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none, or not a whole one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the configuration beside the scalars of a run: ``config.json``, or MMEngine's ``config.py``.

    A Python file is read, never run; a value that is no literal is shown as it is written there.
    """
    if found := object_in(folder / "config.json"):
        return found
    for path in (folder / "config.py", folder.parent / "config.py"):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        return {
            node.targets[0].id: _value(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        }
    return {}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Dict):
        return {
            ast.unparse(key) if not isinstance(key, ast.Constant) else str(key.value): _value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(element) for element in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return ast.unparse(node)


def flattened(settings: Any, prefix: str = "") -> dict[str, str]:
    """Return settings as text by dotted key."""
    if isinstance(settings, Mapping) and settings:
        items = settings.items()
    elif isinstance(settings, list) and any(isinstance(each, (Mapping, list)) for each in settings):
        items = dict(enumerate(settings)).items()
    else:
        return {} if not prefix else {prefix: json.dumps(settings, default=str, ensure_ascii=False)}
    return {
        name: text
        for key, value in items
        for name, text in flattened(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }


# What only the text log of a run says: warnings, errors, and how long an epoch is.


_WARNING = re.compile(r"^(?:\d{4}/)?(\d\d/\d\d \d\d:\d\d:\d\d) - \S+ - (WARNING|ERROR) - (.*)$")
_TRAINING = re.compile(r"(?:Epoch|Iter)\(train\)\s+(?:\[(\d+)\])?\[\s*(\d+)/(\d+)\]")
_MOST = 1000
"""Warnings that are kept: a run may repeat one for days."""


@dataclass
class TextLog:
    """A log file.

    Attributes:
        warnings: level, text, time as it is written, and the iteration of the last line of training before it.
        epoch_length: updates of an epoch; None: lines do not tell.
        left_out: warnings beyond the first thousand.
    """

    warnings: list[tuple[str, str, str, int]] = field(default_factory=list)
    epoch_length: int | None = None
    left_out: int = 0


def text_log(path: Path, begins: int) -> TextLog:
    """Read a log file.

    Args:
        path: the file; it may be missing.
        begins: the iteration at which this start of the run began.
    """
    found, at = TextLog(), begins
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return found
    with file:
        for line in file:
            if "(train)" in line and (match := _TRAINING.search(line)):
                epoch, inner, length = match.groups()
                at = int(inner)
                if epoch is not None:
                    found.epoch_length = int(length)
                    at += (int(epoch) - 1) * int(length)
            elif match := _WARNING.match(line):
                if len(found.warnings) < _MOST:
                    found.warnings.append((match[2], match[3], match[1], at))
                else:
                    found.left_out += 1
    return found


Mode = Literal["train", "val", "user"]
_COUNTERS = frozenset({"epoch", "iter", "step", "eta"})
_ENDS = frozenset({"failed", "stalled", "preempted", "left", "gave_up", "finished"})
_UNEVENTFUL = frozenset({"launched"})


@dataclass
class Curve:
    """The values of one figure.

    Attributes:
        mode: train, val, or user for what the user's own code has stored.
        name: as the run has recorded it.
        xs: iterations in rising order; for ``user`` the steps that were given.
        ys: the values, which may be NaN or infinite.
    """

    mode: Mode
    name: str
    xs: list[float] = field(default_factory=list)
    ys: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run.

    Attributes:
        kind: one word, as in ``events.jsonl``; also "warning", "error" and "resumed".
        iteration: how many updates were done; None: not known.
        when: the time, as text.
        text: what else there is to say.
    """

    kind: str
    iteration: int | None
    when: str
    text: str


@dataclass
class RecordedRun:
    """A run as its files tell of it."""

    name: str
    folder: Path
    curves: dict[tuple[Mode, str], Curve] = field(default_factory=dict)
    ranks: dict[str, dict[int, Curve]] = field(default_factory=dict)
    """``data_time`` and ``memory`` of each rank that has written them."""
    events: list[RunEvent] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    """The configuration of the newest start, as text by dotted key."""
    record: dict[str, Any] = field(default_factory=dict)
    """``run.json`` of the newest start."""
    starts: int = 0
    """Starts of which the curves are made."""
    notes: list[str] = field(default_factory=list)
    pictures: list[tuple[str, int, Path]] = field(default_factory=list)
    """Name, step and file of the newest picture of each name."""
    is_over: bool = False

    @property
    def start(self) -> dict[str, Any]:
        """What the run has recorded of its beginning."""
        found = self.record.get("start")
        return found if isinstance(found, dict) else {}

    @property
    def end(self) -> dict[str, Any]:
        """What it has recorded of its end; empty: it runs, or was killed."""
        found = self.record.get("end")
        return found if isinstance(found, dict) else {}

    @property
    def samples(self) -> int | None:
        """Samples of an update, if they are known."""
        batch = self.start.get("batch")
        found = batch.get("samples") if isinstance(batch, dict) else None
        return found if isinstance(found, int) else None

    @property
    def updates(self) -> int | None:
        """Updates that were made, as far as the files tell."""
        found = [event.iteration for event in self.events if event.iteration is not None]
        found += [int(curve.xs[-1]) for curve in self.curves.values() if curve.mode == "train" and curve.xs]
        return max(found, default=None)


@dataclass
class _Start:
    """One start of a run: its folder of logs."""

    folder: Path
    data: Path
    begins: int | None = None
    """Updates that were done when it began."""

    @property
    def scalars(self) -> Path:
        for name in ("scalars.json", f"{self.folder.name}.json"):
            if (self.data / name).is_file():
                return self.data / name
        return self.data / "scalars.json"


def recorded_run(folder: Path, name: str) -> RecordedRun:
    """Read a work directory, or the folder of logs of one start.

    Raises:
        ConfigError: there is no such folder, or no run has written to it.
    """
    if not folder.is_dir():
        raise ConfigError(f"report: there is no folder {folder}, give the work directory of a run")
    starts, events = _starts(folder), _without_refused(read_events(folder))
    if not starts and not events:
        raise ConfigError(f"report: {folder} has no logs of a run, give a work directory")
    run = RecordedRun(name, folder)
    _find_beginnings(starts, events)
    kept = _kept(starts)
    if kept and (left_out := [start for start in starts[: starts.index(kept[0])] if start.begins is not None]):
        run.notes.append(
            f"{counted(len(left_out), 'earlier start')} in {folder}, after which training began anew: left out; "
            f"`flextrain report {folder}/START` shows one: {', '.join(map(_how_far, left_out))}"
        )
        events = _events_since(kept[0], events)
    run.starts = len(kept)
    logs = [text_log(start.folder / f"{start.folder.name}.log", start.begins or 0) for start in kept]
    for start, log in zip(kept, logs, strict=True):
        _add_records(run, start, log, events)
        _add_ranks(run, start)
    for curve in run.curves.values():
        if curve.mode == "user":  # steps of the user's own, in any order
            points = sorted(dict(zip(curve.xs, curve.ys, strict=True)).items())
            curve.xs, curve.ys = [x for x, _ in points], [y for _, y in points]
    if kept:
        run.settings = flattened(settings_in(kept[-1].data))
        run.record = object_in(kept[-1].data / FILE)
    run.events = sorted(_events(kept, logs, events), key=lambda event: event.when)
    for start in kept:
        _add_pictures(run, start)
    said = [event for event in events if event["event"] in {*_ENDS, "started", "restarted"}]
    run.is_over = bool(said) and said[-1]["event"] in _ENDS
    more = sum(log.left_out for log in logs)
    if more:
        run.notes.append(f"{more:,} more warnings are in the log")
    return run


def _without_refused(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out failures of starts that did not begin, after training had finished: such a start has changed nothing."""
    kept: list[dict[str, Any]] = []
    has_finished = False
    for event in events:
        if event["event"] in ("started", "finished"):
            has_finished = event["event"] == "finished"
        if not (has_finished and event["event"] == "failed" and "iter" not in event):
            kept.append(event)
    return kept


def _starts(folder: Path) -> list[_Start]:
    """The starts of a run in the order of their folders' names, which are times."""
    own = [folder] if (folder / "vis_data").is_dir() else []
    inner = sorted(path for path in folder.iterdir() if (path / "vis_data").is_dir()) if not own else []
    return [_Start(path, path / "vis_data") for path in (own or inner)]


def _how_far(start: _Start) -> str:
    last = max((int(x) for record in lines_of(start.scalars) if (x := _iteration(record))), default=0)
    return f"{start.folder.name} (to iteration {last:,})"


def _find_beginnings(starts: list[_Start], events: list[dict[str, Any]]) -> None:
    told = {Path(str(event.get("log"))).name: event.get("iter") for event in events if event["event"] == "started"}
    for start in starts:
        begins = told.get(start.folder.name, object_in(start.data / FILE).get("first_iter"))
        if not isinstance(begins, int):
            begins = next((int(x) - 1 for record in lines_of(start.scalars) if (x := _iteration(record))), None)
            begins = None if begins is None else _rounded_down(begins, start)
        start.begins = begins


def _rounded_down(first: int, start: _Start) -> int:
    """The update before the first record, less the interval between records: where a start without events began."""
    at = [int(x) for x in islice(filter(None, map(_iteration, lines_of(start.scalars))), 3)]
    interval = at[-1] - at[-2] if len(at) > 1 else 1
    return max(first + 1 - interval, 0)


def _kept(starts: list[_Start]) -> list[_Start]:
    """The last start that began with the first update, and those after it; starts that made no record count for nothing."""
    starts = [start for start in starts if start.begins is not None] or starts  # others have only evaluated
    fresh = [i for i, start in enumerate(starts) if start.begins == 0]
    return starts[fresh[-1] :] if fresh else starts


def _events_since(start: _Start, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events from the beginning of a start on; all of them if it has not told of it."""
    for i, event in enumerate(events):
        if event["event"] == "started" and Path(str(event.get("log"))).name == start.folder.name:
            return events[i:]
    return events


def _iteration(record: Mapping[str, Any]) -> float | None:
    value = record.get("iter")
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _add_records(run: RecordedRun, start: _Start, log: TextLog, events: list[dict[str, Any]]) -> None:
    """Add the records of a start; what an earlier start had done beyond its beginning counts no more."""
    begins = start.begins or 0
    for curve in run.curves.values():
        if curve.mode != "user":
            _cut(curve, begins)
    for by_rank in run.ranks.values():
        for curve in by_rank.values():
            _cut(curve, begins)
    validated = [
        (int(_number(event.get("epoch"))), int(_number(event.get("iter"))))
        for event in _events_of(start, events)
        if event["event"] == "validated"
    ]
    last = float(begins)
    for record in lines_of(start.scalars):
        at = _iteration(record)
        mode: Mode = "train"
        if at is None:
            step = _number(record.get("step"))
            mode = "val" if any(key.rpartition("/")[2] in ("time", "data_time") for key in record) else "user"
            at = step if mode == "user" else _iteration_of(step, validated, log, last)
        else:
            last = at
        for key, value in record.items():
            if key in _COUNTERS or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            name = key.removeprefix(f"{mode}/")
            curve = run.curves.setdefault((mode, name), Curve(mode, name))
            _append(curve, float(at), float(value))


def _iteration_of(step: float, validated: list[tuple[int, int]], log: TextLog, last: float) -> float:
    """The iteration of a validation, whose record has the epoch, or the iteration if training has no epochs."""
    for i, (epoch, iteration) in enumerate(validated):
        if step in (epoch, iteration):
            del validated[: i + 1]
            return float(iteration)
    if step >= last:
        return step
    return step * log.epoch_length if log.epoch_length else last


def _append(curve: Curve, x: float, y: float) -> None:
    """Add a point; a later record of the same iteration replaces the earlier one."""
    if curve.mode != "user" and curve.xs and x <= curve.xs[-1]:
        _cut(curve, x - 1)
    curve.xs.append(x)
    curve.ys.append(y)


def _cut(curve: Curve, last: float) -> None:
    while curve.xs and curve.xs[-1] > last:
        curve.xs.pop()
        curve.ys.pop()


def _add_ranks(run: RecordedRun, start: _Start) -> None:
    """Add what each rank has measured itself; rank 0 has it in its records."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in start.data.glob("rank_*.json"):
        if (number := path.stem.removeprefix("rank_")).isdigit():
            found[int(number)] = list(lines_of(path))
    if not found:
        return
    found[0] = [
        {key.removeprefix("train/"): value for key, value in record.items()}
        for record in lines_of(start.scalars)
        if _iteration(record) is not None
    ]
    for rank, records in sorted(found.items()):
        for record in records:
            for name in ("data_time", "memory"):
                value, at = record.get(name), _iteration(record)
                if at is not None and isinstance(value, (int, float)):
                    curve = run.ranks.setdefault(name, {}).setdefault(rank, Curve("train", name))
                    _append(curve, float(at), float(value))


def _events_of(start: _Start, events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events between the beginning of this start and that of the next."""
    is_own = False
    for event in events:
        if event["event"] == "started":
            is_own = Path(str(event.get("log"))).name == start.folder.name
        if is_own:
            yield event


def _events(starts: list[_Start], logs: list[TextLog], events: list[dict[str, Any]]) -> Iterator[RunEvent]:
    at: int | None = None
    for event in events:
        kind = str(event["event"])
        if isinstance(event.get("iter"), int):
            at = event["iter"]
        if kind in _UNEVENTFUL:
            continue
        if kind == "started" and at:
            kind = "resumed"
        yield RunEvent(kind, at, _as_text(_number(event["time"])), _said(event))
    year = time.strftime("%Y", time.localtime(_number(events[-1]["time"]))) if events else time.strftime("%Y")
    for start, log in zip(starts, logs, strict=True):
        own_year = start.folder.name[:4] if start.folder.name[:4].isdigit() else year
        for level, text, when, iteration in log.warnings:
            yield RunEvent(level.lower(), iteration, f"{own_year}-{when.replace('/', '-')}", text)


_KEPT_FACTS = ("reason", "path", "by", "end", "where", "seconds", "processes", "restarts", "rank")


def _said(event: Mapping[str, Any]) -> str:
    """The facts of an event in words."""
    if event["event"] == "saved":
        return str(event.get("path", "")).rpartition("/")[2]
    if event["event"] == "validated":
        return f"in {event.get('seconds', '?')} s"
    return ", ".join(f"{key} {event[key]}" for key in _KEPT_FACTS if event.get(key) not in (None, ""))


def _as_text(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def _add_pictures(run: RecordedRun, start: _Start) -> None:
    newest = {name: (step, path) for name, step, path in run.pictures}
    folder = start.data / "vis_image"
    for path in sorted(folder.rglob("*.png")):
        name, _, step = str(path.relative_to(folder).with_suffix("")).rpartition("_")
        number = int(step) if step.lstrip("-").isdigit() else 0
        if name and (name not in newest or number >= newest[name][0]):
            newest[name] = (number, path)
    run.pictures = [(name, step, path) for name, (step, path) in newest.items()]
