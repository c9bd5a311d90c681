"""DDPStrategy: what reaches torch, how often processes talk, and state that is the user's model's own."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.comm.collectives import destroy_process_group
from flextrain.core.torch_compat.torch_private import default_store
from flextrain.optim import OptimWrapper
from flextrain.strategies import DDPStrategy, Strategy
from flextrain.testing import WorkerGroup

from ..waiting import wait_until

ADAM = dict(type="Adam", lr=0.05)
SGD = dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x))).square().mean()  # type: ignore[no-any-return]


def data(rank: int, index: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * index + rank))


def prepared(model: nn.Module | None = None, optim: Any = SGD, **options: Any) -> tuple[DDPStrategy, Any, Any]:
    strategy = DDPStrategy(device="cpu", timeout_s=30, **options)
    optim = OptimWrapper(optim) if isinstance(optim, dict) else optim
    torch.manual_seed(0)
    called, optim = strategy.setup(model or Net(), optim)
    return strategy, called, optim


def same_everywhere(strategy: Strategy) -> bool:
    sums = [sum(p.double().sum().item() for p in strategy.module.parameters())]
    found: list[Any] = [None] * strategy.topology.world_size
    torch.distributed.all_gather_object(found, sums)
    return all(value == found[0] for value in found)


# Options


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(static_grah=True), 'strategy.static_grah: unknown key, did you mean "static_graph"?'),
        (dict(static_graph="yes"), 'strategy.static_graph: "yes" is not allowed, give True or False'),
        (dict(comm_hook="fp8_compress"), 'strategy.comm_hook: "fp8_compress" is not allowed, choose "allreduce", "fp16_compress" or "bf16_compress"'),
        (dict(sync_bn="apex"), 'strategy.sync_bn: "apex" is not allowed, choose "torch" or "mmcv"'),
        (dict(detect_anomalous_params=1), "strategy.detect_anomalous_params: 1 is not allowed, give True or False"),
        (dict(model_wrapper=dict(device_ids=[0])), "strategy.model_wrapper.device_ids: has no meaning here, a process has one device"),
        (dict(log_kwargs=dict(log_level="INFO")), "strategy.log_kwargs: belongs to the runner, give log_level and log_processor there"),
        (
            dict(detect_anomalous_params=False, model_wrapper=dict(detect_anomalous_params=True)),
            "strategy.model_wrapper.detect_anomalous_params: True disagrees with strategy.detect_anomalous_params=False",
        ),
        (dict(bucket_cap_mb=0), "strategy.bucket_cap_mb: 0 is not allowed, give a number above 0"),
        (dict(model_wrapper=dict(bucket_cap_mb=-1)), "strategy.model_wrapper.bucket_cap_mb: -1 is not allowed"),
        (dict(model_wrapper=dict(find_unused=True)), 'strategy.model_wrapper.find_unused: unknown key, did you mean "find_unused_parameters"?'),
        (dict(model_wrapper=dict(type="FullyShardedDataParallel")), 'strategy.model_wrapper.type: "FullyShardedDataParallel" is not allowed'),
        (dict(static_graph=True, model_wrapper=dict(static_graph=False)), "strategy.model_wrapper.static_graph: False disagrees with strategy.static_graph=True, give one of them"),
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DDPStrategy(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


REACHES_TORCH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, dict(static_graph=False, find_unused_parameters=False, gradient_as_bucket_view=False, broadcast_buffers=True)),
    (dict(static_graph=True), dict(static_graph=True)),
    (dict(find_unused_parameters=True), dict(find_unused_parameters=True)),
    (dict(gradient_as_bucket_view=True), dict(gradient_as_bucket_view=True)),
    (dict(broadcast_buffers=False), dict(broadcast_buffers=False)),
    (dict(bucket_cap_mb=3), dict(bucket_bytes_cap=3 * 2**20)),
    (dict(model_wrapper=dict(type="MMDistributedDataParallel", find_unused_parameters=True)), dict(find_unused_parameters=True)),
    (dict(model_wrapper=dict(type=DistributedDataParallel, static_graph=True)), dict(static_graph=True)),
    (dict(static_graph=True, model_wrapper=dict(static_graph=True, bucket_cap_mb=3)), dict(static_graph=True, bucket_bytes_cap=3 * 2**20)),
]  # fmt: skip


def found_in_torch() -> list[dict[str, Any]]:
    results = []
    for options, expected in REACHES_TORCH:
        strategy, called, _ = prepared(**options)
        assert isinstance(called, DistributedDataParallel)
        results.append({name: getattr(called, name) for name in expected})
        strategy.leave()
    return results


@pytest.mark.distributed
def test_options_reach_torch(workers2: WorkerGroup) -> None:
    for results in workers2.run(found_in_torch):
        assert results == [expected for _, expected in REACHES_TORCH]


def comm_hooks() -> list[tuple[str, list[float]]]:
    """The hook that torch is given for each name, and the gradient that comes of it."""
    results = []
    for name in ("allreduce", "fp16_compress", "bf16_compress"):
        with mock.patch.object(
            DistributedDataParallel,
            "register_comm_hook",
            autospec=True,
            side_effect=DistributedDataParallel.register_comm_hook,
        ) as register:
            strategy, model, _ = prepared(nn.Linear(1, 1, bias=False), comm_hook=name)
        model(torch.tensor([[1.0 + (strategy.topology.rank + 1) * 2**-9]])).sum().backward()
        results.append((register.call_args.args[2].__name__, strategy.module.weight.grad.flatten().tolist()))
        strategy.leave()
    return results


@pytest.mark.distributed
def test_comm_hooks_by_name(workers2: WorkerGroup) -> None:
    exact = 1 + 1.5 * 2**-9
    for results in workers2.run(comm_hooks):
        assert [name for name, _ in results] == ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"]
        assert results[0][1] == [exact]
        assert results[1][1] == [pytest.approx(exact, abs=2**-10)]
        assert results[2][1][0] != exact  # eight bits do not hold it


# Parameters without gradient


class Branches(nn.Module):
    """Uses one branch, or both, as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return (self.used(x) + (self.other(x) if both else 0)).sum()  # type: ignore[no-any-return]


