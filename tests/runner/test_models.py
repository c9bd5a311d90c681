"""Every kind of model is called the way it wants to be called, and updated as its loss says."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import BaseModel, ConfigError, OptimWrapper, OptimWrapperDict, SingleDeviceStrategy
from flextrain.core.base.registry import MODELS
from flextrain.core.model.base_model import BaseDataPreprocessor
from flextrain.core.torch_compat.torch_private import without_compiling
from flextrain.runner.hooks import Hook
from flextrain.strategies.parts import check_window

from .training import (
    SGD,
    At,
    Net,
    Outputs,
    Samples,
    Watch,
    Weighted,
    differences,
    log_lines,
    make_runner,
    validation,
    whole_state,
)

pytestmark = pytest.mark.usefixtures("quick")


# How a model is given


@MODELS.register_module(force=True)
class RegisteredNet(Net):
    pass


@pytest.mark.parametrize(
    "model",
    [
        Net,
        lambda: Net(8),
        dict(type=Net),
        dict(type=Net, width=8),
        dict(type="RegisteredNet"),
        "RegisteredNet",
        RegisteredNet,
    ],
    ids=["class", "function", "dict", "dict-with-arguments", "dict-with-name", "name", "registered-class"],
)
def test_a_model_in_every_spelling(tmp_path: Path, model: Any) -> None:
    found = make_runner(tmp_path, model=model).model
    assert isinstance(found, Net)
    assert not differences(found.state_dict(), make_runner(tmp_path, model=Net).model.state_dict())


def test_a_model_that_is_built_is_trained_itself(tmp_path: Path) -> None:
    model = Net()
    before = [parameter.clone() for parameter in model.parameters()]
    assert make_runner(tmp_path, model=model).train() is model
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_function_that_builds_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model: gave list, not a torch.nn.Module$"):
        make_runner(tmp_path, model=lambda: [1]).train()


# What forward is like


class Plain(nn.Module):
    """Not made for any runner: the loss is an attribute of what forward gives."""

    def __init__(self, kind: str = "object") -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(6, 2), kind

    def forward(self, index: Any = None, x: Any = None, y: Any = None) -> Any:
        logits = self.net(x)
        loss = functional.cross_entropy(logits, y)
        if self.kind in ("object", "forgot"):
            return Output(loss if self.kind == "object" else None, logits)
        if self.kind == "parts":
            return {
                "loss_box": loss.expand(3) / 4,
                "cls_loss": [loss / 4, loss / 2],
                "logits": logits,
                "scale": loss.detach(),
            }
        if self.kind == "none":
            return {"value": loss}
        if self.kind == "no-labels":
            return DictOutput(aux_loss=loss, logits=logits)
        scalars = {"loss_of_a_part": loss / 2, "accuracy": (logits.argmax(1) == y).float().mean()}
        return {"loss": loss, "logits": logits, **scalars} if self.kind == "dict" else logits


class Labelled(Plain):
    """As transformers' models do, it gives a loss if it gets labels."""

    def forward(self, index: Any = None, x: Any = None, y: Any = None, labels: Any = None) -> Any:
        return Output(None if labels is None else super().forward(x=x, y=labels).loss, self.net(x))


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class DictOutput(dict[str, Any]):
    """As Hugging Face's models give without labels: parts of a loss, and no whole."""

    loss: Tensor | None = None


class WithMode(nn.Module):
    """The same, in MMEngine's way."""

    def __init__(self, losses: str = "one") -> None:
        super().__init__()
        self.net, self.losses = nn.Linear(6, 2), losses

    def forward(self, index: Any, x: Any, y: Any, mode: str = "tensor") -> Any:
        logits = self.net(x)
        if mode != "loss":
            return logits
        loss = functional.cross_entropy(logits, y)
        return {
            "one": {"loss": loss},
            "two": {"loss_a": loss / 4, "b_loss": [loss / 4, loss / 2], "accuracy": loss.detach()},
            "wide": {"loss": loss.expand(3, 2)},
            "none": {"value": loss},
            "number": {"loss": 1.0},
            "not-a-dict": loss,
        }[self.losses]


