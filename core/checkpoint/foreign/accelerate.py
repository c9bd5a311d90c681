"""Find the weights in a folder that Accelerate's ``save_state`` has written.

Source: accelerate 1.15, ``checkpointing.py`` and ``utils/fsdp_utils.py``; DeepSpeed's own files there are not its matter.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from . import dcp, hugging_face

_SHARDED, _WHOLE, _OF_PROCESSES = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "pytorch_model_fsdp*_rank*.bin"
_BESIDE = ("*.bin", "*.pkl", "*.pt", "model_*.safetensors", "optimizer_*", "pytorch_model_fsdp_*")


def find(folder: Path) -> tuple[Path, list[str]] | None:
    """The file or folder of the first model's weights, and the names of what is beside it; None if it is no such folder.

    Raises:
        CheckpointError: each process has written a part that only the same number of processes can use.
    """
    if not any(folder.glob("random_states_*.pkl")) and not any(folder.glob("pytorch_model_fsdp*")):
        return None
    if (folder / _SHARDED).is_dir():
        found: Path | None = dcp.find(folder / _SHARDED)
    elif (folder / _WHOLE).is_file():
        found = folder / _WHOLE
    elif parts := sorted(path.name for path in folder.glob(_OF_PROCESSES)):
        raise CheckpointError(
            f"{folder}: has a file for each process ({parts[0]}), which does not say which part of a weight it holds; save "
            'with fsdp_state_dict_type "SHARDED_STATE_DICT" and use_dcp=True, or "FULL_STATE_DICT"'
        )
    else:
        found = hugging_face.find(folder)
    if found is None:
        return None
    own = {found.name, *(path.name for path in folder.glob("pytorch_model-*.bin"))}
    beside = {path.name for pattern in _BESIDE for path in folder.glob(pattern)}
    return found, sorted(beside - own)
