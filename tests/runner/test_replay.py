"""ReplayHook: every flipped bit in a window that is run twice is found and named; training is that without it."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from flextrain import BaseModel, ConfigError, CorruptionError, OptimWrapper, StrategyError
from flextrain.core.base.events import read_events
from flextrain.runner.hooks import Hook
from flextrain.runner.hooks.silent_corruption import ReplayHook
from flextrain.testing import WorkerGroup

from .training import (
    DDP,
    FSDP,
    SGD,
    Net,
    Samples,
    Weighted,
    differences,
    log_lines,
    make_runner,
    refuses,
    whole_state,
    zero,
)

pytestmark = pytest.mark.usefixtures("quick")

TP = dict(type="MeshStrategy", tp=2, plan={"net.0": "colwise", "net.3": "rowwise"})
PP = dict(type="MeshStrategy", pp=2)
EACH = dict(type="ReplayHook", interval=1)


class Normalised(Net):
    """With running statistics, a count in a plain attribute and a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        self.calls += 1
        x = x * (1 + 0.1 * (self.calls % 3)) + 0.1 * torch.rand(x.shape, generator=self.generator)
        return super().forward(index, self.norm(x), y, mode)


# Training is what it is without the hook


def trained(folder: Path | str, replays: bool, **changes: Any) -> dict[str, Any]:
    """What training has made, and which numbers come next."""
    hook = ReplayHook(interval=2)
    data = dict(batch_size=4, dataset=Samples(24), collate_fn="default_collate")
    given = dict(
        model=Normalised, custom_hooks=[hook] if replays else [], train_cfg=dict(max_epochs=2), train_dataloader=data
    )
    given |= changes
    if isinstance(given.get("optim_wrapper"), partial):
        given["optim_wrapper"] = given["optim_wrapper"]()
    runner = make_runner(folder, **given)
    runner.train()
    if replays:
        assert hook.replays > 1, hook.replays
    state = whole_state(runner)
    state |= {f"buffer.{name}": buffer.clone() for name, buffer in runner.strategy.module.named_buffers()}
    state["next"] = [torch.rand(()), random.random(), torch.tensor(getattr(runner.strategy.module, "calls", 0))]
    runner.strategy.leave()
    return state


def changed(folder: Path | str, **changes: Any) -> list[str]:
    """What replays change in training."""
    return differences(trained(f"{folder}/twice", True, **changes), trained(f"{folder}/once", False, **changes))


class Discriminates(BaseModel):
    """Two optimizers, the second of which sees what the first has done; and averages that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(6, 6), nn.Linear(6, 1)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.calls = 0

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        self.calls += 1
        real, made = data["x"], self.drop(self.generator(data["x"]))
        wrong = (self.discriminator(real) - 1).square().mean() + self.discriminator(made.detach()).square().mean()
        optim_wrapper["discriminator"].update_params(wrong)
        fooled = (self.discriminator(made) - 1).square().mean()
        if self.calls % 2:
            optim_wrapper["generator"].update_params(fooled)
        for average, weight in zip(self.teacher.parameters(), self.generator.parameters(), strict=True):
            average.data.lerp_(weight.data, 0.1)
        return {"loss_d": wrong, "loss_g": fooled}


class Teaches(Normalised):
    """Writes to frozen weights in forward, without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 8).requires_grad_(False)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        for average, weight in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
            average.data.lerp_(weight.data, 0.1)
        result = super().forward(index, x, y, mode)
        result["loss"] = result["loss"] + (self.teacher(x) - self.net[0](x)).square().mean()
        return result


class Frozen(Net):
    """With a layer that FSDP gathers, and does not need again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


class Spoils(Normalised):
    """Changes its batch in place."""

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        x.mul_(2.0)
        return super().forward(index, x, y, mode)


class Keeps(Normalised):
    """Changes tensors in place that are no buffers: of its own, in a dict and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.zeros(300_000)
        self.held, self.queue = {"mean": torch.zeros(6)}, [torch.zeros(6)]

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        kept = (self.large[:6], self.held["mean"], *self.queue)
        for one in kept:
            one.lerp_(x.detach().mean(0), 0.01)
        return super().forward(index, x + sum(kept), y, mode)


class Step:
    def __init__(self) -> None:
        self.number = 0


class Remembers(Normalised):
    """Counts in an object, in a dict within a dict, in lists of a defaultdict and in an array; each shows only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.counts, self.lists = Step(), {"of": {"calls": 0}}, defaultdict[str, list[int]](list)
        self.array = np.zeros(2)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        self.step.number += 1
        self.counts["of"]["calls"] += 1
        self.lists["calls"].append(1)
        self.array += 1
        calls = (
            self.step.number // 4 + self.counts["of"]["calls"] // 5 + len(self.lists["calls"]) // 6 + self.array[0] // 7
        )
        return super().forward(index, x * (1 + 0.1 * calls), y, mode)


class Boxed:
    """What a collate function may give in place of tensors."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.array = x, x.numpy().copy()


