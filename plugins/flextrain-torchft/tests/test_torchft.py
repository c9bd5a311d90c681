"""Groups that die and join train every sample once, and what the record says, as one device does."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flextrain_torchft import lineage, rows
from flextrain_torchft.outer import OuterOptimizer
from flextrain_torchft.record import FILE, append, begin, next_head
from torch.utils.data import Sampler

from flextrain import ConfigError, StrategyError
from flextrain.core.checkpoint import Checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from torchft_checks import (
    check_equal,
    check_groups,
    ends,
    launched,
    nesterov,
    one_device,
    simulated,
    start,
)
from torchft_group import BATCH, EPOCHS, SAMPLES, UPDATES, Net, Numbered, runner_of
from torchft_kills import kill_at_random

try:
    from torchft.coordination import LighthouseServer
except ImportError as error:
    LighthouseServer, why_not = None, f"torchft cannot be imported: {error}"

FSDP: dict[str, Any] = dict(type="FSDPStrategy", device="cpu", timeout_s=300)
DILOCO: dict[str, Any] = dict(sync_every=3, outer_optimizer={})
needs_torchft = pytest.mark.skipif(LighthouseServer is None, reason="" if LighthouseServer else why_not)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=3_000)
    yield server.address()
    server.shutdown()


def replayed(alone: dict[int, dict[str, Any]], folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a loop of torch alone, from a group's first weights, on one device's batches."""
    data, model, losses = Numbered(), Net(), []
    model.load_state_dict(torch.load(folder / "initial.pt"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for update, line in alone.items():
        parts = [model(torch.tensor(ids), data.x[ids], data.y[ids])["loss"] for ids in line["seen"]]
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


def check_every_sample_once(alone: dict[int, dict[str, Any]], samples: int, epochs: int) -> None:
    trained = [sample for line in alone.values() for micro_batch in line["seen"] for sample in micro_batch]
    assert len(trained) == samples * epochs
    for epoch in range(epochs):
        assert sorted(trained[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


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


@pytest.mark.parametrize(
    "batch", [{"x": torch.ones(3), "y": torch.ones(2)}, {"x": "text"}, [torch.ones(()), torch.ones(2)]]
)
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
        (dict(inner={}, sync_every=0), "strategy.sync_every: 0 is not allowed, give 1 or more"),
        (dict(inner={}, sync_every=2.5), "strategy.sync_every"),
        (dict(inner={}, sync_evry=2), "sync_evry: .*sync_every"),
        (dict(inner={}, outer_optimizer={}), "strategy.outer_optimizer: has no meaning without strategy.sync_every"),
        (dict(inner={}, sync_every=2, outer_optimizer="SGD"), "strategy.outer_optimizer"),
        (dict(inner={}, sync_every=2, outer_optimizer=dict(momentu=0.5)), "strategy.outer_optimizer.momentu: .*momentum"),
        (dict(inner={}, sync_every=2, outer_optimizer=dict(type="SDG", lr=1.0)), 'strategy.outer_optimizer.type: "SDG" .*"SGD"'),
        (dict(inner={}, sync_every=2, outer_optimizer=dict(type="Muon", lr=1.0)), "strategy.outer_optimizer.type: Muon is not supported, give SGD, Adam or AdamW"),
        (dict(inner={}, sync_every=2, outer_optimizer=dict(momentum=0.0)), "strategy.outer_optimizer: Nesterov momentum requires"),
        (dict(inner={}, sync_every=2, outer_optimizer=dict(params=[])), "strategy.outer_optimizer.params"),
    ],
)  # fmt: skip
def test_wrong_options(given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises((ConfigError, StrategyError), match=message) as found:
        runner_of(tmp_path, dict(type="flextrain_torchft:TorchFTStrategy", **given))
    assert "\n" not in str(found.value)


# Rounds, without processes


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, lambda ps: torch.optim.SGD(ps, lr=1.0)),
        ({}, nesterov),
        (dict(lr=0.4), lambda ps: torch.optim.SGD(ps, lr=0.4, momentum=0.9, nesterov=True)),
        (dict(type="SGD", lr=0.4), lambda ps: torch.optim.SGD(ps, lr=0.4)),
        (dict(type="AdamW", lr=0.4), lambda ps: torch.optim.AdamW(ps, lr=0.4)),
    ],
)
def test_an_outer_optimizer_goes_on_from_a_checkpoint(given: dict[str, Any] | None, meant: Any) -> None:
    """Three rounds of two groups, each of which adds a number; the last round is made by an optimizer that was given the state."""
    live, other = (torch.ones(2, 2, dtype=torch.float64) for _ in range(2))
    expected = torch.nn.Parameter(live.clone())
    by_torch, outer = meant([expected]), OuterOptimizer(given)
    for round_number in range(3):
        if round_number == 2:
            before, outer = outer, OuterOptimizer(given)
            saved = before.entries()
            template = outer.template(saved, {"w": live})
            assert template.keys() == saved.keys()
            for key, value in template.items():
                value.copy_(saved[key])
            outer.load({"optim.wrapper": {}, **template})
        outer.begin({"w": live})
        live += 0.5 * (round_number + 1)
        other.copy_(expected.detach() - 0.25)
        expected.grad = expected.detach() - (live + other) / 2
        (sent,) = outer.pseudo_gradients()
        sent += expected.detach() - other
        outer.step(2)
        by_torch.step()
        check_equal({"w": live}, {"w": expected.detach()})
    if given is None:
        check_equal({"w": live}, {"w": expected.detach()})
    outer.load({"optim.wrapper": {}})
    assert not outer.entries()


