"""The rules that keep the layers apart, read off the source: who imports whom, and who may name a strategy."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import flextrain
import flextrain.data
import flextrain.ray
import flextrain.testing

from .private_names import is_import_module, nodes, own_attributes, parsed, private_names_of_torch

ROOT = Path(__file__).parents[1]
LAYERS = ["core", "optim", "strategies", "runner"]  # a layer may import itself and what stands before it
# The list of public names, that of strategies, and who chooses for strategy=None; and a strategy's own files, and what shards or
# notes parameters for several of them, whose messages advise another.
MAY_NAME_STRATEGIES = re.compile(
    r"flextrain\.(__init__|strategies\.(__init__|build|ddp|npu|single_device|noted|sharding|(fsdp|deepspeed|mesh)\..*))$"
)
STRATEGYS_OWN = re.compile(r"flextrain\.strategies\.(fsdp|deepspeed|mesh)\.")
REACHES_INSIDE = {  # to become a function of strategies/parts
    "flextrain.plan.step_time imports flextrain.strategies.mesh.pipeline.orders",
    "flextrain.doctor.package_probe imports flextrain.strategies.deepspeed.swap_files",
}
_PLUG_IN = r"flextrain\.(doctor|elastic|mmengine|plan|ray|reference|report|testing|verify)"
PLUG_IN = re.compile(rf"{_PLUG_IN}(\.|$)")
MENTION = re.compile(rf"{_PLUG_IN}\b|\brehearsing\b|\bsimulated ranks?\b")
MAX_LINES = 900  # 200 to 600 are usual: a file holds one idea that has a name in the field
CHECKPOINT_LIBRARY = "torch.distributed.checkpoint"
TORCH_PRIVATE = {
    *(
        f"flextrain.core.{name}_private"
        for name in (*map("torch_compat.{}".format, ("torch", "dtensor", "attention")), "checkpoint.dcp")
    ),
    *(f"flextrain.{name}_private" for name in ("plan.rehearsing", "testing.simulation.group")),
}
CHECKPOINT_HOME = re.compile(r"flextrain\.core\.checkpoint(\.|$)")
# They talk to the other processes, or write a file for each; anybody else asks strategy.topology what a process is.
RANKS_HOME = re.compile(r"flextrain\.core\.(comm|checkpoint)(\.|$)")
RANK_NAMES = {"get_rank", "get_world_size"}
SNAPSHOT = Path(__file__).with_name("public_names.txt")

Sources = Mapping[str, str]  # dotted module name -> source


def sources() -> dict[str, str]:
    """Every library module, by the name under which it is installed."""
    found = {}
    for folder in [*LAYERS, "flextrain"]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(
                ROOT / "flextrain" / "templates"
            ):  # what users get to change, tests/test_init.py runs it
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "flextrain" else ("flextrain", *parts)
            found[".".join(parts)] = path.read_text()
    return found


def layer_of(module: str) -> str | None:
    """ "core" for ``flextrain.core.device.device``; None for the front door and for foreign modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "flextrain" and len(parts) > 1 and parts[1] in LAYERS else None


@functools.cache
def imports(module: str, source: str) -> tuple[tuple[int, str], ...]:
    """What ``_imports`` finds, once for all tests that ask."""
    return tuple(_imports(module, source))


