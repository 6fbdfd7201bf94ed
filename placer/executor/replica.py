"""One replica in this process: its stages on their places."""

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
from placer.executor.transfer import copy_to, transfer
from placer.executor.tree import build_tree
from placer.precision import precision_context
from placer.program import find_tensor, is_inside


class Replica:
    """The stages of ``staged`` on ``places`` (one per stage), reading the weights of ``model``.

    ``model`` holds the primary weights, each at its home among ``homes`` (the places of replica 0).
    What this replica needs elsewhere it reads through its copies. With ``statistics``, those keep
    what the stages' norms would do to running statistics.
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
        self.copies = ParameterCopies()
        self.precision = precision
        self.statistics = statistics
        self._last_reads: dict[frozenset[int], Mapping[str, int]] = {}
        self._constants: dict[tuple[str, Place], torch.Tensor] = {}
        self._attributes: dict[str, tuple[torch.Tensor, int]] = {}  # constants that may change
        self._at_home = tuple(  # stages that find all their weights where they run
            all(self.homes[staged.state_stage[name]] == place for name in stage.state)
            for stage, place in zip(staged.stages, self.places, strict=True)
        )

    def with_program(self, staged: StagedModel) -> Replica:
        """The same replica, its copies of weights too, running other stages."""
        if staged is self.staged:
            return self
        other = Replica(staged, self.places, self.homes, self.precision, self.statistics)
        other.copies = self.copies
        return other

    def last_reads(self, local: frozenset[int]) -> Mapping[str, int]:
        """The last of the ``local`` stages that reads a value, for all that any of them reads."""
        if local not in self._last_reads:
            self._last_reads[local] = {
                name: index for index in sorted(local) for name in self.staged.stages[index].inputs
            }
        return self._last_reads[local]

    @property
    def output_place(self) -> Place:
        return self.places[-1]

    def trees(self, model: nn.Module) -> list[Any]:
        """Per stage, an object that has the stage's modules and tensors on the stage's place."""
        self.follow_attributes(model)
        return [self._tree(model, stage) for stage in self.staged.stages]

    def _tree(self, model: nn.Module, stage: StageCode) -> Any:
        place = self.places[stage.index]
        if self._at_home[stage.index]:
            return model

        def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return self.copies.read(tensor, self.homes[self._home_of(name)], place)

        return build_tree(model, stage.modules, stage.attributes, read)

    def _home_of(self, name: str) -> int:
        """The stage that owns a parameter or buffer.

        One that came since, with a module that replaced another or with a parametrization, belongs to
        the first stage that runs the module it is in.
        """
        known = self.staged.state_stage.get(name)
        if known is not None:
            return known
        return next(
            s.index for s in self.staged.stages if is_inside((*s.modules, *s.attributes), name)
        )

    def run_stage(self, tree: Any, stage: StageCode, inputs: list[Any]) -> tuple[Any, ...]:
        """The stage's outputs; ``inputs`` are on its place already, and the list is emptied."""
        place = self.places[stage.index]
        precision = precision_context(self.precision, place.device.type)
        with on(place), precision:
            if self.statistics is None:
                return run_segments(stage, tree, place, inputs)
            written = [name for segment in stage.segments for name in segment.written]
            with self.statistics.gathering(dict(tensors_at(tree, written)), place):
                return run_segments(stage, tree, place, inputs)

    def follow_attributes(self, model: nn.Module) -> None:
        """Have constants that attributes of ``model`` hold the values that these have now."""
        for name, path in self.staged.constant_paths.items():
            value = find_tensor(model, path)
            if value is None or value.is_meta:
                continue
            version = 0 if value.is_inference() else value._version
            known = self._attributes.get(name)
            if known is None or known[0] is not value or known[1] != version:
                self._attributes[name] = value, version
                for key in [key for key in self._constants if key[0] == name]:
                    del self._constants[key]

    def constant(self, name: str, place: Place) -> torch.Tensor:
        """A tensor that is part of the program, on ``place``."""
        key = (name, place)
        if key not in self._constants:
            found = self._attributes.get(name)
            tensor = self.staged.constants[name] if found is None else found[0]
            with torch.inference_mode(False):
                self._constants[key] = copy_to(place, tensor.detach())
        return self._constants[key]

    def forward(self, trees: Sequence[Any], leaves: Sequence[torch.Tensor]) -> list[Any]:
        """The result leaves for one micro-batch of input leaves, on ``output_place``.

        A value is copied to a stage when the stage starts and dropped after its last reader.
        """
        staged = self.staged
        values: dict[str, tuple[Any, Place | None]] = {
            name: (leaf, None) for name, leaf in zip(staged.graph_inputs, leaves, strict=True)
        }
        for stage, tree in zip(staged.stages, trees, strict=True):
            place = self.places[stage.index]
            inputs = []
            for name in stage.inputs:
                if name in staged.constants:
                    inputs.append(self.constant(name, place))
                    continue
                value, source = values[name]
                home = source or caller_place(value)
                inputs.append(transfer(value, home, place, gradients_wait=source is not None))
                del value
                if staged.last_use[name] == stage.index:
                    del values[name]
            outputs = self.run_stage(tree, stage, inputs)
            values.update((n, (v, place)) for n, v in zip(stage.outputs, outputs, strict=True))
            del outputs
        return [values[x][0] if kind == "value" else x for kind, x in staged.result]


def caller_place(leaf: torch.Tensor) -> Place:
    """Where an input of the caller's is: on its own device, under no name of the plan's."""
    return Place(CALLER.name, leaf.device)
