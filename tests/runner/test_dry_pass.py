"""The dry pass before training: what it finds, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Sampler

from flextrain import ConfigError, Hook
from flextrain.core.base.errors import LaunchError
from flextrain.core.random.generators import rng_state
from flextrain.core.torch_compat.torch_private import end_loader_workers
from flextrain.runner.loops import dry_pass
from flextrain.runner.loops.evaluate import ValLoop
from flextrain.testing import WorkerError, WorkerGroup

from .training import DDP, FSDP, Accuracy, Samples, Watch, make_runner, validation, whole_state, zero

pytestmark = pytest.mark.usefixtures("quick")


class Restless(nn.Module):
    """Draws random numbers in evaluation too, normalises batches, and counts its calls in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("newest", torch.zeros(6))
        self.seen: list[int] = []
        self.count = 0

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        self.calls += 1
        self.newest = x[-1].clone()
        self.count += 1
        self.seen.append(len(x))
        logits = self.net(x) + 0.01 * self.count + 0.001 * torch.rand(()) + 0.001 * self.calls
        logits = logits + 0.001 * (random.random() + float(np.random.randn()))
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits, y)}
        return {"index": index, "logits": logits, "y": y}


class OwnGenerators(Samples):
    """Augments from generators of its own, and counts."""

    def __init__(self, length: int) -> None:
        super().__init__(length, noisy=True)
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)
        self.torch = torch.Generator().manual_seed(3)
        self.reads, self.order = 0, np.zeros(4)
        self.cache: dict[int, float] = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        noise = self.python.random() + self.numpy.random() + float(torch.rand((), generator=self.torch))
        self.reads += 1
        self.order[index % 4] += 1
        self.cache[index] = noise
        noise += self.reads + float(self.order.sum()) + len(self.cache)
        return {**sample, "x": sample["x"] + 0.01 * noise}


class Counting(Accuracy):
    """Also gives how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.batches += 1
        super().process(data_batch, data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {**super().compute_metrics(results), "batches": self.batches, "draw": random.random()}


class Draws(Hook):
    """Writes down the random states at every update, and the training mode of every module at the start."""

    priority = "VERY_LOW"

    def __init__(self) -> None:
        self.states: list[str] = []

    def before_train_epoch(self, runner: Any) -> None:
        self.states.append(str([module.training for module in runner.model.modules()]))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        self.states.append(json.dumps(rng_state(torch.device("cpu"))))


SAID = re.compile(r" - INFO - Dry pass: .*")
TIMES = re.compile(
    r"^\S+ \S+ - |(?:data_)?time: *\S+|eta: *\S+|memory: *\S+|in \d+:\d\d:\d\d, [\d.]+ samples/s|\d{8}_\d{6}|/\S+",
    re.MULTILINE,
)


def life(
    folder: str, dry_run: bool | int, workers: int, strategy: dict[str, Any] | None, shared: bool
) -> dict[str, Any]:
    """All that a run leaves, on this process."""
    path = Path(folder) / f"{dry_run}" / "run"
    data = OwnGenerators(28)
    watch, draws = Watch(), Draws()
    loaders = dict(num_workers=workers, persistent_workers=bool(workers))
    parts = validation(28 if shared else 10)
    parts["val_evaluator"] = dict(type=Counting)
    parts["val_dataloader"] |= loaders
    if shared:
        parts["val_dataloader"]["dataset"] = data
    runner = make_runner(
        path,
        model=Restless,
        strategy=strategy,
        train_dataloader=dict(batch_size=4, dataset=data, collate_fn="default_collate", **loaders),
        custom_hooks=[watch, draws, dict(type="EMAHook")],
        default_hooks=dict(checkpoint=dict(save_best="accuracy"), logger=dict(interval=2)),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        param_scheduler=[dict(type="ReduceOnPlateauLR", monitor="accuracy", rule="greater")],
        env_cfg=dict(dry_run=dry_run, mp_cfg=dict(mp_start_method="fork")),
        log_level="INFO",
        **parts,
    )
    runner.train()
    end_loader_workers()
    state = whole_state(runner)
    found: dict[str, Any] = {
        "losses": [float(loss) for loss in watch.losses],
        "trained": watch.trained,
        "draws": draws.states,
        "state": state,
        "metrics": runner.message_hub.get_scalar("val/accuracy").state_dict(),
        "batches": runner.message_hub.get_scalar("val/batches").state_dict(),
        "module": (runner.strategy.module.count, list(runner.strategy.module.seen)),
        "random": json.dumps(rng_state(torch.device("cpu"))),
        "files": {},
        "lines": [],
    }
    if runner.rank == 0:
        (log,) = path.glob("2*/*.log")
        found["lines"] = [TIMES.sub("", line) for line in log.read_text().splitlines()]
        for file in sorted(path.glob("*epoch_*/*")):
            found["files"][f"{file.parent.name}/{file.name}"] = content(file)
    runner.strategy.leave()
    return found


def content(file: Path) -> Any:
    """What a checkpoint's file holds, without times and folders."""
    if file.suffix != ".json":
        return file.read_bytes()
    values = json.loads(file.read_text())
    for key in ("files", "xxh3"):
        values.pop(key, None)
    return timeless(values)


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if not str(key).endswith("time")}
    if isinstance(value, list):
        return [timeless(entry) for entry in value]
    return TIMES.sub("", value) if isinstance(value, str) else value


