"""Muon: momentum orthogonalised matrix by matrix, and another optimizer for what is no matrix."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.base.errors import ConfigError
from ..core.base.registry import OPTIMIZERS
from .adapters import OF_OTHERS
from .matrices import STRUCTURE, Role, matrices_of
from .owners import Chunk, Matrix, OwnerExchange, Plans, exchanges, held_as, own_gradient, own_tensor

AdjustLR = Literal["original", "match_rms_adamw", "spectral_unclamped"]
_MEGABYTE = 2**20
_MOST_STEPS = 99


@OPTIMIZERS.register_module()
class Muon(Optimizer):
    """torch.optim.Muon for the matrices of a model, however they are sharded, and ``others`` for its other parameters.

    The arithmetic is torch's (2.9 and newer), to the bit. With weights W, gradient G and momentum B of a matrix:
    ``B = m B + (1 - m) G``; ``U = m B + (1 - m) G`` with ``nesterov``, else B; ``W = W - lr * decay * W - lr * a * NS(U)``, where
    NS is some steps of a Newton-Schulz iteration that takes singular values near 1.

    Of a shard, a DTensor or a FlatShard, every process keeps its part of W and B. Each matrix has an owner among the processes, which
    gets U whole, in ``ns_dtype``, by one all-to-all and returns NS(U) by another; see ``OwnerExchange``. Ordinary tensors are computed
    where they are.

    The groups have torch's settings, and some that a configuration finds by the model: ``of_others`` for the groups of
    ``others``; ``stacked`` for parameters that have a matrix in every row; ``part_sizes`` and ``part_dim`` for parameters in which
    matrices are joined; ``transposed`` for those whose outputs are columns. Parameters of more dimensions that are not stacked are matrices with a row for every index of the first.

    Rounding: a gradient of low rank (few tokens, or inputs whose mean a layer norm has taken) has singular values of zero, which the iteration does
    not leave at zero in bfloat16: it magnifies rounding errors, by about 3.4 in each step. There two processes' sums in
    another order give updates that differ as much as the update is large. So differ one device and several, as one device from
    itself with batches of another order. With ``ns_dtype="float64"`` such differences stay below 1e-10.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; it is multiplied by what ``adjust_lr_fn`` says.
        weight_decay: decoupled, as AdamW's.
        momentum: m, 0 to below 1.
        nesterov: whether the step looks ahead, U above.
        ns_coefficients: of the polynomial a X + b (X X^T) X + c (X X^T)^2 X.
        eps: the smallest norm that U is divided by.
        ns_steps: 1 to 99.
        adjust_lr_fn: factor for a matrix of A outputs and B inputs, which are rows and columns but of layers that have their inputs first,
            see ``inputs_come_first``: "original" or None, sqrt(max(1, A / B));
            "match_rms_adamw", 0.2 sqrt(max(A, B)), with which AdamW's learning rates and decay serve;
            "spectral_unclamped", sqrt(A / B).
        others: configuration of the optimizer for embeddings, output heads, vectors and all else that is no matrix.
        matrices: names of parameters, or of modules, with ``*``, that are matrices although they would be left to ``others``.
        leave: names of those that are left to ``others`` although they are matrices.
        parts: by name, the matrices that are joined in a parameter: a number of equal parts of the rows, a list of rows, or
            ``dict(sizes=..., dim=1)`` for columns, as in ``{"layers.*.qkv": 3}``.
        ns_dtype: dtype of the iteration, and of what is sent for it.
        bucket_mb: about how much memory (MiB) whole matrices take on a process at a time.

    Raises:
        ConfigError: a setting is out of range, or ``others`` is not possible; a parameter is no matrix, and in no group of ``others``; names
            are given with parameters that come without a model: ``others``, ``matrices``, ``leave`` and ``parts`` are for a configuration,
            ``dict(type="Muon", ...)``, or an OptimWrapper.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable for LLM
    Training", 2025.
    """

    updates_matrices = True
    """What is no matrix is left to ``others``; a configuration finds the matrices by the model."""
    of_all_groups = ("others", "matrices", "leave", "parts", "bucket_mb", "where")
    """Arguments that are no settings of a group."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLR | None = None,
        *,
        others: Mapping[str, Any] | str | None = None,
        matrices: Sequence[str] = (),
        leave: Sequence[str] = (),
        parts: Mapping[str, Any] | None = None,
        ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16",
        bucket_mb: float = 128,
        where: str = "optimizer",
    ) -> None:
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, eps=eps, ns_steps=ns_steps,
            ns_coefficients=tuple(ns_coefficients), adjust_lr_fn=adjust_lr_fn, ns_dtype=ns_dtype,
        )  # fmt: skip
        _check(defaults, bucket_mb, where)
        self.given: dict[str, Any] = dict(
            others=others, matrices=matrices, leave=leave, parts=parts, bucket_mb=bucket_mb, where=where
        )
        given = list(params)
        if not given:
            raise ValueError("optimizer got an empty parameter list")  # as torch's
        groups = given if isinstance(given[0], Mapping) else [{"params": given}]
        if not any(STRUCTURE & group.keys() for group in groups):
            for key in ("others", "matrices", "leave", "parts"):
                if self.given[key]:
                    raise ConfigError(
                        f"{where}.{key}: has no effect on parameters without the model that names them; give the optimizer as "
                        f'dict(type="Muon", {key}=...)'
                    )
        own = [dict(group) for group in groups if not group.get(OF_OTHERS)]
        super().__init__(own or [{"params": []}], {**defaults, **Role().settings})
        self.param_groups = [group for group in self.param_groups if group["params"]]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim < 2 or parameter.is_complex():
                raise ConfigError(
                    f"{where}: Muon updates real matrices, and a parameter is {parameter.dtype} of shape {tuple(parameter.shape)}; give the "
                    'optimizer as dict(type="Muon", others=dict(type=...)), which has such'
                )
        self.others: Optimizer | None = None
        theirs = [dict(group) for group in groups if group.get(OF_OTHERS)]
        if theirs:
            if others is None:
                raise ConfigError(f'{where}.others: missing, give others=dict(type="AdamW", lr=...)')
            self.others = OPTIMIZERS.build(others, f"{where}.others", params=theirs)
            self.param_groups += self.others.param_groups
        self._plans = Plans()
        self.join()

    def join(self) -> None:
        """Let both optimizers have one state, and the other one its groups of this one's."""
        if self.others is not None:
            self.others.param_groups = [group for group in self.param_groups if group.get(OF_OTHERS)]
            self.others.state = self.state

    def another(self, groups: list[dict[str, Any]]) -> Muon:
        """Return an optimizer with the same settings for other groups."""
        known = inspect.signature(type(self)).parameters
        settings = {key: value for key, value in self.defaults.items() if key in known}
        return type(self)(groups, **settings, **self.given)

    def __getstate__(self) -> dict[str, Any]:
        """Also the other optimizer, for copies; what is planned with process groups is left out."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "others": self.others, "given": self.given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue from a copy's state, or from that of ``state_dict``."""
        super().__setstate__(state)
        self._plans = Plans()
        self.join()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; a collective of the processes that hold shards."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = {id(p): _begin(self, p, group) for group, p in self._matrices() if p.grad is not None}
        for exchange in self._planned_exchanges():
            exchange.run(
                lambda matrix: id(matrix.parameter) in updates,
                lambda matrix, chunk: [updates[id(matrix.parameter)].momentum(chunk)],
                lambda found: [updates[id(matrix.parameter)].orthogonalised(whole) for matrix, (whole,) in found],
                lambda matrix, chunk, values: updates[id(matrix.parameter)].apply(matrix, chunk, values),
            )
        if self.others is not None and self.others.param_groups:
            self.others.step()
        return loss

    def _matrices(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self.param_groups if not group.get(OF_OTHERS) for p in group["params"]]

    def _planned_exchanges(self) -> list[OwnerExchange]:
        own = self._matrices()

        def plan() -> list[OwnerExchange]:
            dtypes = {id(p): getattr(torch, group["ns_dtype"]) for group, p in own}
            found = [Matrix(p, spans) for group, p in own for spans in matrices_of(p.shape, group)]
            room = int(self.given["bucket_mb"] * _MEGABYTE)
            return exchanges(found, lambda m: dtypes[id(m.parameter)], room)

        return self._plans.of([parameter for _, parameter in own], plan)


