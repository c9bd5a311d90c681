"""Published weights are whole, those of the run, and checked; whatever fails, readers have the version before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from flextrain_publish import (
    FolderTarget,
    HTTPTarget,
    PublishError,
    PublishHook,
    Receiver,
    SGLangTarget,
    TransferTarget,
    VLLMTarget,
    published,
    transfer,
)
from flextrain_publish import folder as folders
from flextrain_publish.requests import Server
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flextrain import ConfigError, FlexibleRunner, LiveWeights
from flextrain.core.checkpoint import open_weights, reading


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 5)
        self.first.requires_grad_(False)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(self.first(inputs)).square().mean()}


NAMES = {"first.weight", "first.bias", "second.weight", "second.bias", "count"}


def runner_of(work_dir: Path, strategy: Any = "single", **options: Any) -> FlexibleRunner:
    dataset = TensorDataset(torch.rand(8, 3, generator=torch.Generator().manual_seed(0)))
    data = dict(batch_size=2, dataset=dataset, collate_fn="default_collate")
    return FlexibleRunner(
        model=dict(type=Net),
        work_dir=work_dir,
        strategy=strategy,
        train_dataloader=data,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        **options,
    )


class Looking:
    def publish(self, weights: LiveWeights) -> None:
        assert {one.name for one in weights.metadata()} == NAMES


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[FlexibleRunner]:
    runner = runner_of(tmp_path / "run")
    runner.publish(Looking())  # the model is built at the first call
    yield runner
    runner.close()


def model_of(runner: FlexibleRunner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in runner.strategy.module.state_dict().items()}


def set_all(runner: FlexibleRunner, value: float, names: str = "") -> None:
    with torch.no_grad():
        for name, parameter in runner.strategy.module.named_parameters():
            if name.startswith(names):
                parameter.fill_(value)


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def current(path: Path) -> folders.Published:
    found = published(path)
    assert found is not None
    return found


# Folders


def test_versions_in_a_folder(tmp_path: Path, runner: FlexibleRunner) -> None:
    """Only files with a changed tensor are written; an older version stays until there are enough."""
    path = tmp_path / "out"
    assert published(path) is None
    target = FolderTarget(path, size=60)  # several files
    first = runner.publish(target)
    assert (first["version"], first["changed"], first["tensors"]) == (1, 5, 5)
    before, old = current(path), model_of(runner)
    check_equal(dict(before.read()), old)
    set_all(runner, 2.0, "second.bias")
    second = runner.publish(target)
    assert (second["version"], second["changed"]) == (2, 1)
    assert 0 < second["written_bytes"] < first["written_bytes"]
    now = current(path)
    assert now.folder == Path(second["folder"]) == (path / "current").resolve()
    check_equal(dict(now.read()), model_of(runner))
    check_equal(dict(before.read()), old)
    files = {entry.file for entry in now.tensors.values()}
    shared = {file for file in files if (now.folder / file).samefile(before.folder / file)}
    assert shared == files - {now.tensors["second.bias"].file}
    runner.publish(target)
    assert {one.name for one in (path / "versions").iterdir()} == {"2", "3"}


def test_the_dtype_of_a_version(tmp_path: Path, runner: FlexibleRunner) -> None:
    runner.publish(FolderTarget(tmp_path / "out"), dtype="bfloat16")
    kinds = {name: entry.dtype for name, entry in current(tmp_path / "out").tensors.items()}
    assert kinds == {**dict.fromkeys(NAMES, "bfloat16"), "count": "int64"}


@pytest.mark.parametrize("when", ["in the first file", "in the second file", "before the version", "before the link"])
def test_a_process_that_is_killed_leaves_the_version_before(
    tmp_path: Path, runner: FlexibleRunner, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    target = FolderTarget(tmp_path, size=60)
    runner.publish(target)
    expected = model_of(runner)
    set_all(runner, 2.0)
    if (child := os.fork()) == 0:
        count = 0

        def dies(*_: Any, **__: Any) -> None:
            nonlocal count
            count += 1
            if when != "in the second file" or count == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        owner, name = {"before the version": (Path, "rename"), "before the link": (Path, "replace")}.get(
            when, (folders, "save_file")
        )
        monkeypatch.setattr(owner, name, dies)
        try:
            runner.publish(target)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert current(tmp_path).version == 1
    check_equal(dict(current(tmp_path).read()), expected)
    told = runner.publish(target)
    assert told["version"] == (3 if when == "before the link" else 2)
    check_equal(dict(current(tmp_path).read()), model_of(runner))
    assert not (tmp_path / "versions" / ".unfinished").exists()


def test_readers_never_see_half_of_a_version(tmp_path: Path, runner: FlexibleRunner) -> None:
    target = FolderTarget(tmp_path, size=60, keep=100, verify=False)
    set_all(runner, 0.0)
    runner.publish(target)
    seen: set[float] = set()
    problems: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            values = {float(tensor.flatten()[0]) for name, tensor in current(tmp_path).read() if name != "count"}
            seen.update(values)
            if len(values) != 1:
                problems.append(str(values))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 20):
        set_all(runner, float(number))
        runner.publish(target)
    done.set()
    thread.join()
    assert not problems
    assert seen


def test_a_damaged_tensor_is_found(tmp_path: Path, runner: FlexibleRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FolderTarget(tmp_path)
    runner.publish(target)

    def damaged(tensors: dict[str, Tensor], path: Path, *more: Any) -> None:
        real({**tensors, "first.bias": tensors["first.bias"] + 1}, path, *more)

    real = folders.save_file
    monkeypatch.setattr(folders, "save_file", damaged)
    set_all(runner, 2.0)
    with pytest.raises(PublishError, match=r"first\.bias has checksum"):
        runner.publish(target)
    assert current(tmp_path).version == 1
    current(tmp_path).check()
    runner.publish(FolderTarget(tmp_path, verify=False))
    with pytest.raises(PublishError, match=r"model\.safetensors: first\.bias has checksum"):
        current(tmp_path).check()
    file = current(tmp_path).folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(PublishError, match="cannot be read"):
        current(tmp_path).check()


def test_what_is_not_finite_is_not_published(tmp_path: Path, runner: FlexibleRunner) -> None:
    target = FolderTarget(tmp_path)
    runner.publish(target)
    set_all(runner, float("nan"), "second.bias")
    with pytest.raises(PublishError, match=r"second\.bias: NaN or infinity is in it, it is not published"):
        runner.publish(target)
    assert current(tmp_path).version == 1


def test_two_do_not_publish_to_one_folder(tmp_path: Path, runner: FlexibleRunner) -> None:
    target = FolderTarget(tmp_path)
    with target._alone(), pytest.raises(PublishError, match="another process publishes there now"):
        runner.publish(FolderTarget(tmp_path))
    assert runner.publish(target)["version"] == 1


@pytest.mark.parametrize("kind", ["folder", "http"])
def test_one_bucket_is_in_memory(
    tmp_path: Path, runner: FlexibleRunner, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    held: list[int] = []
    most = 0

    def counted(self: LiveWeights, weight: Any) -> Tensor:
        nonlocal most
        tensor = real_read(self, weight)
        held.append(tensor.nbytes)
        weakref.finalize(tensor, held.remove, tensor.nbytes)
        most = max(most, sum(held))
        return tensor

    monkeypatch.setattr(LiveWeights, "read", counted)
    with served(Holder().handle) as url:
        target = FolderTarget(tmp_path / "out", size=100) if kind == "folder" else HTTPTarget(url, size=100)
        assert runner.publish(target)["tensors"] == 5
    assert not held
    assert max(one.nbytes for one in model_of(runner).values()) < most <= 100


real_read = LiveWeights.read


# Servers on this machine that speak the protocols of engines, with weights in the host's memory


Answer = tuple[int, dict[str, Any]]


@contextmanager
def served(handle: Callable[[str, dict[str, Any]], Answer]) -> Iterator[str]:
    """Context with the URL of a server that answers with what ``handle(path, body)`` returns."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = handle(self.path, json.loads(body or b"{}"))
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Engine:
    """What vLLM's and SGLang's servers do with these requests; it computes with ``weights`` unless it is paused.

    Attributes:
        calls: the requests that it got.
        fails: path of a request that it answers with an error, once.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.version = "default"
        self.is_paused = False
        self.calls: list[str] = []
        self.fails = ""
        self.ignores_version = False

    def handle(self, path: str, body: dict[str, Any]) -> Answer:
        self.calls.append(path)
        name = path.partition("?")[0]
        if name == self.fails:
            self.fails = ""
            return 500, {"error": "out of memory"}
        if name in ("/pause", "/pause_generation"):
            self.is_paused = True
        elif name in ("/resume", "/continue_generation"):
            self.is_paused = False
        elif name == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self._load(body["kwargs"]["weights_path"])
        elif name == "/update_weights_from_disk":
            self._load(body["model_path"])
            self.version = self.version if self.ignores_version else body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights."}
        elif name == "/model_info":
            return 200, {"weight_version": self.version}
        elif name != "/reset_prefix_cache":
            return 404, {"error": path}
        return 200, {}

    def _load(self, folder: str) -> None:
        assert self.is_paused
        found = published(folder)
        assert found is not None
        assert str(found.folder) == folder
        self.weights = dict(found.read())


# Engines that load from the folder


@pytest.mark.parametrize("kind", [VLLMTarget, SGLangTarget])
def test_engines_load_a_version_while_they_are_paused(tmp_path: Path, runner: FlexibleRunner, kind: Any) -> None:
    engines = [Engine(), Engine()]
    with served(engines[0].handle) as first, served(engines[1].handle) as second:
        target = kind([first, second], tmp_path / "out")
        told = runner.publish(target)
        assert told["paused_s"] > 0
        for engine in engines:
            assert not engine.is_paused
            check_equal(engine.weights, model_of(runner))
        expected = {
            VLLMTarget: ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume"],
            SGLangTarget: ["/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"],
        }
        assert engines[0].calls == engines[1].calls == expected[kind]


@pytest.mark.parametrize(
    "kind, fails",
    [(VLLMTarget, "/collective_rpc"), (SGLangTarget, "/update_weights_from_disk"), (SGLangTarget, "version")],
)
def test_an_engine_that_has_not_loaded_stays_paused(
    tmp_path: Path, runner: FlexibleRunner, kind: Any, fails: str
) -> None:
    engine, other = Engine(), Engine()
    engine.fails, engine.ignores_version = fails, fails == "version"
    with served(engine.handle) as url, served(other.handle) as second:
        target = kind([url, second], tmp_path / "out")
        with pytest.raises(
            PublishError, match="the engine stays paused, because it may have a part of the new weights"
        ):
            runner.publish(target)
        assert engine.is_paused
        assert not other.is_paused
        check_equal(other.weights, model_of(runner))
        engine.ignores_version = False
        assert runner.publish(target)["version"] == 2
        assert not engine.is_paused
        check_equal(engine.weights, model_of(runner))


def test_an_engine_that_does_not_pause_goes_on_with_what_it_has(tmp_path: Path, runner: FlexibleRunner) -> None:
    engine, other = Engine(), Engine()
    engine.fails = "/pause"
    with served(other.handle) as first, served(engine.handle) as second:
        with pytest.raises(PublishError, match=r"/pause.*: answers 500, .*out of memory"):
            runner.publish(VLLMTarget([first, second], tmp_path / "out"))
        assert not engine.weights
        assert not other.weights
        assert not other.is_paused


def test_no_engine(tmp_path: Path, runner: FlexibleRunner) -> None:
    with pytest.raises(PublishError, match="refused"):
        runner.publish(VLLMTarget("http://127.0.0.1:1", tmp_path / "out"))


# Over HTTP


class Holder:
    """A server with a receiver, and the weights that it computes with."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.paused = 0
        self.receiver = Receiver(self.weights.update, pause=self._pause)
        self.came: list[list[str]] = []

    def _pause(self) -> None:
        self.paused += 1

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/finish_weight_update":
            assert self.receiver.is_paused
        if path == "/update_weights":
            self.came.append(body["update_info"]["names"])
        return self.receiver.handle(path, body)


