"""Intercept everything that a model computes while it runs on fake tensors.

The model's Python code runs as usual, so control flow, containers and attributes just work. Three
things are intercepted: torch functions and methods (by a ``TorchFunctionMode``), calls of modules (a
layer of ``torch.nn``, or a module that must stay whole, becomes one node), and arithmetic on sizes
(`placer.program.recording.size_recorder`).
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._pytree import tree_iter, tree_map_only

from placer._torch import (
    REENTRANT_CHECKPOINT,
    SET_GRAD_ENABLED,
    is_checkpointing,
    saved_tensor_hooks,
    storage_key,
    without_modes,
    without_torch_function,
)
from placer._torch_patches import watch_missing_attributes
from placer.errors import CaptureError
from placer.operands import tensors_of_tree
from placer.program.alias import written_arguments
from placer.program.call import BoundCall
from placer.program.constants import (
    INDEXING,
    copy_real,
    digest,
    find_value,
    is_constant,
    is_written,
    replace_numpy_indices,
    tensor_from_numpy,
)
from placer.program.failure import (
    CHANGES_FLAGS,
    DIFFERENTIATES,
    TraceFailure,
    Untraceable,
    describe,
    leads_to,
    locate_caller,
)
from placer.program.fake.converter import FakeConverter, Guess, GuessData
from placer.program.fake.packed import PACKING, WithLengths
from placer.program.fingerprint import varying_lines
from placer.program.guards import AttributeGuard, make_guards, watch_attributes
from placer.program.leaves import is_torch_leaf, runs_own_hooks
from placer.program.moves import NamedDevices, replace_device
from placer.program.objects.originals import originals_of, uses_original
from placer.program.objects.paths import Path
from placer.program.objects.python_random import forbid_python_random
from placer.program.objects.restore import Snapshot
from placer.program.recording.backward import BackwardHooks
from placer.program.recording.encoder import fill_padding, find_padding
from placer.program.recording.flags import GradientFlags
from placer.program.recording.leaving import Left
from placer.program.recording.reached import Reached
from placer.program.recording.single_node import SingleNodes, call_single_node, find_reading
from placer.program.recording.size_recorder import SizeRecorder
from placer.program.recording.validation import running_check
from placer.program.recording.watch import runs_library, trace_codes, watch_calls
from placer.program.recording.writer import CPU, GraphWriter, executable
from placer.program.stored import StateInput
from placer.program.targets import (
    ApplyFunction,
    CallMethod,
    CallScript,
    Checkpointed,
    Modes,
    UnderModes,
)

# Names of tensor methods: those that return sizes, those that return values of elements to Python,
# and those that reach into autograd, which a graph cannot express.
_SIZES = ("size", "numel", "nelement", "stride", "storage_offset", "__len__")
_READS = (
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__",
    "__index__", "__contains__",
)  # fmt: skip
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "backward", "grad", "retain_grad")
_OF_EARLIER_STEPS = ("grad", "_version")  # properties of weights and inputs
_DIFFERENTIATORS = (torch.autograd.grad, torch.autograd.backward)
_REFUSALS = (Untraceable, DataDependentOutputException, DynamicOutputShapeException)
_READS_VALUES = "its Python code depends on the value of a tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is recorded, and how.

    Modules whose paths are in ``whole`` become single nodes, as do the layers of ``torch.nn``; where they
    read values of tensors, they get ``guess``. ``grad`` is the answer to ``torch.is_grad_enabled()`` in the
    model's code. Sequences that forward packs are assumed to end ``shorter`` steps before their end.
    ``is_split``: the batch will be. ``disabled``: gradients are disabled while it is recorded, too, because
    forward enables them in a part of it.
    """

    converter: FakeConverter
    model: nn.Module
    fake_model: nn.Module
    bound: BoundCall
    whole: frozenset[str] = frozenset()
    guess: Guess = field(default_factory=Guess)
    ignore_device_moves: bool = False
    grad: bool = True
    numbers: tuple[StateInput, ...] = ()  # numbers that are inputs of the graph
    shorter: int = 0
    is_split: bool = False
    disabled: bool = False


