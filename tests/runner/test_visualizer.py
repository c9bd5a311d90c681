"""runner.visualizer: scalars and pictures reach every reporter, from the process that reports, in the background."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flextrain import VISUALIZERS, ConfigError, FlexibleRunner, Hook, MessageHub, Visualizer
from flextrain.runner.reporting import JsonLinesReporter, Reporter, build_visualizer
from flextrain.runner.reporting import reporter as pictures
from flextrain.testing import WorkerGroup

from .training import At, Net, make_runner, refuses

IMAGE = (np.arange(4 * 5 * 3) * 3 % 256).astype(np.uint8).reshape(4, 5, 3)


class Gallery(Reporter):
    """Keeps pictures, and which thread brought them."""

    def __init__(self, save_dir: Any = None) -> None:
        super().__init__(save_dir)
        self.events: list[Any] = []
        self.threads: set[str] = set()

    def on_start(self, config: Any) -> None:
        self.events.append("start")

    def on_scalars(self, scalars: Any, step: int, mode: str) -> None:
        self.events.append((mode, dict(scalars), step))

    def on_image(self, name: str, image: Any, step: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append((name, image, step))

    def close(self) -> None:
        self.events.append("close")


class OnlyScalars(Reporter):
    def on_scalars(self, scalars: Any, step: int, mode: str) -> None:
        pass


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What flextrain's logger writes."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flextrain")
    level = logger.level  # a run of another test may have left its own
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(level)


def read_png(data: bytes) -> Any:
    return np.asarray(pytest.importorskip("PIL.Image").open(io.BytesIO(data)))


def figure() -> Any:
    """A red page of 40 x 20 pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(0.4, 0.2), dpi=100, facecolor="red")


