"""Names of transformers that are private or differ between its versions, for building and describing its models.

They were read in transformers 5.23, and ran in 5.0, 5.17 and 5.23.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..base.errors import ConfigError
from ..base.initializers import ALL
from ..torch_compat.torch_private import calls_before_forward

OLDEST = "5.0.0"


def is_model_class(kind: Any) -> bool:
    """Whether ``kind`` is a class of models of transformers; nothing is imported: who has one has imported it."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(kind, type) and issubclass(kind, base)


def is_auto_class(kind: Any) -> bool:
    """Whether ``kind`` is a class such as ``AutoModelForCausalLM``, which chooses the model by the configuration."""
    base = getattr(sys.modules.get("transformers.models.auto.auto_factory"), "_BaseAutoModelClass", None)
    return base is not None and isinstance(kind, type) and issubclass(kind, base)


def has_class(name: str) -> bool:
    """Whether transformers, if it is installed, has a model of this name."""
    try:
        import transformers
    except ImportError:
        return False
    return isinstance(getattr(transformers, name, None), type)


def passed_arguments() -> set[str]:
    """Names of the keyword arguments that models pass on to their layers and losses."""
    module = sys.modules.get("transformers.utils.generic")
    return {*getattr(getattr(module, "TransformersKwargs", None), "__annotations__", ())}


def knows(kind: Any, config: Any) -> bool:
    """Whether an Auto class has a model for this configuration, without code of the folder."""
    return type(config) in kind._model_mapping