class Recorder(TorchFunctionMode):
    """Intercepts every call, runs it on fake tensors, and writes a node for it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        converter, model, fake_model = setup.converter, setup.model, setup.fake_model
        self.setup, self.model, self.fake_model = setup, model, fake_model
        self.packs = False  # does forward pack sequences?
        self.flags = GradientFlags(grad=setup.grad, disabled=setup.disabled)
        self.devices = NamedDevices(ignored=setup.ignore_device_moves)
        self.reachable = converter.reachable
        self.generators = [each.value for each in self.reachable.generators]
        self.writer = GraphWriter(converter, fake_model)
        self.inputs: set[int] = set()  # ids
        self.written: set[int] = set()  # storages that operators have written
        self.before: Snapshot | None = None  # the state in which the run began
        self.given: set[int] = set()  # ids of the numbers that have been put there since
        self.single = SingleNodes()
        # What the inputs of the present single node reach
        self.reached = Reached(fake_model, converter.state)
        self.backward = BackwardHooks(
            fake_model,
            self.reachable,
            self.reached,
            lambda: GuessData(converter.mode, setup.guess, self.reached.__contains__),
        )
        self.failed_in: tuple[Exception, str] | None = None  # an exception and its innermost module
        self.refused: TraceFailure | None = None  # the first operation that a graph cannot express
        self.paused = False  # inside a single node: nothing is recorded
        self.sizes = SizeRecorder(self.writer, lambda: self.paused)
        self.modes = Modes(True, False, ())  # those in which the run began
        self.default_dtype = torch.get_default_dtype()
        self.saved_hooks: Any = None  # the saved-tensor hooks when the run began
        self.reentrant: Sequence[Any] | None = None  # inputs of the reentrant checkpoint we are in
        self.calls_model = False  # has a method of the model called the model?
        self.calls_layers = False  # has it called layers before that?
        self.checkpointed: dict[str, str] = {}  # path of a checkpointed module -> source line
        # Constants whose values forward read -> module and line, and the model's tensors for them.
        self.values_read: dict[fx.Node, tuple[str, str]] = {}
        self.tensors_read: list[Tensor] = []
        self.locate_draws = False  # find out which module draws random numbers in Python
        self.inside = False  # a torch function: its operators are part of it
        self.made: set[fx.Node] = set()  # constants that forward made from numpy arrays
        self.made_tensors: list[Tensor] = []  # keeps them alive
        self.attributes: set[tuple[str, str]] = set()  # (module path, name) of those that were read
        self.asked: set[str] = set()  # names of attributes that inputs do not have
        self.codes: dict[int, CodeType] = {}  # of functions that ran outside of torch functions
        self.codes_again: dict[int, CodeType] = {}  # of those that the backward runs again
        self.retained: list[
            tuple[Tensor, str]
        ] = []  # by retain_grad() in single nodes, with the line
        self.written_again: set[int] = set()  # storages that operators in these have written
        self.trace = trace_codes(self.codes, self.codes_again, self.recomputes)
        self.path_of = {id(module): path for path, module in fake_model.named_modules()}
        pairs = zip(model.modules(), fake_model.modules(), strict=True)
        self.originals = [(each, fake) for real, fake in pairs for each in originals_of(real)]
        self.fake_modules = {id(original): fake for original, fake in self.originals}
        self.training = {id(module): module.training for module in fake_model.modules()}
        self.own_parameters = {id(module): _state(module) for module in fake_model.modules()}

    # -- running ---------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Intercept calls of modules, custom autograd functions and torch functions in this thread."""
        self.modes = Modes.current()
        self.default_dtype = torch.get_default_dtype()
        self.saved_hooks = saved_tensor_hooks()
        modules = dict(self.fake_model.named_modules())
        watched = watch_attributes(modules, self.read_attribute, self.copy_of)
        before = sys.gettrace()
        hooks = self.backward.watching() if self.setup.is_split else nullcontext()
        missing = watch_missing_attributes(self.note_missing)
        operators = self.setup.converter.mode.observed_by(self.run_operator)
        with watch_calls(self), watched, missing, hooks, self, operators:
            sys.settrace(self.trace)
            try:
                yield
            finally:
                if sys.gettrace() is not self.trace:  # a tool that measures coverage replaces it
                    self.codes.update((id(code), code) for code in self.reachable.codes)
                sys.settrace(before)
                torch.set_default_dtype(self.default_dtype)  # forward may have been stopped before

    def copy_of(self, module: nn.Module) -> nn.Module | None:
        """The fake copy of a module of the user's model itself; None for any other module.

        Raises ``CaptureError`` in code of a single node, in which calls of the placed model use the original.
        """
        found = self.fake_modules.get(id(module))
        if found is not None and self.paused:
            raise uses_original(self.path_of[id(found)])
        return found

    def read_attribute(self, path: str, name: str) -> None:
        """The module at ``path`` read an attribute. A single-node module reads its own again in every run."""
        if not self.paused:
            self.attributes.add((path, name))

    def note_missing(self, tensor: Tensor, name: str) -> None:
        """Code asks for an attribute that ``tensor`` does not have, and may have in a later call."""
        if self.paused or name.startswith("__") or runs_library(sys._getframe(2)):
            return
        if id(tensor) in self.inputs:
            self.asked.add(name)
        if (state := self.writer.name_of_state(tensor)) is not None:
            path, _, own = state.rpartition(".")
            self.attributes.add((path, own))

    def guards(
        self, unread: Sequence[Path] = (), state: Sequence[StateInput] = ()
    ) -> tuple[AttributeGuard, ...]:
        """The attributes of the model that were read, with their values.

        What is in the containers at the paths ``unread`` does not matter, nor which numbers ``state`` has.
        """
        numbers = {each.path for each in state if each.kind is not Tensor}
        inside = [path for path in numbers if len(path) > 2]
        unread = [*unread, *inside]
        return make_guards(self.model, self.attributes - numbers, self.tensors_read, unread)

    def watch_inputs(self, inputs: Sequence[Tensor]) -> Mapping[int, bool]:
        """Note which tensors are inputs. Returns which inputs and parameters require gradients; by id."""
        self.inputs = set(map(id, inputs))
        return self.flags.watch(self.fake_model, inputs)

    def number_input(self, name: str, value: float) -> Any:
        """A new input of the graph that is a number."""
        return self.sizes.input(self.writer.number(name), value)

    def reads_number(self, placeholder: fx.Node) -> bool:
        """Does Python code look at a number that is an input, or at one computed from it?"""
        return self.sizes.is_read(placeholder)

    def check(self) -> None:
        """Raise the exception of an operation that cannot be recorded, which forward may have caught."""
        self.devices.check()
        if self.refused is not None:  # forward took another path
            raise self.refused
        self.check_constants()

    # -- calls -----------------------------------------------------------------------------------

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """In this block, nothing is recorded."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SET_GRAD_ENABLED:
            self.flags.enable(on=args[0], paused=self.paused)
        if func is torch.Tensor.retain_grad:
            self.note_retained(args[0])
        if self.paused:
            if func is torch.Tensor.register_hook and self.setup.is_split:
                args = args[0], self.backward.watched("", args[1])
            return func(*args, **kwargs)
        before, self.inside = self.inside, True
        traced = sys.gettrace()
        if traced is self.trace:
            sys.settrace(None)
        try:  # not `with self.refusing()`, which is slow: there are many calls
            return self.run_function(func, args, kwargs)
        except _REFUSALS as error:
            self.note_refused(error)
            raise
        finally:
            self.inside = before
            if traced is self.trace:
                sys.settrace(traced)

    def note_retained(self, tensor: Tensor) -> None:
        """Note a call of ``retain_grad()``. Raises ``CaptureError`` if it is on an input of the model."""
        if id(tensor) in self.inputs:
            raise CaptureError(
                type(self.model).__name__,
                f"its forward calls retain_grad() on an input ({locate_caller()}), which is a copy in a "
                "placed model",
                "call it on the tensor before the call of the model",
            )
        self.retained.append((tensor, locate_caller()))

    def run_operator(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Record an operator that ran outside of any torch function, as from ``torch.from_numpy``.

        ``run()`` is its result. Operators of a torch function are part of its node.
        """
        for index, name in written_arguments(func):
            written = args[index] if index < len(args) else kwargs.get(name)
            keys = list(map(storage_key, tensors_of_tree(written)))
            self.written.update(keys)
            if self.recomputes():
                self.written_again.update(keys)
        if self.paused:
            value = run()
            self.reached.spread(func, args, kwargs, value)
            return value
        if self.inside:
            return run()
        with self.refusing():
            if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
                return self.make_constant(copy_real(args[0]))
            value = run()
            if self.is_recorded(value, args, kwargs):
                self.record("call_function", func, args, kwargs, value)
            return value

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Note an exception that says what cannot be recorded: forward's own code may catch it."""
        try:
            yield
        except _REFUSALS as error:
            self.note_refused(error)
            raise

    def note_refused(self, error: Exception) -> None:
        """Keep the first such error in ``refused``."""
        if self.refused is None:
            self.refused = TraceFailure(self.writer.layer, describe(error), locate_caller())

    def run_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function or method on fake tensors, and record it.

        Raises ``Untraceable`` if a graph cannot express it.
        """
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self.get_property(func, args[0])
        if name == "__set__":
            return self.set_property(func, *args)
        method = _is_method(func)
        if method and name == "requires_grad_" and self.sets_flag(args[0]):
            return func(*args, **kwargs)
        if method and name in _READS:
            return self.read(func, args, kwargs)
        if method and name in _HOOKS:
            raise Untraceable(f"it calls {name}() on an intermediate tensor")
        if name in PACKING:
            return self.pack(func, args)
        if func in _DIFFERENTIATORS:
            raise Untraceable(f"{DIFFERENTIATES} (torch.autograd.{name})")
        if method and name in _SIZES:
            return self.sizes.size(func, name, args, kwargs)
        if (data := tensor_from_numpy(func, args, kwargs)) is not None:
            return self.make_constant(data)
        if func in INDEXING:
            args = (args[0], replace_numpy_indices(args[1], self.make_constant), *args[2:])
        args, kwargs, device = replace_device(name, args, kwargs)
        if device is not None:
            self.devices.note(device, self.writer.layer, locate_caller())
        if method and name == "cuda":
            args, kwargs, func, name = (args[0], CPU), {}, torch.Tensor.to, "to"
        value = func(*executable(args), **executable(kwargs))
        if value is NotImplemented or not self.is_recorded(value, args, kwargs):
            return value
        if method:
            self.record("call_method", name, args, kwargs, value)
        elif func is torch.Tensor.__getitem__:
            self.record("call_function", operator.getitem, args, kwargs, value)
        else:
            self.record("call_function", func, args, kwargs, value)
        return value

    def is_recorded(self, value: Any, args: Any, kwargs: Any) -> bool:
        """Does a call with the result ``value`` need a node?"""
        if tensors_of_tree(value):
            return True
        # A function without a result was called for its effect, which matters if it is on a tensor.
        return value is None and bool(tensors_of_tree((args, kwargs)))

    def record(
        self,
        op: str,
        target: Any,
        args: Any,
        kwargs: Any,
        value: Any,
        *,
        layer: str | None = None,
        modes: Modes | None = None,
    ) -> fx.Node:
        """Write the node that made ``value``, under ``modes`` or the current ones (gradients, autocast)."""
        if not isinstance(target, Checkpointed):
            self.check_saving()
        if torch.get_default_dtype() != self.default_dtype:
            raise Untraceable("it computes under another default dtype")
        modes = modes or Modes.current()
        if modes != self.modes:
            if modes.inference:
                raise Untraceable("it computes under torch.inference_mode")
            function = CallMethod(target) if op == "call_method" else target
            op, target = "call_function", UnderModes(function, modes, self.modes)
        node = self.writer.node(op, target, args, kwargs, layer=layer)
        self.writer.bind(value, node)
        return node

    def recomputes(self) -> bool:
        """Does the backward run again what is recorded at this point?"""
        if self.paused:
            return False
        return self.reentrant is not None or saved_tensor_hooks() != self.saved_hooks

    def checkpointing(self) -> Checkpointed | None:
        """How the model's code checkpoints activations at this point, or None if it does not."""
        if self.reentrant is not None:
            return Checkpointed(use_reentrant=True)
        if saved_tensor_hooks() != self.saved_hooks and is_checkpointing(saved_tensor_hooks()):
            return Checkpointed(use_reentrant=False)
        return None

    def check_saving(self) -> None:
        """Refuse an operation under the model's own saved-tensor hooks, which a node cannot have."""
        if self.reentrant is None and saved_tensor_hooks() == self.saved_hooks:
            return
        if self.checkpointing() is None:
            raise Untraceable("it computes under saved-tensor hooks")
        if self.writer.layer:
            raise Untraceable("it checkpoints activations of its own code")

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module: as one node, or by running its forward, whose calls are recorded."""
        module = self.copy_of(module) or module
        path = self.path_of.get(id(module))
        if path is None:  # constructed in forward, such as nn.Softmax(dim=1)(x): part of its caller
            return original(module, *args, **kwargs)
        if not path:
            self.calls_model = True
        elif not self.calls_model:
            self.calls_layers = True
        leaf = is_torch_leaf(module) and not runs_own_hooks(module, self.reachable, self.path_of)
        checkpointed = not leaf and self.checkpointing() is not None
        whole = path in self.setup.whole or checkpointed
        if (whole or leaf) and _state(module) != self.own_parameters[id(module)]:
            if whole:
                with self.refusing():
                    raise Untraceable(f"it runs {path} with other parameters than its own")
            leaf = False
        if whole or leaf:
            if checkpointed:
                self.checkpointed.setdefault(path, locate_caller())
            return call_single_node(self, original, path, module, args, kwargs)
        caller, self.writer.layer = self.writer.layer, path
        try:
            with forbid_python_random(self.generators) if self.locate_draws else nullcontext():
                if isinstance(module, nn.TransformerEncoder):
                    return self.call_encoder(original, module, args, kwargs)
                return original(module, *args, **kwargs)
        except Exception as error:
            if self.failed_in is None or not leads_to(error, self.failed_in[0]):
                self.failed_in = error, path
            raise
        finally:
            self.writer.layer = caller

    def apply(self, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        """Run the custom autograd function ``cls`` as one node."""
        if cls is REENTRANT_CHECKPOINT:
            function, _, *inputs = args
            return self.apply_checkpoint(function, inputs)
        if kwargs:
            raise Untraceable(f"it applies {cls.__name__} with keyword arguments")
        node_args = self.writer.argument(args)
        self.single.ran_code = True
        with self.pausing():
            self.reached.begin(args, inside=self.setup.is_split)
            value = original(*executable(args))
            inside = self.reached.end(value)
        node = self.record("call_function", ApplyFunction(cls), node_args, {}, value)
        self.writer.note_inside(node, inside)
        return value

    def apply_by_alias(self, forward: Callable[..., Any], cls: Any, args: Any) -> Any:
        """Run the custom autograd function ``cls``, whose ``forward`` torch has called, as one node."""
        inputs = args[1:] if args and isinstance(args[0], FunctionCtx) else args
        with self.refusing():
            node_args = self.writer.argument(inputs)
        self.single.ran_code = True
        grad = self.flags.enabled_now  # torch disables gradients in such a forward
        with self.pausing():
            self.reached.begin(inputs, inside=self.setup.is_split)
            value = forward(*executable(args))
            inside = self.reached.end(value)
            # For an input that is returned as it is, torch would make an alias that is unknown here.
            written = map(id, getattr(args[0], "dirty_tensors", None) or ())
            given = {id(x) for x in inputs if isinstance(x, Tensor)}.difference(written)
            new = tree_map_only(Tensor, lambda x: x.view_as(x) if id(x) in given else x, value)
        self.flags.enabled_now = grad
        modes = Modes.current()._replace(grad=grad)
        node = self.record("call_function", ApplyFunction(cls), node_args, {}, new, modes=modes)
        self.writer.note_inside(node, inside)
        return new

    def call_script(
        self, original: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run a function of TorchScript as one node."""
        node_args, node_kwargs = self.writer.argument(args), self.writer.argument(kwargs)
        guess = GuessData(self.writer.converter.mode, self.setup.guess, self.reached.__contains__)
        with self.pausing():
            self.reached.begin((args, kwargs), inside=self.setup.is_split)
            with self.refusing(), guess:
                value = original(function, *executable(args), **executable(kwargs))
            inside = self.reached.end(value)
            reading = find_reading(
                self, guess, inside, functools.partial(original, function), (), args, kwargs
            )
        if guess.guessed and any(isinstance(x, bool | int | float) for x in tree_iter(value)):
            with self.refusing():
                raise Untraceable(
                    f"{function.name} returns a number that depends on values of tensors"
                )
        node = self.record("call_function", CallScript(function), node_args, node_kwargs, value)
        self.writer.note_inside(node, inside, reading)
        return value

    def call_encoder(
        self, original: Callable[..., Any], module: nn.TransformerEncoder, args: Any, kwargs: Any
    ) -> Any:
        """Run an encoder, with zeros for the padding where its fast path would make them."""
        padding = find_padding(module, args, kwargs, self.grad_enabled)
        if padding is None:
            return original(module, *args, **kwargs)
        norm, module.norm = module.norm, None
        try:
            output = original(module, *args, **kwargs)
        finally:
            module.norm = norm
        given = output, padding, getattr(module, "mask_check", True)
        with self.pausing():
            filled = fill_padding(*given)
        self.record("call_function", fill_padding, given, {}, filled)
        return filled if norm is None else norm(filled)

    def pack(self, func: Any, args: Any) -> Any:
        """Record that sequences are packed, or padded again, whose lengths are assumed."""
        self.packs = True
        name = func.__name__
        shorter = {"shorter": self.setup.shorter} if name == "_pack_padded_sequence" else {}
        data, counts = PACKING[name](*executable(args), **shorter)
        value = data, torch.empty(len(counts), dtype=torch.int64)
        self.record("call_function", WithLengths(func), args, {}, value)
        return value

    def run_backward(self, results: Sequence[Any], inputs: Sequence[Tensor]) -> None:
        """Run the backward of ``results`` if it may run code that is not torch's, for every slice."""
        if not (self.setup.is_split and self.single.ran_code and self.setup.grad):
            return
        with self.pausing():
            self.backward.run_backward(tensors_of_tree(results), inputs)

    def seed(self) -> None:
        """Refuse a forward that seeds torch's generator."""
        with self.refusing():
            raise Untraceable("it seeds torch's random numbers")

    def grad_enabled(self) -> bool:
        """Note that the model asks whether gradients are enabled."""
        return self.flags.ask()

    def apply_checkpoint(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run a function under reentrant checkpointing; the modules that it calls are single nodes."""
        before, self.reentrant = self.reentrant, inputs
        try:
            return function(*inputs)
        finally:
            self.reentrant = before

    def get_property(self, func: Any, tensor: Tensor) -> Any:
        """Read a property of a tensor, such as ``x.shape`` or ``x.T``."""
        value, name = func(tensor), func.__self__.__name__
        if name == "requires_grad" and not runs_library(sys._getframe(3)):
            return self.flags.ask_of(tensor, found=value)
        if name in _OF_EARLIER_STEPS and tensor.is_leaf:
            raise CaptureError(
                type(self.model).__name__,
                f"its forward reads the {name} of a tensor ({locate_caller()}), which depends on the steps "
                "before, and is another for each replica and slice of the batch",
                "keep what forward needs of it in a buffer, which you set between the steps",
            )
        if name == "shape":
            return self.sizes.shape(tensor, value)
        if isinstance(value, Tensor) and name not in ("grad", "_base"):
            self.record("call_function", getattr, (tensor, name), {}, value)
        return value

    def set_property(self, func: Any, tensor: Tensor, value: Any) -> None:
        """Assign to a property of a tensor, which only ``requires_grad`` allows."""
        name = func.__self__.__name__
        if name != "requires_grad":
            raise Untraceable(f"it assigns to the attribute {name!r} of a tensor")
        func(tensor, value)
        if not self.sets_flag(tensor):
            self.record("call_method", "requires_grad_", (tensor, value), {}, tensor)

    def sets_flag(self, tensor: Tensor) -> bool:
        """Is it the flag of an input or parameter that forward sets, which is set before a call then?

        Raises ``Untraceable`` if forward has used the tensor with another flag before.
        """
        if not self.flags.is_watched(tensor):
            return False
        node = self.writer.first_use(tensor)
        if node is not None:
            raise Untraceable(CHANGES_FLAGS)
        self.flags.set.add(id(tensor))
        return True

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a method that returns values of a tensor's elements to Python."""
        try:
            return func(*executable(args), **executable(kwargs))
        except Exception as error:
            return self.read_constant(func, args, kwargs, error)

    def read_constant(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Call such a method on the value of a constant. Raises ``Untraceable`` for any other tensor."""
        node, constants = self.writer.node_of(args[0]), self.writer.constants
        known = find_value(node, constants, self.sizes.values)
        if known is None:
            if (check := running_check()) is None:
                raise Untraceable(_READS_VALUES) from error
            require, value = check
            self.record("call_function", require, (args[0], value), {}, None)
            return True
        for constant in known.constants:
            if constant not in self.made:
                self.values_read.setdefault(constant, (self.writer.layer, locate_caller()))
                self.tensors_read.append(constants[constant.name])
        with without_torch_function(), without_modes():
            return func(*executable((known.value, *args[1:])), **executable(kwargs))

    def make_constant(self, value: Tensor) -> Tensor:
        """Record a tensor that forward made from numbers. Runs get a copy, to which they may write."""
        if value.requires_grad:
            raise Untraceable("it makes a tensor that requires a gradient")
        self.made_tensors.append(value)
        fake = self.writer.converter.tensor(value)
        self.made.add(self.writer.constant(fake, f"_constant_{digest(value)}", value))
        copied = fake.clone()
        self.record("call_method", "clone", (fake,), {}, copied)
        return copied

    def is_cache(self, left: Left) -> bool:
        """Is what forward has left computed from constants and sizes alone, as a grid of positions is?

        Then the next call may read it; the program computes it anew in every call.
        """
        nodes = [leaf for leaf in left.leaves if isinstance(leaf, fx.Node)]
        return all(is_constant(x, self.writer.constants, self.sizes.values) for x in nodes)

    def keep(self, tensor: Tensor) -> None:
        """Let the next run read ``tensor``, which forward has left somewhere."""
        if self.writer.makes(tensor):
            with without_torch_function(), without_modes():
                original = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.writer.converter.register(tensor, original)

    def lines(self, results: Sequence[Any], *, constants: bool) -> list[str]:
        """The recorded graph as text; without ``constants``, all constants look alike."""
        graph, sizes = self.writer.graph, self.sizes.values
        labels: dict[fx.Node, str] = {}
        if not constants:
            known = dict.fromkeys(self.writer.constants, torch.zeros(()))
            for node in graph.nodes:
                if node in sizes:
                    labels[node] = repr(sizes[node])
                elif is_constant(node, known, sizes):
                    labels[node] = "constant"
        return varying_lines(graph, results, labels)

    def check_constants(self) -> None:
        """Refuse a forward that reads values of a constant and writes to it, since the next run differs."""
        for constant, (layer, location) in self.values_read.items():
            if is_written(constant):
                raise TraceFailure(layer, _READS_VALUES, location)


# Cached, because torch's function silences warnings in every call, which is slow.
_is_method = functools.cache(is_tensor_method_or_property)


def _state(module: nn.Module) -> tuple[int, ...]:
    """The identities of the parameters of ``module``, which ``functional_call`` replaces."""
    if not module._modules:  # most modules; `parameters()` takes ten times as long
        return tuple(map(id, module._parameters.values()))
    return tuple(map(id, module.parameters()))
