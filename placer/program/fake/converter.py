"""Fake copies of tensors and modules: shapes without data, so that a model runs without using memory.

A fake copy of a module is a deep copy whose tensors are fake CPU tensors. Tied parameters and views
of one storage share memory in the copy too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from placer._torch import (
    copy_attributes,
    mark_parameter,
    storage_key,
    unoptimized,
    without_modes,
    without_torch_function,
)
from placer._torch_patches import (
    override_conversion,
    override_script_functions,
    uncached_parametrizations,
)
from placer.errors import CaptureError
from placer.program.failure import Place, Untraceable, calling_place
from placer.program.fake.caches import isolated_caches
from placer.program.fake.mode import FakeMode
from placer.program.fake.packed import PACKING, RECURRENT, run_recurrent
from placer.program.fake.row_gradients import EMBEDDINGS, look_up
from placer.program.objects.copying import Held, copy_module
from placer.program.objects.originals import original_state
from placer.program.objects.python_random import keep_random
from placer.program.objects.reachable import ReachableState, find_reachable_state
from placer.program.objects.restore import Snapshot, own_context, restored

_CPU = torch.device("cpu")


class FakeConverter:
    """Makes fake copies of tensors and modules; a tensor always gets the same copy.

    All copies are on the CPU, whatever the device of the original (even ``meta``), and belong to one
    ``FakeTensorMode``. If tensors of a module share a storage, so do their copies.
    """

    def __init__(self) -> None:
        self.mode = FakeMode(allow_non_fake_inputs=True)
        self._fakes: dict[int, Tensor] = {}
        # Id of a fake tensor -> original; keeps the ids in _fakes valid
        self._originals: dict[int, Tensor] = {}
        self._bases: dict[tuple[int, torch.dtype], Tensor] = {}  # a fake of each shared storage
        self._sharing: dict[int, set[int]] = {}  # storage -> ids of the tensors that share it
        self.reachable = ReachableState()  # what the modules' code can reach
        # Originals of parameters and buffers, by id, with their names
        self.state: dict[int, tuple[str, Tensor]] = {}

    def tensor(self, original: Tensor) -> Tensor:
        """The fake copy of ``original``: same shape, strides, dtype and ``requires_grad``."""
        fake = self._fakes.get(id(original))
        if fake is None:
            fake = self._make(original)
            self._fakes[id(original)] = fake
            self._originals[id(fake)] = original
            copy_attributes(original, fake, self.tree)
        return fake

    def inputs(self, originals: Sequence[Tensor]) -> list[Tensor]:
        """Fake copies of a call's inputs, each of its own, also of a tensor that is given twice."""
        copies = [self._make(original) for original in originals]
        self._originals |= {
            id(fake): original for fake, original in zip(copies, originals, strict=True)
        }
        return copies

    def copies(self, fakes: Sequence[Tensor]) -> list[Tensor]:
        """New fake tensors like ``fakes``, for a run that may write to them."""
        with without_modes(), without_torch_function():
            made = [
                torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
                if x.layout == torch.strided
                else torch.empty(x.shape, dtype=x.dtype, device="meta")
                for x in fakes
            ]
            return [
                FakeTensor(self.mode, data.requires_grad_(x.requires_grad), _CPU)
                for data, x in zip(made, fakes, strict=True)
            ]

    @property
    def fakes(self) -> list[Tensor]:
        """The copies of tensors that it has made so far, without inputs."""
        return list(self._fakes.values())

    def register(self, fake: Tensor, original: Tensor) -> None:
        """Register ``fake``, which a run computed, as the fake copy of ``original``."""
        self._fakes[id(original)] = fake
        self._originals[id(fake)] = original

    def original(self, fake: Tensor) -> Tensor | None:
        """The tensor that ``fake`` is a copy of, or None if this converter did not make it."""
        return self._originals.get(id(fake))

    @contextmanager
    def running(self, guess: Guess | None = None) -> Iterator[None]:
        """In this block, code runs on fake tensors and gets ``guess`` where it reads values (`GuessData`)."""
        with (
            own_context(),
            self.mode,
            GuessData(self.mode, guess or Guess()),
            fake_execution(),
            self.isolated_caches(),
            restored(Snapshot((), self.reachable)),
        ):
            yield

    def isolated_caches(self) -> AbstractContextManager[None]:
        """In this block, the modules' code leaves nothing in caches."""
        return isolated_caches(self.reachable)

    def tree(self, value: Any) -> Any:
        """``value`` with every tensor in it (by pytree) replaced by its fake copy."""
        return tree_map_only(Tensor, self.tensor, value)

    def module(self, model: nn.Module, arguments: Mapping[str, Any] | None = None) -> nn.Module:
        """A deep copy of ``model`` whose parameters, buffers and other tensors are fake.

        ``arguments`` are functions and objects with which it will be called, by name.
        Raises ``CaptureError`` if the model cannot be copied.
        """
        held = Held.by(model)
        for tensor in held.tensors:
            self._sharing.setdefault(_storage(tensor), set()).add(id(tensor))
        memo: dict[int, Any] = {id(tensor): self.tensor(tensor) for tensor in held.tensors}
        try:
            fake = copy_module(model, memo, held=held)
        except Exception as error:
            raise CaptureError(
                type(model).__name__,
                f"the model cannot be copied ({type(error).__name__}: {error})",
                "give the attribute that cannot be copied a __deepcopy__, or create it lazily",
            ) from error
        self.reachable.extend(find_reachable_state(fake, arguments or {}))
        for name, original in original_state(model):
            self.state.setdefault(id(original), (name, original))
        return fake

    def _make(self, original: Tensor) -> Tensor:
        if len(self._sharing.get(_storage(original), ())) > 1 and original.layout == torch.strided:
            return self._make_sharing(original)
        # Made directly: operators on fake tensors take ten times as long.
        with without_modes(), without_torch_function():
            if original.layout == torch.strided:
                size, stride = original.size(), original.stride()
                data = torch.empty_strided(size, stride, dtype=original.dtype, device="meta")
            else:
                data = torch.empty(original.shape, dtype=original.dtype, device="meta")
            data.requires_grad_(original.requires_grad)
            fake = FakeTensor(self.mode, data, _CPU)
        if isinstance(original, nn.Parameter):
            mark_parameter(fake)
        return fake

    def _make_sharing(self, original: Tensor) -> Tensor:
        """A fake copy that is a view of the fake copy of the whole storage."""
        with self.mode, torch.no_grad():
            fake = self._base(original).as_strided(
                original.size(), original.stride(), original.storage_offset()
            )
            if isinstance(original, nn.Parameter):
                return nn.Parameter(fake, requires_grad=original.requires_grad)
            return fake.requires_grad_(original.requires_grad)

    def _base(self, original: Tensor) -> Tensor:
        key = (_storage(original), original.dtype)
        if key not in self._bases:
            count = original.untyped_storage().nbytes() // original.element_size()
            self._bases[key] = torch.empty(count, dtype=original.dtype, device="cpu")
        return self._bases[key]


