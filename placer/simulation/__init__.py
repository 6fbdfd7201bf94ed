"""Makes dry runs of a plan's emitted module on fake tensors, to find the memory that each device needs."""

from placer.simulation.ledger import Ledger
from placer.simulation.simulate import simulate_plan
from placer.simulation.types import DeviceSimulation, SimulationReport
