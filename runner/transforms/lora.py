"""LoRA: low-rank adapters of the package peft, added to a model in place."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...core.base.errors import ConfigError, listed, nearest, one_of, suggest
from ...core.base.registry import TRANSFORMS
from ...core.checkpoint.untrusted import one_line
from ..reporting.reporter import import_extra

_FILLED_IN = ("auto_mapping", "inference_mode", "peft_type", "peft_version")
_WITHOUT_VALUES = ("gaussian",)
_ELSEWHERE = {
    **dict.fromkeys(("rank", "lora_r", "lora_rank", "lora_dim"), "r"),
    **dict.fromkeys(("alpha", "scale", "scaling"), "lora_alpha"),
    **dict.fromkeys(("dropout", "p"), "lora_dropout"),
    **dict.fromkeys(("targets", "target", "modules", "layers", "lora_target", "lora_target_modules"), "target_modules"),
}
"""Options by the names that papers and other programs have for them, from which letters do not lead to peft's."""
_ALL = "all-linear"
_HEADS = {
    **dict.fromkeys(("SEQ_CLS", "TOKEN_CLS"), ("classifier", "score")),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Modules that peft's class of a task trains as a whole, by ``task_type``; other tasks have none."""
PEFT_CONFIG = "peft_config"
"""The attribute in which peft keeps the configurations of a model's adapters, by name."""


@TRANSFORMS.register_module()
class LoRA:
    """Adds trainable low-rank matrices beside layers of the model, and freezes everything else; names gain ``base_layer``.

    Args:
        adapter_name: the adapter's name in names of parameters.
        options: those of ``peft.LoraConfig``: r, lora_alpha, target_modules, lora_dropout, modules_to_save, use_rslora and so
            on. Without ``target_modules``, peft chooses them by the architecture of a model of transformers. As in peft,
            ``task_type`` "SEQ_CLS" and "TOKEN_CLS" train the modules "classifier" and "score" too, "QUESTION_ANS" "qa_outputs".

    Raises:
        ConfigError: peft is not installed, an option is wrong, or a target or the head of a task is not in the model.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.

    Example:
        transforms=[dict(type="LoRA", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])]
    """

    def __init__(self, adapter_name: str = "default", *, where: str = "LoRA", **options: Any) -> None:
        self._where = where
        peft = import_extra("peft", "peft", where)
        if not re.fullmatch(r"[A-Za-z0-9_-]+", adapter_name):
            raise ConfigError(
                f'{where}.adapter_name: "{adapter_name}" is not allowed, give letters, digits, "_" and "-"'
            )
        self.adapter_name = adapter_name
        self.options = options
        known = [field.name for field in dataclasses.fields(peft.LoraConfig) if field.init]
        for key, value in options.items():
            if key in _FILLED_IN:
                raise ConfigError(f"{where}.{key}: is filled in by flextrain, leave it out")
            if key not in known:
                meant = _ELSEWHERE.get(key)
                hint = f', did you mean "{meant}"?' if meant else suggest(key, {*known, "adapter_name"} - {*_FILLED_IN})
                raise ConfigError(f"{where}.{key}: unknown key{hint}")
            if (
                value != [] or key != "target_modules" or not options.get("target_parameters")
            ):  # adapters for these alone
                _check(key, value, where)
        self._config()

    @property
    def needs_values(self) -> bool:
        """Whether the first values of the adapters are computed from the model's."""
        kind = self.options.get("init_lora_weights", True)
        computes = any(self.options.get(key) for key in ("use_dora", "trainable_token_indices"))
        return computes or (isinstance(kind, str) and kind not in _WITHOUT_VALUES)

    def __call__(self, module: nn.Module) -> nn.Module:
        """Add the adapters."""
        peft = import_extra("peft", "peft", self._where)
        if getattr(module, PEFT_CONFIG, None):
            raise ConfigError(
                f"{self._where}: the model has adapters already ({', '.join(getattr(module, PEFT_CONFIG))}), LoRA adds one adapter to "
                "a model without any"
            )
        self._check_targets(module)
        config = self._config()
        if heads := self._heads(module, config):
            config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or ()), *heads]))
        config.base_model_name_or_path = getattr(module, "name_or_path", None) or None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=r".*fan_in_fan_out is set to False.*")
                changed: nn.Module = peft.inject_adapter_in_model(config, module, self.adapter_name)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self._where}: {one_line(error)}") from error
        self._check_patterns(changed)
        if getattr(changed, PEFT_CONFIG, None) is None:
            changed.peft_config = {self.adapter_name: config}  # type: ignore[assignment]
        return changed

    def _config(self) -> Any:
        peft = import_extra("peft", "peft", self._where)
        try:
            return peft.LoraConfig(**{key: _own_copy(value) for key, value in self.options.items()})
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self._where}: {one_line(error)}") from None

    def _heads(self, module: nn.Module, config: Any) -> list[str]:
        """The modules that are trained as a whole because of the task."""
        task = str(getattr(config.task_type, "value", config.task_type))
        wanted = _HEADS.get(task, ())
        last = {name.rpartition(".")[2] for name, _ in module.named_modules()}
        found = [head for head in wanted if head in last]
        if wanted and not found and not config.modules_to_save:
            quoted = one_of([f'"{head}"' for head in wanted])
            raise ConfigError(
                f'{self._where}.task_type: "{task}" trains the module {quoted}, which the model does not have; name its head, '
                'modules_to_save=["..."]'
            )
        return found

    def _check_targets(self, module: nn.Module) -> None:
        """Raise ConfigError for a target that is not there: peft says it only if none of the targets fits."""
        modules = [name for name, _ in module.named_modules() if name]
        parameters = [name for name, _ in module.named_parameters()]
        for key in ("target_modules", "modules_to_save", "exclude_modules", "target_parameters"):
            names, what = (parameters, "parameter") if key == "target_parameters" else (modules, "module")
            last = {name.rpartition(".")[2] for name in names}
            given = self.options.get(key)
            if isinstance(given, str):
                if given != _ALL and not any(re.fullmatch(given, name) for name in names):
                    raise ConfigError(f'{self._where}.{key}: "{given}" matches no module{_meant(given, last)}')
                continue
            for target in given or ():
                if not any(name == target or name.endswith(f".{target}") for name in names):
                    near = nearest(target, {*last, *names})
                    hint = f', did you mean "{near}"?' if near else f"; the model has {_some(last)}"
                    raise ConfigError(f'{self._where}.{key}: the model has no {what} "{target}"{hint}')

    def _check_patterns(self, changed: nn.Module) -> None:
        """Raise ConfigError for a pattern of ranks or scales that fits no adapter: peft leaves it without effect."""
        adapted = [name for name, module in changed.named_modules() if hasattr(module, "lora_A")]
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in self.options.get(key) or ():
                if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted):  # as peft looks for it
                    last = {name.rpartition(".")[2] for name in adapted}
                    raise ConfigError(
                        f'{self._where}.{key}: "{pattern}" matches no module with an adapter, these are {_some(last)}'
                    )


