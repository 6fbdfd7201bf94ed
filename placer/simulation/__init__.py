"""Simulation: a plan in, the bytes that its emitted module holds per device out; a dry run."""

from placer.simulation.ledger import Ledger
from placer.simulation.simulate import simulate_plan
from placer.simulation.types import DeviceSimulation, SimulationReport

__all__ = ["DeviceSimulation", "Ledger", "SimulationReport", "simulate_plan"]