def test_pictures_reach_the_local_folder_as_they_were_at_the_call(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    visualizer = Visualizer(save_dir=tmp_path)
    image = IMAGE.copy()
    visualizer.add_image("val/sample", image, step=3)
    image[:] = 0
    visualizer.add_image("../../outside", IMAGE)
    red = figure()
    canvas = red.canvas
    visualizer.add_figure("page", red, 1)
    assert red.canvas is canvas, "the user's window stays"
    visualizer.add_scalar("score", 0.5, step=3)
    visualizer.add_scalars({"a": torch.tensor([1.0]), "b": 2}, step=4)
    visualizer.add_config({"extra": 1})
    visualizer.add_graph(nn.Linear(2, 3))
    visualizer.close()
    assert (read_png((tmp_path / "vis_image/val/sample_3.png").read_bytes()) == IMAGE).all()
    assert (read_png((tmp_path / "vis_image/page_1.png").read_bytes()) == (255, 0, 0)).all()
    assert (tmp_path / "vis_image/outside_0.png").exists()
    assert not list(tmp_path.parent.glob("outside*"))
    records = [json.loads(line) for line in (tmp_path / "scalars.json").read_text().splitlines()]
    assert records == [{"score": 0.5, "step": 3}, {"a": 1.0, "b": 2, "step": 4}]
    assert json.loads((tmp_path / "config.json").read_text()) == {"extra": 1}
    assert "in_features=2" in (tmp_path / "graph.txt").read_text()


def test_pictures_reach_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("matplotlib")
    visualizer = Visualizer(vis_backends=dict(type="TensorboardVisBackend"), save_dir=tmp_path)
    visualizer.add_image("sample", IMAGE, step=7)
    visualizer.add_figure("page", figure(), step=8)
    visualizer.add_graph(nn.Linear(2, 3))
    visualizer.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    (sample,) = events.Images("sample")
    assert sample.step == 7
    assert (read_png(sample.encoded_image_string) == IMAGE).all()
    assert [event.step for event in events.Images("page")] == [8]
    assert "graph/text_summary" in events.Tags()["tensors"]


def test_pictures_are_written_by_another_thread_and_the_call_does_not_wait(tmp_path: Path) -> None:
    may_write = threading.Event()

    class Slow(Gallery):
        def on_image(self, name: str, image: Any, step: int) -> None:
            may_write.wait()
            super().on_image(name, image, step)

    reporter = Slow()
    visualizer = Visualizer(vis_backends=[reporter], save_dir=tmp_path)
    for step in range(3):
        visualizer.add_image("sample", IMAGE, step)
        visualizer.add_scalar("score", 1.0, step)
    assert [event for event in reporter.events if event[0] == "sample"] == [], "the network is slow"
    may_write.set()
    visualizer.close()
    assert [event[2] for event in reporter.events if event[0] == "sample"] == [0, 1, 2]
    assert reporter.threads != {threading.current_thread().name}
    assert reporter.events[-1] == "close", "after the last picture"


def test_a_call_waits_rather_than_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MOST_BYTES", 2 * IMAGE.nbytes)
    most = [0]

    class Counting(Gallery):
        def on_image(self, name: str, image: Any, step: int) -> None:
            most.append(sum(not future.done() for future, _ in list(writer._waiting)))

    visualizer = Visualizer(vis_backends=[Counting()], json_lines=False)
    visualizer._writer = writer = pictures.PictureWriter()
    for step in range(50):
        visualizer.add_image("sample", IMAGE, step)
    visualizer.close()
    assert len(most) == 51
    assert max(most) <= 3, "two that wait, and one that is written"


def test_what_a_reporter_cannot_store_is_said_once(said: list[str]) -> None:
    pytest.importorskip("matplotlib")
    visualizer = Visualizer(vis_backends=[OnlyScalars()], json_lines=False)
    for _ in range(2):
        visualizer.add_image("sample", IMAGE)
        visualizer.add_graph(nn.Linear(1, 1))
        visualizer.add_config({})
        visualizer.add_figure("page", figure())
    visualizer.close()
    assert said == [
        "visualizer: OnlyScalars cannot store pictures, it has no method on_image",
        "visualizer: OnlyScalars cannot store graphs, it has no method on_graph",
        "visualizer: OnlyScalars cannot store settings, it has no method on_config",
        "visualizer: OnlyScalars cannot store figures, it has no method on_image",
    ]


def test_a_picture_that_is_lost_is_named(said: list[str], tmp_path: Path) -> None:
    class Fails(Gallery):
        def on_image(self, name: str, image: Any, step: int) -> None:
            raise OSError("disk full")

    visualizer = Visualizer(vis_backends=[Fails(), JsonLinesReporter(tmp_path)])
    visualizer.add_image("sample", IMAGE, 5)
    visualizer.close()
    assert said == ['Fails: the picture "sample" of step 5 is lost: OSError: disk full']
    assert (tmp_path / "vis_image/sample_5.png").exists(), "the others have it"


def test_a_reporter_may_take_figures_as_they_are() -> None:
    pytest.importorskip("matplotlib")

    class Takes(OnlyScalars):
        def on_figure(self, name: str, figure: Any, step: int) -> None:
            self.got = (name, figure, step)

    reporter, page = Takes(), figure()
    visualizer = Visualizer(vis_backends=[reporter], json_lines=False)
    visualizer.add_figure("page", page, 2)
    visualizer.close()
    assert reporter.got == ("page", page, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda v: v.add_image("a", IMAGE / 255),
            'add_image("a"): dtype float64 is not allowed, give uint8, as (image',
        ),
        (
            lambda v: v.add_image("a", IMAGE.transpose(2, 0, 1)),
            "shape (3, 4, 5) is not allowed, give (height, width, 3), as",
        ),
        (
            lambda v: v.add_image("a", IMAGE[..., 0]),
            "shape (4, 5) is not allowed, give (height, width, 3), as numpy.repeat",
        ),
        (lambda v: v.add_image("a", torch.zeros(4, 5, 3)), "Tensor is not allowed, give a NumPy array, as image.cpu()"),
        (lambda v: v.add_figure("a", IMAGE), "ndarray is not allowed, give a matplotlib.figure.Figure"),
        (lambda v: v.add_scalar("a", "high"), "add_scalars(\"a\"): 'high' is no number"),
        (lambda v: v.add_scalar("a", torch.ones(2)), "is no number, nor a tensor with one element"),
        (lambda v: v.add_scalars([1]), "add_scalars: list is not allowed, give a dict"),
        (lambda v: v.add_scalars({}, file_path="x.json"), "add_scalars.file_path: has no meaning here"),
        (lambda v: v.add_config(3), "add_config: int is not allowed, give a dict"),
        (lambda v: v.add_graph("net"), "add_graph: str is not allowed, give a torch.nn.Module"),
        (
            lambda v: v.add_datasample("a", IMAGE, object()),
            "add_datasample: Visualizer does not know what to draw of a object",
        ),
        (lambda v: v.get_image(), "get_image: there is none, call set_image first"),
        (
            lambda v: v.get_backend("Gallry"),
            "get_backend: \"Gallry\" is none of the reporters, there are ['Gallery'], did you",
        ),
    ],
)
@pytest.mark.parametrize("reports", [True, False])
def test_wrong_calls_are_refused_on_every_process(call: Any, message: str, reports: bool) -> None:
    visualizer = Visualizer(vis_backends=[Gallery()], json_lines=False)
    visualizer.belong_to_run("test", Path("vis_data"), {}, reports=reports)
    with pytest.raises(ConfigError) as error:
        call(visualizer)
    visualizer.close()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_drawing_is_refused_by_name_and_nothing_else_is() -> None:
    visualizer = Visualizer(image=IMAGE)
    assert (visualizer.get_image() == IMAGE).all()
    with pytest.raises(AttributeError, match=r"Visualizer.draw_bboxes: this visualizer does not draw, .*add_figure"):
        visualizer.draw_bboxes(1)
    assert not hasattr(visualizer, "anything")
    assert visualizer.get_backend("LocalVisBackend") is visualizer.get_backend("JsonLinesReporter")


