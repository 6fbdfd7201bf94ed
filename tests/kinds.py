"""Models that do more in ``forward`` than return a result, drawn from a seed: a maker for each kind.

Every maker returns a `Case`. The model is a short chain of random layers, with the part of its kind at one
or two random places.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 4
D = torch.float64


@dataclass
class Case:
    """A model, a function that makes arguments with so many rows, and what forward changes elsewhere.

    ``per_slice``: it is changed once for every slice of the batch, as the pages say of hooks.
    """

    model: nn.Module
    example: Callable[[int], tuple[Any, ...]]
    outside: Callable[[], Any] = lambda: None
    per_slice: bool = False


def rows(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *(shape or (WIDTH,)), dtype=D)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Chain(nn.Module):
    """Random layers, with ``parts`` among them; ``parts`` get all the arguments."""

    def __init__(self, draw: Random, *parts: nn.Module) -> None:
        super().__init__()
        layers: list[nn.Module] = [_layer(draw) for _ in range(draw.randint(2, 3))]
        for part in parts:
            layers.insert(draw.randint(1, len(layers) - 1), part)
        self.layers = nn.ModuleList(layers)
        self._parts = [index for index, layer in enumerate(layers) if layer in parts]

    def forward(self, x: Tensor, *others: Any) -> Any:
        for index, layer in enumerate(self.layers):
            x = layer(x, *others) if index in self._parts else layer(x)
        return x


def _layer(draw: Random) -> nn.Module:
    made = draw.choice([Block, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    return made()


class Part(nn.Module):
    """A linear layer; ``act(x, y, *others)`` is what it does with its input and its result."""

    def __init__(self, act: Callable[..., Tensor | None]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), act

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = self.linear(x)
        result = self.act(self, x, y, *others)
        return y if result is None else result


def _value(draw: Random) -> Callable[[Tensor], Tensor]:
    """What is stored: rows, a mean over the batch, or something of the weights; with its graph or without."""
    choices: list[Callable[[Tensor], Tensor]] = [
        lambda y: y * 2,
        lambda y: y.softmax(-1).detach(),
        lambda y: y.square().mean(),
        lambda y: y.t() + 1,
    ]
    return draw.choice(choices)


def stored_on_modules(draw: Random) -> Case:
    value, name = _value(draw), draw.choice(["loss", "map"])
    parts = [
        Part(lambda self, x, y: setattr(self, name, value(y))) for _ in range(draw.randint(1, 2))
    ]
    for part in parts:
        if draw.random() < 0.7:
            setattr(part, name, None)
    return Case(Chain(draw, *parts).to(D), lambda n: (rows(n),))


GLOBAL: list[Tensor] = []


def stored_in_containers(draw: Random) -> Case:
    value, where = _value(draw), draw.choice(["list", "dict", "deque", "global", "closure"])
    closure: dict[str, Tensor] = {}

    def act(self: Any, x: Tensor, y: Tensor) -> None:
        if where == "list":
            self.held.append(value(y))
        elif where == "dict":
            self.held["last"] = value(y)
            self.held.setdefault("calls", []).append(1)
        elif where == "deque":
            self.held.append(value(y))
        elif where == "global":
            GLOBAL.append(value(y))
        else:
            closure["last"] = value(y)

    part = Part(act)
    made: dict[str, Any] = {"list": list, "dict": dict, "deque": lambda: deque(maxlen=2)}
    if where in made:
        part.held = made[where]()
    outside = {"global": lambda: GLOBAL, "closure": lambda: closure}.get(where, lambda: None)
    return Case(Chain(draw, part).to(D), lambda n: (rows(n),), outside)


def counts(draw: Random) -> Case:
    kind = draw.choice(["int", "float", "switch", "dict"])

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if kind == "switch":
            self.calls = not self.calls
            return y * 2 if self.calls else y
        if kind == "dict":
            self.calls["n"] = self.calls.get("n", 0) + 1
            return y
        self.calls += 1 if kind == "int" else 0.5
        return y * self.calls if draw_reads else y

    draw_reads = draw.random() < 0.5
    part = Part(act)
    part.calls = {"int": 0, "float": 0.0, "switch": False, "dict": {}}[kind]
    return Case(Chain(draw, part).to(D), lambda n: (rows(n),))


def written_inputs(draw: Random) -> Case:
    kind = draw.choice(["copy", "slice", "add", "dict", "list", "attribute", "requires_grad"])

    def act(self: Any, x: Tensor, y: Tensor, cache: Any) -> Tensor:
        if kind == "copy":
            cache.copy_(y.detach())
        elif kind == "slice":
            cache[:, 1:3] = y.detach()[:, :2]
        elif kind == "add":
            cache += y.detach().abs()
        elif kind == "dict":
            cache["new"] = y * 3
            cache["old"].mul_(2)
            return y + cache["old"]
        elif kind == "list":
            cache.append(y + 1)
            return y
        elif kind == "requires_grad":
            cache.requires_grad_(True)
        else:
            self.latest = cache + y
            return self.latest * 2
        return y + cache

    def example(n: int) -> tuple[Any, ...]:
        cache: Any = (
            {"old": rows(n)} if kind == "dict" else [rows(n)] if kind == "list" else rows(n)
        )
        return rows(n), cache

    return Case(Chain(draw, Part(act)).to(D), example)


def sets_modes(draw: Random) -> Case:
    kind, late = draw.choice(["eval", "train", "freeze", "unfreeze"]), draw.random() < 0.3

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if kind == "eval":
            self.norm.eval()
        elif kind == "train":
            self.scale.train()
        elif not late:
            self.scale.weight.requires_grad_(kind == "unfreeze")
        y = self.scale(self.norm(y) if kind == "eval" else y)
        if kind.endswith("freeze"):
            self.scale.weight.requires_grad_(kind == "unfreeze")
        return y

    part = Part(act)
    part.norm, part.scale = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    part.scale.weight.requires_grad_(kind != "unfreeze")
    return Case(Chain(draw, part).to(D), lambda n: (rows(n),))


class Attends(nn.Module):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        first = draw.random() < 0.5
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                WIDTH, 2, 8, dropout=0.0, batch_first=True, norm_first=first, activation=F.gelu
            ),
            draw.randint(1, 2),
            enable_nested_tensor=False,
        )
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.weights = draw.random() < 0.5

    def forward(self, x: Tensor, key: Tensor) -> Any:
        x = self.encoder(x)
        x, weights = self.attention(x, key, key, need_weights=self.weights)
        return (x, weights) if self.weights else x


def attention(draw: Random) -> Case:
    return Case(Attends(draw).to(D), lambda n: (rows(n, 3, WIDTH), rows(n, 3, WIDTH)))


def first_forward_state(draw: Random) -> Case:
    kind = draw.choice(["buffer flag", "python flag", "from weights"])

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        ready = self.flag.item() if kind == "buffer flag" else self.ready
        if not ready:
            with torch.no_grad():
                start = self.linear.weight.std(0) if kind == "from weights" else y.std(0)
                self.scale.copy_(1 / (start + 1))
            if kind == "buffer flag":
                self.flag.fill_(1)
            else:
                self.ready = True
        return y * self.scale

    part = Part(act)
    part.scale, part.ready = nn.Parameter(torch.ones(WIDTH)), False
    part.register_buffer("flag", torch.tensor(0))
    model = part if draw.random() < 0.3 else Chain(draw, part)
    return Case(model.to(D), lambda n: (rows(n),))


class Tracker:
    """Its methods are hooks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, *call: Any) -> None:
        self.seen.append(
            call[-1][0].detach() * 1 if isinstance(call[-1], tuple) else call[-1].detach()
        )

    def __call__(self, *call: Any) -> None:
        self.note(*call)


