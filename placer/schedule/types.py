"""A pipeline schedule as a table of actions, in torch's own words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One stage's forward or backward of one micro-batch; prints as torch prints it.

    ``F`` forward; ``B`` whole backward; ``I`` and ``W`` its halves by input and by weight.

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
    """What every rank does, in order; owns no times and no devices.

    ``actions[rank]`` is the order of work on that rank; with interleaved schedules a rank runs
    several stages (``stage s`` on ``rank s % num_ranks``), otherwise rank and stage are the same.
    """

    name: str
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
