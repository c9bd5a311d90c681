"""Read one file of weights: ``.safetensors``, or a file of ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError
from ...json_values import add_to, pack
from ...module_state import EXTRA, module_of
from ..load.checkpoint import Checkpoint
from ..load.partial_read import Fetch
from ..storage import mapped_source
from .stored_tensors import MODEL, dtype_name, whole
from .torch_files import StoredTensor, TorchFile

LIGHTNING_VERSION = "pytorch-lightning_version"
"""A key that every checkpoint file of Lightning's Trainer has."""


def open_file(path: Path) -> Checkpoint:
    """Open the weights in a file, under the keys ``model.<name>``.

    Raises:
        CheckpointError: the file has no weights that can be read safely.
    """
    return _open_safetensors(path) if path.suffix.lower() == ".safetensors" else _open_torch(path)


def _open_safetensors(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            entries = {
                MODEL + name: whole(path, name, stored.get_dtype(), tuple(stored.get_shape()))
                for name, stored in slices.items()
            }
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is no safetensors file, {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error}") from None
    source = mapped_source(path.parent)
    return Checkpoint(path, entries, {}, lambda _: source(path.name), origin="safetensors")


def _open_torch(path: Path) -> Checkpoint:
    file = TorchFile(path)
    tensors = named_tensors(path, file.content)
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors by name")
    entries = {
        MODEL + name: whole(path, name, dtype_name(path, name, tensor), tensor.shape)
        for name, tensor in tensors.items()
    }
    values, extra = _extra_state(path, state_dict(path, file.content))
    entries |= {key: whole(path, key, dtype_name(path, key, tensor), tensor.shape) for key, tensor in extra.items()}
    tensors |= extra

    @contextmanager
    def source(_: str) -> Iterator[Fetch]:
        tensor_of = file.map()
        yield Fetch(path, lambda name, slices: tensor_of(tensors[name])[slices])

    content = file.content
    is_lightning = isinstance(content, Mapping) and LIGHTNING_VERSION in content
    beside = [str(key) for key in content if key not in ("state_dict", LIGHTNING_VERSION)] if is_lightning else []
    origin = "Lightning" if is_lightning else "torch.save"
    return Checkpoint(path, entries, values, source, origin=origin, not_read=beside)


def _extra_state(path: Path, content: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The extra state of modules, encoded as in a checkpoint; single tensors and unsupported values are left out."""
    values: dict[str, Any] = {}
    found: dict[str, StoredTensor] = {}
    for name, value in content.items():
        if (module := module_of(str(name))) is None or isinstance(value, StoredTensor):
            continue
        tensors: list[StoredTensor] = []
        with suppress(CheckpointError):  # loading will report it as missing
            values[EXTRA + module] = pack(
                value, f"{path}: {name}", add_to(tensors, lambda part: isinstance(part, StoredTensor))
            )
            found |= {f"{EXTRA}{module}/{i}": tensor for i, tensor in enumerate(tensors)}
    return values, found


def named_tensors(path: Path, content: Any) -> dict[str, StoredTensor]:
    """The tensors of a state dict by name; see ``state_dict``."""
    return {str(name): value for name, value in state_dict(path, content).items() if isinstance(value, StoredTensor)}


def state_dict(path: Path, content: Any) -> Mapping[Any, Any]:
    """The state dict in ``content``: itself, or under a key as in MMEngine's checkpoints.

    Raises:
        CheckpointError: it is not a dict.
    """
    for key in ("state_dict", "model_state_dict", "model", "module"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        kind = "tensor" if isinstance(content, StoredTensor) else type(content).__name__
        raise CheckpointError(f"{path}: holds a {kind} instead of a state dict")
    return content
