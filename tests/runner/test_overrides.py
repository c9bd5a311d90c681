"""Whatever a subclass of a public base class defines anew is called, or refused by name.

The methods are found by looking at the classes, so that a new one without an entry here fails.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import flextrain
from flextrain import (
    AmpOptimWrapper,
    ApexOptimWrapper,
    BaseDataPreprocessor,
    BaseModel,
    BaseTTAModel,
    DeepSpeedOptimWrapper,
    DefaultOptimWrapperConstructor,
    FlexibleRunner,
    Hook,
    OptimWrapper,
    OptimWrapperDict,
    SingleDeviceStrategy,
)
from flextrain.optim.schedulers import LinearLR
from flextrain.runner.data.samplers import DefaultSampler, InfiniteSampler
from flextrain.runner.hooks import CheckpointHook
from flextrain.runner.loops.evaluate import TestLoop as LoopOfTests
from flextrain.runner.loops.evaluate import ValLoop
from flextrain.runner.loops.train import EpochBasedTrainLoop, IterBasedTrainLoop
from flextrain.runner.metrics.evaluator import Evaluator
from flextrain.runner.reporting import JsonLinesReporter, LogProcessor, Visualizer

from .training import SGD, Accuracy, Samples, SaveEvery, Stop, make_runner

pytestmark = pytest.mark.usefixtures("quick")

MMENGINE = {"_run_forward", "_before_epoch", "_after_epoch", "_before_iter", "_after_iter", "_get_value", "_next"} | {
    "_save_checkpoint", "_save_checkpoint_with_step", "_save_best_checkpoint", "__iter__", "__len__", "__getitem__"
}  # fmt: skip
"""Names with an underscore that users define anew all the same: MMEngine's, and Python's own."""


def overridable(kind: type) -> list[str]:
    """What a subclass may define anew: the methods and properties of the class and of its bases in this library."""
    names: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "flextrain":
            names |= vars(base)
    return sorted(name for name, value in names.items() if _is_method(value) and (name[0] != "_" or name in MMENGINE))


def _is_method(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, property, classmethod, staticmethod))


def spying(base: type, name: str, called: Callable[[str], object]) -> Any:
    """A subclass that defines one method anew: it tells of every call, and does what the base's does."""
    inherited = next(vars(kind)[name] for kind in base.__mro__ if name in vars(kind))

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        called(name)
        return getattr(super(sub, self), name)(*args, **kwargs)

    if isinstance(inherited, property):

        def get(self: Any) -> Any:
            called(name)
            return getattr(super(sub, self), name)

        def set_(self: Any, value: Any) -> None:
            called(name)
            inherited.fset(self, value)

        setter = set_ if inherited.fset else None
        sub = type(f"Own{base.__name__}", (base,), {name: property(get, setter), "__module__": __name__})
    elif isinstance(inherited, classmethod):

        def of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
            called(name)
            return getattr(super(sub, cls), name)(*args, **kwargs)

        sub = type(f"Own{base.__name__}", (base,), {name: classmethod(of_class), "__module__": __name__})
    else:
        sub = type(f"Own{base.__name__}", (base,), {name: method, "__module__": __name__})
    return sub


class Last(nn.Linear):
    def init_weights(self) -> None:
        nn.init.normal_(self.weight)


class Net(BaseModel):
    """A classifier, with a part that initialises itself."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), Last(4, 2))

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(x)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(logits.float(), y)}
        return logits if mode == "tensor" else {"index": index, "logits": logits, "y": y}


class Gan(nn.Module):
    """Two parts with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self.critic(data["x"]).square().mean()
            optim_wrapper["critic"].update_params(loss)
            generator_loss = self.critic(self.generator(data["x"])).mean()
            optim_wrapper["generator"].update_params(generator_loss)
        return {"loss": loss.detach()}

    def val_step(self, data: Any) -> Any:
        return {"index": data["index"], "logits": torch.zeros(len(data["y"]), 2), "y": data["y"]}

    test_step = val_step


class Merging(BaseTTAModel):
    """Takes the first augmentation's prediction."""

    def merge_preds(self, data_samples_list: list[tuple[Any, ...]]) -> Any:
        first = [predictions[0] for predictions in data_samples_list]
        return {name: torch.stack([prediction[name] for prediction in first]) for name in first[0]}