def boxed(samples: list[Any]) -> dict[str, Any]:
    batch = default_collate(samples)
    return {**batch, "x": [Boxed(one) for one in batch["x"]]}


class Unpacks(Normalised):
    """Changes objects in its batch in place."""

    def forward(self, index: Any, x: Any, y: Tensor, mode: str = "tensor") -> Any:
        for one in x:
            one.x.mul_(1.01)
            one.array *= 1.01
        values = torch.stack([one.x + torch.from_numpy(one.array) for one in x])
        return super().forward(index, values, y, mode)


class Late(OptimWrapper):
    """Updates after every second window; the gradients of both count."""

    windows = 0

    def should_update(self) -> bool:
        self.windows += super().should_update()
        return super().should_update() and self.windows % 2 == 0


ADAM = dict(type="AdamW", lr=0.01)
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping and accumulation": dict(
        optim_wrapper=dict(optimizer=ADAM, accumulative_counts=3, clip_grad=dict(max_norm=0.1))
    ),
    "loss scale": dict(optim_wrapper=dict(type="AmpOptimWrapper", dtype="float16", loss_scale=2.0**40, optimizer=SGD)),
    "recomputing": dict(strategy=dict(type="single", activation_checkpointing=dict(classes=["Linear"]))),
    "guarded": dict(env_cfg=dict(nonfinite="skip")),
    "weighted": dict(model=Weighted),
    "writes to weights": dict(model=Teaches),
    "changes its batch": dict(model=Spoils),
    "keeps tensors": dict(model=Keeps),
    "remembers": dict(model=Remembers),
    "changes objects": dict(model=Unpacks, train_dataloader=dict(batch_size=4, dataset=Samples(24), collate_fn=boxed)),
    "compiled": dict(compile=dict(backend="eager"), model=Net),
    "its own updates": dict(
        model=Discriminates,
        optim_wrapper=dict(
            generator=dict(optimizer=ADAM), discriminator=dict(optimizer=SGD, clip_grad=dict(max_norm=0.5))
        ),
    ),
    "late updates": dict(optim_wrapper=partial(Late, ADAM)),  # built for each training
    "loss scale and its own updates": dict(
        model=Discriminates,
        optim_wrapper={
            name: dict(type="AmpOptimWrapper", dtype="float16", loss_scale="dynamic", optimizer=SGD)
            for name in ("generator", "discriminator")
        },
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_bit_for_bit_that_without_replays(tmp_path: Path, name: str) -> None:
    twice, once = (trained(tmp_path / str(replays), replays, **RECIPES[name]) for replays in (True, False))
    assert not differences(twice, once)


STRATEGIES = [
    pytest.param(DDP, Normalised, id="ddp"),
    pytest.param(FSDP, Normalised, id="fsdp"),
    pytest.param(FSDP, Frozen, id="fsdp frozen"),
    pytest.param(TP, Net, id="tp2"),
    pytest.param(PP, Net, id="pp2", marks=pytest.mark.full),
]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy, model", STRATEGIES)
def test_so_it_is_on_several_processes(workers2: WorkerGroup, tmp_path: Path, strategy: Any, model: Any) -> None:
    wrapper = dict(optimizer=ADAM, accumulative_counts=2, clip_grad=dict(max_norm=0.1))
    for found in workers2.run(changed, str(tmp_path), model=model, strategy=strategy, optim_wrapper=wrapper):
        assert not found


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize(
    "name, strategy",
    [
        pytest.param(name, strategy, id=f"{name}-{strategy['type']}")
        for name, given in RECIPES.items()
        for strategy in (DDP, FSDP)
        # Under FSDP a step of the user's cannot write an average of weights, which are sharded there.
        if name not in ("recomputing", "weighted") and not (strategy is FSDP and given.get("model") is Discriminates)
    ],
)
def test_recipes_on_several_processes(workers2: WorkerGroup, tmp_path: Path, name: str, strategy: Any) -> None:
    given = dict(train_cfg=dict(max_epochs=4)) | RECIPES[name]  # two processes have half as many updates
    for found in workers2.run(changed, str(tmp_path), strategy=strategy, **given):
        assert not found


# Flipped bits


class Flips(Hook):
    """Flips one bit in the first run of every second update from the fourth on, on one process, where chance says.

    Args:
        count: how many.
        kinds: "weight": in forward of a module only; "activation": its output; "gradient": after backward.
    """

    priority = "VERY_HIGH"

    def __init__(self, count: int, kinds: tuple[str, ...]) -> None:
        self.left, self.kinds, self.chance = count, kinds, random.Random(3)
        self.flipped: list[tuple[int, str, str]] = []
        """The rank, the kind, and the module or parameter."""
        self._armed: tuple[str, str] | None = None

    def before_train(self, runner: Any) -> None:
        self._parts = {
            name: part for name, part in runner.strategy.module.named_modules() if isinstance(part, nn.Linear)
        }
        for name, part in self._parts.items():
            part.register_forward_pre_hook(lambda part, args, name=name: self._flip_weight(name, part))
            # First of all hooks: FSDP frees the whole weight in one of its own.
            back = lambda part, args, output, name=name: self._after_forward(name, part, output)  # noqa: E731
            part.register_forward_hook(back, prepend=True)
        run_window = runner.strategy.run_window

        def flipping(window: Any, step: Any) -> Any:
            outputs = run_window(window, step)
            armed, self._armed = self._armed, None
            if armed is not None and armed[0] == "gradient":
                gradients = {n: p.grad for n, p in runner.strategy.parameters() if p.grad is not None}
                name = armed[1] if armed[1] in gradients else min(gradients)
                flip(local_of(gradients[name]), self._bit(local_of(gradients[name])))
            return outputs

        runner.strategy.run_window = flipping

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter < 3 or runner.iter % 2 == 0 or not self.left:
            return
        self.left -= 1
        kind, rank = self.kinds[self.left % len(self.kinds)], self.chance.randrange(runner.world_size)
        module = self.chance.choice(sorted(self._parts))
        self.flipped.append((rank, kind, module))
        if rank == runner.rank:
            self._armed = kind, f"{module}.weight" if kind == "gradient" else module

    def _bit(self, tensor: Tensor) -> int:
        return random.Random(len(self.flipped)).randrange(8 * tensor.numel() * tensor.itemsize)

    def _flip_weight(self, name: str, part: Any) -> None:
        if self._armed == ("weight", name):
            weight = local_of(part.weight)
            # Low bits may be lost in rounding, and have no effect at all.
            at = random.Random(len(self.flipped)).randrange(weight.numel())
            self._bit_of_weight = 32 * at + 16 + len(self.flipped) % 15
            flip(weight, self._bit_of_weight)

    def _after_forward(self, name: str, part: Any, output: Tensor) -> None:
        if self._armed == ("weight", name):
            self._armed = None
            flip(local_of(part.weight), self._bit_of_weight)
        if self._armed == ("activation", name):
            self._armed = None
            flip(local_of(output), self._bit(local_of(output)))


def flip(tensor: Tensor, bit: int) -> None:
    """Flip a bit in place, unnoticed by autograd; not by NumPy, after which FSDP could not free a gathered parameter."""
    tensor.data.view(-1).view(torch.uint8)[bit // 8].bitwise_xor_(1 << (bit % 8))


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flipped(
    folder: str, strategy: Any, count: int, kinds: tuple[str, ...], **changes: Any
) -> tuple[list[tuple[int, str, str]], list[Any], int]:
    """The bits that were flipped, the events, and how many updates were skipped."""
    flips, replays = Flips(count, kinds), ReplayHook(interval=1, on_mismatch="skip")
    runner = make_runner(
        folder,
        **{
            **dict(model=lambda: Net(dropout=0.1), strategy=strategy, custom_hooks=[flips, replays]),
            **dict(train_dataloader=dict(batch_size=8, dataset=Samples(64), collate_fn="default_collate")),
            **dict(train_cfg=dict(by_epoch=False, max_iters=2 * count + 4)),
            **changes,
        },
    )
    runner.train()
    events = [event for event in read_events(folder) if event["event"] == "corrupted"]
    runner.strategy.leave()
    return flips.flipped, events, replays.replays


KINDS = ("weight", "activation", "gradient")


def check(found: tuple[list[tuple[int, str, str]], list[Any], int], reduces: bool = False) -> None:
    planted, events, replays = found
    assert len(events) == len(planted) == 50
    assert replays == 2 * 50 + 3
    for number, ((rank, kind, module), event) in enumerate(zip(planted, events, strict=True)):
        assert event["iter"] == 4 + 2 * number
        assert rank in event["ranks"], (rank, kind, module, event)
        if kind == "gradient":
            assert "the gradient of net" in event["reason"]
        else:
            assert f"the output of {module} in forward" in event["reason"], (rank, kind, module, event)
            assert event["ranks"] == [rank] or reduces, (rank, kind, module, event)


def test_every_bit_is_found_on_one_process(tmp_path: Path) -> None:
    check(flipped(str(tmp_path), "SingleDeviceStrategy", 50, KINDS))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(DDP, id="ddp"),
        pytest.param(FSDP, id="fsdp"),
        pytest.param(TP, id="tp2", marks=pytest.mark.full),
        pytest.param(PP, id="pp2", marks=pytest.mark.full),
    ],
)
def test_every_bit_is_found_on_two(workers2: WorkerGroup, tmp_path: Path, strategy: Any) -> None:
    kinds = KINDS if strategy is not PP else ("gradient",)  # a stage has not the modules of others
    for found in workers2.run(flipped, str(tmp_path), strategy, 50, kinds):
        check(found, reduces=strategy is TP)  # the output of a layer that is divided by rows is a sum over processes


