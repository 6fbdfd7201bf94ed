"""One replica of a placed model: runs its stages on their places, with the weights that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from placer.emit import StageCode, StagedModel
from placer.executor.places.exchange import LocalExchange
from placer.executor.places.parameter_copies import ParameterCopies
from placer.executor.places.place import CALLER, Place, on
from placer.executor.places.transfer import copy_to
from placer.executor.stages.segment_state import tensors_at
from placer.executor.stages.segments import run_segments
from placer.executor.stages.statistics import DeferredStatistics
from placer.executor.stages.tree import build_tree
from placer.precision import precision_context
from placer.program import find_tensor, is_inside
from placer.space import Exchange


class Replica:
    """The stages of ``staged`` on ``shards`` (for each stage the places of its shards), for one replica.

    A stage that is not split in space has one shard. ``exchange`` is what the shards of several processes
    use; within one, everything is copied. The model has its weights on ``homes``, the places of replica 0's
    stages; on other places this replica reads copies of them. If ``statistics`` is given, it collects the
    statistics of norms, and running statistics are not updated by the stages.
    """

    def __init__(
        self,
        staged: StagedModel,
        shards: Sequence[Sequence[Place]],
        homes: Sequence[Place],
        precision: str = "fp32",
        statistics: DeferredStatistics | None = None,
        exchange: Exchange | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self.staged = staged
        self.shards = tuple(map(tuple, shards))
        self.places = tuple(row[0] for row in self.shards)
        self._exchange = exchange
        self._exchanges: list[Exchange | None] = [
            LocalExchange(row) if len(row) > 1 else exchange for row in self.shards
        ]
        self.homes = tuple(homes)
        self.precision = precision
        self._compiled = compiled
        self.statistics = statistics
        self._last_reads: dict[frozenset[int], Mapping[str, int]] = {}
        # Copies of constants; each with the tensor of which it is one, and the version of that.
        self._constants: dict[tuple[str, Place], tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._attributes: dict[str, torch.Tensor] = {}  # constants that are attributes of the model
        self._at_home = tuple(  # whether all weights of a stage are on its own place
            all(self.homes[staged.state_stage[name]] == place for name in stage.state)
            for stage, place in zip(staged.stages, self.places, strict=True)
        )

    def place_of(self, index: int, name: str) -> Place:
        """The place of a value in stage ``index``."""
        return self.shards[index][self.staged.shard_of.get(name, 0)]

    def with_program(self, staged: StagedModel) -> Replica:
        """The same replica, but with the stages of ``staged``."""
        if staged is self.staged:
            return self
        return Replica(
            *(staged, self.shards, self.homes, self.precision, self.statistics, self._exchange),
            compiled=self._compiled,
        )

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

    def trees(self, model: nn.Module, copies: ParameterCopies) -> list[list[Any]]:
        """For each shard of each stage an object with the modules and tensors that it reads, on its place.

        ``copies`` are those of this replica for the present call.
        """
        self.follow_attributes(model)
        return [
            [self._tree(model, stage, shard, copies) for shard in range(len(row))]
            for stage, row in zip(self.staged.stages, self.shards, strict=True)
        ]

    def _tree(self, model: nn.Module, stage: StageCode, shard: int, copies: ParameterCopies) -> Any:
        place = self.shards[stage.index][shard]
        if self._at_home[stage.index] and not shard:
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

    def run_stage(
        self, trees: Sequence[Any], stage: StageCode, inputs: list[Any]
    ) -> tuple[Any, ...]:
        """The stage's outputs; ``inputs`` must be on their places, and the list is emptied to free them.

        ``trees`` are those of its shards.
        """
        place, row = self.places[stage.index], self.shards[stage.index]
        exchange = self._exchanges[stage.index]
        precision = precision_context(self.precision, place.device.type)
        with on(place), precision:
            if self.statistics is None:
                return run_segments(stage, trees, row, inputs, exchange, compiled=self._compiled)
            written = [name for segment in stage.segments for name in segment.written]
            with self.statistics.gathering(dict(tensors_at(trees[0], written)), place):
                return run_segments(stage, trees, row, inputs, exchange, compiled=self._compiled)

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
