"""Validate configuration with pydantic: models, checks of a call's arguments by its signature, one-line errors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, StrictBool, StrictFloat, StrictInt, StrictStr

from .errors import ConfigError, one_line, one_of, suggest


class Config(BaseModel):
    """Base class of every component's configuration: unknown keys raise, values are not converted, fields frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, protected_namespaces=()
    )


PositiveInt = Annotated[int, pydantic.Field(ge=1)]
"""An int of 1 or more; a constructor's parameter with this annotation is checked with the configuration."""
NonNegativeInt = Annotated[int, pydantic.Field(ge=0)]
"""An int of 0 or more, in the same way."""

ModelT = TypeVar("ModelT", bound=BaseModel)
P = ParamSpec("P")
T = TypeVar("T")


def validate(model: type[ModelT], data: Mapping[str, Any], where: str) -> ModelT:
    """Return ``data`` as an instance of ``model``.

    Raises:
        ConfigError: the data is not valid; one line that names the first wrong key as ``where.key``.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: {_show(data)} is not allowed, give a dict")
    try:
        return model.model_validate(dict(data))
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error.errors(include_url=False), where, model, data)) from None


def explain(
    problems: Sequence[Any], where: str, model: type[BaseModel], data: Mapping[str, Any], hidden: tuple[str, ...] = ()
) -> str:
    """The error message, on one line, for the first problem that pydantic found when it validated ``data``.

    ``hidden`` are top-level keys that the user cannot give.
    """
    problem = next((p for p in problems if p["type"] in _UNKNOWN_KEY), problems[0])
    kind, given, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    location = _location(problem, data)
    path = where
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{one_line(part)}" if path else one_line(part)
    if kind in _UNKNOWN_KEY:
        known = [key for key in _keys_at(model, location[:-1]) if len(location) > 1 or key not in hidden]
        hint = suggest(str(location[-1]), known) or (f", choose {one_of(known)}" if known else ", no key is allowed")
        return f"{path}: unknown key{hint}"
    if kind == "missing":
        return f"{path}: missing, it must be given"
    if kind == "value_error":
        message = str(context.get("error", problem["msg"]))
        return message if message.startswith(f"{where}.") else f"{path}: {message}"
    if kind in ("literal_error", "enum"):
        allowed = str(context.get("expected", "")).replace("'", '"')
        hint = (
            suggest(given, allowed.replace('"', "").replace(" or ", ", ").split(", ")) if isinstance(given, str) else ""
        )
        others = _wanted(location, [p for p in problems if p["type"] != kind], data)
        return f"{path}: {_show(given)} is not allowed, choose {allowed}{hint or others.replace('give', ' or give', 1)}"
    return f"{path}: {_show(given)} is not allowed, {_wanted(location, problems, data)}"


def _location(problem: Any, data: Any) -> list[Any]:
    """The keys and positions that lead to a problem, without the union branches that pydantic puts between them."""
    location: list[Any] = []
    for part in problem["loc"]:
        sequence = isinstance(data, (list, tuple)) and isinstance(part, int) and part < len(data)
        if sequence or (isinstance(data, Mapping) and part in data):
            data = data[part]
            location.append(part)
        elif problem["type"] == "missing" and part == problem["loc"][-1]:
            location.append(part)
    return location


def _keys_at(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """The keys of the model at ``location`` inside ``model``."""
    for part in location:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        if isinstance(part, int) or part not in fields:
            continue
        nested = _nested_model(fields[part].annotation)
        if nested is None:
            return []
        model = nested
    return [field.alias or name for name, field in model.model_fields.items()]


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    # Python 3.10 takes list[int] for a class.
    if not typing.get_args(annotation) and inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in typing.get_args(annotation) if (found := _nested_model(arg))), None)


def _wanted(location: list[Any], problems: Sequence[Any], data: Any) -> str:
    """The advice "give ...": the expected values of all union branches that failed at this location."""
    same = [p for p in problems if _location(p, data) == location and p["type"] not in _UNKNOWN_KEY]
    wanted = list(dict.fromkeys(_words(p) for p in same))
    if "a number" in wanted and "an integer" in wanted:
        wanted.remove("an integer")
    return "give " + " or ".join(wanted) if wanted else ""


def _words(problem: Any) -> str:
    words = _WORDS.get(problem["type"])
    return words.format(**problem.get("ctx", {})) if words else _as_asked(str(problem["msg"]))


def _as_asked(message: str) -> str:
    """The expected input, from pydantic's message."""
    for start in ("Input should be a valid ", "Input should be an instance of ", "Input should be "):
        message = message.removeprefix(start)
    return {"Sequence": "a list", "Mapping": "a dict"}.get(message) or one_line(message).replace("'", '"')


_UNKNOWN_KEY = ("extra_forbidden", "invalid_key")
_WORDS = {
    "dict_type": "a dict",
    "mapping_type": "a dict",
    "model_type": "a dict",
    "model_attributes_type": "a dict",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "True or False",
    "list_type": "a list",
    "sequence_str": "a list",
    "iterable_type": "a list",
    "tuple_type": "a tuple",
    "callable_type": "a function",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
}


