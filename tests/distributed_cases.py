"""What the processes of a test job run; in a module so that they can import it by name."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from captured import captured_once
from oracle import assert_close, gradient_noise, mean_square, reference_step, refusal
from space_networks import Inputs, ValidUNet, some_inputs
from thin import thin_resnet18
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._pytree import tree_leaves
from unet3d import unet3d

import placer
from placer import api
from placer.emit import materialize
from placer.executor.distributed.job.assignment import find_job
from placer.executor.distributed.launch import launch
from placer.executor.distributed.module import DistributedModule
from placer.executor.distributed.reduction.gradient_piece import GradientPiece
from placer.executor.distributed.runtime import runtime_of_rank
from placer.executor.places.place import CALLER
from placer.executor.stages import compiled
from placer.program import Program, lower, rewritten
from placer.simulation.ranks import RankLedger

D = torch.float64
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


CASES: dict[str, Callable[[int], Case]] = {
    "convnet": lambda rows: (models.ConvNet(p=0.0), (torch.randn(rows, 1, 8, 8, dtype=D),), {}),
    "resnet18": lambda rows: (
        thin_resnet18(classes=5),
        (torch.randn(rows, 3, 48, 48, dtype=D),),
        {},
    ),
    "3D U-Net": lambda rows: (
        unet3d(width=2, depth=2, norm="group"),
        (torch.randn(rows, 1, 8, 8, 8, dtype=D),),
        {},
    ),
    "3D U-Net, batch norm": lambda rows: (
        unet3d(width=2, depth=2, norm="batch"),
        (torch.randn(rows, 1, 8, 8, 8, dtype=D),),
        {},
    ),
    "2D U-Net": lambda rows: (ValidUNet(), (torch.randn(rows, 1, 21, 18, dtype=D),), {}),
    "volume, mask and coarse volume": lambda rows: (Inputs(), some_inputs(rows), {}),
    "padding modes": lambda rows: (
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
            nn.GroupNorm(2, 4),
            nn.Conv2d(4, 2, 3, stride=2, padding=2, padding_mode="reflect"),
        ),
        (torch.randn(rows, 1, 12, 7, dtype=D),),
        {},
    ),
    "tied transformer": lambda rows: (
        _no_dropout(models.TiedTransformer()),
        (torch.randint(0, 17, (rows, 6)),),
        {},
    ),
    "keywords and dict results": lambda rows: (
        models.KeywordModel(),
        (torch.randn(rows, 6, dtype=D),),
        {"scale": torch.randn(rows, 1, dtype=D), "twice": True},
    ),
    "in place": lambda rows: (models.InPlace(), (torch.randn(rows, 2, 5, 5, dtype=D),), {}),
    "recurrent": lambda rows: (models.Recurrent(), (torch.randn(rows, 4, 3, dtype=D),), {}),
    "positions": lambda rows: (  # classified, without statistics over rows
        nn.Sequential(
            nn.Conv1d(3, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.Tanh(), nn.Conv1d(5, 4, 1)
        ),
        (torch.randn(rows, 3, 6, dtype=D),),
        {},
    ),
}


@cache
def make_case(name: str, rows: int) -> Case:
    """The same model for all callers that do not change it."""
    torch.manual_seed(0)
    model, args, kwargs = CASES[name](rows)
    return model.double(), args, kwargs


@cache
def capture_case(name: str, rows: int) -> Program:
    return lower(*make_case(name, rows))


def compile_case(name: str, spec: placer.PlacementSpec) -> placer.PlacedModule:
    """A case of 8 rows, placed by this rank. It is not captured again."""
    _, args, kwargs = make_case(name, 8)
    return compile_captured(capture_case(name, 8), spec, *args, **kwargs)


def compile_captured(
    program: Program, spec: placer.PlacementSpec, *args: Any, **kwargs: Any
) -> placer.PlacedModule:
    """``placer.compile`` of the model of ``program``, which was captured with these arguments."""
    captured = program, tree_leaves((args, kwargs))
    with mock.patch.object(api, "lower_call", lambda *_, **__: captured):
        return placer.compile(program.model, spec, args, kwargs)


def _no_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def make_spec(
    stages: int, replicas: int, microbatches: int, schedule: str = "GPipe", **fields: Any
) -> placer.PlacementSpec:
    given = {"objective": "bottleneck", **fields}  # even stages
    return placer.PlacementSpec(
        devices=[f"cpu:{i}" for i in range(stages)],
        replicas=replicas,
        microbatches=microbatches,
        schedule=schedule,
        **given,
    )


def check_equality(
    name: str, plan: placer.Plan, schedules: tuple[str, ...], batches: tuple[int, ...]
) -> dict[str, Any]:
    """Train this rank's part and the plain model side by side: loss, gradients, weights, buffers.

    All schedules cut the batch alike, so one reference serves them all.
    """
    model, args, kwargs = make_case(name, batches[0])
    plans = [dataclasses.replace(plan, schedule=schedule) for schedule in schedules]
    trained = compile_all(model, plans, capture_case(name, batches[0]))
    plain = copy.deepcopy(model)
    ours = [torch.optim.SGD(placed.parameters(), lr=0.02, momentum=0.9) for placed in trained]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9)
    for step, rows in enumerate(batches):
        torch.manual_seed(step)
        _, args, kwargs = CASES[name](rows)
        theirs.zero_grad()
        expected = reference_step(plain, args, kwargs, plan.replicas, plan.microbatches)
        for placed, optimizer in zip(trained, ours, strict=True):
            when = f"{placed.plan.schedule}, step {step}"
            optimizer.zero_grad()
            loss = placed.step(*args, loss_fn=mean_square, **kwargs)
            assert_close(loss, expected, f"{when}, loss")
            compare_state(placed, plain, when)
            optimizer.step()
        theirs.step()
        for placed in trained:
            compare_state(placed, plain, f"{placed.plan.schedule}, after step {step}")
    plain.eval()
    with torch.no_grad():
        wanted = tree_leaves(plain(*args, **kwargs))
        for placed in trained:
            found = tree_leaves(placed.eval()(*args, **kwargs))
            for a, b in zip(found, wanted, strict=True):
                if isinstance(b, Tensor):
                    assert_close(a, b, f"{placed.plan.schedule}, inference")
    return {"names": list(trained[0].state_dict()), "stages": trained[0].stage_indices}


def check_compiled(*given: Any) -> dict[str, Any]:
    """`check_equality` with a compiler that takes no seconds."""
    compiled._OPTIONS = {"backend": "aot_eager"}
    return check_equality(*given)


def compile_all(
    model: nn.Module, plans: list[placer.Plan], program: Program
) -> list[DistributedModule]:
    """``placer.compile`` for plans that differ only in their schedule; shared work is done once."""
    job = find_job()
    assert job is not None
    trained = [launch(model, partial(_given, program, plan), job) for plan in plans]
    for placed in trained[1:]:
        # The stages are the same, and so is what crosses.
        runtime_of_rank(placed).finder = runtime_of_rank(trained[0]).finder
    return trained


def count_exchanged(name: str, plan: placer.Plan) -> int:
    """The bytes that this rank sends to other shards in a step."""
    model, args, kwargs = make_case(name, 8)
    (placed,) = compile_all(model, [plan], capture_case(name, 8))
    exchange = runtime_of_rank(placed).exchange
    assert exchange is not None
    before = exchange.sent_nbytes
    placed.step(*args, **kwargs, loss_fn=lambda output: mean_square(output))
    return exchange.sent_nbytes - before


def check_boxes(name: str, plan: placer.Plan, rows: int) -> None:
    """A step and a result from this rank's parts of the inputs, and the gradients of the parts."""
    model, args, kwargs = make_case(name, rows)
    (placed,) = compile_all(model, [plan], capture_case(name, rows))
    wanted = [x.clone().requires_grad_() for x in args]
    given = [x.clone().requires_grad_() for x in args]
    boxes = list(placed.boxes.values())
    # The first is a leaf, the others have been computed from leaves.
    leaf = given[0].detach()[boxes[0]].requires_grad_()
    values = [leaf, *(x[own] for x, own in zip(given[1:], boxes[1:], strict=True))]
    parts = [placer.Box(value, x.shape) for value, x in zip(values, args, strict=True)]
    assert all(part.value.numel() < x.numel() for part, x in zip(parts, args, strict=True))
    plain = copy.deepcopy(model)
    expected = reference_step(plain, wanted, kwargs, plan.replicas, plan.microbatches)
    assert_close(placed.step(*parts, loss_fn=mean_square, **kwargs), expected, "loss")
    compare_state(placed, plain, "boxes")
    for x, own, made in zip(wanted, boxes, [leaf, *given[1:]], strict=True):
        assert x.grad is not None and made.grad is not None
        found = made.grad if made is leaf else made.grad[own]
        assert_close(found, x.grad[own], "gradient of a part")
    for module in (plain, placed):
        module.eval()
    with torch.no_grad():
        wanted = tree_leaves(plain(*args, **kwargs))
        for found in (placed(*parts, **kwargs), placed(parts[0], *args[1:], **kwargs)):
            for a, b in zip(tree_leaves(found), wanted, strict=True):
                assert_close(a, b, "inference")


