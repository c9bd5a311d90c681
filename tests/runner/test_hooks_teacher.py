"""TeacherHook: the average's maths, when it moves, half precision, checkpoints, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import ConfigError, DeepSpeedStrategy, StrategyError
from flextrain.core.checkpoint import Checkpoint
from flextrain.runner.hooks import Hook, TeacherHook
from flextrain.strategies.parts import computed_with, take_written
from flextrain.testing import WorkerGroup

from .training import At, Samples, make_runner, refuses, whole

pytestmark = pytest.mark.usefixtures("quick")


class Pair(nn.Module):
    """The student learns what the teacher says of the inputs, and the answers."""

    def __init__(self, frozen: bool = True, width: int = 8) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.teacher = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))
        self.teacher.requires_grad_(not frozen)

    def forward(self, index: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.student(x).float()
        with torch.no_grad():
            wanted = self.teacher(x).float()
        return {"loss": nn.functional.cross_entropy(logits, y) + (logits - wanted).square().mean()}


class Follow(Hook):
    """Both parts after every update, and a teacher of its own, computed in another way."""

    priority = "LOWEST"

    def __init__(self, shares: list[float]) -> None:
        self.shares = shares
        self.expected: Tensor | None = None
        self.moved = 0

    def before_train(self, runner: Any) -> None:
        module = runner.strategy.module
        assert torch.equal(module.teacher[0].weight, module.student[0].weight), "it begins as a copy"
        self.expected = module.student[0].weight.detach().clone()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        module = runner.strategy.module
        if not runner.optim_wrapper.last_step.skipped:
            share = self.shares[min(runner.iter, len(self.shares) - 1)]
            self.expected = (1 - share) * self.expected + share * module.student[0].weight.detach()
            self.moved += 1
        torch.testing.assert_close(module.teacher[0].weight.detach(), self.expected)


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "model": Pair,
        "train_dataloader": dict(batch_size=4, dataset=Samples(32), collate_fn="default_collate"),
        "optim_wrapper": dict(optimizer=dict(type="AdamW", lr=0.02)),
        "train_cfg": dict(max_epochs=1),
        **changes,
    }


def hook(**options: Any) -> dict[str, Any]:
    return dict(type="TeacherHook", student="student", teacher="teacher", **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_moves_once_per_update(tmp_path: Path, accumulate: int) -> None:
    follow = Follow([0.25])
    optim = dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=accumulate)
    make_runner(tmp_path, **settings(custom_hooks=[hook(momentum=0.25), follow], optim_wrapper=optim)).train()
    assert follow.moved == 8 / accumulate


def test_it_follows_weights_that_are_given_other_memory(tmp_path: Path) -> None:
    def give(runner: Any, *_: Any, **__: Any) -> None:
        for parameter in runner.strategy.module.parameters():
            parameter.data = parameter.data * 0.9

    hooks = [At("before_train", give, "HIGH"), hook(momentum=0.1), Follow([0.1])]
    make_runner(tmp_path / "before", **settings(custom_hooks=hooks)).train()


def test_the_share_falls_along_half_a_cosine(tmp_path: Path) -> None:
    shares = [0.1 + 0.4 * (1 + math.cos(math.pi * done / 8)) / 2 for done in range(8)]
    follow = Follow(shares)
    make_runner(tmp_path, **settings(custom_hooks=[hook(momentum=0.5, end_momentum=0.1), follow])).train()
    assert follow.moved == 8


def test_what_is_saved_before_its_turn_has_the_move_too(tmp_path: Path) -> None:
    def save(runner: Any, *_: Any, **__: Any) -> None:
        if runner.iter + 1 == 5:
            runner.save_checkpoint(tmp_path, "saved")

    def trained_with(*hooks: Any, **changes: Any) -> dict[str, Tensor]:
        runner = make_runner(tmp_path / "run", **settings(custom_hooks=[*hooks, hook(momentum=0.1)], **changes))
        runner.train()
        return runner.strategy.module.state_dict()

    expected = trained_with()
    whole = trained_with(At("after_train_iter", save))
    resumed = trained_with(resume=str(tmp_path / "saved"))
    for name, tensor in expected.items():
        assert torch.equal(whole[name], tensor), name
        assert torch.equal(resumed[name], tensor), name


class WithoutItems(Pair):
    """Every second update has no item that counts, and is skipped as after an overflow."""

    def loss_weight(self, data: Any) -> int:
        return int(data["index"][0]) // 4 % 2


def test_a_skipped_update_does_not_move_it(tmp_path: Path) -> None:
    follow = Follow([0.25])
    loader = dict(batch_size=4, dataset=Samples(32), collate_fn="default_collate", shuffle=False)
    changes = settings(model=WithoutItems, custom_hooks=[hook(momentum=0.25), follow], train_dataloader=loader)
    make_runner(tmp_path, **changes).train()
    assert follow.moved == 4


class HalfPair(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, index: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(index, x.to(torch.bfloat16), y)


def test_half_precision_is_averaged_in_float32(tmp_path: Path) -> None:
    """At 0.001 of the distance, bfloat16 would not move; and a resumed run has the same float32 averages."""
    saving = dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)))
    first = TeacherHook("student", "teacher", momentum=0.001)
    runner = make_runner(tmp_path / "first", **settings(model=HalfPair, custom_hooks=[first], **saving))
    runner.train()
    precise = first.state_dict()["precise.teacher.0.weight"]
    assert precise.dtype is torch.float32
    module = runner.strategy.module
    assert torch.equal(module.teacher[0].weight, precise.to(torch.bfloat16))
    assert not torch.equal(precise, precise.to(torch.bfloat16).float()), "more than bfloat16 has"
    again = TeacherHook("student", "teacher", momentum=0.001)
    path = str(tmp_path / "first" / "epoch_1")
    changes = settings(model=HalfPair, custom_hooks=[again], resume=path, train_cfg=dict(max_epochs=2))
    resumed = make_runner(tmp_path / "again", **changes)
    whole = TeacherHook("student", "teacher", momentum=0.001)
    make_runner(
        tmp_path / "whole", **settings(model=HalfPair, custom_hooks=[whole], train_cfg=dict(max_epochs=2))
    ).train()
    resumed.train()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("model", "options", "strategy", "says"),
    [
        (Pair, dict(momentum=0.0), {}, "momentum: 0.0 is not allowed"),
        (Pair, dict(end_momentum=-1.0), {}, "end_momentum: -1.0 is not allowed"),
        (Pair, dict(teacher="student"), {}, 'teacher: "student" and the student "student" are not apart'),
        (Pair, dict(teacher="student.0"), {}, "are not apart, name two submodules"),
        (Pair, dict(teacher="teache"), {}, 'TeacherHook.teacher: "teache" has no .* did you mean "teacher"'),
        (Pair, dict(student="studend"), {}, 'TeacherHook.student: "studend" has no .* did you mean "student"'),
        (partial(Pair, frozen=False), {}, {}, r"teacher.0.bias is trained by the optimizer, freeze it"),
        (partial(Pair, width=7), {}, {}, r"teacher.0.bias has shape \(7,\), the student's \(8,\)"),
        (Pair, dict(teacher="teacher.0"), {}, r"student\.0\.bias has no counterpart"),
        (Pair, {}, dict(exclude_frozen_parameters=True), "strategy.exclude_frozen_parameters: leaves the teacher out"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, model: Any, options: dict[str, Any], strategy: dict[str, Any], says: str
) -> None:
    with refuses(ConfigError, matches=says):
        make_runner(
            tmp_path,
            **settings(
                model=model,
                custom_hooks=[{**hook(), **options}],
                strategy=dict(type="SingleDeviceStrategy", device="cpu", **strategy),
            ),
        ).train()


def test_a_momentum_that_others_call_so_is_warned_of(tmp_path: Path) -> None:
    """With 0.996 the teacher would be the student."""
    runner = make_runner(tmp_path, **settings(custom_hooks=[hook(momentum=0.996)], log_level="WARNING"))
    runner.train()
    log = next(Path(runner.log_dir).glob("*.log")).read_text()
    assert "TeacherHook.momentum: 0.996 is the share of the newest weights" in log
    assert "what others call a momentum of 0.996 is 0.004" in log


def trained(folder: Path, strategy: dict[str, Any], epochs: int = 1, **changes: Any) -> dict[str, Tensor]:
    """The weights that the model computes with at the end, whole; the checkpoint is in the folder."""
    runner = make_runner(
        folder,
        **settings(
            strategy=strategy,
            custom_hooks=[hook(momentum=0.1)],
            train_dataloader=dict(batch_size=2, dataset=Samples(32), collate_fn="default_collate"),
            train_cfg=dict(max_epochs=epochs),
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
            **changes,
        ),
    )
    runner.train()
    found = {name: whole(t).clone().float() for name, t in computed_with(runner.strategy).items()}
    runner.strategy.leave()
    return found


def half(stage: int) -> Any:
    spec = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage), bf16=dict(enabled=True))
    return pytest.param(spec, id=f"zero{stage}-bf16", marks=[pytest.mark.full, pytest.mark.deepspeed])


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", [half(2), half(3)])
def test_engines_in_half_precision(tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    """What a checkpoint has of the teacher is the float32 average, from which a resumed run goes on."""
    whole = workers2.run(trained, tmp_path / "whole", strategy, 2)
    (first, _) = workers2.run(trained, tmp_path / "first", strategy, 1)
    saved = torch.empty(8, 6)
    Checkpoint.open(tmp_path / "first" / "epoch_1").load({"model.teacher.0.weight": saved})
    assert torch.equal(saved.to(torch.bfloat16).float(), first["teacher.0.weight"])
    assert not torch.equal(saved, first["teacher.0.weight"])
    resume = str(tmp_path / "first" / "epoch_1")
    for found, expected in zip(
        workers2.run(partial(trained, resume=resume), tmp_path / "again", strategy, 2), whole, strict=True
    ):
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def refused(folder: Path) -> str:
    plan = {"student.0": "colwise", "student.2": "rowwise"}
    with pytest.raises(StrategyError) as caught:
        trained(folder, dict(type="MeshStrategy", tp=2, plan=plan))
    return str(caught.value)


def both_parts(folder: Path) -> dict[str, Tensor]:
    plan = {
        f"{part}.{layer}": way for part in ("student", "teacher") for layer, way in ((0, "colwise"), (2, "rowwise"))
    }
    return trained(folder, dict(type="MeshStrategy", tp=2, plan=plan))


@pytest.mark.full
@pytest.mark.distributed
def test_tensor_parallelism(tmp_path: Path, workers2: WorkerGroup) -> None:
    for message in workers2.run(refused, tmp_path / "refused"):
        assert "lays teacher.0.bias and the student's out differently" in message
        assert message.endswith("give both the same plan or the same units")
    single = trained(tmp_path / "single", dict(type="SingleDeviceStrategy", device="cpu"))
    for found in workers2.run(both_parts, tmp_path / "both"):
        for name, tensor in single.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


class Counted(nn.Linear):
    """Counts how often its parameters are listed."""

    listed = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self.listed += 1
        return super().named_parameters(*args, **kwargs)


def test_engines_look_for_the_written_parameters_once() -> None:
    pytest.importorskip("deepspeed")
    strategy, module = DeepSpeedStrategy(device="cpu"), Counted(2, 2)
    strategy._module = module
    for _ in range(3):
        take_written(strategy, ["weight"])
    assert module.listed == 1
    module.late = nn.Parameter(torch.zeros(1))
    take_written(strategy, ["weight", "late"])
    assert module.listed == 2
