"""A run that was interrupted after any update and resumed ends where the uninterrupted one does, bit for bit.

The resumed run is configured with another seed: all that it knows of the first one comes from the checkpoint.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from flextrain import FlexibleRunner, ResumeFrom, SingleDeviceStrategy
from flextrain.runner.data.samplers import DefaultSampler, seed_own_generators
from flextrain.strategies.parts import hooks_of

from .training import (
    SGD,
    At,
    Changes,
    Net,
    Samples,
    SaveEvery,
    Stop,
    StopAt,
    Watch,
    differences,
    make_runner,
    validation,
    whole_state,
)

pytestmark = pytest.mark.usefixtures("quick")


class Dice(Sampler[int]):
    """An order drawn, while it is asked for, from every global generator."""

    def __init__(self, dataset: Samples) -> None:
        self.length = len(dataset)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            drawn = random.random() + np.random.rand() + float(torch.rand(()))
            yield int(drawn / 3 * self.length)

    def __len__(self) -> int:
        return self.length


class OwnDice(Dice):
    """An order drawn from generators that the sampler keeps, under names of its own."""

    def __init__(self, dataset: Samples) -> None:
        super().__init__(dataset)
        self.torch, self.old, self.new = torch.Generator(), np.random.RandomState(0), np.random.default_rng(0)
        self.plain = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            drawn = (
                self.plain.random() + self.old.rand() + self.new.random() + float(torch.rand((), generator=self.torch))
            )
            yield int(drawn / 4 * self.length)


class InPlace(Dice):
    """Shuffles its own list again in every pass, so that an order follows from the one before."""

    def __init__(self, dataset: Samples) -> None:
        super().__init__(dataset)
        self.indices = list(range(self.length))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)


class CountsPasses(Dice):
    """Knows the pass from its own count; one that is told the epoch too does not use it."""

    passes = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(self.passes)).tolist())


class Outer(Dice):
    """Gives what another sampler gives, under a name of its own for it."""

    def __init__(self, dataset: Samples) -> None:
        super().__init__(dataset)
        self.inner = InPlace(dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


class Both(Dice):
    """Gives what two samplers of torch give in turn, which have generators of their own."""

    def __init__(self, dataset: Samples) -> None:
        super().__init__(dataset)
        self.half = self.length // 2
        self.parts = [RandomSampler(range(self.half), generator=torch.Generator()) for _ in range(2)]

    def __iter__(self) -> Iterator[int]:
        for one, other in zip(*self.parts, strict=True):
            yield from (one, self.half + other)


class Counter(Dice):
    """Counts its passes in an object, or by an iterator."""

    def __init__(self, dataset: Samples, number: Any) -> None:
        super().__init__(dataset)
        self.number = number

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.number, SimpleNamespace):
            number = self.number.passes = self.number.passes + 1
        else:
            number = next(self.number)
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(number)).tolist())


class Grows(Dice):
    """Has more samples in later epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self.length - 8 + 4 * self.epoch


class Buckets(Sampler[list[int]]):
    """Batches from lists in a list, which it shuffles in place."""

    def __init__(self) -> None:
        self.buckets = [list(range(13)), list(range(13, 26))]

    def __iter__(self) -> Iterator[list[int]]:
        for bucket in self.buckets:
            np.random.shuffle(bucket)
            yield from (bucket[:3], bucket[3:8], bucket[8:])

    def __len__(self) -> int:
        return 6


class Chosen(DefaultSampler):
    """Some of what flextrain's own gives, in another order: where it begins says nothing about where this does."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1][:22])

    def __len__(self) -> int:
        return 22


class Backwards(BatchSampler):
    """The batches of another sampler, last sample first."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[::-1]


class Stream(IterableDataset[dict[str, Any]]):
    """Samples in a random order that cannot be asked for by number."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(22):
            yield self.samples[random.randrange(len(self.samples))]


class Pair(nn.Module):
    """Two parts with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6), nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 1))

    def train_step(self, data: dict[str, Tensor], optim_wrapper: Any) -> dict[str, Tensor]:
        critic_loss = functional.relu(1 - self.critic(data["x"])).mean()
        optim_wrapper["critic"].update_params(critic_loss)
        self.critic.requires_grad_(False)  # or its gradients of this loss would count in its next update
        generator_loss = -self.critic(self.generator(torch.randn(4, 6))).mean()
        optim_wrapper["generator"].update_params(generator_loss)
        self.critic.requires_grad_(True)
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


