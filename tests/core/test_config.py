"""Configurations: what is refused, and the one line that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import pydantic
import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.config import Config, check_call, validate
from flextrain.core.base.errors import ConfigError


class Part(Config):
    lr: float | int = 1.0
    kind: Literal["norm", "value"] = "norm"


class Whole(Config):
    count: int
    name: str | None = None
    flag: bool = False
    scale: float | dict[str, Any] | Literal["dynamic"] = "dynamic"
    part: Part | None = None
    parts: list[Part] = []
    pair: tuple[int, int] = (1, 2)
    names: list[str] = []
    function: Callable[[int], int] | None = None
    tables: dict[str, dict[str, Any]] = {}

    @pydantic.model_validator(mode="after")
    def _check(self) -> Whole:
        if self.count == 13:
            raise ValueError("13 brings bad luck")
        if self.count == 14:
            raise ConfigError("here.count: 14 is not allowed either")
        return self


KEYS = "count, name, flag, scale, part, parts, pair, names, function or tables"


@pytest.mark.parametrize(
    "data, message",
    [
        # keys
        (dict(cuont=1), 'here.cuont: unknown key, did you mean "count"?'),
        ({"count": 1, "zzz": 1}, f"here.zzz: unknown key, choose {KEYS}"),
        ({"count": 1, "max-norm": 1}, f"here.max-norm: unknown key, choose {KEYS}"),
        ({"count": 1, "two\nlines": 1}, f"here.two lines: unknown key, choose {KEYS}"),
        ({"count": 1, 7: 1}, f"here[7]: unknown key, choose {KEYS}"),
        (dict(name="a"), "here.count: missing, it must be given"),
        (dict(count="a", oops=1), f"here.oops: unknown key, choose {KEYS}"),
        # types
        (dict(count="1"), 'here.count: "1" is not allowed, give an integer'),
        (dict(count=1.0), "here.count: 1.0 is not allowed, give an integer"),
        (dict(count=True), "here.count: True is not allowed, give an integer"),
        (dict(count="a\nb"), 'here.count: "a b" is not allowed, give an integer'),
        (dict(count="y" * 99), f'here.count: "{"y" * 76}... is not allowed, give an integer'),
        (dict(count=1, name=3), "here.name: 3 is not allowed, give a string"),
        (dict(count=1, flag=1), "here.flag: 1 is not allowed, give True or False"),
        (dict(count=1, names="abc"), 'here.names: "abc" is not allowed, give a list'),
        (dict(count=1, names=["a", 1]), "here.names[1]: 1 is not allowed, give a string"),
        (dict(count=1, pair=[1, 2]), "here.pair: [1, 2] is not allowed, give a tuple"),
        (dict(count=1, pair=(1,)), "here.pair[1]: missing, it must be given"),
        (dict(count=1, function=3), "here.function: 3 is not allowed, give a function"),
        (5, "here: 5 is not allowed, give a dict"),
        # nested
        (dict(count=1, part=5), "here.part: 5 is not allowed, give a dict"),
        (dict(count=1, part=dict(lrr=1)), 'here.part.lrr: unknown key, did you mean "lr"?'),
        (dict(count=1, part=dict(Kind="norm")), 'here.part.Kind: unknown key, did you mean "kind"?'),
        (dict(count=1, part=dict(lr="a", kind=3)), 'here.part.lr: "a" is not allowed, give a number'),
        (dict(count=1, parts=[dict(), dict(lr="a")]), 'here.parts[1].lr: "a" is not allowed, give a number'),
        (dict(count=1, parts=[dict(lrr=1)]), 'here.parts[0].lrr: unknown key, did you mean "lr"?'),
        (dict(count=1, tables={"a-b.c": 3}), "here.tables.a-b.c: 3 is not allowed, give a dict"),
        (dict(count=1, tables={"Key": 3}), "here.tables.Key: 3 is not allowed, give a dict"),
        # literals and unions
        (dict(count=1, part=dict(kind="vaule")), 'here.part.kind: "vaule" is not allowed, choose "norm" or "value", did you mean "value"?'),
        (dict(count=1, part=dict(kind=3)), 'here.part.kind: 3 is not allowed, choose "norm" or "value"'),
        (dict(count=1, scale=[1]), 'here.scale: [1] is not allowed, give a number or a dict or "dynamic"'),
        # relations between fields
        (dict(count=13), "here: 13 brings bad luck"),
        (dict(count=14), "here.count: 14 is not allowed either"),
    ],
)  # fmt: skip
def test_wrong_configuration(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Whole, data, "here")
    assert str(caught.value) == message


def test_right_configuration_stays_as_it_is() -> None:
    whole = validate(Whole, dict(count=2, part=dict(lr=1), scale=3, pair=(3, 4)), "here")
    assert (whole.count, whole.part, whole.scale, whole.pair) == (2, Part(lr=1), 3, (3, 4))
    with pytest.raises(pydantic.ValidationError):
        whole.count = 3  # type: ignore[misc]


def function(
    first: int,
    ratio: float = 1.0,
    labels: Sequence[str] = (),
    weight: Tensor | float = 0.0,
    name: str | None = None,
    level: Literal[1, 2] = 1,
    table: Mapping[str, int] | None = None,
    items: Iterable[int] = (),
    sizes: tuple[float, ...] = (),
    anything: Any = None,
    *,
    late: bool = False,
) -> None: ...


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(first=1),
        dict(first=1, ratio=2),
        dict(first=1, labels=["a"], weight=torch.ones(1), name=None, level=2),
        dict(first=1, table={"a": 1}, items=range(3), sizes=(1, 2.5), anything=object(), late=True),
    ],
)
def test_right_call(kwargs: dict[str, Any]) -> None:
    check_call(function, kwargs, "call")


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(), "call.first: missing, it must be given"),
        (dict(first=1, latr=True), 'call.latr: unknown key, did you mean "late"?'),
        (dict(first="1"), 'call.first: "1" is not allowed, give an integer'),
        (dict(first=1, ratio="x"), 'call.ratio: "x" is not allowed, give a number'),
        (dict(first=1, ratio=True), "call.ratio: True is not allowed, give a number"),
        (dict(first=1, labels="abc"), 'call.labels: "abc" is not allowed, give a list'),
        (dict(first=1, labels=["a", 1]), "call.labels[1]: 1 is not allowed, give a string"),
        (dict(first=1, weight="x"), 'call.weight: "x" is not allowed, give Tensor or a number'),
        (dict(first=1, name=1), "call.name: 1 is not allowed, give a string"),
        (dict(first=1, level=3), "call.level: 3 is not allowed, choose 1 or 2"),
        (dict(first=1, table=[1]), "call.table: [1] is not allowed, give a dict"),
        (dict(first=1, table={"a": "b"}), 'call.table.a: "b" is not allowed, give an integer'),
        (dict(first=1, items=3), "call.items: 3 is not allowed, give a list"),
        (dict(first=1, sizes=(1, "a")), 'call.sizes[1]: "a" is not allowed, give a number'),
        (dict(first=1, late=1), "call.late: 1 is not allowed, give True or False"),
    ],
)
def test_wrong_call(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_call(function, kwargs, "call")
    assert str(caught.value) == message


def test_arguments_that_the_library_provides() -> None:
    check_call(function, dict(), "call", provided=("first",))
    with pytest.raises(ConfigError, match=r"^call.first: is filled in by flextrain, leave it out$"):
        check_call(function, dict(first=1), "call", provided=("first",))
    with pytest.raises(ConfigError, match="call.firs: unknown key, choose ratio, labels"):
        check_call(function, dict(firs=1), "call", provided=("first",))


def takes_any(first: int, **others: Any) -> None: ...


def takes_nothing() -> None: ...


def unresolvable(first: Nonsense, second: int = 1) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    "target, kwargs, message",
    [
        (takes_any, dict(first=1, other=2), None),
        (takes_any, dict(other=2), "call.first: missing"),
        (takes_nothing, dict(other=2), "call.other: unknown key, no key is allowed"),
        (unresolvable, dict(first=object()), None),
        (unresolvable, dict(first=1, third=2), "call.third: unknown key"),
        (nn.Linear, dict(in_features=1, out_features=1, bais=True), 'call.bais: unknown key, did you mean "bias"?'),
        (nn.Linear, dict(in_features="1", out_features=1), 'call.in_features: "1" is not allowed, give an integer'),
        (max, dict(whatever=1), None),  # has no signature to check against
    ],
)
def test_all_kinds_of_callables(target: Any, kwargs: dict[str, Any], message: str | None) -> None:
    if message is None:
        check_call(target, kwargs, "call")
        return
    with pytest.raises(ConfigError) as caught:
        check_call(target, kwargs, "call")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
