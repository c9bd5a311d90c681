"""What each process keeps for itself, as docs/strategy_state.md does it: the sum stays when the number of processes changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flextrain.core.comm import collectives as dist
from flextrain.testing.conformance_checks import batches, load, one_each, run, save, sgd
from flextrain.testing.sessions import started

from ..conftest import WorkerFactory

PAGE = Path(__file__).parents[2] / "docs" / "strategy_state.md"


def rests_strategy() -> Any:
    """The class on the page."""
    source = next(text for text in PAGE.read_text().split("```python\n") if "class RestsStrategy" in text)
    names: dict[str, Any] = {}
    exec(source.partition("```")[0], names)
    return names["RestsStrategy"]()


def save_rests(path: Path) -> None:
    """In a worker."""
    with started(rests_strategy, sgd()) as session:
        run(session, one_each(batches(1)))
        for rest in session.strategy.rests.values():  # type: ignore[attr-defined]
            rest.fill_(dist.get_rank() + 1.0)
        save(session, path)


def load_rests(path: Path) -> list[float]:
    """In a worker: for each parameter, what all processes have together."""
    with started(rests_strategy, sgd()) as session:
        load(session, path)
        rests = session.strategy.rests.values()  # type: ignore[attr-defined]
        return [float(dist.all_reduce(rest.flatten()[:1].clone())) for rest in rests]


@pytest.mark.distributed
def test_rests_on_another_number_of_processes(workers: WorkerFactory, tmp_path: Path) -> None:
    for before, after in ((2, 1), (1, 2), (2, 3)):
        path = tmp_path / f"{before}-{after}"
        workers(before).run(save_rests, path)
        for found in workers(after).run(load_rests, path):
            assert found
            assert set(found) == {before * (before + 1) / 2}
