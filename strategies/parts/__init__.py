"""What takes a strategy, whichever it is; a backend in which it differs registers a function for its class."""

from ..base import meet
from ..building import construct, hooks_of, init_weights, shape_of
from .advice import cannot_repeat, cannot_switch, check_window, choices, explain, pipeline_of, rehearsed
from .footprint import StateMemory, kept_tensors, state_memory
from .model_state import (
    aliases,
    appeared,
    average_buffers,
    check_initialised,
    computed_with,
    elsewhere,
    expect_values,
    fingerprints_of_left_out,
    keep_own_buffers,
    keepers_elsewhere,
    left_out,
    note_initialised,
    saves,
    share_buffers,
    state_left_out,
    take_written,
)
from .own_loop import prepare
from .replicated import averaged_over, check_replicas, replicas
from .whole_weights import WholeModel, computes_alone, full_weights, prepare_whole

__all__ = [
    "StateMemory",
    "WholeModel",
    "aliases",
    "appeared",
    "average_buffers",
    "averaged_over",
    "cannot_repeat",
    "cannot_switch",
    "check_initialised",
    "check_replicas",
    "check_window",
    "choices",
    "computed_with",
    "computes_alone",
    "construct",
    "elsewhere",
    "expect_values",
    "explain",
    "fingerprints_of_left_out",
    "full_weights",
    "hooks_of",
    "init_weights",
    "keep_own_buffers",
    "keepers_elsewhere",
    "kept_tensors",
    "left_out",
    "meet",
    "note_initialised",
    "pipeline_of",
    "prepare",
    "prepare_whole",
    "rehearsed",
    "replicas",
    "saves",
    "shape_of",
    "share_buffers",
    "state_left_out",
    "state_memory",
    "take_written",
]
