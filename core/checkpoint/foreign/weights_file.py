"""Read one file of weights: ``.safetensors``, or a file of ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pydantic

from ...base.errors import CheckpointError
from ...base.json_values import add_to, pack
from ...base.tensors import DTYPE_NAMES, DTYPES
from ...model.module_state import EXTRA, module_of
from ..load import Checkpoint, checkpoint_source
from ..manifest import StoredChunk, TensorEntry
from ..safetensors_file import Fetch, SafetensorsFile
from ..untrusted import one_line, read_json, sibling
from .torch_files import StoredTensor, TorchFile

# Entries of a checkpoint for tensors in foreign files.


MODEL = "model."


def label(index: int) -> str:
    """The name that chunks use for file number ``index``: real names of foreign files are not valid in a checkpoint."""
    return f"rank-{index:05d}.safetensors"


def whole(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    """The entry of a tensor that is one chunk in the first file; raises as ``entry``."""
    chunk = StoredChunk(offsets=(0,) * len(shape), shape=shape, file=label(0), name=name)
    return entry(path, name, dtype, shape, [chunk])


def entry(path: Path, name: str, dtype: str, shape: tuple[int, ...], chunks: Sequence[StoredChunk]) -> TensorEntry:
    """The entry of a tensor of chunks.

    Raises:
        CheckpointError: the dtype or the shape is impossible, or the chunks do not make up the tensor.
    """
    try:
        return TensorEntry(dtype=dtype, shape=shape, chunks=tuple(chunks))
    except pydantic.ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{path}: {one_line(name)} is damaged, {reason}") from None


def dtype_name(path: Path, name: str, tensor: StoredTensor) -> str:
    """The dtype of a stored tensor, by its name in checkpoints.

    Raises:
        CheckpointError: checkpoints do not support the dtype or the kind of tensor.
    """
    kind = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)) if tensor.kind == "strided" else f"a {tensor.kind} kind"
    if kind not in DTYPES:
        raise CheckpointError(f"{path}: {name} is of {kind}, and tensors of that kind cannot be read")
    return kind


def joined(path: Path, parts: Mapping[str, Checkpoint], weight_map: Mapping[str, str]) -> Checkpoint:
    """Join several sources into one.

    Args:
        path: the origin, for messages.
        parts: name of each file to its source.
        weight_map: name of each tensor to the name of its file.

    Raises:
        CheckpointError: a tensor is not in its file.
    """
    numbers = {file: index for index, file in enumerate(parts)}
    entries = {}
    for name, file in weight_map.items():
        found = parts[file].entries.get(MODEL + name)
        if not isinstance(found, TensorEntry):
            raise CheckpointError(f"{path}: says that {one_line(name)} is in {file}, which lacks it")
        chunks = tuple(chunk.model_copy(update={"file": label(numbers[file])}) for chunk in found.chunks)
        entries[MODEL + name] = found.model_copy(update={"chunks": chunks})
    sources = {label(numbers[file]): part.source for file, part in parts.items()}
    origin = next(iter(parts.values())).origin if parts else "safetensors"
    return Checkpoint(path, entries, {}, lambda file: sources[file](label(0)), origin=origin)


LIGHTNING_VERSION = "pytorch-lightning_version"
"""A key that every checkpoint file of Lightning's Trainer has."""


def open_file(path: Path) -> Checkpoint:
    """Open the weights in a file, under the keys ``model.<name>``.

    Raises:
        CheckpointError: the file has no weights that can be read safely.
    """
    return _open_safetensors(path) if path.suffix.lower() == ".safetensors" else _open_torch(path)


