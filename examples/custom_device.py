"""Train on a type of device that flextrain does not know, added to torch by another package.

    python examples/custom_device.py --type mlu --backend cncl --package torch_mlu
    torchrun --nproc-per-node 2 examples/custom_device.py --type musa --backend mccl --package torch_musa --strategy FSDPStrategy

The arguments describe the device completely. The package must provide what torch requires of a device: a module torch.<type>
with is_available, device_count, set_device, synchronize, max_memory_allocated, get_rng_state and set_rng_state, and, for
several processes, a back end for torch.distributed.

Instead of the call below, an installed package can declare the device for all its users, in its pyproject.toml:

    [project.entry-points."flextrain.devices"]
    mlu = "my_package:MLU"        # MLU = DeviceSpec("mlu", backend="cncl", package="torch_mlu")

Then device="mlu" works wherever a device is given, and the device is chosen by default where torch.accelerator finds it.
"""

from __future__ import annotations

import argparse

import torch
from train_classifier import Accuracy, Classifier, dataloader, digits, digits_net

from flextrain import DeviceSpec, FlexibleRunner, register_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", required=True, help="torch's name of the device")
    parser.add_argument("--backend", required=True, help="torch.distributed's back end for its tensors")
    parser.add_argument("--package", required=True, help="the package whose import adds the device to torch")
    parser.add_argument(
        "--autocast", default="float16", choices=["float16", "bfloat16"], help="dtype of computations with --amp"
    )
    parser.add_argument("--amp", action="store_true", help="mixed precision")
    parser.add_argument("--strategy", default="DDPStrategy", help="any strategy; default: DDPStrategy")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()

    register_device(
        DeviceSpec(
            arguments.type,
            backend=arguments.backend,
            autocast_dtype=getattr(torch, arguments.autocast),
            package=arguments.package,
        )
    )
    train_set, val_set = digits()
    FlexibleRunner(
        model=lambda: Classifier(digits_net()),
        work_dir="work_dirs/custom_device",
        strategy=dict(type=arguments.strategy, device=arguments.type),
        train_dataloader=dataloader(train_set, batch_size=32, num_workers=0, shuffle=True),
        optim_wrapper=dict(
            type="AmpOptimWrapper" if arguments.amp else "OptimWrapper", optimizer=dict(type="AdamW", lr=2e-3)
        ),
        train_cfg=dict(by_epoch=True, max_epochs=arguments.epochs),
        val_dataloader=dataloader(val_set, batch_size=32, num_workers=0, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(checkpoint=dict(overwrite=True)),
        randomness=dict(seed=0),
    ).train()


if __name__ == "__main__":
    main()
