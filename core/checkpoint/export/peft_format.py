"""Export an adapter to a folder in the format of peft: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from ...errors import CheckpointError
from ..load.checkpoint import Checkpoint
from ..load.weights import open_weights
from ..load.whole_tensors import reading
from ..safetensors_file import write_safetensors
from .exported_adapters import adapter_in
from .extra_state import ExportedTensor
from .files import Pending
from .target import check_free, claimed, filled, local_folder
from .weights import weights_to_export

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(
    checkpoint: Checkpoint | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    averaged: bool | str = False,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write an adapter to a folder that ``peft.PeftModel.from_pretrained(base, folder)`` loads; call it in one process.

    Args:
        checkpoint: of a run with the transform LoRA, or with a model that ``peft.get_peft_model`` has wrapped.
        folder: the folder, without an adapter in it.
        adapter: the adapter's name, if the model has several.
        averaged: write EMAHook's averages, see ``export_weights``.
        dtype: of the tensors; default: unchanged.

    Returns:
        The files that were written.

    Raises:
        CheckpointError: the checkpoint has no adapter, or the folder holds one already.

    Source of the format: https://huggingface.co/docs/peft/developer_guides/checkpoint
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    found, folder = adapter_in(source, adapter), local_folder(folder)
    if found.config.get("trainable_token_indices") is not None:
        raise CheckpointError(
            f"{source.path}: trainable_token_indices is not supported in exports; export the whole model"
        )
    check_free(folder, (CONFIG, WEIGHTS))
    weights = [
        ExportedTensor(own, weight.key, weight.shape, weight.dtype)
        for weight in weights_to_export(source, averaged, dtype)
        if (own := found.exported(weight.name)) is not None
    ]
    if not weights:
        raise CheckpointError(f'{source.path}: has no tensor of the adapter "{found.name}"')
    tensors = {weight.name: (weight.dtype, weight.shape) for weight in weights}
    text = json.dumps({**found.config, "inference_mode": True}, indent=2, sort_keys=True)
    with claimed(folder), filled(folder, CONFIG, (CONFIG, WEIGHTS)) as staged:
        with reading(source) as reader, Pending(staged / WEIGHTS) as pending:
            values = (reader.read(weight.key, weight.dtype) for weight in weights)
            write_safetensors(pending, tensors, values, {"format": "pt"}, pairs=False)
        with Pending(staged / CONFIG) as pending:
            pending.write_text(text + "\n", encoding="utf-8")
    return [folder / CONFIG, folder / WEIGHTS]
