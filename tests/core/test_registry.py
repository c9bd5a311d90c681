"""Registries: every way to name a class, what an argument may be, and what a wrong one is answered with."""

from __future__ import annotations

import functools
import os.path
import sys
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ElementTree

import pytest
import torch
from torch import nn

from flextrain.core.base import registry as library
from flextrain.core.base.errors import ConfigError
from flextrain.core.base.registering_modules import REGISTERING_MODULES
from flextrain.core.base.registry import OPTIM_WRAPPERS, OPTIMIZERS, STRATEGIES, Registry
from flextrain.optim.muon import Muon
from flextrain.strategies.deepspeed import half_precision

THINGS = Registry("thing", lists_names=True)


@THINGS.register_module()
class Lamp:
    def __init__(self, watts: int = 5, *, where: str = "") -> None:
        self.watts, self.where = watts, where


@THINGS.register_module(["Chair", "Seat"])
class Chair:
    def __init__(self, where: str = "kitchen", **others: Any) -> None:
        self.where, self.others = where, others


def make_lamp(watts: int) -> Lamp:
    return Lamp(watts)


# Finding


@pytest.mark.parametrize(
    "key, found",
    [
        ("Lamp", Lamp),
        ("Seat", Chair),
        (Lamp, Lamp),
        (make_lamp, make_lamp),
        ("torch.nn:Linear", nn.Linear),
        ("torch.nn:Module.eval", nn.Module.eval),
        ("torch.nn.Linear", nn.Linear),
        ("torch.nn.Module.eval", nn.Module.eval),
        ("torch.optim.sgd.SGD", torch.optim.SGD),
        ("os.path.join", os.path.join),  # its module has another name
        ("xml.etree.ElementTree.ElementTree", ElementTree),
    ],
)
def test_names_of_classes(key: Any, found: Any) -> None:
    assert THINGS.get(key) is found
    assert THINGS.resolve(key) is found
    assert (key in THINGS) == (key in ("Lamp", "Seat", Lamp))


@pytest.mark.parametrize(
    "key",
    ["Lmap", "", "torch.nn.Linaer", "torchh.nn.Linear", "torch.nn:Linaer", "torchh:x", "..x", "a b.c", "torch.nn."],
)
def test_get_gives_none_for_what_is_not_there(key: str) -> None:
    assert THINGS.get(key) is None
    assert key not in THINGS


