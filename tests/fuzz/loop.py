"""What a case gives on one device, by a loop that shares no code with the library: the oracle of the fuzzer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .models import GLOBAL_BATCH, OPTIMIZERS, Case, RandomModel, data_of


@dataclass
class Outcome:
    """What a training gave.

    Attributes:
        losses, grad_norms: one number for each update; the latter only with clipping.
        end, start: parameters after and before, by name, each once.
    """

    losses: list[float]
    grad_norms: list[float]
    end: dict[str, Tensor]
    start: dict[str, Tensor] = field(default_factory=dict)


def freeze_or_thaw(model: nn.Module) -> None:
    """What ``Recipe.thaws`` means."""
    for parameter in model.get_submodule("layers.0").parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def train(case: Case) -> Outcome:
    """Train the model of ``case`` by hand, in float64."""
    recipe = case.recipe
    torch.manual_seed(case.seed)
    model = RandomModel(case).double().train()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = OPTIMIZERS[recipe.optimizer]
    groups = [
        {"params": [parameter], "lr": settings["lr"] * (recipe.bias_lr if "bias" in name else 1.0)}
        for name, parameter in model.named_parameters()
    ]
    optimizer = recipe.optimizer_class(groups, **settings)
    base = [group["lr"] for group in optimizer.param_groups]
    samples = iter(data_of(case))
    losses, norms = [], []
    for update, size in enumerate(recipe.windows):
        if update == recipe.thaws:
            freeze_or_thaw(model)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * recipe.lr_factors[update]
        optimizer.zero_grad()
        loss_of_update = 0.0
        for _ in range(size):
            batch = [next(samples) for _ in range(GLOBAL_BATCH)]
            loss = model(**{key: torch.stack([sample[key] for sample in batch]) for key in batch[0]})["loss"] / size
            loss.backward()
            loss_of_update += float(loss.detach())
        losses.append(loss_of_update)
        if recipe.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)))
        optimizer.step()
    end = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Outcome(losses, norms, end, start)
