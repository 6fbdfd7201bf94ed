"""What the processes of a job run: models that pass odd things between their stages."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import CASES, SkippingChain, compare_state, compare_step, make_spec
from oracle import assert_close, mean_square, reference_step, refusal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import placer
from placer.executor.distributed.reduction import gradients
from placer.executor.distributed.reduction.step_reduction import SharedTensors


class MessageCounter(TorchDispatchMode):
    """Counts the messages that are sent and received."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class WritesInputs(nn.Module):
    """Writes to a view of its first input in place; the second it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.view(-1).mul_(2.0)
        return self.last(torch.tanh(self.first(x)) + y)


def step_with_written_inputs() -> None:
    """A step equals the plain model's, which writes to the caller's first tensor."""
    torch.manual_seed(0)
    model = WritesInputs().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    layers = {"first": "cpu:0", "last": "cpu:1"}
    plain = copy.deepcopy(model)
    placed = placer.compile(model, make_spec(2, 1, 2, layers=layers), (x, y))
    written, before = x * 2, y.clone()
    expected = reference_step(plain, (x.clone(), y), {}, 1, 2)
    assert_close(placed.step(x, y, loss_fn=mean_square), expected, "loss")
    compare_state(placed, plain, "written inputs")
    assert torch.equal(x, written) and torch.equal(y, before)


class LooksAtValues(nn.Module):
    """A value decides between two branches; a table has an entry for only one of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if x.sum().item() > 0 else x * 3
        return x * [0.5][int(x.isnan().any().item())]


class Adjustable(nn.Module):
    """Its result depends on plain attributes, one of which is a tensor but not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.alpha = 0.0
        self.config = {"relu": False}
        self.shift = torch.ones(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.shift
        if self.config["relu"]:
            hidden = hidden.relu()
        return self.last(hidden) * self.alpha + x


def step_after_attributes_were_set() -> None:
    """Each step, and an evaluation, uses the attributes' current values."""
    torch.manual_seed(0)
    plain = Adjustable().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    layers = {"first": "cpu:0", "last": "cpu:1"}
    placed = placer.compile(copy.deepcopy(plain), make_spec(2, 1, 2, layers=layers), x)
    for alpha, relu in ((0.0, False), (2.0, False), (2.0, True)):
        for module in (plain, placed):
            module.alpha, module.config["relu"] = alpha, relu  # type: ignore[assignment]
            module.shift.mul_(2.0)  # type: ignore[operator]
            module.train().zero_grad()
        compare_step(placed, plain, f"{alpha}, {relu}", x)
        assert_close(placed.eval()(x), plain.eval()(x), f"output, {alpha}, {relu}")


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].view(-1, 1)


def step_by_values() -> None:
    """Each micro-batch takes its own branch, as the plain model does with it, if the spec allows that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), LooksAtValues(), nn.Linear(4, 4), nn.Tanh()).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    with torch.no_grad():
        sums = [model[0](cut).sum() > 0 for cut in (x[:2], x[2:], -x[:2], -x[2:])]
    assert any(sums) and not all(sums)
    layers = {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1", "3": "cpu:1"}
    plain = copy.deepcopy(model)
    spec = make_spec(2, 1, 2, layers=layers, inputs={"input": {"batch_dim": 0}})
    placed = placer.compile(model, spec, x)
    for given in (x, -x):
        compare_step(placed, plain, "by values", given)


def step_with_shapes_of_the_data() -> str:
    """The error of a stage whose result has as many rows as the data has positive numbers."""
    model = nn.Sequential(nn.Linear(4, 4), Selects(), nn.Linear(1, 2))
    layers = {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}
    placed = placer.compile(model, make_spec(2, 1, 1, layers=layers), torch.randn(6, 4))
    return refusal(placed.step, torch.randn(6, 4), loss_fn=mean_square)


class SideBranch(nn.Module):
    """The second stage computes a value from the model's input alone, with a layer that it uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.third.delta = nn.Parameter(torch.randn(4, 4))  # gets the very gradient of the weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.first(x).tanh())
        side = self.shared(x).tanh()
        z = nn.functional.linear(y, self.third.weight + self.third.delta, self.third.bias)
        return self.last(torch.tanh(z) * side)