def same(without: dict[str, Any], with_it: dict[str, Any], rank: int = 0) -> None:
    for key in without.keys() - {"lines", "files", "state"}:
        assert with_it[key] == without[key], key
    assert with_it["state"].keys() == without["state"].keys()
    for key, value in without["state"].items():
        other = with_it["state"][key]
        assert torch.equal(other, value) if isinstance(value, Tensor) else other == value, key
    assert with_it["files"].keys() == without["files"].keys()
    assert [name for name, content in without["files"].items() if with_it["files"][name] != content] == []
    if rank == 0:
        # What the end says has seconds, which differ between two runs.
        with_it["lines"], without["lines"] = (
            [line for line in each["lines"] if not line.startswith(("  time ", "flextrain - INFO - Trained "))]
            for each in (with_it, without)
        )
        more = [line for line in with_it["lines"] if line not in without["lines"]]
        assert len(more) == 1
        assert "Dry pass: 2 batches of val_dataloader went through" in more[0]
        assert [line for line in with_it["lines"] if line != more[0]] == without["lines"]
        assert with_it["files"]


@pytest.mark.parametrize("shared", [False, True], ids=["own data", "data of training"])
def test_nothing_stays_in_one_process(tmp_path: Path, shared: bool) -> None:
    same(*(life(str(tmp_path), dry_run, 0, None, shared) for dry_run in (False, True)))


@pytest.mark.processes
def test_nothing_stays_with_workers(tmp_path: Path) -> None:
    same(*(life(str(tmp_path), dry_run, 2, None, True) for dry_run in (False, True)))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "num_workers"),
    [
        (DDP, 0),
        (FSDP, 0),
        pytest.param(DDP, 2, marks=pytest.mark.full),
        pytest.param(FSDP, 2, marks=pytest.mark.full),
        pytest.param(zero(3), 0, marks=[pytest.mark.full, pytest.mark.deepspeed]),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else f"{value} workers",
)
def test_nothing_stays_in_two(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any], num_workers: int
) -> None:
    both = [workers2.run(life, str(tmp_path), dry_run, num_workers, strategy, True) for dry_run in (False, True)]
    for rank, (without, with_it) in enumerate(zip(*both, strict=True)):
        same(without, with_it, rank)


# What it finds


class Fails(Accuracy):
    """Fails in one of its methods, with fewer results than ``needs``."""

    def __init__(self, error: Exception, where: str = "compute_metrics", needs: int = 1000) -> None:
        super().__init__()
        self.error, self.where, self.needs = error, where, needs

    def process(self, data_batch: Any, data_samples: Any) -> None:
        super().process(data_batch, data_samples)
        if self.where == "process":
            raise self.error

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        if self.where == "compute_metrics" and len(results) < self.needs:
            raise self.error
        return super().compute_metrics(results)


class Empty(Accuracy):
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return super().compute_metrics(results) if len(results) > 8 else {}


class Seen(Hook):
    """Counts updates."""

    def __init__(self) -> None:
        self.updates = 0

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        self.updates += 1


def train(folder: Path, log: str = "lines", **changes: Any) -> tuple[Any, list[str]]:
    """What training raised or its number of updates, and the lines on the dry pass."""
    seen = Seen()
    hooks = [*changes.pop("custom_hooks", []), seen]
    runner = make_runner(folder, custom_hooks=hooks, **{**validation(), "log_level": "INFO", **changes})
    outcome: Any
    try:
        runner.train()
        outcome = seen.updates
    except Exception as error:
        assert seen.updates == 0, "found only in training"
        outcome = error
    (file,) = folder.glob("2*/*.log")
    lines = [line.partition(" - flextrain - ")[2] for line in file.read_text().splitlines()]
    return outcome, [line for line in lines if "Dry pass" in line]


