"""The interface of Strategy: few members, described in docs/strategy_interface.md, with a version; earlier names are passed on or refused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flextrain import (
    ConfigError,
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    MeshStrategy,
    NPUStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from flextrain.strategies import build_strategy, interface, parts
from flextrain.strategies.interface import INTERFACE_VERSION

PAGE = (Path(__file__).parents[2] / "docs" / "strategy_interface.md").read_text()
MEMBERS = 25
"""How many public members the class has; the number only falls. What else there is takes a strategy."""
ATTRIBUTES = 8
BUILT_IN = (SingleDeviceStrategy, DDPStrategy, NPUStrategy, FSDPStrategy, MeshStrategy, DeepSpeedStrategy)


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def rows(header: str) -> list[list[str]]:
    """The rows of the page's table that begins with this header."""
    table = PAGE[PAGE.index(f"| {header} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)", cell)


def test_the_class_has_few_members() -> None:
    assert len(public(Strategy)) <= MEMBERS, "let it take a strategy instead, as in strategies/parts/"
    assert len({name for name in vars(Strategy()) if not name.startswith("_")}) <= ATTRIBUTES


def test_the_page_lists_every_member_and_how_far_a_backend_has_it() -> None:
    said = {name: row[1] for row in rows("member") for name in names(row[0])}
    assert {name for name in said if not name.startswith("_")} == public(Strategy)
    assert set(said.values()) == {"must", "may", "need not"}
    for name, how in said.items():
        own = [kind for kind in BUILT_IN if getattr(kind, name) is not getattr(Strategy, name)]
        assert how != "must" or {DDPStrategy, FSDPStrategy, DeepSpeedStrategy} <= set(own), name
        assert how != "need not" or not own, name


def registered() -> set[str]:
    return {name for name in parts.__all__ if hasattr(getattr(parts, name), "register")}


def test_the_page_lists_every_function_that_can_be_registered() -> None:
    assert {name for row in rows("function") for name in names(row[0]) if name in parts.__all__} == registered()


def test_earlier_names_are_passed_on_with_a_warning() -> None:
    strategy: Any = SingleDeviceStrategy(device="cpu")
    with pytest.warns(FutureWarning, match=r"Strategy.setup_environment .* use Strategy.join"):
        strategy.setup_environment()
    strategy.setup(nn.Linear(2, 1))
    with pytest.warns(FutureWarning, match=r"use full_weights\(strategy\) of flextrain.strategies.parts") as warned:
        context = strategy.full_weights(ranks=[0])
    assert warned[0].filename == __file__, "the caller's line is shown"
    with context as model:
        assert model is strategy.module
    for name in (*interface._RENAMED, *interface._REGISTERED, *interface._ONE_FOR_ALL):
        with (
            nullcontext() if name == "prepare" else pytest.warns(FutureWarning, match=rf"Strategy.{name} is deprecated")
        ):
            getattr(strategy, name)
    with pytest.raises(AttributeError, match="'SingleDeviceStrategy' object has no attribute 'full_weight'"):
        strategy.full_weight  # noqa: B018


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("setup_environment", "override join"),
        ("explain", "register a function for your class: flextrain.strategies.parts.explain.register"),
        ("full_weights", "flextrain.strategies.parts.full_weights takes any strategy, rename yours"),
        ("prepare", r"override setup\(model, optim\)"),
    ],
)
def test_an_override_of_an_earlier_name_is_refused_with_the_way_to_do_it_now(name: str, advice: str) -> None:
    kind = type("Theirs", (DDPStrategy,), {name: lambda self: None, "__module__": __name__})
    for build in (kind, lambda: build_strategy(dict(type=kind))):
        with pytest.raises(ConfigError, match=rf"^strategy: Theirs.{name} is never called here, {advice}"):
            build()


def test_what_is_advised_can_be_done() -> None:
    for name, advice in interface.EARLIER.items():
        if found := re.search(r"parts.(\w+).register", advice):
            assert found[1] in registered(), name
        elif found := re.search(r"override (\w+)", advice):
            assert hasattr(Strategy, found[1]), name


@pytest.mark.parametrize(
    ("stated", "advice"),
    [
        (1, "update its package, or change it as docs/strategy_interface.md says"),
        (INTERFACE_VERSION + 1, "update flextrain"),
        (range(INTERFACE_VERSION + 1, INTERFACE_VERSION + 3), "update flextrain"),
        (range(1, INTERFACE_VERSION), "update its package"),
    ],
)
def test_a_class_for_another_version_is_refused(stated: int | range, advice: str) -> None:
    class Theirs(DDPStrategy):
        interface_version = stated

    versions = " or ".join(map(str, stated if isinstance(stated, range) else [stated]))
    said = rf"^strategy: Theirs is written for version {versions} of Strategy's interface and .* version {INTERFACE_VERSION}; {advice}"
    with pytest.raises(ConfigError, match=said):
        build_strategy(dict(type=Theirs))
    for tried in (INTERFACE_VERSION, range(1, INTERFACE_VERSION + 1)):
        Theirs.interface_version = tried
        assert isinstance(build_strategy(dict(type=Theirs)), Theirs)


def test_a_function_holds_for_subclasses_and_may_ask_that_of_the_class_above() -> None:
    class Theirs(FSDPStrategy):
        """Says something about one error, and what FSDPStrategy says about others."""

    class Another(Theirs):
        """Registers nothing."""

    @parts.explain.register(Theirs)
    def _(strategy: Theirs, error: BaseException) -> str | None:
        return "theirs" if "theirs" in str(error) else parts.explain.dispatch(FSDPStrategy)(strategy, error)

    assert parts.explain(Another(), RuntimeError("theirs")) == "theirs"
    assert "sharded" in str(parts.explain(Another(), RuntimeError("got mixed torch.Tensor and DTensor")))
    assert parts.explain(FSDPStrategy(), RuntimeError("theirs")) is None