def test_a_server_gets_what_has_changed(tmp_path: Path, runner: FlexibleRunner) -> None:
    holder = Holder()
    with served(holder.handle) as url:
        first = runner.publish(HTTPTarget(url, size=60))
        assert (first["version"], first["changed"]) == (1, 5)
        assert first["sent_bytes"] == sum(tensor.nbytes for tensor in model_of(runner).values())
        check_equal(holder.weights, model_of(runner))
        set_all(runner, 3.0, "second.bias")
        # Another process, as after a restart: the server knows what it has.
        second = runner.publish(HTTPTarget(url, size=60))
        assert (second["version"], second["changed"], second["sent_bytes"]) == (2, 1, 20)
        assert second["paused_s"] > 0
        assert holder.came[-1] == ["second.bias"]
        assert sum(map(len, holder.came)) == 6
        check_equal(holder.weights, model_of(runner))
        assert (holder.paused, holder.receiver.is_paused) == (2, False)


def test_a_server_whose_pause_fails_goes_on_with_what_it_has(runner: FlexibleRunner) -> None:
    holder = Holder()
    refused: list[str] = []

    def handle(path: str, body: dict[str, Any]) -> Answer:
        if path == "/pause" and not refused:
            refused.append(path)
            holder.handle(path, body)  # it pauses, and the answer is lost
            return 500, {}
        return holder.handle(path, body)

    with served(handle) as url:
        with pytest.raises(PublishError, match=r"/pause: answers 500"):
            runner.publish(HTTPTarget(url))
        assert (holder.receiver.is_paused, holder.receiver.version, holder.weights) == (False, 0, {})
        assert runner.publish(HTTPTarget(url))["version"] == 1
    with (
        served(lambda path, body: (200, {"tensors": {}})) as url,
        pytest.raises(PublishError, match=r"/weights: answers .*, which no Receiver does"),
    ):
        runner.publish(HTTPTarget(url))


