"""An Engine makes the runner's updates, under every strategy; its calls, checkpoints and sleep."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import BaseModel, CheckpointError, ConfigError, Engine, FlexibleRunner, Hook, OptimWrapper, StrategyError
from flextrain.strategies.parts import kept_tensors
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone, shard
from flextrain.testing.models import Mlp
from flextrain.testing.sessions import whole_model, whole_state

from ..device import DEVICE
from ..mesh.models import MATRICES, Plain
from ..mesh.models import sample as texts

ADAMW = dict(type="AdamW", lr=2e-3, weight_decay=0.05, eps=1e-5)
CLIPPED = dict(optimizer=ADAMW, clip_grad=dict(max_norm=0.5))
WINDOW = 2
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": dict(type="SingleDeviceStrategy"),
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy", wrap="blocks"),
    "tp2": dict(type="MeshStrategy", tp=2, plan=MATRICES),
    **{f"zero{stage}": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)) for stage in (1, 2, 3)},
    "cp2": dict(type="MeshStrategy", cp=2),
    "pp2": dict(type="MeshStrategy", pp=2),
}
TOLERANCE = {name: 2e-4 if name.startswith("zero") else 1e-10 for name in STRATEGIES}
"""DeepSpeed trains in float32, from the same values, and all others in float64."""


class Language(Plain):
    """A language model that gives its logits beside the loss."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        output = {"logits": super().forward(input_ids, None, position_ids)}
        return output if labels is None else {**output, "loss": loss_of(output, {"labels": labels})}  # type: ignore[dict-item]

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return labels_in(batch)


