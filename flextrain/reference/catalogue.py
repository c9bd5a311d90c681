"""The catalogue: an entry for every registered type, public name, option and launcher; look-up by name."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..core.base import registry
from ..core.base.config import Config
from ..core.base.errors import FlexTrainError, nearest
from ..core.base.registry import NAMES, STRATEGIES, UnknownNameError, import_dotted, import_path
from ..runner.hooks.hook import Priority
from ..strategies.launchers import LAUNCHERS
from .describe import REFUSED, arguments_of, default_text, describe, home_of, keys_of, methods_of
from .entry import Argument, Entry
from .examples import KINDS, example_of, folded, option_example

# The keys of a dataloader given as a dict: torch's, with what is different here.


_KEYS = (
    (
        "dataset",
        "dataset | dict",
        None,
        "the dataset: an object with a length and indices, a stream, or ``dict(type=...)``",
    ),
    ("batch_size", "int", "1", "samples of a batch, on each process that has data of its own"),
    ("shuffle", "bool", "True in training, else False", "a new order in every epoch; give it here or to ``sampler``"),
    ("sampler", "dict | sampler", 'dict(type="DefaultSampler")', "which process reads which samples, in which order"),
    ("batch_sampler", "dict | sampler | None", "None", "makes batches of what ``sampler`` gives"),
    (
        "collate_fn",
        "dict | str | function",
        '"pseudo_collate"',
        'makes a batch of samples: "pseudo_collate" makes lists of fields, "default_collate" stacks them to tensors',
    ),
    ("num_workers", "int", "0", "worker processes that load batches; 0: the training process loads them itself"),
    (
        "pin_memory",
        "bool",
        "with workers, on an accelerator",
        "load into page-locked memory, from which copies to an accelerator are faster",
    ),
    ("drop_last", "bool", "False", "leave out the last batch of an epoch if it is smaller than the others"),
    ("timeout", "float", "0", "seconds to wait for a batch of the workers; 0: without limit"),
    ("worker_init_fn", "dict | str | function | None", "None", "called in each worker with the worker's number"),
    ("multiprocessing_context", "str | None", "None", 'how workers are started: "fork", "spawn" or "forkserver"'),
    ("prefetch_factor", "int | None", "None", "batches that each worker loads ahead; None: 2"),
    ("persistent_workers", "bool", "False", "keep the workers between epochs"),
    ("pin_memory_device", "str", '""', "the device to pin memory for; empty: the accelerator in use"),
    ("in_order", "bool", "True", "give the batches of several workers in the order of the sampler"),
    (
        "num_batch_per_epoch",
        "int | None",
        "None",
        "epochs of only so many batches per process, of the first samples, to try a configuration out; None: all",
    ),
)

DATALOADER_KEYS = tuple(Argument(*key) for key in _KEYS)
"""Every key that ``train_dataloader=dict(...)`` takes."""


# The options below the arguments of FlexibleRunner: ``strategy.zero_optimization.stage``,
# ``env_cfg.watchdog.stall_s``.


OPTIONS_GROUP = "options"
STRATEGY_OPTIONS_GROUP = "strategy-options"


def runner_options() -> Iterator[Entry]:
    """An entry for every argument of FlexibleRunner and every key below it, except the options of strategies."""
    from ..optim.param_groups import ParamwiseConfig
    from ..optim.wrapper import OptimWrapper
    from ..runner import options
    from ..runner.hooks import DEFAULT_HOOKS
    from ..runner.loops.evaluate import ValLoop
    from ..runner.loops.train import EpochBasedTrainLoop, IterBasedTrainLoop
    from ..runner.reporting import LogProcessor
    from ..runner.runner import FlexibleRunner

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


# The launchers that ``launcher`` and ``strategy.launcher`` can name.


LAUNCHERS_GROUP = "launchers"

_SUMMARIES = {
    "none": "One process that nothing has started; refused if torchrun has started several.",
    "pytorch": "torchrun, `flextrain run`, python -m torch.distributed.launch, Ray, or anything that sets the same variables.",
    "slurm": "srun of Slurm, one task for each process.",
    "mpi": "mpirun of Open MPI, MPICH or Intel MPI, one rank for each process.",
}
_TEXTS = {
    "none": "The program has one process, and no process group is made.",
    "pytorch": "Read from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.",
    "slurm": "Read from SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_LOCALID; the processes meet on the machine of task 0.",
    "mpi": "Read from the variables that the launcher gives to its ranks.",
}


def launchers() -> Iterator[Entry]:
    """An entry for every launcher. Without ``launcher`` it is detected, which is right nearly always."""
    for name in LAUNCHERS:
        yield Entry(
            name=name,
            kind="launcher",
            group=LAUNCHERS_GROUP,
            home="flextrain.strategies.launchers:detect_launch",
            summary=_SUMMARIES[name],
            text=f"{_TEXTS[name]} Leave launcher out to have it detected.",
            example=f'launcher="{name}"',
            see_also=("launcher", "strategy.launcher"),
        )


_PUBLIC = ("flextrain", "flextrain.data", "flextrain.ray", "flextrain.testing")
PUBLIC_GROUP = "public-names"
_FOR_STRATEGIES = {
    "Needs": "flextrain.strategies:Needs",
    "StrategyConfig": "flextrain.strategies:StrategyConfig",
    "TrainStep": "flextrain.strategies.base:TrainStep",
    "Layout": "flextrain.strategies.mesh.axis:Layout",
    "MeshConfig": "flextrain.strategies.mesh:MeshConfig",
}
"""What docs/strategies.md imports from other modules, for strategies of one's own."""


