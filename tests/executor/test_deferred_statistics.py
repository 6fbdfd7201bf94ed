"""``batch_norm: "deferred"``: running statistics as if the batch had not been cut; all else as ever."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from norm_cases import NORMS, make_net, step_by_hand
from oracle import assert_close, gradient_noise, mean_square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import placer
from placer.verification import verify

D = torch.float64
# Stages, replicas and micro-batches: every pair of two of them
CUTS = [
    (1, 1, 4),
    (1, 2, 2),
    (1, 3, 1),
    (2, 1, 2),
    (2, 2, 1),
    (2, 3, 4),
    (3, 1, 1),
    (3, 2, 4),
    (3, 3, 2),
]
FEW = [(1, 1, 4), (2, 3, 2), (3, 2, 1)]


def _spec(stages: int, replicas: int, microbatches: int, **fields: Any) -> placer.PlacementSpec:
    return placer.PlacementSpec(
        devices=[f"cpu:{i}" for i in range(stages)],
        replicas=replicas,
        microbatches=microbatches,
        batch_norm="deferred",
        objective="bottleneck",  # even stages
        **fields,
    )


def _check_step(
    net: nn.Module, placed: placer.PlacedModule, x: Tensor, cut: tuple[int, int, int]
) -> None:
    """A step of ``placed`` equals that of ``net`` by hand, which then gets the same statistics."""
    net.zero_grad()
    placed.zero_grad()
    loss, expected = step_by_hand(net, x, *cut[1:])
    assert_close(placed.step(x, loss_fn=mean_square), loss, f"{cut}, loss")
    for (path, ours), theirs in zip(placed.named_parameters(), net.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, path, floor=gradient_noise(net))
    _compare_buffers(placed, expected)
    for path, buffer in net.named_buffers():
        buffer.copy_(expected[path])


def _compare_buffers(placed: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(placed.named_buffers())
    assert list(found) == list(expected)
    for name, buffer in found.items():
        assert_close(buffer, expected[name], name)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", NORMS)
def test_statistics_are_those_of_all_that_the_norm_was_given(name: str) -> None:
    x = torch.randn(10, 3, 4, 4, dtype=D)
    for cut in CUTS if name == "batch" else FEW:
        net = make_net(name)
        placed = placer.compile(net, _spec(*cut), x)
        assert list(placed.state_dict()) == list(net.state_dict())
        for rows in (10, 7, 2):  # the last has fewer rows than cuts
            _check_step(net, placed, x[:rows], cut)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["shared", "acting"])
def test_statistics_of_stages_that_are_split_in_space(name: str) -> None:
    """Also of norms that run whole: "acting" is a function with running statistics."""
    x = torch.randn(10, 3, 5, 4, dtype=D)
    for cut, fields in (((2, 1, 4), {}), ((2, 2, 2), {"checkpoint": ["**"]}), ((4, 2, 2), {})):
        net = make_net(name)
        placed = placer.compile(net, _spec(*cut, space=2, **fields), x)
        for rows in (10, 7):
            _check_step(net, placed, x[:rows], cut)


def test_instance_norm_equals_the_uncut_original_wholly() -> None:
    x = torch.randn(7, 3, 4, 4, dtype=D)
    net = make_net("instance")
    placed = placer.compile(net, _spec(2, 2, 2), x)
    assert_close(placed(x), net(x), "output")
    _compare_buffers(placed, dict(net.named_buffers()))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("policy", ["checkpoint", "offload"])
def test_recomputed_layers_count_once(schedule: str, policy: str) -> None:
    x = torch.randn(8, 3, 4, 4, dtype=D)
    for name in ("batch", "shared", "acting", "instance"):
        net = make_net(name)
        fields: dict[str, Any] = {policy: ["0", "3"], "schedule": schedule}
        placed = placer.compile(net, _spec(2, 2, 2, **fields), x)
        loss, expected = step_by_hand(net, x, 2, 2)
        assert_close(placed.step(x, loss_fn=mean_square), loss, "loss")
        _compare_buffers(placed, expected)
        for (path, ours), theirs in zip(placed.named_parameters(), net.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad, path, floor=gradient_noise(net))


def test_forward_and_backward_by_hand() -> None:
    """Autograd outside of `step`, and a forward without gradients, which updates as eager does."""
    x = torch.randn(8, 3, 4, 4, dtype=D)
    net = make_net("batch")
    placed = placer.compile(net, _spec(2, 2, 2, checkpoint=["0"]), x)
    _, expected = step_by_hand(net, x, 2, 2)
    first, second = placed(x), None
    _compare_buffers(placed, expected)
    with torch.no_grad():
        second = placed(x)
    torch.testing.assert_close(first, second)
    tracked = placed.get_buffer("0.num_batches_tracked").item()
    before = {name: buffer.clone() for name, buffer in placed.named_buffers()}
    mean_square(first).backward()
    _compare_buffers(placed, before)
    assert tracked == 5


@pytest.mark.parametrize("fields", [{}, {"offload": ["**"]}])
def test_a_callers_checkpoint_updates_twice_as_it_does_of_a_plain_model(
    fields: dict[str, Any],
) -> None:
    """It stops the second forward when all is there that backward needs: in the last norm, or after it."""
    x = torch.randn(8, 3, 4, 4, dtype=D)
    for last in (nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))):
        net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh(), last).double()
        placed = placer.compile(net, _spec(2, 2, 2, **fields), x)
        mean_square(checkpoint(placed, x, use_reentrant=False)).backward()
        for _ in range(2):
            _, expected = step_by_hand(net, x, 2, 2)
            for path, buffer in net.named_buffers():
                buffer.copy_(expected[path])
        _compare_buffers(placed, expected)


def test_evaluation_uses_the_statistics_and_leaves_them() -> None:
    x = torch.randn(8, 3, 4, 4, dtype=D)
    placed = placer.compile(make_net("batch"), _spec(2, 2, 2), x)
    for _ in range(2):  # the other replica reads what the first one was given
        placed.train()
        placed.step(x, loss_fn=mean_square)
        plain = make_net("batch").eval()
        plain.load_state_dict(placed.state_dict())
        before = {name: buffer.clone() for name, buffer in placed.named_buffers()}
        assert_close(placed.eval()(x), plain(x), "output")
        _compare_buffers(placed, before)


def test_a_batch_that_failed_leaves_no_statistics() -> None:
    x = torch.randn(8, 3, 4, 4, dtype=D)
    net = make_net("not affine")
    placed = placer.compile(net, _spec(1, 1, 2), x)

    def explode(_: Any) -> Tensor:
        raise ArithmeticError("boom")

    with pytest.raises(ArithmeticError):
        placed.step(x, loss_fn=explode)
    placed.load_state_dict(net.state_dict())
    _, expected = step_by_hand(net, x, 1, 2)
    placed.step(x, loss_fn=mean_square)
    _compare_buffers(placed, expected)


def test_half_precision_statistics_are_joined_in_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3, 8, 8) * 3 + 20
    net = nn.Sequential(nn.BatchNorm2d(3, momentum=1.0)).bfloat16()
    placed = placer.compile(net, _spec(1, 2, 4), x.bfloat16())
    placed(x.bfloat16())
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    torch.testing.assert_close(placed.get_buffer("0.running_mean").float(), mean, rtol=8e-3, atol=0)
    torch.testing.assert_close(placed.get_buffer("0.running_var").float(), var, rtol=2e-2, atol=0)


def test_moments_far_from_zero_do_not_cancel() -> None:
    x = torch.randn(32, 3, 4, 4, dtype=D) + 1e7
    net = nn.Sequential(nn.BatchNorm2d(3, momentum=1.0).double())
    placed = placer.compile(net, _spec(1, 2, 4), x)
    placed(x)
    torch.testing.assert_close(
        placed.get_buffer("0.running_var"), x.var((0, 2, 3)), rtol=1e-8, atol=0
    )


def test_the_plan_says_what_is_deferred_and_the_placed_model_is_verified() -> None:
    torch.manual_seed(0)
    model, x = models.InPlace().double(), torch.randn(8, 2, 5, 5, dtype=D)
    plan = placer.make_plan(model, _spec(2, 2, 2), x)
    assert any("once per step" in note for note in plan.notes)
    assert placer.simulate(model, plan, x).step_ok
    found = verify(model, plan, x)
    assert found.ok, found.summary
