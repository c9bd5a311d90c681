"""load_from by URL: from a server of this machine and torchvision's names, once per node, and nothing is executed."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flextrain import CheckpointError, ConfigError
from flextrain.core.checkpoint.foreign.download import is_download, local_copy, shown
from flextrain.testing import WorkerGroup

from .training import Net, make_runner, refuses

pytestmark = pytest.mark.usefixtures("quick")


class Server:
    """Files by path, and how often each was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.shorter: dict[str, int] = {}  # what the answer lacks of its length
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                outer.asked[path] += 1
                if path.startswith("/moved/"):
                    self.send_response(302)
                    self.send_header("Location", path.removeprefix("/moved"))
                    self.end_headers()
                elif path not in outer.files:
                    self.send_error(404)
                else:
                    content = outer.files[path]
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content[: len(content) - outer.shorter.get(path, 0)])

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs=dict(poll_interval=0.01))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    yield server
    server.close()


def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "hub" / "checkpoints"


def weights(seed: int = 7) -> tuple[dict[str, Any], bytes]:
    torch.manual_seed(seed)
    state = Net(dropout=0.0).state_dict()
    file = io.BytesIO()
    torch.save({"state_dict": state, "meta": {}}, file)
    return state, file.getvalue()


def loaded(folder: str, source: str, home: str | None = None) -> dict[str, Any]:
    """The weights of a model after ``load_from``, in the middle of which nothing was trained."""
    environment = {"no_proxy": "127.0.0.1", **({"TORCH_HOME": home} if home else {})}
    with mock.patch.dict(os.environ, environment):
        runner = make_runner(folder, model=partial(Net, dropout=0.0))
        runner.load_checkpoint(source)
        found = {name: value.clone() for name, value in runner.strategy.module.state_dict().items()}
        runner.strategy.leave()
    return found


# What is loaded


def test_a_file_is_downloaded_once(tmp_path: Path, server: Server) -> None:
    state, content = weights()
    name = f"net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    server.files[f"/a/{name}"] = content
    for number in range(2):
        found = loaded(str(tmp_path / str(number)), f"{server.url}/a/{name}")
        assert all(torch.equal(found[key], value) for key, value in state.items())
    assert server.asked == {f"/a/{name}": 1}
    assert {path.name for path in cache(tmp_path).iterdir()} == {name, f"{name}.url"}


def test_load_from(tmp_path: Path, server: Server) -> None:
    state, content = weights()
    server.files["/a/net.pth"] = content
    runner = make_runner(
        tmp_path / "run",
        model=partial(Net, dropout=0.0),
        load_from=f"{server.url}/moved/a/net.pth?token=secret",
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        log_level="INFO",
    )
    runner.train()
    found = runner.strategy.module.state_dict()
    runner.strategy.leave()
    assert all(torch.equal(found[key], value) for key, value in state.items())
    logs = "".join(path.read_text() for path in (tmp_path / "run").rglob("*.log"))
    assert "Loaded the weights of http://127.0.0.1" in logs
    assert "secret" not in logs


@pytest.mark.distributed
def test_one_process_of_a_node_downloads(tmp_path: Path, server: Server, workers2: WorkerGroup) -> None:
    state, content = weights()
    server.files["/net.pth"] = content
    for found in workers2.run(loaded, str(tmp_path / "run"), f"{server.url}/net.pth", str(tmp_path / "home")):
        assert all(torch.equal(found[key], value) for key, value in state.items())
    assert server.asked == {"/net.pth": 1}