@functools.cache
def catalogue() -> tuple[Entry, ...]:
    """Every entry: registered types by kind, then public names, then options. Made once in a process."""
    return (*registered_types(), *public_names(), *runner_options(), *strategy_options(), *launchers())


def groups() -> dict[str, list[Entry]]:
    """The entries by their group."""
    found: dict[str, list[Entry]] = {}
    for entry in catalogue():
        found.setdefault(entry.group, []).append(entry)
    return found


def registered_types() -> Iterator[Entry]:
    """Every name of every registry, also of torch's classes that are found by name."""
    for group in KINDS:
        for name in _registry(group):
            yield of_registry(group, name)


def of_registry(group: str, name: str) -> Entry:
    """The entry of a registered name; one that says why, if it cannot be loaded on this machine."""
    kind, found = KINDS[group], _registry(group)
    try:
        target = found.resolve(name)
    except Exception as error:  # an entry point of a third party may fail in any way
        return Entry(name, found.name, group, "", f"Cannot be loaded on this machine: {error}", unavailable=str(error))
    entry = describe(name, target, found.name, group, kind.filled_in)
    aliases = tuple(other for other, each in found.module_dict.items() if other != name and each is target)
    short = tuple(short for short, meant in found.short_names().items() if meant["type"] == name)
    also = (*aliases, *short, *([kind.base] if kind.base and home_of(_public(kind.base)) != entry.home else []))
    example = "" if name in REFUSED else entry.example or example_of(entry)
    if group == "hooks":
        entry = replace(entry, arguments=(*entry.arguments, _priority(target)))
    why = f"Every runner refuses it: {REFUSED[name]}." if name in REFUSED else ""
    return replace(entry, example=folded(example), see_also=also, unavailable=why)


def _priority(hook: Any) -> Argument:
    """The key that the configuration of every hook may have besides its arguments."""
    own = getattr(hook, "priority", None)
    meaning = f"when it is called, among the hooks of one point: {', '.join(Priority.__members__)}, or a number from 0, the first, to 100"
    return Argument("priority", "str | int", None if own is None else default_text(own), meaning)


def public_names() -> Iterator[Entry]:
    """Every public name of flextrain, flextrain.data, flextrain.ray and flextrain.testing."""
    for package in _PUBLIC:
        module = importlib.import_module(package)
        for name in sorted(set(module.__all__)):
            yield _of_public(f"{package}.{name}", getattr(module, name))


