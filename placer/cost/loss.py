"""The loss that a training step ends with, as plans count it: the one that is named, or one that is assumed.

It runs on the last stage's device, once for each micro-batch, outside of autocast. Estimates
(`placer.cost.record`) and dry runs (`placer.simulation`) call the same `Loss`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from placer._torch import without_modes
from placer.errors import PlacerError
from placer.importing import find_callable, user_failure
from placer.program import result_tensors
from placer.spec.loss import MEAN_SQUARE, OF_CLASSES, LossSpec, parse_target

_CLASSES = "cross_entropy"  # assumed for results with classes
_SHORT = 64  # elements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """A loss: ``function(result, target)``, or ``function(result)`` where ``target`` is None.

    ``target`` (any pytree) is that of the whole batch; only shapes and types of its tensors are used.
    ``spec`` is how a spec names the loss; None if it cannot, or if the loss is ``assumed``. Estimates call
    it for a micro-batch also if it is for the ``whole_batch``; a dry run then shows the difference.
    """

    function: Callable[..., Tensor]
    name: str
    target: Any = None
    spec: LossSpec | None = None
    assumed: bool = False
    whole_batch: bool = False  # it is computed once, over all micro-batches and replicas

    def __call__(self, result: Any, target: Any = None) -> Tensor:
        """The loss of a micro-batch. Raises ``PlacerError`` if it is not a scalar tensor."""
        with _KnownRanges():
            loss = self.function(result) if target is None else self.function(result, target)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        kind = f"tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        remedy = "return a scalar, for example loss.mean()"
        raise PlacerError(f"loss {self.name}", f"returned a {kind}, not a scalar tensor", remedy)

    def name_for(self, result: Any) -> str:
        """The name; of a loss that is assumed, by what is assumed for ``result``."""
        if not self.assumed or any(map(_has_classes, result_tensors(result))):
            return self.name
        return MEAN_SQUARE

    def with_rows(self, rows: int | None) -> Any:
        """The target of a micro-batch of so many rows, without data; None: of the whole batch."""

        def cut(leaf: Tensor) -> Tensor:
            shape = leaf.shape if rows is None or not leaf.dim() else (rows, *leaf.shape[1:])
            return torch.empty(shape, dtype=leaf.dtype, device="cpu")

        return tree_map_only(Tensor, cut, self.target)

    def check_rows(self, rows: int | None) -> None:
        """Raise ``PlacerError`` if a tensor of the target does not have the ``rows`` of the batch."""
        for leaf in tree_leaves(self.target):
            if rows is not None and isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != rows:
                problem = f"has {len(leaf)} rows, and the batch has {rows}"
                remedy = "give its shape for the whole batch, with one row per row of the inputs"
                raise PlacerError(f"target of loss {self.name}", problem, remedy)


class _KnownRanges(TorchFunctionMode):
    """Short results of ``torch.arange`` have values among fake tensors too: MONAI's Dice reads dimensions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and len(func(*args, **{**kwargs, "device": "meta"})) <= _SHORT:
            with without_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def find_loss(spec: LossSpec | None, *, values: bool = False) -> Loss:
    """The loss that ``spec`` names, or the one that is assumed; imports the user's function.

    Its target has random ``values``, or else is on ``meta``. Raises ``ModelError`` if the function is not
    found, and ``PlacerError`` if it lacks a target.
    """
    if spec is None:
        return ASSUMED
    target = _make_target(spec, values=values)
    function: Callable[..., Tensor]
    if spec.function == MEAN_SQUARE:
        function = mean_square
    elif ":" in spec.function:
        function = find_callable(spec.function)
        if isinstance(function, type):
            made = f"{function.__name__.lower()} = {function.__name__}()"
            raise PlacerError(f"loss {spec.function}", "is a class", f"name an instance: {made}")
        if target is None and _takes_target(function):
            raise PlacerError(
                f"loss {spec.function}",
                "takes a target, and none is given",
                "give its shape for the whole batch, which for label maps of two images is "
                "--target 2x128x128:int64, or in the spec "
                f'{{"function": "{spec.function}", "target": "2x128x128:int64"}}; for a dict, give '
                "--target NAME=SHAPE for every key",
            )
    elif target is not None:
        function = getattr(F, spec.function)
    else:
        function = _over_results(partial(_torch_loss, spec.function))
    return Loss(
        function=function,
        name=spec.function,
        target=target,
        spec=spec,
        whole_batch=spec.whole_batch,
    )


