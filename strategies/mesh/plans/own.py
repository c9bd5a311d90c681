"""OwnPlan: the plans that models of transformers bring with them, applied by transformers to local tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ....core.base.errors import ConfigError
from ....core.hugging_face.transformers_private import (
    apply_tensor_plan,
    has_causal_loss,
    has_tensor_plan,
    key_value_heads,
    pretrained_models,
    tensor_plan,
)
from ...noted import tied

# Plans of transformers for models whose layers have adapters of peft: the rule of a layer becomes rules of its parts.


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


SUMMED = "replicated_with_grad_allreduce"
"""Style of a module that every process has whole and uses for its own heads, so that gradients have to be summed."""


_GATHERED = ("colwise_gather_output", "colwise_rep")
_PACKED = 2  # matrices in one, in styles called packed
_OF_DTENSORS = (*_COLUMNS, *_ROWS, "packed_colwise", "packed_rowwise", "embedding_rowwise", "embedding_colwise", "replicate",
                "sequence_parallel", SUMMED)  # fmt: skip


class OwnPlan:
    """The plans of the models of transformers in a module, which may be the module itself.

    A style computes on local tensors, as torch's own do, and communicates where the model's authors say so. Other modules
    are whole on every process, and compute the same on each.

    Attributes:
        styles: by full name of a module or parameter.
        left_whole: tied parameters that it divides under one name only, so that they are not divided.
        authors: names of the models' classes.
        heads: name of the model by full name of the matrix that makes its logits, of which its own loss may see a shard.

    Args:
        model: the whole model, before anything is divided.
        tp: number of processes.
        ep: number of processes for experts, whose rules are left out then; 1: experts are divided by this plan.

    Raises:
        ConfigError: ``tp`` does not divide the heads, a width or the vocabulary.
    """

    def __init__(self, model: nn.Module, tp: int, ep: int = 1) -> None:
        self._plans: dict[str, dict[str, str]] = {}
        self.authors = " and ".join(type(part).__name__ for part in pretrained_models(model).values())
        self._known = weakref.WeakSet(model.modules())  # a stage of a pipeline lets others go
        ties = tied(model)
        for prefix, part in pretrained_models(model).items():
            if has_tensor_plan(part):
                plan = tensor_plan(part, but_experts=ep > 1)
                _check_heads(part, prefix, plan, tp)
                self._plans[prefix] = with_adapters(part, plan)
        self.styles = {_joined(prefix, name): style for prefix, name, style in self._rules()}
        self.left_whole = self._without_ties(ties)
        check_sizes(model, self.styles, tp)
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names = {module: name for name, module in model.named_modules()}
        self.heads: dict[str, str] = {}
        for prefix, part in pretrained_models(model).items():
            head = part.get_output_embeddings() if has_causal_loss(part) else None
            # One that is quantized computes in its own way.
            if (
                isinstance(head, nn.Linear)
                and head.weight.is_floating_point()
                and self.styles.get(names[head]) in _GATHERED
            ):
                self.heads[names[head]] = prefix

    @classmethod
    def of(cls, model: nn.Module, tp: int, ep: int = 1) -> OwnPlan | None:
        """Return the plan of a module; None if no model in it has one."""
        if not any(map(has_tensor_plan, pretrained_models(model).values())):
            return None
        return cls(model, tp, ep)

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the parameters; modules that another axis has taken away are left out."""
        ties = tied(model)
        for prefix, plan in self._plans.items():
            part = model.get_submodule(prefix)
            there = {name for name, module in part.named_modules() if module in self._known}
            # The second name of a tied parameter is not among these, unless another process has the first one.
            there |= {name for name, _ in part.named_parameters() if name.rpartition(".")[0] in there}
            here = {name: style for name, style in plan.items() if name in there}
            for name, style in here.items():
                if style == SUMMED and isinstance(found := _module_of(part, name), nn.Module):
                    SummedGradients(mesh).watch(found)
            left_out = {name for name in here if here[name] == SUMMED or _joined(prefix, name) in self.heads}
            apply_tensor_plan(part, mesh, {name: style for name, style in here.items() if name not in left_out})
        for name, first in ties.items():
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, model.get_parameter(first))

    def as_rules(self) -> dict[str, str]:
        """Return the plan for a model of DTensors: styles by full name of a module, with logits that stay divided.

        Raises:
            ConfigError: a style computes on local tensors, or divides a parameter and not its module.
        """
        found = {name: "colwise" if name in self.heads else style for name, style in self.styles.items()}
        for name, style in self.styles.items():
            owner = name.rpartition(".")[0]
            if style not in _OF_DTENSORS or (name in self._parameters and self.styles.get(owner) != style):
                raise ConfigError(
                    f'strategy.sequence_parallel: the plan of {self.authors} itself says "{style}" for {name}, which '
                    "divides no positions; give a plan without it, or leave sequence_parallel out"
                )
        return {name: style for name, style in found.items() if name not in self._parameters}

    def _rules(self) -> Iterator[tuple[str, str, str]]:
        for prefix, plan in self._plans.items():
            for name, style in plan.items():
                yield prefix, name, style

    def _without_ties(self, ties: Mapping[str, str]) -> list[str]:
        """Leave out the rules of tied parameters for which they disagree; return the names of these parameters.

        A parameter is divided under its first name. What it is tied to has to be used in a way that fits.
        """
        left = []
        for name, first in ties.items():
            dims = {_dimension(self.styles.get(each), 2) for each in (name, first)}
            modules = {each.rpartition(".")[0] for each in (name, first)}
            if dims == {None}:
                continue
            if len(dims) > 1:
                left.append(first)
                self._drop({name, first, *modules})
        return left

    def _drop(self, names: set[str]) -> None:
        for prefix, name, _ in [*self._rules()]:
            if _joined(prefix, name) in names:
                del self._plans[prefix][name]
                del self.styles[_joined(prefix, name)]


