"""Write your own strategy: all gradients of an update are sent as one message, after backward.

    torchrun --nproc-per-node 2 examples/custom_strategy.py

There is no wrapper around the model: nothing is sent while micro-batches accumulate, and a slow network gets one large
message in place of many. A package that provides a strategy lists it in its pyproject.toml:

    [project.entry-points."flextrain.strategies"]
    OneMessageStrategy = "my_package.my_module:OneMessageStrategy"
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from flextrain import STRATEGIES, FlexibleRunner, OptimWrapper, Strategy


@STRATEGIES.register_module()
class OneMessageStrategy(Strategy):
    """The whole model in every process, gradients averaged in one message per update."""

    def setup(self, model: nn.Module, optim: OptimWrapper | None = None) -> tuple[nn.Module, OptimWrapper | None]:
        model, optim = super().setup(model, optim)
        if optim is not None and self.topology.data.count > 1:
            for wrapper in optim.wrappers.values():
                wrapper.register_step_pre_hook(self._average_gradients)
        return model, optim

    def _average_gradients(self, optim: OptimWrapper) -> None:
        parameters = [p for group in optim.param_groups for p in group["params"] if p.requires_grad]
        # Messages have equal lengths on all processes. What none of them used keeps no gradient: weight decay would move it.
        sent = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        is_used = [p.new_tensor([p.grad is not None]) for p in parameters]
        message = torch.cat([tensor.flatten() for tensor in (*sent, *is_used)])
        dist.all_reduce(message, group=self.topology.data.group)
        *parts, used = (message / self.topology.data.count).split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, part, share in zip(parameters, parts, used.tolist(), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if share else None


if __name__ == "__main__":
    from train_classifier import Accuracy, Classifier, dataloader, digits, digits_net

    train_set, val_set = digits()
    FlexibleRunner(
        model=Classifier(digits_net()),
        work_dir="work_dirs/custom_strategy",
        strategy=dict(type="OneMessageStrategy"),
        train_dataloader=dataloader(train_set, batch_size=32, num_workers=0, shuffle=True),
        optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=2e-3)),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        val_dataloader=dataloader(val_set, batch_size=32, num_workers=0, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(checkpoint=dict(overwrite=True)),
    ).train()
