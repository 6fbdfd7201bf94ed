"""Schedule: a name and two numbers in, a table of actions out; pure."""

from placer.schedule.batch import batch_cuts
from placer.schedule.build import make_schedule
from placer.schedule.in_flight import Counts, InFlight, in_flight, in_flight_by_stage
from placer.schedule.messages import Flow, Message, find_messages
from placer.schedule.order import bubble, linearize, merge_backward
from placer.schedule.types import Action, Schedule

__all__ = [
    "Action",
    "Counts",
    "Flow",
    "InFlight",
    "Message",
    "Schedule",
    "batch_cuts",
    "bubble",
    "find_messages",
    "in_flight",
    "in_flight_by_stage",
    "linearize",
    "make_schedule",
    "merge_backward",
]