class WithStep(BaseModel):
    """The same, with MMEngine's train_step written out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)
        self.calls: list[str] = []

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        self.calls.append("train")
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, True)
            loss = functional.cross_entropy(self.net(data["x"]), data["y"])
        optim_wrapper.update_params(loss)
        return {"loss": loss}

    def val_step(self, data: Any) -> Any:
        self.calls.append("val")
        return self.predictions(data)

    def test_step(self, data: Any) -> Any:
        self.calls.append("test")
        return self.predictions(data)

    def predictions(self, data: Any) -> Any:
        return {"index": data["index"], "logits": self.net(data["x"]), "y": data["y"]}


class Open(BaseModel):
    """The same, with a signature that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert not args
        assert kwargs.keys() == {"index", "x", "y", "mode"}
        return self.answer(kwargs["x"], kwargs["y"], kwargs["mode"])

    def answer(self, x: Tensor, y: Tensor, mode: str) -> Any:
        logits = self.net(x)
        return {"loss_of_all": functional.cross_entropy(logits, y)} if mode == "loss" else logits


class ToTuple(BaseDataPreprocessor):
    def forward(self, data: Any, training: bool = False) -> Any:
        data = self.cast_data(data)
        return (data["x"], data["y"]) if training else [data["x"], data["y"]]


