"""Run the backward of a forward on fake tensors, to find out what its hooks do.

A hook on gradients runs once for every slice of the batch. So with several slices it may not keep anything,
because the whole batch would leave something else, and it may not mix rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from placer._torch import BACKWARD_HOOK_TABLES, without_torch_function
from placer.program.failure import locate_function
from placer.program.fake.converter import GuessData
from placer.program.objects.paths import Path
from placer.program.objects.python_random import keep_random
from placer.program.objects.reachable import ReachableState
from placer.program.objects.restore import Change, Snapshot, hook_owners, module_roots
from placer.program.recording.inside import Inside
from placer.program.recording.reached import Reached
from placer.program.recording.readings import reading_of_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRun:
    """One run of a hook that replaces gradients.

    ``layer`` is the module that has the hook; "" for a hook on a tensor. ``location`` is the hook's line, and
    ``reading`` the line where it decides by values of gradients, or "".
    """

    layer: str
    location: str
    inside: Inside
    reading: str


class BackwardHooks:
    """The hooks on gradients that run in the backward of the fake ``model``, and what a backward changes."""

    def __init__(
        self,
        model: nn.Module,
        code: ReachableState,
        reached: Reached,
        guess: Callable[[], GuessData],
    ) -> None:
        self.runs: list[HookRun] = []
        self.changes: list[Change] = []
        self._model, self._code = model, code
        self._roots: list[tuple[Path, Any]] = []
        self._reached = reached
        self._guess = guess

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In this block, the model's modules are called with hooks that are watched when they run."""
        tables = [
            (path, table)
            for path, module in self._model.named_modules()
            for name in BACKWARD_HOOK_TABLES
            if (table := vars(module)[name])
        ]
        before = [dict(table) for _, table in tables]
        modules = set(map(id, self._model.modules()))
        self._roots = [*module_roots(self._model), *hook_owners(self._model, "", modules)]
        try:
            for path, table in tables:
                table.update({key: self.watched(path, hook) for key, hook in table.items()})
            yield
        finally:
            for (_, table), hooks in zip(tables, before, strict=True):
                table.update({key: hook for key, hook in hooks.items() if key in table})

    def watched(self, layer: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook``, watched when it runs."""

        def run(*args: Any) -> Any:
            guess, reached = self._guess(), self._reached
            before, reached.inside = reached.inside, None
            try:
                reached.extend(args, inside=True)
                with guess, keep_random():
                    value = hook(*args)
                inside = reached.end(value)
                if inside is not None and value is not None:
                    reading = ""
                    if guess.guessed:
                        reading = reading_of_inputs(guess, inside, lambda other: again(other, args))
                    self.runs.append(
                        HookRun(
                            layer=layer,
                            location=locate_function(hook),
                            inside=inside,
                            reading=reading,
                        )
                    )
            finally:
                reached.inside = before
            return value

        def again(guess: GuessData, args: Sequence[Any]) -> Inside | None:
            with guess, keep_random():
                with without_torch_function():
                    copies = tree_map_only(Tensor, lambda x: x.detach().clone(), args)
                self._reached.extend(copies, inside=True)
                return self._reached.end(hook(*copies))

        return run

    def run_backward(self, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Run the backward of ``results``, note what it changes, and put that back.

        A backward that fails on tensors without data is left to `placer.cost`, which runs it too.
        """
        outputs = [x for x in results if x.grad_fn is not None]
        leaves = [x for x in (*self._model.parameters(), *inputs) if x.requires_grad and x.is_leaf]
        if not outputs or not leaves:
            return
        before = Snapshot(self._roots, self._code)
        try:
            with suppress(Exception):
                ones = list(map(torch.ones_like, outputs))
                torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
            self.changes = list(before.changes())
        finally:
            before.restore()
