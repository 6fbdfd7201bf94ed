"""Weights on their devices: copied, read from files, or initialised; never all in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from oracle import assert_close
from safetensors.torch import save_file
from torch import Tensor, nn

import placer
from placer.emit import materialize
from placer.errors import PlacerError

CPU = torch.device("cpu")


def _homes(model: nn.Module) -> dict[str, torch.device]:
    names = [
        *(n for n, _ in model.named_parameters(remove_duplicate=False)),
        *(n for n, _ in model.named_buffers(remove_duplicate=False)),
    ]
    return dict.fromkeys(names, CPU)


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_a_real_model_is_copied_and_left_alone() -> None:
    model = models.TiedTransformer()
    copied = materialize(model, _homes(model))
    for (name, a), b in zip(copied.named_parameters(), model.parameters(), strict=True):
        assert_close(a.detach(), b.detach(), name)
        assert a.data_ptr() != b.data_ptr()
    assert copied.out.weight is copied.tokens.weight


@pytest.mark.parametrize("save", ["safetensors", "torch"])
def test_a_meta_model_is_read_from_a_file(save: str, tmp_path: Path) -> None:
    real = models.InPlace()
    real(torch.randn(4, 2, 5, 5))  # buffers that are not at their first values
    path = tmp_path / f"weights.{'safetensors' if save == 'safetensors' else 'pt'}"
    if save == "safetensors":
        save_file(real.state_dict(), path)
    else:
        torch.save(real.state_dict(), path)
    x = torch.randn(4, 2, 5, 5)
    spec = {"devices": ["cpu:0", "cpu:1"]}
    placed = placer.compile(_on_meta(models.InPlace), spec, (x,), weights=path)
    assert list(placed.state_dict()) == list(real.state_dict())
    for name, tensor in placed.state_dict().items():
        assert torch.equal(tensor, real.state_dict()[name]), name
    assert_close(placed(x), real(x), "output")


def test_tied_names_are_found_under_any_of_them(tmp_path: Path) -> None:
    real = models.TiedTransformer()
    state = {k: v for k, v in real.state_dict().items() if k != "tokens.weight"}
    torch.save(state, tmp_path / "w.pt")
    meta = _on_meta(models.TiedTransformer)
    placed = materialize(meta, _homes(meta), weights=tmp_path / "w.pt")
    assert placed.out.weight is placed.tokens.weight
    assert torch.equal(placed.tokens.weight, real.tokens.weight)


def test_every_mismatch_with_the_file_is_listed(tmp_path: Path) -> None:
    state = models.ConvNet().state_dict()
    state["fc2.bias"] = torch.zeros(3)
    state["fc3.bias"] = torch.zeros(3)
    del state["conv1.weight"]
    torch.save(state, tmp_path / "w.pt")
    meta = _on_meta(models.ConvNet)
    with pytest.raises(PlacerError) as error:
        materialize(meta, _homes(meta), weights=tmp_path / "w.pt")
    for said in ("conv1.weight is missing", "fc2.bias has shape (3,)", "fc3.bias is not in"):
        assert said in str(error.value)


def test_files_that_are_not_weights(tmp_path: Path) -> None:
    meta = _on_meta(models.ConvNet)
    (tmp_path / "a.pt").write_bytes(b"no pickle")
    (tmp_path / "a.safetensors").write_bytes(b"no header")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("a.pt", "a.safetensors", "list.pt", "missing.pt"):
        with pytest.raises(PlacerError, match=name):
            materialize(meta, _homes(meta), weights=tmp_path / name)


def test_meta_parameters_are_initialised_alike_for_every_placement() -> None:
    x = torch.randn(4, 1, 8, 8)
    specs = [{"devices": ["cpu:0"]}, {"devices": ["cpu:0", "cpu:1", "cpu:2"]}]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, three = (placer.compile(_on_meta(models.ConvNet), spec, (x,)) for spec in specs)
    assert torch.equal(torch.get_rng_state(), state)  # the user's generator is not moved
    for (name, a), b in zip(one.named_parameters(), three.parameters(), strict=True):
        assert torch.equal(a, b), name
    bound = 1 / 9**0.5  # of the default initialisation of a 3 x 3 convolution with one channel
    assert 0.5 * bound < one.conv1.weight.abs().max() <= bound
    assert not torch.equal(one.conv1.bias, one.fc2.bias[:8])


def test_meta_buffers_and_tied_parameters_are_initialised() -> None:
    norm = _on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    made = materialize(norm, _homes(norm))
    assert torch.equal(made[1].running_var, torch.ones(4))
    assert made[1].num_batches_tracked == 0
    rnn = _on_meta(models.Recurrent)
    real = materialize(rnn, _homes(rnn))
    sequence, _ = real(torch.randn(2, 4, 3))
    assert sequence.isfinite().all()


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_modules_without_an_initialiser_are_named() -> None:
    meta = _on_meta(_Bare)
    with pytest.raises(PlacerError, match=r"_Bare: scale[\s\S]*weights="):
        materialize(meta, _homes(meta))

    def ones(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    made = materialize(meta, _homes(meta), initialize=ones)
    assert torch.equal(made.scale, torch.ones(3))
    assert torch.equal(made.linear.weight, torch.ones(3, 3))


def test_frozen_parameters_stay_frozen() -> None:
    meta = _on_meta(models.ConvNet)
    meta.conv1.requires_grad_(False)
    made = materialize(meta, _homes(meta))
    assert not made.conv1.weight.requires_grad
    assert made.conv2.weight.requires_grad
