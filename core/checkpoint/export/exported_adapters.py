"""The adapters of a checkpoint: which it has, with what settings, and under which names its tensors are theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError, one_of, suggest
from ..foreign.stored_tensors import MODEL
from ..load.adapter_names import BASE, COPIES, ORIGINAL, PREFIX, is_adapter
from ..load.checkpoint import Checkpoint

KEY = "adapters"
TRANSPOSED = "transposed_adapters"
"""Key of a checkpoint: names of the layers with an adapter whose weights have their inputs first, as those of Conv1D in GPT-2 do.
Settings of an adapter have one value for all layers, which is that of the layer that peft has changed last."""
_NOT_LORA = "peft_type"


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
