"""What an optimizer needs on a device: bytes for its state and during its step, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placer.catalogue import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """Bytes that an optimizer needs: ``state`` always, the others during its step.

    ``state`` is per byte of parameter. ``each`` is per byte of `StageState.updating`, if parameters
    are updated one after the other; ``together`` per byte of all parameters that the device trains, if
    they are updated at once (``foreach``).
    """

    state: float
    each: float = 0.0
    together: float = 0.0


_STATE = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}  # as torch.optim keeps it


def optimizer_bytes(
    optimizer: str | Mapping[str, int], *, together: bool = False
) -> OptimizerMemory:
    """The memory of the optimizer that a spec names, per byte of (float32) parameter.

    ``together`` means that it updates all parameters of a device at once (``foreach``), as torch's
    optimizers do by default if all parameters are on CUDA devices. Adam's ``torch._foreach_sqrt`` then
    allocates the square roots of all of them (torch/optim/adam.py of 2.15, ``_multi_tensor_adam``); SGD
    allocates nothing in either case. For an optimizer given by the size of its state, only that is counted.
    """
    if not isinstance(optimizer, str):
        return OptimizerMemory(state=optimizer["bytes_per_parameter"] / 4)
    if optimizer not in ("adam", "adamw"):
        return OptimizerMemory(state=_STATE[optimizer])
    return OptimizerMemory(state=_STATE[optimizer], each=1.0 - together, together=1.0 * together)


# Bytes that an optimizer reads and writes, per byte of parameter, counted in torch/optim of 2.15.
# Adam's lerp_, mul_, addcmul_, sqrt, div_, add_ and addcdiv_ are 19 passes, and AdamW has another mul_.
# SGD has an add_ (3 passes), with momentum another mul_ and add_.
_PASSES = {"sgd": 3, "sgd_momentum": 8, "adam": 19, "adamw": 21}


def optimizer_passes(optimizer: str | Mapping[str, int]) -> float:
    """The bytes that the optimizer's step reads and writes, per byte of parameter.

    An optimizer given by the size of its state is assumed to read and write that state once.
    """
    if isinstance(optimizer, str):
        return _PASSES[optimizer]
    return 3 + 2 * optimizer["bytes_per_parameter"] / 4


def optimizer_seconds(nbytes: float, optimizer: str | Mapping[str, int], kind: DeviceKind) -> float:
    """The seconds that the optimizer's step takes for ``nbytes`` of parameters on a device."""
    rate = kind.rates["optimizer", "float32"]
    return rate.seconds(0, optimizer_passes(optimizer) * nbytes) if nbytes else 0.0