@captured_once()
def wrong_boxes(name: str, plan: placer.Plan, rows: int) -> list[str]:
    """What this rank is told of boxes that are none."""
    model, (x, *others), kwargs = make_case(name, rows)
    said = []
    part = x[:, :, :4].clone().requires_grad_()
    mixed = placer.Box(part, x.shape) if dist.get_rank() else x.clone().requires_grad_()
    for given, target in (
        (placer.Box(x[:, :, :3], x.shape), None),
        (mixed, None),
        (x, placer.Box(x[:, :, :4], x.shape)),
    ):
        placed = placer.compile(model, plan, (x, *others), kwargs)
        with pytest.raises(placer.PlacerError) as error:
            placed.step(given, *others, target=target, loss_fn=mean_square, **kwargs)
        said.append(str(error.value))
    return said


def _given(program: Program, plan: placer.Plan) -> tuple[Program, placer.Plan]:
    return rewritten(program, plan.rewrites), plan


def step_over_the_whole_batch(name: str, plan: placer.Plan) -> None:
    """A step whose loss compares rows equals the plain model's."""
    model, args, kwargs = make_case(name, 8)
    (placed,) = compile_all(model, [plan], capture_case(name, 8))
    plain = copy.deepcopy(model)

    def spread(output: Any) -> torch.Tensor:
        return sum(x.var(0).mean() + x.amax() for x in tree_leaves(output))  # type: ignore[return-value]

    loss = placed.step(*args, loss_fn=spread, whole_batch=True, **kwargs)
    expected = spread(plain(*args, **kwargs))
    expected.backward()
    assert_close(loss, expected.detach(), "loss")
    compare_state(placed, plain, "whole batch")


