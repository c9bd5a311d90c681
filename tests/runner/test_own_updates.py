"""Recipes and models of the user's own: what they define anew has its effect, not only its call."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from flextrain import (
    AmpOptimWrapper,
    BaseModel,
    ConfigError,
    DefaultOptimWrapperConstructor,
    Hook,
    OptimWrapper,
    Strategy,
    StrategyError,
)
from flextrain.runner.hooks import EMAHook
from flextrain.runner.reporting import LogProcessor
from flextrain.testing import WorkerGroup

from .training import SGD, Samples, SaveEvery, log_lines, make_runner, whole_state

pytestmark = pytest.mark.usefixtures("quick")

CLIP = dict(max_norm=0.5)


class Plain(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits.float(), y)} if mode == "loss" else logits


def trained(folder: Path | str, wrapper: Any = OptimWrapper, batch_size: int = 4, **changes: Any) -> dict[str, Tensor]:
    data = dict(
        batch_size=batch_size, dataset=Samples(24), sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn="default_collate",
    )  # fmt: skip
    own = {key: changes.pop(key) for key in ("dtype", "accumulative_counts") if key in changes}
    optim = wrapper(SGD, clip_grad=CLIP, **own) if isinstance(wrapper, type) else wrapper
    given = dict(model=Plain, train_dataloader=data, optim_wrapper=optim, train_cfg=dict(max_epochs=2))
    runner = make_runner(folder, **{**given, **changes})
    runner.train()
    state = {key: value for key, value in whole_state(runner).items() if isinstance(value, Tensor)}
    runner.strategy.leave()
    return state


class LikeMMEngine(OptimWrapper):
    """MMEngine's update_params and step, written out: step leaves the gradients to its caller."""

    def update_params(self, loss: Tensor) -> None:
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step()
            self.zero_grad()

    def step(self) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        self.optimizer.step()


class OwnStep(OptimWrapper):
    step = LikeMMEngine.step  # type: ignore[assignment]


class Inherits(OptimWrapper):
    """Comes to everything by the slow way, and changes nothing."""

    def update_params(self, loss: Tensor) -> None:
        super().update_params(loss)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("wrapper", [LikeMMEngine, OwnStep, Inherits])
def test_a_recipe_that_does_the_same(tmp_path: Path, wrapper: type[OptimWrapper], accumulate: int) -> None:
    """Gradients are divided by the window and dropped after it, once."""
    found = trained(tmp_path / "own", wrapper, accumulative_counts=accumulate)
    expected = trained(tmp_path / "usual", accumulative_counts=accumulate)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


class TwoLosses(Plain):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        optim_wrapper.update_params(self(**data, mode="loss")["loss"])
        return {"large_loss": torch.tensor(2.0**24, dtype=torch.float64), "small_loss": torch.tensor(True)}


