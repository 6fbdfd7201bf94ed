"""Makes torch's optimizer for the optimizer that a plan names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


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
