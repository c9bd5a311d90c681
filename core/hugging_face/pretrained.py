"""Pretrained: a model of transformers from a folder, built without its values, which each process reads after set-up."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError, ConfigError, nearest, suggest
from ..base.registry import MODELS
from ..checkpoint.foreign import weights_file as hugging_face
from ..checkpoint.foreign.weights_file import MODEL
from ..checkpoint.weights import open_weights
from ..device.precision import to_dtype
from . import transformers_private as private

# Find the folder of a model of transformers: its configuration, its weights, and the files of its tokenizer.


CONFIG = "config.json"
GENERATION = "generation_config.json"
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "vocab",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "spiece.*",
    "chat_template*",
    "processor_config.json",
    "preprocessor_config.json",
)


def find_folder(given: str | os.PathLike[str], where: str) -> Path:
    """Return the folder with a model's ``config.json`` and weights; a name of the hub is looked up in its cache only.

    Raises:
        ConfigError: there is no such folder, or it lacks one of them.
    """
    if "://" in os.fspath(given):
        raise ConfigError(f"{where}: {given} is a URL, download the model and give its folder")
    path = Path(given).expanduser()
    if not path.is_dir():
        path = _cached(os.fspath(given), path, where)
    if not (path / CONFIG).is_file():
        adapter = (path / "adapter_config.json").is_file()
        raise ConfigError(
            f"{where}: {path} has no {CONFIG}, "
            + (
                "it is an adapter of peft; give the folder of its base"
                if adapter
                else "give a folder of save_pretrained"
            )
        )
    try:
        weights = hugging_face.find(path)
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None
    if weights is None:
        raise ConfigError(
            f"{where}: {path} has no weights, neither model.safetensors nor model.safetensors.index.json; give a folder "
            "of save_pretrained, or build the model from its configuration"
        )
    return path


def _cached(name: str, path: Path, where: str) -> Path:
    """The snapshot of a model of the hub that was downloaded before."""
    if path.is_file():
        raise ConfigError(f"{where}: {path} is a file, give the folder of save_pretrained")
    is_name = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not name.endswith("/") and name
    try:
        from huggingface_hub import snapshot_download

        if is_name:
            return Path(snapshot_download(name, local_files_only=True))
    except (
        ImportError,
        OSError,
        ValueError,
    ):  # its errors of a missing snapshot and of a wrong name are of these kinds
        pass
    hub = f", and no model of the hub's cache has this name; download it first: hf download {name}" if is_name else ""
    near = nearest(str(path), (str(found.parent) for found in path.parent.glob(f"*/{CONFIG}")))
    meant = f'; did you mean "{near}"?' if near else ""
    raise ConfigError(f"{where}: {name or 'an empty name'} is no folder{hub}{meant}")


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """Yield the files that a tokenizer or processor is loaded from."""
    found = {file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()}
    yield from sorted(found)


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
        self.words = self._settings.get("vocab_size")
        """The size of the vocabulary, where that is given."""
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


# Values of parameters that a folder's files lack, such as a new head: as the model's constructor initialises them.


def initial_values(source: Pretrained, names: Collection[str], seed: int) -> dict[str, Tensor]:
    """Return the whole tensors of some parameters, on the CPU; the rest of the model takes no memory.

    Equal on every process, whatever the strategy, for the same names and seed.

    Args:
        source: the model.
        names: of parameters, as in the model that ``source`` builds.
        seed: of the random numbers.

    Raises:
        ConfigError: the model initialises one of them nowhere.
    """
    model = source.meta_model()
    found: dict[str, Tensor] = {}
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        like = model.get_parameter(name)
        # NaN tells afterwards what was not initialised.
        found[name] = torch.full(like.shape, torch.nan, dtype=like.dtype)
        model.get_submodule(path).register_parameter(leaf, nn.Parameter(found[name]))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        private.initialise(model)
    for name, tensor in found.items():
        if tensor.isnan().any():
            raise ConfigError(
                f"model.{name}: {source.folder} does not have it, and {type(model).__name__} does not initialise it"
            )
    return found


# What a checkpoint keeps of a model of transformers, as plain values, so that its weights can be exported to a
# folder.


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
    found = private.pretrained_models(model)
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