def model(spec: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(5)
    return Language().to(torch.float32 if spec["type"] == "DeepSpeedStrategy" else torch.float64)


def batches(updates: int = 3) -> list[list[dict[str, Tensor]]]:
    """Windows of two micro-batches of four texts, with unequal numbers of labels."""
    found = [texts("plain", 4, seed) for seed in range(WINDOW * updates)]
    for seed, batch in enumerate(found):
        for row in range(4):
            batch["labels"][row, : (3 * seed + 5 * row) % 13] = -100
    return [found[at : at + WINDOW] for at in range(0, len(found), WINDOW)]


class History(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(float(outputs["loss"]))
        self.norms.append(float(outputs["grad_norm"]))


Trace = tuple[list[float], list[float], dict[str, Tensor]]


def runner(
    folder: Path | str, spec: Mapping[str, Any], updates: int = 3, windows: list[Any] | None = None, **changes: Any
) -> tuple[FlexibleRunner, History]:
    history = History()
    flat = [batch for window in windows or batches(updates) for batch in window]
    made = FlexibleRunner(
        model=model(spec),
        work_dir=str(folder),
        strategy={**spec, "device": DEVICE},
        train_dataloader=flat,
        optim_wrapper={**CLIPPED, "accumulative_counts": WINDOW},
        train_cfg=dict(by_epoch=False, max_iters=updates),
        custom_hooks=[history],
        default_hooks=dict(checkpoint=None),
        **changes,
    )
    return made, history


def by_runner(folder: Path | str, spec: Mapping[str, Any], updates: int = 3, **changes: Any) -> Trace:
    made, history = runner(folder, spec, updates, **changes)
    with made:
        made.train()
        return history.losses, history.norms, whole_model(made.strategy)


def loss_of(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a language model, of its own forward's output."""
    return functional.cross_entropy(output["logits"].flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def labels_in(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def own(window: list[Any], engine: Engine) -> list[Any]:
    return [shard(batch, *engine.strategy.topology.shard) for batch in window]


def advance(engine: Engine, windows: list[Any], function: bool = False) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for window in windows:
        options = dict(loss_fn=loss_of, loss_weight=labels_in) if function else {}
        outputs = engine.forward_backward(window=own(window, engine), **options)  # type: ignore[arg-type]
        norm = engine.optim_step()
        assert norm is not None
        assert norm.dim() == 0
        losses.append(float(engine.strategy.topology.data.mean(outputs["loss"].clone())))
        norms.append(float(norm))
    return losses, norms


def by_engine(spec: Mapping[str, Any], function: bool = False) -> Trace:
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        losses, norms = advance(engine, batches(), function)
        return losses, norms, whole_model(engine.strategy)


def compare(found: Trace, expected: Trace, tolerance: float) -> None:
    same_numbers(found[0], expected[0], "the loss", tolerance)
    same_numbers(found[1], expected[1], "the gradient norm", tolerance)
    same_tensors(found[2], expected[2], "weights", tolerance)


@functools.cache
def reference() -> Trace:
    import tempfile

    with alone(), tempfile.TemporaryDirectory() as folder:
        return by_runner(folder, STRATEGIES["single"])


def test_an_update_is_the_runners_bit_for_bit() -> None:
    found = by_engine(STRATEGIES["single"])
    assert found[:2] == reference()[:2]
    assert all(torch.equal(found[2][name], value) for name, value in reference()[2].items())


def test_a_loss_function_trains_as_the_models_own_loss() -> None:
    compare(by_engine(STRATEGIES["single"], function=True), reference(), 1e-10)


def of_two(kind: str, function: bool) -> Any:
    """A strategy on two processes; the daily ones are one of data parallelism and one of a mesh."""
    marks = [] if (kind, function) in {("fsdp", False), ("tp2", True)} else [pytest.mark.full]
    return pytest.param(kind, function, marks=[*marks, *([pytest.mark.deepspeed] if kind.startswith("zero") else [])])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind, function",
    [
        of_two(kind, fn)
        for kind in STRATEGIES
        if kind != "single"
        for fn in (False, True)
        if (kind, fn) != ("cp2", True)
    ],
)
def test_parity(workers2: WorkerGroup, kind: str, function: bool) -> None:
    for found in workers2.run(by_engine, STRATEGIES[kind], function):
        compare(found, reference(), TOLERANCE[kind])


def halved(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return loss_of(output, batch) / 2


def two_calls(spec: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after windows of two, and after two calls whose losses are divided by two."""
    ends = []
    for of_windows in (True, False):
        with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
            for window in batches(2):
                parts = own(window, engine)
                if of_windows:
                    engine.forward_backward(window=parts, loss_fn=loss_of)
                else:
                    for part in parts:
                        engine.forward_backward(part, halved)
                engine.optim_step()
            ends.append(whole_model(engine.strategy))
    return ends[0], ends[1]


def test_gradients_of_calls_add_up() -> None:
    expected, found = two_calls(STRATEGIES["single"])
    same_tensors(found, expected, "weights", 1e-12)


class Kept:
    """A target that keeps all weights."""

    def publish(self, weights: Any) -> dict[str, Tensor]:
        return dict(weights)


def published(spec: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is published after an update and in the middle of the next one, and the weights of that time."""
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        for window in batches(1):
            engine.forward_backward(window=own(window, engine))
            engine.optim_step()
            engine.forward_backward(window=own(window, engine))
        found = engine.publish(Kept())
        return {f"model.{name}": value for name, value in found.items()}, whole_model(engine.strategy)


def test_weights_are_published() -> None:
    same_tensors(*published(STRATEGIES["single"]), "weights", 0)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["fsdp", "tp2", "pp2", pytest.param("zero3", marks=pytest.mark.deepspeed)])
def test_weights_are_published_whole(workers2: WorkerGroup, kind: str) -> None:
    for found, expected in workers2.run(published, STRATEGIES[kind]):
        same_tensors(found, expected, "weights", 0)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_adds_up_calls_as_it_does_windows(workers2: WorkerGroup, stage: int, is_half: bool) -> None:
    half = dict(bf16=dict(enabled=True)) if is_half else {}
    for expected, found in workers2.run(
        two_calls, {**STRATEGIES["zero1"], "zero_optimization": dict(stage=stage), **half}
    ):
        assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def square(output: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    value = output["logits"].square().mean()
    return {"loss": 0.1 * value, "square": value}


def of_rows(batch: Mapping[str, Tensor]) -> int:
    return len(batch["labels"])


def first_log_probs(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return output["logits"].log_softmax(-1)[..., 0]  # type: ignore[no-any-return]


Mixed = tuple[list[float], list[Any], dict[str, Tensor]]


def mixed(spec: Mapping[str, Any], functions: bool = True) -> Mixed:
    """Updates of three calls, with losses and numbers of texts of their own, and outputs before, between and after them."""
    norms, outputs = [], []
    by_label = dict(loss_fn=loss_of, loss_weight=labels_in) if functions else {}
    by_row = dict(loss_fn=square, loss_weight=of_rows) if functions else {}
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:

        def look() -> None:
            found = engine.forward(texts("plain", 4, 9), first_log_probs if functions else None)
            found = found["logits"].log_softmax(-1)[..., 0] if isinstance(found, Mapping) else found
            outputs.append(None if found is None else found.cpu())

        for (first, second), (third, _) in zip(batches(2), batches(4)[2:], strict=True):
            three = {name: values[:3] for name, values in third.items()}
            first, second, three = own([first, second, three], engine)
            look()
            engine.forward_backward(first, **by_label)  # type: ignore[arg-type]
            look()
            engine.forward_backward(window=[second, first])
            engine.forward_backward(three, **by_row)  # type: ignore[arg-type]
            look()
            norms.append(float(engine.optim_step(lr=1e-3)))  # type: ignore[arg-type]
        look()
        return norms, outputs, whole_model(engine.strategy)


@functools.cache
def mixed_alone(functions: bool) -> Mixed:
    with alone():
        return mixed(STRATEGIES["single"], functions)


def test_outputs_change_with_updates_only() -> None:
    _, outputs, _ = mixed_alone(True)
    changed = [not torch.equal(one, other) for one, other in itertools.pairwise(outputs)]
    assert changed == [False, False, True] * 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[*([pytest.mark.full] * (kind != "fsdp")), *([pytest.mark.deepspeed] * kind.startswith("zero"))]
        )
        for kind in STRATEGIES
        if kind != "single"
    ],
)
def test_calls_of_several_losses(workers2: WorkerGroup, kind: str) -> None:
    functions = kind != "cp2"
    norms, outputs, weights = mixed_alone(functions)
    found = workers2.run(mixed, STRATEGIES[kind], functions)
    assert any(each[1][0] is not None for each in found)
    for own_norms, own_outputs, own_weights in found:
        same_numbers(own_norms, norms, "the gradient norm", TOLERANCE[kind])
        same_tensors(own_weights, weights, "weights", TOLERANCE[kind])
        for one, expected in zip(own_outputs, outputs, strict=True):
            assert one is None or torch.allclose(
                one.double(), expected, rtol=10 * TOLERANCE[kind], atol=TOLERANCE[kind]
            )


class Branches(nn.Module):
    """Each row goes through one of two layers; a layer without rows is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        x = self.first(x)
        return torch.cat([layer(x[which == k]) for k, layer in enumerate(self.layers) if (which == k).any()])


def by_branches(spec: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights after updates of calls in which all rows take one layer, each half of them its own, and all the other one."""
    torch.manual_seed(3)
    made = Branches().float() if spec["type"] == "DeepSpeedStrategy" else Branches().double()
    with Engine(made, {**spec, "device": DEVICE}, dict(optimizer=ADAMW)) as engine:
        for update in range(2):
            for which in ([0] * 8, [0] * 4 + [1] * 4, [1] * 8, [update] * 8):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(sum(which)))
                batch = {"x": x.to(made.first.weight.dtype), "which": torch.tensor(which)}
                engine.forward_backward(*own([batch], engine), lambda output, batch: output.square().mean())
            engine.optim_step()
        return whole_model(engine.strategy)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.deepspeed] * k.startswith("zero")) for k in ("ddp", "fsdp", "zero1", "zero2")],
)
def test_calls_that_use_different_parameters(workers2: WorkerGroup, kind: str) -> None:
    options = {"ddp": dict(find_unused_parameters=True), "fsdp": dict(wrap=["Linear"])}.get(kind, {})
    for found in workers2.run(by_branches, {**STRATEGIES[kind], **options}):
        same_tensors(found, by_branches(STRATEGIES["single"]), "weights", TOLERANCE[kind])


