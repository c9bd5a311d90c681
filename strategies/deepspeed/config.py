"""Options of DeepSpeedStrategy: DeepSpeed's own keys, checked before DeepSpeed gets them."""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch
from torch import nn

from ...core.base.config import Config, PositiveInt
from ...core.base.errors import ConfigError, StrategyError, suggest
from ..config import ActivationCheckpointing, Needs, StrategyConfig
from . import engine_internals

# Options of offloading: where optimizer state and parameters are kept while they are not needed, and how files are
# read.


WHERE = "strategy"


def _whole(value: float) -> int:
    if value != int(value):
        raise ConfigError(f"{value} is not allowed, give a whole number")
    return int(value)


# JSON files often give numbers of elements as 5e8, a float.
Elements = Annotated[int | float, pydantic.Field(ge=1), pydantic.AfterValidator(_whole)]
Threshold = Annotated[int | float, pydantic.Field(ge=0), pydantic.AfterValidator(_whole)]

# Direct input and output is in whole sectors of a disk.
_SECTOR = 512
_UNIT = 1024  # AIO_ALIGNED_BYTES of DeepSpeed


class Offload(Config):
    """Where a part of the state is kept while it is not needed."""

    key: ClassVar[str]
    _of_files: ClassVar[tuple[str, ...]]

    device: Literal["none", "cpu", "nvme"] = "none"
    """ "none" leaves it on the device, "cpu" moves it to host memory, "nvme" to files in ``nvme_path``."""
    pin_memory: bool = True
    """Use page-locked host memory, which is copied faster."""
    nvme_path: str | Path | None = None
    """A folder on a local disk; every process uses a sub-folder of its own, and removes it at the end."""
    buffer_count: PositiveInt | None = None
    """Buffers in memory that files are read to and written from; None: as many as are needed."""

    @property
    def on_files(self) -> bool:
        """Whether the state is kept in files."""
        return self.device == "nvme"

    @pydantic.model_validator(mode="after")
    def _fits_device(self) -> Offload:
        where = f"{WHERE}.zero_optimization.{self.key}"
        if not self.on_files:
            for key in self._of_files:
                if key in self.model_fields_set and getattr(self, key):
                    raise ConfigError(
                        f'{where}.{key}: has no effect with device="{self.device}", give device="nvme" or leave it out'
                    )
        elif self.nvme_path is None:
            raise ConfigError(f'{where}.nvme_path: missing, device="nvme" needs a folder on a local disk')
        elif problem := why_not_usable(Path(self.nvme_path)):
            raise ConfigError(f'{where}.nvme_path: "{self.nvme_path}" {problem}')
        return self


class OffloadOptimizer(Offload):
    """Optimizer state and float32 masters; they are updated on the CPU."""

    key = "offload_optimizer"
    _of_files = ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")

    ratio: float | int | None = pydantic.Field(None, ge=0, le=1)
    """Share of the optimizer that is updated on the CPU; stage 3."""
    pipeline_read: bool = False
    """Read the state of the next sub-group during the update of one; nvme."""
    pipeline_write: bool = False
    """Write the state of a sub-group during the update of the next; nvme."""
    fast_init: Literal[False] = False
    """Only False: masters begin with the float32 weights."""

    @pydantic.model_validator(mode="after")
    def _whole_on_files(self) -> OffloadOptimizer:
        if self.on_files and self.ratio not in (None, 1):
            raise ConfigError(
                f'{WHERE}.zero_optimization.{self.key}.ratio: {self.ratio} is not allowed with device="nvme", where all of '
                "the optimizer is updated on the CPU; leave it out"
            )
        return self


class OffloadParam(Offload):
    """Parameters, in the dtype that the model computes in."""

    key = "offload_param"
    _of_files = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")

    buffer_size: Elements | None = None
    """Elements of a buffer; None: the largest shard of a parameter."""
    max_in_cpu: Threshold | None = None
    """Elements that stay in host memory; None: 0. DeepSpeed's own default is 1e9, with which files are rarely used."""