def refused(folder: str, source: str, home: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        loaded(folder, source, home)
    return str(caught.value)


@pytest.mark.distributed
def test_every_process_hears_why_it_failed(tmp_path: Path, server: Server, workers2: WorkerGroup) -> None:
    url = f"{server.url}/net.pth"
    found = workers2.run(refused, str(tmp_path / "run"), url, str(tmp_path / "home"))
    assert found == [f"{url}: cannot be downloaded, 404 Not Found"] * 2
    assert server.asked == {"/net.pth": 1}


def test_the_same_name_elsewhere_is_another_file(tmp_path: Path, server: Server) -> None:
    for place, seed in (("a", 1), ("b", 2), ("a", 1)):
        state, content = weights(seed)
        server.files[f"/{place}/net.pth"] = content
        found = torch.load(local_copy(f"{server.url}/{place}/net.pth"), weights_only=True)["state_dict"]
        assert all(torch.equal(found[key], value) for key, value in state.items())
    assert server.asked == {"/a/net.pth": 2, "/b/net.pth": 1}


def test_another_query_is_another_file(tmp_path: Path, server: Server) -> None:
    for seed in (1, 2, 2):
        content = weights(seed)[1]
        server.files["/net.pth"] = content
        assert local_copy(f"{server.url}/net.pth?id={seed}").read_bytes() == content
    assert server.asked == {"/net.pth": 2}
    assert not any("id=" in path.read_text(errors="replace") for path in cache(tmp_path).glob("*.url"))


def test_what_another_program_put_into_the_cache_is_used(tmp_path: Path, server: Server) -> None:
    state, content = weights()
    cache(tmp_path).mkdir(parents=True)
    (cache(tmp_path) / "net.pth").write_bytes(content)
    assert local_copy(f"{server.url}/net.pth").read_bytes() == content
    assert not server.asked
    assert state


# What is refused


@pytest.mark.parametrize(
    "path, message",
    [
        ("/none.pth", "/none.pth: cannot be downloaded, 404 Not Found"),
        ("/none.pth?token=secret", "/none.pth: cannot be downloaded, 404 Not Found"),
        ("/net-0123abcd.pth", "/net-0123abcd.pth: its SHA-256 begins with {hash}, the name says 0123abcd"),
        ("/short.pth", "/short.pth: "),
        ("/page.pth", "/page.pth: is a web page and no file of weights"),
        ("/empty.pth", "/empty.pth: is empty and no file of weights"),
    ],
)
def test_downloads_that_are_refused(tmp_path: Path, server: Server, path: str, message: str) -> None:
    content = weights()[1]
    server.files = {
        **dict.fromkeys(("/net-0123abcd.pth", "/short.pth"), content),
        "/page.pth": b"<!doctype html>log in",
        "/empty.pth": b"",
    }
    server.shorter = {"/short.pth": 10}
    with refuses(
        CheckpointError, begins=server.url + message.format(hash=hashlib.sha256(content).hexdigest()[:8])
    ) as caught:
        local_copy(server.url + path)
    assert "secret" not in str(caught.value)
    assert [*cache(tmp_path).iterdir()] == []


def test_a_date_is_no_hash(server: Server) -> None:
    server.files["/net-20240131.pth"] = weights()[1]
    assert local_copy(f"{server.url}/net-20240131.pth").is_file()


def test_nobody_answers(server: Server, tmp_path: Path) -> None:
    server.close()
    with refuses(
        CheckpointError,
        exactly=f"{server.url}/net.pth: cannot be downloaded, Connection refused; without network, download it elsewhere and give its "
        f"path, or put it into {cache(tmp_path)}",
    ):
        local_copy(f"{server.url}/net.pth")


def test_a_cache_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    server.files["/net.pth"] = weights()[1]
    with pytest.raises(CheckpointError, match="cannot be kept in .*TORCH_HOME names another folder"):
        local_copy(f"{server.url}/net.pth")


@pytest.mark.parametrize(
    "source, file",
    [
        ("torchvision://resnet18", "resnet18-f37072fd.pth"),
        ("modelzoo://resnet18", "resnet18-f37072fd.pth"),
        ("torchvision://resnet50", "resnet50-0676ba61.pth"),
        ("torchvision://resnet50.imagenet1k_v2", "resnet50-11ad3fa6.pth"),
        ("torchvision://ResNet50_Weights.DEFAULT", "resnet50-11ad3fa6.pth"),
    ],
)
def test_names_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, file: str) -> None:
    """A machine without network has the file in the cache, as torch.hub leaves it."""
    pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    cache(tmp_path).mkdir(parents=True)
    (cache(tmp_path) / file).write_bytes(weights()[1])
    assert local_copy(source) == cache(tmp_path) / file


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(load_from="torchvision://resnet81"), 'torchvision has no model "resnet81", did you mean "resnet18"?'),
        (dict(load_from="torchvision://resnet18.v3"), 'resnet18 has no weights "v3", choose imagenet1k_v1'),
        (dict(load_from="torchvision://mnasnet"), 'torchvision has no model "mnasnet", did you mean "mnasnet1_3"?'),
        (dict(load_from="https://a.org/net.pth", resume=True), "has weights only, from which no run resumes; leave out resume"),
        (dict(resume="https://a.org/net.pth"), "has weights only, from which no run resumes; leave out resume"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_made(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(ConfigError) as caught:
        make_runner(tmp_path, **changes)
    key, text = next(iter(changes)), str(caught.value)
    assert text.startswith(f"{key}: ")
    assert text.endswith(message)


def test_what_is_a_download() -> None:
    assert is_download("https://a.org/x/net.pth?y=1")
    assert is_download("torchvision://resnet18")
    assert not is_download("https://a.org/runs/epoch_3")  # a checkpoint's folder, for fsspec
    assert not is_download("s3://runs/net.pth")
    assert not is_download("net.pth")
    assert shown("https://me:secret@a.org:80/net.pth?token=secret#x") == "https://a.org:80/net.pth"
    assert shown("odd?name#.pth") == "odd?name#.pth"


# MMEngine's own checkpoints


@pytest.mark.parametrize(
    "files, note, named",
    [
        (["epoch_1.pth", "epoch_2.pth", "epoch_10.pth"], None, "epoch_10.pth"),
        (["epoch_1.pth", "epoch_2.pth"], "/elsewhere/work_dirs/epoch_1.pth", "epoch_1.pth"),
        (["iter_500.pth"], "/elsewhere/iter_1000.pth", "iter_500.pth"),
        (["weights.pth"], None, None),
    ],
)
def test_resume_beside_checkpoints_of_mmengine(
    tmp_path: Path, files: list[str], note: str | None, named: str | None
) -> None:
    for file in files:
        torch.save({"state_dict": {"net.weight": torch.zeros(1)}}, tmp_path / file)
    if note is not None:
        (tmp_path / "last_checkpoint").write_text(note)
    if named is None:
        runner = make_runner(tmp_path, resume=True)
        runner.train()
    else:
        path = tmp_path / named
        for resume in (True, str(path)):
            runner = make_runner(tmp_path, resume=resume)
            with pytest.raises(CheckpointError) as caught:
                runner.train()
            runner.strategy.leave()
            assert str(caught.value) == (
                f"{path}: cannot be resumed, it is no checkpoint of flextrain; as with those of MMEngine's runner, "
                f'load_from="{path}" begins with its weights, resume=False or another work_dir begins anew'
            )
        torch.save({"state_dict": make_runner(tmp_path).model.state_dict()}, path)
        runner = make_runner(tmp_path, resume=True, load_from=str(path))  # what it says to do
        runner.train()
    runner.strategy.leave()
    assert runner.iter > 0