def test_the_losses_of_a_train_step_are_summed_in_their_dtype(tmp_path: Path) -> None:
    seen: list[float] = []

    class Look(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            seen.append(float(outputs["loss"]))

    trained(tmp_path, model=TwoLosses, custom_hooks=[Look()])
    assert set(seen) == {2.0**24 + 1}


class Decays(OptimWrapper):
    """Adds to the loss what the model does not know of."""

    def update_params(self, loss: Tensor) -> None:
        super().update_params(loss + 0.1 * sum(p.square().sum() for g in self.param_groups for p in g["params"]))


class Decayed(Plain):
    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        found = super().forward(index, x, y, mode)
        if mode != "loss":
            return found
        return {"loss": found["loss"] + 0.1 * sum(p.square().sum() for p in self.parameters())}


@pytest.mark.distributed
def test_update_params_of_a_recipe(tmp_path: Path, workers2: WorkerGroup) -> None:
    """What it adds to the loss counts, on one process and on two."""
    expected = trained(tmp_path / "model", model=Decayed)
    results = [trained(tmp_path / "alone", Decays), *workers2.run(trained, str(tmp_path / "two"), Decays, 2)]
    for found in results:
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


class Half(AmpOptimWrapper):
    """Computes in bfloat16 in every second micro-batch only."""

    count = 0

    def optim_context(self, model: nn.Module) -> Any:
        self.count += 1
        return torch.autocast("cpu", torch.bfloat16, enabled=self.count % 2 == 0)


def test_optim_context_of_a_recipe(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    class Looks(Plain):
        def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
            seen.append(self.net(x).dtype)
            return super().forward(index, x, y, mode)

    trained(tmp_path, Half, dtype="bfloat16", model=Looks)
    assert seen == [torch.float32, torch.bfloat16] * 6


class Late(OptimWrapper):
    """Updates after every second window; the gradients of both count."""

    windows = 0

    def should_update(self) -> bool:
        self.windows += super().should_update()
        return super().should_update() and self.windows % 2 == 0


def test_should_update_of_a_recipe(tmp_path: Path) -> None:
    found = trained(tmp_path / "late", Late(dict(type="SGD", lr=0.05)))
    expected = trained(tmp_path / "twice", OptimWrapper(dict(type="SGD", lr=0.1), accumulative_counts=2))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


class Declines(OptimWrapper):
    """A step of its own that leaves out every second update."""

    steps = 0

    def step(self) -> Any:
        self.steps += 1
        if self.steps % 2 == 0:
            self.optimizer.step()


class Lazy(Plain):
    """Trains on every third batch only."""

    batches = 0

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        self.batches += 1
        return super().train_step(data, optim_wrapper) if self.batches % 3 == 0 else {"loss": torch.tensor(0.0)}


class Direct(Plain):
    """Steps the torch optimizer itself."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        found = self(**data, mode="loss")
        optim_wrapper.zero_grad()
        found["loss"].backward()
        optim_wrapper.optimizer.step()
        return {"loss": found["loss"]}


class Untold(torch.optim.SGD):
    """Calls no hooks of steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        type(self).step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))  # type: ignore[method-assign]


class Changes(Hook):
    """Counts the updates that have changed weights."""

    def __init__(self) -> None:
        self.count, self.before = 0, torch.empty(0)

    def before_train(self, runner: Any) -> None:
        self.before = runner.strategy.module.net[0].weight.detach().clone()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        now = runner.strategy.module.net[0].weight.detach()
        self.count += not torch.equal(now, self.before)
        self.before = now.clone()


RATE = dict(type="SGD", lr=0.05)
UPDATES: dict[str, tuple[dict[str, Any], int]] = {
    "as usual": ({}, 12),
    "should_update": (dict(wrapper=Late(RATE)), 6),
    "update_params and step": (dict(wrapper=LikeMMEngine), 12),
    "step": (dict(wrapper=OwnStep), 12),
    "a step that leaves some out": (dict(wrapper=Declines), 6),
    "train_step that leaves some out": (dict(model=Lazy), 4),
    "train_step that steps itself": (dict(model=Direct), 12),
    "an optimizer that tells nothing": (dict(model=Direct, wrapper=OptimWrapper(dict(type=Untold, lr=0.05))), 12),
}


@pytest.mark.parametrize("name", UPDATES)
def test_averages_follow_updates_and_schedules_iterations(tmp_path: Path, name: str) -> None:
    """A window without an update moves no average; a schedule counts it, as in MMEngine."""
    given, expected = UPDATES[name]
    given = {"model": Plain, "wrapper": OptimWrapper, **given}
    wrapper = given["wrapper"](SGD) if isinstance(given["wrapper"], type) else given["wrapper"]
    average, changes = EMAHook(ema_type="StochasticWeightAverage"), Changes()
    runner = make_runner(
        tmp_path, model=given["model"], optim_wrapper=wrapper, train_cfg=dict(max_epochs=2),
        train_dataloader=dict(batch_size=4, dataset=Samples(24), collate_fn="default_collate"),
        param_scheduler=dict(type="StepLR", step_size=100, by_epoch=False), custom_hooks=[average, changes],
    )  # fmt: skip
    runner.train()
    assert changes.count == expected
    assert average.state_dict()["updates"] == expected
    assert runner.param_schedulers[0].last_step == 11, "the last of its window"