def test_state_of_another_outer_optimizer_is_left() -> None:
    adam = {f"optim.own.outer.w.{key}": torch.ones(2) for key in ("step", "exp_avg", "exp_avg_sq")}
    assert not OuterOptimizer({}).template(adam, {"w": torch.ones(2)})
    assert not OuterOptimizer(None).template({"optim.own.outer.w.momentum_buffer": torch.ones(2)}, {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(default_hooks=dict(checkpoint=dict(interval=3, by_epoch=False))), "CheckpointHook.interval: 3 is in the middle of a round of strategy.sync_every=2 updates, give a multiple of 2"),
        (dict(default_hooks=dict(checkpoint=dict(interval=2, by_epoch=False, save_begin=3))), "CheckpointHook.save_begin: 3 is in the middle"),
        (dict(default_hooks=dict(checkpoint=dict(interval=2, by_epoch=False)), samples=25), "CheckpointHook.interval: 2 .* epoch of 3; save by_epoch=True"),
        (dict(custom_hooks=[dict(type="EMAHook")]), "EMAHook: is not supported with strategy.sync_every"),
        (dict(custom_hooks=[dict(type="LossSpikeHook")]), "LossSpikeHook: is not supported with strategy.sync_every"),
        (
            dict(
                train_cfg=dict(max_iters=8, val_interval=3), val_cfg={}, val_evaluator=dict(type="Accuracy", task="multiclass", num_classes=2),
                val_dataloader=dict(dataset=Numbered(), batch_size=6, collate_fn="default_collate"),
                param_scheduler=[],
            ),
            "train_cfg.val_interval: 3 is in the middle of a round of strategy.sync_every=2 updates",
        ),
    ],
)  # fmt: skip
def test_what_needs_weights_within_a_round_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens:
        address = f"http://127.0.0.1:{listens.getsockname()[1]}"
        strategy = dict(
            type="flextrain_torchft:TorchFTStrategy",
            inner=dict(type="SingleDeviceStrategy", device="cpu"),
            lighthouse=address,
        )
        with runner_of(tmp_path, dict(**strategy, sync_every=2), **more) as runner:
            with pytest.raises(ConfigError, match=message) as found:
                runner.train()
            assert "\n" not in str(found.value)


