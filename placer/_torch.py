"""All uses of private names of torch, but for the patches in `placer._torch_patches`.

`PRIVATE_NAMES` lists them, and `OBJECT_ATTRIBUTES` those that only
objects have. Other files may use `SHARED_ATTRIBUTES`, and the public names of `SHARED_MODULES`. A test
compares these tables with the code. The names of operators (``aten._to_copy``) are not private.

This file can be imported with any release of torch, because private names are looked up when they are
used. `missing_names` tells which ones the installed torch lacks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

PRIVATE_NAMES = (
    # For planning:
    "torch.UntypedStorage._cdata",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.get_unwrapped",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "torch._C._autograd._saved_tensors_hooks_enable",
    "torch._C._autograd._saved_tensors_hooks_disable",
    "torch._C.DisableTorchFunction",
    "torch.overrides._get_current_function_mode_stack",
    "torch.nn.Module._apply",
    "torch._C._create_function_from_graph",
    "torch._C._set_grad_enabled",
    "torch.nn.utils.parametrize._cache",
    "torch.nn.utils.parametrize._cache_enabled",
    "torch.random.default_generator",  # torch.manual_seed and its like look it up there
    "torch.library._scoped_library",
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    "torch._C.DispatchKey.AutocastCPU",
    "torch._C.DispatchKeySet",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_keyset_full_after",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
    "torch.Tensor._make_subclass",
    "torch.Tensor._base",
    "torch._C._set_throw_on_mutable_data_ptr",
    # For running a model, too:
    "torch.nn.Module._replicate_for_data_parallel",
    "torch.nn.RNNBase._init_flat_weights",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.autograd.forward_ad._current_level",
    "torch._C._are_functorch_transforms_active",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._profiler_enabled",
    "torch._C._current_autograd_node",
    "torch.utils.checkpoint._StopRecomputationError",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C._accelerator_setAllocatorSettings",
    "torch.cuda.memory._snapshot",
    # For a process per device, too:
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.nn.utils.clip_grad._get_total_norm",
    "torch.Tensor._make_wrapper_subclass",
)
"""Private names in full. Tested with the releases of torch in `placer.versions`."""

# Only this file uses these. `missing_names` cannot look for them without an object that has them.
OBJECT_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "a module": (
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_is_full_backward_hook",
        "_backward_pre_hooks",
    ),
    "an RNN": ("_flat_weights", "_flat_weights_names"),
    "a module that torch.compile returned": ("_orig_mod",),
    "torch, whose compiler takes seconds to import": ("_dynamo",),
    "a tensor that stands for a parameter": ("_is_param",),
    "an operator": ("_op_dk",),
    "an autograd node": ("_sequence_nr", "_set_sequence_nr"),
    "the options of a process group's backend": ("_timeout",),
    "an optimizer": ("_optimizer_step_post_hooks",),
}

# Any file may use these. No public name replaces them; code for torch relies on them everywhere.
SHARED_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "a module": (
        "_parameters",
        "_buffers",
        "_non_persistent_buffers_set",
        "_modules",
        "_forward_hooks",
        "_apply",  # overridden
        "_load_from_state_dict",  # overridden
        "_reset_parameters",  # of nn.MultiheadAttention and of many models
    ),
    "a tensor": ("_version",),
    "an operator": ("_schema",),
}
SHARED_MODULES = ("torch._subclasses", "torch.utils._pytree", "torch.utils._python_dispatch")


def missing_names() -> list[str]:
    """The private names that the installed torch lacks; it may be built without ``torch.distributed``."""
    left_out = () if dist.is_available() else ("torch.distributed",)
    return [n for n in PRIVATE_NAMES if not n.startswith(left_out) and not _is_there(n)]


def _is_there(name: str) -> bool:
    """Does ``name`` exist, a module or an attribute in one?"""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


SET_GRAD_ENABLED: Any = getattr(torch._C, "_set_grad_enabled", None)
"""What ``torch.no_grad`` and its like call, in Python. Torch's C++ code has other ways."""


