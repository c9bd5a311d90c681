"""Comparison of the first batch with one process that has all positions: what cannot be cut is found before training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ....core.comm import collectives as dist
from ....core.errors import StrategyError
from ....core.torch_private import tree_flatten
from ...steps import EvalStep, TrainStep
from ..experts.token_dispatch import Dispatch
from ..first_batch import differentiated, differing, trying
from .batches import CutBatch, SequenceBatches
from .interception import Interception
from .mixed_positions import MixedPositions
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
    """Runs some positions of the first batch on every process alone and on all together, in the mode that the model is in.

    In training the loss and the gradient of every parameter are compared. Before that, positions are followed through the
    operations of forward: what combines them beside attention is found however little it changes, see MixedPositions.
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
        forwards = (vars(module).get("forward") for module in model.modules())
        # One that is recomputed in backward stands in a partial.
        own = (forward.args[0] if isinstance(forward, functools.partial) else forward for forward in forwards)
        self._dispatches = [each for each in own if isinstance(each, Dispatch)]

    def of_training(self, batch: CutBatch, step: TrainStep) -> None:
        """Compare the loss and its gradients; a collective of all processes.

        Raises:
            StrategyError: they differ, or the model has what cannot be cut.
        """
        whole = self._excerpt(batch)
        cut = self._batches.cut(whole)
        self._interception.losses = []
        self._follow(cut, lambda: step.forward(cut)[0])
        losses, self._interception.losses = self._interception.losses, None
        self._check_calls()
        if cut.get("labels") is not None and any(a.shifts and not a.losses for a in self._adapted):
            raise StrategyError(
                "model: its loss_function is not called for the batch's labels, which cp has shifted for it; compute the loss by it, "
                "or give targets of each position under another key, named in strategy.cp_keys"
            )
        if not self._adapted:
            self._check_losses(losses, cut)
        self._raise_found()
        factor = cut.factor
        if self._is_weighed:
            weights = torch.tensor([cut.weight], dtype=torch.float64)
            torch.distributed.all_reduce(weights, group=self._mesh.get_group())
            factor = cut.weight * self._mesh.size() / float(weights) if float(weights) else 1.0
        with self._uncut(), trying(self._model):
            expected = step.forward(whole)[0]
            wanted = differentiated(self._model, expected, self._mesh.get_group())
        with self._together(cut), trying(self._model):
            loss = step.forward(cut)[0]
            loss = loss * factor if factor else loss.nan_to_num() * 0.0
            gradients = differentiated(self._model, loss, self._mesh.get_group())
        both = torch.stack([loss.detach(), expected.detach()]).double()
        torch.distributed.all_reduce(both, group=self._mesh.get_group())
        value, right = (both / self._mesh.size()).tolist()
        self._check_difference(abs(value - right), abs(right), f"its loss is {value:.6g} and not {right:.6g}")
        found = None if right != right else differing(gradients, wanted, self._attention.dtype, self._attention.device)
        if found is not None:
            raise StrategyError(
                f"model.{found[0]}: over strategy.cp={self._mesh.size()} processes its gradient differs by {found[1]:.1e} of its size "
                f"from that of one process; {_CAUSE}"
            )

    def of_evaluation(self, batch: CutBatch, step: EvalStep) -> None:
        """Compare outputs, see ``of_training``."""
        whole = self._excerpt(batch)
        cut = self._batches.cut(whole)
        with torch.no_grad():
            self._follow(cut, lambda: step.predict(cut))
        self._check_calls()
        self._raise_found()
        with torch.no_grad(), self._uncut(), trying(self._model):
            expected = step.predict(whole)
        with torch.no_grad(), self._together(cut), trying(self._model):
            found = gather_outputs(step.predict(cut), cut, self._mesh)
        worst = (0.0, 0.0)
        for mine, other in zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=False):
            if isinstance(mine, Tensor) and isinstance(other, Tensor) and mine.is_floating_point():
                pair = (mine.double() - other.double()).norm().item(), other.double().norm().item()
                worst = max(worst, pair, key=lambda of: of[0] / (of[1] or 1.0))
        difference, scale = dist.all_gather_object(worst, self._mesh.get_group())[0]
        self._check_difference(difference, scale, f"its outputs differ by {difference / (scale or 1.0):.1e}")

    def _excerpt(self, batch: CutBatch) -> dict[str, Any]:
        return self._batches.excerpt(batch.whole, POSITIONS * self._mesh.size())

    def _follow(self, cut: CutBatch, run: Callable[[], Any]) -> None:
        self._following = MixedPositions(self._model, self._may_cut)
        for key, dim in cut.dims.items():
            self._following.mark(cut[key], dim)
        self._attention.is_apart = True
        try:
            with self._together(cut), trying(self._model):
                with self._following.watching():
                    result = run()
                if torch.is_grad_enabled():
                    differentiated(self._model, result * 0.0)  # FSDP waits for it
        finally:
            self._attention.is_apart = False

    def _may_cut(self) -> bool:
        """Whether what runs may take some positions: a loss that shifts labels, and the sending of tokens to experts."""
        return any(adapted.is_in_loss for adapted in self._adapted) or any(each.is_running for each in self._dispatches)

    def _raise_found(self) -> None:
        """Raise on all processes, whichever has found something."""
        found = next(filter(None, dist.all_gather_object(self._following.found)), None)
        if found is not None:
            raise StrategyError(
                f"{found}; with strategy.cp={self._mesh.size()} only attention by scaled_dot_product_attention may, beside the sum or "
                "mean that is the loss; use dp_shard instead"
            )

    @contextmanager
    def _together(self, cut: CutBatch) -> Iterator[None]:
        self._attention.length = cut.shards.length
        with self._interception.everywhere():
            yield

    @contextmanager
    def _uncut(self) -> Iterator[None]:
        for adapted in self._adapted:
            adapted.cut(False)
        try:
            yield
        finally:
            for adapted in self._adapted:
                adapted.cut(True)

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


def _short(value: Any) -> Any:
    return "..." if isinstance(value, (Tensor, Mapping)) else value
