"""NaN and infinity in training: noticed at the next log line, with the rank, the iteration and what they have reached."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import BaseModel, ConfigError, Hook, OptimWrapper, StrategyError
from flextrain.core.base.errors import NonFiniteError
from flextrain.optim import OptimWrapperDict, build_optim_wrapper
from flextrain.report.recorded_run import recorded_run
from flextrain.report.run_facts import state_of
from flextrain.runner.hooks import logger as line_queue
from flextrain.runner.reporting import LogProcessor, MessageHub
from flextrain.testing import WorkerGroup

from .nonfinite import BadBatch, Poison, saved, train_badly, warnings_in
from .training import SGD, At, Net, Samples, differences, make_runner, validation, whole_state

pytestmark = pytest.mark.usefixtures("quick")

Changes = dict[str, Any]
PLAIN = partial(Net, dropout=0.0)
ADVICE = 'env_cfg=dict(nonfinite="raise") names the module where it begins'


def go(folder: Path | str, *hooks: Hook, iters: int = 20, action: str = "warn", **changes: Any) -> Any:
    """Twenty iterations on 26 samples, seven to an epoch, with a log line after every tenth."""
    options: Changes = dict(
        model=PLAIN,
        train_cfg=dict(by_epoch=False, max_iters=iters),
        custom_hooks=list(hooks),
        env_cfg=dict(nonfinite=action),
        log_level="INFO",
    )
    runner = make_runner(folder, **{**options, **changes})
    if action == "warn":
        return train_badly(runner)
    runner.train()
    return runner


def logger_every(interval: int) -> Changes:
    return dict(default_hooks=dict(checkpoint=None, logger=dict(interval=interval)))


# One process


def test_a_loss_that_is_nan(tmp_path: Path) -> None:
    runner = make_runner(
        tmp_path,
        model=PLAIN,
        train_cfg=dict(by_epoch=False, max_iters=20),
        custom_hooks=[BadBatch(7)],
        log_level="INFO",
    )
    with pytest.raises(NonFiniteError) as caught:
        runner.train()
    first, last = warnings_in(tmp_path)
    assert first == (
        "Iteration 7: loss is nan; likewise in 4 of the last 10 iterations; NaN or infinity in 4 parameters (net.0.bias, "
        f"net.0.weight, net.3.bias and 1 more); {ADVICE}"
    )
    assert str(caught.value) == (
        "Training ended with NaN or infinity in 4 parameters (net.0.weight, net.0.bias, net.3.weight and 1 more) (Iteration 7: "
        "loss is nan); no finite checkpoint was saved"
    )
    assert last.startswith("Failed after epoch 2, iteration 20: NonFiniteError: Training ended with NaN or infinity")
    assert runner.iter == 20
    assert state_of(recorded_run(tmp_path, "run")).startswith(
        "failed: NonFiniteError: Training ended with NaN or infinity in 4"
    )


def test_a_last_update_that_spoils_the_weights(tmp_path: Path) -> None:
    """Its loss was finite, and no later one is read."""
    runner = make_runner(tmp_path, model=PLAIN, train_cfg=dict(by_epoch=False, max_iters=5), custom_hooks=[Poison(5)])
    with pytest.raises(
        NonFiniteError, match=r"Training ended with NaN or infinity in 1 parameter \(net.0.weight\); no finite"
    ):
        runner.train()


@pytest.fixture
def slow_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is written as soon as it is due, as where lines are further apart."""
    monkeypatch.setattr(line_queue, "HOLD_S", 0.0)


def test_it_is_said_at_1_10_and_100_lines(tmp_path: Path, slow_loop: None) -> None:
    go(tmp_path, BadBatch(3), iters=120, **logger_every(1))
    *said, last = warnings_in(tmp_path)
    assert [line.partition(":")[0] for line in said] == ["Iteration 3", "Iteration 12", "Iteration 102"]
    assert "Training ended" in last