class WithNorm(Net):
    """Running statistics are state that no optimizer touches, and predictions draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        noise = torch.rand_like(x) if mode == "predict" else 0.0
        return super().forward(index, self.norm(x) + noise, y, mode)


def data(**options: Any) -> Changes:
    """A dataloader configuration over samples that are logged."""
    noisy = options.pop("noisy", False)
    return lambda folder: dict(
        train_dataloader=dict(
            batch_size=4, dataset=Samples(26, folder / "read", noisy), collate_fn="default_collate", **options
        )
    )


def loader(sampler: Any = None, **options: Any) -> Changes:
    """A DataLoader that the user built."""

    def changes(folder: Path) -> dict[str, Any]:
        dataset = Samples(26, folder / "read")
        own = {} if sampler is None else {"sampler": sampler(dataset)}
        return dict(train_dataloader=DataLoader(dataset, batch_size=4, **own, **options))

    return changes


def stream(folder: Path) -> dict[str, Any]:
    return dict(
        train_dataloader=dict(batch_size=4, dataset=Stream(Samples(26, folder / "read")), collate_fn="default_collate"),
        train_cfg=dict(by_epoch=False, max_iters=15),
    )


def weighted(dataset: Samples) -> WeightedRandomSampler:
    weights = torch.arange(1.0, len(dataset) + 1).tolist()
    return WeightedRandomSampler(weights, len(dataset), generator=torch.Generator().manual_seed(9))


def with_(*parts: Changes, **more: Any) -> Changes:
    def changes(folder: Path) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in parts or (data(),):
            merged |= part(folder)
        return {**merged, **more}

    return changes


ITERATIONS = dict(by_epoch=False, max_iters=17, val_interval=5)
ACCUMULATE = dict(optimizer=SGD, accumulative_counts=3)
ADAMW = dict(type="AdamW", lr=1e-2, weight_decay=0.1)
HALF = dict(
    type="AmpOptimWrapper",
    optimizer=ADAMW,
    dtype="float16",
    # Grows until it overflows, so that updates are skipped and the scale differs from update to update.
    loss_scale=dict(init_scale=2.0**15, growth_interval=2),
    clip_grad=dict(max_norm=0.5),
)
SCHEDULES = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=5),
    dict(type="CosineAnnealingLR", T_max=3, eta_min=1e-3),
    dict(type="ConstantMomentum", factor=0.5, begin=1, end=2),
    dict(type="MultiStepLR", milestones=[1], convert_to_iter_based=True),
    dict(type="ExponentialParamScheduler", param_name="weight_decay", gamma=0.9, by_epoch=False),
]

CASES: dict[str, Changes] = {
    "epochs": with_(),
    "accumulate": with_(optim_wrapper=ACCUMULATE),
    "iterations": with_(train_cfg=ITERATIONS),
    "iterations-accumulate": with_(train_cfg=ITERATIONS, optim_wrapper=ACCUMULATE),
    "infinite": with_(data(sampler=dict(type="InfiniteSampler")), train_cfg=ITERATIONS),
    "infinite-accumulate": with_(
        data(sampler=dict(type="InfiniteSampler", shuffle=True)), train_cfg=ITERATIONS, optim_wrapper=ACCUMULATE
    ),
    "infinite-in-own-batches": with_(
        data(sampler=dict(type="InfiniteSampler"), batch_sampler=dict(type=Backwards)), train_cfg=ITERATIONS
    ),
    "augmentation": data(noisy=True),
    "drop-last": data(drop_last=True),
    "own-iter": data(sampler=dict(type=Chosen)),
    "own-seed": data(sampler=dict(type="DefaultSampler", seed=77)),
    "loader": loader(shuffle=True),
    "loader-in-order": loader(),
    "loader-custom-sampler": loader(Dice),
    "loader-sampler-with-generators": loader(OwnDice),
    "loader-weighted-sampler": loader(weighted),
    "loader-sampler-that-shuffles-in-place": loader(InPlace),
    "loader-sampler-that-counts-passes": with_(loader(CountsPasses), train_cfg=ITERATIONS),
    "loader-sampler-inside-of-another": loader(Outer),
    "loader-sampler-over-two-with-generators": loader(Both),
    "loader-sampler-that-counts-in-an-object": loader(lambda dataset: Counter(dataset, SimpleNamespace(passes=0))),
    "loader-sampler-that-counts-by-an-iterator": loader(lambda dataset: Counter(dataset, itertools.count())),
    "loader-sampler-that-grows": loader(Grows),
    "batches-shuffled-in-place": lambda folder: dict(train_dataloader=DataLoader(
        Samples(26, folder / "read"), batch_sampler=Buckets()
    )),
    "iterations-custom-sampler": with_(loader(Dice), train_cfg=ITERATIONS),
    "batch-sampler": data(batch_sampler=dict(type=Backwards)),
    "stream": stream,
    "two-optimizers": with_(
        model=Pair, optim_wrapper=dict(generator=dict(optimizer=ADAMW), critic=dict(optimizer=SGD)),
        param_scheduler=dict(generator=dict(type="LinearLR", by_epoch=False, end=9), critic=SCHEDULES[1]),
    ),
    "ema": with_(custom_hooks=[dict(type="EMAHook", momentum=0.1)], **validation()),
    "schedulers": with_(optim_wrapper=dict(optimizer=dict(weight_decay=0.1, **SGD)), param_scheduler=SCHEDULES),
    "torch-scheduler": with_(param_scheduler=dict(type="CyclicLR", base_lr=0.01, max_lr=0.1, step_size_up=3, by_epoch=False)),
    "one-cycle": with_(param_scheduler=dict(type="OneCycleLR", eta_max=0.3, by_epoch=False)),
    "plateau": with_(
        param_scheduler=dict(type="ReduceOnPlateauLR", monitor="accuracy", rule="greater", patience=0, factor=0.5),
        **validation(),
    ),
    "float16": with_(optim_wrapper=HALF, param_scheduler=SCHEDULES[0]),
    "bfloat16": with_(optim_wrapper=dict(type="AmpOptimWrapper", optimizer=ADAMW, dtype="bfloat16")),
    "evaluation": with_(model=WithNorm, **validation()),
    "iterations-evaluation": with_(model=WithNorm, train_cfg=ITERATIONS, **validation()),
}  # fmt: skip

# Every update of the first, some of the others: the first and last of training, of an epoch, and around a validation.
SOME = (1, 4, 5, 7, 8, 14, 16)
EVERY = ("epochs", "iterations", "loader-custom-sampler")


def run(folder: Path, changes: Changes, *more: Any, **options: Any) -> tuple[Watch, Any]:
    watch = Watch()
    folder.mkdir(exist_ok=True)
    config = {**changes(folder), **options}
    hooks = [*config.pop("custom_hooks", ()), watch, *more]
    runner = make_runner(folder, **config, custom_hooks=hooks)
    runner.train()
    # Persistent workers end at once when they are let go of, but wait for ten seconds when the garbage collector finds
    # them in the runner's reference cycle (torch 2.15: the pipes to them are closed first).
    runner.train_loop.data.close()
    return watch, runner


def compare(tmp_path: Path, changes: Changes, at: tuple[int, ...] | None) -> None:
    """Resume after the updates ``at`` of a run that is not interrupted, and see that nothing differs from it."""
    whole, runner = run(tmp_path / "whole", changes, SaveEvery(None if at is None else set(at)))
    expected, length = whole_state(runner), len(whole.trained)
    reached = range(1, length + 1) if at is None else [number for number in at if number <= length]
    assert len(reached) > 2
    for number in reached:
        rest, resumed = run(
            tmp_path / f"from_{number}",
            changes,
            resume=str(tmp_path / "whole" / f"iter_{number}"),
            randomness=dict(seed=2),
        )
        assert rest.trained == whole.trained[number:], f"other samples after update {number}"
        assert rest.rates == whole.rates[number:], f"other learning rates after update {number}"
        assert not differences(whole_state(resumed), expected), f"another result after update {number}"
        dataset = resumed.train_dataloader.dataset
        if isinstance(dataset, Samples):
            trained = [index for batch in rest.trained for index in batch]
            assert sorted(dataset.read()) == sorted(trained), f"read something else after update {number}"


@pytest.mark.parametrize("name", CASES)
def test_resume_is_exact(tmp_path: Path, name: str) -> None:
    compare(tmp_path, CASES[name], None if name in EVERY else SOME)


class Half(Net):
    """The same in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return super().forward(index, x.bfloat16(), y, mode)


