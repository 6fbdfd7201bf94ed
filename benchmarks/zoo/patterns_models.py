"""Small models in the style of research code, one for each feature that models of libraries rarely have.

They come from trying placer on models that its test suite did not have. Each computes in milliseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.zoo.subject import Call, Subject, positional

PACKAGES = ()


def subjects() -> Iterator[Subject]:
    """Generative models, routing, recurrence, odd results, state that forward changes, values."""
    image, rows, sequence = (2, 3, 16, 16), (2, 8), (2, 6, 8)
    for model, call in (
        (VariationalAutoencoder, positional(image)),
        (VectorQuantizer, positional(image)),
        (RoutedExperts, positional(sequence)),
        (WeightedExperts, positional(sequence)),
        (TeacherForced, _tokens(2)),
        (ConvolutionalLSTM, positional((2, 3, 3, 8, 8))),
        (FourierMixer, positional((2, 16, 8))),
        (NeuralODE, positional(rows)),
        (FixedPoint, positional(rows)),
        (HalvedUntilDone, positional(rows)),
        (StochasticDepth, positional(rows)),
        (SlopePenalty, positional(rows)),
        (Siamese, positional(image, image)),
        (SpatialTransformer, positional(image)),
        (Folded, positional(image)),
        (Pooled3D, positional((2, 1, 8, 8, 8))),
        (RunningMean, positional(rows)),
        (KeepsLast, positional(rows)),
        (Normalised, positional(rows)),
        (MaskedMean, positional(sequence)),
        (TiedLanguageModel, _tokens(1)),
        (ReturnsDataclass, positional(rows)),
        (ReturnsTuple, positional(rows)),
    ):
        yield Subject(name=model.__name__, build=model, call=call, may_be_whole=model in _WHOLE)


def _tokens(count: int) -> Callable[[bool], Call]:
    def call(training: bool) -> Call:
        return tuple(torch.randint(11, (2, 6)) for _ in range(count)), {}

    return call


def _head() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class VariationalAutoencoder(nn.Module):
    """Draws random numbers in the middle, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.code, self.decode = nn.Linear(512, 16), nn.Linear(8, 768)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, scale = self.code(self.encode(x)).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * scale.exp()
        divergence = (mean**2 + scale.exp() - scale - 1).sum(1)
        return {"image": self.decode(drawn).view_as(x), "divergence": divergence}


class VectorQuantizer(nn.Module):
    """A code book in a buffer that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4)
        self.register_buffer("codes", torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x).permute(0, 2, 3, 1)
        flat = hidden.reshape(-1, 8)
        chosen = torch.cdist(flat, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                share = F.one_hot(chosen, 16).to(flat.dtype)
                self.codes.lerp_(share.T @ flat / (share.sum(0)[:, None] + 1), 0.1)
        found = self.codes[chosen].view_as(hidden)
        return self.decode((hidden + (found - hidden).detach()).permute(0, 3, 1, 2))


class RoutedExperts(nn.Module):
    """A gate assigns rows to experts, so shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen, result = self.gate(flat).argmax(-1), torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            result = result.index_add(0, rows, expert(flat[rows]))
        return result.view_as(x)