class UsesOwnInputTwice(nn.Module):
    """Every stage computes values from the model's input and uses each in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scales = nn.ParameterList(torch.rand(4) + 0.5 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for own, layer, scale in zip(self.own, self.layers, self.scales, strict=True):
            side, other = torch.tanh(own(x)), torch.sigmoid(x * scale)
            y = torch.tanh(layer(y * side * other) + side) * (side * 2) + other
        return y


def step_where_own_inputs_are_used_twice(schedule: str) -> None:
    """Weights join the path of received values at several nodes; other weights at some of these."""
    torch.manual_seed(0)
    model = UsesOwnInputTwice().double()
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layers = {f"{name}.{i}": f"cpu:{i}" for i in range(4) for name in ("own", "layers")}
    plain = copy.deepcopy(model)
    placed = placer.compile(model, make_spec(4, 1, 3, schedule, layers=layers), x)
    for step in range(2):
        ours, theirs = x.clone().requires_grad_(step == 1), x.clone().requires_grad_(step == 1)
        assert_close(
            placed.step(ours, loss_fn=mean_square),
            reference_step(plain, (theirs,), {}, 1, 3),
            "loss",
        )
        compare_state(placed, plain, f"step {step}")
        if step:
            assert_close(ours.grad, theirs.grad, "gradient of the input")


def step_where_outputs_depend_on_nothing_received(schedule: str) -> None:
    """Weights whose path to the outputs does not join that of received values."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    chain[0].requires_grad_(False)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for model, names in (
        (SideBranch(), ("first", "shared", "third", "last")),
        (chain, ("0", "1", "2", "3")),
    ):
        layers = {name: f"cpu:{i}" for i, name in enumerate(names)}
        plain = copy.deepcopy(model.double())
        placed = placer.compile(model, make_spec(4, 1, 3, schedule, layers=layers), x)
        for step in range(2):
            compare_step(placed, plain, f"{type(model).__name__}, step {step}", x)


class Doubled(nn.Module):
    """The hook on a layer's result doubles its gradient, in the way that gradient reversal is written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return torch.tanh(y)


def step_with_hooks_on_results(schedule: str) -> None:
    """A hook's factor is in each gradient exactly once, however the backward is split."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Doubled() for _ in range(4))).double()
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(model)
    layers = {str(i): f"cpu:{i // 2}" for i in range(4)}
    placed = placer.compile(model, make_spec(2, 1, 3, schedule, layers=layers), x)
    compare_step(placed, plain, "hooks", x)


class TwoResults(nn.Module):
    """The second result is computed by its own layer from a value that skips a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.other, self.early = (
            nn.Linear(4, 4) for _ in range(5)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.tanh(self.first(x))
        early = torch.sigmoid(self.early(x))
        return self.third(torch.tanh(self.second(kept))), self.other(kept * early)


def step_with_a_loss_of_one_result(schedule: str) -> None:
    """Parameters that only the other result depends on have the gradient None, not zeros, on every rank."""
    torch.manual_seed(0)
    model = TwoResults().double()
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layers = {"first": "cpu:0", "early": "cpu:0", "second": "cpu:1", "third": "cpu:2"}
    spec = make_spec(3, 1, 2, schedule, layers={**layers, "other": "cpu:2"})
    for used in (0, 1):
        plain = copy.deepcopy(model)
        placed = placer.compile(copy.deepcopy(model), spec, x)

        def loss_fn(results: tuple[Tensor, Tensor], used: int = used) -> Tensor:
            return results[used].square().mean()

        loss = placed.step(x, loss_fn=loss_fn)
        (expected := loss_fn(plain(x))).backward()
        assert_close(loss, expected, "loss")
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        assert any(grad is None for grad in gradients.values())
        for name, parameter in placed.named_parameters():
            assert (parameter.grad is None) == (gradients[name] is None), (used, name)
            if parameter.grad is not None:
                assert_close(parameter.grad, gradients[name], name)


def count_messages_of_a_skip() -> tuple[int, int]:
    """Count this rank's messages in a step with a value that skips two stages."""
    torch.manual_seed(0)
    model = SkippingChain().double()
    x = torch.randn(4, 6, dtype=torch.float64)
    layers = {str(i): f"cpu:{i}" for i in range(4)}
    plain = copy.deepcopy(model)
    placed = placer.compile(model, make_spec(4, 1, 2, "1F1B", layers=layers), x)
    with MessageCounter() as counter:
        compare_step(placed, plain, "skip", x)
    return counter.counts["c10d::send"], counter.counts["c10d::recv_"]


