"""Flatten the arguments of a model's ``forward`` to a list of tensors, and rebuild them from it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from placer.errors import CaptureError, nearest
from placer.operands import leaves_with_paths
from placer.program.fake.packed import unflatten
from placer.program.objects.paths import Path, is_object, parts
from placer.program.result import ResultFormat, readable
from placer.program.rows.batch import BatchDim
from placer.program.rows.marks import is_mark, marked_dims, unmarked
from placer.program.types import TENSOR, AnyNumber, CallFormat, Input

_NONE: Mapping[str, Any] = {}
_UNPACK = (
    "pass its tensors and values in a tuple, list, dict or named tuple, or register its class with "
    "torch.utils._pytree (register_dataclass, register_pytree_node)"
)
_RECAPTURE = "call it as it was captured, or compile it again with these arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCall:
    """One call of ``forward``: its arguments bound to the signature and flattened."""

    signature: inspect.Signature
    in_spec: TreeSpec
    positional: Mapping[str, bool]
    leaf_names: tuple[str, ...]
    leaves: tuple[Any, ...]
    arguments: Mapping[str, Any]  # by parameter name, as the caller passed them
    # Names of leaves whose numbers may be others in other calls.
    numbers: frozenset[str] = frozenset()
    said: Mapping[str, BatchDim] = field(default_factory=dict)  # by the marks of the caller
    method: str = "forward"  # of the model, which is called

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves that are tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def constants(self) -> tuple[Any, ...]:
        """Per leaf: its value, ``TENSOR``, or an ``AnyNumber``."""
        pairs = zip(self.leaf_names, self.leaves, strict=True)
        return tuple(
            TENSOR
            if isinstance(leaf, Tensor)
            else AnyNumber(type(leaf), leaf)
            if name in self.numbers
            else leaf
            for name, leaf in pairs
        )


def bind_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    method: str = "forward",
) -> BoundCall:
    """Bind the arguments to a method of ``model``, apply defaults, and flatten them with pytree.

    Raises ``CaptureError`` if they do not fit the signature.
    """
    try:
        signature = inspect.signature(getattr(model, method))
        return bind_arguments(signature, args, kwargs or {}, method)
    except CaptureError as error:
        if args or kwargs:
            raise
        remedy = f"give an example input: placer.compile(model, spec, x); {error.remedy}"
        raise CaptureError(error.where, error.problem, remedy) from None


def describe_shapes(inputs: Sequence[Tensor | torch.Size]) -> str:
    """Shapes for a message: ``1x3x64x64, 1x64``."""
    shapes = [x.shape if isinstance(x, Tensor) else x for x in inputs]
    return ", ".join("x".join(map(str, shape)) or "a scalar" for shape in shapes)


def placeholder_names(call: BoundCall | CallFormat) -> list[str]:
    """A readable name for each tensor input, such as ``x`` or ``batch.0``."""
    return [n for n, c in zip(call.leaf_names, call.constants, strict=True) if c is TENSOR]


def rebuild_arguments(
    call: BoundCall | CallFormat, leaves: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The ``(args, kwargs)`` whose flattened leaves are ``leaves``.

    Arguments that the caller passed by keyword are passed by keyword again, and defaults are left out,
    because a decorator of ``forward`` may depend on that.
    """
    return place_arguments(call, call_arguments(call, leaves))


def call_arguments(call: BoundCall | CallFormat, leaves: Sequence[Any]) -> dict[str, Any]:
    """The arguments by parameter name, rebuilt from the flat list of their leaves."""
    arguments: dict[str, Any] = unflatten(leaves, call.in_spec)
    return arguments


