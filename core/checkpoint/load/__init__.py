"""Reading checkpoints, and weights from other files."""
