"""Makes torch's optimizer for the optimizer that a plan names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer.partition.stage_cost.optimizer import optimizer_bytes
from placer.program.fake.row_gradients import row_gradient


def make_optimizer(
    wanted: str | Mapping[str, int],
    parameters: Sequence[nn.Parameter],
    *,
    foreach: bool | None = None,
) -> torch.optim.Optimizer:
    """The optimizer ``wanted`` over ``parameters``.

    ``foreach`` is torch's option to update all parameters in one operation; by default torch chooses by
    the device of the parameters.
    """
    if not parameters:
        return torch.optim.SGD([torch.zeros(0, requires_grad=True)])
    if not isinstance(wanted, str):
        return _SizedState(parameters, wanted["bytes_per_parameter"])
    if wanted == "adam":
        return torch.optim.Adam(parameters, foreach=foreach)
    if wanted == "adamw":
        return torch.optim.AdamW(parameters, foreach=foreach)
    momentum = 0.9 if wanted == "sgd_momentum" else 0.0
    return torch.optim.SGD(parameters, lr=1e-3, momentum=momentum, foreach=foreach)


class RowUpdates:
    """Updates of parameters whose gradients are sparse, which ``SparseAdam`` or ``SGD`` makes.

    The optimizer's state is as large as for a dense gradient. ``SparseAdam`` has at most six tensors like
    the values at a time, and a copy of the indices (torch/optim/_functional.py of 2.15).
    """

    def __init__(self, wanted: str | Mapping[str, int], parameters: Iterable[nn.Parameter]) -> None:
        self._wanted, self._parameters = wanted, list(parameters)
        self._state: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Allocate the state, in the first step, and what an update needs."""
        is_adam = self._wanted in ("adam", "adamw")
        for parameter in self._parameters:
            if not row_gradient(parameter):
                continue
            if parameter not in self._state:
                nbytes = optimizer_bytes(self._wanted).state * parameter.nbytes
                self._state[parameter] = parameter.new_empty(int(nbytes), dtype=torch.uint8)
            if is_adam:
                indices, values = row_gradient(parameter)
                _ = indices.clone(), [values.clone() for _ in range(6)]


class _SizedState(torch.optim.Optimizer):
    """An optimizer that only allocates state, of a given number of bytes per element of a parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter], bytes_per_parameter: int) -> None:
        super().__init__(parameters, {"bytes_per_parameter": bytes_per_parameter})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    size = p.numel() * group["bytes_per_parameter"]
                    self.state[p]["held"] = p.new_empty(size, dtype=torch.uint8)
