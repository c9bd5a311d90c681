"""Configurations whose meaning is MMEngine's: what is read from them, merged, written and parsed.

``record.py`` stores what MMEngine makes of them in ``recorded.json``; ``test_recorded.py`` compares.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {"CASE_SET": "from/env", "CASE_NUMBER": "7"}
"""Variables that are set while a case is read."""


@dataclass(frozen=True)
class Case:
    """Files by name, and an expression whose value is recorded; see ``outcome``."""

    name: str
    expression: str
    files: dict[str, str]


CASES: list[Case] = []
# fmt: off


def case(name: str, expression: str = "read()", **files: str) -> None:
    """Add a case; files are given by name, with ``__`` for a slash and their suffix after the last ``_``."""
    named = {}
    for key, text in files.items():
        stem, _, suffix = key.rpartition("_")
        named[f"{stem.replace('__', '/')}.{suffix}"] = text
    CASES.append(Case(name, expression, named))


BASE = """
a = 1
b = dict(b1=[0, 1], b2=None, b3=dict(x=1, y=2))
c = (1, 2)
d = 'text'
"""
PURE = """
from torch.optim import SGD
import torch.nn as nn
model = dict(type=nn.Linear, in_features=4, out=dict(bias=True))
optimizer = dict(type=SGD, lr=0.1, betas=(0.9, 0.99))
"""

# inheritance
case("one file", main_py=BASE)
case("a base", main_py="_base_ = './base.py'\na = 2", base_py=BASE)
case("a base in a list", main_py="_base_ = ['./base.py']\nb = dict(b2=5)", base_py=BASE)
case("two bases", main_py="_base_ = ['one.py', 'two.py']\nx = 3", one_py="x = 1", two_py="y = 2")
case("two bases with one key", main_py="_base_ = ['one.py', 'two.py']", one_py="x = 1", two_py="x = 2")
case("three levels", main_py="_base_ = 'mid.py'\nb = dict(b3=dict(y=9))", mid_py="_base_ = 'base.py'\nb = dict(b3=dict(z=3))", base_py=BASE)
case("a base above", "read('sub/main.py')", sub__main_py="_base_ = '../up/base.py'\nd = 'new'", up__base_py=BASE)
case("a base's base in another folder", main_py="_base_ = 'sub/mid.py'", sub__mid_py="_base_ = '../base.py'\na = 5", base_py=BASE)
case("a tuple replaces", main_py="_base_ = 'base.py'\nc = (3,)", base_py=BASE)
case("a list replaces", main_py="_base_ = 'base.py'\nb = dict(b1=[7])", base_py=BASE)
case("a dict for a number", main_py="_base_ = 'base.py'\na = dict(x=1)", base_py=BASE)
case("a dict for None", main_py="_base_ = 'base.py'\nb = dict(b2=dict(x=1))", base_py=BASE)
case("a number for a dict", main_py="_base_ = 'base.py'\nb = 1", base_py=BASE)
case("None for a dict", main_py="_base_ = 'base.py'\nb = None", base_py=BASE)
case("missing base", main_py="_base_ = 'nowhere.py'")
case("YAML inherits YAML", "read('main.yaml')", main_yaml="_base_: base.yaml\nb: {x: 2}\n", base_yaml="a: 1\nb: {x: 1, y: [1, 2]}\n")
case("JSON inherits JSON", "read('main.json')", main_json='{"_base_": ["base.json"], "b": {"x": 2}}', base_json='{"a": 1, "b": {"x": 1}}')
case("Python inherits YAML", main_py="_base_ = 'base.yaml'\nb = dict(x=2)", base_yaml="a: 1.5\nb: {x: 1, y: null}\n")
case("names used in the file", main_py="pipeline = [dict(type='A'), dict(type='B')]\nloader = dict(dataset=dict(pipeline=pipeline))\nn = len(pipeline)")
case("functions and modules are left out", main_py="import os\ndef f():\n    return 3\na = f()\nb = os.sep")
case("loops and conditions", main_py="stages = []\nfor i in range(3):\n    stages.append(dict(width=i * 2))\nif len(stages) > 2:\n    deep = True")
case("names with underscores", main_py="_hidden = 1\nshown = _hidden + 1\n__none = 3")
case("values of the base as names", main_py="_base_ = 'base.py'\ne = _base_.b.b3.x + 1\nf = _base_.a", base_py=BASE)
case("a base's list extended", main_py="_base_ = 'base.py'\nb = dict(b1=_base_.b.b1 + [5])", base_py=BASE)

# deletion
case("delete", main_py="_base_ = 'base.py'\nb = dict(_delete_=True, new=1)", base_py=BASE)
case("delete inside", main_py="_base_ = 'base.py'\nb = dict(b3=dict(_delete_=True, z=1))", base_py=BASE)
case("delete a number", main_py="_base_ = 'base.py'\na = dict(_delete_=True, z=1)", base_py=BASE)
case("delete False", main_py="_base_ = 'base.py'\nb = dict(_delete_=False, z=1)", base_py=BASE)
case("delete twice", main_py="_base_ = 'mid.py'\nb = dict(_delete_=True, last=1)", mid_py="_base_ = 'base.py'\nb = dict(_delete_=True, mid=1)", base_py=BASE)
case("delete what is new", main_py="_base_ = 'base.py'\nnew = dict(_delete_=True, z=1)", base_py=BASE)
case("delete in YAML", "read('main.yaml')", main_yaml="_base_: base.yaml\nb:\n  _delete_: true\n  z: 1\n", base_yaml="b: {x: 1}\n")

# references and variables
case("reference", main_py="_base_ = 'base.py'\ne = {{_base_.b.b3}}\nf = {{ _base_.a }}", base_py=BASE)
case("reference in a list", main_py="_base_ = 'base.py'\ne = [{{_base_.a}}, dict(x={{_base_.c}})]", base_py=BASE)
case("reference to what is overridden", main_py="_base_ = 'base.py'\na = 7\ne = {{_base_.a}}", base_py=BASE)
case("reference in YAML", "read('main.yaml')", main_yaml="_base_: base.yaml\ne: {{ _base_.b.x }}\n", base_yaml="b: {x: [1, 2]}\n")
case("reference in JSON", "read('main.json')", main_json='{"_base_": "base.json", "e": {{ _base_.b }}}', base_json='{"b": {"x": 1}}')
case("unknown reference", main_py="_base_ = 'base.py'\ne = {{_base_.nothing}}", base_py=BASE)
case("file names", main_py="a = '{{ fileBasename }}'\nb = '{{fileBasenameNoExtension}}'\nc = '{{ fileExtname }}'\nd = '{{ fileDirname }}/x'")
case("file names of a base", main_py="_base_ = 'base.py'\nmine = '{{ fileBasename }}'", base_py="theirs = '{{ fileBasename }}'")
case("file names are left", "Config.fromfile(path('main.py'), use_predefined_variables=False).to_dict()", main_py="a = '{{ fileBasename }}'")
case("environment", main_py="a = '{{$CASE_SET:none}}/x'\nb = {{'$CASE_NUMBER:80'}}\nc = '{{ $CASE_UNSET:default/path }}'\nd = {{'$CASE_UNSET:12'}}")
case("environment in YAML", "read('main.yaml')", main_yaml="a: '{{$CASE_SET:none}}'\nb: {{$CASE_NUMBER:1}}\n")
case("environment without a value", main_py="a = '{{$CASE_UNSET:}}'")
case("environment is left", "Config.fromfile(path('main.py'), use_environment_variables=False).to_dict()", main_py="a = '{{$CASE_SET:none}}'")
case("environment that was used", "Config.fromfile(path('main.py')).env_variables", main_py="a = '{{$CASE_SET:none}}'\nb = '{{$CASE_UNSET:1}}'")

# pure Python
case("read_base", main_py="from mmengine.config import read_base\nwith read_base():\n    from .base import *\na = 2\nb.update(b3=dict(x=5))", base_py=BASE)
case("read_base of names", main_py="from mmengine.config import read_base\nwith read_base():\n    from .base import a, b as other", base_py=BASE)
case("read_base above", "read('sub/main.py')", sub__main_py="from mmengine.config import read_base\nwith read_base():\n    from ..up.base import *\nd = d + '!'", up__base_py=BASE)
case("read_base of two", main_py="from mmengine.config import read_base\nwith read_base():\n    from .one import *\n    from .two import *\nz = x + y", one_py="x = 1", two_py="y = 2")
case("read_base on three levels", main_py="from mmengine.config import read_base\nwith read_base():\n    from .mid import *\noptimizer.lr = 3\nmodel.merge(dict(out=dict(_delete_=True, new=1)))", mid_py="from mmengine.config import read_base\nwith read_base():\n    from .pure import *\noptimizer.update(dict(weight_decay=1))", pure_py=PURE)
case("lazy imports as text", main_py=PURE)
case("lazy imports as classes", "(lambda c: [c.model.type, c.optimizer['type'], c.optimizer.get('type'), dict(**c.model)['type']])(Config.fromfile(path('main.py')))", main_py=PURE)
case("lazy import of a module", main_py="import torch\nx = dict(type=torch.optim.AdamW, dtype=torch.float16)\nfrom functools import partial\nn = 1")
case("imports of a base used again", main_py="from mmengine.config import read_base\nwith read_base():\n    from .pure import *\nother = dict(type=SGD, lr=1)", pure_py=PURE)
case("_base_ of pure Python", main_py="_base_ = 'pure.py'", pure_py=PURE)
case("dict of a base with attributes", main_py="from mmengine.config import read_base\nwith read_base():\n    from .base import *\nb.b3.x = 10\nb.b1.append(3)\ne = b.b3.y", base_py=BASE)

# the object
case("attributes", "(lambda c: [c.a, c.b.b3.x, c['b']['b1'], c.get('none', 3), 'a' in c, len(c), sorted(c.keys())])(Config.fromfile(path('main.py')))", main_py=BASE)
case("missing attribute", "Config(dict(a=1)).b", main_py="")
case("missing key", "Config(dict(a=1))['b']", main_py="")
case("set attributes", "(lambda c: [setattr(c, 'x', dict(y=1)), c.x.y, setattr(c.x, 'z', dict(w=2)), c.to_dict()])(Config(dict(a=[dict(b=1)])))")
case("dicts in lists", "Config(dict(a=[dict(b=1)], t=(dict(c=2),))).a[0].b")
case("pop and setdefault", "(lambda c: [c.pop('a'), c.pop('none', 4), c.setdefault('z', 5), c.to_dict()])(Config(dict(a=1)))")
case("update goes inside", "(lambda c: [c.update(dict(b=dict(y=2))), c.to_dict()])(Config(dict(b=dict(x=1))))")
case("operators go inside, too", main_py="from mmengine.config import read_base\nwith read_base():\n    from .base import *\nb1 = b | dict(b3=dict(x=5))\nb2 = dict(b3=dict(x=5, y=6)) | b\nb |= dict(b3=dict(w=dict(q=1)))\nq = b.b3.w.q", base_py=BASE)
case("a reserved name", "Config(dict(filename=1))")
case("no dict", "Config([1])")
case("from a string", "Config.fromstring('a = 1\\nb = dict(c=(1, 2))', '.py').to_dict()")
case("from a JSON string", "Config.fromstring('{\"a\": [1, 2.5, null, true]}', '.json').to_dict()")
case("from a string of another kind", "Config.fromstring('a = 1', '.txt')")

# options
case("merge from dict", "merged({'b.b3.x': 5, 'new.deep.key': 1, 'd': 'x'})", main_py=BASE)
case("merge by index", "merged({'p.0.type': 'Z', 'p.1': dict(k=1)})", main_py="p = [dict(type='A'), dict(type='B')]")
case("merge by index in a dict", "merged(dict(p={'0': dict(type='Z')}))", main_py="p = [dict(type='A'), dict(type='B')]")
case("merge beyond the list", "merged({'p.2.type': 'Z'})", main_py="p = [dict(type='A')]")
case("merge without indices", "merged({'p.0.type': 'Z'}, False)", main_py="p = [dict(type='A')]")
case("merge through a string", "merged({'d.x': 1})", main_py=BASE)
case("merge a list", "merged({'b.b1': [1], 'c': (5,)})", main_py=BASE)
case("merge by index to a number", "merged({'b.b1.0': 5})", main_py=BASE)
case("merge with delete", "merged({'b': dict(_delete_=True, n=1)})", main_py=BASE)
for number, text in enumerate(
    ["a=1", "a=1.5", "a=1e-3", "a=true", "a=False", "a=None", "a=text", "a=1,2,3", "a=[1,2]", "a=(1,2)", "a=(1,)", "a=[(1,2),(x,y)]",
     "a=[[1],[2,3]]", "a='x'", 'a="1"', "a=['x','y']", "a=b=c", "a=", "a=[]", "a=nan", "a.b.0=x", "a=/path/x.pth", "a=[1", "a=hello world", "a=none", "a=-inf", "a=0x10", "a=(1,2),(3,4)", "a"]
):  # fmt: skip
    case(f"option {number}: {text}", f"options({text!r})")
case("several options", "options('a=1', 'b.c=[x]', 'a=2')")

# writing
case("Python and back", "back('.py')", main_py=BASE + "e = {'a-b': 1, 3: dict(x='quo\\'te')}\nf = [dict(x=(dict(y=1),))]\n")
case("JSON and back", "back('.json')", main_py="a = 1\nb = dict(c=[1, dict(d=None)], e='ä')\n")
case("YAML and back", "back('.yaml')", main_py="a = 1\nb = dict(c=[1, dict(d=None)], e='ä', f='1', g='true')\n")
case("pure Python and back", "back('.py')", main_py=PURE)
case("options and back", "back('.py', {'b.b3.x': (1, 'z')})", main_py=BASE)
case("text without a file", "Config.fromstring(Config(dict(a=dict(b=1))).dump(), '.py').to_dict()")
case("custom_imports", "read()", main_py="custom_imports = dict(imports=['json'], allow_failed_imports=False)\na = 1")
case("custom_imports that fail", "read()", main_py="custom_imports = dict(imports=['no_such_module'], allow_failed_imports=False)")
case("custom_imports that may fail", "read()", main_py="custom_imports = dict(imports=['no_such_module'], allow_failed_imports=True)")
# fmt: on


def outcome(one: Case, folder: Path, config: Any, dict_action: Any) -> Any:
    """What a library makes of a case, in terms of JSON: ``{"value": ...}``, or ``{"error": its class}``."""
    for name, text in one.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def path(name: str) -> str:
        return str(folder / name)

    def read(name: str = "main.py") -> Any:
        return config.fromfile(path(name)).to_dict()

    def merged(options: dict[str, Any], allow_list_keys: bool = True) -> Any:
        found = config.fromfile(path("main.py"))
        found.merge_from_dict(options, allow_list_keys)
        return found.to_dict()

    def options(*texts: str) -> Any:
        parser = argparse.ArgumentParser(exit_on_error=False)
        parser.add_argument("--cfg-options", nargs="+", action=dict_action)
        return parser.parse_args(["--cfg-options", *texts]).cfg_options

    def back(suffix: str, changes: dict[str, Any] | None = None) -> Any:
        found = config.fromfile(path("main.py"))
        found.merge_from_dict(changes or {})
        found.dump(path(f"dumped{suffix}"))
        return config.fromfile(path(f"dumped{suffix}")).to_dict()

    known = {"Config": config, "path": path, "read": read, "merged": merged, "options": options, "back": back}
    try:
        value = eval(one.expression, known)
    except BaseException as error:
        return {"error": type(error).__name__}
    return {"value": json.loads(json.dumps(_plain(value, folder)))}


def _plain(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {"dict": [[_plain(key, folder), _plain(item, folder)] for key, item in sorted(value.items(), key=str)]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_plain(item, folder) for item in value]}
    if isinstance(value, str):
        return value.replace(str(folder), "FOLDER")
    if isinstance(value, float):
        return {"float": repr(value)}
    return (
        value if value is None or isinstance(value, (bool, int)) else {"object": f"{value.__module__}.{value.__name__}"}
    )
