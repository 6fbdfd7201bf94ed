"""Refuses a loss that reads trained tensors besides the model's output, as one rank alone has the loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from placer.autograd_graph import leaf_of, nodes_behind
from placer.errors import PlacerError
from placer.operands import tensors_in
from placer.program import result_tensors


def gradient_nodes(output: Any, left: Sequence[Any]) -> list[Node]:
    """The nodes through which gradients enter the model's graph, by its output or what forward has ``left``.

    Call it before the loss, which may change ``output`` in place.
    """
    tensors = [*result_tensors(output), *tensors_in(*left)]
    return [get_gradient_edge(t).node for t in tensors if t.requires_grad]


def refuse_other_leaves(loss: Tensor, output: list[Node], part: nn.Module, *, whole: bool) -> None:
    """Raise ``PlacerError`` if ``loss`` depends on leaves other than through the nodes ``output``.

    Such leaves are parameters of ``part``, or of the loss itself. Parameters of ``part`` are allowed if
    it is the ``whole`` model, because then every replica adds its share of the gradient.
    """
    found = _leaves_beyond(loss, output)
    if found:
        # Perhaps through activations that a hook has kept, which are part of the model's graph.
        found = _leaves_beyond(loss, _reachable(output))
    if not found:
        return
    own = dict(part.named_parameters())
    read = [name for name, parameter in own.items() if any(leaf is parameter for leaf in found)]
    others = [leaf for leaf in found if not any(leaf is parameter for parameter in own.values())]
    if read and not whole:
        more = f" and {len(read) - 1} more" if len(read) > 1 else ""
        raise PlacerError(
            "loss_fn",
            f"reads the model's parameter {read[0]!r}{more} besides its output; it runs on the rank of "
            "the last stage, which does not have the parameters of other ranks",
            "for a penalty on weights use the optimizer's weight_decay, or add its gradient after the "
            "step, on every rank: placed.step(...), then penalty(placed.parameters()).backward()",
        )
    if others:
        raise PlacerError(
            "loss_fn",
            f"reads a tensor of shape {list(others[0].shape)} that requires gradients and is not the "
            "model's; only the rank of the last stage would train it, and each replica differently",
            "make the loss's parameters part of the model, as a layer that forward calls with the target, "
            "or freeze them with requires_grad_(False)",
        )


def _leaves_beyond(loss: Tensor, stops: Collection[Node]) -> list[Tensor]:
    """The leaves that the backward of ``loss`` reaches without passing through one of ``stops``."""
    start = [loss.grad_fn] if loss.grad_fn is not None else []
    leaves = map(leaf_of, nodes_behind(start, stops=set(stops)))
    return [leaf for leaf in leaves if leaf is not None]


def _reachable(nodes: Collection[Node]) -> list[Node]:
    """``nodes`` and all nodes behind them except leaves, which the loss may read directly."""
    return [node for node in nodes_behind(nodes) if leaf_of(node) is None]
