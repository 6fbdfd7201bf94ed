"""Simulation: a dry run of the emitted module; the judge of every memory number."""

from placer.simulation.ledger import Ledger
from placer.simulation.simulate import DeviceSimulation, SimulationReport, simulate_plan

__all__ = ["DeviceSimulation", "Ledger", "SimulationReport", "simulate_plan"]
