"""A step on simulated devices equals the plain model's, and gradients are where their parameters are.

Found, for example: an input, a target or the loss's own tensors that stay on the caller's device, a
gradient of a copied weight that does not come home, a fetched activation that stays on the host, an
executor that relies on torch's current device, an optimizer's state that is loaded to another device.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.simulated.accelerator import TYPE, device, on_device
from gpu.simulated.cases import HOW, LAYERS, TWO, D, mixed, network
from oracle import assert_close, gradient_noise
from torch import Tensor, nn
from torch.nn import functional as F

import placer

PIPELINED = {"microbatches": 2, "schedule": "1F1B"}
WEIGHT = torch.linspace(0.2, 1.0, 5, dtype=D)
OFFLOADED = {"offload": ["**"], "offload_overlap": True}


def assert_same_gradients(placed: nn.Module, plain: nn.Module) -> None:
    """Equal to those of ``plain``, which is on the CPU, and on the devices of their parameters."""
    noise, expected = gradient_noise(plain), dict(plain.named_parameters())
    for name, parameter in placed.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.device == parameter.device, name
        assert_close(parameter.grad.cpu(), expected[name].grad, name, floor=noise)


def step(
    spec: dict[str, Any],
    layers: dict[str, str] = LAYERS,
    *,
    x_on: str = "cpu",
    target_on: str = "cpu",
    loss_fn: Callable[..., Tensor] = F.cross_entropy,
    plain_loss: Callable[..., Tensor] = F.cross_entropy,
) -> tuple[placer.PlacedModule, nn.Module, Tensor, Tensor]:
    """A step of the mixed model, compared; returns the placed and the plain model, input and target."""
    model, x, target = mixed()
    plain = copy.deepcopy(model)
    placed = placer.compile(model, {**TWO, "layers": layers, **spec}, x)
    loss = placed.step(x.to(x_on), target=target.to(target_on), loss_fn=loss_fn)
    expected = plain_loss(plain(x), target)
    expected.backward()
    assert loss.device == placed.output_device
    assert_close(loss.cpu().detach(), expected.detach(), "loss")
    assert_same_gradients(placed, plain)
    return placed, plain, x, target


@pytest.mark.parametrize("how", HOW)
def test_two_steps_of_a_mixed_model(how: str) -> None:
    """The second one finds the first one's gradients, queues and pinned memory."""
    model, x, target = mixed()
    plain = copy.deepcopy(model)
    placed = placer.compile(model, {**TWO, "layers": LAYERS, **HOW[how]}, x)
    assert len({parameter.device for parameter in placed.parameters()}) == 2
    given, expected_given = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):
        loss = placed.step(given, target=target, loss_fn=F.cross_entropy)
        expected = F.cross_entropy(plain(expected_given), target)
        expected.backward()
        assert_close(loss.cpu().detach(), expected.detach(), "loss")
        assert_same_gradients(placed, plain)
    assert_close(given.grad, expected_given.grad, "the input's gradient")


@pytest.mark.parametrize("how", HOW)
def test_a_step_of_a_u_net(how: str) -> None:
    step_of_a_u_net({**TWO, **HOW[how]})


@pytest.mark.parametrize("fields", [{}, {"offload": ["**"]}, OFFLOADED, {"checkpoint": ["**"]}])
def test_a_step_of_a_u_net_in_space(fields: dict[str, Any]) -> None:
    step_of_a_u_net({**TWO, "space": 2, **fields})


def step_of_a_u_net(spec: dict[str, Any]) -> None:
    model, x = network("U-Net, group")
    plain = copy.deepcopy(model)
    placed = placer.compile(model, spec, x)
    placed.step(x, loss_fn=lambda y: y.square().mean(), reduction="mean")
    plain(x).square().mean().backward()
    assert_same_gradients(placed, plain)


@pytest.mark.parametrize("x_on", ["cpu", f"{TYPE}:0", f"{TYPE}:1"])
@pytest.mark.parametrize("target_on", ["cpu", f"{TYPE}:0", f"{TYPE}:1"])
def test_inputs_and_targets_may_be_anywhere(x_on: str, target_on: str) -> None:
    step(PIPELINED, x_on=x_on, target_on=target_on)