# Outputs


class Dropped(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.frozen = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, mode: str = "tensor") -> Any:
        y = self.frozen(self.net(x))
        return y if mode == "tensor" else {"loss": y.square().mean()}


SGD = dict(optimizer=dict(type="SGD", lr=0.1))


def test_forward_is_an_evaluation_and_leaves_modes_as_they_are() -> None:
    with Engine(Dropped(), None, SGD) as engine:
        module: Any = engine.strategy.module
        module.frozen.eval()
        x = torch.randn(8, 6)
        first, second = (engine.forward({"x": x, "beside": x}) for _ in range(2))
        assert torch.equal(first, second)
        assert not first.requires_grad
        assert (module.training, module.net[1].training, module.frozen.training) == (True, True, False)
        assert torch.equal(
            engine.forward({"x": x, "beside": x}, lambda output, batch: output + batch["beside"][:, :4]),
            first + x[:, :4],
        )
        assert torch.equal(module.frozen.running_mean, torch.zeros(4))


# The order of calls


class OwnStep(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return {}


class OwnUpdate(OptimWrapper):
    def update_params(self, loss: Tensor) -> None:
        super().update_params(loss)


def test_what_an_engine_cannot_honour() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: Engine(Mlp(), None, {**SGD, "accumulative_counts": 2}),
            "accumulative_counts: 2 has no meaning in an Engine",
        ),
        (lambda: Engine(Mlp(), None, dict(a=SGD, b=SGD)), "optim_wrapper: has 2 optimizers, an Engine takes one"),
        (lambda: Engine(OwnStep(), None, SGD), "OwnStep defines its own train_step"),
        (lambda: Engine(Mlp(), None, dict(type=OwnUpdate, **SGD)), "OwnUpdate defines its own update_params"),
        (lambda: Engine(Mlp(), "fsdpp", SGD), "fsdpp"),
        (lambda: Engine(Mlp()).forward_backward(Mlp.sample(2, 0)), "optim_wrapper: missing"),
    ]
    for make, message in cases:
        with pytest.raises(ConfigError, match=message):
            make()


