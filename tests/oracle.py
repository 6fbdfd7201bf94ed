"""The law, as a test: the placed module computes what the plain model computes.

The reference is written here from scratch (``torch.chunk`` twice, plain calls, one backward), so
that a mistake in placer's own scatter or verification cannot hide itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import placer

RTOL, ATOL = 1e-10, 1e-12


def assert_close(
    found: Tensor | None,
    expected: Tensor | None,
    what: str,
    *,
    floor: Callable[[], float] = lambda: 1e-300,
) -> None:
    """Equal in shape, dtype and value: rtol 1e-10, atol 1e-12 of the largest expected value.

    ``floor`` is the least absolute tolerance: a gradient whose true value is zero (a bias before a
    BatchNorm) is rounding noise.
    """
    assert (found is None) == (expected is None), f"{what}: one of them is None"
    if found is None or expected is None:
        return
    if found.dtype == expected.dtype and torch.equal(found, expected):
        return  # most are, and this costs a tenth
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        found, expected, rtol=RTOL, atol=max(ATOL * scale, floor()), msg=lambda m: f"{what}: {m}"
    )


def gradient_noise(model: nn.Module) -> Callable[[], float]:
    """A bound on rounding noise in the float64 gradients that ``model`` has when it is first asked.

    It is 1e-15 of the largest.
    """

    @cache
    def noise() -> float:
        grads = [p.grad.abs().max().item() for p in model.parameters() if p.grad is not None]
        return max(1e-15 * max(grads, default=0.0), 1e-300)

    return noise


def _mean_noise(buffers: Mapping[str, Tensor], name: str) -> float:
    """A bound on rounding noise in a running mean, whose true value is zero after another norm.

    It is 1e-15 of the largest standard deviation; for other buffers next to nothing.
    """
    variance = buffers.get(f"{name.removesuffix('running_mean')}running_var")
    if not name.endswith("running_mean") or variance is None:
        return 1e-300
    return 1e-15 * variance.max().sqrt().item()


def refusal(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The kind and the text of placer's error of a call, or "no error"."""
    try:
        call(*args, **kwargs)
    except placer.PlacerError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mean_square(output: Any) -> Tensor:
    """A loss that is a mean over rows and weights every floating-point result differently."""
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack(
        [(t.square().mean() + t.mean()) * (i + 1) for i, t in enumerate(leaves)]
    ).sum()


def each_cut(
    model: nn.Module, args: Any, kwargs: Any, replicas: int, microbatches: int
) -> Iterator[tuple[Any, Any, float]]:
    """The arguments of every cut of the batch, for the caller to run at once, and its share of rows.

    ``model`` has the buffers of the replica that the cut is of: each starts from the present ones,
    and in the end it has those that the first replica's cuts left, as ``nn.DataParallel`` keeps them.
    """
    leaves, spec = tree_flatten((args, kwargs))
    rows = next(t.size(0) for t in leaves if isinstance(t, Tensor) and t.dim())
    before = {n: b.clone() for n, b in model.named_buffers()}
    after: dict[str, Tensor] = {}
    for number, row in enumerate(torch.arange(rows).chunk(replicas)):
        for name, buffer in model.named_buffers():
            buffer.data = before[name].clone()
        for cut in row.chunk(microbatches):
            part = [
                t[cut[0] : cut[-1] + 1]
                if isinstance(t, Tensor) and t.dim() and len(t) == rows
                else t
                for t in leaves
            ]
            yield *tree_unflatten(part, spec), len(cut) / rows
        if number == 0:
            after = {n: b.clone() for n, b in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data = after[name]


def run_cuts(model: nn.Module, args: Any, kwargs: Any, replicas: int, microbatches: int) -> Any:
    """The plain model on the slices that placer makes of the batch, results joined along dim 0."""
    if replicas * microbatches == 1:
        return model(*args, **kwargs)
    outputs, rows = [], []
    for some_args, some_kwargs, _ in each_cut(model, args, kwargs, replicas, microbatches):
        outputs.append(model(*some_args, **some_kwargs))
        leaves = tree_leaves((some_args, some_kwargs))
        rows.append(next(len(t) for t in leaves if isinstance(t, Tensor) and t.dim()))
    if len(outputs) == 1:  # fewer rows than cuts
        return outputs[0]

    def join(column: tuple[Any, ...]) -> Any:
        if isinstance(column[0], Tensor):
            return torch.cat(column)
        return sum(rows) if list(column) == rows else column[0]

    structure = tree_flatten(outputs[0])[1]
    columns = zip(*(tree_leaves(o) for o in outputs), strict=True)
    return tree_unflatten([join(column) for column in columns], structure)


def assert_same(
    model: nn.Module,
    spec: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    steps: int = 2,
    scheduled: bool = True,
) -> placer.PlacedModule:
    """Train ``model`` plain and placed for some steps and compare all they compute; also `step()`.

    Outputs, the gradient of every parameter and input, buffers, parameters after each SGD step, and
    ``state_dict`` keys. The caller's model must come out unchanged. Returns the placed module.
    """
    kwargs = kwargs or {}
    untouched = {n: t.clone() for n, t in model.state_dict().items()}
    placed = placer.compile(model, spec, args, kwargs)
    twins = (copy.deepcopy(placed), copy.deepcopy(placed)) if scheduled else None
    replicas, microbatches = placed.plan.replicas, placed.plan.microbatches
    plain = copy.deepcopy(model)
    assert list(placed.state_dict()) == list(model.state_dict())
    assert [n for n, _ in placed.named_parameters()] == [n for n, _ in model.named_parameters()]
    _train_both(placed, plain, args, kwargs, replicas, microbatches, steps)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, untouched[name]), name
    if twins is not None:
        _step_both(*twins, model, args, kwargs)
    return placed


