"""NPUStrategy where there is no NPU: tests/npu runs it on a simulated one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from flextrain import STRATEGIES, ConfigError, NPUStrategy, StrategyError


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
@pytest.mark.parametrize(
    "strategy",
    [
        dict(type="NPUStrategy"),
        dict(type="SingleDeviceStrategy", device="npu"),
        dict(type="DDPStrategy", device="npu"),
        dict(type="FSDPStrategy", device="npu"),
    ],
)
def test_without_torch_npu_one_error_says_what_to_install(strategy: dict[str, Any]) -> None:
    with pytest.raises(StrategyError) as caught:
        STRATEGIES.build(strategy).join()
    assert str(caught.value) == (
        'strategy.device: "npu" is not usable on this machine, install torch_npu (pip install flextrain[npu]) and '
        "Ascend's CANN"
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(device="cpu"), 'strategy.device: "cpu" is not allowed, choose "npu"'),
        (dict(compile_mode="jot"), 'strategy.compile_mode: "jot" is not allowed, choose "binary" or "jit"'),
        (dict(jit_compile=True), "strategy.jit_compile: unknown key"),
        (dict(matmul_hf32="yes"), 'strategy.matmul_hf32: "yes" is not allowed, give True or False'),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NPUStrategy(**options)
    assert str(caught.value).startswith(message)


def test_it_has_the_options_of_ddp() -> None:
    strategy = NPUStrategy(static_graph=True, sync_bn="torch", timeout_s=5)
    assert strategy.config.device == "npu"
    assert strategy.config.wrapper_arguments() == {"static_graph": True}
