"""The tables at the start and the end of a training, and what a run writes for reports."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import FlexibleRunner, SingleDeviceStrategy
from flextrain.core.base.errors import ConfigError
from flextrain.core.base.events import read_events
from flextrain.runner.hooks import LoggerHook
from flextrain.runner.reporting import opening
from flextrain.runner.reporting.console import Table, log_table
from flextrain.runner.reporting.model_outline import outline
from flextrain.strategies.parts import state_memory
from flextrain.strategies.parts.footprint import state_of_optimizer

from .conftest import make_run


def log_of(run: FlexibleRunner) -> str:
    return Path(run.log_dir, f"{run.timestamp}.log").read_text()


def rows_of(model: nn.Module) -> list[tuple[str, str, int, int]]:
    found = outline(model, lambda tensor: tensor.shape)
    return [(part.name, part.kind, part.total, part.trained) for part in (*found.parts, found.whole)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)


def test_blocks_share_a_row_and_what_is_shared_is_counted_once() -> None:
    assert rows_of(nn.Sequential(Deep())) == [
        ("0 (own)", "Deep", 3, 0),
        ("0.embedding", "Embedding", 40, 40),
        ("0.blocks.0-11", "12 x Block", 240, 240),
        ("", "Sequential", 283, 280),
    ]


def test_many_different_parts_are_at_most_twelve_rows() -> None:
    model = nn.ModuleDict({f"part{i}": nn.Linear(i + 1, 1, bias=False) for i in range(20)})
    rows = rows_of(model)
    assert len(rows) == 13
    assert rows[-2] == ("9 others", "", sum(range(1, 10)), sum(range(1, 10)))
    assert rows[-1][2] == sum(range(1, 21))


def test_a_lazy_module_is_left_to_the_set_up_which_refuses_it() -> None:
    assert rows_of(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)))[-1] == ("", "Sequential", 8, 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "amsgrad": True}]),
    ],
)
def test_the_state_of_an_optimizer_is_known_before_its_first_update(make: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    optimizer = make(list(model.parameters()))
    before, weights = state_of_optimizer(optimizer), [p.clone() for p in model.parameters()]
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)), "nothing was updated"
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    after = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    assert before == after == state_of_optimizer(optimizer)


def test_the_state_of_another_optimizer_is_not_guessed() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert state_of_optimizer(Mine(nn.Linear(2, 2).parameters(), lr=0.1)) is None


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    from flextrain import OptimWrapper

    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
    model[0].requires_grad_(False)
    strategy = SingleDeviceStrategy(device="cpu")
    strategy.setup(model, OptimWrapper(dict(type="Adam", lr=0.1)))
    memory = state_memory(strategy)
    strategy.leave()
    assert (memory.parameters, memory.gradients, memory.optimizer_state) == (160, 32, 2 * 32 + 4)


def test_a_run_begins_and_ends_with_tables_and_records_both(tmp_path: Path) -> None:
    run = make_run(tmp_path, train_cfg={"by_epoch": True, "max_epochs": 2}, default_hooks={})
    run.train()
    log = log_of(run)
    assert "  batch      4 samples per update\n  updates    20 = 2 epochs of 10\n" in log
    assert "  linear  Linear               10    100 %\n  all     Tiny                 18    100 %\n" in log
    assert "  ended        as configured\n" in log
    assert f"  report       flextrain report {tmp_path}\n" in log
    record = json.loads(Path(run.log_dir, "vis_data/run.json").read_text())
    assert record["start"]["parameters"] == 18
    assert record["start"]["batch"] == {"samples": 4, "per_shard": 4, "shards": 1, "accumulate": 1}
    assert record["environment"]["torch"] == torch.__version__
    assert (record["first_iter"], record["end"]["iter"], record["end"]["ended"]) == (0, 20, "")
    times = record["end"]["seconds"]
    assert abs(sum(times.values()) - 2 * times["all"]) < 1e-6
    assert times["saving"] > 0
    assert times["validation"] > 0
    found = [(event["event"], event["iter"]) for event in read_events(tmp_path)]
    assert found == [
        ("started", 0), ("saved", 10), ("validated", 10), ("saved", 20), ("validated", 20), ("finished", 20),
    ]  # fmt: skip


def test_a_failure_ends_with_a_table_that_says_how_to_go_on(tmp_path: Path) -> None:
    from flextrain import Hook

    class Falls(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.iter == 12:
                raise RuntimeError("a lamp fell")

    run = make_run(tmp_path, custom_hooks=[Falls()], default_hooks={})
    with pytest.raises(RuntimeError, match="a lamp fell"):
        run.train()
    log = log_of(run)
    assert "  ended        RuntimeError: a lamp fell\n  to go on     resume=True continues from epoch_1\n" in log
    record = json.loads(Path(run.log_dir, "vis_data/run.json").read_text())
    assert (record["end"]["ended"], record["end"]["iter"]) == ("RuntimeError: a lamp fell", 12)


def test_saves_and_hooks_are_no_waiting_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves between two iterations were counted twice, so that nothing was left for training."""
    from flextrain import Hook

    clock = [0.0]

    class Batches:
        def __iter__(self) -> Any:
            while True:
                clock[0] += 1
                yield torch.randn(4, 4), torch.tensor([0, 1, 0, 1])

    class Works(Hook):
        priority = "LOWEST"

        def after_train_iter(self, runner: Any, *args: Any, **more: Any) -> None:
            clock[0] += 15
            runner._checkpoints.saver.seconds += 10

    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr("flextrain.runner.hooks.logger.time." + name, lambda: clock[0])
    options = dict(val_dataloader=None, val_cfg=None, val_evaluator=None, param_scheduler=None)
    cfg = {"by_epoch": False, "max_iters": 4}
    hooks = dict(default_hooks=dict(checkpoint=None), custom_hooks=[Works()])
    run = make_run(tmp_path, train_dataloader=Batches(), train_cfg=cfg, **hooks, **options)
    run.train()
    seconds = json.loads(Path(run.log_dir, "vis_data/run.json").read_text())["end"]["seconds"]
    assert seconds == {"training": 20, "validation": 0, "saving": 40, "waiting for data": 4, "all": 64}
    assert [*run.message_hub.history("train/time").data[0]] == [1, 6, 6, 6], "with hooks, without saves"