class Positional(Open):
    """Its preprocessor gives a tuple or a list, which are positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.data_preprocessor = ToTuple()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert len(args) == 2
        assert kwargs.keys() == {"mode"}
        return self.answer(args[0], args[1], kwargs["mode"])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_kinds_of_models_train_alike(tmp_path: Path, accumulate: int) -> None:
    results = []
    kinds = (
        WithMode(),
        WithMode("two"),
        WithMode("wide"),
        Plain(),
        Plain("dict"),
        Plain("parts"),
        WithStep(),
        Open(),
        Positional(),
    )
    for model in kinds:
        torch.manual_seed(0)
        model.net.reset_parameters()
        watch = Watch()
        wrapper = dict(optimizer=SGD, accumulative_counts=accumulate, clip_grad=dict(max_norm=0.5))
        runner = make_runner(tmp_path, model=model, optim_wrapper=wrapper, custom_hooks=[watch])
        runner.train()
        results.append((model.net.weight.detach(), torch.stack(watch.losses)))
    for weight, losses in results[1:]:
        assert torch.allclose(weight, results[0][0], rtol=1e-5, atol=1e-7)
        assert torch.allclose(losses, results[0][1], rtol=1e-5)


def test_scalars_beside_the_loss_are_logged(tmp_path: Path) -> None:
    outputs = Outputs()
    make_runner(tmp_path, model=Plain("dict"), custom_hooks=[outputs]).train()
    for seen in outputs.seen:
        assert seen.keys() == {"loss", "loss_of_a_part", "accuracy"}
        assert torch.allclose(seen["loss"], 2 * seen["loss_of_a_part"]), "it is the total"
        assert not any(value.requires_grad for value in seen.values())


def test_losses_are_logged_as_they_are_named_and_summed(tmp_path: Path) -> None:
    outputs = Outputs()
    make_runner(tmp_path, model=WithMode("two"), train_cfg=dict(max_epochs=1), custom_hooks=[outputs]).train()
    assert outputs.seen
    for seen in outputs.seen:
        assert list(seen) == ["loss", "loss_a", "b_loss", "accuracy"]
        assert torch.isclose(seen["loss"], seen["loss_a"] * 4)
        assert torch.isclose(seen["b_loss"], seen["loss_a"] * 3)


@pytest.mark.parametrize(
    "model, says",
    [
        (Plain("tensor"), "model: Plain.forward has no parameter mode and gave Tensor without a loss"),
        (WithMode("none"), "model: gave 'value', and no key contains 'loss'; those that do are summed"),
        (WithMode("number"), "model: loss 'loss' is float, give a tensor"),
        (WithMode("not-a-dict"), "model: forward.mode='loss'. gave Tensor, give a dict of losses"),
        (Plain("none"), "gave dict without a loss; .* take mode: no key contains 'loss'; those that do are summed"),
        (Plain("forgot"), "gave Output without a loss"),
        (Plain("no-labels"), "gave DictOutput without a loss"),
        (Labelled(), "model: the batch has no labels, without which Labelled.forward gives no loss; add them, as "),
    ],
    ids=["plain", "no-loss", "number", "not-a-dict", "plain-no-loss", "plain-none", "no-labels", "takes-labels"],
)
def test_a_model_without_a_loss(tmp_path: Path, model: nn.Module, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_runner(tmp_path, model=model).train()


def test_a_model_may_total_its_losses_itself(tmp_path: Path) -> None:
    class Own(WithMode):
        def parse_losses(self, losses: Any) -> tuple[Tensor, dict[str, Tensor]]:
            return losses["loss"] * 0, {"loss": losses["loss"], "extra": torch.tensor(1.0)}

    model = Own()
    before = model.net.weight.clone()
    make_runner(tmp_path, model=model, train_cfg=dict(max_epochs=1)).train()
    assert torch.equal(model.net.weight, before)


def test_steps_of_the_model_are_called(tmp_path: Path) -> None:
    model = WithStep()
    parts = validation(4)
    parts |= {key.replace("val_", "test_"): value for key, value in parts.items()}
    runner = make_runner(
        tmp_path, model=model, train_dataloader=dict(batch_size=4, dataset=Samples(8), collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=SGD, accumulative_counts=2), train_cfg=dict(max_epochs=1), **parts,
    )  # fmt: skip
    runner.train()
    runner.test()
    assert model.calls == ["train", "train", "val", "test"]


class Counting(Net):
    """Logs a truth value and a small number beside its loss."""

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        found = super().forward(index, x, y, mode)
        return {**found, "right": torch.tensor(True), "many": torch.tensor(200, dtype=torch.uint8)}


def test_truth_values_and_small_numbers_have_the_mean_of_their_window(tmp_path: Path) -> None:
    wrapper = dict(optimizer=SGD, accumulative_counts=2)
    runner = make_runner(tmp_path, model=Counting, optim_wrapper=wrapper, train_cfg=dict(max_epochs=1))
    runner.train()
    found = [runner.message_hub.get_scalar(f"train/{name}").data[0] for name in ("right", "many")]
    assert [{*map(float, values)} for values in found] == [{1.0}, {200.0}]


# Data preprocessors


@MODELS.register_module(force=True)
class Doubler(BaseDataPreprocessor):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor
        self.modes: set[bool] = set()

    def forward(self, data: Any, training: bool = False) -> Any:
        self.modes.add(training)
        return {**self.cast_data(data), "x": data["x"] * self.factor}


class Preprocessed(BaseModel):
    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.net = nn.Linear(6, 2)
        self.seen: list[Tensor] = []

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        self.seen.append(x)
        logits = self.net(x)
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits, y)}
        return {"index": index, "logits": logits, "y": y}


@pytest.mark.parametrize(
    "changes",
    [
        dict(model=dict(type=Preprocessed, data_preprocessor=dict(type="Doubler"))),
        dict(model=dict(type=Preprocessed), data_preprocessor=dict(type="Doubler")),
        dict(model=dict(type=Preprocessed), data_preprocessor=Doubler()),
        dict(model=Preprocessed(), data_preprocessor=dict(type=Doubler)),
        dict(model=Preprocessed, data_preprocessor=dict(type=Doubler, factor=2.0)),
        dict(model=Preprocessed(Doubler())),
        dict(model=Preprocessed(dict(type="Doubler")), data_preprocessor=Doubler()),
    ],
    ids=["in-model", "beside", "built-beside", "for-a-built-model", "for-a-class", "built-in-model", "replaced"],
)
def test_data_preprocessor(tmp_path: Path, changes: dict[str, Any]) -> None:
    order = dict(type="DefaultSampler", shuffle=False)
    data = dict(batch_size=4, dataset=Samples(4), sampler=order, collate_fn="default_collate")
    runner = make_runner(tmp_path, train_dataloader=data, train_cfg=dict(max_epochs=1), **changes, **validation(4))
    runner.train()
    model: Any = runner.strategy.module
    assert torch.equal(model.seen[0], Samples(4).x * 2)
    assert torch.equal(model.seen[1], Samples(4).x * 2)
    assert model.data_preprocessor.modes == {True, False}


class Doubled(BaseDataPreprocessor):
    """Doubles in place."""

    def forward(self, data: Any, training: bool = False) -> Any:
        data["x"].mul_(2)
        return self.cast_data(data)


class Looking(SingleDeviceStrategy):
    """Computes the first batch before it is trained on, as context parallelism does."""


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_second_data_preprocessor_is_told(tmp_path: Path, factor: float) -> None:
    model = dict(type=Preprocessed, data_preprocessor=dict(type="Doubler", factor=2.0))
    with log_lines() as said:
        runner = make_runner(
            tmp_path, model=model, data_preprocessor=dict(type="Doubler", factor=factor), log_level="WARNING"
        )
        runner.train()
    assert runner.strategy.module.data_preprocessor.factor == 2.0
    assert any("model.data_preprocessor is another and is used" in line for line in said) is (factor != 2.0)


@check_window.register(Looking)
def look(strategy: Looking, window: Any, step: Any) -> None:
    step.begin(0)
    step.forward(window[0])


def test_a_preprocessor_that_changes_the_first_batch_in_place(tmp_path: Path) -> None:
    order = dict(type="DefaultSampler", shuffle=False)
    data = dict(batch_size=4, dataset=Samples(4), sampler=order, collate_fn="default_collate")
    runner = make_runner(
        tmp_path, model=Preprocessed(Doubled()), strategy=Looking(), train_dataloader=data, train_cfg=dict(max_epochs=1)
    )
    runner.train()
    model: Any = runner.strategy.module
    assert [torch.equal(seen, Samples(4).x * 2) for seen in model.seen] == [True, True]


def test_a_preprocessor_for_a_model_that_takes_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data_preprocessor: Net takes none$"):
        make_runner(tmp_path, model=dict(type=Net), data_preprocessor=dict(type="Doubler"))
    with pytest.raises(ConfigError, match=r"^data_preprocessor: Net has no attribute of this name to set$"):
        make_runner(tmp_path, model=lambda: Net(), data_preprocessor=dict(type="Doubler")).train()


def test_weights_are_initialised_once_by_a_base_model(tmp_path: Path) -> None:
    class Initialised(Preprocessed):
        calls = 0

        def init_weights(self) -> None:
            type(self).calls += 1
            nn.init.constant_(self.net.weight, 0.5)

    runner = make_runner(tmp_path, model=Initialised, **validation(4))
    runner.val()
    runner.train()
    assert Initialised.calls == 1


class Half(nn.Linear):
    def init_weights(self) -> None:
        nn.init.constant_(self.weight, 0.5)


class OfParts(Net, BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net[3] = Half(8, 2)


def test_weights_of_parts_are_initialised_by_themselves(tmp_path: Path) -> None:
    still = dict(optimizer=dict(type="SGD", lr=0.0))
    runner = make_runner(tmp_path, model=OfParts, optim_wrapper=still, log_level="INFO", **validation(4))
    runner.val()
    model: Any = runner.train()
    assert (model.net[3].weight == 0.5).all()
    assert "Calling init_weights() of the model's net.3\n" in next(Path(runner.log_dir).glob("*.log")).read_text()


# Several optimizers


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)
        self.step = 0

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        self.step += 1
        loss = functional.relu(1 - self.critic(data["x"])).mean()
        optim_wrapper["critic"].update_params(loss)
        if self.step % 2:
            return {"critic_loss": loss.detach()}
        self.critic.requires_grad_(False)
        generator_loss = -self.critic(self.generator(data["x"])).mean()
        optim_wrapper["generator"].update_params(generator_loss)
        self.critic.requires_grad_(True)
        return {"critic_loss": loss.detach(), "generator_loss": generator_loss.detach()}


def test_several_optimizers(tmp_path: Path) -> None:
    outputs = Outputs()
    wrappers = dict(generator=dict(optimizer=dict(type="Adam", lr=0.01)), critic=dict(optimizer=SGD))
    schedules = dict(critic=dict(type="LinearLR", by_epoch=False, end=4), generator=[])
    runner = make_runner(
        tmp_path, model=Gan, optim_wrapper=wrappers, param_scheduler=schedules, train_cfg=dict(max_epochs=1),
        custom_hooks=[outputs],
    )  # fmt: skip
    before = {name: value.clone() for name, value in runner.model.state_dict().items()}
    runner.train()
    assert isinstance(runner.optim_wrapper, OptimWrapperDict)
    assert set(differences(runner.strategy.module.state_dict(), before)) == set(before)
    assert {name: len(schedulers) for name, schedulers in runner.param_schedulers.items()} == dict(
        generator=0, critic=1
    )
    assert runner.optim_wrapper["generator"].param_groups[0]["lr"] == 0.01
    # "loss" is there for the log line, the sum of the losses; nobody has to give it.
    assert [set(each) for each in outputs.seen[:2]] == [
        {"critic_loss", "loss"},
        {"critic_loss", "generator_loss", "loss"},
    ]
    seen = outputs.seen[1]
    assert torch.isclose(seen["loss"], seen["critic_loss"] + seen["generator_loss"])


class Rarely(Gan):
    """The generator is updated in every second iteration only."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        return {"loss": torch.stack(list(super().train_step(data, optim_wrapper).values())).sum()}


