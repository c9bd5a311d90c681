"""Loops: training, validation and testing, with their hooks."""