def _show(value: Any) -> str:
    text = one_line(f'"{value}"' if isinstance(value, str) else repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


_STRICT: dict[Any, Any] = {int: StrictInt, float: StrictFloat | StrictInt, bool: StrictBool, str: StrictStr}


def _strict(annotation: Any) -> Any:
    """``annotation`` without pydantic's conversion of scalars ("8" is not 8), and Any where pydantic has no schema."""
    if annotation in _STRICT:
        return _STRICT[annotation]
    if annotation is None or annotation is type(None):
        return None
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        parts = (_strict(args[0]), *args[1:])
        return typing.cast(Any, Annotated)[parts]
    if origin in (typing.Union, types.UnionType):
        # A class next to a scalar (float | Tensor) is checked by isinstance; Any would accept every wrong scalar.
        branches = [_instance_of(arg) if _is_class(arg) and _strict(arg) is Any else _strict(arg) for arg in args]
        return typing.Union[tuple(branches)]  # noqa: UP007 - built at run time
    if origin is typing.Literal:
        return annotation
    if origin in (list, tuple, dict, set) or (isinstance(origin, type) and issubclass(origin, Iterable)):
        if (
            origin is not None
            and origin.__module__ == "collections.abc"
            and origin.__name__ in ("Callable", "Iterator")
        ):
            return Any
        inner = tuple(arg if arg is Ellipsis else _strict(arg) for arg in args)
        return origin[inner] if inner else Any
    if annotation in (list, dict, tuple):
        return annotation
    return Any


def _is_class(annotation: Any) -> bool:
    # inspect.isclass(Callable[[int], None]) is True before Python 3.11.
    return inspect.isclass(annotation) and annotation is not Any and typing.get_origin(annotation) is None


def _instance_of(cls: Any) -> Any:
    return Annotated[cls, pydantic.InstanceOf()]  # type: ignore[type-arg]


@functools.cache
def _signature_model(function: Callable[..., Any]) -> type[BaseModel] | None:
    """A pydantic model of the keyword arguments of ``function``; None if it has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    hints = _hints(function.__init__ if inspect.isclass(function) else function)
    fields: dict[str, Any] = {}
    open_ended = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[f"p_{parameter.name}"] = (
                _strict(hints.get(parameter.name, Any)),
                pydantic.Field(default, alias=parameter.name),
            )
    config = ConfigDict(
        extra="allow" if open_ended else "forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )
    return pydantic.create_model("Arguments", __config__=config, **fields)


def _hints(function: Any) -> dict[str, Any]:
    """The annotations that can be resolved; others (names imported for type checkers only, say) are not checked."""
    found: dict[str, Any] = {}
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(Exception):  # evaluating a foreign annotation may raise anything
            found |= typing.get_type_hints(alone, scope, include_extras=True)
    return found


def check_call(
    function: Callable[..., Any], kwargs: Mapping[str, Any], where: str, provided: tuple[str, ...] = ()
) -> None:
    """Check the names and plain types of the keyword arguments of a call, without calling.

    Args:
        function: a class or function; its annotations define what is allowed.
        kwargs: the arguments from a configuration.
        where: the configuration key, for the message.
        provided: parameters that the library fills in; the user must not give them.

    Raises:
        ConfigError: an unknown, missing or wrongly typed argument.
    """
    for name in provided:
        if name in kwargs:
            raise ConfigError(f"{where}.{name}: is filled in by flextrain, leave it out")
    model = _signature_model(function)
    if model is None:
        return
    try:
        model.model_validate(dict(kwargs))
    except pydantic.ValidationError as error:
        problems = [
            p for p in error.errors(include_url=False) if not (p["type"] == "missing" and p["loc"][0] in provided)
        ]
        if problems:
            raise ConfigError(explain(problems, where, model, kwargs, provided)) from None


def known_keywords(elsewhere: Mapping[str, str] | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: an unknown keyword raises a ConfigError that suggests the nearest name, instead of a TypeError.

    Args:
        elsewhere: keywords that are known from elsewhere, with what to do instead.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            check_keywords(kwargs, names, elsewhere or {})
            return function(*args, **kwargs)

        return checked

    return decorate


def check_keywords(given: Iterable[str], names: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    """Check that the given keywords are among ``names``; see ``known_keywords``.

    Raises:
        ConfigError: one of them is not.
    """
    known = list(names)
    for name in given:
        if name not in known:
            hint = f", {elsewhere[name]}" if name in elsewhere else suggest(name, known)
            raise ConfigError(f"{name}: unknown key{hint}")


# Classes of MMEngine that are given to flextrain's own runner: an error that says what to write instead.


_THEIRS = "mmengine"
_BRIDGE = f"{__name__.partition('.')[0]}.mmengine"


def is_of_mmengine(value: Any, within: str = _THEIRS) -> bool:
    """Whether an object, or a class, has a class of MMEngine among its bases.

    Args:
        within: only classes of this package or module of MMEngine count.
    """
    kind = value if inspect.isclass(value) else type(value)
    return any(f"{base.__module__}.".startswith(f"{within}.") for base in kind.__mro__)


def refuse_foreign(value: Any, where: str, instead: str, known: Container[str] = (), within: str = _THEIRS) -> None:
    """Raise ConfigError if ``value`` is made for MMEngine's runner.

    Args:
        value: an object or a class; a configuration is left alone, also one in MMEngine's ConfigDict.
        where: the configuration key.
        instead: flextrain's class to make a subclass of.
        known: the names of flextrain's own, of which one may have the same name.
        within: see ``is_of_mmengine``.
    """
    if isinstance(value, (Mapping, list, tuple)) or not is_of_mmengine(value, within):
        return
    kind = value if inspect.isclass(value) else type(value)
    own = f'give type="{kind.__name__}", which is flextrain\'s' if kind.__name__ in known else f"subclass {instead}"
    raise ConfigError(
        f"{where}: {kind.__name__} is made for MMEngine's runner, {own}; a project that keeps MMEngine imports FlexibleRunner from "
        f"{_BRIDGE}"
    )
