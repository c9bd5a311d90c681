"""KubeflowHook against a server that speaks HTTPS with a certificate of its own authority, as Kubeflow Trainer's does."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from flextrain_jobs.kubeflow_hook import KubeflowHook, StatusServer
from torch import nn, rand
from torch.utils.data import TensorDataset

from flextrain import ConfigError, FlexibleRunner, Hook

jsonschema = pytest.importorskip("jsonschema")
x509 = pytest.importorskip("cryptography.x509")
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/digits/status"


def make_certificates(folder: Path) -> None:
    """ca.crt of an authority, and server.pem with its certificate for 127.0.0.1 and the key."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])

    def certificate(name: str, key: Any, issuer: str, issuers_key: Any, *extensions: Any) -> bytes:
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, issuer)]
        builder = x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(days=1)
        )
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        above = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers_key.public_key())
        for extension in (own, above):  # which Python 3.13 asks for
            builder = builder.add_extension(extension, critical=False)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=extension is not address)
        signed: bytes = builder.sign(issuers_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return signed

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    basic = x509.BasicConstraints(ca=True, path_length=None)
    (folder / "ca.crt").write_bytes(certificate("authority", authority, "authority", authority, basic, usage))
    key = server.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(certificate("server", server, "authority", authority, address) + key)


class Trainer:
    """What Kubeflow Trainer's status server does: it checks the token, the path and the payload."""

    def __init__(self, folder: Path) -> None:
        self.token, self.came, self.answer = "first", [], 200
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        trainer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Authorization"] != f"Bearer {trainer.token}":
                    self._say(403, {"kind": "Status", "message": "Forbidden", "code": 403})
                elif self.path != PATH:
                    self._say(404, {"message": "Not found"})
                elif trainer.answer == 302:
                    self.send_response(302)
                    self.send_header("Location", trainer.url)
                    self.end_headers()
                else:
                    trainer.came.append(json.loads(body))
                    self._say(200, trainer.came[-1])

            def do_GET(self) -> None:
                trainer.came.append("redirected")
                self._say(200, {})

            def _say(self, code: int, content: Any) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """A server, and the variables that a pod has."""
    make_certificates(tmp_path)
    found = Trainer(tmp_path)
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", found.url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield found
    found.close()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Any, y: Any) -> Any:
        return {"loss": (self.layer(x) - y).square().mean()}


def runner_of(work_dir: Path, *hooks: Any) -> FlexibleRunner:
    x = rand(64, 8)
    return FlexibleRunner(
        model=Net,
        train_dataloader=dict(
            dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, collate_fn="default_collate"
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=2),
        default_hooks=dict(logger=dict(interval=2)),
        custom_hooks=list(hooks),
        work_dir=str(work_dir),
    )


class Waits(Hook):
    """Waits in an iteration until the server has heard that so many per cent are done."""

    def __init__(self, trainer: Trainer, at: int, share: int) -> None:
        self.trainer, self.at, self.share = trainer, at, share

    def has_come(self) -> bool:
        return any(message["trainerStatus"]["progressPercentage"] >= self.share for message in self.trainer.came)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        waited = threading.Event()
        while runner.iter == self.at and not self.has_come():
            waited.wait(0.01)


def often() -> KubeflowHook:
    """A hook that sends more often than it may."""
    hook = KubeflowHook()
    hook.interval_s = 0.05
    return hook


def test_a_run_tells_how_far_it_is(trainer: Trainer, tmp_path: Path) -> None:
    hook = often()
    runner = runner_of(tmp_path / "work", hook, Waits(trainer, 0, 0), Waits(trainer, 13, 81))
    runner.train()
    validator = jsonschema.Draft202012Validator({**SCHEMAS, "$ref": f"#/$defs/{SCHEMAS['roots']['Status']}"})
    for message in trainer.came:
        validator.validate(message)
    statuses = [message["trainerStatus"] for message in trainer.came]
    shares = [status["progressPercentage"] for status in statuses]
    assert shares[0] == 0
    assert shares[-1] == 100
    assert shares == sorted(shares)
    assert 81 in shares, "13 of 16 updates"
    last = {metric["name"]: float(metric["value"]) for metric in statuses[-1]["metrics"]}
    assert last["train/loss"] == pytest.approx(runner.message_hub.get_scalar("train/loss").mean(10), rel=1e-3)
    assert statuses[-1]["estimatedRemainingSeconds"] == 0
    assert all("estimatedRemainingSeconds" in status for status in statuses[2:])
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(
        statuses[-1]["lastUpdatedTime"].replace("Z", "+00:00")
    )
    assert age < datetime.timedelta(minutes=5)
    assert not [thread for thread in threading.enumerate() if thread.daemon and "_send_often" in thread.name]


def test_a_failure_is_the_last_message(trainer: Trainer, tmp_path: Path) -> None:
    class Fails(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            if runner.iter == 7:
                raise ValueError("broken")

    hook = KubeflowHook(interval_s=3600)
    with pytest.raises(ValueError, match="broken"):
        runner_of(tmp_path / "work", hook, Waits(trainer, 0, 0), Fails()).train()
    assert [message["trainerStatus"]["progressPercentage"] for message in trainer.came] == [0, 43]


def test_the_token_is_read_anew_and_goes_to_nobody_else(trainer: Trainer, tmp_path: Path) -> None:
    server = StatusServer.of_environment()
    assert server is not None
    assert server.send({}) == ""
    trainer.token = "second"
    assert server.send({}) == f"{trainer.url} answers 403: Forbidden"
    (tmp_path / "token").write_text("second\n")
    assert server.send({}) == ""
    trainer.answer = 302
    assert "answers 302" in server.send({})
    assert "redirected" not in trainer.came


def test_a_server_of_another_authority_hears_nothing(trainer: Trainer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other)
    said = StatusServer(trainer.url, str(other / "ca.crt"), str(tmp_path / "token")).send({})
    assert "certificate verify failed" in said.lower()
    assert trainer.came == []


def test_training_goes_on_without_the_server(trainer: Trainer, tmp_path: Path) -> None:
    """It is said once, not with every message."""
    trainer.token = "another"
    hook = often()
    runner = runner_of(tmp_path / "work", hook)
    runner.train()
    text = next((tmp_path / "work").rglob("*.log")).read_text()
    assert text.count("KubeflowHook: the progress cannot be sent") == 1
    assert "answers 403: Forbidden" in text
    assert runner.iter == 16


def test_outside_of_a_train_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "CA_CERT", "TOKEN"):
        monkeypatch.delenv(f"KUBEFLOW_TRAINER_SERVER_{name}", raising=False)
    runner_of(tmp_path / "work", KubeflowHook()).train()
    text = next((tmp_path / "work").rglob("*.log")).read_text()
    assert "KUBEFLOW_TRAINER_SERVER_URL is not set, this is no TrainJob that is told of; nothing is sent" in text


def test_wrong_settings(tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"KubeflowHook\.interval_s: 1 is not allowed, give 5 or more"):
        KubeflowHook(interval_s=1)
    with pytest.raises(ConfigError, match="is not allowed, the token is sent by https only"):
        StatusServer("http://x", str(tmp_path / "ca.crt"), "token")
    with pytest.raises(ConfigError, match="cannot be read, No such file"):
        StatusServer("https://x", str(tmp_path / "none.crt"), "token")
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_TOKEN")
    with pytest.raises(ConfigError, match="KUBEFLOW_TRAINER_SERVER_TOKEN is not set"):
        StatusServer.of_environment()
