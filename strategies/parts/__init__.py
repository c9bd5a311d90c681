"""What takes a strategy, whichever it is; a backend in which it differs registers a function for its class."""

from ..base import meet
from ..building import construct, init_weights, shape_of
from .advice import explain
from .buffers import average_buffers, keep_own_buffers, share_buffers
from .first_window import check_window
from .footprint import StateMemory, state_memory
from .initialised import check_initialised, expect_values, note_initialised
from .left_out import fingerprints_of_left_out, left_out, state_left_out
from .model_names import aliases, appeared, elsewhere, keepers_elsewhere, saves
from .own_loop import prepare
from .planning import pipeline_of, rehearsed
from .replicated import check_replicas, replicas
from .whole_weights import WholeModel, computes_alone, full_weights, prepare_whole
from .written_weights import computed_with, take_written

__all__ = [
    "StateMemory",
    "WholeModel",
    "aliases",
    "appeared",
    "average_buffers",
    "check_initialised",
    "check_replicas",
    "check_window",
    "computed_with",
    "computes_alone",
    "construct",
    "elsewhere",
    "expect_values",
    "explain",
    "fingerprints_of_left_out",
    "full_weights",
    "init_weights",
    "keep_own_buffers",
    "keepers_elsewhere",
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
