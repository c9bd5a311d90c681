"""EMAHook: the averages' maths, which weights validation sees, and what a checkpoint holds."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flextrain import CheckpointError, ConfigError, DDPStrategy, FlexibleRunner, Hook
from flextrain.core.checkpoint import Checkpoint
from flextrain.runner import ValLoop
from flextrain.runner.hooks import EMAHook, ema
from flextrain.runner.hooks.ema import WeightAverage
from flextrain.testing import WorkerGroup

from .training import At, differences, log_lines, make_runner, refuses


class Stage:
    """A hook with a model whose weights are set by hand."""

    def __init__(
        self, runner: Any, module: nn.Module | None = None, excludes_frozen: bool = False, **options: Any
    ) -> None:
        self.module = module or nn.Linear(1, 1, bias=False)
        runner.strategy = SimpleNamespace(
            module=self.module,
            model_state=self._state,
            parameters=self.module.named_parameters,
            config=SimpleNamespace(exclude_frozen_parameters=excludes_frozen),
        )
        self.runner, self.hook = runner, EMAHook(**options)
        self.hook.before_run(runner)
        self.hook.before_train(runner)

    def _state(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.module.state_dict(keep_vars=True).items()}

    @property
    def weight(self) -> float:
        return float(next(self.module.parameters()).detach().flatten()[0])

    def updates(self, values: list[float], skipped: bool = False) -> Iterator[float]:
        """The average after each update that makes the weights ``value``."""
        self.runner.optim_wrapper.has_updated = not skipped
        for value in values:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.fill_(value)
            self.hook.after_train_iter(self.runner, 0)
            self.runner.iter += 1
            yield self.seen()

    def seen(self) -> float:
        """The weight that validation would see."""
        self.hook.before_val_epoch(self.runner)
        seen = self.weight
        self.hook.after_val_epoch(self.runner)
        return seen


VALUES = [1.0, 3.0, -2.0, 5.0, 0.5]


def reference(weights: list[float | None]) -> list[float]:
    """Averages where the i-th update counts by its weight; None: not at all."""
    average, result = 0.0, []
    for value, weight in zip(VALUES, weights, strict=True):
        average += (value - average) * (weight or 0.0)
        result.append(average)
    return result


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"momentum": 0.25}, [1.0, 0.25, 0.25, 0.25, 0.25]),
        ({}, [1.0, 2e-4, 2e-4, 2e-4, 2e-4]),
        ({"momentum": 0.25, "interval": 2}, [1.0, None, 0.25, None, 0.25]),
        ({"ema_type": "StochasticWeightAverage"}, [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
        ({"ema_type": "StochasticWeightAverage", "interval": 2}, [1.0, None, 1 / 2, None, 1 / 3]),
        ({"ema_type": "MomentumAnnealingEMA"}, [1.0, 100 / 101, 100 / 102, 100 / 103, 100 / 104]),
        ({"ema_type": "MomentumAnnealingEMA", "gamma": 1, "momentum": 0.3}, [1.0, 1 / 2, 1 / 3, 0.3, 0.3]),
        ({"ema_type": lambda updates: 1 / (2 + updates)}, [1.0, 1 / 3, 1 / 4, 1 / 5, 1 / 6]),
    ],
)
def test_averages(runner: Any, options: dict[str, Any], weights: list[float | None]) -> None:
    assert list(Stage(runner, **options).updates(VALUES)) == pytest.approx(reference(weights), rel=1e-5)


def test_another_hook_may_set_the_momentum(runner: Any) -> None:
    stage = Stage(runner, momentum=0.5)
    assert list(stage.updates([0.0, 8.0])) == [0.0, 4.0]
    stage.hook.momentum = 0.25
    assert list(stage.updates([8.0])) == [5.0]
    with refuses(ConfigError, begins="EMAHook.momentum: 2 is not allowed"):
        stage.hook.momentum = 2
    assert stage.hook.momentum == 0.25


def test_a_skipped_update_does_not_count(runner: Any) -> None:
    stage = Stage(runner, ema_type="StochasticWeightAverage")
    list(stage.updates([1.0, 3.0]))
    list(stage.updates([100.0, math.nan], skipped=True))
    assert list(stage.updates([5.0])) == [3.0]


@pytest.mark.parametrize("options", [{"begin_iter": 3}, {"begin_epoch": 2}])
def test_the_average_begins_where_it_is_told(runner: Any, options: dict[str, int]) -> None:
    runner.max_epochs = 3
    stage = Stage(runner, momentum=0.5, **options)
    assert list(stage.updates([1.0, 2.0])) == [1.0, 2.0], "until then validation sees the model's own weights"
    runner.epoch = 1
    assert list(stage.updates([4.0, 8.0])) == [4.0, 6.0]


def test_half_precision_weights_have_float32_averages(runner: Any) -> None:
    """In bfloat16 an average near 1 cannot take a step of 0.001 * 1: it would never move."""
    stage = Stage(runner, nn.Linear(1, 1, bias=False).to(torch.bfloat16), momentum=0.001)
    list(stage.updates([1.0] + [2.0] * 1000))
    expected = 2.0 - 0.999**1000
    averages = stage.hook.state_dict()
    assert averages["averaged.weight"].dtype == torch.float32
    assert float(averages["averaged.weight"]) == pytest.approx(expected, rel=1e-4)
    assert stage.seen() == pytest.approx(expected, rel=1e-2), "as bfloat16 has it"
    assert float(stage.hook.state_dict()["averaged.weight"]) == pytest.approx(expected, rel=1e-4), (
        "validation costs nothing"
    )


@pytest.mark.parametrize("update_buffers", [False, True])
def test_buffers_are_averaged_on_request(runner: Any, update_buffers: bool) -> None:
    norm = nn.BatchNorm1d(1)
    stage = Stage(runner, norm, momentum=0.5, update_buffers=update_buffers)
    for mean in (0.0, 8.0):
        norm.running_mean.fill_(mean)  # type: ignore[union-attr]
        norm.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
        list(stage.updates([1.0]))
    stage.hook.before_test_epoch(runner)
    assert float(norm.running_mean) == (4.0 if update_buffers else 8.0)  # type: ignore[arg-type]
    assert int(norm.num_batches_tracked) == 7  # type: ignore[arg-type]
    stage.hook.after_test_epoch(runner)
    assert float(norm.running_mean) == 8.0  # type: ignore[arg-type]


def test_what_checkpoints_leave_out_is_not_averaged(runner: Any) -> None:
    module = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
    stage = Stage(runner, module, excludes_frozen=True, momentum=0.5)
    assert set(stage.hook.state_dict()) == {"updates", "averaged.1.weight", "averaged.1.bias"}


@pytest.mark.parametrize("update_buffers", [False, True])
def test_averages_follow_what_is_given_other_memory(runner: Any, update_buffers: bool) -> None:
    """As by pruning, ``weight.data = weight.data * mask``, or a module that assigns its buffer anew in each forward."""
    norm = nn.BatchNorm1d(1)
    stage = Stage(runner, norm, momentum=0.5, update_buffers=update_buffers)
    for value in (0.0, 8.0):
        norm.weight.data, norm.running_mean = torch.zeros(1), torch.full((1,), value)
        (seen,) = stage.updates([value])
    assert seen == 4.0
    stage.hook.before_test_epoch(runner)
    assert float(norm.running_mean) == (4.0 if update_buffers else 8.0)
    stage.hook.after_test_epoch(runner)
    assert (float(norm.weight), float(norm.running_mean)) == (8.0, 8.0)


def test_the_weights_come_back_bit_for_bit(runner: Any) -> None:
    module = nn.Linear(7, 5)
    stage = Stage(runner, module, momentum=0.3)
    for _ in range(3):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        stage.hook.after_train_iter(runner, 0)
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    stage.hook.before_val_epoch(runner)
    stage.hook.before_val_epoch(runner)
    assert not torch.equal(module.weight, own["weight"])
    stage.hook.after_val_epoch(runner)
    stage.hook.after_val_epoch(runner)
    assert all(torch.equal(tensor, own[name]) for name, tensor in module.state_dict().items())


def test_who_saves_while_validation_runs_saves_the_models_own_weights(runner: Any) -> None:
    stage = Stage(runner, momentum=0.5)
    list(stage.updates([1.0, 3.0]))
    stage.hook.before_val_epoch(runner)
    assert stage.weight == 2.0
    stage.hook.before_save_checkpoint(runner, {})
    assert stage.weight == 3.0


@pytest.mark.parametrize("point", ["before_val_iter", "after_val_iter"])
def test_the_averages_are_back_after_such_a_save(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path, point: str
) -> None:
    """The rest of the validation is of the same weights as its beginning; training has its own again."""
    follow = Follow(momentum=0.1)
    plain = new_run()
    plain.train()

    def save(runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if batch_idx == 0:
            runner.save_checkpoint(tmp_path, "in_validation")

    run = new_run(custom_hooks=[EMAHook(momentum=0.1), follow, At(point, save)])
    run.train()
    assert follow.same == [True] * 30
    assert all(map(torch.equal, plain.strategy.module.parameters(), run.strategy.module.parameters()))


def test_averages_of_other_weights_are_filled_up_or_refused(runner: Any) -> None:
    stage = Stage(runner, nn.Linear(1, 1), momentum=0.5)
    list(stage.updates([4.0]))
    state = {"updates": 1, "averaged.weight": torch.full((1, 1), 2.0), "averaged.old": torch.ones(1)}
    stage.module.bias.data.fill_(6.0)  # type: ignore[union-attr,operator]
    stage.hook.load_state_dict(state)
    loaded = stage.hook.state_dict()
    assert (float(loaded["averaged.weight"]), float(loaded["averaged.bias"])) == (2.0, 6.0)
    stage.hook.strict_load = True
    with pytest.raises(CheckpointError, match="differ from the model in bias, old"):
        stage.hook.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema_type": "EMA"}, 'EMAHook.ema_type: "EMA" is not allowed, choose ExponentialMovingAverage'),
        ({"momentum": 0.0}, "EMAHook.momentum: 0.0 is not allowed"),
        ({"momentum": 1.0}, "EMAHook.momentum: 1.0 is not allowed"),
        ({"gamma": 10}, "EMAHook.gamma: 10 is not allowed with ExponentialMovingAverage"),
        ({"ema_type": "MomentumAnnealingEMA", "gamma": 0}, "EMAHook.gamma: 0 is not allowed"),
        ({"ema_type": "StochasticWeightAverage", "momentum": 0.1}, "EMAHook.momentum: has no meaning with"),
        ({"ema_type": lambda updates: 0.5, "gamma": 2}, "EMAHook.gamma: has no meaning with a function"),
        ({"interval": 0}, "EMAHook.interval: 0 is not allowed"),
        ({"begin_iter": 1, "begin_epoch": 1}, "EMAHook.begin_iter: 1 with begin_epoch=1 is not allowed"),
        ({"begin_iter": -1}, "EMAHook.begin_iter: -1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, message):
        EMAHook(**options)


@pytest.mark.parametrize("options", [{"begin_iter": 21}, {"begin_epoch": 3}])
def test_an_average_that_would_never_begin_is_refused(runner: Any, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"EMAHook.begin_\w+: .* training ends at"):
        Stage(runner, **options)


# With the real runner


class Follow(Hook):
    """Averages the slow way, and looks at the weights in validation."""

    priority = "LOWEST"

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.average: dict[str, Tensor] = {}
        self.same: list[bool] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        for name, parameter in runner.strategy.module.named_parameters():
            old = self.average.get(name, parameter)
            self.average[name] = (old * (1 - self.momentum) + parameter * self.momentum).detach().clone()

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        weights = runner.strategy.module.named_parameters()
        self.same.append(
            all(torch.allclose(weight, self.average.get(name, weight), atol=1e-6) for name, weight in weights)
        )


def test_validation_sees_the_averages_and_training_does_not(new_run: Callable[..., FlexibleRunner]) -> None:
    follow = Follow(momentum=0.1)
    plain = new_run()
    plain.train()
    averaged = new_run(custom_hooks=[{"type": "EMAHook", "momentum": 0.1}, follow])
    averaged.train()
    assert follow.same == [True] * 30
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.strategy.module.parameters(), averaged.strategy.module.parameters(), strict=True)
    )


def test_the_weights_come_back_when_validation_raises(new_run: Callable[..., FlexibleRunner]) -> None:
    class Failing(Hook):
        own: Tensor

        def after_train_epoch(self, runner: Any) -> None:
            self.own = runner.strategy.module.linear.weight.detach().clone()

        def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            assert not torch.equal(runner.strategy.module.linear.weight, self.own)
            raise RuntimeError("in validation")

    hook = Failing()
    run = new_run(custom_hooks=[EMAHook(momentum=0.1), hook])
    with pytest.raises(RuntimeError, match="in validation"):
        run.train()
    assert torch.equal(run.strategy.module.linear.weight, hook.own)  # type: ignore[arg-type,union-attr]


class Catching(Hook):
    """Evaluates after each update, and goes on after an error."""

    def __init__(self) -> None:
        self.modes: list[bool] = []
        self.fails = False

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.fails = True
        with pytest.raises(RuntimeError, match="in validation"):
            runner.val_loop.run()
        self.fails = False
        self.modes.append(runner.strategy.module.training)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self.fails:
            raise RuntimeError("in validation")


class WithoutHooksAfter(ValLoop):
    def run(self) -> Any:
        self.runner.call_hook("before_val_epoch")
        for idx, batch in enumerate(self.dataloader):
            self.run_iter(idx, batch)
        return self.evaluator.evaluate()


@pytest.mark.parametrize("kind", ["caught", "no hooks"])
def test_training_goes_on_with_its_own_weights_after_an_evaluation_without_an_end(
    new_run: Callable[..., FlexibleRunner], kind: str
) -> None:
    plain = new_run()
    plain.train()
    hook = Catching()
    changes = {"val_cfg": dict(type=WithoutHooksAfter)} if kind == "no hooks" else {}
    run = new_run(custom_hooks=[EMAHook(momentum=0.1), *([] if changes else [hook])], **changes)
    run.train()
    assert torch.equal(run.strategy.module.linear.weight, plain.strategy.module.linear.weight)  # type: ignore[arg-type,union-attr]
    assert all(hook.modes)


def test_of_several_averages_the_first_is_validated_and_training_goes_on_with_its_own_weights(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    seen: list[Tensor] = []

    class Look(Hook):
        def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            seen.append(runner.strategy.module.linear.weight.detach().clone())

    alone = new_run(work_dir=str(tmp_path / "alone"))
    alone.train()
    first, second = EMAHook(momentum=0.1), EMAHook(momentum=0.3)
    run = new_run(work_dir=str(tmp_path / "both"), custom_hooks=[first, second, Look()])
    run.train()
    assert torch.equal(run.strategy.module.linear.weight, alone.strategy.module.linear.weight)  # type: ignore[arg-type,union-attr]
    averages = [hook.state_dict()["averaged.linear.weight"] for hook in (first, second)]
    assert torch.equal(seen[-1], averages[0])
    assert not torch.equal(*averages)


def test_a_checkpoint_holds_both_and_resuming_is_exact(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    def options(hook: EMAHook) -> dict[str, Any]:
        checkpoint = {"type": "CheckpointHook", "interval": 13, "by_epoch": False}
        return {"custom_hooks": [hook], "default_hooks": {"checkpoint": checkpoint}}

    whole = EMAHook(momentum=0.1)
    run = new_run(**options(whole))
    run.train()
    checkpoint = Checkpoint.open(tmp_path / "work" / "iter_30")
    weight = {"model.linear.weight": torch.empty(2, 4), "hook.EMAHook/averaged.linear.weight": torch.empty(2, 4)}
    checkpoint.load(weight)
    assert torch.equal(weight["model.linear.weight"], run.strategy.module.linear.weight)  # type: ignore[arg-type,union-attr]
    assert torch.equal(weight["hook.EMAHook/averaged.linear.weight"], whole.state_dict()["averaged.linear.weight"])

    resumed = EMAHook(momentum=0.1)
    new_run(resume=str(tmp_path / "work" / "iter_13"), **options(resumed)).train()
    state = resumed.state_dict()
    assert state.keys() == whole.state_dict().keys()
    assert state.pop("updates") == 30
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in state.items())


def test_what_is_saved_before_its_turn_has_the_move_too(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    """A hook of the same priority that is listed first saves an update of which the average knows nothing yet."""

    def save(runner: Any, *_: Any, **__: Any) -> None:
        if runner.iter + 1 in (1, 13, 14):
            runner.save_checkpoint(tmp_path, f"iter_{runner.iter + 1}")

    expected, whole = EMAHook(momentum=0.1), EMAHook(momentum=0.1)
    new_run(custom_hooks=[expected]).train()
    new_run(custom_hooks=[At("after_train_iter", save), whole]).train()
    for done in (1, 13, 14):
        resumed = EMAHook(momentum=0.1)
        new_run(resume=str(tmp_path / f"iter_{done}"), custom_hooks=[resumed]).train()
        for hook in (whole, resumed):
            state = hook.state_dict()
            assert state.pop("updates") == 30
            assert all(torch.equal(value, expected.state_dict()[key]) for key, value in state.items()), done


def test_a_run_resumed_without_an_average_starts_one(new_run: Callable[..., FlexibleRunner], tmp_path: Path) -> None:
    class Stop(Hook):
        def before_val_epoch(self, runner: Any) -> None:
            raise KeyboardInterrupt

    checkpoint = {"checkpoint": {"type": "CheckpointHook", "interval": 1}}
    run = new_run(default_hooks=checkpoint, custom_hooks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    follow = Follow(momentum=0.1)
    new_run(default_hooks=checkpoint, resume=True, custom_hooks=[EMAHook(momentum=0.1), follow]).train()
    assert follow.same == [True] * 30, "with its own weights in the validation that was left to do"


def test_loaded_averages_are_what_is_validated_and_training_averages_anew(
    new_run: Callable[..., FlexibleRunner], tmp_path: Path
) -> None:
    class Look(Hook):
        def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            seen.append(runner.strategy.module.linear.weight.detach().clone())

    first, seen = EMAHook(momentum=0.1), []
    new_run(custom_hooks=[first], default_hooks={"checkpoint": {"type": "CheckpointHook"}}).train()
    path = str(tmp_path / "work" / "epoch_3")
    new_run(load_from=path, custom_hooks=[EMAHook(momentum=0.1), Look()]).val()
    assert all(torch.equal(weight, first.state_dict()["averaged.linear.weight"]) for weight in seen)
    assert len(seen) == 10
    follow = Follow(momentum=0.1)
    new_run(load_from=path, custom_hooks=[EMAHook(momentum=0.1), follow]).train()
    assert follow.same == [True] * 30


@pytest.mark.parametrize("begin_epoch, warns", [(0, True), (3, False)], ids=["averaged", "not_yet"])
def test_averages_that_nobody_loads_are_told(
    new_run: Callable[..., FlexibleRunner],
    tmp_path: Path,
    begin_epoch: int,
    warns: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hook = EMAHook(momentum=0.1, begin_epoch=begin_epoch)
    new_run(custom_hooks=[hook], default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}}).train()
    path = str(tmp_path / "work" / "epoch_1")
    capsys.readouterr()
    new_run(load_from=path).val()
    said = "".join(capsys.readouterr())
    assert (f"{path}: the averages of EMAHook are not loaded, this run has no such hook" in said) == warns
    new_run(load_from=path, custom_hooks=[EMAHook(momentum=0.1)]).val()
    assert "not loaded" not in "".join(capsys.readouterr())


def _average_of_shards() -> tuple[list[float], int, list[float]]:
    strategy = DDPStrategy()
    strategy.join()
    mesh = DeviceMesh("cpu", [0, 1])
    whole = torch.arange(6.0)
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    average = WeightAverage({"weight": weight})
    with torch.no_grad():
        weight.to_local().add_(10.0)
    average.lerp_to_model(0.5)
    shadow = average.averages["weight"]
    assert isinstance(shadow, DTensor)
    average.swap_in()
    seen = weight.full_tensor().tolist()
    average.swap_out()
    result = seen, shadow.to_local().numel(), weight.full_tensor().tolist()
    strategy.leave()
    return result


@pytest.mark.distributed
def test_sharded_weights_are_averaged_shard_by_shard(workers2: WorkerGroup) -> None:
    for seen, local, own in workers2.run(_average_of_shards):
        assert seen == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
        assert local == 3
        assert own == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]


class Operations(TorchDispatchMode):
    """Counts operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_averages_of_another_dtype_move_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation for each parameter would take longer to start than to compute."""
    monkeypatch.setattr(ema, "_GROUP_BYTES", 800)  # twenty tensors of 40 bytes
    averages = [torch.zeros(10) for _ in range(50)]
    with Operations() as operations:
        ema.move_towards(averages, [torch.full((10,), float(n), dtype=torch.bfloat16) for n in range(50)], 0.25)
    assert [average.unique().tolist() for average in averages] == [[n / 4] for n in range(50)]
    made = {name: count for name, count in operations.seen.items() if name not in ("empty_like", "full")}
    assert made == {"_foreach_copy_": 3, "_foreach_lerp_": 3}


# Several hooks


def with_hooks(folder: Path, *hooks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The averages of a run after training, by the settings of their hooks."""
    saves = dict(checkpoint=dict(by_epoch=False, interval=7))
    given = [dict(type="EMAHook", **hook) for hook in hooks]
    given_too = dict(train_cfg=dict(max_epochs=1), log_level="WARNING")
    runner = make_runner(folder, default_hooks=saves, custom_hooks=given, **given_too, **changes)
    runner.train()
    found = [hook for hook in runner.hooks if isinstance(hook, EMAHook)]
    return {
        str(hook): {key: torch.as_tensor(value).clone() for key, value in one.state_dict().items()}
        for hook, one in zip(hooks, found, strict=True)
    }


