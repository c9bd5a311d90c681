"""Check all arguments of a runner, and build the parts that need no process group and no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError
from ..optim.build import build_optim_wrapper, guard_updates
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..strategies.base import Strategy
from ..strategies.build import build_strategy
from . import configuration
from .hooks import Hook, NonFiniteHook
from .hooks.build import build_hooks
from .hooks.checkpoint import CheckpointHook
from .options import FixedOptions, check_options, check_start
from .reporting import Visualizer, build_visualizer
from .transforms.build import Transform, build_transforms
from .transforms.quantised import check_left_out


@dataclass(frozen=True)
class Checked:
    """The checked arguments, and the parts built from them."""

    options: FixedOptions
    strategy: Strategy
    optim_wrapper: OptimWrapper | OptimWrapperDict | None
    hooks: list[tuple[Hook, int]]
    visualizer: Visualizer
    trains: bool
    by_epoch: bool
    transforms: tuple[Transform, ...]


def check_everything(given: Mapping[str, Any], *, takes_mmengines_models: bool = False) -> Checked:
    """Check the arguments of a runner.

    Args:
        given: the arguments.
        takes_mmengines_models: see ``check_model``.

    Raises:
        ConfigError: for the first invalid argument, which the message names.
    """
    options = check_options({key: given[key] for key in FixedOptions.model_fields})
    configuration.check_cfg(options.cfg)
    if given["default_scope"] not in (None, "flextrain", "mmengine"):
        raise ConfigError(
            f'default_scope: "{given["default_scope"]}" has no meaning, registries have no scopes; leave it out'
        )
    configuration.check_model(given["model"], given["data_preprocessor"], takes_mmengines=takes_mmengines_models)
    transforms = build_transforms(given["transforms"])
    trains = configuration.check_phase("train", **_parts(given, "train_dataloader", "train_cfg", "optim_wrapper"))
    validates = given["val_dataloader"] is not None
    optim_wrapper = None
    if trains:
        optim_wrapper = build_optim_wrapper(given["optim_wrapper"])
        configuration.check_train(
            given["train_dataloader"],
            given["train_cfg"],
            optim_wrapper,
            given["param_scheduler"],
            given["model"],
            scales_lr=options.auto_scale_lr is not None and options.auto_scale_lr.enable,
            validates=validates,
        )
    else:
        scales = options.auto_scale_lr is not None and options.auto_scale_lr.enable
        for key, is_given in (
            ("param_scheduler", given["param_scheduler"] or isinstance(given["param_scheduler"], Mapping)),
            ("auto_scale_lr", scales),  # configurations for testing have it with enable=False
            ("resume", given["resume"] or isinstance(given["resume"], Mapping)),
        ):
            if is_given:
                raise ConfigError(f"{key}: has no meaning without train_dataloader, train_cfg and optim_wrapper")
    if trains and (merging := configuration.merging_model(given["model"])) is not None:
        # A configuration of training whose model was replaced for runner.test(); runner.train() raises.
        if given["resume"]:
            raise ConfigError(f"resume: has no meaning with {merging.__name__}, which is only tested, give load_from")
        trains, optim_wrapper = False, None
    for mode in ("val", "test"):
        parts = _parts(given, f"{mode}_dataloader", f"{mode}_cfg", f"{mode}_evaluator")
        if configuration.check_phase(mode, **parts):
            configuration.check_evaluation(mode, *parts.values())
    visualizer = build_visualizer(given["visualizer"])
    with visualizer.as_current():  # a hook may look for it when it is made
        hooks = build_hooks(given["default_hooks"], given["custom_hooks"], validates=validates)
    if options.env_cfg.nonfinite == "ignore":
        hooks = [(hook, priority) for hook, priority in hooks if not isinstance(hook, NonFiniteHook)]
    by_epoch = not trains or configuration.train_loop_class(given["train_cfg"])[0].by_epoch
    configuration.check_logging(given["log_processor"], given["log_level"], by_epoch)
    strategy = build_strategy(
        given["strategy"],
        given_as=dict(backend="env_cfg.dist_cfg.backend", timeout_s="env_cfg.dist_cfg.timeout"),
        launcher=options.launcher,
        backend=options.env_cfg.dist_cfg.backend,
        timeout_s=options.env_cfg.dist_cfg.timeout,
        compile=configuration.check_compile(options),
    )
    if trains and any(isinstance(hook, CheckpointHook) for hook, _ in hooks):
        check_left_out(transforms, given["model"], strategy.config.exclude_frozen_parameters)
    check_start(options, leaves_out=bool(strategy.config.exclude_frozen_parameters))
    if optim_wrapper is not None:
        guard_updates(optim_wrapper, skips=options.env_cfg.nonfinite == "skip")
        strategy.check(configuration.model_class(given["model"]), optim_wrapper)
    return Checked(options, strategy, optim_wrapper, hooks, visualizer, trains, by_epoch, transforms)


def _parts(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names}