def compare_step(
    placed: placer.PlacedModule, plain: nn.Module, when: str, *args: Any, **kwargs: Any
) -> None:
    """A step of both: the same loss, gradients, weights and buffers."""
    loss = placed.step(*args, loss_fn=mean_square, **kwargs)
    plan = placed.plan
    expected = reference_step(plain, args, kwargs, plan.replicas, plan.microbatches)
    assert_close(loss, expected, f"{when}, loss")
    compare_state(placed, plain, when)


def compare_state(placed: nn.Module, plain: nn.Module, when: str) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    floor = gradient_noise(plain)
    for name, parameter in placed.named_parameters(remove_duplicate=False):
        what = f"{when}, rank {dist.get_rank()}, {name}"
        gradient = parameter.grad
        if isinstance(gradient, GradientPiece):
            gradient = gradient.full_tensor()
        assert_close(gradient, expected[name].grad, f"{what}, gradient", floor=floor)
        assert_close(parameter.detach(), expected[name].detach(), what)
    buffers = dict(plain.named_buffers(remove_duplicate=False))
    for name, buffer in placed.named_buffers(remove_duplicate=False):
        assert_close(buffer, buffers[name], f"{when}, rank {dist.get_rank()}, buffer {name}")


def fail_in_a_step(
    spec: placer.PlacementSpec, fault: str, rank: int, *, catch: bool = True
) -> tuple[str, ...]:
    """The error of this rank's step when ``fault`` happens on ``rank`` in the second step."""
    _, (ids,), _ = make_case("tied transformer", 8)
    placed = compile_case("tied transformer", spec)
    placed.step(ids, target=ids, loss_fn=token_loss)
    target = ids
    if dist.get_rank() == rank:
        if fault == "layer":
            ids = ids + 17
        elif fault == "hook":
            placed.get_submodule("blocks.2.mlp.0").register_forward_pre_hook(_explode)
        elif fault == "backward":
            layer = placed.get_submodule("blocks.0.mlp.0")
            layer.register_forward_hook(lambda _, inputs, output: hook_with(output, _explode))
        elif fault == "parameter":
            placed.positions.register_hook(_explode)
        elif fault == "killed":
            os._exit(3)
    if fault == "loss":
        target = ids + 17
    loss_fn = token_losses if fault == "rows" else token_loss
    try:
        placed.step(ids, target=target, loss_fn=loss_fn)
    except placer.StageError as error:
        _require_end(placed)
        return "StageError", str(error), error.layer, str(error.stage), str(error.rank)
    except placer.PeerError as error:
        _require_end(placed)
        return "PeerError", str(error)
    if (
        fault == "parameter"
    ):  # its hook runs at the end of the step, when the others need it no more
        try:
            placed.clip_grad_norm_(1.0)
        except placer.PeerError as error:
            return "PeerError", str(error)
    return ("none",)


def _require_end(placed: placer.PlacedModule) -> None:
    """A program that continues after an error gets an error again, without waiting for others."""
    try:
        placed.clip_grad_norm_(1.0)
    except placer.PeerError as error:
        assert "an earlier call failed" in str(error)
    else:
        raise AssertionError("clipped over ranks that have failed")


def hook_with(tensor: Tensor, hook: Callable[..., None]) -> None:
    tensor.register_hook(hook)


def _explode(*values: Any) -> None:
    """Fails, but not on tensors without data, on which the model is recorded again."""
    if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(values)):
        raise ArithmeticError("boom")


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def token_losses(output: Tensor, target: Tensor) -> Tensor:
    """Not a loss, because it has two elements."""
    return token_loss(output, target).expand(2, 1)


