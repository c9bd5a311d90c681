"""A task of SkyPilot, for `sky jobs launch`. Source: SkyPilot's YAML reference, and sky/utils/schemas.py of version 0.14."""

from __future__ import annotations

from typing import Any

from flextrain import ConfigError

from .job import Job


def task(job: Job) -> dict[str, Any]:
    """The task: lost machines are SkyPilot's matter; what else starts again is said by exit status.

    Raises:
        ConfigError: several machines share a bucket, where one does not see at once what another has written.
    """
    buckets = {path: source for source, path in job.volumes if "://" in source}
    if buckets and job.nodes > 1:
        raise ConfigError(
            f"launch.volume: {next(iter(buckets.values()))} is a bucket, in which {job.nodes} machines see late what others have "
            "written, give a volume of SkyPilot"
        )
    resources: dict[str, Any] = {}
    if job.gpus:
        resources["accelerators"] = f"{job.gpu}:{job.gpus}"
    if job.cpus is not None:
        resources["cpus"] = f"{job.cpus}+"
    if job.memory is not None:
        resources["memory"] = f"{job.memory.rstrip('GiB')}+"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    if job.restarts:
        resources["job_recovery"] = {"max_restarts_on_errors": job.restarts}
        if job.goes_on:  # without counting
            resources["job_recovery"]["recover_on_exit_codes"] = job.goes_on
    command = job.command(
        endpoint='"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
        is_first="$((SKYPILOT_NODE_RANK == 0))",
        job_id='"$SKYPILOT_TASK_ID"',
    )
    mounts = {path: {"source": source, "mode": "MOUNT_CACHED"} for path, source in buckets.items()}
    volumes = {path: name for name, path in job.volumes if path not in buckets}
    return {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": resources,
        **({"file_mounts": mounts} if mounts else {}),
        **({"volumes": volumes} if volumes else {}),
        "run": f"{command}\n",
    }
