"""Exceptions that say why recording a model failed: in which module, why, and at which line."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from types import CodeType, FrameType, TracebackType

import torch

from placer.errors import CaptureError, causes, first_line

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared with frame file names
WHOLE_TRACEBACKS = "PLACER_TRACEBACK"  # a variable: show the lines of torch and placer, too
_RUNS_MODELS = "placer.program.recording.record", "placer.program.whole"
OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120

Place = tuple[str, tuple[int | None, ...]]
"""A piece of source code: a file, the lines and columns of its beginning and end, and a number.

In ``assert a.all() and b.all()`` both values are tested by instructions of the same lines and columns, which
are told apart by their number. Neighbouring instructions there have the same one, since Python may run any of
them.
"""


def end_frames(failure: Exception) -> None:
    """Clear the frames of ``failure``, so that the contexts that they entered end.

    ``torch.utils.checkpoint`` enters saved-tensor hooks in a generator that it does not close if the
    function fails (torch 2.11 and 2.12). The exception would keep the generator alive, and the next
    recording would run under these hooks.
    """
    for cause in causes(failure, implicit=True):
        traceback.clear_frames(cause.__traceback__)


def with_own_lines(error: BaseException | None) -> BaseException | None:
    """``error`` with only the lines of the user's code in its traceback, if there are any.

    Between them are those of torch, and of placer's recording: more than a hundred for a wrong shape.
    """
    own: TracebackType | None = None
    if error is None or os.environ.get(WHOLE_TRACEBACKS):
        return error
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not frame.f_code.co_filename.startswith((TORCH_FOLDER, OWN_FOLDER)):
            own = TracebackType(own, frame, frame.f_lasti, number)
    return error if own is None else error.with_traceback(own)


DIFFERENTIATES = "it differentiates a part of itself"
CHANGES_FLAGS = "it changes requires_grad of a tensor that it has used before"
"""Why a module stays whole that only runs where its parameters are leaves of the graph."""


class TraceFailure(Exception):
    """The module ``layer`` (a path) cannot be recorded; ``__cause__`` is the exception, if there was one."""

    def __init__(self, layer: str, reason: str, location: str) -> None:
        super().__init__(layer, reason, location)
        self.layer = layer
        self.reason = reason
        self.location = location


class MethodNotCaptured(CaptureError):
    """A method besides forward cannot be captured. ``calls_layers``: it calls some itself."""

    calls_layers = False


def method_not_captured(
    method: str, reason: str, location: str = "", *, calls_layers: bool = False
) -> MethodNotCaptured:
    """The error for ``method``; ``reason`` says why."""
    error = MethodNotCaptured(
        method,
        f"this method cannot be captured: {reason}" + (f" ({location})" if location else ""),
        "move the code that cannot be captured into a submodule, or let forward do what it does",
    )
    error.calls_layers = calls_layers
    return error


class Untraceable(Exception):
    """Forward does something that a graph cannot express. The text begins with "it" and says what."""


class SetForLayer(Untraceable):
    """Forward sets what a single node reads later in the same run."""


class ForwardFailure(Exception):
    """The model's forward raised an exception of its own, which is ``__cause__``."""

    def __init__(
        self, layer: str, location: str, *, guessed: bool = False, places: Sequence[Place] = ()
    ) -> None:
        super().__init__(layer, location)
        self.layer = layer
        self.location = location
        self.places = places  # where it read guessed values of tensors
        # Did it? Then with real values it might not fail.
        self.guessed = guessed

    def as_error(self, situation: str, remedy: str) -> CaptureError:
        """The error for the user: "forward fails ``situation``", with the line of the user's code."""
        where = f" ({self.location})" if self.location else ""
        text = first_line(self.__cause__)
        if isinstance(self.__cause__, Untraceable):
            return CaptureError(
                self.layer or "the model",
                f"{text}{where}",
                "do it outside of forward, or return it in another form",
            )
        return CaptureError(
            self.layer or "the model",
            f"forward fails {situation}: {type(self.__cause__).__name__}: {text}{where}",
            remedy,
        )


def describe(error: BaseException) -> str:
    """Why recording failed, as a sentence that begins with "it" or "its"."""
    text = first_line(error)
    if isinstance(error, Untraceable):
        return text
    kind = type(error).__name__
    if kind == "DataDependentOutputException":
        return "its Python control flow depends on the value of a tensor"
    if kind == "DynamicOutputShapeException":
        return "it makes a tensor whose shape depends on the values of another"
    return f"it cannot be recorded ({kind}: {text})"


def leads_to(error: BaseException | None, cause: BaseException | None) -> bool:
    """Is ``cause`` the error itself, or among its causes?"""
    return any(one is cause for one in causes(error, implicit=True))


def locate(error: BaseException) -> str:
    """``file.py:line`` of the innermost frame outside torch and placer, or ``""``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def locate_function(function: object) -> str:
    """``file.py:line`` where ``function`` begins; ``""`` for code of torch and code that is not Python."""
    if isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or not _is_users(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def locate_caller() -> str:
    """``file.py:line`` of the innermost running frame of the model's own code, or ``""``.

    Frames of torch and placer do not count, nor do those that called placer: a model made only of torch's
    layers has no code of its own.
    """
    frame = _calling_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def calling_place() -> Place | None:
    """The piece of source code that this frame is executing."""
    frame = _calling_frame()
    if frame is None:
        return None
    return frame.f_code.co_filename, _positions(frame.f_code)[frame.f_lasti // 2]


@functools.cache
def _positions(code: CodeType) -> list[tuple[int | None, ...]]:
    """The lines and columns of each instruction, and the number of its run of equal ones."""
    runs = enumerate(itertools.groupby(code.co_positions()))
    return [(*lines, number) for number, (lines, run) in runs for _ in run]


def _calling_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") not in _RUNS_MODELS:
        if _is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


@functools.cache
def _is_users(filename: str) -> bool:
    # Code from a terminal or a string ("<stdin>", "<string>") is the user's, too.
    others = TORCH_FOLDER, OWN_FOLDER, contextlib.__file__, "<frozen", "<eval_with_key"
    return not filename.startswith(others)
