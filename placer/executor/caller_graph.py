"""Cuts tensors of the caller from their graph for a step, whose slices run one backward each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from placer.errors import PlacerError
from placer.program import is_mark


class CallerGraph:
    """The tensors of the caller that a step reads and that require gradients, each as a leaf of its own.

    The backward of every slice ends at these leaves. Autograd frees what a graph has saved when a backward
    has run through it, so the graph that made the caller's tensors must be run through only once.
    """

    def __init__(self) -> None:
        # Each of the caller's tensors, with its leaf.
        self._leaves: list[tuple[torch.Tensor, torch.Tensor]] = []

    def cut(self, value: Any) -> Any:
        """``value`` (any pytree) with a leaf in place of each tensor that requires gradients."""
        if not torch.is_grad_enabled():
            return value
        return tree_map(self._cut, value, is_leaf=is_mark)

    def _cut(self, leaf: Any) -> Any:
        if is_mark(leaf):
            return replace(leaf, value=self.cut(leaf.value))
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        own = leaf.detach().requires_grad_()
        self._leaves.append((leaf, own))
        return own

    def backward(self) -> None:
        """Continue the backward in the caller's graph, from the gradients of its leaves."""
        reached = [(given, leaf.grad) for given, leaf in self._leaves if leaf.grad is not None]
        if reached:
            torch.autograd.backward([given for given, _ in reached], [grad for _, grad in reached])


def shared_graph() -> PlacerError:
    """The error for slices whose backwards run through one graph that was made before the step."""
    return PlacerError(
        "step",
        "loss_fn or a module reads a tensor that was computed before the step from others that require "
        "gradients; each slice of the batch runs backward by itself, and the second finds the graph of "
        "that tensor freed",
        "compute it inside loss_fn or forward, pass it as target=(…, placer.Whole(tensor)), or detach it; "
        "under torch.nn.utils.parametrize.cached() call placed(x) and loss.backward()",
    )