def test_the_gradient_norms_of_several_optimizers(tmp_path: Path) -> None:
    """Each in its own name, in outputs, log and records, and only of iterations in which it made an update."""
    outputs, stepped = Outputs(), list[list[bool]]()
    look = At("after_train_iter", lambda runner, *args, **kwargs: stepped.append(
        [wrapper.has_stepped for wrapper in runner.optim_wrapper.values()]))  # fmt: skip
    wrappers = {name: dict(optimizer=SGD, clip_grad=dict(max_norm=0.1)) for name in ("generator", "critic")}
    runner = make_runner(
        tmp_path, model=Rarely, optim_wrapper=wrappers, custom_hooks=[outputs, look], train_cfg=dict(max_epochs=1),
        default_hooks=dict(checkpoint=None, logger=dict(interval=1)), log_level="INFO",
    )  # fmt: skip
    runner.train()
    assert stepped == [[i % 2 == 1, True] for i in range(7)]
    names = [{name for name in seen if name.endswith("grad_norm")} for seen in outputs.seen]
    assert names == [{"critic.grad_norm"}, {"generator.grad_norm", "critic.grad_norm"}] * 3 + [{"critic.grad_norm"}]
    assert all(float(seen["critic.grad_norm"]) > 0.1 for seen in outputs.seen), "before clipping"
    lines = [
        line for line in next(Path(runner.log_dir).glob("*.log")).read_text().splitlines() if "Epoch(train)" in line
    ]
    assert [("critic.grad_norm: " in line, "generator.grad_norm: " in line) for line in lines] == [
        (True, i % 2 == 1) for i in range(7)
    ]


