"""What is pushed to the hub loads from there, and its card says how it was trained; against a hub on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.version import Version

pytest.importorskip("transformers")

from flextrain import FlexibleRunner
from flextrain.cli import main
from flextrain.core.base.errors import CheckpointError, ConfigError
from flextrain.core.checkpoint import open_weights, push_to_hub
from flextrain.core.checkpoint.export.model_card import MARK, model_card

from .folders import runner_of, save_folder, save_tokenizer
from .hub import TOKEN, Hub

CAUSAL = "transformers:AutoModelForCausalLM"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small Llama that was trained for two updates."""
    folder = tmp_path_factory.mktemp("trained")
    save_folder(folder / "base")
    save_tokenizer(folder / "base")
    model = dict(type=CAUSAL, pretrained=str(folder / "base"))
    runner: FlexibleRunner = runner_of(folder / "run", model, strategy="single", lr=0.5)
    runner.train()
    runner.close()
    return folder / "run" / "iter_2"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub that the client of this process knows."""
    constants = pytest.importorskip("huggingface_hub.constants")
    found = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # large files by LFS, which every hub has
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield found
    found.close()


def pushed_to(hub: Hub, name: str, folder: Path) -> Path:
    """The repository as somebody would download it."""
    for file, content in hub.repositories[name].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return folder


def front_matter(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_the_command(checkpoint: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("private")
    words = ["checkpoint", "export", str(checkpoint), str(out), "--hf", "--push", "tiny", "--license", "apache-2.0"]
    assert main([*words, "--dataset", "squad", "--private"]) == 0
    assert f"pushed: {hub.url}/me/tiny/commit/1" in capsys.readouterr().out
    assert hub.private == {"me/tiny"}
    found = pushed_to(hub, "me/tiny", tmp_path / "there")
    assert not (found / "notes.txt").exists(), "nothing else in the folder is pushed"
    model = AutoModelForCausalLM.from_pretrained(found)
    exported = open_weights(checkpoint).tensors
    assert {f"model.{name}" for name in model.state_dict()} <= exported.keys()
    assert len(AutoTokenizer.from_pretrained(found)) > 0
    card = (found / "README.md").read_text()
    assert card == (out / "README.md").read_text()
    assert front_matter(card) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "tags": ["flextrain"],
        "datasets": ["squad"],
    }


def test_the_card_says_what_was_done(checkpoint: Path) -> None:
    """Data, recipe, strategy, metrics, versions; and nothing of this machine's folders."""
    import transformers

    card = model_card(open_weights(checkpoint), "tiny", license="mit")
    numbers = sum(
        p.numel()
        for p in transformers.AutoModelForCausalLM.from_pretrained(checkpoint.parents[1] / "base").parameters()
    )
    for row in (
        f"| model | LlamaForCausalLM, {numbers:,} numbers |",
        "| began from | base |",
        "| data | 16 samples, 2 for each update |",
        "| trained | 2 updates, 0 whole epochs |",
        "| strategy | SingleDeviceStrategy on 1 process |",
        "| seed | 5 |",
        f"torch {torch.__version__}, transformers {transformers.__version__} |",
    ):
        assert row in card, card
    losses = open_weights(checkpoint).values["message_hub"]["scalars"]["train/loss"]["values"]
    assert f"| train/loss | {sum(losses) / 2:.4g} |" in card
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)[0])
    assert recipe["optim_wrapper"]["optimizer"] == {"type": "SGD", "lr": 0.5}
    assert recipe["train_cfg"] == {"by_epoch": False, "max_iters": 2}
    assert str(checkpoint.parents[1]) not in card
    assert card.rstrip().endswith(MARK)


