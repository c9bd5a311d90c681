"""A plan as one HTML file, which needs no network: a table, charts of memory and of bytes sent, and what to know of them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from string import Template

from ...core.checkpoint.export.files import Pending
from ...core.errors import ConfigError, counted
from ..page_style import STYLE
from .charts import (
    KIND_COLOURS,
    LINK_COLOURS,
    TIME_COLOURS,
    busiest_of,
    bytes_sent,
    check_charts,
    device_is_drawn,
    highest_of,
    memory_at_peak,
    memory_over_update,
    sent_by_axis,
    time_of_a_step,
)
from .plan import Kind, Moment, RankPlan, StrategyPlan, TrainingPlan
from .report import CAPTION, about_times, cells, headings, interval, lines_on, not_seen, size, where_it_is

_KIND_WORDS: dict[Kind, str] = {
    "optimizer_state": "optimizer state",
    "communication": "communication (gathered parameters, buffers of collectives)",
    "temporary": "temporary (gradients of activations, and the like)",
}
_LINK_WORDS = {"inside": "to processes of the same node", "between": "to other nodes"}
_LONG = 40  # letters of a name
_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def check_page(path: str | Path, where: str = "plan.html") -> None:
    """Check, before anything is planned, that a page can be written.

    Raises:
        ConfigError: its folder does not exist or cannot be written to, ``path`` is a folder, or the package that draws is
            missing.
    """
    file = Path(path)
    folder = file.absolute().parent
    if file.is_dir():
        raise ConfigError(f"{where}: {path} is a folder, give the path of a file")
    if not folder.is_dir():
        raise ConfigError(f"{where}: there is no folder {folder} for {file.name}, make it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{where}: the folder {folder} cannot be written to")
    check_charts(where)


def write_page(plan: TrainingPlan, path: str | Path) -> None:
    """Write the page; there is never a part of it under this name.

    Raises:
        ConfigError: see ``check_page``.
        CheckpointError: the storage failed.
    """
    check_page(path)
    text = page(plan)
    with Pending(Path(path).absolute()) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def page(plan: TrainingPlan) -> str:
    """Return the page of a plan."""
    pair = "".join(filter(None, (_memory_at_peak(plan), _sent(plan), _times(plan))))
    sections = (
        _heading(plan),
        _table(plan),
        f'<div class="pair">{pair}</div>' if pair else "",
        _memory_over_updates(plan),
        _remarks(plan),
        _every_collective(plan),
    )
    title = escape(f"Plan of {Path(plan.script).name}")
    return _PAGE.substitute(title=title, style=STYLE, body="\n".join(filter(None, sections)))


def _heading(plan: TrainingPlan) -> str:
    facts = {
        "script": plan.script,
        "processes": f"{plan.world_size:,}",
        "nodes": f"{plan.nodes:,}",
        "device memory": "not given" if plan.device_memory is None else size(plan.device_memory),
        "torch": plan.torch,
    }
    if plan.arguments:
        facts = {"script": facts["script"], "its arguments": shlex.join(plan.arguments), **facts}
    if plan.machine is not None:
        facts["machine"] = plan.machine.device
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    return f"<header><h1>{escape(Path(plan.script).name)}</h1><p>{_verdict(plan)}</p><dl>{items}</dl></header>"


def _verdict(plan: TrainingPlan) -> str:
    """What the plan says in one sentence."""
    of = f"of {counted(len(plan.strategies), 'strategy', 'strategies')}"
    refused = sum(one.status == "refused" for one in plan.strategies)
    found = [f"{refused} {of} refused"] if refused else []
    if plan.device_memory is not None:
        fitting = sum(plan.fits(one) is True for one in plan.strategies)
        found.insert(0, f"{fitting} {of} {'fits' if fitting == 1 else 'fit'} on the device")
    return f"One update of one rank. {'; '.join(found)}".strip()


def _table(plan: TrainingPlan) -> str:
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings(plan))
    rows = "".join(_row(plan, strategy) for strategy in plan.strategies)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<section><div class="wide">{table}</div><p class="small">{escape(CAPTION)}</p></section>'


def _row(plan: TrainingPlan, strategy: StrategyPlan) -> str:
    verdict = {True: "yes", False: "no", None: strategy.status}[plan.fits(strategy)]
    names = headings(plan)[1:]
    kinds = [' class="fits"' if name == "fits" else "" for name in names]
    body = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, cells(plan, strategy), strict=True))
    return f'<tr class="{verdict}"><th scope=row>{_name(strategy)}</th>{body}</tr>'


def _name(strategy: StrategyPlan) -> str:
    """A strategy's name, which breaks only if it is long."""
    kind = ' class="long"' if len(strategy.strategy) > _LONG else ""
    return f"<span{kind}>{escape(strategy.strategy)}</span>"


def _planned(plan: TrainingPlan) -> list[tuple[StrategyPlan, RankPlan]]:
    return [(one, rank) for one in plan.strategies if (rank := one.highest) is not None]


def _kinds(moments: Iterable[Moment], words: Mapping[Kind, str]) -> str:
    """The legend of the kinds of memory that there are."""
    there = {kind for moment in moments for kind, count in moment.by_kind.items() if count}
    return _legend(
        (KIND_COLOURS[kind], words.get(kind, kind.replace("_", " "))) for kind in KIND_COLOURS if kind in there
    )


