"""Examples in the form of a configuration, for names whose docstring has none."""

from __future__ import annotations

from dataclasses import dataclass

from .entry import Argument, Entry

# The kinds of registered types: where a configuration names each, and what flextrain fills in.


@dataclass(frozen=True)
class RegistryKind:
    """What the reference needs to know of a registry.

    Attributes:
        registry: the public name of the registry.
        where: the keys of FlexibleRunner that take its names.
        filled_in: arguments that flextrain gives; a configuration must not.
        pattern: how a configuration names one: ``{}`` stands for ``dict(type=..., ...)``.
        base: the public class to derive an own one from; empty: any callable, or a class of torch.
    """

    registry: str
    where: str
    pattern: str
    filled_in: frozenset[str] = frozenset()
    base: str = ""


KINDS = {
    "strategies": RegistryKind("STRATEGIES", "strategy", "strategy={}", base="flextrain.Strategy"),
    "hooks": RegistryKind("HOOKS", "custom_hooks and default_hooks", "custom_hooks=[{}]", base="flextrain.Hook"),
    "loops": RegistryKind(
        "LOOPS",
        "train_cfg, val_cfg and test_cfg",
        "train_cfg={}",
        frozenset({"runner", "dataloader", "evaluator"}),
        "flextrain.BaseLoop",
    ),
    "optim-wrappers": RegistryKind(
        "OPTIM_WRAPPERS",
        "optim_wrapper",
        "optim_wrapper={}",
        base="flextrain.OptimWrapper",
    ),
    "optim-wrapper-constructors": RegistryKind(
        "OPTIM_WRAPPER_CONSTRUCTORS",
        "optim_wrapper.constructor",
        "optim_wrapper={}",
        frozenset({"optim_wrapper_cfg", "paramwise_cfg"}),
        "flextrain.DefaultOptimWrapperConstructor",
    ),
    "optimizers": RegistryKind(
        "OPTIMIZERS", "optim_wrapper.optimizer", "optim_wrapper=dict(optimizer={})", frozenset({"params"})
    ),
    "param-schedulers": RegistryKind(
        "PARAM_SCHEDULERS", "param_scheduler", "param_scheduler={}", frozenset({"optimizer"})
    ),
    "datasets": RegistryKind(
        "DATASETS", "train_dataloader.dataset and so on", "train_dataloader=dict(batch_size=8, dataset={})"
    ),
    "data-samplers": RegistryKind(
        "DATA_SAMPLERS",
        "train_dataloader.sampler and batch_sampler, and so on",
        "train_dataloader=dict(batch_size=8, dataset=train_set, sampler={})",
        frozenset({"dataset", "shard"}),
    ),
    "functions": RegistryKind(
        "FUNCTIONS",
        "train_dataloader.collate_fn, worker_init_fn and the functions of strategies",
        "train_dataloader=dict(batch_size=8, dataset=train_set, collate_fn={})",
        frozenset({"data_batch", "batch"}),
    ),
    "metrics": RegistryKind(
        "METRICS", "val_evaluator and test_evaluator", "val_evaluator={}", base="flextrain.BaseMetric"
    ),
    "evaluator": RegistryKind("EVALUATOR", "val_evaluator and test_evaluator", "val_evaluator={}"),
    "models": RegistryKind("MODELS", "model and data_preprocessor", "data_preprocessor={}"),
    "transforms": RegistryKind("TRANSFORMS", "transforms", "transforms=[{}]", frozenset({"module", "model"})),
    "reporters": RegistryKind("REPORTERS", "visualizer", "visualizer=[{}]"),
    "visualizers": RegistryKind("VISUALIZERS", "visualizer", "visualizer={}", base="flextrain.Visualizer"),
}
"""By the name on the command line of `flextrain list`, which is that of the group."""