def test_calls_in_the_wrong_order() -> None:
    batch = Mlp.sample(4, 0)
    with Engine(Mlp(), None, SGD) as engine:
        for options in ({}, dict(batch=batch, window=[batch]), dict(window=[]), dict(window=batch)):
            with pytest.raises(ConfigError, match=r"give a batch, or window="):
                engine.forward_backward(**options)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="loss_weight: has no meaning without loss_fn"):
            engine.forward_backward(batch, loss_weight=len)
        engine.forward_backward(batch)
        with pytest.raises(ConfigError, match=r"Engine.optim_step.lr: -0.1 is not allowed"):
            engine.optim_step(lr=-0.1)
        engine.abort_update()
        with pytest.raises(RuntimeError, match="in a loss"):
            engine.forward_backward(batch, fails)
        with pytest.raises(StrategyError, match=r"failed in the middle of an update; call abort_update\(\)"):
            engine.optim_step()
        engine.abort_update()
        with pytest.raises(StrategyError, match=r"optim_step\(\): there are no gradients"):
            engine.optim_step()
        with pytest.raises(StrategyError, match=r"wake\(\): this engine is awake"):
            engine.wake()
        engine.forward_backward(batch)
        for call in (engine.sleep, lambda: engine.save("nowhere"), lambda: engine.load("nowhere")):
            with pytest.raises(StrategyError, match="there are gradients"):
                call()  # type: ignore[operator]
        engine.optim_step()
        with pytest.raises(StrategyError, match="there are no gradients"):
            engine.optim_step()
        engine.sleep()
        for call in (engine.sleep, engine.optim_step, lambda: engine.forward(batch), lambda: engine.save("nowhere")):
            with pytest.raises(StrategyError, match=r"asleep, call wake\(\) first"):
                call()
        engine.wake()
        engine.forward_backward(batch)
    engine.close()
    for call in (engine.optim_step, lambda: engine.forward(batch), engine.wake, engine.sleep):
        with pytest.raises(StrategyError, match="this engine is closed"):
            call()
    assert engine.iter == 1


@pytest.mark.parametrize(
    "given, said",
    [
        (lambda output: None, "gave NoneType, return the loss"),
        (lambda output: 0.5, "gave float, return the loss"),
        (lambda output: {}, "gave a dict with nothing, return the loss"),
        (lambda output: {"policy_loss": output.mean()}, "gave a dict with policy_loss, return the loss"),
        (lambda output: output, r"loss is of shape \(4, 5\), return tensors without dimensions"),
        (lambda output: {"loss": output.mean(), "kl": 0.1}, "kl is float, return tensors without dimensions"),
        (lambda output: {"loss": output.mean(), "each": output[0]}, r"each is of shape \(5,\), return tensors"),
    ],
)
def test_what_a_loss_function_may_not_give(given: Callable[[Tensor], Any], said: str) -> None:
    with Engine(Mlp(), None, SGD) as engine, pytest.raises(ConfigError, match=rf"^loss_fn: {said}"):
        engine.forward_backward(Mlp.sample(4, 0), lambda output, batch: given(output))


def test_what_a_weight_may_not_be() -> None:
    with Engine(Mlp(), None, SGD) as engine, pytest.raises(ConfigError, match=r"^loss_weight: gave -1.0, give"):
        engine.forward_backward(Mlp.sample(4, 0), lambda output, batch: output.mean(), loss_weight=lambda batch: -1)


def test_a_failed_call_leaves_no_gradient_behind() -> None:
    batch = Mlp.sample(4, 0)
    with Engine(Mlp(), None, SGD) as engine:
        engine.forward_backward(batch)
        with pytest.raises(RuntimeError, match="in a loss"):
            engine.forward_backward(batch, fails)
        engine.abort_update()
        assert all(parameter.grad is None for parameter in engine.model.parameters())


