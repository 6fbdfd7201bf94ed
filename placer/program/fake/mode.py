"""A faster ``FakeTensorMode``, which caches the result shapes of operators.

The layers of a model repeat, and placer runs a model on fake tensors several times. A hit in torch's own
cache of fake results takes 130 us, and a miss runs a Python kernel, which takes 1 to 10 ms.

::

    operator ── a view? ────────────► C++ finds its shape
       │
       ├── seen with such tensors? ─► the results' shapes as before        (_known)
       ├── a shape rule? ───────────► the results' shapes                  (placer.program.fake.shapes)
       └── else ────────────────────► torch's fake kernel
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map_only

from placer._torch import (
    READS_DEVICE,
    FakeTensors,
    TraceableMode,
    as_meta,
    without_modes,
    without_torch_function,
)
from placer.operands import tensors_in
from placer.program.fake.shapes import LIST_RULES, SHAPE_RULES, NewTensor, Recipe

_CPU, _META = torch.device("cpu"), torch.device("meta")
_OPERATOR = type(torch.ops.aten.clone.default)

# Views, which C++ computes on meta tensors in a few microseconds
CPP_VIEWS = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("view", "default"),
        ("_unsafe_view", "default"),
        ("slice", "Tensor"),
        ("select", "int"),
        ("unsqueeze", "default"),
        ("squeeze", "dim"),
        ("permute", "default"),
        ("transpose", "int"),
        ("t", "default"),
        ("expand", "default"),
        ("as_strided", "default"),
        ("detach", "default"),
        ("alias", "default"),
        ("unbind", "int"),
        ("split", "Tensor"),
        ("split_with_sizes", "default"),
    )
}

# Other operators whose kernels for meta tensors are in C++, used where there is no recipe
CPP_KERNELS = {getattr(torch.ops.aten, name).default for name in ("clone", "bmm", "mm", "_softmax")}

# Recipes for the results of operators. Results depend on the key alone, so there is one cache for the whole
# process, as in torch: capture, costs and dry runs need the same results.
_known: dict[Hashable, Recipe] = {}


class _NotKnownByShape(Exception):
    """An argument whose result depends on more than shapes and plain values."""


class Guess(Protocol):
    """Gives possible results of operators that depend on the values of fake tensors."""

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func`` on values that are known; ``NotImplemented`` where one is not."""

    def answer(self, func: Any, args: Any, kwargs: Any, refused: Exception) -> Any:
        """A possible result of ``func``, which raised ``refused`` on fake tensors; or raises ``refused``."""