class Calls(Plain):
    """Calls itself in two halves, as models that sort their batches do."""

    def _run_forward(self, data: Any, mode: str) -> Any:
        parts = [{key: value[half::2] for key, value in data.items()} for half in (0, 1)]
        losses = [super(Calls, self)._run_forward(part, mode) for part in parts]
        return {"loss": sum(loss["loss"] for loss in losses)} if mode == "loss" else losses


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["DDPStrategy", "FSDPStrategy"])
def test_a_models_own_run_forward(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    """The sum of two means of halves is twice the mean; on two processes gradients are averaged all the same."""
    expected = trained(tmp_path / "whole", batch_size=8, model=Twice)
    results = workers2.run(trained, str(tmp_path / "two"), batch_size=4, model=Calls, strategy=dict(type=strategy))
    for found in [trained(tmp_path / "one", batch_size=8, model=Calls), *results]:
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


class Twice(Plain):
    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        found = super().forward(index, x, y, mode)
        return {"loss": 2 * found["loss"]} if mode == "loss" else found


class Thaw(Hook):
    """Thaws a layer that no optimizer has, with a group of its own."""

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 1:
            layer = runner.strategy.module.net[0].requires_grad_(True)
            runner.optim_wrapper.optimizer.add_param_group(dict(params=[*layer.parameters()], lr=0.01))


def test_a_layer_that_a_hook_thaws_into_a_group_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, by_hand = Plain(), Plain()
    model.net[0].requires_grad_(False)
    by_hand.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.net[2].parameters(), lr=0.1)
    found = trained(tmp_path, OptimWrapper(optimizer), model=model, custom_hooks=[Thaw()])
    optimizer, data = torch.optim.SGD(by_hand.net[2].parameters(), lr=0.1), Samples(24)
    for update in range(12):
        if update == 6:
            optimizer.add_param_group(dict(params=[*by_hand.net[0].parameters()], lr=0.01))
        rows = slice(4 * (update % 6), 4 * (update % 6) + 4)
        by_hand.zero_grad()
        by_hand(None, data.x[rows], data.y[rows], "loss")["loss"].backward()
        optimizer.step()
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(found[f"model.{name}"], value, rtol=0, atol=1e-6)


def test_functions_that_objects_are_given(tmp_path: Path) -> None:
    calls: list[str] = []
    model: Any = Plain()
    inherited = model.val_step
    model.val_step = lambda data: (calls.append("val_step"), inherited(data))[1]
    wrapper = OptimWrapper(SGD)
    wrapper.update_params = lambda loss: (calls.append("update"), OptimWrapper.update_params(wrapper, loss))[1]  # type: ignore[method-assign]
    trained(tmp_path, wrapper, model=model)
    assert calls == ["update"] * 12


class Constructor(DefaultOptimWrapperConstructor):
    def __call__(self, model: nn.Module) -> Any:
        pass


class Misspelled(DefaultOptimWrapperConstructor):
    def add_param(self, params: Any, module: nn.Module) -> None:
        pass


class Foreign:
    def __init__(self, optim_wrapper_cfg: Any, paramwise_cfg: Any = None) -> None:
        pass


class Counts(OptimWrapper):
    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        pass


class Prepares(Strategy):
    def prepare(self, model: Any) -> Any:
        pass


class Collects(LogProcessor):
    def _collect_scalars(self, *args: Any) -> Any:
        pass


