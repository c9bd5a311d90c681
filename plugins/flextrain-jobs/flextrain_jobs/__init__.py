"""Job files for Kubernetes, SkyPilot, Slurm and Ray from a training script, and its progress for Kubeflow Trainer."""
