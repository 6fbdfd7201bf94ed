"""The loss of a batch from the losses of its slices, the same in one process and under torchrun.

``step`` has the loss of one step. ``call`` calls the user's function. ``reduction`` has the rules by
which losses of slices are combined, and those of torch's losses. For another function of which the caller
does not give the rule, ``trial`` finds it by calling the function on a few rows, and ``finder`` keeps the
result between steps.
"""

from placer.executor.loss.call import without_graph
from placer.executor.loss.finder import CombinationFinder
from placer.executor.loss.reduction import Normalizer, Reduction
from placer.executor.loss.step import StepLoss
