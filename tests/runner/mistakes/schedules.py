"""Schedules and intervals that do not fit the run."""

from __future__ import annotations

from typing import Any

import torch

from .parts import Row, warns


def schedule(**options: Any) -> dict[str, Any]:
    return {"param_scheduler": options}


def by_iteration(max_iters: int, **options: Any) -> dict[str, Any]:
    return {"train_cfg": dict(by_epoch=False, max_iters=max_iters, **options)}


ROWS = [
    warns("warmup longer than the run", schedule(type="LinearLR", by_epoch=False, end=500), "param_scheduler.end: 500 is beyond the 6 iterations"),
    warns("warmup of more epochs", schedule(type="LinearLR", end=5), "param_scheduler.end: 5 is beyond the 2 epochs of training, lr never reaches end_factor=1"),
    warns("converted warmup", schedule(type="LinearLR", end=5, convert_to_iter_based=True), "param_scheduler.end: 15 is beyond the 6 iterations"),
    warns("second of two", {"param_scheduler": [dict(type="LinearLR", end=1), dict(type="PolyLR", begin=1, end=9)]}, "param_scheduler[1].end: 9 is beyond the 2 epochs of training, lr never reaches eta_min"),
    warns("cosine within the warmup", {"param_scheduler": [dict(type="LinearLR", by_epoch=False, end=5), dict(type="CosineAnnealingLR", by_epoch=False, begin=2, end=6)]}, "param_scheduler[1].begin: 2 is before the warm-up in [0] has ended, both act from there to 5; give 5"),
    warns("a window of one step", {**schedule(type="PolyLR"), "train_cfg": dict(max_epochs=1)}, "param_scheduler.end: 1 makes a window of one step, in which the schedule changes nothing"),
    warns("cosine longer than the run", schedule(type="CosineAnnealingLR", T_max=10), "param_scheduler.T_max: 10 is more than the 2 epochs"),
    warns("cosine rises again", {**schedule(type="CosineAnnealingLR", T_max=2), "train_cfg": dict(max_epochs=5)}, "param_scheduler.T_max: 2 is less than the 5 epochs that training has for it, lr rises again"),
    warns("cosine in epochs by iteration", schedule(type="CosineAnnealingLR", T_max=2, by_epoch=False), "T_max: 2 is less than the 6 iterations that training has for it, lr rises again"),
    warns("cosine after warmup as long as the run", {"param_scheduler": [dict(type="CosineAnnealingLR", begin=2, T_max=5)], "train_cfg": dict(max_epochs=5)}, "param_scheduler[0].T_max: 5 is more than the 3 epochs"),
    warns("cosine up to eta_min", schedule(type="CosineAnnealingLR", eta_min=1.0), "param_scheduler.eta_min: 1 is not below lr=0.1"),
    warns("poly up to eta_min", schedule(type="PolyLR", eta_min=0.5), "param_scheduler.eta_min: 0.5 is not below lr=0.1"),
    warns("milestones of a longer run", schedule(type="MultiStepLR", milestones=[8, 11]), "param_scheduler.milestones: [8, 11] are not within the 2 epochs"),
    warns("one milestone too late", schedule(type="MultiStepLR", milestones=[1, 2]), "param_scheduler.milestones: [2] are not within the 2 epochs"),
    warns("milestones count from begin", {**schedule(type="MultiStepLR", begin=1, milestones=[2]), "train_cfg": dict(max_epochs=3)}, "milestones: [2] are not within the 2 epochs"),
    warns("step of a longer run", schedule(type="StepLR", step_size=30), "param_scheduler.step_size: 30 is not within the 2 epochs"),
    warns("torch's milestones", schedule(type="torch.optim.lr_scheduler:StepLR", step_size=30), "param_scheduler.step_size: 30 is not within the 2 epochs"),
    warns("periods too long", schedule(type="CosineRestartLR", periods=[2, 4], restart_weights=[1, 1]), "periods: [2, 4] have 6 epochs instead of the 2 epochs"),
    warns("periods too short", schedule(type="CosineRestartLR", periods=[1]), "periods: [1] have 1 epochs instead of the 2 epochs"),
    warns("cycle too long", schedule(type="OneCycleLR", eta_max=0.1, total_steps=100, by_epoch=False), "total_steps: 100 is more than the 6 iterations"),
    warns("cycle too short", schedule(type="OneCycleLR", eta_max=0.1, total_steps=3, by_epoch=False), "total_steps: 3 is less than the 6 iterations"),
    warns("plateau without time", schedule(type="ReduceOnPlateauLR", monitor="accuracy", rule="greater"), "param_scheduler.patience: 10 is not less than the 2 epochs"),
    warns("plateau of an accuracy without a rule", schedule(type="ReduceOnPlateauLR", monitor="accuracy", patience=1), 'ReduceOnPlateauLR.rule: with "less" the value falls while accuracy grows; give rule="greater"'),
    warns("cosine up to a ratio", schedule(type="CosineAnnealingLR", eta_min_ratio=2.0), "param_scheduler.eta_min_ratio: 2 is not below 1, lr rises to 2 times its value"),
    warns("momentum of an optimizer that has 0", schedule(type="LinearMomentum", end=2), "param_scheduler.type: changes nothing, because the optimizer's momentum is 0"),
    warns("schedule without its hook", {**schedule(type="LinearLR", end=2), "default_hooks": dict(param_scheduler=None)}, "param_scheduler: has no effect unless a hook of yours steps it, default_hooks.param_scheduler is None"),
    Row("schedule with its hook twice", {**schedule(type="LinearLR", end=2), "custom_hooks": [dict(type="ParamSchedulerHook")]}, "custom_hooks[0]: another ParamSchedulerHook steps the schedules too"),
    Row("schedule after the end", schedule(type="ExponentialLR", gamma=0.9, begin=30), "param_scheduler.begin: 30 is not allowed, training ends at 2"),
    warns("window after the end", schedule(type="ExponentialLR", gamma=0.9, begin=30, end=40), "param_scheduler.begin: 30 is not within the 2 epochs of training, the schedule never acts"),
    Row("float epochs", schedule(type="CosineAnnealingLR", T_max=2.0), "param_scheduler.T_max: 2.0 is not allowed, give an integer"),
    Row("milestones as text", schedule(type="MultiStepLR", milestones=["8"]), 'param_scheduler.milestones[0]: "8" is not allowed'),
    Row("momentum of an optimizer without", {**schedule(type="LinearMomentum", end=2), "optim_wrapper.optimizer": dict(type="Adagrad", lr=0.1)}, "no momentum in the optimizer's group 0"),
    Row("torch's scheduler, built", {"param_scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], 0.1), 1)}, "param_scheduler: "),
    Row("none in the list", {"param_scheduler": [None]}, "param_scheduler[0]: None is not allowed"),
    Row("LambdaLR without its function", schedule(type="LambdaLR"), "param_scheduler.lr_lambda: missing"),
    Row("plateau on a metric that is not there", schedule(type="ReduceOnPlateauLR", monitor="acuracy", patience=0), '"acuracy" is no metric of the validation'),
    warns("validation after the end", {"train_cfg.val_interval": 10}, "train_cfg.val_interval: 10 is beyond the 2 epochs of training, validation is done once, at the end"),
    warns("validation begins after the end", {"train_cfg.val_begin": 10}, "train_cfg.val_begin: 10 is beyond the 2 epochs of training, there is no validation"),
    warns("validation by iteration after the end", by_iteration(5, val_interval=100), "train_cfg.val_interval: 100 is beyond the 5 iterations"),
    warns("dynamic intervals at one epoch", {"train_cfg.dynamic_intervals": [(2, 1), (2, 2)]}, "train_cfg.dynamic_intervals[1]: 2 is given twice"),
    warns("dynamic intervals after the end", {"train_cfg.dynamic_intervals": [(5, 1)]}, "train_cfg.dynamic_intervals[0]: 5 is beyond the 2 epochs"),
    warns("accumulation over more than an epoch", {"optim_wrapper.accumulative_counts": 16}, "optim_wrapper.accumulative_counts: 16 is more than the 3 batches of an epoch"),
    warns("learning rate 0", {"optim_wrapper.optimizer": dict(type="SGD", lr=0.0)}, "optim_wrapper.optimizer.lr: 0 changes no weight"),
    warns("learning rate 0 as an int", {"optim_wrapper.optimizer": dict(type="AdamW", lr=0)}, "optim_wrapper.optimizer.lr: 0 changes no weight"),
    Row("learning rate infinite", {"optim_wrapper.optimizer": dict(type="SGD", lr=float("inf"))}, "optim_wrapper.optimizer.lr: inf is not allowed, give a finite number"),
    Row("learning rate NaN", {"optim_wrapper.optimizer": dict(type="SGD", lr=float("nan"))}, "optim_wrapper.optimizer.lr: nan is not allowed"),
    Row("learning rate as YAML 1.1 reads it", {"optim_wrapper.optimizer": dict(type="AdamW", lr="1e-3")}, 'optim_wrapper.optimizer.lr: "1e-3" is not allowed, give a number'),
    Row("learning rate in a list", {"optim_wrapper.optimizer": dict(type="AdamW", lr=[1e-3])}, "optim_wrapper.optimizer.lr: [0.001] is not allowed"),
    Row("learning rate beside the optimizer", {"optim_wrapper.lr": 0.1}, "optim_wrapper.lr: unknown key"),
    Row("weight decay below 0", {"optim_wrapper.optimizer": dict(type="AdamW", lr=0.1, weight_decay=-1.0)}, "optim_wrapper.optimizer: Invalid weight_decay value"),
    Row("one beta", {"optim_wrapper.optimizer": dict(type="AdamW", lr=0.1, betas=0.9)}, "optim_wrapper.optimizer"),
    Row("parameters given", {"optim_wrapper.optimizer": dict(type="SGD", lr=0.1, params=[])}, "optim_wrapper.optimizer.params: is filled in by flextrain"),
]  # fmt: skip