def _of_public(name: str, value: Any) -> Entry:
    if isinstance(value, registry.Registry):
        return _of_a_registry(name, value)
    if isinstance(value, str):  # __version__
        summary = "The version of flextrain, as text."
        return Entry(name, "value", PUBLIC_GROUP, name.replace(".__", ":__"), summary, example=f"print({name})")
    kind = "exception" if inspect.isclass(value) and issubclass(value, Exception) else "class"
    entry = describe(name, value, kind if inspect.isclass(value) else "function", PUBLIC_GROUP)
    if inspect.isclass(value) and kind == "class":
        entry = replace(entry, methods=tuple(methods_of(value)))
    if kind == "exception" or (inspect.isclass(value) and issubclass(value, argparse.Action)):
        entry = replace(entry, arguments=())  # those of Python's own class
    short = name.rpartition(".")[2]
    group = next((each for each in KINDS if _registry(each).module_dict.get(short) is value), None)
    if group is None:
        return replace(entry, example=entry.example or example_of(entry))
    registered = of_registry(group, short)
    return replace(entry, arguments=registered.arguments, example=registered.example, see_also=registered.see_also)


def _of_a_registry(name: str, value: registry.Registry) -> Entry:
    group = next(group for group, kind in KINDS.items() if kind.registry == name.rpartition(".")[2])
    public = KINDS[group].registry
    return Entry(
        name=name,
        kind="registry",
        group=PUBLIC_GROUP,
        home=f"flextrain.core.base.registry:{public}",
        summary=f"The registry of the kind {value.name}: the names that {KINDS[group].where} can have.",
        text=f"`flextrain list {group}` shows them. register_module() adds a class or function.",
        example=f"@{public}.register_module()\nclass Mine: ...",
        see_also=("flextrain.Registry",),
    )


def find(name: str) -> list[Entry]:
    """The entries of what a user calls ``name``: a type, a short name of a strategy, a public name, or an option.

    A name of a library that is found on demand, such as torchmetrics' ``Accuracy``, has an entry too, and so has an
    import path ``package.module:Name``. For an option its last names are enough: "zero_optimization.stage".

    Raises:
        ConfigError: an import path that cannot be imported.
    """
    bare = name.removeprefix("flextrain.")
    for group in KINDS:
        if bare in _listed(group):
            return [of_registry(group, bare)]
        if (meant := _registry(group).short_names().get(name)) is not None:
            return [_of_short_name(name, group, meant)]
    for package in _PUBLIC:
        module = importlib.import_module(package)
        own = name.removeprefix(f"{package}.")
        if own in module.__all__:
            return [_of_public(f"{package}.{own}", getattr(module, own))]
    if bare in _FOR_STRATEGIES:
        return [_of_path(bare, import_path(_FOR_STRATEGIES[bare], "show"))]
    options = [*runner_options(), *strategy_options(), *launchers()]
    if found := [each for each in options if each.name == name]:
        return found
    if ":" in name:
        short = name.partition(":")[0]
        for group in KINDS:
            if short in _registry(group).short_names():
                return [_of_short_name(name, group, _registry(group).expand(name, "show"))]
        return [_of_path(name, import_path(name, "show"))]
    outer, _, last = name.rpartition(".")
    if outer and (found := [each for entry in find(outer) for each in _part(entry, last)]):
        return found
    for group in KINDS:
        if "." not in name and _known(group, name):
            return [of_registry(group, name)]
    if found := [each for each in options if each.name.endswith(f".{name}")] or list(_members(name)):
        return found
    if outer and importlib.util.find_spec(name.partition(".")[0]) is not None:
        with contextlib.suppress(FlexTrainError, UnknownNameError):
            return [_of_path(name, import_dotted(name, "show"))]
    return []


def _of_path(name: str, target: Any) -> Entry:
    if not inspect.isclass(target):
        return describe(name, target, "function", "")
    methods = () if issubclass(target, Config) else tuple(methods_of(target))  # pydantic's are no matter of the user's
    return replace(describe(name, target, "class", ""), methods=methods)


