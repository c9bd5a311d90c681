"""BaseTTAModel: tests a model with several augmentations of every sample (test-time augmentation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

from torch import Tensor, nn

from .errors import ConfigError
from .model import BaseModel, run_forward, takes_mode
from .overriding import overridden
from .registry import MODELS


class BaseTTAModel(BaseModel):
    """Predicts every augmentation of a batch with the model inside, and merges what belongs to one sample.

    A batch for testing is a dict, list or tuple whose fields are lists with one entry for each augmentation, as
    ``pseudo_collate`` makes of samples with such lists. All batches have equally many augmentations.

    In a run the strategy has the model inside: it is wrapped, sharded and loaded as without this class, and names in
    checkpoints have no prefix. Validation uses it alone.

    Args:
        module: the model, or ``dict(type=...)``.
        data_preprocessor: for a model that is given as a configuration; otherwise it replaces the model's.

    Raises:
        ConfigError: ``module`` is no module, or a data preprocessor is given for one that has none.
    """

    def __init__(
        self,
        module: nn.Module | dict[str, Any],
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        *,
        where: str = "model",
    ) -> None:
        super().__init__()
        if isinstance(module, Mapping) and data_preprocessor is not None:
            module = {**module, "data_preprocessor": data_preprocessor}
        built: Any = MODELS.build(module, f"{where}.module") if isinstance(module, (Mapping, str)) else module
        if not isinstance(built, nn.Module):
            raise ConfigError(f"{where}.module: {type(built).__name__} is not allowed, give a module or dict(type=...)")
        if not isinstance(module, Mapping) and data_preprocessor is not None:
            if not hasattr(built, "data_preprocessor"):
                raise ConfigError(
                    f"{where}.data_preprocessor: {type(built).__name__} has no attribute of this name to set"
                )
            own: Any = data_preprocessor
            is_built = isinstance(own, nn.Module)
            built.data_preprocessor = own if is_built else MODELS.build(own, f"{where}.data_preprocessor")
        self.module = built
        self._predict_in_run: Callable[[Any], Any] | None = None

    def merge_preds(self, data_samples_list: list[tuple[Any, ...]]) -> Any:
        """Return the predictions that metrics get; every subclass must define it.

        Args:
            data_samples_list: for each sample of the batch, its predictions by augmentation.
        """
        raise NotImplementedError(f"{type(self).__name__}.merge_preds(data_samples_list) is not defined")

    def test_step(self, data: Any) -> Any:
        """Return the merged predictions of a batch of augmented samples; None on processes without outputs.

        Raises:
            ConfigError: a field of the batch is no list, or has more or fewer entries than another; or the model does not
                predict each sample of the batch.
        """
        predictions = [self._predict(part) for part in augmentations(data)]
        if any(found is None for found in predictions):
            return None
        by_sample = [_by_sample(found) for found in predictions]
        if len({len(samples) for samples in by_sample}) != 1:
            raise ConfigError(
                f"model.module: {type(self.module).__name__} predicted {[len(samples) for samples in by_sample]} samples of "
                "the augmentations of one batch, give equally many"
            )
        return self.merge_preds(list(zip(*by_sample, strict=True)))

    def run_with(self, predict: Callable[[Any], Any] | None) -> None:
        """Predict with this function from now on; None: with the model inside."""
        self._predict_in_run = predict

    def _predict(self, data: Any) -> Any:
        if self._predict_in_run is not None:
            return self._predict_in_run(data)
        if callable(getattr(self.module, "test_step", None)):
            return self.module.test_step(data)  # type: ignore[operator]
        return run_forward(self.module, data, **({"mode": "predict"} if takes_mode(self.module) else {}))


def overrides_test_step(model: BaseTTAModel) -> bool:
    """Whether a subclass defines ``test_step`` anew, and so may call the model inside itself."""
    return bool(overridden(model, "test_step"))


def module_to_set_up(model: nn.Module, *, trains: bool) -> nn.Module:
    """Return the module that a strategy gets of a model: of a BaseTTAModel, the model inside.

    Raises:
        ConfigError: a BaseTTAModel is to be trained, or has weights of its own.
    """
    if not isinstance(model, BaseTTAModel):
        return model
    if trains:
        raise not_trainable(type(model))
    if not overridden(model, "merge_preds", "test_step"):
        raise ConfigError(f"model: {type(model).__name__}.merge_preds(data_samples_list) is not defined")
    tensors = (*model.named_parameters(), *model.named_buffers())
    if any(not name.startswith("module.") for name, _ in tensors):
        raise ConfigError(
            f"model: {type(model).__name__} has weights beside its module, which no strategy would place and no checkpoint "
            "contain; put them into the module"
        )
    return model.module


def not_trainable(kind: type) -> ConfigError:
    """Return the error of training with a BaseTTAModel."""
    return ConfigError(
        f"model: {kind.__name__} merges predictions in testing and cannot be trained, train its module; "
        f'custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=dict(type=...))] tests what was trained'
    )


def augmentations(data: Any) -> list[Any]:
    """Return a batch for each augmentation, from a batch whose fields are lists of augmentations.

    Raises:
        ConfigError: a field is no list, or the fields have different lengths.
    """
    if isinstance(data, Mapping):
        fields = {repr(key): value for key, value in data.items()}
    elif isinstance(data, (list, tuple)):
        fields = {f"number {i}": value for i, value in enumerate(data)}
    else:
        raise ConfigError(
            f"test_dataloader: gave {type(data).__name__}, BaseTTAModel needs a dict, list or tuple of fields"
        )
    lengths: dict[str, int] = {}
    for name, value in fields.items():
        if not isinstance(value, (list, tuple)):
            raise ConfigError(
                f"test_dataloader: field {name} of a batch is {type(value).__name__}, BaseTTAModel needs a list with an entry "
                "for each augmentation"
            )
        lengths[name] = len(value)
    if len(set(lengths.values())) != 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigError(f"test_dataloader: fields of a batch have different numbers of augmentations ({counts})")
    if isinstance(data, Mapping):
        return [{key: value[i] for key, value in data.items()} for i in range(next(iter(lengths.values())))]
    return [list(part) for part in zip(*data, strict=True)]


def _by_sample(predictions: Any) -> list[Any]:
    """Return predictions as a list of samples; a dict of batches becomes a dict for each sample."""
    if isinstance(predictions, Mapping):
        sizes = {len(value) if _has_length(value) else None for value in predictions.values()}
        if len(sizes) != 1 or None in sizes:
            raise ConfigError(
                "model.module: predicted a dict, whose values need one entry for each sample to merge augmentations; give a "
                "list of samples"
            )
        return [dict(zip(predictions, row, strict=True)) for row in zip(*predictions.values(), strict=True)]
    if not isinstance(predictions, (list, tuple, Tensor)) or (
        isinstance(predictions, Tensor) and not predictions.dim()
    ):
        raise ConfigError(
            f"model.module: predicted {type(predictions).__name__}, to merge augmentations give a list of samples"
        )
    return list(predictions)


def _has_length(value: Any) -> bool:
    return value.dim() > 0 if isinstance(value, Tensor) else isinstance(value, Sized)
