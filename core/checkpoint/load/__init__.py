"""Read checkpoints, and weights from other files."""