_ARGUMENTS = {
    # Hooks
    "CheckReplicasHook": "interval=100",
    "EMAHook": "momentum=0.0002",
    "EarlyStoppingHook": 'monitor="accuracy", patience=3, min_delta=0.001',
    "EmptyCacheHook": "after_epoch=True",
    "PrepareTTAHook": "tta_cfg=dict(type=MyTTAModel)",
    "ReplayHook": "interval=1000",
    "PruningHook": 'trial=trial, monitor="accuracy"',
    # Loops
    "EpochBasedTrainLoop": "max_epochs=10, val_interval=1",
    "IterBasedTrainLoop": "max_iters=10_000, val_interval=1000",
    # Optimizers and what is around them
    "OptimWrapper": 'optimizer=dict(type="AdamW", lr=1e-3), clip_grad=dict(max_norm=1.0)',
    "AmpOptimWrapper": 'dtype="bfloat16", optimizer=dict(type="AdamW", lr=1e-3)',
    "ApexOptimWrapper": 'opt_level="O1", optimizer=dict(type="AdamW", lr=1e-3)',
    "SGD": "lr=0.1, momentum=0.9",
    "Muon": 'lr=0.02, others=dict(type="AdamW", lr=1e-3)',
    # Schedules
    "ConstantLR": "factor=0.1, end=5",
    "LinearLR": "start_factor=0.01, by_epoch=False, end=500",
    "StepLR": "step_size=30",
    "MultiStepLR": "milestones=[30, 60]",
    "ExponentialLR": "gamma=0.95",
    "CosineAnnealingLR": "T_max=100",
    "CosineRestartLR": "periods=[10, 20], restart_weights=[1.0, 0.5]",
    "PolyLR": "power=0.9, eta_min=1e-5",
    "OneCycleLR": "eta_max=0.1, total_steps=1000, by_epoch=False",
    "ReduceOnPlateauLR": 'monitor="accuracy", rule="greater", patience=3',
    "CosineAnnealingWarmRestarts": "T_0=10",
    "CyclicLR": "base_lr=0.001, max_lr=0.1",
    "LambdaLR": "lr_lambda=lambda epoch: 0.95**epoch",
    "MultiplicativeLR": "lr_lambda=lambda epoch: 0.95",
    # Data
    "DefaultSampler": "shuffle=True",
    "InfiniteSampler": "shuffle=True",
    "RepeatDataset": "dataset=train_set, times=3",
    "ClassBalancedDataset": "dataset=train_set, oversample_thr=0.01",
    "ConcatDataset": "datasets=[train_set, more_data]",
    # Metrics, reporters, preprocessors
    "DumpResults": 'out_file_path="predictions.pkl"',
    "Evaluator": 'metrics=[dict(type="Accuracy", task="multiclass", num_classes=10)]',
    "Visualizer": 'vis_backends=[dict(type="TensorboardReporter")]',
    "ImgDataPreprocessor": "mean=[123.7, 116.3, 103.5], std=[58.4, 57.1, 57.4], bgr_to_rgb=True",
    "MlflowReporter": 'exp_name="digits"',
    "WandbReporter": 'init_kwargs=dict(project="digits")',
}
"""Arguments by type; those of a schedule of the learning rate serve for its other forms too."""

_WHOLE = {
    "OptimWrapperDict": 'optim_wrapper=dict(generator=dict(optimizer=dict(type="Adam", lr=1e-4)), '
    'discriminator=dict(optimizer=dict(type="Adam", lr=1e-4)))',
    "DefaultOptimWrapperConstructor": 'optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05), '
    'constructor="DefaultOptimWrapperConstructor", paramwise_cfg=dict(norm_decay_mult=0.0))',
    "DeepSpeedOptimWrapper": 'strategy="zero2", '
    'optim_wrapper=dict(type="DeepSpeedOptimWrapper", optimizer=dict(type="AdamW", lr=1e-3))',
    "CheckpointHook": 'default_hooks=dict(checkpoint=dict(interval=1, max_keep_ckpts=3, save_best="accuracy"))',
    "DistSamplerSeedHook": 'default_hooks=dict(sampler_seed=dict(type="DistSamplerSeedHook"))',
    "IterTimerHook": 'default_hooks=dict(timer=dict(type="IterTimerHook"))',
    "LoggerHook": "default_hooks=dict(logger=dict(interval=50))",
    "NonFiniteHook": 'env_cfg=dict(nonfinite="raise")',
    "ParamSchedulerHook": 'default_hooks=dict(param_scheduler=dict(type="ParamSchedulerHook"))',
    "RuntimeInfoHook": 'default_hooks=dict(runtime_info=dict(type="RuntimeInfoHook"))',
    "TestLoop": "test_cfg=dict()",
    "ValLoop": "val_cfg=dict()",
}