def _meant(given: str, last: set[str]) -> str:
    """What a text that matches no module may have been meant for: a text is a pattern of whole names."""
    names = [name.strip() for name in given.split(",")]
    if all(name in last for name in names):
        return f", it is a regular expression of whole names; give a list, {json.dumps(names)}"
    return suggest(given, last)


def options_of(config: Any) -> dict[str, Any]:
    """Return the arguments of a ``peft.LoraConfig`` that are not the defaults."""
    default = type(config)()
    given = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.init and field.name not in _FILLED_IN
    }
    return {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in given.items()
        if value != getattr(default, key)
    }


def _check(key: str, value: Any, where: str) -> None:
    allowed = ""
    if key == "r" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        allowed = "give an integer of 1 or more"
    elif key == "lora_alpha" and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        allowed = "give a number above 0"
    elif key == "lora_dropout" and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1
    ):
        allowed = "give a number from 0 to below 1"
    elif key in ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out") and not isinstance(value, bool):
        allowed = "give True or False"
    elif key == "bias" and value not in ("none", "all", "lora_only"):
        allowed = 'choose "none", "all" or "lora_only"'
    elif key in ("target_modules", "exclude_modules") and not _is_names(value, text=True):
        allowed = "give names of modules, or a regular expression"
    elif key in ("modules_to_save", "target_parameters") and not _is_names(value):
        allowed = f"give names of {'modules' if key == 'modules_to_save' else 'parameters'}"
    elif key in ("rank_pattern", "alpha_pattern") and not isinstance(value, Mapping):
        allowed = "give a dict by names of modules"
    if allowed:
        raise ConfigError(f"{where}.{key}: {value!r} is not allowed, {allowed}")


def _is_names(value: Any, *, text: bool = False) -> bool:
    if value is None or (text and isinstance(value, str) and value):
        return True
    return (
        isinstance(value, (list, tuple, set)) and bool(value) and all(isinstance(name, str) and name for name in value)
    )


def _own_copy(value: Any) -> Any:
    """A value that peft may change: it fills in defaults, and shortens lists of targets."""
    if isinstance(value, Mapping):
        return {**value}
    return list(value) if isinstance(value, (list, tuple)) else value


def _some(names: set[str]) -> str:
    return listed(sorted(name for name in names if not name.isdigit()), 12)
