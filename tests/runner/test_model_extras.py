"""What modules keep beside parameters and buffers: saved, resumed and exported, or refused when the runner is set up."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import CheckpointError, StrategyError
from flextrain.core.checkpoint import export_weights
from flextrain.testing import WorkerGroup

from .training import Net, SaveEvery, change_values, make_runner

pytestmark = pytest.mark.usefixtures("quick")

FSDP = dict(type="FSDPStrategy", wrap=["Linear"])
ZERO_3 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3))


class Counter(nn.Module):
    """Counts its calls, and keeps what it has seen in a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[Tensor] = []
        self.bounds: tuple[float, ...] = (0.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen.append(x.detach().mean(0))
            self.bounds = (min(self.bounds[0], float(x.min())), max(self.bounds[1], float(x.max())))
        return x

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "seen": self.seen, "bounds": self.bounds, 3: OrderedDict(deep=[None, True])}

    def set_extra_state(self, state: Any) -> None:
        assert state[3] == {"deep": [None, True]}
        self.calls, self.seen, self.bounds = state["calls"], state["seen"], state["bounds"]


class Scale(nn.Module):
    """Its extra state is a tensor and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().amax(0)[:2])
        return x

    def get_extra_state(self) -> Tensor:
        return self.largest

    def set_extra_state(self, state: Tensor) -> None:
        self.largest = state


class Keeping(Net):
    """Two modules with extra state, one of them under two names, and a buffer that comes with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.counter, self.scale = Counter(), Scale()
        self.same_counter = self.counter

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        if not hasattr(self, "first"):
            self.register_buffer("first", torch.zeros(6))
            self.first += x.mean(0)
        return super().forward(index, self.scale(self.counter(x)), y, mode)


def kept(runner: Any) -> Any:
    module = runner.strategy.module
    return [module.counter.calls, module.counter.seen, module.counter.bounds, module.scale.largest, module.first]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def resumed(folder: str, strategy: Any, other: Any) -> list[tuple[Any, Any]]:
    """What modules keep after an epoch: without an interruption, and resumed in its middle under ``other``."""
    changes = dict(model=Keeping, train_cfg=dict(max_epochs=1))
    first = make_runner(Path(folder) / "a", strategy=strategy, custom_hooks=[SaveEvery({2, 3})], **changes)
    first.train()
    expected = kept(first)
    assert expected[0] == len(expected[1]) == first.iter
    first.strategy.leave()
    second = make_runner(Path(folder) / "b", strategy=other, resume=str(Path(folder) / "a" / "iter_3"), **changes)
    second.train()
    found = kept(second)
    second.strategy.leave()
    return list(zip(found, expected, strict=True))


def test_extra_state_goes_on(tmp_path: Path) -> None:
    for found, expected in resumed(str(tmp_path), "SingleDeviceStrategy", "SingleDeviceStrategy"):
        assert equal(found, expected)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "other"),
    [
        ("DDPStrategy", FSDP),
        (FSDP, "DDPStrategy"),
        pytest.param(ZERO_3, ZERO_3, marks=pytest.mark.deepspeed),
    ],
)
def test_extra_state_goes_on_under_every_strategy(
    workers2: WorkerGroup, tmp_path: Path, strategy: Any, other: Any
) -> None:
    main, _ = workers2.run(resumed, str(tmp_path), strategy, other)
    for found, expected in main:  # rank 0's is what a checkpoint has
        assert equal(found, expected)


def saved(folder: Path) -> tuple[Any, Path]:
    runner = make_runner(folder, model=Keeping, custom_hooks=[SaveEvery({3})], train_cfg=dict(max_epochs=1))
    runner.train()
    return runner, folder / "iter_3"