@VISUALIZERS.register_module()
class Twice(Visualizer):
    """As projects on MMEngine write theirs: own arguments, own drawing, and a log of their own."""

    def __init__(self, name: str, vis_backends: Any = None, save_dir: Any = None, alpha: float = 0.8) -> None:
        super().__init__(name=name, vis_backends=vis_backends, save_dir=save_dir)
        self.alpha = alpha
        self.told: list[Any] = []

    def add_datasample(self, name: str, image: Any, data_sample: Any = None, **kwargs: Any) -> None:
        self.add_image(name, np.concatenate([image, image]), kwargs.get("step", 0))

    def add_scalars(self, scalar_dict: Any, step: int = 0, file_path: Any = None, **kwargs: Any) -> None:
        self.told.append((step, sorted(scalar_dict)))
        super().add_scalars(scalar_dict, step, file_path, **kwargs)

    def add_config(self, config: Any, **kwargs: Any) -> None:
        self.told.append("config")
        super().add_config(config, **kwargs)


class Draws(Hook):
    """Finds the visualizer and the hub when it is made, as MMDetection's hooks do."""

    def __init__(self) -> None:
        self.visualizer, self.hub = Visualizer.get_current_instance(), MessageHub.get_current_instance()

    def before_run(self, runner: Any) -> None:
        assert runner.visualizer is self.visualizer
        assert runner.message_hub is self.hub
        self.visualizer.add_graph(runner.model)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.visualizer.add_datasample("sample", IMAGE, step=runner.iter)


