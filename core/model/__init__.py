"""Models: base classes, deferred initialisation, state, and what batches they take."""