class ReadsInputsAgain(nn.Module):
    """The first and the third stage read the batch; the second reads a vector shared by all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, shift: Tensor, unread: Tensor) -> Tensor:
        y = self.first(x).tanh()
        y = self.second(y + shift).tanh()
        return self.last(self.third(y * x).tanh())


def take_gradients_of_inputs(spec: placer.PlacementSpec) -> None:
    """Inputs get the plain model's gradients on every rank, also accumulated, with other and own rows."""
    torch.manual_seed(0)
    model = ReadsInputsAgain().double()
    whole = [torch.randn(6, 4), torch.randn(3, 4)[0], torch.randn(6, 1)]
    if len(spec.devices) > 1:  # else all layers are on the one
        names = ("first", "second", "third", "last")
        devices = [device.name for device in spec.devices]
        layers = {n: devices[i * len(devices) // 4] for i, n in enumerate(names)}
        spec = spec.model_copy(update={"layers": layers})
    plain = copy.deepcopy(model)
    inputs = [x.double() for x in whole]
    placed = placer.compile(model, spec, tuple(inputs))
    for rows in (6, 6, 5):
        ours = [x if x.dim() == 1 else x[:rows].clone() for x in inputs]
        theirs = [x.clone().requires_grad_() for x in ours]
        ours = [x.clone().requires_grad_() for x in ours]
        for _ in range(2):
            placed.step(ours[0] * 1.0, *ours[1:], loss_fn=mean_square)  # not a leaf
            reference_step(plain, tuple(theirs), {}, spec.replicas, spec.microbatches)
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a.grad, b.grad, f"{rows} rows, rank {dist.get_rank()}")
        compare_state(placed, plain, f"{rows} rows")
    share = slice(0, 4) if placed.replica_index == 0 else slice(4, 6)
    own = slice(0, 6) if spec.replicas == 1 else share
    x = inputs[0][own].clone().requires_grad_()
    shift = inputs[1].clone().requires_grad_()
    placed.step(x, shift, inputs[2][own], loss_fn=mean_square, own_rows=True)
    x2, shift2 = inputs[0].clone().requires_grad_(), inputs[1].clone().requires_grad_()
    mean_square(plain(x2, shift2, inputs[2])).backward()
    assert x2.grad is not None
    assert_close(x.grad, x2.grad[own], "own rows")
    assert_close(shift.grad, shift2.grad, "own rows, the vector")


def want_gradients_on_one_rank(spec: placer.PlacementSpec, frozen: bool) -> list[str]:
    """The error when an input requires gradients on rank 1 only.

    Of a frozen first stage nothing comes back unless the input wants it.
    """
    torch.manual_seed(0)
    model = ReadsInputsAgain().double()
    model.first.requires_grad_(not frozen)
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)] + [torch.randn(4, 1)]
    names = ("first", "second", "third", "last")
    layers = {n: f"cpu:{min(i, len(spec.devices) - 1)}" for i, n in enumerate(names)}
    found = []
    for own_rows in (False,) if frozen else (False, True):
        placed = placer.compile(model, spec.model_copy(update={"layers": layers}), tuple(inputs))
        wanted = [x.clone() for x in inputs]
        wanted[0].requires_grad_(dist.get_rank() == 1)
        found.append(refusal(placed.step, *wanted, loss_fn=mean_square, own_rows=own_rows))
    return found


def sum_gradients_where_they_are(schedule: str) -> None:
    """Every gradient of some size is sent without a bucket; tied ones, and one that is nowhere.

    The last batch leaves a replica without rows; gradients accumulate over the steps.
    """
    torch.manual_seed(0)
    model, (ids,), _ = CASES["tied transformer"](8)
    model.unread = nn.Parameter(torch.ones(40))
    plain = copy.deepcopy(model.double())
    placed = placer.compile(model, make_spec(2, 2, 2, schedule), ids)
    before, gradients._ALONE_NBYTES = gradients._ALONE_NBYTES, 256
    try:
        for step, rows in enumerate((8, 1)):
            compare_step(placed, plain, f"{schedule}, step {step}", ids[:rows])
    finally:
        gradients._ALONE_NBYTES = before


