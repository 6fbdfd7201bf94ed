"""What the processes of a test job run in tests of losses; in a module so that they can import it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from captured import captured_once
from distributed_cases import (
    capture_case,
    compare_state,
    compile_captured,
    make_case,
    make_spec,
)
from oracle import assert_close, gradient_noise, refusal
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from placer.program import unmarked
from placer.schedule import split_batch

D = torch.float64
CLASSES, LENGTH = 4, 6
WEIGHTS = torch.tensor([1.0, 0.5, 3.0, 0.1], dtype=D)


def labels(rows: int, ignored: int = -100) -> Tensor:
    """The first row keeps all labels, each further row one label less; the last row has none."""
    found = torch.randint(0, CLASSES, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    for row in range(rows):
        found[row, LENGTH - row :] = ignored
    found[-1] = ignored
    return found


def flat(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2).flatten(0, 1), target.flatten(), **options)


def kept(target: Tensor) -> Tensor:
    return (target != -100).sum()


LOSSES: dict[str, tuple[Callable[..., Tensor], int, dict[str, Any]]] = {
    "mean": (flat, 0, {}),
    "sum": (functools.partial(flat, reduction="sum"), -100, {}),
    "module": (nn.CrossEntropyLoss(weight=WEIGHTS), -100, {}),
    "function": (F.cross_entropy, -100, {}),
    "kept labels": (flat, -100, {"normalizer": kept}),
}


def _pair(spec: placer.PlacementSpec, rows: int = 8) -> tuple[Any, nn.Module, Tensor]:
    model, (x,), _ = make_case("positions", rows)
    placed = compile_captured(capture_case("positions", rows), spec, x)
    return placed, copy.deepcopy(model), x


def step_with_losses(spec: placer.PlacementSpec, rows: int) -> None:
    """Compare all losses with the plain model, on the whole batch and on own rows of each replica."""
    placed, plain, x = _pair(spec)
    x = x[:rows]
    shares = [rows] if spec.replicas == 1 else [rows, rows - 2, 0]
    for name, (loss_fn, ignored, options) in LOSSES.items():
        target = labels(rows, ignored)
        plain.zero_grad()
        expected = loss_fn(plain(x), target)
        expected.backward()
        for first in (None, *shares):
            placed.zero_grad()
            own = slice(0, rows)
            if first is not None:
                own = slice(0, first) if placed.replica_index == 0 else slice(first, rows)
            loss = placed.step(
                x[own],
                target=target[own],
                loss_fn=loss_fn,
                own_rows=first is not None,
                **options,
            )
            what = f"{name}, {first} rows on the first replica"
            assert_close(loss, expected.detach(), f"{what}, loss")
            compare_state(placed, plain, what)


def try_targets(spec: placer.PlacementSpec) -> dict[str, str]:
    """The messages about targets and normalizers."""
    good, last = labels(8, 0), dist.get_rank() == dist.get_world_size() - 1
    summed = functools.partial(flat, reduction="sum")
    counts: list[Callable[[Tensor], Any]] = [
        lambda target: (target != 0).double().mean(),
        lambda target: {}["labels"],
    ]
    calls: dict[str, dict[str, Any]] = {
        "good": {"target": good},
        "rows": {"target": good[:6]},
        "rows of one rank": {"target": good[:6] if last else good},
        "a share": {"target": good, "normalizer": counts[0]},
        "raises": {"target": good, "normalizer": counts[1]},
        "options": {"target": good, "normalizer": kept if last else None},
        "combination": {"target": good, "loss_fn": summed if last else flat},
    }
    found = {}
    for name, given in calls.items():
        placed, plain, x = _pair(spec)
        try:
            loss = placed.step(x, **{"loss_fn": flat, **given})
            assert_close(loss, flat(plain(x), good).detach(), name)
            found[name] = "no error"
        except placer.PlacerError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def step_once(spec: placer.PlacementSpec, kind: str) -> str:
    """The error of a step whose loss is wrong on only one rank."""
    placed, _, x = _pair(spec)
    own = nn.Linear(LENGTH, 1).double()
    teacher = nn.Linear(LENGTH, LENGTH).double()
    wanted = teacher(torch.ones(LENGTH, dtype=D)) if kind == "a tensor with a graph" else None
    target = teacher(torch.ones(len(x), 1, LENGTH, dtype=D)) if kind == "a target" else None
    kept_by_hook: list[Tensor] = []
    if kind == "activations of a hook":
        for module in placed.modules():
            if isinstance(module, nn.Conv1d):
                module.register_forward_hook(lambda *given: kept_by_hook.append(given[-1]))

    def loss_fn(output: Tensor, target: Tensor | None = None) -> Tensor:
        loss = output.square().mean()
        if target is not None:
            return (output - target).square().mean()
        if kind == "penalty":
            return loss + 0.1 * sum(p.square().sum() for p in placed.parameters())
        if kind == "a call":
            return loss + torch.no_grad()(placed)(x).mean()
        if kind == "a module":
            return own(output).square().mean()
        if kind == "a frozen module":
            return own.requires_grad_(False)(output).square().mean()
        if kind == "a tensor with a graph":
            return (output - wanted).square().mean()
        if kind == "activations of a hook":
            return loss + kept_by_hook[-1].square().mean()
        if kind == "no mean":
            return output.square().mean((1, 2)).max()
        if kind == "in place":
            return output.mul_(2).square_().mean()
        raise AssertionError(kind)

    reduction = "auto" if kind == "no mean" else "mean"
    return refusal(placed.step, x, target=target, loss_fn=loss_fn, reduction=reduction)


def train_a_target(spec: placer.PlacementSpec) -> None:
    """A target that another module has computed, where one rank has the whole job."""
    placed, plain, x = _pair(spec)
    teacher = nn.Linear(LENGTH, LENGTH).double()
    seen = torch.ones(len(x), 1, LENGTH, dtype=D)
    (plain(x) - teacher(seen)).square().mean().backward()
    expected = [parameter.grad for parameter in teacher.parameters()]
    teacher.zero_grad()
    placed.step(x, target=teacher(seen), loss_fn=nn.MSELoss())
    for parameter, grad in zip(teacher.parameters(), expected, strict=True):
        assert_close(parameter.grad, grad, "the gradient of the target")
    compare_state(placed, plain, "after a step")


def add_a_penalty(spec: placer.PlacementSpec) -> None:
    """Add a penalty as the error says: after the step on every rank, or in the loss of a whole model."""
    placed, plain, x = _pair(spec)

    def penalty(module: nn.Module) -> Tensor:
        return 0.1 * torch.stack([p.square().sum() for p in module.parameters()]).sum()

    (flat(plain(x), labels(8, 0)) + penalty(plain)).backward()
    placed.step(x, target=labels(8, 0), loss_fn=flat)
    penalty(placed).backward()
    compare_state(placed, plain, "penalty after the step")
    if len(spec.devices) == 1:
        placed.zero_grad()
        placed.step(x, target=labels(8, 0), loss_fn=lambda y, t: flat(y, t) + penalty(placed))
        compare_state(placed, plain, "penalty in the loss")


class Expert(nn.Linear):
    """Leaves behind a loss of its own, in training mode only."""

    loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.loss = y.square().mean(1)
        return y.tanh()


def add_losses_of_layers(microbatches: int, *, compiled_in_training: bool) -> str:
    """Train with the sum of the losses that layers of both ranks store; in another mode, its error."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=D)
    plain = nn.Sequential(Expert(4, 4), nn.Sequential(Expert(4, 4), Expert(4, 4))).double()
    placed = placer.compile(plain.train(compiled_in_training), make_spec(2, 1, microbatches), x)

    def loss_of(model: nn.Module, output: Tensor) -> Tensor:
        losses = [m.loss for m in model.modules() if isinstance(m, Expert) and m.loss is not None]
        return output.mean() + torch.stack(losses).sum(0).mean()

    def step(**options: Any) -> Tensor:
        plain.zero_grad(), placed.zero_grad()
        return placed.step(x, loss_fn=lambda output: loss_of(placed, output), **options)

    plain.train(), placed.train()
    if not compiled_in_training:
        return refusal(step)
    for options in ({"reduction": "mean"}, {"whole_batch": True}):
        loss = step(**options)
        expected = loss_of(plain, plain(x))
        expected.backward()
        assert_close(loss, expected.detach(), f"{options}, loss")
        compare_state(placed, plain, str(options))
        for name, module in placed.named_modules():
            if isinstance(module, Expert):
                assert_close(module.loss, plain.get_submodule(name).loss.detach(), name)
    return "no error"


