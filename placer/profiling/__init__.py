"""Measure seconds on a device of this machine, for the nodes of a model or for classes of operations.

`nodes` runs a captured model node by node, and `profile` makes a device kind from the measured seconds, for
use in plans; `memory` measures the bytes of a GPU beside them. `calibration` measures a few operations of
every class instead.
"""

from placer.profiling.calibration import calibrate
from placer.profiling.clocks import Clock, clock_for
from placer.profiling.files import check_output, device_here, file_values, known_kind, profile
from placer.profiling.nodes import NodeTimes, measure_nodes
from placer.profiling.profile import Measured, profile_model
