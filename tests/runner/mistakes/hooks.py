"""Hooks: never due, with the meaning turned round, or with state that no checkpoint can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from flextrain.runner.hooks import Hook

from .parts import Net, OldState, Row, advises, warns


def saving(**options: Any) -> dict[str, Any]:
    return {"default_hooks": dict(checkpoint=options)}


def hook(*hooks: Any) -> dict[str, Any]:
    return {"custom_hooks": list(hooks)}


class FewArguments(Hook):
    def after_train_iter(self, runner: Any) -> None:  # type: ignore[override]
        ...


class Misspelled(Hook):
    def after_train_itr(self, runner: Any) -> None: ...


class LateState(Hook):
    """Has a state only after the first iteration."""

    seen: int

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen = batch_idx

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


class NewHead(Hook):
    """Replaces a layer at the beginning of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == self.epoch:
            runner.strategy.module.net = torch.nn.Linear(3, 2)


class NewWeight(Hook):
    def before_run(self, runner: Any) -> None:
        runner.strategy.module.net.weight = torch.nn.Parameter(torch.zeros(2, 3))


class Thaw(Hook):
    def before_train_epoch(self, runner: Any) -> None:
        runner.strategy.module.net.bias.requires_grad_(runner.epoch == 1)


def nobodys(config: dict[str, Any]) -> None:
    config["model"] = model = Net()
    model.net.bias.requires_grad_(False)
    config |= dict(optim_wrapper=dict(optimizer=torch.optim.SGD([model.net.weight], lr=0.1)), custom_hooks=[Thaw()])


class Adds(Hook):
    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter == 1:
            runner.strategy.module.more = nn.Parameter(torch.zeros(2))


class Accumulates(Hook):
    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        runner.optim_wrapper.accumulate = 2


class NoHook:
    def after_train_iter(self, runner: Any) -> None: ...


def a_file(work_dir: Path) -> None:
    (work_dir.parent / "taken").write_text("")


ROWS = [
    warns("checkpoints after the end", saving(interval=50), "CheckpointHook.interval: 50 is beyond the 2 epochs of training, one checkpoint is saved, at the end"),
    warns("checkpoints after the end, and none there", saving(interval=50, save_last=False), "CheckpointHook.interval: 50 is beyond the 2 epochs of training, no checkpoint is saved"),
    warns("checkpoints by iteration after the end", saving(interval=1000, by_epoch=False), "CheckpointHook.interval: 1000 is beyond the 6 iterations of training"),
    warns("checkpoints begin after the end", saving(interval=1, save_begin=50), "CheckpointHook.save_begin: 50 is beyond the 2 epochs"),
    warns("checkpoints by epoch in training by iterations", {"train_cfg": dict(by_epoch=False, max_iters=12), **saving(interval=1)}, "CheckpointHook.by_epoch: True counts epochs, of which training by iterations has only one, so one checkpoint is saved, at its end"),
    Row("kept checkpoints 0", saving(interval=1, max_keep_ckpts=0), "default_hooks.checkpoint.max_keep_ckpts: 0 is not allowed, give 1 or more, or -1 for all"),
    Row("names without a number", saving(interval=1, filename_tmpl="model"), "default_hooks.checkpoint.filename_tmpl"),
    Row("names in folders", saving(interval=1, filename_tmpl="a/{}"), "default_hooks.checkpoint.filename_tmpl"),
    Row("a file as the folder of checkpoints", lambda config: config.update(default_hooks=dict(checkpoint=dict(out_dir=str(Path(config["work_dir"]).parent / "taken")))), "CheckpointHook.out_dir", prepare=a_file),
    Row("a back end of MMEngine", saving(interval=1, backend_args=dict(backend="petrel")), "default_hooks.checkpoint.backend_args"),
    Row("the whole hook as True", {"default_hooks": dict(checkpoint=True)}, "default_hooks.checkpoint: True is not allowed"),
    Row("interval as a list", {"default_hooks": dict(logger=dict(interval=[10]))}, "default_hooks.logger.interval: [10] is not allowed"),
    Row("averages begin after the end", hook(dict(type="EMAHook", begin_epoch=10)), "EMAHook.begin_epoch: 10 is not allowed, training ends at 2"),
    Row("averages begin after the last iteration", hook(dict(type="EMAHook", begin_iter=1000)), "EMAHook.begin_iter: 1000 is not allowed, training ends at 6"),
    warns("averages with PyTorch's decay", hook(dict(type="EMAHook", momentum=0.9999)), "EMAHook.momentum: 0.9999 is the share of the newest weights"),
    Row("averages without memory", hook(dict(type="EMAHook", momentum=1.0)), "custom_hooks[0].momentum: 1.0 is not allowed"),
    Row("averages with decay", hook(dict(type="EMAHook", decay=0.999)), "custom_hooks[0].decay: unknown key"),
    Row("profile beyond the end", hook(dict(type="ProfilerHook", by_epoch=False, profile_times=100)), "profile_times: 100 is not allowed, training has 6"),
    Row("a method that no point calls", hook(Misspelled()), "after_train_itr"),
    Row("a hook without the base class", hook(NoHook()), "custom_hooks[0]"),
    Row("a hook's class without the base class", hook(dict(type=NoHook)), "custom_hooks[0].type: NoHook is no Hook"),
    advises("a hook point with too few arguments", hook(FewArguments()), "FewArguments.after_train_iter"),
    Row("a hook's state is a set", hook(OldState({1, 2})), "hook.OldState/seen"),
    Row("a hook's state has numbers as keys", hook(OldState({1: 2})), "hook.OldState/seen"),
    Row("a hook's state is an object", hook(OldState(object())), "hook.OldState/seen"),
    Row("a hook's state is a tensor of a strange dtype", hook(OldState(torch.ones(2).to(torch.float8_e4m3fnuz))), "hook.OldState/seen: tensors of torch.float8_e4m3fnuz cannot be saved"),
    warns("a hook's state that begins with training", hook(LateState()), "LateState.state_dict: fails before training, AttributeError"),
    Row("unknown hook of MMEngine's projects", hook(dict(type="NumClassCheckHook")), 'custom_hooks[0].type: "NumClassCheckHook" is no known hook'),
    Row("a layer that is replaced in training", hook(NewHead(1)), "model: net.weight is not the parameter that the optimizer has", late=True),
    Row("a weight that is replaced after set-up", hook(NewWeight()), "model: net.weight is not the parameter that the optimizer has"),
    Row("a layer that is thawed and that no optimizer has", nobodys, "model: net.bias is trainable now, and no optimizer has it", late=True),
    warns("a parameter that is added in training", hook(Adds()), "model: more was added when training was set up already, and no optimizer of the run has it"),
    Row("a window that grows in training", hook(Accumulates()), "optim_wrapper.accumulate: 1 cannot become 2 now", late=True),
    Row("priority as a float", hook(dict(type="EMAHook", priority=0.5)), "custom_hooks[0].priority"),
]  # fmt: skip