@pytest.mark.parametrize("kind", ["Twice", Twice])
def test_a_visualizer_of_ones_own_is_the_runs(tmp_path: Path, kind: Any) -> None:
    visualizer = dict(type=kind, vis_backends=[dict(type=Gallery)], alpha=0.5)
    runner = make_runner(tmp_path, visualizer=visualizer, custom_hooks=[dict(type=Draws)])
    assert type(runner.visualizer) is Twice
    assert runner.visualizer.alpha == 0.5
    runner.train()
    gallery: Any = runner.visualizer.get_backend("Gallery")
    assert gallery.events[0] == "start"
    assert gallery.events.count("start") == gallery.events.count("close") == 1
    shown = [event for event in gallery.events if event[0] == "sample"]
    assert [event[2] for event in shown] == list(range(21))
    assert shown[0][1].shape == (8, 5, 3)
    assert [event[2] for event in gallery.events if event[0] == "train"] == [7, 14, 21]
    assert runner.visualizer.told[0] == "config"
    assert [entry[0] for entry in runner.visualizer.told[1:]] == [7, 14, 21]
    folder = Path(runner.log_dir) / "vis_data"
    assert "Linear" in (folder / "graph.txt").read_text()
    assert len(list((folder / "vis_image").iterdir())) == 21


def test_what_hooks_add_at_the_very_end_is_written_and_closed(tmp_path: Path) -> None:
    last = At("after_run", lambda runner: runner.visualizer.add_image("last", IMAGE, 9), "LOWEST")
    for logger in ({}, None):
        gallery = Gallery()
        folder = tmp_path / str(logger)
        make_runner(
            folder, visualizer=[gallery], custom_hooks=[last], default_hooks=dict(logger=logger, checkpoint=None)
        ).train()
        assert gallery.events[-2][0] == "last"
        assert gallery.events[-1] == "close"


def test_a_visualizer_that_is_built_is_taken(tmp_path: Path) -> None:
    own = Visualizer(save_dir=tmp_path / "own")
    runner = make_runner(tmp_path / "run", visualizer=own)
    assert runner.visualizer is own
    runner.train()
    assert (tmp_path / "own/scalars.json").exists()
    own.add_scalar("after", 1.0, 99)
    own.close()
    assert json.loads((tmp_path / "own/scalars.json").read_text().splitlines()[-1]) == {"after": 1.0, "step": 99}


