"""Metrics over all processes."""
