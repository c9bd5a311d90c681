"""Streams: orders, mixtures and packed sequences that are computed from a position."""