def _imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported, also in functions and for types; ``from x import y`` as ``x.y``."""
    package = module if module.endswith("__init__") else module.rpartition(".")[0]
    package = package.removesuffix(".__init__")
    for node in nodes(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif _imports_by_call(node):
            yield node.lineno, node.args[0].value  # type: ignore[attr-defined]


def _imports_by_call(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return False
    return is_import_module(node.func) and isinstance(node.args[0].value, str)


def strategy_classes(modules: Sources) -> dict[str, str]:
    """Concrete strategies by class name, with the module that defines each."""
    found = {}
    for module, source in modules.items():
        if layer_of(module) != "strategies":
            continue
        for node in nodes(parsed(source)):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(base.rpartition(".")[2].endswith("Strategy") for base in bases):
                found[node.name] = module  # type: ignore[attr-defined]
    return found


def upward_imports(modules: Sources) -> list[str]:
    found = []
    for module, source in modules.items():
        own = layer_of(module)
        if own is None:
            continue
        for line, name in imports(module, source):
            other = layer_of(name)
            front_door = name.split(".")[0] == "flextrain" and other is None
            if front_door or (other is not None and LAYERS.index(other) > LAYERS.index(own)):
                found.append(f"{module}:{line} imports {name}")
    return found


def plug_ins_mentioned(modules: Sources) -> list[str]:
    """Where a layer imports a plug-in, names it by its path, or names a class of two words that only plug-ins define."""
    classes: dict[bool, set[str]] = {True: set(), False: set()}
    for module, source in modules.items():
        if layer_of(module) or PLUG_IN.match(module):
            found = (node.name for node in nodes(parsed(source)) if isinstance(node, ast.ClassDef))
            classes[bool(layer_of(module))].update(found)
    theirs = {
        name for name in classes[False] - classes[True] if re.match("_?[A-Z][a-z]+[A-Z]", name)
    }  # one word may be anything
    found = []
    for module, source in modules.items():
        if not layer_of(module):
            continue
        for number, line in enumerate(source.splitlines(), 1):
            found += [f"{module}:{number} mentions {match[0]}" for match in MENTION.finditer(line)]
        for node in nodes(parsed(source)):
            names = [getattr(node, key, None) for key in ("id", "attr", "value")]
            found += [
                f"{module}:{node.lineno} names {name}" for name in names if isinstance(name, str) and name in theirs
            ]  # type: ignore[attr-defined]
    return found


def folders_that_import_each_other(modules: Sources) -> list[str]:
    """Pairs of folders of which none holds the other: neither can be read, or changed, alone; imports for types count."""
    edges = {
        (module.rpartition(".")[0], target.rpartition(".")[0])
        for module, source in modules.items()
        for _, name in imports(module, source)
        if (target := _module_of(name, modules)) in modules
    }
    pairs = {pair for pair in edges if (pair[1], pair[0]) in edges and pair[0] < pair[1]}
    return sorted(" and ".join(pair) for pair in pairs if not f"{pair[1]}.".startswith(f"{pair[0]}."))


def ranks_asked_for(modules: Sources) -> list[str]:
    """Where the rank is asked for, and not what a process is to the others."""
    return [
        f"{module}:{node.lineno} asks {name}"
        for module, source in modules.items()
        if not RANKS_HOME.match(module)
        for node in nodes(parsed(source))
        if isinstance(node, (ast.Name, ast.Attribute, ast.alias))
        and (name := getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", ""))
        in RANK_NAMES
    ]


def import_circles(modules: Sources) -> list[str]:
    """Groups of modules that know each other, be it only as types: none of them can be read, or changed, alone."""
    edges: dict[str, set[str]] = {}
    for module, source in modules.items():
        targets = {_module_of(name, modules) for _, name in imports(module, source)}
        edges[module] = targets & modules.keys() - {module}
    return [" -> ".join([*circle, circle[0]]) for circle in _circles(edges)]


def _module_of(name: str, modules: Sources) -> str:
    """The module that an imported name is, or stands in: ``from package import submodule`` does not need the package."""
    for candidate in (name, name.rpartition(".")[0]):
        for found in (candidate, f"{candidate}.__init__"):
            if found in modules:
                return found
    return name


def _circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    reach = {start: _reachable(start, edges) for start in edges}
    groups = {
        frozenset(other for other in reach[node] if node in reach[other]) for node in edges if node in reach[node]
    }
    return [sorted(group) for group in groups]


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    rest = list(edges[start])
    while rest:
        node = rest.pop()
        if node not in seen:
            seen.add(node)
            rest += edges[node]
    return seen


def named_strategies(modules: Sources) -> list[str]:
    classes = strategy_classes(modules)
    names = re.compile(rf"\b({'|'.join(sorted(classes))})\b") if classes else re.compile("(?!)")
    homes = set(classes.values())
    found = []
    for module, source in modules.items():
        if MAY_NAME_STRATEGIES.match(module):
            continue
        for number, line in enumerate(source.splitlines(), 1):
            found += [f"{module}:{number} names {match}" for match in names.findall(line)]
        for number, name in imports(module, source):
            if name in homes or name.rpartition(".")[0] in homes:
                found.append(f"{module}:{number} imports {name}")
    return found


def reaches_inside(modules: Sources) -> list[str]:
    """Who imports from a strategy's folder from outside; other strategies may, and the public names, but only what it gives."""
    found = []
    for module, source in modules.items():
        may = module == "flextrain.__init__" or layer_of(module) == "strategies"
        for number, name in imports(module, source):
            home = STRATEGYS_OWN.match(f"{name}.")
            if home and not module.startswith(home[0]) and not (may and name.count(".") < 4):
                found.append(f"{module}:{number} imports {name}")
    return found


