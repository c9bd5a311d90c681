"""YAML, JSON and TOML: values, lines, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flextrain import Config, ConfigError

TEXTS = {
    ".yaml": "a: 1\nb:\n  lr: 1e-3\n  list:\n    - x: yes\n    - 2\nt: 12:30\nd: 2024-01-01\ne: 010\nn: null\ni: {7: x}\n",
    ".json": '{\n"a": 1,\n"b": {"lr": 1e-3,\n"list": [{"x": true},\n2]},\n"t": "12:30", "d": "2024-01-01", "e": 10, "n": null}',
    ".toml": 'a = 1\nt = "12:30"\n[b]\nlr = 1e-3\nlist = [\n  {x = true},\n  2,\n]\n[[p]]\nk = 1\n[[p]]\nk = 2\n[p.q]\nz = 3\n',
}


@pytest.mark.parametrize("suffix", TEXTS)
def test_values(suffix: str) -> None:
    config = Config.fromstring(TEXTS[suffix], suffix)
    assert config.a == 1
    assert config.b == {"lr": 0.001, "list": [{"x": True}, 2]}
    assert config.t == "12:30"
    if suffix == ".yaml":
        assert (config.d, config.e, config.n, config.i) == ("2024-01-01", 10, None, {7: "x"})


@pytest.mark.parametrize(
    "suffix, lines",
    {
        ".yaml": [(("a",), 1), (("b", "lr"), 3), (("b", "list", 0, "x"), 5), (("b", "list", 1), 6), (("t",), 7)],
        ".json": [(("a",), 2), (("b", "lr"), 3), (("b", "list", 0, "x"), 4), (("b", "list", 1), 5), (("t",), 6)],
        ".toml": [(("a",), 1), (("b", "lr"), 4), (("b", "list", 1), 5), (("p", 1, "k"), 12), (("p", 1, "q", "z"), 14)],
    }.items(),
)
def test_lines(suffix: str, lines: list[tuple[tuple[str | int, ...], int]]) -> None:
    config = Config.fromstring(TEXTS[suffix], suffix)
    for path, line in lines:
        origin = config.origin(*path)
        assert origin is not None
        assert origin.line == line, path
        assert origin.source == config.filename


def test_aliases_and_merge_keys_of_yaml() -> None:
    text = "base: &b\n  x: 1\n  y: 2\nother:\n  <<: *b\n  y: 3\nlist: [*b, *b]\n"
    config = Config.fromstring(text, ".yaml")
    assert config.other == {"x": 1, "y": 3}
    assert config["list"][1] == {"x": 1, "y": 2}
    assert [config.origin("other", name).line for name in "xy"] == [2, 6]  # type: ignore[union-attr]


def test_data_executes_nothing(tmp_path: Path) -> None:
    for text in ("a: !!python/object/apply:os.system ['touch executed']", "a: !!python/name:os.system"):
        with pytest.raises(ConfigError, match="could not determine a constructor"):
            Config.fromstring(text, ".yaml")
    (tmp_path / "evil.py").write_text("raise SystemExit(3)")
    for suffix, text in (
        (".yaml", "_base_: evil.py"),
        (".json", '{"_base_": "evil.py"}'),
        (".toml", '_base_ = "evil.py"'),
    ):
        path = tmp_path / f"main{suffix}"
        path.write_text(text)
        with pytest.raises(ConfigError, match="evil.py is Python, which .* files do not execute"):
            Config.fromfile(path)


def test_custom_imports_of_data_wait_for_a_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_by_yaml.py").write_text("from pathlib import Path\nPath(__file__).with_name('done').touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Config.fromstring("custom_imports: {imports: imported_by_yaml}", ".yaml")
    assert not (tmp_path / "done").exists()
    config.import_custom_modules()
    assert (tmp_path / "done").exists()
