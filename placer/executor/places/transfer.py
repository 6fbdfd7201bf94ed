"""Copies values between places so that autograd copies their gradients back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten

from placer._torch import (
    gradient_hook_tables,
    is_batch_of_gradients,
    is_transformed,
    run_at_once,
    storage_key,
)
from placer.executor.places.place import Place, on
from placer.program import unflatten

_MIN_CHUNK_NBYTES = 2**20  # copying less takes hardly less time
_MAX_CHUNKS = 64


def copy_to(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` on ``place``, even if the tensor is already on the torch device of ``place``."""
    with on(place):
        return tensor.to(place.device, copy=True)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Does ``tensor`` require gradients, and can what is computed of it?"""
    return tensor.requires_grad and not torch.is_inference_mode_enabled()


class PendingGradients:
    """Gradients of one value, kept where its readers computed them until the value's own backward.

    The device that made the value has its highest memory use just when that backward begins, while a
    reader has by then freed what it saved. So the gradient of a skip connection is better kept on the
    reader's device. Autograd gets a placeholder that takes no memory, and a hook on the value replaces
    it by the sum.
    """

    def __init__(self, home: Place, like: torch.Tensor) -> None:
        self._home = home
        self._zero = (like.dtype, like.device, like.shape)
        self._placeholder: torch.Tensor | None = None
        self._held: list[tuple[Place, torch.Tensor, bool, torch.cuda.Event | None]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, place: Place, grad: torch.Tensor, *, may_modify: bool = False) -> None:
        """Keep ``grad`` on ``place``; if it is a view of something larger, keep a copy.

        A view (as in the backward of a concatenation) would keep all of its memory alive. With
        ``may_modify`` nobody else refers to the tensor, so it may be changed in place.
        """
        whole = grad.untyped_storage().nbytes() if grad.layout == torch.strided else 0
        if whole > grad.nbytes and not torch.is_grad_enabled():
            may_modify = True
            with on(place):
                grad = grad.clone()
        made = torch.cuda.current_stream(grad.device).record_event() if grad.is_cuda else None
        self._held.append((place, grad, may_modify, made))

    def placeholder(self) -> torch.Tensor:
        """A zero gradient for the value on its home, expanded from one element."""
        dtype, device, shape = self._zero
        with on(self._home):
            self._placeholder = torch.zeros((), dtype=dtype, device=device)
            return self._placeholder.expand(shape)

    def added_to(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, or a view of it, with a hook that adds them before hooks of the model run."""
        hooks, _ = gradient_hook_tables(value)
        owners = (getattr(hook, "__self__", None) for hook in hooks.values())
        if not all(isinstance(owner, PendingGradients) for owner in owners):
            value = value.view_as(value)
        value.register_hook(self.add_to)
        return value

    def add_to(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The sum of ``grad``, which is on the value's home, and all pending gradients; forgets them.

        They are copied to the home one by one. Autograd keeps ``grad`` alive until this returns, so the
        sum is computed in place in the first copy, and later ones are added in chunks: there are never
        more than two tensors of this size.
        """
        may_modify = False  # whether ``grad`` may be changed in place
        placeholder, self._placeholder = self._placeholder, None
        if self._held and grad is not None and placeholder is not None:
            alone = storage_key(grad) == storage_key(placeholder)
            grad = None if alone else grad  # zeros need not be added
        with on(self._home):
            while self._held:
                place, pending, may_modify_pending, made = self._held.pop()
                if made is not None:
                    stream = torch.cuda.current_stream(pending.device)
                    stream.wait_event(made)
                    pending.record_stream(stream)
                dense = grad is not None and pending.layout == grad.layout == torch.strided
                if may_modify and grad is not None and dense:
                    _add_in_chunks(grad, pending, place, self._home)
                    del pending
                    continue
                came = transfer(pending, place, self._home)
                del pending
                is_own = (may_modify_pending or place != self._home) and not torch.is_grad_enabled()
                if grad is None:
                    grad, may_modify = came, is_own
                elif is_own and dense:
                    grad, may_modify = came.add_(grad), True
                else:
                    grad, may_modify = came + grad, not torch.is_grad_enabled()
                del came
        return grad


def _add_in_chunks(
    total: torch.Tensor, pending: torch.Tensor, source: Place, target: Place
) -> None:
    """Add ``pending``, which is on ``source``, to ``total``, which is on ``target``."""
    if source == target or not (total.is_contiguous() and pending.is_contiguous()):
        total.add_(transfer(pending, source, target))
        return
    size = max(_MIN_CHUNK_NBYTES // pending.element_size(), -(-pending.numel() // _MAX_CHUNKS))
    pieces = zip(total.view(-1).split(size), pending.view(-1).split(size), strict=True)
    for part, piece in pieces:
        part.add_(transfer(piece, source, target))


class _Transfer(torch.autograd.Function):
    """A copy to another place. Its gradient is copied back at once, or kept in ``pending``."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        source: Place,
        target: Place,
        pending: PendingGradients | None,
    ) -> torch.Tensor:
        ctx.source = source
        ctx.target = target
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return copy_to(target, tensor)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        if grads[0] is None or ctx.pending is None or is_batch_of_gradients(grads[0]):
            return transfer(grads[0], ctx.target, ctx.source), None, None, None
        ctx.pending.hold(ctx.target, grads[0])
        return ctx.pending.placeholder(), None, None, None


