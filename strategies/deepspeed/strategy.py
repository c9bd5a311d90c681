"""DeepSpeedStrategy: optimizer state, gradients and parameters sharded by DeepSpeed's ZeRO."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ...core.base.errors import ONLY_IN_FILE, StrategyError
from ...core.base.registry import STRATEGIES
from ...core.comm.agreement import raising_together
from ...core.comm.collectives import share_weights
from ...core.device.precision import DTYPES, PrecisionReport, dtypes, require
from ...core.model.base_model import calls_itself
from ...core.model.logits import deferred_of
from ...core.torch_compat.torch_private import hooks_after_accumulating
from ...optim.canonical import split_key
from .. import gradient_hooks
from ..base import NOTHING, Optim, Strategy, kept_gradients, left_out
from ..gathering_order import GatheringOrder, Together, message_group
from ..gradient_hooks import Hooked, HooksAfterBackward, HooksInOrder
from ..lost_writes import watch_forward
from ..noted import Arranged
from ..parts import (
    StateMemory,
    cannot_repeat,
    cannot_switch,
    computed_with,
    computes_alone,
    construct,
    explain,
    prepare_whole,
    rehearsed,
    shape_of,
    state_memory,
    take_written,
)
from ..parts.advice import explain_dtypes
from ..recomputation import compile_in_place
from ..sharding import check_dense, check_real, check_tables, make_contiguous
from ..without_memory import ModelWithoutMemory
from . import engine_internals, swapping
from .compiling import announced, init_distributed
from .compiling import deepspeed as _deepspeed
from .config import NEEDS, DeepSpeedConfig, EngineCheckpointing, check_layers, merged
from .engine_config import Request, check_accelerator, check_wrapper, engine_config, resolve
from .engine_state import EngineState, engine_memory
from .freed_parameters import refuse_use
from .half_precision import (
    cast_inputs_and_outputs,
    check_supported,
    float32_originals,
    keep_running_statistics,
    own_shard_of_original,
    take_out_frozen,
)
from .outside_writes import OutsideWrites
from .rehearsed import RehearsedZero
from .split_init import SplitInit, restore_linear
from .swap_files import SwapFiles
from .whole_parameters import SeenWhole, check_offloading, looks_at_whole
from .wrapper import DeepSpeedOptimWrapper, UsedAlike, UsedByNobody

logger = logging.getLogger("flextrain")


def _refuse_second_backward(module: nn.Module, args: Any, output: Any) -> None:
    def refuse(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise StrategyError(
                "model: a gradient with create_graph=True goes through weights that DeepSpeed has freed at stage 3 when its own "
                "backward comes; choose stage 1 or 2"
            )

    if isinstance(output, Tensor) and output.requires_grad and torch.is_grad_enabled():
        output.register_hook(refuse)  # type: ignore[no-untyped-call]


class _LayerOrder(GatheringOrder):
    advice = "call it on every process, name the module that chooses in strategy.zero_optimization.leaf_module, or choose stage 1 or 2"


@STRATEGIES.register_module()
class DeepSpeedStrategy(Strategy):
    """DeepSpeed's engine: ZeRO stages 0 to 3, in float32, bfloat16 or float16, with float32 masters and moments.

    Precision, accumulation and clipping come from OptimWrapper or AmpOptimWrapper, or from MMEngine's keys in these options;
    values given in both must be equal. In half precision the whole model is cast, unlike under autocast, which chooses
    for each operation; its outputs are float32. Running statistics of batch normalisation stay float32.

    A parameter that no process uses in an update stays as it is, as on one device; see ``unused_parameters``. At stages 0 to 2 processes may use different parameters in a
    micro-batch. At stage 3, which gathers parameters layer by layer, that raises, except inside of a ``leaf_module``.

    One process without launcher has world size 1.

    Args:
        config: further options as a dict or the path of a JSON file, with DeepSpeed's keys.
        options: the fields of DeepSpeedConfig.

    Raises:
        ConfigError: an option that is unknown, wrong, given twice with two values, or not supported.
        StrategyError: DeepSpeed is not installed.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020;
    https://www.deepspeed.ai/docs/config-json/
    """

    Config = DeepSpeedConfig
    needs = NEEDS
    short_names = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)}
    config: DeepSpeedConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**merged(options))
        _deepspeed()
        self._checkpointing: EngineCheckpointing | None = None
        given: object = self.config.activation_checkpointing
        if isinstance(given, EngineCheckpointing):
            self._checkpointing = given
            self.config = self.config.model_copy(update={"activation_checkpointing": None})
        self._request = Request(torch.float32, 0.0, 1, {})
        self._wrapper: DeepSpeedOptimWrapper | None = None
        self._engine: Any = None
        self._state: EngineState | None = None
        self._nobody: UsedByNobody | None = None
        self._local_rank: str | None = None  # as the launcher set it
        self._files = SwapFiles(self.config)
        self._without_memory = ModelWithoutMemory(keep_zeros=False)
        self._by_name: Mapping[str, nn.Parameter] = {}

    # Setup and teardown

    def join(self) -> None:
        """See Strategy; a single process creates a process group too, because DeepSpeed needs one."""
        was_set_up = self._spec is not None
        super().join()
        spec = self._spec
        if was_set_up or spec is None:
            return
        try:
            with raising_together():  # machines may differ
                self._check_environment()
                self._files.open()
        except BaseException:
            self._files.remove()
            self._spec = None  # another call must not find it set up
            raise
        self._join_alone()
        # DeepSpeed reads it in many places as the index of the device. Only some launchers set it, and a process that sees
        # one device has index 0.
        self._local_rank = os.environ.get("LOCAL_RANK", "")
        index = self.launch.local_rank if self.device.type == "cpu" else self.device.index
        os.environ["LOCAL_RANK"] = str(index)
        engine_internals.forget_process_groups()  # those of an earlier strategy in this process
        init_distributed(spec.backend, self.device.type)

    def _check_environment(self) -> None:
        resolve(self.config, None, self.device)
        if self.topology.shares_data or self.topology.model is not None:
            raise StrategyError(
                f"{type(self).__name__}: DeepSpeed averages over all processes, of which every one has to train on data of its "
                "own; leave _arrange() as it is"
            )
        check_accelerator(_deepspeed(), self.device)

    def building(self, model: nn.Module | None = None, draws: Tensor | None = None) -> AbstractContextManager[Any]:
        """See Strategy; stage 3 builds without memory, and shards one parameter after the other in ``setup``."""
        if self.config.zero_optimization.stage != 3 or not self.config.zero_init:
            return super().building(model, draws)
        return self._without_memory.building(
            model, draws, lambda: super(DeepSpeedStrategy, self).building(model, draws)
        )

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """See Strategy; the returned wrapper is a DeepSpeedOptimWrapper."""
        self.join()
        wrapper = None
        asked = None if optim is None else check_wrapper(optim)
        if asked is not None and not isinstance(asked, DeepSpeedOptimWrapper):
            asked.attach(self.device, self.autocast)  # its dtype may depend on the device
        self._request = resolve(self.config, asked, self.device)
        if asked is not None:
            kind = type(asked) if isinstance(asked, DeepSpeedOptimWrapper) else DeepSpeedOptimWrapper
            wrapper = kind.of(asked, self._request.precision, self._request.accumulate)
            if self._request.max_norm and wrapper.clip_grad is None:
                wrapper.clip_by(self._request.max_norm)
        self._wrapper = wrapper
        self._without_memory.note(model)
        made = super().setup(model, wrapper)
        refuse_use(model)
        return made

    def _arranged(self) -> Arranged:
        why = "and the engine keeps what it arranged then"
        hooked = "and the engine has arranged gradients before; register it in the model's __init__ or in a transform"
        added = "and stage 3 divides all parameters at set-up" if self.config.zero_optimization.stage == 3 else ""
        return Arranged(thawed=why, frozen=why, hooked=hooked, added=added)

    def check(self, model: nn.Module | type[nn.Module] | None, optim: Optim) -> None:
        """See Strategy."""
        check_wrapper(optim)
        skips = any(wrapper.guard is not None for wrapper in optim.wrappers.values())
        if skips and self.config.zero_optimization.stage == 0:
            raise StrategyError(
                'env_cfg.nonfinite: "skip" is not possible with strategy.zero_optimization.stage=0, whose engine updates with '
                "whatever it has; choose stage 1, 2 or 3"
            )
        if model is not None:
            self._check_model(model)

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        self._check_model(model)
        check_real(model, "DeepSpeedStrategy")
        if optim is not None:
            self._without_memory.check_initialised(self.noted.read_later)
        stage = self.config.zero_optimization.stage
        if stage or self.topology.data.count > 1 or self._request.dtype is not torch.float32:
            check_tables(model, type(self).__name__)
        if optim is not None and stage:
            check_dense(model, type(self).__name__)
        for name, parameter in model.named_parameters() if stage == 3 else ():
            if not math.prod(shape_of(self, parameter)):
                raise StrategyError(
                    f"model.{name}: has no elements, which DeepSpeed cannot gather at stage 3; leave it out, or choose stage 1 or 2"
                )
        for name, parameter in model.named_parameters() if optim is not None else ():
            if (
                hooks_after_accumulating(parameter)
                and stage
                and (stage > 1 or self._request.dtype is not torch.float32)
            ):
                raise StrategyError(
                    f"model.{name}: has a hook from register_post_accumulate_grad_hook, which ZeRO calls when it has taken the gradient "
                    "already; give strategy.zero_optimization.stage=0, or 1 in float32, or register_hook in its place"
                )
            if self._request.dtype is torch.float32 is not parameter.dtype and parameter.requires_grad:
                kind = str(parameter.dtype).removeprefix("torch.")
                raise StrategyError(
                    f"model.{name}: is {kind}, and DeepSpeed trains in float32, or in half precision by strategy.bf16 or fp16; give "
                    "the model as model.float(), or choose FSDPStrategy or DDPStrategy, which train it as it is"
                )

    def _check_model(self, model: nn.Module | type[nn.Module]) -> None:
        if isinstance(model, nn.Module):
            check_layers(model, self.config.zero_optimization.leaf_module)
        if method := calls_itself(model):
            name = model.__name__ if isinstance(model, type) else type(model).__name__
            raise StrategyError(
                f"model: {name} defines its own {method}, which DeepSpeed's engine cannot see; "
                "define forward instead, or choose another strategy"
            )

    def _place(self, model: nn.Module) -> None:
        make_contiguous(model)
        whole = [p for p in model.parameters() if not (engine_internals.is_partitioned(p) or p.is_meta)]
        for tensor in (*whole, *model.buffers()):
            tensor.data = tensor.data.to(self.device)
        share_weights(model, whole)

    def _wrap(self, model: nn.Module) -> nn.Module:
        dtype, stage = self._request.dtype, self.config.zero_optimization.stage
        if stage == 3 and self.config.activation_checkpointing is not None and TorchVersion(torch.__version__) < "2.7":
            raise StrategyError(
                "strategy.activation_checkpointing: with torch 2.6, stage 3 has no gradients of what is recomputed; choose "
                "zero_optimization.stage=2, leave activation_checkpointing out, or install a newer torch"
            )
        if any(parameter.is_meta for parameter in model.parameters()):
            self._split(model)
        optimizer = None
        frozen_groups: dict[str, dict[str, Any]] = {}
        if self._wrapper is not None:
            with raising_together():  # it may compile, which can fail on one machine
                frozen_groups = self._build_optimizer(self._wrapper, model, stage)
            optimizer = self._wrapper.optimizer
            if self.config.unused_parameters == "refuse":
                self._nobody = UsedByNobody(model.named_parameters(), self._wrapper, self.topology.data, self.device)
                self._gradient_hooks += self._nobody.handles
        elif stage < 3:
            stage = 0  # without an optimizer there is no state to shard
        originals: dict[str, Tensor] = {}
        if dtype is not torch.float32:
            originals = float32_originals(model, dtype, left_out(self))
            keep_running_statistics(model, dtype)
            cast_inputs_and_outputs(model, dtype, self.config.inputs_to_half)
        replaced = self._files.fit(model, self._wrapper, self.topology.world_size, dtype)
        num_elements = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())
        keys = self._engine_config(self._request, stage=stage, num_elements=num_elements)
        logger.info("DeepSpeed's configuration: %s", keys, extra={ONLY_IN_FILE: True})
        scalars = model.parameters() if stage == 3 else ()
        with (
            announced(float(self.config.timeout_s)),
            engine_internals.weights_agree(),
            engine_internals.scalars_as_vectors(scalars),
            engine_internals.no_spare_memory(self.device),
            swapping.param_files_in(dtype),
        ):
            heads = [
                (each, found) for each in model.modules() if stage == 3 and (found := deferred_of(each)) is not None
            ]
            for parameter in (each for head, _ in heads for each in head.parameters()):
                _deepspeed().zero.register_external_parameter(model, parameter)
            self._engine, *_ = _deepspeed().initialize(model=model, optimizer=optimizer, config=keys)
        self._watch_forward(model, stage)
        for _, deferred in heads:
            deferred.come_last()
        for module in engine_internals.gathering_modules(model).values() if stage == 3 and self._wrapper else ():
            module.register_forward_hook(_refuse_second_backward)
        if stage == 3 and self.topology.data.count > 1:
            group = message_group(self.topology.data, float(self.config.timeout_s))
            hidden = torch.compiler.disable if self.config.compile else lambda hook: hook
            modules = engine_internals.gathering_modules(model)
            data, rank = self.topology.data, self.topology.rank
            # On an accelerator a process goes on while a gathering waits.
            waits = engine_internals.is_gathered_next if self.device.type == "cpu" else lambda unit: False
            _LayerOrder(model, "", modules, Together(data, rank, group, hidden), waits)
            if self._wrapper:
                alike = UsedAlike(self._engine.optimizer, model, self.topology.data, self.device)
                self._gradient_hooks += alike.handles
        if self._checkpointing:
            _deepspeed().checkpointing.configure(None, deepspeed_config=keys)
        fragments = self._adopt(model, stage, originals) if self._wrapper else []
        if self._nobody is not None:
            in_files = swapping.has_files(self._engine)
            self._nobody.bind(engine_internals.inner_optimizer(self._engine), fragments, in_files=in_files)
        swapping.discard(replaced)
        trained = {fragment.name for fragment in fragments}
        others = [name for name in originals if name not in trained]
        frozen = {name: own_shard_of_original(model, name, originals[name]) for name in others}
        adapter = self._wrapper.adapter if self._wrapper else None
        lags = None if self._nobody is None else self._nobody.lags
        self._state = EngineState(self._engine, adapter, model, fragments, frozen, frozen_groups, lags)
        return self._engine  # type: ignore[no-any-return]

    def _split(self, model: nn.Module) -> None:
        """Shard the parameters of a model that was built without memory, with their values."""
        self._files.prepare(model, self.topology.world_size)
        keys = self._engine_config(Request(torch.float32, 0.0, 1, {}), stage=3, num_elements=10**12)
        with swapping.param_files_in(torch.float32):
            SplitInit(_deepspeed(), keys, self.device).run(model, self._without_memory)

    def _call_hooks(self, hooked: Mapping[str, Hooked], optim: Optim) -> None:
        stage, data = self.config.zero_optimization.stage, self.topology.data
        hooks: HooksAfterBackward | HooksInOrder
        if stage == 3:  # gradients are whole in backward only
            group = message_group(data, gradient_hooks.PATIENCE_S)
            hooks = HooksInOrder(hooked, data, self.topology.rank, group)
        else:
            hooks = HooksAfterBackward(hooked, data, at_end=stage < 2)
        assert self._wrapper is not None
        hooks.register(self._wrapper)
        self._gradient_hooks.append(hooks)
        if stage == 2 and isinstance(hooks, HooksAfterBackward):
            self._wrapper.send_last(hooks)

    def _build_optimizer(
        self, wrapper: DeepSpeedOptimWrapper, model: nn.Module, stage: int
    ) -> dict[str, dict[str, Any]]:
        """Create the torch optimizer with the trainable parameters; return the groups of only frozen ones, by name."""
        wrapper._has_ranges = stage > 0
        try:
            with announced(float(self.config.timeout_s)):
                wrapper.build(model)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            if isinstance(error, StrategyError):
                raise
            # DeepSpeed's optimizers compile a kernel in their constructor, which can fail in many ways.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StrategyError(
                f"{wrapper.where}.optimizer: cannot be made on {self.device.type}, {reason[:200]}"
            ) from error
        optimizer = wrapper.optimizer
        check_supported(wrapper, stage)
        if stage:
            check_offloading(wrapper, self.config.zero_optimization)
        frozen_groups = take_out_frozen(optimizer, model)
        if not optimizer.param_groups:
            raise StrategyError(f"{wrapper.where}.optimizer: has no parameter to train, all are frozen")
        return frozen_groups

    def _watch_forward(self, model: nn.Module, stage: int) -> None:
        """Let forward raise where it writes to what the engine has elsewhere: shards, or masters."""
        is_half = self._request.dtype is not torch.float32
        where = "since the engine keeps its values in shards" if stage == 3 else "since the engine updates a copy of it"
        lost = {
            f"{path}.{key}".lstrip("."): (module, key)
            for path, module in model.named_modules()
            for key, parameter in module.named_parameters(recurse=False)
            if stage == 3 or is_half or (stage and parameter.requires_grad)
        }
        watch_forward(self._engine, lost, where, "make it a buffer, or choose another strategy")

    def _adopt(self, model: nn.Module, stage: int, originals: Mapping[str, Tensor]) -> list[engine_internals.Fragment]:
        """Return the engine's fragments, after its masters got the float32 values that half precision has rounded."""
        assert self._wrapper is not None
        engine_internals.forget_trial_step(self._engine)
        fragments = engine_internals.fragments(self._engine, model)
        with swapping.mapped(self._engine):
            for fragment in fragments:
                if fragment.name in originals:
                    fragment.take(originals[fragment.name])
            engine_internals.check_layout(fragments)
        writes = self._watch_writes(model, stage, fragments)
        if stage and looks_at_whole(self._wrapper):
            nobody = self._nobody
            fragments = SeenWhole(
                self._engine,
                self._wrapper.adapter,
                model,
                fragments,
                self.device,
                lambda: () if nobody is None else nobody.unused,
            ).fragments
        self._wrapper.bind(self._engine, fragments, writes, clips_here=stage == 0)
        return fragments

    def _watch_writes(
        self, model: nn.Module, stage: int, fragments: Sequence[engine_internals.Fragment]
    ) -> OutsideWrites | None:
        """Watch the parameters whose values the engine has in masters, or at stage 3 in shards."""
        if not stage and self._request.dtype is torch.float32:
            return None
        watched = {n: p for n, p in model.named_parameters() if p.requires_grad or stage == 3}
        return OutsideWrites(watched, fragments, compares=not swapping.has_files(self._engine))

    def _engine_config(self, request: Request, *, stage: int, num_elements: int) -> dict[str, Any]:
        return engine_config(
            self.config,
            request,
            stage=stage,
            world_size=self.topology.world_size,
            on_cpu=self.device.type == "cpu",
            num_elements=num_elements,
            checkpointing=self._checkpointing,
            files=self._files,
        )

    def _compile(self, model: nn.Module) -> None:
        compile_in_place([self.module], self.config.compile if isinstance(self.config.compile, dict) else {})

    def leave(self) -> None:
        """See Strategy."""
        if self._engine is not None:
            engine_internals.forget_added_groups(self._engine)
            self._engine.destroy()
            engine_internals.forget_modules(self.module)
            swapping.free_buffers(self.module.parameters())
        self._files.remove()
        began, ends_group = self._spec is not None, self._owns_group
        self._engine = self._state = self._wrapper = self._nobody = None
        self._own_groups = ()  # DeepSpeed keeps them for other engines of this process
        super().leave()
        if ends_group:  # otherwise another engine of this process may use it
            engine_internals.forget_process_groups()
        if began:
            restore_linear()
        if self._local_rank is not None:
            os.environ.pop("LOCAL_RANK", None)
            if self._local_rank:
                os.environ["LOCAL_RANK"] = self._local_rank
            self._local_rank = None

    # Around a micro-batch

    def autocast(self) -> AbstractContextManager[None]:
        """See Strategy; no autocast, because the engine's whole model is cast."""
        return NOTHING

    def abort_update(self) -> None:
        """See Strategy."""
        raise kept_gradients("DeepSpeed")

    # State

    @property
    def _engine_state(self) -> EngineState:
        if self._state is None:
            raise StrategyError(f"{type(self).__name__}: no model yet, call setup(model, optim) first")
        return self._state

    def model_state(self) -> dict[str, Tensor]:
        """See Strategy; a sharded parameter is a FlatShard, a slice of the flattened parameter."""
        return self._engine_state.parameters() | self.buffers()

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach() for name, buffer in super().buffers().items()}

    def state(self) -> dict[str, Any]:
        """See Strategy."""
        if self._wrapper is not None:
            self._wrapper.check_writes()
        return self._offered() | (self._engine_state.optimizer_state() if self._wrapper else {})

    def template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """See Strategy."""
        model = {f"model.{name}": tensor for name, tensor in self.model_state().items()}
        template = {key: tensor for key, tensor in model.items() if key in saved}
        return template | (self._engine_state.optimizer_template(saved) if self._wrapper else {})

    def load(self, state: Mapping[str, Any]) -> None:
        """See Strategy; collective."""
        self._engine_state.follow_masters()
        if self._wrapper is not None:
            self._wrapper.follow_writes()
        values = {key: value for key, value in state.items() if split_key(key)[0]}
        if values and self._wrapper:
            self._engine_state.load_optimizer(values)

    # Precision

    def precision_report(self) -> PrecisionReport:
        """See Strategy."""
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        fragments = self._engine_state.fragments
        optimizer = self._engine_state.optimizer if self._wrapper else None
        states = (
            [value for kept in optimizer.state.values() for value in kept.values()] if optimizer is not None else []
        )
        sent = self.config.communication_data_type
        return PrecisionReport(
            compute=(self._request.dtype,),
            parameters=dtypes(trainable),
            masters=dtypes([fragment.flat for fragment in fragments if fragment.flat is not fragment.parameter]),
            gradients=(DTYPES[sent] if sent else self._request.dtype,),
            optimizer_state=dtypes([value for value in states if isinstance(value, Tensor) and value.dim() > 0]),
        )

    def _check_precision(self) -> None:
        report = self.precision_report()
        if self._wrapper:
            require(self._request.dtype, report.parameters, "parameters")
            require(torch.float32, report.masters or report.parameters, "master weights")


