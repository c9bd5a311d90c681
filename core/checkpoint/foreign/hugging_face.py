"""Read Hugging Face's weights: one file, or several files and an index from tensor to file.

Source of the format: https://huggingface.co/docs/safetensors and the ``save_pretrained`` of Transformers
"""

from __future__ import annotations

from pathlib import Path

import pydantic

from ...errors import CheckpointError
from ..load.checkpoint import Checkpoint
from ..untrusted import read_json, sibling
from .stored_tensors import joined
from .weights_file import open_file

INDEX = ".safetensors.index.json"
_INDICES = (f"*{INDEX}", "*.bin.index.json")
_PARTS = "model-*-of-*.safetensors"
_SINGLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")


class _Index(pydantic.BaseModel):
    weight_map: dict[str, str]


def find(folder: Path) -> Path | None:
    """The index of a folder, or its single file of weights; None if it has neither.

    Raises:
        CheckpointError: it has several indices, or parts of weights without an index.
    """
    for pattern in _INDICES:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise CheckpointError(f"{folder}: has several indices, give one of them: {names}")
        if found:
            return found[0]
    single = next((folder / name for name in _SINGLE if (folder / name).is_file()), None)
    if single is None and (parts := sorted(path.name for path in folder.glob(_PARTS))):
        raise CheckpointError(
            f"{folder}: has {parts[0]}, and no model{INDEX}, which says where each tensor is; it belongs to the same folder"
        )
    return single


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