_PUBLIC = {
    "AmpOptimWrapper": 'optim_wrapper=dict(type="AmpOptimWrapper", dtype="bfloat16", optimizer=dict(type="AdamW", lr=1e-3))',
    "Axis": 'class Rows(Axis):\n    name = "rows"  # examples/custom_axis.py has the whole class',
    "BaseDataPreprocessor": "class Scale(BaseDataPreprocessor):\n    def forward(self, data, training=False):\n"
    "        images, labels = self.cast_data(data)\n        return images / 255, labels",
    "BaseLoop": "class Evaluation(BaseLoop):\n    def run(self):\n        for batch in self.dataloader:\n"
    "            self.runner.model.val_step(batch)",
    "BaseMetric": "class Accuracy(BaseMetric):\n    def process(self, data_batch, data_samples):\n"
    "        scores, labels = data_samples\n        self.results.append((scores.argmax(1) == labels).float().mean().item())\n\n"
    '    def compute_metrics(self, results):\n        return {"accuracy": sum(results) / len(results)}',
    "BaseModel": "class Net(BaseModel):\n    def __init__(self):\n        super().__init__()\n"
    '        self.layer = nn.Linear(64, 10)\n\n    def forward(self, images, labels, mode="tensor"):\n'
    '        scores = self.layer(images)\n        if mode == "loss":\n'
    '            return {"loss": F.cross_entropy(scores, labels)}\n        return (scores, labels) if mode == "predict" else scores',
    "BaseTTAModel": "class Mean(BaseTTAModel):\n    def merge_preds(self, data_samples_list):\n"
    "        return [torch.stack(samples).mean(0) for samples in data_samples_list]",
    "Config": 'cfg = Config.fromfile("config.py")\ncfg.merge_from_dict({"optim_wrapper.optimizer.lr": 3e-4})\n'
    "FlexibleRunner.from_cfg(cfg).train()",
    "ConfigDict": "options = ConfigDict(optimizer=dict(lr=0.1))\noptions.optimizer.lr = 0.01",
    "DataShard": "Topology(data=DataShard(index=rank, count=world_size))",
    "DeviceSpec": 'register_device(DeviceSpec("xpu", backend="xccl"))',
    "DictAction": 'parser.add_argument("--cfg-options", nargs="+", action=DictAction)',
    "Engine": 'with Engine(model, "fsdp", dict(optimizer=dict(type="AdamW", lr=1e-5))) as engine:\n'
    "    engine.forward_backward(batch, loss_fn)\n    engine.optim_step()",
    "Evaluator": 'val_evaluator=dict(type="Evaluator", metrics=[dict(type="DumpResults", out_file_path="predictions.pkl")])',
    "FileSource": "class Lines(FileSource):\n    def _count(self, path):\n        return len(path.read_text().splitlines())\n\n"
    "    def _open(self, path):\n        return path.read_text().splitlines()\n\n"
    "    def _read(self, opened, row):\n        return opened[row]",
    "FlexibleRunner": "runner = FlexibleRunner(\n    model=Net(),\n"
    '    train_dataloader=dict(batch_size=64, dataset=train_set, collate_fn="default_collate"),\n'
    '    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),\n    train_cfg=dict(max_epochs=5),\n)\nrunner.train()',
    "HistoryBuffer": 'loss = runner.message_hub.get_scalar("train/loss")\nloss.mean(10)',
    "Hook": "class Shout(Hook):\n    def after_train_epoch(self, runner):\n"
    '        runner.logger.info("Epoch %d is done", runner.epoch + 1)',
    "ResumeFrom": 'raise ResumeFrom(Path("work_dirs/other/epoch_3"), "another run is ahead")',
    "LiveWeights": "class Norms:\n    def publish(self, weights):\n        return {name: tensor.norm().item() for name, tensor in weights}\n\n\n"
    "norms = runner.publish(Norms())",
    "MessageHub": 'runner.message_hub.update_scalar("train/temperature", 0.5)',
    "Order": "order = dataset.order_of_pass(seed=0, number=3, shuffle=True)\nindices = order[np.arange(1000, 1032)]",
    "Registry": 'AUGMENTATIONS = Registry("augmentation")\n\n\n@AUGMENTATIONS.register_module()\nclass Flip: ...',
    "DataSource": "class Squares:\n    def __len__(self):\n        return 1000\n\n    def __getitem__(self, index):\n        return index**2",
    "Strategy": "@STRATEGIES.register_module()\nclass Mine(Strategy):\n    def _wrap(self, model):\n        return model",
    "Topology": "runner.strategy.topology.data.count  # processes that train on different data",
    "TrainingCopy": "first: TrainingCopy = engine.switch()\nengine.switch(first)",
    "Visualizer": 'runner.visualizer.add_image("sample", picture, step=runner.iter)',
    "append_event": 'append_event(runner.work_dir, "relabelled", images=12)',
    "read_events": 'starts = [event["time"] for event in read_events("work_dirs/digits") if event["event"] == "started"]',
    "heartbeat": "for part in long_work:\n    part.do()\n    heartbeat()",
    "launch": "launch(main, nprocs=2)",
    "read_base": "with read_base():\n    from .base import *",
    "register_device": 'register_device(DeviceSpec("xpu", backend="xccl"))',
    "stack_batch": "batch = stack_batch(pictures, pad_size_divisor=32)",
    "RayReportHook": "custom_hooks=[RayReportHook()]",
    "train_loop": "TorchTrainer(train_loop(config), scaling_config=ScalingConfig(num_workers=4)).fit()",
    "CheckResult": "report = check_strategy(MyStrategy)\nprint([result.name for result in report.results])",
    "ConformanceReport": "report = check_strategy(MyStrategy)\nprint(report.passed, report.failed)",
    "WorkerGroup": "with WorkerGroup(2) as group:\n    results = group.run(train, learning_rate)",
    "check_strategy": "check_strategy(MyStrategy)",
    "run_distributed": "results = run_distributed(train, 2, 60.0)",
}