def compile_unlike_the_others(what: str) -> str:
    """The message of compile's error when rank 1 has another model or plan."""
    odd = dist.get_rank() == 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6 if odd and what == "model" else 5), nn.ReLU())
    spec = make_spec(2, 1, 2 if odd and what == "plan" else 1)
    try:
        placer.compile(model, spec, torch.randn(4, 4))
    except placer.PlanError as error:
        return str(error)
    return "no error"


class SkippingChain(nn.Sequential):
    """Four blocks; the first one's result also goes to the last block, past two stages."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self
        skipped = first(x)
        return last(third(second(skipped)) + skipped)


def accumulate_and_clip(spec: placer.PlacementSpec) -> None:
    """If the program does not seed its model, all ranks start from rank 0's weights."""
    torch.manual_seed(0)
    model, (ids,), _ = CASES["tied transformer"](8)
    model = model.double()
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor += dist.get_rank()
    placed = placer.compile(model, spec, (ids,))
    for step in range(3):
        placed.step(ids, loss_fn=mean_square)
        reference_step(plain, (ids,), {}, spec.replicas, 2)
        compare_state(placed, plain, f"accumulated {step}")
    norm = placed.clip_grad_norm_(0.01)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert_close(norm, expected, "norm")
    compare_state(placed, plain, "clipped")


def hook_gradients(spec: placer.PlacementSpec) -> None:
    """Hooks see and change the gradient of the whole batch, summed over ranks, slices and tied stages."""
    torch.manual_seed(0)
    model = models.TiedTransformer().double().eval()
    ids = torch.randint(0, 17, (8, 6))
    plain = copy.deepcopy(model)
    placed = placer.compile(model, spec, ids)
    seen: dict[str, dict[str, Tensor]] = {"placed": {}, "plain": {}}
    for kind, module in (("placed", placed), ("plain", plain)):
        for name, parameter in module.named_parameters():

            def keep(p: Tensor, found: dict[str, Tensor] = seen[kind], name: str = name) -> None:
                assert p.grad is not None
                found[name] = p.grad.clone()

            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            parameter.register_post_accumulate_grad_hook(keep)
    for _ in range(2):  # the second step adds to the gradients of the first
        placed.step(ids, target=ids, loss_fn=token_loss, reduction="mean")
        token_loss(plain(ids), ids).backward()
        compare_state(placed, plain, "with hooks")
    assert seen["placed"]
    for name, found in seen["placed"].items():
        wanted = seen["plain"].get(name, seen["plain"]["tokens.weight"])  # tied: one of two names
        assert_close(found, wanted, f"what the hook of {name} saw")
    with pytest.raises(placer.PlacerError), placed.accumulate():  # would see a part of the sum
        placed.step(ids, target=ids, loss_fn=token_loss, reduction="mean")


def load_tied_weights(spec: placer.PlacementSpec) -> None:
    """A tied weight is loaded on every rank that has it from whichever of its names the state has."""
    plain = models.TiedTransformer().double()
    placed = placer.compile(plain, spec, torch.randint(0, 17, (8, 6)))
    for left_out in ("out.weight", "tokens.weight"):
        state = {n: x * 1.1 for n, x in plain.state_dict().items() if n != left_out}
        for module in (plain, placed):
            module.load_state_dict(state, strict=False)
        for name, found in placed.named_parameters():
            assert_close(found, plain.get_parameter(name), f"{name} without {left_out}")
    with pytest.raises(placer.PlacerError, match="assign=True"):
        placed.load_state_dict(plain.state_dict(), assign=True)


def connect_in_a_step(spec: placer.PlacementSpec) -> list[tuple[Any, ...]]:
    """The groups, and the other ranks of messages, that are used in a step and were not in compile."""
    _, (ids,), _ = make_case("tied transformer", 8)
    used: dict[tuple[Any, ...], None] = {}

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, group: Any = None, **options: Any) -> Any:
            if len(args) > 2:  # the probe of a rank that waits for others, in compile
                return function(*args, **options)
            other = options.get("group_dst", options.get("group_src"))
            used[None if group is None else group.group_name, other] = None
            return function(*args, group=group, **options)

        return record

    with pytest.MonkeyPatch.context() as patched:
        for name in ("all_reduce", "broadcast", "all_gather", "send", "recv", "isend", "irecv"):
            patched.setattr(dist, name, recorded(getattr(dist, name)))
        placed = compile_case("tied transformer", spec)
        known = list(used)
        placed.step(ids, loss_fn=mean_square)
        placed.clip_grad_norm_(1.0)
    assert any(other is not None for _, other in used), "no messages"
    return [use for use in used if use not in known]


