"""Plans of transformers for models whose layers have adapters of peft: the rule of a layer becomes rules of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ....core.errors import ConfigError

_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_INSTEAD = "leave the layer out of the adapter's target_modules, or choose another axis than tp"


def with_adapters(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return a plan with rules for what adapters have put in the place of its modules.

    Of a low-rank adapter, the matrix on the divided side of the layer is divided, and the other is whole on every process:
    lora_B beside a layer that is divided by columns, lora_A beside one that is divided by rows.

    Args:
        model: that of transformers, whole.
        plan: styles by name of a module or parameter, as transformers resolves them.

    Raises:
        ConfigError: an adapter cannot be divided with its layer.
    """
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for name, style in plan.items():
        rules = dict(_rules(name, style, modules[name])) if name in modules else None
        found |= rules or {name: style}
    return found


def _rules(name: str, style: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    children = dict(module.named_children())
    if "base_layer" in children:
        _check(name, style, children)
        yield from _of_layer(f"{name}.base_layer", style, children["base_layer"])
        divided = "lora_B" if style in _COLUMNS else "lora_A"
        for adapter, layer in _adapters(children, divided):
            yield from _of_layer(f"{name}.{divided}.{adapter}", style, layer)
    elif "original_module" in children:  # a copy of which is trained
        yield from _of_layer(f"{name}.original_module", style, children["original_module"])
        for adapter, layer in _adapters(children, "modules_to_save"):
            yield from _of_layer(f"{name}.modules_to_save.{adapter}", style, layer)


def _of_layer(name: str, style: str, layer: nn.Module) -> Iterator[tuple[str, str]]:
    for key, _ in layer.named_parameters(recurse=False):
        yield f"{name}.{key}", style
    yield name, style


def _check(name: str, style: str, children: Mapping[str, nn.Module]) -> None:
    if style not in (*_COLUMNS, *_ROWS):
        raise ConfigError(
            f'strategy.tp: the model\'s own plan divides {name} as "{style}", and with an adapter a layer can only be divided by '
            f"columns or rows; {_INSTEAD}"
        )
    for kind in ("lora_magnitude_vector", "lora_embedding_A"):
        if _adapters(children, kind) or any(True for _ in _module(children, kind).parameters()):
            raise ConfigError(f"strategy.tp: {name} has an adapter with {kind}, which cannot be divided; {_INSTEAD}")
    if not _adapters(children, "lora_A"):
        raise ConfigError(
            f"strategy.tp: {name} has an adapter of another kind than LoRA, which cannot be divided; {_INSTEAD}"
        )


def _adapters(children: Mapping[str, nn.Module], kind: str) -> list[tuple[str, nn.Module]]:
    return [(name, layer) for name, layer in _module(children, kind).named_children()]


def _module(children: Mapping[str, nn.Module], kind: str) -> nn.Module:
    found = children.get(kind)
    return nn.Module() if found is None else found
