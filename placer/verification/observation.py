"""What a caller can see of a model after a call, as one flat mapping, and the comparison of two of them."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from placer._torch import HOOK_TABLES
from placer.operands import tensors_in
from placer.program.leaves import without_hooks
from placer.program.objects.paths import (
    MODULE_TABLES,
    Path,
    function_parts,
    is_object,
    parts,
    spell,
    walk,
)
from placer.program.objects.reachable import find_reachable_state
from placer.program.objects.restore import MISSING, Snapshot, module_roots

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_LEAVES = (*_ATOMS, Tensor, np.ndarray, np.generic, enum.Enum, torch.dtype)
_MOST = 50_000  # values of one kind; of more, the first are compared
SMALL = 0.01  # share of the largest gradient below which rounding may decide what a gradient is


class Seen(NamedTuple):
    """Something that a caller can see: "gradient" of "encoder.weight"."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.name else self.kind


Observation: TypeAlias = Mapping[Seen, Any]
"""Everything that a caller can see after a call: tensors, without their graphs, and plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One thing that a caller can see of the placed model, compared with the same of the plain model.

    ``relative_error`` is the largest absolute difference over the largest absolute expected value; infinite
    for things that are no numbers, and for one that only one model has. Some values are zero but for
    rounding, such as the gradient of a bias before a norm, and the running mean behind another norm. So a
    gradient is compared with at least 1 % of the largest gradient of the model, and a running mean with at
    least 1 % of the largest standard deviation. ``detail`` says what was found and expected if no numbers
    were compared.
    """

    name: str
    kind: str  # "output", "loss", "gradient", "buffer", "parameter", "input", "mode", …
    relative_error: float
    tolerance: float
    situation: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.tolerance

    def __str__(self) -> str:
        found = self.detail or f"relative error {self.relative_error:.2e}"
        return f"{Seen(self.kind, self.name)}: {found}"


def values_in(
    kind: str, roots: Iterable[tuple[Path, Any]], skipped: Iterable[nn.Module] = ()
) -> Iterator[tuple[Seen, Any]]:
    """Tensors, plain values and containers in ``roots``, with the names by which a caller finds them.

    A container is the text "list of 3". The modules ``skipped`` are not searched.
    """
    apart = set(map(id, skipped))
    objects: set[int] = set()  # searched already: configurations that all modules share
    waiting = [(path, value, frozenset[int]()) for path, value in roots]
    waiting.reverse()
    for _ in range(_MOST):
        if not waiting:
            return
        path, value, around = waiting.pop()
        seen = Seen(kind, spell(path))
        if isinstance(value, _LEAVES):
            yield seen, value
        elif isinstance(value, set | frozenset):
            yield seen, f"set of {sorted(repr(x) for x in value if isinstance(x, _ATOMS))}"
        elif id(value) not in apart | around | objects:
            inside = parts(value)
            if is_object(value):
                objects.add(id(value))
                inside = [(key, part) for key, part in inside if not _is_own(value, key)]
            elif isinstance(value, dict | list | tuple) or hasattr(value, "maxlen"):
                yield seen, f"{type(value).__name__} of {len(list(parts(value)))}"
            deeper = around | {id(value)}
            waiting += [((*path, key), part, deeper) for key, part in reversed(list(inside))]


def _is_own(value: Any, key: Any) -> bool:
    """Is ``key`` what every module has, besides its tensors?"""
    return isinstance(value, nn.Module) and key in MODULE_TABLES - {"_parameters", "_buffers"}