@contextmanager
def fake_execution() -> Iterator[None]:
    """In this block, code may run on fake tensors.

    Failures on fake tensors are not logged by torch, because exceptions report them. ``module.to(dtype)`` is
    allowed if all tensors already have that type; fake modules cannot be converted in place. Functions of
    TorchScript run as they were written. The random number generators are restored at the end.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    # Another level would clear the caches of all loggers.
    disabled, logger.disabled = logger.disabled, True
    try:
        with (
            override_conversion(_convert_fakes),
            override_script_functions(_call_script_function),
            uncached_parametrizations(),
            keep_random(),
        ):
            yield
    finally:
        logger.disabled = disabled


def _convert_fakes(
    convert: Callable[..., nn.Module], module: nn.Module, fn: Any, *args: Any, **kwargs: Any
) -> nn.Module:
    """``module`` itself if it is fake and ``fn`` keeps its dtypes; else what ``convert`` does."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return convert(module, fn, *args, **kwargs)
    with without_torch_function():
        if all(fn(tensor).dtype == tensor.dtype for tensor in tensors):
            return module
    raise Untraceable("it converts its own parameters to another type in forward")


def _call_script_function(
    original: Callable[..., Any], function: Any, args: Any, kwargs: Any
) -> Any:
    if any(isinstance(leaf, FakeTensor) for leaf in tree_iter((args, kwargs))):
        function = unoptimized(function)
    return original(function, *args, **kwargs)


