"""Which module and tensor of a user's model each part of its placed copy was copied from.

A global variable or a closure may hold a part of the model that was given to `placer.compile`. Where code of
the model uses it, the same part of the placed copy is meant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from placer.errors import CaptureError
from placer.program.failure import locate_caller


class _Original(NamedTuple):
    module: weakref.ref[nn.Module]
    tensors: Mapping[str, weakref.ref[Tensor]]  # parameters and buffers, by name


# Part of a copy -> what it was copied from, the first at the beginning
_originals: MutableMapping[nn.Module, tuple[_Original, ...]] = WeakIdKeyDictionary()


def note_originals(model: nn.Module, copied: nn.Module) -> None:
    """Note that each module of ``copied`` is a copy of that of ``model``."""
    for original, module in zip(model.modules(), copied.modules(), strict=True):
        tensors = {name: weakref.ref(tensor) for name, tensor in _own_tensors(original)}
        before = _originals.get(original, ())
        _originals[module] = (*before, _Original(weakref.ref(original), tensors))


def originals_of(module: nn.Module) -> list[nn.Module]:
    """``module`` and the modules that it was copied from, as far as they still exist."""
    copied = (each.module() for each in _originals.get(module, ()))
    return [module, *(original for original in copied if original is not None)]


def original_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of ``model``, and those that they were copied from, with their names."""
    for path, module in model.named_modules():
        pairs = _own_tensors(module)
        for each in _originals.get(module, ()):
            pairs += [(n, x) for n, ref in each.tensors.items() if (x := ref()) is not None]
        yield from ((f"{path}.{name}".lstrip("."), tensor) for name, tensor in pairs)


def refusing_originals(model: nn.Module) -> Callable[[nn.Module], None]:
    """A function that raises ``CaptureError`` for a module of ``model``, or one that it was copied from."""
    modules = model.named_modules()
    known = {id(each): (path, each) for path, module in modules for each in originals_of(module)}

    def refuse(module: nn.Module) -> None:
        if id(module) in known:
            raise uses_original(known[id(module)][0])

    return refuse


def uses_original(name: str) -> CaptureError:
    """The error for code that stays whole, and in which a variable holds the part ``name`` of the model."""
    return CaptureError(
        name or "the model",
        f"is used through a variable in code that cannot be recorded ({locate_caller()}), where the variable "
        "would hold that of the model before it was placed",
        "use it through self, in a module that holds it",
    )


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    held = (*module._buffers.items(), *module._parameters.items())
    return [(name, tensor) for name, tensor in held if tensor is not None]
