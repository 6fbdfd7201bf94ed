"""The memory of an optimizer's state and of its step on a device, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placer.machine.catalogue import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """Memory of an optimizer as ratios: ``state`` throughout, the others only during its step.

    ``state`` is in bytes per byte of parameter. ``each`` is per byte of `StageState.updating`, if
    parameters are updated one after the other. ``together`` is per byte of all parameters that the device
    trains, if they are updated at once (``foreach``).
    """

    state: float
    each: float = 0.0
    together: float = 0.0

    def divided(self, ranks: int) -> OptimizerMemory:
        """The memory of a rank that updates one of ``ranks`` equal pieces of every parameter."""
        return OptimizerMemory(
            state=self.state / ranks, each=self.each / ranks, together=self.together / ranks
        )


_STATE = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}  # as torch.optim keeps it


def optimizer_bytes(
    optimizer: str | Mapping[str, int], *, together: bool = False
) -> OptimizerMemory:
    """The memory of the optimizer that a spec names, per byte of (float32) parameter.

    ``together``: all parameters of a device are updated at once (``foreach``), as torch's optimizers do by
    default if all parameters are on CUDA devices. Adam's ``torch._foreach_sqrt`` then allocates the square
    roots of all of them (torch/optim/adam.py of 2.15, ``_multi_tensor_adam``). SGD allocates nothing in
    either case. If the optimizer is given by the size of its state, only the state is counted.
    """
    if not isinstance(optimizer, str):
        return OptimizerMemory(state=optimizer["bytes_per_parameter"] / 4)
    if optimizer not in ("adam", "adamw"):
        return OptimizerMemory(state=_STATE[optimizer])
    return OptimizerMemory(state=_STATE[optimizer], each=1.0 - together, together=1.0 * together)


# Bytes that an optimizer reads and writes, per byte of parameter, counted in torch/optim of 2.15.
# Adam's lerp_, mul_, addcmul_, sqrt, div_, add_ and addcdiv_ make 19 passes; AdamW adds a mul_.
# SGD has an add_ (3 passes), and with momentum also a mul_ and another add_.
_PASSES = {"sgd": 3, "sgd_momentum": 8, "adam": 19, "adamw": 21}


def optimizer_passes(optimizer: str | Mapping[str, int]) -> float:
    """The bytes that the optimizer's step reads and writes, per byte of parameter.

    An optimizer given by the size of its state is assumed to read and write that state once.
    """
    if isinstance(optimizer, str):
        return _PASSES[optimizer]
    return 3 + 2 * optimizer["bytes_per_parameter"] / 4


def optimizer_seconds(nbytes: float, optimizer: str | Mapping[str, int], kind: DeviceKind) -> float:
    """Seconds of the optimizer's step for ``nbytes`` of parameters on a device of this kind."""
    rate = kind.rates["optimizer", "float32"]
    return rate.seconds(0, optimizer_passes(optimizer) * nbytes) if nbytes else 0.0
