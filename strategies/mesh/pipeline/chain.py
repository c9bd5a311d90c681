"""Chain: the layers of a model that follow each other, what is before and after them, and how they are cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from ....core.base.errors import ConfigError, StrategyError, counted, suggest
from ....core.comm.agreement import gather_differing
from ....core.model.module_state import keepers
from ...recomputation import repeated_blocks
from ..plans import without_memory

_PREPROCESSOR = "data_preprocessor"


@dataclass
class Chain:
    """The layers of a model in their order, by name, and the submodules outside them that have parameters or state.

    Attributes:
        layers: names of the layers; each is called with what the one before it returned.
        before, after: names of the submodules that are called before and after them.
        own: names of the parameters of the modules that contain the layers, which may be used on either side.
    """

    layers: list[str]
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)


def stage_of(layer: int, spans: Sequence[tuple[int, int]]) -> int:
    """Return the stage that has a layer.

    Args:
        spans: first layer, and first layer after it, of every stage.
    """
    return next(stage for stage, (start, end) in enumerate(spans) if start <= layer < end)


def stages_of(name: str, chain: Chain, spans: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Return the stages that have a submodule, or a parameter, by its name."""
    last = len(spans) - 1
    if name in chain.own:
        return frozenset({0, last})
    for names, stage in ((chain.before, 0), (chain.after, last)):
        if any(name == part or name.startswith(f"{part}.") for part in names):
            return frozenset({stage})
    for number, part in enumerate(chain.layers):
        if name == part or name.startswith(f"{part}."):
            return frozenset({stage_of(number, spans)})
    return frozenset(range(len(spans)))


def chain_of(model: nn.Module, names: Sequence[str] | None = None) -> Chain:
    """Return the chain of a model.

    Args:
        names: of the layers in their order, or of one list of modules; None: found.

    Raises:
        ConfigError: a name that the model does not have, or a submodule with parameters between two layers.
        StrategyError: no layers are found.
    """
    layers = _found(model) if names is None else _named(model, names)
    chain = Chain(layers)
    holders = {_parent(name, depth) for name in layers for depth in range(1, len(name.split(".")) + 1)}
    inside, last = 0, {name: i for i, name in enumerate(layers)}
    planned_after = _planned_after(model)
    for name, module in model.named_modules():
        if name in last:
            inside += 1
            continue
        if name in holders:
            chain.own += [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
            continue
        if _parent(name, 1) not in holders or not _has_state(module) or name == _PREPROCESSOR:
            continue  # a part of something that was decided, or nothing that a process could lack
        if 0 < inside < len(layers):
            raise ConfigError(
                f'strategy.pp_layers: "{name}" stands between "{layers[inside - 1]}" and "{layers[inside]}" and has parameters, '
                "name it too"
            )
        (chain.after if inside or name in planned_after else chain.before).append(name)
    return chain


def _found(model: nn.Module) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    containers: dict[str, nn.Module] = {}
    blocks = repeated_blocks(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and any(child in blocks for child in module.children()):
            containers[name] = module
    if isinstance(model, nn.Sequential):
        containers = {"": model}
    elif not containers:
        sequences = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Sequential) and len(m) > 1]
        containers = dict(sequences[:1]) if len(_outermost(n for n, _ in sequences)) == 1 else {}
    if len(containers) != 1:
        several = ", ".join(f'"{name}"' for name in containers)
        found = f"several chains of layers, {several}" if several else "no list of layers that follow each other"
        raise StrategyError(
            f"strategy.pp: {type(model).__name__} has {found}; name its layers in their order, such as "
            'pp_layers=["layer1", "layer2"]'
        )
    return [names[id(child)] for child in next(iter(containers.values())).children()]


