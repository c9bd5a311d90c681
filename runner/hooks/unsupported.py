"""Arguments and methods of MMEngine's hooks that flextrain refuses."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...core.overriding import refuse_unused
from ...core.registry import HOOKS

_REASONS = {
    "file_client_args": "files are written to mounted file systems only",
    "backend_args": "files are written to mounted file systems only",
    "published_keys": "a checkpoint needs no cleaning before it is shared, load_from reads only the weights in it",
}


def refuse(where: str, **arguments: Any) -> None:
    """Raise ConfigError with the reason if one of ``arguments`` is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{where}.{name}: has no meaning here, {_REASONS[name]}; leave it out")


HOOKS.refuse(
    {
        "NaiveVisualizationHook": "call runner.visualizer.add_image in after_test_iter of a hook of your own",
        "NPUProfilerHook": "choose ProfilerHook, or call torch_npu.profiler in a hook of your own",
    }
)

_METHODS = {
    "CheckpointHook": {
        "_get_metric_score": "give save_best the metric's name, or override _save_best_checkpoint(runner, metrics)",
        "_init_rule": "give rule, greater_keys or less_keys",
        "_publish_model": "load_from reads only the weights of a checkpoint",
    },
    "EarlyStoppingHook": {
        "_check_stop_condition": "override after_val_epoch(runner, metrics)",
        "_init_rule": "give rule",
    },
    "EMAHook": {
        "_swap_ema_parameters": "override before_val_epoch and its kin",
        "_swap_ema_state_dict": "override before_save_checkpoint",
    },
}


def refuse_methods(hook: object, where: str) -> None:
    """Raise ConfigError if a subclass of a hook overrides a method that only MMEngine's hook calls."""
    for base in type(hook).__mro__:
        refuse_unused(hook, _METHODS.get(base.__name__, {}), where)
