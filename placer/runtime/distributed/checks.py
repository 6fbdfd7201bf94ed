"""What a program may not do with its part of a placed model, because other ranks cannot know of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from placer.errors import PlacerError


def check_inference(leaves: Sequence[Tensor], *, training: bool) -> None:
    """Raise ``PlacerError`` where ``placed(x)`` would have to give a result with gradients."""
    if not torch.is_grad_enabled():
        return
    if training:
        raise PlacerError(
            "placed(x)",
            "gives results without gradients when there is one process per device",
            "train with placed.step(x, target=t, loss_fn=f); for results call placed.eval() or "
            "use torch.no_grad()",
        )
    if any(leaf.requires_grad for leaf in leaves):
        raise PlacerError(
            "inputs",
            "one of them requires gradients, and with one process per device none come out of "
            "placed(x), which gives results without",
            "give x.detach(), or take the gradient with placed.step, where inputs get theirs",
        )


def check_parameters(
    part: nn.Module, known: Collection[str], frozen: Collection[str]
) -> tuple[int, ...]:
    """The ids of the parameters that are trained.

    Raises ``PlacerError`` when there are others than the ``known`` ones, or others are ``frozen``.
    """
    named = list(part.named_parameters())
    new = [name for name, _ in named if name not in known]
    if new:
        raise PlacerError(
            new[0],
            "was made after placer.compile, and the other ranks cannot know",
            "prune, parametrize or extend the model before placer.compile",
        )
    frozen_now = {name for name, parameter in named if not parameter.requires_grad}
    if frozen_now != frozen:
        changed = sorted(frozen_now.symmetric_difference(frozen))[0]
        raise PlacerError(
            changed,
            "requires_grad was changed after placer.compile, and the other ranks cannot know",
            "freeze parameters of the model before placer.compile",
        )
    return tuple(id(parameter) for _, parameter in named if parameter.requires_grad)


def check_scaler(scaler: torch.amp.GradScaler | None, *, num_devices: int) -> None:
    """Raise ``PlacerError`` for a scaler that knows nothing of the replica's other ranks."""
    if scaler is None or not scaler.is_enabled() or num_devices == 1:
        return
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if not isinstance(scaler, ShardedGradScaler):
        raise PlacerError(
            "scaler",
            f"{type(scaler).__name__} looks at the gradients of this rank's stages only, so that "
            "some ranks would skip a step and others not",
            "make it with placed.grad_scaler()",
        )