def fails(output: Any, batch: Any) -> Any:
    raise RuntimeError("in a loss")


def aborted(spec: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """What ``abort_update`` says in the middle of an update, and the weights after the next one, made by the same calls without it."""
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        first, second = batches(2)
        engine.forward_backward(own(second, engine)[0])
        with pytest.raises(RuntimeError, match="in a loss"):
            engine.forward_backward(own(second, engine)[1], fails)
        try:
            engine.abort_update()
        except StrategyError as error:
            return str(error), {}
        advance(engine, [first])
        return "", whole_model(engine.strategy)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.deepspeed] * k.startswith("zero")) for k in ("ddp", "fsdp", "tp2", "zero2")],
)
def test_a_failed_call_on_two_processes(workers2: WorkerGroup, kind: str) -> None:
    """Either its gradients are dropped, or the engine says that they cannot be."""
    _, expected = aborted(STRATEGIES["single"])
    for said, found in workers2.run(aborted, STRATEGIES[kind]):
        if kind in ("fsdp", "zero2"):
            assert "still has its gradients; make another runner" in said
        else:
            assert said == ""
            same_tensors(found, expected, "weights", TOLERANCE[kind])


def test_an_overflow_in_one_call_skips_the_update() -> None:
    half = dict(
        type="AmpOptimWrapper", dtype="float16", loss_scale=dict(init_scale=256.0), clip_grad=dict(max_norm=1.0), **SGD
    )
    batch = Mlp.sample(4, 0)
    with Engine(Mlp(), None, half) as engine:
        wrapper: Any = engine.optim_wrapper
        before = whole_model(engine.strategy)
        engine.forward_backward(batch)
        engine.forward_backward(batch, lambda output, batch: output.float().mean() * 1e38 * 1e3)
        engine.optim_step()
        assert (wrapper.last_step.skipped, wrapper.loss_scaler.get_scale(), engine.iter) == (True, 128.0, 1)
        assert all(torch.equal(value, before[name]) for name, value in whole_model(engine.strategy).items())
        engine.forward_backward(batch)
        norm = engine.optim_step()
        assert norm is not None
        assert norm.isfinite()
        assert not wrapper.last_step.skipped


def test_learning_rates_keep_their_ratios() -> None:
    slower = dict(paramwise_cfg=dict(custom_keys={"layers.0": dict(lr_mult=0.1)}))
    with Engine(Mlp(), None, {**SGD, **slower}) as engine:
        assert engine.optim_wrapper is not None
        before = [group["lr"] for group in engine.optim_wrapper.param_groups]
        assert len(set(before)) == 2
        engine.forward_backward(Mlp.sample(4, 0))
        assert engine.optim_step(lr=0.4) is None, "nothing is clipped"
        assert [group["lr"] for group in engine.optim_wrapper.param_groups] == pytest.approx([4 * lr for lr in before])


def test_an_update_without_items_is_skipped() -> None:
    batch = Mlp.sample(4, 0)
    batch["y"][:] = -100
    with Engine(Mlp(), None, dict(optimizer=ADAMW)) as engine:
        before = whole_model(engine.strategy)
        assert float(engine.forward_backward(batch)["loss"]) == 0
        assert engine.optim_step() is None
        assert engine.optim_wrapper is not None
        assert engine.optim_wrapper.last_step.skipped
        assert all(torch.equal(value, before[name]) for name, value in whole_model(engine.strategy).items())


# Checkpoints


def by_engine_to(folder: str, spec: Mapping[str, Any]) -> None:
    """Two updates and a save."""
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        advance(engine, batches()[:2])
        engine.save(f"{folder}/iter_2")


def by_engine_from(path: str, spec: Mapping[str, Any]) -> Trace:
    """The third update, from a checkpoint."""
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        engine.load(path)
        assert engine.iter == 2
        losses, norms = advance(engine, batches()[2:])
        return losses, norms, whole_model(engine.strategy)


def last(trace: Trace) -> Trace:
    return trace[0][2:], trace[1][2:], trace[2]


def resumed_by_runner(folder: str, spec: Mapping[str, Any]) -> Trace:
    """The third update by a runner, from an engine's checkpoint: the data of a run begin anew, and are those of that update."""
    start = dict(path=f"{folder}/iter_2", data=False, random=False)
    return by_runner(f"{folder}/resumed", spec, windows=batches()[2:], resume=start)


