"""Pipeline schedules: which rank runs which stage's forward or backward of which micro-batch, and when.

Nothing here imports torch. `make_schedule` gives each rank its actions, `linearize` puts those of all
ranks in one order, `find_messages` says what ranks must send each other, and `in_flight_by_stage` how
many micro-batches wait at each stage.
"""

from placer.schedule.batch import split_batch
from placer.schedule.build import make_schedule, one_process_order, ranks_of, schedule_on
from placer.schedule.in_flight import Counts, InFlight, in_flight_by_stage
from placer.schedule.messages import Flow, Message, find_messages
from placer.schedule.order import linearize, merge_backward
from placer.schedule.types import Action, Schedule

__all__ = [
    "Action",
    "Counts",
    "Flow",
    "InFlight",
    "Message",
    "Schedule",
    "find_messages",
    "in_flight_by_stage",
    "linearize",
    "make_schedule",
    "merge_backward",
    "one_process_order",
    "ranks_of",
    "schedule_on",
    "split_batch",
]
