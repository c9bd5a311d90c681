"""A training loop of one's own: phases of easy and hard data, harder when the model copes.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py --strategy fsdp
    torchrun --nproc-per-node 2 examples/own_loop.py --strategy zero2

The loop alternates phases of easy and of hard data: in every second phase, it hides a part of each handwritten digit, and more of it as
soon as the model copes. The level is saved in checkpoints: a resumed run continues in the middle of a phase.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from train_classifier import Accuracy, Classifier, dataloader, digits, digits_net

from flextrain import LOOPS, FlexibleRunner
from flextrain.runner import IterBasedTrainLoop


@LOOPS.register_module()
class CurriculumLoop(IterBasedTrainLoop):
    """Phases of some updates each, of easy and hard data in turn. The level rises after a hard phase with a low loss.

    Args:
        phase: updates of a phase.
        threshold: the level rises if the loss of a hard phase's last update is below it.
        levels: number of levels.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: Any,
        max_iters: int,
        phase: int = 10,
        threshold: float = 1.0,
        levels: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(runner, dataloader, max_iters, **options)
        self.phase, self.threshold, self.levels = phase, threshold, levels
        self.level = 1

    def run_iter(self, idx: int, data_batch: Any) -> None:
        runner = self.runner
        # What depends on the number of the update alone needs no state.
        is_hard = self.iter // self.phase % 2 == 1
        if is_hard:
            is_window = isinstance(data_batch[0], list)  # with accumulation, a list of batches
            data_batch = [self.hide(batch) for batch in data_batch] if is_window else self.hide(data_batch)
        runner.call_hook("before_train_iter", batch_idx=idx, data_batch=data_batch)
        outputs = runner.model.train_step(data_batch, optim_wrapper=runner.optim_wrapper)
        # Before the hooks, because one of them may save a checkpoint, which has to hold the new level.
        if is_hard and (self.iter + 1) % self.phase == 0:
            self.end_phase(outputs["loss"])
        outputs["level"] = torch.tensor(float(self.level if is_hard else 0))
        runner.call_hook("after_train_iter", batch_idx=idx, data_batch=data_batch, outputs=outputs)

    def end_phase(self, loss: Tensor) -> None:
        """Decide by the mean over processes, so that all decide the same; the host waits for the device once in a phase."""
        data = self.runner.strategy.topology.data
        if float(data.sum(loss.detach().clone())) / data.count < self.threshold:
            self.level = min(self.level + 1, self.levels)

    def hide(self, batch: list[Tensor]) -> list[Tensor]:
        """Hide as many columns as the level says; which ones depends on the picture alone, not on who has read it."""
        images, labels = batch
        start = images.flatten(1).sum(1).long() % images.shape[-1]
        columns = (torch.arange(images.shape[-1]) - start[:, None]) % images.shape[-1]
        return [images.masked_fill((columns < self.level)[:, None, None, :], 0.0), labels]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "level": self.level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.level = state["level"]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", help="ddp, fsdp, zero2, zero3 and so on; default: one device or DDP")
    parser.add_argument("--max-iters", type=int, default=200)
    parser.add_argument("--phase", type=int, default=10, help="updates of a phase")
    parser.add_argument("--threshold", type=float, default=1.0, help="loss below which the data get harder")
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--work-dir", default="work_dirs/own_loop")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work-dir")
    return parser.parse_args(arguments)


def make_runner(arguments: argparse.Namespace) -> FlexibleRunner:
    train_set, val_set = digits()
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=50, max_keep_ckpts=2, overwrite=True)
    return FlexibleRunner(
        model=lambda: Classifier(digits_net()),
        work_dir=arguments.work_dir,
        strategy=arguments.strategy,
        train_dataloader=dataloader(train_set, arguments.batch_size, num_workers=0, shuffle=True),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3), accumulative_counts=arguments.accumulate),
        param_scheduler=dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=20),
        train_cfg=dict(
            type="CurriculumLoop",
            max_iters=arguments.max_iters,
            val_interval=50,
            phase=arguments.phase,
            threshold=arguments.threshold,
        ),
        val_dataloader=dataloader(val_set, arguments.batch_size, num_workers=0, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(checkpoint=checkpoint),
        randomness=dict(seed=0),
        resume=arguments.resume,
    )


if __name__ == "__main__":
    make_runner(parse_arguments()).train()