def test_a_function_comes_before_a_module_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "with_ops"
    package.mkdir()
    (package / "__init__.py").write_text("from .nms import nms\n")
    (package / "nms.py").write_text("def nms(): ...\n\n\nclass Soft: ...\n")
    (package / "late.py").write_text("class Late: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert THINGS.resolve("with_ops.nms").__name__ == "nms"
    assert THINGS.resolve("with_ops.late.Late").__name__ == "Late"
    assert THINGS.resolve("with_ops.nms:Soft").__name__ == "Soft"


@pytest.mark.parametrize(
    "key, message",
    [
        ("Lmap", 'here: "Lmap" is no known thing, did you mean "Lamp"?'),
        ("lamp", 'here: "lamp" is no known thing, did you mean "Lamp"?'),
        ("Xyz", 'here: "Xyz" is no known thing, choose Chair, Lamp or Seat'),
        ("", 'here: "" is no known thing, choose Chair, Lamp or Seat'),
        ("torch.nn.Linaer", 'here: "torch.nn.Linaer" does not exist, torch.nn has no Linaer, did you mean "Linear"?'),
        ("torch.optimm.SGD", 'here: "torch.optimm.SGD" does not exist, torch has no optimm, did you mean "optim"?'),
        ("torchh.nn.Linear", "here: \"torchh.nn.Linear\" cannot be imported, No module named 'torchh'"),
        ("torch.pi", 'here: "torch.pi" is no class or function'),
        ("torch.nn", 'here: "torch.nn" is no class or function'),
        ("torch..nn", 'here: "torch..nn" is not allowed, give package.module.Name'),
        ("torch.nn:Linaer", 'here: "torch.nn:Linaer" does not exist, torch.nn has no Linaer, did you mean "Linear"?'),
        ("torchh.nn:Linear", "here: \"torchh.nn:Linear\" cannot be imported, No module named 'torchh'"),
        ("torch:pi", 'here: "torch:pi" is no class or function'),
        (":Linear", 'here: ":Linear" is not allowed, give package.module:Name'),
        ("torch.nn:", 'here: "torch.nn:" is not allowed, give package.module:Name'),
        ("..nn:Linear", 'here: "..nn:Linear" is not allowed, give package.module:Name'),
        (7, "here: 7 is not allowed, give a thing's class, name, or package.module:Name"),
        (nn.ReLU(), "here: ReLU() is not allowed, give a thing's class, name, or package.module:Name"),
    ],
)
def test_get_what_is_not_there(key: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        THINGS.resolve(key, "here")
    assert str(caught.value) == message


def test_names_are_listed_with_those_of_lookups() -> None:
    things = Registry("thing")
    things.register_module("b")(Lamp)
    things.add_lookup(lambda name: Chair if name == "a" else None, lambda: ["a"])
    assert list(things) == ["a", "b"]
    assert things.get("a") is Chair
    assert "a" in things
    assert "c" not in things
    assert len(things) == 2
    assert Lamp in things
    assert nn.ReLU not in things


def test_a_module_that_fails_to_import_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "has_a_bug.py").write_text("import torch\ntorch.no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported, No module named 'not_installed_anywhere'"):
        THINGS.resolve("needs_more:Thing")
    for find in (THINGS.get, THINGS.resolve):  # it is there, so None would be wrong
        with pytest.raises(ConfigError, match="cannot be imported, No module named 'not_installed_anywhere'"):
            find("needs_more.Thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        THINGS.resolve("has_a_bug:Thing")


def test_locations_are_imported_at_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    things = Registry("thing", locations=["registers_late"])
    (tmp_path / "registers_late.py").write_text(
        "from late_things import THINGS\n\n@THINGS.register_module()\nclass Late: ...\n"
    )
    (tmp_path / "late_things.py").write_text("THINGS = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    import late_things

    late_things.THINGS = things
    assert things.get("Late").__name__ == "Late"


def test_installed_packages_add_names_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebody.py").write_text("class Table: ...\n")
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[test.things]\nTable = somebody:Table\n[other.things]\nShelf = somebody:Table\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    things = Registry("thing", entry_points="test.things")
    assert list(things) == ["Table"]
    assert things.get("Table").__module__ == "somebody"
    with pytest.raises(ConfigError, match='did you mean "Table"'):
        things.resolve("Tabel")
    later = tmp_path / "later-1.0.dist-info"
    later.mkdir()
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (later / "entry_points.txt").write_text("[test.things]\nShelf = somebody:Table\n")
    assert list(things) == ["Shelf", "Table"], "installed in the same folder while the program runs"


def test_who_lists_no_names_is_asked_last() -> None:
    asked: list[str] = []
    things = Registry("thing")

    def unlisted(key: str) -> None:
        asked.append(key)

    things.add_lookup(unlisted)
    things.add_lookup({"Lamp": Lamp}.get, lambda: ["Lamp"])
    assert things.get("Lamp") is Lamp
    assert not asked
    assert things.get("Chair") is None
    assert asked == ["Chair"]


# Registering


def test_a_name_is_taken_once() -> None:
    things = Registry("thing")
    things.register_module()(Lamp)
    things.register_module()(Lamp)  # a module that is imported twice
    with pytest.raises(ConfigError, match=r'^thing "Lamp": already registered as .*Lamp.*, pass force=True$'):
        things.register_module("Lamp")(Chair)
    things.register_module("Lamp", force=True)(Chair)
    assert things.get("Lamp") is Chair


def test_registering_as_mmengine_does() -> None:
    things = Registry("thing")
    assert things.register_module(name="light", module=Lamp) is Lamp
    assert things.get("light") is Lamp
    assert things.register_module(module=make_lamp) is make_lamp
    assert things.register_module("lamp", True, Chair) is Chair
    things.register_module(name=("a", "b"), module=functools.partial(Lamp, watts=2))
    assert things.build(dict(type="b")).watts == 2
    assert list(things) == ["a", "b", "lamp", "light", "make_lamp"]
    assert things.module_dict.pop("light") is Lamp
    assert "light" not in things


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(name=Lamp), "thing: register_module got a class for a name, write register_module() with brackets"),
        (dict(name=5), "thing 5: is no name, give a string, or a list of them"),
        (dict(name=["a", 5]), "thing ['a', 5]: is no name, give a string, or a list of them"),
        (dict(force="yes", module=Lamp), "thing: force='yes' is not allowed, give True or False"),
        (dict(name="lamp", module=5), "thing: 5 cannot be registered, give a class or function"),
        (dict(module=functools.partial(Lamp)), "has no name of its own, give register_module(name=...)"),
    ],
)
def test_registering_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    things = Registry("thing")
    with pytest.raises(ConfigError) as caught:
        things.register_module(**arguments)
    assert str(caught.value).endswith(message)
    assert len(things) == 0


