"""The strategy of a run, from what is said of it in several places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flextrain.core.base.errors import ConfigError
from flextrain.core.base.registry import STRATEGIES
from flextrain.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    NPUStrategy,
    SingleDeviceStrategy,
    Strategy,
    build_strategy,
)


@pytest.mark.parametrize(
    "cfg, options, kind, config",
    [
        (None, {}, SingleDeviceStrategy, {}),
        (None, dict(compile=True, launcher="none"), SingleDeviceStrategy, dict(compile=True, launcher="none")),
        ("DDPStrategy", {}, DDPStrategy, {}),
        (DDPStrategy, dict(compile=None), DDPStrategy, dict(compile=False)),
        (DDPStrategy, dict(compile={}), DDPStrategy, dict(compile=True)),
        (dict(type="DDPStrategy", static_graph=True), {}, DDPStrategy, dict(static_graph=True)),
        (dict(type=DDPStrategy), dict(compile=True), DDPStrategy, dict(compile=True)),
        ("ddp", {}, DDPStrategy, {}),
        (dict(type="single", compile=True), dict(launcher="none"), SingleDeviceStrategy, dict(compile=True)),
        (dict(type="fsdp", wrap="blocks"), {}, FSDPStrategy, dict(wrap="blocks")),
        ("npu", {}, NPUStrategy, dict(device="npu")),
        (dict(type="flextrain.FSDPStrategy"), {}, FSDPStrategy, {}),
        (dict(type="flextrain.strategies:DDPStrategy", compile=True), dict(compile=True), DDPStrategy, dict(compile=True)),
    ],
)  # fmt: skip
def test_build(cfg: Any, options: dict[str, Any], kind: type, config: dict[str, Any]) -> None:
    strategy = build_strategy(cfg, **options)
    assert type(strategy) is kind
    assert {key: getattr(strategy.config, key) for key in config} == config


@pytest.mark.deepspeed
def test_a_short_name_stands_for_options_too() -> None:
    pytest.importorskip("deepspeed")
    zero = build_strategy(dict(type="zero3", zero_optimization=dict(overlap_comm=True), launcher="none"))
    assert type(zero) is DeepSpeedStrategy
    assert (zero.config.zero_optimization.stage, zero.config.zero_optimization.overlap_comm) == (3, True)


def test_every_strategy_has_a_short_name_of_its_own() -> None:
    expanded = STRATEGIES.short_names()
    assert {meant["type"] for meant in expanded.values()} == set(STRATEGIES)
    assert not set(expanded) & set(STRATEGIES)
    for short in expanded:
        kind = STRATEGIES.check(short, "strategy")
        assert short in vars(kind)["short_names"]


def test_a_subclass_does_not_take_its_bases_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class AStrategy(DDPStrategy): ...  # stands before DDPStrategy in the registry

    monkeypatch.setitem(STRATEGIES._modules, "AStrategy", AStrategy)
    assert type(build_strategy("ddp")) is DDPStrategy


def test_several_processes_train_with_ddp_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="here", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    assert type(build_strategy()) is DDPStrategy
    assert type(build_strategy("SingleDeviceStrategy")) is SingleDeviceStrategy  # which will refuse to be set up


def test_a_built_strategy_comes_back_as_it_is() -> None:
    strategy = DDPStrategy(compile=True)
    assert build_strategy(strategy) is strategy
    assert build_strategy(strategy, compile=True, launcher=None) is strategy


def test_strategies_of_third_parties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "third_party.py").write_text(
        "from flextrain import Strategy\nclass TheirStrategy(Strategy):\n    short_names = {'theirs': {}}\n"
    )
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[flextrain.strategies]\nTheirStrategy = third_party:TheirStrategy\nBroken = no_such:Strategy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level("WARNING", logger="flextrain")
    try:
        assert type(build_strategy("TheirStrategy")).__name__ == "TheirStrategy"
        assert type(build_strategy("theirs")).__name__ == "TheirStrategy"
        assert "TheirStrategy" in set(STRATEGIES)
        # One that cannot be loaded is a warning, and hides no other name.
        assert type(build_strategy("ddp")) is DDPStrategy
        assert "strategy \"Broken\" cannot be loaded: No module named 'no_such'" in caplog.text
    finally:
        STRATEGIES._modules.pop("TheirStrategy", None)


@pytest.mark.parametrize(
    "cfg, options, message",
    [
        ("DPStrategy", {}, 'strategy.type: "DPStrategy" is no known strategy, did you mean "DDPStrategy"?'),
        ("fdsp", {}, 'strategy.type: "fdsp" is no known strategy, did you mean "fsdp"?'),
        (dict(type="DDP"), {}, 'strategy.type: "DDP" is no known strategy, did you mean "ddp"?'),
        (dict(type="zero3", zero_optimization=dict(stage=2)), {}, 'strategy.zero_optimization.stage: 2 disagrees with type "zero3", give one of them'),
        (dict(type="ddp", static=True), {}, 'strategy.static: unknown key, did you mean "static_graph"?'),
        (dict(static_graph=True), {}, "strategy.type: missing, say which strategy"),
        (dict(tp=2), {}, "strategy.type: missing, say which strategy"),
        (dict(tpye="fsdp"), {}, 'strategy.tpye: unknown key, did you mean "type"?'),
        (dict(type="DDPStrategy", static=True), {}, 'strategy.static: unknown key, did you mean "static_graph"?'),
        (dict(type="DDPStrategy", compile=True), dict(compile=dict(backend="eager")), "strategy.compile: True disagrees with compile={'backend': 'eager'}, give one of them"),
        (DDPStrategy(), dict(compile=True), "compile: the strategy is already built, give compile=True to it"),
        (dict(type=dict), {}, "strategy.type: dict is no Strategy, subclass flextrain.Strategy"),
        (5, {}, "strategy.type: 5 is not allowed, give a strategy's class, name, or package.module:Name"),
        (None, dict(launcher="pytroch"), 'launcher: "pytroch" is not allowed'),
    ],
)  # fmt: skip
def test_wrong_configurations(cfg: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_strategy(cfg, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_every_strategy_is_a_strategy() -> None:
    assert all(issubclass(STRATEGIES.get(name), Strategy) for name in STRATEGIES)  # type: ignore[arg-type]


def test_an_unknown_name_without_a_near_one_lists_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        build_strategy("ColossalAI")
    assert str(caught.value) == (
        'strategy.type: "ColossalAI" is no known strategy, choose DDPStrategy, DeepSpeedStrategy, FSDPStrategy, MeshStrategy, '
        "NPUStrategy, SingleDeviceStrategy, ddp, fsdp, mesh, npu, single, zero0, zero1, zero2 or zero3"
    )
    with pytest.raises(ConfigError) as caught:  # "NPUStrategy" is like it in nothing but its end
        build_strategy("TopKStrategy")
    assert str(caught.value).startswith('strategy.type: "TopKStrategy" is no known strategy, choose DDPStrategy, ')
    assert str(caught.value).endswith("; one of your own: import its module, or give package.module:TopKStrategy")
