"""Comparison of the first batch with one process that has all positions: what cannot be cut is found before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ....core.comm import collectives as dist
from ....core.errors import StrategyError
from ....core.random_state import kept_random_state
from ....core.torch_private import tree_flatten, without_compiling
from ...steps import EvalStep, TrainStep
from .batches import CutBatch, SequenceBatches
from .interception import Interception
from .of_transformers import TransformersModel
from .outputs import gather_outputs
from .sequence_attention import SequenceAttention

POSITIONS = 16
"""How many positions of each sequence a process has in the comparison, at most."""
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5}
"""By the dtype of attention; transformers computes losses and norms in float32. Others have few digits."""
_CAUSE = (
    "something in it sees the positions of one process only: attention that is not scaled_dot_product_attention, positions that "
    "it counts itself, a convolution, or a loss that is no mean over the targets that are not -100"
)


class OneProcessComparison:
    """Runs forward of some positions, in evaluation mode, on every process alone and on all together.

    A loss of a model that was just initialised hardly depends on attention. Therefore it is compared also with attention
    that is sharper than the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: SequenceBatches,
        attention: SequenceAttention,
        adapted: Sequence[TransformersModel],
        interception: Interception,
        mesh: DeviceMesh,
        is_weighed: bool,
    ) -> None:
        self._model, self._batches, self._attention = model, batches, attention
        self._adapted, self._interception, self._mesh, self._is_weighed = adapted, interception, mesh, is_weighed

    def of_training(self, batch: CutBatch, step: TrainStep) -> None:
        """Compare the loss; a collective of all processes.

        Raises:
            StrategyError: it differs, or the model has what cannot be cut.
        """
        whole = self._excerpt(batch)
        cut, alone = self._batches.cut(whole), self._batches.cut(whole, alone=True)
        with self._evaluating():
            expected = self._unchanged(lambda: step.forward(whole)[0])
            self._interception.losses = []
            self._attention.length = cut.shards.length
            with self._interception:
                loss = step.forward(cut)[0]
                losses, self._interception.losses = self._interception.losses, None
                sharp = [self._sharp(step, one) for one in (cut, alone)]
        self._check_calls()
        if cut.get("labels") is not None and any(a.shifts and not a.losses for a in self._adapted):
            raise StrategyError(
                "model: its loss_function is not called for the batch's labels, which cp has shifted for it; compute the loss by it, "
                "or give targets of each position under another key, named in strategy.cp_keys"
            )
        if not self._adapted:
            self._check_losses(losses, cut)
        factor = cut.factor
        if self._is_weighed:
            weights = torch.tensor([cut.weight], dtype=torch.float64)
            torch.distributed.all_reduce(weights, group=self._mesh.get_group())
            factor = cut.weight * self._mesh.size() / float(weights) if float(weights) else 1.0
        found = torch.stack([loss, sharp[0]]) * factor
        both = torch.stack(
            [torch.zeros_like(found) if factor == 0 else found, torch.stack([expected, sharp[1]])]
        ).double()
        torch.distributed.all_reduce(both, group=self._mesh.get_group())
        for value, wanted in (both / self._mesh.size()).t().tolist():
            self._check_difference(abs(value - wanted), abs(wanted), f"its loss is {value:.6g} and not {wanted:.6g}")

    def of_evaluation(self, batch: CutBatch, step: EvalStep) -> None:
        """Compare outputs, see ``of_training``."""
        whole = self._excerpt(batch)
        cut = self._batches.cut(whole)
        with self._evaluating():
            expected = self._unchanged(lambda: step.predict(whole))
            self._attention.length = cut.shards.length
            with self._interception:
                found = gather_outputs(step.predict(cut), cut, self._mesh)
        self._check_calls()
        worst = (0.0, 0.0)
        for mine, other in zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=False):
            if isinstance(mine, Tensor) and isinstance(other, Tensor) and mine.is_floating_point():
                pair = (mine.double() - other.double()).norm().item(), other.double().norm().item()
                worst = max(worst, pair, key=lambda of: of[0] / (of[1] or 1.0))
        difference, scale = dist.all_gather_object(worst, self._mesh.get_group())[0]
        self._check_difference(difference, scale, f"its outputs differ by {difference / (scale or 1.0):.1e}")

    def _excerpt(self, batch: CutBatch) -> dict[str, Any]:
        return self._batches.excerpt(batch.whole, POSITIONS * self._mesh.size())

    def _sharp(self, step: TrainStep, batch: CutBatch) -> Tensor:
        self._attention.is_sharp, self._attention.is_alone = True, batch.shards.count == 1
        try:
            return step.forward(batch)[0]
        finally:
            self._attention.is_sharp = self._attention.is_alone = False

    def _unchanged(self, run: Callable[[], Any]) -> Any:
        for adapted in self._adapted:
            adapted.cut(False)
        try:
            return run()
        finally:
            for adapted in self._adapted:
                adapted.cut(True)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, and no trace of it afterwards."""
        training = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            device = next(self._model.parameters()).device
            with torch.no_grad(), kept_random_state(device), without_compiling(), _without_zeros(self._model):
                yield
        finally:
            for module, mode in training.items():
                module.training = mode

    def _check_calls(self) -> None:
        if not self._attention.calls:
            raise StrategyError(
                "model: calls neither scaled_dot_product_attention nor transformers' attention interface, strategy.cp needs one of "
                "them; use dp_shard instead"
            )

    def _check_losses(self, losses: list[tuple[str, dict[str, Any]]] | None, cut: CutBatch) -> None:
        own, count = cut.shards.length // cut.shards.count, cut.size or 1
        for name, given in losses or ():
            target = given["target"]
            if not target.is_floating_point() and target.numel() == count * (own - 1):
                raise StrategyError(
                    f"model: its {name} has {own - 1} targets of {own} positions, as if it shifted labels itself; with "
                    "strategy.cp targets are shifted in the batch"
                )
            if self._is_weighed:
                continue
            for key, usual in (("ignore_index", -100), ("reduction", "mean"), ("weight", None)):
                if given.get(key, usual) is not usual and given.get(key, usual) != usual:
                    raise StrategyError(
                        f"model: its {name} has {key}={_short(given[key])}, so that strategy.cp cannot tell how many targets "
                        "count; define loss_weight(data) in the model"
                    )

    def _check_difference(self, difference: float, scale: float, what: str) -> None:
        if scale != scale:  # a mean over nothing
            return
        tolerance = _TOLERANCE.get(self._attention.dtype, 3e-2)
        if torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32:
            tolerance = tolerance if self._attention.device.type == "cpu" else max(tolerance, 2e-3)
        if not difference <= tolerance * max(scale, 1e-3):  # also if it is NaN
            raise StrategyError(
                f"model: over strategy.cp={self._mesh.size()} processes {what} of one process; {_CAUSE}"
            )


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Context in which parameters that are 0 are not: what they multiply would show in no result.

    Positions, gates and last layers are often initialised so. Replicas of a shard get the same values.
    """
    own = (parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters())
    zeros = [local for local in own if local.is_floating_point() and not local.any()]
    for local in zeros:
        local.copy_(torch.arange(local.numel(), device=local.device).cos().view(local.shape) / 16)
    try:
        yield
    finally:
        for local in zeros:
            local.zero_()


def _short(value: Any) -> Any:
    return "..." if isinstance(value, (Tensor, Mapping)) else value