def share_buffers_of_all_kinds() -> None:
    """Odd sizes between data types of several widths; rank 0 has the values."""

    def buffers(value: int) -> list[torch.Tensor]:
        return [
            torch.full((3,), value > 0),
            torch.full((5,), value, dtype=torch.float32),
            torch.tensor(value),
            torch.full((3, 1), value, dtype=torch.bfloat16),
            torch.full((2, 3), value, dtype=torch.float64),
            torch.empty(0),
        ]

    own = buffers(0 if dist.get_rank() else 7)
    world = dist.new_group()
    SharedTensors(own, world).wait()
    for found, expected in zip(own, buffers(7), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    SharedTensors([], world).wait()


class WritesState(nn.Module):
    """Forward writes a frozen parameter, a buffer from the batch and, in training, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        self.seen.add_(x.sum(0))
        with torch.no_grad():
            self.frozen.weight.add_(self.last.weight)
        return self.last(self.frozen(y))


def share_what_forward_writes(spec: placer.PlacementSpec, captured_in_training: bool) -> None:
    """After a step and after inference, all ranks have the values that the first replica wrote."""
    torch.manual_seed(0)
    model = WritesState().double().train(captured_in_training)
    x = torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    placed = placer.compile(model, spec, x)
    for training in (True, False, True):
        placed.train(training)
        plain.train(training)
        with torch.no_grad():
            for rows in x.chunk(spec.replicas)[0].chunk(spec.microbatches):
                plain(rows)
        if training:
            placed.step(x, loss_fn=mean_square)
        else:
            with torch.no_grad():
                placed(x)
        expected = plain.state_dict()
        for name, tensor in placed.state_dict().items():
            assert_close(tensor, expected[name], f"rank {dist.get_rank()}, {training}, {name}")


class PassesParameters(nn.Module):
    """The stage of ``last`` reads a part of a parameter, and all of one, of the stage of ``first``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 12)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, _ = self.first.weight.chunk(3)
        return self.last(self.first(x)[:, :4] @ query) @ key + self.first.bias[:4]


def infer_where_stages_pass_parameters(spec: placer.PlacementSpec) -> None:
    torch.manual_seed(0)
    model = PassesParameters().double()
    x = torch.randn(4, 4, dtype=torch.float64)
    placed = placer.compile(model, spec, x).eval()
    with torch.no_grad():
        assert_close(placed(x), model(x), "inference")


class Conjugates(nn.Module):
    """Passes on tensors with the conjugate or negative bit set; some gradients have it too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.complex128)
        self.second = nn.Linear(4, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = self.first(torch.complex(x, 2 * x)).conj()
        y = self.second(z.imag) + (z * self.scale.conj()).real
        return y, z.imag, z


def step_with_conjugated_tensors(spec: placer.PlacementSpec) -> None:
    torch.manual_seed(0)
    model = Conjugates()
    x = torch.randn(4, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    placed = placer.compile(model, spec, x)
    compare_step(placed, plain, "step", x)
    with torch.no_grad():
        for found, expected in zip(placed.eval()(x), plain.eval()(x), strict=True):
            assert_close(found, expected, "inference")


@dataclass
class Named:
    logits: Tensor
    hidden: Tensor


class ReturnsObject(nn.Module):
    """Its result is an object that pytree does not flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Named:
        hidden = self.first(x).tanh()
        return Named(self.last(hidden), hidden)


def step_with_an_object_as_result() -> None:
    """A loss of the object's tensors; in some slices the normalizer counts nothing."""
    torch.manual_seed(0)
    model, x = ReturnsObject().double(), torch.randn(8, 4, dtype=torch.float64)
    target = torch.tensor([0, 1, 2, -100, -100, -100, 0, 1])
    plain = copy.deepcopy(model)

    def loss_fn(output: Named, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits, target)

    layers = {"first": "cpu:0", "last": "cpu:1"}
    placed = placer.compile(model, make_spec(2, 1, 4, layers=layers), x)
    loss = placed.step(x, target=target, loss_fn=loss_fn, normalizer=lambda t: (t != -100).sum())
    expected = loss_fn(plain(x), target)
    expected.backward()
    assert_close(loss, expected.detach(), "loss")
    compare_state(placed, plain, "object")
    placed.eval()
    assert_close(placed(x).logits, plain(x).logits, "logits")


class Patches(nn.Module):
    """Sizes of the input, and one computed from them, are read on the next device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        rows, channels, *size = x.shape
        patches = nn.functional.unfold(x, 2, stride=2).transpose(1, 2)
        hidden = self.first(patches).tanh()
        found = nn.functional.fold(self.last(hidden).transpose(1, 2), size, 2, stride=2)
        return found.reshape(rows, channels, size[0] * size[1])


def steps_with_sizes(spec: placer.PlacementSpec) -> None:
    """Also for inputs of another size, and without a backward."""
    torch.manual_seed(0)
    model, x = Patches().double(), torch.randn(6, 3, 4, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    placed = placer.compile(model, spec, x)
    for size in (4, 6):
        given = torch.randn(6, 3, size, size, dtype=torch.float64)
        compare_step(placed, plain, "sizes", given)
        with torch.no_grad():
            assert_close(placed(given), plain(given), "result")


class HoldsFunctions(nn.Module):
    """Has a method and a partial function in attributes, and skips an operation for a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = partial(nn.functional.gelu, approximate="tanh")
        self.move = self.up

    def up(self, x: Tensor) -> Tensor:
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.arange(4.0, device=x.device).to(x.dtype)[None]
        if x.size(0) != offsets.size(0):
            offsets = offsets.expand(x.size(0), -1)
        result: Tensor = self.last(self.move(self.act(self.first(x))) + offsets[:, None])
        return result


