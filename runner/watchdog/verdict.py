"""The verdict on a run that stands still: which rank it waits for, and what every rank is doing."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from .whereabouts import Whereabouts

_MOST_GROUPS = 12


def verdict(
    seconds: float, reports: Mapping[int, Whereabouts], silent: Mapping[int, str], finished: Sequence[int] = ()
) -> str:
    """Say on one line whom a run waits for, and below it what every rank does.

    Args:
        seconds: how long nobody has got on.
        reports: those of the ranks that answer.
        silent: what is known of those that do not, such as "rank 1 (process 4711 on node2) is stopped (SIGSTOP)".
        finished: ranks that have left the run.
    """
    first = _culprits(reports, silent, finished)
    head = f"The run stands still for {seconds:.0f} s: {'; '.join(first)}"
    return "\n".join([head, *(f"  {line}" for line in _lines(reports, silent, finished) if line not in first)])


def _culprits(reports: Mapping[int, Whereabouts], silent: Mapping[int, str], finished: Sequence[int]) -> list[str]:
    """Say who keeps the others: whoever is not there, waits for nobody, is behind, or does what most do not."""
    if silent:
        return [*silent.values()]
    if ended := [report for report in reports.values() if report.failed]:
        return [f"{ranks([report.rank])} has failed, {report.failed}, and is still{report.words}" for report in ended]
    own = [report for report in reports.values() if not report.waits and report.rank not in finished]
    if finished:
        gone = f"{ranks(finished)} {'has' if len(finished) == 1 else 'have'} finished the run already"
        return [gone] if not own else [gone, *_groups(own, "waits for nobody")]
    if own and (len(own) < len(reports) or len(reports) == 1):
        return _groups(own, "waits for nobody")
    least = min(report.iteration for report in reports.values())
    behind = [report for report in reports.values() if report.iteration == least]
    if len(behind) < len(reports):
        return _groups(behind, "is behind the others")
    counts = collections.Counter(_doing(report) for report in reports.values())
    if len(counts) > 1 and len({report.collective for report in reports.values()}) > 1:
        return [f"the ranks wait in different calls: {', '.join(_groups(reports.values(), 'waits'))}"]
    if len(counts) > 1:
        usual = counts.most_common(1)[0]
        if usual[1] > len(reports) / 2:
            return _groups((r for r in reports.values() if _doing(r) != usual[0]), "is not where the others are")
        return [f"the ranks are in different calls: {', '.join(_groups(reports.values(), 'is'))}"]
    return [f"all ranks are at the same point,{next(iter(counts))}"]


def _lines(reports: Mapping[int, Whereabouts], silent: Mapping[int, str], finished: Sequence[int]) -> list[str]:
    waiting = [report for report in reports.values() if report.waits and report.rank not in finished]
    own = [report for report in reports.values() if not report.waits and report.rank not in finished]
    lines = [*silent.values(), *_groups(own, "waits for nobody"), *_groups(waiting, "waits for others")]
    more = len(lines) - _MOST_GROUPS
    return lines if more <= 0 else [*lines[:_MOST_GROUPS], f"and {more} more lines, see the log files of the ranks"]


def _groups(reports: Iterable[Whereabouts], does: str) -> list[str]:
    """Say what ranks do, with one text for all that do the same."""
    together: dict[tuple[int, str, str], list[int]] = {}
    for report in reports:
        together.setdefault((report.iteration, _doing(report), report.failed), []).append(report.rank)
    return [
        f"{ranks(members)} {_plural(does) if len(members) > 1 else does} in iteration {iteration + 1},{doing}{f', after {failed}' if failed else ''}"
        for (iteration, doing, failed), members in together.items()
    ]


def _plural(does: str) -> str:
    verb, _, rest = does.partition(" ")
    return f"{'are' if verb == 'is' else verb.removesuffix('s')} {rest}".rstrip()


def _doing(report: Whereabouts) -> str:
    return f"{report.words or ' at an unknown point'}{f' (last collective: {report.collective})' if report.collective else ''}"


def ranks(numbers: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 7``."""
    found = sorted(numbers)
    spans: list[list[int]] = []
    for number in found:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(found) > 1 else ''} {said}"