TABLES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def seen(module: nn.Module, plain: nn.Module, output: Any, args: Any) -> dict[str, Any]:
    """What a caller of ``module`` can see after a call, by name; attributes by the names that ``plain`` has.

    Written anew, so that a mistake in what placer looks at cannot hide itself.
    """
    found: dict[str, Any] = {}
    add = partial(_add_seen, found)
    add("output", output)
    add("argument", args)
    found |= _identities(module, output, args)
    for path, part in plain.named_modules():
        ours = module.get_submodule(path)
        found[f"mode of {path}"] = ours.training
        for name in vars(part).keys() - TABLES:
            add(f"{path}.{name}", getattr(ours, name, "missing"))
    for name, parameter in module.named_parameters():
        found[f"requires_grad of {name}"] = parameter.requires_grad
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return found


def _identities(module: nn.Module, output: Any, args: Any) -> dict[str, Any]:
    """Which tensors of the result are inputs, parameters, buffers, or each other."""
    named = {f"argument {i}": x for i, x in enumerate(tree_leaves(args))}
    named |= dict(module.named_parameters()) | dict(module.named_buffers())
    found = {}
    for index, leaf in enumerate(tree_leaves(output)):
        is_tensor = isinstance(leaf, Tensor)
        found[f"result {index} is"] = [n for n, x in named.items() if is_tensor and x is leaf]
        named[f"result {index}"] = leaf
    return found


def _add_seen(found: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Tensor | bool | int | float | str | None):
        found[name] = value
    elif isinstance(value, Mapping):
        found[name] = f"mapping of {list(value)}"
        for key in value:
            _add_seen(found, f"{name}[{key}]", value[key])
    elif isinstance(value, Iterable):
        items = list(value)
        found[name] = f"{len(items)} items"
        for index, item in enumerate(items):
            _add_seen(found, f"{name}[{index}]", item)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module) and not callable(value):
        for key, part in vars(value).items():
            _add_seen(found, f"{name}.{key}", part)


class Case(Protocol):
    """A model, arguments with so many rows, others in every call, and what forward changes elsewhere."""

    model: nn.Module
    example: Callable[[int], tuple[Any, ...]]
    outside: Callable[[], Any]


def assert_seen_alike(plain: Case, ours: Case, spec: Any, *, rows: int = 6) -> str:
    """Call two equal models, one of them placed, in five situations; compare all `seen`, and gradients.

    What is held outside, such as a global list, is emptied before a call. Returns "equal", or "refused: …" if
    placer raises one of its errors.
    """
    torch.manual_seed(0)
    try:
        placed = placer.compile(ours.model, spec, ours.example(rows))
        plain.example(rows)
        for index, (train, grad, size) in enumerate(SITUATIONS):
            looks = []
            for net, case in ((plain.model, plain), (placed, ours)):
                torch.manual_seed(index)
                args = case.example(rows + size)
                looks.append(_look(net, plain.model, train, grad, args, case.outside))
            _assert_alike(*looks, f"{spec}, call {index}")
    except placer.PlacerError as error:
        return f"refused: {error}"
    return "equal"


# Train mode or not, with gradients or not, and how many rows more than the example
SITUATIONS = (
    (True, True, 0),
    (True, True, 0),
    (False, True, 1),
    (False, False, 0),
    (True, True, 1),
)


def _look(
    net: nn.Module,
    plain: nn.Module,
    train: bool,
    grad: bool,
    args: tuple[Any, ...],
    outside: Callable[[], Any],
) -> dict[str, Any]:
    """What is seen of a call of ``net`` and of its backward, after an SGD step."""
    if net.training != train:
        net.train(train)
    net.zero_grad()
    held = outside()
    if isinstance(held, list | dict):
        held.clear()
    known = [*seen(net, plain, None, args).values()]
    former = {f"former buffer {name}": buffer for name, buffer in net.named_buffers()}
    with torch.set_grad_enabled(grad):
        output = net(*args)
    found = seen(net, plain, output, args) | former
    _add_seen(found, "outside", outside())
    if grad:
        new = [
            x
            for name, x in sorted(found.items())
            if isinstance(x, Tensor)
            and x.grad_fn is not None
            and not name.startswith("output")
            and not any(x is y for y in known)
        ]
        loss = sum((x.mean() for x in new), mean_square(output))
        loss.backward()
        found["loss"] = loss.detach()
    found |= {f"gradient of {name}": p.grad for name, p in net.named_parameters()}
    for index, x in enumerate(tree_leaves(args)):
        if isinstance(x, Tensor) and x.is_leaf and x.requires_grad:
            found[f"gradient of input {index}"] = x.grad
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
    found |= {f"parameter {name}": p.detach().clone() for name, p in net.named_parameters()}
    return {name: _snapshot(value) for name, value in found.items()}