def wrap() -> list[str]:
    """The errors of torch's own wrappers for a part of a model."""
    placed, _, _ = _pair(make_spec(2, 1, 2))
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2))  # of others it is none of our business
    return [
        refusal(lambda module=module: nn.parallel.DistributedDataParallel(module))  # type: ignore[misc]
        for module in (placed, nn.Sequential(placed))
    ]


def shard() -> list[str]:
    """FSDP2's error for a part of a model, and a step of a part whose layers it has sharded."""
    from torch.distributed.fsdp import fully_shard

    whole, _, _ = _pair(make_spec(2, 1, 2))
    placed, _, x = _pair(make_spec(2, 1, 2))
    for layer in placed.children():
        fully_shard(layer)
    return [
        refusal(lambda: fully_shard(whole)),
        refusal(lambda: placed.step(x, target=labels(8, 0), loss_fn=flat)),
    ]


def clip_a_part(spec: placer.PlacementSpec) -> dict[str, str]:
    """The errors of torch's clipping for this rank's parameters, as training loops call it."""
    placed, plain, x = _pair(spec)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
    placed.step(x, target=labels(8, 0), loss_fn=flat)
    flat(plain(x), labels(8, 0)).backward()
    ways: dict[str, Callable[[], Any]] = {
        "parameters": placed.parameters,
        "a selection": lambda: [p for p in placed.parameters() if p.requires_grad],
        "by name": lambda: [p for name, p in placed.named_parameters() if "." in name],
        "of the optimizer": lambda: (p for g in optimizer.param_groups for p in g["params"]),
        "of a module around it": lambda: nn.Sequential(placed, nn.Linear(2, 2)).parameters(),
    }
    found = {
        name: refusal(lambda way=way: nn.utils.clip_grad_norm_(way(), 0.01))  # type: ignore[misc]
        for name, way in ways.items()
    }
    compare_state(placed, plain, "refused")
    for module in (placed, plain):  # what needs no other rank
        nn.utils.clip_grad_value_(module.parameters(), 0.1)
        for parameter in module.parameters():
            nn.utils.clip_grad_norm_(parameter, 0.05)
    nn.utils.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert_close(placed.clip_grad_norm_(0.01), expected, "norm")
    compare_state(placed, plain, "clipped")
    return found