def test_an_engine_and_a_runner_go_on_from_each_other(tmp_path: Path) -> None:
    single = STRATEGIES["single"]
    by_engine_to(str(tmp_path), single)
    compare(resumed_by_runner(str(tmp_path), single), last(reference()), 1e-12)
    made, _ = runner(tmp_path / "run", single, updates=2)
    with made:
        made.train()
        made.save_checkpoint(tmp_path / "run", "iter_2")
    compare(by_engine_from(str(tmp_path / "run" / "iter_2"), single), last(reference()), 1e-12)


def test_what_a_runner_needs_of_an_engines_checkpoint(tmp_path: Path) -> None:
    by_engine_to(str(tmp_path), STRATEGIES["single"])
    with pytest.raises(CheckpointError, match=r"it has no data; resume=dict\(data=False\) leaves it out"):
        by_runner(tmp_path / "resumed", STRATEGIES["single"], resume=str(tmp_path / "iter_2"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "writer, reader",
    [
        pytest.param(one, other, marks=[] if one == "fsdp" else [pytest.mark.full, *([pytest.mark.deepspeed] if "zero" in one + other else [])])
        for one, other in (("fsdp", "single"), ("single", "tp2"), ("single", "zero1"), ("zero1", "zero3"), ("zero2", "fsdp"))
    ],
)  # fmt: skip
def test_checkpoints_between_strategies(tmp_path: Path, workers2: WorkerGroup, writer: str, reader: str) -> None:
    """An engine's checkpoint is resumed by a runner, and loaded by an engine, under another strategy."""

    def run(function: Any, *arguments: Any, kind: str) -> list[Any]:
        return (
            [function(*arguments, STRATEGIES[kind])]
            if kind == "single"
            else workers2.run(function, *arguments, STRATEGIES[kind])
        )

    run(by_engine_to, str(tmp_path), kind=writer)
    found = run(by_engine_from, str(tmp_path / "iter_2"), kind=reader)
    if reader == "single":
        found += run(resumed_by_runner, str(tmp_path), kind=reader)
    for each in found:
        compare(each, last(reference()), max(TOLERANCE[writer], TOLERANCE[reader]))


def test_weights_alone(tmp_path: Path) -> None:
    with Engine(Mlp(), None, SGD) as engine:
        expected = whole_model(engine.strategy)
        engine.forward_backward(Mlp.sample(4, 0))
        engine.optim_step()
        engine.save(tmp_path / "a")
        later = whole_model(engine.strategy)
    with Engine(Mlp()) as reader:  # without an optimizer
        reader.load(tmp_path / "a")
        same_tensors(whole_model(reader.strategy), later, "weights")
    torch.save({name.removeprefix("model."): value for name, value in expected.items()}, tmp_path / "weights.pth")
    with Engine(Mlp(), None, SGD) as engine:
        engine.load(tmp_path / "weights.pth", optimizer=False)
        same_tensors(whole_model(engine.strategy), expected, "weights")
        assert engine.iter == 0


# Sleep


def asleep(spec: Mapping[str, Any]) -> tuple[int, int, int, float]:
    """Bytes that were freed, those that are left, how many tensors of the state differ after waking, and the next update's norm."""
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        advance(engine, batches()[:1])
        before, freed, left = whole_state(engine.strategy), [], 0
        for _ in range(2):
            freed.append(engine.sleep())
            left += sum(
                t.untyped_storage().nbytes() for t in engine.strategy.module.parameters() if type(t) is nn.Parameter
            )
            engine.wake()
        assert freed[0] == freed[1]
        after = whole_state(engine.strategy)
        wrong = sum(not same(after[key], value) for key, value in before.items())
        _, norms = advance(engine, batches()[1:2])
        engine.sleep()  # and closes in its sleep
        return freed[0], left, wrong, norms[0]


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, Tensor) else bool(one == other)


def test_sleep_frees_memory_and_waking_brings_back_the_bits() -> None:
    freed, left, wrong, norm = asleep(STRATEGIES["single"])
    size = sum(parameter.nbytes for parameter in model(STRATEGIES["single"]).parameters())
    assert freed > 3 * size, "weights, and two moments of each"
    assert (left, wrong, norm) == (0, 0, reference()[1][1])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[*([pytest.mark.deepspeed] * kind.startswith("zero")), *([pytest.mark.full] * (kind != "fsdp"))]
        )
        for kind in STRATEGIES
        if kind != "single"
    ],
)
def test_sleep_on_two_processes(workers2: WorkerGroup, kind: str) -> None:
    size = sum(parameter.nbytes for parameter in model(STRATEGIES[kind]).parameters())
    for freed, _, wrong, norm in workers2.run(asleep, STRATEGIES[kind]):
        assert norm == pytest.approx(reference()[1][1], rel=TOLERANCE[kind])
        assert freed > size, "one and a half of the whole where weights and moments are sharded over two"
        assert wrong == 0


