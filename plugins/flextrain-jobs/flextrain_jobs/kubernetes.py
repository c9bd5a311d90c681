"""JobSet, and a TrainJob of Kubeflow Trainer with the runtime that has what a TrainJob cannot say.

Sources: the API's types of kubernetes-sigs/jobset (v1alpha2), kubeflow/trainer (v1alpha1), and Kubernetes' pod failure policy.
"""

from __future__ import annotations

import re
from typing import Any

from flextrain import ConfigError

from .job import WRONG, Job

_NODE = "node"
"""Name of the replicated job and of its container, which Kubeflow Trainer looks for."""
_ALIVE = "/tmp/alive"
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def job_set(job: Job) -> list[dict[str, Any]]:
    """The JobSet of a job."""
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name},
            "spec": _job_set_spec(job, {"command": _command(job), "resources": _resources(job)}, {}),
        }
    ]


def train_job(job: Job) -> list[dict[str, Any]]:
    """The TrainJob of a job, after its TrainingRuntime: a TrainJob has neither probes nor failure policies."""
    metadata = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": _job_set_spec(job, {}, {"metadata": metadata})},
        },
    }
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": {
            "image": job.image,
            "numNodes": job.nodes,
            "numProcPerNode": job.processes,
            "resourcesPerNode": _resources(job),
            "command": _command(job),
        },
    }
    if job.time_s is not None:
        spec["activeDeadlineSeconds"] = job.time_s
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": spec,
    }
    return [runtime, train]


def _job_set_spec(job: Job, of_container: dict[str, Any], of_job: dict[str, Any]) -> dict[str, Any]:
    container = {
        "name": _NODE,
        "image": job.image,
        **of_container,
        # What the watchdog of the run cannot end: one process alone, and a machine whose flextrain run stands still.
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", f'test -z "$(find {_ALIVE} -mmin +{job.probe_minutes})"']},
            "periodSeconds": 60,
            "timeoutSeconds": 10,
        },
        "volumeMounts": [*({"name": name, "mountPath": path} for name, path in job.volumes), _SHM_MOUNT],
    }
    for name, path in job.volumes:
        if not _CLAIM.fullmatch(name) or name == _SHM["name"] or path == _SHM_MOUNT["mountPath"]:
            raise ConfigError(
                f'launch.volume: "{name}:{path}" is not allowed, give the name of a claim, which has small letters, digits and -; '
                f"{_SHM['name']} and {_SHM_MOUNT['mountPath']} are taken"
            )
    names = dict.fromkeys(name for name, _ in job.volumes)
    claims = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in names]
    pod = {
        "restartPolicy": "Never",  # as podFailurePolicy needs it
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container],
        "volumes": [*claims, _SHM],
    }
    deadline = {} if of_job or job.time_s is None else {"activeDeadlineSeconds": job.time_s}
    spec = {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        "backoffLimit": 0,  # a pod alone cannot go on: the whole job starts again
        **deadline,
        "podFailurePolicy": {"rules": _pod_rules(job)},
        "template": {"spec": pod},
    }
    return {
        "failurePolicy": {
            "maxRestarts": job.restarts,
            "restartStrategy": "BlockingRecreate",  # pods of two starts would write to the same work directory
            "rules": _job_rules(job),
        },
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {**of_job, "spec": spec}}],
    }


_SHM = {"name": "shm", "emptyDir": {"medium": "Memory"}}
_SHM_MOUNT = {"name": "shm", "mountPath": "/dev/shm"}  # workers of dataloaders need more than the 64 MiB that pods have


def _pod_rules(job: Job) -> list[dict[str, Any]]:
    """What ends the Job at once, with a message that says why. All other failures end it too, as BackoffLimitExceeded."""
    taken_away = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    for_ever = {"containerName": _NODE, "operator": "In", "values": sorted({WRONG, *job.ends_for_good})}
    return [taken_away, {"action": "FailJob", "onExitCodes": for_ever}]


def _job_rules(job: Job) -> list[dict[str, Any]]:
    """A pod that was taken away costs no restart, a status that would come again ends the job; the rest counts."""
    of_policy = {"onJobFailureReasons": ["PodFailurePolicy"]}
    taken_away = {
        "name": "taken_away",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        **of_policy,
        "onJobFailureMessagePatterns": ["has condition DisruptionTarget"],
    }
    return [*([taken_away] if job.restarts else []), {"name": "for_ever", "action": "FailJobSet", **of_policy}]


def _resources(job: Job) -> dict[str, Any]:
    asked = {"cpu": None if job.cpus is None else str(job.cpus), "memory": job.memory}
    requests = {name: value for name, value in asked.items() if value is not None}
    limits: dict[str, Any] = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    if job.memory is not None:
        limits["memory"] = job.memory
    return {**({"limits": limits} if limits else {}), **({"requests": requests} if requests else {})}


def _command(job: Job) -> list[str]:
    """The command of a container; ``$`` twice, because Kubernetes would replace ``$(NAME)`` before the shell sees it."""
    text = job.command(
        endpoint=f"{job.name}-{_NODE}-0-0.{job.name}",
        is_first="$((JOB_COMPLETION_INDEX == 0))",
        job_id=job.name,
        alive_file=_ALIVE,
    )
    return ["sh", "-c", f"exec {text}\n".replace("$", "$$")]
