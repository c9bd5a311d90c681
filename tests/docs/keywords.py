"""What a page gives a value as an argument of FlexibleRunner is what a runner takes."""

from __future__ import annotations

import re
from typing import Any

from .pages import Block

KEYWORDS = {
    "auto_scale_lr",
    "custom_hooks",
    "default_hooks",
    "env_cfg",
    "log_processor",
    "optim_wrapper",
    "param_scheduler",
    "randomness",
    "resume",
    "strategy",
    "train_cfg",
    "visualizer",
}
"""Arguments that can be checked without the rest of a page's training."""


def check_keywords(block: Block, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Check the values that a block gave to names of the runner's arguments, as a runner does before it trains.

    Raises:
        ConfigError: a runner would refuse it.
    """
    given = {
        key: after[key]
        for key in KEYWORDS & after.keys()
        if isinstance(after[key], (dict, list)) and before.get(key) is not after[key]
    }
    if not given or re.search(r"\bFlexibleRunner\b", block.code):
        return
    check(**given)


def check(**given: Any) -> None:
    """Check arguments beside those of a small training."""
    import torch

    from flextrain import BaseMetric, FlexibleRunner
    from flextrain.runner.config import check_everything
    from flextrain.user_script import arguments_given_by

    class Count(BaseMetric):
        def process(self, data_batch: Any, data_samples: Any) -> None: ...
        def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
            return {"accuracy": 0.0}

    batches = [(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))]
    least: dict[str, Any] = dict(
        model=torch.nn.Linear(2, 2),
        train_dataloader=batches,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=1),
        val_dataloader=batches,
        val_cfg=dict(),
        val_evaluator=Count(),
    )
    arguments = arguments_given_by(lambda: FlexibleRunner(**{**least, **given}))
    check_everything(arguments, takes_mmengines_models=False)
