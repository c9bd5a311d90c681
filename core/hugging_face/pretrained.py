"""Pretrained: a model of transformers from a folder, built without its values, which each process reads after set-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.foreign import hugging_face
from ..checkpoint.foreign.stored_tensors import MODEL
from ..checkpoint.load.weights import open_weights
from ..errors import ConfigError, suggest
from ..precision import to_dtype
from ..registry import MODELS
from . import pretrained_private as private
from .folder import GENERATION, find_folder

KEY = "pretrained"
_OWN = ("dtype", "ignore_mismatched_sizes", "trust_remote_code")
_SWITCHES = ("ignore_mismatched_sizes", "trust_remote_code")
_NOTE = "_flextrain_pretrained"
_QUANTISED = (
    "a quantised model is not trained this way; give model=AutoModelForCausalLM.from_pretrained(...) as an instance, with "
    'transforms=[dict(type="Quantize", but=["lm_head"]), dict(type="LoRA", ...)] and strategy=dict(type="single", exclude_frozen_parameters=True)'
)
_REFUSED = {
    "torch_dtype": "give dtype",
    "config": "give its settings one by one, as in num_labels=3",
    "state_dict": "give load_from",
    "device_map": "the strategy places the model, leave it out",
    "low_cpu_mem_usage": "each process reads its own part in any case, leave it out",
    "tp_plan": 'give strategy=dict(type="mesh", tp=...)',
    "use_safetensors": "the folder says which files there are, leave it out",
    "local_files_only": "nothing is downloaded in any case, leave it out",
    "revision": "give the folder of that revision",
    "cache_dir": "give the folder itself",
    "token": "nothing is downloaded, leave it out",
    "load_in_8bit": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "quantization_config": _QUANTISED,
    "gradient_checkpointing": 'give strategy=dict(..., activation_checkpointing="model")',
    "transforms": "is an argument of the runner, FlexibleRunner(transforms=[...])",
    "pretrained_model_name_or_path": f'give {KEY}="folder" alone',
}


class Pretrained:
    """A model of transformers in a folder, as ``model=dict(type=..., pretrained="folder", ...)`` describes it.

    Args:
        kind: the model's class, or an Auto class.
        folder: what ``find_folder`` returns.
        options: dtype, ignore_mismatched_sizes, trust_remote_code, and settings of the model's configuration.
        where: the configuration key, for messages.

    Raises:
        ConfigError: an option is unknown, or the folder holds another kind of model.
    """

    def __init__(self, kind: Any, folder: Path, options: Mapping[str, Any], where: str) -> None:
        private.check_version(f"{where}.pretrained")
        self.folder, self._kind, self._where = folder, kind, where
        self.name: str = kind.__name__
        self._own = {key: value for key, value in options.items() if key in _OWN}
        self._settings = {key: value for key, value in options.items() if key not in _OWN}
        for key in options:
            if key in _REFUSED:
                raise ConfigError(f"{where}.{key}: {_REFUSED[key]}")
            if key in _SWITCHES and not isinstance(options[key], bool):  # a text such as "no" would switch it on
                raise ConfigError(f"{where}.{key}: {options[key]!r} is not allowed, give True or False")
        self.replaces_misshaped = bool(self._own.get("ignore_mismatched_sizes", False))
        self.dtype = self._dtype(self.config())
        self.names: dict[str, str] = {}
        """Name of each tensor in the files to that in the model; after ``build``."""
        self._owners: dict[str, tuple[nn.Module, str]] = {}

    @classmethod
    def of(cls, given: Any, where: str) -> Pretrained | None:
        """Return what a model's configuration describes; None if it is not one of a pretrained model of transformers.

        Raises:
            ConfigError: see ``Pretrained``.
        """
        if not isinstance(given, Mapping) or "type" not in given:
            return None
        if KEY not in given and not (isinstance(given["type"], str) and given["type"].startswith("transformers")):
            return None
        kind = _kind_of(given["type"], f"{where}.type")
        if KEY in given and getattr(kind, "__name__", "") == "from_pretrained":
            raise ConfigError(
                f"{where}.type: from_pretrained reads all weights in every process, and takes no {KEY}; give the class without it"
            )
        is_auto = private.is_auto_class(kind)
        if not (is_auto or private.is_model_class(kind)):
            return None
        if KEY not in given:
            if is_auto:
                other = next((key for key in ("pretrained_model_name_or_path", "path", "folder") if key in given), None)
                raise ConfigError(
                    f'{where}.{KEY}: missing, {kind.__name__} needs the folder of a model, {KEY}="folder"'
                    f"{f' in place of {other}' if other else ''}"
                )
            return None
        folder = given[KEY]
        if not isinstance(folder, (str, Path)):
            raise ConfigError(f"{where}.{KEY}: {folder!r} is not allowed, give a folder of save_pretrained")
        options = {key: value for key, value in given.items() if key not in ("type", KEY, "data_preprocessor")}
        return cls(kind, find_folder(folder, f"{where}.{KEY}"), options, where)

    def config(self) -> Any:
        """Read the configuration, with the settings that were given.

        Raises:
            ConfigError: it cannot be read, is of another kind of model, or has no such setting.
        """
        from transformers import AutoConfig

        where, trusted = self._where, {"trust_remote_code": self._own.get("trust_remote_code", False)}
        try:
            without, rest = AutoConfig.from_pretrained(self.folder, return_unused_kwargs=True, **trusted)
            config, unused = AutoConfig.from_pretrained(
                self.folder, return_unused_kwargs=True, **trusted, **self._settings
            )
        except Exception as error:  # its own classes, also huggingface_hub's for a setting of a wrong type
            raise ConfigError(
                f"{where}: the configuration of {self.folder} cannot be read, {_first_line(error)}"
            ) from error
        for key in unused.keys() - rest.keys() - {"trust_remote_code"}:
            known = [name for name in (*_OWN, "attn_implementation", *without.to_dict()) if not name.startswith("_")]
            raise ConfigError(
                f"{where}.{key}: {type(config).__name__} has no such setting{suggest(key, known) or '; its file lists them'}"
            )
        name = self.name
        if private.is_auto_class(self._kind):
            if not private.knows(self._kind, config) and not self._own.get("trust_remote_code"):
                raise ConfigError(
                    f"{where}.type: {name} has no model for {config.model_type}, which {self.folder} holds"
                )
        elif (own := getattr(self._kind, "config_class", None)) is not None and not isinstance(config, own):
            raise ConfigError(f"{where}.type: {name} is a {own.model_type}, {self.folder} holds a {config.model_type}")
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(
                f"{where}.{KEY}: {self.folder} holds quantised weights, give the folder of the model before"
            )
        return config

    def _dtype(self, config: Any) -> torch.dtype:
        given = self._own.get("dtype", "float32")
        if given == "auto":
            return private.dtype_of(config) or torch.float32
        found = to_dtype(given, f"{self._where}.dtype")
        if not found.is_floating_point:
            raise ConfigError(f"{self._where}.dtype: {given} is not allowed, give a floating-point dtype")
        return found

    def build(self) -> nn.Module:
        """Build the model, whose parameters have no values yet.

        Raises:
            ConfigError: transformers cannot build it with these settings, or would make other tensors of those in the files.
        """
        config = self.config()
        options = {"trust_remote_code": True} if self._own.get("trust_remote_code") else {}
        options = options if private.is_auto_class(self._kind) else {}
        with private.without_values():
            try:
                model = private.from_config(self._kind, config, self.dtype, **options)
            except (ValueError, ImportError, TypeError) as error:
                raise ConfigError(f"{self._where}: {type(error).__name__}, {_first_line(error)}") from error
        self._take_generation_config(model)
        keys = [key.removeprefix(MODEL) for key in open_weights(self.folder).entries if key.startswith(MODEL)]
        self.names, converted = private.names_in_model(model, keys)
        if converted:
            raise ConfigError(
                f"{self._where}.{KEY}: {self.folder} stores {converted[0]} and {len(converted) - 1} others in another layout than "
                f"{type(model).__name__} has; write the folder anew once: model = from_pretrained(folder), "
                "model.save_pretrained(new, save_original_format=False)"
            )
        for path, module in model.named_modules():
            for own in (module.named_parameters, module.named_buffers):
                for name, _ in own(recurse=False, remove_duplicate=False):
                    self._owners[f"{path}.{name}" if path else name] = module, name
        model.__dict__[_NOTE] = self
        return model

    def _take_generation_config(self, model: Any) -> None:
        if (self.folder / GENERATION).is_file() and hasattr(model, "generation_config"):
            from transformers import GenerationConfig

            try:
                model.generation_config = GenerationConfig.from_pretrained(self.folder)
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(f"{self._where}.{KEY}: {self.folder / GENERATION}: {_first_line(error)}") from error

    def renamed_in(self, model: nn.Module) -> dict[str, str]:
        """Return the names at ``build`` to those in ``model``, which may hold the modules under other names since."""
        at = {id(module): name for name, module in model.named_modules()}
        tensors = (*model.named_parameters(), *model.named_buffers())
        elsewhere = {id(tensor): name for name, tensor in tensors}  # where another module has taken it over
        found = {}
        for old, (owner, leaf) in self._owners.items():
            if (path := at.get(id(owner))) is not None:
                found[old] = f"{path}.{leaf}" if path else leaf
            elif (name := elsewhere.get(id(getattr(owner, leaf, None)))) is not None:
                found[old] = name
        return found

    def size(self) -> int:
        """Bytes of the files with the weights."""
        source = hugging_face.find(self.folder)
        files = self.folder.glob("*.safetensors") if source is not None and source.suffix == ".json" else [source]
        return sum(file.stat().st_size for file in files if file is not None)

    def meta_model(self) -> nn.Module:
        """Build the model again, on the meta device."""
        with torch.device("meta"), private.without_values():
            return private.from_config(self._kind, self.config(), self.dtype)


def pretrained_in(model: nn.Module) -> Iterator[Pretrained]:
    """Yield what was built from a folder in a model."""
    for module in model.modules():
        if isinstance(found := module.__dict__.get(_NOTE), Pretrained):
            yield found


def _kind_of(given: Any, where: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return MODELS.resolve(given, where)
    except ConfigError as error:
        if set(given) & set(":.") or "did you mean" in str(error) or not private.has_class(given):
            raise
        raise ConfigError(f'{error}, did you mean "transformers:{given}"?') from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__