_FLAG = 16  # elements of a buffer whose values may decide what a module does


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What code gets where it reads values of fake tensors: ``value``; at ``others`` the other of 1 and 0."""

    value: int = 1
    others: frozenset[Place] = frozenset()

    def at(self, place: Place | None) -> int:
        """The value that code at ``place`` gets."""
        return 1 - self.value if place in self.others else self.value

    def following(self, places: Sequence[Place]) -> Guess | None:
        """Another guess, after forward has failed, having read values at ``places``; None at the end.

        What an assertion wants is the opposite of what the last place got. All 1 is tried first.
        """
        for place in reversed(places):
            if place not in self.others and len(self.others) < _MOST_OTHERS:
                return replace(self, others=self.others | {place})
        return Guess(value=0) if self.value else None


class GuessData:
    """In this context, code that reads values of fake tensors of ``mode`` gets guesses.

    A scalar is 1 or 0 (True or False), as ``guess`` says, and so are all elements of a numpy array. A loop
    that waits for another value would never end, so too many reads in one run are an error. Operators that
    select elements select as many as possible. All packed sequences have the full length, so values computed
    from their lengths are known. ``guessed`` says whether any guess was made; if so, the run is one of
    several possible runs. ``of_inputs`` tells which tensors depend on the inputs.
    """

    def __init__(
        self,
        mode: FakeMode,
        guess: Guess,
        of_inputs: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        self.guess = guess
        self.guessed = False
        # Where values were read, the last at the end: were any of the inputs?
        self.places: dict[Place, bool] = {}
        self.numbers: dict[Place, int] = {}  # what code gets at a place, other than 1 and 0
        self._of_inputs = of_inputs
        self._reads_left = _MOST_READS[guess.value]
        self.mode = mode
        self._before = mode.guess
        self._reads = _GuessReads(self)
        self._values = WeakTensorKeyDictionary()  # fake tensor -> its value, where that is known
        self._knows_any = False  # has any value ever been known?

    @classmethod
    def other(cls, converter: FakeConverter, module: nn.Module, guess: Guess) -> GuessData:
        """Other guesses than ``guess``: the values that small buffers of the fake ``module`` really have."""
        other = cls(converter.mode, Guess(value=1 - guess.value))
        other._reads_left = _FEW_READS
        for buffer in module.buffers():
            real = converter.original(buffer)
            if real is not None and not real.is_meta and real.numel() <= _FLAG:
                other.know(buffer, real)
        return other

    def again(self, guess: Guess) -> GuessData:
        """For another run of the same code with other guesses, which need not read much more."""
        again = GuessData(self.mode, guess)
        again._reads_left = _FEW_READS + 2 * (_MOST_READS[self.guess.value] - self._reads_left)
        return again

    def __enter__(self) -> GuessData:
        self._before, self.mode.guess = self.mode.guess, self
        self._reads.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reads.__exit__(*error)
        self.mode.guess = self._before

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func`` on values that are known; ``NotImplemented`` where one is not."""
        if not self._knows_any:
            return NotImplemented
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            self._values.pop(args[0], None)
        if not self._knows((args, kwargs)):
            return NotImplemented
        with without_modes():
            args, kwargs = tree_map_only(Tensor, self._values.__getitem__, (args, kwargs))
            known = func(*args, **kwargs)
        with self.mode:
            return tree_map_only(Tensor, self.tell, known)

    def _knows(self, arguments: Any) -> bool:
        tensors = [leaf for leaf in tree_iter(arguments) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(tensor in self._values for tensor in tensors)

    def tell(self, value: Tensor) -> Tensor:
        """A fake tensor whose value is known."""
        fake = torch.empty_like(value)
        self.know(fake, value)
        return fake

    def know(self, fake: Tensor, value: Tensor) -> None:
        """Let ``fake`` have this value, until it is written."""
        self._values[fake] = value
        self._knows_any = True

    def number(self, *tensors: Tensor) -> int:
        """The number that the running code of the model gets, which reads values of ``tensors``."""
        place = calling_place()
        if place is not None:
            self.places[place] = self.places.pop(place, False) or any(map(self._of_inputs, tensors))
        return self.numbers[place] if place in self.numbers else self.guess.at(place)

    def answer(self, func: Any, args: Any, kwargs: Any, refused: Exception) -> Any:
        """A possible result of ``func``, which raised ``refused`` on fake tensors; or raises ``refused``."""
        self.guessed = True
        if isinstance(refused, DynamicOutputShapeException):
            if (largest := _LARGEST_RESULT.get(func.name())) is not None:
                with self.mode:
                    return largest(func, *args, **kwargs)
        elif func is torch.ops.aten._local_scalar_dense.default:
            self._reads_left -= 1
            if self._reads_left < 0:
                most = _MOST_READS[self.guess.value]
                raise RuntimeError(
                    f"a run read {most} values of tensors, and got guesses: a loop that waits for another "
                    "value does not end"
                ) from refused
            return _number(args[0].dtype, self.number(args[0]))
        elif func is torch.ops.aten.equal.default:
            return bool(self.number(*args[:2]))
        raise refused


_MOST_OTHERS = 16  # places where another value is tried than elsewhere
# Guess -> reads of single values in one run. A capture tries 1 first and then 0, so 1 is given up early.
# (Mask R-CNN reads 1,400 for each image, and runs with 0.)
_FEW_READS = 100  # in a run that only looks for what else a module writes
_MOST_READS = {1: 1_000, 0: 50_000}
_READ_AS_VALUES = ("numpy", "__array__", "tolist", "__format__")
_WATCHED = {*_READ_AS_VALUES, *(f.__name__ for f in EMBEDDINGS), *PACKING, *RECURRENT}


class _GuessReads(TorchFunctionMode):
    """Answers reads that do not reach an operator: conversions to arrays, lists and text.

    It also runs recurrent layers on packed sequences, which read the lengths of the sequences, and embeddings
    so that their sparse gradients are counted (`placer.program.fake.row_gradients`).
    """

    def __init__(self, guess: GuessData) -> None:
        super().__init__()
        self.guess = guess

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _WATCHED:
            return func(*args, **(kwargs or {}))
        if func in EMBEDDINGS:
            return look_up(func, args, kwargs or {})
        tensor = args[0] if args else None
        # A capture may run under the guesses of a dry run, whose tensors are of another mode.
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self.guess.mode:
            return func(*args, **(kwargs or {}))
        if name in PACKING:
            self.guess.guessed = True
            data, counts = PACKING[name](*args)
            with without_modes():
                known = torch.tensor(counts)
            return data, self.guess.tell(known)
        if name in RECURRENT and isinstance(args[3], list | tuple):  # (data, batch sizes, state, …)
            return run_recurrent(func, *args)
        if name not in _READ_AS_VALUES:
            return func(*args, **(kwargs or {}))
        if name == "__format__":
            return format(tensor.item(), args[1]) if not tensor.dim() else func(*args)
        self.guess.guessed = True
        dtype = str(tensor.dtype).removeprefix("torch.")
        values = np.full(tensor.shape, self.guess.number(tensor), dtype=dtype)
        return values.tolist() if name == "tolist" else values


def _indices(count: int, *others: int) -> Tensor:
    return torch.zeros(count, *others, dtype=torch.int64)


def _masked(func: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, mask.shape)).reshape(-1)


