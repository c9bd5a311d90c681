"""Weights by URL: ``https://``, ``http://`` and ``torchvision://<model>``, downloaded into torch.hub's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch

from ...base.errors import CheckpointError, ConfigError, one_of, suggest
from ...comm.agreement import raising_together
from ...comm.collectives import all_gather_object, get_rank, side_group
from ...version import __version__
from ..folders import as_path
from ..untrusted import is_name_in_folder, one_line

_logger = logging.getLogger("flextrain")

_TORCHVISION = ("torchvision://", "modelzoo://")
_HTTP = ("https://", "http://")
_TIMEOUT_S = 60.0  # without a byte
_BLOCK_BYTES = 2**20
# The begin of the file's SHA-256, as in resnet18-f37072fd.pth. Eight digits alone are rather a date.
_HASH = re.compile(r"-(?=\d*[a-f])([0-9a-f]{8,64})\.")


def is_download(source: str | os.PathLike[str]) -> bool:
    """Whether ``source`` is a file to download; other URLs are those of folders that fsspec reaches."""
    text = str(source)
    if text.startswith(_HTTP):
        return bool(Path(urllib.parse.urlsplit(text).path).suffix)
    return text.startswith(_TORCHVISION)


def check_download(source: str | os.PathLike[str], where: str) -> None:
    """Check what can be known of a download without network.

    Raises:
        ConfigError: torchvision has no such weights, or is not installed; or the URL names no file.
    """
    try:
        _target(_url(source))
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None


def local_copy(source: str | os.PathLike[str]) -> Path:
    """Return the path of ``source``; a file by URL is downloaded first, unless it is in torch.hub's cache. A collective.

    One process of each node downloads, and the others wait for it. If the name holds the begin of a SHA-256, as torchvision's
    do, the download is held against it.

    Raises:
        CheckpointError: on every process, if the file cannot be downloaded.
    """
    if not is_download(source):
        return as_path(source)
    with raising_together():
        url = _url(source)
        target = _target(url)
    own = (socket.gethostname(), str(target))
    everyones = all_gather_object(own, side_group())
    with raising_together():
        if everyones.index(own) == get_rank():
            _provide(url, target)
    with raising_together():
        if not target.is_file():
            raise CheckpointError(
                f"{shown(url)}: was downloaded to {target} by another process, and is not there on this one"
            )
    return target


def shown(url: str | os.PathLike[str]) -> str:
    """Return a URL without password and query, which may hold a token, for messages."""
    if "://" not in str(url):
        return str(url)
    parts = urllib.parse.urlsplit(str(url))
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _url(source: str | os.PathLike[str]) -> str:
    text = str(source)
    prefix = next((prefix for prefix in _TORCHVISION if text.startswith(prefix)), None)
    return text if prefix is None else _torchvision_url(text.removeprefix(prefix), text)


def _target(url: str) -> Path:
    name = Path(urllib.parse.urlsplit(url).path).name
    if not is_name_in_folder(name):
        raise CheckpointError(f"{shown(url)}: names no file")
    return Path(torch.hub.get_dir()) / "checkpoints" / name


# torchvision


def _torchvision_url(name: str, source: str) -> str:
    """Return the URL of a model's weights: its first ones, or those after a dot (``resnet50.imagenet1k_v2``)."""
    try:
        from torchvision import models
    except ImportError as error:
        raise CheckpointError(f"{source}: needs torchvision, {one_line(error)}; pip install torchvision") from None
    model, _, chosen = name.lower().replace("_weights", "").partition(".")
    known = models.list_models()
    if model not in known:
        raise CheckpointError(f'{source}: torchvision has no model "{model}"{suggest(model, known)}')
    weights: dict[str, Any] = {each.name.lower(): each for each in models.get_model_weights(model)}
    if not weights:
        raise CheckpointError(f"{source}: torchvision has no weights for {model}")
    if chosen == "default":
        return str(models.get_model_weights(model).DEFAULT.url)
    if chosen and chosen not in weights:
        raise CheckpointError(
            f'{source}: {model} has no weights "{chosen}"{suggest(chosen, weights)}, choose {one_of(weights)}'
        )
    return str((weights[chosen] if chosen else next(iter(weights.values()))).url)


# Downloading


def _provide(url: str, target: Path) -> None:
    """Download a file into the cache, unless it is there."""
    origin = target.with_name(f"{target.name}.url")  # another program's file has none
    try:
        if target.is_file() and (_HASH.search(target.name) or _read(origin) in ("", _named(url))):
            _logger.info(f"{shown(url)}: found as {target}")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{uuid.uuid4().hex}.part")
        try:
            _download(url, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        origin.write_text(_named(url))
    except OSError as error:
        raise CheckpointError(
            f"{shown(url)}: cannot be kept in {target.parent}, {error.strerror or one_line(error)}; TORCH_HOME names another "
            "folder"
        ) from None


def _named(url: str) -> str:
    """Return what tells a URL from others on the disk: its query may choose the file, and is kept as a SHA-256 only."""
    query = urllib.parse.urlsplit(url).query
    return f"{shown(url)} {hashlib.sha256(query.encode()).hexdigest()}" if query else shown(url)


def _read(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _download(url: str, part: Path) -> None:
    begin, digest, received = time.monotonic(), hashlib.sha256(), 0
    expected = _HASH.search(Path(urllib.parse.urlsplit(url).path).name)
    first = b""
    with _answer(url) as answer, part.open("wb") as file:
        length = int(answer.headers.get("Content-Length") or 0)
        _logger.info(f"Downloading {shown(url)}{f' ({length / 1e6:.1f} MB)' if length else ''}")
        while block := _block(answer, url):
            first = first or block[:1]
            digest.update(block)
            received += len(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if length and received != length:
        raise CheckpointError(f"{shown(url)}: ended after {received} of {length} bytes, try again")
    if not received or first == b"<":
        raise CheckpointError(f"{shown(url)}: is {'a web page' if received else 'empty'} and no file of weights")
    if expected and not digest.hexdigest().startswith(expected[1]):
        raise CheckpointError(
            f"{shown(url)}: its SHA-256 begins with {digest.hexdigest()[:8]}, the name says {expected[1]}; it is damaged, or the "
            "name means something else: download it and give its path"
        )
    _logger.info(f"Downloaded {received / 1e6:.1f} MB in {time.monotonic() - begin:.1f} s")


def _answer(url: str) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": f"flextrain/{__version__}"})
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise CheckpointError(f"{shown(url)}: cannot be downloaded, {error.code} {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:  # URLError is an OSError
        raise _no_answer(url, getattr(error, "reason", error)) from None


def _block(answer: Any, url: str) -> bytes:
    try:
        return bytes(answer.read(_BLOCK_BYTES))
    except (OSError, HTTPException) as error:
        raise _no_answer(url, error) from None


def _no_answer(url: str, reason: object) -> CheckpointError:
    why = getattr(reason, "strerror", None) or one_line(reason) or type(reason).__name__
    return CheckpointError(
        f"{shown(url)}: cannot be downloaded, {why}; without network, download it elsewhere and give its path, or put it into "
        f"{_target(url).parent}"
    )
