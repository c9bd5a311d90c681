"""Every block of code in the documentation runs; what cannot run here is checked."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from flextrain.testing import WorkerGroup

from ..conftest import IMPORTS
from .pages import blocks, name, pages
from .running import go_through

pytestmark = pytest.mark.processes
PAGES = [path for path in pages() if blocks(path)]
FULL = [path for path in PAGES if any(block.mode == "full" for block in blocks(path))]
OFTEN = ["torchmetrics", "transformers.models.llama.modeling_llama", "peft", "torch.utils.tensorboard"]
"""What several pages import, each in processes of its own: for all of them once."""


@pytest.fixture(scope="module")
def warm() -> Iterator[WorkerGroup]:
    """A process that has imported all and runs nothing: a page's processes are forked from it."""
    installed = [name for name in OFTEN if importlib.util.find_spec(name.partition(".")[0])]
    with WorkerGroup(1, 900, imports=[*IMPORTS, *installed]) as group:
        yield group


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page(warm: WorkerGroup, page: Path) -> None:
    (found,) = warm.run(go_through, blocks(page), False)
    assert not found, "\n".join(found)


@pytest.mark.full
@pytest.mark.parametrize("page", FULL, ids=name)
def test_all_of_a_page(warm: WorkerGroup, page: Path) -> None:
    (found,) = warm.run(go_through, blocks(page), True)
    assert not found, "\n".join(found)
