"""What a loss reads besides the model's output: tensors whose gradients would stay on one rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from placer.autograd_graph import leaf_of, nodes_behind
from placer.errors import PlacerError
from placer.program import result_tensors


def gradient_nodes(output: Any) -> list[Node]:
    """Where gradients enter the model's own graph; to be asked before a loss may write to ``output``."""
    return [get_gradient_edge(t).node for t in result_tensors(output) if t.requires_grad]


def refuse_other_leaves(loss: Tensor, output: list[Node], part: nn.Module, *, whole: bool) -> None:
    """Raise ``PlacerError`` when ``loss`` depends on leaves other than through the nodes ``output``.

    Those are parameters of ``part``, which are none of the other ranks' (but where it is the ``whole``
    model, as many times as there are replicas, each weighted by its share), or of the loss itself.
    """
    found = _leaves_beyond(loss, output)
    if found:  # by way of activations, say, that a hook has kept: these are the model's own graph
        found = _leaves_beyond(loss, _reachable(output))
    own = dict(part.named_parameters())
    read = [name for name, parameter in own.items() if any(leaf is parameter for leaf in found)]
    others = [leaf for leaf in found if not any(leaf is parameter for parameter in own.values())]
    if read and not whole:
        more = f" and {len(read) - 1} more" if len(read) > 1 else ""
        raise PlacerError(
            "loss_fn",
            f"reads the model's parameter {read[0]!r}{more} besides its output; it runs where the last "
            "stage is, and the parameters of other ranks are not there",
            "for a penalty on weights use the optimizer's weight_decay, or add its gradient after the "
            "step, on every rank: placed.step(...), then penalty(placed.parameters()).backward()",
        )
    if others:
        raise PlacerError(
            "loss_fn",
            f"reads a tensor of shape {list(others[0].shape)} that requires gradients and is not the "
            "model's; it would get one only where the last stage is, and replicas would train it apart",
            "have the model hold the loss's parameters, as a layer that forward calls with the target, "
            "or freeze them with requires_grad_(False)",
        )


def _leaves_beyond(loss: Tensor, stops: Collection[Node]) -> list[Tensor]:
    """The leaves that gradients of ``loss`` reach without passing one of ``stops``."""
    start = [loss.grad_fn] if loss.grad_fn is not None else []
    leaves = map(leaf_of, nodes_behind(start, stops=set(stops)))
    return [leaf for leaf in leaves if leaf is not None]


def _reachable(nodes: Collection[Node]) -> list[Node]:
    """The nodes behind ``nodes``, and these, but for the leaves: the loss may read those by itself."""
    return [node for node in nodes_behind(nodes) if leaf_of(node) is None]