def _memory_at_peak(plan: TrainingPlan) -> str:
    planned = _planned(plan)
    if not planned:
        return ""
    legend = _kinds((rank.peak for _, rank in planned), _KIND_WORDS)
    chart = f"<figure>{memory_at_peak(plan, size)}<figcaption>{_of_the_device(plan)}</figcaption></figure>"
    return f"<section><h2>Memory at the peak</h2>{legend}{chart}</section>"


def _of_the_device(plan: TrainingPlan) -> str:
    if plan.device_memory is None:
        return "The device's memory was not given (--device-memory)."
    where = "is the vertical line" if device_is_drawn(plan) else "lies far to the right"
    free = f"; {size(plan.unseen)} of it are left free for what is not seen" if plan.unseen else ""
    return f"The device's memory of {size(plan.device_memory)} {where}{free}."


def _memory_over_updates(plan: TrainingPlan) -> str:
    drawn = [(strategy, rank) for strategy, rank in _planned(plan) if rank.moments]
    if not drawn:
        return ""
    legend = _kinds((moment for _, rank in drawn for moment in rank.moments), {})
    charts = "".join(_memory_over_update(plan, *each) for each in drawn)
    text = "Each chart has a scale of its own. The triangle is the peak."
    if plan.device_memory is not None and any(rank.peak.total >= plan.device_memory for _, rank in drawn):
        text += " The horizontal line is the device's memory."
    return f'<section><h2>Memory over the update</h2>{legend}<p class="small">{text}</p><div class="grid">{charts}</div></section>'


def _memory_over_update(plan: TrainingPlan, strategy: StrategyPlan, rank: RankPlan) -> str:
    at = where_it_is(rank)
    if highest_of(rank) is None:
        at += "; not in the update that is drawn, but in the one before, which creates the optimizer's state"
    caption = f"<strong>{size(rank.peak.total)}</strong> in {escape(at)}"
    chart = memory_over_update(rank, strategy.strategy, plan.device_memory)
    return f"<figure><h3>{escape(strategy.strategy)}</h3>{chart}<figcaption>{caption}</figcaption></figure>"


def _sent(plan: TrainingPlan) -> str:
    sending = [strategy for strategy in plan.strategies if sent_by_axis(strategy)]
    if not sending:
        return ""
    legend = _legend((colour, _LINK_WORDS[link]) for link, colour in LINK_COLOURS.items())
    caption = "By axis of the mesh, from the planned rank that sends most. Messages go in a ring."
    chart = f"<figure>{bytes_sent(sending, size)}<figcaption>{caption}</figcaption></figure>"
    return f"<section><h2>Bytes sent in an update</h2>{legend}{chart}</section>"


def _times(plan: TrainingPlan) -> str:
    if all(one.time is None for one in plan.strategies):
        return ""
    words = {"least": "if computing and sending overlap perfectly", "most": "more, if nothing overlaps"}
    legend = _legend((colour, words[part]) for part, (colour, _) in TIME_COLOURS.items())
    caption = " ".join(f"{escape(line)}" for line in about_times(plan))
    return f"<section><h2>Time of a step</h2>{legend}<figure>{time_of_a_step(plan, interval)}<figcaption>{caption}</figcaption></figure></section>"


def _every_collective(plan: TrainingPlan) -> str:
    rows = "".join(_collectives(strategy) for strategy in plan.strategies)
    if not rows:
        return ""
    heads = ("strategy", "collective", "axis", "ranks", "phase", "calls", "whole tensors", "sent inside", "between")
    head = "".join(f"<th scope=col>{heading}</th>" for heading in heads)
    table = f'<div class="wide"><table class="many"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f"<section><details><summary>Every collective of an update</summary>{table}</details></section>"


def _collectives(strategy: StrategyPlan) -> str:
    rank = busiest_of(strategy)
    found = []
    for traffic in rank.traffic if rank is not None else ():
        texts = (
            *(traffic.collective, traffic.axis, f"{traffic.ranks:,}", traffic.phase),
            *(f"{traffic.count:,}", size(traffic.payload), size(traffic.inside), size(traffic.between)),
        )
        tds = "".join(f"<td>{escape(text)}</td>" for text in texts)
        found.append(f"<tr><th scope=row>{_name(strategy)}</th>{tds}</tr>")
    return "".join(found)


def _remarks(plan: TrainingPlan) -> str:
    found = []
    for strategy in plan.strategies:
        kind = ' class="refused"' if strategy.status == "refused" else ""
        for line, _ in lines_on(strategy):
            rest = line.removeprefix(f"{strategy.strategy}: ")
            found.append(f"<li{kind}><strong>{escape(strategy.strategy)}:</strong> {escape(rest)}</li>")
    found += [f"<li>{escape(note)}</li>" for note in plan.notes]
    found += [f"<li>{escape(line)}</li>" for line in (not_seen(plan), *about_times(plan))]
    return f'<section><h2>What to know</h2><ul class="remarks">{"".join(found)}</ul></section>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(words)}</li>' for colour, words in entries)
    return f'<ul class="legend">{items}</ul>'