@pytest.mark.parametrize("by_epoch", [False, True])
def test_lines_that_are_written_several_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_epoch: bool
) -> None:
    monkeypatch.setattr(line_queue, "HOLD_S", 60.0)

    seen: list[int] = []
    look = At("after_train_iter", lambda runner, *args, **kwargs: seen.append(runner.message_hub.readings), "LOWEST")
    train_cfg = dict(max_epochs=21) if by_epoch else dict(by_epoch=False, max_iters=147)
    go(tmp_path, BadBatch(3), look, train_cfg=train_cfg, **logger_every(1))
    # The first line is written at once; the others when an epoch ends, or when half of what is kept is unread.
    first = 7 if by_epoch else 51
    # At the end of an epoch that comes after the hooks of its last iteration.
    unread = first if by_epoch else first - 1
    assert seen[: unread + 1] == [1] * unread + [2]
    said = warnings_in(tmp_path)
    assert said[0].startswith(f"Iteration 3: loss is nan; likewise in {first - 2} of the last {first - 1} iterations; ")
    assert not any("finite again" in line for line in said)
    assert "Training ended with NaN or infinity in 4 parameters" in said[-1]


@pytest.mark.parametrize("interval, said_at", [(50, 50), (5, 10)])
def test_without_a_logger(tmp_path: Path, interval: int, said_at: int) -> None:
    lines: list[int] = []
    look = At("after_train_iter", lambda *args, **kwargs: lines.append(len(warnings_in(tmp_path))), "LOWEST")
    go(tmp_path, BadBatch(7), look, iters=60,
       default_hooks=dict(checkpoint=None, logger=None, nonfinite=dict(interval=interval)))  # fmt: skip
    assert lines.index(1) + 1 == said_at
    assert warnings_in(tmp_path)[0].startswith("Iteration 7: loss is nan")


class Silent(LogProcessor):
    """Reads nothing, as one of somebody's own may."""

    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: Any) -> tuple[dict[str, Any], str]:
        return {}, "a line"


class Steep(Net):
    """A finite loss with infinite gradients: the root's slope at zero."""

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        result = super().forward(index, x, y, mode)
        if mode == "loss" and self.training:
            result["loss"] = result["loss"] + (self.net[0].bias * 0.0).abs().sum().sqrt()
        return result


def test_infinite_gradients_under_loss_scaling_are_nothing_to_speak_of(tmp_path: Path) -> None:
    scaled = dict(type="AmpOptimWrapper", optimizer=SGD, dtype="float16", clip_grad=dict(max_norm=1.0),
                  loss_scale=dict(init_scale=2.0**40))  # fmt: skip
    runner = go(tmp_path, optim_wrapper=scaled, iters=10)
    norms = runner.message_hub.get_scalar("train/grad_norm").values
    assert not all(map(math.isfinite, norms))
    assert warnings_in(tmp_path) == []


def test_a_nan_loss_under_loss_scaling_is(tmp_path: Path) -> None:
    go(tmp_path, BadBatch(7), optim_wrapper=dict(type="AmpOptimWrapper", optimizer=SGD, dtype="float16"))
    said = warnings_in(tmp_path)
    assert said[0] == f"Iteration 7: loss is nan; all weights are finite; {ADVICE}"
    assert said[1] == "Iteration 20: losses and gradient norms are finite again"
    assert len(said) == 2


