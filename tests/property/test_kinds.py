"""What ``forward`` does besides returning a result: equal in all that a caller can see, or refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from kinds import KINDS, Case
from oracle import assert_seen_alike

_LATE = "after it has used it"  # refused in every spec
SPECS: tuple[dict[str, Any], ...] = (
    {},
    {"microbatches": 2},
    {"replicas": 2},
    {"replicas": 2, "microbatches": 2},
)


def make(kind: str, seed: int) -> Case:
    torch.manual_seed(seed)
    return KINDS[kind](Random(seed))


@pytest.mark.matrix(28)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("kind", KINDS)
def test_equal_in_all_that_is_seen_or_refused(kind: str, seed: int, spec: dict[str, Any]) -> None:
    plain, ours = make(kind, seed), make(kind, seed)
    if spec and plain.per_slice:
        plain.outside = ours.outside = lambda: None
    found = assert_seen_alike(plain, ours, {"devices": ["cpu:0", "cpu:1"], **spec})
    assert found == "equal" or spec or _LATE in found, found