def twice(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch with two augmentations, which are the same."""
    return {name: [value, value] for name, value in default_collate(samples).items()}


def augmented() -> dict[str, Any]:
    return loader() | dict(collate_fn=twice)


class FailAt(Hook):
    """Ends training before an update, as an error of the model's would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.at:
            raise Stop


def loader(**options: Any) -> dict[str, Any]:
    return dict(batch_size=4, dataset=Samples(8), collate_fn="default_collate", **options)


def life(folder: Path, make: Callable[[], dict[str, Any]], **resume: Any) -> None:
    """A run of two epochs of two updates that trains, validates, saves and tests; one that resumes it early, and fails.

    Args:
        make: gives the runner's arguments, with new objects for every run.
        resume: what the second run leaves out of the first one's state.
    """
    runner = _runner(folder, make(), SaveEvery({1}))
    runner.train()
    runner.test()
    runner.strategy.leave()
    resumed = _runner(folder, make(), FailAt(3), resume=dict(path=str(folder / "iter_1"), **resume))
    with pytest.raises(Stop):
        resumed.train()
    resumed.strategy.leave()


def _runner(folder: Path, own: dict[str, Any], *hooks: Hook, **more: Any) -> FlexibleRunner:
    checkpoint = dict(interval=2, save_best="accuracy", rule="greater")
    given: dict[str, Any] = {
        "model": Net,
        "optim_wrapper": dict(optimizer=SGD, clip_grad=dict(max_norm=1.0)),
        "auto_scale_lr": dict(base_batch_size=8),
        "train_dataloader": loader(),
        "train_cfg": dict(max_epochs=2),
        "param_scheduler": dict(type="LinearLR", end=3, by_epoch=False),
        "default_hooks": {"logger": dict(interval=1), "checkpoint": checkpoint, **own.pop("default_hooks", {})},
        "custom_hooks": [*own.pop("custom_hooks", ()), dict(type="EMAHook"), dict(type="SyncBuffersHook"), *hooks],
        **{f"{mode}_dataloader": loader() for mode in ("val", "test")},
        **{f"{mode}_cfg": {} for mode in ("val", "test")},
        **{f"{mode}_evaluator": dict(type=Accuracy) for mode in ("val", "test")},
        **more,
    }
    return make_runner(folder, **{**given, **own})


Make = Callable[[Any], dict[str, Any]]


class Mine(torch.optim.SGD):
    """Somebody else's, which is tried before it is trained with."""


class Shows(Hook):
    """Gives the visualizer everything but a figure."""

    def after_train(self, runner: Any) -> None:
        runner.visualizer.add_config(dict(a=1))
        runner.visualizer.add_image("sample", np.zeros((2, 2, 3), np.uint8))
        runner.visualizer.add_graph(runner.model)


class Stateful(Hook):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


MINE = dict(type=Mine, lr=0.1, momentum=0.9)
ADAMW = dict(type="AdamW", lr=0.1)


@dataclass
class Case:
    """A base class, what a runner is given of a subclass of it, and which of its methods a run does not call.

    Attributes:
        not_called: by name, why.
        refused: methods that the runner refuses by name.
        resume: pieces that the second run leaves out.
    """

    base: Any
    make: Make
    not_called: dict[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    marks: tuple[Any, ...] = ()
    id: str = ""
    resume: dict[str, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.id or self.base.__name__


CLIP = dict(max_norm=1.0)
DDP = dict(type="DDPStrategy")
ZERO = dict(type="DeepSpeedStrategy")

_ASKED = "a question that a hook asks of itself, when it likes"
_FACT = "a fact for others to ask, which follows from what other methods do"
_USER = "only the user calls it"
_ON_ACCELERATORS = "asked on accelerators, for the line of the log that says what was chosen"
QUESTIONS = dict.fromkeys(
    ("end_of_epoch", "every_n_epochs", "every_n_inner_iters", "every_n_train_iters", "is_last_train_epoch"), _ASKED
) | {"is_last_train_iter": _ASKED, "get_triggered_stages": _USER}
WRAPPER = {
    "get_momentum": _USER,
    "has_stepped": _FACT,
    "end_window": "called where a train_step may update in some micro-batches of a window only",
    "accumulative_counts": "MMEngine's name of accumulate, for users",
    "clip_grad_kwargs": "MMEngine's name of clip_grad, for users",
    "chose_fused": _ON_ACCELERATORS,
    "spread": "a strategy calls it whose processes hold different parameters",
    "register_backward_pre_hook": "strategies call it that average the gradients of several optimizers, or have gradient hooks of users",
    "register_step_pre_hook": "strategies and users call it to add something, with several processes",
}
NEVER_CALLED = ("initialize_count_status", "state_dict", "load_state_dict")
TRAIN_LOOP = {
    "inner": _FACT,
    "position": "asked when a run is preempted",
    "ends_with_filler": "asked by hooks that look at batches",
    "has_begun": "asked when a hook replaces runner.optim_wrapper",
} | dict.fromkeys(("num_batches", "dry_run"), "evaluation loops are asked")
MODEL_SAYS_WHICH = "the model's train_step calls it of one of the optimizers"

NOT_ASKED = {"save_now": "called when a run is preempted"}


def without(names: dict[str, str], *called: str, **more: str) -> dict[str, str]:
    return {name: why for name, why in names.items() if name not in called} | more


AMP = without(
    WRAPPER,
    loss_scale="DeepSpeedStrategy alone asks, which takes no subclass",
    loss_scaler=_USER,
    cast_dtype=_USER,
    chose_dtype=_ON_ACCELERATORS,
)
CASES: list[Case] = [
    Case(Stateful, lambda kind: dict(custom_hooks=[kind()]), QUESTIONS, id="Hook"),
    Case(
        CheckpointHook,
        lambda kind: dict(default_hooks=dict(checkpoint=kind(interval=2, save_best="accuracy", rule="greater"))),
        without(QUESTIONS, "every_n_epochs", "is_last_train_epoch", **NOT_ASKED),
    ),
    Case(
        CheckpointHook,
        lambda kind: dict(
            default_hooks=dict(checkpoint=kind(interval=3, by_epoch=False, save_best="accuracy", rule="greater"))
        ),
        without(QUESTIONS, "every_n_train_iters", "is_last_train_iter", **NOT_ASKED),
        id="CheckpointHook-by-iteration",
    ),
    Case(Net, lambda kind: dict(model=kind), id="BaseModel"),
    Case(
        Merging,
        lambda kind: dict(
            test_dataloader=augmented(), custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=dict(type=kind))]
        ),
        dict.fromkeys(
            ("forward", "init_weights", "parse_losses", "train_step", "val_step", "_run_forward"),
            "its module's are called",
        ),
        id="BaseTTAModel",
    ),
    Case(BaseDataPreprocessor, lambda kind: dict(model=lambda: Net(kind()))),
    Case(
        OptimWrapper,
        lambda kind: dict(optim_wrapper=kind(MINE, clip_grad=CLIP), strategy=DDP),
        WRAPPER,
        refused=NEVER_CALLED,
    ),
    Case(
        AmpOptimWrapper,
        lambda kind: dict(optim_wrapper=kind(MINE, dtype="float16", clip_grad=CLIP), strategy=DDP),
        AMP,
        refused=NEVER_CALLED,
    ),
    Case(
        ApexOptimWrapper,
        lambda kind: dict(optim_wrapper=kind(MINE, opt_level="O1", loss_scale=8.0), strategy=DDP),
        AMP,
        refused=NEVER_CALLED,
    ),
    Case(
        OptimWrapperDict,
        lambda kind: dict(model=Gan, optim_wrapper=kind(generator=OptimWrapper(SGD), critic=OptimWrapper(SGD))),
        dict.fromkeys(("backward", "step", "update_params", "zero_grad"), MODEL_SAYS_WHICH)
        | {"get_momentum": _USER, "optim_wrappers": _USER, "__len__": _USER, "has_stepped": _FACT, "last_step": _FACT},
        refused=NEVER_CALLED,
    ),
    Case(
        OptimWrapper,
        lambda kind: dict(
            model=Gan, optim_wrapper=OptimWrapperDict(generator=kind(MINE), critic=OptimWrapper(SGD)), strategy=DDP
        ),
        without(
            WRAPPER,
            "is_built",
            "register_backward_pre_hook",
            should_sync="gradients of several optimizers are averaged as each is updated",
            wrappers="OptimWrapperDict has its own",
        ),
        refused=NEVER_CALLED,
        id="OptimWrapper-of-several",
    ),
    Case(
        DeepSpeedOptimWrapper,
        lambda kind: dict(optim_wrapper=kind(ADAMW, clip_grad=CLIP), strategy=ZERO),
        without(
            WRAPPER | {"send_last": "the strategy calls it where gradient hooks of users come last"},
            "register_step_pre_hook",
            clip_by="for strategy=dict(gradient_clipping=...)",
            make_another="a trial that torch's own optimizers are spared",
        ),
        refused=NEVER_CALLED,
        marks=(pytest.mark.deepspeed,),
    ),
    Case(Accuracy, lambda kind: dict(val_evaluator=kind()), id="BaseMetric"),
    Case(Evaluator, lambda kind: dict(val_evaluator=kind([Accuracy()])), {"offline_evaluate": _USER}),
    Case(EpochBasedTrainLoop, lambda kind: dict(train_cfg=dict(type=kind, max_epochs=2)), TRAIN_LOOP),
    Case(
        IterBasedTrainLoop,
        lambda kind: dict(train_cfg=dict(type=kind, max_iters=4, val_interval=2)),
        without(TRAIN_LOOP, "inner", dataloader_iterator="a loop's own run asks for it"),
    ),
    Case(ValLoop, lambda kind: dict(val_cfg=dict(type=kind))),
    Case(
        LoopOfTests,
        lambda kind: dict(test_cfg=dict(type=kind)),
        {"dry_run": "validation alone is tried before training"},
        id="TestLoop",
    ),
    Case(
        SingleDeviceStrategy,
        lambda kind: dict(strategy=kind(), transforms=[lambda model: model]),
        {
            "abort_update": "no update of this life is interrupted, see test_interrupted",
        },
        id="Strategy",
    ),
    Case(
        JsonLinesReporter,
        lambda kind: dict(visualizer=[dict(type=kind)], custom_hooks=[Shows()]),
        {"on_figure": "in its place on_image gets the rendered figure, unless a class defines it"},
        id="Reporter",
    ),
    Case(
        Visualizer,
        lambda kind: dict(visualizer=dict(type=kind)),
        dict.fromkeys(
            (
                "add_datasample",
                "add_figure",
                "add_graph",
                "add_image",
                "add_scalar",
                "check_instance_created",
                "get_backend",
                "get_current_instance",
                "get_image",
                "get_instance",
                "instance_name",
                "set_image",
            ),
            _USER,
        ),
    ),
    Case(LogProcessor, lambda kind: dict(log_processor=dict(type=kind))),
    Case(DefaultSampler, lambda kind: dict(train_dataloader=loader(sampler=dict(type=kind))), {"total_size": _USER}),
    Case(
        InfiniteSampler,
        lambda kind: dict(
            train_dataloader=loader(sampler=dict(type=kind)), train_cfg=dict(by_epoch=False, max_iters=4)
        ),
        {"__len__": "it has no end"},
    ),
    Case(
        LinearLR,
        lambda kind: dict(param_scheduler=dict(type=kind, end=2, convert_to_iter_based=True)),
        {"note_values": "a resume with other schedules calls it"},
        resume=dict(optimizer=False),
        id="ParamScheduler",
    ),
    Case(DefaultOptimWrapperConstructor, lambda kind: dict(optim_wrapper=dict(optimizer=SGD, constructor=kind))),
]


@pytest.mark.parametrize("case", [pytest.param(case, marks=case.marks, id=case.name) for case in CASES])
def test_all_that_is_defined_anew_is_called(tmp_path: Path, case: Case) -> None:
    """In one run with all methods together; where that is not as expected, a method is tried by itself."""
    calls: set[str] = set()
    names = [name for name in overridable(case.base) if name not in case.refused]
    kind = case.base
    for name in names:
        kind = spying(kind, name, calls.add)
    life(tmp_path / "together", lambda: case.make(kind), **case.resume)
    for name in names:
        if (name in calls) == (name in case.not_called):  # of one that another new one brings about
            calls.discard(name)
            alone = spying(case.base, name, calls.add)
            life(tmp_path / name, lambda alone=alone: case.make(alone), **case.resume)
        if name in case.not_called:
            assert name not in calls, f"{name} is called: take it out of the list of those that are not"
        else:
            assert name in calls, f"{case.base.__name__}.{name} is never called: call it, refuse it, or say why not"
    for name in case.refused:
        never = spying(case.base, name, calls.add)
        with pytest.raises(flextrain.ConfigError, match=rf"\.{name} is never called here"):
            life(tmp_path / name, lambda never=never: case.make(never))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_lists_name_methods_that_there_are(case: Case) -> None:
    assert set(case.not_called) <= set(overridable(case.base))


def test_every_public_base_class_has_a_case() -> None:
    """A class of which users are told to make a subclass, or to give one of their own."""
    bases = {base for case in CASES for base in case.base.__mro__}
    public = {getattr(flextrain, name) for name in flextrain.__all__}
    kinds = {value for value in public if isinstance(value, type) and not issubclass(value, Exception)}
    for kind in sorted(kinds - bases - NO_BASES.keys(), key=lambda kind: kind.__name__):
        raise AssertionError(f"{kind.__name__} has no case")


def without_truth(base: type) -> Any:
    """A subclass whose objects are neither true nor false; an empty container is false, and still was given."""

    def asked(self: object) -> bool:
        raise TypeError(f"{base.__name__} was asked whether it is true")

    return type(base.__name__, (base,), {"__bool__": asked})


def test_nobody_asks_whether_a_part_is_true(tmp_path: Path) -> None:
    made: list[Any] = []

    def parts() -> dict[str, Any]:
        made.append(without_truth(Visualizer)())
        return dict(
            model=without_truth(Net),
            strategy=without_truth(SingleDeviceStrategy)(),
            train_dataloader=dict(
                batch_size=4,
                dataset=without_truth(Samples)(8),
                sampler=dict(type=without_truth(DefaultSampler)),
                batch_sampler=dict(type=without_truth(torch.utils.data.BatchSampler)),
                collate_fn="default_collate",
            ),
            optim_wrapper=dict(type=without_truth(OptimWrapper), optimizer=dict(type=without_truth(Mine), lr=0.1)),
            param_scheduler=[dict(type=without_truth(LinearLR), end=2)],
            val_evaluator=without_truth(Evaluator)([without_truth(Accuracy)()]),
            visualizer=made[-1],
            log_processor=without_truth(LogProcessor)(),
        )

    life(tmp_path, parts)
    assert Visualizer.get_current_instance() is made[-1]
    assert Visualizer.get_instance(made[0].instance_name) is made[0]


NO_BASES = {
    flextrain.ImgDataPreprocessor: "BaseDataPreprocessor, whose methods are called, is its base",
    flextrain.FlexibleRunner: "a script makes one, parts are given to it",
    flextrain.Engine: "a program makes one",
    flextrain.LiveWeights: "a runner gives it to a target",
    flextrain.TrainingCopy: "Engine.switch returns one",
    flextrain.ResumeFrom: "a hook raises it",
    flextrain.Registry: "a table of names",
    flextrain.DeviceSpec: "a record",
    flextrain.Config: "it is read from a file",
    flextrain.ConfigDict: "what is read from a file",
    flextrain.DictAction: "argparse makes one",
    flextrain.MessageHub: "a runner makes its own, no argument takes one",
    flextrain.HistoryBuffer: "a message hub makes its own",
    flextrain.Axis: "a strategy takes it, not the runner, see tests/mesh/test_custom_axis.py",
    flextrain.DataShard: "a record",
    flextrain.Topology: "a record",
    **dict.fromkeys(
        [
            flextrain.DDPStrategy,
            flextrain.FSDPStrategy,
            flextrain.DeepSpeedStrategy,
            flextrain.MeshStrategy,
            flextrain.NPUStrategy,
        ],
        "Strategy, whose methods the runner calls, is its base",
    ),
}