# Groups that are processes


@needs_torchft
@pytest.mark.processes
def test_two_groups_train_as_one_device(tmp_path: Path, lighthouse: str) -> None:
    """With schedules, accumulation and clipping; a checkpoint of a group goes on without groups."""
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [start(folder, lighthouse, min_replicas=2) for folder in folders]
    alone, weights = one_device(tmp_path / "alone")
    check_every_sample_once(alone, SAMPLES, EPOCHS)
    for process, folder in zip(processes, folders, strict=True):
        ends(process, folder)
    record = check_groups(folders, folders, alone, weights)
    assert {line["groups"] for line in record} == {2}
    assert "Got iteration 0 from another of 2 groups" in "".join((f / "output.txt").read_text() for f in folders)
    losses, by_torch = replayed(alone, folders[0])
    check_equal(weights, by_torch)
    assert [line["loss"] for line in alone.values()] == pytest.approx(losses, rel=1e-12)
    for strategy in ("SingleDeviceStrategy", "FSDPStrategy"):
        _, resumed = one_device(tmp_path / strategy, strategy, resume=str(folders[1] / "epoch_2"))
        check_equal(resumed, weights)


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
def test_a_group_dies_and_another_joins(tmp_path: Path, lighthouse: str) -> None:
    """One is killed in the forward of an update, which the other makes alone; a third gets a checkpoint in the next epoch."""
    a, b, c = folders = [tmp_path / name for name in "abc"]
    processes = [
        start(a, lighthouse, events=dict(waits={str(b / "arrived"): 0, str(c / "arrived"): 6})),
        start(b, lighthouse, min_replicas=2, events=dict(dies_at=3)),
        start(c, lighthouse, after=str(a / "epoch_1")),
    ]
    ends(processes[1], b, code=-9)
    ends(processes[0], a)
    ends(processes[2], c)
    record = check_groups(folders, [a, c], *one_device(tmp_path / "alone"))
    assert [line["groups"] for line in record[1:3]] == [2, 2]
    assert [line["groups"] for line in record[3:6]] == [1, 1, 1]
    assert record[-1]["groups"] == 2
    assert "A group was lost in the middle of an update" in (a / "output.txt").read_text()


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("groups", [2, 3])
def test_kills_at_random_moments(groups: int, tmp_path: Path, lighthouse: str) -> None:
    killed = kill_at_random(tmp_path, lighthouse, groups, kills=3, seed=groups)
    assert len(killed) == 3


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
def test_groups_of_two_processes_under_fsdp(tmp_path: Path, lighthouse: str) -> None:
    """A micro-batch of each process has six rows; one device has them in one of twelve; 40 samples need no filling up."""
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [
        (start(folder, lighthouse, variables, min_replicas=2, inner=FSDP, more=dict(samples=40)), folder)
        for folder in folders
        for variables in launched(2)
    ]
    for process, folder in processes:
        ends(process, folder)
    record = lineage(folders)
    assert [line["groups"] for line in record] == [2] * len(record)
    _, weights = one_device(tmp_path / "alone", batch_size=2 * BATCH, samples=40)
    found = [torch.load(folder / "weights.pt") for folder in folders]
    check_equal(found[0], weights)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    _, resumed = one_device(tmp_path / "resumed", batch_size=2 * BATCH, samples=40, resume=str(folders[1] / "epoch_2"))
    check_equal(resumed, weights)


# Rounds of groups that are processes


