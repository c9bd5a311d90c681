"""Loops: in which order batches, updates, validation and hooks come."""
