"""`flextrain report`: what a run has logged is what the page shows, also of resumed, broken and foreign runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flextrain import Hook
from flextrain.cli import main
from flextrain.core.base.events import append_event
from flextrain.report import report_files
from flextrain.report.curve_charts import figures, thinned
from flextrain.report.recorded_run import Curve, RecordedRun, recorded_run
from flextrain.report.run_facts import facts_of, markdown, state_of
from flextrain.report.run_page import page

from .runner.conftest import make_run


class Falls(Hook):
    """Shows a picture after each validation, stores a number, and fails in the third epoch."""

    def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        picture = np.full((4, 6, 3), 40 * runner.epoch, np.uint8)
        runner.visualizer.add_image("val/<sample>", picture, step=runner.epoch)
        runner.visualizer.add_scalar("mine/a&b", 0.5 * runner.epoch, step=runner.epoch)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 27 and runner.train_loop.start_iter == 0:
            raise RuntimeError("a lamp fell")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: ``first`` failed in its third epoch and was resumed after the second; ``second`` has another rate."""
    folder = tmp_path_factory.mktemp("runs")
    hooks: dict[str, Any] = dict(
        default_hooks={"logger": {"interval": 5}}, scores=[0.25, 0.75, 0.5], env_cfg={"dry_run": False}
    )
    first = make_run(folder / "first", custom_hooks=[Falls()], **hooks)
    with pytest.raises(RuntimeError, match="a lamp fell"):
        first.train()
    first.strategy.leave()
    again = make_run(folder / "first", custom_hooks=[Falls()], resume=True, **{**hooks, "scores": [0.75, 0.875]})
    again.train()
    again.strategy.leave()
    second = make_run(folder / "second", optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.05}}, **hooks)
    second.train()
    second.strategy.leave()
    return folder


