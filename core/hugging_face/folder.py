"""Find the folder of a model of transformers: its configuration, its weights, and the files of its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint.foreign import hugging_face
from ..errors import CheckpointError, ConfigError

CONFIG = "config.json"
GENERATION = "generation_config.json"
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "vocab",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "spiece.*",
    "chat_template*",
    "processor_config.json",
    "preprocessor_config.json",
)


def find_folder(given: str | os.PathLike[str], where: str) -> Path:
    """Return the folder with a model's ``config.json`` and weights; a name of the hub is looked up in its cache only.

    Raises:
        ConfigError: there is no such folder, or it lacks one of them.
    """
    if "://" in os.fspath(given):
        raise ConfigError(f"{where}: {given} is a URL, download the model and give its folder")
    path = Path(given).expanduser()
    if not path.is_dir():
        path = _cached(os.fspath(given), path, where)
    if not (path / CONFIG).is_file():
        adapter = (path / "adapter_config.json").is_file()
        raise ConfigError(
            f"{where}: {path} has no {CONFIG}, "
            + (
                "it is an adapter of peft; give the folder of its base"
                if adapter
                else "give a folder of save_pretrained"
            )
        )
    try:
        weights = hugging_face.find(path)
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None
    if weights is None:
        raise ConfigError(
            f"{where}: {path} has no weights, neither model.safetensors nor model.safetensors.index.json; give a folder "
            "of save_pretrained, or build the model from its configuration"
        )
    return path


def _cached(name: str, path: Path, where: str) -> Path:
    """The snapshot of a model of the hub that was downloaded before."""
    if path.is_file():
        raise ConfigError(f"{where}: {path} is a file, give the folder of save_pretrained")
    is_name = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not name.endswith("/") and name
    try:
        from huggingface_hub import snapshot_download

        if is_name:
            return Path(snapshot_download(name, local_files_only=True))
    except (
        ImportError,
        OSError,
        ValueError,
    ):  # its errors of a missing snapshot and of a wrong name are of these kinds
        pass
    hub = (
        ", and no model of the hub's cache has this name; download it first: huggingface-cli download"
        if is_name
        else ""
    )
    raise ConfigError(f"{where}: {name or 'an empty name'} is no folder{hub}{f' {name}' if hub else ''}")


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """Yield the files that a tokenizer or processor is loaded from."""
    found = {file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()}
    yield from sorted(found)
