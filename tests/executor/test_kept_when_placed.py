"""What a capture must keep: one tiny model per thing that tracing a model loses easily.

Every model is trained plain and placed over at least two stages, and must compute the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import placer
from placer import PlacementSpec

D = torch.float64
ROWS, WIDTH = 8, 4


class Chain(nn.Module):
    """Two linear layers, the part under test between them, and two after it."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x))
        for part in self.parts:
            x = part(x)
        return self.out(torch.tanh(self.mid(x)))


class Layer(nn.Module):
    """The base of most parts: a linear layer to have parameters, and `width` to its name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


# -- train and eval, randomness ------------------------------------------------------------------


class Noise(Layer):
    """Random numbers from five kinds of calls."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) + torch.rand(x.shape, dtype=x.dtype, device=x.device)
        x = self.linear(x) + torch.empty_like(x).normal_()
        x = x * torch.bernoulli(torch.full_like(x, 0.5))
        return x[torch.randperm(x.shape[0], device=x.device)]


class StochasticDepth(Layer):
    """Python's own branch on the mode, as drop path has it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.linear(x)
        keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.5)
        return x + self.linear(x).div(0.5) * keep


class BatchNorms(nn.Module):
    """A BatchNorm module, and one written out by a function over buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        x = self.linear(self.norm(x))
        return F.batch_norm(x, self.mean, self.var, training=self.training, momentum=0.2)


# -- control flow, hooks, state ------------------------------------------------------------------


def forward_hooks(part: nn.Module) -> nn.Module:
    part.register_forward_hook(lambda module, args, output: output * 2)
    part.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return part


def backward_hooks(part: nn.Module) -> nn.Module:
    part.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    return part


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class BorrowingChooser(nn.Module):
    """Must stay whole, replaces a buffer and counts, and has a weight that another stage owns."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight = owner.weight
        self.register_buffer("latest", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x) if x.sum() > 0 else self.linear(-x)
        self.latest = 0.5 * self.latest + y.detach().mean(0)
        return y + self.latest


def borrowing() -> nn.Module:
    chain = Chain()
    chain.parts.append(BorrowingChooser(chain.inp))
    return chain


# -- memory that is shared -----------------------------------------------------------------------


class Views(Layer):
    """Writes through views, to bases of views, and to slices."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        head, tail = y[:, :2], y.t()
        y.mul_(2)
        z = head + 1
        head.add_(0.5)
        y[:, 3:] = z[:, :1]
        total = tail.sum(0, keepdim=True).t()
        y[0] += 1
        F.relu(y, inplace=True)
        return y + total


class Borrowed(nn.Module):
    """Parameters used by other code than their module's; a list of them; a plain tensor of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(2))
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.rand(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.a.weight + self.b.weight, self.b.bias)
        for scale in self.scales:
            x = self.b(x) * scale
        return x + self.named["shift"] + self.a.weight.norm() * self.a.bias


# -- modes ---------------------------------------------------------------------------------------


class Autocast(nn.Module):
    """Parts of forward in bfloat16; the layer inside keeps float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        low = self._modules.pop("low")  # stays float32 under model.double()
        result = super()._apply(fn, recurse)
        self._modules["low"] = low
        return result

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            half = self.low(x.float())
            assert half.dtype == torch.bfloat16
            half = half @ half.t()
            with torch.autocast(x.device.type, enabled=False):
                full = F.linear(half.float(), half.float())
        return self.linear(x) + full.sum(1, keepdim=True).to(x.dtype)


class NoGrad(nn.Module):
    """Regions without gradients: a with-block, a decorated forward, detach, and gradients on again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = Frozen()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x)
            scale = y.abs().mean() + 1
            with torch.enable_grad():
                z = self.b(x)
        return self.c(z / scale + y + self.frozen(x) + self.a(x).detach())


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


class Checkpointed(nn.Module):
    """Activation checkpointing of both kinds, with dropout inside, and of a chain."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh())
        self.chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return checkpoint_sequential(self.chain, 2, x, use_reentrant=self.use_reentrant)


class RootCheckpoints(nn.Module):
    """The model itself checkpoints its blocks, and a line of its own code."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(Linears() for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        x = checkpoint(lambda x: torch.tanh(x) * 2, x, use_reentrant=self.use_reentrant)
        return self.out(x)


class RootReadsValues(Chain):
    """The model's own code depends on values, so all of it stays whole; and it goes through numpy."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        scale = np.abs(x.detach().numpy()).max(axis=0)
        return super().forward(x) + torch.from_numpy(scale)[:3]


def normalized() -> nn.Module:
    """Weights computed from others at every call."""
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    )


