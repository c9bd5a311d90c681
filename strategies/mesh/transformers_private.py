"""All names of transformers that are private or change often; other modules use its public, documented names only.

They were read, and ran, in transformers 5.23. Each function says in one line if the installed version lacks what it needs.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...core.errors import ConfigError

CHECKED = "5.23"
TENSOR_PARALLEL = "transformers.distributed.tensor_parallel"


def pretrained_models(model: nn.Module) -> dict[str, Any]:
    """Return the outermost models of transformers in a module, by name; "" is the module itself.

    It imports nothing: who has such a model has imported transformers.
    """
    base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    found: dict[str, Any] = {}
    for name, module in model.named_modules() if base is not None else ():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, base) and not inside:
            found[name] = module
    return found


def attention_implementation(model: Any) -> str:
    """Return the name under which a model's attention is registered, which ``set_attn_implementation`` sets."""
    found = getattr(model.config, "_attn_implementation", None)
    if found is None:
        raise _unknown_version("PreTrainedConfig._attn_implementation")
    return str(found)


def has_tensor_plan(model: Any) -> bool:
    """Whether a model of transformers brings a plan for tensor parallelism."""
    return bool(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None))


def resolved_plans(model: Any, tp: int, ep: int = 1) -> tuple[dict[str, str], dict[str, str]]:
    """Return a model's own plans for tensor and for expert parallelism: styles by name of a module or parameter.

    What the second one divides is not in the first.

    Args:
        tp, ep: number of processes, 1 for none; with ``ep`` a multiple of ``tp`` or 1.

    Raises:
        ConfigError: the installed transformers has other functions, or the model no such plan.
    """
    resolve = getattr(model, "_resolve_parallel_plans", None)
    config = getattr(_module("transformers.distributed"), "DistributedConfig", None)
    if resolve is None or config is None:
        raise _unknown_version("PreTrainedModel._resolve_parallel_plans")
    try:
        plans = resolve(config(tp_size=tp, ep_size=ep, fsdp_size=max(1, ep // tp)))
    except ValueError as error:
        raise ConfigError(f"strategy.plan: {type(model).__name__} refuses its own plan: {_one_line(error)}") from error
    return dict(plans[0]), dict(plans[1])


def apply_tensor_plan(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Divide the parameters that a plan names, and make its modules compute on what is left.

    Every process must have the same parameters before, which may be on the meta device. A module's ``forward`` becomes
    a function that holds the module.

    Args:
        model: a model of transformers.
        mesh: of one dimension.
        plan: styles by name of a module or parameter, names of parameters before that of their module.
    """
    apply = getattr(_module(TENSOR_PARALLEL), "apply_tensor_parallelism", None)
    if apply is None:
        raise _unknown_version("apply_tensor_parallelism")
    apply(model, mesh, dict(plan))


def key_value_heads(model: Any, plan: Mapping[str, str], tp: int) -> int | None:
    """Return the number of key/value heads of a model if ``tp`` does not divide them and its plan does; else None."""
    per_process = getattr(_module(TENSOR_PARALLEL), "get_kv_heads_per_rank", None)
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None)
    if per_process is None or not isinstance(heads, int):
        return None
    return heads if per_process(dict(plan), heads, tp) is None else None


def has_causal_loss(model: Any) -> bool:
    """Whether a model's loss is transformers' own for causal language models: a cross entropy of each next token."""
    causal = getattr(_module("transformers.loss.loss_utils"), "ForCausalLMLoss", None)
    return causal is not None and getattr(model, "loss_function", None) is causal


def dummy_batch(model: nn.Module) -> Any:
    """Return inputs to try a model of transformers with, and labels if it takes them; None for any other module."""
    inputs = getattr(model, "dummy_inputs", None) if "" in pretrained_models(model) else None
    if not isinstance(inputs, dict) or not inputs:
        return None
    ids = inputs.get("input_ids")
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    return {**inputs, "labels": ids} if takes_labels and ids is not None else inputs


@contextmanager
def taking_sequences_for_whole() -> Iterator[None]:
    """Context in which models of transformers take each row of a batch for one sequence, as they do if positions say so.

    Without values they cannot tell, and would build a mask that they do not have otherwise. It imports nothing.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return

    def find_none(position_ids: Any) -> None:
        find(position_ids)  # what it computes takes memory for a moment

    masking.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = find


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _unknown_version(what: str) -> ConfigError:
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    return ConfigError(
        f'strategy.plan: transformers {version} has no {what}, which "auto" needs for the plan of a model of its own; '
        f"install transformers {CHECKED}, or give a plan"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
