"""``placed.forward`` has the signature of the original's ``forward``, which trainers look at."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


class ForwardOfOriginal:
    """A method whose signature is ``signature_of(module)``, to be assigned in the class body.

    Hugging Face's ``Trainer`` drops the columns of a batch that ``inspect.signature(model.forward)``
    does not name. As a method it may be replaced on an instance.
    """

    def __init__(
        self, method: Callable[..., Any], signature_of: Callable[[Any], inspect.Signature]
    ) -> None:
        self._method = method
        self._signature_of = signature_of
        self.__doc__ = method.__doc__

    def __get__(self, module: Any, owner: type[Any] | None = None) -> Any:
        method = self._method
        if module is None:
            return method

        @functools.wraps(method)
        def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = self._signature_of(module)
        others = [p for name, p in signature.parameters.items() if name != "self"]
        vars(forward)["__signature__"] = signature.replace(parameters=[own, *others])
        return MethodType(forward, module)