def test_what_sleeps_is_all_that_is_kept() -> None:
    with Engine(Mlp(), None, dict(optimizer=ADAMW)) as engine:
        engine.forward_backward(Mlp.sample(4, 0))
        engine.optim_step()
        kept = {tensor.data_ptr() for tensor in kept_tensors(engine.strategy)}
        state = {value.data_ptr() for value in whole_live_state(engine).values()}
        assert state <= kept


def whole_live_state(engine: Engine) -> dict[str, Tensor]:
    return {key: value for key, value in engine.strategy.state().items() if isinstance(value, Tensor)}


@pytest.mark.full
@pytest.mark.distributed
def test_a_function_does_not_see_parts_of_a_batch(workers2: WorkerGroup) -> None:
    for message in workers2.run(refused):
        assert "loss_fn: MeshStrategy gives each process a part of the batch" in message


def refused() -> str:
    with (
        Engine(model(STRATEGIES["cp2"]), {**STRATEGIES["cp2"], "device": DEVICE}, CLIPPED) as engine,
        pytest.raises(StrategyError) as error,
    ):
        engine.forward_backward(texts("plain", 4, 0), loss_of)
    return str(error.value)


# Several trainings of one model


def of_training(engine: Engine, calls: list[Any], lr: float) -> Callable[[int], None]:
    """What a training does in turn ``n``: a forward and backward, and at every second one an update."""

    def turn(n: int) -> None:
        engine.forward_backward(*own([calls[n]], engine), loss_of, loss_weight=labels_in)
        if n % 2:
            engine.optim_step(lr=lr)

    return turn


TRAININGS = [([batch for window in batches(6)[at::2] for batch in window], lr) for at, lr in ((0, 2e-3), (1, 7e-4))]
TURNS = (0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0)
"""Who has the turn: each is away in the middle of an update, and between updates."""


def alone_at(spec: Mapping[str, Any], which: int) -> tuple[dict[str, Any], int]:
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        turn = of_training(engine, *TRAININGS[which])
        for n in range(6):
            turn(n)
        return whole_state(engine.strategy), engine.iter


def side_by_side(spec: Mapping[str, Any]) -> list[tuple[dict[str, Any], int]]:
    """The state of two trainings at their end, which took turns on one engine."""
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        first = engine.switch()
        trainings, counts = [first, first], [0, 0]
        turns = [of_training(engine, *each) for each in TRAININGS]
        for which in TURNS:
            engine.switch(trainings[which])
            turns[which](counts[which])
            counts[which] += 1
            trainings[which] = engine.switch()
        ends = []
        for training in trainings:
            engine.switch(training)
            ends.append((whole_state(engine.strategy), engine.iter))
        engine.switch(first)
        assert engine.iter == 0
        assert not [key for key in whole_state(engine.strategy) if key.startswith("optim.state.")]
        return ends


def test_trainings_side_by_side_are_those_alone() -> None:
    for which, (found, iterations) in enumerate(side_by_side(STRATEGIES["single"])):
        expected, count = alone_at(STRATEGIES["single"], which)
        assert iterations == count == 3
        assert found.keys() == expected.keys()
        same_tensors(found, expected, "state", 0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.full] * (k != "fsdp")) for k in ("ddp", "fsdp", "tp2", "pp2")]
)
def test_trainings_side_by_side_on_two_processes(workers2: WorkerGroup, kind: str) -> None:
    for found in workers2.run(side_by_side, STRATEGIES[kind]):
        for which, (state, iterations) in enumerate(found):
            assert iterations == 3
            same_tensors(state, alone_at(STRATEGIES["single"], which)[0], "state", TOLERANCE[kind])


def test_a_new_training_begins_with_the_values_of_now() -> None:
    batch = Mlp.sample(4, 0)
    with Engine(Mlp(), None, dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9))) as engine:
        engine.forward_backward(batch)
        engine.optim_step(lr=0.2)
        engine.forward_backward(batch)
        values = whole_model(engine.strategy)
        before = engine.switch()
        same_tensors(whole_model(engine.strategy), values, "weights", 0)
        assert (engine.iter, before.iter) == (0, 1)
        assert not [key for key in whole_live_state(engine) if key.startswith("optim.state.")]
        with pytest.raises(StrategyError, match="there are no gradients"):
            engine.optim_step()
        assert engine.optim_wrapper is not None
        assert engine.optim_wrapper.param_groups[0]["lr"] == 0.2
        assert engine.switch(before).iter == 0
        engine.optim_step()
        assert engine.iter == 2


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))  # type: ignore[no-any-return]


