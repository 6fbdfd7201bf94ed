"""Runs hooks on the gradients of parameters once per step, although a step computes gradients in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer._torch import gradient_hook_tables


@dataclass(frozen=True, slots=True)
class _Held:
    """A parameter, the gradient that it had before the step, and the hooks that were taken from it."""

    parameter: Tensor
    before: Tensor | None
    changing: dict[int, Callable[[Tensor], Tensor | None]]
    telling: dict[int, Callable[[Tensor], object]]


Explain = Callable[[Tensor, Exception], Exception]


@contextmanager
def hooks_run_once(
    parameters: Iterable[Tensor], *, keep: Set[int] = frozenset(), explain: Explain | None = None
) -> Iterator[None]:
    """After this block, run the hooks on the gradients of ``parameters`` that would have run inside it.

    Inside, every slice of the batch and every stage that reads a parameter adds a part of its gradient. A
    hook such as ``lambda g: g.clamp(-1, 1)`` must see their sum, as in a backward of the whole batch.
    Gradients from before the block are added afterwards, as backward does. Hooks with the ids ``keep``
    run inside. ``explain`` turns what a hook of a parameter raises into what is raised.
    """
    held = [found for p in parameters if p.requires_grad and (found := _take(p, keep)) is not None]
    done = False
    try:
        yield
        done = True
    finally:
        for one in held:
            _put_back(one)
            if not done:
                one.parameter.grad = one.before
    for one in held:
        try:
            _run(one)
        except Exception as error:
            if explain is None:
                raise
            raise explain(one.parameter, error) from error


def _take(parameter: Tensor, keep: Set[int]) -> _Held | None:
    """Take the hooks and the gradient of ``parameter``; None if it has no hooks."""
    changing, telling = gradient_hook_tables(parameter)
    if changing.keys() <= keep and telling.keys() <= keep:
        return None
    before, parameter.grad = parameter.grad, None
    return _Held(parameter, before, _pop(changing, keep), _pop(telling, keep))


def _pop(table: MutableMapping[int, Any], keep: Set[int]) -> dict[int, Any]:
    return {key: table.pop(key) for key in list(table) if key not in keep}


def _put_back(held: _Held) -> None:
    changing, telling = gradient_hook_tables(held.parameter)
    _insert_first(changing, held.changing)
    _insert_first(telling, held.telling)


def _insert_first(table: MutableMapping[int, Any], hooks: dict[int, Any]) -> None:
    """Put ``hooks`` before those that stayed in ``table``, which placer registered later."""
    stayed = dict(table)
    table.clear()
    table.update(hooks | stayed)


def _run(held: _Held) -> None:
    parameter, before = held.parameter, held.before
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = before
        return
    with torch.no_grad():
        for change in held.changing.values():
            changed = change(gradient)
            gradient = gradient if changed is None else changed
        parameter.grad = gradient if before is None else _sum(before, gradient)
        for tell in held.telling.values():
            tell(parameter)


def _sum(before: Tensor, gradient: Tensor) -> Tensor:
    """Their sum, in ``before`` where that is dense, as backward accumulates."""
    return before.add_(gradient) if before.layout == torch.strided else before + gradient