def test_a_step_that_is_not_made_has_no_gradient_norm(tmp_path: Path) -> None:
    outputs = Outputs()

    class Lazy(WithStep):
        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            return {"loss": torch.tensor(0.0)} if len(outputs.seen) % 2 else super().train_step(data, optim_wrapper)

    wrapper = dict(optimizer=SGD, clip_grad=dict(max_norm=0.1))
    make_runner(tmp_path, model=Lazy, optim_wrapper=wrapper, custom_hooks=[outputs]).train()
    assert ["grad_norm" in seen for seen in outputs.seen] == [i % 2 == 0 for i in range(21)]


def test_several_optimizers_given_as_objects(tmp_path: Path) -> None:
    model = Gan()
    wrappers = OptimWrapperDict(
        generator=OptimWrapper(torch.optim.SGD(model.generator.parameters(), lr=0.1)),
        critic=OptimWrapper(torch.optim.SGD(model.critic.parameters(), lr=0.1)),
    )
    make_runner(tmp_path, model=model, optim_wrapper=wrappers, train_cfg=dict(max_epochs=1)).train()
    assert model.step == 7


def test_several_optimizers_of_a_function_without_train_step(tmp_path: Path) -> None:
    """Only seen once the function was called, because nothing else knows the class."""
    wrappers = dict(generator=dict(optimizer=SGD), critic=dict(optimizer=SGD))

    class NoStep(Gan):
        train_step = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"^optim_wrapper: has 2 optimizers, NoStep must define train_step"):
        make_runner(tmp_path, model=lambda: NoStep(), optim_wrapper=wrappers).train()


def test_a_train_step_that_gives_no_dict(tmp_path: Path) -> None:
    class Silent(Gan):
        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            return None

    with pytest.raises(ConfigError, match=r"^model.train_step: gave NoneType, return a dict of what to log$"):
        make_runner(tmp_path, model=Silent).train()


# The loss of ragged batches


