"""Pipeline schedules: the order in which each rank runs forwards and backwards of micro-batches.

Nothing here imports torch. `make_schedule` returns the actions of each rank, `linearize` puts the actions
of all ranks into one order, `find_messages` finds the messages between ranks, and `in_flight_by_stage`
counts the micro-batches whose activations each stage keeps.
"""

from placer.schedule.batch import num_chunks, split_batch, split_evenly
from placer.schedule.build import (
    SCHEDULES,
    make_schedule,
    one_process_order,
    ranks_of,
    schedule_on,
    splits_backward,
)
from placer.schedule.in_flight import Counts, InFlight, in_flight_by_stage
from placer.schedule.messages import Flow, Message, find_messages, take_due_receives
from placer.schedule.order import linearize, merge_backward
from placer.schedule.types import Action, Schedule
