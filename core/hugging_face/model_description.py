"""What a checkpoint keeps of a model of transformers, as plain values, so that its weights can be exported to a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigError
from . import pretrained_private as private
from .folder import CONFIG, GENERATION

META_KEY = "hugging_face"


@dataclass(frozen=True)
class Description:
    """A model of transformers, and where its tokenizer may be.

    Attributes:
        architecture: its class in transformers.
        config: its configuration, as in ``config.json``.
        generation_config: as in ``generation_config.json``; None: it has none.
        folder: the folder that it was built from; None: unknown.
        prefix: its name in the trained module, with a dot at the end; "" if it is the module itself.
    """

    architecture: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None = None
    folder: str | None = None
    prefix: str = ""

    def values(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def of_values(cls, value: Any, where: Path) -> Description:
        """Return what ``values`` gave.

        Raises:
            CheckpointError: it is something else.
        """
        fields = cls.__dataclass_fields__.keys()
        if not isinstance(value, Mapping) or not {"architecture", "config"} <= value.keys() <= fields:
            raise CheckpointError(f"{where}: its description of a model of transformers is damaged")
        if not isinstance(value["config"], Mapping) or not isinstance(value["architecture"], str):
            raise CheckpointError(f"{where}: its description of a model of transformers is damaged")
        return cls(**value)


def describe(model: nn.Module) -> Description | None:
    """Return the description of the only model of transformers in a module; None if there is none, or several."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if private.is_model_class(type(module)) and not any(not one or name.startswith(f"{one}.") for one in found):
            found[name] = module
    if len(found) != 1:
        return None
    ((name, inner),) = found.items()
    try:
        architecture = private.published_class(inner)
    except ConfigError:
        return None
    generation = getattr(inner, "generation_config", None)
    folder = getattr(inner.config, "_name_or_path", "") or ""
    return Description(
        architecture=architecture,
        config=json.loads(inner.config.to_json_string()),
        generation_config=None if generation is None else json.loads(generation.to_json_string()),
        folder=str(Path(folder).absolute()) if folder and Path(folder).is_dir() else None,
        prefix=f"{name}." if name else "",
    )


def of_folder(folder: Path) -> Description:
    """Return the description of the model in a folder of ``save_pretrained``.

    Raises:
        CheckpointError: it has no readable ``config.json`` with ``architectures``.
    """
    config = _json(folder / CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"{folder / CONFIG}: has no architectures, so the class of the model is unknown")
    generation = _json(folder / GENERATION) if (folder / GENERATION).is_file() else None
    return Description(str(names[0]), config, generation, str(folder))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be read, {why}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds no configuration")
    return found


def meta_model(description: Description) -> nn.Module:
    """Build the described model on the meta device.

    Raises:
        CheckpointError: the installed transformers does not have such a model, or not with this configuration.
        ConfigError: transformers is older than 5.
    """
    import transformers

    private.check_version("--hf")
    kind: Any = getattr(transformers, description.architecture, None)
    if kind is None:
        raise CheckpointError(
            f"{description.architecture}: transformers {transformers.__version__} has no such model, and its code is not in "
            "the checkpoint"
        )
    if not private.is_model_class(kind):
        raise CheckpointError(f"architectures: {description.architecture} is no model of transformers")
    try:
        config = kind.config_class.from_dict(dict(description.config))
        with torch.device("meta"), private.without_values():
            return private.from_config(kind, config, torch.float32)
    except Exception as error:  # its own classes, also huggingface_hub's for a setting of a wrong type
        lines = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{description.architecture}: its configuration is wrong, {lines}") from error