@construct.register(DeepSpeedStrategy)
def _(
    strategy: DeepSpeedStrategy, make: Callable[[], nn.Module], initialise: Callable[[nn.Module], None] | None = None
) -> nn.Module:
    """See ``construct``; at stage 3, a model that looks at the values of its parameters is built with memory."""
    build = partial(construct.dispatch(object), strategy, make, initialise)
    if strategy.config.zero_optimization.stage != 3 or not strategy.config.zero_init:
        return build()
    return strategy._without_memory.build(build, strategy.device, strategy.launch.local_rank)


@shape_of.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy, tensor: Tensor) -> Sequence[int]:
    return tensor.ds_shape if engine_internals.is_partitioned(tensor) else tensor.shape  # type: ignore[attr-defined]


@computed_with.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy) -> dict[str, Tensor]:
    """See ``computed_with``; in the dtype of the engine, at stage 3 as FlatShards.

    Raises:
        StrategyError: shards are in files.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in strategy.module.named_parameters():
        if swapping.is_in_file(parameter):
            raise StrategyError(
                f"strategy.zero_optimization.offload_param: {name} is in a file, to which only the engine writes; give "
                'device="cpu", or leave it out'
            )
        is_split = engine_internals.is_partitioned(parameter)
        found[name] = engine_internals.own_shard(parameter) if is_split else parameter.detach()
    return found


@take_written.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy, names: Collection[str]) -> None:
    if any(name not in strategy._by_name for name in names):  # at the first call; later ones come at every update
        strategy._by_name = dict(strategy.module.named_parameters())
    engine_internals.gather_small(strategy._by_name[name] for name in names)


@state_memory.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy) -> StateMemory:
    zero, trains = strategy.config.zero_optimization, strategy._wrapper is not None
    return engine_memory(strategy._engine_state, strategy.module, zero, trains=trains)


@computes_alone.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy) -> bool:
    return strategy.config.zero_optimization.stage != 3  # whose hooks gather, and learn the order of the calls


@prepare_whole.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy, model: nn.Module) -> torch.dtype | None:
    if strategy._request.dtype is not torch.float32:
        cast_inputs_and_outputs(model, strategy._request.dtype, strategy.config.inputs_to_half)
    return None


@explain.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy, error: BaseException) -> str | None:
    if "ds_status" in str(error):
        return (
            "something computes with parameters that DeepSpeed has freed outside of the modules that have them, as a sum over "
            'model.parameters() in the loss does: choose stage 1 or 2, or strategy="fsdp"'
        )
    if re.search(r"vmap over \w+, but|implement the jvp function", str(error)):
        return 'stage 3 computes layers by functions of its own, which torch.func does not look into (jvp, vmap): choose stage 1 or 2, or strategy="fsdp"'
    return explain.dispatch(Strategy)(strategy, error) or explain_dtypes(error, strategy._request.dtype)


@cannot_repeat.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy) -> str | None:
    return "DeepSpeed's engine keeps the gradients, and adds the second run's to them; choose strategy=\"fsdp\""


@cannot_switch.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy) -> str | None:
    return 'DeepSpeed\'s engine keeps masters and gradients in memory of its own; choose strategy="fsdp"'


@rehearsed.register(DeepSpeedStrategy)
def _(strategy: DeepSpeedStrategy) -> Strategy | None:
    """See ``rehearsed``; the engine's tensors and collectives by formula."""
    return RehearsedZero(strategy.config)
