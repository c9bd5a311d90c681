"""Starts groups as processes, and compares what they have trained with one device."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flextrain_torchft import lineage, rows
from torch import Tensor
from torchft_group import Events, full, runner_of

Lines = dict[tuple[Path, int], dict[str, Any]]


def start(folder: Path, lighthouse: str, launched: dict[str, str] | None = None, **given: Any) -> subprocess.Popen[str]:
    """A process of a group; ``launched`` has what torchrun gives each of several."""
    options = json.dumps(dict(folder=str(folder), lighthouse=lighthouse, **given))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.txt", "a") as output:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("torchft_group.py")), options], stdout=output, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": os.environ.get("RUST_LOG", "error"), **(launched or {})},
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
) -> list[dict[str, Any]]:
    """Compare the groups' record, samples, losses and weights with those of one device; return the record.

    Args:
        folders: those of all groups.
        finished: those of the groups that have come to the end.
        alone: by update, the samples of each micro-batch of one device, and the loss.
        weights: of one device, at the end.
        tolerance: for rounding, relative and absolute.
    """
    record = lineage([finished[0], *folders])
    assert [line["update"] for line in record] == list(alone)
    members = {(line["head"], folder): line for folder in folders for line in lines_of(folder / "torchft.jsonl")}
    seen = {(line["head"], folder): line for folder in folders for line in lines_of(folder / "seen_0.jsonl")}
    for line in record:
        micro_batches, loss = alone[line["update"]]["seen"], alone[line["update"]]["loss"]
        assert line["rows"] == [len(numbers) for numbers in micro_batches]
        there = [folder for folder in folders if (line["head"], folder) in seen]
        numbers_of_groups = [members[line["head"], folder]["group"] for folder in there]
        assert len(set(numbers_of_groups)) == len(there) <= line["groups"]
        for number, folder in zip(numbers_of_groups, there, strict=True):
            had = seen[line["head"], folder]
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
