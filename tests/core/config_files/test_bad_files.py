"""Mistakes in configuration files and options: each is one line, with the file and line, and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flextrain import Config, ConfigError
from flextrain.core.config_files import parse_options

READ_BASE = "from flextrain import read_base\nwith read_base():\n    "
BASE = "a = 1\nb = dict(x=1, y=[1, 2])\nc = 'text'\n"
# The files (the first is read) and the message after the folder was left out.
FILES: list[tuple[dict[str, str], str]] = [
    ({"m.py": "a = 1\n_base_ = 'bse.py'", "base.py": ""}, 'm.py:2: bse.py does not exist, did you mean "base.py"?'),
    ({"m.py": "_base_ = '.'"}, 'm.py:1: "{folder_name}" is no kind of configuration file, give .py, .yaml, .yml, .json or .toml'),
    ({"m.py": "_base_ = 3"}, "m.py:1: _base_: 3 is not allowed, give the path of a file, or a list of them"),
    ({"m.py": "_base_ = nowhere"}, "m.py:1: _base_: NameError: name 'nowhere' is not defined"),
    ({"m.py": "_base_ = 'n.py'", "n.py": "\n_base_ = 'm.py'"}, "n.py:2: _base_: goes in a circle, m.py -> n.py -> m.py"),
    ({"m.yaml": "_base_: m.yaml"}, "m.yaml:1: _base_: goes in a circle, m.yaml -> m.yaml"),
    ({"m.py": "_base_ = ['n.py', 'o.py']", "n.py": "\nx = 1", "o.py": "x = 2"}, "m.py:1: _base_: two bases give x, n.py:2 and o.py:1; leave one out"),
    ({"m.py": "_base_ = 'n.py'\nb = dict(z={{_base_.b.xx}})", "n.py": BASE}, 'm.py:2: _base_.b: has no "xx", did you mean "x"?'),
    ({"m.py": "_base_ = 'n.py'\nz = 'to {{_base_.a}}'", "n.py": BASE}, "m.py:2: a reference {{ _base_.... }} stands inside a string, it must be the whole value, without quotes"),
    ({"m.py": "_base_ = 'n.py'\nz = '''to {{_base_.a}}'''", "n.py": BASE}, "m.py:2: a reference {{ _base_.... }} stands inside a string, it must be the whole value, without quotes"),
    ({"m.py": "a = 1\nb = dict(x=1"}, "m.py:2: this is no Python, '(' was never closed"),
    ({"m.py": "a = 1\nb = a + 'x'"}, "m.py:2: TypeError: unsupported operand type(s) for +: 'int' and 'str'"),
    ({"m.py": "import sys\nsys.exit(4)"}, "m.py: ends the program, with status 4"),
    ({"m.py": "_base_ = 'n.py'\na = dict(z=1)", "n.py": BASE}, "m.py:2: a: is a dict here and a int in n.py:1, which cannot be merged; _delete_=True replaces it"),
    ({"m.py": "_base_ = 'n.py'\nb = dict(\n  y=dict(z=1))", "n.py": BASE}, "m.py:3: b.y: is a dict here and a list in n.py:2, which cannot be merged; _delete_=True replaces it"),
    ({"m.py": "filename = 3"}, "m.py:1: filename: is a property of every Config, give it another name"),
    ({"m.py": "a = '{{$NO_SUCH_VARIABLE:}}'"}, "m.py:1: the environment variable NO_SUCH_VARIABLE is not set, set it or give a default, {{$NO_SUCH_VARIABLE:default}}"),
    ({"m.py": "\ncustom_imports = dict(imports=['no_such_module'])"}, 'm.py:2: custom_imports.imports[0]: "no_such_module" cannot be imported, No module named \'no_such_module\', put the folder that has it on PYTHONPATH'),
    ({"m.py": "custom_imports = dict(import_=['json'])"}, "m.py:1: custom_imports: {'import_': ['json']} is not allowed, give dict(imports=[...], allow_failed_imports=False)"),
    ({"m.py": "custom_imports = dict(imports=[3])"}, "m.py:1: custom_imports.imports[0]: 3 is not allowed, give the name of a module"),
    ({"m.py": READ_BASE + "from .nowhere import *"}, "m.py:3: .nowhere: there is no file nowhere.py"),
    ({"m.py": READ_BASE + "from .n import bb", "n.py": BASE}, 'm.py:3: .n has no "bb", did you mean "b"?'),
    ({"m.py": READ_BASE + "from .n import *", "n.py": READ_BASE + "from .m import *"}, "n.py:3: _base_: goes in a circle, m.py -> n.py -> m.py"),
    ({"m.py": "from .n import a", "n.py": BASE}, 'm.py:1: ".n" is imported outside of `with read_base():`, where only packages can be imported'),
    ({"m.py": "from torch.optim import *"}, "m.py:1: `from torch.optim import *` is not allowed outside of `with read_base():`, name what is needed"),
    ({"m.py": "from torch.optim import SGD\nx = SGD(lr=1)"}, "m.py:2: torch.optim.SGD(): is not called in a configuration file, which imports it later; give dict(type=...)"),
    ({"m.py": READ_BASE + "from no_such_package.a import *"}, 'm.py:3: the package "no_such_package" is not installed'),
    ({"m.py": READ_BASE + "from .n import *\n_base_ = 'n.py'", "n.py": BASE}, "m.py:4: _base_ has no meaning in a file of pure Python, inherit by `with read_base():`"),
    ({"m.py": "_base_ = 'n.py'", "n.py": "import torch\na = torch.float16"}, "m.py:1: _base_: n.py is a file of pure Python, which is inherited by `with read_base():`"),
    ({"m.py": "_base_ = 'no_such_package::x/y.py'"}, 'm.py:1: _base_: no_such_package::x/y.py: the package "no_such_package" is not installed'),
    ({"m.yaml": "a: 1\nb:\n\tx: 1"}, "m.yaml:3: this is no YAML, found character '\\t' that cannot start any token, indent with spaces"),
    ({"m.yaml": "a: 1\nb: 2\na: 3"}, 'm.yaml:3: the key "a" is given twice'),
    ({"m.yaml": "b:\n  x: 1\n  x: 2"}, 'm.yaml:3: the key "x" is given twice'),
    ({"m.yaml": "on: 1"}, "m.yaml:1: the key on is no string, write it in quotes"),
    ({"m.yaml": "a: 1\n7: 1"}, "m.yaml:2: 7 is no name, give a string"),
    ({"m.yaml": "- 1\n- 2"}, "m.yaml: the YAML is a list, give names with values"),
    ({"m.yaml": "a: &x\n  b: *x"}, "m.yaml:1: an alias stands inside of what it repeats"),
    ({"m.yaml": "a: 1\n---\nb: 2"}, "m.yaml:2: this is no YAML, but found another document"),
    ({"m.json": '{"a": 1,\n"b": {"x": 1,\n"x": 2}}'}, 'm.json:3: the key "x" is given twice'),
    ({"m.json": '{"a": 1,\nb: 2}'}, "m.json:2: this is no JSON, Expecting property name enclosed in double quotes"),
    ({"m.json": "[1]"}, "m.json: the JSON is a list, give names with values"),
    ({"m.json": '{"_base_": [1]}'}, "m.json:1: _base_: 1 is not allowed, give the path of a file, or a list of them"),
    ({"m.toml": "a = 1\na = 2\nb = 3"}, "m.toml:2: this is no TOML, Cannot overwrite a value"),
    ({"m.toml": "x = 1\nd = 2024-01-01"}, 'm.toml:2: d: is a date or time, write it in quotes, "2024-01-01"'),
    ({"m.toml": "a = none"}, "m.toml:1: this is no TOML, Invalid value"),
    ({"m.cfg": "a = 1"}, '".cfg" is no kind of configuration file, give .py, .yaml, .yml, .json or .toml'),
    ({"m.py": "_base_ = 'base'", "base.yaml": "a: 1"}, 'm.py:1: "base" is no kind of configuration file, give .py, .yaml, .yml, .json or .toml, did you mean "base.yaml"?'),
    ({"m.ymal": "a: 1"}, '".ymal" is no kind of configuration file, give .py, .yaml, .yml, .json or .toml, did you mean ".yml"?'),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FILES)))
def test_file(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, message = FILES[number]
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as found:
        Config.fromfile(next(iter(files)))
    said = (
        str(found.value).replace(f"{tmp_path}/", "").replace("Can not overwrite", "Cannot overwrite")
    )  # as tomli says
    message = message.replace("Can not overwrite", "Cannot overwrite")
    assert said == message.replace("{folder_name}", tmp_path.name)


OPTIONS = [
    ("a", '--cfg-options: "a" is not allowed, give key=value'),
    ("=1", '--cfg-options: "=1" is not allowed, give key=value'),
    ("a=[(1]", "--cfg-options a: [(1] has a bracket without its counterpart"),
    ("a={x: 1}", "--cfg-options a: {x: 1} is not allowed, give keys with dots between them, a.b=1 for {b: 1} in a"),
    ("a..b=1", '--cfg-options: "a..b" is no key, give names with dots between them'),
    ("c.x=1", '--cfg-options: c: is a str in base.py:3, which has no key "x"'),
    ("b.y.5=1", "--cfg-options: b.y: has 2 items, there is no index 5"),
    ("b.y.x=1", '--cfg-options: b.y: is a list, give an index from 0 to 1 in place of "x"'),
    ("a.b.c=1", '--cfg-options: a: is a int in base.py:1, which has no key "b"'),
    ("n=1 n.x=2", '--cfg-options: n.x: another option gives a value for "n"'),
    ("n.x=2 n=1", "--cfg-options: n: another option gives a value in it"),
    ("n=1 n=2", "--cfg-options n: is given twice"),
]


def apply(config: Config, texts: list[str]) -> None:
    options, origins = parse_options(texts)
    config.merge_from_dict(options, origins=origins)


@pytest.mark.parametrize("given, message", OPTIONS, ids=[given for given, _ in OPTIONS])
def test_option(given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.py").write_text(BASE)
    config = Config.fromfile("base.py")
    before = config.to_dict()
    with pytest.raises(ConfigError) as found:
        apply(config, given.split(" ") if given.startswith("n") else [given])
    assert str(found.value) == message
    assert config.to_dict() == before


@pytest.mark.parametrize("second", [dict(x=3), dict(_delete_=True, y=3), 3])
def test_no_option_replaces_another(second: Any) -> None:
    config = Config(dict(n=dict(x=1, y=1)))
    with pytest.raises(ConfigError, match="^n: another option gives a value in it$"):
        config.merge_from_dict({"n.x": 2, "n": second})
    config.merge_from_dict({"n.x": 2, "n": dict(y=3)})
    assert config.to_dict() == dict(n=dict(x=2, y=3))
