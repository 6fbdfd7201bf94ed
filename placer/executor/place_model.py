"""Makes a placed module from a plan, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from placer.emit import emit_stages, materialize
from placer.executor.module import PlacedModule, make_placed
from placer.executor.places.place import Place
from placer.executor.runtime import Runtime
from placer.garbage import only_new_garbage
from placer.plan.types import Plan
from placer.program import Program


@only_new_garbage()
def place_model(
    model: nn.Module,
    program: Program,
    plan: Plan,
    places: Sequence[Sequence[Sequence[Place]]],
    *,
    weights: Path | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
) -> PlacedModule:
    """A copy of ``model`` whose stages run on ``places`` (``[replica][stage][shard]``), with weights there.

    ``weights`` and ``initialize`` are as for `placer.compile`.
    """
    staged = emit_stages(program, plan)
    homes = {name: places[0][stage][0].device for name, stage in staged.state_stage.items()}
    with torch.inference_mode(False):  # weights that are made under it could not be trained
        own = materialize(model, homes, weights=weights, initialize=initialize)
    return make_placed(PlacedModule, Runtime(own, plan=plan, staged=staged, places=places))