class TwoParts(BaseModel):
    """Two optimizers, by names that are no "loss"; or with one, in a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 1), nn.Linear(6, 1)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        logs = {}
        for name in "ab":
            with optim_wrapper[name].optim_context(self):
                error = getattr(self, name)(data["x"]).square().mean()
            optim_wrapper[name].update_params(error)
            logs[f"{name}_{self.word}"] = error
        return logs

    word = "loss"


class Nameless(TwoParts):
    word = "error"


def two(**options: Any) -> OptimWrapperDict:
    return OptimWrapperDict(**{name: build_optim_wrapper(dict(optimizer=SGD, **options)) for name in "ab"})


SCALARS = dict(optimizer=SGD, clip_grad=dict(max_norm=1.0))
FIRST: dict[str, tuple[list[Hook], Changes, str]] = {
    "every line": ([BadBatch(7)], logger_every(1), "Iteration 7: loss is nan"),
    "every third": ([BadBatch(7)], logger_every(3), "Iteration 7: loss is nan"),
    "one line": ([BadBatch(7)], logger_every(50), "Iteration 7: loss is nan"),
    "epochs": ([BadBatch(7)], dict(train_cfg=dict(max_epochs=3), **logger_every(50)), "Iteration 7: loss is nan"),
    "after the last line": ([BadBatch(24)], dict(iters=25), "Iteration 24: loss is nan; likewise in 2 of the last 5 iterations; "),
    "kept no more": ([BadBatch(3)], dict(iters=150, **logger_every(150)), "Iteration 51 or before: loss is nan; likewise in 100 of the last 150"),
    "nothing is read": (
        [BadBatch(7)],
        dict(iters=200, log_processor=Silent(by_epoch=False), **logger_every(4)),
        "Iteration 7: loss is nan; likewise in 2 of the last 8 iterations; ",
    ),
    "spoilt by others": ([Poison(4, "net.3.bias", math.inf)], {}, "Iteration 5: loss is "),
    "norm": ([], dict(iters=1, model=partial(Steep, dropout=0.0), optim_wrapper=SCALARS, **logger_every(1)), "Iteration 1: grad_norm is "),
    "accumulation": ([BadBatch(7)], dict(optim_wrapper=dict(optimizer=SGD, accumulative_counts=2)), "Iteration 7: loss is nan"),
    "two optimizers": ([BadBatch(7)], dict(model=TwoParts, optim_wrapper=two()), "Iteration 7: a_loss is nan, b_loss is nan, loss is nan; likewise in"),
    "norms of two": (
        [BadBatch(7)],
        dict(model=Nameless, optim_wrapper=two(clip_grad=dict(max_norm=1.0))),
        "Iteration 7: a.grad_norm is nan, b.grad_norm is nan; likewise in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_what_is_said_first(tmp_path: Path, slow_loop: None, name: str) -> None:
    hooks, changes, said = FIRST[name]
    go(tmp_path, *hooks, **changes)
    first = warnings_in(tmp_path)[0]
    assert first.startswith(said)
    assert name != "norm" or "loss" not in first


def test_metrics_of_a_validation_are_left_alone(tmp_path: Path) -> None:
    parts = validation()
    go(tmp_path, train_cfg=dict(max_epochs=2), default_hooks=dict(checkpoint=None), **parts)
    assert warnings_in(tmp_path) == []


def test_a_resumed_run_looks_at_its_own_figures(tmp_path: Path) -> None:
    hooks = dict(default_hooks=dict(checkpoint=dict(by_epoch=False, interval=9)))
    go(tmp_path / "a", BadBatch(10), iters=9, **hooks)
    assert warnings_in(tmp_path / "a") == []
    runner = go(tmp_path / "a", BadBatch(12), iters=20, resume=True, **hooks)
    assert runner.train_loop.start_iter == 9
    assert any(line.startswith("Iteration 12: loss is nan") for line in warnings_in(tmp_path / "a"))


# Ignoring, raising


def raised(folder: Path, *hooks: Hook, **changes: Any) -> str:
    with pytest.raises(NonFiniteError) as caught:
        go(folder, *hooks, action="raise", **changes)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_raising_names_a_module_with_bad_weights(tmp_path: Path) -> None:
    assert raised(tmp_path, BadBatch(7)) == (
        "Iteration 7: loss is nan; likewise in 4 of the last 10 iterations; weights are not finite, net.0 (Linear) is "
        "the first module in forward with such weights (net.0.weight, net.0.bias); LoggerHook(interval=1) looks after every "
        "iteration"
    )


class Exploding(Net):
    """The second of three layers divides by nothing, where its weights are good."""

    class Divide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0.0

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.net.insert(2, self.Divide())


@pytest.mark.parametrize("counts", [1, 2])
def test_raising_names_the_module_where_it_begins(tmp_path: Path, counts: int) -> None:
    scaled = dict(
        type="AmpOptimWrapper", optimizer=SGD, dtype="float16", accumulative_counts=counts
    )  # keeps its weights
    text = raised(tmp_path, model=Exploding, optim_wrapper=scaled)
    assert text.startswith("Iteration 1: loss is nan; likewise in 10 of")
    assert text.endswith("; net.2 (Divide) is the first module whose output is not finite, when the batch is run again")


class Counting(Exploding):
    """Its first micro-batch has nothing to count, and a loss of 0/0 that does no harm; only the others are divided."""

    class Divide(nn.Module):
        by = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x / self.by

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        mask = (index >= 4).float()
        self.net[2].by = 1.0 - float(mask.any())  # type: ignore[assignment, union-attr]
        losses = nn.functional.cross_entropy(self.net(x).float(), y, reduction="none")
        return {"loss": (losses * mask).sum() / mask.sum()}

    def loss_weight(self, data_batch: Any) -> Tensor:
        return (data_batch["index"] >= 4).sum()


def test_raising_does_not_name_what_does_not_count(tmp_path: Path) -> None:
    scaled = dict(type="AmpOptimWrapper", optimizer=SGD, dtype="float16", accumulative_counts=2)
    data = dict(
        batch_size=4,
        dataset=Samples(8),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn="default_collate",
    )
    text = raised(tmp_path, model=Counting, optim_wrapper=scaled, train_dataloader=data)
    assert text.endswith("; net.2 (Divide) is the first module whose output is not finite, when the batch is run again")


def test_raising_with_a_train_step_of_ones_own(tmp_path: Path) -> None:
    class Halved(TwoParts):
        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            data = {**data, "x": data["x"] / 0.0}
            return super().train_step(data, optim_wrapper)

    scaled = OptimWrapperDict(
        **{n: build_optim_wrapper(dict(type="AmpOptimWrapper", dtype="float16", optimizer=SGD)) for n in "ab"}
    )
    text = raised(tmp_path, model=Halved, optim_wrapper=scaled)
    assert text.endswith("; a (Linear) is the first module whose output is not finite, when the batch is run again")


def test_raising_about_gradients(tmp_path: Path) -> None:
    samples = Samples(4)
    clipped = dict(optimizer=dict(type="SGD", lr=0.0), clip_grad=dict(max_norm=1.0))
    loader = dict(batch_size=4, dataset=samples, collate_fn="default_collate")

    def mend(runner: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in runner.model.parameters():
            parameter.detach().nan_to_num_(0.1)

    text = raised(tmp_path, At("after_train_iter", mend, "HIGH"), iters=1, model=partial(Steep, dropout=0.0), optim_wrapper=clipped,
                  train_dataloader=loader, **logger_every(1))  # fmt: skip
    assert text.startswith("Iteration 1: grad_norm is ")
    assert text.endswith(
        "when the batch is run again; in backward the gradients of 1 parameter (net.0.bias) are not finite"
    )


# Skipping


@pytest.mark.parametrize(
    "wrapper",
    [
        dict(),
        dict(clip_grad=dict(max_norm=0.5)),
        dict(clip_grad=dict(type="value", clip_value=0.1)),
        dict(accumulative_counts=2),
        dict(type="AmpOptimWrapper", dtype="bfloat16"),
        dict(type="AmpOptimWrapper", dtype="float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_update_changes_nothing(tmp_path: Path, wrapper: Changes, value: float) -> None:
    before: dict[str, Any] = {}
    changed: list[list[str]] = []

    def look(runner: Any, *args: Any, **kwargs: Any) -> None:
        before.update(whole_state(runner))

    def compare(runner: Any, *args: Any, **kwargs: Any) -> None:
        changed.append([key for key in differences(whole_state(runner), before) if key != "wrapper"])

    adam = dict(type="AdamW", lr=0.02, weight_decay=0.1)
    schedule = dict(type="LinearLR", start_factor=0.1, end=10, by_epoch=False)
    ema = dict(type="EMAHook", momentum=0.1)
    hooks = At("before_train_iter", look, "HIGHEST"), BadBatch(7, 8, value=value), ema
    go(tmp_path, *hooks, At("after_train_iter", compare, "LOWEST"), action="skip", param_scheduler=schedule,
       optim_wrapper=dict(optimizer=adam, **wrapper), iters=10)  # fmt: skip
    assert [not keys for keys in changed] == [number in (7, 8) for number in range(1, 11)]
    first = warnings_in(tmp_path)[:1]
    if math.isnan(value):
        assert first[0].startswith("Iteration 7: loss is nan")
        assert first[0].endswith("all weights are finite; such updates are left out")
    elif "clip_grad" in wrapper and "max_norm" in wrapper["clip_grad"]:
        assert first[0].startswith("Iteration 7: grad_norm is nan")
    elif "type" not in wrapper or "bf" in wrapper.get("dtype", ""):
        assert first[0].startswith("Iteration 10: 2 of the last 10 updates had gradients that are not finite; such")
    else:  # usual under loss scaling
        assert first == []


@pytest.mark.parametrize(
    "wrapper",
    [
        dict(),
        dict(type="AmpOptimWrapper", dtype="float16"),
    ],
    ids=str,
)
def test_a_loss_whose_gradients_are_finite_is_skipped_too(tmp_path: Path, wrapper: Changes) -> None:
    class Offset(Net):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)

        def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
            result = super().forward(index, x, y, mode)
            return {"loss": result["loss"] + math.inf} if mode == "loss" else result

    optim_wrapper = dict(optimizer=SGD, **wrapper)
    runner = go(tmp_path, action="skip", model=Offset, iters=3, optim_wrapper=optim_wrapper)
    fresh = make_runner(tmp_path / "b", model=Offset, optim_wrapper=optim_wrapper)
    for name, tensor in fresh.model.state_dict().items():
        assert torch.equal(tensor, runner.model.state_dict()[name])


def test_a_wrapper_that_was_guarded_once(tmp_path: Path) -> None:
    wrapper = build_optim_wrapper(dict(optimizer=SGD))
    make_runner(tmp_path, env_cfg=dict(nonfinite="skip"), optim_wrapper=wrapper)
    assert wrapper.guard is not None
    make_runner(tmp_path, optim_wrapper=wrapper)
    assert wrapper.guard is None


class OwnStep(OptimWrapper):
    def step(self) -> Any:
        return super().step()


def test_skipping_is_refused_where_it_has_no_hold(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'^env_cfg.nonfinite: "skip" has no effect on OwnStep, which defines its own step'
    ):
        make_runner(tmp_path, env_cfg=dict(nonfinite="skip"), optim_wrapper=OwnStep(SGD))
    with pytest.raises(ConfigError, match=r'^env_cfg.nonfinite: "skp" is not allowed, choose "warn", "raise", "skip"'):
        make_runner(tmp_path, env_cfg=dict(nonfinite="skp"))


@pytest.mark.deepspeed
def test_skipping_is_refused_under_deepspeed(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r'^env_cfg.nonfinite: "skip" is not possible with .*stage=0'):
        make_runner(tmp_path, env_cfg=dict(nonfinite="skip"), strategy={**ZERO, "zero_optimization": dict(stage=0)})


# Two processes


DDP, FSDP = dict(type="DDPStrategy"), dict(type="FSDPStrategy", wrap=["Linear"])


def zero(stage: int) -> Changes:
    return dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage))


ZERO = zero(2)
WRAPPERS = {
    "fp32": dict(optimizer=SGD),
    "bf16": dict(type="AmpOptimWrapper", optimizer=SGD, dtype="bfloat16"),
    "fp16": dict(type="AmpOptimWrapper", optimizer=SGD, dtype="float16"),
}


def on_two(folder: str, *hooks: Hook, **changes: Any) -> str:
    loader = dict(batch_size=2, dataset=Samples(28), collate_fn="default_collate")
    checkpoint = dict(by_epoch=False, interval=2, max_keep_ckpts=2)
    options = {"train_dataloader": loader, "default_hooks": dict(checkpoint=checkpoint), **changes}
    try:
        go(folder, *hooks, **options).strategy.leave()
    except NonFiniteError as error:
        return str(error)
    return ""


FULL = pytest.mark.full
CASES = [
    pytest.param(DDP, "fp32", False, id="ddp-fp32"),
    pytest.param(DDP, "fp32", True, id="ddp-fp32-async"),
    pytest.param(DDP, "fp16", False, id="ddp-fp16"),
    pytest.param(FSDP, "bf16", False, id="fsdp-bf16"),
    pytest.param(ZERO, "fp32", False, id="zero2-fp32", marks=[FULL, pytest.mark.deepspeed]),
    pytest.param(ZERO, "bf16", False, id="zero2-bf16", marks=pytest.mark.deepspeed),
    pytest.param(zero(3), "bf16", False, id="zero3-bf16", marks=[FULL, pytest.mark.deepspeed]),
]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy, precision, async_save", CASES)
def test_nan_on_one_of_two_ranks(
    tmp_path: Path, workers2: WorkerGroup, strategy: Changes, precision: str, async_save: bool
) -> None:
    hook = dict(by_epoch=False, interval=2, max_keep_ckpts=2, async_save=async_save)
    workers2.run(
        on_two, str(tmp_path), BadBatch(7, rank=1), strategy=strategy, optim_wrapper=WRAPPERS[precision],
        default_hooks=dict(checkpoint=hook),
    )  # fmt: skip
    said = [line for line in warnings_in(tmp_path) if not line.startswith("Checkpoint")]
    assert said[0].startswith("Iteration 7: loss is nan on rank 1; ")
    # Under a loss scale the update was left out; and so does ZeRO, in float32 and at stage 3.
    if precision == "fp16" or strategy == zero(3) or (strategy == ZERO and precision == "fp32"):
        assert saved(tmp_path) == {"iter_18": False, "iter_20": False}
        assert "all weights are finite" in said[0]
        return
    assert saved(tmp_path) == {"iter_20": True, "iter_4": False, "iter_6": False}
    assert (tmp_path / "latest").read_text() == "iter_6"
    assert "likewise in 4 of the last 10 iterations; NaN or infinity in 4 parameters (net.0.bias, " in said[0]
    assert (
        "and 1 more) (Iteration 7: loss is nan on rank 1); the newest checkpoint with finite weights is iter_6"
        in said[-1]
    )


@pytest.mark.distributed
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "strategy, precision",
    [
        pytest.param(DDP, "fp32", id="ddp"),
        pytest.param(FSDP, "fp32", id="fsdp", marks=FULL),
        pytest.param(ZERO, "bf16", id="zero2", marks=pytest.mark.deepspeed),
        pytest.param(zero(3), "fp32", id="zero3-fp32", marks=[FULL, pytest.mark.deepspeed]),
    ],
)
def test_skipping_on_all_ranks_alike(
    tmp_path: Path, workers2: WorkerGroup, strategy: Changes, precision: str, value: float
) -> None:
    workers2.run(
        on_two, str(tmp_path), BadBatch(7, rank=1, value=value), strategy=strategy, action="skip",
        optim_wrapper=WRAPPERS[precision], model=OffsetByInput,
    )  # fmt: skip
    assert saved(tmp_path) == {"iter_18": False, "iter_20": False}
    assert warnings_in(tmp_path)[0] == (
        f"Iteration 7: loss is {value} on rank 1; all weights are finite; such updates are left out"
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy, precision",
    [(DDP, "fp32"), pytest.param(zero(3), "bf16", marks=[FULL, pytest.mark.deepspeed])],
    ids=["ddp", "zero3"],
)
def test_a_loss_alone_is_skipped_on_all_ranks(
    tmp_path: Path, workers2: WorkerGroup, strategy: Changes, precision: str
) -> None:
    start, end = (
        workers2.run(weights_after, str(tmp_path / str(count)), count, strategy, WRAPPERS[precision])[0]
        for count in (0, 3)
    )
    assert all(torch.equal(start[name], end[name]) for name in start)


class OffsetByInput(Net):
    """A loss that is as infinite as its input, with the same gradients."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        result = super().forward(index, x.nan_to_num(0.0, 0.0, 0.0), y, mode)
        return {"loss": result["loss"] + 0.1 * x.float().sum()} if mode == "loss" else result


