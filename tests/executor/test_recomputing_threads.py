"""Segments recomputed in several threads at once, as backward does with stages on several devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import checkpoint

from placer.emit import SegmentCode, StageCode
from placer.executor.places.place import Place
from placer.executor.stages.segments import run_segments

CPU = Place("cpu:0", torch.device("cpu"))
PATIENCE = 0.5  # seconds that a thread waits for one that must not come


def _dropped(xs: Sequence[Tensor], recomputing: Callable[[], Any]) -> list[Any]:
    """``xs`` times their dropout, recomputed in backward; ``recomputing`` is called before that draws."""
    calls: Iterator[Callable[[], Any]] = iter([lambda: None, recomputing])

    def forward(tree: Any, device: torch.device, inputs: list[Any]) -> tuple[Any, ...]:
        next(calls)()
        return tuple(F.dropout(x) * x for x in inputs)

    made, given = ([f"{name}{i}" for i in range(len(xs))] for name in "yx")
    names: Any = {"inputs": given, "outputs": made, "modules": (), "attributes": ()}
    segment = SegmentCode(
        **names,
        released=frozenset(),
        written=(),
        recompute=True,
        offload=False,
        overlapped=False,
        forward=forward,
    )
    stage = StageCode(**names, index=0, state=(), segments=(segment,))
    return list(run_segments(stage, [None], [CPU], list(xs)))


def test_each_draws_its_own_mask_and_the_generator_is_where_it_was() -> None:
    """The first recomputation ends while the second has set its state, if they are not kept apart."""
    torch.manual_seed(0)
    second_came, first_ended = threading.Event(), threading.Event()

    def first_waits() -> None:
        second.start()
        second_came.wait(PATIENCE)

    def second_waits() -> None:
        second_came.set()
        first_ended.wait(10 * PATIENCE)

    xs = [(torch.rand(100) + 1).requires_grad_() for _ in range(2)]
    pairs = zip(xs, (first_waits, second_waits), strict=True)
    ys = [y for x, waits in pairs for y in _dropped([x], waits)]
    second = threading.Thread(target=ys[1].sum().backward)
    before = torch.get_rng_state()
    ys[0].sum().backward()
    first_ended.set()
    second.join()
    for x, y in zip(xs, ys, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2 * (y / x).detach())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(
    not hasattr(checkpoint, "GraphExecGroup"), reason="no GraphExecGroup in this torch"
)
def test_threads_of_one_backward_run_a_segment_again_once() -> None:
    """As the devices of a stage that is split in space do, each in its own thread."""
    backward = checkpoint.GraphExecGroup()

    def run(y: Tensor) -> None:
        with backward:
            y.sum().backward()

    def first_waits() -> None:
        second.start()
        second.join(PATIENCE)  # it comes while the segment runs again

    xs = [(torch.rand(100) + 1).requires_grad_() for _ in range(2)]
    ys = _dropped(xs, first_waits)
    second = threading.Thread(target=run, args=(ys[1],))
    run(ys[0])
    second.join()
    for x, y in zip(xs, ys, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2 * (y / x).detach())