def _named(model: nn.Module, given: Sequence[str]) -> list[str]:
    known = {name: module for name, module in model.named_modules() if name}
    for i, name in enumerate(given):
        if name not in known:
            raise ConfigError(f'strategy.pp_layers[{i}]: the model has no "{name}"{suggest(name, known)}')
        if name in given[:i]:
            raise ConfigError(f'strategy.pp_layers[{i}]: "{name}" is named twice')
        outer = next((other for other in given if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(f'strategy.pp_layers[{i}]: "{name}" is inside of "{outer}", which is named too')
    if len(given) == 1 and isinstance(known[given[0]], (nn.ModuleList, nn.Sequential)):
        return [f"{given[0]}.{key}" for key, _ in known[given[0]].named_children()]
    return list(given)


def _planned_after(model: nn.Module) -> list[str]:
    """Names of the submodules that a model of transformers says are called after its layers, wherever they stand."""
    base: Any = getattr(model, "base_model", None)
    plan = getattr(getattr(base, "config", None), "base_model_pp_plan", None)
    if not isinstance(base, nn.Module) or not plan:
        return []
    prefix = next((f"{name}." if name else "" for name, module in model.named_modules() if module is base), "")
    keys = list(plan)
    lists = [i for i, key in enumerate(keys) if isinstance(getattr(base, key, None), nn.ModuleList)]
    return [prefix + key for key in keys[lists[0] + 1 :]] if lists else []


def _parent(name: str, levels: int) -> str:
    return ".".join(name.split(".")[:-levels])


def _outermost(names: Iterable[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found.append(name)
    return found


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or bool(module.state_dict()) or any(True for _ in keepers(module))


def balanced(sizes: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """Return how many layers each stage gets, so that the largest stage has as few parameters as possible.

    Args:
        sizes: parameters of every layer.
        first, last: parameters that the first and the last stage have besides.
    """
    # fewest[s][n]: (parameters of the largest of s stages with the first n layers, layers of the last of them)
    sums = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    fewest = [(sums[n] + first, n) for n in range(len(sizes) + 1)]
    taken: list[list[int]] = []
    for stage in range(1, stages):
        besides = last if stage == stages - 1 else 0
        row = []
        for n in range(len(sizes) + 1):
            options = [(max(fewest[k][0], sums[n] - sums[k] + besides), n - k) for k in range(stage, n)]
            row.append(min(options, key=lambda option: option[0]) if options else (sums[-1] + first + last, 0))
        taken.append([layers for _, layers in row])
        fewest = row
    split, left = [], len(sizes)
    for row_taken in reversed(taken):
        split.append(row_taken[left])
        left -= row_taken[left]
    return [left, *reversed(split)]


def split_of(model: nn.Module, chain: Chain, stages: int, given: Sequence[int] | None) -> list[int]:
    """Return the number of layers of every stage.

    Raises:
        ConfigError: ``given`` does not fit, or there are fewer layers than stages.
    """
    if len(chain.layers) < stages:
        raise ConfigError(
            f"strategy.pp: {counted(stages, 'stage')} need as many layers, {type(model).__name__} has {len(chain.layers)} "
            f'("{chain.layers[0]}" to "{chain.layers[-1]}"); give a smaller pp or pp_stages_per_process'
        )
    if given is not None:
        if len(given) != stages:
            raise ConfigError(
                f"strategy.pp_split: has {counted(len(given), 'number')}, give one for each of the {stages} stages"
            )
        if sum(given) != len(chain.layers):
            raise ConfigError(
                f"strategy.pp_split: {' + '.join(map(str, given))} is {sum(given)}, but {type(model).__name__} has "
                f"{len(chain.layers)} layers"
            )
        return list(given)

    def size(names: Iterable[str]) -> int:
        return sum(p.numel() for p in {p for name in names for p in model.get_submodule(name).parameters()})

    return balanced([size([name]) for name in chain.layers], size(chain.before), size(chain.after), stages)


# Whether the submodules of a chain are called before its layers or after them, which their order in the model may not
# say.


def put_in_order(chain: Chain, model: nn.Module, example: Callable[[], Any]) -> None:
    """Sort ``before`` and ``after`` of a chain by when forward calls them first; a collective.

    What forward does not call, and all where it cannot run without values, keeps its order in the model. A wrong order
    is found by the rehearsal.

    Args:
        example: gives a batch, or None.
    """
    called = gather_differing(_first_calls(chain, model, example))[0]  # samples may differ
    parts = [*chain.before, *chain.after]
    chain.before = [name for name in parts if called.get(name, name in chain.before)]
    chain.after = [name for name in parts if name not in chain.before]


def _first_calls(chain: Chain, model: nn.Module, example: Callable[[], Any]) -> dict[str, bool]:
    """By name of a submodule that forward calls: whether it does so before it calls a layer."""
    called: dict[str, bool] = {}
    begun: list[str] = []

    def begin(name: str, module: nn.Module, args: Any) -> None:
        begun.append(name)

    def note(name: str, module: nn.Module, args: Any) -> None:
        called.setdefault(name, not begun)

    first = chain.layers[0]
    handles = [model.get_submodule(first).register_forward_pre_hook(partial(begin, first))]
    for name in (*chain.before, *chain.after):
        for part in model.get_submodule(name).modules():  # a list of heads is not called itself
            handles.append(part.register_forward_pre_hook(partial(note, name)))
    try:
        batch = example()
        if batch is not None:
            with without_memory(model, batch) as (_, run):
                run()
    except Exception:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return called if begun else {}