def checkpoint_imports(modules: Sources) -> list[str]:
    found = []
    for module, source in modules.items():
        if not CHECKPOINT_HOME.match(module):
            found += [
                f"{module}:{line} imports {name}"
                for line, name in imports(module, source)
                if f"{name}.".startswith(f"{CHECKPOINT_LIBRARY}.")
            ]
    return found


def private_torch_names(modules: Sources) -> list[str]:
    inherited = {name for source in modules.values() for name in own_attributes(source)}
    return [
        f"{module}:{line} uses {name}"
        for module, source in modules.items()
        if module not in TORCH_PRIVATE
        for line, name in private_names_of_torch(source, inherited)
    ]


def public_names() -> list[str]:
    return [
        *(f"flextrain.{name}" for name in sorted(flextrain.__all__)),
        *(f"flextrain.data.{name}" for name in sorted(flextrain.data.__all__)),
        *(f"flextrain.ray.{name}" for name in sorted(flextrain.ray.__all__)),
        *(f"flextrain.testing.{name}" for name in sorted(flextrain.testing.__all__)),
    ]


def test_imports_go_down_only() -> None:
    assert upward_imports(sources()) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_circles(sources()) == []


def test_no_layer_knows_a_plug_in() -> None:
    assert plug_ins_mentioned(sources()) == []


def test_no_two_folders_import_each_other() -> None:
    assert folders_that_import_each_other(sources()) == []


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {module: source.count("\n") for module, source in sources().items()}
    assert {module for module, length in lengths.items() if length > MAX_LINES} == set()


def test_the_runner_is_one_class_beside_its_other_names() -> None:
    assert [kind.__name__ for kind in flextrain.FlexibleRunner.__mro__] == ["FlexibleRunner", "RunnerNames", "object"]
    assert sources()["flextrain.runner.runner"].count("\n") <= 500


def test_only_strategies_name_a_concrete_strategy() -> None:
    assert {"SingleDeviceStrategy", "DDPStrategy"} <= strategy_classes(sources()).keys()
    assert named_strategies(sources()) == []


def test_only_known_modules_reach_inside_a_strategys_folder() -> None:
    found = {re.sub(r":\d+", "", line) for line in reaches_inside(sources())}
    assert {line for line in found if not line.startswith(tuple(REACHES_INSIDE))} == set()
    assert all(any(line.startswith(known) for line in found) for known in REACHES_INSIDE), "take it out of the list"


def test_every_registered_strategy_is_seen_by_the_lint() -> None:
    ours = {name for name in flextrain.STRATEGIES if flextrain.STRATEGIES.get(name).__module__.startswith("flextrain.")}
    assert ours <= strategy_classes(sources()).keys()


def test_only_core_checkpoint_uses_torchs_checkpoint_library() -> None:
    assert checkpoint_imports(sources()) == []


def test_private_names_of_torch_stand_in_one_module() -> None:
    assert private_torch_names(sources()) == []


def test_who_a_process_is_to_the_others_is_asked_of_the_topology() -> None:
    assert ranks_asked_for(sources()) == []


def test_the_public_names_are_those_of_the_snapshot() -> None:
    snapshot = SNAPSHOT.read_text().split()
    added = sorted(set(public_names()) - set(snapshot))
    removed = sorted(set(snapshot) - set(public_names()))
    assert not added, f"new public names, to be decided on and then added to {SNAPSHOT.name}: {added}"
    assert not removed, f"public names that are gone, which breaks users: {removed}"


def test_every_public_name_can_be_imported() -> None:
    assert set(dir(flextrain)) >= set(flextrain.__all__)
    for name in flextrain.__all__:
        assert getattr(flextrain, name) is not None


