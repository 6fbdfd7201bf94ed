"""What kernels of a CPU keep for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from placer.cost.cpu_results import lstm_workspace_nbytes


@pytest.mark.matrix(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 12, 5, 4), (10, 16, 128, 64), (10, 16, 64, 100)])
def test_an_lstm_keeps_what_the_formula_says(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    steps, rows, features, hidden = shape
    lstm = nn.LSTM(features, hidden).to(dtype)
    x = torch.randn(steps, rows, features, dtype=dtype)
    output, _ = lstm(x)
    node: Any = output.grad_fn
    while not hasattr(node, "_saved_result3"):
        if not node.next_functions:
            pytest.skip(f"on this CPU an LSTM of {dtype} is not a single operation")
        node = node.next_functions[0][0]
    assert node._saved_result3.nbytes == lstm_workspace_nbytes(x, hidden)
