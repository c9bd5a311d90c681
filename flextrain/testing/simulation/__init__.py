"""Simulation: many ranks in one process."""

from .ranks import Simulation, simulate
from .turns import SimulationError

__all__ = ["Simulation", "SimulationError", "simulate"]