class WeightedExperts(RoutedExperts):
    """All experts see all rows."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1).unbind(-1)
        return sum(w[..., None] * e(x) for w, e in zip(weights, self.experts, strict=True))


class TeacherForced(nn.Module):
    """A loop over positions with a cell and attention, as in early translation models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encode = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True)
        self.cell, self.attend = nn.LSTMCell(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, _ = self.encode(self.embed(source))
        state = carry = memory.mean(1)
        found = []
        for token in target.unbind(1):
            state, carry = self.cell(self.embed(token), (state, carry))
            read, _ = self.attend(state[:, None], memory, memory)
            found.append(self.head(read[:, 0] + state))
        return torch.stack(found, 1)


class ConvolutionalLSTM(nn.Module):
    """A state whose shape comes from the input's size."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Conv2d(11, 32, 3, 1, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = carry = x.new_zeros(x.shape[0], 8, *x.shape[-2:])
        for frame in x.unbind(1):
            take, keep, give, new = self.gates(torch.cat([frame, state], 1)).chunk(4, 1)
            carry = keep.sigmoid() * carry + take.sigmoid() * new.tanh()
            state = give.sigmoid() * carry.tanh()
        return self.head(state)


class FourierMixer(nn.Module):
    """Complex weights between two transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.real, self.imaginary = (nn.Parameter(torch.randn(9, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(x), dim=1) * torch.complex(self.real, self.imaginary)
        return self.last(torch.fft.irfft(spectrum, n=x.shape[1], dim=1) + x)


class NeuralODE(nn.Module):
    """The same layers four times per step (the Runge-Kutta method)."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            a = self.slope(x)
            b = self.slope(x + 0.05 * a)
            c = self.slope(x + 0.05 * b)
            x = x + 0.1 / 6 * (a + 2 * b + 2 * c + self.slope(x + 0.1 * c))
        return self.head(x)


class FixedPoint(nn.Module):
    """Iterates without gradients until little changes, then once more with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                before, state = state, torch.tanh(self.layer(state) + x)
                if (state - before).norm() < 1e-4:
                    break
        return self.head(torch.tanh(self.layer(state) + x))


class HalvedUntilDone(nn.Module):
    """As many steps as the values of a row need."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.halt = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        done = x.new_zeros(x.shape[0], 1)
        while done.min() < 0.9:
            x = torch.tanh(self.layer(x))
            done = done + 0.2 + self.halt(x).sigmoid()
        return x


class StochasticDepth(nn.Module):
    """Layers are dropped by Python's own random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() < 0.7:
                x = x + layer(x).tanh()
        return x


class SlopePenalty(nn.Module):
    """Differentiates a part of itself in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.last(self.first(x).tanh())
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + slope.square().sum(1, keepdim=True)


class Siamese(nn.Module):
    """One module under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU())
        self.right, self.project = self.left, nn.Linear(8, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        codes = (
            self.project(tower(x).mean((2, 3))) for tower, x in ((self.left, a), (self.right, b))
        )
        return F.cosine_similarity(*codes)


class SpatialTransformer(nn.Module):
    """Samples the image on a grid that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(3, 4, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6)
        )
        self.head = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.locate(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False))


class Folded(nn.Module):
    """Unfolds patches and folds them back, by sizes of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Linear(48, 48),
            nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48)),
        )

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 4, stride=4).transpose(1, 2)
        found = self.last(self.first(patches).relu()).transpose(1, 2)
        return F.fold(found, x.shape[-2:], 4, stride=4)


class Pooled3D(nn.Module):
    """The indices of a pooling go to the layer that unpools."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 1, 1)
        self.pool, self.restore = nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2)

    def forward(self, x: Tensor) -> Tensor:
        pooled, where = self.pool(self.first(x).relu())
        return self.last(self.restore(pooled, where))


class RunningMean(nn.Module):
    """A buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.last(self.first(x - self.mean).relu())


class KeepsLast(nn.Module):
    """Stores activations and a count on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), _head()
        self.calls, self.hidden = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(x).relu()
        self.hidden = hidden.detach()
        return self.last(hidden)


class Normalised(nn.Module):
    """Weights that are computed from other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.middle = parametrizations.weight_norm(nn.Linear(8, 8))
        self.last = _head()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).relu())


class MaskedMean(nn.Module):
    """Padding is recognized by its values, and left out of a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = (x[..., :1] > -0.5).to(x.dtype)
        return self.last((self.first(x) * kept).sum(1) / kept.sum(1).clamp(min=1))


class TiedLanguageModel(nn.Module):
    """The head is the embedding, several layers further on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            ids.shape[1], dtype=self.head.weight.dtype
        )
        return self.head(self.layers(self.embed(ids), mask=mask, is_causal=True))


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Both(NamedTuple):
    logits: Tensor
    hidden: Tensor


class ReturnsDataclass(nn.Module):
    """A result that pytree does not flatten."""

    output: Callable[..., Any] = Output

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), _head()

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        return self.output(self.last(hidden), hidden)


class ReturnsTuple(ReturnsDataclass):
    """A named tuple as the result."""

    output = Both


_WHOLE = (RoutedExperts, FixedPoint, HalvedUntilDone, StochasticDepth, SlopePenalty)