STRATEGIES = {
    "flextrain.plan.books": "class BookKeeper: ...",
    "flextrain.strategies.base": "class Strategy: ...",
    "flextrain.strategies.ddp": "from .base import Strategy\nclass DDPStrategy(Strategy): ...",
}
DCP = "import torch.distributed.checkpoint as dcp"
SCALER = "from torch.amp import GradScaler\nclass A(GradScaler):\n"


@pytest.mark.parametrize(
    "lint, module, source, message",
    [
        (upward_imports, "core.a", "from ..optim.wrapper import OptimWrapper", "imports flextrain.optim.wrapper"),
        (upward_imports, "core.a", "def f():\n    from ..runner import hooks", ":2 imports flextrain.runner.hooks"),
        (upward_imports, "optim.a", "import flextrain.strategies.base", "imports flextrain.strategies.base"),
        (upward_imports, "strategies.a", "from flextrain import FlexibleRunner", "imports flextrain.FlexibleRunner"),
        (upward_imports, "core.a", "importlib.import_module('flextrain.optim')", "imports flextrain.optim"),
        (upward_imports, "optim.p.__init__", "from ...strategies import base", "imports flextrain.strategies.base"),
        (plug_ins_mentioned, "core.a", "x = 1  # see flextrain.plan.update", ":1 mentions flextrain.plan"),
        (plug_ins_mentioned, "runner.a", "def f():\n    return g(BookKeeper)", ":2 names BookKeeper"),
        (plug_ins_mentioned, "strategies.a", "if rehearsing():\n    x = 1", ":1 mentions rehearsing"),
        (named_strategies, "runner.a", "if x:\n    y = 'DDPStrategy'", ":2 names DDPStrategy"),
        (named_strategies, "optim.a", "def f():\n    return 1  # for DDPStrategy", ":2 names DDPStrategy"),
        (named_strategies, "plan.a", "NAMES = {'ddp': 'DDPStrategy'}", ":1 names DDPStrategy"),
        (named_strategies, "plan.a.b", "from ...strategies.ddp import DDPStrategy", "names DDPStrategy"),
        (named_strategies, "commands.a", "help = 'such as DDPStrategy'", "names DDPStrategy"),
        (named_strategies, "testing.a", "from ..strategies.ddp import f", "imports flextrain.strategies.ddp.f"),
        (named_strategies, "runner.a", "from ..strategies import ddp", "imports flextrain.strategies.ddp"),
        (named_strategies, "runner.a", "from ..strategies.ddp import f", "imports flextrain.strategies.ddp.f"),
        (named_strategies, "mmengine.a", "x = 'DDPStrategy'", ":1 names DDPStrategy"),
        (named_strategies, "strategies.parts.a", "isinstance(strategy, DDPStrategy)", ":1 names DDPStrategy"),
        (named_strategies, "strategies.base", "# as DDPStrategy does", ":1 names DDPStrategy"),
        (
            reaches_inside,
            "runner.a",
            "from ..strategies.fsdp import FSDPConfig",
            "imports flextrain.strategies.fsdp.FSDPC",
        ),
        (
            reaches_inside,
            "strategies.ddp",
            "from .fsdp.config import f",
            ":1 imports flextrain.strategies.fsdp.config.f",
        ),
        (reaches_inside, "ray.a", "def f():\n    import_module('flextrain.strategies.mesh.axis')", ":2 imports"),
        (ranks_asked_for, "runner.a", "from ..core.comm.collectives import get_rank", ":1 asks get_rank"),
        (ranks_asked_for, "strategies.a", "x = 1\nn = torch.distributed.get_world_size()", ":2 asks get_world_size"),
        (ranks_asked_for, "runner.a", "def f():\n    return get_rank()", ":2 asks get_rank"),
        (checkpoint_imports, "strategies.a", DCP, "imports torch.distributed.checkpoint"),
        (checkpoint_imports, "runner.a", "from torch.distributed import checkpoint", "torch.distributed.checkpoint"),
        (checkpoint_imports, "core.checkpoints", f"def f():\n    {DCP}", ":2 imports torch.distributed.checkpoint"),
        (private_torch_names, "core.a", "import torch._utils", "uses torch._utils"),
        (
            private_torch_names,
            "core.a",
            "from torch.utils._pytree import tree_map",
            "uses torch.utils._pytree.tree_map",
        ),
        (private_torch_names, "core.a", "from torch.nn.modules.norm import _X", "uses torch.nn.modules.norm._X"),
        (private_torch_names, "optim.a", "import torch\ntorch._foreach_mul_([], 2)", ":2 uses torch._foreach_mul_"),
        (private_torch_names, "core.a", "from torch import nn\nx = nn.modules._N", "uses torch.nn.modules._N"),
        (private_torch_names, "core.a", "import torch\na = torch.ops.aten\na._to_copy", "uses torch.ops.aten._to_copy"),
        (private_torch_names, "core.a", "import_module('torch.utils').a._b()", "uses torch.utils.a._b"),
        (private_torch_names, "core.a", "def f(m):\n    return m._buffers", ":2 uses _buffers"),
        (private_torch_names, "runner.a", "loader._iterator = None", "uses _iterator"),
        (private_torch_names, "runner.a", "getattr(loader, '_iterator')", "uses '_iterator'"),
        (private_torch_names, "runner.a", "vars(loader).update(_iterator=None)", "uses _iterator="),
        (private_torch_names, "strategies.a", "unit._get_fsdp_state()", "uses _get_fsdp_state"),
        (
            private_torch_names,
            "optim.a",
            f"{SCALER}    def _unscale_grads_(self): ...",
            "uses torch.amp.GradScaler._unsc",
        ),
        (
            private_torch_names,
            "optim.a",
            f"{SCALER}    def f(self): self._scale = 1",
            "uses torch.amp.GradScaler._scale",
        ),
    ],
)
def test_the_lints_find_what_they_look_for(lint: object, module: str, source: str, message: str) -> None:
    found = lint({**STRATEGIES, f"flextrain.{module}": source})  # type: ignore[operator]
    assert any(message in entry and entry.startswith(f"flextrain.{module}:") for entry in found), found


