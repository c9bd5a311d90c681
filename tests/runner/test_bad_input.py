"""A wrong configuration is refused on one line that names its key, before any process group or model exists.

The environment is that of torchrun with two processes, so a runner that gets past its checks would join a process group;
``test_the_right_configuration_goes_on`` shows that it would be seen.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from flextrain import BaseMetric, ConfigError, DDPStrategy, FlexibleRunner, OptimWrapper, SingleDeviceStrategy
from flextrain.core.comm import collectives
from flextrain.runner import InfiniteSampler
from flextrain.runner.hooks import CheckpointHook, EarlyStoppingHook, Hook

DATA = TensorDataset(torch.randn(8, 3), torch.zeros(8))


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(3, width)

    def forward(self, x: Any, y: Any, mode: str = "loss") -> Any:
        return {"loss": self.net(x).mean()} if mode == "loss" else self.net(x)


class Mean(BaseMetric):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0.0)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"mean": 0.0}


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.length


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Shout(Hook):
    def __init__(self, loudness: int = 1) -> None:
        if loudness < 0:
            raise ConfigError(f"Shout.loudness: {loudness} is not allowed, give 0 or more")


def needs_an_argument(width: int) -> nn.Module:
    return Net(width)


MISSING = object()
SGD = dict(type="SGD", lr=0.1)


def right() -> dict[str, Any]:
    """A configuration that nothing is wrong with; a copy to change."""
    return dict(
        train_dataloader=dict(batch_size=4, dataset=DATA, sampler=dict(type="DefaultSampler", shuffle=True)),
        optim_wrapper=dict(type="OptimWrapper", optimizer=SGD),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        param_scheduler=[dict(type="LinearLR", end=2), dict(type="MultiStepLR", milestones=[1])],
        val_dataloader=dict(batch_size=4, dataset=DATA, sampler=dict(type="DefaultSampler", shuffle=False)),
        val_cfg=dict(),
        val_evaluator=[dict(type=Mean)],
        test_dataloader=dict(batch_size=4, dataset=DATA),
        test_cfg=dict(),
        test_evaluator=dict(type=Mean),
        strategy=dict(type="DDPStrategy"),
        default_hooks=dict(checkpoint=dict(interval=1), logger=dict(interval=10)),
        custom_hooks=[dict(type="EMAHook", momentum=0.1)],
        auto_scale_lr=dict(base_batch_size=8),
        env_cfg=dict(cudnn_benchmark=False, mp_cfg=dict(), dist_cfg=dict()),
        log_processor=dict(window_size=10),
        visualizer=dict(type="Visualizer", vis_backends=[dict(type="JsonLinesReporter")]),
        randomness=dict(seed=1),
    )


def changed(config: dict[str, Any], path: str, value: Any) -> None:
    """Set, add or remove the entry at a path such as ``custom_hooks[0].momentum``, on the way to which dicts are made."""
    *outer, last = path.replace("[", ".").replace("]", "").split(".")
    place: Any = config
    for key in outer:
        index = int(key) if isinstance(place, list) else key
        held = place[index] if isinstance(place, list) else place.get(index)
        place[index] = copy.copy(held) if isinstance(held, (dict, list)) else {}
        place = place[index]
    if value is MISSING:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value


# (what to change, to what, the key that the message begins with, what else it says)
Case = tuple[str | dict[str, Any], Any, str, str]


def case(path: str, value: Any, says: str = "", key: str | None = None, **more: Any) -> Any:
    """One wrong value; ``more`` are further top-level changes that it takes."""
    shown = value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    name = "missing" if value is MISSING else shown
    return pytest.param({**more, path: value}, path if key is None else key, says, id=f"{path}={name}-{says[:30]}")


NO_TRAINING = dict.fromkeys(("train_dataloader", "train_cfg", "optim_wrapper", "param_scheduler", "auto_scale_lr"))
NO_VALIDATION = dict.fromkeys(("val_dataloader", "val_cfg", "val_evaluator"))


def without(*kept: str) -> dict[str, None]:
    """A configuration that trains nothing, but for some of its keys."""
    return {key: None for key in NO_TRAINING if key not in kept}


BY_ITERATION: dict[str, Any] = dict(train_cfg=dict(by_epoch=False, max_iters=5), param_scheduler=None)
AMP = {"optim_wrapper.type": "AmpOptimWrapper"}
APEX = {"optim_wrapper.type": "ApexOptimWrapper"}
WORKERS = {"train_dataloader.num_workers": 1}
BUILT = torch.optim.SGD(Net().parameters(), lr=0.1)
BEST = CheckpointHook(save_best="mean", rule="less")
GAN = dict(generator=dict(optimizer=SGD), critic=dict(optimizer=SGD))

MISSPELLED = [
    case("modle", None, 'unknown key, did you mean "model"?'),
    case("hooks", [], "unknown key"),
    case("train_dataloader.batch_sise", 4, 'unknown key, did you mean "batch_size"?'),
    case("train_dataloader.sampler.shufle", True, 'unknown key, did you mean "shuffle"?'),
    case(
        "train_dataloader.dataset",
        dict(type=Numbers, lenght=4),
        'did you mean "length"?',
        "train_dataloader.dataset.lenght",
    ),
    case("val_dataloader.num_worker", 2, 'did you mean "num_workers"?'),
    case("test_dataloader.drop_lst", True, 'did you mean "drop_last"?'),
    case("train_cfg.max_epoch", 3, 'did you mean "max_epochs"?'),
    case("train_cfg.val_intervall", 3, 'did you mean "val_interval"?'),
    case("val_cfg.fp61", True, 'did you mean "fp16"?'),
    case("val_evaluator[0].scal", 2.0, 'did you mean "scale"?'),
    case("test_evaluator.prefixx", "a", "unknown key"),
    case("optim_wrapper.accumulative_count", 2, 'did you mean "accumulative_counts"?'),
    case("optim_wrapper.optimzer", SGD, 'did you mean "optimizer"?'),
    case("optim_wrapper.optimizer.learning_rate", 0.1, "unknown key"),
    case("optim_wrapper.clip_grad.max_nrom", 1.0, 'did you mean "max_norm"?'),
    case("optim_wrapper.paramwise_cfg.norm_decay_mul", 0.0, 'did you mean "norm_decay_mult"?'),
    case("param_scheduler[0].start_facto", 0.1, 'did you mean "start_factor"?'),
    case("param_scheduler[1].milestone", [1], 'did you mean "milestones"?'),
    case("strategy.find_unused_parameter", True, 'did you mean "find_unused_parameters"?'),
    case("strategy.model_wrapper.static_grap", True, 'did you mean "static_graph"?'),
    case("strategy.activation_checkpointing.clases", ["A"], 'did you mean "classes"?'),
    case("default_hooks.checkpiont", dict(interval=1), 'unknown key, did you mean "checkpoint"?'),
    case("default_hooks.checkpoints", dict(type="CheckpointHook"), 'unknown key, did you mean "checkpoint"? A second'),
    case("default_hooks.checkpoint.intervall", 1, 'did you mean "interval"?'),
    case("default_hooks.logger.ignore_lst", True, 'did you mean "ignore_last"?'),
    case("custom_hooks[0].momentun", 0.1, 'did you mean "momentum"?'),
    case("auto_scale_lr.base_batchsize", 8, 'did you mean "base_batch_size"?'),
    case("env_cfg.cudnn_benchmarks", True, 'did you mean "cudnn_benchmark"?'),
    case("env_cfg.mp_cfg.mp_start_methode", "fork", 'did you mean "mp_start_method"?'),
    case("env_cfg.dist_cfg.bakend", "gloo", 'did you mean "backend"?'),
    case("randomness.sead", 1, 'did you mean "seed"?'),
    case("log_processor.windowsize", 1, 'did you mean "window_size"?'),
    case(
        "log_processor.custom_cfg",
        [dict(data_scr="loss")],
        'did you mean "data_src"?',
        "log_processor.custom_cfg[0].data_scr",
    ),
    case("visualizer.vis_backend", [], 'did you mean "vis_backends"?'),
    case("visualizer.vis_backends[0].scalar_save_fil", "x", 'did you mean "scalar_save_file"?'),
    case("model", dict(type=Net, widht=3), 'did you mean "width"?', "model.widht"),
    case("compile.modee", "default", 'did you mean "mode"?'),
    case("strategy.compile.backnd", "eager", 'did you mean "backend"?'),
]

WRONG_NAME = [
    case("model.type", "MyModle", "is no known model"),
    case("model", "flextrain.core.model.base_model:BaseModle", 'did you mean "BaseModel"?', "model"),
    case("model.type", "no.such.package:Net", "cannot be imported"),
    case("train_dataloader.dataset.type", "CIFAR", "is no known dataset"),
    case("train_dataloader.sampler.type", "DefaultSampeler", 'did you mean "DefaultSampler"?'),
    case("train_dataloader.collate_fn", "default_colate", '"default_collate"?', "train_dataloader.collate_fn.type"),
    case("train_dataloader.collate_fn.type", "pseudo_colate", 'did you mean "pseudo_collate"?'),
    case("train_cfg", dict(type="EpochBasedTrainLop"), 'did you mean "EpochBasedTrainLoop"?', "train_cfg.type"),
    case("val_cfg.type", "ValLop", 'did you mean "ValLoop"?'),
    case("val_evaluator[0].type", "Accuracyy", "is no known metric"),
    case("test_evaluator", "Accurracy", "is no known metric"),
    case("optim_wrapper.type", "AmpOptimWraper", 'did you mean "AmpOptimWrapper"?'),
    case("optim_wrapper.optimizer.type", "AdamV", 'did you mean "Adam"?'),
    case("optim_wrapper.optimizer.type", "torch.optim.AdamV", 'torch.optim has no AdamV, did you mean "Adam"?'),
    case("optim_wrapper.constructor", "DefaultConstructor", "is no known optimizer wrapper constructor"),
    case("param_scheduler[0].type", "LinerLR", 'did you mean "LinearLR"?'),
    case("param_scheduler", dict(type="SequentialLR"), "give a list of schedulers"),
    case("strategy.type", "DPPStrategy", 'did you mean "DDPStrategy"?'),
    case("strategy", "DDPStrategie", 'did you mean "DDPStrategy"?', "strategy.type"),
    case("custom_hooks[0].type", "EMAHok", 'did you mean "EMAHook"?'),
    case("default_hooks.checkpoint.type", "CheckpointHok", 'did you mean "CheckpointHook"?'),
    case("visualizer.vis_backends[0].type", "TensorbordReporter", 'did you mean "TensorboardReporter"?'),
    case("visualizer.type", "Visualiser", 'did you mean "Visualizer"?'),
    case("log_processor.type", "LogProcesor", "give LogProcessor"),
    case("launcher", "torchrum", "choose none, pytorch, slurm or mpi", strategy=None),
    case("launcher", "torchrum", "choose none, pytorch, slurm or mpi"),
    case("strategy.device", "gpu", "choose cpu, cuda, npu, xpu or mps"),
    case("default_scope", "mmdet", "registries have no scopes"),
    case("log_level", "INFOO", 'did you mean "INFO"?'),
    case("data_preprocessor.type", "ImgPreprocessor", "is no known model"),
]

WRONG_TYPE = [
    case("model", 5, "int is not allowed"),
    case("model", dict(), "missing", "model.type"),
    case("model", needs_an_argument, "missing", "model.width"),
    case("model", dict(type=Numbers, length=2), "is no torch.nn.Module", "model.type"),
    case("work_dir", 5, "5 is not allowed"),
    case("work_dir", __file__, f'"{__file__}" is a file, give a folder'),
    case("work_dir", f"{__file__}/below", f'"{__file__}" is a file, give a folder'),
    case("experiment_name", 5, "5 is not allowed"),
    case("train_dataloader", 5, "int is not allowed, give dict(dataset=..., batch_size=...), a DataLoader, a list"),
    case("train_dataloader", DATA, "TensorDataset is not allowed"),
    case("train_dataloader.batch_size", "4", "give an integer"),
    case("train_dataloader.num_workers", 1.5, "give an integer"),
    case("train_dataloader.dataset", 5, "int is no dataset"),
    case("train_dataloader.dataset", dict(root="x"), "missing, say which dataset", "train_dataloader.dataset.type"),
    case("train_dataloader.dataset", Numbers, "missing", "train_dataloader.dataset.length"),
    case("train_dataloader.dataset.type", Net, "is no dataset"),
    case("train_dataloader.sampler", 5, "int is not allowed"),
    case("train_dataloader.sampler", dict(shuffle=True), "missing, say which sampler", "train_dataloader.sampler.type"),
    case("train_dataloader.sampler", dict(type=Numbers, length=1), "is no sampler", "train_dataloader.sampler.type"),
    case("train_dataloader.worker_init_fn", 5, "5 is not allowed, give a function, its name, or dict(type=...)"),
    case(
        "train_dataloader.worker_init_fn", dict(), "missing, say which function", "train_dataloader.worker_init_fn.type"
    ),
    case("train_dataloader.generator", torch.Generator(), "is filled in by flextrain"),
    case("train_dataloader.collate_fn", 5, "5 is not allowed"),
    case("train_dataloader.collate_fn", dict(), "missing, say which function", "train_dataloader.collate_fn.type"),
    case("train_dataloader.collate_fn.pad", 0, "unknown key", **{"train_dataloader.collate_fn.type": "pseudo_collate"}),
    case("train_dataloader.multiprocessing_context", "spwan", 'did you mean "spawn"?', **WORKERS),
    case("train_cfg", [], "[] is not allowed, give dict(by_epoch=True, max_epochs=...)"),
    case("train_cfg.by_epoch", "yes", "give True or False"),
    case("train_cfg.max_epochs", "3", "give an integer"),
    case("train_cfg.max_epochs", 2.5, "give an integer"),
    case("train_cfg.dynamic_intervals", [3], "3 is not allowed", "train_cfg.dynamic_intervals[0]"),
    case("train_cfg", dict(type="ValLoop"), "is no training loop", "train_cfg.type"),
    case("val_cfg", "default", "'default' is not allowed, give dict()"),
    case("val_cfg.fp16", "yes", "give True or False"),
    case("val_cfg", dict(type="IterBasedTrainLoop", max_iters=1), "is no evaluation loop", "val_cfg.type"),
    case("val_evaluator", 5, "5 is not allowed"),
    case("val_evaluator", [], "is empty, give at least one metric"),
    case("val_evaluator[0]", dict(scale=1.0), "missing, say which metric", "val_evaluator[0].type"),
    case("val_evaluator[0].scale", "big", "give a number"),
    case("val_evaluator", dict(type=Numbers, length=3), "is no metric", "val_evaluator.type"),
    case("val_evaluator", dict(type="Accuracy"), "missing", "val_evaluator.task"),
    case("optim_wrapper", 5, "5 is not allowed, give dict(optimizer=dict(type=...))"),
    case("optim_wrapper", {}, "missing", "optim_wrapper.optimizer"),
    case("optim_wrapper.optimizer", 0.1, "0.1 is not allowed"),
    case("optim_wrapper.optimizer", dict(lr=0.1), "missing, say which optimizer", "optim_wrapper.optimizer.type"),
    case("optim_wrapper.optimizer.lr", "0.1", "give a number"),
    case("optim_wrapper.optimizer.nesterov", 1, "give True or False"),
    case("optim_wrapper.accumulative_counts", 2.5, "give a whole number"),
    case("optim_wrapper.clip_grad", 1.0, "1.0 is not allowed, give a dict"),
    case("optim_wrapper.clip_grad.max_norm", "1", "give a number"),
    case("optim_wrapper.paramwise_cfg.bias_lr_mult", "2", "give a number"),
    case("optim_wrapper.paramwise_cfg.custom_keys", ["bias"], "give a dict"),
    case("optim_wrapper.paramwise_cfg.custom_keys.bias.lr_mult", "2", "give a number"),
    case("optim_wrapper", dict(type="ValLoop", optimizer=SGD), "is no known optimizer wrapper", "optim_wrapper.type"),
    case("optim_wrapper", dict(type=Net, optimizer=SGD), "unknown key", "optim_wrapper.optimizer"),
    case("optim_wrapper", dict(generator=dict(optimizer=SGD), critic=5), "5 is not allowed", "optim_wrapper.critic"),
    case("param_scheduler", 5, "5 is not allowed"),
    case("param_scheduler[0]", dict(end=1), "is not allowed, give dict(type=...)"),
    case("param_scheduler[0].start_factor", "0.1", "give a number"),
    case("param_scheduler[1].milestones", 1, "give a list"),
    case("param_scheduler", dict(type="StepLR"), "missing, it must be given", "param_scheduler.step_size"),
    case("param_scheduler[0].type", Net, "is no parameter scheduler"),
    case("strategy", 5, "5 is not allowed", "strategy.type"),
    case("strategy.type", Net, "is no Strategy"),
    case("strategy.static_graph", "yes", "give True or False"),
    case("strategy.bucket_cap_mb", "25", "give a number"),
    case("strategy.timeout_s", "long", "give a number"),
    case("default_hooks", [], "[] is not allowed, give a dict"),
    case("default_hooks.checkpoint", 5, "5 is not allowed"),
    case("default_hooks.checkpoint.interval", "1", "give an integer"),
    case("default_hooks.checkpoint.type", Numbers, "unknown key", "default_hooks.checkpoint.interval"),
    case("custom_hooks", dict(type="EMAHook"), "dict is not allowed, give a list"),
    case("custom_hooks[0]", 5, "5 is not allowed"),
    case("custom_hooks[0]", dict(momentum=0.1), "missing, say which hook", "custom_hooks[0].type"),
    case("custom_hooks", [dict(type=Net)], "is no Hook", "custom_hooks[0].type"),
    case("custom_hooks[0].begin_iter", "5", "give an integer"),
    case("auto_scale_lr", 8, "8 is not allowed, give a dict"),
    case("auto_scale_lr.base_batch_size", "8", "give an integer"),
    case("env_cfg", "fast", '"fast" is not allowed, give a dict'),
    case("env_cfg.cudnn_benchmark", 1, "give True or False"),
    case("env_cfg.dist_cfg.timeout", "1h", "give a number"),
    case("randomness", 5, "5 is not allowed, give a dict"),
    case("randomness.seed", "1", "give an integer"),
    case("log_processor", 10, "10 is not allowed"),
    case("log_processor.window_size", "10", "give an integer"),
    case("visualizer", 5, "5 is not allowed"),
    case("visualizer.vis_backends", "JsonLinesReporter", "give a list"),
    case("visualizer.vis_backends[0]", 5, "5 is not allowed"),
    case("visualizer", [Net], "is not allowed, give a subclass of Reporter", "visualizer[0].type"),
    case("log_level", None, "None is not allowed"),
    case("log_level", 1.5, "1.5 is not allowed"),
    case("load_from", 5, "5 is not allowed"),
    case("resume", 1, "1 is not allowed"),
    case("compile", "max", '"max" is not allowed'),
    case("cfg", "config.py", '"config.py" is not allowed'),
    case("data_preprocessor", 5, "5 is not allowed"),
    case("data_preprocessor", dict(mean=0), "missing, say which model", "data_preprocessor.type"),
]

OUT_OF_RANGE = [
    case("train_dataloader.batch_size", 0, "give 1 or more"),
    case("train_dataloader.num_workers", -1, "give 0 or more"),
    case("train_dataloader.timeout", -1.0, "give 0 or more"),
    case("train_dataloader.prefetch_factor", 0, "give 1 or more"),
    case("train_cfg.max_epochs", 0, "give 1 or more"),
    case("train_cfg", dict(by_epoch=False, max_iters=0), "give 1 or more", "train_cfg.max_iters", param_scheduler=None),
    case("train_cfg.val_interval", 0, "give 1 or more"),
    case("train_cfg.val_begin", -1, "give 1 or more"),
    case("train_cfg.dynamic_intervals", [(-3, 1)], "give 0 or more", "train_cfg.dynamic_intervals[0][0]"),
    case("train_cfg.dynamic_intervals", [(3, 0)], "give 1 or more", "train_cfg.dynamic_intervals[0][1]"),
    case("optim_wrapper.accumulative_counts", 0, "give 1 or more"),
    case("optim_wrapper.clip_grad.max_norm", -1.0, "give a number above 0"),
    case("optim_wrapper.clip_grad.type", "nrom", 'did you mean "norm"?', **{"optim_wrapper.clip_grad.max_norm": 1}),
    case("optim_wrapper.optimizer.lr", -0.1, "Invalid learning rate", "optim_wrapper.optimizer"),
    case("optim_wrapper.optimizer", dict(type="AdamW", betas=(0.9, 1.5)), "Invalid beta parameter"),
    case("optim_wrapper.optimizer.nesterov", True, "Nesterov momentum requires", "optim_wrapper.optimizer"),
    case("optim_wrapper.dtype", "float61", 'choose "float16" or "bfloat16"', **AMP),
    case("optim_wrapper.loss_scale", -1, "give a number above 0", **AMP),
    case("optim_wrapper.loss_scale", "dynamik", "is not allowed", **AMP),
    case("optim_wrapper.loss_scale.init_scal", 2.0, 'did you mean "init_scale"?', **AMP),
    case("optim_wrapper.opt_level", "O4", "is not allowed", **APEX),
    case("param_scheduler[0].start_factor", 2.0, "LinearLR.start_factor: 2.0 is not allowed", "param_scheduler[0]"),
    case("param_scheduler[0].begin", -1, "LinearLR.begin: -1 is not allowed", "param_scheduler[0]"),
    case("param_scheduler[0].begin", 2, "give an int larger than begin=2", "param_scheduler[0]"),
    case("param_scheduler", dict(type="StepLR", step_size=0), "give a positive int"),
    case("param_scheduler", dict(type="ConstantLR", begin=2), "training ends at 2", "param_scheduler.begin"),
    case("auto_scale_lr.base_batch_size", 0, "give 1 or more"),
    case("strategy.bucket_cap_mb", -1, "give a number above 0"),
    case("strategy.timeout_s", 0, "give a number above 0"),
    case("strategy.comm_hook", "fp8_compress", "is not allowed"),
    case("strategy.sync_bn", "apex", 'choose "torch"'),
    case("default_hooks.checkpoint.interval", 0, "give 1 or more"),
    case("default_hooks.checkpoint.max_keep_ckpts", 0, "give 1 or more"),
    case("default_hooks.logger.interval", 0, "give 1 or more"),
    case("custom_hooks[0].momentum", 2.0, "give a number between 0 and 1"),
    case("custom_hooks[0].ema_type", "Exponential", "is not allowed"),
    case("custom_hooks[0].priority", "HIGHESTT", 'did you mean "HIGHEST"?'),
    case("custom_hooks[0].priority", 101, "give a name or a number from 0 to 100"),
    case("custom_hooks", [dict(type=Shout, loudness=-1)], "give 0 or more", "custom_hooks[0].loudness"),
    case("env_cfg.mp_cfg.mp_start_method", "frok", 'did you mean "fork"?'),
    case("env_cfg.mp_cfg.opencv_num_threads", -1, "give 0 or more"),
    case("env_cfg.dist_cfg.timeout", 0, "give a number above 0"),
    case("env_cfg.resource_limit", 0, "give 1 or more"),
    case("log_processor.window_size", 0, "give 1 or more"),
    case("log_processor.num_digits", -1, "give 0 or more"),
    case(
        "log_processor.custom_cfg",
        [dict(data_src="loss", window_size=0)],
        "0 is not allowed, give 1 or more",
        "log_processor.custom_cfg[0].window_size",
    ),
    case("visualizer.vis_backends", [dict(type="LocalVisBackend")] * 2, "is given twice", "visualizer.vis_backends[1]"),
    case(
        "optim_wrapper.clip_grad",
        dict(max_norm=1, norm_type=-1),
        "give a number above 0, or inf",
        "optim_wrapper.clip_grad.norm_type",
    ),
    case("optim_wrapper.optimizer", dict(type="SGD", foreach=True, fused=True), "cannot be `True` together"),
    case(
        "optim_wrapper.optimizer",
        dict(type="AdamW", betas=(0.9, 0.99, 0.999)),
        "give at most 2 items",
        "optim_wrapper.optimizer.betas",
    ),
    case("strategy", nn.Linear, "Linear is no Strategy, subclass flextrain.Strategy", "strategy.type"),
    case("log_processor.mean_pattern", "(", "is no regular expression"),
    case(
        "log_processor.custom_cfg",
        [dict(data_src="loss", method_name="median")],
        "choose",
        "log_processor.custom_cfg[0].method_name",
    ),
    case("resume", "no/such/checkpoint", "does not exist"),
    case("load_from", "no/such/weights.pth", "does not exist"),
]

MISSING_HALF = [
    case("train_dataloader", None, "missing, train_cfg and optim_wrapper are given"),
    case("train_cfg", None, "missing, train_dataloader and optim_wrapper are given"),
    case("optim_wrapper", None, "missing, train_dataloader and train_cfg are given"),
    case("val_dataloader", None, "missing, val_cfg and val_evaluator are given"),
    case("val_evaluator", None, "missing, val_dataloader and val_cfg are given"),
    case("val_cfg", None, "missing, val_dataloader and val_evaluator are given"),
    case("test_dataloader", None, "missing, test_cfg and test_evaluator are given"),
    case("test_evaluator", None, "missing, test_dataloader and test_cfg are given"),
    case("test_cfg", None, "missing, test_dataloader and test_evaluator are given"),
    case("train_dataloader.dataset", MISSING, "missing, it must be given"),
    case("train_cfg", dict(by_epoch=True), "missing, it must be given", "train_cfg.max_epochs"),
    case("train_cfg", dict(by_epoch=False), "missing, it must be given", "train_cfg.max_iters", param_scheduler=None),
    case("auto_scale_lr", dict(enable=True), "missing, it must be given", "auto_scale_lr.base_batch_size"),
    case("optim_wrapper.clip_grad", dict(type="value"), "missing", "optim_wrapper.clip_grad.clip_value"),
    case(
        "optim_wrapper.paramwise_cfg",
        dict(norm_decay_mult=0.0),
        "missing, paramwise_cfg multiplies it",
        "optim_wrapper.optimizer.weight_decay",
    ),
    case("param_scheduler", dict(type="LinearLR"), "has no meaning without", **without("param_scheduler")),
    case("auto_scale_lr", dict(base_batch_size=8), "has no meaning without", **without("auto_scale_lr")),
    case("resume", True, "has no meaning without", **NO_TRAINING),
    case("default_hooks.checkpoint.save_best", "accuracy", "needs validation", **NO_VALIDATION),
    case("custom_hooks", [BEST], "needs validation", "custom_hooks[0].save_best", **NO_VALIDATION),
    case("custom_hooks[0]", dict(type="EarlyStoppingHook", monitor="loss"), "needs validation", **NO_VALIDATION),
    case("custom_hooks[0]", EarlyStoppingHook("loss"), "needs validation", **NO_VALIDATION),
    case("param_scheduler", dict(type="ReduceOnPlateauLR", monitor="loss"), "needs validation", **NO_VALIDATION),
]

TWO_HOMES = [
    case("compile", True, "disagrees with cfg.compile=False", cfg=dict(compile=False)),
    case("strategy.compile", True, "disagrees with compile=False", compile=False),
    case("cfg.compile", "yes", "is not allowed"),
    case("cfg.model_wrapper_cfg", dict(type="MMDistributedDataParallel"), "model_wrapper="),
    case("cfg.find_unused_parameters", True, "has no effect"),
    case("cfg.sync_bn", "torch", 'give strategy=dict(type=..., sync_bn="torch")'),
    case("cfg.activation_checkpointing", ["net"], "has no effect"),
    case("launcher", "mpi", "disagrees", "strategy.launcher", strategy=dict(type="DDPStrategy", launcher="pytorch")),
    case("launcher", "pytorch", "the strategy is already built", strategy=SingleDeviceStrategy()),
    case(
        "strategy.timeout_s", 5, "disagrees with env_cfg.dist_cfg.timeout=10, ", env_cfg=dict(dist_cfg=dict(timeout=10))
    ),
    case("strategy.backend", "nccl", "disagrees", env_cfg=dict(dist_cfg=dict(backend="gloo"))),
    case("env_cfg.dist_cfg.backend", "nccl", "cannot send CPU tensors", strategy="fsdp"),
    case("strategy.model_wrapper.static_graph", False, "disagrees", **{"strategy.static_graph": True}),
    case(
        "train_cfg.by_epoch", True, "has no meaning beside train_cfg.type", **{"train_cfg.type": "EpochBasedTrainLoop"}
    ),
    case("train_cfg.max_iters", 5, "has no meaning with by_epoch=True"),
    case("train_cfg.max_iters", 5, "max_epochs is given too", **{"train_cfg.by_epoch": MISSING}),
    case("train_dataloader.shuffle", True, "say train_dataloader.sampler.shuffle"),
    case("optim_wrapper.clip_grad.clip_value", 1.0, "has no meaning", **{"optim_wrapper.clip_grad.max_norm": 1.0}),
    case("optim_wrapper.paramwise_cfg", dict(bias_lr_mult=2.0), "has no meaning", **{"optim_wrapper.optimizer": BUILT}),
]

UNUSABLE = [
    case("train_dataloader.sampler", dict(type="InfiniteSampler"), "has no epochs", "train_cfg.by_epoch"),
    case("train_dataloader", DataLoader(DATA, sampler=InfiniteSampler(DATA)), "has no epochs", "train_cfg.by_epoch"),
    case("val_dataloader.sampler", dict(type="InfiniteSampler"), "has no end"),
    case("val_dataloader.sampler.round_up", True, "would count repeated samples"),
    case("train_dataloader", (batch for batch in DATA), "the generator <genexpr> can be read once, give the function"),
    case("train_dataloader", iter([1]), "list_iterator can be read once, give a list, or a function"),
    case("val_dataloader", itertools.cycle([1]), "itertools.cycle has no end, evaluation needs one"),
    case("train_dataloader", lambda epoch: [1], "missing, it must be given", "train_dataloader.epoch"),
    case("train_dataloader", "batches", "str is not allowed"),
    case("train_dataloader.sampler", "DefaultSampler", "has no meaning", **{"train_dataloader.dataset": Stream()}),
    case("train_dataloader.persistent_workers", True, "needs num_workers of 1 or more"),
    case("train_dataloader.prefetch_factor", 2, "needs num_workers of 1 or more"),
    case(
        "train_dataloader",
        dict(dataset=DATA, batch_size=2, batch_sampler=torch.utils.data.BatchSampler(RandomSampler(DATA), 2, True)),
        "batch_sampler",
        "train_dataloader.batch_size",
    ),
    case("param_scheduler[0].by_epoch", True, "no effect", train_cfg=dict(by_epoch=False, max_iters=5)),
    case("param_scheduler", dict(gen=dict(type="LinearLR")), "no optimizer", "param_scheduler.gen", optim_wrapper=GAN),
    case("param_scheduler", dict(type="ReduceOnPlateauLR", monitor="loss", by_epoch=False), "by_epoch"),
    case("optim_wrapper", GAN, "must define train_step", model=Net()),
    case("optim_wrapper", GAN, "must define train_step", model=Net),
    case("optim_wrapper", GAN, "must define train_step", model=dict(type=Net)),
    case("optim_wrapper.critic.accumulative_counts", 2, "differs", optim_wrapper=GAN),
    case("optim_wrapper.loss_scale", 128.0, "no meaning with bfloat16", **AMP, **{"optim_wrapper.dtype": "bfloat16"}),
    case("optim_wrapper.loss_scale", 128.0, "has no meaning", **APEX, **{"optim_wrapper.opt_level": "O0"}),
    case(
        "strategy.activation_checkpointing",
        dict(check_fn=callable, classes=["A"]),
        "give either check_fn or classes",
        "strategy.activation_checkpointing.check_fn",
    ),
    case("strategy.model_wrapper.type", "FullyShardedDataParallel", "is not allowed"),
    case(
        "log_processor.custom_cfg",
        [dict(data_src="loss", window_size="epoch")],
        "has no meaning with by_epoch=False",
        "log_processor.custom_cfg[0].window_size",
        **BY_ITERATION,
    ),
    case("default_hooks.checkpoint.rule", "greater", "has no meaning without save_best"),
    case("default_hooks.checkpoint.filename_tmpl", "epoch_{}.pth", "checkpoints are directories"),
    case("data_preprocessor", dict(type="BaseDataPreprocessor"), "has no attribute of this name", model=Net()),
    case("auto_scale_lr", dict(base_batch_size=8), "is not known", train_dataloader=DataLoader(DATA, batch_size=None)),
    case("resume", str(Path(__file__)), "give one of them", load_from=str(Path(__file__))),
    case("strategy", DDPStrategy(device="tpu"), "choose cpu, cuda, npu, xpu or mps", "strategy.device"),
    case("param_scheduler", dict(a=dict(type="LinearLR")), "give dict(type=...)", optim_wrapper=OptimWrapper(SGD)),
]

FROM_CFG = [
    case("work_dirr", "x", 'unknown key, did you mean "work_dir"?'),
    case("model", MISSING, "missing, it must be given"),
    case("train_cfg.max_epoch", 3, 'did you mean "max_epochs"?'),
]


@pytest.fixture(autouse=True)
def _as_under_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Two processes, started by torchrun; joining their group is written down, and is the end of it."""
    joined: list[str] = []
    # The address is no name, so that no name server is asked for it, which may not answer for seconds.
    for name, value in dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="x..x", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)

    def join(*args: Any, **kwargs: Any) -> None:
        joined.append("joined")
        raise InterruptedError

    monkeypatch.setattr(collectives, "init_process_group", join)
    monkeypatch.chdir(tmp_path)
    return joined


