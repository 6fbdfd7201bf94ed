"""The measured steps are planned with the regions that they had when they were measured."""

from __future__ import annotations

import torch

from benchmarks.gpu_cases import GPUCase, capped_case, case_plan
from placer.program import lower

ROW = {"model": "U-Net", "edge": 224, "offload": "auto", "planned_for": 16}


def test_a_capped_step_is_planned_with_its_recorded_regions() -> None:
    case = capped_case(ROW)
    plain = GPUCase(family="U-Net", build=case.build)
    with torch.device("meta"):
        model, x = case.build()
    program = lower(model, (x,))
    found, kept = (case_plan(program, [x], which) for which in (case, plain))
    assert len(found.stages[0].regions) == 13  # of recorded_regions.json
    assert found.stages[0].regions == case.regions
    assert found.step_seconds > kept.step_seconds  # the link to the host takes its time
    assert found.devices[0].peak < kept.devices[0].peak
