"""The caller may have made other streams current: nothing may be read, overwritten or freed too early.

Found, for example: a copy beside the kernels that does not wait for the stream that made its source, or for
which nobody waits; a gradient kept on another device whose adding does not wait for it.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from gpu.simulated.accelerator import current_stream, device, new_stream, on_stream
from gpu.simulated.cases import HOW, LAYERS, TWO, mixed
from gpu.simulated.test_steps import assert_same_gradients
from torch.nn import functional as F

import placer


# torch warns where a gradient comes to its parameter from another stream, as that of a weight does which
# stages on both devices read.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("by", ["step", "backward"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("devices", [(0,), (1,), (0, 1)], ids=str)
def test_on_streams_of_the_caller(devices: tuple[int, ...], how: str, by: str) -> None:
    model, x, target = mixed()
    plain = copy.deepcopy(model)
    placed = placer.compile(model, {**TWO, "layers": LAYERS, **HOW[how]}, x)
    with ExitStack() as stack:
        for index in devices:
            stream = new_stream(device(index))
            stream.wait_stream(current_stream(device(index)))
            stack.enter_context(on_stream(stream))
        if by == "step":
            placed.step(x, target=target, loss_fn=F.cross_entropy)
        else:
            F.cross_entropy(placed(x), target.to(placed.output_device)).backward()
    for index in (0, 1):
        torch.accelerator.synchronize(device(index))
    F.cross_entropy(plain(x), target).backward()
    assert_same_gradients(placed, plain)
