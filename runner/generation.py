"""Generating text: a model's own ``generate`` with whole weights, inside of a run that goes on as if nothing had been generated."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core.comm.joint_errors import gather_differing, raising_together
from ..core.device import to_device
from ..core.errors import ConfigError
from ..core.hugging_face.pretrained_private import is_model_class
from ..core.model import class_name
from ..core.random_state import kept_random_state
from ..core.torch_private import without_compiling
from ..strategies.base import Strategy
from ..strategies.whole.shared_buffers import buffers_kept

# Names of tensors without which a model of transformers has nothing to generate from.
_INPUTS = frozenset({"input_ids", "inputs_embeds", "input_features", "pixel_values", "decoder_input_ids"})


def check_generates(model: nn.Module) -> None:
    """Raise ConfigError if a model has no ``generate``; it names a part of the model that has one."""
    if callable(getattr(model, "generate", None)):
        return
    parts = [name for name, part in model.named_modules() if name and callable(getattr(part, "generate", None))]
    hint = "define it, or give a model that has one, such as AutoModelForCausalLM of transformers"
    if parts:
        hint = f"its {parts[0]} has one: def generate(self, *args, **kwargs): return self.{parts[0]}.generate(*args, **kwargs)"
    raise ConfigError(f"generate: {class_name(model)} has no method generate; {hint}")


def _check_inputs(model: nn.Module, inputs: Any, seed: Any, by_layer: Any) -> None:
    """Raise ConfigError for what transformers would end on in an error of its own; other models take what they like."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"generate.seed: {seed!r} is not allowed, give an integer")
    if not isinstance(by_layer, bool):
        raise ConfigError(f"generate.by_layer: {by_layer!r} is not allowed, give True or False")
    if inputs is None or not is_model_class(type(model)):
        return
    for key, value in inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]:
        where = f'generate.inputs["{key}"]' if key else "generate.inputs"
        if not isinstance(value, Tensor) and (not key or key in _INPUTS or isinstance(value, (str, list))):
            raise ConfigError(
                f'{where}: is {type(value).__name__}, give tensors, as tokenizer(texts, return_tensors="pt", padding=True) does'
            )
        if not isinstance(value, Tensor) or (key or getattr(model, "main_input_name", "")) != "input_ids":
            continue
        if value.dim() != 2 or not value.numel():
            raise ConfigError(f"{where}: has shape {list(value.shape)}, give (texts, tokens), at least one of each")
        if value.is_floating_point():
            raise ConfigError(f"{where}: is {str(value.dtype).removeprefix('torch.')}, give token numbers (.long())")


def generate(
    strategy: Strategy,
    inputs: Any,
    options: Mapping[str, Any],
    *,
    seed: int | None,
    memory_limit: int | str | None,
    by_layer: bool,
) -> Any:
    """Return what the model generates for this process's inputs, see ``FlexibleRunner.generate``; a collective.

    Args:
        strategy: it has the model.
        inputs: tensors, in a mapping by name or alone; None on a process without any.
        options: further arguments of the model's ``generate``.
    """
    check_generates(strategy.module)
    given = gather_differing((inputs is not None, _problem(inputs, options)))
    asking = [rank for rank, (asks, _) in enumerate(given) if asks]
    if wrong := next((problem for _, problem in given if problem), None):
        raise ConfigError(wrong)
    if not asking:
        raise ConfigError("generate.inputs: is None on every process, give inputs on one or more")
    with raising_together():
        _check_inputs(strategy.module, inputs, seed, by_layer)
    device = strategy.device
    with (
        strategy.full_weights(ranks=asking, memory_limit=memory_limit, by_layer=by_layer) as model,
        kept_random_state(device),
        without_compiling(),
        torch.no_grad(),
    ):
        if model is None:
            return None
        model.eval()
        data = to_device(inputs, device)
        if seed is not None:
            torch.manual_seed(seed)
        is_live = model is strategy.module
        with buffers_kept(model) if is_live else nullcontext(), strategy.autocast():
            if isinstance(data, Mapping):
                return model.generate(**data, **options)
            return model.generate(data, **options)


def _problem(inputs: Any, options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments of this process."""
    misplaced = [key for key in options if key in _INPUTS] if inputs is None else []
    if misplaced:
        return (
            f"generate.inputs: is None, and {misplaced[0]} is an argument of its own; give it in a dict: "
            f"generate(dict({misplaced[0]}=..., attention_mask=...), max_new_tokens=20)"
        )
    both = sorted(map(str, inputs.keys() & options.keys())) if isinstance(inputs, Mapping) else []
    if both:
        return f"generate.{both[0]}: is given twice, in inputs and as an argument; leave one of them out"
    return None