# Building


@pytest.mark.parametrize(
    "cfg, watts",
    [
        (dict(type="Lamp", watts=7), 7),
        (dict(type=Lamp), 5),
        ("Lamp", 5),
        (Lamp, 5),
        (dict(type=make_lamp, watts=8), 8),
        (functools.partial(Lamp, watts=9), 9),
        (dict(type=functools.partial(Lamp, watts=9)), 9),
    ],
)
def test_build(cfg: Any, watts: int) -> None:
    assert THINGS.build(cfg).watts == watts


@pytest.mark.parametrize(
    "cfg, default_args, watts",
    [
        (dict(type="Lamp"), dict(watts=3), 3),
        (dict(type="Lamp", watts=7), dict(watts=3, type="Chair"), 7),
        (dict(watts=7), dict(type=Lamp), 7),
        (Lamp, dict(watts=3), 3),
        ("Lamp", dict(), 5),
        ("Lamp", None, 5),
    ],
)
def test_build_with_defaults(cfg: Any, default_args: Any, watts: int) -> None:
    assert THINGS.build(cfg, default_args=default_args).watts == watts
    with pytest.raises(ConfigError, match='^thing.wats: unknown key, did you mean "watts"'):
        THINGS.build(dict(type="Lamp"), default_args=dict(wats=3))


def test_build_leaves_the_configuration_alone() -> None:
    cfg = dict(type="Lamp", watts=7)
    THINGS.build(cfg)
    assert cfg == dict(type="Lamp", watts=7)


@pytest.mark.parametrize(
    "cfg, message",
    [
        (dict(typ="Lamp"), 'here.typ: unknown key, did you mean "type"?'),
        (dict(), "here.type: missing, say which thing"),
        (dict(type="Lmap"), 'here.type: "Lmap" is no known thing, did you mean "Lamp"?'),
        ("Lmap", 'here: "Lmap" is no known thing, did you mean "Lamp"?'),
        (dict(type="Lamp", wats=5), 'here.wats: unknown key, did you mean "watts"?'),
        (dict(type="Lamp", watts="5"), 'here.watts: "5" is not allowed, give an integer'),
        (dict(type="Lamp", where="there"), "here.where: is filled in by flextrain, leave it out"),
        (dict(type=make_lamp), "here.watts: missing, it must be given"),
        (nn.ReLU(), "here: ReLU() is not allowed, give dict(type=...), a class, or a name"),
        (None, "here: None is not allowed, give dict(type=...), a class, or a name"),
        ([Lamp], "is not allowed, give dict(type=...), a class, or a name"),
    ],
)
@pytest.mark.parametrize("method", ["build", "check"])
def test_build_and_check_refuse_alike(method: str, cfg: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(THINGS, method)(cfg, "here")
    assert str(caught.value).endswith(message)
    assert "\n" not in str(caught.value)


def test_check_builds_nothing() -> None:
    calls = []

    def factory(size: int) -> None:
        calls.append(size)

    assert THINGS.check(dict(type=factory, size=1), "here") is factory
    assert THINGS.check(dict(type=factory), "here", provided=("size",)) is factory
    assert calls == []


def test_where_is_passed_to_those_that_take_it_by_keyword() -> None:
    assert THINGS.build("Lamp", "train_cfg.lamp").where == "train_cfg.lamp"
    assert THINGS.build("Lamp").where == "thing"
    chair = THINGS.build(dict(type="Chair", colour="red"), "train_cfg.chair")  # the user's own parameter of that name
    assert (chair.where, chair.others) == ("kitchen", {"colour": "red"})
    assert THINGS.build(dict(type="Chair", where="hall"), "here").where == "hall"


def test_provided_arguments_are_given_to_those_that_take_them() -> None:
    assert THINGS.build("Lamp", watts=3, runner=object()).watts == 3
    assert THINGS.build("Chair", watts=3).others == {"watts": 3}
    with pytest.raises(ConfigError, match="here.watts: is filled in by flextrain"):
        THINGS.build(dict(type="Lamp", watts=3), "here", watts=4)


# What is in them


def test_all_torch_optimizers_have_their_names() -> None:
    kinds = [v for v in vars(torch.optim).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)]
    kinds.remove(torch.optim.Optimizer)
    own = [
        kind for kind in kinds if kind.__name__ == "Muon"
    ]  # flextrain's has this name, since torch's takes no shards
    assert {OPTIMIZERS.get(kind.__name__) for kind in kinds if kind not in own} == {*kinds} - {*own}
    assert OPTIMIZERS.get("Muon") is Muon
    assert {kind.__name__ for kind in kinds} <= set(OPTIMIZERS)
    for name in ("Optimizer", "lr_scheduler", "Sgd"):
        with pytest.raises(ConfigError, match=f'"{name}" is no known optimizer'):
            OPTIMIZERS.resolve(name)


