"""What the processes of a job run in tests of sharded state; in a module so that they can import it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from checkpoint_cases import make_optimizer, place_plain
from checkpoint_cases import train as train_steps
from distributed_cases import (
    CASES,
    capture_case,
    compare_state,
    compile_all,
    compile_case,
    make_case,
    make_spec,
)
from oracle import assert_close, mean_square, reference_step, refusal
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import placer

FIELDS = "shard_state", "node_layout", "shard_over"
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def train(
    name: str,
    plan: placer.Plan,
    make: str,
    batches: tuple[int, ...],
    accumulated: int = 1,
    clip: float | None = None,
) -> tuple[int, int]:
    """Train this rank's part and the plain model side by side.

    Returns the elements of the optimizer's state on this rank, and in the plain model's optimizer.
    """
    model, *_ = make_case(name, batches[0])
    (placed,) = compile_all(model, [plan], capture_case(name, batches[0]))
    plain = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS[make](m.parameters()) for m in (placed, plain))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (ours, theirs)]
    for step, rows in enumerate(batches):
        torch.manual_seed(step)
        for _ in range(accumulated):
            _, args, kwargs = CASES[name](rows)
            expected = reference_step(plain, args, kwargs, plan.replicas, plan.microbatches)
            loss = placed.step(*args, loss_fn=mean_square, **kwargs)
            assert_close(loss, expected, f"step {step}, loss")
        if clip is not None:
            norm = placed.clip_grad_norm_(clip)
            assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), clip), "norm")
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        compare_state(placed, plain, f"{plan.schedule}, after step {step}")  # and gradients
        ours.zero_grad()
        theirs.zero_grad()
    return count_elements(ours), count_elements(theirs)


def count_elements(optimizer: Optimizer) -> int:
    """The elements of the tensors of the optimizer's state, without numbers such as ``step``."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(v.numel() for v in values if isinstance(v, Tensor) and v.dim())


class Layout(NamedTuple):
    """How a model is placed, and its training state divided."""

    stages: int
    replicas: int
    shard_state: str = "optimizer"
    node_layout: str = "stages"
    shard_over: int | str = "auto"


def make_placed(layout: Layout, *, seed: int) -> placer.PlacedModule:
    stages, replicas, *_ = layout
    fields = {name: value for name, value in layout._asdict().items() if name in FIELDS}
    spec = make_spec(stages, replicas, 2, **fields)
    return place_plain(seed, spec, train=False)


def save_and_go_on(layout: Layout, path: Path) -> dict[str, Any]:
    """Train 2 steps, save, train 2 more: the later losses, and the elements of the optimizer's state."""
    placed = make_placed(layout, seed=0)
    optimizer = make_optimizer(placed)
    train_steps(placed, optimizer, 2)
    placer.save(placed, optimizer, path)
    return {"losses": train_steps(placed, optimizer, 2), "elements": count_elements(optimizer)}


def load_and_go_on(layout: Layout, path: Path) -> dict[str, Any]:
    """The same, starting from the checkpoint with a module that was trained differently before."""
    placed = make_placed(layout, seed=1)
    optimizer = make_optimizer(placed)
    train_steps(placed, optimizer, 1)
    placer.load(placed, optimizer, path)
    before = count_elements(optimizer)
    placer.save(placed, optimizer, path.with_name("again"))  # state that has not made a step yet
    placer.load(placed, optimizer, path.with_name("again"))
    found = {"losses": train_steps(placed, optimizer, 2), "elements": count_elements(optimizer)}
    assert before == found["elements"], (before, found["elements"])
    return found


