"""Save a run to a checkpoint, and resume it."""
