"""What DeepSpeed leaves undone before an update, from the inside of its optimizers; written for and tested with 0.19.8.

A parameter that an update does not use keeps, where a buffer for its gradient outlives the update, the gradient of an
earlier one: at stage 3, and at stages 1 and 2 with the optimizer's state in host memory. If only a later micro-batch of an
update uses it, its gradient is added to the earlier one. Elsewhere DeepSpeed gives such parameters zeros, and so do these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from . import swapping


class BeforeUpdate(Protocol):
    """What an update of DeepSpeed's engine needs done before."""

    def before(self) -> None:
        """Prepare the update; called between the last backward and the engine's ``step``."""


def before_update(engine: Any) -> BeforeUpdate | None:
    """Return what an engine that trains needs before its updates; None if nothing. To be called once for an engine."""
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        swapping.keep_gradients_in_memory(engine)
        return _ShardedUpdate(engine.optimizer)
    if getattr(engine.optimizer, "cpu_offload", False):
        return _OffloadedUpdate(engine.optimizer)
    return None


class _ShardedUpdate:
    """Of stage 3, whose shards of gradients are kept from one update to the next.

    Args:
        optimizer: DeepSpeed's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._gradients: dict[int, Tensor] = getattr(
            optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}
        )
        parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
        self._swapped = [] if swapping.param_swapper(parameters) is None else parameters
        self._add = optimizer.partition_grads
        optimizer.partition_grads = self._add_to_this_update

    def before(self) -> None:
        """Give parameters that were not used zero gradients, and drop shards that were read and not used."""
        # Otherwise they would get those of an earlier update, or what a buffer held before: another sub-group's state.
        used = self._optimizer._offload_boundary_param_ids
        for number in self._gradients.keys() - used:
            self._gradients[number].zero_()
            used.add(number)
        swapping.drop_buffers(self._swapped)

    def _add_to_this_update(self, parameters: Sequence[Any], gradients: Sequence[Tensor]) -> Any:
        if self._optimizer.micro_step_id > 0:  # the first micro-batch overwrites
            for number in {parameter.ds_id for parameter in parameters} - self._optimizer._offload_boundary_param_ids:
                self._gradients[number].zero_()
        return self._add(parameters, gradients)


class _OffloadedUpdate:
    """Of stages 1 and 2 whose optimizer state, and the float32 gradients for it, are in host memory.

    Args:
        optimizer: DeepSpeed's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters: dict[int, Any] = {
            optimizer.get_param_id(parameter): parameter
            for group in optimizer.params_in_partition
            for parameter in group
        }
        self._add = optimizer.async_accumulate_grad_in_cpu_via_gpu
        optimizer.async_accumulate_grad_in_cpu_via_gpu = self._add_to_this_update

    def before(self) -> None:
        """Give parameters that were not used zero gradients."""
        for number in self._unused():
            group, _, offset, numel = self._optimizer.grad_position[number]
            flat = self._optimizer.single_partition_of_fp32_groups[group].grad
            flat.view(-1).narrow(0, offset, numel).zero_()

    def _unused(self) -> set[int]:
        if self._optimizer.partition_gradients:
            used: set[int] = self._optimizer._offload_accumulated_param_ids
            return self._parameters.keys() - used
        # Stage 1 leaves gradients in the parameters until the engine's step.
        gradient_of = self._optimizer.get_gradient_for_reduction
        return {number for number, parameter in self._parameters.items() if gradient_of(parameter) is None}

    def _add_to_this_update(self, parameter: Any) -> None:
        number, optimizer = self._optimizer.get_param_id(parameter), self._optimizer
        kept = optimizer.accumulated_grads_in_cpu.get(number)
        if (
            kept is not None
            and optimizer.micro_step_id > 0  # the first micro-batch overwrites
            and number not in optimizer._offload_accumulated_param_ids
        ):
            kept.zero_()
        self._add(parameter)
