"""Registries: find classes by name, and build objects from ``dict(type=..., **arguments)``."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from .config import check_call, known_keywords
from .errors import ConfigError, nearest, one_of, suggest
from .registering_modules import REGISTERING_MODULES

# Words of other libraries, and what they are called here: only errors and ``flextrain show`` use them.


RUNNER = {
    "accumulate_grad_batches": "give optim_wrapper=dict(accumulative_counts=...)",
    "args": "give the runner's own arguments",
    "callbacks": "give custom_hooks=[...]",
    "compute_metrics": "give val_evaluator=...",
    "criterion": "let the model return its loss",
    "data_collator": "give train_dataloader a collate_fn",
    "devices": "start as many processes with torchrun or flextrain run",
    "eval_dataset": "give val_dataloader=...",
    "gradient_accumulation_steps": "give optim_wrapper=dict(accumulative_counts=...)",
    "gradient_clip_val": "give optim_wrapper=dict(clip_grad=dict(max_norm=...))",
    "lr_scheduler": "give param_scheduler=...",
    "max_epochs": "give train_cfg=dict(max_epochs=...)",
    "max_grad_norm": "give optim_wrapper=dict(clip_grad=dict(max_norm=...))",
    "max_iters": "give train_cfg=dict(by_epoch=False, max_iters=...)",
    "max_steps": "give train_cfg=dict(by_epoch=False, max_iters=...)",
    "num_nodes": "start processes on every machine with torchrun or flextrain run",
    "num_train_epochs": "give train_cfg=dict(max_epochs=...)",
    "optimizer": "give optim_wrapper=dict(optimizer=...)",
    "optimizers": "give optim_wrapper=... and param_scheduler=...",
    "plugins": "give strategy=...",
    "precision": 'give optim_wrapper=dict(type="AmpOptimWrapper", dtype=...)',
    "scheduler": "give param_scheduler=...",
    "seed": "give randomness=dict(seed=...)",
    "train_dataset": "give train_dataloader=...",
    "train_loader": "give train_dataloader=...",
    "val_loader": "give val_dataloader=...",
}
"""Arguments of other trainers, and what to give a runner."""

NAMES = {
    "Accelerator": "FlexibleRunner",
    "Callback": "Hook",
    "CSVLogger": "LoggerHook",
    "EarlyStopping": "EarlyStoppingHook",
    "EarlyStoppingCallback": "EarlyStoppingHook",
    "EMAWeightAveraging": "EMAHook",
    "LearningRateMonitor": "LoggerHook",
    "LightningModule": "BaseModel",
    "MLFlowLogger": "MLflowReporter",
    "ModelCheckpoint": "CheckpointHook",
    "ReduceLROnPlateau": "ReduceOnPlateauLR",
    "StochasticWeightAveraging": "EMAHook",
    "TensorBoardLogger": "TensorboardReporter",
    "Trainer": "FlexibleRunner",
    "TrainerCallback": "Hook",
    "WandbLogger": "WandbReporter",
}
"""Classes of other libraries, and the one of the same purpose."""


# Import classes and functions by their paths: ``package.module:Name``, or with dots only.


class UnknownNameError(ConfigError):
    """A name for which there is no class."""


def import_path(path: str, where: str) -> Callable[..., Any]:
    """Import ``package.module:Name``."""
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise UnknownNameError(f'{where}: "{path}" is not allowed, give package.module:Name')
    return _attribute(_imported(module_name, path, where), attribute.split("."), path, where)


def import_dotted(path: str, where: str) -> Callable[..., Any]:
    """Import ``package.module.Name``: modules as far as there are some, then attributes.

    A class or function comes before a module of the same name.
    """
    first, *parts = path.split(".")
    if not all(part.isidentifier() for part in (first, *parts)):
        raise UnknownNameError(f'{where}: "{path}" is not allowed, give package.module.Name')
    module = _imported(first, path, where)
    while parts:
        found = getattr(module, parts[0], None)
        if found is not None and not inspect.ismodule(found):
            break
        if found is None and not _has_module(module, parts[0]):
            break
        module = found or _imported(f"{module.__name__}.{parts[0]}", path, where)
        parts.pop(0)
    return _attribute(module, parts, path, where)


def _has_module(package: ModuleType, name: str) -> bool:
    return hasattr(package, "__path__") and importlib.util.find_spec(f"{package.__name__}.{name}") is not None


def _imported(module: str, path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If another module is missing, this one is there and imports it.
        is_unknown = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        kind = UnknownNameError if is_unknown else ConfigError
        raise kind(f'{where}: "{path}" cannot be imported, {error}') from None


def _attribute(module: ModuleType, names: Iterable[str], path: str, where: str) -> Callable[..., Any]:
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            hint = suggest(name, dir(found))
            raise UnknownNameError(f'{where}: "{path}" does not exist, {module.__name__} has no {name}{hint}')
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f'{where}: "{path}" is no class or function')
    return found  # type: ignore[no-any-return]


T = TypeVar("T")
Factory = Callable[..., Any]

logger = logging.getLogger("flextrain")


class Registry:
    """Classes and functions of one kind, found by name, short name or import path, or given directly.

    Args:
        name: the kind, singular, for messages ("optimizer").
        locations: modules that register this kind when imported; loaded at the first look-up. Default: those that
            ``flextrain/__init__.py`` lists for this kind.
        entry_points: entry point group through which installed packages add names.
        lists_names: whether an error about an unknown name lists all names, if none is near.
    """

    @known_keywords(
        {
            "parent": "call register_module of the registry that shall know the name, names are global here",
            "scope": "call register_module(name=...), names are global here",
            "build_func": "call a class method of your own, build(cfg) calls the class",
        }
    )
    def __init__(
        self,
        name: str,
        *,
        locations: Iterable[str] | None = None,
        entry_points: str | None = None,
        lists_names: bool = False,
    ) -> None:
        self.name = name
        self._lists_names = lists_names
        self._modules: dict[str, Factory] = {}
        self._locations: dict[str, tuple[str, ...]] | None = None if locations is None else dict.fromkeys(locations, ())
        self._lookups: list[tuple[Callable[[str], Factory | None], Callable[[], Iterable[str]]]] = []
        self._refused: dict[str, str] = {}
        self._entry_points = entry_points

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: None = None
    ) -> Callable[[T], T]: ...

    @overload
    def register_module(self, name: str | Sequence[str] | None = None, force: bool = False, *, module: T) -> T: ...

    def register_module(self, name: str | Sequence[str] | None = None, force: bool = False, module: Any = None) -> Any:
        """Return a decorator that registers a class or function under ``name`` (default: its own name).

        Called as ``register_module(name=..., module=Class)`` it registers at once and returns the class, as in MMEngine.

        Args:
            name: one name, or several.
            force: replace what has the name.
            module: the class or function to register.

        Raises:
            ConfigError: the name is taken and ``force`` is False, or an argument has another type.
        """
        if _is_factory(name):
            raise ConfigError(
                f"{self.name}: register_module got a class for a name, write register_module() with brackets"
            )
        names = name if isinstance(name, (list, tuple)) else () if name is None else (name,)
        if not all(isinstance(each, str) for each in names):
            raise ConfigError(f"{self.name} {_brief(name)}: is no name, give a string, or a list of them")
        if not isinstance(force, bool):
            raise ConfigError(f"{self.name}: force={_brief(force)} is not allowed, give True or False")
        register = self._register(tuple(names), force)
        return register if module is None else register(module)

    def _register(self, names: tuple[str, ...], force: bool) -> Callable[[T], T]:
        def register(target: T) -> T:
            if not callable(target):
                raise ConfigError(f"{self.name}: {_brief(target)} cannot be registered, give a class or function")
            own = getattr(target, "__name__", None)
            if not names and own is None:
                raise ConfigError(
                    f"{self.name}: {_brief(target)} has no name of its own, give register_module(name=...)"
                )
            for key in names or (str(own),):
                self._load(key, unlisted=False)  # the library's own class of this name comes first
                if not force and self._modules.get(key, target) is not target:
                    raise ConfigError(
                        f'{self.name} "{key}": already registered as {self._modules[key]}, pass force=True'
                    )
                self._modules[key] = target
            return target

        return register

    def add_lookup(
        self, lookup: Callable[[str], Factory | None], names: Callable[[], Iterable[str]] | None = None
    ) -> None:
        """Add a function that finds further names on demand; ``names`` lists them, for suggestions.

        Functions without such a list are asked last: importing a library takes seconds.
        """
        self._lookups.append((lookup, names or tuple))
        self._lookups.sort(key=lambda each: each[1] is tuple)

    def refuse(self, names: Mapping[str, str]) -> None:
        """Name classes of other libraries that have no counterpart here, each with what to do instead, for the message."""
        self._refused.update(names)

    @property
    def module_dict(self) -> dict[str, Factory]:
        """What is registered so far, by name; the names of other libraries, found on demand, are not in it."""
        self._load()
        return self._modules

    def __contains__(self, key: object) -> bool:
        """Whether this is a name of the registry, or a class that is registered; no import path is."""
        if isinstance(key, str):
            return self._find(key) is not None
        self._load()
        return any(kind is key for kind in self._modules.values())

    def __len__(self) -> int:
        """Number of names."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[str]:
        """All names, sorted."""
        own = self._own_names()  # first: it may add functions that find more
        return iter(sorted({*own, *(name for _, names in self._lookups for name in names())}))

    def get(self, key: str | Factory) -> Factory | None:
        """The class or function that ``key`` names, or None, as in MMEngine; ``resolve`` raises instead.

        Raises:
            ConfigError: ``key`` is no name, or a module on its import path is there and cannot be imported.
        """
        try:
            return self._resolve(key, "type", ())
        except UnknownNameError:
            return None

    def resolve(self, key: str | Factory, where: str = "type", others: Iterable[str] = ()) -> Factory:
        """The class or function that ``key`` names.

        Args:
            key: a class or function (returned as it is), a short name, or an import path: ``package.module:Name`` or
                ``package.module.Name``.
            where: the configuration key, for the message.
            others: further names that are allowed there, for the message.

        Raises:
            ConfigError: the name is unknown; the message suggests the nearest one.
        """
        try:
            return self._resolve(key, where, others)
        except UnknownNameError as error:
            raise ConfigError(str(error)) from None

    def _resolve(self, key: str | Factory, where: str, others: Iterable[str]) -> Factory:
        if isinstance(key, str):
            found = self._find(key)
            if found is not None:
                return found
            if (instead := self._refused.get(key)) is not None:
                raise UnknownNameError(f'{where}: "{key}" is not supported, {instead}')
            if ":" in key:
                return import_path(key, where)
            if "." in key:
                return import_dotted(key, where)
            names = [*self, *self.short_names(), *others]
            hint = f', did you mean "{NAMES[key]}"?' if NAMES.get(key) in names else self._suggest(key, names)
            if not hint and names and self._lists_names:
                hint = f", choose {one_of(sorted(names))}"
                if key.endswith(self.name.title()):  # a class of the user's
                    hint += f"; one of your own: import its module, or give package.module:{key}"
            raise UnknownNameError(f'{where}: "{key}" is no known {self.name}{hint}')
        if _is_factory(key):
            return key
        raise ConfigError(
            f"{where}: {_brief(key)} is not allowed, give a {self.name}'s class, name, or package.module:Name"
        )

    def short_names(self, wanted: str | None = None) -> dict[str, dict[str, Any]]:
        """The configuration of each short name: ``{"zero1": {"type": "...", "stage": 1}}``.

        A class declares short names in its attribute ``short_names``, a mapping from name to options. Subclasses do not
        inherit them.

        Args:
            wanted: the one short name that is looked for, so that no module is imported for the others.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in self._own_names(wanted):
            try:
                declared = getattr(self.resolve(name), "__dict__", {}).get("short_names", {})
            except Exception as error:  # the entry point of a foreign package may raise anything
                logger.warning('%s "%s" cannot be loaded: %s', self.name, name, error)
                continue
            for short, options in declared.items():
                found.setdefault(short, {"type": name, **options})
        return found

    def expand(self, cfg: Any, where: str) -> dict[str, Any]:
        """``cfg`` as a dict with ``type``; a short name is replaced by its configuration.

        If the class of a short name has a class method ``options_of(text, where)``, the name may be followed by a colon and
        a text with options: ``"mesh:tp2xpp2"``.

        Raises:
            ConfigError: ``cfg`` has no type, or an option differs from that of the short name.
        """
        kind, options = self._split(cfg, where)
        if isinstance(kind, str) and (meant := self._written_out(kind, where)):
            return _merged(meant, options, where, kind)
        if not isinstance(kind, str) or set(kind) & set(":.") or self._find(kind) is not None:
            return {"type": kind, **options}
        short = self.short_names(kind).get(kind, {"type": kind})
        return _merged(short, options, where, kind)

    def _written_out(self, kind: str, where: str) -> dict[str, Any] | None:
        """The configuration of a short name with options of its own after a colon, such as "mesh:tp2xpp2"."""
        short, colon, text = kind.partition(":")
        if not colon or "." in short or short not in (known := self.short_names(short)):
            return None
        options_of = getattr(self.resolve(known[short]["type"], where), "options_of", None)
        return None if options_of is None else {**known[short], **options_of(text, where)}

    def check(self, cfg: Any, where: str, provided: tuple[str, ...] = ()) -> Factory:
        """Check the type and the arguments of ``cfg`` without building; return its class.

        Raises:
            ConfigError: unknown type, or unknown, missing or wrongly typed arguments.
        """
        kwargs = self.expand(cfg, where)
        factory = self.resolve(kwargs.pop("type"), where if isinstance(cfg, str) else f"{where}.type")
        check_call(factory, kwargs, where, tuple(_accepted(factory, {"where": where, **dict.fromkeys(provided)})))
        return factory

    def build(
        self,
        cfg: Any,
        where: str | None = None,
        *,
        default_args: Any = None,
        **provided: Any,
    ) -> Any:
        """Build the object that ``cfg`` describes.

        Args:
            cfg: ``dict(type=..., **arguments)``, a name, or a class.
            where: the configuration key, for messages; default: the registry's name.
            default_args: a dict of arguments, or the type, where ``cfg`` does not give them, as in MMEngine.
            provided: arguments that the library adds; those that the class does not take are left out. A keyword-only
                parameter ``where`` gets the configuration key, so that a class can name its nested keys in errors.

        Raises:
            ConfigError: unknown type, or unknown, missing or wrongly typed arguments.
        """
        where = where or self.name
        if default_args is not None:
            cfg = {**default_args, **(cfg if isinstance(cfg, Mapping) else {"type": cfg})}
        kwargs = self.expand(cfg, where)
        factory = self.resolve(kwargs.pop("type"), where if isinstance(cfg, str) else f"{where}.type")
        provided = _accepted(factory, {"where": where, **provided})
        check_call(factory, kwargs, where, tuple(provided))
        return factory(**kwargs, **provided)

    def _split(self, cfg: Any, where: str) -> tuple[Any, dict[str, Any]]:
        if isinstance(cfg, Mapping):
            if "type" not in cfg:
                if meant := nearest("type", cfg, 0.75):
                    raise ConfigError(f'{where}.{meant}: unknown key, did you mean "type"?')
                raise ConfigError(f"{where}.type: missing, say which {self.name}")
            return cfg["type"], {key: value for key, value in cfg.items() if key != "type"}
        if isinstance(cfg, str) or _is_factory(cfg):
            return cfg, {}
        raise ConfigError(f"{where}: {_brief(cfg)} is not allowed, give dict(type=...), a class, or a name")

    def _suggest(self, key: str, names: Iterable[str]) -> str:
        """The name most like ``key``; where both end in the kind, as classes do, by what is before it."""
        ending = self.name.title()
        stems = {name.removesuffix(ending): name for name in names if name.endswith(ending)}
        if not (stem := key.removesuffix(ending)) or stem == key:
            return suggest(key, names)
        found = nearest(stem, stems)
        return f', did you mean "{stems[found]}"?' if found else ""

    def _find(self, key: str) -> Factory | None:
        if key not in self._modules:
            self._load(key)
        if key in self._modules:
            return self._modules[key]
        for lookup, _ in self._lookups:
            if found := lookup(key):
                return found
        for entry_point in entry_points(self._entry_points):
            if entry_point.name == key:
                self._modules[key] = entry_point.load()
                return self._modules[key]
        return None

    def _load(self, name: str | None = None, unlisted: bool = True) -> None:
        """Import the modules that register ``name``, and with ``unlisted`` those that do not list theirs; default: all."""
        if self._locations is None:
            self._locations = dict(REGISTERING_MODULES.get(self.name, {}))
        for module, names in list(self._locations.items()):
            if (name is None or name in names or (unlisted and not names)) and module in self._locations:
                del self._locations[module]
                importlib.import_module(module)

    def _own_names(self, name: str | None = None) -> list[str]:
        """Names that are registered or come from entry points, sorted; with ``name`` those that may be, or declare, it."""
        self._load(name)
        return sorted({*self._modules, *(entry_point.name for entry_point in entry_points(self._entry_points))})


def entry_points(group: str | None) -> Any:
    """The entry points of a group that installed packages have, also those installed meanwhile; those of no group are none."""
    # Installing a package changes its folder.
    folders = tuple((folder, Path(folder).stat().st_mtime_ns) for folder in sys.path if Path(folder).exists())
    return _installed_entry_points(folders).select(group=group) if group else ()


@functools.lru_cache(maxsize=1)
def _installed_entry_points(_folders: tuple[tuple[str, int], ...]) -> Any:
    return importlib.metadata.entry_points()


def _merged(short: Mapping[str, Any], options: Mapping[str, Any], where: str, name: str) -> dict[str, Any]:
    """``options`` completed by those of the short name ``name``."""
    merged = dict(options)
    for key, value in short.items():
        given = merged.setdefault(key, value)
        if isinstance(value, Mapping) and isinstance(given, Mapping):
            merged[key] = _merged(value, given, f"{where}.{key}", name)
        elif given != value:
            raise ConfigError(f'{where}.{key}: {_brief(given)} disagrees with type "{name}", give one of them')
    return merged


def _accepted(factory: Factory, provided: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        parameters = {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = {name: value for name, value in provided.items() if takes_any or name in parameters}
    # A foreign class may use the name "where" for another argument.
    if "where" not in parameters or parameters["where"].kind is not inspect.Parameter.KEYWORD_ONLY:
        accepted.pop("where", None)
    return accepted


def _is_factory(value: Any) -> bool:
    """Whether ``value`` is a class or function to call; a callable object (a model) is used as it is."""
    return inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, functools.partial)


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _torch_optimizer(name: str) -> Factory | None:
    import torch

    found = getattr(torch.optim, name, None)
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return found
    return None


def _torch_optimizer_names() -> list[str]:
    import torch

    return [name for name in dir(torch.optim) if _torch_optimizer(name)]


def _function(name: str) -> Factory | None:
    from torch.utils import data

    return data.default_collate if name == "default_collate" else None


MODELS = Registry("model", entry_points="flextrain.models")
DATASETS = Registry("dataset", entry_points="flextrain.datasets")
FUNCTIONS = Registry("function")
FUNCTIONS.add_lookup(_function, lambda: ["default_collate"])
OPTIMIZERS = Registry("optimizer", entry_points="flextrain.optimizers")
OPTIMIZERS.add_lookup(_torch_optimizer, _torch_optimizer_names)
OPTIM_WRAPPERS = Registry("optimizer wrapper", lists_names=True)
OPTIM_WRAPPER_CONSTRUCTORS = Registry("optimizer wrapper constructor")
PARAM_SCHEDULERS = Registry("parameter scheduler")
STRATEGIES = Registry("strategy", entry_points="flextrain.strategies", lists_names=True)
DATA_SAMPLERS = Registry("sampler")
METRICS = Registry("metric", entry_points="flextrain.metrics")
EVALUATOR = Registry("evaluator")
HOOKS = Registry("hook", entry_points="flextrain.hooks")
LOOPS = Registry("loop", lists_names=True)
REPORTERS = Registry("reporter", entry_points="flextrain.reporters")
TRANSFORMS = Registry("transform", entry_points="flextrain.transforms", lists_names=True)
VISUALIZERS = Registry("visualizer")
REGISTRIES = [value for value in globals().values() if isinstance(value, Registry)]


@contextmanager
def registrations_undone(module: str) -> Iterator[None]:
    """Context that removes, at its end, the names that ``module`` registered inside, from every registry."""
    before = [dict(each._modules) for each in REGISTRIES]
    try:
        yield
    finally:
        for each, names in zip(REGISTRIES, before, strict=True):
            own = {name for name, kind in each._modules.items() if getattr(kind, "__module__", "") == module}
            for name in own - names.keys():
                del each._modules[name]
