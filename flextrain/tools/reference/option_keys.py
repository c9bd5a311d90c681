"""The options below the arguments of FlexibleRunner: ``strategy.zero_optimization.stage``, ``env_cfg.watchdog.stall_s``."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...core.config import Config
from ...core.registry import STRATEGIES
from .dataloader import DATALOADER_KEYS
from .describe import arguments_of, home_of, keys_of
from .entry import Argument, Entry
from .examples import folded, option_example

OPTIONS_GROUP = "options"
STRATEGY_OPTIONS_GROUP = "strategy-options"


def runner_options() -> Iterator[Entry]:
    """An entry for every argument of FlexibleRunner and every key below it, except the options of strategies."""
    from ...optim.constructor import ParamwiseConfig
    from ...optim.wrapper import OptimWrapper
    from ...runner import options
    from ...runner.hooks import DEFAULT_HOOKS
    from ...runner.loops.epoch import EpochBasedTrainLoop
    from ...runner.loops.evaluate import ValLoop
    from ...runner.loops.iteration import IterBasedTrainLoop
    from ...runner.reporting import LogProcessor
    from ...runner.runner import FlexibleRunner

    home = home_of(FlexibleRunner)
    models: dict[str, type[Config]] = {
        "auto_scale_lr": options.AutoScaleLR,
        "randomness": options.Randomness,
        "env_cfg": options.Environment,
        "resume": options.Resume,
    }
    keys: dict[str, tuple[Argument, ...]] = {
        **dict.fromkeys(("train_dataloader", "val_dataloader", "test_dataloader"), DATALOADER_KEYS),
        "log_processor": _free(LogProcessor),
        "optim_wrapper": _free(OptimWrapper),
        "train_cfg": _of_training(_free(EpochBasedTrainLoop), _free(IterBasedTrainLoop)),
        **dict.fromkeys(("val_cfg", "test_cfg"), _free(ValLoop)),
        "default_hooks": tuple(
            Argument(
                name, "dict | None", f'dict(type="{cfg["type"]}")', f"changes to the {cfg['type']}; None removes it"
            )
            for name, cfg in DEFAULT_HOOKS.items()
        ),
    }
    for argument in arguments_of(FlexibleRunner):
        model = models.get(argument.name)
        own = tuple(keys_of(model)) if model is not None else keys.get(argument.name, ())
        yield _entry(argument, argument.name, OPTIONS_GROUP, home, own)
        if model is not None:
            yield from _below(model, argument.name, OPTIONS_GROUP)
            continue
        for key in own:
            nested = tuple(keys_of(ParamwiseConfig)) if key.name == "paramwise_cfg" else ()
            yield _entry(key, f"{argument.name}.{key.name}", OPTIONS_GROUP, home, nested)
            for each in nested:
                yield _entry(each, f"{argument.name}.{key.name}.{each.name}", OPTIONS_GROUP, home_of(ParamwiseConfig))


def strategy_options() -> Iterator[Entry]:
    """An entry for every option of every registered strategy; one for those that have it from the same class."""
    found: dict[tuple[str, str, str], Entry] = {}
    strategies: dict[tuple[str, str, str], list[str]] = {}
    for name in STRATEGIES:
        try:
            kind = STRATEGIES.get(name)
        except Exception:  # an entry point of a third party may fail in any way; `flextrain list strategies` says how
            continue
        model = getattr(kind, "Config", None)
        if not (inspect.isclass(model) and issubclass(model, Config)):
            continue
        for entry in _below(model, "strategy", STRATEGY_OPTIONS_GROUP):
            key = (entry.name, entry.home, entry.text)
            found.setdefault(key, entry)
            strategies.setdefault(key, []).append(name)
    for key, entry in found.items():
        names = strategies[key]
        example = entry.example.replace("strategy=dict(", f'strategy=dict(type="{names[0]}", ')
        options_of = f"option of {', '.join(names)}"
        yield replace(entry, kind=options_of, see_also=tuple(names), example=folded(example))


def _free(kind: type[Any]) -> tuple[Argument, ...]:
    """The arguments of a class, without those that flextrain gives."""
    return tuple(each for each in arguments_of(kind) if each.name not in ("runner", "dataloader", "evaluator"))


def _of_training(epochs: Sequence[Argument], iterations: Sequence[Argument]) -> tuple[Argument, ...]:
    """The keys of ``train_cfg``: those of both loops, and the two that choose one of them."""
    of_iterations = {each.name: each for each in iterations}
    first = Argument("by_epoch", "bool", "True", "count epochs, with max_epochs; False: count updates, with max_iters")
    kind = Argument("type", "str | class", "None", "the loop; None: by_epoch says which")
    limits = (("by_epoch=True", epochs[0]), ("by_epoch=False", iterations[0]))
    counts = (
        replace(each, default="", meaning=f"{each.meaning} Must be given with {which}.") for which, each in limits
    )
    return (first, kind, *counts, *(_both(each, of_iterations[each.name]) for each in epochs[1:]))


def _both(of_epochs: Argument, of_iterations: Argument) -> Argument:
    """An argument that both loops have, with other units."""
    default = f", default {of_iterations.default}" if of_iterations.default != of_epochs.default else ""
    meaning = f"{of_epochs.meaning} With by_epoch=False{default}: {of_iterations.meaning}"
    return replace(of_epochs, meaning=meaning)


def _below(model: type[Config], path: str, group: str) -> Iterator[Entry]:
    """Entries of the keys of a configuration and, for those that are configurations, of their keys."""
    for key in keys_of(model):
        nested = _models_in(model.model_fields[key.name].annotation)
        owner = next(kind for kind in model.__mro__ if key.name in inspect.get_annotations(kind))
        keys = tuple(each for other in nested for each in keys_of(other))
        yield _entry(key, f"{path}.{key.name}", group, home_of(owner), keys)
        for other in nested:
            yield from _below(other, f"{path}.{key.name}", group)


def _models_in(annotation: Any) -> list[type[Config]]:
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, Config) else []
    return [found for inner in typing.get_args(annotation) for found in _models_in(inner)]


def _entry(argument: Argument, name: str, group: str, home: str, keys: tuple[Argument, ...] = ()) -> Entry:
    return Entry(
        name=name,
        kind="option" if "." in name else "argument of FlexibleRunner",
        group=group,
        home=home,
        summary=argument.meaning,
        type=argument.type,
        default=argument.default,
        arguments=keys,
        example=option_example(name, argument) if "." in name else "",
        see_also=() if "." in name else ("flextrain.FlexibleRunner",),
    )
