"""The page of a plan: what is on it, and that it is one file which needs nothing else."""

import dataclasses
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from flextrain.cli import main
from flextrain.core.base.errors import CheckpointError, ConfigError
from flextrain.plan import html as html_module
from flextrain.plan.html import check_page, page, write_page
from flextrain.plan.machines import MACHINES
from flextrain.plan.plan import KINDS, Moment, RankPlan, Recipe, StepTime, StrategyPlan, Traffic, TrainingPlan

pytest.importorskip("matplotlib")
MIB = 2**20
NASTY = "mesh:<script>alert(1)</script>&$x_1$\x1b" + "tp2x" * 40


def moments(count, peak):
    phases = ["forward"] * (count // 2) + ["backward"] * (count - count // 2 - 1) + ["update"]
    found = []
    for i, phase in enumerate(phases):
        high = 1 - abs(2 * i - count) / (count + 1)
        by_kind = {kind: int(peak * high / len(KINDS)) for kind in KINDS}
        found.append(Moment(phase, f"layers.{i}", "aten.mm", sum(by_kind.values()), by_kind))
    return found


def strategy(name, peak, count=400, axes=("dp_shard", "tp")):
    each = moments(count, peak)
    traffic = [
        Traffic("all_gather", axis, 8, 3, 9 * MIB, (i + 1) * MIB, i * MIB, "forward") for i, axis in enumerate(axes)
    ]
    highest = max(each, key=lambda moment: moment.total)
    return StrategyPlan(name, "planned", ranks=[RankPlan(0, {}, highest, {}, each, traffic)], notes=["a note & more"])


def training_plan(*strategies, **changes):
    given = {"script": "dir/train.py", "world_size": 1024, "nodes": 128, "device_memory": 100 * MIB, "torch": "2.15.0"}
    return TrainingPlan(**{**given, **changes}, strategies=list(strategies), unseen=5 * MIB)


REFUSED = StrategyPlan("zero3", "refused", 'strategy.type: "<b>" is not possible')


class Reader(HTMLParser):
    """Collects what an HTML file says and refers to."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.refers, self.ids = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], "tags that are not closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        self.refers += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open = self.open[: len(self.open) - (tag not in self.VOID)]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def six():
    return page(training_plan(*(strategy(f"{NASTY}{i}", 20 * MIB * (i + 1)) for i in range(5)), REFUSED))


def test_the_page_needs_nothing_else(six):
    read = Reader(six)
    assert "script" not in read.tags
    assert "link" not in read.tags
    assert all(each.startswith("#") for each in read.refers)
    assert not re.search(r"url\((?!#)|@import|@font-face", six)
    assert re.findall(r"https?://[^\s\"<)]*", six.replace("http://www.w3.org/", "")) == []


def test_what_users_named_is_shown_as_text(six):
    assert "<b>" not in six
    text = "".join(Reader(six).text)
    assert NASTY.split("\x1b")[0] in text
    assert 'zero3: strategy.type: "<b>" is not possible' in text
    assert text.count("a note & more") == 5


def test_what_the_page_says_of_each_strategy(six):
    text = " ".join("".join(Reader(six).text).split())
    assert "4 of 6 strategies fit on the device; 1 of 6 strategies refused" in text
    assert "100 MiB is the vertical line; 5 MiB of it are left free" in text
    assert "20 MiB in backward of layers.200 (aten.mm), on rank 0" in text.replace("19.95", "20")
    assert six.count("<svg") == 2 + 5
    assert six.count("dp_shard") == six.count(">tp<") == 2 * 5  # in a chart and in the table of collectives


def test_the_time_of_a_step_and_the_arguments_of_the_script():
    times = {"ddp": (0.5, 2.0), "fsdp": (0.25, 0.75)}
    timed = [
        dataclasses.replace(strategy(name, MIB, 20), time=StepTime(*ends, 0.1, 0, 0, 0, (0.1, 0.2)))
        for name, ends in times.items()
    ]
    ranks = [dataclasses.replace(timed[0].ranks[0], samples=4)]
    timed[0] = dataclasses.replace(timed[0], ranks=ranks, recipe=Recipe(data_shards=512))
    plan = training_plan(*timed, REFUSED, machine=MACHINES["h100"], arguments=["--name", "<b>x y</b>"])
    found = page(plan)
    read = Reader(found)
    text = " ".join("".join(read.text).split())
    assert "its arguments--name '<b>x y</b>'" in text
    assert "<b>" not in found
    assert "machineNVIDIA H100 SXM 80 GB" in text
    assert "from perfect overlap of computing and sending to none" in text
    assert re.findall(r'<td class="fits">(\w*)</td>', found) == ["yes", "yes", ""]
    assert ">2,048</td>" in found  # samples
    chart = found[found.index('aria-label="Time of a step"') :]
    chart = chart[: chart.index("</svg>")]
    assert "seconds per update" in chart
    assert "ddp, 2,048 samples" in chart
    assert "0.5 to 2 s" in chart
    assert "250 to 750 ms" in chart
    # Of each strategy a bar from 0 to the lower end, and one from there to the upper end.
    assert bars_of(chart) == [(0, 0.25), (0.25, 1), (0, 0.125), (0.125, 0.375)]
    assert "Time of a step" not in page(training_plan(strategy("ddp", MIB, 20)))
    assert "its arguments" not in page(training_plan(strategy("ddp", MIB, 20)))


def bars_of(chart):
    """The left and the right end of a chart's bars, by the length of its longest."""
    boxes = re.findall(r'<path d="M ([\d.]+) [\d.]+ \s*L ([\d.]+) [\d.]+[^"]*z\s*"', chart)
    left, right = min(float(begin) for begin, _ in boxes), max(float(end) for _, end in boxes)
    return [tuple(round((float(at) - left) / (right - left), 3) for at in box) for box in boxes]


def test_a_plan_of_refused_strategies_alone_has_no_chart():
    found = page(training_plan(REFUSED))
    assert "<svg" not in found
    assert "0 of 1 strategy fit on the device; 1 of 1 strategy refused" in "".join(Reader(found).text)


def test_a_peak_of_an_update_that_is_not_drawn_and_a_large_device():
    one = strategy("ddp", MIB, count=3, axes=())
    rank = dataclasses.replace(one.ranks[0], peak=Moment("backward", "", "", 2 * MIB, {"gradients": 2 * MIB}))
    found = page(training_plan(dataclasses.replace(one, ranks=[rank]), device_memory=80 * 2**30))
    text = "".join(Reader(found).text)
    assert "80 GiB lies far to the right" in text
    assert "2 MiB in backward, on rank 0; not in the update that is drawn" in text
    assert "Bytes sent" not in text


def test_the_same_plan_gives_the_same_page(six):
    assert page(training_plan(*(strategy(f"{NASTY}{i}", 20 * MIB * (i + 1)) for i in range(5)), REFUSED)) == six


def test_the_page_of_a_saved_plan(tmp_path, capsys):
    saved, file = tmp_path / "plan.json", tmp_path / "plan.html"
    saved.write_text(json.dumps(training_plan(strategy("fsdp", MIB, 20), REFUSED).as_json()))
    assert main(["plan", "--from", str(saved), "--html", str(file)]) == 1
    assert file.read_text() == page(training_plan(strategy("fsdp", MIB, 20), REFUSED))
    assert "train.py: one update on 1,024 processes" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json"]


def test_a_page_that_could_not_be_written_is_told_before_planning(tmp_path, capsys, monkeypatch):
    command = ["plan", "none.py", "--world-size", "8", "--html"]
    for path, says in [
        (
            tmp_path / "none" / "plan.html",
            f"plan.html: there is no folder {tmp_path / 'none'} for plan.html, make it first",
        ),
        (tmp_path, f"plan.html: {tmp_path} is a folder, give the path of a file"),
    ]:
        assert main([*command, str(path)]) == 2
        assert capsys.readouterr().err == f"flextrain: {says}\n"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ConfigError, match=r"^plan\.html: needs the package matplotlib .*pip install flextrain\[plots\]$"
    ):
        check_page(tmp_path / "plan.html")


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "plan.html"
    file.write_text("before")
    monkeypatch.setattr(html_module.Path, "write_text", _full)
    with pytest.raises(CheckpointError, match=r"plan\.html: could not be written, No space left"):
        write_page(training_plan(REFUSED), file)
    monkeypatch.undo()
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]


def _full(path, text, **_):
    path.write_bytes(text[:10].encode())
    raise OSError(28, "No space left on device")
