"""Export the adapters of a checkpoint: alone, in the format of peft, or merged into the weights of their base."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import CheckpointError, counted, one_of, suggest
from ...hugging_face.pretrained import META_KEY
from ..foreign.weights_file import MODEL
from ..load import Checkpoint, TensorInfo, TensorReader, reading
from ..replicas import FrozenPrints
from ..safetensors_file import write_safetensors
from ..weights import BASE, COPIES, ORIGINAL, PREFIX, computed, is_adapter, name_in_base, open_weights, sources_of
from .files import ExportedTensor, Pending, check_free, claimed, filled, local_folder
from .weights import weights_to_export

_logger = logging.getLogger("flextrain")

KEY = "adapters"
TRANSPOSED = "transposed_adapters"
"""Key of a checkpoint: names of the layers with an adapter whose weights have their inputs first, as those of Conv1D in GPT-2 do.
Settings of an adapter have one value for all layers, which is that of the layer that peft has changed last."""
_NOT_LORA = "peft_type"
_TAKEN_OUT = ("pissa", "olora", "corda", "loftq", "lora_ga")
_DRAWN = ("pissa_niter", "corda", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """One adapter in a checkpoint.

    Attributes:
        name: of the adapter.
        prefix: what the names of the module with the adapter begin with, with a dot; empty if that is the model.
        config: its settings, as ``peft.LoraConfig`` has them.
    """

    name: str
    prefix: str
    config: Mapping[str, Any]

    def inner(self, name: str) -> str | None:
        """A tensor's name in the module with the adapter, without what ``get_peft_model`` puts before it; None: it is elsewhere."""
        if not name.startswith(self.prefix):
            return None
        return name.removeprefix(self.prefix).removeprefix(PREFIX)

    def exported(self, name: str) -> str | None:
        """The name that peft's file of adapters has for a tensor; None for what it does not have."""
        inner = self.inner(name)
        if inner is None:
            return None
        parts = inner.split(".")
        if is_adapter(inner):
            at = next(index for index, part in enumerate(parts) if part.startswith("lora_"))
            if parts[at + 1 : at + 2] != [self.name]:
                return None
            rest = parts[at + 2 :] if parts[at] != "lora_magnitude_vector" else []
            return PREFIX + ".".join([*parts[: at + 1], *rest])
        if COPIES in parts:
            at = parts.index(COPIES)
            return PREFIX + ".".join([*parts[:at], *parts[at + 2 :]]) if parts[at + 1] == self.name else None
        trains_bias = self.config.get("bias", "none") == "all" or (
            self.config.get("bias") == "lora_only" and BASE in parts
        )
        return PREFIX + inner if trains_bias and parts[-1] == "bias" and ORIGINAL not in parts else None


def adapter_in(source: Checkpoint, name: str | None) -> Adapter:
    """Return the adapter of a checkpoint.

    Args:
        source: the open checkpoint.
        name: of the adapter; None: there is only one.

    Raises:
        CheckpointError: there is none, or none of this name, or several; or it is not LoRA.
    """
    given = source.values.get(KEY)
    found: list[Adapter] = []
    for module, configs in given.items() if isinstance(given, Mapping) else ():
        for adapter, config in configs.items() if isinstance(configs, Mapping) else ():
            if not isinstance(config, Mapping):
                raise CheckpointError(f"{source.path}: {KEY} is damaged, {adapter} has no settings")
            found.append(Adapter(str(adapter), f"{module}." if module else "", config))
    if not found:
        keys = [key for key in source.entries if key.startswith(MODEL) and is_adapter(key)]
        why = "names of adapters, and no settings of them; it was saved by another program" if keys else "no adapters"
        raise CheckpointError(
            f"{source.path}: has {why}; give a checkpoint of a run with LoRA in transforms, or get_peft_model"
        )
    names = [adapter.name for adapter in found]
    if name is not None and name not in names:
        raise CheckpointError(f'adapter: "{name}" is not allowed, give {one_of(names)}{suggest(name, names)}')
    chosen = [adapter for adapter in found if name in (None, adapter.name)]
    if len(chosen) > 1:
        raise CheckpointError(f"{source.path}: has several adapters, choose one with adapter={one_of(names)}")
    if chosen[0].config.get(_NOT_LORA) != "LORA":
        raise CheckpointError(
            f'{source.path}: "{chosen[0].name}" is a {chosen[0].config.get(_NOT_LORA)}, only LoRA can be exported'
        )
    return chosen[0]