def place_arguments(
    call: BoundCall | CallFormat, arguments: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` that pass ``arguments`` as the caller did."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, is_positional in call.positional.items():
        kind = call.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            args += arguments[name]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            kwargs |= arguments[name]
        elif is_positional:
            args.append(arguments[name])
        else:
            kwargs[name] = arguments[name]
    return tuple(args), kwargs


def arguments_roots(call: BoundCall, arguments: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """What the caller passes, as roots of a `Snapshot`: paths begin with the name of a parameter.

    Python itself makes the tuple of ``*args`` and the dict of ``**kwargs``.
    """
    made = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    roots: list[tuple[Path, Any]] = []
    for name, value in arguments.items():
        if call.signature.parameters[name].kind in made:
            roots += [((name, key), part) for key, part in parts(value)]
        else:
            roots.append(((name,), value))
    return roots


def objects_of(call: BoundCall | CallFormat) -> dict[str, Any]:
    """The functions among the arguments, and the objects that pytree does not flatten, by name."""
    pairs = zip(call.leaf_names, call.constants, strict=True)
    leaves = {name: x for name, x in pairs if x is not TENSOR and not isinstance(x, AnyNumber)}
    return {name: x for name, x in leaves.items() if is_object(x) or callable(x)}


def strides_of_copy(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy of ``tensor`` on another device, which a stage gets."""
    if tensor.layout != torch.strided:
        return torch.empty(tensor.shape, device="meta").stride()
    # By way of its strides, because in a transform such as vmap no tensor can be made like it.
    return torch.empty_like(
        torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    ).stride()


def make_call_format(
    bound: BoundCall, result: ResultFormat, batch_dims: Sequence[BatchDim]
) -> CallFormat:
    """The format of calls with arguments like ``bound`` and results of the format ``result``."""
    found = zip(placeholder_names(bound), bound.tensors, batch_dims, strict=True)
    return CallFormat(
        method=bound.method,
        said=bound.said,
        signature=bound.signature,
        in_spec=bound.in_spec,
        positional=bound.positional,
        leaf_names=bound.leaf_names,
        constants=bound.constants,
        inputs=tuple(
            Input(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                batch_dim=dim,
                strides=strides_of_copy(tensor),
            )
            for name, tensor, dim in found
        ),
        result=result,
    )


def flatten_call(call: CallFormat, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor leaves of a call, in the order of the graph's placeholders.

    Raises ``CaptureError``, which names the argument, if the call differs from the captured one
    (`call_difference`) or a tensor has another number of dimensions.
    """
    bound = bind_arguments(call.signature, args, kwargs)
    if (difference := call_difference(call, bound)) is not None:
        raise difference
    return call_tensors(call, bound)


def call_tensors(call: CallFormat, bound: BoundCall) -> list[Tensor]:
    """The tensors of ``bound``, in the order of the graph's placeholders.

    Raises ``CaptureError`` for a tensor whose number of dimensions differs from the captured one's.
    """
    given = dict(zip(bound.leaf_names, bound.leaves, strict=True))
    # By name: the keys of a dict may come in another order than at capture.
    tensors = [given[each.name] for each in call.inputs]
    for each, tensor in zip(call.inputs, tensors, strict=True):
        if tensor.dim() != len(each.shape):
            raise CaptureError(
                each.name,
                f"a tensor of {tensor.dim()} dimensions is given; {len(each.shape)} were captured "
                f"(shape {list(each.shape)})",
                _RECAPTURE,
            )
    return tensors


def call_difference(call: CallFormat, bound: BoundCall) -> CaptureError | None:
    """An error for the first argument of ``bound`` that differs from the captured call, or None.

    An argument differs if it is missing, unknown or of another structure, if it is a tensor where a constant
    was captured or vice versa, if it is another constant, or if a mark says that it is split otherwise.
    """
    if call.method != bound.method:
        found = f"the method {bound.method} is called where {call.method} was captured"
        return CaptureError(bound.method, found, _RECAPTURE)
    given = dict(zip(bound.leaf_names, bound.leaves, strict=True))
    if missing := [name for name in call.leaf_names if name not in given]:
        found = f"this argument is missing; the call has {sorted(given)}"
        return CaptureError(missing[0], found, _RECAPTURE)
    if extra := [name for name in given if name not in call.leaf_names]:
        found = f"the captured call had no such argument, only {list(call.leaf_names)}"
        return CaptureError(extra[0], found, _RECAPTURE)
    for name, constant in zip(call.leaf_names, call.constants, strict=True):
        value = given[name]
        if isinstance(value, Tensor) and constant is not TENSOR:
            found = f"a tensor is given where {_spell(constant)} was captured"
        elif type(value).__module__ == "numpy" and constant is TENSOR:
            remedy = f"pass a tensor: torch.from_numpy({name})"
            return CaptureError(name, "is a numpy array, not a tensor", remedy)
        elif isinstance(constant, AnyNumber):
            if type(value) is constant.kind:
                continue
            found = (
                f"{_spell(value)} is given where a number ({constant.kind.__name__}) was captured"
            )
        elif not isinstance(value, Tensor) and constant is TENSOR:
            found = f"{_spell(value)} is given where a tensor was captured"
        elif constant is not TENSOR and value is not constant and is_object(value):
            kind = type(value).__qualname__
            found = f"is an object of type {kind}, but not the captured one, and placer does not look into it"
            return CaptureError(name, found, _UNPACK)
        elif constant is not TENSOR and not _same_constant(value, constant):
            found = (
                f"{_spell(value)} is given, but {_spell(constant)} was captured and is part of the "
                "program"
            )
        else:
            continue
        return CaptureError(name, found, _RECAPTURE)
    for each in call.inputs:
        if each.name in bound.said and bound.said[each.name] != each.batch_dim:
            return CaptureError(each.name, "is split otherwise than it was captured", _RECAPTURE)
    return None


def changed_numbers(call: CallFormat, bound: BoundCall) -> set[str]:
    """The names of all numbers that are others in ``bound`` than in ``call``, or that any may be.

    Empty if the calls differ in something else too.
    """
    given = dict(zip(bound.leaf_names, bound.leaves, strict=True))
    example = dict(zip(call.leaf_names, call.constants, strict=True))
    found = {name for name, c in example.items() if isinstance(c, AnyNumber)}
    for name, value in given.items():
        before = example.get(name)
        if type(value) in (int, float) and type(before) is type(value) and before != value:
            example[name] = value
            found.add(name)
    same = replace(call, constants=tuple(example.values()))
    return found if call_difference(same, bound) is None else set()


def rebuild_call(
    call: BoundCall | CallFormat, tensors: Sequence[Tensor], numbers: Mapping[str, Any] = _NONE
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The ``(args, kwargs)`` whose tensor leaves are ``tensors``; the inverse of `flatten_call`.

    ``numbers`` are those that may be others in every call, by name; the default are the example's.
    """
    return rebuild_arguments(call, call_leaves(call, tensors, numbers))


def call_leaves(
    call: BoundCall | CallFormat, tensors: Sequence[Tensor], numbers: Mapping[str, Any] = _NONE
) -> list[Any]:
    """The leaves of a call with these ``tensors`` and ``numbers``, as for `rebuild_call`."""
    remaining = iter(tensors)
    return [
        next(remaining)
        if constant is TENSOR
        else numbers.get(name, constant.value)
        if isinstance(constant, AnyNumber)
        else constant
        for name, constant in zip(call.leaf_names, call.constants, strict=True)
    ]


def unflatten_output(call: CallFormat, leaves: Sequence[Any]) -> Any:
    """What ``forward`` would have returned, rebuilt from the flat list of its leaves."""
    return call.result.unflatten(leaves)


def bind_arguments(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: str = "forward",
) -> BoundCall:
    """Bind arguments to the ``signature`` of ``method``, apply defaults, and flatten them with pytree.

    Raises ``CaptureError`` if they do not fit.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise _mismatch(signature, kwargs, error, method) from None
    positional = {name: name not in kwargs for name in bound.arguments}
    bound.apply_defaults()
    arguments, said = dict(bound.arguments), dict[str, BatchDim]()
    paths, in_spec = leaves_with_paths(arguments)
    if any(is_mark(leaf) for _, leaf in paths):
        said = marked_dims(arguments)
        paths, in_spec = leaves_with_paths(unmarked(arguments))
        arguments = {k: v.value if is_mark(v) else v for k, v in arguments.items()}
    return BoundCall(
        method=method,
        said=said,
        signature=signature,
        in_spec=in_spec,
        positional=positional,
        leaf_names=tuple(readable(path) for path, _ in paths),
        leaves=tuple(leaf for _, leaf in paths),
        arguments=arguments,
    )


def _mismatch(
    signature: inspect.Signature, kwargs: Mapping[str, Any], error: TypeError, method: str
) -> CaptureError:
    """The error for arguments that do not fit; it names an unknown keyword and the nearest valid one."""
    parameters = signature.parameters.values()
    unknown = [name for name in kwargs if name not in signature.parameters]
    if not unknown or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return CaptureError("arguments", f"{error}", f"{method} takes {signature}")
    close = nearest(unknown[0], signature.parameters)
    hint = f"did you mean {close!r}? " if close else ""
    problem = f"{method} has no argument {unknown[0]!r}"
    return CaptureError("arguments", problem, f"{hint}it takes {signature}")


def _spell(value: Any) -> str:
    """``repr(value)`` for a message; only the type if the repr is long, as for an array."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__qualname__}"


def _same_constant(value: Any, constant: Any) -> bool:
    if value is constant:
        return True
    try:
        return type(value) is type(constant) and bool(value == constant)
    except Exception:  # == does not return a bool, as for an array
        return False