def example_of(entry: Entry) -> str:
    """The keywords of FlexibleRunner that use a registered type, or Python that uses a public name."""
    kind = KINDS.get(entry.group)
    if kind is None:
        return _of_public(entry)
    name = entry.name
    if name in _WHOLE:
        return _WHOLE[name]
    other = name.replace("Momentum", "LR").replace("ParamScheduler", "LR")
    arguments = [_ARGUMENTS.get(name, _ARGUMENTS.get(other, ""))]
    if name.endswith("ParamScheduler"):
        arguments.insert(0, 'param_name="lr"')
    if entry.group == "optimizers" and not arguments[0]:
        arguments = ["lr=1e-3"]
    given = ", ".join([f'type="{name}"', *filter(None, arguments)])
    return kind.pattern.replace("{}", f"dict({given})")


def _of_public(entry: Entry) -> str:
    name = entry.name.rpartition(".")[2]
    if name in _PUBLIC:
        return _PUBLIC[name]
    if entry.kind == "exception":
        return f"try:\n    runner.train()\nexcept {name} as error:\n    print(error)"
    return ""


def option_example(name: str, argument: Argument) -> str:
    """Where an option stands: ``env_cfg=dict(watchdog=dict(stall_s=600.0))``, with its default or another value of its type."""
    *outer, last = name.split(".")
    value = argument.default
    if value in (None, "None"):
        first = argument.type.partition(" | ")[0]
        value = {"int": "1", "float": "1.0", "bool": "True", "dict": "dict(...)"}.get(first.partition(",")[0], "...")
        value = first if first.startswith('"') else value
    return f"{'=dict('.join(outer)}=dict({last}={value}{')' * len(outer)}"


def folded(example: str, width: int = 74) -> str:
    """A configuration of one line that is longer than ``width``, with the parts of its outermost brackets on lines of their own."""
    if len(example) <= width or "\n" in example:
        return example
    parts = _split(example)
    if len(parts) > 1:  # several keywords of FlexibleRunner
        return ",\n".join(folded(part, width) for part in parts)
    begin = min((at for at in (example.find("("), example.find("[")) if at >= 0), default=-1)
    inner = [
        f"    {line}" for part in _split(example[begin + 1 : -1]) for line in f"{folded(part, width - 4)},".splitlines()
    ]
    return "\n".join([example[: begin + 1], *inner, example[-1]])


def _split(text: str) -> list[str]:
    """The parts between commas that are in no brackets and no string."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        depth += 0 if quoted else (character in "([{") - (character in ")]}")
        if character == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
