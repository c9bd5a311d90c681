"""Weights of a run beside those that train: frozen, pretrained, adapters, extra state, and which must stay finite."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.base.errors import CheckpointError, ConfigError, counted
from ...core.base.tensors import nonfinite
from ...core.checkpoint import Checkpoint, match_weights, open_weights_together
from ...core.checkpoint.chunks import held_chunks
from ...core.checkpoint.folders import is_local
from ...core.checkpoint.foreign.weights_file import MODEL
from ...core.checkpoint.weights import BASE, copies_of, is_adapter
from ...core.comm import collectives as dist
from ...core.comm.agreement import gather_differing, raising_together, told_by_rank_0
from ...core.device.precision import running_statistics
from ...core.hugging_face import transformers_private as private
from ...core.hugging_face.pretrained import Pretrained, initial_values, pretrained_in
from ...core.model.module_state import (
    EXTRA,
    extra_state,
    keeper_of,
    keepers,
    make_buffers,
    set_extra_state,
    tell_loaded,
    torch_key,
)
from ...optim.canonical import STATE
from ...strategies.noted import tied
from ...strategies.parts import aliases, appeared, fingerprints_of_left_out, keepers_elsewhere, note_initialised, saves

if TYPE_CHECKING:
    from ..run import Run

LEFT_OUT = "left_out"


_MOST = 0.5


def frozen_advice(runner: Run) -> str:
    """Return a line for the log if most of what checkpoints hold is frozen, and nobody has said that it shall be; else empty."""
    whole = runner.outline.whole
    if runner.strategy.config.exclude_frozen_parameters is not None or not whole.total:
        return ""
    share = 1 - whole.trained / whole.total
    if share <= _MOST:
        return ""
    return (
        f"{100 * share:.3g} % of the parameters are frozen, and in every checkpoint; "
        "strategy=dict(type=..., exclude_frozen_parameters=True) leaves them out, and load_from brings them when the run goes on"
    )


def leaves_out(path: Path) -> bool:
    """Return whether a checkpoint was saved without its frozen parameters; a collective."""
    return told_by_rank_0(lambda: bool(Checkpoint.open(path).values.get(LEFT_OUT)))


def check_left_out(runner: Run, checkpoint: Checkpoint, *, refuses: bool = True) -> list[str]:
    """Compare the model's parameters with the fingerprints of those that a checkpoint lacks, if it has any; a collective.

    Args:
        refuses: whether other values are an error; else they are a warning.

    Returns:
        The names of these parameters: their values are as in that run, or something was said of them.

    Raises:
        CheckpointError: on every process; it names the first parameter with other values.
    """
    saved = checkpoint.values.get(LEFT_OUT)
    if not isinstance(saved, dict):  # the checkpoint has all parameters, or an older version has saved it
        return []
    lacking = [name for name in saved if f"model.{name}" not in checkpoint.entries]
    here = fingerprints_of_left_out(runner.strategy, lacking)
    other_dtype = [name for name, value in here.items() if value.split()[0] != str(saved[name]).split()[0]]
    different = [name for name, value in here.items() if value != saved[name] and name not in other_dtype]
    if different:
        line = (
            f"{checkpoint.path}: was saved without its frozen parameters, and {_some(different)} not as in that run; build the model "
            "with the same weights or seed as then, or give the file with these weights as load_from"
        )
        if refuses:
            raise CheckpointError(line)
        runner.logger.warning(line)
    if other_dtype:
        runner.logger.warning(
            f"{checkpoint.path}: was saved without its frozen parameters; {_some(other_dtype)} not compared with those of that run, "
            f"because their dtype is another: {here[other_dtype[0]].split()[0]}, and {str(saved[other_dtype[0]]).split()[0]} then"
        )
    return [*here]


def _some(names: list[str]) -> str:
    more = f" and {counted(len(names) - 1, 'other')} are" if len(names) > 1 else " is"
    return names[0] + more


# Names of weights, statistics and averages that must stay finite; masks may hold infinity on purpose.


_AVERAGED = "averaged."


def averaged_name(key: str) -> str:
    """Return the weight or buffer whose average a hook's state has under ``key``; "" if it has none."""
    return key.partition(_AVERAGED)[2]


def trained_names(runner: Run) -> set[str]:
    """Return the names of tensors that training changes: parameters that are not frozen, and running statistics."""
    module = runner.strategy.module
    names = {name for name, parameter in runner.strategy.parameters() if parameter.requires_grad}
    return names | running_statistics(module).keys()