def from_config(kind: Any, config: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Build a model as ``from_pretrained`` would, without values."""
    make = kind.from_config if is_auto_class(kind) else kind._from_config
    # Before transformers 5.2 a model inside of the model takes its dtype from here, and not from the argument.
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if each is not None:
            each.dtype = dtype
    return make(config, dtype=dtype, **options)  # type: ignore[no-any-return]


def check_version(where: str) -> None:
    """Refuse transformers 4, which has other names for tied weights and leaves models in the dtype of their folder.

    Raises:
        ConfigError: in one line, with both versions.
    """
    import transformers

    if Version(transformers.__version__) < Version(OLDEST):
        raise ConfigError(f"{where}: needs transformers {OLDEST} or newer, {transformers.__version__} is installed")


def tied_names(model: Any) -> dict[str, str]:
    """Name of each parameter that is tied to another one, to that other name, under which files have it."""
    found = getattr(model, "all_tied_weights_keys", None)  # transformers 5
    return dict(found) if isinstance(found, dict) else {}


def computes_with_tying(model: Any) -> bool:
    """Whether a model computes something else if its configuration ties embeddings: some scale the head's input then."""
    return "config.tie_word_embeddings" in inspect.getsource(type(model).forward)


def dtype_of(config: Any) -> torch.dtype | None:
    """The dtype that a configuration names; None: it names none."""
    found = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return getattr(torch, found) if isinstance(found, str) else found


@contextmanager
def without_values() -> Iterator[None]:
    """Context in which layers and models do not initialise their parameters; tied ones are tied."""
    import transformers

    base: Any = transformers.PreTrainedModel

    def nothing(tensor: Any = None, *_: Any, **__: Any) -> Any:
        return tensor

    kept = {name: getattr(nn.init, name) for name in ALL}
    of_models = base._initialize_weights
    base._initialize_weights = nothing
    for name in kept:
        setattr(nn.init, name, nothing)
    try:
        yield
    finally:
        base._initialize_weights = of_models
        for name, function in kept.items():
            setattr(nn.init, name, function)


def initialise(model: Any) -> None:
    """Initialise what has memory of a model that is otherwise on the meta device, as its constructor would."""
    for module in model.modules():
        module._is_hf_initialized = False
    if hasattr(model, "initialize_weights"):
        model.initialize_weights()
    else:
        model.apply(model._initialize_weights)


def names_in_model(model: Any, keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Translate the names in a folder's files into those in a model, as ``from_pretrained`` does.

    Returns:
        Name in the file to name in the model, and the names of tensors that transformers would make others of.
    """
    own = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "")
    loading: Any = importlib.import_module("transformers.core_model_loading")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    found, converted = {}, []
    for key in keys:
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, own)
        if pattern is not None and key not in own:
            converted.append(key)
        found[key] = key if key in own else name
    return found, converted


def ignored(model: Any, names: Sequence[str], *, missing: bool) -> set[str]:
    """Those of the names that transformers does not speak of when they are missing in a file, or unexpected there."""
    kind = "missing" if missing else "unexpected"
    patterns = list(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    patterns += [] if missing else [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def published_class(model: Any) -> str:
    """The name of the model's class in transformers, for ``architectures``: of a class derived from it, its base.

    Raises:
        ConfigError: it is derived from none.
    """
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return str(kind.__name__)
    if getattr(type(model), "_auto_class", None) or is_model_class(type(model)):
        return type(model).__name__
    raise ConfigError(f"model: {type(model).__name__} is no model of transformers")


# Caches of keys and values, which generation needs and training does not.


def train_without_cache(model: nn.Module) -> list[str]:
    """Set ``use_cache=False`` in the configurations of all models of transformers; return the classes of those that had it.

    Generation has a setting of its own, in ``generation_config``, and keeps its cache.
    """
    found: dict[str, None] = {}
    for module in model.modules():
        if not is_model_class(type(module)):
            continue
        config: Any = module.config
        for one in (config, config.get_text_config()):
            if getattr(one, "use_cache", False):
                one.use_cache = False
                found.setdefault(type(module).__name__)
    return list(found)


def keep_documents_apart(model: nn.Module) -> None:
    """Let models of transformers compute without a cache where they are given positions and neither a cache nor ``use_cache``.

    Beside a cache they do not look for positions that begin again, so that every document of a packed sequence would see
    those before it. Their configurations ask for a cache by default. Generation gives its own.
    """
    for module in model.modules():  # those inside of others too, which may be called by themselves
        if not is_model_class(type(module)) or calls_before_forward(module, _without_cache):
            continue
        if "use_cache" in inspect.signature(type(module).forward).parameters:  # its own may be one that is recomputed
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    # Models call each other by keywords: the signature is read where a person gives positions by position.
    given = kwargs if len(args) < 2 else called_by_keywords(module, args, kwargs)
    caches = ("use_cache", "past_key_values", "cache")
    if given.get("position_ids") is None or any(given.get(key) is not None for key in caches):
        return None
    return args, {**kwargs, "use_cache": False}


def called_by_keywords(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the forward of the module's class, as its own may be one that is recomputed.

    Raises:
        TypeError: forward takes no such arguments.
    """
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    return {**kwargs, **{name: bound.arguments[name] for name in [*bound.arguments][1 : len(args) + 1]}}


# All names of transformers that are private or change often; other modules use its public, documented names only.
#
# They were read, and ran, in transformers 5.17 and 5.23. Each function says in one line if the installed version lacks
# what it needs.


WITH_PLANS = "5.16"
"""The first transformers whose styles of plans divide parameters that are there; before, they divided files as they were read."""
TENSOR_PARALLEL = "transformers.distributed.tensor_parallel"


def pretrained_models(model: nn.Module) -> dict[str, Any]:
    """Return the outermost models of transformers in a module, by name; "" is the module itself.

    It imports nothing: who has such a model has imported transformers.
    """
    base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    found: dict[str, Any] = {}
    for name, module in model.named_modules() if base is not None else ():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, base) and not inside:
            found[name] = module
    return found


def attention_implementation(model: Any) -> str:
    """Return the name under which a model's attention is registered, which ``set_attn_implementation`` sets."""
    return str(model.config._attn_implementation)


_BLOOM = "transformers.models.bloom.modeling_bloom"


def bloom_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention layers of BLOOM in a model, none if one computes otherwise; it imports nothing."""
    kind: Any = getattr(sys.modules.get(_BLOOM), "BloomAttention", None)
    layers = [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]
    return layers if all(type(layer).forward is kind.forward for layer in layers) else []


def bloom_slopes(layer: Any) -> Tensor:
    """Return (heads,) of float32: by how much the scores of a layer of BLOOM grow with the position of a key."""
    ones = torch.ones(1, 2, dtype=torch.long, device=layer.dense.weight.device)
    found: Tensor = sys.modules[_BLOOM].build_alibi_tensor(ones, layer.num_heads, torch.float32)
    return found[:, 0, 1]


def encoder_and_decoder(model: Any) -> tuple[nn.Module, nn.Module] | None:
    """Return the stacks of a model of transformers that has an encoder and a decoder beside it, and None of any other."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return None
    encoder, decoder = model.get_encoder(), model.get_decoder()
    inside = [{*stack.modules()} for stack in (encoder, decoder)]
    return None if decoder in inside[0] or encoder in inside[1] else (encoder, decoder)


def position_embeddings(stack: nn.Module) -> list[nn.Module]:
    """Return the modules of an encoder or decoder that embed positions, which they count from 0 unless they are given any."""
    children = stack.named_children()
    found = [module for name, module in children if name == "embed_positions" and isinstance(module, nn.Embedding)]
    return [module for module in found if "position_ids" in inspect.signature(type(module).forward).parameters]


def relative_attention(stack: nn.Module) -> list[Any]:
    """Return the attention layers of an encoder or decoder that learn biases by distance, as T5's do: ``compute_bias`` gives them."""
    found = [module for module in stack.modules() if hasattr(module, "relative_attention_bias")]
    known = ["self", "query_length", "key_length"]
    ways = [getattr(type(layer), "compute_bias", None) for layer in found]
    return [
        layer
        for layer, way in zip(found, ways, strict=True)
        if way and [*inspect.signature(way).parameters][:3] == known
    ]


def decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    """Return what a model with an encoder and a decoder gives its decoder for labels, of which it is given nothing else.

    Raises:
        ConfigError: it does not say how it makes them.
    """
    if callable(own := getattr(model, "prepare_decoder_input_ids_from_labels", None)):
        return own(labels=labels)  # type: ignore[no-any-return]
    for kind in type(model).__mro__:
        if (shifted := getattr(sys.modules[kind.__module__], "shift_tokens_right", None)) is not None:
            return shifted(labels, model.config.pad_token_id, model.config.decoder_start_token_id)  # type: ignore[no-any-return]
    raise ConfigError(
        f"batch: has no decoder_input_ids, and {type(model).__name__} does not say how it makes them of labels; give them"
    )


def has_tensor_plan(model: Any) -> bool:
    """Whether a model of transformers brings a plan for tensor parallelism."""
    return bool(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None))


