"""examples/pretraining.py: the same training on one device, with FSDP and on meshes, each of which continues what another began."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flextrain import FlexibleRunner, Hook
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import make, recipe, whole

pytest.importorskip("transformers")

SIZE = ("--max-iters", "4", "--interval", "4", "--dim", "16", "--layers", "2", "--length", "16")
WHOLE = ("--batch-size", "4")
HALF = ("--batch-size", "2")
# A pipeline and tensor parallelism have one data shard, whose batches are whole.
STRATEGIES = [
    pytest.param("ddp", HALF, marks=pytest.mark.full),
    ("fsdp", HALF),
    pytest.param("zero3", HALF, marks=[pytest.mark.full, pytest.mark.deepspeed]),
    pytest.param("mesh:tp=2", WHOLE, marks=pytest.mark.full),
    pytest.param("mesh:pp=2", WHOLE, marks=pytest.mark.full),
]


class Noted(Hook):
    """Losses and sequences of the updates; ends training after the update ``stop``."""

    priority = "LOWEST"

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.losses: list[float] = []
        self.sequences: list[set[tuple[int, ...]]] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        self.losses.append(float(outputs["loss"]))
        self.sequences.append({tuple(row) for batch in data_batch for row in batch["input_ids"].tolist()})
        if runner.iter + 1 == self.stop:
            runner.save_checkpoint(runner.work_dir, f"iter_{self.stop}")
            raise KeyboardInterrupt


def trained(folder: Path, flags: tuple[str, ...], stop: int | None = None) -> dict[str, Any]:
    """Train, to the end or to the update ``stop``: losses, sequences, perplexity, and weights that are here."""
    torch.manual_seed(0)
    flags = (*SIZE, *flags, "--data-dir", str(folder.parent / "tokens"))
    runner: FlexibleRunner = make("pretraining", folder, flags)
    runner.register_hook(noted := Noted(stop))
    try:
        try:
            runner.train()
        except KeyboardInterrupt:
            assert stop is not None
        metrics = dict(runner.val()) if stop is None else {}
        weights = {name: whole(tensor) for name, tensor in runner.strategy.model_state().items()}
    finally:
        runner.strategy.leave()
    return dict(losses=noted.losses, sequences=noted.sequences, metrics=metrics, weights=weights)


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What processes have found, as if they were one."""
    return dict(
        losses=[sum(losses) / len(found) for losses in zip(*(one["losses"] for one in found), strict=True)],
        sequences=[set().union(*of_update) for of_update in zip(*(one["sequences"] for one in found), strict=True)],
        metrics=found[0]["metrics"],
        weights={name: tensor for one in found for name, tensor in one["weights"].items()},
    )


def check(found: dict[str, Any], expected: dict[str, Any], first: int = 0) -> None:
    """``found`` begins with update ``first``."""
    assert found["sequences"] == expected["sequences"][first:]
    assert found["losses"] == pytest.approx(expected["losses"][first:], rel=1e-5)
    assert found["metrics"]["perplexity"] == pytest.approx(expected["metrics"]["perplexity"], rel=1e-4)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        close = torch.allclose(found["weights"][name], weight, rtol=1e-4, atol=1e-5)
        assert close, f"{name} differs by {(found['weights'][name] - weight).abs().max()}"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One device, not interrupted."""
    with alone():
        found = trained(tmp_path_factory.mktemp("alone") / "run", WHOLE)
    assert found["losses"][-1] < found["losses"][0]
    assert [len(sequences) for sequences in found["sequences"]] == [8] * 4, "two micro-batches of four"
    assert len(set().union(*found["sequences"])) == 32, "none comes twice"
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("strategy, batch", STRATEGIES)
def test_two_processes_train_as_one_device(
    tmp_path: Path, workers2: WorkerGroup, expected: dict[str, Any], strategy: str, batch: tuple[str, ...]
) -> None:
    found = workers2.run(trained, tmp_path / "run", (*batch, "--strategy", strategy))
    check(together(found), expected)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    "before, after",
    [
        (("fsdp", *HALF), ("mesh:tp=2", *WHOLE)),
        (("mesh:tp=2", *WHOLE), ("mesh:pp=2", *WHOLE)),
        (("mesh:pp=2", *WHOLE), ("fsdp", *HALF)),
        (("fsdp", *HALF), None),
    ],
)
def test_another_mesh_continues_with_the_next_sequence(
    tmp_path: Path,
    workers2: WorkerGroup,
    expected: dict[str, Any],
    before: tuple[str, ...],
    after: tuple[str, ...] | None,
) -> None:
    workers2.run(trained, tmp_path / "run", ("--strategy", *before), stop=2)
    if after is None:
        with alone():
            found = [trained(tmp_path / "run", (*WHOLE, "--resume"))]
    else:
        found = workers2.run(trained, tmp_path / "run", ("--strategy", *after, "--resume"))
    check(together(found), expected, first=2)


def test_files_hold_documents_and_are_written_once(tmp_path: Path) -> None:
    module = recipe("pretraining")
    module.write_tokens(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    sources = [f"{name}-{shard}.bin" for name in ("code", "prose") for shard in range(3)]
    assert names == sorted([*sources, "held_out-code.bin", "held_out-prose.bin"]), "and no temporary file"
    tokens = np.fromfile(tmp_path / "prose-1.bin", np.uint16)
    assert tokens[-1] == module.END == tokens.max()
    first = tokens[: int((tokens == module.END).argmax())].astype(np.uint8).tobytes().decode()
    assert first == list(module.pydoc_data.topics.topics.values())[2]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    module.write_tokens(tmp_path)
    module.write_shard(tmp_path / "prose-0.bin", ["other"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
