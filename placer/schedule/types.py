"""A pipeline schedule: the actions of each rank, in the notation of `torch.distributed.pipelining`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The forward or backward of one micro-batch on one stage; ``str`` gives torch's notation.

    Kinds: ``F`` forward, ``B`` whole backward, ``I`` its half for inputs, ``W`` its half for weights.

    >>> str(Action(stage_index=2, kind="F", microbatch_index=0))
    '2F0'
    """

    stage_index: int
    kind: Literal["F", "B", "I", "W"]
    microbatch_index: int

    def __str__(self) -> str:
        return f"{self.stage_index}{self.kind}{self.microbatch_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of every rank in order, without times and devices.

    ``rank_of`` has the rank of each stage; ``actions[rank]`` are the actions of the rank's stages.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