def test_a_wrong_checksum_is_rejected(tmp_path: Path, runner: FlexibleRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    with served(holder.handle) as url:
        runner.publish(HTTPTarget(url, size=60))
        expected = model_of(runner)
        set_all(runner, 2.0)
        monkeypatch.setattr(
            transfer, "save", lambda tensors: real({n: t + (n == "second.bias") for n, t in tensors.items()})
        )
        with pytest.raises(PublishError, match=r"answers 409, .*version 2: second\.bias has checksum"):
            runner.publish(HTTPTarget(url, size=60))
        check_equal(holder.weights, expected)
        assert (holder.receiver.version, holder.receiver.is_paused) == (1, False)
        monkeypatch.undo()
        assert runner.publish(HTTPTarget(url))["version"] == 2
        check_equal(holder.weights, model_of(runner))


real = transfer.save


def test_a_sender_that_stops_leaves_the_version_before(tmp_path: Path, runner: FlexibleRunner) -> None:
    holder = Holder()
    with served(holder.handle) as url:
        runner.publish(HTTPTarget(url))
        expected = model_of(runner)
        set_all(runner, 2.0, "first")
        server = Server(url)
        server.post("/pause")
        server.post("/start_weight_update", {"version": 2})
        sums = dict(holder.receiver.sums)
        with pytest.raises(PublishError, match=r"version 2: second\.bias did not come"):
            server.post("/finish_weight_update", {"version": 2, "tensors": {**sums, "second.bias": "0"}})
        with pytest.raises(PublishError, match="version 2 was not started"):
            server.post("/finish_weight_update", {"version": 2, "tensors": sums})
        with pytest.raises(PublishError, match="version 7 cannot follow 1"):
            server.post("/start_weight_update", {"version": 7})
        check_equal(holder.weights, expected)
        assert runner.publish(HTTPTarget(url))["changed"] == 2


def test_a_server_that_fails_in_the_middle_stays_paused(tmp_path: Path, runner: FlexibleRunner) -> None:
    holder = Holder()
    fails = True

    def load(tensors: Any) -> None:
        holder.weights.update(tensors)
        if fails:
            raise RuntimeError("out of memory")

    holder.receiver._load = load
    with served(holder.handle) as url:
        with pytest.raises(PublishError, match="version 1: could not be loaded"):
            runner.publish(HTTPTarget(url))
        assert holder.receiver.is_paused
        fails = False
        assert runner.publish(HTTPTarget(url))["version"] == 1
        assert not holder.receiver.is_paused


# vLLM's weight transfer


class Trainer:
    """A trainer's engine as vLLM's are, which sends over HTTP to a receiver."""

    def __init__(self, url: str, source: Any) -> None:
        self.server, self.source, self.rounds = Server(url), source, 0

    def send_weights(self) -> None:
        self.rounds += 1
        named = [(one.name, one.dtype, one.shape) for one in self.source.metadata()]
        self.server.post("/start_weight_update", {"version": self.rounds})
        sums = {}
        for (name, dtype, shape), (own, tensor) in zip(named, self.source, strict=True):
            assert (name, dtype, tuple(shape)) == (own, tensor.dtype, tuple(tensor.shape))
            entry = transfer.entry_of(name, tensor)
            sums[name] = entry.sha256
            self.server.post("/update_weights", {"update_info": transfer._packed({name: tensor}, {name: entry})})
        self.server.post("/finish_weight_update", {"version": self.rounds, "tensors": sums})


def test_an_engine_of_weight_transfer_reads_metadata_and_tensors(tmp_path: Path, runner: FlexibleRunner) -> None:
    receiver = Receiver(lambda tensors: weights.update(tensors))
    weights: dict[str, Tensor] = {}
    made: list[Trainer] = []

    def make(source: Any) -> Trainer:
        made.append(Trainer(url, source))
        return made[-1]

    with served(receiver.handle) as url:
        target = TransferTarget(make)
        for value in (1.0, 2.0):
            set_all(runner, value)
            assert runner.publish(target)["tensors"] == 5
            check_equal(weights, model_of(runner))
        assert len(made) == 1
        with pytest.raises(PublishError, match=r"during publish\(\) only"):
            made[0].source.metadata()


# The hook


def test_the_hook_publishes_on_its_interval(tmp_path: Path) -> None:
    hook = PublishHook(dict(type="folder", path=tmp_path / "out", keep=9), interval=3)
    runner = runner_of(tmp_path / "run", custom_hooks=[hook])
    runner.train()  # of four updates
    found = {one.name: dict(current(one).read()) for one in (tmp_path / "out" / "versions").iterdir()}
    assert found.keys() == {"1", "2"}
    check_equal(found["2"], model_of(runner))
    assert not torch.equal(found["1"]["second.weight"], found["2"]["second.weight"])
    assert hook.told is not None
    assert hook.told["changed"] == 2  # what is frozen is not new
    assert runner.message_hub.get_scalar("train/publish_seconds").current() > 0
    runner.close()


def test_two_targets(tmp_path: Path) -> None:
    holder = Holder()
    with served(holder.handle) as url:
        hooks = [
            PublishHook(dict(type="folder", path=tmp_path / "out")),
            PublishHook(dict(type="http", url=url), interval=2),
        ]
        runner = runner_of(tmp_path / "run", custom_hooks=hooks)
        runner.train()
        assert (current(tmp_path / "out").version, holder.receiver.version) == (4, 2)
        check_equal(dict(current(tmp_path / "out").read()), holder.weights)
        runner.close()


@pytest.mark.parametrize(
    "make, says",
    [
        (partial(PublishHook, dict(type="folders")), "type 'folders' is not allowed, give folder, vllm, sglang, http"),
        (partial(PublishHook, dict(type="folder", paht="x")), "folder, .*path"),
        (partial(PublishHook, dict(type="vllm", urls="http://x", path="x", kep=1)), "vllm, .*kep"),
        (partial(PublishHook, None, interval=0), "PublishHook.interval: 0 is not allowed"),
        (partial(FolderTarget, "x", keep=0), "FolderTarget.keep: 0 is not allowed"),
        (partial(VLLMTarget, [], "x"), "urls: is empty"),
        (partial(VLLMTarget, "localhost:8000", "x"), "url: \"localhost:8000\" is not allowed"),
        (partial(VLLMTarget, "http://x", "x", mode="retract"), 'mode: "retract" is not allowed, give wait, abort or keep'),
        (partial(TransferTarget, "nccl"), "TransferTarget.trainer: 'nccl' is not allowed"),
    ],
)  # fmt: skip
def test_mistakes(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from flextrain import FlexibleRunner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 7)

    def forward(self, inputs):
        return {"loss": self.second(self.first(inputs)).square().mean()}


runner = FlexibleRunner(
    model=dict(type=Net),
    work_dir=sys.argv[1],
    strategy="fsdp",
    train_dataloader=dict(batch_size=2, dataset=TensorDataset(torch.rand(8, 3)), collate_fn="default_collate"),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    train_cfg=dict(by_epoch=True, max_epochs=1),
    default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
    custom_hooks=[dict(type="flextrain_publish:PublishHook", target=dict(type="folder", path=sys.argv[1] + "/out"))],
)
runner.train()
runner.close()
"""


@pytest.mark.processes
@pytest.mark.full
def test_processes_publish_together(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*command, str(tmp_path / "run")], check=True, timeout=600)
    found = dict(current(tmp_path / "run" / "out").read())
    saved = open_weights(tmp_path / "run" / "epoch_1")
    with reading(saved) as reader:
        check_equal(
            found, {key.removeprefix("model."): reader.read(key) for key in saved.tensors if key.startswith("model.")}
        )
    assert current(tmp_path / "run" / "out").version == 2
