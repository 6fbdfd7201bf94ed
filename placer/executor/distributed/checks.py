"""Refuses uses of one rank's part of a model that would give wrong results without the other ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placer._torch_patches import call_before_clipping
from placer.errors import PlacerError
from placer.executor.loss import without_graph

_CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # by `refuse_unsummed_steps`


def check_inference(leaves: Sequence[Tensor], *, training: bool) -> None:
    """Raise ``PlacerError`` if ``placed(x)`` would have to return a result with gradients or tangents."""
    if any(forward_ad.unpack_dual(leaf).tangent is not None for leaf in leaves):
        raise PlacerError(
            "inputs",
            "one of them has a tangent, but with one process per device placed(x) returns results without",
            "compute forward-mode derivatives in one process",
        )
    if not torch.is_grad_enabled():
        return
    if training:
        raise PlacerError(
            "placed(x)",
            "returns results without gradients when there is one process per device",
            "train with placed.step(x, target=t, loss_fn=f); for inference call placed.eval() or "
            "use torch.no_grad()",
        )
    if any(leaf.requires_grad for leaf in leaves):
        raise PlacerError(
            "inputs",
            "one of them requires gradients, but with one process per device placed(x) returns "
            "results without gradients",
            "pass x.detach(), or use placed.step, in which inputs get their gradients",
        )


def check_training() -> None:
    """Raise ``PlacerError`` if gradients are disabled; called before any communication."""
    if not torch.is_grad_enabled():
        raise without_graph()


def refuse_joint_optimizers(part: nn.Module) -> None:
    """Make ``torch.optim.LBFGS`` raise ``PlacerError`` when it steps with parameters of ``part``.

    It is the only optimizer of torch that computes with all parameters together (their inner products).
    Without this check it would take a different direction on every rank.
    """

    def check(optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PlacerError(
                "torch.optim.LBFGS",
                "computes with all parameters of the model together, and this rank has those of its "
                "stages only",
                "use an optimizer that updates each parameter separately (SGD, Adam, …), or one device "
                "per replica",
            )

    _check_steps(part, check)


def refuse_unsummed_steps(part: nn.Module, require_sums: Callable[[str], None]) -> None:
    """Call ``require_sums(optimizer)`` when an optimizer steps with parameters of ``part``, from now on."""
    require = weakref.WeakMethod(require_sums)

    def check(optimizer: torch.optim.Optimizer) -> None:
        if require_now := require():
            require_now(type(optimizer).__name__)

    if part not in _CHECKED:
        _CHECKED.add(part)
        _check_steps(part, check)


def _check_steps(part: nn.Module, check: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call ``check(optimizer)`` when an optimizer steps with parameters of ``part``, while that lives."""
    reference = weakref.ref(part)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        part = reference()
        own = set() if part is None else {id(parameter) for parameter in part.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            check(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(part, handle.remove)


def refuse_wrappers(part: nn.Module) -> None:
    """Make torch's data-parallel wrappers raise ``PlacerError`` for a module that contains ``part``.

    They would sum gradients of this rank's stages with those of other ranks' stages.
    """
    reference = weakref.ref(part)

    def check(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        part = reference()
        fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported just for this check
        wrappers: tuple[Any, ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)
        if fsdp is not None:
            wrappers += (fsdp.FullyShardedDataParallel,)
        if part is None or child is None or not isinstance(parent, wrappers):
            return
        if any(module is part for module in child.modules()):
            raise PlacerError(
                type(parent).__name__,
                "cannot wrap a placed model, which sums the gradients of its replicas by itself",
                'call placed.step as it is, and ask for copies in the spec: "replicas": 2',
            )

    handle = register_module_module_registration_hook(check)
    weakref.finalize(part, handle.remove)


def refuse_sharding(new_class: type) -> None:
    """Raise ``PlacerError`` if ``new_class`` is one that ``fully_shard`` gives to a module at its end."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and issubclass(new_class, fsdp.FSDPModule):
        raise _sharded()


def _sharded() -> PlacerError:
    return PlacerError(
        "torch.distributed.fsdp.fully_shard",
        "cannot shard a placed model: each rank has other parameters already, those of its stages",
        'call placed.step as it is; to need less memory, add devices to the spec, or "checkpoint"',
    )


def refuse_partial_clipping(part: nn.Module) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` raise ``PlacerError`` for gradients of ``part``.

    It would scale them by the norm of this rank's gradients alone. Clipping a single one of several
    parameters is allowed, because its whole gradient is on this rank.
    """
    reference = weakref.ref(part)

    def check(gradients: Sequence[Tensor]) -> None:
        part = reference()
        if part is None:
            return
        own = {id(p.grad) for _, p in part.named_parameters() if p.grad is not None}
        is_one_of_several = len(gradients) == 1 and len(own) > 1
        if any(id(g) in own for g in gradients) and not is_one_of_several:
            raise PlacerError(
                "torch.nn.utils.clip_grad_norm_",
                "would clip by the norm of this rank's gradients, which are those of its stages only",
                "call placed.clip_grad_norm_(max_norm), on every rank",
            )

    weakref.finalize(part, call_before_clipping(check))


def check_parameters(
    named: Mapping[str, nn.Parameter], known: Collection[str], frozen: Collection[str]
) -> tuple[int, ...]:
    """The ids of those of the parameters ``named`` that are trained.

    Raises ``PlacerError`` if there is a parameter that is not ``known``, if those that do not require
    gradients are not the ``frozen`` ones, or if they have been sharded.
    """
    distributed = sys.modules.get("torch.distributed.tensor")  # not imported for this alone
    if distributed is not None and any(isinstance(p, distributed.DTensor) for p in named.values()):
        raise _sharded()
    new = [name for name in named if name not in known]
    if new:
        raise PlacerError(
            new[0],
            "was created after placer.compile, and the other ranks do not know of it",
            "prune, parametrize or extend the model, or replace its layers, before placer.compile",
        )
    frozen_now = {name for name, parameter in named.items() if not parameter.requires_grad}
    if frozen_now != frozen:
        changed = sorted(frozen_now.symmetric_difference(frozen))[0]
        raise PlacerError(
            changed,
            "requires_grad was changed after placer.compile, and the other ranks do not know of it",
            "freeze parameters of the model before placer.compile; in the middle of training save, "
            "freeze, compile and load",
        )
    return tuple(id(parameter) for parameter in named.values() if parameter.requires_grad)


def check_scaler(scaler: torch.amp.GradScaler | None, *, num_devices: int) -> None:
    """Raise ``PlacerError`` for a scaler that looks at this rank's gradients only."""
    if scaler is None or not scaler.is_enabled() or num_devices == 1:
        return
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if not isinstance(scaler, ShardedGradScaler):
        raise PlacerError(
            "scaler",
            f"{type(scaler).__name__} looks at the gradients of this rank's stages only, so some "
            "ranks would skip a step and others not",
            "make it with placed.grad_scaler()",
        )