def _note(tracker: Tracker, *call: Any) -> None:
    tracker.note(*call)


def hooks(draw: Random) -> Case:
    kind = draw.choice(["function", "method", "object", "partial"])
    held: list[Tensor] = []
    tracker = Tracker()
    hook = {
        "function": lambda *call: held.append(call[-1].detach()),
        "method": tracker.note,
        "object": tracker,
        "partial": functools.partial(_note, tracker),
    }[kind]
    model = Chain(draw, Block()).to(D)
    model.layers[draw.randint(0, 2)].register_forward_hook(hook)
    if draw.random() < 0.5:
        model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    outside = (lambda: held) if kind == "function" else lambda: tracker.seen
    return Case(model, lambda n: (rows(n),), outside, per_slice=True)


def buffers_in_a_graph(draw: Random) -> Case:
    kind = draw.choice(["assigned", "in place", "replaced", "read next", "shifted"])

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if kind == "assigned":
            self.state = self.linear.weight.sum(0) * 0.5
            return y + self.state
        if kind == "in place":
            with torch.no_grad():
                self.state.mul_(0.5).add_(self.linear.weight[0])
            return y * self.state
        if kind == "replaced":
            self.state = 0.5 * self.state.detach() + self.linear.bias
            return y - self.state
        if kind == "shifted":
            self.last, self.state = self.state, self.state + 1
            return y * self.state - self.last
        before, self.state = self.state, (self.linear.weight.sum(0)).detach()
        return y + before

    part = Part(act)
    part.register_buffer("state", torch.ones(WIDTH))
    part.register_buffer("last", torch.zeros(WIDTH))
    return Case(Chain(draw, part).to(D), lambda n: (rows(n),))


