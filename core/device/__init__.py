"""Devices: their kinds, memory and precision."""
