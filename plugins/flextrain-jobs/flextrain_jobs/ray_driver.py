"""The program that starts a training on Ray, for `ray job submit`. Source: Ray Train V2."""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from flextrain import ConfigError

from .job import Job

_PROGRAM = '''\
"""The driver of a job of Ray, written by `flextrain launch`."""

import contextlib

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from flextrain.ray import train_loop

SCRIPT, ARGUMENTS = {script}, {arguments}


def build(config):
    """Called in every worker: what the script gives to its runner. The script stays __main__ as long as the worker lives."""
    from flextrain.user_script import runner_arguments

    script = contextlib.ExitStack()
    given = script.enter_context(runner_arguments(SCRIPT, ARGUMENTS))
    config["script"] = script.pop_all()
    return given


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop(build),
        train_loop_config={{}},
        scaling_config=ScalingConfig({scaling}),
        run_config=RunConfig(
            name={name}, storage_path={storage}, failure_config=FailureConfig(max_failures={restarts})
        ),
    )
    trainer.fit()
'''


def program(job: Job) -> str:
    """The driver: Ray's workers are the processes, and Ray starts them again after failures.

    Raises:
        ConfigError: the work directory, in which Ray's storage is too, is relative.
    """
    folder = PurePosixPath(job.facts.work_dir)
    if not folder.is_absolute():
        raise ConfigError(
            f'launch: work_dir "{folder}" is relative, and workers of Ray start in folders of their own; give a path that all machines see'
        )
    each = {"CPU": job.cpus // job.processes or 1} if job.cpus is not None else {}
    if job.gpus:
        each["GPU"] = job.gpus // job.processes
    scaling = f"num_workers={job.nodes * job.processes}, use_gpu={bool(job.gpus)}"
    if each:
        scaling += f", resources_per_worker={json.dumps(each)}"
    if job.gpus and job.gpu:
        scaling += f", accelerator_type={json.dumps(job.gpu)}"
    return _PROGRAM.format(
        script=json.dumps(job.script),
        arguments=json.dumps(list(job.arguments)),
        scaling=scaling,
        name=json.dumps(job.name),
        storage=json.dumps(str(folder / "ray")),
        restarts=job.restarts,
    )
