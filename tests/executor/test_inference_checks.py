"""What placed(x) cannot return with one process per device is refused."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from placer import PlacerError
from placer.executor.distributed.checks import check_inference


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_inputs_with_tangents_are_refused() -> None:
    x = torch.ones(2)
    with torch.no_grad():
        check_inference([x], training=False)
        with forward_ad.dual_level():
            check_inference([x], training=False)
            with pytest.raises(PlacerError, match="one of them has a tangent"):
                check_inference([forward_ad.make_dual(x, x)], training=False)