FAST, SLOW, MEAN = dict(momentum=0.5), dict(momentum=0.01), dict(ema_type="StochasticWeightAverage")


@pytest.mark.parametrize(
    "order", [(FAST, SLOW, MEAN), (MEAN, SLOW, FAST), (SLOW,), (dict(momentum=0.3), SLOW, FAST, MEAN)]
)
def test_each_of_several_hooks_takes_the_state_of_its_settings(tmp_path: Path, order: Any) -> None:
    saved = with_hooks(tmp_path, FAST, SLOW, MEAN)
    with log_lines() as lines:
        found = with_hooks(tmp_path, *order, resume=True)
    for name in saved.keys() & found.keys():
        assert not differences(found[name], saved[name])
    assert not [line for line in lines if "cannot be told" in line]


def test_it_is_told_when_nobody_knows_whose_a_state_is(tmp_path: Path) -> None:
    with_hooks(tmp_path, FAST, SLOW)
    with log_lines() as lines:
        with_hooks(tmp_path, dict(momentum=0.4), dict(momentum=0.02), resume=True)
    (line,) = (line for line in lines if "cannot be told" in line)
    assert line.endswith(
        "iter_7: which EMAHook has which of their states cannot be told, because the settings of several are others now; they are taken "
        "in the order of the hooks"
    )
    with log_lines() as lines:
        with_hooks(tmp_path, FAST, dict(momentum=0.02), resume=True)
    assert not [line for line in lines if "cannot be told" in line], "one has other settings now"