class Muon(torch.optim.SGD):
    """Looks at all of a matrix, as Muon and LAMB do: steps by its gradient's direction."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def refused(spec: placer.PlacementSpec) -> list[str]:
    """The errors of optimizers that cannot update pieces, and whether one that can still works."""
    _, (x,), _ = make_case("convnet", 8)
    placed = compile_case("convnet", spec)
    placed.step(x, loss_fn=mean_square)
    before = [p.detach().clone() for p in placed.parameters()]
    found = []
    mine = list(placed.parameters())[dist.get_rank() :]
    for optimizer in (
        Muon(placed.parameters(), lr=0.0),  # as at the begin of a warm-up
        torch.optim.Adafactor(placed.parameters()),
        torch.optim.LBFGS(placed.parameters()),
        torch.optim.SGD(mine, lr=0.1),
    ):
        found.append(refusal(optimizer.step, lambda: 0.0))
    assert all(map(torch.equal, before, placed.parameters()))
    return found


def read_divided_gradients(spec: placer.PlacementSpec) -> list[str]:
    """Does with pieces of gradients what a rank can do; returns the errors of what it cannot."""
    model, (x,), _ = make_case("convnet", 8)
    plain, placed = copy.deepcopy(model), compile_case("convnet", spec)
    for module in (placed, plain):
        next(module.parameters()).register_hook(lambda gradient: gradient * 2)
    reference_step(plain, (x,), {}, spec.replicas, int(spec.microbatches))
    with placed.accumulate():
        placed.step(x, loss_fn=mean_square)
    pairs = list(zip(placed.parameters(), plain.parameters(), strict=True))
    pieces = [p.grad.piece.numel() for p, _ in pairs]
    assert sum(pieces) <= sum(q.numel() for _, q in pairs) / 2 + len(pairs)
    for both in pairs:
        for p in both:
            p.grad = p.grad.clamp(-0.1, 0.1) * 2 + p.detach()
            p.grad.add_(p.detach(), alpha=0.1)
    for module in (placed, plain):
        nn.utils.clip_grad_value_(module.parameters(), 0.5)
    for p, q in pairs:
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-12)
        assert (p.grad.shape, p.grad.dtype) == (q.grad.shape, q.grad.dtype)
    found = []
    for read in (
        lambda: nn.utils.clip_grad_norm_(placed.parameters(), 1.0),
        lambda: pairs[0][0].grad.sum(),
        lambda: torch.zeros_like(pairs[0][1]).add_(pairs[0][0].grad),
        lambda: torch.mul(pairs[0][0].grad, 2, out=torch.zeros_like(pairs[0][1])),
        lambda: torch.equal(pairs[0][0].grad, pairs[0][0].grad),
    ):
        found.append(refusal(read))
    placed.zero_grad(set_to_none=False)
    for p, _ in pairs:
        assert not p.grad.piece.any()
    return found


def step_with_a_scaler(spec: placer.PlacementSpec, overflows: bool) -> None:
    """A GradScaler unscales pieces; an infinite number in one rank's piece skips the step on all ranks."""
    model, (x,), _ = make_case("convnet", 8)
    plain, placed = copy.deepcopy(model), compile_case("convnet", spec)
    scaler = placed.grad_scaler(init_scale=8.0, enabled=True)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (placed, plain))
    placed.step(x, loss_fn=mean_square, scaler=scaler)
    reference_step(plain, (x,), {}, spec.replicas, int(spec.microbatches))
    if overflows:
        first = next(p for p in placed.parameters() if p.grad is not None and p.numel() > 1)
        if dist.get_rank() == 0:
            first.grad.piece[0] = torch.inf
    scaler.unscale_(ours)
    if not overflows:
        compare_state(placed, plain, "unscaled")
        theirs.step()
    scaler.step(ours)
    scaler.update()
    for p, q in zip(placed.parameters(), plain.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), "weights")
    assert scaler.get_scale() == (4.0 if overflows else 8.0)


def step_with_hooks_and_a_closure(spec: placer.PlacementSpec) -> None:
    """The optimizer's own hooks, its closure, and hooks on gradients see whole tensors."""
    _, (x,), _ = make_case("convnet", 8)
    placed = compile_case("convnet", spec)
    shapes = [p.shape for p in placed.parameters()]
    seen = []

    def look(*_: Any) -> None:
        seen.append([(p.shape, p.grad.shape) for p in placed.parameters() if p.grad is not None])

    optimizer = torch.optim.Adam(placed.parameters())
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for _ in range(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = placed.step(x, loss_fn=mean_square)
            look()
            return loss

        loss = optimizer.step(closure)
        assert isinstance(loss, Tensor) and loss.dim() == 0
    assert seen == [[], *[[(s, s) for s in shapes]] * 5]


def fail_in_a_step(spec: placer.PlacementSpec) -> list[str]:
    """What is said after a step of the optimizer that failed halfway."""
    _, (x,), _ = make_case("convnet", 8)
    placed = compile_case("convnet", spec)
    placed.step(x, loss_fn=mean_square)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
    for p in placed.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.ones(3, 3, 3)  # of no use
    optimizer.param_groups[0]["momentum"] = 0.9
    found = []
    for call in (optimizer.step, optimizer.step, lambda: placed.step(x, loss_fn=mean_square)):
        try:
            call()
        except (RuntimeError, placer.PlacerError) as error:
            found.append(str(error))
    return found


class Odd(nn.Module):
    """Parameters of one element, of none, without gradients, and in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none, self.unused = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(3))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.shift = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(1) * self.scale + self.shift + self.none.sum()


def train_odd_parameters(spec: placer.PlacementSpec, make: str) -> None:
    """With whole state of the plain model's optimizer, and parameters that were replaced after compile."""
    torch.manual_seed(0)
    plain = Odd().double()
    x = torch.randn(6, 2, 4, 4, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(plain), spec, x)
    theirs = OPTIMIZERS[make](plain.parameters())
    reference_step(plain, (x,), {}, 1, 1)
    theirs.step()
    placed.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
    ours = OPTIMIZERS[make](placed.parameters())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in range(2):
        theirs.zero_grad()
        ours.zero_grad()
        reference_step(plain, (x,), {}, 1, 1)
        placed.step(x, loss_fn=mean_square)
        ours.step()
        theirs.step()
        for (name, one), other in zip(placed.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=f"{step}, {name}")
    assert not placed.conv.weight.is_contiguous()


def divide_whole_parameters(spec: placer.PlacementSpec) -> tuple[int, int]:
    """Adafactor looks at whole matrices; torch's own optimizer divides whole parameters over replicas."""
    model, (x,), _ = make_case("convnet", 8)
    plain, placed = copy.deepcopy(model), compile_case("convnet", spec)
    group = placed.mesh.get_group("dp")
    kind = torch.optim.Adafactor
    ours = ZeroRedundancyOptimizer(placed.parameters(), kind, process_group=group, lr=0.1)
    theirs = kind(plain.parameters(), lr=0.1)
    for step in range(2):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        placed.step(x, loss_fn=mean_square)
        reference_step(plain, (x,), {}, 1, 1)
        for optimizer in (ours, theirs):
            optimizer.step()
        compare_state(placed, plain, f"step {step}")
    return count_elements(ours.optim), count_elements(theirs)