def test_loss_weight_makes_the_split_into_micro_batches_irrelevant(tmp_path: Path) -> None:
    """Pains 17: a mean of means would weigh an item by how many others its micro-batch happens to have."""
    results, losses = [], []
    for size, accumulate in ((12, 1), (4, 3), (3, 4), (2, 6)):
        watch = Watch()
        data = dict(
            batch_size=size, dataset=Samples(24), sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn="default_collate",
        )  # fmt: skip
        runner = make_runner(
            tmp_path, model=Weighted, train_dataloader=data, custom_hooks=[watch],
            optim_wrapper=dict(optimizer=SGD, accumulative_counts=accumulate),
        )  # fmt: skip
        runner.train()
        results.append(runner.model.net.weight.detach())
        losses.append(torch.stack(watch.losses))
    counts = [int((Samples(24).y[i : i + 2] == 1).sum()) for i in range(0, 24, 2)]
    assert set(counts) == {0, 1, 2}, "without items in some micro-batches and many in others this shows little"
    for weight, loss in zip(results[1:], losses[1:], strict=True):
        assert torch.allclose(weight, results[0], rtol=1e-6)  # the shares are float32
        assert torch.allclose(loss, losses[0], rtol=1e-6)


def test_a_number_of_that_name_is_the_models_own(tmp_path: Path) -> None:
    model = Net()
    model.loss_weight = 0.5
    make_runner(tmp_path, model=model, train_cfg=dict(max_epochs=1)).train()


def test_loss_weight_beside_train_step(tmp_path: Path) -> None:
    class Both(WithStep):
        def loss_weight(self, data_batch: Any) -> Tensor:
            return torch.tensor(1.0)

    with pytest.raises(ConfigError, match=r"^model.loss_weight: has no effect beside train_step"):
        make_runner(tmp_path, model=Both()).train()


# Mixed precision


def test_code_without_gradients_inside_a_step(tmp_path: Path) -> None:
    """Pains 37: autocast keeps casts of weights, and one made without gradients would cut the weight off."""

    class Twice(WithStep):
        looks_first = False

        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            if self.looks_first:
                with torch.no_grad(), optim_wrapper.optim_context(self):
                    self.net(data["x"])
            return super().train_step(data, optim_wrapper)

    class Looks(Twice):
        looks_first = True

    results = []
    for kind in (Twice, Looks):
        torch.manual_seed(0)
        wrapper = dict(type="AmpOptimWrapper", optimizer=SGD, dtype="bfloat16")
        results.append(make_runner(tmp_path, model=kind(), optim_wrapper=wrapper).train().net.weight)
    assert torch.equal(*results)


class Overflows(nn.Module):
    """The gradient of some updates is infinite."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.at, self.calls = nn.Linear(6, 2), at, 0

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        self.calls += 1
        loss = functional.cross_entropy(self.net(x).float(), y)
        return {"loss": loss + (self.net.weight.sum() * float("inf") if self.calls - 1 in self.at else 0.0)}


class AfterEach(Hook):
    """Weights and learning rate behind every update."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.rates: list[float] = []
        self.skipped: list[bool] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.weights.append(runner.strategy.module.net.weight.detach().clone())
        self.rates.append(runner.optim_wrapper.param_groups[0]["lr"])
        self.skipped.append(runner.optim_wrapper.last_step.skipped)


@pytest.mark.parametrize("kind", ["AmpOptimWrapper", "ApexOptimWrapper"])
def test_a_schedule_waits_when_an_update_is_skipped(tmp_path: Path, kind: str) -> None:
    after, at = AfterEach(), (0, 3, 4)
    options = dict(dtype="float16") if kind == "AmpOptimWrapper" else dict(opt_level="O1")
    runner = make_runner(
        tmp_path,
        model=Overflows(at),
        optim_wrapper=dict(type=kind, optimizer=SGD, loss_scale=128.0, **options),
        param_scheduler=dict(type="LinearLR", start_factor=0.1, end=9, by_epoch=False),
        train_cfg=dict(max_epochs=1),
        custom_hooks=[after],
    )
    first = runner.optim_wrapper
    runner.train()
    assert runner.iter == 7  # the data go on, an update is counted as it comes
    assert after.skipped == [i in at for i in range(7)]
    still = [torch.equal(a, b) for a, b in zip(after.weights, after.weights[1:], strict=False)]
    assert still == [i + 1 in at for i in range(6)]
    # Three of seven updates were not made: the schedule has moved four times.
    applied = 0
    for i, rate in enumerate(after.rates):
        applied += i not in at
        assert rate == pytest.approx(0.1 * (0.1 + 0.9 * applied / 8))
    assert runner.param_schedulers[0].last_step == 4
    assert first is runner.optim_wrapper