def lacks(key: str) -> Any:
    def collate(samples: Any) -> Any:
        batch = torch.utils.data.default_collate(samples)
        del batch[key]
        return batch

    return collate


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (dict(val_evaluator=Fails(KeyError("scores"), "process")), KeyError, "scores"),
        (dict(val_dataloader=dict(batch_size=4, dataset=Samples(8), collate_fn=lacks("y"))), TypeError, "'y'"),
        (dict(val_dataloader=dict(batch_size=4, dataset=[{"x": 1}, {}])), KeyError, "x"),
        (dict(val_evaluator=Fails(NameError("name 'np' is not defined"))), NameError, "np"),
        (dict(val_evaluator=Fails(ImportError("no scipy"))), ImportError, "scipy"),
        (
            dict(param_scheduler=dict(type="ReduceOnPlateauLR", monitor="loss")),
            ConfigError,
            'monitor: "loss" is no metric of the validation, choose from accuracy, count, indices',
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(getattr(value, "__name__", value))[:40],
)
def test_a_mistake_is_found_before_the_first_update(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    outcome, _ = train(tmp_path, **changes)
    assert type(outcome) is error
    assert text in str(outcome)


class Broken(Samples):
    """The samples of rank 1 cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 2:
            raise ValueError(f"sample {index} is broken")
        return super().__getitem__(index)


def broken_on_one(folder: str, strategy: dict[str, Any]) -> str:
    runner = make_runner(folder, strategy=strategy, **{**validation(), "val_dataloader": dict(dataset=Broken(8))})
    with pytest.raises((ValueError, LaunchError)) as caught:
        runner.train()
    runner.strategy.leave()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.distributed
def test_data_that_one_process_cannot_read_stop_all_before_forward(tmp_path: Path, workers2: WorkerGroup) -> None:
    """Forward of FSDP has collectives, which must not meet those that tell of the failure."""
    first, second = workers2.run(broken_on_one, str(tmp_path), FSDP)
    assert second == "ValueError: sample 1 is broken"
    assert first.startswith(f"LaunchError: another process failed in the dry pass: {second}")


def test_a_metric_that_needs_more_data_is_only_warned_of(tmp_path: Path) -> None:
    metrics = [Fails(ZeroDivisionError("one class"), needs=9)]
    changes = dict(default_hooks=dict(checkpoint=dict(save_best="accuracy")))
    outcome, lines = train(tmp_path, val_evaluator=metrics, **changes)
    assert outcome == 21
    (line,) = lines
    assert line.startswith(
        "WARNING - Dry pass: val_evaluator: Fails cannot be computed from so few data, or not at all: "
        f"ZeroDivisionError: one class ({__file__}:"
    )
    assert line.endswith("env_cfg=dict(dry_run=False) leaves the dry pass out")


def test_a_metric_without_names_says_nothing_of_what_is_monitored(tmp_path: Path) -> None:
    outcome, lines = train(tmp_path, val_evaluator=Empty(), default_hooks=dict(checkpoint=dict(save_best="accuracy")))
    assert (outcome, lines) == (21, [])


class Prepares(Hook):
    """What the model needs before it is validated."""

    def before_val(self, runner: Any) -> None:
        runner.strategy.module.is_ready = True


class NeedsHook(nn.Module):
    is_ready = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        if mode == "loss":
            return {"loss": functional.cross_entropy(self.net(x), y)}
        if not self.is_ready:
            raise RuntimeError("not ready")
        return {"index": index, "logits": self.net(x), "y": y}


def test_what_only_a_hook_makes_possible_is_no_mistake(tmp_path: Path) -> None:
    outcome, (line,) = train(tmp_path, model=NeedsHook, custom_hooks=[Prepares()])
    assert outcome == 21
    assert "RuntimeError: not ready (" in line
    assert "; Prepares may be needed before it, and was not called; env_cfg" in line
    assert type(train(tmp_path / "without", model=NeedsHook)[0]) is RuntimeError


def test_such_a_hook_may_have_a_function_as_an_attribute(tmp_path: Path) -> None:
    hook: Any = Seen()
    hook.before_val = lambda runner: setattr(runner.model, "is_ready", True)
    outcome, (line,) = train(tmp_path, model=NeedsHook, custom_hooks=[hook])
    assert outcome == 21
    assert "; Seen may be needed before it, and was not called; env_cfg" in line


class Calls(Hook):
    """Writes down the hook points of validation."""

    def __init__(self) -> None:
        self.points: list[str] = []

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.points.append("iter")

    def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        self.points.append("end")


def test_no_hook_is_called(tmp_path: Path) -> None:
    calls = Calls()
    train(tmp_path, custom_hooks=[calls], train_cfg=dict(max_epochs=1))
    assert calls.points == ["iter"] * 3 + ["end"]


# Where it is left out


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        samples = Samples(6)
        return (samples[i] for i in range(6))


class OwnLoop(ValLoop):
    def run(self) -> Any:
        return super().run()


def batches() -> Iterator[Any]:
    READ.append(1)
    yield from DataLoader(Samples(8), batch_size=4)


READ: list[int] = []


def test_data_that_may_be_read_only_once_are_left_alone(tmp_path: Path) -> None:
    stream, once = Stream(), dict(max_epochs=1)
    loader = dict(batch_size=3, dataset=stream, collate_fn="default_collate")
    outcome, lines = train(tmp_path / "1", val_dataloader=loader, train_cfg=once)
    assert (outcome, stream.passes) == (7, 1)
    assert lines == [
        "INFO - Dry pass: left out, val_dataloader: Stream is a stream, which may give each sample only once"
    ]
    READ.clear()
    outcome, lines = train(tmp_path / "2", val_dataloader=batches, train_cfg=once)
    assert (outcome, len(READ)) == (7, 1)
    assert lines == ["INFO - Dry pass: left out, val_dataloader: batches may give each batch only once"]


def test_a_loop_of_one_s_own_is_left_alone(tmp_path: Path) -> None:
    outcome, lines = train(tmp_path, val_cfg=dict(type=OwnLoop))
    assert (outcome, lines) == (21, ["INFO - Dry pass: left out, OwnLoop defines its own run"])


class Shuffles(Sampler[int]):
    """A sampler with a generator and a count of its own."""

    def __init__(self) -> None:
        self.generator, self.passes, self.order = torch.Generator().manual_seed(5), 0, [*range(10)]

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        random.Random(self.passes).shuffle(self.order)
        return iter(list(self.order))

    def __len__(self) -> int:
        return 10


class Indices(Accuracy):
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        SEEN.append([index for index, _ in results])
        return {"accuracy": 1.0}


SEEN: list[list[int]] = []


def test_a_sampler_of_the_user_s_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    found = []
    for dry_run in (False, True):
        SEEN.clear()
        loader = DataLoader(Samples(10), batch_size=4, sampler=Shuffles())
        options = dict(val_dataloader=loader, val_evaluator=Indices(), env_cfg=dict(dry_run=dry_run))
        train(tmp_path / str(dry_run), train_cfg=dict(max_epochs=2), **options)
        found.append(list(SEEN))
    assert len(found[1].pop(0)) == 8, "the dry pass"
    assert found[0] == found[1]


@pytest.mark.parametrize(("dry_run", "read"), [(False, 0), (True, 8), (1, 4), (3, 10)])
def test_as_many_batches_as_are_asked_for(tmp_path: Path, dry_run: bool | int, read: int) -> None:
    data = Samples(10, tmp_path / "read")
    loader = dict(batch_size=4, dataset=data, collate_fn="default_collate")
    cfg = dict(max_epochs=1, val_begin=9)
    train(tmp_path / "run", val_dataloader=loader, train_cfg=cfg, env_cfg=dict(dry_run=dry_run))
    assert len(data.read()) == read


@pytest.mark.parametrize("dry_run", [0, -1, 1.5, "yes", None])
def test_other_values_are_refused(tmp_path: Path, dry_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"^env_cfg.dry_run: .* is not allowed, give"):
        make_runner(tmp_path, env_cfg=dict(dry_run=dry_run), **validation())


def test_once_in_the_life_of_a_runner(tmp_path: Path) -> None:
    data = Samples(10, tmp_path / "read")
    loader = dict(batch_size=4, dataset=data, collate_fn="default_collate")
    runner = make_runner(
        tmp_path / "run", **validation() | dict(val_dataloader=loader), train_cfg=dict(max_epochs=1, val_begin=9)
    )
    runner.train()
    runner.train()
    assert len(data.read()) == 8


class ByParts(NeedsHook):
    """Is validated by its parts, without a call of the whole."""

    def val_step(self, data: dict[str, Any]) -> Any:
        return {"index": data["index"], "logits": self.net(data["x"]), "y": data["y"]}


def train_by_parts(folder: str) -> int:
    runner = make_runner(folder, model=ByParts, strategy=FSDP, train_cfg=dict(max_epochs=1), **validation())
    runner.train()
    done = runner.iter
    runner.strategy.leave()
    return done


@pytest.mark.distributed
def test_a_sharded_model_that_is_validated_by_its_parts(tmp_path: Path, workers2: WorkerGroup) -> None:
    assert workers2.run(train_by_parts, str(tmp_path)) == [4, 4]


# Where one of several processes fails while the others are in a collective, it says its own error


class FailsOn(nn.Module):
    """Cannot predict on some ranks, before any layer; can do so once it is ready."""

    is_ready = False

    def __init__(self, ranks: str) -> None:
        super().__init__()
        self.ranks, self.net = ranks, nn.Linear(6, 2)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        if mode == "loss":
            return {"loss": functional.cross_entropy(self.net(x), y)}
        if os.environ["RANK"] in self.ranks and not self.is_ready:
            raise KeyError("scores")
        return {"index": index, "logits": self.net(x), "y": y}


class FailsIn(Accuracy):
    """Fails on rank 1 in one of its methods, which sums over all processes on the others."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.sum_in("process")
        super().process(data_batch, data_samples)

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        self.sum_in("evaluate")
        return super().evaluate(size)

    def sum_in(self, where: str) -> None:
        if self.where == where:
            if os.environ["RANK"] == "1":
                raise KeyError("scores")
            dist.all_reduce(torch.ones(1))


def outcome(folder: str, strategy: dict[str, Any], **changes: Any) -> str:
    """What training raised, or its number of updates."""
    once = dict(train_cfg=dict(max_epochs=1), log_level="INFO")
    runner = make_runner(folder, strategy=strategy, **validation(), **once, **changes)
    try:
        runner.train()
        return str(runner.iter)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runner.strategy.leave()


def end_without_rank_0(folder: str, strategy: dict[str, Any], **changes: Any) -> None:
    """Train until rank 1 fails and its process ends, which rank 0 notices."""
    dry_pass.PATIENCE_S = 0.5  # the processes of this call are not used again
    runner = make_runner(folder, strategy=strategy, **{**validation(), **changes})
    try:
        runner.train()
    except Exception:
        if runner.rank == 1:
            os._exit(1)
        raise


def lines_of(folder: Path) -> list[str]:
    (file,) = (file for file in folder.glob("2*/*.log") if "_rank" not in file.name)
    return file.read_text().splitlines()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "changes", "where"),
    [
        (FSDP, dict(model=FailsOn("1")), "in forward of model (FailsOn) in the dry pass"),
        (FSDP, dict(model=FailsOn("1"), custom_hooks=[Prepares()]), "in forward of model (FailsOn) in the dry pass"),
        (DDP, dict(val_evaluator=FailsIn("process")), "in val_evaluator (FailsIn.process) in the dry pass"),
        (DDP, dict(val_evaluator=FailsIn("evaluate")), "in val_evaluator (FailsIn.compute) in the dry pass"),
    ],
    ids=["forward", "forward with a hook", "process", "evaluate"],
)
def test_a_process_that_the_others_wait_for_in_a_collective_says_its_own_error(
    tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any], changes: dict[str, Any], where: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        workers2.run(end_without_rank_0, str(tmp_path), strategy, **changes)
    assert not caught.value.timed_out
    lines = lines_of(tmp_path)
    own = "".join(line for line in lines if " - ERROR - rank 1 - Failed " in line)
    assert where in own, caught.value
    assert "KeyError: 'scores'" in own
    (other,) = (line for line in lines if " - ERROR - Failed because rank 1 failed: KeyError: 'scores'" in line)
    assert "noticed on rank 0 after epoch 0, iteration 0" in other
    assert "in the dry pass" in other.partition("noticed")[2], "it was in the collective, and did not abort"


@pytest.mark.distributed
def test_what_a_hook_makes_possible_is_no_mistake_if_all_fail_alike(tmp_path: Path, workers2: WorkerGroup) -> None:
    changes = dict(model=FailsOn("01"), custom_hooks=[Prepares()])
    assert workers2.run(outcome, str(tmp_path), FSDP, **changes) == ["4", "4"]
    (line,) = (line for line in lines_of(tmp_path) if "Dry pass" in line)
    assert "KeyError: 'scores' (" in line
    assert "; Prepares may be needed before it, and was not called; env_cfg" in line


@pytest.mark.distributed
def test_forward_that_fails_on_one_process_ends_all_whatever_hooks_there_are(
    tmp_path: Path, workers2: WorkerGroup
) -> None:
    """On an accelerator, forward of the other process may have returned with its collectives still open."""
    changes = dict(model=FailsOn("1"), custom_hooks=[Prepares()])
    first, second = workers2.run(outcome, str(tmp_path), DDP, **changes)
    assert second == "KeyError: 'scores'"
    assert first.startswith("LaunchError: another process failed in the dry pass: KeyError: 'scores' (")
