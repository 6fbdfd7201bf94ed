"""Models with norms that keep running statistics, and the statistics computed by hand."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import make_spec
from oracle import assert_close, gradient_noise, mean_square, reference_step, refusal
from torch import Tensor, nn
from torch.nn import functional as F

import placer

D = torch.float64


class Acting(nn.BatchNorm2d):
    """A norm with its own forward, like timm's: it is recorded inside, and its parts may be on two stages."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        return F.relu(
            F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self.momentum,
                self.eps,
            )
        )


class Operators(nn.BatchNorm2d):
    """Torch's operator itself, all arguments in order."""

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight, self.bias, self.running_mean, self.running_var
        return torch.batch_norm(x, *state, self.training, self.momentum, self.eps, False)


class Whole(nn.Module):
    """Its forward reads values, so it stays whole, including its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if y.isnan().any():
            raise ValueError("not a number")
        return y


class Shared(nn.Module):
    """One norm called twice in a forward, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.between = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.between(self.norm(x)).relu())


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(3),
    "cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
    "not affine": lambda: nn.BatchNorm2d(3, affine=False, momentum=0.4),
    "not tracking": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "frozen": lambda: nn.BatchNorm2d(3).eval(),
    "synchronised": lambda: nn.SyncBatchNorm(3),
    "instance": lambda: nn.InstanceNorm2d(3, track_running_stats=True, affine=True),
    "acting": lambda: Acting(3),
    "operators": lambda: Operators(3, momentum=0.2),
    "whole": Whole,
    "shared": Shared,
}


def make_net(name: str) -> nn.Module:
    torch.manual_seed(1)
    norms = [NORMS[name](), NORMS[name]()]
    net = nn.Sequential(
        norms[0], nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), norms[1], nn.Conv2d(3, 2, 1)
    ).double()
    for norm in net.modules():
        if isinstance(norm, nn.modules.batchnorm._NormBase) and norm.track_running_stats:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
            norm.num_batches_tracked.fill_(3)
    return net


def step_by_hand(
    plain: nn.Module, x: Tensor, replicas: int, microbatches: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the slices one after the other, and buffers from every norm's inputs in all of them."""
    received: dict[str, list[list[Tensor]]] = defaultdict(list)  # norm -> per cut, its inputs
    norms = {
        name: module
        for name, module in plain.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.track_running_stats
        and module.training
    }
    twin = copy.deepcopy(plain)

    def keep(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        received[name][-1].append(args[0].detach())

    def begin_cut(*_: Any) -> None:
        for name in norms:
            received[name].append([])

    handles = [m.register_forward_pre_hook(partial(keep, n)) for n, m in norms.items()]
    cut = plain.register_forward_pre_hook(begin_cut)
    loss = reference_step(plain, (x,), {}, replicas, microbatches)
    for handle in (*handles, cut):
        handle.remove()
    expected = {name: buffer.clone() for name, buffer in twin.named_buffers()}
    for name, norm in norms.items():
        for pieces in zip(*received[name], strict=True):
            _learn(expected, name, norm, torch.cat(pieces))
    return loss, expected


def _learn(buffers: dict[str, Tensor], name: str, norm: Any, x: Tensor) -> None:
    momentum = norm.momentum
    if isinstance(norm, nn.InstanceNorm2d):
        mean, var = x.mean((2, 3)).mean(0), x.var((2, 3)).mean(0)
    else:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
        buffers[f"{name}.num_batches_tracked"] += not isinstance(norm, Operators)
        if momentum is None:
            momentum = 1 / buffers[f"{name}.num_batches_tracked"].item()
    for key, value in (("running_mean", mean), ("running_var", var)):
        old = buffers[f"{name}.{key}"]
        buffers[f"{name}.{key}"] = (1 - momentum) * old + momentum * value


def train_with_deferred_statistics(
    name: str, stages: int, replicas: int, fields: dict[str, Any] | None = None
) -> None:
    """Steps of this rank's part beside the plain model, also with fewer rows than slices and own rows."""
    torch.manual_seed(0)
    x = torch.randn(9, 3, 4, 4, dtype=D)
    plain = make_net(name)
    spec = make_spec(stages, replicas, 2, "1F1B", batch_norm="deferred", **(fields or {}))
    placed = placer.compile(plain, spec, x)
    for rows in (9, 5, 1):  # of one row a replica gets none
        _step_both(placed, plain, x[:rows], replicas, f"{name}, {rows} rows")
    mine = x[:8].chunk(replicas)[dist.get_rank() // stages]
    _step_both(placed, plain, x[:8], replicas, f"{name}, own rows", given=mine)
    with torch.no_grad():
        placed(x)
    _, expected = step_by_hand(plain, x, replicas, 2)
    _compare_buffers(placed, expected, f"{name}, without gradients", but="num_batches_tracked")
    plain.load_state_dict({**plain.state_dict(), **expected})
    assert_close(placed.eval()(x), plain.eval()(x), f"{name}, evaluation")


def compile_synchronised() -> str:
    """The error message for a model that has a `SyncBatchNorm`."""
    model = nn.Sequential(nn.SyncBatchNorm(3).eval())
    spec = make_spec(1, 2, 1, batch_norm="deferred")
    return refusal(placer.compile, model, spec, torch.randn(4, 3))


def _step_both(
    placed: Any, plain: nn.Module, x: Tensor, replicas: int, when: str, given: Tensor | None = None
) -> None:
    plain.zero_grad()
    placed.zero_grad()
    wanted, expected = step_by_hand(plain, x, replicas, 2)
    own = x if given is None else given
    loss = placed.step(own, loss_fn=mean_square, own_rows=given is not None)
    assert_close(loss, wanted, f"{when}, loss")
    theirs = dict(plain.named_parameters())
    for path, parameter in placed.named_parameters():
        floor = gradient_noise(plain)
        assert_close(parameter.grad, theirs[path].grad, f"{when}, {path}", floor=floor)
    _compare_buffers(placed, expected, when)
    for path, buffer in plain.named_buffers():
        buffer.copy_(expected[path])


def _compare_buffers(
    placed: nn.Module, expected: dict[str, Tensor], when: str, but: str = ""
) -> None:
    for name, buffer in placed.named_buffers():
        if not but or not name.endswith(but):
            assert_close(buffer, expected[name], f"{when}, rank {dist.get_rank()}, {name}")
