"""MMEngine's models for test-time augmentation as models of flextrain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mmengine.model import BaseTTAModel as Theirs

from ..core.tta_model import BaseTTAModel
from .registries import built_by


class AdaptedTTAModel(BaseTTAModel):
    """Merges predictions as a model of MMEngine does; the strategy has the model inside.

    Args:
        theirs: the model for test-time augmentation.
    """

    def __init__(self, theirs: Theirs) -> None:
        super().__init__(theirs.module)
        # As attributes, like methods that a user's object defines anew.
        vars(self)["merge_preds"] = theirs.merge_preds
        if type(theirs).test_step is not Theirs.test_step:
            vars(self)["test_step"] = theirs.test_step
        vars(theirs)["module"] = _Inside(self._predict)


class _Inside:
    """Stands for the model inside, whose predictions the strategy makes."""

    def __init__(self, predict: Callable[[Any], Any]) -> None:
        self.test_step = predict


def _adapted(
    build: Callable[..., Theirs], /, module: Any, data_preprocessor: Any = None, **arguments: Any
) -> AdaptedTTAModel:
    if data_preprocessor is not None:
        arguments["data_preprocessor"] = data_preprocessor
    # Not by its name: DeepSpeed wraps constructors in functions whose own first parameter is called "module".
    return AdaptedTTAModel(build(module, **arguments))


def adapted_tta(model: Any) -> Any:
    """``model`` for flextrain, if it is one for test-time augmentation or describes one; any other as it is."""
    if isinstance(model, Theirs):
        return AdaptedTTAModel(model)
    kind = built_by(model.get("type")) if isinstance(model, dict) else None
    if isinstance(kind, type) and issubclass(kind, Theirs):
        maker = functools.partial(_adapted, model["type"])
        maker.merges = kind  # type: ignore[attr-defined]  # says before it is called that this model is only tested
        return {**model, "type": maker}
    return model