class _Update(NamedTuple):
    """An update of a parameter, by what this process has of it."""

    group: dict[str, Any]
    weights: Tensor
    grad: Tensor
    buffer: Tensor

    def momentum(self, chunk: Chunk) -> Tensor:
        """Return what a chunk gives to the iteration."""
        buffer = chunk.of(self.buffer)
        return chunk.of(self.grad).lerp(buffer, self.group["momentum"]) if self.group["nesterov"] else buffer

    def orthogonalised(self, whole: Tensor) -> Tensor:
        """Return the iteration's result for a whole matrix."""
        group = self.group
        matrix = whole.squeeze(0) if group["stacked"] else whole.flatten(1)
        found = newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
        return found.reshape(whole.shape)

    def apply(self, matrix: Matrix, chunk: Chunk, values: Tensor) -> None:
        """Add a chunk of the result to the weights."""
        rows, *columns = matrix.shape[1:] if self.group["stacked"] else matrix.shape
        sizes = (math.prod(columns), rows) if self.group["transposed"] else (rows, math.prod(columns))
        lr = adjusted_lr(float(self.group["lr"]), self.group["adjust_lr_fn"], *sizes)
        weights = chunk.of(self.weights)
        weights.add_(values.to(weights.device), alpha=-lr)


def _begin(optimizer: Muon, parameter: Tensor, group: dict[str, Any]) -> _Update:
    """Update the momentum of a parameter, and let its weights decay."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        raise RuntimeError("Muon takes dense gradients only, leave parameters with sparse ones to others")
    weights, grad = own_tensor(parameter), own_gradient(parameter)
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = held_as(parameter, torch.zeros_like(grad, memory_format=torch.preserve_format))
    buffer = own_tensor(state["momentum_buffer"])
    buffer.lerp_(grad, 1 - group["momentum"])
    weights.mul_(1 - float(group["lr"]) * group["weight_decay"])
    return _Update(group, weights, grad, buffer)


def newton_schulz(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1, in its dtype."""
    a, b, c = coefficients
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)  # the largest singular value is at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def adjusted_lr(lr: float, function: str | None, outputs: int, inputs: int) -> float:
    """Return the learning rate for a matrix of this size; see ``Muon``."""
    if function == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(outputs, inputs)))
    if function == "spectral_unclamped":
        return lr * math.sqrt(outputs / inputs)
    return lr * math.sqrt(max(1, outputs / inputs))


def _check(settings: Mapping[str, Any], bucket_mb: float, where: str) -> None:
    """Raise ConfigError for a setting out of range."""
    coefficients = settings["ns_coefficients"]
    if len(coefficients) != 3:
        raise ConfigError(f"{where}.ns_coefficients: has {len(coefficients)} numbers, give three")
    if not all(map(math.isfinite, coefficients)):
        raise ConfigError(f"{where}.ns_coefficients: {coefficients} is not allowed, give finite numbers")
    for key in ("lr", "weight_decay", "eps"):
        if not 0 <= settings[key] < math.inf:
            raise ConfigError(f"{where}.{key}: {settings[key]} is not allowed, give 0 or more")
    if not 0 <= settings["momentum"] < 1:
        raise ConfigError(f"{where}.momentum: {settings['momentum']} is not allowed, give 0 to below 1")
    if not 1 <= settings["ns_steps"] <= _MOST_STEPS:
        raise ConfigError(f"{where}.ns_steps: {settings['ns_steps']} is not allowed, give 1 to {_MOST_STEPS}")
    if not 0 < bucket_mb < math.inf:
        raise ConfigError(f"{where}.bucket_mb: {bucket_mb} is not allowed, give a number above 0")