class Aio(Config):
    """How DeepSpeed reads and writes files, with ``device="nvme"``."""

    block_size: Annotated[int, pydantic.Field(ge=_SECTOR)] = 2**20
    """Bytes of one request; a multiple of 512. Tensors below 1 MiB, or below this, stay in memory."""
    queue_depth: PositiveInt = 8
    """Requests that are under way at a time."""
    intra_op_parallelism: PositiveInt = 1
    """Threads that share a tensor."""
    single_submit: bool = False
    """Submit one request at a time."""
    overlap_events: bool = True
    """Submit requests while others are under way."""
    use_gds: Literal[False] = False
    """Only False: GPUDirect Storage is not supported."""

    @pydantic.field_validator("block_size")
    @classmethod
    def _sectors(cls, size: int) -> int:
        if size % _SECTOR:
            raise ConfigError(f"{size} is not allowed, give a multiple of {_SECTOR}")
        return size


def why_not_usable(folder: Path) -> str | None:
    """Return why a folder cannot hold files that are read and written past the page cache; None if it can."""
    if not folder.is_dir():
        return "is no folder, create it on a local disk"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    probe = folder / f".flextrain_probe_{os.getpid()}_{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, flags, 0o600))
    except OSError as error:
        return f"is not writable, {error.strerror}"
    try:
        return _why_not_direct(probe)
    finally:
        probe.unlink(missing_ok=True)


