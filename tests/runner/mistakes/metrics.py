"""Metrics, and the hooks that watch them."""

from __future__ import annotations

from typing import Any

from flextrain import BaseMetric, FlexibleRunner

from .parts import Accuracy, Gives, Net, Row, Silent, warns


def metric(gives: Any, **more: Any) -> dict[str, Any]:
    return {"val_evaluator": Gives(gives), **more}


def best(**options: Any) -> dict[str, Any]:
    return {"default_hooks": dict(checkpoint=options)}


def early(**options: Any) -> dict[str, Any]:
    return {
        "custom_hooks": [
            dict(type="EarlyStoppingHook", **{"monitor": "accuracy", "patience": 1, "min_delta": 0.001, **options})
        ]
    }


class NoSuper(Accuracy):
    def __init__(self) -> None:
        self.threshold = 0.5


class NoProcess(BaseMetric):
    def compute_metrics(self, results: list[Any]) -> Any:
        return {"accuracy": 0.0}


ROWS = [
    Row("compute_metrics returns nothing", metric(None), "compute_metrics gave None, return a dict of metrics by name"),
    Row("compute_metrics returns a number", metric(0.5), "compute_metrics gave"),
    Row("compute_metrics returns a list", metric([0.5]), "compute_metrics gave"),
    Row("names that are numbers", metric({1: 0.5}), "compute_metrics"),
    Row("two metrics of one name", {"val_evaluator": [Accuracy(), Accuracy()]}, 'two metrics are called "accuracy", give one a prefix'),
    warns("no results", {"val_evaluator": Silent(), "train_cfg.max_epochs": 1, "env_cfg": dict(dry_run=False)}, "got no results, process() appended nothing"),
    Row("metric without process", {"val_evaluator": NoProcess}, "val_evaluator"),
    Row("metric without super().__init__", {"val_evaluator": NoSuper}, "super().__init__()"),
    Row("a function as a metric", {"val_evaluator": lambda pred, label: 0.0}, "val_evaluator"),
    Row("a model as a metric", {"val_evaluator": dict(type=Net)}, "is no metric, subclass flextrain.BaseMetric"),
    Row("save_best misspelled", best(save_best="acuracy", rule="greater"), 'save_best: "acuracy" is no metric of the validation, did you mean "accuracy"?'),
    Row("save_best on a metric that is not there", best(save_best="mIoU"), "save_best: \"mIoU\" is no metric of the validation"),
    Row("save_best with its evaluator's name", best(save_best="val/accuracy"), "is no metric of the validation"),
    Row("save_best without a rule", best(save_best="mse"), "rule: missing, the name \"mse\" does not say whether greater or less is better"),
    Row("save_best with torch's words", best(save_best="accuracy", rule="max"), 'rule: "max" is not allowed, choose greater or less'),
    Row("save_best of two with one rule too many", best(save_best=["accuracy"], rule=["greater", "less"]), "rule"),
    Row("save_best of text", {**metric({"accuracy": "high"}), **best(save_best="accuracy")}, "\"accuracy\" is 'high', which is no number", late=True),
    Row("save_best of a list", {**metric({"accuracy": [0.1, 0.2]}), **best(save_best="accuracy")}, "which is no number", late=True),
    Row("save_best automatic without a rule", {**metric({"score": 0.5}), **best(save_best="auto")}, "rule: missing"),
    warns("early stopping misspelled", early(monitor="acuracy", rule="greater"), 'EarlyStoppingHook.monitor: "acuracy" is no metric of the validation, did you mean "accuracy"?'),
    Row("early stopping, strictly", early(monitor="acuracy", rule="greater", strict=True), '"acuracy" is no metric of the validation'),
    Row("early stopping without a rule", early(monitor="mse"), "rule: missing"),
    Row("early stopping with torch's words", early(mode="max"), "custom_hooks[0].mode: unknown key"),
    Row("min_delta below 0", early(min_delta=-0.1), "custom_hooks[0].min_delta: -0.1 is not allowed"),
    Row("min_delta NaN", early(min_delta=float("nan")), "custom_hooks[0].min_delta: nan is not allowed"),
    warns("min_delta for per cent on a share", early(min_delta=0.1), "EarlyStoppingHook.min_delta: 0.1 is a large difference for accuracy = 0.5"),
    warns("MMEngine's default min_delta", {"custom_hooks": [dict(type="EarlyStoppingHook", monitor="accuracy", patience=1)]}, "EarlyStoppingHook.min_delta: 0.1 is a large difference"),
    warns("min_delta larger than a loss", {**metric({"loss": 0.02}), **early(monitor="loss", min_delta=0.05)}, "EarlyStoppingHook.min_delta: 0.05 is a large difference for loss = 0.0200"),
    Row("negative patience", early(patience=-1), "custom_hooks[0].patience: -1 is not allowed"),
    warns("patience beyond the end", early(patience=10), "EarlyStoppingHook.patience: 10 validations without improvement do not fit"),
    Row("validation that was not configured", {"val_dataloader": None, "val_cfg": None, "val_evaluator": None}, "val_cfg: missing, runner.val() needs", do=FlexibleRunner.val),
    Row("testing that was not configured", {}, "test_cfg: missing, runner.test() needs", do=FlexibleRunner.test),
    Row("metric key of dict", {"val_evaluator": dict(Accuracy=dict())}, "val_evaluator.type: missing"),
]  # fmt: skip
