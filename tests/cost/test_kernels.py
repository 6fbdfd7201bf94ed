"""The tensors that CUDA would save, found on fake CPU tensors, are those that fake CUDA tensors save.

Fake CUDA tensors need no GPU for a forward. They never choose a fused attention there (they cannot
ask which GPU it is) and cannot run cuDNN's RNNs: those two are compared with the operators
themselves, and with what their derivatives need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import captured_once
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import placer
from placer.cost import device_kernels

IN_FP16 = ("batch norm", "softmax", "log softmax", "convnet", "transformer")


@contextmanager
def autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Like ``torch.autocast``, which refuses CUDA on a machine without it."""
    torch.set_autocast_dtype(device, dtype or torch.bfloat16)
    torch.set_autocast_enabled(device, dtype is not None)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, False)


def saved(device: str, run: Callable[[], Any], dtype: torch.dtype | None = None) -> Counter[int]:
    """Bytes of the storages that autograd saves in a forward, each counted once."""
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with FakeTensorMode(), torch.device(device), hooks, autocast(device, dtype):
        run()
    return Counter(s.nbytes() for s in storages.values() if s.nbytes())


def saved_as_cuda(run: Callable[[], Any], dtype: torch.dtype | None = None) -> Counter[int]:
    with device_kernels(lambda: "cuda", half=dtype is not None):
        return saved("cpu", run, dtype)


def R(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, requires_grad=True, **options)


def attend(**options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*(R(2, 4, 32, 16) for _ in range(3)), **options)


CASES: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(R(64, 64), 0.1),
    "dropout in place": lambda: nn.Dropout(0.5, inplace=True)(R(64, 64) * 2),
    "dropout of channels": lambda: nn.Dropout3d()(R(2, 8, 4, 4, 4)),
    "batch norm": lambda: nn.BatchNorm2d(8)(R(4, 8, 16, 16)),
    "batch norm, two dimensions": lambda: nn.BatchNorm1d(8)(R(4, 8)),
    "batch norm, evaluation": lambda: nn.BatchNorm2d(8).eval()(R(4, 8, 16, 16)),
    "batch norm without weights": lambda: nn.BatchNorm2d(8, affine=False)(R(4, 8, 16, 16)),
    "instance norm": lambda: nn.InstanceNorm3d(8, affine=True)(R(2, 8, 4, 4, 4)),
    "layer norm": lambda: nn.LayerNorm(8)(R(4, 6, 8)),
    "group norm": lambda: nn.GroupNorm(2, 8)(R(4, 8, 8)),
    "rms norm": lambda: nn.RMSNorm(8)(R(4, 6, 8)),
    "lstm cell": lambda: nn.LSTMCell(8, 16)(R(4, 8)),
    "gru cell": lambda: nn.GRUCell(8, 16)(R(4, 8)),
    "convolution": lambda: nn.Conv3d(3, 8, 3)(R(2, 3, 8, 8, 8)),
    "linear": lambda: nn.Linear(8, 16)(R(4, 6, 8)),
    "a tied weight": lambda: (lambda m, x: m(m(x)))(nn.Linear(8, 8), R(4, 8)),
    "attention by its definition": lambda: attend(),
    "the same with dropout and mask": lambda: attend(
        dropout_p=0.1, attn_mask=torch.ones(32, 32, dtype=torch.bool)
    ),
    "attention with its weights": lambda: nn.MultiheadAttention(16, 4, dropout=0.1)(
        *(R(5, 3, 16) for _ in range(3))
    ),
    "softmax": lambda: nn.Linear(8, 8)(R(4, 8)).softmax(1),
    "log softmax": lambda: nn.Linear(8, 8)(R(4, 8)).log_softmax(1),
    "cross entropy": lambda: F.cross_entropy(
        nn.Linear(8, 5)(R(4, 8)), torch.zeros(4, dtype=torch.long)
    ),
    "elementwise": lambda: nn.Linear(8, 8)(R(4, 8)).exp().pow(2).log1p().sum(1),
    "einsum": lambda: torch.einsum("ij,jk->ik", R(4, 8), R(8, 4)),
    "cat": lambda: torch.cat([nn.Linear(8, 8)(R(4, 8)), R(4, 8)]) * 2,
    "upsampling": lambda: F.interpolate(nn.Conv2d(3, 4, 1)(R(2, 3, 8, 8)), scale_factor=2),
    "pooling": lambda: F.max_pool3d(nn.Conv3d(3, 4, 1)(R(2, 3, 8, 8, 8)), 2),
    "convnet": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(288, 4),
    )(R(2, 3, 10, 10)),
    "transformer": lambda: nn.Sequential(
        *(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(2))
    )(R(2, 6, 16)),
}


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in CASES for dtype in (None, torch.bfloat16)),
        *((name, torch.float16) for name in IN_FP16),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_same_tensors_as_on_a_fake_gpu(name: str, dtype: torch.dtype | None) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        ours = saved_as_cuda(CASES[name], dtype)
        try:
            theirs = saved("cuda", CASES[name], dtype)
        except RuntimeError as error:
            assert name == "gru cell", error
            pytest.skip(f"torch {torch.__version__} cannot run fused GRU cells without data")
    if name == "convnet" and dtype is not None:  # batch statistics in half, 8 channels
        assert ours - theirs == Counter({16: 2})
        assert theirs - ours == Counter({32: 2})
    else:
        assert ours == theirs