def _why_not_direct(probe: Path) -> str | None:
    """Return why DeepSpeed cannot read and write a file past the page cache; it does not look at such errors itself."""
    try:
        file = os.open(probe, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        return "is on a file system without direct input and output (O_DIRECT), choose a folder on a local disk"
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwritev(file, [memoryview(page)[:_UNIT]], 0)
    except OSError:
        return f"is on a disk with sectors of more than {_UNIT} bytes, DeepSpeed writes multiples of so many; choose another"
    finally:
        os.close(file)
    return None


# DeepSpeed's own kinds of model parallelism: refused by name, with the MeshStrategy that does the same.


class LeafModules(Config):
    """Modules that stage 3 gathers whole, such as mixtures whose processes use different experts."""

    classes: list[str] | None = None
    """Names of classes; None is DeepSpeed's list of mixtures in transformers."""
    names: list[str] | None = None
    """Names of modules."""
    name_suffixes: list[str] | None = None
    """Ends of names of modules."""


_UNEVEN = "of which checkpoints for every layout cannot be made"
_ULYSSES = "DeepSpeed's Ulysses needs batches and a loss that are cut by hand"
# By key: the entry in it that has the size, the reason, and the axis to use.
_KEYS: dict[str, tuple[str, str, str | None]] = {
    "tensor_parallel": ("autotp_size", f"AutoTP leaves slices of weights, {_UNEVEN}", "tp"),
    "expert_parallel": ("autoep_size", f"AutoEP leaves each process experts of its own, {_UNEVEN}", "ep"),
    "use_data_before_expert_parallelism": ("", "it arranges experts of DeepSpeed, which are not supported", "ep"),
    "sequence_parallel_size": ("", _ULYSSES, "cp"),
    "data_parallel_size": ("", "it is the number of processes divided by sequence_parallel_size", None),
    "seq_parallel_communication_data_type": ("", _ULYSSES, "cp"),
    "pipeline": ("stages", "DeepSpeed's pipelines need a model that is written for them", "pp"),
}
# By the module of DeepSpeed that has a layer's class: what a process has of it, and the axis to use.
_LAYERS = {
    "deepspeed.moe": ("every process would train experts of its own, and one process's would be saved", "ep"),
    "deepspeed.sequence": ("processes have different samples here, not parts of a sequence", "cp"),
    "deepspeed.runtime.sequence_parallel": ("processes have different samples here, not parts of a sequence", "cp"),
    "deepspeed.module_inject": ("it holds a slice of a weight, and checkpoints are of whole ones", "tp"),
    "deepspeed.runtime.pipe": ("processes have the whole model here, not stages", "pp"),
}


def refuse_options(options: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for keys of DeepSpeed's configuration that divide a model over processes."""
    for key, (name, reason, axis) in _KEYS.items():
        if (given := options.get(key)) is not None:
            path, value = key, given
            if isinstance(given, Mapping):
                path, value = (f"{key}.{name}", given[name]) if name in given else (key, dict(given))
            is_off = axis is None or (isinstance(value, int) and value < 2)
            advice = "leave it out" if is_off else _instead(axis, value)
            raise ConfigError(f"{where}.{path}: {value!r} is not possible, {reason}; {advice}")


def _instead(axis: str | None, size: object = None) -> str:
    """Return the advice to use an axis of MeshStrategy, with 2 for a size that is no number."""
    kind = ', cp_kind="ulysses"' if axis == "cp" else ""
    return f'give strategy=dict(type="MeshStrategy", {axis}={size if isinstance(size, int) else 2}{kind})'


def check_layers(model: nn.Module, leaf_modules: LeafModules | None) -> None:
    """Check that no layer of a model is DeepSpeed's for processes that work together, and that ``leaf_modules`` are there.

    DeepSpeedStrategy gives every process samples of its own and the whole model: such layers would train wrongly.

    Raises:
        StrategyError: it has such a layer, or a call of DeepSpeed has prepared for them.
        ConfigError: an entry of ``leaf_modules`` is no module of the model.
    """
    _check_leaf_modules(leaf_modules, model)
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            package = next((package for package in _LAYERS if f"{kind.__module__}.".startswith(f"{package}.")), None)
            if package is not None:
                reason, axis = _LAYERS[package]
                path = f"model.{name}" if name else "model"
                raise StrategyError(f"{path}: is DeepSpeed's {kind.__name__}, but {reason}; {_instead(axis)}")
    if (size := engine_internals.prepared_tensor_parallelism()) is not None:
        raise StrategyError(
            "model: deepspeed.tp_model_init() was called, but a slice of each weight is in no checkpoint; leave the call out and "
            f"{_instead('tp', size)}"
        )
    if engine_internals.has_sequence_groups():
        raise StrategyError(
            "model: DeepSpeed's sequence parallelism was initialised, but processes have different samples here; leave the call "
            f"out and {_instead('cp')}"
        )


def _check_leaf_modules(given: LeafModules | None, model: nn.Module) -> None:
    modules = dict(model.named_modules())
    classes = {type(module).__name__ for module in modules.values()}
    classes |= {f"{type(module).__module__}.{type(module).__qualname__}" for module in modules.values()}
    for key, entries in (given.model_dump() if given is not None else {}).items():
        for number, entry in enumerate(entries or ()):
            known = classes if key == "classes" else modules
            matches = any(name.endswith(entry) for name in known) if key == "name_suffixes" else entry in known
            if not matches:
                what = "class of a module" if key == "classes" else "module"
                raise ConfigError(
                    f'{WHERE}.zero_optimization.leaf_module.{key}[{number}]: "{entry}" is no {what} of the model'
                    f"{suggest(entry, known)}"
                )


__all__ = ["NEEDS", "WHERE", "Bf16", "DeepSpeedConfig", "EngineCheckpointing", "Fp16", "ZeroOptimization", "merged"]

NEEDS = Needs(
    distributed=True,
    packages={"deepspeed": "pip install 'flextrain[deepspeed]'"},
    processes="DeepSpeed keeps its process groups in variables of modules",
)

# DeepSpeed's keys that have no meaning here or are not supported, with the reason.
_REFUSED = {
    "optimizer": "belongs into optim_wrapper.optimizer",
    "scheduler": "belongs into param_scheduler",
    "amp": "Apex is not supported, give bf16 or fp16",
    "tensorboard": "belongs into visualizer",
    "wandb": "belongs into visualizer",
    "csv_monitor": "belongs into visualizer",
    "comet": "belongs into visualizer",
    "elasticity": "the number of processes is the launcher's",
    "autotuning": "is not supported",
    "checkpoint": "checkpoints are flextrain's own",
    "data_types": "gradients are summed in the type they are computed in, leave it out",
}
_REFUSED_ZERO = {
    "round_robin_gradients": "DeepSpeed's own record of who keeps what is wrong with it, leave it out",
    "legacy_stage1": "DeepSpeed has dropped it, leave it out",
    "elastic_checkpoint": "concerns DeepSpeed's own checkpoints, flextrain's fit any number of processes; leave it out",
    "stage3_gather_16bit_weights_on_model_save": "checkpoints are written in parts and read as a whole; leave it out",
    "stage3_gather_fp16_weights_on_model_save": "checkpoints are written in parts and read as a whole; leave it out",
    "zero_quantized_weights": "is not supported, leave it out",
    "zero_quantized_nontrainable_weights": "is not supported, leave it out",
    "zero_quantized_gradients": "is not supported, leave it out",
    "zenflow": "is not supported, leave it out",
}


class ZeroOptimization(Config):
    """ZeRO's stage, buckets and offloading; None is DeepSpeed's default."""

    stage: Literal[0, 1, 2, 3] = 0
    """0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    offload_optimizer: OffloadOptimizer | None = None
    """Keep optimizer state in host memory (stages 1 to 3) or in files (stage 3), and update there."""
    offload_param: OffloadParam | None = None
    """Keep parameters in host memory or in files; stage 3."""
    allgather_partitions: bool = True
    """Send updated parameters by all-gather rather than by a series of broadcasts."""
    allgather_bucket_size: Elements = 500_000_000
    """Elements gathered at a time."""
    reduce_scatter: bool = True
    """Send gradients only to the process that keeps them."""
    reduce_bucket_size: Elements = 500_000_000
    """Elements reduced at a time."""
    overlap_comm: bool | None = None
    """Reduce while backward runs; None does at stage 3 on accelerators."""
    contiguous_gradients: bool = True
    """Copy gradients to one buffer as they are computed."""
    sub_group_size: Elements | None = None
    """Elements updated at a time; stage 3. None with optimizer state in files: 5e7, because buffers are so large."""
    stage3_prefetch_bucket_size: Threshold | None = None
    """Elements gathered ahead of their use."""
    stage3_param_persistence_threshold: Threshold | None = None
    """Parameters with fewer elements stay whole on every process."""
    stage3_model_persistence_threshold: Threshold | None = None
    """Total number of elements that may stay whole."""
    stage3_max_live_parameters: Threshold | None = None
    """Elements that may be gathered at one time."""
    stage3_max_reuse_distance: Threshold | None = None
    """A parameter that is needed again within this number of elements stays gathered. None with parameters in files: 0."""
    ignore_unused_parameters: bool = True
    """Allow parameters without gradient; stage 2."""
    memory_efficient_linear: bool | None = None
    """Use a linear layer that saves less for backward; stage 3."""
    leaf_module: LeafModules | None = None
    """Modules whose parameters are gathered at once, of which processes may use different ones; stage 3."""

    @pydantic.field_validator("allgather_bucket_size")
    @classmethod
    def _even(cls, size: int) -> int:
        if size % 2:
            raise ConfigError(f"{size} is not allowed, DeepSpeed needs an even number")
        return size

    @pydantic.model_validator(mode="after")
    def _fits_stage(self) -> ZeroOptimization:
        where = f"{WHERE}.zero_optimization"
        only_3 = [key for key in self.model_fields_set if key.startswith("stage3_")]
        for key in (*sorted(only_3), "offload_param", "sub_group_size", "memory_efficient_linear", "leaf_module"):
            if self.stage != 3 and key in self.model_fields_set and not _is_off(getattr(self, key)):
                raise ConfigError(f"{where}.{key}: has no effect at stage {self.stage}, give stage=3 or leave it out")
        if self.stage == 0 and not _is_off(self.offload_optimizer):
            raise ConfigError(f"{where}.offload_optimizer: has no effect at stage 0, give stage=1, 2 or 3")
        if self.stage != 3 and self.offload_optimizer is not None and self.offload_optimizer.on_files:
            raise ConfigError(f'{where}.offload_optimizer.device: "nvme" needs stage=3, the stage is {self.stage}')
        if self.stage < 2 and self.overlap_comm:
            raise ConfigError(f"{where}.overlap_comm: True needs stage 2 or 3, the stage is {self.stage}")
        return self

    @property
    def on_files(self) -> tuple[Offload, ...]:
        """The parts of the state that are kept in files."""
        return tuple(
            part for part in (self.offload_optimizer, self.offload_param) if part is not None and part.on_files
        )


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, Offload) and value.device == "none")


class Fp16(Config):
    """float16 with a loss scale."""

    enabled: bool = True
    """Train in float16."""
    auto_cast: bool = False
    """Only False: flextrain casts inputs, see inputs_to_half."""
    loss_scale: float | int = pydantic.Field(0, ge=0)
    """A fixed factor, or 0 for a dynamic one."""
    initial_scale_power: int = pydantic.Field(16, ge=0)
    """A dynamic scale begins at 2 ** initial_scale_power."""
    loss_scale_window: PositiveInt = 1000
    """Updates without overflow after which the scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows before the scale is halved."""
    consecutive_hysteresis: bool = False
    """Updates without overflow reset that count."""
    min_loss_scale: PositiveInt = 1
    """Lower bound of the scale."""
    fp16_master_weights_and_grads: Literal[False] = False
    """Only False: weights are updated in float32."""


class Bf16(Config):
    """bfloat16, without a loss scale."""

    enabled: bool = True
    """Train in bfloat16."""
    check_grad_overflow: bool = False
    """Skip updates whose gradients are not finite; the host then waits for the device at every update. DeepSpeed's own
    default is True. Has an effect at stages 1 and 2: stages 0 and 3 skip such updates in any case."""
    immediate_grad_update: Literal[False] = False
    """Only False."""
    bf16_master_weights_and_grads: Literal[False] = False
    """Only False: weights are updated in float32."""
    bf16_optimizer_states: Literal[False] = False
    """Only False: moments are float32."""


class EngineCheckpointing(Config):
    """Options of ``deepspeed.checkpointing.checkpoint``, for models that call it."""

    partition_activations: bool = False
    """Shard saved activations over model-parallel processes."""
    cpu_checkpointing: bool = False
    """Keep saved activations in host memory."""
    contiguous_memory_optimization: bool = False
    """Keep saved activations in one buffer."""
    number_checkpoints: PositiveInt | None = None
    """Number of checkpointed calls, for the size of the buffer."""
    synchronize_checkpoint_boundary: bool = False
    """Wait for the device at each checkpointed call."""
    profile: bool = False
    """Log the time of each checkpointed call."""


class DeepSpeedConfig(StrategyConfig):
    """Options of DeepSpeedStrategy.

    Example:
        strategy=dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2), bf16=dict(enabled=True))
    """

    zero_optimization: ZeroOptimization = ZeroOptimization()
    """ZeRO's stage and its details."""
    zero_init: bool = True
    """Stage 3: build the model without memory and shard one parameter after the other, so that no process ever holds the whole
    model. Has an effect on models given as configuration or function."""
    fp16: Fp16 | None = None
    """Train in float16; not on the CPU."""
    bf16: Bf16 | None = None
    """Train in bfloat16."""
    unused_parameters: Literal["refuse", "zeros"] = "refuse"
    """"refuse": a trained parameter that no process uses in an update stays as it is, as on one device, or, where that cannot be, the
    update raises: at stages 1 to 3 with state in files, an optimizer of another package, or Adam when the parameter is used again,
    because DeepSpeed counts updates of all parameters together. "zeros": momentum and weight decay move it."""
    inputs_to_half: list[int | str] | None = None
    """Positions and names of the model's arguments that are cast to its half precision; None casts all, [] none."""
    gradient_clipping: float | int | None = pydantic.Field(None, ge=0)
    """Largest total norm of the gradients; the same as optim_wrapper.clip_grad's max_norm."""
    activation_checkpointing: ActivationCheckpointing | Literal["model"] | EngineCheckpointing | None = None  # type: ignore[assignment]
    """Submodules to recompute (``classes`` or ``check_fn``), "model" for the model's own switch, or DeepSpeed's own keys."""
    train_batch_size: PositiveInt | None = None
    """Samples per update over all processes; must be the product of the next two options and the world size."""
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    """Samples per micro-batch and process; only DeepSpeed's counters depend on it."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per update; the same as optim_wrapper.accumulative_counts."""
    steps_per_print: PositiveInt | None = None
    """Updates between two of DeepSpeed's own log lines; None prints none."""
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """Dtype of gradients in collectives; None: the dtype they are computed in."""
    prescale_gradients: bool = False
    """Divide gradients before they are summed."""
    gradient_predivide_factor: float | int = pydantic.Field(1.0, gt=0)
    """Divisor used with prescale_gradients."""
    wall_clock_breakdown: bool = False
    """Let DeepSpeed measure the times of forward, backward and update."""
    zero_allow_untested_optimizer: Literal[True] = True
    """Only True: torch's optimizers are not on DeepSpeed's list; flextrain tries each before training."""
    zero_force_ds_cpu_optimizer: bool = False
    """Refuse optimizers other than DeepSpeed's own with offload_optimizer."""
    aio: Aio | None = None
    """How files are read and written, with ``device="nvme"``."""

    @property
    def own_dtype(self) -> torch.dtype | None:
        """See StrategyConfig."""
        homes = ((torch.bfloat16, self.bf16), (torch.float16, self.fp16))
        return next((dtype for dtype, home in homes if home and home.enabled), None)

    @pydantic.model_validator(mode="after")
    def _agrees(self) -> DeepSpeedConfig:
        if self.fp16 and self.fp16.enabled and self.bf16 and self.bf16.enabled:
            raise ConfigError(f"{WHERE}.bf16.enabled: True contradicts {WHERE}.fp16.enabled=True, give one of them")
        if self.aio is not None and not self.zero_optimization.on_files:
            raise ConfigError(f'{WHERE}.aio: has no effect without offloading to device="nvme", leave it out')
        if self.fp16 and self.fp16.auto_cast:
            raise ConfigError(f"{WHERE}.fp16.auto_cast: inputs are cast by {WHERE}.inputs_to_half, leave it out")
        return self