def loss_of(
    function: Callable[..., Tensor], target: Any = None, *, whole_batch: bool = False
) -> Loss:
    """The loss with the caller's own function and target; its name is in <> if no spec can name it."""
    path = getattr(function, "__qualname__", type(function).__name__)
    spec = _as_spec(function, path, target, whole_batch=whole_batch)
    name = f"<{path.rpartition('.')[2].strip('<>')}>" if spec is None else spec.function
    return Loss(function=function, name=name, target=target, spec=spec, whole_batch=whole_batch)


def mean_square(result: Any) -> Tensor:
    """The sum of the mean squares of ``result``'s floating-point tensors, so that each gets a gradient."""
    return _sum_over(_square, result_tensors(result))


def _sum_over(loss_of_tensor: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> Tensor:
    terms = [loss_of_tensor(x) for x in tensors if x.is_floating_point()]
    if not terms:
        return torch.zeros(())
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in terms], torch.float32)
    return torch.stack([term.to(dtype) for term in terms]).sum()


def _over_results(loss_of_tensor: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    """The sum of a loss over the tensors that `result_tensors` finds in a result, each counted once."""

    def run(result: Any) -> Tensor:
        return _sum_over(loss_of_tensor, {id(x): x for x in result_tensors(result)}.values())

    return run


def _square(x: Tensor) -> Tensor:
    return x.square().mean()


def _torch_loss(name: str, x: Tensor) -> Tensor:
    """A loss of torch.nn.functional with a target of zeros."""
    if not x.dim():
        return _square(x)
    target = torch.zeros_like(x)
    if name in OF_CLASSES:
        shape = (*x.shape[:1], *x.shape[2:]) if x.dim() > 1 else ()
        target = x.new_zeros(shape, dtype=torch.int64)
    loss: Tensor = getattr(F, name)(x, target)
    return loss


def _has_classes(x: Tensor) -> bool:
    """Is it probably scores of two or more classes, in dimension 1?"""
    return x.is_floating_point() and x.requires_grad and x.dim() > 1 and x.size(1) > 1


ASSUMED = Loss(
    function=_over_results(lambda x: _torch_loss(_CLASSES, x) if _has_classes(x) else _square(x)),
    name=_CLASSES,
    assumed=True,
)


def _make_target(spec: LossSpec, *, values: bool) -> Any:
    """The target of ``spec``: a tensor, a tuple of several, or a dict; None if there is none.

    Or what the user's callable makes.
    """
    found = parse_target(spec.target)
    if spec.target and not found:
        make = find_callable(spec.target[0])
        try:
            return make()
        except (Exception, SystemExit) as error:
            raise user_failure(spec.target[0], "the target", error) from error
    tensors = [item.random() if values else item.on_meta() for item in found]
    if found and found[0].name is not None:
        return {item.name: tensor for item, tensor in zip(found, tensors, strict=True)}
    return tensors[0] if len(tensors) == 1 else tuple(tensors) or None


def _takes_target(function: Callable[..., Any]) -> bool:
    """Does ``function`` need more than one argument?"""
    try:
        inspect.signature(getattr(function, "forward", function)).bind(None)
    except TypeError:
        return True
    except ValueError:  # it has no signature
        pass
    return False


def _as_spec(
    function: Callable[..., Any], path: str, target: Any, *, whole_batch: bool
) -> LossSpec | None:
    """The spec of which `find_loss` makes the same loss; None if there is none."""
    module = str(getattr(function, "__module__", None))
    known = getattr(F, path, None) is function
    try:
        if attrgetter(path)(sys.modules[module]) is not function or module == "__main__":
            return None
        name = path if known else f"{module}:{path}"
        return LossSpec(function=name, target=_texts(target), whole_batch=whole_batch)
    except (AttributeError, KeyError, ValidationError):
        return None


def _texts(target: Any) -> tuple[str, ...]:
    """``target`` as a spec writes it. Raises ``AttributeError`` if it has other parts than tensors."""
    parts = [] if target is None else [("", target)]
    if isinstance(target, Mapping):
        parts = [(f"{name}=", part) for name, part in target.items()]
    elif isinstance(target, tuple) and len(target) > 1:
        parts = [("", part) for part in target]
    return tuple(
        f"{name}{'x'.join(map(str, part.shape)) or 'scalar'}:{str(part.dtype).removeprefix('torch.')}"
        for name, part in parts
    )
