"""What a version consists of: every tensor with its dtype, shape and checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flextrain import FlexTrainError


class PublishError(FlexTrainError):
    """A version of the weights was not published, or is not what was published."""


@dataclass(frozen=True)
class Entry:
    """One tensor.

    Attributes:
        dtype: without torch's prefix, such as "bfloat16".
        shape: of the whole tensor.
        sha256: of its bytes, in C order; hexadecimal.
        file: with the tensor, in a folder.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    file: str = ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in C order; hexadecimal."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def entry_of(name: str, tensor: Tensor, file: str = "") -> Entry:
    """Return what a manifest says of a tensor.

    Raises:
        PublishError: NaN or infinity is in it; an engine would serve nonsense.
    """
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise PublishError(f"{name}: NaN or infinity is in it, it is not published")
    return Entry(dtype_name(tensor.dtype), tuple(tensor.shape), digest(tensor), file)


def check(name: str, tensor: Tensor, entry: Entry, where: object) -> None:
    """Raise PublishError if a tensor is not what the manifest says."""
    found = Entry(dtype_name(tensor.dtype), tuple(tensor.shape), digest(tensor), entry.file)
    for key, kind in (("dtype", "dtype"), ("shape", "shape"), ("sha256", "checksum")):
        if getattr(found, key) != getattr(entry, key):
            raise PublishError(
                f"{where}: {name} has {kind} {getattr(found, key)}, and {getattr(entry, key)} was published"
            )


def to_json(version: int, tensors: Mapping[str, Entry]) -> str:
    """Return a manifest as text."""
    return json.dumps(
        {"version": version, "tensors": {name: asdict(entry) for name, entry in tensors.items()}}, indent=1
    )


def of_json(value: Any, where: object) -> tuple[int, dict[str, Entry]]:
    """Return the version and the tensors of a manifest.

    Raises:
        PublishError: it is no manifest.
    """
    try:
        tensors = {
            str(name): Entry(str(one["dtype"]), tuple(map(int, one["shape"])), str(one["sha256"]), str(one["file"]))
            for name, one in value["tensors"].items()
        }
        return int(value["version"]), tensors
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PublishError(f"{where}: is no manifest of published weights, {error!r}") from None
