"""The precision in which torch computes: autocast for a spec's, and fp32 without TF32 for comparisons."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_state(device_type: str) -> tuple[str, ...]:
    """The data types of the current autocast, on the CPU and on devices of this type."""
    kinds = dict.fromkeys(("cpu", device_type))
    return tuple(
        f"{kind} {torch.get_autocast_dtype(kind)}"
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    )


def precision_context(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """Autocast on devices of this type for ``"bf16"`` and ``"fp16"``, no context for ``"fp32"``."""
    if precision == "fp32":
        return nullcontext()
    # Cached casts of weights would pile up over the stage; only a backward has a use for them.
    # (A cached cast also requires grad, and then torch multiplies by other kernels.)
    kept = torch.is_grad_enabled()
    return torch.autocast(device_type, _AUTOCAST[precision], cache_enabled=kept)


@contextmanager
def casts_kept(precision: str) -> Iterator[None]:
    """In this block, autocast casts a weight once, for all micro-batches that read it.

    torch drops all casts when the outermost autocast of a thread ends, also in a thread of autograd's that
    recomputes a region. So backwards run in the calling thread here. The gradients of casts come at the end
    of a backward: autograd runs first what was recorded last, and casts are of the first micro-batch.
    """
    if precision == "fp32" or not torch.is_grad_enabled():
        yield
        return
    present = torch.autocast(
        "cpu",
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    with present, torch.autograd.set_multithreading_enabled(False):
        try:
            yield
        finally:
            torch.clear_autocast_cache()  # also where the caller has an autocast of their own


def keeps_casts(precision: str, microbatches: int, *, own_weights: bool) -> bool:
    """Are casts of weights kept for all micro-batches of a training step, and not made for each?

    ``own_weights``: no stage reads copies of another one's weights, of which torch keeps no casts.
    """
    return precision != "fp32" and microbatches > 1 and own_weights


def present_autocast(precision: str) -> torch.dtype | None:
    """The data type of the autocast under which stages of this precision would run now; None without one.

    In fp32 that is the caller's autocast, of the accelerator or else of the CPU.
    """
    if precision != "fp32":
        return _AUTOCAST[precision]
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
    return next((torch.get_autocast_dtype(x) for x in kinds if torch.is_autocast_enabled(x)), None)


def planned_autocast(precision: str) -> torch.dtype | None:
    """The same where the caller has none."""
    return _AUTOCAST.get(precision)


def recorded_under(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to ``dtype``, or none, on the CPU, where models are recorded on fake tensors."""
    return torch.autocast("cpu", dtype or torch.bfloat16, dtype is not None, cache_enabled=False)


@contextmanager
def full_precision() -> Iterator[None]:
    """In this block, torch computes fp32 convolutions, products and RNNs in fp32; then as before.

    By default it uses TF32 for convolutions on CUDA. There are two sets of switches: ``fp32_precision`` per
    backend and operation, where "none" takes that of the backend, or of all, and the older ``allow_tf32``
    and `torch.set_float32_matmul_precision`, which set the newer ones too. If the two disagree, torch raises
    an error when the older ones are read, as ``cudnn.flags()`` does (aten/src/ATen/Context.cpp of 2.9; 2.15
    does the same). So this sets both, and puts back both; what the user has set may disagree. A switch that
    was never set keeps its value, but no longer follows the one for everything if that is set later.
    """
    backends: Any = torch.backends
    parents = (backends, backends.cudnn)
    operations = (
        *(backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul),
        *(backends.mkldnn.conv, backends.mkldnn.rnn, backends.mkldnn.matmul),
    )
    with _without_warnings():
        # A parent that is "none" shows what its children themselves are.
        switches = [*zip(parents, _take(parents), strict=True)]
        switches += [*zip(operations, _take(operations), strict=True)]
        _set_all(operations, "ieee")
        allowed, products = _allows_tf32_in_cudnn(), torch.get_float32_matmul_precision()
        backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        _set_all(operations, "ieee")
    try:
        yield
    finally:
        with _without_warnings():
            backends.cudnn.allow_tf32 = allowed
            torch.set_float32_matmul_precision(products)
            for switch, value in switches:
                switch.fp32_precision = value


def _take(switches: Sequence[Any]) -> list[str]:
    """The values of the switches, each set to "none" after it was read."""
    found = []
    for switch in switches:
        found.append(str(switch.fp32_precision))
        switch.fp32_precision = "none"
    return found


def _set_all(switches: Sequence[Any], value: str) -> None:
    for switch in switches:
        switch.fp32_precision = value


def _allows_tf32_in_cudnn() -> bool:
    """The older switch of cuDNN, while the newer ones are off: torch refuses to read it if it is on."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return True


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the older switches are old
        yield
