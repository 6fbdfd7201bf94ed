"""Runs the demo and prints its steps to a terminal."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import placer
from examples.demo.brain import CLASSES, Brain, load_brain, padded_shape
from examples.demo.train import PATCH, STEPS, Training
from examples.unet3d import unet3d
from placer.errors import BudgetError
from placer.plan.store import save_plan
from placer.plan.types import DevicePeak
from placer.quantities import format_bytes
from placer.report import needs_text, plan_table, write_html

BUDGET = "16GiB"
_MOST_DEVICES = 8


def run_demo(
    folder: Path, console: Console, *, steps: int = STEPS, width: int = 16, patch: int = PATCH
) -> None:
    """Plan the full volume, train a small network, and leave spec, plan and report in ``folder``.

    ``width`` is the number of channels at the small network's first level, ``patch`` the side of its
    patches in voxels. Exits with an error if the placed model's first step differs from the plain
    model's, or if training does not learn.
    """
    start = time.perf_counter()
    console.rule("[bold]1. A brain that does not fit on one device", align="left")
    brain = load_brain()
    volume = (1, 1, *padded_shape(brain.shape))
    console.print(
        f"MNI152 template at 1 mm, {_times(brain.shape)} voxels, padded to {_times(volume[2:])}; "
        "3D U-Net, width 32, depth 4, Adam."
    )
    with torch.device("meta"):
        model, image = unet3d(width=32, depth=4, out_channels=len(CLASSES)), torch.empty(volume)
    one = placer.make_plan(model, {"devices": _devices(1)}, (image,))
    (device,) = one.devices
    console.print(
        f"One device of {format_bytes(device.budget or 0)}: a training step peaks at "
        f"[bold]{format_bytes(device.peak)}[/] of tensors, and needs {needs_text(device)}. "
        + ("It fits." if one.fits else f"[bold red]It does not fit: {_too_much(device)}.[/]")
    )

    console.rule("[bold]2. auto: as many devices as it needs", align="left")
    spec, plan = _fewest_devices(model, image)
    console.print(plan_table(plan))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(spec.to_json())
    save_plan(plan, folder / "plan.json")
    report = placer.simulate(model, plan, (image,))
    write_html(plan, folder / "report.html", simulation=report)
    console.print(
        "A dry run of the emitted module on simulated devices agrees: "
        + ", ".join(f"{d.device} {format_bytes(d.peak)}" for d in report.devices)
        + "."
    )

    console.rule("[bold]3. Training: 2 stages x 2 replicas, on patches", align="left")
    _train(brain, console, steps, width, patch)

    console.rule("[bold]Files", align="left")
    for name, what in (
        ("spec.json", "what you ask for: edit it, then run `placer plan`"),
        ("plan.json", "the lock file: `placer.load_plan`, `placer.compile(model, plan, …)`"),
        ("report.html", "the plan as a page"),
    ):
        console.print(f"  {folder / name}  [dim]{what}[/]", soft_wrap=True)
    console.print(f"Done in {time.perf_counter() - start:.0f} s.")


def _too_much(device: DevicePeak) -> str:
    return f"{format_bytes(-(device.headroom or 0))} too much"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _devices(count: int) -> list[dict[str, str]]:
    return [{"name": f"cuda:{i}", "memory": BUDGET} for i in range(count)]


def _fewest_devices(model: nn.Module, image: Tensor) -> tuple[placer.PlacementSpec, placer.Plan]:
    """The automatic spec for two devices, or for more if two do not suffice, and its plan."""
    for count in range(2, _MOST_DEVICES + 1):
        try:
            spec = placer.auto_spec(
                *(model, (image,)),
                devices=_devices(count),
                objective="devices",
                checkpoint=[],
                space=1,
                chunks=1,
            )
        except BudgetError:
            if count == _MOST_DEVICES:
                raise
            continue
        return spec, placer.make_plan(model, spec, (image,))
    raise AssertionError("the loop returns or raises")


def _train(brain: Brain, console: Console, steps: int, width: int, patch: int) -> None:
    torch.manual_seed(0)
    # InstanceNorm's statistics are a sample's own, so that the whole batch on the plain model is
    # what the replicas together must equal.
    model = unet3d(width=width, depth=3, out_channels=len(CLASSES), norm="instance")
    training = Training(brain, model, patch=patch)
    images, _ = training.batch()
    spec = {"devices": _devices(2), "replicas": 2, "objective": "memory"}
    gpus = torch.cuda.device_count()
    placed = placer.compile(model, spec, (images,), run_on=None if gpus >= 4 else "cpu")
    rows = [" | ".join(stage.devices) for stage in placed.plan.stages]
    where = "" if gpus >= 4 else f" (this machine has {gpus} GPUs: simulated devices on the CPU)"
    console.print(
        f"Stages on {' and '.join(rows)}{where}; width {width}, depth 3, patches of {patch}^3 mm."
    )
    with Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"))
        for done in training.run(placed, steps):
            bar.update(task, completed=done.step, loss=done.loss)
    outcome, first = training.outcome, training.first_step
    assert outcome is not None and first is not None
    console.print("On patches of a part of the brain that was not trained on:")
    console.print(f"  loss               {outcome.loss_before:.3f} -> {outcome.loss_after:.3f}")
    scores = zip(CLASSES[1:], outcome.dice_before, outcome.dice_after, strict=True)
    for tissue, before, after in scores:
        console.print(f"  Dice, {tissue:<12} {before:.3f} -> [bold]{after:.3f}[/]")

    console.rule("[bold]4. Is it the same computation?", align="left")
    verdict = "[bold green]EQUAL" if first.equal else "[bold red]DIFFERENT"
    console.print(
        f"First training step, placed against plain: {verdict}[/]. Loss {first.placed_loss:.6f} "
        f"against {first.plain_loss:.6f}; {first.gradients} gradients, the worst "
        f"({first.worst_name}) off by {first.worst_error:.1e} of its largest value, as float32 "
        "rounds."
    )
    if not first.equal:
        raise SystemExit("the placed step differs from the plain one: please report it")
    worse = zip(outcome.dice_before, outcome.dice_after, strict=True)
    if outcome.loss_after > outcome.loss_before or any(after <= before for before, after in worse):
        raise SystemExit("training did not learn: run it for more steps")