def taken_from_base(config: Mapping[str, Any]) -> str:
    """The ``init_lora_weights`` that has taken the first values of an adapter out of the weights of its base; "" if none has.

    With such an adapter belongs what was left of the base, and not the base.
    """
    kind = config.get("init_lora_weights")
    return kind if isinstance(kind, str) and kind.lower().startswith(_TAKEN_OUT) else ""


def is_drawn(kind: str) -> bool:
    """Whether what ``taken_from_base`` returns follows from random numbers or data, and so is not found again of the base alone."""
    return kind.lower().startswith(_DRAWN)


# Merge an adapter into the weights of its base, one tensor at a time.


_NOT_MERGED = (
    "use_dora", "use_qalora", "use_bdlora", "arrow_config", "alora_invocation_tokens", "velora_config", "kasa_config",
    "monteclora_config", "layer_replication", "target_parameters", "trainable_token_indices",
)  # fmt: skip
_LEFT_OUT, _ALIASES = "left_out", "aliases"


@contextmanager
def merged(
    checkpoint: Checkpoint | str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    adapter: str | None = None,
    averaged: bool | str = False,
) -> Iterator[Checkpoint]:
    """Context with the weights of the model without adapters that computes the same: what is to be exported.

    A tensor is merged whenever it is read, one at a time, and nothing is kept.

    Args:
        checkpoint: of a run with LoRA.
        base: weights that ``load_from`` takes, for what the checkpoint leaves out.
        adapter: the adapter's name, if the model has several.
        averaged: merge EMAHook's averages, see ``export_weights``.

    Raises:
        CheckpointError: there is no adapter, it is of a kind that cannot be merged, or the base is missing or another.
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    found = adapter_in(source, adapter)
    for key in _NOT_MERGED:
        if found.config.get(key):
            raise CheckpointError(
                f"{source.path}: an adapter with {key} is not merged here; export it with --peft, and merge it with peft's "
                "merge_and_unload()"
            )
    with ExitStack() as stack:
        weights = _Weights(stack, source, weights_to_export(source, averaged, None), base)
        plan, aliases = _plan(weights, found)
        if not found.config.get("ensure_weight_tying"):
            _warn_of_untied(source, weights, {each.name for each in plan})
        values = {
            key: value for key, value in source.values.items() if key not in (_LEFT_OUT, _ALIASES, KEY, TRANSPOSED)
        }
        values[_ALIASES] = aliases
        values["meta"] = _of_the_base(values.get("meta"))
        by_key = {f"{MODEL}{each.name}": each for each in plan}
        infos = {key: weights.info(each.base) for key, each in by_key.items()}
        tensors = {key: TensorInfo(info.shape, info.dtype) for key, info in infos.items()}
        yield computed(source.path, tensors, values, lambda key: by_key[key].value(weights))


def _warn_of_untied(source: Checkpoint, weights: _Weights, names: set[str]) -> None:
    """Say which tied tensors the adapter has made two: a model that ties them takes only one of the two."""
    pairs = {name_in_base(alias): name_in_base(first) for alias, first in weights.aliases.items()}
    if apart := [(alias, first) for alias, first in pairs.items() if alias != first and {alias, first} <= names]:
        alias, first = apart[0]
        _logger.warning(
            f"{source.path}: {first} and {alias} are one tensor in the model, and two after the merge, because an adapter has changed "
            "one of them; only a model that does not tie them (tie_word_embeddings=False) computes the same"
        )


def _of_the_base(meta: Any) -> Any:
    """What a checkpoint says of its model, for a model that ``get_peft_model`` has not wrapped."""
    described = meta.get(META_KEY) if isinstance(meta, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(described.get("prefix"), str):
        return meta
    return {**meta, META_KEY: {**described, "prefix": name_in_base(described["prefix"])}}


@dataclass(frozen=True)
class _Merged:
    """One tensor of the result.

    Attributes:
        name: in the model without adapters.
        base: in the checkpoint or the base.
        down, up: the names of the adapter's two matrices, or of its bias as ``up``; empty: nothing is added.
        scale: what their product is multiplied by.
        is_table: whether they are those of an embedding.
        is_transposed: whether the base has its inputs first.
    """

    name: str
    base: str
    down: str = ""
    up: str = ""
    scale: float = 0.0
    is_table: bool = False
    is_transposed: bool = False

    def computed(self, weights: _Weights) -> tuple[Any, ...]:
        """What is the same for two names of a tensor that stays tied."""
        return weights.stored(self.base), weights.stored(self.down), weights.stored(self.up), self.scale, self.is_table

    def value(self, weights: _Weights) -> Tensor:
        base = weights.read(self.base)
        if not self.up:
            return base
        wide = torch.promote_types(base.dtype, torch.float32)
        change = weights.read(self.up).to(wide)
        if self.down:
            down = weights.read(self.down).to(wide)
            if change.shape[1] != len(down):
                raise CheckpointError(f"{self.base}: is of a convolution with groups; such a layer is not merged")
            # Of a convolution, the second one has a kernel of 1, and the first one that of the base.
            change = (change.flatten(1) @ down.flatten(1)).reshape(-1, *down.shape[1:])
        change = change.T if self.is_table else change
        if change.shape != base.shape or self.is_transposed:
            change = change.T if change.ndim == 2 and not self.is_table else change
        if change.shape != base.shape:
            raise CheckpointError(
                f"{self.base}: has shape {tuple(base.shape)}, and its adapter {tuple(change.shape)}; such a layer is not merged"
            )
        return (base.to(wide) + self.scale * change).to(base.dtype)


class _Weights:
    """The tensors of a checkpoint, and those of a base for what it leaves out, by their names in the checkpoint."""

    def __init__(
        self, stack: ExitStack, source: Checkpoint, weights: list[ExportedTensor], base: str | os.PathLike[str] | None
    ) -> None:
        self._of: dict[str, tuple[TensorReader, str]] = {}
        self._transposed = source.values.get(TRANSPOSED)
        self._info = {weight.name: weight for weight in weights}
        given = source.values.get(_ALIASES)
        self.aliases: dict[str, str] = {str(a): str(n) for a, n in given.items()} if isinstance(given, Mapping) else {}
        """Further names of tied tensors and of extra state, each with the one under which it is stored."""
        reader = stack.enter_context(reading(source))
        self._of = {weight.name: (reader, weight.key) for weight in weights}
        left_out = source.values.get(_LEFT_OUT)
        prints: Mapping[str, Any] = left_out if isinstance(left_out, Mapping) else {}
        lacking = [name for name in prints if name not in self._info]
        if not lacking:
            if base is not None:
                raise CheckpointError(f"{source.path}: has all parameters, base has no effect; leave it out")
            return
        if base is None:
            raise CheckpointError(
                f"{source.path}: was saved without {counted(len(lacking), 'frozen parameter')}, give the weights that the run began "
                "with as base (--base PATH)"
            )
        opened = open_weights(base)
        own = {weight.name: weight for weight in weights_to_export(opened, False, None)}
        found = {name: name for name in lacking if name in own}
        found |= sources_of([name for name in lacking if name not in found], list(own))
        if missing := [name for name in lacking if name not in found]:
            raise CheckpointError(f"{base}: has no {name_in_base(missing[0])}, which {source.path} has left out")
        other = stack.enter_context(reading(opened))
        for name, there in found.items():
            self._info[name], self._of[name] = own[there], (other, own[there].key)
        self._check_same(prints, lacking, source, base)

    def _check_same(self, prints: Mapping[str, Any], names: list[str], source: Checkpoint, base: object) -> None:
        """Raise CheckpointError if a parameter of the base has other values than in the run."""
        for name in names:
            then = str(prints[name])
            # A file may have another dtype than the run computed with: of bfloat16 trained in float32, or the reverse.
            if _fingerprint(self.read(name).to(getattr(torch, then.split()[0]))) != then:
                raise CheckpointError(
                    f"{base}: {name} is not as in the run that saved {source.path}, give the base of that run"
                )

    def __contains__(self, name: str) -> bool:
        return self.stored(name) in self._of

    def __iter__(self) -> Iterator[str]:
        """Yield every name of every tensor, those under which they are stored first."""
        yield from self._of
        yield from (alias for alias, name in self.aliases.items() if name in self._of and alias not in self._of)

    def stored(self, name: str) -> str:
        """The name under which a tensor is stored."""
        return name if name in self._of else self.aliases.get(name, name)

    def is_transposed(self, layer: str, adapter: Adapter) -> bool:
        """Whether the weight of a layer has its inputs first; older checkpoints have only the settings of the adapter."""
        known = self._transposed
        return layer in known if isinstance(known, list) else bool(adapter.config.get("fan_in_fan_out"))

    def info(self, name: str) -> ExportedTensor:
        return self._info[self.stored(name)]

    def read(self, name: str) -> Tensor:
        reader, key = self._of[self.stored(name)]
        return reader.read(key)


def _fingerprint(tensor: Tensor) -> str:
    return FrozenPrints().of({"": tensor})[""]


def _plan(weights: _Weights, adapter: Adapter) -> tuple[list[_Merged], dict[str, str]]:
    """The tensors of the model without adapters, in the order of the checkpoint, and further names of those that stay tied."""
    plan: dict[tuple[Any, ...], _Merged] = {}
    copied = {name_in_base(name) for name in weights if _is_copy_of(name, adapter)}
    merged_bases = set()
    aliases = {name_in_base(alias): name_in_base(n) for alias, n in weights.aliases.items() if n not in weights}
    for name in weights:
        parts = name.split(".")
        if is_adapter(name) or (COPIES in parts and not _is_copy_of(name, adapter)):
            continue
        if ORIGINAL in parts and name_in_base(name) in copied:
            continue
        each = _of_layer(name, weights, adapter) if BASE in parts else _Merged(name_in_base(name), name)
        merged_bases.add(each.up)
        # Of a tied tensor one name may have an adapter or a copy that another has not.
        same = plan.setdefault(each.computed(weights), each)
        if same is not each:
            aliases[each.name] = same.name
    unused = [
        name
        for name in weights
        if is_adapter(name) and adapter.exported(name) and _is_second(name) and name not in merged_bases
    ]
    if unused:
        raise CheckpointError(f"{MODEL}{unused[0]}: belongs to no layer that can be merged")
    return list(plan.values()), {alias: name for alias, name in aliases.items() if alias != name}


def _is_copy_of(name: str, adapter: Adapter) -> bool:
    return f".{COPIES}.{adapter.name}." in f".{name}"


def _is_second(name: str) -> bool:
    return any(part in ("lora_B", "lora_embedding_B") for part in name.split("."))


def _of_layer(name: str, weights: _Weights, adapter: Adapter) -> _Merged:
    layer, _, key = name.rpartition(f".{BASE}.")
    base_name, own = name_in_base(name), adapter.name
    if key == "weight":
        for down, up in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            is_table = down != "lora_A"
            end = "" if is_table else ".weight"
            names = f"{layer}.{down}.{own}{end}", f"{layer}.{up}.{own}{end}"
            if all(each in weights for each in names):
                rank = weights.info(names[0]).shape[0]
                scale, is_transposed = _scale(layer, rank, adapter), weights.is_transposed(layer, adapter)
                return _Merged(base_name, name, *names, scale, is_table, is_transposed)
    elif key == "bias" and (bias := f"{layer}.lora_B.{own}.bias") in weights:
        rank = weights.info(f"{layer}.lora_A.{own}.weight").shape[0]
        return _Merged(base_name, name, up=bias, scale=_scale(layer, rank, adapter))
    return _Merged(base_name, name)


def _scale(layer: str, rank: int, adapter: Adapter) -> float:
    config, name = adapter.config, name_in_base(adapter.inner(layer) or layer)
    patterns = config.get("alpha_pattern") or {}
    alpha = next(
        (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), config.get("lora_alpha", 8)
    )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


# Export an adapter to a folder in the format of peft: ``adapter_config.json`` and ``adapter_model.safetensors``.


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
        CheckpointError: the checkpoint has no adapter, or one whose base is not found again, or the folder holds one already.

    Source of the format: https://huggingface.co/docs/peft/developer_guides/checkpoint
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    found, folder = adapter_in(source, adapter), local_folder(folder)
    if found.config.get("trainable_token_indices") is not None:
        raise CheckpointError(
            f"{source.path}: trainable_token_indices is not supported in exports; export the whole model"
        )
    if is_drawn(kind := taken_from_base(found.config)):
        raise CheckpointError(
            f'{source.path}: init_lora_weights="{kind}" has taken the adapter out of its base by random numbers or data, so peft would '
            "not find what was left of the base; export the whole model with --merge"
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
