"""The law on simulated devices: outputs, gradients and buffers of ``placed(x)`` equal the plain model's.

Found, for example: a value or a constant that is not copied to the device of its reader, a gradient that
stays where it was computed, a layer that makes a tensor on the device of the capture, random numbers that
are drawn in another order because each device has its thread.
"""

from __future__ import annotations

import pytest
import torch
from gpu.simulated.cases import HOW, NETWORKS, TWO, network

import placer


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_the_plain_model(name: str, how: str) -> None:
    model, x = network(name)
    found = placer.verify(model, {**TWO, **HOW[how]}, x)
    assert found.ok, found


def test_recomputing_leaves_the_random_generator_where_it_was() -> None:
    """Two devices recompute at once, in a thread each. Without a lock, this fails about every other time."""
    model, x = network("tied transformer")
    placed = placer.compile(model, {**TWO, "checkpoint": ["**"], "microbatches": 4}, x)
    for seed in range(10):
        torch.manual_seed(seed)
        loss = placed(x).square().mean()
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