@pytest.mark.parametrize("lines", [None, True])
def test_beside_a_bar_the_lines_of_iterations_are_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: bool | None
) -> None:
    run = make_run(tmp_path, default_hooks={"logger": {"progress_bar": True, "lines": lines, "interval": 5}})
    run.train()
    out = capsys.readouterr().out
    for line in ("Epoch(train) [2][ 5/10]", "In the lines below: "):
        assert (line in out) == (lines is True)
        assert line in log_of(run)
    assert "accuracy: " in out, "which the bar does not show"


def test_tables_can_be_turned_off(tmp_path: Path) -> None:
    run = make_run(tmp_path, train_cfg={"by_epoch": True, "max_epochs": 1}, default_hooks={"logger": {"tables": False}})
    run.train()
    assert "The run:" not in log_of(run)
    assert "Model:" not in log_of(run)
    with pytest.raises(ConfigError, match=r"LoggerHook.tables: 'no' is not allowed"):
        LoggerHook(tables="no")  # type: ignore[arg-type]


def test_a_terminal_gets_the_drawn_table_and_the_file_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flextrain.runner.reporting import setup_logger
    from flextrain.runner.reporting.console import close_logger

    class Terminal:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    logger = setup_logger("INFO", tmp_path / "run.log")
    table = Table("Model", ("module", "parameters"), [("a[bold]b", "1"), ("all", "1")], right=(1,), last_is_sum=True)
    log_table(logger, table)
    close_logger()
    assert isinstance(logger, logging.Logger)
    assert (
        "Model:\n  module    parameters\n  a[bold]b           1\n  all                1\n"
        in (tmp_path / "run.log").read_text()
    )
    assert "─" in terminal.text
    assert "a[bold]b" in terminal.text
    assert " - INFO - " not in terminal.text


def test_a_list_of_batches_has_iterations_per_second_and_no_samples(tmp_path: Path) -> None:
    batches = [(torch.randn(4, 4), torch.tensor([0, 1, 0, 1])) for _ in range(5)]
    options = dict(val_dataloader=None, val_cfg=None, val_evaluator=None)
    run = make_run(tmp_path, train_dataloader=batches, train_cfg={"by_epoch": True, "max_epochs": 1}, **options)
    run.train()
    assert re.search(r"Trained 1 epoch \(5 iterations\) in \d\.\d\d s, [\d.e+]+ iterations/s", log_of(run))
    assert "  batch      of unknown size: as the data give them\n" in log_of(run)


def test_a_strategy_that_cannot_tell_its_memory_trains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, train_cfg={"by_epoch": True, "max_epochs": 1})
    monkeypatch.setattr(opening, "state_memory", lambda _: list[int]().pop())
    run.train()
    assert run.iter == 10
    assert "WARNING - No tables of the training: IndexError: pop from empty list\n" in log_of(run)