class SummedGradients:
    """Adds the gradients of a module's whole parameters over the processes, once for every backward.

    transformers adds what has accumulated instead, so that earlier micro-batches of a window would count several times.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._watched: dict[str, Tensor] = {}

    def watch(self, module: nn.Module) -> None:
        """Add them for the parameters that ``module`` has in its forward: FSDP gathers them right before."""
        module.register_forward_pre_hook(self._hook)

    def _hook(self, module: nn.Module, args: object) -> None:
        if not torch.is_grad_enabled():
            return
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and self._watched.get(name) is not parameter:
                self._watched[name] = parameter
                parameter.register_hook(self._sum)  # type: ignore[no-untyped-call]

    def _sum(self, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=self._group)
        return total


def check_sizes(model: nn.Module, styles: Mapping[str, str], tp: int) -> None:
    """Raise ConfigError if ``tp`` does not divide a dimension that a style of transformers divides.

    Args:
        styles: by name of a parameter; names of modules are passed over.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        style = styles.get(name)
        dim = _dimension(style, parameter.ndim)
        if style is None or dim is None:
            continue
        count = _PACKED if style.startswith("packed") else 1
        size = parameter.shape[dim]
        if size % (count * tp):
            matrices = f" of each of its {count} matrices" if count > 1 else ""
            raise ConfigError(
                f"strategy.tp: {tp} does not divide {size // count}, the size of dimension {dim % parameter.ndim}{matrices} "
                f'of {name}, for which the model\'s own plan says "{style}"; {_instead(size // count, tp)}'
            )


def _check_heads(part: nn.Module, prefix: str, plan: Mapping[str, str], tp: int) -> None:
    heads = key_value_heads(part, plan, tp)
    if heads is not None:
        raise ConfigError(
            f"strategy.tp: {tp} does not divide the {heads} key/value heads of {prefix or type(part).__name__}, "
            f"which the model's own plan divides; {_instead(heads, tp)}"
        )
    for name, style in plan.items():
        module = _module_of(part, name)
        if style != "colwise" or not isinstance(module, nn.Module):
            continue
        attention = part.get_submodule(name.rpartition(".")[0])
        width, out = getattr(attention, "head_dim", None), getattr(module, "out_features", None)
        if isinstance(width, int) and isinstance(out, int) and not out % width and (out // width) % tp:
            raise ConfigError(
                f"strategy.tp: {tp} does not divide the {out // width} heads of {_joined(prefix, name)}; "
                f"{_instead(out // width, tp)}"
            )


def smaller(size: int, tp: int) -> str:
    """Return the numbers of processes to choose in place of ``tp``, which does not divide ``size``, in words; "": none."""
    allowed = [str(each) for each in range(2, tp) if size % each == 0]
    return f"choose {' or '.join(allowed[-2:])}, or " if allowed else ""


def _instead(size: int, tp: int) -> str:
    return f"{smaller(size, tp)}give a plan that leaves it out"


def _dimension(style: str | None, ndim: int) -> int | None:
    """Return the dimension of a parameter that a style divides; None: it is whole."""
    if style in (*_COLUMNS, "packed_colwise"):
        return -2 if ndim > 1 else -1
    if style in (*_ROWS, "packed_rowwise"):
        return -1 if ndim > 1 else None
    return {"embedding_rowwise": -2, "embedding_colwise": -1}.get(style or "")


def _module_of(part: nn.Module, name: str) -> nn.Module | None:
    try:
        return part.get_submodule(name)
    except AttributeError:
        return None


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