def test_a_gru_cell_keeps_a_workspace_of_five_units_per_row() -> None:
    """Checked against a constant, because older releases of torch have no fake CUDA kernel for it."""
    kept = saved_as_cuda(CASES["gru cell"])
    rows, inputs, units = 4, 8, 16
    assert kept == Counter(
        4 * n
        for n in (
            *(rows * 3 * units, rows * 3 * units),  # gates
            *(3 * units, 3 * units),  # biases
            *(rows * inputs, rows * units, rows * 5 * units),  # input, state, workspace
            3 * units * inputs,  # the state needs no gradient, so its weight is not kept
        )
    )


@pytest.mark.filterwarnings("ignore")
def test_a_cpu_stage_keeps_what_it_kept() -> None:
    """Even while another stage of the same run is on a GPU."""
    for run in CASES.values():
        with device_kernels(lambda: "cpu", half=True):
            again = saved("cpu", run, torch.bfloat16)
        assert again == saved("cpu", run, torch.bfloat16)


def test_fused_attention_keeps_its_result_and_a_sum_per_row() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

    def half() -> list[Tensor]:
        return [R(2, 4, 32, 16, dtype=torch.bfloat16) for _ in range(3)]

    def full() -> list[Tensor]:
        return [R(2, 4, 32, 16) for _ in range(3)]

    ours = saved_as_cuda(lambda: F.scaled_dot_product_attention(*half()))
    assert ours == saved("cuda", lambda: flash(*half()))
    ours = saved_as_cuda(lambda: F.scaled_dot_product_attention(*full(), dropout_p=0.1))
    assert ours == saved("cuda", lambda: efficient(*full(), None, True, 0.1))
    matrix = 2 * 4 * 32 * 32 * 4
    assert matrix not in ours


@pytest.mark.parametrize(("kind", "kept"), [(nn.LSTM, 7), (nn.GRU, 6), (nn.RNN, 2)])
def test_cudnn_keeps_the_gates_of_all_steps(kind: Callable[..., nn.Module], kept: int) -> None:
    found = saved_as_cuda(lambda: kind(8, 16, 2, dropout=0.1)(R(5, 3, 8)))
    cells = 5 * 3 * 16
    assert found[4 * kept * cells * 2 + cells] == 1  # the reserve: two layers, a mask between them
    plain = saved("cpu", lambda: kind(8, 16, 2, dropout=0.1)(R(5, 3, 8)))
    assert len(list(found.elements())) < len(list(plain.elements()))


class Mixed(nn.Module):
    """Dropout, attention, recurrence and batch norm, whose operators differ by device."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.rnn(self.encoder(x))[0].transpose(1, 2)).transpose(1, 2))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("second", ["cuda:1", "cpu:0"])
@captured_once()
def test_predicted_is_simulated_with_the_kernels_of_each_device(
    precision: str, second: str
) -> None:
    model, x = Mixed(), torch.empty(2, 64, 16)
    spec = {
        "devices": ["cuda:0", second],
        "layers": {"encoder": "cuda:0", "rnn": second, "norm": second, "head": second},
        "precision": precision,
    }
    plan = placer.make_plan(model, spec, (x,))
    simulated = {d.device: d.peak for d in placer.simulate(model, plan, (x,)).devices}
    predicted = {d.device: d.peak for d in plan.devices}
    assert simulated == pytest.approx(predicted, rel=0.01)
    on_cpu = {d.device: d.peak for d in placer.simulate(model, plan, (x,), run_on="cpu").devices}
    assert on_cpu["cuda:0"] > 1.05 * simulated["cuda:0"]  # float masks
    if second == "cpu:0":
        assert on_cpu["cpu:0"] == simulated["cpu:0"]
