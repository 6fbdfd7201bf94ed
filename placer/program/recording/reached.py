"""Follows what the inputs of a module reach while it runs: tensors, and state that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from placer._torch import DispatchMode, storage_key
from placer.operands import tensors_in, tensors_of_tree
from placer.program.alias import written_arguments
from placer.program.objects.originals import uses_original
from placer.program.recording.inside import Inside
from placer.program.state import StateNames


class Reached:
    """The tensors that depend on the inputs of a module, by the operators that it runs.

    ``written`` has the names of parameters and buffers that operators write, and whether what they write
    depends on the inputs; ``flags`` those of the parameters that any module has read, and whether they
    required gradients then. ``inside`` records the operators, if that is asked for. ``originals`` has the
    tensors of which those of ``model`` are copies, by id, with their names.
    """

    def __init__(self, model: nn.Module, originals: Mapping[int, tuple[str, Tensor]]) -> None:
        self._originals = originals
        self.written: dict[str, bool] = {}
        self.flags: dict[str, bool] = {}
        self.inside: Inside | None = None
        state = [*model.named_buffers(), *model.named_parameters()]
        self._state = StateNames(state)
        self._parameters = {id(tensor): name for name, tensor in model.named_parameters()}
        self._storages = {storage_key(tensor) for _, tensor in state}
        self._tensors = WeakTensorKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._tensors

    def begin(self, inputs: Any, *, inside: bool) -> None:
        """Begin anew with these inputs (any pytree)."""
        self.written = {}
        self._tensors = WeakTensorKeyDictionary()
        self.extend(inputs, inside=inside)

    def extend(self, inputs: Any, *, inside: bool) -> None:
        """Count these tensors among the inputs too."""
        self.inside = Inside(inputs, self._state) if inside else None
        for tensor in tensors_of_tree(inputs):
            self._tensors[tensor] = True

    def spread(self, func: Any, args: Any, kwargs: Any, value: Any) -> None:
        """Note what an operator computed from ``args`` and ``kwargs``.

        Raises ``CaptureError`` if it uses a parameter or buffer of the user's model itself, which a variable
        holds: the placed model has others.
        """
        if self.inside is not None:
            self.inside.note(func, args, kwargs, value)
        written = written_arguments(func)
        given = tensors_in(args, kwargs)
        depends = any(tensor in self._tensors for tensor in given)
        for tensor in given:
            if id(tensor) in self._originals:
                raise uses_original(self._originals[id(tensor)][0])
            if id(tensor) in self._parameters:
                self.flags.setdefault(self._parameters[id(tensor)], tensor.requires_grad)
        if depends:
            for tensor in tensors_in(value):
                self._tensors[tensor] = True
        for index, name in written:
            target = args[index] if index < len(args) else kwargs.get(name)
            for tensor in tensors_in(target):
                if depends:
                    self._tensors[tensor] = True
                for state in self._state.of(tensor):
                    self.written[state] = self.written.get(state, False) or depends

    def note_replaced(self, module: nn.Module, path: str = "") -> None:
        """Note the state of ``module``, at ``path``, whose data is another tensor's now (``x.data = y``)."""
        for name, tensor in (*module.named_buffers(path), *module.named_parameters(path)):
            if storage_key(tensor) not in self._storages:
                self.written[name] = True

    def end(self, value: Any) -> Inside | None:
        """The operators that ran since `begin` and made ``value``; what follows is not recorded."""
        inside, self.inside = self.inside, None
        if inside is not None:
            inside.end(value)
        return inside


class Follow(DispatchMode):
    """Follows what the inputs of the model reach."""

    def __init__(self, reached: Reached) -> None:
        super().__init__()
        self._reached = reached

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = func(*args, **kwargs)
        self._reached.spread(func, args, kwargs, value)
        return value