class Accelerated(OptimWrapper):
    def update_params(self, loss: Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(optim_wrapper=dict(optimizer=SGD, constructor=Constructor)),
            r"optim_wrapper.constructor: Constructor.__call__ is never called here, override add_params\(",
        ),
        (
            dict(optim_wrapper=dict(optimizer=SGD, constructor=Misspelled)),
            'optim_wrapper.constructor: Misspelled.add_param would never be called, did you mean "add_params"',
        ),
        (
            dict(optim_wrapper=dict(optimizer=SGD, constructor=Foreign)),
            r"optim_wrapper.constructor: Foreign has no add_params\(params, module\)",
        ),
        (
            dict(optim_wrapper=dict(type=Counts, optimizer=SGD)),
            r"optim_wrapper.type: Counts.initialize_count_status is never called here",
        ),
        (dict(optim_wrapper=Counts(SGD)), r"optim_wrapper: Counts.initialize_count_status is never called here"),
        (dict(strategy=dict(type=Prepares)), r"strategy: Prepares.prepare is never called here, override setup"),
        (dict(log_processor=dict(type=Collects)), r"log_processor.type: Collects._collect_scalars is never called"),
        (dict(log_processor=Collects()), r"log_processor: Collects._collect_scalars is never called"),
        pytest.param(
            dict(optim_wrapper=Accelerated(SGD), strategy="DeepSpeedStrategy"),
            'optim_wrapper.type: "Accelerated" defines its own update_params, DeepSpeed',
            marks=pytest.mark.deepspeed,
        ),
        pytest.param(
            dict(model=Calls, strategy="DeepSpeedStrategy"),
            "model: Calls defines its own _run_forward, which DeepSpeed's engine cannot see",
            marks=pytest.mark.deepspeed,
        ),
    ],
)
def test_what_would_never_be_called_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, StrategyError), match=f"^{message}"):
        make_runner(tmp_path, **changes)


class Rivals(nn.Module):
    """A generator whose loss leaves gradients in the critic, unless these are kept off."""

    keeps_off = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 2), nn.Linear(2, 1)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        points = self.generator(data["x"])
        optim_wrapper["critic"].update_params(self.critic(points.detach()).sub(1).square().mean())
        self.critic.requires_grad_(not self.keeps_off)
        loss = self.critic(points).square().mean()
        optim_wrapper["generator"].update_params(loss)
        self.critic.requires_grad_(True)
        return {"loss": loss}


class Apart(Rivals):
    keeps_off = True


TOLD = "critic.weight (2 parameters) has a gradient that no update has used, and checkpoints hold none: a resumed run will differ"


@pytest.mark.parametrize(("model", "told"), [(Rivals, 1), (Apart, 0)])
def test_gradients_that_a_checkpoint_does_not_have_are_told(tmp_path: Path, model: type[Rivals], told: int) -> None:
    optim = dict(generator=dict(optimizer=SGD), critic=dict(optimizer=SGD))
    data = DataLoader(Samples(24), batch_size=4)
    with log_lines() as lines:
        saves = [SaveEvery({2, 4})]
        trained(tmp_path, optim, model=model, train_dataloader=data, custom_hooks=saves, log_level="WARNING")
    assert [line.startswith(TOLD) for line in lines] == [True] * told


class Rarely(Rivals):
    """The generator's turn is every second call, or every second update."""

    counts_updates = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.count: Tensor

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self.critic(self.generator(data["x"]).detach()).sub(1).square().mean()
        optim_wrapper["critic"].update_params(loss)
        if self.count % 2 == 0:
            self.critic.requires_grad_(False)
            optim_wrapper["generator"].update_params(self.critic(self.generator(data["x"])).square().mean())
            self.critic.requires_grad_(True)
        self.count += not self.counts_updates or optim_wrapper["critic"].should_update()
        return {"loss": loss}


class RarelyByUpdates(Rarely):
    counts_updates = True


@pytest.mark.parametrize(("model", "told"), [(Rarely, 1), (RarelyByUpdates, 0)])
def test_an_optimizer_that_is_called_in_a_part_of_a_window_is_told(
    tmp_path: Path, model: type[Rarely], told: int
) -> None:
    optim = {name: dict(optimizer=SGD, accumulative_counts=2) for name in ("generator", "critic")}
    with log_lines() as lines:
        trained(
            tmp_path, optim, model=model, train_dataloader=DataLoader(Samples(24), batch_size=4), log_level="WARNING"
        )
    start = "optim_wrapper.generator: train_step called update_params 1 times in the 2 micro-batches of an update, and no update was made"
    assert [line.startswith(start) for line in lines] == [True] * told
