"""Parts that take a strategy: what is more than placing and running a model."""
