"""Describe a class or function: its signature with what its docstrings, and those of its bases, say of each argument."""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, Literal

import pydantic
from pydantic.fields import FieldInfo

from ..core.base.config import Config
from ..core.base.errors import FlexTrainError
from .entry import Argument, Entry, Method, Raised

# Types and defaults as text for people: ``"a" | "b"``, ``int, 1 or more``, ``dict | None``.


_WORDS = {
    Any: "any",
    type(None): "None",
    collections.abc.Mapping: "dict",
    collections.abc.MutableMapping: "dict",
    collections.abc.Sequence: "list",
    collections.abc.Iterable: "iterable",
    collections.abc.Collection: "list",
    collections.abc.Callable: "function",
}
_BOUNDS = {"ge": "{} or more", "gt": "above {}", "le": "{} or less", "lt": "below {}"}


def type_text(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type as text; ``metadata`` is pydantic's, with bounds."""
    bounds = list(_bounds(metadata))
    if typing.get_origin(annotation) is Annotated:
        bounds += _bounds(typing.get_args(annotation)[1:])
        annotation = typing.get_args(annotation)[0]
    return ", ".join([_text(annotation), *bounds])


def default_text(value: Any) -> str:
    """A default as Python writes it; functions and classes by name, a configuration as ``dict(...)``."""
    if isinstance(value, pydantic.BaseModel):
        given = {key: getattr(value, key) for key in sorted(value.model_fields_set)}
        return f"dict({', '.join(f'{key}={default_text(item)}' for key, item in given.items())})"
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    if isinstance(value, str):
        return f'"{value}"' if '"' not in value else repr(value)
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(default_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1_000_000_000:
        return f"{value:,}".replace(",", "_")
    text = f"{value:.6g}" if isinstance(value, float) and len(repr(value)) > 8 else repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def hints_of(function: Any) -> dict[str, Any]:
    """The annotations of a function, resolved where their names can be found, else as text."""
    found: dict[str, Any] = {}
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            found |= typing.get_type_hints(alone, scope, include_extras=True)
        except Exception:  # evaluating an annotation may raise anything: names for type checkers only, foreign code
            found[name] = annotation
    return found


def _bounds(metadata: Iterable[Any]) -> Iterable[str]:
    for each in metadata:
        inner = getattr(each, "metadata", None)  # of pydantic's FieldInfo
        if inner:
            yield from _bounds(inner)
        for name, words in _BOUNDS.items():
            if (value := getattr(each, name, None)) is not None:
                yield words.format(value)


def _text(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union(inner)
    if origin is Literal:
        return " | ".join(map(default_text, inner))
    if origin is Annotated:
        return type_text(annotation)
    if origin in _WORDS or annotation in _WORDS:
        return _WORDS[origin if origin in _WORDS else annotation] if origin is not None else _WORDS[annotation]
    if origin is type:
        return "class"
    if origin in (list, tuple, set) and inner:
        parts = [_text(each) for each in inner if each is not Ellipsis]
        return f"{origin.__name__}[{', '.join(parts)}]"
    if origin is dict or annotation is dict:
        return "dict"
    if inspect.isclass(annotation) and origin is None:  # list[int] is a class too on Python 3.10
        is_model = issubclass(annotation, pydantic.BaseModel)
        return "dict" if is_model else annotation.__name__
    return str(annotation).replace("typing.", "")


def _union(inner: tuple[Any, ...]) -> str:
    """The members once each, None last; ``float | int`` is ``float``."""
    texts = [_text(each) for each in inner if each is not type(None)]
    if "float" in texts and "int" in texts:
        texts.remove("int")
    flat = list(dict.fromkeys(texts))
    return " | ".join([*flat, *(["None"] if type(None) in inner else [])])


def signature_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class or function; empty if it has no signature."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


# Read docstrings: the summary, the text, and the sections "Args:", "Raises:", "Returns:", "Example:", "Source:".


_SECTION = re.compile(
    r"(Args|Arguments|Keyword Args|Attributes|Returns|Yields|Raises|Examples?|Notes?|Warning|Source|References):(?: +(\S.*))?$"
)
_ITEM = re.compile(r"(\*{0,2}[\w.]+(?:, *\*{0,2}[\w.]+)*)(?: *\(([^()]*(?:\([^()]*\)[^()]*)*)\))? *:(?:\s+(.*))?$")
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z`])")


@dataclass
class Docstring:
    """What a docstring says."""

    summary: str = ""
    text: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    """Meanings by name, of arguments and attributes."""
    types: dict[str, str] = field(default_factory=dict)
    """Types by name, where the docstring has them: ``lr (float): ...``."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Meanings of the attributes alone."""
    returns: str = ""
    raises: tuple[Raised, ...] = ()
    example: str = ""
    source: str = ""


def read_docstring(text: str | None) -> Docstring:
    """Read a docstring of Google's style, as flextrain and torch have it; an empty one for None."""
    found = Docstring()
    body: list[str] = []
    for name, lines in _sections(inspect.cleandoc(text or "").splitlines()):
        content = textwrap.dedent("\n".join(lines)).strip("\n")
        if name == "":
            body.append(content)
        elif name in ("Args", "Arguments", "Keyword Args", "Attributes"):
            for names, kind, meaning in _items(content):
                for each in re.split(r", *", names):
                    found.arguments.setdefault(each.lstrip("*"), meaning)
                    found.types.setdefault(each.lstrip("*"), kind)
                    if name == "Attributes":
                        found.attributes[each] = meaning
        elif name == "Raises":
            found.raises = tuple(
                Raised(each, meaning) for names, _, meaning in _items(content) for each in re.split(r", *", names)
            )
        elif name in ("Returns", "Yields"):
            found.returns = joined(content)
        elif name.startswith("Example"):
            found.example = found.example or content
        elif name in ("Source", "References"):
            found.source = joined(content)
    paragraphs = [part for part in "\n\n".join(body).split("\n\n") if part.strip()]
    first = joined(paragraphs[0]) if paragraphs else ""
    found.summary = _SENTENCE.split(first)[0]
    rest = first[len(found.summary) :].strip()
    found.text = "\n\n".join([*([rest] if rest else []), *map(_kept, paragraphs[1:])])
    return found


def joined(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


def _kept(paragraph: str) -> str:
    """A paragraph on one line; a list, or indented text, as it stands."""
    lines = paragraph.splitlines()
    is_list = any(line.startswith(("- ", "* ", "  ")) for line in lines)
    return paragraph if is_list else joined(paragraph)


def _sections(lines: list[str]) -> list[tuple[str, list[str]]]:
    """The lines of each section, by its name; those outside of sections under ""."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        header = _SECTION.match(line)
        if header:
            found.append((header[1], [header[2]] if header[2] else []))
        elif found[-1][0] and line and not line.startswith(" ") and not _continues(found[-1]):
            found.append(("", [line]))
        else:
            found[-1][1].append(line)
    return found


def _continues(section: tuple[str, list[str]]) -> bool:
    """Whether an unindented line goes on with the section: with "Source: Kingma, ..." on several lines."""
    name, lines = section
    return name == "Source" and bool(lines) and bool(lines[-1])


def _items(content: str) -> list[tuple[str, str, str]]:
    """Names, type and meaning of each item ``name (type): meaning`` with its further lines."""
    found: list[list[str]] = []
    for line in content.splitlines():
        item = None if line.startswith(" ") else _ITEM.match(line)
        if item:
            found.append([item[1], item[2] or "", item[3] or ""])
        elif found:
            found[-1][2] += f"\n{line}"
    return [(names, kind, joined(meaning)) for names, kind, meaning in found]


# The meaning of attributes: the string below an assignment in a class, which only the source has.


def attribute_meanings(kind: Any) -> dict[str, str]:
    """Meanings by name of the attributes that a class itself defines; empty without its source."""
    return _read(kind)


@functools.cache
def _read(kind: Any) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    last: str | None = None
    (definition,) = tree.body
    for node in definition.body if isinstance(definition, ast.ClassDef) else ():
        if last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last] = joined(str(node.value.value))
        last = _assigned(node)
    return found


def _assigned(node: ast.stmt) -> str | None:
    target = (
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    )
    return target.id if isinstance(target, ast.Name) else None


# Docstrings of other libraries: torch's and DeepSpeed's optimizers and schedulers, torchmetrics' metrics.


_ROLE = re.compile(r":[\w:]+:`~?(?:[^`<]*<)?([^`>]+)>?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?")
_DEFAULT = re.compile(r"\s*[(,]?\s*\(?[Dd]efaults?(?: is|:)?\s*`*[^\s()`]+`*(?:\s*\([^)]*\))?\)?\.?$")

# What the docstrings of DeepSpeed's optimizers leave out.
_CPU_ADAGRAD = {
    "lr": "learning rate",
    "eps": "added to the denominator, for numerical stability",
    "weight_decay": "weight decay, added to the gradients",
    "amsgrad": "has no effect",
    "fp32_optimizer_states": "keep the state in float32, whatever the dtype of the parameters",
}
_BIAS = {"bias_correction": "correct the moments for their start at zero"}
_MEANINGS: dict[str, Mapping[str, str]] = {
    "DeepSpeedCPUAdagrad": _CPU_ADAGRAD,
    "DeepSpeedCPUAdam": _BIAS,
    "FusedAdam": _BIAS,
}
_SUMMARIES = {
    "DeepSpeedCPUAdagrad": "Adagrad on the CPU, for optimizer state in host memory.",
    "DeepSpeedCPUAdam": "Adam and AdamW on the CPU, for optimizer state in host memory.",
    "DeepSpeedCPULion": "Lion on the CPU, for optimizer state in host memory.",
}
REFUSED = {"LBFGS": "it evaluates the loss several times per update, and a training loop computes it once"}
"""Types that are found by name and that every runner refuses, with the reason."""


def is_foreign(target: Any) -> bool:
    """Whether a class or function is of another library than flextrain and the user's: its docstring has another form."""
    if getattr(target, "scheduler", None) is not None:  # one of torch's, as flextrain runs it
        return True
    package = str(getattr(target, "__module__", "")).partition(".")[0]
    return package in ("torch", "torchmetrics", "deepspeed", "torch_npu", "torchvision")


def said_by_others(target: Any) -> Docstring:
    """The summary, and where the rest stands: their texts hold formulas and links of a documentation system."""
    original = getattr(target, "scheduler", target)
    own = read_docstring(vars(original).get("__doc__") if inspect.isclass(original) else original.__doc__)
    summary = (
        _SUMMARIES.get(original.__name__) or unmarked(own.summary) or f"{original.__name__}, without a description."
    )
    package = original.__module__.partition(".")[0]
    return Docstring(summary=summary, text=f"A {_noun(original)} of {package}, whose documentation says more.")


def missing_meanings(target: Any) -> Mapping[str, str]:
    """Meanings of arguments that the library's docstring does not have."""
    return _MEANINGS.get(getattr(target, "__name__", ""), {}) if is_foreign(target) else {}


def unmarked(text: str) -> str:
    """The text without the marks of a documentation system, and without a default, which the signature has."""
    text = re.sub(r"`([^`]+)`__?", r"\1", re.sub(r"\s*\.\. \w+::.*", "", text))
    text = _LINK.sub(r"\1", _ROLE.sub(lambda found: found[1].rpartition(".")[2], text))
    text = re.sub(r"\*\*(.+?)\*\*", r"\1", text.replace("``", "`").replace(r"\beta", "beta"))
    return _DEFAULT.sub("", text).strip()


def left_to_others(target: Any) -> str:
    """The meaning of an argument that another library's docstring does not explain; empty for classes of the user's."""
    return f"see the documentation of {target.__module__.partition('.')[0]}" if is_foreign(target) else ""


def _noun(target: Any) -> str:
    return "class" if inspect.isclass(target) else "function"


_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def describe(name: str, target: Any, kind: str, group: str, filled_in: Collection[str] = ()) -> Entry:
    """The entry of a class or function.

    Args:
        name: what the user writes.
        target: the class or function.
        kind: see Entry.
        group: see Entry.
        filled_in: parameters that flextrain gives.
    """
    said = documentation(target)
    options = getattr(target, "Config", None)
    own_example = said.example or (documentation(options).example if inspect.isclass(options) else "")
    return Entry(
        name=name,
        kind=kind,
        group=group,
        home=home_of(target),
        summary=said.summary,
        text=said.text,
        arguments=tuple(arguments_of(target, filled_in)),
        returns="" if inspect.isclass(target) else said.returns,
        raises=said.raises,
        example=own_example,
        source=said.source,
    )


def home_of(target: Any) -> str:
    """The import path ``package.module:Name``."""
    original = getattr(target, "scheduler", target) if inspect.isclass(target) else target  # a scheduler of torch
    return f"{original.__module__}:{getattr(original, '__qualname__', original)}"


def documentation(target: Any) -> Docstring:
    """What the docstring says; that of a base where ``dataclass`` has written only the signature, or where there is none."""
    if is_foreign(target):
        return said_by_others(target)
    text = target.__doc__ or ""
    if inspect.isclass(target) and (not text or (is_dataclass(target) and text.startswith(f"{target.__name__}("))):
        base = target.__bases__[-1]  # mixins come first
        return documentation(base) if base is not object else Docstring()
    return read_docstring(text)


def arguments_of(target: Any, filled_in: Collection[str] = ()) -> Iterator[Argument]:
    """The arguments of a class or function with their meanings; of a configuration its keys."""
    if inspect.isclass(target) and issubclass(target, Config):
        yield from keys_of(target)
        return
    if isinstance(options := getattr(target, "Config", None), type) and issubclass(options, Config):
        yield from keys_of(options)
        return
    meanings, types = _said_of_arguments(target)
    hints = _hints(target)
    for parameter in signature_of(target).values():
        if _is_hidden(parameter) or parameter.name.startswith("_"):
            continue
        stars = _STARS.get(parameter.kind, "")
        if stars and parameter.name not in meanings:
            continue
        hint = hints.get(parameter.name, parameter.annotation)
        yield Argument(
            name=stars + parameter.name,
            type=types.get(parameter.name, "") if hint is parameter.empty else type_text(hint),
            default=_default(parameter) if not stars else "",
            meaning=meanings.get(parameter.name, "") or left_to_others(target),
            is_filled_in=parameter.name in filled_in,
        )


def keys_of(model: type[Config]) -> Iterator[Argument]:
    """The keys of a configuration, own ones before inherited ones."""
    fields = model.model_fields
    own = [name for name in fields if name in inspect.get_annotations(model)]
    for name in [*own, *(name for name in fields if name not in own)]:
        field = fields[name]
        if _refuses(model, name, field):
            continue
        meaning = next((found for kind in model.__mro__ if (found := attribute_meanings(kind).get(name))), "")
        yield Argument(
            name=name,
            type=type_text(field.annotation, field.metadata),
            default=None if field.is_required() else default_text(field.get_default(call_default_factory=True)),
            meaning=meaning,
        )


def _refuses(model: type[Config], name: str, field: FieldInfo) -> bool:
    """Whether a configuration refuses a key that it has inherited, whatever its value."""
    if field.is_required() or not _takes(model, {}):
        return False
    return not _takes(model, {name: field.get_default(call_default_factory=True)})


def _takes(model: type[Config], values: dict[str, Any]) -> bool:
    try:
        model.model_validate(values)
    except (ValueError, FlexTrainError):
        return False
    return True


def methods_of(kind: type[Any]) -> Iterator[Method]:
    """The attributes of a class that its docstring names, and its public methods and properties, with those of its bases."""
    package = kind.__module__.partition(".")[0]
    given = signature_of(kind)
    meanings = {name: text for owner in reversed(kind.__mro__) for name, text in _attributes(owner, package).items()}
    yield from (Method(name, "", text) for name, text in meanings.items() if name not in given)
    seen: set[str] = set()
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] != package:
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if isinstance(value, property):
                yield Method(name, "", read_docstring(value.__doc__).summary)
            elif inspect.isfunction(function):
                yield Method(name, _signature(function), _summary_of_method(kind, name))


def _attributes(owner: type[Any], package: str) -> dict[str, str]:
    said = owner.__module__.partition(".")[0] == package
    return read_docstring(owner.__doc__).attributes if said else {}


def _summary_of_method(kind: type[Any], name: str) -> str:
    """The first sentence of a method's docstring, or of the one that it overrides."""
    for owner in kind.__mro__:
        if (own := vars(owner).get(name)) is not None and (text := getattr(own, "__doc__", None)):
            return read_docstring(text).summary
    return ""


def _signature(function: Callable[..., Any]) -> str:
    names = []
    for parameter in signature_of(function).values():
        if _is_hidden(parameter):
            continue
        stars = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={default_text(parameter.default)}"
        names.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(names)})"