class StepsItself(Branches):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        return {}


def named_without_gradient(kind: type[Branches], **options: Any) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flextrain")
    strategy, called, optim = prepared(kind(), SGD, **options)
    logger.addHandler(handler)
    try:
        for number, both in enumerate([False, False, True, False]):
            with strategy.grad_sync(True):
                optim.backward(called(data(strategy.topology.rank, number), both))
            optim.step()
    finally:
        logger.removeHandler(handler)
        strategy.leave()
    return lines


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [Branches, StepsItself])
def test_parameters_without_gradient_are_named(workers2: WorkerGroup, kind: type[Branches]) -> None:
    wrapper = dict(type="MMDistributedDataParallel", detect_anomalous_params=True)
    if kind is Branches:
        wrapper["find_unused_parameters"] = True
    without = (
        "detect_anomalous_params: no gradient for other.weight, other.bias; forward has not used them, or the loss does not depend "
        "on them"
    )
    for lines in workers2.run(named_without_gradient, kind, model_wrapper=wrapper):
        assert lines == [without, "detect_anomalous_params: all parameters have gradients again", without]


def test_nothing_is_said_unless_it_is_asked_for() -> None:
    assert named_without_gradient(Branches) == []
    assert len(named_without_gradient(Branches, detect_anomalous_params=True)) == 3


# Wrapping