def steps_with_functions_in_attributes() -> None:
    """Micro-batches of two rows and of one row; then with other functions."""
    torch.manual_seed(0)
    model, x = HoldsFunctions().double(), torch.randn(4, 3, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    how_split = {"x": {"batch_dim": 0}}  # one row alone is computed otherwise
    spec = make_spec(2, 1, 2, layers={"first": "cpu:0", "last": "cpu:1"}, inputs=how_split)
    placed = placer.compile(model, spec, x)
    for rows, move, how in ((4, None, "tanh"), (2, None, "tanh"), (3, torch.neg, "none")):
        for net in (plain, placed):
            if move is not None:
                net.move = move
            net.act = partial(nn.functional.gelu, approximate=how)
        compare_step(placed, plain, "functions", x[:rows])


class Counts(nn.Module):
    """A number that depends on the data is among the results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        result = self.layer(x)
        return result, int((result > 0).sum().item())


def a_number_of_the_data() -> None:
    """Another number for every slice is that of no batch; all ranks say so."""
    torch.manual_seed(0)
    model, x = Counts().double(), torch.randn(6, 4, dtype=torch.float64)
    placed = placer.compile(model, make_spec(1, 2, 1, inputs={"x": {"batch_dim": 0}}), x)
    assert model(x[:3])[1] != model(x[3:])[1]
    with torch.no_grad(), pytest.raises(placer.PlacerError, match="another number for every slice"):
        placed(x)


class Reads(nn.Module):
    """It stays whole, and its recurrent layer also has its weights in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
        return self.cells(packed)[1][0][-1]


class Leaves(nn.Module):
    """Stores tensors, has a method besides forward, and a number that differs in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hidden: Any = None
        self.history: list[Tensor] = []

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()

    def forward(self, x: Tensor, scale: float) -> Tensor:
        x += 1  # the caller's tensor
        self.hidden = self.encode(x)
        self.history.append(x.mean(1))
        return self.last(self.hidden * scale)


def leave_values(spec: placer.PlacementSpec) -> None:
    """Values that forward stores are on every rank what the plain model stores, in steps and inference."""
    torch.manual_seed(0)
    plain = Leaves().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(plain), spec, (x.clone(), 0.5))
    for scale in (0.5, 0.25, 0.75, 1.5, 3.0):
        for training in (True, False):
            ours, theirs = x.clone(), x.clone()
            for model in (placed, plain):
                model.train(training).zero_grad()

            def loss_fn(out: Tensor, of: Any = placed) -> Tensor:
                return out.square().mean() + of.hidden.square().mean()

            if training:
                loss = placed.step(ours, scale, loss_fn=loss_fn, reduction="mean")
                expected = loss_fn(plain(theirs, scale), plain)
                expected.backward()
                torch.testing.assert_close(loss, expected.detach())
                for name, p in placed.named_parameters():
                    torch.testing.assert_close(p.grad, plain.get_parameter(name).grad, msg=name)
            else:
                with torch.no_grad():
                    torch.testing.assert_close(placed(ours, scale), plain(theirs, scale))
                    torch.testing.assert_close(placed.encode(x), plain.encode(x))
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(placed.hidden, plain.hidden.detach())
            torch.testing.assert_close(placed.history[-1], plain.history[-1])
            assert len(placed.history) == len(plain.history)


def step_where_hooks_are_removed(spec: placer.PlacementSpec) -> None:
    """One hook removes itself, in the process that runs its layer; handles remove others between steps."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double()
    model = copy.deepcopy(plain)
    handles = [_put_hooks(each) for each in (plain, model)]
    placed = placer.compile(model, spec, torch.randn(8, 4, dtype=torch.float64))
    del model
    for step in range(4):
        x = torch.randn(8, 4, dtype=torch.float64)
        compare_step(placed, plain, f"step {step}", x)
        if step == 1:
            for handle in (*handles[0], *handles[1]):
                handle.remove()


def _put_hooks(model: nn.Sequential) -> list[Any]:
    def triple(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        handle.remove()
        return 3 * out

    handle = model[1].register_forward_hook(triple)
    return [
        model[0].register_forward_hook(lambda module, args, out: 2 * out),
        model[2].register_full_backward_hook(lambda module, given, gradients: (2 * given[0],)),
        *(
            parameter.register_hook(lambda gradient: 2 * gradient)
            for parameter in model.parameters()
        ),
    ]
