"""Targets of graph nodes for operations of a model that torch has no function for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import TreeSpec
from torch.utils.checkpoint import checkpoint

from placer._torch import without_modes
from placer.program.fake.packed import unflatten
from placer.program.objects.copying import copy_module
from placer.program.objects.reachable import find_reachable_state
from placer.program.objects.restore import Snapshot, restored
from placer.program.result import flatten_result, result_of_values

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]

# Settings of torch that decide which kernels run, and so what can be differentiated twice: read, write
_SETTINGS: tuple[_Setting, ...] = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: torch.backends.cudnn.enabled,
        lambda value: setattr(torch.backends.cudnn, "enabled", value),
    ),
)


class Modes(NamedTuple):
    """The modes of a thread, and settings of torch, that a ``with`` block in forward may change."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]  # device type, enabled, dtype
    settings: tuple[Any, ...] = ()  # the values of `_SETTINGS`

    @classmethod
    def current(cls) -> Modes:
        is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            (
                ("cpu", is_enabled("cpu"), dtype_of("cpu")),
                ("cuda", is_enabled("cuda"), dtype_of("cuda")),
            ),
            tuple([read() for read, _ in _SETTINGS]),
        )


class UnderModes:
    """Calls ``function`` with gradients, autocast and settings as they were at that point of forward.

    A block ``torch.autocast(x.device.type)`` is recorded on the CPU, but must affect the device of the stage.
    So a setting that forward changed only for the CPU is changed for CUDA too.
    """

    def __init__(self, function: Callable[..., Any], inside: Modes, outside: Modes) -> None:
        self.function = function
        self.grad = inside.grad if inside.grad != outside.grad else None
        changed = [
            now for now, was in zip(inside.autocast, outside.autocast, strict=True) if now != was
        ]
        self.autocast = tuple(changed)
        if [kind for kind, _, _ in changed] == ["cpu"]:
            _, enabled, dtype = changed[0]
            default = {kind: dtype for kind, _, dtype in outside.autocast}
            self.autocast += (
                ("cuda", enabled, default["cuda"] if dtype == default["cpu"] else dtype),
            )
        pairs = zip(inside.settings, outside.settings, strict=True)
        self.settings = {i: now for i, (now, was) in enumerate(pairs) if now != was}
        name = getattr(function, "__name__", "call").strip("_")  # of the node, which users see
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if kind == "cuda" and not torch.cuda.is_available():
                    continue  # autocast would only warn
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            for index, value in self.settings.items():
                read, write = _SETTINGS[index]
                stack.callback(write, read())
                write(value)
            return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"UnderModes({name}, grad={self.grad}, autocast={self.autocast}, {self.settings})"


class CallMethod:
    """Calls the method ``name`` of its first argument."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __call__(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.__name__)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"CallMethod({self.__name__})"


def call_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``module(*args, **kwargs)``, for a node that gets the module as an argument."""
    return module(*args, **kwargs)


def present_value(value: Tensor) -> Tensor:
    """``value`` itself: it marks the end of the operations that write to an input."""
    return value


def get_field(value: Any, name: str) -> Any:
    """The field ``name`` of a dataclass that a module returned."""
    return getattr(value, name)


class CallInModes:
    """Calls a module that forward has put into other modes than those in which it was when forward began.

    ``training`` are the flags of the module and its submodules, in the order of ``modules()``.
    """

    def __init__(self, training: tuple[bool, ...]) -> None:
        self.training = training
        self.__name__ = self.__qualname__ = "call_in_modes"
        self.__module__ = __name__

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        modules = list(module.modules())
        before = [each.training for each in modules]
        for each, flag in zip(modules, self.training, strict=True):
            each.training = flag
        try:
            return module(*args, **kwargs)
        finally:
            for each, flag in zip(modules, before, strict=True):
                each.training = flag

    def __repr__(self) -> str:
        return f"CallInModes({self.training})"


SELECTS: tuple[Callable[..., Any], ...] = (operator.getitem, get_field)
"""Targets of nodes that select one of several values. A stage passes on only the selected value."""