@needs_torchft
@pytest.mark.processes
def test_rounds_of_two_groups_are_those_of_two_models(tmp_path: Path, lighthouse: str) -> None:
    """DiLoCo: each group has its own state of AdamW; a round ends with the epoch, too. Checkpoints go on without groups."""
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [start(folder, lighthouse, min_replicas=2, rounds=DILOCO) for folder in folders]
    alone, _ = one_device(tmp_path / "alone")
    for process, folder in zip(processes, folders, strict=True):
        ends(process, folder)
    record = lineage(folders)
    assert [line["round"] for line in record] == [1, 1, 1, 4, 5, 5, 5, 8, 9, 9, 9, 12]
    weights, losses = simulated(torch.load(folders[0] / "initial.pt"), record, alone, nesterov)
    check_groups(folders, folders, alone, weights, losses=losses)
    assert not list(tmp_path.glob("*/round_start"))
    _, resumed = one_device(tmp_path / "resumed", resume=str(folders[1] / "epoch_3"))
    check_equal(resumed, weights)


class Counting(Net):
    """Has a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, *args: Any) -> Any:
        self.count += len(args[0])
        return super().forward(*args)


@needs_torchft
@pytest.mark.processes
def test_buffers_that_a_round_changes_are_refused(tmp_path: Path, lighthouse: str) -> None:
    inner = dict(type="SingleDeviceStrategy", device="cpu")
    strategy = dict(type="flextrain_torchft:TorchFTStrategy", inner=inner, lighthouse=lighthouse, sync_every=2)
    with runner_of(tmp_path, strategy, model=Counting) as runner:
        with pytest.raises(StrategyError, match="TorchFTStrategy: the buffer count has changed in training"):
            runner.train()
        assert runner.iter == 1


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
def test_local_sgd_with_fewer_samples_than_groups(tmp_path: Path, lighthouse: str) -> None:
    """The last batch of an epoch has one sample, so that one group makes no update."""
    folders, more = [tmp_path / "a", tmp_path / "b"], dict(samples=37)
    processes = [start(folder, lighthouse, min_replicas=2, rounds=dict(sync_every=2), more=more) for folder in folders]
    alone, _ = one_device(tmp_path / "alone", **more)
    for process, folder in zip(processes, folders, strict=True):
        ends(process, folder)
    record = lineage(folders)
    assert [line["rows"] for line in record[3::4]] == [[1]] * EPOCHS
    weights, losses = simulated(torch.load(folders[0] / "initial.pt"), record, alone, None, samples=37)
    check_groups(folders, folders, alone, weights, losses=losses)


class Strided(Sampler[int]):
    """Divides samples, and makes no parts equal."""

    def __init__(self, dataset: Any) -> None:
        self.numbers = range(int(os.environ.get("RANK", "0")), len(dataset), 2)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
def test_uneven_samples_within_a_group_are_refused_in_a_round(tmp_path: Path, lighthouse: str) -> None:
    """The last batches of an epoch have three samples and two."""
    loader = dict(
        dataset=Numbered(37),
        batch_size=4,
        num_workers=0,
        collate_fn="default_collate",
        sampler=dict(type=Strided),
        shard=False,
    )
    more = dict(train_dataloader=loader)
    places = launched(2)
    processes = [
        start(tmp_path, lighthouse, place, inner=FSDP, rounds=dict(sync_every=2), more=more) for place in places
    ]
    for process in processes:
        ends(process, tmp_path, code=1)
    said = (tmp_path / "output.txt").read_text()
    assert said.count("StrategyError: train_dataloader: processes of a group have batches of different sizes") >= 2


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
def test_rounds_of_groups_of_two_processes(tmp_path: Path, lighthouse: str) -> None:
    """Training by iterations: rounds do not end with epochs. The momentum is in the checkpoints of shards."""
    folders = [tmp_path / "a", tmp_path / "b"]
    more: dict[str, Any] = dict(
        samples=40, train_cfg=dict(max_iters=7), default_hooks=dict(checkpoint=dict(interval=3, by_epoch=False)),
        param_scheduler=[dict(type="LinearLR", start_factor=0.1, end=6, by_epoch=False)],
    )  # fmt: skip
    processes = [
        (start(folder, lighthouse, place, min_replicas=2, inner=FSDP, rounds=DILOCO, more=more), folder)
        for folder in folders
        for place in launched(2)
    ]
    alone, _ = one_device(tmp_path / "alone", batch_size=2 * BATCH, **more)
    for process, folder in processes:
        ends(process, folder)
    record = lineage(folders)
    assert [line["round"] for line in record] == [1, 1, 1, 4, 4, 4, 7]
    weights, losses = simulated(
        torch.load(folders[0] / "initial.pt"), record, alone, nesterov, processes=2, samples=40, ends_epochs=False
    )
    check_groups(folders, folders, alone, weights, losses=losses, processes=2)
    _, resumed = one_device(tmp_path / "resumed", batch_size=2 * BATCH, resume=str(folders[1] / "iter_7"), **more)
    check_equal(resumed, weights)
    # From the second round on, in groups of one process.
    for folder in folders:
        again = start(
            folder.with_name(f"{folder.name}_again"), lighthouse, min_replicas=2, rounds=DILOCO, batch_size=2 * BATCH,
            more=dict(more, resume=str(folder / "iter_3")),
        )  # fmt: skip
        processes.append((again, folder.with_name(f"{folder.name}_again")))
    for process, folder in processes[-2:]:
        ends(process, folder)
    again = torch.load(tmp_path / "a_again" / "weights.pt")
    for name, value in torch.load(tmp_path / "b_again" / "weights.pt").items():
        assert torch.equal(value, again[name])
    state = Checkpoint.open(folders[0] / "iter_3").entries.keys()
    assert "optim.own.outer.layers.0.weight.momentum_buffer" in state


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_rounds_go_on_from_checkpoints_with_the_outer_momentum(processes: int, tmp_path: Path, lighthouse: str) -> None:
    """Two groups that start anew after the first epoch end with the bits of two that did not.

    Which group has which share may change, so the optimizer within a group has no state.
    """
    whole, halves = [tmp_path / "a", tmp_path / "b"], [tmp_path / "c", tmp_path / "d"]
    sgd = dict(optimizer=dict(type="SGD", lr=0.02), accumulative_counts=2)
    inner = FSDP if processes > 1 else dict(type="SingleDeviceStrategy", device="cpu")
    for folders in (whole, halves):
        running = []
        for old, folder in zip(whole, folders, strict=True):
            more = dict(
                samples=40, optim_wrapper=sgd, **({} if folders is whole else dict(resume=str(old / "epoch_1")))
            )
            for place in launched(processes) if processes > 1 else [None]:
                given = dict(min_replicas=2, inner=inner, rounds=DILOCO, more=more)
                running.append((start(folder, lighthouse, place, **given), folder))
        for process, folder in running:
            ends(process, folder)
    weights = [torch.load(folder / "weights.pt") for folder in (*whole, *halves)]
    for name, value in weights[0].items():
        assert all(torch.equal(value, other[name]) for other in weights[1:])


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
def test_a_checkpoint_of_the_middle_of_a_round_goes_on_from_its_start(tmp_path: Path, lighthouse: str) -> None:
    folder = tmp_path / "a"
    ends(start(folder, lighthouse, rounds=DILOCO, events=dict(saves_at=5, dies_at=6)), folder, code=-9)
    ends(start(folder, lighthouse, rounds=DILOCO, more=dict(resume=str(folder / "between"))), folder)
    assert "round_start/iter_4: epoch 1, iteration 4" in (folder / "output.txt").read_text()
    alone, _ = one_device(tmp_path / "alone")
    weights, losses = simulated(torch.load(folder / "initial.pt"), lineage([folder]), alone, nesterov)
    check_groups([folder], [folder], alone, weights, losses=losses)


@needs_torchft
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(("processes", "sync_every"), [(2, None), (1, 10), (2, 10)])
def test_kills_of_groups_of_processes_and_in_rounds(
    processes: int, sync_every: int | None, tmp_path: Path, lighthouse: str
) -> None:
    killed = kill_at_random(tmp_path, lighthouse, groups=2, kills=2, seed=3, processes=processes, sync_every=sync_every)
    assert len(killed) == 2