def make_wrapper(cls: type[Tensor], like: Tensor, shape: torch.Size) -> Any:
    """A tensor of the class ``cls`` of this shape, without elements, otherwise like ``like``."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)


def is_view(tensor: Tensor) -> bool:
    """Does autograd see it as a part of another tensor, which a write to it changes?"""
    return tensor._base is not None


def unoptimized(function: Any) -> Any:
    """``function``, one of TorchScript, as before its first call: it runs the operators in its source.

    After some calls, TorchScript runs optimized parts that detach their inputs and have a backward of their
    own, which does not work on fake tensors.
    """
    return torch._C._create_function_from_graph(function.name, function.graph.copy())


def clone_shallow(
    module: nn.Module, parameters: dict[str, Tensor | None], buffers: dict[str, Tensor | None]
) -> nn.Module:
    """A shallow copy of ``module`` that shares its attributes and hooks, with the given tensors.

    It is made as ``nn.DataParallel`` makes replicas. The tensors need not be leaves, so they are put
    into ``_parameters`` directly; RNNs have a second list of their weights.
    """
    clone: nn.Module = module._replicate_for_data_parallel()
    clone._parameters = parameters  # type: ignore[assignment]
    clone._buffers = buffers
    if isinstance(clone, nn.RNNBase):
        clone._flat_weights = [getattr(clone, name) for name in clone._flat_weights_names]
    return clone


def is_in_cache_of_parametrizations(module: nn.Module) -> bool:
    """Are we in ``parametrize.cached()``, and does ``module`` have parametrizations?"""
    return bool(parametrize._cache_enabled) and parametrize.is_parametrized(module)


def refresh_weight_list(module: nn.Module) -> None:
    """Make the list of weights that an RNN has besides its parameters anew, after these were replaced."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def is_own_leaf(tensor: Tensor) -> bool:
    """Does ``tensor`` collect a gradient of its own, as ``torch.zeros(4, requires_grad=True)`` does?"""
    return tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter)


def copy_attributes(
    source: Tensor, target: Tensor, convert: Callable[[Any], Any] = lambda value: value
) -> None:
    """Set on ``target`` what a user has set on ``source``, such as ``weight.is_expert``, converted."""
    for name in vars(source).keys() - vars(target).keys():  # a fake tensor has its own
        vars(target)[name] = convert(vars(source)[name])


