"""OptimWrappers from every form of configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD

from flextrain.core.base.errors import ConfigError
from flextrain.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, OptimWrapperDict, build_optim_wrapper

OPTIMIZER = dict(type="SGD", lr=0.1)


@pytest.mark.parametrize(
    "cfg, kind",
    [
        (dict(optimizer=OPTIMIZER), OptimWrapper),
        (dict(type="OptimWrapper", optimizer=OPTIMIZER), OptimWrapper),
        (dict(type="AmpOptimWrapper", optimizer=OPTIMIZER, dtype="bfloat16"), AmpOptimWrapper),
        (dict(type=AmpOptimWrapper, optimizer=OPTIMIZER), AmpOptimWrapper),
        (dict(type="flextrain.optim:ApexOptimWrapper", optimizer=OPTIMIZER), ApexOptimWrapper),
        (SGD([torch.zeros(1)]), OptimWrapper),
        (dict(optimizer=SGD([torch.zeros(1)])), OptimWrapper),
        (dict(g=dict(optimizer=OPTIMIZER), d=OptimWrapper(OPTIMIZER)), OptimWrapperDict),
    ],
)
def test_build(cfg: Any, kind: type) -> None:
    assert type(build_optim_wrapper(cfg)) is kind


def test_wrappers_come_back_as_they_are() -> None:
    wrapper = OptimWrapper(OPTIMIZER)
    several = OptimWrapperDict(a=wrapper)
    assert build_optim_wrapper(wrapper) is wrapper
    assert build_optim_wrapper(several) is several


def test_arguments_arrive() -> None:
    cfg = dict(optimizer=OPTIMIZER, accumulative_counts=3, clip_grad=dict(max_norm=2))
    wrapper = build_optim_wrapper(cfg)
    assert isinstance(wrapper, OptimWrapper)
    assert wrapper.accumulate == 3
    assert wrapper.clip_grad is not None
    assert wrapper.clip_grad.max_norm == 2
    assert cfg == dict(optimizer=OPTIMIZER, accumulative_counts=3, clip_grad=dict(max_norm=2))


def test_several_by_name() -> None:
    several = build_optim_wrapper(dict(g=dict(optimizer=OPTIMIZER), d=dict(type="OptimWrapper", optimizer=OPTIMIZER)))
    assert isinstance(several, OptimWrapperDict)
    assert list(several) == ["g", "d"]
    assert several["d"].where == "optim_wrapper.d"


@pytest.mark.parametrize(
    "cfg, message",
    [
        (None, "optim_wrapper: None is not allowed, give dict(optimizer=dict(type=...))"),
        (dict(), "optim_wrapper.optimizer: missing, give dict(type=...)"),
        (dict(type="OptimWrapper"), "optim_wrapper.optimizer: missing, give dict(type=...)"),
        (dict(optimiser=OPTIMIZER), 'optim_wrapper.optimiser: unknown key, did you mean "optimizer"?'),
        (dict(type="OptimWrapper", optimzer=OPTIMIZER), 'optim_wrapper.optimzer: unknown key, did you mean "optimizer"?'),
        (dict(type="AmpOptimWraper", optimizer=OPTIMIZER), 'optim_wrapper.type: "AmpOptimWraper" is no known optimizer wrapper, did you mean "AmpOptimWrapper"?'),
        (dict(optimizer=OPTIMIZER, accumulative_count=2), 'optim_wrapper.accumulative_count: unknown key, did you mean "accumulative_counts"?'),
        (dict(optimizer=OPTIMIZER, accumulative_counts="2"), 'optim_wrapper.accumulative_counts: "2" is not allowed, give a number'),
        (dict(optimizer=OPTIMIZER, accumulative_counts=0), "optim_wrapper.accumulative_counts: 0 is not allowed"),
        (dict(optimizer=OPTIMIZER, clip_grad=5), "optim_wrapper.clip_grad: 5 is not allowed, give a dict"),
        (dict(optimizer=OPTIMIZER, dtype="float16"), "optim_wrapper.dtype: unknown key"),
        (dict(type=SGD, optimizer=OPTIMIZER), "optim_wrapper.optimizer: unknown key"),
        (dict(g=dict(optimizer=OPTIMIZER), d=dict()), "optim_wrapper.d.optimizer: missing"),
        (dict(g=dict(optimizer=dict(type="SDG"))), 'optim_wrapper.g.optimizer.type: "SDG" is no known optimizer'),
    ],
)  # fmt: skip
def test_wrong_configurations(cfg: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optim_wrapper(cfg)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_type_that_is_no_wrapper() -> None:
    with pytest.raises(ConfigError, match="^optim_wrapper.type: .* is no optimizer wrapper$"):
        build_optim_wrapper(dict(type=dict, optimizer=OPTIMIZER))
