"""check_strategy passes for every strategy that works, and names the fault of every one that does not."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flextrain import (
    STRATEGIES,
    ConfigError,
    DDPStrategy,
    OptimWrapper,
    SingleDeviceStrategy,
    Strategy,
    StrategyError,
)
from flextrain.core.base import errors
from flextrain.core.comm import collectives as dist
from flextrain.core.comm.topology import DataShard, Topology
from flextrain.optim.gradients import average, clip_by_norm, gradients
from flextrain.optim.wrapper import StepInfo
from flextrain.strategies.parts import computes_alone
from flextrain.testing import ConformanceError, WorkerGroup, check_strategy
from flextrain.testing.conformance import ORDER
from flextrain.testing.conformance_checks import CHECKS

from .splitting import CutsBatches, ForwardFirst

pytestmark = pytest.mark.distributed
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_strategy.py"

# Strategies that work


def ddp_with_bucket_views() -> Strategy:
    """A factory in place of a name."""
    return DDPStrategy(gradient_as_bucket_view=True, bucket_cap_mb=0.001)


# What options of one strategy, or another number of processes, can make a difference to.
ARITHMETIC = ("initial_weights", "gradients", "accumulation", "clipping", "overflow", "resume_itself")


def test_ddp(workers2: WorkerGroup) -> None:
    report = check_strategy("DDPStrategy", workers=workers2)
    statuses = {result.name: result.status for result in report.results}
    assert statuses == {
        name: "refused" if name == "unused" else "passed" for name in CHECKS
    }  # it has an option for them


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [
        dict(type="DDPStrategy", static_graph=True),
        dict(type=DDPStrategy, find_unused_parameters=True, broadcast_buffers=False),
        dict(type="DDPStrategy", activation_checkpointing=dict(classes=["Block"])),
        ddp_with_bucket_views,
    ],
    ids=["static_graph", "find_unused", "activation_checkpointing", "bucket_views"],
)
def test_ddp_with_options(workers2: WorkerGroup, strategy: Any) -> None:
    assert check_strategy(strategy, workers=workers2, only=["gradients", "accumulation", "resume_itself"]).passed


@pytest.mark.parametrize(
    "strategy",
    [
        dict(type="FSDPStrategy", wrap=["Block"]),
        pytest.param(dict(type="DDPStrategy"), marks=pytest.mark.full),
        pytest.param(dict(type="zero3"), marks=pytest.mark.full),
        pytest.param(dict(type="zero1"), marks=pytest.mark.full),
    ],
    ids=["fsdp", "ddp", "zero3", "zero1"],
)
def test_recomputation_that_keeps_products(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    if strategy["type"].startswith("zero"):
        pytest.importorskip("deepspeed")
    recomputes = strategy | dict(activation_checkpointing=dict(classes=["Block"], policy="matmuls"))
    assert check_strategy(recomputes, workers=workers2, only=["gradients", "accumulation", "resume_itself"]).passed


@pytest.mark.parametrize("option, status", [("find_unused_parameters", "passed"), ("static_graph", "refused")])
def test_ddp_with_what_is_unused(workers2: WorkerGroup, option: str, status: str) -> None:
    report = check_strategy({"type": "DDPStrategy", option: True}, workers=workers2, only=["unused"])
    assert [result.status for result in report.results] == [status]


@pytest.mark.full
def test_ddp_on_three_processes_whose_parts_differ_in_size(workers3: WorkerGroup) -> None:
    assert check_strategy(DDPStrategy, world_size=3, workers=workers3, only=ARITHMETIC).passed


def test_single_device(workers1: WorkerGroup) -> None:
    report = check_strategy(SingleDeviceStrategy, world_size=1, workers=workers1)
    assert [result.status for result in report.results] == ["passed"] * len(CHECKS)
    assert "SingleDeviceStrategy on 1 processes" in str(report)


def test_ddp_in_a_world_of_one(workers1: WorkerGroup) -> None:
    only = ["facts", "gradients", "accumulation", "overflow", "teardown"]
    assert check_strategy("DDPStrategy", world_size=1, workers=workers1, only=only).passed


@pytest.mark.full
def test_the_example_of_a_third_party(workers2: WorkerGroup) -> None:
    with loaded(EXAMPLE) as module:
        (strategy,) = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Strategy) and value.__module__ == module.__name__
        ]
        report = check_strategy(strategy, workers=workers2)
    assert [result.status for result in report.results] == ["passed"] * len(CHECKS)


def test_the_example_leaves_what_is_unused(workers2: WorkerGroup) -> None:
    with loaded(EXAMPLE) as module:
        report = check_strategy(module.OneMessageStrategy, workers=workers2, only=["unused"])
    assert [result.status for result in report.results] == ["passed"]


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    registered = dict(STRATEGIES._modules)
    sys.modules[path.stem] = module
    sys.path.append(str(path.parent))  # as for a script, which finds its neighbours
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[path.stem]
        sys.path.remove(str(path.parent))
        for name in STRATEGIES._modules.keys() - registered:  # the next test loads it again
            del STRATEGIES._modules[name]


# Strategies with one fault each


class AveragesTwice(DDPStrategy):
    """Divides gradients that are averaged by the number of processes once more."""

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        optim.register_step_pre_hook(
            lambda o: [grad.div_(self.topology.world_size) for grad in gradients(o.param_groups)]
        )
        return model, optim


class AveragesAtStep(Strategy):
    """Works: the base of those that need to come between backward and the exchange of gradients."""

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        optim.register_step_pre_hook(self.before_step)
        return model, optim

    def before_step(self, optim: OptimWrapper) -> None:
        average([p for group in optim.param_groups for p in group["params"]], self.topology.data)


class ClipsByLocalNorm(AveragesAtStep):
    """Each process clips its own gradients before they are averaged."""

    def before_step(self, optim: OptimWrapper) -> None:
        if optim.clip_grad is not None and optim.clip_grad.max_norm is not None:
            clip_by_norm(gradients(optim.param_groups), optim.clip_grad.max_norm)
        super().before_step(optim)


class KeepsOwnWeights(AveragesAtStep):
    """Leaves every process with the weights that it drew itself; torch's wrapper would make them agree."""

    def _place(self, model: nn.Module) -> None:
        model.to(self.device)


