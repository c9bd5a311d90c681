"""The kinds of registered types: where a configuration names each, and what flextrain fills in."""

from __future__ import annotations

from dataclasses import dataclass


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