class Scaled(torch.autograd.Function):
    """Its gradient is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight * 3, (grads[0] * x).sum(0) * 5


class ThroughModule(torch.autograd.Function):
    """It calls a module in forward and in backward, as adjoint solvers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *weights: Tensor) -> Tensor:
        ctx.module, ctx.weights = module, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
            found = torch.autograd.grad(y, (x, *ctx.weights), grads[0])
        return found[0], None, *found[1:]


ALIAS = Scaled.apply


def custom_functions(draw: Random) -> Case:
    kind = draw.choice(["apply", "alias", "bound", "module"])

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if kind == "module":
            return ThroughModule.apply(y, self.inner, *self.inner.parameters())
        apply = {"apply": Scaled.apply, "alias": ALIAS, "bound": self.apply_}[kind]
        return apply(y, self.linear.bias)

    part = Part(act)
    part.apply_ = Scaled.apply
    part.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return Case(Chain(draw, part).to(D), lambda n: (rows(n),))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def scripted(x: Tensor, factor: float) -> Tensor:
        return torch.tanh(x) * factor + x.sigmoid()


def script_functions(draw: Random) -> Case:
    factor = draw.choice([0.5, 2.0])
    for _ in range(draw.randint(0, 3)):
        scripted(rows(2).requires_grad_(), factor).sum().backward()
    return Case(
        Chain(draw, Part(lambda self, x, y: scripted(y, factor))).to(D), lambda n: (rows(n),)
    )


class Arguments(nn.Module):
    """What two arguments have in common in the example is chance."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        if self.kind == "table":  # as many rows as the batch, by chance
            return self.b(torch.tanh(self.a(x)) @ y.t() @ y) * scale
        return self.b(torch.tanh(self.a(x)) - self.a(y).relu()) * scale


def shared_arguments(draw: Random) -> Case:
    kind = draw.choice(["one tensor", "table", "number"])
    calls = iter(range(1_000))

    def example(n: int) -> tuple[Any, ...]:
        x = rows(n)
        if kind == "table":
            return x, rows(6)
        if kind == "number":
            return x, rows(n), 1.0 + next(calls)
        return (x, x) if not next(calls) else (x, rows(n))

    return Case(Arguments(kind).to(D), example)


class Results(nn.Module):
    """Results whose rows are not along dimension 0, and results that are not rows."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        kinds = [
            "along 1",
            "stacked",
            "state",
            "twice",
            "count",
            "weights",
            "mean",
            "object",
            "view",
        ]
        self.kinds = draw.sample(kinds, 3)
        self.rnn = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y, state = self.rnn(x)
        y = self.linear(y)
        found: dict[str, Any] = {
            "along 1": y.transpose(0, 1),
            "stacked": torch.stack([y, y * 2], 1),
            "state": state,
            "twice": torch.cat([y, y * 2]),
            "count": x.size(0),
            "weights": self.linear.weight * 2,
            "mean": y.mean(),
            "object": {"inside": [y[:, 0], 3, "text"]},
            "view": y.flatten(0, 1),
        }
        return {"y": y} | {kind: found[kind] for kind in self.kinds}


def results(draw: Random) -> Case:
    return Case(Results(draw).to(D), lambda n: (rows(n, 3, WIDTH),))


