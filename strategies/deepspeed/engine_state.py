"""EngineState: an engine's weights and optimizer state under the names and shapes of the user's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.base.errors import CheckpointError
from ...core.checkpoint.chunks import FlatShard
from ...optim.adapters import OptimizerAdapter, without_inner
from ...optim.canonical import GROUP, STATE, hyper_parameters, restored_hyper_parameters, split_key
from ..parts.footprint import StateMemory, size_of, state_of_shapes
from . import engine_internals, swapping
from .config import ZeroOptimization
from .engine_internals import Fragment, is_partitioned, own_shard

# State that torch's optimizers keep once per parameter, in a tensor with one element.
_COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})


class EngineState:
    """State of the parameters and of the optimizer, as views of the engine's tensors.

    Args:
        engine: DeepSpeed's engine.
        adapter: adapter of the torch optimizer that the engine steps; None for evaluation only.
        module: the user's model.
        fragments: this process's shards of the trainable parameters.
        originals: frozen parameters in float32 on the CPU, if the engine has them in half precision only.
        frozen_groups: the groups of frozen parameters, by name; the engine's optimizer has no frozen parameter.
        lags: see ``UsedByNobody``; None if parameters of one flat tensor must have as many updates.
    """

    def __init__(
        self,
        engine: Any,
        adapter: OptimizerAdapter | None,
        module: nn.Module,
        fragments: Sequence[Fragment],
        originals: Mapping[str, Tensor],
        frozen_groups: Mapping[str, dict[str, Any]],
        lags: dict[str, int] | None = None,
    ) -> None:
        self.engine, self.module, self.fragments, self.originals = engine, module, fragments, originals
        self._adapter, self._lags = adapter, lags
        self._frozen_groups = dict(frozen_groups)
        self._incoming: dict[tuple[int, str], Tensor] = {}
        self._files = swapping.IncomingState(engine)

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer."""
        return engine_internals.inner_optimizer(self.engine)

    @property
    def adapter(self) -> OptimizerAdapter:
        """The optimizer's adapter, which converts its state to the form of checkpoints."""
        assert self._adapter is not None, "there is an optimizer"
        return self._adapter

    def parameters(self) -> dict[str, Tensor]:
        """Return masters of trainable parameters, and frozen parameters, by name."""
        with swapping.mapped(self.engine):
            masters = {fragment.name: fragment.cut(fragment.flat) for fragment in self.fragments}
        return {name: masters.get(name, self._untrained(name, p)) for name, p in self.module.named_parameters()}

    def _untrained(self, name: str, parameter: Tensor) -> Tensor:
        if name in self.originals:
            return self.originals[name]
        return (
            engine_internals.own_shard(parameter) if engine_internals.is_partitioned(parameter) else parameter.detach()
        )

    def optimizer_state(self) -> dict[str, Any]:
        """Return existing optimizer state as ``optim.state.<name>.<key>``, settings as ``optim.group.<name>.<key>``.

        Raises:
            CheckpointError: state that is not element by element.
        """
        with swapping.mapped(self.engine):
            return self._optimizer_state()

    def _optimizer_state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        optimizer = self.optimizer
        for fragment in self.fragments:
            state, lag = self.adapter.state_of(fragment.flat), (self._lags or {}).get(fragment.name, 0)
            if lag and "step" in state:  # as on one device, where nobody's first update makes state
                state = {**state, "step": state["step"] - lag} if int(state["step"]) > lag else {}
            for key, value in state.items():
                one_each = isinstance(value, Tensor) and value.shape == fragment.flat.shape and key not in _COUNTERS
                if isinstance(value, Tensor) and not one_each and value.numel() > 1 and fragment.offset is not None:
                    raise CheckpointError(
                        f"{STATE}{fragment.name}.{key}: has shape {tuple(value.shape)} for {fragment.flat.numel()} elements, "
                        "under ZeRO only state that is kept element by element can be saved"
                    )
                found[f"{STATE}{fragment.name}.{key}"] = fragment.cut(value) if one_each else value
            found |= hyper_parameters(self.adapter, optimizer.param_groups[fragment.group], fragment.name)
        for name, group in self._frozen_groups.items():
            found |= hyper_parameters(self.adapter, group, name)
        return found

    def optimizer_template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return tensors to fill with the optimizer state of a checkpoint; the live state does not change.

        Raises:
            CheckpointError: state that is not element by element.
        """
        with swapping.mapped(self.engine):
            return self._optimizer_template(saved)

    def _optimizer_template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        fragments = {fragment.name: fragment for fragment in self.fragments}
        template: dict[str, Tensor] = {}
        self._incoming = {}
        counters = _COUNTERS | _numbers(saved, fragments)
        for full_key, info in saved.items():
            prefix, name, key = split_key(full_key)
            if prefix != STATE or name not in fragments or not hasattr(info, "shape"):
                continue
            fragment = fragments[name]
            if not self.adapter.keeps_state_of(fragment.flat):
                continue
            dtype = torch.float32 if info.dtype is torch.float64 else info.dtype  # DeepSpeed has no float64
            slot = (id(fragment.flat), key)
            if (own := self.adapter.empty_state(fragment.flat, info.shape, dtype)) is not None:
                template[full_key] = self._incoming[slot] = own
                continue
            if key in counters:
                template[full_key] = torch.empty(info.shape, dtype=info.dtype)
                continue
            if tuple(info.shape) != tuple(fragment.shape) and fragment.offset is None:
                own = torch.empty(tuple(info.shape), dtype=dtype, device=fragment.flat.device)
                template[full_key] = self._incoming[slot] = own
                continue
            if tuple(info.shape) != tuple(fragment.shape):
                raise CheckpointError(
                    f"{full_key}: has shape {tuple(info.shape)}, the parameter's is {tuple(fragment.shape)}; DeepSpeed can "
                    "take up only state that is kept element by element"
                )
            if slot not in self._incoming:
                self._incoming[slot] = self._files.zeros(fragment.flat, key, dtype)
            template[full_key] = fragment.cut(self._incoming[slot])
        return template

    def load_optimizer(self, values: Mapping[str, Any]) -> None:
        """Use the filled tensors of ``optimizer_template`` and the plain values as optimizer state.

        Raises:
            CheckpointError: another class of optimizer, or different numbers of updates for parameters in one flat
                tensor of the engine.
        """
        with swapping.mapped(self.engine):
            self._load_optimizer(values)
            self._files.adopt()
        engine_internals.relink(self.engine)

    def _load_optimizer(self, values: Mapping[str, Any]) -> None:
        optimizer = self.optimizer
        counters: dict[int, dict[str, tuple[str, Any]]] = {}
        settings: dict[str, dict[str, Any]] = {}
        groups = {
            fragment.name: optimizer.param_groups[fragment.group] for fragment in self.fragments
        } | self._frozen_groups
        flats = {each.name: each.flat for each in self.fragments if self.adapter.keeps_state_of(each.flat)}
        for full_key, value in values.items():
            prefix, name, key = split_key(full_key)
            if prefix == GROUP:
                settings.setdefault(name, {})[key] = value
            elif prefix == STATE and name in flats and (id(flats[name]), key) not in self._incoming:
                kept = counters.setdefault(id(flats[name]), {})
                first, known = kept.setdefault(key, (name, value))
                if known != value and key == "step" and self._lags is not None:
                    kept[key] = (first, max(known, value))
                elif known != value:
                    raise CheckpointError(
                        f"{full_key}: is {_number(value)}, that of {first} is {_number(known)}; DeepSpeed counts the "
                        "updates of a parameter group together, so these cannot share a group"
                    )
        if self._lags is not None:
            counts = {name: int(counters.get(id(flat), {}).get("step", (name, 0))[1]) for name, flat in flats.items()}
            behind = {name: count - int(values.get(f"{STATE}{name}.step", 0)) for name, count in counts.items()}
            self._lags.clear()
            self._lags.update({name: lag for name, lag in behind.items() if lag})
        known = [name for name in settings if name in groups]
        for name in sorted(known, key=lambda name: name not in self._frozen_groups):  # those of trained ones count
            groups[name].update(restored_hyper_parameters(self.adapter, groups[name], settings[name]))
        for flat in {id(fragment.flat): fragment.flat for fragment in self.fragments}.values():
            adopted = {key: tensor for (owner, key), tensor in self._incoming.items() if owner == id(flat)}
            adopted |= {key: value for key, (_, value) in counters.get(id(flat), {}).items()}
            optimizer.state.pop(flat, None)
            if adopted:
                own = self.adapter.state_at_owner(flat, self.adapter.own_state(adopted))
                optimizer.state[flat] = without_inner(own)
            self.adapter.load_inner(flat, adopted)
        self._incoming = {}

    def follow_masters(self) -> None:
        """Copy the values of ``parameters`` into the weights that the model computes with; a collective."""
        for name, parameter in self.module.named_parameters():
            original = self.originals.get(name)
            if isinstance(original, FlatShard):
                engine_internals.own_shard(parameter).to_local().copy_(original.to_local())
            elif original is not None:
                parameter.detach().copy_(original)
        engine_internals.refresh(self.engine, self.fragments)


def _numbers(saved: Mapping[str, Any], fragments: Mapping[str, Fragment]) -> set[str]:
    """Return keys of scalar state of non-scalar parameters in a checkpoint: these are counters, whatever their name."""
    found = set()
    for full_key, info in saved.items():
        prefix, name, key = split_key(full_key)
        if prefix == STATE and getattr(info, "shape", None) == () and name in fragments:
            found |= {key} if fragments[name].shape else set()
    return found


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


# The bytes that DeepSpeed's engine keeps on one process, from the shapes of its shards.


_SHARDS_GRADIENTS = 2
"""The stage from which on a process keeps the gradients of its shard only."""


def engine_memory(state: EngineState, module: nn.Module, zero: ZeroOptimization, *, trains: bool) -> StateMemory:
    """Return the bytes of parameters, gradients and optimizer state that this process keeps; padding is not counted.

    Args:
        state: the engine's state.
        module: the user's model.
        zero: the stage, and what is offloaded.
        trains: whether there is an optimizer.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    parameters = sum(_held(tensor) for tensor in tensors.values())
    parameters += sum(original.nbytes for original in state.originals.values())
    if not trains:
        return StateMemory(parameters, 0, 0)
    fragments = {id(fragment.parameter): fragment for fragment in state.fragments}
    if zero.stage < _SHARDS_GRADIENTS:
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if id(p) in fragments)
    else:
        gradients = sum(each.numel * each.parameter.element_size() for each in fragments.values())
    return StateMemory(parameters, gradients, _of_optimizer(state, [*fragments.values()]), _note(zero))


def _held(tensor: Tensor) -> int:
    return own_shard(tensor).to_local().nbytes if is_partitioned(tensor) else size_of(tensor)


def _of_optimizer(state: EngineState, fragments: Sequence[Fragment]) -> int | None:
    masters = sum(each.numel * each.flat.element_size() for each in fragments if each.flat is not each.parameter)
    # The optimizer sees the flat tensors: what it keeps once for each, such as a counter, is there once for many fragments.
    flats: dict[int, list[Fragment]] = {}
    for each in fragments:
        flats.setdefault(id(each.flat), []).append(each)
    groups = state.optimizer.param_groups
    moments = state_of_shapes(
        state.optimizer,
        (((sum(each.numel for each in held),), held[0].flat.dtype, groups[held[0].group]) for held in flats.values()),
    )
    return None if moments is None else masters + moments


def _note(zero: ZeroOptimization) -> str:
    where = {"cpu": "in host memory", "nvme": "in files"}
    parts = (("optimizer state", zero.offload_optimizer), ("parameters", zero.offload_param))
    return ", ".join(
        f"{what} {where[part.device]}" for what, part in parts if part is not None and part.device in where
    )
