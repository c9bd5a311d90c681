"""Remote storage whose listings lag: they show a moment of the past."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.checkpoint import Checkpoint, as_path, find_latest, is_checkpoint, save_checkpoint

from ..runner.training import make_runner

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("upath")

from fsspec import AbstractFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


class Listings:
    """What a folder in memory is listed to hold: what it held at one moment, while files are read and written as ever."""

    def __init__(self) -> None:
        self.seen: set[str] | None = None

    def stop(self) -> None:
        """From now on listings show this moment."""
        self.seen = set(MemoryFileSystem.store)

    def go_on(self) -> None:
        self.seen = None


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listings]:
    found, ls = Listings(), MemoryFileSystem.ls

    def lagging(self: Any, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if found.seen is None:
            return ls(self, path, detail=detail, **kwargs)
        folder = self._strip_protocol(path).rstrip("/") + "/"
        inside = [name.removeprefix(folder) for name in found.seen if name.startswith(folder)]
        kinds = {folder + name.split("/")[0]: "directory" if "/" in name else "file" for name in inside}
        if not kinds and not self.exists(path):
            raise FileNotFoundError(path)
        return [dict(name=name, type=kind, size=0) for name, kind in kinds.items()] if detail else sorted(kinds)

    monkeypatch.setattr(MemoryFileSystem, "ls", lagging)
    monkeypatch.setattr(MemoryFileSystem, "find", AbstractFileSystem.find)  # by ``ls``, as most have it
    yield found
    found.go_on()
    MemoryFileSystem.store.clear()


ROOT = "memory://lagging/a"


def value_in(path: Any) -> float:
    x = torch.zeros(4)
    Checkpoint.open(path).load({"x": x})
    assert torch.equal(x, x[:1].expand(4))
    return float(x[0])


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((4,), value), "loop": {"iter": int(value)}}


def test_a_checkpoint_is_replaced_whole_where_listings_lag(listings: Listings) -> None:
    """Its new files are not listed yet; copying what is listed would leave a manifest without tensors."""
    save_checkpoint(f"{ROOT}/c", state(1.0), is_latest=True)
    listings.stop()
    save_checkpoint(f"{ROOT}/c", state(2.0), is_latest=True)
    assert value_in(f"{ROOT}/c") == 2.0
    listings.go_on()
    assert value_in(find_latest(ROOT)) == 2.0
    assert {path.name for path in as_path(ROOT).iterdir()} == {"c", "latest"}


def test_a_run_where_listings_lag(listings: Listings, tmp_path: Path) -> None:
    """They show the first checkpoint until the end: the right ones are kept, deleted, and resumed."""
    options: dict[str, Any] = dict(
        default_hooks=dict(checkpoint=dict(interval=1, out_dir=ROOT, max_keep_ckpts=1, on_error="raise"))
    )
    make_runner(tmp_path / "run", train_cfg=dict(max_epochs=1), **options).train()
    listings.stop()
    make_runner(tmp_path / "run", train_cfg=dict(max_epochs=3), resume=True, **options).train()
    again = make_runner(tmp_path / "run", train_cfg=dict(max_epochs=4), resume=True, **options)
    again.train()
    assert again.train_loop.start_iter == 21
    listings.go_on()
    folder = as_path(f"{ROOT}/run")
    assert {path.name for path in folder.iterdir() if is_checkpoint(path)} == {"epoch_4"}
    left = [name for name in MemoryFileSystem.store if "epoch_4" not in name and not name.endswith("latest")]
    assert left == [], "files that nobody would ever delete"
