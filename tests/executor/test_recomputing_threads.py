"""Segments recomputed in several threads at once, as backward does with stages on several devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from placer.emit import SegmentCode, StageCode
from placer.executor.places.place import Place
from placer.executor.stages.segments import run_segments

CPU = Place("cpu:0", torch.device("cpu"))
PATIENCE = 0.5  # seconds that a thread waits for one that must not come


def _dropped(x: Tensor, recomputing: Callable[[], Any]) -> Tensor:
    """``x`` times its dropout, recomputed in backward; ``recomputing`` is called before that draws."""
    calls: Iterator[Callable[[], Any]] = iter([lambda: None, recomputing])

    def forward(tree: Any, device: torch.device, inputs: list[Any]) -> tuple[Any, ...]:
        next(calls)()
        return (F.dropout(inputs[0]) * inputs[0],)

    names: Any = {"inputs": ("x",), "outputs": ("y",), "modules": (), "attributes": ()}
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
    (y,) = run_segments(stage, [None], [CPU], [x])
    assert isinstance(y, Tensor)
    return y


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
    ys = [_dropped(x, waits) for x, waits in zip(xs, (first_waits, second_waits), strict=True)]
    second = threading.Thread(target=ys[1].sum().backward)
    before = torch.get_rng_state()
    ys[0].sum().backward()
    first_ended.set()
    second.join()
    for x, y in zip(xs, ys, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2 * (y / x).detach())
    assert torch.equal(torch.get_rng_state(), before)
