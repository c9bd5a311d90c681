"""Wrong configurations at 1,024 ranks: one line each, which names the key."""

import pytest

from .conftest import PLANS
from .real_runs import refusal, refusal_of_script

MESH, FSDP, ZERO = ({"type": f"{name}Strategy"} for name in ("Mesh", "FSDP", "DeepSpeed"))
AMP = {"optim_wrapper.type": "AmpOptimWrapper"}
ROWS = {
    "sizes": (
        "mlp",
        {**MESH, "dp_shard": 100, "tp": 8},
        {},
        "strategy: dp_shard=100 * tp=8 is 800, but there are 1024",
    ),
    "shard": (
        *("mlp", "mesh:cp3", {}),
        "strategy: cp=3 needs a multiple of 3 processes, not 1024; start 1026",
    ),
    "experts-of": ("mlp", "mesh:ep3", {}, "strategy.ep: 3 does not divide the 1024 processes of dp_shard * cp * tp"),
    "zero-size": ("mlp", {**MESH, "tp": 0}, {}, "strategy.tp: 0 is not allowed, give a positive number"),
    "replicas": ("mlp", {**FSDP, "replicate_size": 3}, {}, "strategy.replicate_size: 3 does not divide the 1024"),
    "groups": (
        *("mlp", {**FSDP, "reshard_after_forward": 3}, {}),
        "strategy.reshard_after_forward: 3 does not divide the 1024 processes that shard the model; give a divisor",
    ),
    "name": ("mlp", "fdsp", {}, 'strategies: "fdsp" is no known strategy, did you mean "fsdp"?'),
    "option": ("mlp", {**FSDP, "warp": ["Linear"]}, {}, 'strategy.warp: unknown key, did you mean "wrap"?'),
    "class": (
        "mlp",
        {**FSDP, "wrap": ["Liner"]},
        {},
        'strategy.wrap: no submodule is a "Liner", did you mean "Linear"?',
    ),
    "precision": (
        *("mlp", {**FSDP, "mixed_precision": {"param_dtype": "bf17"}}, {}),
        'strategy.mixed_precision.param_dtype: "bf17" is not allowed, choose float32',
    ),
    "autocast": ("mlp", "ddp", {**AMP, "optim_wrapper.dtype": "fp8"}, 'optim_wrapper.dtype: "fp8" is not allowed'),
    "stage": ("mlp", {**ZERO, "zero_optimization": {"stage": 5}}, {}, "strategy.zero_optimization.stage: 5 is not"),
    "offload": (
        *("mlp", {**ZERO, "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, {}),
        "strategy.zero_optimization.offload_param: has no effect at stage 1",
    ),
    "accumulate": (
        *("mlp", "fsdp", {"optim_wrapper.accumulative_counts": 0}),
        "optim_wrapper.accumulative_counts: 0 is not allowed, give 1 or more",
    ),
    "clip": (
        "mlp",
        "ddp",
        {"optim_wrapper.clip_grad": {"max_nrom": 1.0}},
        "optim_wrapper.clip_grad.max_nrom: unknown key",
    ),
    "matrices": (
        "mlp",
        "fsdp",
        {"optim_wrapper.optimizer": {"type": "Muon", "lr": 1e-3}},
        "optim_wrapper.optimizer.others: missing, Muon updates matrices",
    ),
    "owners": (
        "mlp",
        {**ZERO, "zero_optimization": {"stage": 3}},
        {"optim_wrapper.optimizer": {"type": "Muon", "lr": 1e-3, "others": {"type": "AdamW"}}},
        "optim_wrapper.optimizer: Muon cannot be planned under ZeRO",
    ),
    "closure": (
        "mlp",
        "fsdp",
        {"optim_wrapper.optimizer": {"type": "LBFGS"}},
        "optim_wrapper.optimizer: LBFGS evaluates",
    ),
    "batch": ("mlp", "ddp", {"train_dataloader.batch_size": 0}, "train_dataloader.batch_size: 0 is not allowed"),
    "positions": ("mlp", "mesh:cp2", {}, "strategy.cp_positions: Perceptron.forward has no parameter position_ids"),
    "layer": (
        *("mlp", {**MESH, "tp": 2, "plan": {"blocks.*.7": "colwise"}}, {}),
        'strategy.plan["blocks.*.7"]: names no module of the model, did you mean "blocks.*.',
    ),
    "schedule": ("mlp", {**MESH, "pp": 2, "pp_schedule": "1f2b"}, {}, 'strategy.pp_schedule: "1f2b" is not allowed'),
    "split": ("mlp", {**MESH, "pp": 2, "pp_split": [1, 1]}, {}, "strategy.pp_split: 1 + 1 is 2, but Perceptron has 4"),
    "no-experts": ("mlp", "mesh:ep2", {}, "strategy.ep: Perceptron has no plan for experts"),
    "device": ("mlp", "npu", {}, "strategy.type: NPUStrategy cannot be planned"),
    "argument": (
        "mlp",
        "ddp",
        {"train_dataloder.batch_size": 4},
        "changes.train_dataloder: the runner has no such argument",
    ),
}
OF_TRANSFORMERS = {
    "heads": ("llama", "mesh:tp16", {}, "strategy.tp: 16 does not divide the 4 key/value heads of LlamaForCausalLM"),
    "heads-of-ulysses": (
        *("llama", {**MESH, "cp": 16, "cp_kind": "ulysses"}, {}),
        'strategy.cp_kind: "ulysses" needs a number of heads that cp * tp = 16 divides',
    ),
    "layers": ("llama", "mesh:pp16", {}, "strategy.pp: 16 stages need as many layers, LlamaForCausalLM has 4"),
    "experts": (
        "mixtral",
        "mesh:ep8",
        {},
        "strategy.ep: 8 does not divide the 4 experts of model.layers.0.mlp.experts",
    ),
    "keys": (
        *("llama", {**MESH, "cp": 2, "cp_keys": {"input_idz": 1}}, {}),
        'strategy.cp_keys: "input_idz" is not in the batch, which has "input_ids", "labels"; did you mean "input_ids"?',
    ),
    "length": ("llama", "mesh:cp128", {}, 'batch["input_ids"]: 64 positions do not divide over cp=128 processes'),
    "sequence": (
        *("mixtral", {**MESH, "tp": 2, "sequence_parallel": True}, {}),
        'strategy.sequence_parallel: the plan of MixtralForCausalLM itself says "packed_colwise" for model.layers.0.mlp',
    ),
    "statistics": ("resnet", "mesh:cp2", {}, "model.net.bn1.running_mean: strategy.cp=2 would keep statistics of"),
    "chains": ("resnet", "mesh:pp2", {}, "strategy.pp: Images has several chains of layers"),
    "values": (
        *("mlp", "ddp", {"optim_wrapper.optimizer": {"type": "Adafactor", "lr": 1e-3}}),
        "the computation depends on values at ",
    ),
}


def check(found, says):
    assert found.startswith(says)
    assert "\n" not in found


@PLANS
@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_configuration_is_one_line(workers1, name):
    model, strategy, changes, says = ROWS[name]
    check(workers1.run(refusal, strategy, 1024, model, changes=changes)[0], says)


SCRIPT = """
import sys
import torch
from torch import nn
from flextrain import FlexibleRunner

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        if "item" in sys.argv:
            print(y.mean().item())  # line 14
        if "cuda" in sys.argv:
            y = y + self.layer(y.cuda())  # line 16
        return {"loss": y.mean()}

FlexibleRunner(
    model=Net(),
    train_dataloader=dict(dataset=[{"x": torch.ones(4)}] * 8, batch_size=2, collate_fn="default_collate"),
    train_cfg=dict(by_epoch=True, max_epochs=1),
    optim_wrapper=dict(optimizer=dict(type=sys.argv[-1], lr=0.1)),
)
"""


@PLANS
@pytest.mark.parametrize(
    ("arguments", "begins", "ends"),
    [
        (
            ("item", "SGD"),
            "the computation depends on values at the model ({script}:14), which a rehearsal has none of",
            " and return tensors to log as they are, without item() or float()",
        ),
        (
            ("cuda", "SGD"),
            "needs another device than the CPU, on which a plan runs, at layer ({script}:16); give tensors",
            "",
        ),
        (("Adafactor",), "the computation depends on values at ", "(aten._local_scalar_dense.default)"),
    ],
    ids=["item", "cuda", "optimizer"],
)
def test_what_a_model_cannot_do_in_a_plan_is_one_line(workers1, tmp_path, arguments, begins, ends):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.removeprefix("\n"))
    (found,) = workers1.run(refusal_of_script, str(script), *arguments)
    check(found, begins.format(script=script))
    assert found.endswith(ends)
    assert ("/torch/optim/_adafactor.py:" in found) == ("Adafactor" in arguments)


@pytest.mark.full
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_configuration_that_does_not_fit_its_model_is_one_line(workers1, name):
    model, strategy, changes, says = OF_TRANSFORMERS[name]
    check(workers1.run(refusal, strategy, 1024, model, changes=changes)[0], says)
