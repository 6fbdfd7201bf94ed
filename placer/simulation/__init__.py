"""Simulation: a plan in, the bytes that its emitted module holds per device out; a dry run."""

from placer.simulation.ledger import Ledger, LiveTensor
from placer.simulation.simulate import simulate_plan
from placer.simulation.types import DeviceSimulation, SimulationReport

__all__ = ["DeviceSimulation", "Ledger", "LiveTensor", "SimulationReport", "simulate_plan"]
