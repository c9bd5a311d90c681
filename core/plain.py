"""Foreign state as JSON: tensors, arrays, bytes and tuples among plain values, and keys that are no text."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CheckpointError

# What JSON has no word for is an object of one entry, named after its kind.


def pack(value: Any, where: str) -> Any:
    """``value`` as JSON can hold it; ``unpack`` gives back an equal one.

    Raises:
        CheckpointError: naming the place of something that is neither a plain value nor a tensor.
    """
    if value is None or type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [pack(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [pack(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[pack(key, where), pack(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": _text(bytes(value))}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        array = np.asarray(value)
        return {"array": [array.dtype.str, list(array.shape), _text(array.tobytes())]}
    if isinstance(value, Tensor) and value.layout is torch.strided:
        tensor = value.detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _text(data)]}
    raise CheckpointError(f"{where}: {type(value).__name__} cannot be saved, give plain values or tensors")


def unpack(value: Any) -> Any:
    """What ``pack`` was given.

    Raises:
        ValueError, TypeError, AttributeError: it is not what ``pack`` makes.
    """
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(unpack(item) for item in content)
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in content}
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
    raise ValueError(f"{kind} is no kind of value")


_PLAIN = (bool, int, float, str)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