def what_is_called() -> dict[str, bool]:
    frozen = Net().requires_grad_(False)
    cases = {"trained": (Net(), SGD), "frozen": (frozen, None), "own step": (OwnStep(), SGD)}
    results = {}
    for name, (model, optim) in cases.items():
        strategy, called, _ = prepared(model, optim)
        results[name] = isinstance(called, DistributedDataParallel)
        assert strategy.module is model
        assert (strategy.topology.world_size, strategy.topology.shard) == (2, (strategy.topology.rank, 2))
        strategy.leave()
        strategy.leave()
        assert not torch.distributed.is_initialized()
    return results


@pytest.mark.distributed
def test_what_is_wrapped(workers2: WorkerGroup) -> None:
    assert workers2.run(what_is_called) == [{"trained": True, "frozen": False, "own step": False}] * 2


_STORES: list[Any] = []  # rank 0 serves its store to the other also when it has left the group


def group_of_others(backend: str) -> tuple[list[str], bool]:
    """What a strategy says of a group that was made before, and whether that is there still."""
    torch.distributed.init_process_group(backend)
    store = default_store()
    _STORES.append(store)
    store.add("have joined", 1)
    wait_until(lambda: store.add("have joined", 0) == 2)  # one that leaves breaks the connections that the other makes
    said = []
    try:
        DDPStrategy(device="cpu").join()
    except StrategyError as error:
        said.append(str(error))
    found = torch.distributed.is_initialized()
    destroy_process_group()  # as torch's, when gloo's threads have let go of what was sent
    return said, found


@pytest.mark.distributed
def test_a_group_without_cpu_tensors_is_refused(workers2: WorkerGroup) -> None:
    """What init_process_group("nccl") makes, in words that a machine without CUDA understands."""
    message = (
        'strategy.backend: the existing process group has the backend "cuda:gloo" and none for CPU tensors, '
        'create it with init_process_group("cpu:gloo,cuda:gloo") or let the strategy create it'
    )
    assert workers2.run(group_of_others, "cuda:gloo") == [([message], True)] * 2
    assert workers2.run(group_of_others, "cpu:gloo,cuda:gloo") == [([], True)] * 2


def test_one_process_is_a_world_of_one() -> None:
    model = Net()
    strategy = DDPStrategy(device="cpu", static_graph=True, comm_hook="fp16_compress")
    called, _ = strategy.setup(model, OptimWrapper(SGD))
    assert called is model
    assert not torch.distributed.is_initialized()
    with strategy.grad_sync(False):
        called(data(0)).backward()
    strategy.leave()


def test_a_second_setup_is_refused() -> None:
    strategy = DDPStrategy(device="cpu")
    strategy.setup(Net())
    with pytest.raises(StrategyError, match="^DDPStrategy: setup was called before"):
        strategy.setup(Net())


def test_sync_bn_is_refused_where_torch_has_none() -> None:
    message = '^strategy.sync_bn: torch has it for accelerators only, leave it out on device "cpu"$'
    with pytest.raises(StrategyError, match=message):
        DDPStrategy(device="cpu", sync_bn="torch").setup(Net())
    DDPStrategy(device="cpu", sync_bn="torch").setup(nn.Linear(1, 1))  # nothing to synchronise


@pytest.mark.parametrize("options", [dict(static_graph=True), dict(comm_hook="allreduce")])
def test_options_without_effect_are_refused(options: dict[str, Any]) -> None:
    message = f"^strategy.{next(iter(options))}: has no effect on OwnStep, which defines its own train_step"
    with pytest.raises(StrategyError, match=message):
        DDPStrategy(device="cpu", **options).setup(OwnStep())


def start_differently(trained: bool) -> list[float]:
    strategy = DDPStrategy(device="cpu", timeout_s=30)
    strategy.join()
    strategy.join()
    torch.manual_seed(strategy.topology.rank)
    model = Net().requires_grad_(trained)
    nn.init.constant_(model.norm.running_mean, strategy.topology.rank + 3)  # type: ignore[arg-type]
    strategy.setup(model)
    return [tensor.double().sum().item() for tensor in model.state_dict().values()]


