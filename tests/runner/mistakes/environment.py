"""Launch variables, devices, dtypes, strategies and other words."""

from __future__ import annotations

from typing import Any

import torch

from .parts import SGD, Row

ALONE: dict[str, Any] = {"strategy": None}


def amp(**options: Any) -> dict[str, Any]:
    return {"optim_wrapper": dict(type="AmpOptimWrapper", optimizer=SGD, **options)}


def strategy(**options: Any) -> dict[str, Any]:
    return {"strategy": options}


def device(name: Any) -> dict[str, Any]:
    return strategy(type="SingleDeviceStrategy", device=name)


TWO = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
NO_GPU = not torch.accelerator.is_available()

ROWS = [
    Row("RANK without WORLD_SIZE", ALONE, "launcher: RANK=0 is set and WORLD_SIZE is not", env=dict(RANK="0")),
    Row("WORLD_SIZE without RANK", ALONE, "launcher: WORLD_SIZE=2 is set and RANK is not", env=dict(WORLD_SIZE="2")),
    Row("LOCAL_RANK alone", ALONE, "launcher: LOCAL_RANK=1 is set and RANK is not", env=dict(LOCAL_RANK="1")),
    Row("RANK as large as WORLD_SIZE", ALONE, "launcher: RANK=2, LOCAL_RANK=0 and WORLD_SIZE=2 do not fit", env=TWO | dict(RANK="2")),
    Row("RANK below 0", ALONE, "launcher: RANK=-1, LOCAL_RANK=0 and WORLD_SIZE=2 do not fit", env=TWO | dict(RANK="-1")),
    Row("no MASTER_ADDR", ALONE, "launcher: MASTER_ADDR must be set for 2 processes", env=TWO | dict(MASTER_ADDR="")),
    Row("MASTER_PORT that is no number", ALONE, 'launcher: environment variable MASTER_PORT="a" is no whole number', env=TWO | dict(MASTER_PORT="a")),
    Row("WORLD_SIZE that is no number", ALONE, 'launcher: environment variable WORLD_SIZE="two" is no whole number', env=TWO | dict(WORLD_SIZE="two")),
    Row("MPICH", ALONE, "launcher: PMI_SIZE=4 says that several processes were started", env=dict(PMI_SIZE="4", PMI_RANK="0")),
    Row("launcher none under torchrun", {"launcher": "none"}, 'launcher: "none" was given and torchrun started 2 processes', env=TWO),
    Row("launcher slurm without Slurm", {"launcher": "slurm"}, "launcher: environment variable SLURM_STEP_NUM_TASKS is not set"),
    Row("launcher mpi without mpirun", {"launcher": "mpi"}, "launcher: environment variable OMPI_COMM_WORLD_SIZE is not set"),
    Row("launcher pytorch without torchrun", {"launcher": "pytorch"}, "launcher: environment variable RANK is not set"),
    Row("one device for two processes", strategy(type="SingleDeviceStrategy"), "SingleDeviceStrategy", env=TWO | dict(TORCHELASTIC_RUN_ID="none")),
    Row("device gpu", device("gpu"), 'strategy.device: "gpu" is not allowed, choose'),
    Row("device in capitals", device("CUDA"), 'strategy.device: "CUDA" is not allowed'),
    Row("device with an index", device("cuda:1"), 'strategy.device: "cuda:1" is not allowed, give "cuda"'),
    Row("device as a number", device(0), "strategy.device: 0 is not allowed"),
    Row("device tpu", device("tpu"), 'strategy.device: "tpu" is not allowed'),
    Row("device of torch", device(torch.device("cpu")), "strategy.device"),
    Row("dtype fp16", amp(dtype="fp16"), 'optim_wrapper.dtype: "fp16" is not allowed, choose "float16" or "bfloat16"'),
    Row("dtype half", amp(dtype="half"), 'optim_wrapper.dtype: "half" is not allowed'),
    Row("dtype bf16", amp(dtype="bf16"), 'optim_wrapper.dtype: "bf16" is not allowed'),
    Row("dtype float32", amp(dtype="float32"), 'optim_wrapper.dtype: "float32" is not allowed'),
    Row("dtype 16", amp(dtype=16), "optim_wrapper.dtype: 16 is not allowed"),
    Row("dtype of torch", amp(dtype=torch.float32), "optim_wrapper.dtype"),
    Row("precision as Lightning says", {"optim_wrapper.precision": "16-mixed"}, "optim_wrapper.precision: unknown key"),
    Row("loss scale below 0", amp(loss_scale=-1.0), "optim_wrapper.loss_scale"),
    Row("clipping by a number", {"optim_wrapper.clip_grad": 1.0}, "optim_wrapper.clip_grad: 1.0 is not allowed, give a dict"),
    Row("clipping to 0", {"optim_wrapper.clip_grad": dict(max_norm=0)}, "optim_wrapper.clip_grad.max_norm: 0 is not allowed"),
    Row("clipping by two ways", {"optim_wrapper.clip_grad": dict(type="value", clip_value=1.0, max_norm=1.0)}, "optim_wrapper.clip_grad.max_norm: has no meaning"),
    Row("accumulation auto", {"optim_wrapper.accumulative_counts": "auto"}, "optim_wrapper.accumulative_counts"),
    Row("accumulation as Lightning says", {"optim_wrapper.accumulate_grad_batches": 4}, "optim_wrapper.accumulate_grad_batches: unknown key"),
    Row("cudnn in the wrong place", {"cudnn_benchmark": True}, "cudnn_benchmark: unknown key"),
    Row("max_epochs in the wrong place", {"max_epochs": 3}, "max_epochs: unknown key"),
    Row("seed in the wrong place", {"seed": 1}, "seed: unknown key"),
    Row("lr_scheduler", {"lr_scheduler": dict(type="StepLR", step_size=1)}, "lr_scheduler: unknown key"),
    Row("log level in words", {"log_level": "verbose"}, "log_level"),
    Row("sharding under one device", strategy(type="SingleDeviceStrategy", zero_optimization=dict(stage=2)), "strategy.zero_optimization: unknown key"),
    Row("wrap with a class that is not there", strategy(type="FSDPStrategy", device="cpu", wrap=["Linaer"]), "Linaer"),
    Row("wrap that is no list", strategy(type="FSDPStrategy", device="cpu", wrap=3), "strategy.wrap"),
    Row("ZeRO's stage 4", strategy(type="DeepSpeedStrategy", zero_optimization=dict(stage=4)), "strategy.zero_optimization.stage"),
    Row("DeepSpeed's micro-batches in the wrong words", strategy(type="DeepSpeedStrategy", gradient_accumulation=2), "strategy.gradient_accumulation: unknown key"),
    Row("no such strategy", {"strategy": "horovod"}, 'strategy.type: "horovod" is not supported, horovod 0.28.1, its last release, does not compile against torch 2.1'),
    Row("an evaluator without data", {"val_dataloader": None}, "val_dataloader: missing, val_cfg and val_evaluator are given"),
    Row("resume as text", {"resume": "auto"}, 'resume: "auto" does not exist'),
    Row("epochs and iterations", {"train_cfg": dict(max_epochs=1, max_iters=3)}, "train_cfg.max_iters: max_epochs is given too"),
    Row("epochs below 1", {"train_cfg": dict(max_epochs=-1)}, "train_cfg.max_epochs"),
    Row("optimizer beside the wrapper", {"optim_wrapper": dict(type="AdamW", lr=0.1)}, "optim_wrapper"),
]  # fmt: skip
if NO_GPU:
    ROWS += [
        Row("a GPU where there is none", device("cuda"), 'strategy.device: "cuda" is not usable on this machine'),
    ]
