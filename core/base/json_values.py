"""Encode Python values as JSON and decode them: tuples, dicts with any keys, and tensors, arrays and bytes.

A value that JSON does not have becomes an object of one entry, from its kind: ``{"tuple": [1, 2]}``. Every mapping is
decoded as a dict.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CheckpointError
from .tensors import stored_row

Word = dict[str, Any]
"""An object of one entry, from the kind of a value to its content."""


def as_text(value: Any) -> Word | None:
    """Encode a tensor, an array or bytes with the content; None for any other value."""
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": _text(bytes(value))}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        array = np.asarray(value)
        return {"array": [array.dtype.str, list(array.shape), _text(array.tobytes())]}
    if isinstance(value, Tensor) and value.layout is torch.strided:
        data = stored_row(value.cpu()).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(data)]}
    return None


def from_text(kind: str, content: Any) -> Any:
    """Decode what ``as_text`` has encoded."""
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "array":
        dtype, shape, text = content
        return np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype)).reshape(shape).copy()[()]
    if kind == "tensor":
        dtype, shape, text = content
        data = (
            torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            if text
            else torch.empty(0, dtype=torch.uint8)
        )
        return data.view(getattr(torch, dtype)).reshape(shape)
    raise ValueError(f"unknown kind {kind}")


def add_to(tensors: list[Any], is_tensor: Callable[[Any], bool]) -> Callable[[Any], Word | None]:
    """Return an encoder that appends each tensor to ``tensors`` and encodes it as its index there."""

    def word(value: Any) -> Word | None:
        if not is_tensor(value):
            return None
        tensors.append(value)
        return {"tensor": len(tensors) - 1}

    return word


def taken_from(tensor: Callable[[int], Any]) -> Callable[[str, Any], Any]:
    """Return the decoder for ``add_to``; ``tensor(i)`` returns the tensor with that index."""

    def value(kind: str, content: Any) -> Any:
        if kind != "tensor":
            raise ValueError(f"unknown kind {kind}")
        return tensor(int(content))

    return value


def pack(value: Any, where: str, word: Callable[[Any], Word | None] = as_text) -> Any:
    """Encode ``value`` as JSON-able values; ``unpack`` returns an equal one.

    Args:
        value: plain values, dicts, lists and tuples, and the values that ``word`` encodes.
        where: the start of the error message.
        word: encodes any other value; it returns None for one that cannot be saved.

    Raises:
        CheckpointError: the value contains something else; the message says where.
    """
    if value is None or type(value) in _PLAIN_TYPES:
        return value
    if type(value) is list:
        return [pack(item, f"{where}[{i}]", word) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [pack(item, f"{where}[{i}]", word) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        items = value.items()
        return {
            "dict": [[pack(key, f"{where}, a key", word), pack(item, f"{where}[{key!r}]", word)] for key, item in items]
        }
    if (found := word(value)) is not None:
        return found
    raise CheckpointError(
        f"{where}: {type(value).__name__} cannot be saved, give tensors, plain values, and dicts, lists and tuples of them"
    )


def unpack(packed: Any, meaning: Callable[[str, Any], Any] = from_text) -> Any:
    """Decode what ``pack`` has encoded.

    Args:
        packed: the values from JSON.
        meaning: decodes what ``word`` has encoded, from its kind and content.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: ``pack`` has not made these values.
    """
    if isinstance(packed, list):
        return [unpack(item, meaning) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tuple":
        return tuple(unpack(item, meaning) for item in content)
    if kind == "dict":
        return {unpack(key, meaning): unpack(item, meaning) for key, item in content}
    return meaning(kind, content)


_PLAIN_TYPES = (bool, int, float, str)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
