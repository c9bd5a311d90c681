"""Adapters: the needs of each family of optimizers beyond torch's interface."""
