"""Gives ``forward`` of a placed module the signature that the original model's ``forward`` has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


class MethodWithSignature:
    """A descriptor for ``method`` whose signature on an instance is ``signature_of(instance)``.

    Assign it in the class body. Hugging Face's ``Trainer`` needs the signature: it drops every column
    of a batch that ``inspect.signature(model.forward)`` does not name. An instance attribute of the
    same name overrides the method, as usual.
    """

    def __init__(
        self, method: Callable[..., Any], signature_of: Callable[[Any], inspect.Signature]
    ) -> None:
        self._method = method
        self._signature_of = signature_of
        # The last signature and the function that has it: a placed module asks at every call.
        self._latest: tuple[inspect.Signature, Callable[..., Any]] | None = None
        self.__doc__ = method.__doc__

    def __get__(self, module: Any, owner: type[Any] | None = None) -> Any:
        if module is None:
            return self._method
        signature = self._signature_of(module)
        if self._latest is None or self._latest[0] is not signature:
            self._latest = signature, self._function(signature)
        return MethodType(self._latest[1], module)

    def _function(self, signature: inspect.Signature) -> Callable[..., Any]:
        """A function that calls the method and has ``signature``, with ``self`` before it."""
        method = self._method

        @functools.wraps(method)
        def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        others = [p for name, p in signature.parameters.items() if name != "self"]
        vars(forward)["__signature__"] = signature.replace(parameters=[own, *others])
        return forward