def step_on_own_rows(spec: placer.PlacementSpec) -> None:
    """Replicas get 5 and 3 rows, then 8 and 0: the loss is the mean over all eight."""
    torch.manual_seed(0)
    model, (x,), _ = make_case("convnet", 8)
    plain = copy.deepcopy(model)
    target = torch.randint(0, 10, (8,))
    expected = nn.functional.cross_entropy(plain(x), target)
    expected.backward()
    placed = compile_case("convnet", spec)
    for first in (5, 8, 0):
        rows = slice(0, first) if placed.replica_index == 0 else slice(first, 8)
        placed.zero_grad()
        loss = placed.step(
            x[rows], target=target[rows], loss_fn=nn.functional.cross_entropy, own_rows=True
        )
        assert_close(loss, expected.detach(), "loss")
        compare_state(placed, plain, f"{first} rows on replica 0")


def _float_convnet(
    spec: placer.PlacementSpec,
) -> tuple[placer.PlacedModule, nn.Module, Tensor]:
    """A placed and a plain model with the same weights, and inputs."""
    torch.manual_seed(0)
    model, (x,), _ = CASES["convnet"](8)
    plain, x = copy.deepcopy(model), x.float()
    return placer.compile(model, spec, x), plain, x


def _compare_gradients(placed: nn.Module, plain: nn.Module, *, rtol: float, atol: float) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in placed.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=rtol, atol=atol)


def train_bf16(spec: placer.PlacementSpec) -> None:
    placed, plain, x = _float_convnet(spec)
    loss = placed.step(x, loss_fn=lambda y: y.float().square().mean())
    total = torch.zeros(())
    for cut in x.chunk(4):
        with torch.autocast("cpu", torch.bfloat16):
            y = plain(cut)
        part = y.float().square().mean() / 4
        part.backward()
        total += part.detach()
    torch.testing.assert_close(loss, total)
    _compare_gradients(placed, plain, rtol=1e-4, atol=1e-6)


def step_in_and_out_of_autocast(spec: placer.PlacementSpec) -> None:
    """The program's own autocast, for inputs of one shape: values that cross stages change their dtype."""
    placed, plain, x = _float_convnet(spec)

    def loss_of(y: Tensor) -> Tensor:
        return y.float().square().mean()

    for enabled in (False, True, False):
        placed.zero_grad()
        plain.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = placed.step(x, loss_fn=loss_of)
            result = placed.eval()(x)
            placed.train()
            total = torch.zeros(())
            cuts = spec.replicas * spec.microbatches
            for cut in x.chunk(cuts):
                part = loss_of(plain(cut)) / cuts
                part.backward()
                total += part.detach()
            expected_result = plain.eval()(x)
            plain.train()
        assert result.dtype == expected_result.dtype
        torch.testing.assert_close(loss, total, rtol=1e-5, atol=0, check_dtype=False)
        _compare_gradients(placed, plain, rtol=1e-3, atol=1e-5)


def train_with_a_scaler(spec: placer.PlacementSpec) -> tuple[float, ...]:
    """The scale before a good step, after it, and after a step that overflows on the last rank."""
    torch.manual_seed(0)
    model, (x,), _ = CASES["convnet"](8)
    x = x.float()
    placed = placer.compile(model, spec, x)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
    scaler = placed.grad_scaler(init_scale=64.0)
    scales = [scaler.get_scale()]
    foreign = torch.amp.GradScaler("cpu")  # knows nothing of other ranks
    said = refusal(placed.step, x, loss_fn=mean_square, scaler=foreign)
    assert "make it with placed.grad_scaler()" in said
    for bad in (False, True):
        before = [p.detach().clone() for p in placed.parameters()]
        optimizer.zero_grad()
        loss = placed.step(x, loss_fn=lambda y: y.float().square().mean(), scaler=scaler)
        assert float(loss) < 10, "the loss comes back unscaled"
        if bad and dist.get_rank() == dist.get_world_size() - 1:
            next(p for p in placed.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, placed.parameters(), strict=True))
        assert moved != bad
        scales.append(scaler.get_scale())
    return tuple(scales)


def materialise_from_meta(spec: placer.PlacementSpec) -> None:
    """A part of a meta model gets the weights that one process gives the whole model."""
    with torch.device("meta"):
        model = models.ConvNet()
    placed = placer.compile(model, spec, torch.randn(4, 1, 8, 8))
    homes = dict.fromkeys(model.state_dict(), torch.device("cpu"))
    whole = materialize(model, homes).state_dict()
    for name, tensor in placed.state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    placed.step(torch.randn(4, 1, 8, 8), loss_fn=lambda y: y.square().mean())


def read_from_file(spec: placer.PlacementSpec, path: str) -> dict[str, float]:
    """The sum of every tensor of this rank's part, read from ``path``."""
    with torch.device("meta"):
        model = models.ConvNet()
    placed = placer.compile(model, spec, torch.randn(4, 1, 8, 8), weights=path)
    return {name: float(tensor.double().sum()) for name, tensor in placed.state_dict().items()}


