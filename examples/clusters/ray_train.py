"""The training of train.py on Ray:  ray job submit --working-dir . -- python ray_train.py --storage /shared/runs --name digits

    python examples/clusters/ray_train.py --storage /tmp/runs --name digits --workers 2

The same name and storage continue a run that was stopped.
"""

from __future__ import annotations

import argparse
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from flextrain.ray import train_loop


def build(config: dict[str, Any]) -> dict[str, Any]:
    """Called in every worker; without ``work_dir`` it is the run's folder in the storage."""
    from train import arguments

    return arguments(**config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", required=True, help="a folder that all machines see")
    parser.add_argument("--name", required=True, help="of the run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--iters", type=int, default=2000)
    parser.add_argument("--interval", type=int, default=200, help="iterations between two checkpoints")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train_loop(build),
        train_loop_config=dict(iters=args.iters, interval=args.interval),
        # With a tuple, such as (1, 8), a run goes on with the workers that are left, and grows again.
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"Finished at iteration {result.metrics['iter']}, checkpoint {result.checkpoint.path}")


if __name__ == "__main__":
    main()