def merged(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options merged with those of ``config``, a dict or a JSON file, with older keys in today's form.

    Raises:
        ConfigError: an unreadable file, an option with two values, or an option that is not supported.
    """
    options = dict(options)
    given = options.pop("config", None)
    if given is not None:
        for key, value in _modern(_read(given), f"{WHERE}.config").items():
            options[key] = _joined(options.get(key), value, key)
    return _modern(options, WHERE)


def _read(config: Any) -> Mapping[str, Any]:
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text())
        except OSError as error:
            raise ConfigError(f"{WHERE}.config: {config} cannot be read, {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{WHERE}.config: {config} is no JSON, {error}") from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{WHERE}.config: {config!r} is not allowed, give a dict or the path of a JSON file")
    return config


def _joined(ours: Any, theirs: Any, key: str) -> Any:
    if ours is None:
        return theirs
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {**ours, **{name: _joined(ours.get(name), value, f"{key}.{name}") for name, value in theirs.items()}}
    if ours != theirs:
        raise ConfigError(f"{WHERE}.config.{key}: {theirs!r} disagrees with {WHERE}.{key}={ours!r}, give one of them")
    return ours


def _modern(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace older names; raise ConfigError for options that are not supported."""
    options = dict(options)
    refuse_options(options, where)
    for key, reason in _REFUSED.items():
        if options.pop(key, None) is not None:
            raise ConfigError(f"{where}.{key}: {reason}")
    if "bfloat16" in options:
        options["bf16"] = _joined(options.get("bf16"), options.pop("bfloat16"), "bf16")
    zero = options.get("zero_optimization")
    if isinstance(zero, Mapping):
        options["zero_optimization"] = _modern_zero(zero, f"{where}.zero_optimization")
    return options


def _modern_zero(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    options = dict(options)
    for key, reason in _REFUSED_ZERO.items():
        if options.pop(key, None):
            raise ConfigError(f"{where}.{key}: {reason}")
    pin = options.pop("cpu_offload_use_pin_memory", None)
    for old, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("cpu_offload_params", "offload_param"),
    ):
        if old not in options:
            continue
        asked = options.pop(old)
        if not isinstance(asked, bool):
            raise ConfigError(f"{where}.{old}: {asked!r} is not allowed, give {new}=dict(device=...)")
        if asked and options.get(new) is not None:
            raise ConfigError(f"{where}.{old}: is the older name of {new}, which is given too; leave it out")
        if asked:
            options[new] = {"device": "cpu"} | ({} if pin is None else {"pin_memory": pin})
    if options.pop("zero_hpz_partition_size", 1) != 1:
        raise ConfigError(f"{where}.zero_hpz_partition_size: is not supported, leave it out")
    return options
