"""Predicted against measured step times of transformers on A100s, and which setting would have been picked.

    python -m benchmarks.measured_runs FILE.csv [FILE.csv …] [--json] [--write]

The files have runs of Megatron-DeepSpeed that the authors of vTrain measured (MICRO 2024; columns as in
``../shared/workloads/vtrain``): fp16, full recomputation, 1F1B, attention without a fused kernel. placer has
no tensor parallelism, so a rank's share is recorded as a smaller module, with its collectives as seconds. All
else is placer's: the costs of operations, the machine ``dgx-a100`` with its one factor, and the layout of a
step in time.

A group has the rows of the same devices, batch, width and depth. Its pick is the row that is predicted to be
the fastest, which is compared with the row that was measured to be the fastest.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placer.cost import CostEstimates
from placer.machine.machine import LinkSpec, Machine, device_kind_of, find_machine
from placer.plan.step_spans import lay_out_step
from placer.plan.types import NO_MEMORY, StagePlan, Transfer
from placer.program import lower
from placer.timeline import end_of

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 50176
_CLOSE = 0.05  # a pick is good if its step is at most so much longer than the best
_HALF = 2  # bytes of a weight, a gradient or an activation
_UPDATE = 30  # bytes that mixed-precision Adam reads and writes per parameter
_COLUMNS = {
    "hidden size": "width",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "length",
    "global batch": "batch",
    "micro batch": "rows",
    "tensor parallelism": "tensor",
    "data parallelism": "replicas",
    "pipeline parallelism": "stages",
    "iteration time (ms)": "milliseconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run. ``rows`` are the samples of a micro-batch."""

    width: int
    heads: int
    layers: int
    length: int
    batch: int
    rows: int
    tensor: int
    replicas: int
    stages: int
    milliseconds: float

    @property
    def devices(self) -> int:
        return self.tensor * self.replicas * self.stages

    @property
    def microbatches(self) -> int:
        return max(1, self.batch // (self.replicas * self.rows))

    @property
    def group(self) -> tuple[int, ...]:
        return self.devices, self.batch, self.width, self.layers


class Block(nn.Module):
    """The part of a transformer's block on one of ``tensor`` ranks, without its collectives."""

    def __init__(self, width: int, heads: int, tensor: int) -> None:
        super().__init__()
        self.heads, self.size = heads // tensor, width // heads
        own = self.heads * self.size
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * own), nn.Linear(own, width)
        self.up, self.down = (
            nn.Linear(width, 4 * width // tensor),
            nn.Linear(4 * width // tensor, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, self.size)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, self.heads * self.size))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Embedding, three blocks and head; the costs of the middle block are those of any block."""

    def __init__(self, width: int, heads: int, tensor: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY // tensor, width)
        self.blocks = nn.ModuleList(Block(width, heads, tensor) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY // tensor, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Seconds of the device and of the host that launches, for a micro-batch; the number of parameters."""

    forward: float
    backward: float
    launch: float
    launch_backward: float
    parameters: int


@functools.cache
def parts(
    width: int, heads: int, length: int, rows: int, tensor: int, machine: Machine
) -> Mapping[str, Part]:
    """The costs of the embedding, of a block and of the head on one rank."""
    with torch.device("meta"):
        model = Transformer(width, heads, tensor).to(torch.bfloat16)
        ids = torch.empty(rows, length, dtype=torch.long)
    program = lower(model, (ids,))
    costs = CostEstimates(program)([ids], kernels="cuda")
    seconds = costs.work.seconds(device_kind_of(machine))
    layers = [*(program.nodes[name].layer for name in program.order), "loss"]
    found = {}
    for name in ("embedding", "block", "head"):
        at = [i for i, layer in enumerate(layers) if _part_of(i, layer) == name]
        found[name] = Part(
            forward=float(seconds.forward.device[at].sum()),
            backward=float(seconds.backward.device[at].sum()),
            launch=float(seconds.forward.host[at].sum()),
            launch_backward=float(seconds.backward.host[at].sum()),
            parameters=sum(t.nbytes for t in costs.state if set(t.readers) & set(at)) // _HALF,
        )
    return found


def _part_of(index: int, layer: str) -> str:
    if layer.startswith("blocks"):
        return "block" if layer.startswith("blocks.1") else "other"
    return "embedding" if index < 2 else "head"


def predict(run: Run, machine: Machine) -> float:
    """The seconds of a step of ``run``."""
    part = parts(run.width, run.heads, run.length, run.rows, run.tensor, machine)
    block, links = part["block"], machine.links
    activation = _HALF * run.rows * run.length * run.width
    # Two all-reduces of the tensor group in each pass of a block, and in the repeated forward
    reduced = 2 * links.all_reduce_seconds(activation, ranks=run.tensor, stride=1)
    # A block takes as long as its kernels, or as its process takes to launch them.
    forward = max(block.forward + reduced, block.launch)
    backward = max(
        block.backward + block.forward + 2 * reduced, block.launch_backward + block.launch
    )
    sent = 0.0
    if run.stages > 1:  # the ranks of a stage follow one another, so the next stage is so far away
        sent = links.send_seconds(activation / run.tensor, 0, run.tensor * run.replicas)
    stages, own = [], []
    for stage in range(run.stages):
        count = run.layers * (stage + 1) // run.stages - run.layers * stage // run.stages
        ends = [part["embedding"]] * (stage == 0) + [part["head"]] * (stage == run.stages - 1)
        own.append(count * block.parameters + sum(end.parameters for end in ends))
        stages.append(
            _stage(
                stage,
                forward=count * forward + sum(end.forward for end in ends) + sent,
                backward=count * backward + sum(end.backward for end in ends) + sent,
            )
        )
    spans = lay_out_step(
        stages,
        # Megatron's sends block, so their seconds are in those of the stages.
        [
            Transfer(value="x", source=s, target=s + 1, nbytes=activation)
            for s in range(run.stages - 1)
        ],
        [[f"stage {stage}" for stage in range(run.stages)]],
        schedule="1F1B" if run.stages > 1 else "GPipe",
        microbatches=run.microbatches,
        training=True,
        processes=True,
        optimizer_seconds=_UPDATE
        * max(own)
        / device_kind_of(machine).rates["optimizer", "float32"].bandwidth,
    )
    sums = links.all_reduce_seconds(_HALF * max(own), ranks=run.replicas, stride=run.tensor)
    return end_of(spans) + sums


def _stage(index: int, *, forward: float, backward: float) -> StagePlan:
    return StagePlan(
        index=index,
        devices=(f"stage {index}",),
        layers=(),
        nodes=(),
        memory=NO_MEMORY,
        budget=None,
        reserve=0,
        forward_seconds=forward,
        backward_seconds=backward,
    )


def read_runs(path: Path) -> list[Run]:
    """The runs in a file of vTrain's."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [
            {key.strip().lower(): value for key, value in row.items()}
            for row in csv.DictReader(file)
        ]
    return [
        Run(
            **{
                field: float(row[column]) if field == "milliseconds" else int(float(row[column]))
                for column, field in _COLUMNS.items()
            }
        )
        for row in rows
        if row.get("iteration time (ms)")
    ]


def summarize(runs: Sequence[Run], seconds: Sequence[float]) -> dict[str, Any]:
    """The errors of the predictions, and how good the picks of groups of three or more are."""
    errors = [abs(s / (run.milliseconds / 1e3) - 1) for run, s in zip(runs, seconds, strict=True)]
    groups = defaultdict[tuple[int, ...], list[tuple[float, float]]](list)
    for run, predicted in zip(runs, seconds, strict=True):
        groups[run.group].append((predicted, run.milliseconds / 1e3))
    compared = [group for group in groups.values() if len(group) > 2]
    losses = [min(group)[1] / min(measured for _, measured in group) - 1 for group in compared]
    ratios = [s / (run.milliseconds / 1e3) for run, s in zip(runs, seconds, strict=True)]
    return {
        "rows": len(runs),
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "median_ratio": statistics.median(ratios),
        "groups": len(losses),
        "picks_within_5_percent": sum(loss <= _CLOSE for loss in losses),
        "worst_pick": max(losses, default=0.0),
    }


def machine_of(runs: Iterable[Run]) -> Machine:
    """dgx-a100, with as many nodes as the largest run needs; 90 % of network cards of 100 Gb/s."""
    machine = find_machine("dgx-a100")
    nodes = max(1, -(-max(run.devices for run in runs) // machine.devices_per_node))
    network = LinkSpec(send=11.25e9, latency=2e-5)
    return machine.model_copy(update={"nodes": nodes, "network": network})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}/measured_runs.md")
    given = parser.parse_args(arguments)
    found = {}
    for path in given.files:
        runs = read_runs(path)
        machine = machine_of(runs)
        seconds = [predict(run, machine) for run in runs]
        found[path.name] = (runs, seconds, summarize(runs, seconds))
    if given.json:
        values = {
            name: {
                "summary": summary,
                "rows": [
                    {"measured": run.milliseconds / 1e3, "predicted": predicted}
                    for run, predicted in zip(runs, seconds, strict=True)
                ],
            }
            for name, (runs, seconds, summary) in found.items()
        }
        print(json.dumps(values, indent=1))
    text = page({name: summary for name, (_, _, summary) in found.items()})
    if not given.json:
        print(text)
    if given.write:
        (RESULTS / "measured_runs.md").write_text(text, encoding="utf-8")


def page(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "# Predicted against measured step times",
        "",
        "`python -m benchmarks.measured_runs ../shared/workloads/vtrain/*.csv --write`: runs of",
        "Megatron-DeepSpeed on A100s that vTrain's authors measured. One number was fitted, elsewhere:",
        "`sustained` of the machine `dgx-a100`.",
        "",
        "| file | rows | mean error | worst | predicted / measured | picks within 5 % of the best "
        "| worst pick |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name, s in summaries.items():
        lines.append(
            f"| {name} | {s['rows']} | {s['mean_error']:.1%} | {s['worst_error']:.0%} "
            f"| {s['median_ratio']:.2f} | {s['picks_within_5_percent']} of {s['groups']} "
            f"| {s['worst_pick']:.0%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
