"""The runner on two processes: what they share out, what they agree on, and what a resumed run needs of each."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import CheckpointError, FlexibleRunner
from flextrain.runner.hooks import Hook
from flextrain.runner.resume import choose_checkpoint as runner_module
from flextrain.testing import WorkerGroup

from .training import (
    SGD,
    Net,
    Samples,
    SaveEvery,
    Watch,
    change_values,
    differences,
    log_lines,
    make_runner,
    validation,
    whole_state,
)

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]


def loader(length: int = 26, batch_size: int = 2, **options: Any) -> dict[str, Any]:
    return dict(batch_size=batch_size, dataset=Samples(length), collate_fn="default_collate", **options)


def run(folder: str | Path, *more: Hook, **changes: Any) -> tuple[Watch, Any, dict[str, Any]]:
    """What was trained on, the runner, and everything that training has changed."""
    watch = Watch()
    hooks = [*changes.pop("custom_hooks", ()), watch, *more]
    runner = make_runner(folder, **{"train_dataloader": loader(), **changes, "custom_hooks": hooks})
    runner.train()
    state = whole_state(runner)
    runner.strategy.leave()
    return watch, runner, state


def in_turn(parts: list[list[list[int]]]) -> list[list[int]]:
    """The samples of every update, of both processes together."""
    return [sorted(chain(*updates)) for updates in zip(*parts, strict=True)]


# Sharing out


def trained_on(folder: str, **changes: Any) -> tuple[list[list[int]], list[float]]:
    watch, _, _ = run(folder, **changes)
    return watch.trained, watch.rates


@pytest.mark.parametrize("length", [24, 25])
def test_every_update_has_both_halves(tmp_path: Path, workers2: WorkerGroup, length: int) -> None:
    changes = dict(train_dataloader=loader(length), train_cfg=dict(max_epochs=2))
    (first, _), (second, _) = workers2.run(trained_on, str(tmp_path), **changes)
    alone, _, _ = run(tmp_path, **changes | dict(train_dataloader=loader(length, 4)))
    both = in_turn([first, second])
    assert len(both) == len(alone.trained) == 2 * -(-length // 4)
    if length == 24:
        assert both == [sorted(update) for update in alone.trained]
    for epoch in range(2):
        samples = list(chain(*both[epoch * len(both) // 2 : (epoch + 1) * len(both) // 2]))
        assert set(samples) == set(range(length))
        assert len(samples) == length + length % 2  # the first sample again, so that both make as many updates


# Clocks


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rate_of_an_update_does_not_depend_on_the_processes(
    tmp_path: Path, workers2: WorkerGroup, accumulate: int
) -> None:
    """Pains 14: one scheduler step per update, however many processes and micro-batches make one."""
    schedules = [dict(type="LinearLR", by_epoch=False, end=6), dict(type="StepLR", step_size=1, gamma=0.5)]
    common = dict(param_scheduler=schedules, auto_scale_lr=dict(base_batch_size=8))
    alone, _, _ = run(tmp_path, train_dataloader=loader(24, 4), **common)
    assert len(set(alone.rates)) > 4
    found = workers2.run(
        trained_on,
        str(tmp_path),
        train_dataloader=loader(24, 2 // accumulate),
        optim_wrapper=dict(optimizer=SGD, accumulative_counts=accumulate),
        **common,
    )
    assert [rates for _, rates in found] == [pytest.approx(alone.rates)] * 2


class Overflows(nn.Module):
    """On the second process, the gradient of one update is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Linear(6, 2), 0

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        self.calls += 1
        strain = float("inf") if self.calls == 3 and torch.distributed.get_rank() == 1 else 0.0
        return {"loss": nn.functional.cross_entropy(self.net(x).float(), y) + self.net.weight.sum() * strain}