@pytest.mark.parametrize("saved, now, is_told", [(Net, Half, True), (Half, Net, False), (Half, Half, False)])
def test_a_dtype_that_rounds_what_the_checkpoint_has_is_told(
    tmp_path: Path, saved: Any, now: Any, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "whole", with_(model=saved), SaveEvery({4}))
    run(tmp_path / "rest", with_(model=now), resume=str(tmp_path / "whole" / "iter_4"), log_level="WARNING")
    said = capsys.readouterr().out
    assert ("iter_4: is rounded to bfloat16, model.net.0.weight (float32) and" in said) is is_told


def test_samplers_beside_each_other_draw_apart() -> None:
    both = Both(Samples(26))
    seed_own_generators(both, 3)
    one, other = (list(part) for part in both.parts)
    assert sorted(one) == sorted(other) == list(range(13))
    assert one != other


@pytest.mark.parametrize("sampler, is_exact", [(InPlace, False), (Dice, True)])
def test_a_sampler_that_this_process_has_read_before(
    tmp_path: Path, sampler: Any, is_exact: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """After 9 updates it has begun its second pass, which the second run cannot make again."""
    whole, _ = run(tmp_path / "whole", loader(sampler))
    same = loader(sampler)(tmp_path)
    with pytest.raises(Stop):
        run(tmp_path / "parts", lambda folder: same, SaveEvery({9}), StopAt(9))
    rest, _ = run(tmp_path / "parts", lambda folder: same, resume=True, log_level="WARNING")
    assert (rest.trained == whole.trained[9:]) is is_exact
    said = capsys.readouterr().out
    assert ("InPlace has begun 2 passes in this process and changes in each" in said) is not is_exact


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("sampler", [None, Dice])
def test_resume_is_exact_with_workers(tmp_path: Path, by_epoch: bool, persistent: bool, sampler: Any) -> None:
    """Workers read ahead, but never what is not trained on."""
    options = dict(num_workers=2, persistent_workers=persistent)
    given = data(noisy=True, **options) if sampler is None else loader(sampler, **options)
    loop = dict(by_epoch=True, max_epochs=2) if by_epoch else dict(by_epoch=False, max_iters=10)
    compare(tmp_path, with_(given, train_cfg=loop), (2, 7, 9))


# A checkpoint that is saved at the end of an epoch comes before that epoch's validation.
@pytest.mark.parametrize("name", ["schedulers", "plateau", "evaluation"])
def test_resume_from_the_checkpoint_of_an_epoch(tmp_path: Path, name: str) -> None:
    changes = with_(CASES[name], default_hooks=dict(checkpoint=dict(interval=1)))
    whole, runner = run(tmp_path / "whole", changes)
    expected = whole_state(runner)
    for epoch in (1, 2, 3):
        resumed_from = str(tmp_path / "whole" / f"epoch_{epoch}")
        rest, resumed = run(tmp_path / f"from_{epoch}", changes, resume=resumed_from, randomness=dict(seed=2))
        assert rest.trained == whole.trained[len(whole.trained) * epoch // 3 :]
        assert not differences(whole_state(resumed), expected), f"another result after epoch {epoch}"
        assert (resumed.epoch, resumed.iter) == (3, len(whole.trained))


@pytest.mark.parametrize("saved_after, left", [(None, [2, 3]), (2, [3])])
def test_no_validation_is_left_out_or_repeated(tmp_path: Path, saved_after: int | None, left: list[int]) -> None:
    """Saved at the end of epoch 2, before its validation; or in epoch 3, after it."""

    def save(runner: FlexibleRunner) -> None:
        if runner.epoch == saved_after:
            runner.save_checkpoint(runner.work_dir, "later")

    saving = dict(checkpoint=dict(interval=2))
    run(tmp_path / "whole", with_(**validation()), At("before_train_epoch", save), default_hooks=saving)
    path, seen = tmp_path / "whole" / ("later" if saved_after else "epoch_2"), list[int]()
    look = At("before_val", lambda runner: seen.append(runner.epoch))
    run(tmp_path / "rest", with_(**validation()), look, resume=str(path))
    assert seen == left


@pytest.mark.parametrize("priority", ["NORMAL", "LOWEST"])
@pytest.mark.parametrize(
    "point, at",
    [("after_train_iter", 9), ("after_train_iter", 14), ("after_train_epoch", 2), ("after_val_epoch", 2), ("after_val", 2)],
)  # fmt: skip
def test_a_hook_may_save_before_schedules_have_stepped(tmp_path: Path, point: str, at: int, priority: str) -> None:
    """A hook of the user's has the priority NORMAL, and so comes before the one that steps schedules."""
    plateau = dict(type="ReduceOnPlateauLR", monitor="accuracy", rule="greater", patience=1, factor=0.5)
    stopping = dict(type="EarlyStoppingHook", monitor="accuracy", min_delta=0.0, patience=2)
    schedules = [plateau] if "val" in point else [*SCHEDULES, dict(type="MultiStepLR", milestones=[2], gamma=0.1)]
    optim = dict(optimizer=dict(weight_decay=0.1, **SGD))
    loop = dict(max_epochs=4)
    changes = with_(
        **validation(), optim_wrapper=optim, param_scheduler=schedules, train_cfg=loop, custom_hooks=[stopping]
    )
    calls = list[int]()

    def save(runner: FlexibleRunner, *_: Any, **__: Any) -> None:
        calls.append(runner.iter)
        if len(calls) == at:
            runner.save_checkpoint(runner.work_dir, "saved")

    whole, runner = run(tmp_path / "whole", changes, At(point, save, priority))
    done = at if point == "after_train_iter" else 14
    rest, resumed = run(tmp_path / "rest", changes, resume=str(tmp_path / "whole" / "saved"))
    assert (rest.trained, rest.rates) == (whole.trained[done:], whole.rates[done:])
    assert not differences(whole_state(resumed), whole_state(runner))
    assert resumed.iter == runner.iter


def test_resume_of_a_finished_run_does_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = with_(default_hooks=dict(checkpoint=dict(interval=1)))
    _, runner = run(tmp_path, changes)
    expected = whole_state(runner)
    assert "Nothing is left" not in capsys.readouterr().out
    rest, resumed = run(tmp_path, changes, resume=True, log_level="INFO")
    assert rest.trained == []
    assert "Nothing is left to train: 3 of max_epochs=3 are done" in capsys.readouterr().out
    assert not differences(whole_state(resumed), expected)


def test_resume_true_takes_the_newest_after_a_crash(tmp_path: Path) -> None:
    whole, runner = run(tmp_path / "whole", CASES["accumulate"])
    expected = whole_state(runner)
    # The checkpoint is two updates older than the crash: those two are made again.
    with pytest.raises(Stop):
        run(tmp_path / "crash", CASES["accumulate"], SaveEvery({2, 5}), StopAt(7))
    rest, resumed = run(tmp_path / "crash", CASES["accumulate"], resume=True, randomness=dict(seed=9))
    assert rest.trained == whole.trained[5:]
    assert not differences(whole_state(resumed), expected)
    with pytest.raises(Stop):
        run(tmp_path / "crash", CASES["accumulate"], SaveEvery({8}), StopAt(8), resume=str(tmp_path / "crash/iter_5"))
    assert (tmp_path / "crash" / "latest").read_text() == "iter_8"


def test_resume_true_takes_load_from(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole", with_(), SaveEvery({4}))
    rest, _ = run(tmp_path / "rest", with_(), resume=True, load_from=str(tmp_path / "whole" / "iter_4"))
    assert rest.trained == whole.trained[4:]


def test_a_run_may_be_interrupted_twice(tmp_path: Path) -> None:
    whole, runner = run(tmp_path / "whole", CASES["schedulers"])
    for at in (3, 10):
        with pytest.raises(Stop):
            run(tmp_path / "parts", CASES["schedulers"], SaveEvery({at}), StopAt(at), resume=True)
    rest, resumed = run(tmp_path / "parts", CASES["schedulers"], resume=True)
    assert rest.trained == whole.trained[10:]
    assert not differences(whole_state(resumed), whole_state(runner))


def test_training_goes_on_when_more_epochs_are_asked_for(tmp_path: Path) -> None:
    """The first three epochs of six are those of a run of three, and train() again does nothing more."""
    six = dict(by_epoch=True, max_epochs=6)
    whole, runner = run(tmp_path / "six", with_(train_cfg=six))
    run(tmp_path / "three", with_(default_hooks=dict(checkpoint=dict(interval=1))))
    rest, resumed = run(tmp_path / "more", with_(train_cfg=six), resume=str(tmp_path / "three" / "epoch_3"))
    assert rest.trained == whole.trained[21:]
    assert not differences(whole_state(resumed), whole_state(runner))
    resumed.train()
    assert len(rest.trained) == 21


@pytest.mark.parametrize("by_hand", [True, False])
def test_resume_by_hand(tmp_path: Path, by_hand: bool) -> None:
    """Before train() nothing of a run exists yet, such as the averages that are to be filled."""
    changes = with_(CASES["ema"], default_hooks=dict(checkpoint=dict(interval=1)))
    _, whole = run(tmp_path / "whole", changes)
    runs, validated = list[None](), list[int]()
    runner = make_runner(tmp_path / "rest", **changes(tmp_path))
    runner.register_hook(At("before_run", lambda runner: runs.append(None)))
    runner.register_hook(At("before_val", lambda runner: validated.append(runner.epoch)))
    if by_hand:
        runner.resume(tmp_path / "whole" / "epoch_2")
    else:
        runner.load_checkpoint(tmp_path / "whole" / "epoch_3")
    runner.train()
    assert len(runs) == 1
    if by_hand:
        assert validated == [2, 3]
        assert not differences(whole_state(runner), whole_state(whole))
    else:
        assert runner.iter == 21


@pytest.mark.parametrize("parts", [dict(resume_optimizer=False), dict(resume_param_scheduler=False)], ids=str)
def test_parts_can_be_left_out(tmp_path: Path, parts: dict[str, bool]) -> None:
    changes = with_(param_scheduler=dict(type="StepLR", step_size=1, gamma=0.5))
    run(tmp_path / "whole", changes, default_hooks=dict(checkpoint=dict(interval=1)))
    runner = make_runner(tmp_path / "rest", **changes(tmp_path))
    runner.resume(tmp_path / "whole" / "epoch_2", **parts)
    assert (runner.epoch, runner.iter) == (2, 14)
    assert (runner.param_schedulers[0].last_step == 2) is ("resume_param_scheduler" not in parts)
    has_momentum = bool(runner.optim_wrapper.optimizer.state)
    assert has_momentum is ("resume_optimizer" not in parts)


@pytest.mark.parametrize("reached", [3, 12], ids=["from a later iteration", "from an earlier one"])
@pytest.mark.parametrize("point", ["before_train_iter", "run_window"])
def test_training_goes_on_from_another_run_in_the_same_process(tmp_path: Path, reached: int, point: str) -> None:
    """A run with other weights, which a hook or its strategy brings to the checkpoint of the 9th update, ends as the other one."""
    changes = with_(param_scheduler=dict(type="StepLR", step_size=1, gamma=0.5))
    watch, whole = run(tmp_path / "whole", changes, SaveEvery({9}))
    jumps = list[int]()

    def jump(runner: Any, *others: Any) -> None:
        if runner.iter == reached and not jumps:
            jumps.append(reached)
            raise ResumeFrom(tmp_path / "whole" / "iter_9", "a test")

    class Jumping(SingleDeviceStrategy):
        def run_window(self, window: Any, step: Any) -> dict[str, Tensor]:
            found = super().run_window(window, step)  # which has left gradients
            jump(runner)
            return found

    hook = At(
        "on_exception" if point == "run_window" else point, (lambda *_, **__: None) if point == "run_window" else jump
    )
    hooks_of.register(Jumping, lambda strategy: [hook])
    own = Watch()
    options = {
        **changes(tmp_path),
        "custom_hooks": [own],
        "strategy": Jumping(device="cpu"),
        "randomness": dict(seed=2),
    }
    if point != "run_window":
        del Jumping.run_window
    runner = make_runner(tmp_path / "own", **options)
    assert hook in runner.hooks
    runner.train()
    assert jumps == [reached]
    assert own.trained[-12:] == watch.trained[9:]
    assert not differences(whole_state(runner), whole_state(whole))