def test_running_statistics_belong_to_a_training() -> None:
    made = Normed()
    with Engine(made, None, SGD) as engine:
        first = engine.switch()
        engine.forward_backward({"x": torch.randn(8, 6)}, lambda output, batch: output.square().mean())
        assert made.norm.running_mean.any()
        engine.switch(first)
        assert not made.norm.running_mean.any()


def test_what_cannot_be_switched() -> None:
    batch = Mlp.sample(4, 0)
    with Engine(Mlp(), None, SGD) as engine, Engine(Mlp(), None, SGD) as other, Engine(Mlp()) as reference:
        with pytest.raises(ConfigError, match=r"training: is of another engine"):
            engine.switch(other.switch())
        with pytest.raises(ConfigError, match="optim_wrapper: missing"):
            reference.switch()
        with pytest.raises(RuntimeError, match="in a loss"):
            engine.forward_backward(batch, fails)
        with pytest.raises(StrategyError, match="failed in the middle of an update"):
            engine.switch()


def test_what_is_frozen_now_belongs_to_a_training_too() -> None:
    made = Normed()
    with Engine(made, None, SGD) as engine:
        made.out.requires_grad_(False)
        first = engine.switch()
        made.out.requires_grad_(True)
        before = made.out.weight.clone()
        engine.forward_backward({"x": torch.randn(8, 6)}, lambda output, batch: output.square().mean())
        engine.optim_step()
        made.out.requires_grad_(False)
        assert not torch.equal(made.out.weight, before)
        engine.switch(first)
        assert torch.equal(made.out.weight, before)


class Counted(Normed):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


def test_extra_state_is_not_shared_between_trainings() -> None:
    with Engine(Counted(), None, SGD) as engine:
        with pytest.raises(StrategyError, match=r"Counted .* has extra state"):
            engine.switch()
        engine.forward({"x": torch.randn(8, 6)})


def test_an_engine_that_failed_between_trainings_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(Mlp(), None, SGD) as engine:
        first = engine.switch()
        monkeypatch.setattr(engine.strategy, "load", lambda state: fails(state, None))
        with pytest.raises(RuntimeError, match="in a loss"):
            engine.switch(first)
        for call in (engine.abort_update, engine.switch, functools.partial(engine.forward_backward, Mlp.sample(4, 0))):
            with pytest.raises(StrategyError, match=r"switch\(\) failed between two trainings"):
                call()


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.distributed
def test_deepspeed_keeps_its_training(workers2: WorkerGroup) -> None:
    for message in workers2.run(switched_by_deepspeed):
        assert "DeepSpeed's engine keeps masters and gradients in memory of its own" in message


def switched_by_deepspeed() -> str:
    spec = STRATEGIES["zero2"]
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine, pytest.raises(StrategyError) as error:
        engine.switch()
    return str(error.value)


# Several engines


def beside_another(spec: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights after two updates, of an engine with others beside it, one of which is closed between the updates."""
    with Engine(model(spec), {**spec, "device": DEVICE}, CLIPPED) as engine:
        with Engine(model(other), {**other, "device": DEVICE}) as reference:
            advance(engine, batches()[:1])
            one, two = (each.forward(texts("plain", 4, 9), first_log_probs) for each in (reference, engine))
            assert not torch.allclose(one.double(), two.double())
        advance(engine, batches()[1:2])
        with Engine(model(other), {**other, "device": DEVICE}, CLIPPED) as second:
            advance(second, batches()[:1])
        advance(engine, batches()[2:])
        return whole_model(engine.strategy)


def test_engines_beside_each_other() -> None:
    same_tensors(beside_another(STRATEGIES["single"], STRATEGIES["single"]), reference()[2], "weights")


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind, other",
    [
        ("fsdp", "fsdp"),
        ("fsdp", "ddp"),
        ("tp2", "fsdp"),
        *(
            pytest.param(one, two, marks=pytest.mark.deepspeed)
            for one, two in (("zero2", "zero2"), ("zero3", "zero3"), ("zero3", "ddp"), ("fsdp", "zero3"))
        ),
    ],
)
def test_engines_beside_each_other_on_two_processes(workers2: WorkerGroup, kind: str, other: str) -> None:
    for found in workers2.run(beside_another, STRATEGIES[kind], STRATEGIES[other]):
        same_tensors(found, reference()[2], "weights", TOLERANCE[kind])