def keys_to_keep_finite(runner: Run, state: Mapping[str, Any]) -> set[str]:
    """Return the keys of a checkpoint that must be finite to resume from it.

    These are trained tensors, their optimizer state, and averages. A buffer or a frozen parameter may be a mask of
    minus infinity, and single numbers in the optimizer state may have any value.
    """
    names = trained_names(runner)
    hooks = tuple(f"hook.{type(hook).__name__}" for hook in runner.hooks if hook.holds_weights)
    return {
        key
        for key, value in state.items()
        if isinstance(value, Tensor)
        and (
            key.removeprefix("model.") in names
            or (key.startswith(STATE) and value.dim() > 0)
            or (hooks and key.startswith(hooks) and averaged_name(key) in names)
        )
    }


def own_nonfinite(runner: Run) -> list[str]:
    """Return the names of weights, statistics and averages that are not finite in this process's part."""
    return nonfinite(_watched(runner))


def nonfinite_weights(runner: Run) -> list[str]:
    """Return the names of weights, statistics and averages that are not finite on any process; a collective."""
    found = dict.fromkeys(name for names in dist.all_gather_object(own_nonfinite(runner)) for name in names)
    own = [name for name in _watched(runner) if name in found]
    return [*own, *(name for name in found if name not in own)]


def _watched(runner: Run) -> dict[str, Tensor]:
    names = trained_names(runner)
    watched = {name: tensor for name, tensor in runner.strategy.model_state().items() if name in names}
    for state in (hook.state_dict() for hook in runner.hooks if hook.holds_weights):
        watched |= {key: value for key, value in state.items() if averaged_name(key) in names}
    return watched


# Read the weights of a model of transformers from its folder, each process its own part, after the model is set up.


_LISTED = 6


