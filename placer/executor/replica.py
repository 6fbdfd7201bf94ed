"""One replica of a placed model: runs its stages on their places, with the weights that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from placer.emit import StageCode, StagedModel
from placer.executor.parameter_copies import ParameterCopies
from placer.executor.place import CALLER, Place, on
from placer.executor.segments import run_segments, tensors_at
from placer.executor.statistics import DeferredStatistics
from placer.executor.transfer import copy_to
from placer.executor.tree import build_tree
from placer.precision import precision_context
from placer.program import find_tensor, is_inside


class Replica:
    """The stages of ``staged`` on ``places`` (one per stage), for one replica.

    The model has its weights on ``homes``, the places of replica 0's stages; on other places this
    replica reads copies of them. If ``statistics`` is given, it collects the statistics of norms, and
    running statistics are not updated by the stages.
    """

    def __init__(
        self,
        staged: StagedModel,
        places: Sequence[Place],
        homes: Sequence[Place],
        precision: str = "fp32",
        statistics: DeferredStatistics | None = None,
    ) -> None:
        self.staged = staged
        self.places = tuple(places)
        self.homes = tuple(homes)
        self.precision = precision
        self.statistics = statistics
        self._last_reads: dict[frozenset[int], Mapping[str, int]] = {}
        # Copies of constants; each with the tensor of which it is one, and the version of that.
        self._constants: dict[tuple[str, Place], tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._attributes: dict[str, torch.Tensor] = {}  # constants that are attributes of the model
        self._at_home = tuple(  # whether all weights of a stage are on its own place
            all(self.homes[staged.state_stage[name]] == place for name in stage.state)
            for stage, place in zip(staged.stages, self.places, strict=True)
        )

    def with_program(self, staged: StagedModel) -> Replica:
        """The same replica, but with the stages of ``staged``."""
        if staged is self.staged:
            return self
        return Replica(staged, self.places, self.homes, self.precision, self.statistics)

    def last_reads(self, local: frozenset[int]) -> Mapping[str, int]:
        """For every value that ``local`` stages read, the last of them that reads it."""
        if local not in self._last_reads:
            self._last_reads[local] = {
                name: index for index in sorted(local) for name in self.staged.stages[index].inputs
            }
        return self._last_reads[local]

    @property
    def output_place(self) -> Place:
        """The place of the last stage."""
        return self.places[-1]

    def trees(self, model: nn.Module, copies: ParameterCopies) -> list[Any]:
        """For each stage an object with the modules and tensors that it reads, on the stage's place.

        ``copies`` are those of this replica for the present call.
        """
        self.follow_attributes(model)
        return [self._tree(model, stage, copies) for stage in self.staged.stages]

    def _tree(self, model: nn.Module, stage: StageCode, copies: ParameterCopies) -> Any:
        place = self.places[stage.index]
        if self._at_home[stage.index]:
            return model

        def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return copies.read(tensor, self.homes[self._home_of(name)], place)

        return build_tree(model, stage.modules, stage.attributes, read)

    def _home_of(self, name: str) -> int:
        """The index of the stage that owns a parameter or buffer.

        A tensor that was added after planning, by a new module or a parametrization, belongs to the
        first stage that runs its module.
        """
        known = self.staged.state_stage.get(name)
        if known is not None:
            return known
        return next(
            s.index for s in self.staged.stages if is_inside((*s.modules, *s.attributes), name)
        )

    def run_stage(self, tree: Any, stage: StageCode, inputs: list[Any]) -> tuple[Any, ...]:
        """The stage's outputs; ``inputs`` must be on its place, and the list is emptied to free them."""
        place = self.places[stage.index]
        precision = precision_context(self.precision, place.device.type)
        with on(place), precision:
            if self.statistics is None:
                return run_segments(stage, tree, place, inputs)
            written = [name for segment in stage.segments for name in segment.written]
            with self.statistics.gathering(dict(tensors_at(tree, written)), place):
                return run_segments(stage, tree, place, inputs)

    def follow_attributes(self, model: nn.Module) -> None:
        """Update constants of the program that are attributes of ``model`` to their present values."""
        for name, path in self.staged.constant_paths.items():
            value = find_tensor(model, path)
            if value is not None and not value.is_meta:
                self._attributes[name] = value

    def constant(self, name: str, place: Place) -> torch.Tensor:
        """The program's constant tensor ``name``, copied to ``place``; anew if it was written since."""
        key = (name, place)
        tensor = self._attributes.get(name, self.staged.constants[name])
        version = 0 if tensor.is_inference() else tensor._version
        known = self._constants.get(key)
        if known is None or known[1] is not tensor or known[2] != version:
            with torch.inference_mode(False):
                known = copy_to(place, tensor.detach()), tensor, version
            self._constants[key] = known
        return known[0]


def caller_place(leaf: Any) -> Place:
    """The place of one of the caller's inputs: its own device, with a name that no plan uses."""
    return Place(CALLER.name, leaf.device) if isinstance(leaf, torch.Tensor) else CALLER
