"""What ``forward`` does besides returning a result: equal in all that a caller can see, or refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from kinds import KINDS, Case
from oracle import assert_seen_alike

_LATE = "after it has used it"  # refused in every spec
SPECS: tuple[dict[str, Any], ...] = (
    {},
    {"microbatches": 2},
    {"replicas": 2},
    {"replicas": 2, "microbatches": 2},
)
# Nightly, every model is placed in every way; otherwise each of four in one way.
DRAWN = [(seed, SPECS[seed]) for seed in range(4)]
if settings.get_current_profile_name() == "nightly":
    DRAWN = [(seed, spec) for seed in range(25) for spec in SPECS]


def make(kind: str, seed: int) -> Case:
    torch.manual_seed(seed)
    return KINDS[kind](Random(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_in_all_that_is_seen_or_refused(kind: str) -> None:
    for seed, spec in DRAWN:
        plain, ours = make(kind, seed), make(kind, seed)
        if spec and plain.per_slice:
            plain.outside = ours.outside = lambda: None
        found = assert_seen_alike(plain, ours, {"devices": ["cpu:0", "cpu:1"], **spec})
        assert found == "equal" or spec or _LATE in found, f"seed {seed}: {found}"