class Scripts(HTMLParser):
    """The points of the charts, and everything in the page that refers to something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.points: list[dict[str, Any]] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self._is_points = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._is_points = tag == "script" and ("class", "points") in attributes
        names = ("src", "href", "xlink:href", "action", "data")
        self.references += [value or "" for name, value in attributes if name in names]

    def handle_data(self, data: str) -> None:
        if self._is_points:
            self.points.append(json.loads(data))
            self._is_points = False
        elif self.tags and self.tags[-1] not in ("script", "style"):
            self.text += data


def logged(folder: Path, name: str) -> dict[int, list[tuple[int, float]]]:
    """The records of a scalar by start of the run, straight from the files."""
    found = {}
    for i, path in enumerate(sorted(folder.glob("*/vis_data/scalars.json"))):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found[i] = [(record.get("iter", record["step"]), record[name]) for record in records if name in record]
    return found


def chart(shown: Scripts, title: str) -> dict[str, list[tuple[float, float]]]:
    (points,) = (each for each in shown.points if each["title"] == title)
    return {curve["name"]: list(zip(curve["x"], curve["y"], strict=True)) for curve in points["curves"]}


@pytest.fixture(scope="module")
def shown(recorded: Path) -> Scripts:
    output = recorded / "page.html"
    assert main(["report", str(recorded / "first"), str(recorded / "second"), "-o", str(output)]) == 0
    return Scripts(output.read_text())


def test_the_points_of_a_curve_are_those_that_were_logged(recorded: Path, shown: Scripts) -> None:
    before, after = logged(recorded / "first", "loss").values()
    (other,) = logged(recorded / "second", "loss").values()
    expected = {"first": [*before[:4], *after], "second": other}
    assert before[-1][0] == 25, "what is beyond the checkpoint that the run was resumed from"
    assert [x for x, _ in expected["first"]] == [5, 10, 15, 20, 25, 30]
    found = chart(shown, "loss")
    assert {name: [x for x, _ in points] for name, points in found.items()} == {
        name: [x for x, _ in points] for name, points in expected.items()
    }
    for name, points in expected.items():
        assert [y for _, y in found[name]] == pytest.approx([y for _, y in points], rel=1e-5)


def test_a_validation_is_at_its_iteration_and_not_at_its_epoch(shown: Scripts) -> None:
    assert chart(shown, "accuracy, validation") == {
        "first": [(10, 0.25), (20, 0.75), (30, 0.875)],
        "second": [(10, 0.25), (20, 0.75), (30, 0.5)],
    }
    assert chart(shown, "mine/a&b") == {"first": [(1, 0.5), (2, 1), (3, 1.5)]}, "the user's own steps"


def test_samples_per_second_are_those_of_the_logged_times(recorded: Path, shown: Scripts) -> None:
    (times,) = logged(recorded / "second", "time").values()
    train = [(x, value) for x, value in times if x % 5 == 0]
    found = chart(shown, "samples per second")["second"]
    assert [x for x, _ in found] == [x for x, _ in train]
    assert [y for _, y in found] == pytest.approx([4 / seconds for _, seconds in train], rel=1e-4)


def test_the_drawn_line_has_the_points(recorded: Path, shown: Scripts) -> None:
    """A line of the picture is the curve, scaled evenly in both directions."""
    text = (recorded / "page.html").read_text()
    drawn = re.search(r"<h3>accuracy, validation</h3><svg.*?</svg>", text, re.DOTALL)
    assert drawn is not None
    line = re.search(r'<g class="of-run-0">\s*<path d="([^"]*)"', drawn[0])
    assert line is not None
    spots = [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", line[1])]
    points = chart(shown, "accuracy, validation")["first"]
    assert len(spots) == len(points)
    for axis, sign in ((0, 1), (1, -1)):
        drawn_at, values = [spot[axis] for spot in spots], [point[axis] for point in points]
        scale = (drawn_at[1] - drawn_at[0]) / (values[1] - values[0])
        assert scale * sign > 0
        assert drawn_at[2] - drawn_at[0] == pytest.approx(scale * (values[2] - values[0]), abs=0.6)


def test_the_page_needs_no_network_and_escapes_what_it_shows(shown: Scripts, recorded: Path) -> None:
    outside = [ref for ref in shown.references if not ref.startswith(("#", "data:image/png;base64,"))]
    assert not outside
    text = (recorded / "page.html").read_text()
    assert not re.search(r"url\(\s*['\"]?(?!#)", text)
    assert "@import" not in text
    assert "sample" not in shown.tags, "a name of a picture"
    assert "val/<sample>, step 3" in shown.text
    assert "mine/a&b" in shown.text


def test_events_are_listed_and_say_what_happened(recorded: Path) -> None:
    run = recorded_run(recorded / "first", "first")
    assert [(event.kind, event.iteration) for event in run.events if event.kind not in ("saved", "validated", "error")] == [
        ("started", 0), ("failed", 27), ("resumed", 20), ("finished", 30),
    ]  # fmt: skip
    assert [event.iteration for event in run.events if event.kind == "saved"] == [10, 20, 30]
    assert [event.iteration for event in run.events if event.kind == "error"] == [25], "the line of the failure"
    assert (run.starts, run.is_over, state_of(run)) == (2, True, "finished")
    assert facts_of(run)["best accuracy"] == "0.875 at iteration 30"
    assert [(name, step) for name, step, _ in run.pictures] == [("val/<sample>", 3)]


def test_markdown_has_the_facts_and_what_differs(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(recorded / "first"), str(recorded / "second"), "--markdown", "--names", "a|b,c"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("|  | a\\|b | c |\n| --- | --- | --- |\n| state | finished | finished |\n")
    assert "| updates | 30 in 2 starts | 30 |\n" in text
    assert "| accuracy, validation | 0.875 | 0.5 (best 0.75) |\n" in text
    assert "| optim\\_wrapper.optimizer.lr | 0.1 | 0.05 |\n" in text
    assert "randomness" not in text, "which is the same"


# Broken and foreign folders


def written(folder: Path, records: list[dict[str, Any]], start: str = "20260101_000000", **files: str) -> Path:
    data = folder / start / "vis_data"
    data.mkdir(parents=True)
    (data / "scalars.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, text in files.items():
        (folder / start / name.replace("__", ".")).write_text(text)
    return folder


def curve_of(run: RecordedRun, name: str, mode: Any = "train") -> list[tuple[float, float]]:
    curve = run.curves[mode, name]
    return list(zip(curve.xs, curve.ys, strict=True))


def test_a_torn_last_line_and_lines_of_something_else_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, [{"loss": 1.0, "iter": 10, "step": 10}])
    with (tmp_path / "20260101_000000/vis_data/scalars.json").open("a") as file:
        file.write('[1]\nnull\n{"loss": 0.5, "iter": 20, "st')
    run = recorded_run(tmp_path, "torn")
    assert curve_of(run, "loss") == [(10, 1.0)]
    assert state_of(run) == "running, or killed"
    assert "torn" in page([run])


def test_an_empty_run_is_shown_as_such(tmp_path: Path) -> None:
    (tmp_path / "20260101_000000/vis_data").mkdir(parents=True)
    run = recorded_run(tmp_path, "empty")
    assert "none yet" in Scripts(page([run])).text
    assert "none yet" in markdown([run])


def test_other_packages_add_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has nothing to say of this run, and one fails, which ends no report."""
    info = tmp_path / "site" / "my_rows-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rows\nVersion: 0.1.0\n")
    rows = "folder_is = my_rows:says\nnothing = my_rows:nothing\nwrong = my_rows:wrong"
    (info / "entry_points.txt").write_text(f"[flextrain.report]\n{rows}\n")
    (tmp_path / "site" / "my_rows.py").write_text(
        "says = lambda folder: folder.name\nnothing = lambda folder: ''\nwrong = lambda folder: 1 / 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    facts = facts_of(recorded_run(written(tmp_path / "run", []), "a"))
    assert facts["folder_is"] == "run"
    assert "nothing" not in facts
    assert facts["wrong"] == "my_rows:wrong fails: ZeroDivisionError: division by zero"


def test_a_killed_start_and_its_successor_are_one_curve_also_without_events(tmp_path: Path) -> None:
    written(tmp_path, [{"loss": float(i), "iter": i, "step": i} for i in (10, 20, 30, 40)])
    written(tmp_path, [{"loss": -float(i), "iter": i, "step": i} for i in (30, 40, 50)], "20260102_000000")
    run = recorded_run(tmp_path, "run")
    assert curve_of(run, "loss") == [(10, 10.0), (20, 20.0), (30, -30.0), (40, -40.0), (50, -50.0)]


def test_a_training_that_began_anew_replaces_the_earlier_one(tmp_path: Path) -> None:
    for start, value in (("20260101_000000", 1.0), ("20260102_000000", 2.0)):
        append_event(tmp_path, "started", iter=0, log=str(tmp_path / start))
        written(tmp_path, [{"loss": value, "iter": 10, "step": 10}], start)
        append_event(tmp_path, "saved", iter=10, path=f"{tmp_path}/of_{start}")
    run = recorded_run(tmp_path, "run")
    assert curve_of(run, "loss") == [(10, 2.0)]
    assert [event.text for event in run.events if event.kind == "saved"] == ["of_20260102_000000"]
    assert run.notes[0].startswith("1 earlier start in ")
    assert run.notes[0].endswith("/START` shows one: 20260101_000000 (to iteration 10)")


def test_what_never_changes_is_folded_away_and_words_are_whole(tmp_path: Path) -> None:
    written(tmp_path, [{"loss": 1.0 / i, "lr": 0.1, "iter": i, "step": i} for i in (10, 20, 30)])
    text = page([recorded_run(tmp_path, "run")])
    (folded,) = re.findall(r"<details><summary>Constant: lr</summary>(.*?)</details>", text, re.DOTALL)
    assert re.findall("<h3>(.*?)</h3>", folded) == ["lr"]
    assert "anywhere; vertical-align" not in text, "columns would be as narrow as a letter"
    assert f"{tmp_path.parent.name}/<wbr>{tmp_path.name}".replace("_", "_<wbr>") in text, (
        "a path breaks at its separators"
    )


def test_what_was_done_beyond_the_checkpoint_that_a_run_was_resumed_from_is_left_out(tmp_path: Path) -> None:
    for start, begins, at in (("20260101_000000", 0, (10, 20, 30, 40)), ("20260102_000000", 20, (50, 60))):
        append_event(tmp_path, "started", iter=begins, log=str(tmp_path / start))
        written(tmp_path, [{"loss": float(i), "iter": i, "step": i} for i in at], start)
    assert [x for x, _ in curve_of(recorded_run(tmp_path, "run"), "loss")] == [10, 20, 50, 60]


def test_a_start_that_only_evaluated_changes_no_curve(tmp_path: Path) -> None:
    records = [{"loss": 1.0, "iter": 10, "step": 10}, {"accuracy": 0.5, "time": 0.1, "data_time": 0.1, "step": 10}]
    written(tmp_path, records)
    (tmp_path / "20260101_000000/vis_data/config.json").write_text('{"seed": 1}')
    written(tmp_path, [{"accuracy": 0.1, "time": 0.1, "data_time": 0.1, "step": 0}], "20260102_000000")
    run = recorded_run(tmp_path, "run")
    assert curve_of(run, "accuracy", "val") == [(10, 0.5)]
    assert run.settings == {"seed": "1"}
    assert not run.notes


def test_a_folder_of_mmengine_is_read_and_its_configuration_not_run(tmp_path: Path) -> None:
    records = [
        {"lr": 0.1, "data_time": 0.01, "loss": 2.0, "time": 0.1, "epoch": 1, "iter": 50, "memory": 100, "step": 50},
        {"accuracy/top1": 30.0, "data_time": 0.1, "time": 0.2, "step": 1},
        {"lr": 0.1, "data_time": 0.01, "loss": 1.0, "time": 0.1, "epoch": 2, "iter": 110, "memory": 100, "step": 110},
        {"accuracy/top1": 40.0, "data_time": 0.1, "time": 0.2, "step": 2},
    ]
    config = "lr = 0.1\nmodel = dict(type='ResNet', depth=50, out=(1, 2))\nx = open('was_run', 'w')\n"
    log = "2026/01/01 10:00:00 - mmengine - INFO - Epoch(train)   [1][50/60]  lr: 1.0000e-01\n2026/01/01 10:00:01 - mmengine - WARNING - careful\n"
    written(tmp_path, records, **{"20260101_000000__log": log})
    (tmp_path / "20260101_000000/vis_data/config.py").write_text(config)
    run = recorded_run(tmp_path, "theirs")
    assert curve_of(run, "accuracy/top1", "val") == [(60, 30.0), (120, 40.0)]
    assert run.settings == {
        "lr": "0.1", "model.type": '"ResNet"', "model.depth": "50", "model.out": "[1, 2]", "x": "\"open('was_run', 'w')\"",
    }  # fmt: skip
    assert not Path("was_run").exists()
    assert [(event.kind, event.iteration, event.text) for event in run.events] == [("warning", 50, "careful")]


def test_values_that_are_not_finite_break_the_curve_and_are_marked(tmp_path: Path) -> None:
    values = [1.0, math.nan, 2.0, math.inf, 3.0]
    written(tmp_path, [{"loss": value, "iter": i + 1, "step": i + 1} for i, value in enumerate(values)])
    text = page([recorded_run(tmp_path, "run")])
    shown = Scripts(text)
    assert chart(shown, "loss")[""] == [(1, 1), (2, "nan"), (3, 2), (4, "inf"), (5, 3)]
    assert "Crosses mark values" in shown.text
    assert "3 (best 1), 2 not finite" in shown.text
    nothing = written(tmp_path / "other", [{"loss": math.nan, "iter": 1, "step": 1}])
    assert "no finite value" in page([recorded_run(nothing, "run")])


def test_names_can_be_anything(tmp_path: Path) -> None:
    name = "a</script><script>alert(1)</script>&\"'$x$ %s {b}"
    written(tmp_path, [{name: float(i), "iter": i, "step": i} for i in (1, 2)])
    shown = Scripts(page([recorded_run(tmp_path, name)]))
    assert shown.tags.count("script") == 2, "the points, and the page's own"
    assert shown.points[0]["title"] == name
    assert name in shown.text


def test_of_many_values_the_smallest_and_the_largest_stay() -> None:
    random = np.random.default_rng(0)
    ys = random.normal(size=200_000)
    ys[77_777], ys[123_456], ys[5_000] = 50.0, -60.0, math.nan
    curve = Curve("train", "loss", list(range(1, 200_001)), ys.tolist())
    x, y = thinned(curve)
    assert len(x) <= 3 * 300 + 2
    assert (x[0], x[-1]) == (1, 200_000)
    points = dict(zip(x.tolist(), y.tolist(), strict=True))
    assert (points[77_778], points[123_457]) == (50.0, -60.0)
    assert math.isnan(points[5_001])
    assert all(curve.ys[int(at) - 1] == value for at, value in points.items() if math.isfinite(value))


def test_each_rank_has_a_curve(tmp_path: Path) -> None:
    written(tmp_path, [{"loss": 1.0, "data_time": 0.1, "time": 1, "memory": 5, "iter": i, "step": i} for i in (1, 2)])
    data = tmp_path / "20260101_000000/vis_data"
    for rank in range(1, 12):
        lines = [{"iter": i, "data_time": 0.1 * rank, "time": 1.0, "memory": 10 * rank} for i in (1, 2)]
        (data / f"rank_{rank}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = recorded_run(tmp_path, "run")
    assert sorted(run.ranks["data_time"]) == list(range(12))
    waits = chart(Scripts(page([run])), "Waiting for data, of each rank: run")
    assert waits["rank 11"] == [(1, 1.1), (2, 1.1)]
    assert 4 <= len(waits) <= 8, "those that differ most"


# The command


def test_a_watched_page_is_written_until_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    written(folder, [{"loss": 1.0, "iter": 10, "step": 10}])
    append_event(folder, "started", iter=0, log=str(folder / "20260101_000000"))
    seen: list[tuple[int, bool]] = []

    def goes_on(_: float) -> None:
        text = (folder / "report.html").read_text()
        seen.append((len(chart(Scripts(text), "loss")[""]), 'http-equiv="refresh" content="3"' in text))
        if len(seen) == 1:
            with (folder / "20260101_000000/vis_data/scalars.json").open("a") as file:
                file.write('{"loss": 0.5, "iter": 20, "step": 20}\n')
        else:
            append_event(folder, "finished", iter=20)

    monkeypatch.setattr(report_files.time, "sleep", goes_on)
    assert main(["report", str(folder), "--watch", "--interval", "3"]) == 0
    assert seen == [(1, True), (2, True)]
    assert "http-equiv" not in (folder / "report.html").read_text()
    assert "All runs are over" in capsys.readouterr().out

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    append_event(folder, "started", iter=20, log=str(folder / "20260101_000000"))
    monkeypatch.setattr(report_files.time, "sleep", interrupted)
    assert main(["report", str(folder), "--watch"]) == 0
    assert "http-equiv" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing"], "report: there is no folder missing, give the work directory of a run"),
        (["."], "report: . has no logs of a run, give a work directory"),
        (["run", "run"], 'report: "'),
        (["run", "--names", "a,b"], 'report.names: "a,b" has 2 names, give 1, one for each run'),
        (["run", "-o", "nowhere/a.html"], "report.output: there is no folder "),
        (["run", "--watch", "--markdown"], "report.watch: has no meaning with --markdown, give one of them"),
        (["run", "--watch", "--interval", "0"], "report.interval: 0.0 is not allowed, give 0.1 or more seconds"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run", [{"loss": 1.0, "iter": 10, "step": 10}])
    assert main(["report", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flextrain: {says}")


def test_without_the_package_that_draws_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, [{"loss": 1.0, "iter": 10, "step": 10}])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install flextrain[report]" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--markdown"]) == 0, "which draws nothing"


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("width", [1400, 390])
def test_a_browser_shows_it_without_scrolling_sideways(
    recorded: Path, shown: Scripts, tmp_path: Path, width: int
) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    probe = tmp_path / "probe.html"
    measure = (
        "<script>const f = document.createElement('iframe'); f.style.cssText = 'border:0;height:900px;width:WIDTHpx';"
        "f.srcdoc = document.getElementById('page').textContent; document.body.append(f);"
        "f.onload = () => { const d = f.contentDocument; const svg = d.querySelector('figure svg');"
        "const box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new f.contentWindow.PointerEvent('pointermove', {clientX: box.left + box.width * .6, clientY: box.top + 50}));"
        "document.body.dataset.found = [d.documentElement.scrollWidth, d.querySelectorAll('figure svg').length,"
        "d.querySelector('.shown').textContent].join('|'); };</script>"
    ).replace("WIDTH", str(width))

    inner = json.dumps((recorded / "page.html").read_text()).replace("</", "<\\/")
    measure = measure.replace("document.getElementById('page').textContent", inner)

    probe.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{measure}</body>")
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1500,1000", "--virtual-time-budget=5000", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    wide, charts, said = found[1].split("|")
    assert int(wide) <= width
    assert int(charts) == len(shown.points)
    assert said.startswith("iteration "), "what a pointer shows"


def test_all_figures_of_a_run_are_in_a_section(recorded: Path) -> None:
    found = figures([recorded_run(recorded / "second", "second")])
    assert {(figure.section, figure.title) for figure in found} >= {
        ("Loss", "loss"), ("Learning rate", "lr"), ("Memory", "largest memory so far"), ("Metrics", "accuracy, validation"),
        ("Speed", "samples per second"), ("Speed", "waiting for data, in an iteration"),
    }  # fmt: skip
