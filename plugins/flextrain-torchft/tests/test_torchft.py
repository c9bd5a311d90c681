"""Groups that die and join train every sample once, and what the record says, as one device does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flextrain_torchft import lineage, rows
from flextrain_torchft.record import FILE, append, begin, next_head

from flextrain import ConfigError, StrategyError

sys.path.insert(0, str(Path(__file__).parent))
from torchft_group import BATCH, EPOCHS, SAMPLES, UPDATES, Net, Numbered, runner_of

try:
    from torchft.coordination import LighthouseServer
except ImportError as error:
    LighthouseServer, why_not = None, f"torchft cannot be imported: {error}"

needs_torchft = pytest.mark.skipif(LighthouseServer is None, reason="" if LighthouseServer else why_not)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=50, heartbeat_timeout_ms=10_000
    )
    yield server.address()
    server.shutdown()


def start(folder: Path, lighthouse: str, launched: dict[str, str] | None = None, **given: Any) -> subprocess.Popen[str]:
    """A process of a group; ``launched`` has what torchrun gives each of several."""
    options = json.dumps(dict(folder=str(folder), lighthouse=lighthouse, **given))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.txt", "a") as output:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("torchft_group.py")), options], stdout=output, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(launched or {})},
        )  # fmt: skip


def launched(count: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def ends(process: subprocess.Popen[str], folder: Path, code: int = 0, limit_s: float = 200.0) -> None:
    try:
        found = process.wait(limit_s)
    finally:
        process.kill()
        process.wait()
    assert found == code, (folder / "output.txt").read_text()[-3000:]


def seen_in(folders: list[Path]) -> dict[tuple[Path, int], dict[str, Any]]:
    """What forward had of each update, by group; an update that was made again by a later process counts as it was then."""
    found = {}
    for folder in folders:
        for text in (folder / "seen_0.jsonl").read_text().splitlines():
            line = json.loads(text)
            found[folder, line["update"]] = line
    return found


def batches_of(record: list[dict[str, Any]], folders: list[Path]) -> list[list[list[int]]]:
    """The micro-batches of each update of the record, put together from the samples that the groups have computed."""
    seen = seen_in(folders)
    heads = {folder: [json.loads(t) for t in (folder / FILE).read_text().splitlines() if t] for folder in folders}
    batches = []
    for line in record:
        took_part = sorted(
            (one["group"], folder) for folder in folders for one in heads[folder] if one["head"] == line["head"]
        )
        assert [number for number, _ in took_part] == list(range(line["groups"]))
        parts = [seen[folder, line["update"]]["seen"] for _, folder in took_part]
        micro_batches = []
        for i, count in enumerate(line["rows"]):
            # A group without a share has computed one sample, which counts nothing.
            spans = [rows.span_of(count, number, line["groups"]) for number, _ in took_part]
            micro_batches.append([s for part, (a, b) in zip(parts, spans, strict=True) if b > a for s in part[i]])
            assert len(micro_batches[-1]) == count
        batches.append(micro_batches)
    return batches


def check_every_sample_once(record: list[dict[str, Any]], batches: list[list[list[int]]]) -> None:
    for epoch in range(EPOCHS):
        trained = [s for line, batch in zip(record, batches, strict=True) if line["epoch"] == epoch for part in batch for s in part]
        assert sorted(trained) == list(range(SAMPLES))


def replayed(batches: list[list[list[int]]], folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a loop of torch alone on one device, on these global batches."""
    data, model, losses = Numbered(), Net(), []
    model.load_state_dict(torch.load(folder / "initial.pt"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for update, batch in enumerate(batches, 1):
        parts = [model(torch.tensor(ids), data.x[ids], data.y[ids])["loss"] for ids in batch]
        loss = torch.stack(parts).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        if update % (UPDATES // EPOCHS) == 0:
            decay.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def check_equals_its_record(folders: list[Path], finished: list[Path]) -> list[dict[str, Any]]:
    """Every sample once, and weights and losses of a loop of torch on the record's batches; return the record."""
    record = lineage([finished[0], *folders])
    assert [line["update"] for line in record] == list(range(1, UPDATES + 1))
    batches = batches_of(record, folders)
    check_every_sample_once(record, batches)
    losses, weights = replayed(batches, folders[0])
    seen = seen_in(folders)
    for folder in finished:
        found = torch.load(folder / "weights.pt")
        assert found.keys() == weights.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-12, atol=1e-12)
            assert torch.equal(value, torch.load(finished[0] / "weights.pt")[name])
    logged = [next(seen[f, u]["loss"] for f in finished if (f, u) in seen) for u in range(1, UPDATES + 1)]
    assert logged == pytest.approx(losses, rel=1e-12)
    return record


def check_equals_one_device(folder: Path, tmp_path: Path, **more: Any) -> None:
    alone = runner_of(tmp_path / f"alone_{len(more)}", dict(type="SingleDeviceStrategy", device="cpu"), **more)
    alone.train()
    found = alone.strategy.model_state()
    for name, value in torch.load(folder / "weights.pt").items():
        torch.testing.assert_close(value, found[name], rtol=1e-12, atol=1e-12)
    alone.close()


# Without processes


def test_rows_are_divided() -> None:
    for count in (1, 2, 3, 7):
        spans = [rows.span_of(5, i, count) for i in range(count)]
        assert [s for a, b in spans for s in range(a, b)] == list(range(5))
    batch = {"x": torch.arange(6).view(3, 2), "more": [torch.arange(3), ("a", "b", "c")], "kind": "all"}
    assert rows.rows_in(batch) == 3
    part = rows.some_rows(batch, 1, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert (part["more"][0].tolist(), part["more"][1], part["kind"]) == ([1, 2], ("b", "c"), "all")


@pytest.mark.parametrize("batch", [{"x": torch.ones(3), "y": torch.ones(2)}, {"x": "text"}, [torch.ones(()), torch.ones(2)]])
def test_rows_that_cannot_be_divided(batch: Any) -> None:
    with pytest.raises(StrategyError, match=r"^train_dataloader: a batch has .*row for each sample"):
        rows.rows_in(batch)


def test_the_lineage_leaves_out_what_was_lost(tmp_path: Path) -> None:
    """The first group has made update 2 alone and was lost; the second has made another one."""
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        folder.mkdir()
        begin(folder)
        append(folder, dict(update=1, head=11, parent=5))
    append(a, dict(update=2, head=12, parent=11))
    append(b, dict(update=2, head=22, parent=11))
    with open(b / FILE, "a") as file:
        file.write('{"update": 3, "he')
    begin(b)
    append(b, dict(update=3, head=23, parent=22))
    assert [line["head"] for line in lineage([b, a])] == [11, 22, 23]
    assert [line["head"] for line in lineage([a, b])] == [11, 12]
    assert [line["head"] for line in lineage([a, b], head=23, since=2)] == [22, 23]
    with pytest.raises(ConfigError, match="no record has the update with head 5"):
        lineage([a, b], since=0)
    assert next_head(1, 2, [3]) != next_head(1, 2, [4])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(), "strategy.inner: missing"),
        (dict(inner=dict(type="DDPStrategy")), "strategy.inner.type: DDPStrategy is not supported"),
        (dict(inner={}, min_replica=2), "min_replica: .*min_replicas"),
        (dict(inner={}, min_replicas=0), "strategy.min_replicas: 0 is not allowed, give 1 or more"),
        (dict(inner={}, mode="DiLoCo"), "mode"),
        (dict(inner=dict(compile=True), compile=False), "strategy.compile: disagrees with strategy.inner.compile=True"),
        (dict(inner={}, lighthouse="http://127.0.0.1:9"), "strategy.lighthouse: nothing answers at http://127.0.0.1:9 .*torchft_lighthouse"),
        (dict(inner={}), "strategy.lighthouse: missing.*torchft_lighthouse"),
    ],
)  # fmt: skip
def test_wrong_options(given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises((ConfigError, StrategyError), match=message) as found:
        runner_of(tmp_path, dict(type="flextrain_torchft:TorchFTStrategy", **given))
    assert "\n" not in str(found.value)


# Groups that are processes


@needs_torchft
@pytest.mark.processes
def test_two_groups_train_as_one_device(tmp_path: Path, lighthouse: str) -> None:
    """With schedules, accumulation and clipping; a checkpoint of a group goes on on one device."""
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [start(folder, lighthouse, min_replicas=2) for folder in folders]
    for process, folder in zip(processes, folders, strict=True):
        ends(process, folder)
    record = check_equals_its_record(folders, folders)
    assert {line["groups"] for line in record} == {2}
    assert "Got iteration 0 from another of 2 groups" in "".join((f / "output.txt").read_text() for f in folders)
    check_equals_one_device(folders[0], tmp_path)
    check_equals_one_device(folders[0], tmp_path, resume=str(folders[1] / "epoch_2"))


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
def test_a_group_dies_and_another_joins(tmp_path: Path, lighthouse: str) -> None:
    """One is killed in the forward of an update, which the other makes alone; a third gets a checkpoint in the next epoch."""
    a, b, c = folders = [tmp_path / name for name in "abc"]
    processes = [
        start(a, lighthouse, events=dict(waits={str(b / "arrived"): 0, str(c / "arrived"): 6})),
        start(b, lighthouse, min_replicas=2, events=dict(dies_at=3)),
        start(c, lighthouse, after=str(a / "killed")),
    ]
    ends(processes[1], b, code=-9)
    (a / "killed").touch()
    ends(processes[0], a)
    ends(processes[2], c)
    record = check_equals_its_record(folders, [a, c])
    assert [line["groups"] for line in record[1:3]] == [2, 2]
    assert [line["groups"] for line in record[3:6]] == [1, 1, 1]
    assert record[-1]["groups"] == 2
    assert "A group was lost in the middle of an update" in (a / "output.txt").read_text()


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
def test_groups_of_two_processes_under_fsdp(tmp_path: Path, lighthouse: str) -> None:
    """A micro-batch of each process has six rows; one device has them in one of twelve."""
    folders = [tmp_path / "a", tmp_path / "b"]
    inner = dict(type="FSDPStrategy", device="cpu", timeout_s=300)
    processes = [
        (start(folder, lighthouse, variables, min_replicas=2, inner=inner), folder)
        for folder in folders
        for variables in launched(2)
    ]
    for process, folder in processes:
        ends(process, folder)
    record = lineage(folders)
    assert [line["groups"] for line in record] == [2] * len(record)
    for name, value in torch.load(folders[0] / "weights.pt").items():
        assert torch.equal(value, torch.load(folders[1] / "weights.pt")[name])
    check_equals_one_device(folders[0], tmp_path, batch_size=2 * BATCH)
