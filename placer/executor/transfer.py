"""Moving values between places, differentiably."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from placer._torch import is_transformed, run_at_once, storage_key
from placer.executor.place import Place, on

_LEAST_PIECE = 2**20  # bytes: a copy of fewer takes hardly less time
_MOST_PIECES = 64


def copy_to(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` on ``place``; always a copy, also where two places share one device."""
    with on(place):
        return tensor.to(place.device, copy=True)


class WaitingGradients:
    """Gradients of one value that wait where its readers are until its own backward comes.

    Its home holds the most just when its backward begins, while a reader's place has let go of
    what it saved: a skip connection's gradient is better kept there. A stand-in of no bytes takes
    its place in autograd's order; a hook on the value then puts the sum in.
    """

    def __init__(self, home: Place, like: torch.Tensor) -> None:
        self._home = home
        self._zero = (like.dtype, like.device, like.shape)
        self._stand_in: torch.Tensor | None = None
        self._held: list[tuple[Place, torch.Tensor, bool, torch.cuda.Event | None]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, place: Place, grad: torch.Tensor, *, ours: bool = False) -> None:
        """Keep ``grad`` on ``place``; a part of something larger (a concatenation's) as a copy.

        ``ours`` is a tensor that nobody else has, such as one that was received.
        """
        whole = grad.untyped_storage().nbytes() if grad.layout == torch.strided else 0
        if whole > grad.nbytes and not torch.is_grad_enabled():
            ours = True
            with on(place):
                grad = grad.clone()
        made = torch.cuda.current_stream(grad.device).record_event() if grad.is_cuda else None
        self._held.append((place, grad, ours, made))

    def stand_in(self) -> torch.Tensor:
        """A zero gradient for the value, at home."""
        dtype, device, shape = self._zero
        with on(self._home):
            self._stand_in = torch.zeros((), dtype=dtype, device=device)
            return self._stand_in.expand(shape)

    def add_to(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """``grad``, which is at home, and all that waits, which comes home one by one.

        Autograd keeps ``grad`` until the end. The sum is made in the first copy, and what comes
        after is added to it piece by piece: there is never a third tensor.
        """
        ours = False  # is ``grad`` a tensor that nobody else has?
        stand_in, self._stand_in = self._stand_in, None
        if self._held and grad is not None and stand_in is not None:
            alone = storage_key(grad) == storage_key(stand_in)
            grad = None if alone else grad  # zeros need not be added
        with on(self._home):
            while self._held:
                place, waiting, copied, made = self._held.pop()
                if made is not None:
                    stream = torch.cuda.current_stream(waiting.device)
                    stream.wait_event(made)
                    waiting.record_stream(stream)
                if ours and grad is not None and waiting.layout == grad.layout == torch.strided:
                    _add_pieces(grad, waiting, place, self._home)
                    del waiting
                    continue
                came = transfer(waiting, place, self._home)
                del waiting
                free = (copied or place != self._home) and not torch.is_grad_enabled()
                if grad is None:
                    grad, ours = came, free
                elif free and came.layout == grad.layout == torch.strided:
                    grad, ours = came.add_(grad), True  # the copy is ours: no third tensor
                else:
                    grad, ours = came + grad, not torch.is_grad_enabled()
                del came
        return grad


def _add_pieces(total: torch.Tensor, waiting: torch.Tensor, source: Place, target: Place) -> None:
    """Add ``waiting``, which is on ``source``, to ``total``, which is on ``target``."""
    if source == target or not (total.is_contiguous() and waiting.is_contiguous()):
        total.add_(transfer(waiting, source, target))
        return
    size = max(_LEAST_PIECE // waiting.element_size(), -(-waiting.numel() // _MOST_PIECES))
    pieces = zip(total.view(-1).split(size), waiting.view(-1).split(size), strict=True)
    for part, piece in pieces:
        part.add_(transfer(piece, source, target))


class _Transfer(torch.autograd.Function):
    """Copy from one place to another; the gradient takes the way back, at once or when needed."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        source: Place,
        target: Place,
        waiting: WaitingGradients | None,
    ) -> torch.Tensor:
        ctx.source = source
        ctx.target = target
        ctx.waiting = waiting
        ctx.set_materialize_grads(False)
        return copy_to(target, tensor)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        if grads[0] is None or ctx.waiting is None:
            return transfer(grads[0], ctx.target, ctx.source), None, None, None
        ctx.waiting.hold(ctx.target, grads[0])
        return ctx.waiting.stand_in(), None, None, None


def transfer(value: Any, source: Place, target: Place, *, gradients_wait: bool = False) -> Any:
    """``value`` (any pytree) with its tensors moved from ``source`` to ``target``.

    A value that stays at its place is passed on as it is. A ``torch.device`` becomes the target's.
    With ``gradients_wait``, gradients stay on ``target`` until the value's own backward runs.
    """
    if source == target:
        return value

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if not (leaf.requires_grad and torch.is_grad_enabled()) or is_transformed():
                return copy_to(target, leaf)
            waiting = None
            if gradients_wait and has_backward(leaf):
                waiting = WaitingGradients(source, leaf)
                leaf.register_hook(waiting.add_to)
            copied = _Transfer.apply(leaf, source, target, waiting)
            if waiting is not None:
                run_at_once(copied.grad_fn)
            return copied
        return target.device if isinstance(leaf, torch.device) else leaf

    return tree_map(move, value)


def has_backward(tensor: torch.Tensor) -> bool:
    """Was it computed from what needs gradients? (A leaf's hooks would outlive the step.)"""
    return tensor.grad_fn is not None


class _Receive(torch.autograd.Function):
    """A value from another stage as the start of a new graph; ``deliver`` gets its gradient.

    The anchor, which has no bytes, is what makes the result require grad. Unlike a leaf, the result
    is kept alive only by those who save it, and in-place operations on it are allowed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        tensor: torch.Tensor,
        source: Place,
        target: Place,
        deliver: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.deliver = deliver
        ctx.set_materialize_grads(False)
        return tensor.detach() if source == target else copy_to(target, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None, None]:
        if grads[0] is not None:
            ctx.deliver(grads[0])
        return None, None, None, None, None


def receive(
    tensor: torch.Tensor, source: Place, target: Place, deliver: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """``tensor`` on ``target``, cut off from its graph; ``deliver`` is given its gradient there.

    It gets it as soon as the last reader's backward has run, not when all else of the stage has: of
    a concatenation's gradient, a part would keep the whole until then.
    """
    with on(target):
        anchor = torch.zeros(0, requires_grad=True)
    received: torch.Tensor = _Receive.apply(anchor, tensor.detach(), source, target, deliver)
    assert received.grad_fn is not None
    run_at_once(received.grad_fn)
    return received


class _Root(torch.autograd.Function):
    """No numbers, over a tensor; in backward the tensor's gradient is what ``start`` gives.

    Given to ``torch.autograd.backward`` directly, the gradient would be held to the end of it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, start: Callable[[], Any]) -> torch.Tensor:
        ctx.start = start
        return tensor.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.start(), None


def gradient_root(tensor: torch.Tensor, waiting: WaitingGradients) -> torch.Tensor:
    """A tensor of no bytes whose backward starts that of ``tensor``, and then adds what waits for it.

    It does not keep the tensor alive, only its graph.
    """
    if not has_backward(tensor):
        return _Root.apply(tensor, lambda: waiting.add_to(None))  # type: ignore[no-any-return]
    tensor.register_hook(waiting.add_to)
    return _Root.apply(tensor, waiting.stand_in)  # type: ignore[no-any-return]


class _ParameterCopy(torch.autograd.Function):
    """A parameter's copy on another place; its gradient goes home to the parameter."""

    @staticmethod
    def forward(
        ctx: Any, primary: torch.Tensor, copied: torch.Tensor, home: Place, place: Place
    ) -> torch.Tensor:
        ctx.home = home
        ctx.place = place
        ctx.set_materialize_grads(False)
        return copied.detach()

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        return transfer(grads[0], ctx.place, ctx.home), None, None, None


def attach(primary: torch.Tensor, copied: torch.Tensor, home: Place, place: Place) -> torch.Tensor:
    """``copied`` at ``place``, as a differentiable function of ``primary`` at ``home``."""
    return _ParameterCopy.apply(primary, copied, home, place)  # type: ignore[no-any-return]
