"""Models whose forward changes the model itself, each with a layer that another rank lacks; run by jobs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import placer

SPECS: dict[str, dict[str, Any]] = {
    "stages": {"devices": ["cpu:0", "cpu:1"], "layers": {"a": "cpu:0", "n": "cpu:0", "c": "cpu:1"}},
    "recomputed": {
        "devices": ["cpu:0", "cpu:1"],
        "layers": {"a": "cpu:0", "n": "cpu:0", "c": "cpu:1"},
        "checkpoint": ["**"],
    },
    "replicas": {"devices": ["cpu:0"], "replicas": 2, "replica_devices": [["cpu:1"]]},
}
_TABLES = frozenset({*vars(nn.Module()), "ends"})


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.c = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.n.eval()
        self.calls, self.c.calls, self.c.ready = 0, 0.0, False
        self.a.register_buffer("steps", torch.zeros(4))

    def train(self, mode: bool = True) -> Layers:
        """Keep the norm in eval mode."""
        super().train(mode)
        if hasattr(self, "n"):
            self.n.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.n(self.a(x)))


class Counts(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.c.calls += 0.5 if self.training else 2.0
        return super().forward(x * self.calls) * self.c.calls


class SetsModes(Layers):
    def train(self, mode: bool = True) -> nn.Module:
        return nn.Module.train(self, mode)

    def forward(self, x: Tensor) -> Tensor:
        self.n.eval()
        return super().forward(x)


class Initialises(Layers):
    """In eval mode only."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.c.ready = True
        return super().forward(x * 2 if self.c.ready else x)


class ReplacesBuffers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.a.steps = self.a.steps + 1
        return super().forward(x * self.a.steps)


class Gate(nn.Module):
    """Has no weights, but a number and a mode that the caller changes."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.strength if self.training else x


class HoldsLayers(Layers):
    """In a plain list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.ends = Gate(), [self.a, self.c]

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.ends
        return self.gate(last(self.n(self.gate(first(x)))))


