"""Export weights for other programs."""