def tensor_plan(model: Any, *, but_experts: bool = False) -> dict[str, str]:
    """Return a model's own plan for tensor parallelism: styles by name of a module or parameter, parameters before their module.

    Args:
        but_experts: leave out what the model's plan for expert parallelism divides.

    Raises:
        ConfigError: transformers is too old, or does not know a style.
    """
    general = _tensor_parallel().replace_layer_number_by_wildcard
    plan = model.tp_plan or {}
    experts = [f"{rule}." for rule in _expert_plan(model)] if but_experts else []
    plan = {rule: style for rule, style in plan.items() if not f"{rule}.".startswith(tuple(experts))}
    found = {}
    for name, module in model.named_modules():
        style = plan.get(general(name))
        for key, _ in module.named_parameters(recurse=False):
            full = f"{name}.{key}" if name else key
            if (own := plan.get(general(full), style)) is not None:
                found[full] = own
        if style is not None:
            found[name] = style
    for name, style in found.items():
        if style not in _tensor_parallel().ALL_PARALLEL_STYLES:
            raise ConfigError(
                f'strategy.plan: the plan of {type(model).__name__} itself says "{style}" for {name}, which transformers does '
                "not know; give a plan"
            )
    return found


def expert_rules(model: Any) -> list[str]:
    """Return the names in a model's own plan of its stacks of experts, with ``*`` for numbers of layers."""
    return [rule for rule, style in _expert_plan(model).items() if style in _STACKS]


_STACKS = ("ep_dispatch_experts", "moe_tp_experts")  # in transformers 5.23, 5.17