class GrowsBuffers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.c.register_buffer("means", torch.zeros(0, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.c.means = torch.cat([self.c.means, self.a.weight.detach()])
        return super().forward(x + self.c.means.sum(0))


class Remembers(Layers):
    """Its first layer has a cache that begins as None, and grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.a.cache = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.a.cache is not None:
            x = x + self.a.cache.unflatten(1, (-1, 4)).sum(1)
            self.a.cache = torch.cat([self.a.cache, x.detach()], 1)
        else:
            self.a.cache = x.detach()
        return self.c(self.n(x))


class KeepsFeatures(Layers):
    """Hooks on layers of both ranks write to one dict of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        for name in ("c", "a"):
            self.get_submodule(name).register_forward_hook(partial(self.keep, name))

    def keep(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features[name] = output.detach()


class ActNorm(nn.Module):
    """Its first batch sets its weights; ``in_buffer``: there it keeps that it has."""

    def __init__(self, width: int = 4, *, in_buffer: bool = True) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("ready", torch.zeros((), dtype=torch.uint8))
        self.in_buffer, self.known = in_buffer, False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.ready.item() if self.in_buffer else self.known):
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
            self.known = True
            self.ready.fill_(1)
        return self.scale * (x + self.shift)


class NormsByData(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.n = ActNorm()


class Freezes(Layers):
    def __init__(self, *, in_eval: bool) -> None:
        super().__init__()
        self.in_eval = in_eval

    def forward(self, x: Tensor) -> Tensor:
        if self.training != self.in_eval:
            self.c.requires_grad_(False)
        return super().forward(x)


def call_in_both_modes(make: Callable[[], nn.Module], spec: str) -> None:
    """Compare what a rank has after steps and calls with the plain model."""
    torch.manual_seed(0)
    plain = make().double()
    x = torch.randn(4, 4, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(plain), SPECS[spec], x)
    for number, training in enumerate((True, False, True, False, False, True)):
        placed.train(training)
        plain.train(training)
        for module in (*plain.modules(), *placed.modules()):
            if isinstance(module, Gate):
                module.strength += 0.5
                module.training = number in (0, 1, 4)
        kept = dict(placed.named_buffers()), dict(plain.named_buffers())
        plain.zero_grad()
        placed.zero_grad()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number)).double()
        if number % 2 == 0:
            found = placed.step(x, loss_fn=_loss, reduction="mean")
            expected = _loss(plain(x))
            expected.backward()
        else:
            with torch.no_grad():
                found, expected = placed(x), plain(x)
        torch.testing.assert_close(found, expected.detach())
        for ours, theirs in ((_seen(placed), _seen(plain)), kept):
            torch.testing.assert_close(ours, {name: theirs[name] for name in ours})


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def _seen(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if path and not any(True for _ in module.parameters(recurse=False)):
            continue
        found[f"mode of {path}"] = module.training
        found |= {f"{path}.{n}": v for n, v in vars(module).items() if n not in _TABLES}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            found |= {name: parameter.grad, f"flag of {name}": parameter.requires_grad}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def freeze(*, in_eval: bool) -> str:
    """The error of a model whose forward freezes a layer, in its first mode or in the other."""
    model = Freezes(in_eval=in_eval)
    x = torch.randn(4, 4)
    try:
        placed = placer.compile(model, SPECS["stages"], x)
        placed.eval()
        placed(x)
    except placer.PlacerError as error:
        return str(error)
    return ""


PART: Any = None


class _CallsAVariable(Layers):
    def forward(self, x: Tensor, *, double: bool = False) -> Tensor:
        y = PART(self.n(self.a(x)))
        return y * 2 if double else y


def call_a_part_in_a_variable(spec: str) -> None:
    """Compare with the plain model; a global variable holds a layer of the model that was placed."""
    global PART
    torch.manual_seed(0)
    plain = _CallsAVariable().double()
    model, x = copy.deepcopy(plain), torch.randn(4, 4, dtype=torch.float64)
    PART = model.c
    placed = placer.compile(model, SPECS[spec], x)
    for double in (False, True):
        for net in (plain, placed):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.1)
            net.zero_grad()
        PART = model.c
        found = placed.step(x, double=double, loss_fn=_loss, reduction="mean")
        PART = plain.c
        expected = _loss(plain(x, double=double))
        expected.backward()
        torch.testing.assert_close(found, expected.detach())
        ours, theirs = _seen(placed), _seen(plain)
        torch.testing.assert_close(ours, {name: theirs[name] for name in ours})


class _Returns(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = super().forward(x)
        return y, y, x, self.a.weight, self.c.weight


def results_are_copies() -> None:
    """On the rank of the first stage, a tensor that is returned twice is two; weights are copies on all."""
    model, x = _Returns(), torch.ones(4, 4)
    placed = placer.compile(model, SPECS["stages"], x)
    with torch.no_grad():
        y, again, given, *weights = placed(x)
    assert torch.distributed.get_rank() or y is not again
    torch.testing.assert_close(y, again)
    assert given is not x
    torch.testing.assert_close(given, x)
    for name, weight in zip("ac", weights, strict=True):
        torch.testing.assert_close(weight, model.get_parameter(f"{name}.weight").detach())
        assert all(weight is not parameter for parameter in placed.parameters())


class _Block(nn.Sequential):
    """A module of several layers."""


def hook_later(layer: str, *, keeps: bool) -> str:
    """The error of a step of two micro-batches after a hook was put on ``layer``, or "equal"."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(_Block(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)).double()

    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if keeps:
            seen.append(output)
        return output * 2

    spec = {
        "devices": ["cpu:0", "cpu:1"],
        "layers": {"0": "cpu:0", "1": "cpu:1"},
        "microbatches": 2,
    }
    x, plain = torch.randn(4, 4, dtype=torch.float64), build()
    placed = placer.compile(build(), spec, x)
    for module in (placed, plain):
        if layer in dict(module.named_modules()):
            module.get_submodule(layer).register_forward_hook(hook)
    try:
        placed.step(x, loss_fn=_square)
    except placer.PlacerError as error:
        return str(error)
    _square(plain(x)).backward()
    for name, parameter in placed.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
    return "equal"


def _square(output: Tensor) -> Tensor:
    return output.square().mean()
