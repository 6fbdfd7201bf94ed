"""Find where code that is a single node decides by values of the batch what it computes."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch

from placer.program.failure import Place
from placer.program.fake.converter import GuessData
from placer.program.recording.inside import Inside

_RAISE = dis.opmap["RAISE_VARARGS"]
# They run operators on fake tensors.
_OPERATORS = "torch._subclasses", "placer.program.fake.converter", "placer.program.fake.mode"


def reading_of_inputs(
    guess: GuessData, inside: Inside, run: Callable[[GuessData], Inside | None]
) -> str:
    """The first line, as ``file.py:line``, where code does more than to check a value of its inputs; or "".

    ``guess`` has the places where it read values, and ``inside`` what it then computed. ``run`` runs it again
    with other guesses: where it raises an exception for another value, or computes the same, it only checks
    the value.
    """
    for place, of_inputs in guess.places.items():
        if of_inputs and not (
            _is_check(guess, inside, place, run)
            and all(_is_same(guess, inside, place, x, run) for x in _VALUES)
        ):
            return f"{place[0]}:{place[1][0]}"
    return ""


_VALUES = 2, 10**30, -(10**30)


def _is_same(
    guess: GuessData,
    inside: Inside,
    place: Place,
    value: int,
    run: Callable[[GuessData], Inside | None],
) -> bool:
    """Does code compute the same if it gets ``value`` at ``place``, or raise an exception?"""
    again = guess.again(guess.guess)
    again.numbers[place] = value
    try:
        return inside.equals(run(again))
    except Exception as error:
        return _is_raised_by_code(error)


def _is_check(
    guess: GuessData, inside: Inside, place: Place, run: Callable[[GuessData], Inside | None]
) -> bool:
    """Does code raise an exception if it gets another value at ``place``, or compute the same?

    Further values that it then reads are guessed as well, so that it passes if it can.
    """
    others, last = guess.guess.others, place
    flipped: set[Place] = set()
    while last not in flipped:
        flipped.add(last)
        again = guess.again(replace(guess.guess, others=others ^ flipped))
        try:
            found = run(again)
        except Exception as error:
            if not _is_raised_by_code(error):
                return False
            last = next(reversed(again.places), place)
        else:
            return inside.equals(found)
    # In another line, other values may be why, of which no guess will do.
    return (last[0], last[1][0]) == (place[0], place[1][0])


def _is_raised_by_code(error: Exception) -> bool:
    """Is it of a ``raise`` or ``assert``, and not of an operation that the value made impossible?"""
    if isinstance(error, torch.jit.Error):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(str(x.f_globals.get("__name__")).startswith(_OPERATORS) for x in frames):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