def use_other_modes_and_sizes(spec: placer.PlacementSpec) -> None:
    """Equal to eager for inputs of another size, in train and eval mode, with hooks on the whole module."""
    torch.manual_seed(0)
    model = unet3d(width=2, depth=1, norm="batch").double()
    plain = copy.deepcopy(model)
    placed = placer.compile(model, spec, torch.randn(8, 1, 4, 4, 4, dtype=D))

    def double(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output * 2

    for mode, size, rows, hooked in (
        (True, 6, 8, False),
        (False, 4, 5, False),
        (False, 6, 8, True),
        (True, 4, 8, False),
    ):
        x = torch.randn(rows, 1, size, size, size, dtype=D)
        hooks = [m.register_forward_hook(double) for m in (placed, plain) if hooked]
        for module in (placed, plain):
            module.train(mode)
            module.zero_grad()
        what = f"training {mode}, size {size}"
        compare_step(placed, plain, what, x)
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            placed.eval(), plain.eval()
            assert_close(placed(x), plain(x), f"{what}, inference")


class ManyCalls(nn.Module):
    """Optional inputs, a number, flags, another result without gradients; ``extra`` is used if ``wide``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.extra = nn.Linear(6, 6)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        late: Tensor | None = None,
        others: dict[str, Tensor] | None = None,
        *,
        scale: float = 1.0,
        features: bool = False,
        wide: bool = False,
    ) -> dict[str, Tensor]:
        hidden = self.first(x).relu()
        if late is not None:
            hidden = hidden * late
            assert mask is not None
            hidden = hidden + mask
        for other in (others or {}).values():
            hidden = hidden + other
        hidden = self.second(hidden).tanh()
        if wide:
            hidden = self.extra(hidden)
        out = self.last(hidden if mask is None else hidden * mask) * scale
        if not torch.is_grad_enabled():
            out = -out
        return {"out": out, "hidden": hidden} if features else {"out": out}


def make_other_calls(spec: placer.PlacementSpec) -> None:
    """Calls with arguments that ``compile`` did not get, alternating with the call that it got."""
    torch.manual_seed(0)
    plain, x = ManyCalls().double(), torch.randn(8, 4, dtype=D)
    placed = placer.compile(copy.deepcopy(plain), spec, x)
    mask, more = torch.rand(8, 6, dtype=D), torch.randn(8, 6, dtype=D)
    for number, kwargs in enumerate(
        (
            {},
            {"mask": mask},
            {"features": True},
            {"mask": mask, "others": {"a": more, "b": more * 2}, "scale": 0.5},
            {"mask": mask},
            {},
            {"scale": 2.0, "mask": mask[:5]},
        )
    ):
        rows = x[: len(kwargs.get("mask", x))]  # type: ignore[arg-type]
        for module in (placed, plain):
            module.train().zero_grad()
        compare_step(placed, plain, f"call {number}", rows, **kwargs)
        with torch.no_grad():
            placed.eval(), plain.eval()
            found, wanted = placed(rows, **kwargs), plain(rows, **kwargs)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_close(found[name], value, f"call {number}, {name}")


@captured_once()
def make_calls_that_cannot_be(spec: placer.PlacementSpec) -> list[str]:
    """The errors of calls that differ between ranks, or that need a layer that no rank has for them."""
    torch.manual_seed(0)
    model, x = ManyCalls().double(), torch.randn(8, 4, dtype=D)
    rank = dist.get_rank()
    mask = torch.rand(8, 6, dtype=D)
    found = []
    for kwargs in (
        {"mask": mask} if rank else {},
        {"scale": 1.0 + rank},
        {"others": {"a": mask}, "mask": mask * (1 + rank), "late": mask},
        {"wide": True},
        {"scale": object()},
    ):
        placed = placer.compile(model, spec, x)
        found.append(refusal(placed.step, x, **kwargs, loss_fn=mean_square))
    return found


def try_what_needs_one_process(spec: placer.PlacementSpec) -> list[str]:
    """The errors of features that do not work with one process per device."""
    _, (x,), _ = make_case("convnet", 8)
    placed: Any = None
    given = x.clone().requires_grad_()

    def freeze() -> None:
        next(placed.parameters()).requires_grad_(False)
        placed.step(x, loss_fn=mean_square)

    def extend() -> None:
        holder = next(m for m in placed.modules() if list(m.parameters(recurse=False)))
        holder.register_parameter("made_later", nn.Parameter(torch.ones(1)))
        placed.step(x, loss_fn=mean_square)

    def replace() -> None:
        for name in ("conv1", "fc2"):  # each rank has one of them
            setattr(placed, name, nn.Conv2d(1, 1, 1))
        placed.step(x, loss_fn=mean_square)

    def step_together() -> None:
        lbfgs = torch.optim.LBFGS(placed.parameters())
        lbfgs.step(lambda: placed.step(x, loss_fn=mean_square))

    tries: list[Callable[[], Any]] = [
        lambda: placed(x),
        lambda: placed.eval()(given),
        lambda: torch.no_grad()(placed.step)(x, loss_fn=mean_square),
        step_together,
        freeze,
        extend,
        replace,
        lambda: placed.to(torch.float32).step(x.float(), loss_fn=mean_square),
        lambda: (
            placed.register_full_backward_hook(_explode) and placed.step(x, loss_fn=mean_square)
        ),
    ]
    found = []
    for attempt in tries:
        placed = compile_case("convnet", spec)
        found.append(refusal(attempt))
    return found


def drop_twice(spec: placer.PlacementSpec) -> list[float]:
    """This replica's mean output in two steps, and again after reseeding; all replicas get the same rows."""
    torch.manual_seed(0)
    rows = torch.randn(2, 1, 8, 8)
    x = rows.repeat(4, 1, 1, 1)
    placed = placer.compile(models.ConvNet(p=0.5), spec, x)
    seen: list[float] = []
    for _ in range(2):
        torch.manual_seed(7)
        for _ in range(2):
            outputs: list[Tensor] = []

            def keep(y: Tensor, outputs: list[Tensor] = outputs) -> Tensor:
                outputs.append(y.detach())
                return y.sum()

            placed.step(x, loss_fn=keep)
            seen.append(float(torch.cat(outputs).sum()))
    return seen


def list_part(spec: placer.PlacementSpec) -> dict[str, list[str]]:
    placed = placer.compile(models.ConvNet(), spec, torch.randn(4, 1, 8, 8))
    return {
        "modules": [name for name, _ in placed.named_children()],
        "owned": sorted(placed.owned_names),
    }


class Versioned(nn.Linear):
    """A layer with state that is not a tensor."""

    version = 1

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


def use_names_of_other_ranks(spec: placer.PlacementSpec) -> list[str]:
    """Load the whole model's state into a part; the messages about layers and keys that are not here."""
    torch.manual_seed(dist.get_rank())
    plain, x = models.ConvNet(), torch.randn(4, 1, 8, 8)
    state = plain.state_dict()
    placed = placer.compile(models.ConvNet(), spec, x)
    placed.load_state_dict(state)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert get_model_state_dict(placed).keys() == placed.tensor_names.keys()
        assert not said
        own = placed.state_dict()
        placed.state_dict()
        assert ["this rank's part of the model only" in str(each.message) for each in said] == [
            True
        ]
        assert said[0].filename == __file__
    assert own.keys() == placed.tensor_names.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, state[name])
    old = nn.Sequential(Versioned(4, 4), Versioned(4, 4))
    old[0].version = old[1].version = 2
    part = placer.compile(nn.Sequential(Versioned(4, 4), Versioned(4, 4)), spec, torch.randn(4, 4))
    part.load_state_dict(old.state_dict())
    assert [layer.version for layer in part.children()] == [2]
    elsewhere = next(name for name in state if name not in own)
    tries: list[Callable[[], Any]] = [
        lambda: getattr(placed, elsewhere.partition(".")[0]),
        lambda: placed.get_submodule(elsewhere.rpartition(".")[0]),
        lambda: placed.get_parameter(elsewhere),
        lambda: placed.get_parameter("nowhere.weight"),
        lambda: placed.load_state_dict({**state, "misspelt": x}),
        lambda: placed.load_state_dict({n: t for n, t in state.items() if n != next(iter(own))}),
    ]
    found = []
    for attempt in tries:
        try:
            attempt()
        except (AttributeError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class RenamingModel(models.ConvNet):
    """Overrides ``state_dict``: other names, an additional entry, and extra state."""

    steps = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for layer in ("conv1", "conv2", "fc1", "fc2"):
            for leaf in ("weight", "bias"):
                state[f"net.{layer}.{leaf}"] = state.pop(f"{layer}.{leaf}")
        state["version"] = 2
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state = dict(state_dict)
        assert state.pop("version") == 2
        state = {name.removeprefix("net."): value for name, value in state.items()}
        return super().load_state_dict(state, strict, assign)

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def use_a_state_dict_of_the_models_own(spec: placer.PlacementSpec, folder: str) -> list[str]:
    """The names of its state, loaded from the whole model's ``state_dict`` and through a checkpoint."""
    torch.manual_seed(0)
    plain, other, x = RenamingModel(), RenamingModel(), torch.randn(4, 1, 8, 8)
    other.steps = 3
    state = other.state_dict()
    placed = placer.compile(plain, spec, x)

    def require_state_of_other() -> None:
        assert placed.state_dict()["_extra_state"] == {"steps": 3}
        for name, tensor in placed.state_dict().items():
            if isinstance(tensor, Tensor):
                assert torch.equal(tensor, state[name]), name

    placed.load_state_dict(state)
    require_state_of_other()
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
    placer.save(placed, optimizer, folder)
    placed.load_state_dict(RenamingModel().state_dict())
    assert placed.state_dict()["_extra_state"] == {"steps": 0}
    placer.load(placed, optimizer, folder)
    require_state_of_other()
    placed.load_state_dict(placed.state_dict())
    require_state_of_other()
    inner = {**models.ConvNet().state_dict(), "_extra_state": {"steps": 1}}
    around = nn.ModuleDict({"inner": placed})
    around.load_state_dict({f"inner.{name}": value for name, value in inner.items()})
    assert placed.state_dict()["_extra_state"] == {"steps": 1}
    return list(placed.state_dict())


def train_with_synchronised_norms(spec: placer.PlacementSpec, head: bool = False) -> None:
    """Equal to the plain model on the whole batch, even with uneven rows; a head has norms without pixels."""
    torch.manual_seed(0)
    model: nn.Module = unet3d(width=2, depth=2, norm="batch")
    if head:
        layers = nn.Linear(3 * 4**3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)
        model = nn.Sequential(model, nn.Flatten(), nn.Tanh(), *layers)
    model.double()
    x = torch.randn(7, 1, 4, 4, 4, dtype=D)
    plain = copy.deepcopy(model)
    placed = placer.compile(model, spec, x)
    for rows in (7, 5):
        placed.zero_grad()
        plain.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = placed.step(x[:rows], loss_fn=mean_square)
        expected = mean_square(plain(x[:rows]))
        expected.backward()
        assert_close(loss, expected.detach(), "loss")
        compare_state(placed, plain, f"{rows} rows")
    assert "leave a replica without any" in refusal(placed.step, x[:1], loss_fn=mean_square)


@cache
def memory_case() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return unet3d(width=4, depth=2), torch.randn(8, 1, 8, 8, 8)


@cache
def space_memory_case() -> tuple[nn.Module, Tensor]:
    """The input takes much of the memory."""
    torch.manual_seed(0)
    return unet3d(in_channels=12, width=4, depth=2), torch.randn(2, 12, 16, 8, 8)


@cache
def wide_case() -> tuple[nn.Module, Tensor]:
    """Most of its memory is weights; each is summed in a message of its own."""
    torch.manual_seed(0)
    layers = (layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.Tanh()))
    return nn.Sequential(*layers), torch.randn(8, 512)