class AccumulatesOffByOne(DDPStrategy):
    """Exchanges gradients one micro-batch too late: those of a window's last are missing when there are several."""

    _enabled = True

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        late, self._enabled = self._enabled, enabled
        return super().grad_sync(late)


class SchedulesPerMicroBatch(DDPStrategy):
    """Lets the learning rate decay at every micro-batch but the last, when the loop's own scheduler moves it."""

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            assert self.optim is not None
            for group in self.optim.param_groups:
                group["lr"] *= 0.8
        return super().grad_sync(enabled)


class RenamesAKey(DDPStrategy):
    """Stores a parameter under the name that the wrapper gives it, and loads it from there."""

    ours, theirs = "model.norm.weight", "model.module.norm.weight"

    def state(self) -> dict[str, Any]:
        return {self.theirs if key == self.ours else key: value for key, value in super().state().items()}

    def template(self, saved: Any) -> dict[str, Tensor]:
        template = super().template({self.ours if key == self.theirs else key: saved[key] for key in saved})
        return {self.theirs if key == self.ours else key: value for key, value in template.items()}


# The check that must name the fault, what it must say, and the checks that the fault may spread to.
SIX = [
    (AveragesTwice, "gradients", "it is 0.5 times what it should be", {"losses", "accumulation", "clipping"}),
    (ClipsByLocalNorm, "clipping", "the gradient norm of update 0 is", {"overflow"}),  # of scaled gradients
    (KeepsOwnWeights, "initial_weights", "model.", {"gradients", "losses", "accumulation", "clipping", "evaluation", "overflow"}),
    (AccumulatesOffByOne, "accumulation", "weights after update 0", {"schedule"}),
    (SchedulesPerMicroBatch, "schedule", "learning rates before micro-batch 1 of update 0", {"accumulation"}),
    (RenamesAKey, "state_keys", '(renamed to "model.module.norm.weight"?)', set()),
]  # fmt: skip


# What a fault in the arithmetic would most likely spread to, and all that it could.
NEAR = {"initial_weights", "gradients", "accumulation", "clipping"}
FAR = {*ARITHMETIC, "facts", "losses", "schedule", "frozen", "tied", "evaluation", "state_keys", "resume_to_single"}


