"""Docstrings of other libraries: torch's and DeepSpeed's optimizers and schedulers, torchmetrics' metrics."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from .docstrings import Docstring, read_docstring

_ROLE = re.compile(r":[\w:]+:`~?(?:[^`<]*<)?([^`>]+)>?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?")
_DEFAULT = re.compile(r"\s*[(,]?\s*\(?[Dd]efaults?(?: is|:)?\s*`*[^\s()`]+`*(?:\s*\([^)]*\))?\)?\.?$")

# What the docstrings of DeepSpeed's optimizers leave out.
_CPU_ADAGRAD = {
    "lr": "learning rate",
    "eps": "added to the denominator, for numerical stability",
    "weight_decay": "weight decay, added to the gradients",
    "amsgrad": "has no effect",
    "fp32_optimizer_states": "keep the state in float32, whatever the dtype of the parameters",
}
_BIAS = {"bias_correction": "correct the moments for their start at zero"}
_MEANINGS: dict[str, Mapping[str, str]] = {
    "DeepSpeedCPUAdagrad": _CPU_ADAGRAD,
    "DeepSpeedCPUAdam": _BIAS,
    "FusedAdam": _BIAS,
}
_SUMMARIES = {
    "DeepSpeedCPUAdagrad": "Adagrad on the CPU, for optimizer state in host memory.",
    "DeepSpeedCPUAdam": "Adam and AdamW on the CPU, for optimizer state in host memory.",
    "DeepSpeedCPULion": "Lion on the CPU, for optimizer state in host memory.",
}
REFUSED = {"LBFGS": "it evaluates the loss several times per update, and a training loop computes it once"}
"""Types that are found by name and that every runner refuses, with the reason."""


def is_foreign(target: Any) -> bool:
    """Whether a class or function is of another library than flextrain and the user's: its docstring has another form."""
    if getattr(target, "scheduler", None) is not None:  # one of torch's, as flextrain runs it
        return True
    package = str(getattr(target, "__module__", "")).partition(".")[0]
    return package in ("torch", "torchmetrics", "deepspeed", "torch_npu", "torchvision")


def said_by_others(target: Any) -> Docstring:
    """The summary, and where the rest stands: their texts hold formulas and links of a documentation system."""
    original = getattr(target, "scheduler", target)
    own = read_docstring(vars(original).get("__doc__") if inspect.isclass(original) else original.__doc__)
    summary = (
        _SUMMARIES.get(original.__name__) or unmarked(own.summary) or f"{original.__name__}, without a description."
    )
    package = original.__module__.partition(".")[0]
    return Docstring(summary=summary, text=f"A {_noun(original)} of {package}, whose documentation says more.")


def missing_meanings(target: Any) -> Mapping[str, str]:
    """Meanings of arguments that the library's docstring does not have."""
    return _MEANINGS.get(getattr(target, "__name__", ""), {}) if is_foreign(target) else {}


def unmarked(text: str) -> str:
    """The text without the marks of a documentation system, and without a default, which the signature has."""
    text = re.sub(r"`([^`]+)`__?", r"\1", text)
    text = _LINK.sub(r"\1", _ROLE.sub(lambda found: found[1].rpartition(".")[2], text))
    text = re.sub(r"\*\*(.+?)\*\*", r"\1", text.replace("``", "`").replace(r"\beta", "beta"))
    return _DEFAULT.sub("", text).strip()


def left_to_others(target: Any) -> str:
    """The meaning of an argument that another library's docstring does not explain; empty for classes of the user's."""
    return f"see the documentation of {target.__module__.partition('.')[0]}" if is_foreign(target) else ""


def _noun(target: Any) -> str:
    return "class" if inspect.isclass(target) else "function"