def _expert_plan(model: Any) -> Mapping[str, str]:
    found = getattr(model, "_ep_plan", None)
    return found if isinstance(found, Mapping) else {}


def biased_routers(model: nn.Module) -> dict[str, str]:
    """Return the routers that add a bias to their scores before they choose experts, each by name with the name of its bias.

    The choice is the only integer tensor of a router's output. 5.24 has the bias in the router, in the mixture around it, or in
    a module inside of it. It is a buffer, or a parameter that is not trained.
    """
    found: dict[str, str] = {}
    for prefix, inner in pretrained_models(model).items():
        names = {f"{prefix}.{name}" if prefix else name: module for name, module in inner.named_modules()}
        for owner, module in names.items():
            bias = next((key for key in _ROUTER_BIASES if getattr(module, key, None) is not None), None)
            if bias is None:
                continue
            parent = owner.rpartition(".")[0]
            near = (owner, parent, *(f"{owner}.{child}" for child, _ in module.named_children()))
            router = next((name for name in near if name in names and "Router" in type(names[name]).__name__), None)
            if router is not None:
                found[router] = f"{owner}.{bias}"
    return found


_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")


def apply_tensor_plan(model: Any, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Divide the parameters that a plan names, and make its modules compute on what is left.

    Every process must have the same parameters before, which may be on the meta device. A module's ``forward`` becomes
    a function that holds the module.

    Args:
        model: a model of transformers.
        mesh: of one dimension.
        plan: styles by name of a module or parameter, names of parameters before that of their module.
    """
    styles = _tensor_parallel().ALL_PARALLEL_STYLES
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, style in plan.items():
        owner, _, key = name.rpartition(".") if name in parameters else (name, "", "")
        module = model.get_submodule(owner)
        if key:
            styles[style].validate_param(module, key, mesh, parameter_name=name)
            styles[style].shard_param(module, key, mesh)
            continue
        if style == "mla_kv_a_proj":  # which asks its module for the width of the part with rotary positions
            module.config = model.config.get_text_config()
        styles[style].install_forward(module, mesh)


def key_value_heads(model: Any, plan: Mapping[str, str], tp: int) -> int | None:
    """Return the number of key/value heads of a model if ``tp`` does not divide them and its plan does; else None."""
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    divided = any(style == "colwise" and name.rpartition(".")[2] in _KEYS for name, style in plan.items())
    return heads if isinstance(heads, int) and divided and heads % tp else None


_KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Names of modules that compute keys, alone or joined with queries and values."""


def has_causal_loss(model: Any) -> bool:
    """Whether a model's loss is transformers' own for causal language models: a cross entropy of each next token."""
    causal = getattr(_module("transformers.loss.loss_utils"), "ForCausalLMLoss", None)
    return causal is not None and getattr(model, "loss_function", None) is causal


def dummy_batch(model: nn.Module) -> Any:
    """Return inputs to try a model of transformers with, and labels if it takes them; None for any other module."""
    inputs = getattr(model, "dummy_inputs", None) if "" in pretrained_models(model) else None
    if not isinstance(inputs, dict) or not inputs:
        return None
    ids = inputs.get("input_ids")
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    return {**inputs, "labels": ids} if takes_labels and ids is not None else inputs


@contextmanager
def taking_sequences_for_whole() -> Iterator[None]:
    """Context in which models of transformers take each row of a batch for one sequence, as they do if positions say so.

    Without values they cannot tell, and would build a mask that they do not have otherwise. It imports nothing.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return

    def find_none(position_ids: Any) -> None:
        find(position_ids)  # what it computes takes memory for a moment

    masking.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = find


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _tensor_parallel() -> Any:
    module: Any = _module(TENSOR_PARALLEL)
    if not hasattr(module, "ALL_PARALLEL_STYLES"):
        version = getattr(sys.modules.get("transformers"), "__version__", "")
        raise ConfigError(
            f'strategy.plan: "auto" needs transformers {WITH_PLANS} or newer for the plan of a model of its own, {version} is '
            "installed; install it, or give a plan"
        )
    return module