@pytest.mark.processes
def test_a_programs_last_picture_is_written_though_nobody_closes(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, numpy as np\nfrom flextrain import Visualizer\nv = Visualizer(save_dir=sys.argv[1])\n"
        "v.add_image('last', np.zeros((400, 400, 3), np.uint8))\nv.add_scalar('x', 1.0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert (tmp_path / "vis_image/last_0.png").exists()
    assert (tmp_path / "scalars.json").read_text()


# Which one is current


def test_the_current_ones_are_those_of_the_innermost_run(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def look(name: str) -> None:
        seen[name] = (MessageHub.get_current_instance(), Visualizer.get_current_instance())

    class Outer(Hook):
        def before_train(self, runner: Any) -> None:
            look("before")
            self.other = make_runner(
                tmp_path / "inner", custom_hooks=[At("before_train", lambda runner: look("inner"))]
            )
            look("made another")
            self.other.train()
            look("after")

    hook = Outer()
    outer = make_runner(tmp_path / "outer", custom_hooks=[hook], model=lambda: look("model") or Net())
    newer = make_runner(tmp_path / "newer")
    look("none runs")
    outer.train()
    of = lambda runner: (runner.message_hub, runner.visualizer)  # noqa: E731
    assert seen["none runs"] == of(newer)
    assert seen["model"] == seen["before"] == seen["made another"] == seen["after"] == of(outer)
    assert seen["inner"] == of(hook.other)
    assert MessageHub.get_instance(outer.experiment_name) is outer.message_hub
    assert Visualizer.check_instance_created(newer.experiment_name)


def test_arguments_that_no_back_end_takes_are_refused() -> None:
    visualizer = Visualizer(vis_backends=[])
    for call, message in (
        (lambda: visualizer.add_scalar("a", 1.0, stpe=5), 'add_scalars.stpe: unknown argument, did you mean "step"?'),
        (lambda: visualizer.add_image("a", np.zeros((2, 2, 3), np.uint8), steps=5), "add_image.steps"),
        (lambda: visualizer.add_graph(nn.Linear(1, 1), verbose=True), "add_graph.verbose: unknown argument, leave"),
        (lambda: visualizer.add_config({}, name="b"), "add_config.name"),
    ):
        with refuses(ConfigError, begins=message):
            call()


def test_a_run_comes_before_what_was_made_with_its_name(tmp_path: Path) -> None:
    made = MessageHub.get_instance("of a run")
    runner = make_runner(tmp_path, experiment_name="of a run")
    assert MessageHub.get_instance("of a run") is runner.message_hub is not made


def test_a_run_that_is_gone_is_not_kept(tmp_path: Path) -> None:
    import gc
    import weakref

    runner = make_runner(tmp_path)
    gone = weakref.ref(runner.message_hub)
    del runner
    gc.collect()
    assert gone() is None


def test_named_instances() -> None:
    hub = MessageHub.get_instance("named", runtime_info={"a": 1})
    assert MessageHub.get_instance("named") is hub is MessageHub.get_current_instance()
    assert hub.instance_name == "named"
    assert hub.get_info("a") == 1
    assert not MessageHub.check_instance_created("other")
    first = Visualizer.get_instance("named", vis_backends=[])
    assert Twice.get_instance("named") is first, "a subclass looks among the same"


# Several processes


def _draw(folder: str, strategy: str) -> tuple[bool, int]:
    runner: FlexibleRunner = make_runner(
        folder,
        custom_hooks=[dict(type=Everything)],
        visualizer=dict(type="Visualizer", vis_backends=[dict(type="LocalVisBackend")]),
        strategy=strategy,
        launcher="pytorch",
    )
    runner.train()
    is_idle = runner.visualizer._writer is None
    rank = runner.rank
    runner.strategy.leave()
    return is_idle, rank


class Everything(Hook):
    """Adds everything on every process."""

    def after_train_epoch(self, runner: Any) -> None:
        from matplotlib.figure import Figure

        visualizer = Visualizer.get_current_instance()
        visualizer.add_image("sample", np.full((4, 4, 3), runner.rank, np.uint8), runner.epoch)
        visualizer.add_figure("page", Figure(figsize=(0.2, 0.2)), runner.epoch)
        visualizer.add_scalar("rank", runner.rank, runner.epoch)
        visualizer.add_graph(runner.model)
        visualizer.add_config(dict(rank=runner.rank))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    ["ddp", pytest.param("fsdp", marks=pytest.mark.full), pytest.param("zero2", marks=pytest.mark.full)],
)
def test_only_the_process_that_reports_writes(workers2: WorkerGroup, tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("matplotlib")
    assert workers2.run(_draw, str(tmp_path), strategy) == [(True, 0), (True, 1)]
    (folder,) = tmp_path.glob("*/vis_data")
    names = sorted(path.name for path in (folder / "vis_image").iterdir())
    assert names == [f"{name}_{epoch}.png" for name in ("page", "sample") for epoch in range(3)]
    assert (read_png((folder / "vis_image/sample_0.png").read_bytes()) == 0).all()
    records = [json.loads(line) for line in (folder / "scalars.json").read_text().splitlines()]
    assert [record["rank"] for record in records if "rank" in record] == [0, 0, 0]
    assert json.loads((folder / "config.json").read_text())["rank"] == 0


def test_a_list_of_reporters_still_names_its_entries() -> None:
    with pytest.raises(ConfigError, match=r"^visualizer\[1\]\.type: "):
        build_visualizer(["LocalVisBackend", {"type": "Nothing"}])
    with pytest.raises(ConfigError, match=r"^visualizer\.vis_backends\[0\]\.type: "):
        build_visualizer({"type": "Twice", "vis_backends": [{"type": "Nothing"}]})
    with pytest.raises(ConfigError, match=r"^visualizer\.alpa: unknown key, did you mean \"alpha\""):
        build_visualizer({"type": "Twice", "alpa": 1})
