"""Backwards in two halves, inputs first and weights later, that lose no gradient."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining import PipelineStage

from placer._torch import chunk_state


class SplitStage(PipelineStage):
    """Torch's stage; where its split backward would lose weights' gradients, it is not split.

    ``stage_backward_weight`` (pipelining/_backward.py, torch 2.15) starts from the nodes at which
    a weight's way to the outputs meets that of the stage's received inputs. An output that depends
    on no received input that has a gradient, such as one of the model's own inputs after a layer,
    or any output after frozen stages, has no such node: the gradients of what it is made of are
    left out, without an error. Such a micro-batch has its whole backward at once.

    ::

        received ──► conv ─────► out 0    split: conv's weights wait
        own input ─► linear ───► out 1    meets nothing that was received: linear would get none

    Its backward for weights that meet the way of received inputs at several nodes runs through what
    lies between these, which belongs to other weights and runs once more for them: "backward through
    the graph a second time". Such a micro-batch is not split either.

    ::

        received ────────────► (*) ──► conv ──► (+) ──► out
        own input ─► linear ────┴────────────────┘    meets it at * and at +
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._done: set[int] = set()  # micro-batches whose weights have their gradients already

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        if not full_backward and not self.is_first and not self._can_split(bwd_chunk_id, loss):
            self._done.add(bwd_chunk_id)
            full_backward = True
        return super().backward_one_chunk(
            bwd_chunk_id, loss, full_backward=full_backward, last_backward=last_backward
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        if bwd_chunk_id in self._done:
            self._done.discard(bwd_chunk_id)
            return None
        result = super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._part_gradients()
        return result

    def _part_gradients(self) -> None:
        """Give weights that were assigned one and the same gradient (of ``w + delta``) one each."""
        seen: set[int] = set()
        for weight in self.submod.parameters():
            if weight.grad is not None:
                if id(weight.grad) in seen:
                    weight.grad = weight.grad.clone()
                seen.add(id(weight.grad))

    def _can_split(self, chunk: int, loss: Any) -> bool:
        """Does every output depend on a received input, and every weight meet its way once?"""
        outputs, inputs = chunk_state(self, chunk)
        roots = list(filter(None, map(_node, [loss] if self.is_last else outputs)))
        received = set(filter(None, map(_node, inputs)))
        weights = list(filter(None, map(_node, self.submod.parameters())))
        order = _topological(roots)
        onward = set(received)  # nodes on a way from an output to a received input
        for node in order:
            if any(following in onward for following, _ in node.next_functions):
                onward.add(node)
        if not all(root in onward for root in roots):
            return False
        return _meet_once(order, onward, weights)


def _node(value: Any) -> Node | None:
    """Where gradients of ``value`` arrive: a leaf's accumulator, else its ``grad_fn``."""
    if isinstance(value, GradientEdge):
        return value.node
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    return value.grad_fn or value.view_as(value).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _topological(roots: Iterable[Node]) -> list[Node]:
    """All nodes that lead to leaves from ``roots``, each after those that follow it in backward."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(n, False) for n, _ in node.next_functions if n is not None]
    return order


def _meet_once(order: Iterable[Node], onward: Container[Node], weights: Iterable[Node]) -> bool:
    """Does each of ``weights`` hang on at most one node of ``onward``? ``order`` is topological."""
    bit = {weight: 1 << i for i, weight in enumerate(weights)}
    behind: dict[Node, int] = {}  # which weights a node outside of ``onward`` leads to
    met = 0
    for node in order:
        found = bit.get(node, 0)
        for following, _ in node.next_functions:
            if following is not None and following not in onward:
                found |= behind[following]
        if node not in onward:
            behind[node] = found
        elif met & found:
            return False
        else:
            met |= found
    return True
