"""An emitted module keeps no tensor longer than a module written by hand for the same devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unet3d import UNet3D, unet3d

import placer
from placer.executor.places.place import CALLER, Place, on
from placer.executor.places.transfer import transfer
from placer.simulation.ledger import Ledger

CPU = torch.device("cpu")
FIRST, SECOND = (Place(name, CPU) for name in ("cpu:0", "cpu:1"))


class HandSplitUNet(nn.Module):
    """`UNet3D.forward` with ``.to`` in two places, as the simulator knows it.

    Encoder and bottleneck on the first device, the rest on the second; a skip goes when needed.
    With ``recompute``, every double convolution goes through ``torch.utils.checkpoint``.
    """

    def __init__(self, model: UNet3D, *, recompute: bool = False) -> None:
        super().__init__()
        self.model = model
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        x = transfer(x, CALLER, FIRST)
        skips = []
        for encode in model.encoder:
            x = self.block(encode, x)
            skips.append(x)
            x = model.pool(x)
        x = transfer(self.block(model.bottleneck, x), FIRST, SECOND)
        for level in reversed(range(len(skips))):
            skip = transfer(skips.pop(), FIRST, SECOND)
            x = torch.cat([skip, model.upsample[level](x)], dim=1)
            del skip
            x = self.block(model.decoder[level], x)
        return model.head(x)  # type: ignore[no-any-return]

    def block(self, layers: nn.Module, x: Tensor) -> Any:
        return checkpoint(layers, x, use_reentrant=False) if self.recompute else layers(x)


CASES: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], Any, tuple[int, ...]]] = {
    "unet": (
        lambda: unet3d(width=4, depth=3, norm="instance"),
        HandSplitUNet,
        {"upsample": "cpu:1", "decoder": "cpu:1", "head": "cpu:1", "encoder": "cpu:0"}
        | {"pool": "cpu:0", "bottleneck": "cpu:0"},
        (4, 1, 16, 16, 16),
    ),
}


Peaks = dict[str, int]


def _peaks(model: nn.Module, layers: dict[str, str], x: Tensor, run: Callable[[], object]) -> Peaks:
    """Peak bytes per device while ``run`` runs; tensors outside layers of the second count for the first."""
    second = [layer for layer, device in layers.items() if device == "cpu:1"]
    ledger = Ledger()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        ledger.add(tensor, SECOND if any(name.startswith(s) for s in second) else FIRST)
    ledger.add(x, CALLER)
    with ledger, on(SECOND):  # where the loss is
        run()
    model.zero_grad()
    return {place.name: ledger.timeline().peaks()[place.name].nbytes for place in (FIRST, SECOND)}


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_no_byte_more_than_by_hand(name: str, microbatches: int) -> None:
    """With micro-batches, by hand is a loop over chunks: all forwards, then all backwards, as in GPipe."""
    build, split, layers, shape = CASES[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers, "microbatches": microbatches}
    placed = placer.compile(copy.deepcopy(model), spec, (x,), run_on="cpu")
    hand = split(model)

    def train_by_hand() -> None:
        losses = [_loss(hand(chunk)) / microbatches for chunk in x.chunk(microbatches)]
        for loss in losses:
            loss.backward()

    def check(emitted: Callable[[], object], by_hand: Callable[[], object]) -> None:
        found = _peaks(placed, layers, x, emitted)
        expected = _peaks(model, layers, x, by_hand)
        assert all(found[place] <= expected[place] for place in expected), (found, expected)

    check(lambda: placed.step(x, loss_fn=_loss), train_by_hand)
    if microbatches == 1:
        check(lambda: _loss(placed(x)).backward(), train_by_hand)
    placed.eval(), hand.eval()
    with torch.no_grad():
        check(lambda: placed(x), lambda: torch.cat([hand(c) for c in x.chunk(microbatches)]))


def test_no_byte_more_than_with_checkpoint_by_hand() -> None:
    build, _, layers, shape = CASES["unet"]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers}
    recomputed = {"checkpoint": ["encoder.*", "bottleneck", "decoder.*"]}
    placed = placer.compile(copy.deepcopy(model), spec | recomputed, (x,), run_on="cpu")
    hand = HandSplitUNet(model, recompute=True)
    kept = _peaks(model, layers, x, lambda: _loss(HandSplitUNet(model)(x)).backward())
    expected = _peaks(model, layers, x, lambda: _loss(hand(x)).backward())
    found = _peaks(placed, layers, x, lambda: placed.step(x, loss_fn=_loss))
    assert all(found[place] <= expected[place] for place in expected), (found, expected)
    assert sum(expected.values()) < sum(kept.values())