# Faults of three kinds; the others under ``full``.
THREE = (AveragesTwice, AccumulatesOffByOne, RenamesAKey)
FAULTS = [pytest.param(*fault, marks=() if fault[0] in THREE else pytest.mark.full) for fault in SIX]


@pytest.mark.parametrize("others", [NEAR, pytest.param(FAR, marks=pytest.mark.full)], ids=["near", "far"])
@pytest.mark.parametrize("strategy, name, message, spread", FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_fails_the_check_of_its_name(
    workers2: WorkerGroup, strategy: type[Strategy], name: str, message: str, spread: set[str], others: set[str]
) -> None:
    with pytest.raises(ConformanceError, match=f"{strategy.__name__}: .* checks failed on 2 processes") as caught:
        check_strategy(strategy, workers=workers2, only={name, *others})
    failed = caught.value.report.failed
    assert message in failed[name]
    assert "Traceback" not in failed[name]
    resuming = {"resume_from_single", "resume_to_single", "resume_itself"}
    assert failed.keys() <= {name} | spread | resuming


def test_the_strategy_that_the_faulty_ones_start_from_has_no_fault(workers2: WorkerGroup) -> None:
    assert check_strategy(AveragesAtStep, workers=workers2, only=ARITHMETIC).passed


@pytest.mark.parametrize("strategy", [ForwardFirst, CutsBatches])
def test_a_strategy_may_drive_updates_and_evaluation_itself(workers2: WorkerGroup, strategy: type[Strategy]) -> None:
    only = {*ARITHMETIC, "facts", "losses", "schedule", "evaluation", "overflow"}
    assert check_strategy(strategy, workers=workers2, only=only).passed


class SeesAllData(DDPStrategy):
    def join(self) -> None:
        super().join()
        self.topology = Topology(data=DataShard(0, 1))


class LosesGroups(DDPStrategy):
    """Gives all parameters the hyper-parameters of the first group."""

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        for group in optim.param_groups[1:]:
            group.update({key: value for key, value in optim.param_groups[0].items() if key != "params"})
        return model, optim


class ThawsEverything(DDPStrategy):
    def _wrap(self, model: nn.Module) -> nn.Module:
        return super()._wrap(model.requires_grad_())


class MovesWhatIsUnused(AveragesAtStep):
    """Gives parameters without a gradient zeros, with which weight decay moves them."""

    def before_step(self, optim: OptimWrapper) -> None:
        for group in optim.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        super().before_step(optim)


class KeepsToItsOwn(AveragesAtStep):
    """Drops the average of a gradient that this process has none of, though another has."""

    def before_step(self, optim: OptimWrapper) -> None:
        parameters = [p for group in optim.param_groups for p in group["params"]]
        without = [p for p in parameters if p.grad is None]
        super().before_step(optim)
        for parameter in without:
            parameter.grad = None


class SendsWhatItHas(AveragesAtStep):
    """Sends a message for each gradient that this process has, and none for others."""

    def before_step(self, optim: OptimWrapper) -> None:
        for parameter in (p for group in optim.param_groups for p in group["params"] if p.grad is not None):
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.topology.world_size


class Unties(DDPStrategy):
    def _wrap(self, model: nn.Module) -> nn.Module:
        head = model.get_submodule("head")
        head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
        return super()._wrap(model)


class EvaluationMovesABuffer(DDPStrategy):
    def autocast(self) -> AbstractContextManager[None]:
        if not torch.is_grad_enabled():
            self.module.get_buffer("scale").mul_(1.01)
        return super().autocast()


class IgnoresAutocast(DDPStrategy):
    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()


class DoublesInHalf(DDPStrategy):
    """Adds gradients up over two processes, in mixed precision only."""

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        if self.precision.compute is not torch.float32:
            optim.register_step_pre_hook(
                lambda o: [grad.mul_(self.topology.world_size) for grad in gradients(o.param_groups)]
            )
        return model, optim


class KeepsSkipsToItself(AveragesAtStep):
    """Averages nothing when its own gradients are not finite, and pretends that others' are not its business."""

    def before_step(self, optim: OptimWrapper) -> None:
        grads = gradients(optim.param_groups)
        finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
        kept = [grad.clone() for grad in grads]
        for grad in grads:
            grad.nan_to_num_(0.0, 0.0, 0.0)
        super().before_step(optim)
        if not finite:
            for grad, own in zip(grads, kept, strict=True):
                grad.copy_(own)


class CallsEveryStepApplied(DDPStrategy):
    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        step = optim.step

        def applied() -> StepInfo:
            return StepInfo(step().grad_norm, skipped=False)

        optim.step = applied
        return model, optim


class ForgetsMoments(DDPStrategy):
    def load(self, state: Any) -> None:
        super().load({key: value for key, value in state.items() if not key.startswith("optim.state.")})


class ForgetsHyperparameters(DDPStrategy):
    def state(self) -> dict[str, Any]:
        return {key: value for key, value in super().state().items() if not key.startswith("optim.group.")}


class CountsStepsFromZero(DDPStrategy):
    """Gives the counters of steps away as zero, which nobody sees until Adam corrects its bias by them."""

    def state(self) -> dict[str, Any]:
        state = super().state()
        return {key: torch.zeros_like(value) if key.endswith(".step") else value for key, value in state.items()}


class TakesAnyOption(DDPStrategy):
    def __init__(self, **options: Any) -> None:
        super().__init__()


class TakesAnyOptimizer(DDPStrategy):
    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        optim.build = lambda _: None
        return super().setup(model, optim)

    def _check_precision(self) -> None:
        pass


class StaysInTheGroup(DDPStrategy):
    def leave(self) -> None:
        if self._owns_group:
            self._owns_group = False
            super().leave()


class GivesOtherWeights(DDPStrategy):
    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().parameters():
            yield name, nn.Parameter(parameter.detach() + 1) if self.noted.is_whole else parameter


@computes_alone.register(GivesOtherWeights)
def of_a_copy(strategy: GivesOtherWeights) -> bool:
    return False


class RemembersModels(DDPStrategy):
    models: ClassVar[list[Any]] = []

    def leave(self) -> None:
        self.models.append(self._module)
        super().leave()


class DiesOnSecondTeardown(DDPStrategy):
    def leave(self) -> None:
        super().leave()
        self.config = self.config.no_such_attribute if getattr(self, "_ended", False) else self.config
        self._ended = True


@pytest.mark.parametrize(
    "strategy, name, message",
    [
        (SeesAllData, "facts", "one process for each part of the data must report"),
        (LosesGroups, "losses", "the loss of update 1 is"),
        (ThawsEverything, "frozen", "model.frozen.weight changed"),
        (MovesWhatIsUnused, "unused", "weights after 1 updates: model."),
        (KeepsToItsOwn, "unused", " updates: model.extra."),
        (SendsWhatItHas, "unused", "all must send the same messages, zeros in its place, and keep the average: "),
        (Unties, "tied", "different tensors"),
        (EvaluationMovesABuffer, "evaluation", "outputs for batch 0"),
        (GivesOtherWeights, "full_weights", "weights in full_weights"),
        (IgnoresAutocast, "precision", "is not bfloat16"),
        (
            DoublesInHalf,
            "precision",
            "in bfloat16 updates differ by ",
        ),
        (
            DoublesInHalf,
            "overflow",
            "in float16 gradient norms differ by ",
        ),
        (KeepsSkipsToItself, "overflow", "reports skipped="),
        (CallsEveryStepApplied, "overflow", "reports skipped=[False, False, False, False, False]"),
        (ForgetsMoments, "resume_itself", "after resuming, the loss"),
        (ForgetsMoments, "resume_from_single", "after resuming, the loss"),
        (CountsStepsFromZero, "resume_to_single", "after resuming, the loss"),
        (ForgetsHyperparameters, "state_keys", "missing, optim.group."),
        (TakesAnyOption, "refusals", "an unknown option was accepted"),
        (TakesAnyOptimizer, "refusals", "another model's parameters"),
        (StaysInTheGroup, "teardown", "the process group is still there"),
        (DiesOnSecondTeardown, "teardown", "no_such_attribute"),
        (RemembersModels, "teardown", "the model is still in memory after teardown"),
    ],
)
def test_every_check_can_fail(workers2: WorkerGroup, strategy: type[Strategy], name: str, message: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_strategy(strategy, workers=workers2, only=[name])
    assert message in caught.value.report.failed[name]


def test_a_name_that_only_the_caller_has_registered(workers2: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES._modules, "registered_here", AveragesAtStep)
    for strategy in ("registered_here", dict(type="registered_here"), "ddp"):
        assert check_strategy(strategy, workers=workers2, only=["facts"]).passed


class TrainsApart(Strategy):
    """Local SGD: weights are averaged after every second update, and in checkpoints."""

    not_promised: ClassVar[dict[str, str]] = {
        "losses": "weights are averaged after every second update only",
        "frozen": "this is not true",
    }
    tolerance = 1e-5

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        self.updates = 0
        optim.optimizer.register_step_post_hook(lambda *_: self.after_update())
        return model, optim

    def after_update(self) -> None:
        self.updates += 1
        if self.updates % 2 == 0:
            self.average()

    def average(self) -> None:
        self.topology.data.average([parameter.detach() for parameter in self.module.parameters()])

    def state(self) -> dict[str, Any]:
        self.average()
        state = super().state()
        self.topology.data.average(
            [v for k, v in state.items() if k.startswith("optim.state.") and v.is_floating_point()]
        )
        return state


def test_what_a_strategy_does_not_promise(workers2: WorkerGroup) -> None:
    """A difference where its class says so is none; a declaration that is not needed is told."""
    report = check_strategy(TrainsApart, workers=workers2, only=["facts", "losses", "frozen"])
    assert report.passed
    assert {result.name: result.status for result in report.results} == {
        "facts": "passed", "losses": "not promised", "frozen": "passed",
    }  # fmt: skip
    told = {result.name: result.message for result in report.results}
    assert told["losses"].startswith("weights are averaged after every second update only: ")
    assert told["frozen"] == "not_promised names it and is not needed (this is not true)"
    assert "tolerance 1e-05" in str(report)
    with pytest.raises(ConformanceError, match="clipping: "):
        check_strategy(TrainsApart, workers=workers2, only=["clipping"])
    # Mixed precision is compared with what is lost in float32.
    assert check_strategy(TrainsApart, workers=workers2, only=["precision"]).passed


class Rounds(DDPStrategy):
    """Lossy: an update is made of rounded gradients."""

    tolerance: ClassVar[dict[str, float]] = {"gradients": 0.05}

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        optim.optimizer.register_step_pre_hook(lambda *_: self.round())
        return model, optim

    def round(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                unit = parameter.grad.abs().max() / 127
                parameter.grad.div_(unit).round_().mul_(unit)


def test_a_tolerance_of_one_check_is_not_that_of_others(workers2: WorkerGroup) -> None:
    report = check_strategy(Rounds, workers=workers2, only=["gradients", "facts"])
    told = {result.name: result.message for result in report.results}
    found = re.fullmatch(r"largest difference (\S+), allowed 5e-02", told["gradients"])
    assert found is not None
    assert 1e-4 < float(found[1]) < 0.05
    assert told["facts"] == ""
    with pytest.raises(ConformanceError, match="accumulation: .*allowed 1e-06"):
        check_strategy(Rounds, workers=workers2, only=["accumulation"])
    told = {
        r.name: r.message for r in check_strategy(Rounds, workers=workers2, only=["gradients"], tolerance=0.04).results
    }
    assert told["gradients"].endswith("allowed 4e-02")


@pytest.mark.parametrize(
    "declared, message",
    [
        ({"gradient": 0.1}, 'Declares.tolerance: "gradient" is no check, did you mean "gradients"?'),
        ({"gradients": "small"}, "Declares.tolerance.gradients: 'small' is not allowed, give a number from 0 up"),
        (-1.0, "Declares.tolerance: -1.0 is not allowed, give a number from 0 up"),
    ],
)
def test_tolerances_are_checked_before_any_process_starts(declared: Any, message: str) -> None:
    class Declares(DDPStrategy):
        tolerance = declared

    with pytest.raises(ConfigError) as caught:
        check_strategy(Declares, timeout_s=0)
    assert message in str(caught.value)


class PromisesEverything(AveragesAtStep):
    """An error where a difference is allowed is an error all the same."""

    not_promised: ClassVar[dict[str, str]] = {"losses": "lossy"}

    def before_step(self, optim: OptimWrapper) -> None:
        raise RuntimeError("broken")


def test_an_error_is_no_difference(workers2: WorkerGroup) -> None:
    with pytest.raises(ConformanceError, match="losses: .*broken"):
        check_strategy(PromisesEverything, workers=workers2, only=["losses"])


@pytest.mark.parametrize(
    "declared, message",
    [
        ({"loses": "lossy"}, 'Declares.not_promised: "loses" is no check, did you mean "losses"?'),
        ({"losses": ""}, "Declares.not_promised.losses: '' is not allowed, give the reason in words"),
        ("losses", "Declares.not_promised: 'losses' is not allowed, give a dict of reasons"),
    ],
)
def test_declarations_are_checked_before_any_process_starts(declared: Any, message: str) -> None:
    class Declares(DDPStrategy):
        not_promised = declared

    with pytest.raises(ConfigError) as caught:
        check_strategy(Declares, timeout_s=0)
    assert message in str(caught.value)


class RefusesHalf(DDPStrategy):
    def _check_request(self, model: nn.Module, optim: Any) -> None:
        if self.precision.compute is not torch.float32:
            raise StrategyError("strategy: float32 only")


class HangsOnOneRank(DDPStrategy):
    def _place(self, model: nn.Module) -> None:
        if self.topology.rank == 1:
            dist.barrier()
        super()._place(model)


def test_a_refusal_is_no_failure_and_is_told(workers2: WorkerGroup) -> None:
    report = check_strategy(RefusesHalf, workers=workers2, only=["precision", "overflow", "facts"], skip=["facts"])
    assert {result.name: result.status for result in report.results} == {
        "facts": "skipped", "precision": "refused", "overflow": "refused",
    }  # fmt: skip
    assert "float32 only" in str(report)


def test_a_strategy_that_hangs_fails_in_time_with_the_stacks() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_strategy(HangsOnOneRank, only=["facts"], timeout_s=3)
    assert "within 3 s" in caught.value.report.failed["facts"]
    assert "in _place" in caught.value.report.failed["facts"]


class Breaks(DDPStrategy):
    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        raise AttributeError("no such thing")


@pytest.mark.parametrize("wanted", ["", "1"])
def test_an_error_has_a_line_for_each_check_and_one_traceback_at_most(
    workers2: WorkerGroup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: str
) -> None:
    monkeypatch.setenv("FLEXTRAIN_TRACEBACK", wanted)
    with pytest.raises(ConformanceError) as caught:
        check_strategy(Breaks, workers=workers2, only=["facts", "losses", "unused"])
    monkeypatch.delenv("FLEXTRAIN_TRACEBACK")
    head, *rest = str(caught.value).splitlines()
    assert str(caught.value).count("Traceback (most") == bool(wanted)
    assert all(message.count("Traceback (most") == 1 for message in caught.value.report.failed.values())
    if not wanted:
        told = [re.sub(r"rank \d", "rank 1", line) for line in rest]
        assert told == [
            f"- {name}: rank 1 of 2 failed, AttributeError: no such thing" for name in ("facts", "losses", "unused")
        ]
        assert head.endswith("failed on 2 processes, tracebacks are in this error's report.failed")
        errors._show(sys.__excepthook__, ConformanceError, caught.value, None)
        shown = capsys.readouterr().err.splitlines()
        assert shown[0] == f"flextrain: ConformanceError: {head}"
        assert shown[1:3] == rest[:2]
        assert len(shown) == 4


def test_arguments_are_checked(workers2: WorkerGroup) -> None:
    with pytest.raises(ConfigError, match='"clippings" is no check, did you mean "clipping"'):
        check_strategy("DDPStrategy", only=["clippings"])
    with pytest.raises(ConfigError, match="has 2 processes, world_size is 3"):
        check_strategy("DDPStrategy", world_size=3, workers=workers2)
    with pytest.raises(ConfigError, match='"DDPStrateg" is no known strategy, did you mean "DDPStrategy"'):
        check_strategy("DDPStrateg")
    with pytest.raises(ConfigError, match=r"strategy.bucket_mb: unknown key"):
        check_strategy(dict(type="DDPStrategy", bucket_mb=1))
    with pytest.raises(ConfigError, match="an object serves one model, give DDPStrategy"):
        check_strategy(DDPStrategy())  # type: ignore[arg-type]


def test_every_check_has_its_place() -> None:
    assert sorted(ORDER) == sorted(CHECKS)
    page = (Path(__file__).parents[2] / "docs" / "checking_strategies.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    assert rows == [(name, CHECKS[name][0]) for name in ORDER]