def _unique(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.reshape(-1), torch.zeros_like(x, dtype=torch.int64), _indices(x.numel())


def _unique_rows(func: Any, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return x, _indices(x.size(dim)), _indices(x.size(dim))


def _bins(func: Any, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else weights.dtype
    return torch.zeros(
        max(minlength, 1), dtype=dtype if dtype in (torch.int64, torch.float32) else torch.float64
    )


def _ctc_loss(func: Any, scores: Tensor, targets: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    steps, batch, labels = scores.size(0), scores.size(1), targets.size(-1)
    return scores.new_empty(batch), scores.new_empty(batch, steps, 2 * labels + 1)


# Operator -> its largest result: all elements are selected, distinct or kept, or repeated once; histograms
# have the requested bins. The last operator is torchvision's; it is looked up by name, since torchvision may
# not be installed.
_LARGEST_RESULT: dict[str, Callable[..., Any]] = {
    "aten::nonzero": lambda func, x: _indices(x.numel(), x.dim()),
    "aten::masked_select": _masked,
    "aten::index.Tensor": lambda func, x, indices: func(x, _all_true(indices)),
    "aten::_unique2": _unique,
    "aten::_unique": lambda func, x, *args, **kwargs: _unique(func, x)[:2],
    "aten::unique_consecutive": _unique,
    "aten::unique_dim": _unique_rows,
    "aten::repeat_interleave.Tensor": lambda func, repeats, output_size=None: torch.arange(
        repeats.numel()
    ),
    "aten::bincount": _bins,
    "aten::_ctc_loss.Tensor": _ctc_loss,
    "torchvision::nms": lambda func, boxes, scores, iou_threshold: _indices(boxes.size(0)),
}


def _number(dtype: torch.dtype, value: int) -> complex | bool:
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_complex:
        return complex(value)
    return float(value) if dtype.is_floating_point else value


def _all_true(indices: Any) -> list[Any]:
    """``indices`` with every boolean mask replaced by the index tensors of an all-true mask."""
    positions: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += [torch.zeros(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            positions.append(index)
    return positions


def _storage(tensor: Tensor) -> int:
    return id(tensor) if tensor.layout != torch.strided else storage_key(tensor)
