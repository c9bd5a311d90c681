"""Trials of an optimizer on small parameters, before training: does it work on shards, with checkpoints, in this loop?

A strategy that shards a parameter gives the optimizer a part of it. Its class does not tell whether the result is the
same as for the whole parameter: a norm or a matrix product anywhere in its update makes a difference. So another
optimizer with the same settings updates small parameters, with as many dimensions as the model's, whole and in parts.
Some optimizers treat large matrices differently, so larger ones follow.
"""

from __future__ import annotations

import copy
import textwrap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from ..core.base.tensors import is_quantised, parts_of
from ..core.random.generators import torch_states
from ..core.torch_compat.torch_private import with_values
from .adapters import swaps_weights

Groups = list[dict[str, Any]]
Make = Callable[[Groups], Optimizer]

_UPDATES = 3
_MORE_UPDATES = 12
"""Where more updates cost no precision: some optimizers compute otherwise after their first five (RAdam's warm-up) or ten."""
_MANY_UPDATES = 40
"""Where both sides round alike: optimizers that find their step size, as Prodigy does, begin with steps that are too small to tell."""
_ROWS = 16
# The sizes after the first, small because some optimizers keep a square matrix per dimension, also of flattened ones.
_TAILS: dict[int, tuple[int, ...]] = {1: (), 2: (24,), 3: (6, 4), 4: (3, 3, 3)}
# Minimum of the first two sizes of large samples: Adafactor factors its state from 128 on, others earlier.
_LARGE_ROWS, _LARGE_COLUMNS = 130, 140
_SMALLEST_LR = 0.01  # below it, rounding hides what an update does
# Allowed differences, relative to the largest change of any element. Updates of parts round like updates of the whole;
# DTensor sums in another order, which costs optimizers that compute in bfloat16 some of its 8 bits.
_TOLERANCE, _TOLERANCE_SPREAD = 1e-3, 0.05


class TrialError(Exception):
    """The optimizer could not be constructed or stepped in a trial; the reason is on one line."""


@dataclass
class Trial:
    """The outcome of a few trial updates.

    Attributes:
        before: the parameters' values before the updates.
        values: the parameters' values after the updates.
        states: the optimizer state of each parameter.
        drew: whether random numbers of torch were drawn.
    """

    before: list[Tensor]
    values: list[Tensor]
    states: list[Mapping[str, Any]]
    drew: bool


