"""The ledger: what it counts, where, and that two devices are never mixed."""

from __future__ import annotations

import gc

import pytest
import torch
from ledgers import live_bytes

from placer.cost import BLAS_NBYTES
from placer.errors import DeviceError
from placer.executor.places.place import Place, on
from placer.executor.places.transfer import transfer
from placer.simulation import Ledger
from placer.timeline import StepPosition

CPU = torch.device("cpu")
A, B = Place("cuda:0", CPU), Place("cuda:1", CPU)
KIB = 1024  # a float32 tensor of 16 x 16


def _tile() -> torch.Tensor:
    return torch.ones(16, 16)


def test_counts_a_storage_once_while_it_lives() -> None:
    with Ledger() as ledger:
        with on(A):
            x = _tile()
            view = x[2:].t()
        y = x + 1
        assert live_bytes(ledger) == {"cuda:0": 2 * KIB}
        del x
        assert live_bytes(ledger) == {"cuda:0": 2 * KIB}  # the view holds the storage
        del view, y
        gc.collect()
    assert live_bytes(ledger) == {}
    assert ledger.timeline().peaks()["cuda:0"].nbytes == 2 * KIB


def test_a_transfer_moves_to_the_other_device() -> None:
    with Ledger() as ledger:
        with on(A):
            x = _tile()
        y = transfer(x, A, B)
        z = y * 2
    assert live_bytes(ledger) == {"cuda:0": KIB, "cuda:1": 2 * KIB}
    assert z.shape == (16, 16)


def test_an_operation_over_two_devices_is_an_error() -> None:
    with Ledger():
        with on(A):
            x = _tile()
        with on(B):
            y = _tile()
        with pytest.raises(DeviceError, match="cuda:0 and cuda:1"):
            x + y
        with on(B):
            scalar = torch.tensor(2.0)
        x * scalar  # numbers without dimensions may come from anywhere, as on CUDA


def test_in_place_operations_allocate_nothing() -> None:
    with Ledger() as ledger:
        with on(A):
            x = _tile()
        x.add_(1).mul_(2)
    assert ledger.timeline().peaks()["cuda:0"].nbytes == KIB


def test_matrix_products_take_a_workspace_in_each_of_two_threads() -> None:
    """Of autograd's thread, in which a recomputed forward runs too, and of all else."""
    phases = iter(("forward", "forward", "backward", "recompute"))
    with Ledger(lambda: StepPosition(phase=next(phases)), kernels=lambda _: "cuda") as ledger:
        with on(A):
            x = _tile()
        found = []
        for _ in range(3):
            x @ x
            blocks = ledger.timeline().blocks
            found.append([block.nbytes for block in blocks if block.kind == "workspace"])
    assert found == [[BLAS_NBYTES] * count for count in (1, 2, 2)]


def test_what_was_live_at_the_peak() -> None:
    with Ledger() as ledger:
        with on(A):
            small = torch.ones(4)
            big = _tile()
        del big
        other = small + 1
        found = ledger.timeline().live("cuda:0", ledger.timeline().peaks()["cuda:0"])
    assert [t.shape for t in found] == [(16, 16), (4,)]
    assert other.shape == (4,)


def test_a_copy_and_the_state_of_an_optimizer_are_named_after_their_source() -> None:
    weight = _tile()
    with Ledger() as ledger:
        ledger.add(weight, A, kind="parameter", name="conv.weight")
        copy = transfer(weight, A, B)
        with on(A):
            state = torch.zeros_like(weight)
    for place, kind in (("cuda:0", ""), ("cuda:1", "received")):
        found = ledger.timeline().live(place, ledger.timeline().peaks()[place])[-1]
        assert (found.kind, found.name, found.layer) == (kind, "conv.weight", "conv")
    assert copy.shape == state.shape
