"""What a plan says of DeepSpeed's stages, against real runs: memory by kind, collectives, floating-point operations."""

import json
import os

import pytest
import torch

from flextrain.core.base.tensors import has_memory
from flextrain.plan.child import arguments_for, rehearse
from flextrain.plan.plan import PlannedJob
from flextrain.plan.update import Training, set_seed
from flextrain.testing.loop import environ
from flextrain.user_script import runner_arguments

from .real_runs import SCRIPT

pytest.importorskip("deepspeed")

MODELS = ["mlp", "mlp accumulate", "llama", "llama ac", "resnet", "vit", "mixtral"]


def sizes(tensors):
    """Bytes by storage."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return {key: size for key, size in found.items() if size}


def held_by(strategy):
    """Bytes of the tensors that DeepSpeed's engine holds, by kind; those with several uses count once."""
    outer = strategy._engine.optimizer
    inner, parameters = getattr(outer, "optimizer", outer), [*strategy.module.parameters()]
    kinds = {
        "parameters": [parameter.data for parameter in parameters if has_memory(parameter)]
        + [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        + getattr(outer, "bit16_groups_flat", []),
        "optimizer_state": [one for group in inner.param_groups for one in group["params"]]
        + getattr(outer, "fp32_partitioned_groups_flat", [])
        + [value for state in inner.state.values() for value in state.values()],
        "gradients": [parameter.grad for parameter in parameters]
        + [getattr(outer, "grad_partitions_flat_buffer", None)],
        "communication": [bucket.buffer for bucket in getattr(outer, "ipg_buckets", {}).values()],
    }
    kinds["communication"] = [
        one for buffer in kinds["communication"] for one in (buffer if isinstance(buffer, list) else [buffer])
    ]
    known, found = {}, {}
    for kind, tensors in kinds.items():
        own = {key: size for key, size in sizes(tensors).items() if key not in known}
        known |= own
        found[kind] = sum(own.values())
    return found


def both(strategy, *arguments, changes=None):
    job = PlannedJob(SCRIPT, strategy, 2, 1, arguments, changes or {})
    with runner_arguments(job.script, job.arguments) as given:
        set_seed()
        training = Training(arguments_for(job, given)[0], job)
        real = training.run()
        held = held_by(training.strategy)
        training.strategy.leave()
    own = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    with environ(**own):
        planned, facts = rehearse(job, int(own["RANK"]))
    return planned, facts.source, held, real


def options(stage, half, **zero):
    return {
        "type": "DeepSpeedStrategy",
        "zero_optimization": {"stage": stage, **zero},
        **({"bf16": {"enabled": True}} if half else {}),
    }


def check(results, of_flops):
    for planned, source, held, real in results:
        assert source == "formula"
        kept = planned.between_updates
        # Parameters that stay gathered are parameters to DeepSpeed.
        mine = {kind: kept.get(kind, 0) for kind in held}
        states = sum(held.values())
        assert sum(mine.values()) == pytest.approx(states, rel=0.02)
        for kind in ("optimizer_state", "gradients"):
            assert mine[kind] == pytest.approx(held[kind], rel=0.02, abs=200)
        print(json.dumps({"planned": mine, "held": held, "peak": planned.peak.total, "real peak": real.peak.total}))
        assert planned.flops == pytest.approx(real.flops, rel=of_flops)
        assert planned.flops > 0
        assert planned.peak.total == pytest.approx(real.peak.total, rel=0.25)


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_states_of_every_stage(workers2, stage, half, model):
    changes = {"strategy.activation_checkpointing": {"classes": ["LlamaDecoderLayer"]}} if "ac" in model.split() else {}
    # Hooks of stage 3 let torch repeat a module to its end.
    of_flops = 0.1 if changes and stage == 3 else 0
    check(workers2.run(both, options(stage, half), *model.split(), changes=changes), of_flops)
