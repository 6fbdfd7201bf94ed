"""Makes the steps of the user's own optimizers update pieces of parameters; see `reduction.pieces`."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placer._torch import hook_first_after_step
from placer.errors import PlacerError, first_line
from placer.executor.distributed.job.groups import gather_objects
from placer.executor.distributed.partial import runtime_of_rank
from placer.executor.distributed.reduction.pieces import Pieces

if TYPE_CHECKING:
    from placer.executor.distributed.runtime import DistributedRuntime

_ROWS, _COLUMNS, _CUT = 96, 256, 10_007  # of a trial: a matrix, cut where no block of numbers ends


def update_pieces(module: nn.Module) -> None:
    """Make every optimizer that steps with parameters of ``module`` update this rank's pieces of them.

    Hooks on gradients and on the optimizer see whole tensors. Raises ``PlacerError`` at the first step of an
    optimizer that does not update each number by itself, or that has other parameters on other ranks.
    """
    reference = weakref.ref(module)
    hooked: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()

    def hook(optimizer: Optimizer, *_: Any) -> None:
        module = reference()
        if module is None:
            return
        runtime = runtime_of_rank(module)
        own = _shared_by(optimizer, runtime.pieces)
        if not own:
            return
        if optimizer not in hooked:
            require_elementwise(optimizer, own[0])
            _require_same_parameters(runtime, own)
        for handle in hooked.get(optimizer, ()):
            handle.remove()
        # In every step again, to be next to the step: the user's own hooks see what they see without pieces.
        hooked[optimizer] = [
            optimizer.register_step_pre_hook(partial(_begin, runtime)),
            hook_first_after_step(optimizer, partial(_end, runtime)),
        ]

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(module, handle.remove)


def _shared_by(optimizer: Optimizer, pieces: Pieces) -> list[nn.Parameter]:
    found = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in found if id(p) in pieces.shared]


def _require_same_parameters(runtime: DistributedRuntime, own: Sequence[nn.Parameter]) -> None:
    """Raise ``PlacerError`` unless all ranks that have parameters in common update the same ones."""
    names: dict[tuple[int, ...], list[str]] = {}
    for parameter in own:
        shared = runtime.pieces.shared[id(parameter)]
        names.setdefault(shared.holders, []).append(shared.name)
    with runtime.watch():
        for holders, found in sorted(names.items()):
            everyone = gather_objects(sorted(found), runtime.process_groups.of_holders(holders))
            odd = {name for each in everyone for name in set(each) ^ set(everyone[0])}
            if odd:
                raise PlacerError(
                    min(odd),
                    "is in the optimizer on some of the ranks that have it, but not on others",
                    "give the optimizer the same parameters in every replica",
                )


def _begin(
    runtime: DistributedRuntime, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure, if the step got one, while parameters are whole; then make pieces of them."""
    own, *rest = args
    closure = kwargs.get("closure", rest[0] if rest else None)
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        args, kwargs = (own,), {**kwargs, "closure": lambda: loss}
    pieces = runtime.pieces
    pieces.begin(_shared_by(optimizer, pieces), optimizer.state)
    return args, kwargs


def _end(runtime: DistributedRuntime, *_: Any) -> None:
    with runtime.watch():
        runtime.pieces.end()


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
        f"does not update each number by itself, as \"shard_state\": 'optimizer' needs ({why})",
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

    With ``has_state`` it starts with zeros where ``optimizer`` has state of a group's largest parameter.
    """
    trial = copy.copy(optimizer)  # without hooks; __getstate__ leaves out other attributes too
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler's, bound to the optimizer itself
            vars(trial).setdefault(name, value)
    trial.param_groups, trial.state = [], defaultdict(dict)
    tried = []
    for group in optimizer.param_groups:
        parameter = nn.Parameter(weights.to(like.device, copy=True))
        options = {name: value for name, value in group.items() if name != "params"}
        trial.param_groups.append({**copy.deepcopy(options), "params": [parameter]})
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
