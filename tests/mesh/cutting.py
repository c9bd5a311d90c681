"""Batches that a cut of their sequences may get wrong, and training with them under a mesh beside one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import MeshStrategy, OptimWrapper, SingleDeviceStrategy
from flextrain.core.comm import collectives as dist
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone, shard, train, windows
from flextrain.testing.sessions import whole_model

from ..device import DEVICE
from .models import LENGTH, VOCABULARY, Batch, _exact_loss, of_transformers, sample
from .parity import TOLERANCE, dtype_of


def uneven(batch: Batch, seed: int) -> Batch:
    """Labels that do not count: the beginning of every sample, at times all of what the first process has."""
    labels = batch["labels"].clone()
    for row, length in enumerate(torch.randint(0, LENGTH - 2, (len(labels),), generator=_generator(seed)).tolist()):
        labels[row, : length if seed % 3 else max(length, LENGTH // 2 + 1)] = -100
    return {**batch, "labels": labels}


def padded(batch: Batch, seed: int) -> Batch:
    """Padding on the left of some samples and on the right of others."""
    mask, labels = torch.ones_like(batch["labels"]), batch["labels"].clone()
    for row, length in enumerate(torch.randint(0, LENGTH - 4, (len(labels),), generator=_generator(seed)).tolist()):
        span = slice(0, length) if row % 2 else slice(LENGTH - length, LENGTH)
        mask[row, span], labels[row, span] = 0, -100
    return {**batch, "labels": labels, "attention_mask": mask}


def packed(batch: Batch, seed: int) -> Batch:
    """Several documents in each sequence, whose positions start again."""
    count = len(batch["labels"])
    starts = torch.randint(1, 6, (count, LENGTH), generator=_generator(seed)).cumsum(-1)
    positions = torch.stack([torch.cat([torch.arange(n) for n in _lengths(row.tolist())])[:LENGTH] for row in starts])
    return {**batch, "position_ids": positions}


def divided(batch: Batch, seed: int) -> Batch:
    """The number that transformers' losses are divided by, instead of being means."""
    batch = uneven(batch, seed)
    return {**batch, "num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()[None]}


def _lengths(stops: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Weighed(nn.Module):
    """A causal language model with ``loss_weight``, as users write it for one device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, mode: str = "loss", **batch: Tensor) -> Any:
        found = self.model(**{**batch, "position_ids": batch.get("position_ids")})
        return {"loss": found.loss * self.temperature} if mode == "loss" else found.logits

    def loss_weight(self, data: Batch) -> Tensor:
        return (data["labels"][:, 1:] != -100).sum()


class Encoder(nn.Module):
    """A model of torch's own layers, in which every position sees all others, without positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, functional.gelu, batch_first=True, norm_first=True, bias=False)
            for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, where: Tensor, targets: Tensor | None = None) -> Any:
        hidden = self.embed(tokens) + self.position(where)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        if targets is None:
            return logits
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def _for_encoder(batch: Batch, seed: int) -> Batch:
    labels = batch["labels"].clone()
    labels[torch.rand(labels.shape, generator=_generator(seed)) < 0.6] = -100
    where = torch.arange(LENGTH).expand(len(labels), -1)
    return {"tokens": batch["input_ids"], "where": where.contiguous(), "targets": labels}


def _llama(**options: Any) -> nn.Module:
    return of_transformers("llama", **options)


def _weighed() -> nn.Module:
    return Weighed(_llama())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Batch, int], Batch]]] = {
    "uneven": (_llama, uneven),
    "padded": (_llama, padded),
    "packed": (_llama, packed),
    "divided": (_llama, divided),
    "number": (_llama, divided),  # which the loss does not look at
    "window": (functools.partial(of_transformers, "mixtral", sliding_window=5), padded),
    "weighed": (_weighed, uneven),
    "encoder": (Encoder, _for_encoder),
}
ENCODER = dict(cp_keys={"tokens": 1, "targets": 1, "where": 1}, cp_positions="where")


def _model(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    model = make()
    language = model.model if isinstance(model, Weighed) else model
    if name != "encoder":  # in float64, and with labels that do not count
        language.loss_function = _exact_loss if name == "number" else language_loss
    return model


def language_loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    number = kwargs.get("num_items_in_batch")
    how = "mean" if number is None else "sum"
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=how)
    return loss if number is None else loss / number.squeeze()


def adamw(accumulate: int) -> OptimWrapper:
    return OptimWrapper(dict(type="AdamW", lr=3e-3), accumulative_counts=accumulate, clip_grad=dict(max_norm=0.1))


def same_training(
    name: str,
    options: Mapping[str, Any],
    accumulate: int = 2,
    models: Mapping[str, tuple[Callable[[], nn.Module], Callable[[Batch, int], Batch]]] = MODELS,
    updates: int = 6,
    tolerance: float = TOLERANCE[torch.float64],
    without: Sequence[str] = ("labels", "targets", "num_items_in_batch"),
) -> None:
    """In a worker: train a case on one device and under a mesh, and compare; then compare outputs of the trained model.

    ``without``: the entries that batches to compute outputs of do not have.
    """
    torch.set_num_threads(1)
    found = []
    build, change = models[name]
    with dtype_of(torch.float64):
        batches = [change(sample("llama", 4, seed), seed) for seed in range(5)]
        global_windows = (windows(batches, accumulate) * 2)[:updates]
        inputs = [{k: v for k, v in batch.items() if k not in without} for batch in global_windows[0]]
        for make in (lambda: SingleDeviceStrategy(device=DEVICE), lambda: MeshStrategy(device=DEVICE, **options)):
            with alone() if not found else torch.enable_grad():
                strategy = make()
                strategy.join()
                model, optim = strategy.setup(_model(name, build), adamw(accumulate))
                trace = train(strategy, model, optim, global_windows)  # type: ignore[arg-type]
                outputs = None if name == "weighed" else outputs_of(strategy, model, inputs)
                found.append((trace, whole_model(strategy), outputs))
                reports = strategy.topology.reports
                index, count = strategy.topology.shard
                strategy.leave()
                if len(found) == 2:
                    dist.destroy_process_group()
    (expected, weights, outputs), (trace, found_weights, found_outputs) = found
    same_numbers(trace.losses, expected.losses, "the loss", tolerance)
    same_numbers(trace.grad_norms, expected.grad_norms, "the gradient norm", tolerance)
    same_tensors(found_weights, weights, "final weights", tolerance)
    if outputs is not None:
        has_outputs = found_outputs is not None and found_outputs[0] is not None
        assert has_outputs == reports or "tp" in options  # whose processes all have what one of them reports
        for mine, whole in zip(found_outputs or (), outputs, strict=True):
            if reports:
                torch.testing.assert_close(mine, whole.tensor_split(count)[index], rtol=1e-9, atol=1e-9)


def outputs_of(strategy: Any, model: nn.Module, batches: Sequence[Batch]) -> list[Any]:
    """The logits of batches; None on a process that does not report."""
    model.eval()
    parts = [strategy.split(shard(batch, *strategy.topology.shard)) for batch in batches]
    found = [strategy.evaluate(part, Evaluated(model)) for part in parts]
    model.train()
    return [getattr(one, "logits", one) for one in found]


class Evaluated:
    """An EvalStep that gives what the model gives."""

    mode = "val"

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def predict(self, batch: Batch) -> Any:
        with torch.no_grad():
            return self.model(**{name: value.to(DEVICE) for name, value in batch.items()})
