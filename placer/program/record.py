"""Record what a model computes: run it once on fake tensors and record every torch call.

`placer.program.recorder` intercepts the calls, and `placer.program.writer` writes the graph. This file
prepares the run, restores the modules afterwards, and attributes failures to the innermost module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer.program.call import BoundCall
from placer.program.failure import TraceFailure, describe, leads_to, locate
from placer.program.fake import FakeConverter, fake_execution
from placer.program.guards import AttributeGuard
from placer.program.leaves import is_inside
from placer.program.objects import attribute_of
from placer.program.python_random import PythonRandomDraw
from placer.program.recorder import Recorder
from placer.program.restore import Snapshot, module_roots
from placer.program.result import ResultFormat
from placer.program.size_log import SizeLog
from placer.program.writer import CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProgram:
    """What was recorded in one run of a model on fake tensors; tables are keyed by node name."""

    graph: fx.Graph
    layer_of: dict[str, str]
    location_of: dict[str, str]
    constants: dict[str, Tensor]
    result: ResultFormat
    results: tuple[Any, ...]  # per leaf of the result: the shape of a tensor, or the value
    side_effects: tuple[tuple[str, str], ...]  # (module path, attribute) pairs that forward changes
    guards: tuple[AttributeGuard, ...]  # the plain attributes that forward read
    checkpointed: dict[str, str]  # path of a module under activation checkpointing -> source line
    grad: (
        bool | None
    )  # the answer given to ``torch.is_grad_enabled()``; None if forward never asked
    sizes: SizeLog


class UnlocatedRandomDraw(TraceFailure):
    """Forward drew random numbers from Python or numpy; the run did not find out in which module."""


def record_model(
    converter: FakeConverter,
    model: nn.Module,
    fake_model: nn.Module,
    bound: BoundCall,
    inputs: Sequence[Tensor],
    whole: frozenset[str],
    *,
    guess: int = 1,
    ignore_device_moves: bool = False,
    grad: bool = True,
    named: bool = True,
    forgotten: Sequence[Tensor] = (),
) -> RecordedProgram:
    """Run ``fake_model``, the fake copy of ``model``, on fake ``inputs`` and record what it does.

    Modules whose paths are in ``whole`` become single nodes, as do the layers of ``torch.nn``; where they
    read values of tensors, they get ``guess``. ``torch.is_grad_enabled()`` returns ``grad`` to the model's
    code. With ``named``, equal graphs have equal node names, which a graph that is only compared does not
    need. ``forgotten`` are tensors of ``model`` that were removed from ``fake_model``, which is restored
    afterwards. Raises ``TraceFailure``, which names the innermost module that cannot be recorded;
    ``ForwardFailure`` if the model itself fails; and ``CaptureError`` if it moves tensors to several
    devices, unless ``ignore_device_moves``.
    """
    snapshot = Snapshot(module_roots(fake_model))
    make = partial(Recorder, ignore_device_moves=ignore_device_moves, grad=grad)
    run = partial(
        run_once,
        partial(make, converter, model, fake_model, whole, guess),
        converter,
        bound,
        inputs,
    )
    try:
        try:
            recorder, leaves = run(locate_draws=False)
        except UnlocatedRandomDraw as failure:
            # Run again and compare the generators' states around every module. That is slow, so it
            # is done only now.
            snapshot.restore()
            run()
            raise TraceFailure("", f"{failure.reason}, but not in every call", "") from failure
        changed = dict.fromkeys(attribute_of(change.path) for change in snapshot.changes())
        changes = [x for x in changed if not is_inside(recorder.single_nodes, x[0])]
        effects = _replace_buffers(recorder, model, fake_model, changes, forgotten)
        cached = [recorder.keep_cached(_attribute(fake_model, *effect)) for effect in effects]
        if effects:
            # Does what forward left behind change what the next forward computes? The next one may
            # read constants from there, which the first one computed.
            first = recorder.lines(leaves, constants=not any(cached))
            another, results = run()
            second = another.lines(results, constants=not any(cached))
            for path, attribute in effects:
                if path and first != second:
                    raise TraceFailure(path, f"its forward changes its attribute {attribute!r}", "")
        sizes = recorder.sizes.log()
        graph = recorder.writer.finish(leaves, recorder.sizes.values, named=named)
    finally:
        snapshot.restore()
    writer = recorder.writer
    names = {node.name for node in graph.nodes}
    assert recorder.result is not None
    return RecordedProgram(
        graph=graph,
        layer_of={k: v for k, v in writer.layer_of.items() if k in names},
        location_of={k: v for k, v in writer.location_of.items() if k in names},
        constants={k: v for k, v in writer.constants.items() if k in names},
        result=recorder.result,
        results=recorder.results,
        side_effects=tuple(effects),
        guards=recorder.guards(forgotten),
        checkpointed=recorder.checkpointed,
        grad=recorder.grad if recorder.asked_grad else None,
        sizes=sizes,
    )


def run_once(
    make_recorder: Callable[[], Recorder],
    converter: FakeConverter,
    bound: BoundCall,
    inputs: Sequence[Tensor],
    *,
    locate_draws: bool = True,
) -> tuple[Recorder, list[Any]]:
    recorder = make_recorder()
    recorder.locate_draws = locate_draws
    try:
        with recording_modes(converter), recorder.watching():
            return recorder, recorder.run(bound, inputs)
    except TraceFailure:
        raise
    except Exception as error:
        if recorder.devices.error is not None:
            raise recorder.devices.error from None
        if recorder.failed is not None and leads_to(error, recorder.failed.__cause__):
            raise recorder.failed from error
        if recorder.failed_in is not None and leads_to(error, recorder.failed_in[0]):
            raise TraceFailure(recorder.failed_in[1], describe(error), locate(error)) from error
        kind = UnlocatedRandomDraw if isinstance(error, PythonRandomDraw) else TraceFailure
        raise kind("", describe(error), locate(error)) from error


def _attribute(fake_model: nn.Module, path: str, attribute: str) -> Any:
    return fake_model.get_submodule(path).__dict__.get(attribute)


def _replace_buffers(
    recorder: Recorder,
    model: nn.Module,
    fake_model: nn.Module,
    changes: Iterable[tuple[str, str]],
    forgotten: Sequence[Tensor],
) -> list[tuple[str, str]]:
    """Record each buffer that forward replaced by another tensor as a copy into the buffer.

    ``changes`` are pairs (module path, attribute). Returns all other changes, among them buffers in
    ``forgotten``, which the model did not have before its first call.
    """
    others = []
    for path, attribute in changes:
        before = model.get_submodule(path)._buffers.get(attribute)
        now = fake_model.get_submodule(path)._buffers.get(attribute)
        if (
            before is None
            or any(before is tensor for tensor in forgotten)
            or now is None
            or now.requires_grad
            or (now.shape, now.dtype) != (before.shape, before.dtype)
        ):
            others.append((path, attribute))
        else:
            recorder.writer.replace_buffer(f"{path}.{attribute}".lstrip("."), now, path)
    return others


@contextmanager
def recording_modes(converter: FakeConverter) -> Iterator[None]:
    """The modes of a recording: gradients on, even inside ``torch.no_grad``, and fake CPU tensors."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(converter.mode)
        stack.enter_context(fake_execution())
        stack.enter_context(converter.isolated_caches())
        # Entered only if needed: it slows every torch function.
        if torch.get_default_device() != CPU:
            stack.enter_context(CPU)
        yield