def _is_hidden(parameter: inspect.Parameter) -> bool:
    """Whether no user gives it, such as ``where``, the configuration key for messages, unless a call is wrong without it."""
    is_needed = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    return parameter.name in ("self", "cls") or (parameter.name == "where" and not is_needed)


def _default(parameter: inspect.Parameter) -> str | None:
    return None if parameter.default is parameter.empty else default_text(parameter.default)


def _owners(target: Any) -> list[Any]:
    """The class with its bases and their constructors, or the function: whatever may say what an argument means."""
    if not inspect.isclass(target):
        return [target]
    found: list[Any] = []
    for kind in target.__mro__[:-1]:
        found.append(kind)
        if "__init__" in vars(kind):
            found.append(vars(kind)["__init__"])
    return found


def _said_of_arguments(target: Any) -> tuple[dict[str, str], dict[str, str]]:
    meanings: dict[str, str] = dict(missing_meanings(target))
    types: dict[str, str] = {}
    for owner in _owners(target):
        said = read_docstring(getattr(owner, "__doc__", None))
        own = {**(attribute_meanings(owner) if inspect.isclass(owner) else {}), **said.arguments}
        meanings.update({name: text for name, text in own.items() if name not in meanings and text})
        meanings.update({name: _looked_up(name, text, target) for name, text in meanings.items()})
        types.update({name: text for name, text in said.types.items() if name not in types and text})
    return meanings, types


def _looked_up(name: str, text: str, target: Any) -> str:
    """The meaning; that of another class where the docstring only says "see OptimWrapper"."""
    if is_foreign(target):
        return unmarked(text)
    refers = re.fullmatch(r"see (\w+)\.?", text)
    other = refers and getattr(sys.modules[target.__module__], refers[1], None)
    return _said_of_arguments(other)[0].get(name, text) if inspect.isclass(other) and other is not target else text


def _hints(target: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner in reversed(_owners(target)):
        function = getattr(owner, "__init__", None) if inspect.isclass(owner) else owner
        found |= hints_of(function) if function is not None else {}
    return found