def mark_parameter(tensor: Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true, as ``nn.Parameter`` does for other classes."""
    tensor._is_param = True


def storage_key(tensor: Tensor) -> int:
    """A number that identifies the tensor's storage; views of one another have the same."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


FORWARD_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOK_TABLES = ("_backward_hooks", "_backward_pre_hooks")
HOOK_TABLES = (*FORWARD_HOOK_TABLES, *BACKWARD_HOOK_TABLES)
"""The attributes of a module that hold the hooks of its calls."""
ALL_HOOK_TABLES = tuple(name for name in vars(torch.nn.Module()) if "_hooks" in name)
"""Those, and others: for ``state_dict``, and that say how hooks are called."""


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of the calls of ``module``, forward and backward."""
    return [hook for name in HOOK_TABLES for hook in vars(module)[name].values()]


def global_hooks() -> list[Any]:
    """The hooks of the calls of all modules, as added by ``register_module_forward_hook``."""
    every = nn.modules.module
    forward = *every._global_forward_pre_hooks.values(), *every._global_forward_hooks.values()
    return [
        *forward, *every._global_backward_pre_hooks.values(), *every._global_backward_hooks.values()
    ]  # fmt: skip


def share_hooks(module: nn.Module, other: nn.Module) -> None:
    """Let ``other`` have the hooks of ``module``, also those that it gets later."""
    for name in (*ALL_HOOK_TABLES, "_is_full_backward_hook"):
        other.__dict__[name] = module.__dict__[name]


def forward_pre_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The forward pre-hooks of ``module``, and whether each takes keyword arguments."""
    with_kwargs = module._forward_pre_hooks_with_kwargs
    return [(hook, key in with_kwargs) for key, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The forward hooks of ``module``, and whether each takes keyword arguments."""
    with_kwargs = module._forward_hooks_with_kwargs
    return [(hook, key in with_kwargs) for key, hook in module._forward_hooks.items()]


def has_backward_hooks(module: nn.Module) -> bool:
    """Does ``module`` have full backward hooks, or pre-hooks?"""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Has ``torch.compile`` returned ``module``? The module that was compiled is its ``_orig_mod``."""
    # Not by isinstance: importing torch._dynamo takes seconds.
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def is_under_compile() -> bool:
    """Is this code being traced by ``torch.compile``, or called from compiled code?"""
    if torch.compiler.is_compiling():
        return True
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)


def compiled_as_written() -> AbstractContextManager[Any]:
    """In this block, code that ``torch.compile`` compiles follows hooks and draws numpy's random numbers.

    By default torch ignores hooks that are added later, and draws from its own generator for numpy.
    """
    import torch._dynamo  # takes seconds

    return torch._dynamo.config.patch(  # type: ignore[no-any-return]
        skip_nnmodule_hook_guards=False, use_numpy_random_stream=True
    )


def is_profiling() -> bool:
    """Does a profiler of torch run?"""
    return torch._C._autograd._profiler_enabled()


def is_transformed() -> bool:
    """Is a ``torch.func`` transform (grad, vmap, jvp) or forward-mode AD active?

    These need rules that torch's operators have, but not every ``autograd.Function``.
    """
    level: int = torch.autograd.forward_ad._current_level
    return level >= 0 or bool(torch._C._are_functorch_transforms_active())


def gradient_hook_tables(tensor: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks on the gradient of ``tensor`` by id: those that may change it, and those after it is added.

    Autograd reads these tables whenever it computes the gradient, so what is taken out does not run.
    """
    changing, telling = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return {} if changing is None else changing, {} if telling is None else telling


def copy_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Register the hooks of ``source`` on its gradient on ``target``, too, while ``source`` has them."""
    register = target.register_hook, target.register_post_accumulate_grad_hook
    for table, add in zip(gradient_hook_tables(source), register, strict=True):
        for key, hook in table.items():
            add(functools.partial(_call_if_in, table, key, hook))


def _call_if_in(
    table: dict[int, Any], key: int, hook: Callable[[Tensor], Any], given: Tensor
) -> Any:
    return hook(given) if key in table else None


def is_batch_of_gradients(gradient: Tensor) -> bool:
    """Has ``gradient`` been made by ``autograd.grad(…, is_grads_batched=True)``? It has no storage then."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(gradient))


def next_sequence_number() -> int:
    """The sequence number of the next autograd node that is made in this thread."""
    return torch._C._autograd._get_sequence_nr()


def running_sequence_number() -> int | None:
    """The sequence number of the autograd node whose backward runs now; None outside of backward.

    It is -1 for a node that was given to `run_at_once`.
    """
    node = torch._C._current_autograd_node()
    number = None if node is None else node._sequence_nr()
    return -1 if number == _FIRST_IN_LINE else number


def run_at_once(node: torch.autograd.graph.Node) -> None:
    """Make autograd run ``node`` as soon as its gradient is there, before all other nodes.

    Of the nodes that are ready, autograd runs the one with the highest sequence number.
    """
    node._set_sequence_nr(_FIRST_IN_LINE)  # type: ignore[attr-defined]


_FIRST_IN_LINE = 2**63 - 1


def default_store() -> Any:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def default_timeout(device: torch.device) -> timedelta:
    """The timeout of the default process group for tensors on ``device``."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(device)
    timeout: timedelta = backend.options._timeout
    return timeout


def is_checkpointing(hooks: object) -> bool:
    """Are these the saved-tensor hooks of non-reentrant ``torch.utils.checkpoint``?"""
    return isinstance(hooks, tuple) and hooks[0].__module__ == "torch.utils.checkpoint"


STOP_RECOMPUTING: type[Exception] = torch.utils.checkpoint._StopRecomputationError
"""Raised to end a run under non-reentrant ``torch.utils.checkpoint`` of which no more is needed."""


REENTRANT_CHECKPOINT: type = torch.utils.checkpoint.CheckpointFunction
"""The autograd function of reentrant ``torch.utils.checkpoint``: (function, keep RNG state, *inputs)."""


def saved_tensor_hooks() -> Any:
    """The saved-tensor hooks (pack, unpack) that are in force, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


READS_DEVICE = torch.ops.prim.device.default
"""The operator that reads a tensor's device. On fake tensors, modes see it more often than others."""


class TraceableMode:
    """A base of dispatch modes: ``torch.compile`` may trace code under them.

    Torch would prevent that by a wrapper around every call, which takes as long as the mode itself.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class DispatchMode(TraceableMode, TorchDispatchMode):
    """A dispatch mode whose subclasses implement `run`; reads of a tensor's device do not reach them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READS_DEVICE and type(args[0]) is FakeTensor:
            return args[0].device  # no need to ask other modes
        # Otherwise torch-function modes would see every access to a tensor in `run`.
        with without_torch_function():
            if func is READS_DEVICE:
                return func(args[0])
            return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result for ``func(*args, **kwargs)``."""
        raise NotImplementedError


class FakeTensors:
    """Makes fake tensors of one mode and device, faster than ``FakeTensor`` does.

    Their attributes are all the same, so they are copied from a fake tensor that torch has made.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._device = device
        with without_modes(), without_torch_function():
            sample = FakeTensor(mode, torch.empty(0, device="meta"), device)
        self._attributes = dict(sample.__dict__)

    def make(self, data: Tensor) -> FakeTensor:
        """``FakeTensor(mode, data, device)`` for ``data`` on meta that requires no gradient."""
        made: FakeTensor = Tensor._make_subclass(
            FakeTensor, data, False, dispatch_device=True, device_for_backend_keys=self._device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self._attributes)
        return made


def as_meta(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """In this context, C++ treats the fake tensors of ``mode`` as meta tensors, without any mode."""
    return in_kernel_invocation_manager(mode)


def without_modes() -> AbstractContextManager[object]:
    """A context in which all dispatch modes are disabled."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@contextmanager
def without_transforms() -> Iterator[None]:
    """A context in which all ``torch.func`` transforms are disabled."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    autograd = torch._C._autograd
    refusal = autograd._saved_tensors_hooks_get_disabled_error_message()
    with temporarily_clear_interpreter_stack():
        if refusal is not None:
            autograd._saved_tensors_hooks_enable()
        try:
            yield
        finally:
            if refusal is not None:
                autograd._saved_tensors_hooks_disable(refusal)


def without_torch_function() -> AbstractContextManager[object]:
    """A context in which all torch-function modes are disabled."""
    return torch._C.DisableTorchFunction()


def function_modes() -> list[TorchFunctionMode]:
    """The torch-function modes that are in force, the outermost first. A backward has none of them."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
    return modes


def all_gather_single(
    whole: Tensor, part: Tensor, group: Any, *, async_op: bool = False
) -> dist.Work | None:
    """Gather a part of every rank; torch before 2.14 has another name for it, which 2.14 deprecates."""
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found: dist.Work | None = run(whole, part, group=group, async_op=async_op)
    return found


def reduce_scatter_single(part: Tensor, whole: Tensor, group: Any) -> dist.Work | None:
    """Begin a reduce-scatter, which has two names for the same reason as `all_gather_single`."""
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    found: dist.Work | None = run(part, whole, group=group, async_op=True)
    return found


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort and remove ``group`` without waiting for its other ranks.

    ``dist.destroy_process_group`` is for a group without operations in progress. Over gloo there is
    nothing to abort. This was not tested with NCCL; according to pytorch#119797, ranks that abort
    several groups one after the other may wait for each other.
    """
    dist.distributed_c10d._abort_process_group(group)


def hook_first_after_step(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    """Register a step post hook that runs before the optimizer's others; the handle removes it."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def call_composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the composite implementation of ``op``, which calls other operators.

    ``op.decompose`` may call another one, which is written in Python (for dropout, say).
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@functools.cache
def autocast_operators(device_type: str) -> frozenset[Any]:
    """The aten operators that have an autocast kernel for ``device_type``."""
    key = f"Autocast{device_type.upper()}"
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            base, _, overload = name.removeprefix("aten::").partition(".")
            found.add(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return frozenset(found)


def call_below_autocast(op: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``op`` without its own autocast kernel; operators that it calls are still cast."""
    after = keyset & torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
    return op.redispatch(after, *args, **kwargs)


def call_without_autocast(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``op`` with autocast disabled inside, as autocast's own kernels do."""
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    ):
        return op(*args, **kwargs)


def set_expandable_segments() -> None:
    """Set expandable segments for torch's CUDA allocator, as ``PYTORCH_ALLOC_CONF`` would."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def has_expandable_segments() -> bool:
    """Does torch's CUDA allocator use expandable segments for new memory?"""
    return bool(_allocator_settings().get("expandable_segments", False))


def given_allocator_settings() -> str:
    """The settings that torch's CUDA allocator was given last, by a variable or by the program; or ""."""
    return str(_allocator_settings().get("PYTORCH_CUDA_ALLOC_CONF", ""))


def _allocator_settings() -> dict[str, Any]:
    try:
        settings: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    except RuntimeError:  # the backend cudaMallocAsync has no segments, and no snapshot
        return {}
    return settings