# What is asked for, and what cannot be done


def test_a_replay_is_due_in_the_second_update_and_then_at_the_interval(tmp_path: Path) -> None:
    hook, seen = ReplayHook(interval=5), []

    class Counts(Net):
        def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
            seen.append(int(index[0]))
            return super().forward(index, x, y, mode)

    data = dict(
        batch_size=1,
        dataset=Samples(12),
        collate_fn="default_collate",
        sampler=dict(type="DefaultSampler", shuffle=False),
    )
    make_runner(
        tmp_path, model=Counts, custom_hooks=[hook], train_dataloader=data, train_cfg=dict(max_epochs=1)
    ).train()
    assert hook.replays == 3
    assert {number: seen.count(number) for number in seen} == {n: {1: 4, 4: 2, 9: 2}.get(n, 1) for n in range(12)}


class Once(Hook):
    """Turns one bit of the output of a module of another, in one run of one update."""

    def __init__(self, *iterations: int) -> None:
        self.iterations, self.handle = iterations, None

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter + 1 in self.iterations and runner.rank == runner.world_size - 1:
            self.handle = runner.strategy.module.net[0].register_forward_hook(self.spoil)

    def spoil(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.handle.remove()
        flip(output.detach(), 3)


def stopped(folder: str, strategy: str, on_mismatch: str, *iterations: int) -> tuple[str, int, list[str], list[Any]]:
    """The error, the updates done, the warnings, and the lines in events.jsonl."""
    hooks = [Once(*iterations), dict(type="ReplayHook", interval=2, on_mismatch=on_mismatch)]
    said = ""
    with log_lines() as lines:
        runner = make_runner(
            folder, strategy=strategy, custom_hooks=hooks, log_level="WARNING", param_scheduler="cosine"
        )
        try:
            runner.train()
        except CorruptionError as error:
            said = str(error)
        events = [event for event in read_events(folder) if event["event"] == "corrupted"]
        done = runner.iter, runner.schedulers[""][0].last_step
        runner.strategy.leave()
    return said, done, [line for line in lines if line.startswith("ReplayHook")], events


def test_a_difference_stops_with_the_rank_and_the_tensor(tmp_path: Path) -> None:
    said, done, _, events = stopped(str(tmp_path), "single", "stop", 6)
    assert said.startswith("ReplayHook: iteration 6, rank 0: the output of net.0 in forward (and "), said
    assert "\n" not in said
    assert done[0] == 5
    assert len(events) == 1


def test_a_second_difference_in_a_row_stops_also_if_updates_are_skipped(tmp_path: Path) -> None:
    said, done, warnings, events = stopped(str(tmp_path / "twice"), "single", "skip", 6, 7)
    assert "also in the update before" in said
    assert done[0] == 6
    assert len(warnings) == 1
    assert "the update is left out" in warnings[0]
    said, done, warnings, events = stopped(str(tmp_path / "apart"), "single", "skip", 6, 8)
    assert (said, len(warnings), len(events)) == ("", 2, 2)
    assert done == (21, 19)  # schedules count updates that were made


@pytest.mark.distributed
def test_all_processes_decide_alike(workers2: WorkerGroup, tmp_path: Path) -> None:
    for said, done, _, _ in workers2.run(stopped, str(tmp_path), "DDPStrategy", "stop", 6):
        assert said.startswith("ReplayHook: iteration 6, rank 1: the output of net.0 in forward"), said
        assert done[0] == 5


class Speaks(nn.Module):
    """Makes logits, which are not to be made whole, and a second loss beside that of these."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(6, 8), nn.Linear(8, 50)

    def forward(self, index: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.net(x).tanh()
        loss = nn.functional.cross_entropy(self.head(hidden), index % 50)
        return {"loss": loss + hidden.square().mean()}


def test_logits_by_chunks_stay_so(tmp_path: Path) -> None:
    chunks = dict(model=Speaks, transforms=[dict(type="ChunkedLoss", head="head", chunk=3)])
    with log_lines() as lines:
        assert not changed(tmp_path / "trained", **chunks)
        found = flipped(str(tmp_path / "flipped"), "SingleDeviceStrategy", 6, ("weight", "gradient"), **chunks)
    assert not [line for line in lines if "logits are computed whole" in line]
    assert len(found[0]) == len(found[1]) == 6


class Random(Net):
    """Counts where nobody sees it, and computes with that, as little as asked."""

    size = 1e-6

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return super().forward(index, x * (1 + self.size * (next(HIDDEN) % 2)), y, mode)


HIDDEN = count()


def test_what_does_not_repeat_is_named_and_compared_within_what_was_measured(tmp_path: Path) -> None:
    with log_lines() as lines:
        make_runner(tmp_path, model=Random, custom_hooks=[EACH], log_level="WARNING").train()
    (said,) = [line for line in lines if "ReplayHook" in line]
    assert "and " in said
    assert "not repeat bit by bit" in said
    assert "deterministic=True" in said


def test_what_does_not_repeat_may_be_refused(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, model=Random, custom_hooks=[dict(EACH, nonrepeating="refuse")])
    with refuses(StrategyError, 'nonrepeating: "refuse", and '):
        runner.train()


class Coarse(Random):
    size = 1.0


class Steps(Net):
    """Writes to a weight in its second update."""

    calls = 0

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        self.calls += 1
        if self.calls > 1:
            self.net[0].weight.data.mul_(0.99)
        return super().forward(index, x, y, mode)


class Counts(Net):
    """Computes in another way from its ninth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = count()

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return super().forward(index, x if next(self.calls) < 8 else 2 * x, y, mode)


@pytest.mark.parametrize(
    "model, message",
    [
        (Counts, "forward or backward has advanced calls, an itertools.count, which cannot be set back"),
        (Coarse, "when forward and backward are run again: the model, or what it calls, keeps state"),
        (Steps, "forward or backward has written to the weight net.0.weight, and did not in the update before"),
    ],
)
def test_a_window_that_cannot_be_repeated_is_refused(tmp_path: Path, model: Any, message: str) -> None:
    runner = make_runner(tmp_path, model=model, custom_hooks=[EACH])
    with refuses(StrategyError, message, begins="ReplayHook: "):
        runner.train()


@pytest.mark.deepspeed
@pytest.mark.distributed
@pytest.mark.full
def test_deepspeed_is_refused(workers2: WorkerGroup, tmp_path: Path) -> None:
    for said in workers2.run(refused, str(tmp_path), zero(2)):
        assert said.startswith(
            "ReplayHook: needs forward and backward twice, and DeepSpeed's engine keeps the gradients"
        )


def refused(folder: str, strategy: Any) -> str:
    runner = make_runner(folder, strategy=strategy, custom_hooks=[EACH])
    with pytest.raises(StrategyError) as error:
        runner.train()
    runner.strategy.leave()
    return str(error.value)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(interval=0), "custom_hooks[0].interval: 0 is not allowed, give an integer of 1 or more"),
        (dict(trials=-1), "custom_hooks[0].trials: -1 is not allowed, give an integer of 1 or more"),
        (
            dict(on_mismatch="skipp"),
            'custom_hooks[0].on_mismatch: \'skipp\' is not allowed, choose "stop", "skip" or "leave", did you mean "skip"?',
        ),
        (
            dict(nonrepeating="forbid"),
            'custom_hooks[0].nonrepeating: \'forbid\' is not allowed, choose "tolerate" or "refuse"',
        ),
    ],
)
def test_wrong_options(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, exactly=message):
        make_runner(tmp_path, custom_hooks=[dict(type="ReplayHook", **given)])


def test_leaving_needs_a_launcher_that_starts_the_others(tmp_path: Path) -> None:
    with refuses(ConfigError, "needs `flextrain run`"):
        make_runner(tmp_path, custom_hooks=[dict(EACH, on_mismatch="leave")]).train()


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def locked(samples: list[Any]) -> dict[str, Any]:
    batch = default_collate(samples)
    return {**batch, "index": Locked()}


def test_a_batch_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    data = dict(batch_size=4, dataset=Samples(24), collate_fn=locked)
    runner = make_runner(tmp_path, custom_hooks=[EACH], train_dataloader=data)
    with refuses(StrategyError, begins="ReplayHook: a batch has a Locked, which cannot be copied, "):
        runner.train()
