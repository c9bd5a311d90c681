"""Files that readers of the repository meet beside the code: they can be read, and say what is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flextrain.core.base.events import EVENTS

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# GitHub's forms: what each kind of question must have.
KINDS = {"markdown": {"value"}, "textarea": {"label"}, "input": {"label"}, "dropdown": {"label", "options"}}
KINDS["checkboxes"] = {"label", "options"}


@pytest.mark.parametrize("path", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.stem)
def test_forms_of_issues_are_complete(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    ids = [question["id"] for question in form["body"] if question["type"] != "markdown"]
    assert len(ids) == len(set(ids))
    for question in form["body"]:
        assert KINDS[question["type"]] <= question["attributes"].keys(), question


def test_a_bug_comes_with_the_doctors_output_and_the_files_there_are() -> None:
    (bug,) = (yaml.safe_load(path.read_text()) for path in FORMS if path.stem == "bug")
    questions: dict[str, Any] = {question.get("id"): question for question in bug["body"]}
    assert "flextrain doctor" in questions["doctor"]["attributes"]["label"]
    assert questions["doctor"]["validations"]["required"]
    assert EVENTS in questions["log"]["attributes"]["description"]


def test_the_citation_names_the_licence_of_the_project_and_no_version() -> None:
    """The version stands in core/version.py alone."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (licence,) = re.findall(r'^license = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert citation["license"] == licence
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert "version" not in citation


def test_the_sdist_gets_every_file_that_git_would_give() -> None:
    """A folder or file at the top that MANIFEST.in does not name would be missing for who tests an sdist."""
    said = (ROOT / "MANIFEST.in").read_text()
    own = {"LICENSE", "README.md", "pyproject.toml", "core", "flextrain", "optim", "runner", "strategies", ".gitignore"}
    given = {"build", "dist", "work_dirs", "data", ".git", "htmlcov"}  # what is made here
    for path in ROOT.iterdir():
        made = path.name in given or path.name.endswith(("_cache", ".egg-info")) or path.name.startswith(".venv")
        if not made and path.name not in own and path.name != ".coverage" and not path.name.startswith("site"):
            assert re.search(
                rf"(^graft|include|^recursive-include) (.* )?{re.escape(path.name)}\b", said, re.MULTILINE
            ), path
