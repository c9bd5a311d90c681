"""MessageHub and HistoryBuffer: what stays on the device, when it is read, and what a checkpoint gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flextrain import ConfigError, DDPStrategy
from flextrain.runner.reporting import HistoryBuffer, MessageHub
from flextrain.testing import WorkerGroup


class Operations(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[list[str]]:
    with Operations() as mode:
        yield mode.names


def test_updates_run_no_operator_and_a_fetch_runs_one_stack() -> None:
    hub = MessageHub()
    losses = [torch.tensor(float(i)) for i in range(10)]
    norms = [torch.tensor(float(-i)) for i in range(10)]
    with operations() as names:
        for loss, norm in zip(losses, norms, strict=True):
            hub.update_scalar("train/loss", loss)
            hub.update_scalar("train/grad_norm", norm)
            hub.update_scalar("train/time", 0.5)
    assert names == []
    hub.update_scalar("val/loss", losses[0])
    with operations() as names:
        hub.fetch("train/")
    assert names == ["aten::stack"]
    with operations() as names:
        assert hub.get_scalar("train/loss").mean(4) == 7.5
        assert hub.get_scalar("train/grad_norm").min() == -9.0
    assert names == []
    with operations() as names:
        hub.fetch()
    assert names == ["aten::stack"], "of what does not begin with train/"


def test_values_of_half_precision_share_the_copy_of_float32() -> None:
    hub = MessageHub()
    hub.update_scalar("train/loss", torch.tensor(1.5, dtype=torch.bfloat16))
    hub.update_scalar("train/half", torch.tensor(2.5, dtype=torch.float16))
    hub.update_scalar("train/grad_norm", torch.tensor(3.25))
    hub.update_scalar("train/tokens", torch.tensor(2**40 + 1))
    with operations() as names:
        hub.fetch()
    assert names.count("aten::stack") == 2, "one for the floats, one for the integers"
    assert [buffer.current() for buffer in hub.log_scalars.values()] == [1.5, 2.5, 3.25, 2**40 + 1]


def test_a_statistic_of_one_key_reads_that_key_only() -> None:
    hub = MessageHub()
    hub.update_scalar("train/loss", torch.tensor(2.0))
    hub.update_scalar("train/other", torch.tensor(3.0))
    assert hub.get_scalar("train/loss").current() == 2.0
    with operations() as names:
        hub.fetch()
    assert names == ["aten::stack"], "the other one was still pending"


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.array([3.0]), torch.tensor([3]), torch.tensor([[3.0]])])
def test_everything_with_one_element_is_a_scalar(value: Any) -> None:
    hub = MessageHub()
    hub.update_scalar("train/x", value)
    assert hub.get_scalar("train/x").values == [3.0]
    assert isinstance(hub.get_scalar("train/x").current(), float)


def test_a_scalar_that_needs_a_gradient_does_not_keep_its_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    hub = MessageHub()
    loss = (weight * 2).sum()
    hub.update_scalar("train/loss", loss)
    held = hub.get_scalar("train/loss")._new[0]
    assert isinstance(held, Tensor)
    assert held.grad_fn is None


@pytest.mark.parametrize("value", [torch.ones(2), "high", None, [1.0, 2.0]])
def test_no_scalar_is_refused_where_it_comes_in(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"train/x: .* no scalar"):
        MessageHub().update_scalar("train/x", value)


def test_means_divide_by_the_number_of_items() -> None:
    hub = MessageHub()
    hub.update_scalars({"train/loss": {"value": 10.0, "count": 4}, "train/plain": 3.0})
    hub.update_scalars({"train/loss": {"value": 2.0, "count": 2}})
    assert hub.get_scalar("train/loss").mean() == 2.0
    assert hub.get_scalar("train/loss").mean(1) == 1.0
    assert hub.get_scalar("train/plain").statistics("current") == 3.0


def test_what_is_put_into_a_history_that_grew_is_kept() -> None:
    history = MessageHub(history=2).history("train/loss")
    history.put(1.0)
    history.grow(3)
    for value in (2.0, 3.0):
        history.put(value)
    assert history.values == [1.0, 2.0, 3.0]


def test_what_a_hub_begins_with_is_checked() -> None:
    with pytest.raises(ConfigError, match="^MessageHub.log_scalars.a: 1 is not allowed, give a HistoryBuffer$"):
        MessageHub("hub", log_scalars=dict(a=1))  # type: ignore[dict-item]
    with pytest.raises(
        ConfigError, match="^MessageHub.resumed_keys.iters: is neither in log_scalars nor in runtime_info$"
    ):
        MessageHub("hub", runtime_info=dict(iter=1), resumed_keys=dict(iters=False))


def test_a_history_says_how_much_it_keeps() -> None:
    buffer = HistoryBuffer(max_length=3)
    assert buffer.max_length == 3
    buffer.grow(5)
    assert (buffer.max_length, HistoryBuffer().max_length) == (5, None)


def test_history_is_bounded_and_grows_on_request() -> None:
    hub = MessageHub(history=3)
    hub.retain("train/all", None)
    for i in range(10):
        hub.update_scalar("train/loss", torch.tensor(float(i)))
        hub.update_scalar("train/all", torch.tensor(float(i)))
    assert hub.get_scalar("train/loss").values == [7.0, 8.0, 9.0]
    assert len(hub.get_scalar("train/all")) == 10
    hub.retain_all(5)
    hub.retain("train/loss", 4)
    for i in range(10, 20):
        hub.update_scalar("train/loss", float(i))
        hub.update_scalar("train/late", float(i))
    assert hub.get_scalar("train/loss").values == [15.0, 16.0, 17.0, 18.0, 19.0]
    assert len(hub.get_scalar("train/late")) == 5
    assert len(hub.get_scalar("train/all")) == 10, "asking for less takes nothing away"


def test_unknown_keys_and_statistics_are_named() -> None:
    hub = MessageHub()
    hub.update_scalar("train/loss", 1.0)
    with pytest.raises(KeyError, match=r"train/los'.*train/loss"):
        hub.get_scalar("train/los")
    with pytest.raises(ConfigError, match=r'"mean_" is not allowed, .*did you mean "mean"'):
        hub.get_scalar("train/loss").statistics("mean_")


def test_state_goes_through_json_and_leaves_out_what_json_cannot_hold() -> None:
    hub = MessageHub()
    for i in range(3):
        hub.update_scalar("train/loss", torch.tensor(float(i)), count=2)
    hub.update_info("eta", 12.5)
    hub.update_info("nested", {"a": [1, None, "x"]})
    hub.update_info("model", object())
    hub.update_info("stage", "train", resumed=False)
    state = json.loads(json.dumps(hub.state_dict()))

    resumed = MessageHub()
    resumed.update_scalar("train/loss", 100.0)
    held = resumed.get_scalar("train/loss")
    resumed.load_state_dict(state)
    assert resumed.get_scalar("train/loss") is held, "who looked it up before sees the new values"
    assert held.values == [0.0, 1.0, 2.0]
    assert held.mean() == 0.5
    assert resumed.runtime_info == {"eta": 12.5, "nested": {"a": [1, None, "x"]}}


def test_infos() -> None:
    hub = MessageHub()
    hub.update_info_dict({"a": 1, "b": 2})
    assert (hub.get_info("a"), hub.get_info("c"), hub.get_info("c", 7)) == (1, None, 7)
    assert hub.pop_info("a") == 1
    assert hub.pop_info("a") is None


def test_all_that_was_saved_is_kept() -> None:
    hub, other = MessageHub(history=4), MessageHub(history=4)
    hub.retain("train/loss", None)
    for i in range(9):
        hub.update_scalar("train/loss", float(i))
    other.load_state_dict(hub.state_dict())
    assert other.get_scalar("train/loss").values == [float(i) for i in range(9)]


def test_a_history_names_what_is_no_scalar() -> None:
    hub = MessageHub()
    hub.history("train/table").append(torch.ones(3))
    with pytest.raises(ConfigError, match=r"^train/table: a tensor of shape \(3,\) is no scalar"):
        hub.fetch()


def _losses_of_a_rank(values: list[list[Any]], reads_early: list[bool]) -> list[list[float]]:
    """The history after each log line, where this rank saw ``values`` of each interval."""
    strategy = DDPStrategy()
    strategy.join()
    rank = strategy.topology.rank
    hub = MessageHub(history=4)
    seen = []
    for interval in values:
        for i, value in enumerate(interval):
            if reads_early[rank] and i == 4:
                hub.get_scalar("train/loss").current()
            hub.update_scalar("train/loss", torch.tensor(value + 10.0 * rank))
            hub.update_scalar("train/other", torch.tensor(value + 10.0 * rank))
        if reads_early[rank]:
            hub.get_scalar("train/loss").current()
        hub.fetch("train/", reduce="train/loss")
        with operations() as names:
            seen.append(hub.get_scalar("train/loss").values)
        assert names == [], "it is on the host"
        assert all(isinstance(value, float) for value in seen[-1])
    strategy.leave()
    return [*seen, hub.get_scalar("train/other").values]


@pytest.mark.distributed
@pytest.mark.parametrize("reads_early", [[False, False], [True, False]])
def test_only_the_loss_becomes_the_mean_over_ranks(workers2: WorkerGroup, reads_early: list[bool]) -> None:
    """Also when a hook on one rank looks at it between two log lines, which must not upset the exchange."""
    first, second = workers2.run(_losses_of_a_rank, [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0, 7.0, 8.0]], reads_early)
    assert first[:-1] == second[:-1] == [[6.0, 7.0], [6.0, 7.0, 8.0], [10.0, 11.0, 12.0, 13.0]]
    assert first[-1] == [5.0, 6.0, 7.0, 8.0]
    assert second[-1] == [15.0, 16.0, 17.0, 18.0]


@pytest.fixture
def registered() -> Iterator[None]:
    """Statistics that a test registers are forgotten after it."""
    before = dict(HistoryBuffer._statistics_methods)
    yield
    HistoryBuffer._statistics_methods.clear()
    HistoryBuffer._statistics_methods.update(before)


@pytest.mark.usefixtures("registered")
def test_statistics_of_ones_own() -> None:
    @HistoryBuffer.register_statistics
    def weighted(buffer: HistoryBuffer, window_size: int, weight: list[float]) -> float:
        return float(
            (buffer._log_history[-window_size:] * np.array(weight)).sum() / buffer._count_history[-window_size:].sum()
        )

    buffer = HistoryBuffer([1.0, 2.0], [1, 3])
    assert buffer.statistics("weighted", 2, [2, 1]) == 1.0
    assert buffer.statistics("max") == 2.0
    with pytest.raises(ConfigError, match=r'"weightd" is not allowed, choose .* or weighted, did you mean "weighted"'):
        buffer.statistics("weightd")
    for name in ("weighted", "mean"):
        with pytest.raises(ConfigError, match=f'register_statistics: "{name}" is a statistic already'):
            HistoryBuffer.register_statistics(SimpleNamespace(__name__=name))  # type: ignore[arg-type]


def test_a_history_in_mmengines_words() -> None:
    buffer = HistoryBuffer([1.0, 2.0], [1, 2], max_length=3)
    buffer.update(torch.tensor(4.0), 2)  # type: ignore[arg-type]
    buffer.update(5)
    values, counts = buffer.data
    assert (values.tolist(), counts.tolist()) == ([2.0, 4.0, 5.0], [2, 2, 1])
    values[:] = 0
    assert buffer.values == [2.0, 4.0, 5.0], "what was returned is a copy"
    assert HistoryBuffer(np.array([1.0, 2.0, 6.0]), np.array([1, 1, 2])).mean() == 2.25
    with pytest.raises(ConfigError, match="^scalar: 2 values have 1 counts$"):
        HistoryBuffer([1.0, 2.0], [1])
    with pytest.raises(ConfigError, match="^scalar: has no value yet$"):
        HistoryBuffer().current()


def test_what_is_not_to_be_resumed_is_not_saved() -> None:
    hub = MessageHub("mine", dict(kept=HistoryBuffer([1.0])), dict(info=1, other=2), dict(other=False))
    hub.update_scalar("passing", 1.0, resumed=False)
    hub.update_scalars(dict(a=1.0, b=dict(value=2.0, count=2)), resumed=False)
    state = hub.state_dict()
    assert list(state["scalars"]) == ["kept"]
    assert state["info"] == {"info": 1}
    assert hub.get_scalar("b").mean() == 1.0
    with pytest.raises(ConfigError, match=r"b: .* is no scalar, give dict\(value=..., count=...\)"):
        hub.update_scalars(dict(b=dict(count=2)))