class Observer(Protocol):
    """Runs in place of every operator under a `FakeMode`."""

    def __call__(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """The result of ``func(*args, **kwargs)``, which ``run()`` computes."""


class FakeMode(TraceableMode, FakeTensorMode):
    """A ``FakeTensorMode`` for CPU tensors that caches the result shapes of operators.

    If an operator needs the values of tensors and ``guess`` is set, ``guess`` gives the result. As with
    `placer._torch.DispatchMode`, ``torch.compile`` may trace code that runs under this mode.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.guess: Guess | None = None
        self._observer: Observer | None = None
        self._tensors = FakeTensors(self, _CPU)

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """In this block, ``observer`` runs the operators; not those that it or a fake kernel calls.

        A second dispatch mode would cost another pass through torch's dispatcher.
        """
        before, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READS_DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        observer = self._observer
        with without_torch_function():
            if observer is None:
                return self._guess(func, types, args, kwargs)
            self._observer = None
            try:
                return observer(func, args, kwargs, lambda: self._guess(func, types, args, kwargs))
            finally:
                self._observer = observer

    def detach(self, tensor: Tensor) -> Tensor:
        """``tensor.detach()`` for a fake tensor of this mode, without calling any dispatch mode."""
        with as_meta(self):
            data = tensor.detach()
        return self._tensors.make(data)

    def _guess(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        guess = self.guess
        if guess is None:
            return self._run(func, types, args, kwargs)
        # Operators that the kernel itself calls get no guesses.
        self.guess = None
        try:
            known = guess.compute(func, args, kwargs)
            return self._run(func, types, args, kwargs) if known is NotImplemented else known
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return guess.answer(func, args, kwargs, error)
        finally:
            self.guess = guess

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator in one of the ways shown in this module's docstring."""
        way = _ways.get(id(func)) or _way_of(func)
        if way.writes and not all(isinstance(x, FakeTensor) for x in tensors_in(args, kwargs)):
            return self._write_copies(func, types, args, kwargs)
        if way.is_view and self._is_plain(args[0]):
            return self._run_in_cpp(func, args, kwargs)
        if func is _READS_NUMBER and type(args[0]) is FakeTensor:
            return _read_number(args[0])
        if func is _LIFTS and type(args[0]) is Tensor and _is_number(args[0]):
            return self._lift(args[0])
        if way.list_rule is not None and all(map(self._is_plain, tensors_in(args))):
            recipe = way.list_rule(*args, **kwargs)
            if recipe is not None:
                return self._follow(recipe, args)
        if not way.by_shape:
            return self._ask_torch(func, types, args, kwargs)
        try:
            key = (
                id(func),
                torch.get_default_dtype(),
                torch.is_inference_mode_enabled(),
                *map(self._key_of, args),
                *((name, self._key_of(value)) for name, value in kwargs.items()),
            )
        except _NotKnownByShape:
            return self._ask_torch(func, types, args, kwargs)
        recipe = _known.get(key)
        if recipe is None:
            found = None if way.shape_rule is None else way.shape_rule(*args, **kwargs)
            if found is None:
                return self._learn(key, func, types, args, kwargs)
            recipe = _known[key] = found
        return self._follow(recipe, args)

    def _write_copies(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that writes to real tensors, such as a global one, on their fake copies.

        Torch would run some of these, such as ``add_`` of a number, on the real tensor.
        """
        originals: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            copied: Tensor = self.from_tensor(tensor)
            originals[id(copied)] = tensor
            return copied

        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        result = self._ask_torch(func, types, args, kwargs)
        return tree_map_only(Tensor, lambda x: originals.get(id(x), x), result)

    def _ask_torch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result: Any = self.dispatch(func, types, args, kwargs)
        if func not in _UNASKED:
            return result
        return tuple(x if asked else None for x, asked in zip(result, args[-1], strict=True))

    def _run_in_cpp(self, func: Any, args: Any, kwargs: Any) -> Any:
        with as_meta(self):
            data = func(*args, **kwargs)
        if isinstance(data, Tensor):
            return self._tensors.make(data)
        return [self._tensors.make(part) for part in data]

    def _lift(self, number: Tensor) -> Tensor:
        """A fake tensor with a known value: the single number in ``number``, a real tensor."""
        with without_modes():
            known = number.clone()
            fake = self._tensors.make(torch.empty((), dtype=number.dtype, device=_META))
        fake.constant = known
        self.fake_tensor_converter.add_constant_storage_mapping(fake)
        return fake

    def _is_plain(self, argument: Any) -> bool:
        """Is it not a tensor, or a fake CPU tensor of this mode whose value is not known?"""
        if type(argument) is FakeTensor:
            return (
                argument.fake_mode is self
                and argument.constant is None
                and argument.fake_device == _CPU
            )
        return not isinstance(argument, Tensor)

    def _key_of(self, argument: Any) -> Hashable:
        """Everything that a result can depend on; numbers with their types, since ``1 == 1.0 == True``.

        Where a tensor begins in its storage is left out: a new tensor is the same for every row of another.

        Raises ``_NotKnownByShape`` for an argument of another kind.
        """
        kind = type(argument)
        if kind is FakeTensor:
            if not self._is_plain(argument) or argument.layout is not torch.strided:
                raise _NotKnownByShape
            return (
                argument.shape,
                argument.stride(),
                argument.dtype,
                argument.requires_grad,
                argument.is_neg(),
                argument.is_conj(),
            )
        if kind in _PLAIN:
            return kind, argument
        if kind is list or kind is tuple:
            return kind, *map(self._key_of, argument)
        raise _NotKnownByShape

    def _learn(self, key: Hashable, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Ask torch, and remember how to make the results if they depend on the key alone."""
        given = tensors_in(args, kwargs)
        before = [(x.shape, x.stride()) for x in given]
        if func in CPP_KERNELS:
            result = self._run_in_cpp(func, args, kwargs)
        else:
            result = self._ask_torch(func, types, args, kwargs)
        found = tensors_in(result)
        if any(x.layout is not torch.strided for x in (*given, *found)):
            return result
        several = type(result) is tuple
        storages = [x.untyped_storage() for x in given]
        made = [self._describe(x, args, storages) for x in (result if several else (result,))]
        unchanged = before == [(x.shape, x.stride()) for x in given]
        apart = len({id(x.untyped_storage()) for x in found}) == len(found)
        if unchanged and apart and _UNKNOWN not in made:
            _known[key] = several, tuple(made)
        return result

    def _describe(self, result: Any, args: Any, storages: list[Any]) -> Any:
        """How to make ``result`` again; `_UNKNOWN` if it shares memory or is not a plain fake tensor."""
        if result is None:
            return None
        for position, argument in enumerate(args):
            if result is argument:
                return position
        if type(result) is not FakeTensor or not self._is_plain(result):
            return _UNKNOWN
        if result.is_neg() or result.is_conj():
            return _UNKNOWN
        storage = result.untyped_storage()
        made = NewTensor(tuple(result.shape), result.stride(), result.dtype)
        if any(storage is other for other in storages) or result.requires_grad:
            return _UNKNOWN
        return made if storage.nbytes() == made.nbytes else _UNKNOWN

    def _follow(self, recipe: Recipe, args: Any) -> Any:
        several, made = recipe
        results = tuple(
            self._make(x) if type(x) is NewTensor else x if x is None else args[x] for x in made
        )
        return results if several else results[0]

    def _make(self, made: NewTensor) -> Tensor:
        data = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=_META)
        return self._tensors.make(data)


# Torch 2.15's fake kernels for these return all gradients; the real kernels compute only those that
# the mask asks for. A split backward asks for the input's gradient first and for the others later.
_UNASKED = {torch.ops.aten.native_batch_norm_backward.default}


_LIFTS = torch.ops.aten.lift_fresh.default
_READS_NUMBER = torch.ops.aten._local_scalar_dense.default


def _is_number(tensor: Tensor) -> bool:
    """Is it a zero-dimensional CPU tensor that does not require a gradient?"""
    return not tensor.dim() and tensor.device == _CPU and not tensor.requires_grad


def _read_number(tensor: FakeTensor) -> Any:
    """``tensor.item()``. Raises ``DataDependentOutputException``, as torch does, if the value is unknown."""
    if tensor.constant is None:
        raise DataDependentOutputException(_READS_NUMBER)
    with without_modes():
        return tensor.constant.item()


_UNKNOWN = object()
_PLAIN = {
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}


class _Way(NamedTuple):
    """What is known of an operator. It has the operator, so that no other one gets the same id."""

    func: Any
    writes: bool
    is_view: bool  # one of `CPP_VIEWS`
    list_rule: Callable[..., Recipe | None] | None
    shape_rule: Callable[..., Recipe | None] | None
    by_shape: bool  # see `_depends_on_shapes`


# By the id of the operator, whose hash torch computes in Python: there would be five look-ups.
_ways: dict[int, _Way] = {}


def _way_of(func: Any) -> _Way:
    return _ways.setdefault(
        id(func),
        _Way(
            func,
            type(func) is _OPERATOR and func._schema.is_mutable,
            func in CPP_VIEWS,
            LIST_RULES.get(func),
            SHAPE_RULES.get(func),
            _depends_on_shapes(func),
        ),
    )


def _depends_on_shapes(func: Any) -> bool:
    """Do the results of ``func`` depend only on shapes and plain values, and share no memory?"""
    if type(func) is not _OPERATOR or func.namespace not in ("aten", "prims"):
        return False
    # The last reads offsets
    if func.is_view or "lift" in func.name() or "as_strided" in func.name():
        return False
    refused = {torch.Tag.data_dependent_output, torch.Tag.inplace_view}
    if func is not torch.ops.aten.index.Tensor:  # its shape depends on values only for masks
        refused.add(torch.Tag.dynamic_output_shape)
    return not refused & set(func.tags)


def detach_fake(tensor: Tensor) -> Tensor:
    """``tensor.detach()`` without calling any dispatch mode, which is ten times as fast for a fake tensor."""
    mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
    if isinstance(mode, FakeMode):
        with without_torch_function():
            return mode.detach(tensor)
    with without_modes():
        return tensor.detach()