def clip_a_whole_model() -> None:
    """With one device per replica, torch's clipping sees the whole model."""
    placed, plain, x = _pair(make_spec(1, 2, 2))
    placed.step(x, target=labels(8, 0), loss_fn=flat)
    flat(plain(x), labels(8, 0)).backward()
    for module in (placed, plain):
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    compare_state(placed, plain, "clipped")


class TwoTowers(nn.Module):
    """Compares images and texts, as CLIP does; rows see each other in the loss only."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv1d(6, 8, 1), nn.BatchNorm1d(8), nn.Tanh(), nn.Flatten(), nn.Linear(32, 5)
        )
        self.text = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 5))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {
            "image": F.normalize(self.image(image), dim=-1),
            "text": F.normalize(self.text(text), dim=-1),
            "scale": self.scale * 10,
        }


def clip_loss(output: dict[str, Tensor], target: dict[str, Any]) -> Tensor:
    """The contrastive loss of both directions, with ``target["weights"]`` for rows."""
    scores = output["scale"].clamp_(max=100) * output["image"] @ output["text"].T
    own = torch.arange(len(scores))
    rows = F.cross_entropy(scores, own, reduction="none") + F.cross_entropy(
        scores.T, own, reduction="none", label_smoothing=float(target["smoothing"][0])
    )
    weights = target["weights"]
    return (rows * weights).sum() / weights.sum()


def two_towers(**fields: Any) -> tuple[nn.Module, dict[str, Any], Tensor, Tensor]:
    """The model, fields of a spec for it, and its inputs of 8 rows."""
    torch.manual_seed(0)
    inputs = {"image": {"batch_dim": 0}, "text": {"batch_dim": 0}}
    fields = {"inputs": inputs, "objective": "bottleneck", **fields}
    return (
        TwoTowers().double(),
        fields,
        torch.randn(8, 6, 4, dtype=D),
        torch.randn(8, 7, dtype=D),
    )


def slices_of(rows: int, replicas: int, microbatches: int, first: int | None = None) -> list[int]:
    """The rows of each slice, if the first of two replicas is given ``first`` of them, or torch's share."""
    shares = [rows] if first is None else [first, rows - first]
    cuts = [split_batch(n, replicas if first is None else 1, microbatches) for n in shares if n]
    return [size for cut in cuts for row in cut for size in row]


def clip_in_slices(
    plain: nn.Module, image: Tensor, text: Tensor, target: Any, sizes: list[int]
) -> Tensor:
    """The loss of the plain model, whose BatchNorm sees the slices, after its backward."""
    slices = zip(image.split(sizes), text.split(sizes), strict=True)
    results = [plain(*each) for each in slices]
    joined = {name: torch.cat([each[name] for each in results]) for name in ("image", "text")}
    loss = clip_loss({**joined, "scale": results[0]["scale"]}, target)
    loss.backward()
    return loss.detach()


