"""The public interface is the recorded one, and what docs/policy.md promises holds."""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from pathlib import Path

import pytest
from packaging.version import Version

import flextrain
from flextrain.core.base.deprecation import deprecated, warn_deprecated
from flextrain.core.checkpoint.manifest import VERSION

from .public_api import RECORD, lines
from .test_architecture import sources

ROOT = Path(__file__).parents[1]
POLICY = (ROOT / "docs" / "policy.md").read_text()


def verdict(old: list[str], new: list[str]) -> str:
    """What differs, near lines beside each other, and what to do; "" if nothing does."""
    gone, come = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    if not (gone or come):
        return ""
    shown = []
    for line in gone:
        shown.append(f"- {line}")
        head = re.split(r"[(\[:=]", line)[0]
        near = [other for other in come if re.split(r"[(\[:=]", other)[0] == head]
        for other in difflib.get_close_matches(line, near, n=1, cutoff=0.0):
            shown.append(f"+ {other}")
            come.remove(other)
    shown += [f"+ {line}" for line in come]
    advice = []
    if gone:
        advice.append(
            "Lines with - are public, and users' code may need them. Keep what they had, and deprecate it with "
            "core/base/deprecation.py (docs/policy.md says for how long). A new parameter with a default changes a line too: that is "
            "no break if it comes last or by keyword only."
        )
    if come:
        advice.append("Lines with + will be promised to users: look at each name once more.")
    advice.append("If all of it is meant, record it: python -m tests.public_api --write, with a line in CHANGELOG.md.")
    return "\n".join(["The public interface has changed:", *shown, *advice])


def test_the_public_interface_is_the_recorded_one() -> None:
    said = verdict(RECORD.read_text().splitlines(), lines())
    if said:
        pytest.fail(said, pytrace=False)


def test_a_change_is_shown_beside_what_there_was_and_says_what_to_do() -> None:
    old = ["flextrain.launch(fn, nprocs)", "flextrain.heartbeat()", "flextrain.launch2(a)"]
    said = verdict(old, ["flextrain.launch(fn, nprocs, *, start='fork')", "flextrain.new()", "flextrain.launch2(a)"])
    assert said.splitlines()[1:5] == [
        "- flextrain.heartbeat()",
        "- flextrain.launch(fn, nprocs)",
        "+ flextrain.launch(fn, nprocs, *, start='fork')",
        "+ flextrain.new()",
    ]
    assert "deprecate it" in said
    added = verdict(old, [*old, "flextrain.new()"])
    assert "deprecate" not in added
    assert "--write" in added
    assert verdict(old, old[::-1]) == ""


def test_what_is_frozen_has_all_that_users_write() -> None:
    found = RECORD.read_text()
    for line in (
        r"^flextrain\.FlexibleRunner\(model, work_dir='work_dirs', .*, cfg=None\)$",
        r"^flextrain\.FlexibleRunner\.train\(self\)$",
        r"^flextrain\.FlexibleRunner\.from_cfg\(cls, cfg\) \[classmethod\]$",
        r"^flextrain\.Strategy\.setup\(self, model, optim=None\)$",
        r"^flextrain\.Hook\.after_train_iter\(self, runner, batch_idx, data_batch=None, outputs=None\)$",
        r"^flextrain\.BaseLoop\.run\(self\)$",
        r"^flextrain\.BaseMetric\.compute_metrics\(self, results\)$",
        r"^flextrain\.runner\.run\.Run\.iter \[property\]$",
        r'^HOOKS "EarlyStoppingHook"\(monitor, rule=None, min_delta=0\.1, ',
        r"^STRATEGIES \"DeepSpeedStrategy\"\['zero_optimization'\]\['stage'\]=",
        r"^FlexibleRunner\['env_cfg'\]\['preemption'\]\['status'\]=143$",
        r"^\$ flextrain plan --world-size$",
    ):
        assert re.search(line, found, flags=re.MULTILINE), line
    assert "0x" not in found, "an address"


# Deprecation


def due(modules: dict[str, str], version: str) -> list[str]:
    """What was to be removed in this version or an earlier one, and is still there."""
    found = []
    for module, source in modules.items():
        if "deprecated(" not in source or module.endswith(".deprecation"):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("warn_deprecated", "deprecated")):
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                if "removed_in" in given and Version(ast.literal_eval(given["removed_in"])) <= Version(version):
                    found.append(f"{module}:{node.lineno}")
    return found


def test_nothing_that_was_to_go_is_still_there() -> None:
    assert due(sources(), flextrain.__version__) == []


def test_what_is_due_is_found() -> None:
    source = 'def f():\n    warn_deprecated("f", since="1.2", removed_in="2.0", instead="use g")'
    assert due({"a": source}, "2.0.0") == ["a:2"]
    assert due({"a": source}, "1.9.3") == []


def test_the_warning_has_versions_and_replacement_and_shows_the_users_line() -> None:
    @deprecated("f()", since="1.2", removed_in="2.0", instead="use g()")
    def f(x: int) -> int:
        """What it does."""
        return x + 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert f(1) == 2
    (one,) = caught
    assert one.category is FutureWarning
    assert one.filename == __file__
    assert str(one.message) == "f() is deprecated since flextrain 1.2 and will be removed in 2.0: use g()"
    assert f.__doc__ == "What it does."

    def own() -> None:
        warn_deprecated("own()", since="1.2", removed_in="2.0", instead="use g()")

    with pytest.warns(FutureWarning, match="own") as record:
        own()
    assert record[0].filename == __file__


# What the policy says


def test_the_policy_names_the_formats_and_versions_that_hold() -> None:
    assert f"writes format {VERSION}" in POLICY
    project = (ROOT / "pyproject.toml").read_text()
    torch_floor, *_ = re.findall(r'"torch>=([\d.]+)"', project)  # extras may ask for more
    assert f"PyTorch {torch_floor} and newer" in POLICY
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert f"Python {pythons[0]} to {pythons[-1]}" in POLICY