# torch.compile


@pytest.mark.parametrize("given", [("cfg",), ("cfg", "argument")], ids=["cfg", "both"])
def test_compile(tmp_path: Path, given: tuple[str, ...]) -> None:
    calls: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return module.forward

    options = dict(compile=dict(backend=backend))
    changes = dict(cfg=options) | (options if "argument" in given else {})
    parts: dict[str, Any] = dict(model=lambda: Net(dropout=0.0), train_cfg=dict(max_epochs=1))
    runner = make_runner(tmp_path, **parts, **changes)
    runner.train()
    assert calls, "nothing was compiled"
    plain = make_runner(tmp_path, **parts)
    plain.train()
    # Same names, same numbers; this back end changes no arithmetic.
    assert not differences(whole_state(runner), whole_state(plain))


@pytest.mark.parametrize("changes", [dict(compile=False), dict(cfg=dict(compile=False)), {}], ids=str)
def test_not_compiled(tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(nn.Module, "compile", never)
    monkeypatch.setattr(torch, "compile", never)
    make_runner(tmp_path, train_cfg=dict(max_epochs=1), **changes).train()


def test_what_is_not_compiled_for_two_threads_is_compiled_after_both() -> None:
    """Each computes while the other is in the context, or has left it first; simulated ranks do so."""
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    first, second = without_compiling(), without_compiling()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    double(torch.ones(1))
    assert not compiled
    second.__exit__(None, None, None)
    double(torch.ones(1))
    assert compiled


# Learning rates by batch size


@pytest.mark.parametrize(
    "changes, rates",
    [
        ({}, {0.1 * 4 / 8}),
        (dict(optim_wrapper=dict(optimizer=SGD, accumulative_counts=3)), {0.1 * 12 / 8}),
        (dict(auto_scale_lr=dict(base_batch_size=8, enable=False)), {0.1}),
        (dict(param_scheduler=dict(type="ConstantLR", factor=0.5, end=2)), {0.1 * 4 / 8 * 0.5, 0.1 * 4 / 8}),
    ],
    ids=["batch", "accumulate", "off", "schedule"],
)
def test_auto_scale_lr(tmp_path: Path, changes: dict[str, Any], rates: set[float]) -> None:
    watch = Watch()
    make_runner(tmp_path, custom_hooks=[watch], **{"auto_scale_lr": dict(base_batch_size=8), **changes}).train()
    assert sorted(set(watch.rates)) == pytest.approx(sorted(rates))
    assert watch.rates == sorted(watch.rates), "a schedule begins with its factor"


class Parts(nn.Module):
    """Gives parts of a loss in the way that is asked for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(6, 2), kind

    def forward(self, index: Any, x: Tensor, y: Tensor) -> Any:
        logits = self.net(x)
        main, penalty = functional.cross_entropy(logits, y), logits.square().mean()
        given = {
            "beside": {"loss": main, "loss_gp": penalty, "loss_wd": logits.abs().mean()},
            "object": types.SimpleNamespace(loss=main, gp_loss=penalty),
            "contained": {"loss": main + penalty, "loss_gp": penalty, "loss_ce": main},
            "logged": {"loss": main, "loss_gp": penalty.detach(), "share": penalty},
            "summed": {"loss_ce": main, "loss_gp": penalty},
        }
        return given[self.kind]


@pytest.mark.parametrize(
    "kind, names",
    [("beside", "loss_gp, loss_wd"), ("object", "gp_loss"), ("contained", ""), ("logged", ""), ("summed", "")],
)
def test_losses_beside_the_loss_are_named_once(kind: str, names: str, tmp_path: Path, caplog: Any) -> None:
    runner = make_runner(tmp_path, model=Parts(kind), train_cfg=dict(max_epochs=2), log_level="WARNING")
    runner.logger.addHandler(caplog.handler)
    runner.train()
    runner.logger.removeHandler(caplog.handler)
    said = [message for message in caplog.messages if "Parts.forward" in message]
    assert len(said) == bool(names)
    assert all(f"gave a loss, and beside it {names}, which" in message for message in said)
