"""Write checkpoints."""