@dataclass
class Samples:
    """Small parameters in the groups of an optimizer, one for each number of dimensions in a group.

    Attributes:
        settings: hyper-parameters of each group.
        shapes: shapes of each group's parameters.
        device: device of the parameters.
    """

    settings: list[dict[str, Any]]
    shapes: list[list[tuple[int, ...]]]
    device: torch.device
    _drawn: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    @classmethod
    def like(
        cls, optimizer: Optimizer, shape_of: Callable[[Tensor], Sequence[int]] | None = None, rows: int = _ROWS
    ) -> Samples:
        """Return samples for a built optimizer.

        Args:
            optimizer: the optimizer with the model's groups.
            shape_of: returns a parameter's shape, if it is not the tensor's ``shape``.
            rows: size of the first dimension.
        """
        settings = [{k: _fit(k, v) for k, v in group.items() if k not in _OWN} for group in optimizer.param_groups]
        dims = [
            sorted({len(shape_of(p) if shape_of else p.shape) for p in group["params"]})
            for group in optimizer.param_groups
        ]
        shapes = [[_shape(ndim, rows) for ndim in group] for group in dims]
        return cls(settings, shapes, optimizer.param_groups[0]["params"][0].device)

    def of(self, groups: Sequence[bool]) -> Samples:
        """Return those of some of the groups."""
        kept = [number for number, is_one in enumerate(groups) if is_one]
        return Samples([self.settings[n] for n in kept], [self.shapes[n] for n in kept], self.device)

    @property
    def larger(self) -> Samples | None:
        """Larger samples of those with two or more dimensions; None if there are none.

        Use them only after the small ones have passed: other optimizers may make square matrices of large dimensions.
        """
        shapes = [[_enlarged(*shape) for shape in group if len(shape) > 1] for group in self.shapes]
        return Samples(self.settings, shapes, self.device) if any(shapes) else None

    @property
    def doubled(self) -> Samples:
        """Two parameters of each shape."""
        return Samples(self.settings, [[*group, *group] for group in self.shapes], self.device)

    @property
    def singles(self) -> list[Samples]:
        """Each parameter alone, with the same values and gradients."""
        of_group = [(own, shape) for own, shapes in zip(self.settings, self.shapes, strict=True) for shape in shapes]
        pairs = zip(of_group, self.drawn(), strict=True)
        return [Samples([own], [[shape]], self.device, [drawn]) for (own, shape), drawn in pairs]

    def drawn(self) -> list[tuple[Tensor, list[Tensor]]]:
        """Return each parameter's values and the gradients of its updates; the second half has another scale."""
        if not self._drawn:
            generator = torch.Generator().manual_seed(0)
            for shape in (shape for group in self.shapes for shape in group):
                scale = torch.ones(shape).flatten()
                scale[scale.numel() // 2 :] = 8.0
                scale = scale.view(shape)
                draws = [torch.randn(shape, generator=generator) for _ in range(_UPDATES + 1)]
                value, *gradients = draws
                # Gradients have the inverse scale: norms of parts then differ much from the whole's.
                given = [(gradient / scale).to(self.device) for gradient in gradients]
                self._drawn.append(((value * scale).to(self.device), given))
        return self._drawn

    def run(
        self,
        make: Make,
        part: Callable[[Tensor], Tensor | None],
        updates: int = _UPDATES,
        resume_at: int | None = None,
    ) -> Trial:
        """Run updates with an optimizer that gets ``part`` of each parameter and gradient.

        Args:
            resume_at: before this update, another optimizer continues with the first one's ``state_dict``.

        Raises:
            TrialError: constructing or stepping the optimizer failed.
        """
        parameters: list[nn.Parameter | None] = []
        gradients: list[list[Tensor | None]] = []
        for value, given in self.drawn():
            own = part(value.clone())
            parameters.append(None if own is None else nn.Parameter(own))
            gradients.append([part(gradient.clone()) for gradient in given])
        present = [(p, grads) for p, grads in zip(parameters, gradients, strict=True) if p is not None]
        groups, taken = [], iter(parameters)
        for settings, shapes in zip(self.settings, self.shapes, strict=True):
            members = [parameter for parameter in (next(taken) for _ in shapes) if parameter is not None]
            if members:
                groups.append({**settings, "params": members})
        before = [parameter.detach().clone() for parameter, _ in present]
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"), torch.enable_grad():
            torch.manual_seed(0)
            seeded = torch_states(self.device)
            try:
                optimizer = make([dict(group) for group in groups])
                if swaps_weights(optimizer):
                    optimizer.train()  # type: ignore[attr-defined]
                for update in range(updates):
                    if update == resume_at:
                        saved = _as_saved(optimizer)
                        optimizer = make(groups)
                        optimizer.load_state_dict({**optimizer.state_dict(), **saved})
                    for parameter, grads in present:
                        parameter.grad = grads[update % _UPDATES]
                    optimizer.step()
            except Exception as error:  # third-party code may raise anything
                reason = textwrap.shorten(str(error), 200, placeholder=" ...") or "without a reason"
                raise TrialError(f"{type(error).__name__}: {reason}") from error
            with with_values():  # a plan has none, but for these
                drew = any(not torch.equal(state, seeded[name]) for name, state in torch_states(self.device).items())
        states = [optimizer.state.get(parameter, {}) for parameter, _ in present]
        return Trial(before, [parameter.detach() for parameter, _ in present], states, drew)


def _as_saved(optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint has of an optimizer: settings of its groups and state of its parameters, and nothing that is its own."""
    saved = copy.deepcopy(Optimizer.state_dict(optimizer))
    numbers = {number for group in saved["param_groups"] for number in group["params"]}
    return {**saved, "state": {key: kept for key, kept in saved["state"].items() if key in numbers}}


_OWN = ("params", "param_names", "part_sizes")  # sizes are the model's


def _fit(key: str, value: Any) -> Any:
    if key == "lr" and isinstance(value, (int, float)):
        return max(float(value), _SMALLEST_LR)
    return value.clone() if isinstance(value, Tensor) else value


def _shape(ndim: int, rows: int) -> tuple[int, ...]:
    if ndim == 0:
        return ()
    return (rows, *_TAILS.get(ndim, (2,) * (ndim - 1)))


def _enlarged(rows: int, _: int, *tail: int) -> tuple[int, ...]:
    return (rows * -(-_LARGE_ROWS // rows), _LARGE_COLUMNS, *tail)


def why_not_usable(make: Make, samples: Samples) -> str | None:
    """Return why an optimizer fits no loop or no checkpoint, and what to do; None if it fits or cannot be tried."""
    try:
        trial = samples.run(make, lambda tensor: tensor, updates=1)
    except TrialError as error:
        cause = error.__cause__
        if isinstance(cause, NotImplementedError) or "closure" in str(error).lower():
            return (
                f"cannot be stepped once per update as it is ({error}); override OptimWrapper.update_params, or choose "
                "another optimizer"
            )
        return None
    for state in trial.states:
        for key, kept in state.items():
            if _is_nested(kept):
                return f'keeps "{key}", a {type(kept).__name__} of tensors, which no checkpoint has; choose another optimizer'
    return None


def why_not_saved(optimizer: Optimizer) -> str | None:
    """Return why no checkpoint could hold the state of one of torchao's optimizers, and what to do; None if one can."""
    zeros = getattr(optimizer, "_subclass_zeros", None)
    if zeros is None:
        return None
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    sizes = [part.numel() for parameter in parameters for part in parts_of(parameter)]
    block: float = optimizer.block_size  # type: ignore[attr-defined]  # infinite for one that quantises nothing
    if not any(size >= _LEAST_QUANTISED and size % block == 0 for size in sizes):
        return None
    if not is_quantised(zeros(torch.zeros(_LEAST_QUANTISED), True, block)):
        return None
    return 'keeps quantised moments of large parameters, which no checkpoint has; choose "AdamW"'


_LEAST_QUANTISED = 4096  # elements; of smaller parameters torchao's optimizers keep ordinary moments


def _is_nested(value: Any) -> bool:
    """Return whether it is a container with tensors, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return any(isinstance(part, Tensor) or _is_nested(part) for part in value.values())
    return isinstance(value, (list, tuple, set, deque)) and any(isinstance(p, Tensor) or _is_nested(p) for p in value)


def resumes(make: Make, samples: Samples) -> bool:
    """Return whether a resumed optimizer computes the same as an uninterrupted one; True if it cannot be tried."""
    try:
        straight = samples.run(make, lambda tensor: tensor, _MORE_UPDATES)
        resumed = samples.run(make, lambda tensor: tensor, _MORE_UPDATES, resume_at=_UPDATES)
    except TrialError:
        return True
    changes = zip(resumed.values, straight.values, straight.before, strict=True)
    return all(_close(found, expected, expected - before, _TOLERANCE) for found, expected, before in changes)


def draws(make: Make, samples: Samples) -> bool:
    """Return whether an optimizer draws random numbers in its updates; False if it cannot be tried."""
    try:
        return samples.run(make, lambda tensor: tensor).drew
    except TrialError:
        return False


def updates_apart(make: Make, samples: Samples) -> bool:
    """Return whether an optimizer updates a parameter alone as it does beside others; True if it cannot be tried."""
    several = samples.doubled
    try:
        together = several.run(make, lambda tensor: tensor, _MANY_UPDATES)
        alone = [one.run(make, lambda tensor: tensor, _MANY_UPDATES).values[0] for one in several.singles]
    except TrialError:
        return True
    changes = zip(alone, together.values, together.before, strict=True)
    return all(_close(found, expected, expected - before, _TOLERANCE) for found, expected, before in changes)


def why_not_flat_shards(make: Make, samples: Samples) -> str | None:
    """Return why an optimizer cannot train shards of flattened parameters; None if it updates element by element.

    Its state is checked too: it must have one value per element, or not depend on the elements.
    """
    reason = _why_not_flat_shards(make, samples)
    if reason is None and (larger := samples.larger) is not None:
        return _why_not_flat_shards(make, larger)
    return reason


def _why_not_flat_shards(make: Make, samples: Samples) -> str | None:
    try:
        whole = samples.run(make, lambda tensor: tensor, _MORE_UPDATES)
    except TrialError as error:
        return f"could not be tried on small parameters, {error}"
    try:
        first = samples.run(make, lambda tensor: tensor.flatten()[: _cut(tensor)], _MORE_UPDATES)
        second = samples.run(
            make, lambda tensor: tensor.flatten()[_cut(tensor) :] if tensor.ndim else None, _MORE_UPDATES
        )
    except TrialError as error:
        return f"cannot update a shard of a flattened parameter, {error}"
    rest = iter(zip(second.values, second.states, strict=True))
    apart = False
    for i, value in enumerate(whole.values):
        shards = [(first.values[i], first.states[i]), *([next(rest)] if value.ndim else [])]
        reason = _state_by_element(value, whole.states[i], [state for _, state in shards])
        if reason is not None:
            return reason
        joined = torch.cat([shard for shard, _ in shards]).view(value.shape)
        apart |= not _close(joined, value, value - whole.before[i], _TOLERANCE)
    return "computes with a parameter as a whole, a norm of it, say, or a product of matrices" if apart else None


def _cut(tensor: Tensor) -> int:
    """Return the index at which to cut a flattened tensor: in the middle of a row."""
    return tensor.numel() // 2 + 3 if tensor.numel() > 8 else tensor.numel()


def _state_by_element(value: Tensor, whole: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> str | None:
    for key, kept in whole.items():
        found = [shard.get(key) for shard in shards]
        if isinstance(kept, Tensor) and kept.numel() > 1:
            if kept.shape != value.shape or any(not isinstance(part, Tensor) for part in found):
                return f'keeps "{key}" of shape {tuple(kept.shape)} of a parameter of shape {tuple(value.shape)}'
            parts = [part.flatten() for part in found if isinstance(part, Tensor)]
            if sum(part.numel() for part in parts) != kept.numel():
                return f'keeps "{key}" in another shape for each shard of a parameter'
            if not _close(torch.cat(parts).view(kept.shape), kept, kept, _TOLERANCE):
                return f'keeps "{key}", which it computes from a parameter as a whole'
        elif _is_nested(kept):
            return f'keeps "{key}", a {type(kept).__name__} of tensors'
        elif any(not _same(part, kept) for part in found) and value.ndim:
            return f'keeps "{key}", one number that it computes from a parameter as a whole'
    return None


def why_not_dtensors(
    make: Make, samples: Samples, spread: Callable[[Tensor], Tensor]
) -> tuple[str | None, dict[tuple[int, str], tuple[Placement, ...]]]:
    """Return why an optimizer cannot train DTensors; None if the result is that of whole tensors.

    All processes of the mesh must call it. The reason may differ between them; the caller must compare.

    Args:
        spread: makes a DTensor of a tensor that every process has.

    Returns:
        The reason, and the placements of state that is a DTensor, by the parameter's number of dimensions and the
        state's key.
    """
    reason, layouts = _why_not_dtensors(make, samples, spread)
    if reason is None and (larger := samples.larger) is not None:
        reason, of_larger = _why_not_dtensors(make, larger, spread)
        layouts |= of_larger
    if reason is None:
        try:  # what begins later, as the step of Lookahead that follows five others
            samples.run(make, spread, _MORE_UPDATES)
        except TrialError as error:
            reason = f"cannot update sharded parameters, {error}"
    return reason, layouts


def _why_not_dtensors(
    make: Make, samples: Samples, spread: Callable[[Tensor], Tensor]
) -> tuple[str | None, dict[tuple[int, str], tuple[Placement, ...]]]:
    try:
        whole = samples.run(make, lambda tensor: tensor)
    except TrialError as error:
        return f"could not be tried on small parameters, {error}", {}
    try:
        parts = samples.run(make, spread)
    except TrialError as error:
        return f"cannot update sharded parameters, {error}", {}
    layouts = {
        (value.ndim, key): tuple(kept.placements)
        for value, state in zip(whole.values, parts.states, strict=True)
        for key, kept in state.items()
        if isinstance(kept, DTensor)
    }
    for (_, key), placements in layouts.items():
        if any(placement.is_partial() for placement in placements):
            return f'keeps "{key}" as partial sums, which no checkpoint can contain', layouts
    values = [_gathered(value) for value in parts.values]
    states = [{key: _gathered(kept) for key, kept in state.items()} for state in parts.states]
    for i, value in enumerate(whole.values):
        if not _close(values[i], value, value - whole.before[i], _TOLERANCE_SPREAD):
            return "updates sharded parameters differently from whole ones", layouts
        for key, kept in whole.states[i].items():
            if _is_nested(kept):
                return f'keeps "{key}", a {type(kept).__name__} of tensors', layouts
            other = states[i].get(key)
            if isinstance(kept, Tensor) and isinstance(other, Tensor) and kept.numel() > 1:
                if kept.shape != other.shape:
                    return (
                        f'keeps "{key}" of shape {tuple(other.shape)} on each process, not {tuple(kept.shape)}',
                        layouts,
                    )
                if not _close(other, kept, kept, _TOLERANCE_SPREAD):
                    return f'keeps another "{key}" of sharded parameters than of whole ones', layouts
            elif not _same(other, kept, _TOLERANCE_SPREAD):
                return f'keeps another "{key}" of sharded parameters than of whole ones', layouts
    return None, layouts


def _gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _close(found: Tensor, expected: Tensor, change: Tensor, tolerance: float) -> bool:
    """Return whether two tensors are equal within a share of the largest change plus float32 rounding."""
    if not change.is_floating_point():
        return torch.equal(found, expected)
    allowed = tolerance * change.abs().max() + 1e-6 * expected.abs().max()
    difference = (found - expected).abs().max()
    return bool(difference <= allowed)


def _same(found: Any, expected: Any, tolerance: float = _TOLERANCE) -> bool:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return _close(found.reshape(()).double(), expected.reshape(()).double(), expected.double(), tolerance)
    if isinstance(expected, float) and isinstance(found, float):
        return abs(found - expected) <= tolerance * abs(expected)
    return type(found) is type(expected) and bool(found == expected)