def _members(name: str) -> Iterator[Entry]:
    """The entries of a method or property without its class: of the public classes that define it themselves."""
    classes = {
        f"{package}.{each}": getattr(importlib.import_module(package), each)
        for package in _PUBLIC
        for each in importlib.import_module(package).__all__
    }
    classes |= {each: import_path(path, "show") for each, path in _FOR_STRATEGIES.items()}
    for home, kind in classes.items():
        if inspect.isclass(kind) and name in vars(kind) and not name.startswith("_"):
            yield from (part for entry in find(home) for part in _part(entry, name))


def _part(entry: Entry, name: str) -> Iterator[Entry]:
    """The entry of an argument or a method of what has an entry: of ``EMAHook.momentum`` or ``Hook.before_run``."""
    full = f"{entry.name.removeprefix('flextrain.')}.{name}"
    for argument in entry.arguments:
        if argument.name == name:
            yield Entry(
                name=full,
                kind=f"argument of {entry.name}",
                group=entry.group,
                home=entry.home,
                summary=argument.meaning,
                type=argument.type,
                default=argument.default,
                see_also=(entry.name,),
            )
    for method in entry.methods:
        if method.name == name:
            function = getattr(import_path(entry.home, "show"), name, None)
            if isinstance(function, property) or not callable(function):
                kind = "property" if isinstance(function, property) else "attribute"
                yield Entry(full, kind, entry.group, f"{entry.home}.{name}", method.summary)
            else:
                text = f"{name}{method.signature}"
                yield replace(describe(full, function, "method", entry.group), example=text, see_also=(entry.name,))


def _of_short_name(name: str, group: str, meant: dict[str, Any]) -> Entry:
    long = of_registry(group, meant["type"])
    options = ", ".join(f"{key}={value!r}" for key, value in meant.items())
    return replace(
        long,
        name=name,
        kind=f"short name of a {long.kind}",
        text=f"Short for dict({options.replace(chr(39), chr(34))}).\n\n{long.text}".strip(),
        example=f'strategy="{name}"',
        see_also=(long.name, *long.see_also),
    )


def near(name: str, others: Iterable[str]) -> list[str]:
    """The names most like ``name``, at most three: those that are spelled alike, then those that contain it.

    ``others`` are names besides those of the catalogue.
    """
    if len(name.strip()) < 2:
        return []
    if name in NAMES:
        return [NAMES[name]]
    names = [*all_names(), *others]
    found: list[str] = []
    rest = [*names, *(each.rpartition(".")[2] for each in names)]
    while len(found) < 3 and (best := nearest(name, rest, 0.7)):
        found.append(best)
        rest = [each for each in rest if each.lower() != best.lower()]
    containing = sorted((each for each in names if name.lower() in each.lower()), key=len)
    return list(dict.fromkeys([*found, *containing]))[:3]


def all_names() -> Iterator[str]:
    """Every name that ``find`` takes; nothing optional is imported for them."""
    for group in KINDS:
        yield from _registry(group).short_names()
        yield from _listed(group)
    for package in _PUBLIC:
        module = importlib.import_module(package)
        yield from (name if package == "flextrain" else f"{package}.{name}" for name in sorted(set(module.__all__)))
    yield from _FOR_STRATEGIES
    yield from dict.fromkeys(each.name for each in (*runner_options(), *strategy_options(), *launchers()))


def _listed(group: str) -> frozenset[str]:
    return frozenset(_registry(group))


def _known(group: str, name: str) -> bool:
    try:
        return _registry(group).get(name) is not None
    except FlexTrainError:  # it is known, and cannot be loaded
        return True


def _registry(group: str) -> registry.Registry:
    found: registry.Registry = getattr(registry, KINDS[group].registry)
    return found


def _public(name: str) -> Any:
    return getattr(importlib.import_module("flextrain"), name.removeprefix("flextrain."))