class References(nn.Module):
    """A weak reference to the model, a wrapped forward, a module hidden in a list, layers as keys."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0
        self.kind = draw.choice(["weak", "wrapped", "hidden", "weak keys", "weak set"])
        if self.kind == "weak":
            self.a.owner = weakref.ref(self)
        elif self.kind == "wrapped":
            inner = self.a.forward
            self.a.forward = lambda x: inner(x) * 2
        elif self.kind == "weak keys":
            self.scales = weakref.WeakKeyDictionary({self.a: 2.0, self.b: 3.0})
        elif self.kind == "weak set":
            self.doubled = weakref.WeakSet([self.a])
        else:
            self.teacher = [nn.Linear(WIDTH, WIDTH).to(D).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "weak":
            self.a.owner().calls += 1
        y = self.a(x)
        if self.kind == "weak keys":
            y = y * self.scales[self.a]
        elif self.kind == "weak set" and self.a in self.doubled:
            y = y * 2
        return self.b(y - self.teacher[0](x) if self.kind == "hidden" else y)


def references(draw: Random) -> Case:
    return Case(References(draw).to(D), lambda n: (rows(n),))


def returned_as_they_are(draw: Random) -> Case:
    """Inputs, parameters, buffers, and one tensor in several places, as results and in attributes."""
    kinds = draw.sample(["input", "parameter", "buffer", "twice", "written", "stored"], 3)

    def act(self: Any, x: Tensor, y: Tensor, cache: Tensor) -> Any:
        if "written" in kinds:
            cache[:, 0] = y[:, 0].detach()
        if "stored" in kinds:
            self.latest = cache
        held = {
            "input": cache,
            "parameter": self.linear.weight,
            "buffer": self.state,
            "twice": {"y": y, "last": [y]},
            "written": cache,
        }
        return y, {kind: held[kind] for kind in kinds if kind in held}

    part = Part(act)
    part.register_buffer("state", torch.ones(WIDTH))

    class Ends(Chain):
        def forward(self, x: Tensor, cache: Tensor) -> Any:
            return self.part(super().forward(x), cache)

    model = Ends(draw)
    model.part = part
    return Case(model.to(D), lambda n: (rows(n), rows(n)))


def gradient_modes(draw: Random) -> Case:
    """Parts that are computed with gradients even where the caller has disabled them, or without."""
    kind = draw.choice(["enabled", "set", "part", "nested", "asked", "without"])

    def act(self: Any, x: Tensor, y: Tensor) -> Any:
        if kind == "set":
            with torch.set_grad_enabled(self.training):
                scaled = self.scale(y)
            return scaled + y
        if kind == "without":
            with torch.no_grad():
                start = self.scale(y)
            return start + y
        with torch.enable_grad():
            if kind == "part":
                return y, self.scale(x.detach()).square()
            if kind == "nested":
                with torch.no_grad():
                    y = y + self.linear(x)
            if kind == "asked" and torch.is_grad_enabled():
                y = y * 2
            return self.scale(x) * y

    part = Part(act)
    part.scale = nn.Linear(WIDTH, WIDTH)
    first = [_layer(draw) for _ in range(draw.randint(0, 2))]
    return Case(nn.Sequential(*first, part).to(D), lambda n: (rows(n),))


def tensor_attributes(draw: Random) -> Case:
    """Attributes on parameters and buffers, which libraries set to know them again; some change."""
    kind, whole = draw.choice(["number", "flag", "tensor", "buffer"]), draw.random() < 0.5

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if whole and x.sum() > 1e9:
            return y
        if kind == "number":
            return y * self.linear.weight.scale
        if kind == "tensor":
            return y + self.linear.bias.shift
        if kind == "buffer":
            return y * self.state * getattr(self.state, "times", 1)
        return y * 2 if any(getattr(p, "is_expert", False) for p in self.parameters()) else y

    part = Part(act)
    part.register_buffer("state", torch.ones(WIDTH, dtype=D))
    held = {"number": part.linear.weight, "tensor": part.linear.bias, "buffer": part.state}
    values = {"number": ("scale", 2.0), "tensor": ("shift", rows(1)[0]), "buffer": ("times", 3)}
    model = Chain(draw, part).to(D)
    setattr(held.get(kind, part.linear.bias), *values.get(kind, ("is_expert", True)))
    return Case(model, lambda n: (rows(n),))


KINDS: dict[str, Callable[[Random], Case]] = {
    made.__name__: made
    for made in (
        stored_on_modules,
        stored_in_containers,
        counts,
        written_inputs,
        sets_modes,
        attention,
        first_forward_state,
        hooks,
        buffers_in_a_graph,
        custom_functions,
        script_functions,
        shared_arguments,
        results,
        references,
        gradient_modes,
        returned_as_they_are,
        tensor_attributes,
    )
}
