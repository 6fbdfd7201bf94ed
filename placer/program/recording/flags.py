"""What forward asks about gradients, and which tensors it lets require them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from placer.program.types import Answers


class GradientFlags:
    """Whether gradients are enabled in a recording, and which inputs and parameters require them.

    Recording always enables them. ``grad`` is the answer to ``torch.is_grad_enabled()`` in the model's code;
    ``disabled``: they are not enabled while it is recorded, too, because forward does so in a part of it.
    """

    def __init__(self, *, grad: bool, disabled: bool) -> None:
        self._grad, self._disabled = grad, disabled
        self.enabled_now = not disabled  # has forward left gradients enabled at this point?
        self.enabled = False  # has forward enabled them, which they may not be in a call?
        self.asked = False  # has code asked whether they are enabled,
        self.asked_of_tensor = False  # or whether a tensor requires them?
        self.set: set[int] = set()  # ids of the tensors whose flag forward has set, changed or not
        self._before: Mapping[int, bool] = {}  # by id

    def watch(self, model: nn.Module, inputs: Sequence[Tensor]) -> Mapping[int, bool]:
        """Which inputs and parameters require gradients before forward runs; by id."""
        self._before = {id(x): x.requires_grad for x in (*model.parameters(), *inputs)}
        return self._before

    def is_watched(self, tensor: Tensor) -> bool:
        """Is it an input or a parameter?"""
        return id(tensor) in self._before

    def enable(self, *, on: bool, paused: bool) -> None:
        """Forward enables gradients or disables them; ``paused`` if a single node does."""
        self.enabled |= on and (self.enabled_now or self._disabled) and not paused
        self.enabled_now = on

    def ask(self) -> bool:
        """Note that code asks whether gradients are enabled; the answer."""
        self.asked = True
        return self._grad or self._disabled

    def ask_of(self, tensor: Tensor, *, found: bool) -> bool:
        """Note that code asks whether ``tensor`` requires gradients. Returns what it is told.

        ``found`` is what is true of the fake tensor.
        """
        self.asked_of_tensor = True
        return found and (self._grad or self._disabled or tensor.is_leaf)

    def answers(self, tensors: Iterable[Tensor]) -> Answers:
        """What forward asked; ``tensors`` are the caller's inputs and the parameters."""
        if self.asked_of_tensor:
            return self._grad, *(tensor.requires_grad for tensor in tensors)
        return (self._grad,) if self.asked or self.enabled else ()

    @property
    def needs_disabled(self) -> bool:
        """Has forward enabled gradients, although they are to be disabled and are not?"""
        return self.enabled and not (self._grad or self._disabled)
