"""Finds out whether an optimizer updates each number of a parameter by itself, as SGD and Adam do."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from placer.errors import PlacerError, first_line

# What a learning-rate scheduler sets, bound to the optimizer itself, and a GradScaler for a single step.
_NOT_COPIED = ("step", "grad_scale", "found_inf")
_ROWS, _COLUMNS, _CUT = 96, 256, 10_007  # of a trial: a matrix, cut where no block of numbers ends


def require_elementwise(optimizer: Optimizer, like: Tensor) -> None:
    """Raise ``PlacerError`` unless ``optimizer`` updates each number by its own gradients and state.

    It is tried with a small matrix on the device of ``like``, whole and in two pieces.
    """
    why = ""
    for has_state in (False, True):  # most optimizers make it in their first step, Adagrad before
        try:
            if _is_elementwise(partial(_try, optimizer, like, has_state=has_state)):
                return
            why = "its result for a matrix is not that for two pieces of it"
            break
        except Exception as error:
            why = f"a trial with a small matrix failed: {type(error).__name__}: {first_line(error)}"
    raise PlacerError(
        type(optimizer).__name__,
        f'does not update each number by itself, as divided state ("shard_state") needs ({why})',
        "use \"shard_state\": 'none', if need be with torch.distributed.optim.ZeroRedundancyOptimizer, which "
        "divides whole parameters, or an optimizer that does (SGD, Adam, AdamW, …)",
    )


def _is_elementwise(run: Callable[[Tensor, Sequence[Tensor]], list[Tensor]]) -> bool:
    """Does ``run`` (weights and gradients to new weights) give the same for a matrix and for its pieces?"""
    make = partial(torch.randn, _ROWS * _COLUMNS, generator=torch.Generator().manual_seed(0))
    weights, gradients = make(), [make() * scale for scale in (1, 0.1, 10)]
    gradients[0][: _CUT // 2] *= 5  # pieces have other norms than the whole
    size = _ROWS, _COLUMNS
    whole = run(weights.view(size), [gradient.view(size) for gradient in gradients])
    pieces = slice(_CUT), slice(_CUT, None)
    parts = [run(weights[at], [gradient[at] for gradient in gradients]) for at in pieces]
    return all(
        torch.allclose(one.view(-1), torch.cat(others), rtol=1e-4, atol=1e-6)
        and not torch.equal(one.view(-1), weights.to(one))
        for one, *others in zip(whole, *parts, strict=True)
    )


def _try(
    optimizer: Optimizer,
    like: Tensor,
    weights: Tensor,
    gradients: Sequence[Tensor],
    *,
    has_state: bool,
) -> list[Tensor]:
    """The weights after steps of an optimizer with the options of each group of ``optimizer``.

    The learning rate is another, because a warm-up may begin with none, which would show nothing. With
    ``has_state``, state is zeros where ``optimizer`` has some of a group's largest parameter.
    """
    trial = copy.copy(optimizer)  # without hooks; __getstate__ leaves out other attributes too
    for name, value in vars(optimizer).items():
        if name not in _NOT_COPIED:
            vars(trial).setdefault(name, value)
    trial.param_groups, trial.state = [], defaultdict(dict)
    tried = []
    for group in optimizer.param_groups:
        parameter = nn.Parameter(weights.to(like.device, copy=True))
        options = copy.deepcopy({name: each for name, each in group.items() if name != "params"})
        if isinstance(rate := options.get("lr"), int | float | Tensor):
            options["lr"] = torch.full_like(rate, 0.1) if isinstance(rate, Tensor) else 0.1
        trial.param_groups.append({**options, "params": [parameter]})
        tried.append(parameter)
        if has_state and group["params"]:
            largest = max(group["params"], key=Tensor.numel)
            for key, value in optimizer.state.get(largest, {}).items():
                is_like = isinstance(value, Tensor) and value.dim() > 0
                made = torch.zeros_like(parameter) if is_like else copy.deepcopy(value)
                trial.state[parameter][key] = made
    for gradient in gradients:
        for parameter in tried:
            parameter.grad = gradient.to(like.device, copy=True)
        type(trial).step(trial)
    return [parameter.detach() for parameter in tried]