class Untrained(Keeping):
    """The same, with the buffer from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(6))


def test_exports_are_what_torch_would_write_and_come_back(tmp_path: Path) -> None:
    _, path = saved(tmp_path / "run")
    again = make_runner(tmp_path / "again", model=Untrained)
    again.load_checkpoint(path)
    expected = again.strategy.module.state_dict()
    export_weights(path, tmp_path / "x.pth")
    written = torch.load(tmp_path / "x.pth", weights_only=True)
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        assert equal(written[key], value), key
    other = make_runner(tmp_path / "other", model=Untrained)
    other.load_checkpoint(tmp_path / "x.pth")
    assert all(equal(a, b) for a, b in zip(kept(other), kept(again), strict=True))
    assert other.strategy.module.counter.calls == 3


def test_safetensors_hold_what_is_a_tensor_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file

    _, path = saved(tmp_path / "run")
    with caplog.at_level(logging.WARNING, "flextrain"):
        export_weights(path, tmp_path / "x.safetensors")
    assert "counter._extra_state, same_counter._extra_state is left out; export to .pth to keep it" in caplog.text
    assert "scale._extra_state" in load_file(tmp_path / "x.safetensors")
    other = make_runner(tmp_path / "other", model=Untrained)
    other.load_checkpoint(tmp_path / "x.safetensors")
    assert equal(other.strategy.module.scale.largest, load_file(tmp_path / "x.safetensors")["scale._extra_state"])


def test_a_checkpoint_without_it_resumes_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(tmp_path / "a", custom_hooks=[SaveEvery({3})], train_cfg=dict(max_epochs=1))
    runner.train()

    class Later(Net):
        def __init__(self) -> None:
            super().__init__()
            self.counter = Counter()

    again = make_runner(tmp_path / "b", model=Later, resume=str(tmp_path / "a" / "iter_3"), log_level="WARNING")
    with caplog.at_level(logging.WARNING, "flextrain"):
        again.train()
    assert "iter_3: has no counter._extra_state, the model keeps its current extra state" in caplog.text


# Refused when the run is set up


class Unsavable(Net):
    def get_extra_state(self) -> Any:
        return {"names": [{"a", "b"}]}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("never saved")


class OneWay(Net):
    def get_extra_state(self) -> Any:
        return 1


class Adding(Net):
    """Its state_dict has an entry that is neither parameter nor buffer."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "version"] = torch.tensor(3)


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.LazyLinear(8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Unsavable, r"model._extra_state\['names'\]\[0\]: set cannot be saved"),
        (OneWay, "model._extra_state: its module defines get_extra_state but no set_extra_state"),
        (Adding, "model.version: is added by the model's own state_dict and is no parameter, buffer or extra state"),
        (Lazy, "model.net.0.weight: has no shape before the first batch, LazyLinear waits for it"),
        (Lazy(), "model.net.0.weight: has no shape before the first batch, LazyLinear waits for it"),
    ],
)
@pytest.mark.parametrize("strategy", ["SingleDeviceStrategy", pytest.param(FSDP, marks=pytest.mark.distributed)])
def test_refused_when_the_run_is_set_up(
    workers1: WorkerGroup, tmp_path: Path, strategy: Any, model: Any, message: str
) -> None:
    if strategy == FSDP:
        (found,) = workers1.run(refusal, str(tmp_path), strategy, model)
        assert re.match(message, found), found
        return
    with pytest.raises(StrategyError, match=message):
        _ = make_runner(tmp_path, model=model, strategy=strategy).model


def refusal(folder: str, strategy: Any, model: Any) -> str:
    runner = make_runner(folder, model=model, strategy=strategy)
    try:
        _ = runner.model
    except StrategyError as error:
        return str(error)
    finally:
        runner.strategy.leave()
    return "nothing"


# What appears later, and what is called after loading


class Growing(Net):
    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        if not hasattr(self, "bias"):
            self.bias = nn.Parameter(torch.zeros(2))
        return super().forward(index, x, y, mode)


def test_a_parameter_that_appears_in_training_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(
        tmp_path, model=Growing, custom_hooks=[SaveEvery({2, 3})], train_cfg=dict(max_epochs=1), log_level="WARNING"
    )
    with caplog.at_level(logging.WARNING, "flextrain"):
        runner.train()
    said = [line.getMessage() for line in caplog.records if "after the run was set up" in line.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("The model has registered parameters after the run was set up: bias; no optimizer")


class Derived(Net):
    """Keeps something that follows from its weights, which it makes anew whenever a state dict was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.total = float(self.net[0].weight.detach().sum())
        self.register_load_state_dict_post_hook(lambda module, _: module.make())

    def make(self) -> None:
        self.total = float(self.net[0].weight.detach().sum())


class Older(Net):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


def test_what_modules_do_after_loading_is_done(tmp_path: Path) -> None:
    runner = make_runner(tmp_path / "a", model=Derived, custom_hooks=[SaveEvery({3})], train_cfg=dict(max_epochs=1))
    runner.train()
    export_weights(tmp_path / "a" / "iter_3", tmp_path / "x.pth")
    for path in (tmp_path / "a" / "iter_3", tmp_path / "x.pth"):
        other = make_runner(tmp_path / "b", model=Derived, randomness=dict(seed=2))
        other.load_checkpoint(path)
        module = other.strategy.module
        assert module.total == float(module.net[0].weight.detach().sum())


def test_code_for_older_files_that_is_not_called_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(Older().state_dict(), tmp_path / "x.pth")
    runner = make_runner(tmp_path / "run", model=Older, log_level="WARNING")
    with caplog.at_level(logging.WARNING, "flextrain"):
        runner.load_checkpoint(tmp_path / "x.pth")
    assert "the model's own code for older files is not called: Older._load_from_state_dict" in caplog.text


def test_damaged_extra_state_is_one_line(tmp_path: Path) -> None:
    _, path = saved(tmp_path / "run")
    change_values(path, lambda values: values.update({"extra_state.counter": {"set": []}}))
    other = make_runner(tmp_path / "other", model=Untrained)
    with pytest.raises(
        CheckpointError, match="model.counter._extra_state: its module cannot load it, ValueError: unknown kind set"
    ):
        other.load_checkpoint(path)