def transfer(value: Any, source: Place, target: Place, *, defer_gradients: bool = False) -> Any:
    """``value`` (any pytree) with its tensors copied from ``source`` to ``target``.

    Returns ``value`` itself if both are the same place. A ``torch.device`` in it becomes the target's.
    With ``defer_gradients``, gradients stay on ``target`` until the value's own backward runs.
    """
    if source == target:
        return value

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if not is_differentiable(leaf) or is_transformed():
                return copy_to(target, leaf)
            pending = None
            if defer_gradients and has_backward(leaf):
                pending = PendingGradients(source, leaf)
                leaf = pending.added_to(leaf)
            with torch.enable_grad():  # forward may enable gradients in a part of it
                copied = _Transfer.apply(leaf, source, target, pending)
            if pending is not None:
                run_at_once(copied.grad_fn)
            return copied
        return target.device if isinstance(leaf, torch.device) else leaf

    if isinstance(value, torch.Tensor):
        return move(value)
    leaves, spec = tree_flatten(value)
    return unflatten(map(move, leaves), spec)


def has_backward(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a ``grad_fn``. (Hooks on a leaf would stay after the step.)"""
    return tensor.grad_fn is not None


class _Receive(torch.autograd.Function):
    """A value from another stage as the start of a new graph; ``deliver`` is called with its gradient.

    The result requires gradients because ``anchor``, an empty tensor, does. Unlike a leaf, the result is
    kept alive only by operations that save it, and in-place operations on it are allowed.
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
    """``tensor`` on ``target``, detached from its graph; ``deliver`` is called with its gradient there.

    The call comes as soon as the last reader's backward has run, before the rest of the stage's
    backward. Otherwise a gradient that is a view, as in the backward of a concatenation, would keep the
    whole tensor alive for longer.
    """
    with on(target):
        anchor = torch.zeros(0, requires_grad=True)
    received: torch.Tensor = _Receive.apply(anchor, tensor.detach(), source, target, deliver)
    assert received.grad_fn is not None
    run_at_once(received.grad_fn)
    return received


class _Root(torch.autograd.Function):
    """An empty tensor whose backward gives ``tensor`` the gradient that ``start()`` returns.

    If the gradient were passed to ``torch.autograd.backward`` itself, it would stay alive to the end.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, start: Callable[[], Any]) -> torch.Tensor:
        ctx.start = start
        return tensor.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.start(), None


def gradient_root(tensor: torch.Tensor, pending: PendingGradients) -> torch.Tensor:
    """An empty tensor whose backward runs that of ``tensor`` from the sum of its pending gradients.

    It keeps the graph of ``tensor`` alive, but not its data.
    """
    if not has_backward(tensor):
        return _Root.apply(tensor, lambda: pending.add_to(None))  # type: ignore[no-any-return]
    return _Root.apply(pending.added_to(tensor), pending.placeholder)  # type: ignore[no-any-return]


class _ParameterCopy(torch.autograd.Function):
    """A parameter's copy on another place; its gradient is copied back to the parameter's home."""

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


def attach_copy(
    primary: torch.Tensor, copied: torch.Tensor, home: Place, place: Place
) -> torch.Tensor:
    """``copied`` on ``place`` as a differentiable function of ``primary``, which is on ``home``."""
    return _ParameterCopy.apply(primary, copied, home, place)  # type: ignore[no-any-return]
