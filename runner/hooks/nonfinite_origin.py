"""Find the first module whose output is not finite, by running the last batch again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.checkpoint import what_is_not_finite
from ...core.comm import collectives as dist
from ...core.finite import nonfinite
from ..finite_weights import nonfinite_weights

if TYPE_CHECKING:
    from ..run import Run


def find_origin(runner: Run, batch: Any) -> str:
    """Return the origin of NaN or infinity, as the end of a sentence; a collective, with the same result on every process.

    Random numbers differ from the first run. Training cannot continue afterwards: gradients and statistics change.

    Args:
        runner: the runner whose model is checked.
        batch: the last batch; with gradient accumulation, the list of the last window's micro-batches.
    """
    window = batch if runner.accumulate > 1 else [batch]
    weights = nonfinite_weights(runner)
    own = _run_again(runner, window)
    if weights:
        # Each process may hold some of the modules; those that come first in forward have the lower ranks.
        answers = dist.all_gather_object(_first_with(weights, own, runner))
        first = next(filter(None, answers), f"NaN or infinity is in {what_is_not_finite(weights)}")
        return f"{first}; LoggerHook(interval=1) looks after every iteration"
    found = {rank: run for rank, run in enumerate(dist.all_gather_object(own)) if run.bad is not None}
    if found:
        rank, run = min(found.items(), key=lambda item: item[1].called.index(str(item[1].bad)))
        where = f" on rank {rank}" if runner.world_size > 1 else ""
        return f"{run.bad} is the first module whose output is not finite, when the batch is run again{where}"
    if failed := next((run.error for run in dist.all_gather_object(own) if run.error), None):
        return f"run again, the batch fails with {failed}"
    return _in_backward(runner, window)


class _Run(NamedTuple):
    """The modules and outputs seen when a window was run again."""

    called: list[str]
    """The modules, in the order in which their forward ended."""
    bad: str | None
    """The first of them whose output is not finite."""
    error: str | None


def _run_again(runner: Run, window: list[Any]) -> _Run:
    error = None
    with _watching(runner.strategy.module, bool(runner.strategy.config.compile)) as seen:
        try:
            for index, micro_batch in enumerate(window):
                before = len(seen)
                runner.stepper.rehearse(micro_batch, _Idle(runner.optim_wrapper))
                if not runner.stepper.counts(micro_batch, index):  # the update ignores it: a mean over no items
                    del seen[before:]
        except Exception as reason:  # a model may check its input; the error becomes part of the message
            error = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
    bad = next((name for name, is_finite in seen if not bool(is_finite)), None)
    return _Run([name for name, _ in seen], bad, error)


@contextmanager
def _watching(module: nn.Module, is_compiled: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """Record by name, in the order in which they end, whether the outputs of all modules are finite."""
    seen: list[tuple[str, Tensor]] = []

    def watch(name: str) -> Any:
        def look(_: nn.Module, args: Any, output: Any) -> None:
            flags = [tensor.detach().isfinite().all() for tensor in _tensors(output)]
            if flags:
                seen.append((name, torch.stack(flags).all()))

        return look

    handles = [part.register_forward_hook(watch(_title(name, part))) for name, part in module.named_modules()]
    try:
        # Compiled code ignores hooks that are registered after compilation.
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _title(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _first_with(weights: list[str], run: _Run, runner: Run) -> str | None:
    """Return the first module in forward that directly owns some of the ``weights``; None if only averages do."""
    own = {
        _title(prefix, part): [name for name in weights if name.rpartition(".")[0] == prefix]
        for prefix, part in runner.strategy.module.named_modules()
    }
    first = next((title for title in (*run.called, *own) if own.get(title)), None)
    if first is None:
        return None
    return f"weights are not finite, {first} is the first module in forward with such weights ({', '.join(own[first])})"


def _in_backward(runner: Run, window: list[Any]) -> str:
    """Return the gradients that are not finite, when all outputs of forward are."""
    again = "weights are finite, and so is every output when the batch is run again"
    if not runner.stepper.differentiate(window):
        return again
    named = runner.strategy.module.named_parameters()
    own = nonfinite({name: parameter.grad for name, parameter in named if parameter.grad is not None})
    names = sorted({name for names in dist.all_gather_object(own) for name in names})
    if names:
        return f"{again}; in backward the gradients of {what_is_not_finite(names, 'parameter')} are not finite"
    return f"{again}, and so is every gradient"


class _Idle:
    """Wraps an OptimWrapper, or several, for a model's own ``train_step``; it neither differentiates nor updates."""

    def __init__(self, optim: Any) -> None:
        self._optim = optim

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optim, name)

    def __getitem__(self, name: str) -> _Idle:
        return _Idle(self._optim[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._optim)

    def __len__(self) -> int:
        return len(self._optim)

    def update_params(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    backward = step = zero_grad = update_params