@pytest.mark.distributed
@pytest.mark.parametrize("trained", [True, False], ids=["wrapped", "not wrapped"])
def test_all_start_from_rank_0(workers2: WorkerGroup, trained: bool) -> None:
    first, second = workers2.run(start_differently, trained)
    assert first == second
    assert 4 * 3.0 in first  # the running mean of rank 0


# How often gradients travel


def count_all_reduces(static_graph: bool, windows: list[int]) -> list[int]:
    """Messages per window of so many micro-batches; the model's gradients fit into one."""
    calls: list[int] = []

    def counting(state, bucket):  # type: ignore[no-untyped-def] # torch reads annotations and cannot read text
        calls.append(1)
        return allreduce_hook(state, bucket)

    strategy, model, optim = prepared(static_graph=static_graph)
    model.register_comm_hook(None, counting)
    counts = []
    for length in windows:
        calls.clear()
        for index in range(length):
            optim.begin(index, length)
            with strategy.grad_sync(enabled=optim.should_sync()):
                loss = model(data(strategy.topology.rank, index))
                optim.update_params(loss)
        counts.append(len(calls))
    assert same_everywhere(strategy)
    strategy.leave()
    return counts


@pytest.mark.distributed
def test_gradients_travel_once_per_window(workers2: WorkerGroup) -> None:
    windows = [3, 1, 3, 2]
    assert workers2.run(count_all_reduces, False, windows) == [[1, 1, 1, 1]] * 2
    # A static graph is recorded in the first backward, which must be one that reduces.
    assert workers2.run(count_all_reduces, True, windows) == [[2, 1, 1, 1]] * 2


# Models with a train_step of their own