def step_over_whole_batches(stages: int, replicas: int, microbatches: int) -> None:
    """A contrastive loss equals the plain model's, for the whole batch and for own rows, also for none."""
    model, fields, images, texts = two_towers()
    spec = make_spec(stages, replicas, microbatches, **fields)
    placed = placer.compile(model, spec, (images, texts))
    for rows in (8, 5, 1):
        for first in (None, 3, rows)[: 1 if rows == 1 or replicas != 2 else 3]:
            sizes = slices_of(rows, replicas, microbatches, first)
            image, text = (x[:rows].clone().requires_grad_() for x in (images, texts))
            target = {
                "weights": torch.arange(1.0, rows + 1, dtype=D),
                "smoothing": placer.Whole(torch.tensor([0.1])),
            }
            plain = copy.deepcopy(model)
            expected = clip_in_slices(plain, image, text, unmarked(target), sizes)
            own = slice(0, rows)
            if first is not None:
                own = slice(0, first) if placed.replica_index == 0 else slice(first, rows)
            given = [x.detach()[own].requires_grad_() for x in (image, text)]
            placed.zero_grad()
            loss = placed.step(
                *given,
                target={**target, "weights": target["weights"][own]},
                loss_fn=clip_loss,
                whole_batch=True,
                own_rows=first is not None,
            )
            what = f"{rows} rows, {first} on the first replica"
            assert_close(loss, expected, what)
            for ours, theirs in zip(given, (image, text), strict=True):
                if len(ours):
                    assert_close(ours.grad, theirs.grad[own], f"{what}, input")
            for name, parameter in placed.named_parameters():
                wanted = plain.get_parameter(name).grad
                assert_close(parameter.grad, wanted, f"{what}, {name}", floor=gradient_noise(plain))


@captured_once()
def fail_over_whole_batches() -> dict[str, str]:
    """The errors of steps over the whole batch that cannot be computed, one after the other."""
    model, fields, image, text = two_towers()

    def penalty(output: dict[str, Tensor]) -> Tensor:
        return output["image"].square().mean() + sum(p.square().sum() for p in placed.parameters())

    def fail(output: dict[str, Tensor]) -> Tensor:
        raise ValueError(f"{len(output['image'])} rows")

    found = {}
    cases: dict[str, Any] = {
        "schedule": ("1F1B", {"loss_fn": fail}),
        "reduction": ("GPipe", {"loss_fn": fail, "reduction": "mean"}),
        "raises": ("GPipe", {"loss_fn": fail}),
        "penalty": ("GPipe", {"loss_fn": penalty}),
    }
    for name, (schedule, options) in cases.items():
        placed = placer.compile(model, make_spec(1, 2, 2, schedule, **fields), (image, text))
        found[name] = refusal(
            lambda o=options, p=placed: p.step(image, text, whole_batch=True, **o)
        )  # type: ignore[misc]
    return found


def measure(spec: placer.PlacementSpec) -> list[tuple[int, int, int, float, float]]:
    """Rank, replica, stage and the seconds forward and in messages of a measured step's report."""
    placed, _, x = _pair(spec)
    placed.step(x, target=labels(8, 0), loss_fn=flat, profile=True)
    report = placed.report()
    computed = [span for span in report.spans if span.kind == "compute"]
    assert len(computed) == 2 * spec.microbatches * len(report.stages)
    return [
        (s.rank, s.replica, s.stage, s.seconds.forward, s.seconds.waiting + s.seconds.sending)
        for s in report.stages
    ]


def measure_on_one_rank(spec: placer.PlacementSpec) -> str:
    """The error of a step that only rank 0 measures."""
    placed, _, x = _pair(spec)
    first = dist.get_rank() == 0
    return refusal(lambda: placed.step(x, target=labels(8, 0), loss_fn=flat, profile=first))


def accumulate(spec: placer.PlacementSpec) -> list[str]:
    """Three steps, two of them in ``accumulate``, twice; and what is refused before the last of them."""
    placed, plain, x = _pair(spec)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (placed, plain)]
    said = []
    for number in range(2):  # the second time, gradients that are sums exist before
        with placed.accumulate():
            for rows in (8, 3):
                placed.step(x[:rows], target=labels(rows, 0), loss_fn=flat)
        said += [refusal(optimizers[0].step), refusal(lambda: placed.clip_grad_norm_(1.0))]
        placed.step(x, target=labels(8, 0), loss_fn=flat)
        for rows in (8, 3, 8):
            flat(plain(x[:rows]), labels(rows, 0)).backward()
        compare_state(placed, plain, f"accumulated {number}")
    for optimizer in optimizers:
        optimizer.step()
    compare_state(placed, plain, "updated")
    return said