class Model:
    """A function that builds a model, and knows whether it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> nn.Module:
        self.calls += 1
        return Net()


def build(config: Mapping[str, Any]) -> FlexibleRunner:
    return FlexibleRunner(**config)


def check(make: Callable[[], Any], key: str, says: str) -> None:
    with pytest.raises(Exception) as caught:
        make()
    message = str(caught.value)
    assert isinstance(caught.value, ConfigError), f"{type(caught.value).__name__}: {message}"
    assert "\n" not in message
    assert message.startswith(f"{key}: "), message
    assert says in message, message


@pytest.mark.parametrize(
    "changes, key, says",
    [*MISSPELLED, *WRONG_NAME, *WRONG_TYPE, *OUT_OF_RANGE, *MISSING_HALF, *TWO_HOMES, *UNUSABLE],
)
def test_wrong_configuration(
    changes: dict[str, Any], key: str, says: str, _as_under_torchrun: list[str], tmp_path: Path
) -> None:
    model = Model()
    config = {"model": model, **right()}
    for path, value in changes.items():
        changed(config, path, value)
    check(lambda: build(config), key, says)
    assert not _as_under_torchrun, "the process group came first"
    assert not model.calls, "the model came first"
    assert not list(tmp_path.iterdir()), "something was written"


def test_the_right_configuration_goes_on(_as_under_torchrun: list[str]) -> None:
    """What the table changes is right before, and the guard sees who goes on."""
    with pytest.raises(InterruptedError):
        build({"model": Model(), **right()})
    assert _as_under_torchrun == ["joined"]


def test_all_at_once_is_still_one_line() -> None:
    wrong = dict(train_dataloader=dict(a=1, b=2), train_cfg=dict(c=3), custom_hooks=5, model=Model())
    with pytest.raises(ConfigError) as caught:
        build(right() | wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes, key, says", FROM_CFG)
def test_from_cfg(changes: dict[str, Any], key: str, says: str, _as_under_torchrun: list[str]) -> None:
    config = {"model": Model(), **right()}
    for path, value in changes.items():
        changed(config, path, value)
    check(lambda: FlexibleRunner.from_cfg(config), key, says)
    assert not _as_under_torchrun


def test_from_cfg_wants_a_dict() -> None:
    check(lambda: FlexibleRunner.from_cfg("config.py"), "from_cfg", "'config.py' is not allowed")  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["train", "val", "test"])
def test_a_phase_without_its_parts(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = Model()
    runner = FlexibleRunner(model)
    check(getattr(runner, call), f"{call}_cfg", "missing")
    assert not model.calls
