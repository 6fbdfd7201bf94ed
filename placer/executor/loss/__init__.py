"""The loss of a step, the same in one process and under torchrun.

``call`` calls the function, ``reduction`` says how losses of slices make that of the batch, ``trial``
finds it out on a few rows, with the ``values`` that a target has held; ``found`` keeps that between
steps, and ``step`` puts it together.
"""

from placer.executor.loss.call import without_graph
from placer.executor.loss.found import FoundCombination
from placer.executor.loss.reduction import Normalizer, Reduction
from placer.executor.loss.step import StepLoss

__all__ = [
    "FoundCombination",
    "Normalizer",
    "Reduction",
    "StepLoss",
    "without_graph",
]