def normalized_of_old() -> nn.Module:
    """The same by hooks that put the weight, a result, into an attribute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(
            nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
            nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        )


# -- devices -------------------------------------------------------------------------------------


class Factories(Layer):
    """Tensors made in forward: masks, positions, and whatever takes a device."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(ROWS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, device = x.size(0), x.device
        ids = torch.arange(rows, device=device)
        x = self.linear(x) + self.positions(ids)
        mask = torch.ones(rows, rows, device=device, dtype=torch.bool).tril()
        weights = (x @ x.t()).masked_fill(~mask, float("-inf")).softmax(-1)
        late = torch.zeros(rows, WIDTH).to(x)
        like = torch.zeros_like(x) + x.new_ones(WIDTH) + torch.full((1,), 0.5).to(x.device)
        eye = torch.eye(WIDTH, dtype=x.dtype, device=self.linear.weight.device)
        return weights @ x @ eye + late + like


CASES: dict[str, Callable[[], nn.Module]] = {
    "noise": lambda: Chain(Noise()),
    "stochastic depth": lambda: Chain(StochasticDepth(), StochasticDepth()),
    "batch norms": lambda: Chain(BatchNorms(), nn.BatchNorm1d(WIDTH)),
    "hooks on a layer": lambda: Chain(forward_hooks(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "hooks on a block": lambda: Chain(forward_hooks(Linears()), nn.Tanh()),
    "hooks on the model": lambda: forward_hooks(Chain()),
    "backward hooks on a layer": lambda: Chain(backward_hooks(nn.Linear(WIDTH, WIDTH))),
    "backward hooks on a block": lambda: Chain(backward_hooks(Linears())),
    "backward hooks on the model": lambda: backward_hooks(Chain()),
    "a whole module with a borrowed weight": borrowing,
    "views": lambda: Chain(Views(), Views()),
    "borrowed parameters": lambda: Chain(Borrowed()),
    "autocast": lambda: Chain(Autocast()),
    "no_grad": lambda: Chain(NoGrad()),
    "checkpoint": lambda: Chain(Checkpointed(use_reentrant=False)),
    "reentrant checkpoint": lambda: Chain(Checkpointed(use_reentrant=True)),
    "checkpoint by the model": lambda: RootCheckpoints(use_reentrant=False),
    "reentrant checkpoint by the model": lambda: RootCheckpoints(use_reentrant=True),
    "normalized weights": lambda: Chain(normalized()),
    "factories": lambda: Chain(Factories()),
}


def _input() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=D, requires_grad=True)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cut", [(2, 1, 1), (3, 2, 2)])
def test_kept(name: str, cut: tuple[int, int, int]) -> None:
    stages, replicas, microbatches = cut
    torch.manual_seed(0)
    model = CASES[name]().double()
    spec = PlacementSpec(
        devices=[f"cpu:{i}" for i in range(stages)],
        replicas=replicas,
        microbatches=microbatches,
        inputs={"x": {"batch_dim": 0}},  # some compute across rows: of each slice by itself
    )
    if name == "a whole module with a borrowed weight" and microbatches > 1:
        with pytest.raises(placer.CaptureError, match="would run for every slice"):
            placer.compile(model, spec, _input())
        return
    scheduled = "backward hooks on the model" not in name  # step() refuses those, tested below
    placed = assert_same(model, spec, (_input(),), scheduled=scheduled)
    assert len(placed.plan.stages) >= 2
    if stages == 2:
        assert_same(copy.deepcopy(model).eval(), spec, (_input(),), steps=1, scheduled=False)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("root", [False, True])
def test_results_that_an_earlier_forward_kept_do_not_hinder(root: bool) -> None:
    model = (RootReadsValues() if root else Chain(normalized_of_old())).double()
    model.kept = {"results": [model(_input())]}
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    spec = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2, "inputs": {"x": {"batch_dim": 0}}}
    verification = placer.verify(model, spec, (_input(),))
    assert verification.ok, verification.worst


def test_what_a_whole_module_notes_is_kept_wherever_it_runs() -> None:
    model = borrowing().double()
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": {"inp": "cpu:0", "parts": "cpu:1"}}
    placed = assert_same(model, spec, (_input(),))
    assert placed.parts[0].calls == 2
    assert model.parts[0].calls == 0


class Logged(Linears):
    runs: ClassVar[list[str]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(self.name)
        return super().forward(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_under_checkpoint_run_again_in_backward(use_reentrant: bool) -> None:
    model = RootCheckpoints(use_reentrant=use_reentrant)
    model.blocks = nn.ModuleList(Logged() for _ in range(3))
    for index, block in enumerate(model.blocks):
        block.name = str(index)
    placed = placer.compile(model.double(), {"devices": ["cpu:0", "cpu:1"]}, _input())
    Logged.runs.clear()
    loss = placed(_input()).sum()
    assert Logged.runs == ["0", "1", "2"]
    loss.backward()
    assert Logged.runs == ["0", "1", "2", "2", "1", "0"]


def test_step_refuses_backward_hooks_on_the_model() -> None:
    placed = placer.compile(
        backward_hooks(Chain()).double(), {"devices": ["cpu:0", "cpu:1"]}, _input()
    )
    with pytest.raises(placer.PlacerError, match="full backward hooks"):
        placed.step(_input(), loss_fn=torch.sum)
