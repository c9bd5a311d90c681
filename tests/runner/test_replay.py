"""ReplayHook: every flipped bit in a window that is run twice is found and named; training is that without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flextrain import BaseModel, ConfigError, CorruptionError, OptimWrapper, StrategyError
from flextrain.core.base.events import read_events
from flextrain.runner.hooks import Hook, ReplayHook
from flextrain.testing import WorkerGroup

from .test_replicas import flip
from .training import DDP, FSDP, SGD, Net, Samples, Weighted, differences, log_lines, make_runner, refuses, whole_state, zero

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
    given = dict(model=Normalised, custom_hooks=[hook] if replays else [], train_cfg=dict(max_epochs=2))
    runner = make_runner(folder, **{**given, **changes})
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


class Spoils(Normalised):
    """Changes its batch in place."""

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        x.mul_(2.0)
        return super().forward(index, x, y, mode)


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
    "compiled": dict(compile=dict(backend="eager"), model=Net),
    "its own updates": dict(
        model=Discriminates,
        optim_wrapper=dict(generator=dict(optimizer=ADAM), discriminator=dict(optimizer=SGD, clip_grad=dict(max_norm=0.5))),
    ),
    "late updates": dict(optim_wrapper=lambda: Late(ADAM)),
    "loss scale and its own updates": dict(
        model=Discriminates,
        optim_wrapper={
            name: dict(type="AmpOptimWrapper", dtype="float16", loss_scale="dynamic", optimizer=SGD)
            for name in ("generator", "discriminator")
        },
    ),
}


def recipe(name: str) -> dict[str, Any]:
    return {key: value() if key == "optim_wrapper" and callable(value) else value for key, value in RECIPES[name].items()}


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_bit_for_bit_that_without_replays(tmp_path: Path, name: str) -> None:
    twice, once = (trained(tmp_path / str(replays), replays, **recipe(name)) for replays in (True, False))
    assert not differences(twice, once)


STRATEGIES = [
    pytest.param(DDP, Normalised, id="ddp"),
    pytest.param(FSDP, Normalised, id="fsdp"),
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
@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("recomputing", "weighted")])
def test_recipes_on_several_processes(workers2: WorkerGroup, tmp_path: Path, strategy: Any, name: str) -> None:
    given = recipe(name)
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
        self._parts = {name: part for name, part in runner.strategy.module.named_modules() if isinstance(part, nn.Linear)}
        for name, part in self._parts.items():
            part.register_forward_hook(lambda part, args, output, name=name: self._in_forward(name, part, args, output))
        run_window = runner.strategy.run_window

        def flipping(window: Any, step: Any) -> Any:
            outputs = run_window(window, step)
            armed, self._armed = self._armed, None
            if armed is not None and armed[0] == "gradient":
                gradients = {n: p.grad for n, p in runner.strategy.parameters() if p.grad is not None}
                name = armed[1] if armed[1] in gradients else min(gradients)
                local = gradients[name]
                local = local.to_local() if isinstance(local, DTensor) else local
                if local.numel():
                    flip(local.detach(), self._bit(local))
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

    def _in_forward(self, name: str, part: Any, args: Any, output: Tensor) -> Tensor | None:
        if self._armed not in (("weight", name), ("activation", name)):
            return None
        kind, self._armed = self._armed[0], None
        local = output.to_local() if isinstance(output, DTensor) else output
        if kind == "activation":
            flip(local.detach(), self._bit(local))
            return None
        weight = part.weight.to_local() if isinstance(part.weight, DTensor) else part.weight
        for at in range(100):  # some low bits are lost in rounding, and have no effect at all
            bit = self._bit(weight) + 7 * at
            flip(weight.detach(), bit % (8 * weight.numel() * weight.itemsize))
            found = part.forward(*args)
            flip(weight.detach(), bit % (8 * weight.numel() * weight.itemsize))
            if not torch.equal(found.to_local() if isinstance(found, DTensor) else found, local):
                return found
        raise AssertionError(f"no bit of {name} has an effect")


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


def check(found: tuple[list[tuple[int, str, str]], list[Any], int], world_size: int) -> None:
    planted, events, replays = found
    assert len(events) == len(planted) == 50
    assert replays == 2 * 50 + 3
    for number, ((rank, kind, module), event) in enumerate(zip(planted, events, strict=True)):
        assert event["iter"] == 4 + 2 * number
        assert rank in event["ranks"], (rank, kind, module, event)
        if kind == "gradient":
            assert "the gradient of net" in event["reason"]
        else:
            assert event["ranks"] == [rank], (rank, kind, module, event)
            assert event["reason"].startswith(f"rank {rank}: the output of {module} in forward"), event


def test_every_bit_is_found_on_one_process(tmp_path: Path) -> None:
    check(flipped(str(tmp_path), "SingleDeviceStrategy", 50, KINDS), 1)


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
        check(found, 2)