class OwnStep(nn.Module):
    """Uses ``sometimes`` on rank 0 only, and ``never`` on none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(3, 1, bias=False) for _ in range(3))

    def train_step(self, batch: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        x, use = batch
        loss = self.always(x).mean() + (self.sometimes(x).mean() if use else 0)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def own_steps(accumulate: int) -> dict[str, Any]:
    counts: list[int] = []
    strategy, model, optim = prepared(OwnStep(), OptimWrapper(SGD, accumulative_counts=accumulate))
    before = model.never.weight.detach().clone()
    grads: list[Any] = []
    apply = optim.optimizer.step
    optim.optimizer.step = lambda: (grads.append(model.always.weight.grad.clone()), apply())
    sometimes: list[Any] = []
    optim.register_step_pre_hook(lambda _: sometimes.append(model.sometimes.weight.grad.clone()))
    for window in range(2):
        with mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as reduce:
            for index in range(accumulate):
                optim.begin(index, accumulate)
                model.train_step(
                    (data(strategy.topology.rank, 10 * window + index), strategy.topology.rank == 0), optim
                )
            counts.append(reduce.call_count)
    result = {
        "counts": counts,
        "grads": grads,
        "sometimes": sometimes,
        "same": same_everywhere(strategy),
        "never has moved": not torch.equal(model.never.weight, before),
        "never has a gradient": model.never.weight.grad is not None,
    }
    strategy.leave()
    return result


@pytest.mark.distributed
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_train_step_averages_once_per_update(workers2: WorkerGroup, accumulate: int) -> None:
    # The gradient of a mean over rows is the mean row, whatever the weights are.
    rows = [[data(rank, 10 * w + i).mean(0) for i in range(accumulate)] for w in range(2) for rank in range(2)]
    means = [torch.stack([*rows[2 * w], *rows[2 * w + 1]]).mean(0, keepdim=True) for w in range(2)]
    halves = [torch.stack(rows[2 * w]).mean(0, keepdim=True) / 2 for w in range(2)]
    for result in workers2.run(own_steps, accumulate):
        assert result["counts"] == [2, 2]  # which parameters were used, and their gradients in one message
        torch.testing.assert_close(result["grads"], means)
        torch.testing.assert_close(result["sometimes"], halves)  # zero on the rank that did not use it
        assert result["same"]
        assert not result["never has moved"]
        assert not result["never has a gradient"]


class Between(nn.Module):
    """Uses its gradients between backward and update, or goes past the wrapper."""

    def __init__(self, kind: str, rank: int = 0) -> None:
        super().__init__()
        self.kind, self.parts = kind, 2 if kind == "more backwards on rank 0" and rank == 0 else 1
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))

    def backward(self, x: Tensor, optim_wrapper: OptimWrapper) -> None:
        for part in x.chunk(self.parts):
            optim_wrapper.backward((part @ self.weight).square().mean() / self.parts)

    def train_step(self, x: Tensor, optim_wrapper: OptimWrapper) -> None:
        if self.kind == "past the wrapper":
            (x @ self.weight).square().mean().backward()
            optim_wrapper.optimizer.step()
            return optim_wrapper.zero_grad()
        self.backward(x, optim_wrapper)
        if self.kind == "clipped":
            nn.utils.clip_grad_norm_([self.weight], 0.1)
        if self.kind == "sharpness":
            with torch.no_grad():
                moved = 0.05 * optim_wrapper.param_groups[0]["params"][0].grad
                self.weight += moved
            optim_wrapper.zero_grad()
            self.backward(x, optim_wrapper)
            with torch.no_grad():
                self.weight -= moved
        optim_wrapper.step()
        return None


def between(kind: str) -> tuple[Tensor, Tensor]:
    """In a worker: the weights after two updates, of DDP and of one device with the whole batch."""
    strategy = DDPStrategy(device="cpu", timeout_s=30)
    strategy.join()
    rank = strategy.topology.rank
    model, optim = Between(kind, rank), OptimWrapper(SGD)
    strategy.setup(model, optim)
    whole = Between(kind if "rank" not in kind else "", 1)
    own = OptimWrapper(
        torch.optim.SGD(whole.parameters(), **{key: value for key, value in SGD.items() if key != "type"})
    )  # type: ignore[arg-type]
    for index in range(2):
        rows = [data(r, index).double() for r in range(2)]
        optim.begin(0, 1)
        model.train_step(rows[rank], optim)
        whole.train_step(torch.cat(rows), own)
    strategy.leave()
    return model.weight.detach(), whole.weight.detach()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["clipped", "sharpness", "past the wrapper", "more backwards on rank 0"])
def test_what_a_train_step_does_with_its_gradients(workers2: WorkerGroup, kind: str) -> None:
    for found, expected in workers2.run(between, kind):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# State


def state_keys(options: dict[str, Any]) -> list[str]:
    strategy, model, optim = prepared(None, OptimWrapper(ADAM), **options)
    for index in range(2):
        with optim.optim_context(model):
            loss = model(data(strategy.topology.rank, index))
        optim.update_params(loss)
    keys = list(strategy.state())
    assert same_everywhere(strategy)
    strategy.leave()
    torch.compiler.reset()
    return keys


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(compile=dict(backend="eager")),
        dict(activation_checkpointing=dict(classes=["Sequential"])),
        dict(
            compile=dict(backend="aot_eager"), activation_checkpointing=dict(classes=["Sequential"]), static_graph=True
        ),
    ],
    ids=["plain", "compile", "recompute", "all"],
)
def test_keys_are_the_modules_own(workers2: WorkerGroup, options: dict[str, Any]) -> None:
    first, second = workers2.run(state_keys, options)
    names = {name for name, _ in Net().named_parameters()}
    buffers = {name for name, _ in Net().named_buffers()}
    assert {key.removeprefix("model.") for key in first if key.startswith("model.")} == names | buffers
    assert {key.split(".", 2)[2].rpartition(".")[0] for key in first if key.startswith("optim.")} == names
    assert set(first) - set(second) == {f"model.{name}" for name in buffers}  # rank 0's count