class ToRead:
    """What is read after ``Strategy.setup``.

    Args:
        source: the folder.
        model: the whole model, before it is set up.
    """

    def __init__(self, source: Pretrained, model: nn.Module) -> None:
        self.source = source
        self.names = source.renamed_in(model)
        """Name in the model that ``source`` built to that in the whole model."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.copies = copies_of(self.names.values(), parameters)
        """Name of a copy that an adapter trains to that of the original."""
        self.tied = tied(model)
        """Further names of tied parameters, each with its first."""
        self.parameters = {new for new in (*self.names.values(), *self.copies) if new in parameters}
        self.owner = next(module for module in model.modules() if source in pretrained_in(module))
        self.not_missed = private.ignored(self.owner, sorted(self.names), missing=True)

    def stored(self, name: str, there: Container[str]) -> str | None:
        """Return the name under which the files have a parameter, which they may have under that of one tied to it."""
        first = self.tied.get(name, name)
        group = (name, first, *(alias for alias, of in self.tied.items() if of == first))
        return next((each for each in group if MODEL + each in there), None)


def read_pretrained(run: Run, part: ToRead) -> None:
    """Fill the parameters and buffers with what the files hold, and initialise those that they lack; a collective.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: nothing fits, or a tensor has another shape.
    """
    source, strategy = part.source, run.strategy
    folder = source.folder
    live = {f"{MODEL}{name}": tensor for name, tensor in strategy.model_state().items()}
    own = {name: old for old, name in part.names.items()}
    # A copy whose original the files lack has the original's new values.
    own |= {copy: own[part.tied.get(name, name)] for copy, name in part.copies.items()}
    opened = open_weights_together(folder)
    entries = {}
    for key, entry in opened.entries.items():
        name = source.names.get(key.removeprefix(MODEL))
        if name is not None:
            entries[MODEL + part.names.get(name, name)] = entry
    copied = {copy: found for copy, name in part.copies.items() if (found := part.stored(name, entries)) is not None}
    entries |= {MODEL + copy: entries[MODEL + of] for copy, of in copied.items()}
    template = {key: tensor for key, tensor in live.items() if key.removeprefix(MODEL) in own}
    matched, fits, report = match_weights(opened.renamed(entries), template, aliases(strategy))
    report = report.with_untied(matched, template).of_all()
    if report.untied:
        name, first = next(iter(report.untied.items()))
        raise ConfigError(
            f"model.pretrained: {folder} has other values of {name} than of {first}, and {source.name} ties them; give "
            "model.tie_word_embeddings=False to have both"
        )
    if report.misshaped and not source.replaces_misshaped:
        name, (there, wanted) = next(iter(report.misshaped.items()))
        if wanted == (source.words, *there[1:]):
            raise ConfigError(
                f"model.{name}: has shape {wanted}, and {there} in {folder}, because model.vocab_size does not resize what is loaded; leave it "
                "out, write the folder anew after resize_token_embeddings for new words, or give "
                "model.ignore_mismatched_sizes=True, which draws every row anew"
            )
        raise ConfigError(
            f"model.{name}: has shape {wanted}, and {there} in {folder}; change the setting that it depends on, or give "
            "model.ignore_mismatched_sizes=True to initialise it anew"
        )
    if not any(gather_differing(bool(fits))):
        raise ConfigError(f"model.pretrained: no tensor of {folder} is one of {source.name}: {report}")
    check_not_quantised(run, matched, fits)
    matched.load(fits)
    new = [name for name in (*report.missing, *report.misshaped) if name in part.parameters]
    with raising_together():
        values = initial_values(source, [*dict.fromkeys(own[name] for name in new)], run.seed) if new else {}
    for old, whole in values.items():
        name = part.names[old]
        same = (copy for copy, of in part.copies.items() if part.tied.get(of, of) == name)
        for key in (MODEL + each for each in (name, *same)):
            if key in template:
                _fill(key, template[key], whole)
                fits[key] = template[key]
    strategy.load(fits)
    note_initialised(strategy, (name for name, _ in strategy.parameters() if name in own))
    in_files = {info.dtype for info in opened.tensors.values() if info.dtype.is_floating_point}
    _tell(run, part, report.missing, report.unexpected, in_files)
    if replaced := [name for name in report.misshaped if name in part.parameters]:
        run.logger.warning(
            f"{source.folder}: has other shapes of {_listed(replaced)}, which start with new random values, also where shapes agree"
        )


def _tell(run: Run, part: ToRead, missing: Sequence[str], unused: Sequence[str], stored: set[torch.dtype]) -> None:
    source = part.source
    wanted = str(source.dtype).removeprefix("torch.")
    others = sorted(str(dtype).removeprefix("torch.") for dtype in stored - {source.dtype})
    cast = f", from {' and '.join(others)} to {wanted} (model.dtype)" if others else ""
    run.logger.info(f"{source.name}: weights of {source.folder} ({source.size() / 2**20:.1f} MiB){cast}")
    if shown := [name for name in missing if name in part.parameters and name not in part.not_missed]:
        run.logger.warning(f"{source.folder}: does not have {_listed(shown)}, which start with new random values")
    if shown := sorted({*unused} - private.ignored(part.owner, unused, missing=False)):
        run.logger.warning(f"{source.folder}: {_listed(shown)} is not used, {source.name} has no such tensor")


def _listed(names: Sequence[str]) -> str:
    more = f" and {counted(len(names) - _LISTED, 'other tensor')}" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


@torch.no_grad()
def _fill(key: str, tensor: Tensor, whole: Tensor) -> None:
    """Copy this process's part of a tensor that every process has."""
    for offsets, held in held_chunks(key, tensor).items():
        part = whole
        for dim, (begin, size) in enumerate(zip(offsets, held.shape, strict=True)):
            part = part.narrow(dim, begin, size)
        held.copy_(part)


_SCALES = ("scale", "scale_inv")
"""What names have at their ends, after the weight's, of what float8 weights are to be multiplied by."""


