"""Schedule: a name and two numbers in, a table of actions out; pure."""

from placer.schedule.build import make_schedule
from placer.schedule.order import bubble, draw, linearize, max_in_flight, merge_backward
from placer.schedule.types import Action, Schedule

__all__ = [
    "Action",
    "Schedule",
    "bubble",
    "draw",
    "linearize",
    "make_schedule",
    "max_in_flight",
    "merge_backward",
]