class Counts(Hook):
    """A hook with a number, and an argument that differs between processes."""

    def __init__(self, log: str, start: int) -> None:
        self.log, self.count = log, start

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def _counts(folder: Path, **starts: int) -> dict[str, int]:
    """What the hooks a and b count after training, of two that begin at these numbers."""
    hooks = {name: Counts(f"{name}{os.environ['RANK']}", start) for name, start in starts.items()}
    saves = dict(checkpoint=dict(by_epoch=False, interval=7))
    settings = dict(strategy=dict(type="DDPStrategy"), train_cfg=dict(max_epochs=1), log_level="WARNING")
    runner = make_runner(
        folder, default_hooks=saves, custom_hooks=[*hooks.values()], resume=not any(starts.values()), **settings
    )
    runner.train()
    return {name: hook.count for name, hook in hooks.items()}


def _counts_saved_and_resumed(folder: Path) -> dict[str, int]:
    _counts(folder, a=1, b=101)
    return _counts(folder, b=0, a=0)


@pytest.mark.distributed
def test_whose_a_state_is_does_not_depend_on_the_process(tmp_path: Path, workers2: WorkerGroup) -> None:
    """Hooks that differ in an argument that differs between processes too, listed in another order."""
    assert workers2.run(_counts_saved_and_resumed, tmp_path) == [{"b": 101, "a": 1}] * 2