def test_the_lints_allow_what_is_allowed() -> None:
    downwards = "from ..strategies.base import Strategy\nfrom ..core import errors\nimport torch.distributed"
    modules = {
        **STRATEGIES,
        "flextrain.runner.a": downwards,
        "flextrain.core.checkpoint": DCP,
        "flextrain.__init__": "from .strategies.ddp import DDPStrategy",
        "flextrain.testing.a": "from ..strategies.base import Strategy",
        "flextrain.core.torch_compat.torch_private": "import torch._utils",
        "flextrain.core.b": "import torch\nclass A:\n    def f(self): self._step()\n    def _step(self): torch.__version__",
        "flextrain.core.c": "from .b import A\nclass B(A):\n    def g(self): self._step()",
    }
    assert upward_imports(modules) == named_strategies(modules) == checkpoint_imports(modules) == []
    modules["flextrain.strategies.mesh.a"] = "from ..fsdp import FSDPStrategy\nfrom .axis import Axis"
    assert reaches_inside(modules) == []
    assert private_torch_names(modules) == []


def test_circles_are_found_through_packages_functions_and_types() -> None:
    a = "from .b import f"
    assert import_circles({"flextrain.core.a": a, "flextrain.core.b": "from . import a"}) == [
        "flextrain.core.a -> flextrain.core.b -> flextrain.core.a"
    ]
    for late in ("def f():\n    from . import a", "if TYPE_CHECKING:\n    from . import a"):
        assert import_circles({"flextrain.core.a": a, "flextrain.core.b": late})
    assert folders_that_import_each_other(
        {"flextrain.core.p.a": "from ..q.b import x", "flextrain.core.q.b": late.replace(" .", " ..p")}
    )
    package = {"flextrain.core.p.__init__": "from .x import f", "flextrain.core.p.x": "from ..q import g"}
    assert import_circles({**package, "flextrain.core.q": "from .p import f"})
    # A neighbour is reached through the package, which need not be complete for it; what the package defines is not.
    package = {"flextrain.core.p.__init__": "from .x import f\ng = 1", "flextrain.core.p.y": ""}
    assert import_circles({**package, "flextrain.core.p.x": "from . import y"}) == []
    assert import_circles({**package, "flextrain.core.p.x": "from . import g"})
