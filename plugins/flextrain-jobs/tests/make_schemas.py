"""Write schemas.json: the parts of Kubernetes' schemas that job files are checked against, as JSON schema.

    pip install kubeflow-trainer-api==2.3.0 && python make_schemas.py

The package has the types of Kubeflow Trainer, JobSet and Kubernetes as pydantic models. Of each object that a job file has, all names
are kept, and the schemas of those in USED; descriptions are left out. ALSO has what the types say in words or in rules of the API
server only. SkyPilot's part is written by hand, from sky/utils/schemas.py of skypilot 0.14.1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("schemas.json")
KINDS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "Status": "TrainerV1alpha1UpdateTrainJobStatusRequest",
}
NAMES = """
apiVersion kind metadata name labels spec mlPolicy numNodes torch template runtimeRef apiGroup trainer image
numProcPerNode resourcesPerNode command activeDeadlineSeconds failurePolicy maxRestarts restartStrategy rules
action onJobFailureReasons onJobFailureMessagePatterns replicatedJobs replicas completionMode parallelism
completions backoffLimit podFailurePolicy onPodConditions onExitCodes type status containerName operator
values restartPolicy terminationGracePeriodSeconds containers volumes livenessProbe exec periodSeconds
timeoutSeconds volumeMounts mountPath persistentVolumeClaim claimName emptyDir medium resources limits
requests trainerStatus progressPercentage estimatedRemainingSeconds metrics value lastUpdatedTime
"""
USED = frozenset(NAMES.split())
_LENGTH = {"minLength": 1, "maxLength": 64}
ALSO: dict[str, dict[str, Any]] = {
    "JobsetV1alpha2FailurePolicy": {"restartStrategy": {"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]}},
    "JobsetV1alpha2FailurePolicyRule": {
        "name": {"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "action": {
            "enum": [
                *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
            ]
        },
    },
    "IoK8sApiBatchV1PodFailurePolicyRule": {"action": {"enum": ["FailJob", "FailIndex", "Ignore", "Count"]}},
    "IoK8sApiBatchV1PodFailurePolicyOnExitCodesRequirement": {
        "operator": {"enum": ["In", "NotIn"]},
        "values": {"uniqueItems": True, "items": {"type": "integer", "minimum": 1, "maximum": 255}, "minItems": 1},
    },
    "IoK8sApiBatchV1JobSpec": {"completionMode": {"enum": ["Indexed", "NonIndexed"]}},
    "IoK8sApiCoreV1PodSpec": {"restartPolicy": {"enum": ["Never"]}},  # as a podFailurePolicy needs it
    "TrainerV1alpha1TrainJobSpec": {"activeDeadlineSeconds": {"minimum": 1}},
    "TrainerV1alpha1TrainerStatus": {
        "progressPercentage": {"minimum": 0, "maximum": 100},
        "estimatedRemainingSeconds": {"minimum": 0},
        "metrics": {"maxItems": 256},
    },
    "TrainerV1alpha1Metric": {"name": _LENGTH, "value": _LENGTH},
}

QUANTITY = {"type": ["integer", "string"], "pattern": "^[0-9]+([.][0-9]+)?([KMGTPE]i|[mkMGTPE])?$"}


def kubernetes() -> dict[str, Any]:
    """The schemas by name; the roots are those of KINDS."""
    from kubeflow_trainer_api import models

    found: dict[str, Any] = {}
    for kind in KINDS.values():
        schema = getattr(models, kind).model_json_schema(by_alias=True)
        found |= {kind: schema, **schema.pop("$defs", {})}
    kept: dict[str, Any] = {}

    def keep(name: str) -> None:
        if name in kept:
            return
        schema = found[name]
        kept[name] = QUANTITY if name.endswith("ResourceQuantity") else {"type": "object"}
        if "properties" in schema and kept[name] is not QUANTITY:
            parts = {key: _bare(value) if key in USED else {} for key, value in schema["properties"].items()}
            for key, more in ALSO.get(name, {}).items():
                parts[key] = {"allOf": [parts[key], more]}
            kept[name] |= {"properties": parts, "additionalProperties": False, "required": schema.get("required", [])}
            for text in json.dumps(parts).split("#/$defs/")[1:]:
                keep(text.partition('"')[0])

    for kind in KINDS.values():
        keep(kind)
    return kept


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {key: _bare(value) for key, value in schema.items() if key not in ("description", "title", "default")}
    options = [one for one in bare.get("anyOf", []) if one != {"type": "null"}]  # what may be left out is no null
    return options[0] if len(options) == 1 else bare


if __name__ == "__main__":
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    source = "kubeflow-trainer-api 2.3.0, Apache-2.0; skypilot 0.14.1, Apache-2.0: names and types, see make_schemas.py"
    written = {"source": source, "roots": KINDS, "$defs": kubernetes(), "skypilot": before.get("skypilot", {})}
    FILE.write_text(json.dumps(written, indent=1) + "\n")
