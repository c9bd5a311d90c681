"""Job files for Kubernetes, SkyPilot, Slurm and Ray from a training script, and its progress for Kubeflow Trainer."""

from .job import Job
from .kubeflow_hook import KubeflowHook

__all__ = ["Job", "KubeflowHook"]