def _open_safetensors(path: Path) -> Checkpoint:
    source = checkpoint_source(path.parent)
    try:
        with source(path.name) as file:
            stored = cast(SafetensorsFile, file).tensors
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
    entries = {MODEL + name: whole(path, name, DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in stored.items()}
    return Checkpoint(path, entries, {}, lambda _: source(path.name), origin="safetensors")


def _open_torch(path: Path) -> Checkpoint:
    file = TorchFile(path)
    tensors = named_tensors(path, file.content)
    others = _other_parts(file.content)
    if not tensors:
        known = ", ".join(f'"{key}"' for key in _CONTAINERS)
        there = f"; it has {', '.join(others)}, save one of them alone" if others else ""
        raise CheckpointError(f"{path}: holds no tensors by name, at the top or under {known}{there}")
    first: dict[StoredTensor, str] = {}  # names of one tensor have one entry, so that nobody compares it with itself
    entries = {
        MODEL + name: whole(path, first.setdefault(tensor, name), dtype_name(path, name, tensor), tensor.shape)
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
    beside = [str(key) for key in content if key not in ("state_dict", LIGHTNING_VERSION)] if is_lightning else others
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


_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")


def _other_parts(content: Any) -> list[str]:
    """The keys of further state dicts beside the one that is read, such as averaged weights."""
    chosen = next(
        (key for key in _CONTAINERS if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)), None
    )
    parts = content.items() if isinstance(content, Mapping) else ()
    return [
        one_line(key)
        for key, part in parts
        if key != chosen
        and isinstance(part, Mapping)
        and any(isinstance(value, StoredTensor) for value in part.values())
    ]


def state_dict(path: Path, content: Any) -> Mapping[Any, Any]:
    """The state dict in ``content``: itself, or under a key as in MMEngine's checkpoints.

    Raises:
        CheckpointError: it is not a dict.
    """
    for key in _CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        kind = "tensor" if isinstance(content, StoredTensor) else type(content).__name__
        raise CheckpointError(f"{path}: holds a {kind} instead of a state dict")
    return content


# Read Hugging Face's weights: one file, or several files and an index from tensor to file.
#
# Source of the format: https://huggingface.co/docs/safetensors and the ``save_pretrained`` of Transformers


INDEX = ".safetensors.index.json"
_INDICES = (f"*{INDEX}", "*.bin.index.json")
_PARTS = "model-*-of-*.safetensors"
_SINGLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")


class _Index(pydantic.BaseModel):
    weight_map: dict[str, str]


def find(folder: Path) -> Path | None:
    """The index of a folder, or its single file of weights; None if it has neither.

    Raises:
        CheckpointError: it has several indices, one beside a file of whole weights, or parts of weights without an index.
    """
    for pattern in _INDICES:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise CheckpointError(f"{folder}: has several indices, give one of them: {names}")
        if found:
            _check_alone(found[0])
            return found[0]
    single = next((folder / name for name in _SINGLE if (folder / name).is_file()), None)
    if single is None and (parts := sorted(path.name for path in folder.glob(_PARTS))):
        raise CheckpointError(
            f"{folder}: has {parts[0]}, and no model{INDEX}, which says where each tensor is; it belongs to the same folder"
        )
    return single


def _check_alone(index: Path) -> None:
    """Raise CheckpointError if a file of whole weights beside an index, which transformers would read, is none of its parts."""
    single = index.name.removesuffix(".index.json")
    if single in _SINGLE and (index.parent / single).is_file() and f'"{single}"' not in index.read_text("utf-8"):
        raise CheckpointError(
            f"{index.parent}: has {single} and {index.name}, which may be of different models; give one of the two"
        )


def open_index(path: Path) -> Checkpoint:
    """Open the weights in the files that an index names; they must be in its folder.

    Raises:
        CheckpointError: the index or a file is damaged, or a file is outside of the folder.
    """
    try:
        index = _Index.model_validate(read_json(path))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path}: is no index of weights at {at or 'its beginning'}, {first['msg'].replace(f' or instance of {_Index.__name__}', '')}"
        ) from None
    files = {name: sibling(path, name) for name in dict.fromkeys(index.weight_map.values())}
    return joined(path, {name: open_file(file) for name, file in files.items()}, index.weight_map)
