"""The loss of the benchmarks' training steps, measured or predicted: a mean of squares, without a target."""

from __future__ import annotations

from placer.cost import find_loss
from placer.spec import LossSpec

LOSS = {"loss": "mean_square"}  # for specs
MEAN_SQUARE = find_loss(LossSpec(function="mean_square"))
