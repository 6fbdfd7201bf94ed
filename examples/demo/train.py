"""Train a placed small U-Net on patches, and compare its first step with that of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from examples.demo.brain import Brain, cut_patches, dice_scores, training_and_held_out_centers

PATCH, BATCH, STEPS = 32, 8, 150
_HELD_OUT = 16  # patches
_LEARNING_RATE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first step of the placed model compared with the plain one's; errors are relative."""

    plain_loss: float
    placed_loss: float
    gradients: int
    worst_name: str
    worst_error: float

    @property
    def equal(self) -> bool:
        """Whether they agree within float32 rounding of sums over some 10^5 voxels."""
        return self.worst_error < 5e-4 and abs(self.plain_loss - self.placed_loss) < 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The loss of the batch after ``step`` steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Dice per tissue on held-out patches and the mean loss there, before and after training."""

    dice_before: list[float]
    dice_after: list[float]
    loss_before: float
    loss_after: float


class Training:
    """One run: the data, the model to place, and the loop. It sets ``first_step`` and ``outcome``."""

    def __init__(
        self, brain: Brain, model: nn.Module, *, patch: int = PATCH, seed: int = 0
    ) -> None:
        self.brain = brain
        self.model = model
        self.patch = patch
        self._random = torch.Generator().manual_seed(seed)
        self._train, held_out = training_and_held_out_centers(brain, patch)
        self.held_out = cut_patches(brain, self._pick(held_out, _HELD_OUT), patch)
        self.first_step: FirstStep | None = None
        self.outcome: Outcome | None = None

    def batch(self, size: int = BATCH) -> tuple[Tensor, Tensor]:
        """Images (size, 1, patch, patch, patch) and labels from the part that is trained on."""
        return cut_patches(self.brain, self._pick(self._train, size), self.patch)

    def _pick(self, centers: Tensor, count: int) -> Tensor:
        return centers[torch.randint(len(centers), (count,), generator=self._random)]

    def run(self, placed: placer.PlacedModule, steps: int = STEPS) -> Iterator[Progress]:
        """Train ``placed`` for ``steps`` steps of Adam."""
        optimizer = torch.optim.Adam(placed.parameters(), lr=_LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, steps)
        loss_before, dice_before = self._judge(placed)
        for step in range(steps):
            images, labels = self.batch()
            loss = placed.step(images, target=labels, loss_fn=F.cross_entropy)
            if step == 0:
                self.first_step = self._compare(placed, float(loss), images, labels)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield Progress(step=step + 1, loss=float(loss))
        loss_after, dice_after = self._judge(placed)
        self.outcome = Outcome(
            dice_before=dice_before,
            dice_after=dice_after,
            loss_before=loss_before,
            loss_after=loss_after,
        )

    def _compare(
        self, placed: nn.Module, placed_loss: float, images: Tensor, labels: Tensor
    ) -> FirstStep:
        """Compare with the same step of the plain model; ``placed`` already has its gradients."""
        plain = copy.deepcopy(self.model)
        loss = F.cross_entropy(plain(images), labels)
        loss.backward()
        expected = {name: p.grad for name, p in plain.named_parameters()}
        errors = {
            name: _relative_error(parameter.grad, expected[name])
            for name, parameter in placed.named_parameters()
        }
        worst = max(errors, key=lambda name: errors[name])
        return FirstStep(
            plain_loss=loss.item(),
            placed_loss=placed_loss,
            gradients=len(errors),
            worst_name=worst,
            worst_error=errors[worst],
        )

    def _judge(self, placed: nn.Module) -> tuple[float, list[float]]:
        """Loss and Dice on the held-out patches."""
        images, labels = self.held_out
        placed.eval()
        with torch.no_grad():
            logits = placed(images).cpu()
        placed.train()
        return F.cross_entropy(logits, labels).item(), dice_scores(logits, labels)


def _relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    difference = (found.cpu() - expected).abs().max()
    return float(difference / expected.abs().max().clamp_min(1e-12))