def check_not_quantised(run: Run, source: Checkpoint, fits: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a file has numbers for a parameter that mean something else without their scale; a collective.

    Args:
        source: under the names of the model.
        fits: what is loaded, by key.
    """
    with raising_together():
        there = source.tensors
        for key in (f"{MODEL}{name}" for name, _ in run.strategy.parameters()):
            if key not in fits or not (fits[key].is_floating_point() or fits[key].is_complex()):
                continue
            dtype = there[key].dtype
            is_scaled = dtype.itemsize == 1 and any(f"{key}_{end}" in there for end in _SCALES)
            if is_scaled or not (dtype.is_floating_point or dtype.is_complex):
                kinds = [str(each).removeprefix("torch.") for each in (dtype, fits[key].dtype)]
                raise CheckpointError(
                    f"{source.path}: {key.removeprefix(MODEL)} is {kinds[0]}{' with a scale' if is_scaled else ''}, and {kinds[1]} in the model; "
                    "quantised weights are not read, give those from before the quantisation"
                )


# State of modules besides weights: extra state, and buffers that were registered during training.


LATE = "late_buffers"
_MODEL = "model."


def module_state(runner: Run) -> tuple[dict[str, Any], list[str]]:
    """Return the modules' extra state, and the names of buffers registered after setup."""
    strategy = runner.strategy
    # Every process calls this, because ``get_extra_state`` of a module may run a collective.
    state = extra_state(strategy.module)
    parameters, buffers = appeared(strategy)
    if parameters != runner.late_parameters:
        runner.late_parameters = parameters
        runner.logger.warning(
            f"The model has registered parameters after the run was set up: {', '.join(parameters)}; no optimizer "
            "trains them, and a resumed run does not have them; create them in the constructor"
        )
    saved = {name for name, _ in keepers(strategy.module) if saves(strategy, name)}
    own = {k: v for k, v in state.items() if not isinstance(v, Tensor) or keeper_of(k) in saved}
    return own, buffers


def prepare(runner: Run, checkpoint: Checkpoint) -> None:
    """Register the buffers of a checkpoint that appear only during training, as the model will do later."""
    names = checkpoint.values.get(LATE, ())
    tensors = checkpoint.tensors
    shapes = {
        name: (tensors[_MODEL + name].shape, tensors[_MODEL + name].dtype)
        for name in (names if isinstance(names, list) else ())
        if isinstance(name, str) and _MODEL + name in tensors
    }
    make_buffers(runner.strategy.module, shapes, runner.strategy.device)


def extra_template(
    runner: Run, checkpoint: Checkpoint, revise_keys: Sequence[tuple[str, str]] = ()
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return the checkpoint with its extra state under the model's module names, and tensors to load that into."""
    module = runner.strategy.module
    other_names, wanted = aliases(runner.strategy), {torch_key(name): name for name, _ in keepers(module)}
    found: dict[str, str] = {}
    for key in checkpoint.values:
        if key.startswith(EXTRA):
            name = torch_key(key.removeprefix(EXTRA))
            for pattern, replacement in revise_keys:
                name = re.sub(pattern, replacement, name)
            found[other_names.get(name, name)] = key
    for name in wanted.keys() - found.keys():
        runner.logger.warning(f"{checkpoint.path}: has no {name}, the model keeps its current extra state")
    elsewhere = {torch_key(name) for name in keepers_elsewhere(runner.strategy)}
    for name in found.keys() - wanted.keys() - elsewhere:
        runner.logger.warning(f"{checkpoint.path}: {name} is left out, the model has no such extra state")
    renamed = {found[name]: EXTRA + wanted[name] for name in found.keys() & wanted.keys()}
    values = {key: value for key, value in checkpoint.values.items() if not key.startswith(EXTRA)}
    values |= {new: checkpoint.values[old] for old, new in renamed.items()}
    entries = {}
    for key, entry in checkpoint.entries.items():
        module_key, _, number = key.rpartition("/")
        if not key.startswith(EXTRA):
            entries[key] = entry
        elif module_key in renamed:
            entries[f"{renamed[module_key]}/{number}"] = entry
    source = checkpoint.renamed(entries, values)
    live = extra_state(module) if found else {}
    template = {
        key: torch.empty(info.shape, dtype=info.dtype, device=_device(live.get(key), runner.strategy.device))
        for key, info in source.tensors.items()
        if key.startswith(EXTRA)
    }
    return source, template


def _device(live: Any, otherwise: torch.device) -> torch.device:
    return live.device if isinstance(live, Tensor) else otherwise


def finish(runner: Run, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Give the modules their extra state, after the weights were loaded, and notify them that they are loaded."""
    set_extra_state(runner.strategy.module, values, tensors)
    tell_loaded(runner.strategy.module)


# The configurations of a model's adapters of peft: in checkpoints, for exports, and compared with those of a run that
# loads them.


ADAPTERS = "adapters"
"""Key of a checkpoint: configurations by the name of the module with the adapters ("" is the model), and the adapter's name."""


def adapter_configurations(model: nn.Module) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the configurations of the outermost modules that have adapters; empty for a model without any.

    Args:
        model: the user's module, after ``get_peft_model`` or the transform LoRA.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in found):
            continue
        configurations = getattr(module, "peft_config", None)
        if isinstance(configurations, Mapping) and all(hasattr(each, "to_dict") for each in configurations.values()):
            found[name] = {str(adapter): _as_json(each.to_dict()) for adapter, each in configurations.items()}
    return found


_COMPARED = (
    "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens",
)  # fmt: skip
"""Settings with which the same matrices compute something else. ``fan_in_fan_out`` follows from the layers, peft corrects it."""
_OF_SHAPES = ("r", "rank_pattern")


def check_adapters(run: Run, checkpoint: Checkpoint, path: Path, *, with_shapes: bool = False) -> None:
    """Compare the settings of a file's adapters with those of the model that it is loaded into; a collective.

    Args:
        checkpoint: what was opened, under the names of the model.
        path: a checkpoint of a run, or a folder or file in peft's format.
        with_shapes: whether settings that decide on the matrices' shapes are compared too.

    Raises:
        CheckpointError: on every process, if the model would compute something else with the matrices of the file, or cannot
            take them; or if the file has a base, out of which the adapters here have taken their first values.
    """
    with raising_together():
        layers = [f"model.{name}" for name, _ in run.strategy.parameters() if BASE in name.split(".")]
        has_base = any(name in checkpoint.entries for name in layers)
        if not any(map(is_adapter, checkpoint.entries)):
            if has_base:
                _refuse_base(run, path)
            return
        here = _by_adapter(adapter_configurations(run.strategy.module).values())
        there = _by_adapter((checkpoint.values.get(ADAPTERS) or {}).values()) or _of_peft(path)
        pairs = [(here[name], there[name]) for name in here.keys() & there.keys()]
        if not pairs and len(here) == len(there) == 1:
            pairs = [(next(iter(here.values())), next(iter(there.values())))]
        for own, saved in pairs:
            if not has_base and not checkpoint.values.get(LEFT_OUT):  # of what is left out, the values are compared
                _check_taken(own, saved, path)
            for key in (*(_OF_SHAPES if with_shapes else ()), *_COMPARED):
                if key == "lora_alpha" and key not in saved:
                    continue
                if (own.get(key) or None) != (saved.get(key) or None):
                    what = "makes other shapes" if key in _OF_SHAPES else "computes something else"
                    raise CheckpointError(
                        f"{path}: its adapter was trained with {key}={saved.get(key)!r}, and LoRA has {own.get(key)!r} here, which {what}; "
                        f"give {key}={saved.get(key)!r}"
                    )


def _refuse_base(run: Run, path: Path) -> None:
    """Raise CheckpointError if adapters of the model have taken their first values out of the base, which a file would put back."""
    from ...core.checkpoint.export.peft_adapters import taken_from_base

    for config in _by_adapter(adapter_configurations(run.strategy.module).values()).values():
        if kind := taken_from_base(config):
            raise CheckpointError(
                f'{path}: has the base without adapters, and init_lora_weights="{kind}" has taken those of the model out of its base; '
                "load the base before they are added"
            )


def _check_taken(own: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if an adapter without its base belongs to another base than that of the model."""
    from ...core.checkpoint.export.peft_adapters import is_drawn, taken_from_base

    here, there = taken_from_base(own), taken_from_base(saved)
    if is_drawn(there):
        raise CheckpointError(
            f'{path}: init_lora_weights="{there}" has taken its adapter out of its base by random numbers or data, and what was left '
            "of the base is not here; load the whole model of that run"
        )
    if here != there:
        given = repr(there or True)
        raise CheckpointError(
            f"{path}: its adapter was trained with init_lora_weights={given}, and LoRA has {own.get('init_lora_weights')!r} here, "
            f"which leaves another base; give init_lora_weights={given}"
        )


def _by_adapter(configurations: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: config for each in configurations for name, config in each.items() if isinstance(config, Mapping)}


def _of_peft(path: Path) -> dict[str, Mapping[str, Any]]:
    """The settings in a folder of peft, under an empty name; empty if there are none."""
    from ...core.checkpoint.export.peft_adapters import CONFIG

    file = (path if path.is_dir() else path.parent) / CONFIG if is_local(path) else None
    if file is None or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: is damaged, it is no JSON ({error})") from None
    return {"": found} if isinstance(found, Mapping) else {}


def transposed_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers with an adapter whose weights have their inputs first.

    Args:
        model: as for ``adapter_configurations``; of a pipeline this process's part.
    """
    return [name for name, module in model.named_modules() if getattr(module, "fan_in_fan_out", None) is True]


def _as_json(value: Any) -> Any:
    """A value of a configuration as JSON has it, in the way in which peft writes it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_as_json, value), key=str)
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
