"""A batch is split into slices for all replicas; a dry run makes those of the first replica alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from placer.executor.scatter import scatter_batch
from placer.program import lower


@pytest.mark.parametrize(("rows", "replicas"), [(12, 2), (11, 3), (7, 7), (1, 4)])
def test_slices_of_further_replicas_stand_for_those_with_as_many_rows(
    rows: int, replicas: int
) -> None:
    x = torch.randn(rows, 4)
    call = lower(nn.Linear(4, 4), (x,)).call
    whole = scatter_batch(call, [x], replicas=replicas, microbatches=2)
    first = scatter_batch(call, [x], replicas=replicas, microbatches=2, only_first=True)
    assert first.rows == whole.rows
    assert [each.shape for (each,) in first.slices] == [each.shape for (each,) in whole.slices]
    own = whole.of_replica(0)
    for index in own:
        assert torch.equal(first.slices[index][0], whole.slices[index][0])
    made = {id(each) for (each,) in first.slices}
    assert len(made) <= len(own) + 1