class Skips(Hook):
    def __init__(self) -> None:
        self.seen: list[tuple[bool, float]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append((runner.optim_wrapper.last_step.skipped, float(runner.strategy.module.net.weight.sum())))


def overflow(folder: str) -> tuple[list[tuple[bool, float]], int]:
    skips = Skips()
    wrapper = dict(type="AmpOptimWrapper", optimizer=SGD, dtype="float16", loss_scale=64.0)
    schedule = dict(type="LinearLR", by_epoch=False, end=9)
    cfg = dict(max_epochs=1)
    _, runner, _ = run(folder, skips, model=Overflows, optim_wrapper=wrapper, param_scheduler=schedule, train_cfg=cfg)
    return skips.seen, runner.param_schedulers[0].last_step


def test_an_overflow_on_one_process_skips_the_update_on_all(tmp_path: Path, workers2: WorkerGroup) -> None:
    first, second = workers2.run(overflow, str(tmp_path))
    assert first == second
    assert [skipped for skipped, _ in first[0]] == [False, False, True, *[False] * 4]
    assert first[1] == 6


# Several optimizers


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x = data["x"].double()
        loss = nn.functional.softplus(-self.critic(x)).mean()
        optim_wrapper["critic"].update_params(loss)
        self.critic.requires_grad_(False)
        generator_loss = nn.functional.softplus(self.critic(self.generator(x))).mean()
        optim_wrapper["generator"].update_params(generator_loss)
        self.critic.requires_grad_(True)
        return {"critic_loss": loss.detach(), "generator_loss": generator_loss.detach()}


def gan(folder: str, batch_size: int, accumulate: int) -> dict[str, Any]:
    wrappers = {name: dict(optimizer=SGD, accumulative_counts=accumulate) for name in ("generator", "critic")}
    return run(folder, model=Gan, optim_wrapper=wrappers, train_dataloader=loader(24, batch_size))[2]


def test_several_optimizers(tmp_path: Path, workers2: WorkerGroup) -> None:
    expected = gan(str(tmp_path), 4, 2)
    for state in workers2.run(gan, str(tmp_path), 2, 2):
        for key in expected:
            if key.startswith("model."):
                assert torch.allclose(state[key], expected[key], rtol=1e-9), key


# Resuming


class Noisy(Net):
    """Draws on the processes' own generators in training and in evaluation."""

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return super().forward(index, x + torch.rand_like(x), y, mode)


def resumed(folder: str, at: tuple[int, ...], **changes: Any) -> None:
    """In a worker: a run, and the rest of it after some of its updates."""
    common = dict(model=Noisy, **validation(5), **changes)
    different = dict(randomness=dict(seed=1, diff_rank_seed=True))
    whole, _, expected = run(f"{folder}/whole", SaveEvery(set(at)), **common, **different)
    for number in at:
        different["randomness"]["seed"] = 2
        rest, _, state = run(f"{folder}/rest", resume=f"{folder}/whole/iter_{number}", **common, **different)
        assert rest.trained == whole.trained[number:], f"other samples after update {number}"
        assert not differences(state, expected), f"another result after update {number}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(
            train_cfg=dict(by_epoch=False, max_iters=12, val_interval=5),
            train_dataloader=loader(sampler=dict(type="InfiniteSampler")),
            optim_wrapper=dict(optimizer=SGD, accumulative_counts=2),
        ),
        dict(
            optim_wrapper=dict(type="AmpOptimWrapper", optimizer=SGD, dtype="float16", loss_scale=dict(init_scale=8.0))
        ),
    ],
    ids=["epochs", "infinite-accumulate", "float16"],
)
def test_resume_is_exact_on_two_processes(tmp_path: Path, workers2: WorkerGroup, changes: dict[str, Any]) -> None:
    workers2.run(resumed, str(tmp_path), (2, 7, 11), **changes)


def save_epochs(folder: str, **changes: Any) -> tuple[list[list[int]], dict[str, Any]]:
    watch, _, state = run(folder, **{"default_hooks": dict(checkpoint=dict(interval=1)), **changes})
    return watch.trained, state


def heard(runner: FlexibleRunner) -> str:
    """What training says that cannot go on from a checkpoint; "" if it can."""
    try:
        runner.train()
    except CheckpointError as error:
        return str(error)
    finally:
        runner.strategy.leave()
    return ""


def refused(folder: str, **changes: Any) -> str:
    return heard(make_runner(f"{folder}/rest", **{"train_dataloader": loader(), **changes}))


def test_the_random_state_of_a_process_is_missing(tmp_path: Path, workers2: WorkerGroup) -> None:
    workers2.run(save_epochs, str(tmp_path), train_cfg=dict(max_epochs=1))
    path = tmp_path / "epoch_1"
    change_values(path, lambda values: values["rng"].pop(1))
    for message in workers2.run(refused, str(tmp_path), resume=str(path)):
        assert message.startswith(
            f"{path}: was written with 2 data shards and has RNG states of 1; resume=dict(random=False)"
        )


def rest_of(folder: str, checkpoint: str, **changes: Any) -> tuple[list[list[int]], dict[str, Any], list[str]]:
    with log_lines() as found:
        watch, _, state = run(f"{folder}/rest", resume=checkpoint, log_level="WARNING", **changes)
    return watch.trained, state, [line for line in found if "RNG states" in line]


def steady_net() -> nn.Module:
    return Net(dropout=0.0)


@pytest.mark.parametrize("first", [1, 2])
def test_another_number_of_processes_at_the_end_of_an_epoch(tmp_path: Path, workers2: WorkerGroup, first: int) -> None:
    """The same global batches in the same order: without dropout the weights are those of a run that had never changed."""
    changes = dict(
        model=steady_net, optim_wrapper=dict(optimizer=SGD), param_scheduler=dict(type="StepLR", step_size=1)
    )
    one, two = loader(24, 4), loader(24, 2)
    whole, expected = save_epochs(str(tmp_path / "whole"), train_dataloader=one, **changes)
    if first == 1:
        checkpoint = str(tmp_path / "whole" / "epoch_1")
        rest = workers2.run(rest_of, str(tmp_path), checkpoint, train_dataloader=two, **changes)
        (_, state, said), found = rest[0], in_turn([trained for trained, _, _ in rest])
        warned = "The checkpoint was written with 1 data shard and there are 2 now"
    else:
        workers2.run(save_epochs, str(tmp_path / "two"), train_dataloader=two, **changes)
        trained, state, said = rest_of(
            str(tmp_path), str(tmp_path / "two" / "epoch_1"), train_dataloader=one, **changes
        )
        found = [sorted(update) for update in trained]
        warned = "The checkpoint was written with 2 data shards and there is 1 now"
    assert found == [sorted(update) for update in whole[6:]]
    assert said[0].startswith(f"{warned}: RNG states are not restored")
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.allclose(state[key], value, rtol=1e-5, atol=1e-6), key
    assert state["schedulers"] == expected["schedulers"]