@cache
def _capture_memory_case(case: str) -> Program:
    model, x = globals()[case]()
    return lower(model, (x,))


def count_bytes(plan: placer.Plan, case: str = "memory_case", *, boxes: bool = False) -> int:
    """This rank's peak bytes of real tensors in a training step or a forward, perhaps with its own boxes."""
    case = "space_memory_case" if plan.shards > 1 else case
    model, x = globals()[case]()
    (placed,) = compile_all(model, [plan], _capture_memory_case(case))
    if boxes:
        x = placer.Box(x[placed.boxes["x"]].clone(), x.shape)  # type: ignore[assignment]
    if not plan.training:
        return _count_forward(placed, x)
    optimizer = torch.optim.Adam(placed.parameters())
    placed.step(x, loss_fn=placer.cost.mean_square)  # finds what crosses, on fake tensors
    optimizer.zero_grad()
    optimizer.step()  # with sharded state it is tried whether it can update pieces
    with _ledger(placed, x) as ledger:
        for _ in range(2):
            placed.step(x, loss_fn=placer.cost.mean_square)
            optimizer.step()
            optimizer.zero_grad()
    return ledger.timeline().peaks()["rank"].nbytes


def _ledger(placed: nn.Module, x: Any) -> RankLedger:
    """A ledger that knows what this rank holds before a step."""
    ledger = RankLedger(kernels=lambda _: "cpu")
    ledger.add_state((*placed.parameters(), *placed.buffers()))
    ledger.add(x.value if isinstance(x, placer.Box) else x, CALLER)
    return ledger


def _count_forward(placed: nn.Module, x: Tensor) -> int:
    placed.eval()
    placed(x)  # finds what crosses
    with _ledger(placed, x) as ledger:
        placed(x)
    return ledger.timeline().peaks()["rank"].nbytes


@cache
def pinned_case() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh()))
    return nn.Sequential(*layers), torch.randn(512, 64)


def compile_within(wanted: Any) -> str | list[int]:
    """The error of `pinned_case` under ``wanted`` (a spec or a plan), otherwise the peaks of its plan."""
    model, x = pinned_case()
    try:
        with mock.patch("placer.search.remedies.try_remedies", lambda *_: []):
            placed = placer.compile(model, wanted, x)
    except placer.BudgetError as error:
        return str(error)
    return [device.peak for device in placed.plan.devices]