@pytest.mark.parametrize(
    "registry, name",
    [
        ("OPTIM_WRAPPERS", "AmpOptimWrapper"),
        ("OPTIM_WRAPPER_CONSTRUCTORS", "DefaultOptimWrapperConstructor"),
        ("PARAM_SCHEDULERS", "CosineAnnealingLR"),
        ("STRATEGIES", "DDPStrategy"),
        ("DATA_SAMPLERS", "DefaultSampler"),
        ("FUNCTIONS", "default_collate"),
        ("HOOKS", "CheckpointHook"),
        ("LOOPS", "EpochBasedTrainLoop"),
        ("REPORTERS", "JsonLinesReporter"),
        ("MODELS", "BaseDataPreprocessor"),
    ],
)
def test_registries_know_what_they_load(registry: str, name: str) -> None:
    found: Registry = getattr(library, registry)
    assert found.get(name).__name__ == name
    assert name in set(found)


def test_names_that_are_refused_say_what_to_do_instead() -> None:
    registry = Registry("pet")
    registry.register_module(name="Cat", module=dict)
    registry.refuse({"Bat": "it flies away, choose Cat"})
    with pytest.raises(ConfigError, match='^model.type: "Bat" is not supported, it flies away, choose Cat$'):
        registry.build(dict(type="Bat"), "model")
    assert registry.get("Bat") is None
    assert "Bat" not in registry
    assert list(registry) == ["Cat"]
    registry.register_module(name="Bat", module=dict)
    assert registry.get("Bat") is dict, "somebody's own class of this name"


def test_a_registry_has_no_parent() -> None:
    with pytest.raises(ConfigError, match="^parent: unknown key, call register_module of the registry that shall know"):
        Registry("pet", parent=library.MODELS)  # type: ignore[call-arg]


# Modules that list the names they register


def test_a_module_is_imported_when_a_name_of_its_own_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when another class takes its name; an error about an unknown name knows all."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "LAZY", lazy := Registry("lazy thing", lists_names=True), raising=False)
    monkeypatch.setitem(REGISTERING_MODULES, "lazy thing", {f"lazy_{name}": (name.title(), name) for name in "abc"})
    for name in "abc":
        text = f"class {name.title()}:\n    short_names = {{'{name}': {{}}}}\n"
        (tmp_path / f"lazy_{name}.py").write_text(
            f"from flextrain.core.base.registry import LAZY\n@LAZY.register_module()\n{text}"
        )

    def imported() -> set[str]:
        return {name for name in "abc" if f"lazy_{name}" in sys.modules}

    assert lazy.build("a").__module__ == "lazy_a"
    assert imported() == {"a"}
    with pytest.raises(ConfigError, match='lazy thing "B": already registered as'):
        lazy.register_module(name="B", module=Lamp)
    assert imported() == {"a", "b"}
    with pytest.raises(ConfigError, match='thing: "d" is no known lazy thing, choose A, B, C, a, b or c'):
        lazy.build("d", "thing")
    assert imported() == {"a", "b", "c"}


@pytest.mark.parametrize("registry", [STRATEGIES, OPTIMIZERS, OPTIM_WRAPPERS])
def test_the_names_listed_for_a_module_are_those_it_registers(registry: Registry) -> None:
    for module, listed in REGISTERING_MODULES[registry.name].items():
        own = {name for name, kind in registry.module_dict.items() if f"{kind.__module__}.".startswith(f"{module}.")}
        own |= {short for short, meant in registry.short_names().items() if meant["type"] in own}
        if listed and registry is OPTIMIZERS and "deepspeed" in module:  # found on demand
            own = {*half_precision._HOMES, *half_precision._REFUSED}
        assert not listed or set(listed) == own
