"""SavedView: the checkpoint as ``before_save_checkpoint`` hooks see and change it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.errors import CheckpointError

_WHERE = "before_save_checkpoint"
_MODEL, _OPTIMIZER = "model.", "optim."
_PLAIN_VALUES = {"meta": "meta", "param_schedulers": "scheduler", "message_hub": "message_hub"}
_OWN_KEY = 'give what is to be saved a key of its own: checkpoint["..."] = value'


class SavedView:
    """A dict in MMEngine's form with the state that is about to be saved.

    ``meta``, ``message_hub`` and ``param_schedulers`` (lists by the optimizer's name) are plain values, saved with the
    hooks' changes. ``state_dict`` has the live weights; of a sharded one, this process's shard. A plain tensor may be
    replaced by another one of the same shape, and names may be removed if the checkpoint has no optimizer.
    ``optimizer`` may only be removed as a whole.

    Args:
        state: the state by canonical key; changed by ``apply``.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.checkpoint: dict[str, Any] = {key: state[name] for key, name in _PLAIN_VALUES.items() if name in state}
        self._weights, self._optimizer = _part(state, _MODEL), _part(state, _OPTIMIZER)
        self.checkpoint["state_dict"] = dict(self._weights)
        if self._optimizer:
            self.checkpoint["optimizer"] = dict(self._optimizer)

    def apply(self) -> dict[str, Any]:
        """Apply the hooks' changes to the state, and return what the hooks added.

        Raises:
            CheckpointError: a change cannot be saved.
        """
        found = dict(self.checkpoint)
        for key, name in _PLAIN_VALUES.items():
            if key in found:
                self._state[name] = found.pop(key)
            else:
                self._state.pop(name, None)
        self._change_optimizer(found.pop("optimizer", None))
        self._change_weights(found.pop("state_dict", None))
        return found

    @property
    def has_optimizer(self) -> bool:
        """True if the state still has that of the optimizer."""
        return any(key.startswith(_OPTIMIZER) for key in self._state)

    def _change_optimizer(self, found: Any) -> None:
        if found is None:
            for key in self._optimizer:
                del self._state[_OPTIMIZER + key]
        elif not self._optimizer or found.keys() != self._optimizer.keys() or _differing(found, self._optimizer):
            raise CheckpointError(
                f'{_WHERE}: a hook has changed checkpoint["optimizer"], which may only be removed as a whole; {_OWN_KEY}'
            )

    def _change_weights(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise CheckpointError(
                f'{_WHERE}: a hook has removed checkpoint["state_dict"], but a checkpoint needs its weights'
            )
        if new := sorted(found.keys() - self._weights.keys()):
            raise CheckpointError(f'{_WHERE}: a hook has added {new[0]} to checkpoint["state_dict"], {_OWN_KEY}')
        if lost := sorted(self._weights.keys() - found.keys()):
            if self.has_optimizer:
                raise CheckpointError(
                    f'{_WHERE}: a hook has removed {lost[0]} from checkpoint["state_dict"], which makes resuming '
                    "impossible; save_optimizer=False saves only weights, and strategy=dict(exclude_frozen_parameters=True) "
                    "leaves frozen parameters out"
                )
            for name in lost:
                del self._state[_MODEL + name]
        for name in _differing(found, self._weights):
            value, before = found[name], self._weights[name]
            if type(before) is not Tensor or type(value) is not Tensor or value.shape != before.shape:
                raise CheckpointError(
                    f'{_WHERE}: a hook has put {type(value).__name__} in the place of checkpoint["state_dict"]["{name}"], '
                    f"a {type(before).__name__} of shape {tuple(before.shape)}; only a plain tensor may be replaced, by one of "
                    "the same shape; change the model instead"
                )
            self._state[_MODEL + name] = value


def _part(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _differing(found: dict[str, Any], given: dict[str, Any]) -> list[str]:
    return [name for name, value in found.items() if value is not given[name]]