def test_paths_and_other_arguments_stay_here(checkpoint: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(checkpoint, tmp_path / "iter_2")
    config = tmp_path / "1" / "vis_data" / "config.json"
    config.parent.mkdir(parents=True)
    given = {
        "visualizer": {"init_kwargs": {"api_key": "secret"}},
        "optim_wrapper": {"type": "OptimWrapper", "note": "/home/somebody/private/optimizer.py"},
        "train_dataloader": {
            "dataset": {"type": "datasets:load_dataset", "path": "/home/somebody/data", "x": ["/home/a"]}
        },
    }
    config.write_text(json.dumps(given))
    import os

    os.utime(config, (0, 0))
    card = model_card(open_weights(tmp_path / "iter_2"), "tiny", license="mit")
    assert "note: optimizer.py" in card
    assert "| data | load_dataset, 16 samples" in card
    assert "secret" not in card
    assert "/home" not in card


def test_another_push_leaves_no_old_weights(checkpoint: Path, hub: Hub, tmp_path: Path) -> None:
    """from_pretrained would take model.safetensors before the shards, and would add an adapter to them."""
    push_to_hub(checkpoint, "org/tiny", license="mit")
    others = {"figures/loss.png": b"png", "model_of_rewards.bin": b"bin"}
    hub.repositories["org/tiny"].update({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, **others)
    pushed = push_to_hub(checkpoint, "org/tiny", license="other", max_shard_size="20KB", folder=tmp_path / "out")
    assert b"license: other" in hub.repositories["org/tiny"]["README.md"]
    there = hub.repositories["org/tiny"].keys()
    assert hub.commits[1][1] == ["adapter_config.json", "adapter_model.safetensors", "model.safetensors"]
    assert {"model.safetensors.index.json", "README.md", *others} <= there
    assert {path.name for path in pushed.files} <= there
    push_to_hub(checkpoint, "org/tiny", license="other")
    assert "model.safetensors" in there
    assert not [name for name in there if "-of-" in name or "index" in name]


OWN = b"---\nlicense: mit\n---\nby hand\r\n"


def test_a_card_of_one_s_own_stays(checkpoint: Path, hub: Hub, tmp_path: Path) -> None:
    """That of the folder before that of the hub; what it says of the licence is what was asked for."""
    push_to_hub(checkpoint, "tiny", license="mit")
    hub.repositories["me/tiny"]["README.md"] = OWN
    push_to_hub(checkpoint, "tiny", license="mit")
    assert hub.repositories["me/tiny"]["README.md"] == OWN
    mine = tmp_path / "README.md"
    mine.write_bytes(OWN + b", again")
    for words, message in (
        (dict(license="other"), 'push.license: "other" is not what your README.md says, mit; let both say the same'),
        (dict(license="mit", datasets=["squad"]), 'push.datasets: "squad" is not what your README.md says, nothing'),
    ):
        with pytest.raises(ConfigError) as caught:
            push_to_hub(checkpoint, "tiny", folder=tmp_path, **words)
        assert str(caught.value).startswith(message)
    assert list(tmp_path.iterdir()) == [mine]
    push_to_hub(checkpoint, "tiny", license="mit", folder=tmp_path)
    assert hub.repositories["me/tiny"]["README.md"] == OWN + b", again"
    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("---\na: [\n---\n")
    with pytest.raises(ConfigError, match="^push: your README.md has a head that is no YAML, ") as caught:
        push_to_hub(checkpoint, "tiny", license="mit", folder=other)
    assert "\n" not in str(caught.value)


# What is refused, before anything is written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hf", "--push", "tiny"], "checkpoint export: --push needs --license"),
        (["--push", "tiny", "--license", "mit"], "checkpoint export: --push has no effect without --hf"),
        (["--hf", "--license", "mit"], "checkpoint export: --license has no effect without --push"),
        (["--hf", "--private"], "checkpoint export: --private has no effect without --push"),
        (
            ["--hf", "--push", "a/b/c", "--license", "mit"],
            'push: "a/b/c" is not allowed, give NAME or ORGANISATION/NAME',
        ),
        (["--hf", "--push", "", "--license", "mit"], 'push: "" is not allowed, give NAME or ORGANISATION/NAME'),
        (["--hf", "--push", "a", "--license", "MIT License"], 'push.license: "MIT License" is not allowed'),
    ],
)
def test_bad_options(
    checkpoint: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "out"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_offline(checkpoint: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is made, and nothing is written."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="^push: HF_HUB_OFFLINE is set, unset it to push to tiny$"):
        push_to_hub(checkpoint, "tiny", license="mit", folder=tmp_path / "out")
    assert hub.requests == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError) as caught:
        push_to_hub(checkpoint, "tiny", license="mit", folder=tmp_path / "out")
    assert str(caught.value).startswith("push: tiny was not pushed to http://127.0.0.1:9, ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_the_hub_refuses_at_once(
    checkpoint: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token, a licence, a name; and a public repository is not taken for a private one."""
    out = tmp_path / "out"
    advice = "give a token that may write to it, HF_TOKEN or hf auth login"
    with pytest.raises(CheckpointError, match=f"refuses tiny, 401: Invalid .*; {advice}$"):
        push_to_hub(checkpoint, "tiny", license="mit", token="hf_wrong", folder=out)
    if Version(importlib.metadata.version("huggingface_hub")) >= Version(
        "2"
    ):  # earlier ones check it before the commit
        with pytest.raises(CheckpointError, match="license is not one of apache-2.0"):
            push_to_hub(checkpoint, "tiny", license="unknown", folder=out)
    with pytest.raises(
        CheckpointError, match="push: a--b was not pushed to .*, Cannot have -- or .. in repo_id: 'me/a--b'"
    ):
        push_to_hub(checkpoint, "a--b", license="mit", folder=out)
    hub.repositories["me/tiny"] = {}
    with pytest.raises(
        ConfigError, match="^push.private: me/tiny is public, make it private on the hub or leave private out$"
    ):
        push_to_hub(checkpoint, "tiny", license="mit", private=True, folder=out)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="push: tiny was not pushed to .*hf auth login") as caught:
        push_to_hub(checkpoint, "tiny", license="mit", folder=out)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert hub.commits == []


def test_a_refused_commit_says_how_to_try_again(checkpoint: Path, hub: Hub, tmp_path: Path) -> None:
    hub.refuses = 403
    with pytest.raises(CheckpointError) as caught:
        push_to_hub(checkpoint, "tiny", license="mit", folder=tmp_path / "out")
    said = str(caught.value)
    assert "refuses tiny, 403: You may not write here." in said
    assert said.endswith(f"; hf upload me/tiny {tmp_path / 'out'} tries it again")
    assert "\n" not in said