def attributes(model: nn.Module) -> Iterator[tuple[Seen, Any]]:
    """What the modules of ``model`` hold besides parameters, buffers and submodules."""
    roots = [
        ((path, name), value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in MODULE_TABLES
    ]
    for seen, value in values_in("attribute", roots, model.modules()):
        if not isinstance(value, nn.Parameter):  # it is seen as a parameter
            yield seen, value


class Watch:
    """Notes what a call changes outside of the model: variables of its code, and what its hooks hold.

    So are tensors that were its buffers, which a caller may keep when forward replaces them.
    The hooks are those of ``hooked``, which is the caller's model; None: they are left out. ``given`` are the
    functions and objects among the arguments, by name.
    """

    def __init__(
        self, model: nn.Module, hooked: nn.Module | None, given: Mapping[str, Any]
    ) -> None:
        with without_hooks(model.modules()):
            self.code = find_reachable_state(model, given)
        # The search also finds what attributes hold.
        own = {id(value) for _, value in walk(module_roots(model))}
        self.code.containers = [each for each in self.code.containers if id(each.value) not in own]
        self._snapshots = {"variable": Snapshot((), self.code)}
        if hooked is not None:
            self._snapshots["hook"] = Snapshot(hook_roots(hooked), root="hook")
        self._tensors = [(seen, t, t._version) for seen, t in self._live_tensors()]
        self._buffers = dict(model.named_buffers())

    def _live_tensors(self) -> list[tuple[Seen, Tensor]]:
        read = [((each.name,), each.read()) for each in self.code.variables]
        held = [((each.name,), each.value) for each in self.code.containers]
        found = values_in("variable", [*read, *held])
        return [(seen, value) for seen, value in found if isinstance(value, Tensor)]

    def changes(self) -> Iterator[tuple[Seen, Any]]:
        """What has become of them."""
        for kind, snapshot in self._snapshots.items():
            for change in snapshot.changes():
                if change.value is MISSING:
                    yield Seen(kind, spell(change.path)), "deleted"
                    continue
                yield from values_in(kind, [(change.path, change.value)])
        for seen, tensor, version in self._tensors:
            if tensor._version != version:
                yield seen, tensor
        for name, buffer in self._buffers.items():
            yield Seen("buffer", f"{name} before the call"), buffer


class Shared:
    """The state that calls of copies of these models also change; `restore` undoes what they did.

    ``given`` are the functions and objects among the arguments, by name.
    """

    def __init__(self, given: Mapping[str, Any], model: nn.Module, *others: nn.Module) -> None:
        code = find_reachable_state(model, given)
        roots = [*module_roots(model), *hook_roots(model)]
        for other in others:
            roots += hook_roots(other)
        self._snapshot = Snapshot(roots, code)
        read = [((each.name,), each.read()) for each in code.variables]
        held = [((each.name,), each.value) for each in code.containers]
        tensors = (x for _, x in walk([*roots, *read, *held]) if isinstance(x, Tensor))
        own = {id(x) for x in (*model.parameters(), *model.buffers())}
        self._tensors = [
            (x, x._version, x.detach().clone()) for x in tensors if id(x) not in own and x.is_leaf
        ]

    def restore(self) -> None:
        """Restore objects, and the data of tensors that were written in place."""
        self._snapshot.restore()
        with torch.no_grad():
            for tensor, version, data in self._tensors:
                if tensor._version != version:
                    tensor.copy_(data)


def hook_roots(model: nn.Module) -> list[tuple[Path, Any]]:
    """What the hooks of ``model`` hold: variables of closures, and objects whose methods they are."""
    return [
        ((path, f"{table.strip('_')}[{index}]", name), value)
        for path, table, index, hook in _hooks(model)
        for name, value in function_parts(hook) or [("", hook)]
        if not isinstance(value, nn.Module)
    ]


def _hooks(model: nn.Module) -> Iterator[tuple[str, str, int, Any]]:
    for path, module in model.named_modules():
        for table in HOOK_TABLES:
            for index, hook in enumerate(vars(module)[table].values()):
                yield path, table, index, hook
        if "forward" in vars(module):
            yield path, "forward", 0, vars(module)["forward"]


def user_hooks(model: nn.Module) -> Iterator[tuple[Seen, dict[int, Any], int]]:
    """The hooks that a user put on modules, each in its table at a key; not those of torch or of forward."""
    with without_hooks(model.modules()):
        code = find_reachable_state(model)
    for path, module in model.named_modules():
        for name in HOOK_TABLES:
            table = vars(module)[name]
            for index, (key, hook) in enumerate(list(table.items())):
                torchs = type(hook).__module__.partition(".")[0] == "torch"  # such as weight_norm's
                if not torchs and not code.defines(getattr(hook, "__code__", None)):
                    yield Seen("calls", spell((path, f"{name.strip('_')}[{index}]"))), table, key


@contextmanager
def counted_hooks(model: nn.Module, *, counted: bool = True) -> Iterator[dict[Seen, int]]:
    """In this block, count the calls of the hooks that a user put on the modules of ``model``.

    Calls on tensors without data, by which a placed model records another program, do not count.
    """
    if not counted:
        yield {}
        return
    hooks = [(seen, table, key, table[key]) for seen, table, key in user_hooks(model)]
    counts = {seen: 0 for seen, *_ in hooks}
    for seen, table, key, hook in hooks:
        table[key] = functools.partial(_count, counts, seen, hook)
    try:
        yield counts
    finally:
        for _, table, key, hook in hooks:
            if key in table:
                table[key] = hook


def _count(counts: dict[Seen, int], seen: Seen, hook: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(map(_is_empty, tensors_in(args, kwargs))):
        counts[seen] += 1
    return hook(*args, **kwargs)


def observe(
    module: nn.Module, model: nn.Module, output: Any, arguments: Mapping[str, Any], watch: Watch
) -> dict[Seen, Any]:
    """Everything that a caller can see of ``module`` after a call that returned ``output``.

    ``model`` has its attributes: the module itself, or that in which a placed one keeps them.
    """
    modules = list(model.modules())
    inputs = list(values_in("input", [((name,), x) for name, x in arguments.items()], modules))
    found = dict(values_in("output", [((), output)], modules))
    found |= dict(inputs) | dict(attributes(model)) | dict(watch.changes())
    found = {seen: _without_graph(value) for seen, value in found.items()}
    for seen, value in inputs:
        if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            found[Seen("gradient", f"input {seen.name}")] = value.grad
    for name, parameter in module.named_parameters():
        found[Seen("gradient", name)] = parameter.grad
        found[Seen("requires_grad", name)] = parameter.requires_grad
    for name, buffer in module.named_buffers():
        found[Seen("buffer", name)] = buffer.detach()
    for name, each in module.named_modules():
        found[Seen("mode", name or "the model")] = "train" if each.training else "eval"
    return found


def identities(module: nn.Module, output: Any, arguments: Mapping[str, Any]) -> dict[Seen, str]:
    """Which tensors of ``output`` are inputs, parameters, buffers, or others of the output, by name.

    Nothing if tensors are on several devices, where some of these are copies.
    """
    known: dict[int, str] = {}
    named = [*module.named_parameters(), *module.named_buffers()]
    named += [
        (f"input {seen.name}", value)
        for seen, value in values_in("input", [((name,), x) for name, x in arguments.items()])
        if isinstance(value, Tensor)
    ]
    for name, tensor in named:
        known.setdefault(id(tensor), name)
    leaves = [
        (seen, value)
        for seen, value in values_in("output", [((), output)])
        if isinstance(value, Tensor)
    ]
    if len({tensor.device for _, tensor in (*named, *leaves)}) > 1:
        return {}
    return {
        Seen("identity", str(seen)): known.setdefault(id(value), str(seen))
        for seen, value in leaves
    }


def _without_graph(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, np.ndarray | np.generic) and np.issubdtype(value.dtype, np.number):
        return torch.as_tensor(np.array(value))
    return value if isinstance(value, _ATOMS) else repr(value)


def compare(
    ours: Observation,
    theirs: Observation,
    tolerance: float,
    *,
    moved: float = 0.0,
    situation: str = "",
) -> Iterator[Comparison]:
    """Compare what is seen of the placed model with what is seen of the plain one.

    ``moved`` is how far steps have moved parameters at most: they may differ by as much of it as gradients.
    """
    largest = largest_gradient(theirs)
    for seen in dict.fromkeys((*theirs, *ours)):
        least = 0.0
        if seen.kind == "gradient":
            least = SMALL * largest
        elif seen.kind == "parameter":
            least = SMALL * moved
        elif seen.kind == "buffer" and seen.name.endswith("running_mean"):
            variance = theirs.get(Seen(seen.kind, f"{seen.name.removesuffix('mean')}var"))
            least = SMALL * math.sqrt(_largest(variance))
        found, expected = ours.get(seen, MISSING), theirs.get(seen, MISSING)
        if seen.kind == "identity" and MISSING in (found, expected):
            continue
        error = relative_error(found, expected, least)
        detail = "" if math.isfinite(error) else _detail(found, expected)
        yield Comparison(
            name=seen.name,
            kind=seen.kind,
            relative_error=error,
            tolerance=tolerance,
            situation=situation,
            detail=detail,
        )


def largest_gradient(observation: Observation) -> float:
    """The largest absolute value of any gradient; 0 if there is none."""
    found = (_largest(value) for seen, value in observation.items() if seen.kind == "gradient")
    return max(found, default=0.0)


def relative_error(found: Any, expected: Any, least: float) -> float:
    """The largest difference relative to the largest of ``expected``, or to ``least`` if that is larger."""
    if isinstance(found, float) and isinstance(expected, float):
        found, expected = (torch.tensor(x, dtype=torch.float64) for x in (found, expected))
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        both = not isinstance(found, Tensor) and not isinstance(expected, Tensor)
        return 0.0 if both and type(found) is type(expected) and found == expected else math.inf
    if _kind_of(found) != _kind_of(expected) or _is_empty(found) or _is_empty(expected):
        return math.inf
    if expected.numel() == 0:
        return 0.0
    wide = torch.promote_types(expected.dtype, torch.float64)
    found, expected = (tensor.detach().to_dense().to("cpu", wide) for tensor in (found, expected))
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (found - expected).abs()).max().item()
    finite = expected.abs()[expected.isfinite()]
    scale = max(finite.max().item() if finite.numel() else 0.0, least)
    if difference != difference:
        return math.inf
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)


def _is_empty(tensor: Tensor) -> bool:
    """Has ``tensor`` no data, as those with which a model is recorded?"""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _detail(found: Any, expected: Any) -> str:
    if found is MISSING:
        return f"is missing; the plain model has {_spell(expected)}"
    if expected is MISSING:
        return f"is {_spell(found)}, which the plain model does not have"
    return f"is {_spell(found)}, and {_spell(expected)} in the plain model"


def _spell(value: Any) -> str:
    if not isinstance(value, Tensor):
        text = repr(value) if isinstance(value, _ATOMS) else str(value)
        return text if len(text) <= 60 else text[:59] + "…"
    shape = "x".join(map(str, value.shape)) or "scalar"
    if _is_empty(value):
        return f"a tensor without data {shape}"
    flag = " with a gradient" if value.requires_grad else ""
    return f"a tensor {shape}:{str(value.dtype).removeprefix('torch.')}{flag}"


def _largest(value: Any) -> float:
    """The largest absolute value; 0 if there is none, or if it is not finite."""
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    found: float = value.to_dense().abs().max().item()
    return found if math.isfinite(found) else 0.0
