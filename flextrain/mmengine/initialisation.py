"""MMEngine's models: their own initialisation, and the device of their data preprocessors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor, BaseModel, base_module, weight_init
from torch import nn

from ..core.model import add_base_model
from ..strategies.base import Strategy

add_base_model(BaseModel)

_RECORD = "_params_init_info"


def initialise(model: Any, strategy: Strategy) -> None:
    """Call ``init_weights()`` of a model that has it, as MMEngine's runner does before training."""
    if not callable(getattr(model, "init_weights", None)):
        return
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    with _without_record(model) if is_meta else nullcontext():
        strategy.init_weights(model)


@contextmanager
def _without_record(model: nn.Module) -> Iterator[None]:
    """Context in which BaseModule does not record who initialised which parameter.

    It compares the means of parameters, which have no values on the meta device.
    """
    modules = [base_module, weight_init]
    originals = [module.update_init_info for module in modules]
    for part in model.modules():
        setattr(part, _RECORD, {})
    for module in modules:
        module.update_init_info = lambda *args, **kwargs: None
    try:
        with warnings.catch_warnings():
            # torch does not see that the copies are recorded, and are made once there is memory.
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.update_init_info = original
        for part in model.modules():
            part.__dict__.pop(_RECORD, None)


def use_device(model: nn.Module, device: torch.device) -> None:
    """Tell the model's data preprocessors the device to which they move a batch.

    They learn it from ``model.to()`` only; strategies that build a model without memory, or in parts, never call that.
    """
    for part in model.modules():
        if isinstance(part, BaseDataPreprocessor):
            part.to(device)  # its own method notes the device
