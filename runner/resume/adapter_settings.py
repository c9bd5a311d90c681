"""The configurations of a model's adapters of peft: in checkpoints, for exports, and compared with those of a run that loads them."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...core.checkpoint import Checkpoint
from ...core.checkpoint.export.peft_format import CONFIG
from ...core.checkpoint.load.adapter_names import is_adapter
from ...core.checkpoint.paths import is_local
from ...core.comm.joint_errors import raising_together
from ...core.errors import CheckpointError

if TYPE_CHECKING:
    from ..run import Run

ADAPTERS = "adapters"
"""Key of a checkpoint: configurations by the name of the module with the adapters ("" is the model), and the adapter's name."""


def adapter_configurations(model: nn.Module) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the configurations of the outermost modules that have adapters; empty for a model without any.

    Args:
        model: the user's module, after ``get_peft_model`` or the transform LoRA.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in found):
            continue
        configurations = getattr(module, "peft_config", None)
        if isinstance(configurations, Mapping) and all(hasattr(each, "to_dict") for each in configurations.values()):
            found[name] = {str(adapter): _as_json(each.to_dict()) for adapter, each in configurations.items()}
    return found


_COMPARED = (
    "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens",
)  # fmt: skip
"""Settings with which the same matrices compute something else. ``fan_in_fan_out`` follows from the layers, peft corrects it."""


def check_adapters(run: Run, checkpoint: Checkpoint, path: Path) -> None:
    """Compare the settings of a file's adapters with those of the model that it is loaded into; a collective.

    Args:
        checkpoint: what was opened.
        path: a checkpoint of a run, or a folder or file in peft's format.

    Raises:
        CheckpointError: on every process, if the model would compute something else with the matrices of the file.
    """
    with raising_together():
        if not any(map(is_adapter, checkpoint.entries)):
            return
        here = _by_adapter(adapter_configurations(run.strategy.module).values())
        there = _by_adapter((checkpoint.values.get(ADAPTERS) or {}).values()) or _of_peft(path)
        pairs = [(here[name], there[name]) for name in here.keys() & there.keys()]
        if not pairs and len(here) == len(there) == 1:
            pairs = [(next(iter(here.values())), next(iter(there.values())))]
        for own, saved in pairs:
            for key in _COMPARED:
                if key == "lora_alpha" and key not in saved:
                    continue
                if (own.get(key) or None) != (saved.get(key) or None):
                    raise CheckpointError(
                        f"{path}: its adapter was trained with {key}={saved.get(key)!r}, and LoRA has {own.get(key)!r} here, which computes "
                        f"something else; give {key}={saved.get(key)!r}"
                    )


def _by_adapter(configurations: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: config for each in configurations for name, config in each.items() if isinstance(config, Mapping)}


def _of_peft(path: Path) -> dict[str, Mapping[str, Any]]:
    """The settings in a folder of peft, under an empty name; empty if there are none."""
    file = (path if path.is_dir() else path.parent) / CONFIG if is_local(path) else None
    if file is None or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: is damaged, it is no JSON ({error})") from None
    return {"": found} if isinstance(found, Mapping) else {}


def transposed_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers with an adapter whose weights have their inputs first.

    Args:
        model: as for ``adapter_configurations``; of a pipeline this process's part.
    """
    return [name for name, module in model.named_modules() if getattr(module, "fan_in_fan_out", None) is True]


def _as_json(value: Any) -> Any:
    """A value of a configuration as JSON has it, in the way in which peft writes it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_as_json, value), key=str)
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