def weights_after(folder: str, updates: int, strategy: Changes, wrapper: Changes) -> dict[str, Tensor]:
    """What is left of the weights after updates all of which have an infinite loss on rank 1."""
    loader = dict(batch_size=2, dataset=Samples(28), collate_fn="default_collate")
    bad = BadBatch(*range(1, 10), rank=1, value=math.inf)
    options: Changes = dict(train_dataloader=loader, strategy=strategy, optim_wrapper=wrapper, model=OffsetByInput)
    if updates:
        runner = go(folder, bad, iters=updates, action="skip", **options)
    else:
        runner = make_runner(folder, **options)
        runner.model.train()
    state = runner.strategy.model_state().items()
    found = {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in state}
    runner.strategy.leave()
    return found


class SplitBatches(Hook):
    """Rank 1 gets something else than rank 0, always."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        data_batch["x"] += 10.0 * runner.rank


class Picky(Net):
    """Divides by nothing in its last layer where its input is large."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.last = nn.Identity()
        self.last.register_forward_hook(lambda _, args, out: out)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.last(self.net(x) / (x.mean() < 5.0))
        return {"loss": functional.cross_entropy(logits.float(), y)} if mode == "loss" else logits


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_raising_on_two_ranks(tmp_path: Path, workers2: WorkerGroup, strategy: Changes) -> None:
    found = workers2.run(
        on_two, str(tmp_path), SplitBatches(), strategy=strategy, action="raise", model=Picky,
        optim_wrapper=WRAPPERS["fp16"],
    )  # fmt: skip
    assert found[0] == found[1]
    assert found[0].startswith(
        "Iteration 1: loss is nan on rank 1; likewise in 10 of the last 10 iterations; last (Identity)"
    )
    assert found[0].endswith("is the first module whose output is not finite, when the batch is run again on rank 1")