class Checkpointed:
    """Calls a module under ``torch.utils.checkpoint``, as the model's code did.

    ``differentiated``: the model's code passed the reentrant checkpoint an extra input that requires a
    gradient, often a dummy parameter, so that the module's parameters get gradients even if none of the
    module's own inputs requires one. Reentrant checkpointing cannot do that without such an input, so the
    call is non-reentrant instead.
    """

    def __init__(self, *, use_reentrant: bool, differentiated: bool = False) -> None:
        self.use_reentrant = use_reentrant
        self.differentiated = differentiated
        self.__name__ = self.__qualname__ = "checkpoint"
        self.__module__ = __name__

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        function = partial(module, **kwargs) if kwargs else module
        reentrant = self.use_reentrant
        if self.differentiated and not any(_requires_grad(arg) for arg in args):
            reentrant = False
        return checkpoint(function, *args, use_reentrant=reentrant)

    def __repr__(self) -> str:
        more = ", differentiated=True" if self.differentiated else ""
        return f"Checkpointed(use_reentrant={self.use_reentrant}{more})"


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class ApplyFunction:
    """Calls ``apply`` of a custom ``torch.autograd.Function``, which is a node with its own backward."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"{function.__name__}_apply"
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)

    def __repr__(self) -> str:
        return f"ApplyFunction({self.function.__module__}.{self.function.__qualname__})"


class CallScript:
    """Calls a function of TorchScript, which branches on sizes and values by itself."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = str(function.name)
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"CallScript({self.__name__}, {self.function.code!r})"


class RequireValid:
    """Raises ``ValueError`` unless all of ``valid`` is true, as `torch.distributions` does for ``value``."""

    def __init__(self, place: str, rule: str) -> None:
        self.place, self.rule = place, rule
        self.__name__ = self.__qualname__ = "require_valid"
        self.__module__ = __name__

    def __call__(self, valid: Tensor, value: Tensor) -> None:
        if isinstance(valid, FakeTensor) or valid.all():
            return
        kind = f"{type(value).__name__} of shape {tuple(value.shape)}"
        raise ValueError(
            f"Expected {self.place} ({kind}) {self.rule}, but found invalid values:\n{value}"
        )

    def __repr__(self) -> str:
        return f"RequireValid({self.place}, {self.rule})"


class BuildTree:
    """Builds a dataclass or other pytree from its leaves."""

    def __init__(self, spec: TreeSpec, kind: type[Any]) -> None:
        self.spec = spec
        self.__name__ = self.__qualname__ = f"build_{kind.__name__}"
        self.__module__ = __name__

    def __call__(self, *leaves: Any) -> Any:
        return unflatten(leaves, self.spec)

    def __repr__(self) -> str:
        return f"BuildTree({self.spec})"


class WholeRoot:
    """Calls the whole model, if its own ``forward`` cannot be recorded.

    The arguments are the parameters and buffers ``names``, in this order, and then the inputs.
    ``skeleton`` is the model with its tensors on ``meta``; writes to buffers go to the arguments.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        names: tuple[str, ...],
        rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        expected: tuple[TreeSpec, Mapping[int, Any]],
    ) -> None:
        self.skeleton = skeleton
        self.names = names
        self.rebuild = rebuild
        self.expected = expected  # of the result: its containers, and its leaves that are fixed
        self.__name__ = self.__qualname__ = f"whole_{type(skeleton).__name__}"
        self.__module__ = __name__

    def __call__(self, *values: Any) -> list[Any]:
        state: Mapping[str, Tensor] = dict(zip(self.names, values, strict=False))
        args, kwargs = self.rebuild(list(values[len(self.names) :]))
        model, code = self.skeleton, None
        if any(isinstance(value, FakeTensor) for value in values):  # leaves nothing behind
            with without_modes():
                model = copy_module(model)
                code = find_reachable_state(model)
        with restored(Snapshot((), code)):
            result = torch.func.functional_call(model, dict(state), args, kwargs, tie_weights=False)
        leaves, form = flatten_result(result)
        spec, fixed = self.expected
        if form.spec != spec or any(leaves[i] != value for i, value in fixed.items()):
            raise result_of_values(type(self.skeleton).__name__)
        return leaves

    def __repr__(self) -> str:
        return f"WholeRoot({type(self.skeleton).__qualname__}, {self.names})"
