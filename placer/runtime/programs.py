"""The programs of a placed model: the captured one, and those of other modes and input sizes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from placer._torch import without_modes
from placer.capture import (
    capture_model,
    captured_key,
    condition_key,
    find_difference,
    rebuild_call,
)
from placer.emit import StagedModel, emit_stages
from placer.plan.follow import follow_plan
from placer.plan.types import Plan
from placer.regions import find_regions, region_keys


def _own_saving() -> AbstractContextManager[None]:
    """The caller's saved-tensor hooks (`torch.utils.checkpoint` counts) hear nothing of a capture."""
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Programs:
    """Finds the stages that compute what ``model`` computes in its present mode for given inputs.

    A captured graph is the program of one mode and of the sizes that it leaves open. For another
    mode, dtype or size the model is recorded once more on fake tensors: where the program is the
    same, the captured stages serve; where not, it is captured anew and put on the same stages. Every
    answer is kept. Weights stay where the plan has them.
    """

    def __init__(self, model: nn.Module, plan: Plan, staged: StagedModel) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._plan = plan
        self._captured = staged
        self._known: dict[Hashable, StagedModel] = {
            captured_key(staged.conditions, staged.call): staged
        }

    def find(self, inputs: Sequence[Tensor]) -> StagedModel:
        """The stages for one micro-batch of inputs. Raises ``CaptureError``."""
        captured = self._captured
        modes = tuple(module.training for module in self._modules)
        key = condition_key(captured.conditions, captured.call, modes, inputs)
        if key not in self._known:
            with without_modes(), _own_saving(), torch.inference_mode(False), torch.enable_grad():
                self._known[key] = self._make(inputs)
        return self._known[key]

    def _make(self, inputs: Sequence[Tensor]) -> StagedModel:
        captured = self._captured
        shaped = [
            torch.empty(x.shape, dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
            for x in inputs
        ]
        args, kwargs = rebuild_call(captured.call, shaped)
        if find_difference(self._model, captured.conditions, args, kwargs) is None:
            return captured
        capture = capture_model(self._model, args, kwargs)
        stages = follow_plan(self._plan, capture)
        keys = region_keys(capture, self._plan.checkpoint, self._plan.offload)
        key_of = dict(zip(capture.order, keys, strict=True))
        staged = emit_stages(capture, stages, [find_regions(nodes, key_of) for nodes in stages])
        return replace(staged, state_stage=captured.state_stage)
