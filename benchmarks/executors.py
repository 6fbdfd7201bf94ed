"""Compares two executors of a schedule over processes: torch's pipelining (public API) and placer's.

``python -m benchmarks.executors`` runs both on small models with features that split models have, with one
process per device over gloo. Each case compares the loss and every gradient with the plain model's; a case
that exceeds the time limit counts as hanging. Run under several releases of torch: each run adds its row.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import placer
from benchmarks.record import RESULTS, write_page

LIMIT_SECONDS = 60
WIDTH = 6


def block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Skip(nn.Module):
    """Three blocks; the result of the first also goes to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = block(), block(), block()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.a(x)
        return self.c(self.b(kept) + kept)


class First(nn.Module):
    def __init__(self, model: Skip) -> None:
        super().__init__()
        self.a = model.a

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.a(x)
        return kept, kept


class Middle(nn.Module):
    """Passes the skipped value on, because stages communicate only with their neighbours."""

    def __init__(self, model: Skip) -> None:
        super().__init__()
        self.b = model.b

    def forward(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(x), kept


class Last(nn.Module):
    def __init__(self, model: Skip) -> None:
        super().__init__()
        self.c = model.c

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return self.c(x + kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its stages (cut by hand), and the batches of its steps, in order."""

    processes: int
    model: Callable[[], nn.Module]
    stages: Callable[[Any], Sequence[nn.Module]]  # more than processes: dealt out in turn
    layers: Sequence[Sequence[str]]  # of every stage, for the spec
    batches: Sequence[tuple[int, ...]]
    schedule: str = "1F1B"
    microbatches: int = 4


def chain(blocks: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(block() for _ in range(blocks)))


def pairs(model: nn.Sequential) -> Sequence[nn.Module]:
    return [model[:2], model[2:]]


CASES = {
    "a chain of two stages": Case(
        processes=2,
        model=chain(4),
        stages=pairs,
        layers=(("0", "1"), ("2", "3")),
        batches=((8, WIDTH), (8, WIDTH)),
    ),
    "a value that skips a stage": Case(
        processes=3,
        model=Skip,
        stages=lambda m: (First(m), Middle(m), Last(m)),
        layers=(("a",), ("b",), ("c",)),
        batches=((8, WIDTH), (8, WIDTH)),
    ),
    "a batch that does not divide evenly": Case(
        processes=2,
        model=chain(4),
        stages=pairs,
        layers=(("0", "1"), ("2", "3")),
        batches=((8, WIDTH), (7, WIDTH)),
    ),
    "fewer rows than micro-batches": Case(
        processes=2,
        model=chain(4),
        stages=pairs,
        layers=(("0", "1"), ("2", "3")),
        batches=((8, WIDTH), (3, WIDTH)),
    ),
    "inputs of another size": Case(
        processes=2,
        model=chain(4),
        stages=pairs,
        layers=(("0", "1"), ("2", "3")),
        batches=((8, 5, WIDTH), (8, 3, WIDTH), (16, 5, WIDTH)),
    ),
    "two stages per device": Case(
        processes=2,
        model=chain(4),
        stages=lambda m: list(m),
        layers=(("0",), ("1",), ("2",), ("3",)),
        batches=((8, WIDTH), (8, WIDTH)),
        schedule="Interleaved1F1B",
    ),
    "zero bubble, two stages per device": Case(
        processes=2,
        model=chain(4),
        stages=lambda m: list(m),
        layers=(("0",), ("1",), ("2",), ("3",)),
        batches=((8, WIDTH), (8, WIDTH)),
        schedule="InterleavedZeroBubble",
    ),
}


def mean_square(output: Tensor, target: Tensor | None = None) -> Tensor:
    return output.square().mean()


def by_pipelining(case: Case, model: Any) -> Callable[[Tensor], object]:
    """A step with torch's schedules, as in their documentation."""
    rank, parts = dist.get_rank(), case.stages(model)
    own = range(rank, len(parts), case.processes)
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(parts[i], i, len(parts), device) for i in own]
    kind = getattr(pipelining, f"Schedule{case.schedule}")
    several = len(parts) > case.processes
    schedule = kind(stages if several else stages[0], case.microbatches, loss_fn=mean_square)
    last = len(parts) - 1 in own

    def step(x: Tensor) -> object:
        inputs = [x] if rank == 0 else []
        return schedule.step(*inputs, target=x if last else None)

    return step


def by_placer(
    case: Case, model: nn.Module, x: Tensor
) -> tuple[nn.Module, Callable[[Tensor], object]]:
    layers = {
        layer: f"cpu:{index % case.processes}"
        for index, names in enumerate(case.layers)
        for layer in names
    }
    spec = {
        "devices": [f"cpu:{i}" for i in range(case.processes)],
        "layers": layers,
        "schedule": case.schedule,
        "microbatches": case.microbatches,
    }
    placed = placer.compile(model, spec, x)
    return placed, lambda x: placed.step(x, loss_fn=mean_square)


def try_case(name: str, engine: str, rank: int, store: str, answers: Any) -> None:
    """One process of a case; puts "equal", or what went wrong, and the seconds of its last step."""
    case = CASES[name]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=case.processes
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = case.model().double()
    batches = [torch.randn(*size, dtype=torch.float64) for size in case.batches]
    ours: nn.Module = copy.deepcopy(plain)
    try:
        if engine == "placer":
            ours, step = by_placer(case, ours, batches[0])
        else:
            step = by_pipelining(case, ours)
        for x in batches:
            ours.zero_grad()
            plain.zero_grad()
            mean_square(plain(x)).backward()
            step(x)
            expected = dict(plain.named_parameters())
            for parameter_name, parameter in ours.named_parameters():
                if engine == "placer" or parameter.grad is not None:
                    torch.testing.assert_close(parameter.grad, expected[parameter_name].grad)
        answers.put((rank, "equal"))
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        answers.put((rank, f"{type(error).__name__}: {lines[0][:90]}"))
    time.sleep(1)


def run_case(name: str, engine: str) -> str:
    """ "equal", the first error, or "hangs"."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=try_case, args=(name, engine, rank, f"{folder}/store", answers), daemon=True
            )
            for rank in range(CASES[name].processes)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + LIMIT_SECONDS
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            time.sleep(0.1)
        hangs = any(process.is_alive() for process in processes)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        found = []
        while not answers.empty():
            found.append(answers.get())
    wrong = [said for _, said in sorted(found) if said != "equal"]
    if wrong:
        return wrong[0]
    if hangs:
        return f"hangs ({LIMIT_SECONDS} s)"
    if len(found) < len(processes):
        return f"the process ends (exit codes {codes})"
    return "equal"


def main() -> None:
    path = RESULTS / "executors.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    release = torch.__version__.split("+")[0]
    known[release] = {
        name: {engine: run_case(name, engine) for engine in ("pipelining", "placer")}
        for name in CASES
    }
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    lines = []
    for engine, title in (
        ("pipelining", "torch.distributed.pipelining, by its public API"),
        ("placer", "placer's executor"),
    ):
        releases = sorted(known)
        lines += [f"## {title}", "", f"| case | {' | '.join(f'torch {r}' for r in releases)} |"]
        lines += [f"|{' --- |' * (1 + len(releases))}"]
        for name in CASES:
            row = [known[r].get(name, {}).get(engine, "not run") for r in releases]
            lines.append(f"| {name} | {' | '.join(row)} |")
        lines.append("")
    lines += [
        '"equal": the loss and every gradient of every step are those of the plain model. The time of a '
        "step beside torch's is in [distributed.md](distributed.md).",
        "",
    ]
    write_page(
        "executors",
        "What runs a schedule over processes",
        "python -m benchmarks.executors",
        lines,
    )


if __name__ == "__main__":
    main()
