"""Values that differ by process and stay in the processes' own files: saved, read back, damaged, and what rank 0 gets of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from flextrain import CheckpointError, FlexibleRunner
from flextrain.commands.checkpoint import describe
from flextrain.core.checkpoint import Checkpoint, Staging, directory, save_checkpoint, save_in_background
from flextrain.core.checkpoint import plain_values as own_row
from flextrain.core.checkpoint.compare import damages
from flextrain.core.checkpoint.plain_values import OwnRow, RowFacts, plan_rows
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup
from flextrain.testing.simulation import Simulation
from flextrain.testing.simulation.group_private import CHECKED

from ..runner.training import Net, Samples, whole_state

pytestmark = pytest.mark.skipif(
    Version(torch.__version__).release[:2] != CHECKED.release[:2],
    reason=f"ranks are simulated with torch {CHECKED} only",
)


@pytest.fixture(autouse=True)
def _in_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_row, "FROM", 2)


def on_ranks(size: int, function: Any, *args: Any) -> tuple[list[Any], list[int]]:
    """The results of all ranks, and the bytes that each has given to collectives and got."""
    simulation, spent = Simulation(size), [0] * size

    def joined() -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=size, init_method="env://", timeout_s=30)
        before = simulation.counts.nbytes[rank]
        try:
            return function(rank, *args)
        except CheckpointError as error:
            return str(error)
        finally:
            spent[rank] = simulation.counts.nbytes[rank] - before
            dist.destroy_process_group()

    return simulation.run(joined), spent


def values_of(rank: int, save: int) -> dict[str, Any]:
    return {"rng": {"rank": rank, "state": [save] * 400, "text": "\u00e4\n"}, "loader": None if rank % 2 else [rank]}


def saves(rank: int, folder: Path, numbers: dict[int, int], background: bool) -> list[Any]:
    """Several saves with one plan, then one whose values do not fit any more; ``numbers`` says who has which row."""
    staging, plans = Staging(), []
    for save in (1, 12, 123_456_789):
        own = values_of(rank, save) if rank in numbers else None
        function = save_in_background if background else save_checkpoint
        done = function(
            folder / str(save),
            {"w": torch.arange(3.0), "loop": {"iter": save}},
            per_rank={"losses": [rank]},
            in_own_file=own,
            number=numbers.get(rank, rank),
            staging=staging,
        )
        if not isinstance(done, Path):
            done.wait()
        plans.append(staging.plan)
    return [plans[0] is plans[1], plans[1] is plans[2]]


@pytest.mark.parametrize(
    "numbers", [{0: 0, 1: 1, 2: 2, 3: 3}, {0: 0, 2: 1}, {3: 0, 2: 1, 1: 2, 0: 3}, {1: 0, 0: 1, 3: 2}, {2: 0}]
)
def test_values_come_back(tmp_path: Path, numbers: dict[int, int]) -> None:
    found, _ = on_ranks(4, saves, tmp_path, numbers, False)
    assert found == [[True, False]] * 4
    come_back(tmp_path, numbers)


def come_back(tmp_path: Path, numbers: dict[int, int]) -> None:
    order = sorted(numbers, key=lambda rank: numbers[rank])
    for save in (1, 12, 123_456_789):
        path = tmp_path / str(save)
        assert not list(damages(path))
        opened = Checkpoint.open(path)
        assert opened.tensors.keys() == {"w"}
        for key in ("rng", "loader"):
            assert opened.values[key] == [values_of(rank, save)[key] for rank in order]
            assert len(opened.values[key]) == len(order)
        assert opened.values["rng"][-1] == values_of(order[-1], save)["rng"]
        assert opened.values["rng"][1:] == [values_of(rank, save)["rng"] for rank in order[1:]]
        with pytest.raises(IndexError):
            opened.values["rng"][len(order)]
        assert len((path / "values.json").read_bytes()) < 300
        assert describe(opened)["values"]["rng"] == [values_of(rank, save)["rng"] for rank in order]


def saves_in_background(folder: Path) -> list[Any]:
    """In a worker: see ``saves``."""
    own_row.FROM = 2
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="env://", timeout_s=30)
    try:
        return saves(rank, folder, {0: 0, 1: 1}, True)
    finally:
        own_row.FROM = 64
        dist.destroy_process_group()


@pytest.mark.distributed
def test_values_come_back_from_the_background(workers2: WorkerGroup, tmp_path: Path) -> None:
    assert workers2.run(saves_in_background, tmp_path) == [[True, False]] * 2
    come_back(tmp_path, {0: 0, 1: 1})


def test_rank_0_gets_little_of_them(tmp_path: Path) -> None:
    def once(rank: int) -> None:
        own = {"rng": ["x" * 20_000]}
        save_checkpoint(tmp_path / "a", {"w": torch.ones(2)}, in_own_file=own, per_rank={"losses": []})

    _, few = on_ranks(4, once)
    _, many = on_ranks(8, once)
    assert many[0] < 2 * few[0] < 20_000
    assert max(many[1:]) < max(few[1:]) + 200


def test_values_that_do_not_fit_together(tmp_path: Path) -> None:
    def differ(rank: int) -> None:
        save_checkpoint(tmp_path / "a", {}, in_own_file={"rng": 1} if rank else {"other": 1})

    def twice(rank: int) -> None:
        save_checkpoint(tmp_path / "a", {}, in_own_file={"rng": 1}, number=3)

    def unfit(rank: int) -> None:
        save_checkpoint(tmp_path / "a", {}, in_own_file={"rng": {1} if rank == 1 else 1})

    for function, says in (
        (differ, "rank 1 has rng of its own, and rank 0 has other"),
        (twice, "rank 1 and another one have values number 3"),
        (unfit, "rank 1: per_rank.rng (set): cannot be saved"),
    ):
        found, _ = on_ranks(3, function)
        assert all(says in one for one in found), found
        assert not list(tmp_path.iterdir())


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    on_ranks(2, lambda rank: save_checkpoint(tmp_path / "a", {"w": torch.ones(2)}, in_own_file=values_of(rank, 1)))
    path = tmp_path / "a" / "rank-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"rank": 1', b'"rank": 7'))
    assert path.read_bytes() != content
    opened = Checkpoint.open(tmp_path / "a")
    assert opened.values["rng"][0]["rank"] == 0
    with pytest.raises(CheckpointError, match="row 1 of values by process has another checksum"):
        opened.values["rng"][1]
    path.write_bytes(content)
    texts = directory.read_manifest_text(tmp_path / "a"), b'{"values by process": ["rng", "more"]}'
    with pytest.raises(CheckpointError, match="is damaged, values by process lack some of rng, more in row 0"):
        Checkpoint._from_texts(tmp_path / "a", *texts).values["more"][0]
    with pytest.raises(CheckpointError, match="is damaged, values by process are incomplete"):
        Checkpoint._from_texts(tmp_path / "a", texts[0], b"{}")
    with pytest.raises(CheckpointError, match="checkpoints have a tensor of this name"):
        save_checkpoint(tmp_path / "b", {"values by process": torch.ones(1)})


def test_rows_of_4096_processes_are_one_entry() -> None:
    plan, keys = plan_rows([RowFacts(rank, 22_000 + rank % 7, ("rng",)) for rank in range(4096)])
    assert plan is not None
    assert keys == ["rng"]
    assert len(plan.tensor().layout.model_dump_json()) < 100
    assert [part.box for part in plan.part_of(4095)] == [((4095, 0), (1, plan.length))]
    row = OwnRow(0, {"rng": "x" * (plan.length - 100)})
    row.facts()
    assert row.fits(plan)
    assert not row.fits(None)


def trained(folder: Path, epochs: int, resume: bool, size: int) -> list[dict[str, Tensor]]:
    """The state of each rank of a run; its model has dropout, so that weights tell whether random states came back."""

    def train() -> dict[str, Tensor]:
        runner = FlexibleRunner(
            model=Net(),
            work_dir=folder,
            strategy="ddp",
            resume=resume,
            train_dataloader=dict(batch_size=2, dataset=Samples(16, noisy=True), collate_fn="default_collate"),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
            train_cfg=dict(by_epoch=True, max_epochs=epochs),
            env_cfg=dict(preemption=False, watchdog=False),
            randomness=dict(seed=1, diff_rank_seed=True),
        )
        runner.train()
        return {key: value.clone() for key, value in whole_state(runner).items() if isinstance(value, Tensor)}

    return Simulation(size).run(train)


def test_a_run_goes_on_with_its_random_states(tmp_path: Path) -> None:
    expected = trained(tmp_path / "straight", 2, False, 2)
    trained(tmp_path / "parts", 1, False, 2)
    assert "rng" not in (tmp_path / "parts" / "epoch_1" / "values.json").read_text().replace('["rng", "loader"]', "")
    found = trained(tmp_path / "parts", 2, True, 2)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert len(trained(tmp_path / "parts", 3, True, 4)) == 4
