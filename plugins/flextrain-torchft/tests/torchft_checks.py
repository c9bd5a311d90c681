"""Starts groups as processes, and compares what they have trained with one device."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from itertools import groupby
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from flextrain_torchft import lineage, rows
from torch import Tensor
from torchft_group import Events, Net, Numbered, full, run, runner_of

Lines = dict[tuple[Path, int], dict[str, Any]]


def start(folder: Path, lighthouse: str, launched: dict[str, str] | None = None, **given: Any) -> BaseProcess:
    """A process of a group; ``launched`` has what torchrun gives each of several. It is forked from one that has imported all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}.items():  # read when modules are imported
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.compile_fx", "torchft.manager", "flextrain.runner.runner"])
    options = dict(folder=str(folder), lighthouse=lighthouse, **given)
    process = context.Process(target=run, args=(options, str(folder / "output.txt"), launched or {}))
    process.start()
    return process


def launched(count: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def ends(process: BaseProcess, folder: Path, code: int = 0, limit_s: float = 200.0) -> None:
    try:
        process.join(limit_s)
        found = process.exitcode
    finally:
        process.kill()
        process.join()
    assert found == code, (folder / "output.txt").read_text()[-3000:]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that killed processes may have left in the middle of one."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def one_device(folder: Path, strategy: str = "SingleDeviceStrategy", **more: Any) -> tuple[dict[int, dict[str, Any]], dict[str, Tensor]]:  # fmt: skip
    """What a run of this configuration in this process has seen of each update, and its weights."""
    runner = runner_of(folder, dict(type=strategy, device="cpu"), [Events()], **more)
    runner.train()
    weights = {name: value.clone() for name, value in full(runner).items()}
    runner.close()
    return {line["update"]: line for line in lines_of(folder / "seen_0.jsonl")}, weights


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def check_groups(
    folders: list[Path],
    finished: list[Path],
    alone: dict[int, dict[str, Any]],
    weights: dict[str, Tensor],
    tolerance: float = 1e-12,
    processes: int = 1,
    losses: dict[tuple[int, int], float] | None = None,
) -> list[dict[str, Any]]:
    """Compare the groups' record, samples, losses and weights with those of one device, or of a simulation; return the record.

    Args:
        folders: those of all groups.
        finished: those of the groups that have come to the end.
        alone: by update, the samples of each micro-batch of one device, and the loss.
        weights: what they have to be at the end.
        tolerance: for rounding, relative and absolute.
        processes: of a group; each has every so manieth sample of a micro-batch of one device.
        losses: by update and number of the group, if groups have losses of their own.
    """
    record = lineage([finished[0], *folders])
    assert [line["update"] for line in record] == list(alone)
    members = {(line["head"], folder): line for folder in folders for line in lines_of(folder / "torchft.jsonl")}
    for process in range(processes):
        seen = {
            (line["head"], folder): line for folder in folders for line in lines_of(folder / f"seen_{process}.jsonl")
        }
        for line in record:
            micro_batches = [numbers[process::processes] for numbers in alone[line["update"]]["seen"]]
            if process == 0:
                assert line["rows"] == [len(numbers) for numbers in micro_batches]
            there = [folder for folder in folders if (line["head"], folder) in seen.keys() & members.keys()]
            numbers_of_groups = [members[line["head"], folder]["group"] for folder in there]
            assert 1 <= len(set(numbers_of_groups)) == len(there) <= line["groups"]
            for number, folder in zip(numbers_of_groups, there, strict=True):
                had = seen[line["head"], folder]
                loss = alone[line["update"]]["loss"] if losses is None else losses[line["update"], number]
                if processes == 1:  # else it is logged as the mean over them
                    assert had["loss"] == pytest.approx(loss, rel=tolerance)
                for numbers, own in zip(micro_batches, had["seen"], strict=True):
                    first, last = rows.span_of(len(numbers), number, line["groups"])
                    if first < last:  # else a sample that counts nothing
                        assert own == numbers[first:last]
    for folder in finished:
        found = torch.load(folder / "weights.pt")
        check_equal(found, weights, tolerance)
        assert all(torch.equal(value, torch.load(finished[0] / "weights.pt")[name]) for name, value in found.items())
    return record


# Rounds


class Replica:
    """One of several models that are trained by themselves, by torch alone."""

    def __init__(self, optimizer: Callable[[Any], Any], schedules: bool) -> None:
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters())
        self.schedules = schedules
        if schedules:
            self.warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.1, total_iters=5)
            self.decay = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)

    def update(self, data: Numbered, micro_batches: list[list[int]], ends_epoch: bool) -> float:
        parts = [self.model(torch.tensor(ids), data.x[ids], data.y[ids])["loss"] for ids in micro_batches if ids]
        if parts:
            loss = torch.stack(parts).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.schedules:
            self.warm_up.step()
            if ends_epoch:
                self.decay.step()
        return loss.item() if parts else 0.0


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def nesterov(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def simulated(
    initial: dict[str, Tensor],
    record: list[dict[str, Any]],
    alone: dict[int, dict[str, Any]],
    outer: Callable[[Any], Any] | None,
    inner: Callable[[Any], Any] = adamw,
    processes: int = 1,
    schedules: bool = True,
    samples: int | None = None,
    ends_epochs: bool = True,
) -> tuple[dict[str, Tensor], dict[tuple[int, int], float]]:
    """Weights of rounds of several models as the record says, in a loop of torch alone; and losses by update and model."""
    data = Numbered() if samples is None else Numbered(samples)
    start = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
    optimizer = None if outer is None else outer(list(start.values()))
    replicas: dict[int, Replica] = {}
    last = {line["epoch"]: line["update"] for line in record} if ends_epochs else {}
    losses: dict[tuple[int, int], float] = {}
    for _, of_round in groupby(record, lambda line: line["round"]):
        lines, ends = list(of_round), []
        for group in range(count := lines[0]["groups"]):
            replica = replicas.setdefault(group, Replica(inner, schedules))
            replica.model.load_state_dict(start)
            for line in lines:
                assert line["groups"] == count
                shares = [list(own_rows(numbers, group, count, processes)) for numbers in alone[line["update"]]["seen"]]
                losses[line["update"], group] = replica.update(data, shares, last.get(line["epoch"]) == line["update"])
            ends.append({name: value.clone() for name, value in replica.model.state_dict().items()})
        with torch.no_grad():
            for name, value in start.items():
                mean = torch.stack([end[name] for end in ends]).mean(0)
                if optimizer is None:
                    value.copy_(mean)
                else:
                    value.grad = value.detach() - mean
        if optimizer is not None:
            optimizer.step()
    return {name: value.detach() for name, value in start.items()}, losses


def own_rows(numbers: list[int], group: int, groups: int, processes: int = 1) -> Iterator[int]:
    """The samples of a group: each of its processes has every so manieth of the global batch, and the group's share of these."""
    for process in range(processes):
        own = numbers[process::processes]
        start, stop = rows.span_of(len(own), group, groups)
        yield from own[start:stop]