# Which checkpoint is the newest


class Iterations(Hook):
    def __init__(self) -> None:
        self.iterations: list[int] = []

    def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        self.iterations.append(runner.iter)


def resumed_at(folder: Path, stale: bool) -> int | str:
    """The update that this process goes on from; one may see a shared folder as it was a while ago."""
    with pytest.MonkeyPatch.context() as patch:
        options = dict(train_dataloader=loader(), train_cfg=dict(max_epochs=3), resume=True)
        runner = make_runner(folder, **options, custom_hooks=[watch := Iterations()])
        if runner.rank == 1:
            patch.setattr(runner_module, "find_latest", lambda _: Path(folder) / "epoch_1" if stale else None)
        return heard(runner) or watch.iterations[0]


@pytest.mark.parametrize("stale", [True, False])
def test_all_processes_take_the_checkpoint_that_rank_0_takes(
    tmp_path: Path, workers2: WorkerGroup, stale: bool
) -> None:
    changes = dict(default_hooks=dict(checkpoint=dict(interval=1)), train_cfg=dict(max_epochs=2))
    workers2.run(run_quietly, tmp_path, changes)
    first, second = workers2.run(resumed_at, tmp_path, stale)
    assert first == second == 2 * 7


def test_all_processes_hear_that_the_newest_is_gone(tmp_path: Path, workers2: WorkerGroup) -> None:
    (tmp_path / "latest").write_text("epoch_7")
    for heard in workers2.run(resumed_at, tmp_path, True):
        assert str(heard).startswith(f'{tmp_path / "latest"}: names "epoch_7", which is not a complete checkpoint')


def resumed_beside(folder: Path, unreadable: str) -> str:
    """What this process hears where rank 0 cannot read a file."""
    read = Path.open

    def fails(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *args, **kwargs)

    runner = make_runner(folder, train_dataloader=loader(), resume=True)
    with pytest.MonkeyPatch.context() as patch:
        if runner.rank == 0:
            patch.setattr(Path, "open", fails)
        return heard(runner)


@pytest.mark.parametrize("name", ["latest", "last_checkpoint"])
def test_all_processes_hear_that_rank_0_cannot_read(tmp_path: Path, workers2: WorkerGroup, name: str) -> None:
    (tmp_path / name).write_text("epoch_7")
    says = f"{tmp_path / name}: cannot be read, Input/output error"
    assert workers2.run(resumed_beside, tmp_path, name) == [says] * 2


class Save(Hook):
    """One checkpoint."""

    priority = "LOWEST"

    def __init__(self, at: int, in_background: bool) -> None:
        self.at, self.in_background = at, in_background

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.iter + 1 == self.at:
            runner.save_checkpoint(runner.work_dir, "here", async_save=self.in_background)


def logged_losses(folder: Path, *more: Hook, batch_size: int = 2, **changes: Any) -> dict[int, float]:
    """The loss of every log line on rank 0, by the number of updates."""
    data = loader(length=120, batch_size=batch_size, sampler=dict(type="DefaultSampler", shuffle=False))
    options = dict(model=partial(Net, dropout=0.0), train_cfg=dict(max_epochs=1), custom_hooks=more, **changes)
    runner = make_runner(folder, train_dataloader=data, **options)
    runner.train()
    file = Path(runner.log_dir) / "vis_data" / "scalars.json"
    records = [json.loads(line) for line in file.read_text().splitlines()] if runner.rank == 0 else []
    runner.strategy.leave()
    return {record["iter"]: record["loss"] for record in records}


@pytest.mark.distributed
@pytest.mark.parametrize("in_background", [False, True])
def test_the_first_line_after_a_resume_is_that_of_the_uninterrupted_run(
    tmp_path: Path, workers2: WorkerGroup, in_background: bool
) -> None:
    """Also where a window was under way, of which a process has its own losses only."""
    whole, nothing = workers2.run(logged_losses, tmp_path / "whole", Save(15, in_background))
    assert (list(whole), nothing) == ([10, 20, 30], {})
    again, _ = workers2.run(logged_losses, tmp_path / "again", resume=str(tmp_path / "whole" / "here"))
    assert again == {number: whole[number] for number in (20, 30)}
    alone = logged_losses(tmp_path / "alone", batch_size=4, resume=str(tmp_path / "whole" / "here"))
    assert alone == pytest.approx(again, rel=1e-6)


def run_quietly(folder: Path, changes: dict[str, Any]) -> None:
    run(folder, **changes)