def _snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _assert_alike(expected: Mapping[str, Any], found: Mapping[str, Any], when: str) -> None:
    grads = [
        x.abs().max() for n, x in expected.items() if n.startswith("gradient") and x is not None
    ]
    floor = max([1e-300, *(1e-15 * x.item() for x in grads)])
    assert found.keys() == expected.keys(), f"{when}: {found.keys() ^ expected.keys()}"
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert isinstance(found[name], Tensor), f"{when}: {name} is {found[name]!r}"
            assert found[name].requires_grad == value.requires_grad, f"{when}: graph of {name}"
            assert_close(
                found[name].detach(), value.detach(), f"{when}: {name}", floor=lambda: floor
            )
        else:
            same = found[name] == value and not isinstance(found[name], Tensor)
            assert same, f"{when}: {name} is {found[name]!r}, not {value!r}"


def _train_both(
    placed: nn.Module,
    plain: nn.Module,
    args: Any,
    kwargs: Any,
    replicas: int,
    microbatches: int,
    steps: int,
) -> None:
    ours = torch.optim.SGD(placed.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        our_args, their_args = _leaves_of((args, kwargs)), _leaves_of((args, kwargs))
        torch.manual_seed(step)
        output = placed(*our_args[0], **our_args[1])
        torch.manual_seed(step)
        expected = run_cuts(plain, *their_args, replicas, microbatches)
        found_leaves, found_spec = tree_flatten(output)
        expected_leaves, expected_spec = tree_flatten(expected)
        assert found_spec == expected_spec
        for i, (a, b) in enumerate(zip(found_leaves, expected_leaves, strict=True)):
            if isinstance(b, Tensor):
                assert_close(a, b, f"step {step}, output {i}")
            else:
                assert a == b
        ours.zero_grad()
        theirs.zero_grad()
        mean_square(output).backward()
        mean_square(expected).backward()
        _compare_state(placed, plain, f"step {step}")
        for a, b in zip(tree_leaves(our_args), tree_leaves(their_args), strict=True):
            if isinstance(a, Tensor) and a.requires_grad:
                assert_close(a.grad, b.grad, f"step {step}, gradient of an input")
        ours.step()
        theirs.step()
        _compare_state(placed, plain, f"after step {step}")


def _step_both(
    placed: placer.PlacedModule,
    other: placer.PlacedModule,
    model: nn.Module,
    args: Any,
    kwargs: Any,
) -> None:
    """Compare `PlacedModule.step` with forward and backward of the same placed module."""
    torch.manual_seed(0)
    loss = mean_square(placed(*args, **kwargs))
    loss.backward()
    torch.manual_seed(0)
    found = other.step(*args, loss_fn=mean_square, **kwargs)
    cuts = placed.plan.replicas * placed.plan.microbatches
    if cuts == 1:
        assert_close(found, loss.detach(), "loss of step()")
        _compare_state(other, placed, "step()")
        return
    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    total = reference_step(plain, args, kwargs, placed.plan.replicas, placed.plan.microbatches)
    assert_close(found, total.detach(), "loss of step()")
    floor = gradient_noise(plain)
    for (name, a), b in zip(other.named_parameters(), plain.parameters(), strict=True):
        assert_close(a.grad, b.grad, f"step(), gradient of {name}", floor=floor)


def reference_step(
    model: nn.Module, args: Any, kwargs: Any, replicas: int, microbatches: int
) -> Tensor:
    """The plain model on the same slices, one after the other; gradients accumulate."""
    total = torch.zeros((), dtype=torch.float64)
    for some_args, some_kwargs, share in each_cut(model, args, kwargs, replicas, microbatches):
        loss = mean_square(model(*some_args, **some_kwargs)) * share
        loss.backward()
        total = total + loss.detach()
    return total


def _leaves_of(value: Any) -> Any:
    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(fresh, value)


def _compare_state(placed: nn.Module, plain: nn.Module, when: str) -> None:
    expected = dict(plain.named_parameters())
    floor = gradient_noise(plain)
    for name, parameter in placed.named_parameters():
        grad = expected[name].grad
        assert_close(parameter.grad, grad, f"{when}, gradient of {name}", floor=floor)
        value = expected[name].detach()  # a step moves it by no more than its gradient
        assert_close(parameter.detach(), value, f"{when}, parameter {name}", floor=floor)
    buffers = dict(plain.named_buffers())
    for name, buffer in placed.named_buffers():
        noise = partial(_mean_noise, buffers, name)
        assert_close(buffer, buffers[name], f"{when}, buffer {name}", floor=noise)