@pytest.mark.distributed
@pytest.mark.deepspeed
def test_raising_under_deepspeed(tmp_path: Path, workers2: WorkerGroup) -> None:
    found = workers2.run(
        on_two, str(tmp_path), BadBatch(7, rank=1), strategy=ZERO, action="raise", optim_wrapper=WRAPPERS["bf16"]
    )
    assert found[0] == found[1]
    assert "net.0 (Linear) is the first module in forward with such weights (net.0.weight, net.0.bias)" in found[0]


class PartOfLoss(Net):
    """A part that is no part of the total is NaN on rank 1."""

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        result = super().forward(index, x, y, mode)
        return {**result, "watched_loss": x.mean() / 0.0 * 0.0} if mode == "loss" else result

    def parse_losses(self, losses: Any) -> Any:
        return losses["loss"], losses


def has_rank(folder: str) -> None:
    class OnRankOne(PartOfLoss):
        def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
            result = super().forward(index, x, y, mode)
            if torch.distributed.get_rank() == 0 and mode == "loss":
                result["watched_loss"] = result["loss"].detach()
            return result

    on_two(folder, model=partial(OnRankOne, dropout=0.0))


@pytest.mark.distributed
def test_a_figure_that_is_not_averaged(tmp_path: Path, workers2: WorkerGroup) -> None:
    workers2.run(has_rank, str(tmp_path))
    assert warnings_in(tmp_path)[0].startswith(
        "Iteration 1: watched_loss is nan on rank 1; likewise in 10 of the last 10"
    )


# What it costs


def test_nothing_is_kept_that_was_not_asked_for(tmp_path: Path) -> None:
    runner = go(tmp_path, BadBatch(7), action="ignore")
    assert warnings_in(tmp_path) == []
    assert runner.message_hub.beside is None
    assert not any(type(hook).__name__ == "NonFiniteHook" for hook in runner.hooks)


def test_updates_are_counted_once_however_they_are_read() -> None:
    hub = MessageHub()
    history = hub.history("train/loss")
    for value in (1.0, 2.0, 3.0):
        history.append(value)
    assert (history.updates, history.newest(2)) == (3, [3.0, 2.0])
    hub.fetch()
    history.append(4.0)
    assert (history.updates, history.newest(2), history.newest(0), len(history.newest(9))) == (4, [4.0, 3.0], [], 4)
