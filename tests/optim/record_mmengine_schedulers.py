"""Record what MMEngine's own schedulers do into data/mmengine_schedulers.json.

Run by hand, where mmengine is installed: ``python tests/optim/record_mmengine_schedulers.py``. A case is a list of
scheduler configurations on one optimizer, moved for 100 iterations the way MMEngine's ParamSchedulerHook moves them.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch

NUM_STEPS = 100
LRS = {"one": [0.1], "two": [0.1, 0.03], "three": [1.0, 0.02, 0.004]}


def losses(kind: str) -> list[float]:
    """A made-up course of a metric over the epochs."""
    courses = {
        "stuck": lambda i: 1.0,
        "falls": lambda i: 1 / (1 + i),
        "stalls": lambda i: max(1 / (1 + i), 0.08),
        "waves": lambda i: 1 + math.sin(i / 5) / (1 + i / 20),
        "rises": lambda i: 1 - math.exp(-i / 8) + 0.01 * math.sin(i),
        "creeps": lambda i: 1 - 0.00005 * i,
    }
    return [courses[kind](i) for i in range(NUM_STEPS)]


# Ten configurations per schedule; "groups", "epoch_length" and "metrics" belong to the case, the rest to the scheduler.
SCHEDULES: dict[str, list[dict[str, Any]]] = {
    "Constant": [
        dict(),
        dict(factor=0.5, end=20),
        dict(factor=0.1, begin=10, end=30),
        dict(factor=1.0, end=50, groups="two"),
        dict(factor=0.25, begin=99),
        dict(factor=0.7, begin=5, end=6, groups="three"),
        dict(factor=0.5, end=5, epoch_length=7, convert_to_iter_based=True),
        dict(factor=0.5, begin=1, end=4, epoch_length=20),
        dict(factor=0.3, end=40, by_epoch=False, epoch_length=9),
        dict(factor=0.9, begin=50, end=200, groups="two"),
    ],
    "Linear": [
        dict(end=100),
        dict(start_factor=0.001, end=20),
        dict(start_factor=0.1, begin=10, end=30, groups="two"),
        dict(start_factor=1.0, end_factor=0.1, end=60),
        dict(start_factor=0.5, end_factor=0.25, begin=20, end=90, groups="three"),
        dict(),
        dict(start_factor=1e-6, end=5, epoch_length=8, convert_to_iter_based=True),
        dict(start_factor=0.2, begin=1, end=3, epoch_length=16, convert_to_iter_based=True, groups="two"),
        dict(start_factor=0.1, end=50, by_epoch=False, epoch_length=10),
        dict(start_factor=0.2, end_factor=0.8, end=8, epoch_length=11),
    ],
    "Step": [
        dict(step_size=10),
        dict(step_size=30, gamma=0.5),
        dict(step_size=1, gamma=0.95, groups="two"),
        dict(step_size=7, gamma=0.3, begin=10, end=60),
        dict(step_size=200),
        dict(step_size=15, gamma=1.2, groups="three"),
        dict(step_size=2, gamma=0.5, epoch_length=12, convert_to_iter_based=True),
        dict(step_size=3, gamma=0.1, begin=2, end=8, epoch_length=9, convert_to_iter_based=True),
        dict(step_size=25, by_epoch=False, epoch_length=5),
        dict(step_size=2, gamma=0.8, epoch_length=6, groups="two"),
    ],
    "MultiStep": [
        dict(milestones=[30, 60, 90]),
        dict(milestones=[50], gamma=0.5),
        dict(milestones=[10, 10, 40], gamma=0.5, groups="two"),
        dict(milestones=[5, 20, 45], begin=10, end=50, gamma=0.2),
        dict(milestones=[0, 33], gamma=0.3),
        dict(milestones=[1, 2, 3, 4, 99], gamma=0.7, groups="three"),
        dict(milestones=[2, 5], epoch_length=15, convert_to_iter_based=True),
        dict(milestones=[1, 4], begin=1, end=7, epoch_length=13, convert_to_iter_based=True, gamma=0.6),
        dict(milestones=[20, 80], by_epoch=False, epoch_length=10, groups="two"),
        dict(milestones=[3, 6], epoch_length=10, gamma=0.1),
    ],
    "Exponential": [
        dict(gamma=0.9),
        dict(gamma=0.99, groups="two"),
        dict(gamma=0.5, begin=10, end=20),
        dict(gamma=1.01),
        dict(gamma=0.97, begin=40, groups="three"),
        dict(gamma=0.8, end=1),
        dict(gamma=0.98, end=6, epoch_length=10, convert_to_iter_based=True),
        dict(gamma=0.95, begin=2, end=5, epoch_length=14, convert_to_iter_based=True, groups="two"),
        dict(gamma=0.96, by_epoch=False, epoch_length=20),
        dict(gamma=0.7, epoch_length=8),
    ],
    "Poly": [
        dict(end=100),
        dict(end=100, power=2.0, groups="two"),
        dict(end=80, power=0.9, eta_min=1e-3),
        dict(begin=10, end=60, power=3.0),
        dict(begin=20, end=100, power=0.5, eta_min=1e-4, groups="three"),
        dict(),
        dict(end=9, power=0.9, epoch_length=11, convert_to_iter_based=True),
        dict(begin=1, end=6, eta_min=0.01, epoch_length=15, convert_to_iter_based=True, groups="two"),
        dict(end=90, power=2.0, by_epoch=False, epoch_length=10),
        dict(end=10, power=1.5, eta_min=1e-5, epoch_length=10),
    ],
    "CosineAnnealing": [
        dict(T_max=100),
        dict(end=80, eta_min=1e-3),
        dict(T_max=20, groups="two"),
        dict(T_max=25, eta_min=0.001, begin=10, end=90),
        dict(begin=20, end=100, eta_min_ratio=0.05, groups="three"),
        dict(T_max=1),
        dict(T_max=7, eta_min_ratio=0.2, groups="two"),
        dict(T_max=8, epoch_length=12, convert_to_iter_based=True, eta_min=1e-5),
        dict(begin=2, end=9, epoch_length=11, convert_to_iter_based=True, eta_min_ratio=0.1, groups="two"),
        dict(end=50, by_epoch=False, epoch_length=10),
    ],
    "CosineRestart": [
        dict(periods=[100], eta_min=0.0),
        dict(periods=[20, 30, 50], restart_weights=[1, 0.5, 0.25], eta_min=1e-4),
        dict(periods=[10] * 5, restart_weights=[1, 1, 1, 1, 1], eta_min=0.0, groups="two"),
        dict(periods=[30, 30], restart_weights=[1.0, 0.8], eta_min_ratio=0.1, groups="three"),
        dict(periods=[25, 40], restart_weights=[0.5, 1.0], eta_min=1e-3, begin=10, end=70),
        dict(periods=[1, 2, 3, 4], restart_weights=[1, 0.9, 0.8, 0.7], eta_min=0.0),
        dict(periods=[2, 4], restart_weights=[1, 0.5], eta_min=1e-5, epoch_length=15, convert_to_iter_based=True),
        dict(periods=[3, 3], restart_weights=[1, 0.3], eta_min_ratio=0.01, begin=1, end=6, epoch_length=14,
             convert_to_iter_based=True, groups="two"),
        dict(periods=[40, 60], restart_weights=[1, 0.1], eta_min=0.0, by_epoch=False, epoch_length=7),
        dict(periods=[4, 6], restart_weights=[1, 0.5], eta_min_ratio=0.05, epoch_length=9, groups="two"),
    ],
    "OneCycle": [
        dict(eta_max=0.5, total_steps=101),
        dict(eta_max=0.5, end=101, anneal_strategy="linear", groups="two"),
        dict(eta_max=1.0, total_steps=101, three_phase=True),
        dict(eta_max=1.0, total_steps=101, three_phase=True, anneal_strategy="linear", pct_start=0.4),
        dict(eta_max=0.2, total_steps=101, pct_start=0.1, div_factor=10.0, final_div_factor=100.0),
        dict(eta_max=0.3, begin=10, end=90, groups="three"),
        dict(eta_max=0.5, end=7, epoch_length=15, convert_to_iter_based=True),
        dict(eta_max=0.4, total_steps=5, begin=1, end=6, epoch_length=18, convert_to_iter_based=True, groups="two"),
        dict(eta_max=0.5, end=80, by_epoch=False, epoch_length=10, pct_start=0.5),
        dict(eta_max=0.5, end=12, epoch_length=9, div_factor=5.0),
    ],
    "ReduceOnPlateau": [
        dict(metrics="stuck"),
        dict(metrics="falls", patience=2, factor=0.5),
        dict(metrics="stalls", patience=5, factor=0.5, cooldown=3, groups="two"),
        dict(metrics="waves", patience=3, factor=0.8, threshold=0.01),
        dict(metrics="rises", rule="greater", patience=4, factor=0.3, groups="three"),
        dict(metrics="rises", patience=0, factor=0.9, min_value=0.01),
        dict(metrics="waves", patience=2, factor=0.6, threshold_rule="abs", threshold=0.05),
        dict(metrics="stuck", patience=5, factor=0.5, begin=20, end=70, groups="two"),
        dict(metrics="creeps", patience=6, factor=0.1, min_value=[1e-3, 1e-4], groups="two"),
        dict(metrics="waves", rule="greater", patience=1, factor=0.7, cooldown=2, threshold_rule="abs",
             threshold=0.02, epoch_length=5, monitor="acc"),
    ],
}  # fmt: skip

CHAINS: list[dict[str, Any]] = [
    dict(schedulers=[dict(type="LinearLR", start_factor=0.01, end=10),
                     dict(type="CosineAnnealingLR", begin=10, end=100, eta_min=1e-4)]),
    dict(schedulers=[dict(type="LinearLR", start_factor=0.1, end=20, by_epoch=False),
                     dict(type="MultiStepLR", milestones=[4, 8], gamma=0.1)], epoch_length=10, groups="two"),
    dict(schedulers=[dict(type="LinearLR", start_factor=0.001, end=2, convert_to_iter_based=True),
                     dict(type="CosineAnnealingLR", begin=2, end=10, convert_to_iter_based=True, eta_min_ratio=0.01)],
         epoch_length=10),
    dict(schedulers=[dict(type="ConstantLR", factor=0.1, end=15), dict(type="PolyLR", begin=15, end=100, power=0.9)]),
    dict(schedulers=[dict(type="LinearLR", start_factor=0.1, end=10), dict(type="StepLR", step_size=20, begin=10)]),
    dict(schedulers=[dict(type="ExponentialLR", gamma=0.98), dict(type="MultiStepLR", milestones=[30, 60])]),
    dict(schedulers=[dict(type="CosineAnnealingLR", T_max=50, end=50),
                     dict(type="CosineAnnealingLR", T_max=50, begin=50, end=100, eta_min=0.01)], groups="two"),
    dict(schedulers=[dict(type="LinearLR", start_factor=0.5, end=30), dict(type="ExponentialLR", gamma=0.97, begin=20),
                     dict(type="LinearMomentum", start_factor=0.8, end=40)]),
    dict(schedulers=[dict(type="OneCycleLR", eta_max=0.3, end=60), dict(type="ExponentialLR", gamma=0.9, begin=60),
                     dict(type="CosineAnnealingMomentum", T_max=30, eta_min=0.5)], optimizer="Adam"),
    dict(schedulers=[dict(type="LinearLR", start_factor=0.1, end=3), dict(type="ReduceOnPlateauLR", patience=3)],
         metrics="stalls", epoch_length=2),
    dict(schedulers=[dict(type="StepParamScheduler", param_name="weight_decay", step_size=20, gamma=0.5),
                     dict(type="PolyLR", end=100)], groups="two"),
    dict(schedulers=[dict(type="LinearLR", start_factor=0.1, end=10, begin=0),
                     dict(type="ConstantLR", factor=0.5, begin=30, end=50),
                     dict(type="CosineRestartLR", periods=[20, 20], restart_weights=[1, 0.5], eta_min=0, begin=60)]),
    dict(schedulers=[dict(type="CosineAnnealingLR", T_max=120, last_step=19)], initial=True),
    dict(schedulers=[dict(type="ExponentialLR", gamma=0.9, last_step=4)], initial=True, groups="two"),
]  # fmt: skip

CASE_KEYS = ("groups", "epoch_length", "metrics", "initial", "optimizer")


def cases() -> dict[str, dict[str, Any]]:
    found = {f"chain-{i}": case for i, case in enumerate(CHAINS)}
    for schedule, configurations in SCHEDULES.items():
        for suffix in ("LR", "Momentum") if schedule != "OneCycle" else ("LR",):
            # One schedule is behind both names, so two configurations tell that the other one sets momentum.
            for i, configuration in enumerate(configurations if suffix == "LR" else configurations[:2]):
                options = {key: value for key, value in configuration.items() if key not in CASE_KEYS}
                case = {key: value for key, value in configuration.items() if key in CASE_KEYS}
                # Momentum is set in SGD's groups and in Adam's betas by turns.
                optimizer = "Adam" if suffix == "Momentum" and i % 2 else "SGD"
                scheduler = {"type": schedule + suffix, **options}
                found[f"{schedule}{suffix}-{i}"] = {**case, "optimizer": optimizer, "schedulers": [scheduler]}
    return found


def make_optimizer(case: dict[str, Any]) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in case["lrs"]]
    if case["optimizer"] == "Adam":
        return torch.optim.Adam(groups, betas=(0.9, 0.99), weight_decay=0.05)
    if case["initial"]:
        groups = [{**group, "initial_lr": 2 * group["lr"]} for group in groups]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05)


def record(case: dict[str, Any]) -> list[list[float]]:
    """Per iteration, before it runs, each recorded key of each group."""
    import mmengine.optim  # noqa: F401 - registers the schedulers
    from mmengine.registry import PARAM_SCHEDULERS

    optimizer = make_optimizer(case)
    provided = {"optimizer": optimizer, "epoch_length": case["epoch_length"]}
    schedulers = [PARAM_SCHEDULERS.build(copy.deepcopy(c), default_args=provided) for c in case["schedulers"]]
    rows = []
    for iteration in range(NUM_STEPS):
        rows.append([read(group, key) for key in case["keys"] for group in optimizer.param_groups])
        optimizer.step()
        epoch, rest = divmod(iteration + 1, case["epoch_length"])
        for scheduler in schedulers:
            if not scheduler.by_epoch or rest == 0:
                scheduler.step()
        if rest == 0:
            for scheduler in schedulers:
                if getattr(scheduler, "need_val_args", False):
                    scheduler.step({"loss": case["metrics"][epoch - 1], "acc": case["metrics"][epoch - 1]})
    return rows


def read(group: dict[str, Any], key: str) -> float:
    value = group["betas"][0] if key == "momentum" and "betas" in group else group[key]
    return float(f"{value:.12g}")


def main() -> None:
    recorded = {}
    for name, given in cases().items():
        case = {
            "optimizer": given.get("optimizer", "SGD"),
            "lrs": LRS[given.get("groups", "one")],
            "initial": given.get("initial", False),
            "epoch_length": given.get("epoch_length", 1),
            "schedulers": given["schedulers"],
            "metrics": losses(given["metrics"]) if "metrics" in given else [],
        }
        types = " ".join(scheduler["type"] for scheduler in case["schedulers"])
        keys = {"lr": "LR", "momentum": "Momentum", "weight_decay": "ParamScheduler"}
        case["keys"] = [key for key, word in keys.items() if word in types]
        recorded[name] = {**case, "values": record(case)}
    lines = ",\n".join(f'"{name}": {json.dumps(case, separators=(",", ":"))}' for name, case in recorded.items())
    path = Path(__file__).parent / "data" / "mmengine_schedulers.json"
    path.write_text("{\n" + lines + "\n}\n")
    print(f"{len(recorded)} cases")


if __name__ == "__main__":
    main()