def test_a_loss_may_have_tensors_of_its_own() -> None:
    on_output = nn.CrossEntropyLoss(weight=WEIGHT.to(device(1)))
    step(PIPELINED, loss_fn=on_output, plain_loss=nn.CrossEntropyLoss(weight=WEIGHT))
    ignoring = nn.CrossEntropyLoss(ignore_index=1)
    step({"replicas": 2}, loss_fn=ignoring, plain_loss=ignoring)


@pytest.mark.parametrize("fields", [{}, OFFLOADED], ids=["kept", "offloaded"])
@pytest.mark.parametrize(
    "devices",
    [
        ["cuda:0", "cpu"],
        ["cpu", "cuda:1"],
        ["cuda:3"],
        ["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
    ],
    ids=", ".join,
)
def test_other_devices(devices: list[str], fields: dict[str, Any]) -> None:
    """A stage on the CPU, a single device that is not the first, and all four."""
    layers = {name: devices[i % len(devices)] for i, name in enumerate("abcd")}
    layers["skip"] = layers["d"]
    step({**PIPELINED, **fields, "devices": devices}, layers)


def test_the_current_device_may_be_another() -> None:
    with on_device(2):
        step({**PIPELINED, **OFFLOADED, "checkpoint": ["b"]})


def test_bf16_is_near() -> None:
    model, x, target = mixed()
    plain = copy.deepcopy(model)
    placed = placer.compile(model, {**TWO, **PIPELINED, "layers": LAYERS, "precision": "bf16"}, x)
    placed.step(
        x, target=target, loss_fn=lambda y, t: F.cross_entropy(y.double(), t), reduction="mean"
    )
    F.cross_entropy(plain(x), target).backward()
    for (name, parameter), expected in zip(
        placed.named_parameters(), plain.parameters(), strict=True
    ):
        assert parameter.grad is not None and expected.grad is not None
        scale = expected.grad.abs().max().item()
        torch.testing.assert_close(
            parameter.grad.cpu(), expected.grad, rtol=0.1, atol=0.1 * scale, msg=name
        )


def test_training_goes_on_from_a_checkpoint_on_other_devices(tmp_path: Path) -> None:
    placed, plain, x, target = step(PIPELINED)
    optimizer, expected = _adam(placed), _adam(plain)
    norms = [placed.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)]
    assert_close(norms[0].cpu(), norms[1], "norm")
    for each in (optimizer, expected):
        each.step()
        each.zero_grad()
    placer.save(placed, optimizer, tmp_path / "saved")
    spec = {
        "devices": ["cuda:2", "cuda:1"],
        "layers": {"a": "cuda:2", "b": "cuda:2", "d": "cuda:1"},
    }
    resumed = placer.compile(mixed()[0], spec, x)
    optimizer = _adam(resumed)
    placer.load(resumed, optimizer, tmp_path / "saved")
    resumed.step(x, target=target, loss_fn=F.cross_entropy)
    F.cross_entropy(plain(x), target).backward()
    assert_same_gradients(resumed, plain)
    for each in (optimizer, expected):
        each.step()
    for (name, parameter), wanted in zip(
        resumed.named_parameters(), plain.parameters(), strict=True
    ):
        assert optimizer.state[parameter]["exp_avg"].device == parameter.device
        assert_close(parameter.detach().cpu(), wanted.detach(), name)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), foreach=True)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_a_copy_is_on_the_same_devices(copied: Callable[[Any], Any]) -> None:
    placed, plain, x, target = step(PIPELINED)
    twin = copied(placed)
    for model in (twin, plain):
        model.zero_grad()
    twin.step(x, target=target, loss_fn=F.cross_entropy)
    F.cross_entropy(plain(x), target).backward()
    assert_same_gradients(twin, plain)
    assert [p.device for p in twin.parameters()] == [p.device for p in placed.parameters()]


def test_calls_without_gradients_and_of_another_size() -> None:
    placed, plain, x, _ = step({"replicas": 2})
    for rows in (12, 5):
        with torch.no_grad():
            found = placed(x[:rows])
        assert found.device == placed.output_device != device(0)
        assert_close(found.cpu(), plain(x[:rows]).detach(), "output")
