"""``python -m benchmarks.rivals``: common ways to train, by the same simulator as ``auto``'s answer.

Each way is a rule that writes specs: it fixes stages, replicas, schedule, recomputation and who keeps the
optimizer's state, as the guides of these projects say. The size of a micro-batch is the best one that fits.
Where a stage begins is left to placer, which is at least as good as the rule (Megatron and torchtitan give
every stage equally many blocks). placer has no tensor parallelism, so theirs is left out, and so is FSDP's
division of weights. "replicas x stages" leaves out the parts of a stage in space, which are devices too.

All plans are for a process per device, except that of ``DataParallel``; nothing is allocated.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import placer
from benchmarks.record import RESULTS, write_result
from examples.gpt3_ten_thousand import GPT
from examples.unet3d import unet3d
from placer.api import as_spec, lower_call
from placer.plan.types import Plan
from placer.program import Program
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec

Spec = dict[str, Any]
_FILE = RESULTS / "rivals.json"


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """A model, a batch, and the ``count`` equal devices that ``where`` describes, in nodes of ``node``.

    ``blocks`` is a pattern of the layers that a user would recompute.
    """

    make: Callable[[], nn.Module]
    batch: tuple[int, ...]
    dtype: torch.dtype
    where: Spec
    count: int
    node: int
    blocks: str

    @property
    def rows(self) -> int:
        return self.batch[0]

    def example(self) -> tuple[nn.Module, Tensor]:
        with torch.device("meta"):
            return self.make(), torch.empty(self.batch, dtype=self.dtype)

    @functools.cached_property
    def captured(self) -> tuple[Program, list[Tensor]]:
        wanted = PlacementSpec.model_validate({"devices": ["cuda:0"], "precision": "bf16"})
        return lower_call(*self.example(), None, wanted)


def _cards(count: int, kind: str, memory: str) -> Spec:
    return {
        "devices": [{"name": f"cuda:{i}", "kind": kind, "memory": memory} for i in range(count)]
    }


def _tokens(blocks: int, width: int, rows: int, nodes: int) -> Case:
    return Case(
        make=lambda: GPT(blocks, width, heads=width // 128),
        batch=(rows, 2048),
        dtype=torch.long,
        where={"machine": f"dgx-a100:{nodes}"},
        count=8 * nodes,
        node=8,
        blocks="blocks.*",
    )


CASES = {
    "ResNet-50, 256 images, one DGX A100": Case(
        make=torchvision.models.resnet50,
        batch=(256, 3, 224, 224),
        dtype=torch.float32,
        where={"machine": "dgx-a100"},
        count=8,
        node=8,
        blocks="layer*.*",
    ),
    "3D U-Net, 2 x 256 x 256 x 192, four cards of 12 GiB": Case(
        make=unet3d,
        batch=(2, 1, 256, 256, 192),
        dtype=torch.float32,
        where=_cards(4, "rtx3060-12gb", "12GiB"),
        count=4,
        node=4,
        blocks="*",
    ),
    "GPT of 7B, 64 sequences, one DGX A100": _tokens(32, 4096, rows=64, nodes=1),
    "GPT-3 of 175B, 1,536 sequences, 128 DGX A100": _tokens(96, 12288, rows=1536, nodes=128),
}


Group = list[Spec]  # specs of which the first needs the least memory


def data_parallel(case: Case) -> Iterator[Group]:
    """``nn.DataParallel``: one process, so one node, a replica per device, all rows at once."""
    yield [{"stages": 1, "replicas": min(case.node, case.rows)}]


def distributed_data_parallel(case: Case) -> Iterator[Group]:
    """``DistributedDataParallel``: a replica per device, with accumulation of gradients."""
    spec = {"stages": 1, "replicas": min(case.count, case.rows), "schedule": "1F1B"}
    yield _microbatched(case, spec)


def sharded_optimizer(case: Case) -> Iterator[Group]:
    """``DistributedDataParallel`` with ``ZeroRedundancyOptimizer``."""
    for group in distributed_data_parallel(case):
        yield [{**spec, "shard_state": "optimizer"} for spec in group]


def device_map(case: Case) -> Iterator[Group]:
    """accelerate's ``device_map``, or ``.to("cuda:1")`` by hand: a stage per device, one after the other."""
    yield [{"stages": case.node}]


def megatron(case: Case, schedule: str = "1F1B") -> Iterator[Group]:
    """Megatron-LM's rules: the fewest stages that fit, blocks recomputed or not, whichever is faster.

    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 3; its distributed optimizer divides state over replicas.
    """
    for stages in _powers(case.count):
        replicas = min(case.count // stages, case.rows)
        spec = {"stages": stages, "replicas": replicas, "schedule": schedule}
        if replicas > 1:
            spec["shard_state"] = "optimizer"
        yield [
            {**each, **({"checkpoint": [case.blocks]} if recomputes else {})}
            for recomputes in (True, False)
            for each in _microbatched(case, spec)
        ]


def torchtitan(case: Case) -> Iterator[Group]:
    """torchtitan's pipeline and data parallelism: as `megatron`, with two stages per device in turns."""
    for group in megatron(case, "Interleaved1F1B"):
        if group[0]["stages"] > 1:
            yield group


RIVALS: Mapping[str, tuple[bool, Callable[[Case], Iterator[Group]]]] = {
    "`nn.DataParallel`": (False, data_parallel),
    "`DistributedDataParallel`": (True, distributed_data_parallel),
    "DDP, `ZeroRedundancyOptimizer`": (True, sharded_optimizer),
    "`device_map`, or by hand": (True, device_map),
    "Megatron's rules": (True, megatron),
    "torchtitan's pipeline": (True, torchtitan),
}


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def _microbatched(case: Case, spec: Spec) -> Group:
    """``spec`` with micro-batches of 1, 4, 16, … samples, and with all rows at once."""
    rows = case.rows // spec["replicas"]
    sizes = dict.fromkeys([*_powers(rows)[::2], rows])
    return [{**spec, "microbatches": rows // size} for size in sizes]


def best_of(case: Case, groups: Iterator[Group], *, processes: bool) -> Plan | None:
    """The fastest plan of the first group that has one that fits."""
    planner = JudgingPlanner(*case.captured, processes=processes)
    for group in groups:
        fitting: list[Plan] = []
        for spec in group:
            plan = planner(as_spec({**case.where, "precision": "bf16", **spec}))
            print(f"  {spec}: {plan.step_seconds:.3f} s, fits: {plan.fits}", flush=True)
            if plan.fits:
                fitting.append(plan)
            elif not fitting:
                break  # what follows needs more memory
        if fitting:
            return min(fitting, key=lambda plan: plan.step_seconds)
    return None


def automatic(case: Case) -> Plan:
    return placer.auto_plan(*case.example(), precision="bf16", processes=True, **case.where)


def describe(plan: Plan) -> str:
    devices = sum(len(stage.devices) for stage in plan.stages)
    return f"{plan.replicas} x {len(plan.stages)} x {plan.microbatches} on {devices}"


def rate(case: Case) -> list[list[str]]:
    """The rows of the table for ``case``."""
    best = automatic(case)
    rows = [["**placer auto**", describe(best), f"{best.step_seconds:.3f}", "1"]]
    for rival, (processes, rule) in RIVALS.items():
        print(f" {rival}", flush=True)
        plan = best_of(case, rule(case), processes=processes)
        if plan is None:
            rows.append([rival, "", "does not fit", ""])
            continue
        slower = plan.step_seconds / best.step_seconds
        rows.append([rival, describe(plan), f"{plan.step_seconds:.3f}", f"{slower:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument(
        "--only", default="", help="cases whose name has this; others stay as they are"
    )
    only = parser.parse_args().only
    for name, case in CASES.items():
        if only in name:
            print(name, flush=True)
            rated = rate(case)
            known = json.loads(_FILE.read_text()) if _FILE.exists() else {}
            _FILE.write_text(json.dumps({**known, name: rated}, indent=1) + "\n")
    known = json.loads(_FILE.read_text())
    write_result(
        "rivals",
        "Common ways to train, by the same simulator",
        "python -m benchmarks.rivals",
        ["case", "way", "replicas x stages x micro-batches", "seconds of a step", "of auto's"],
        [
            [name * (number == 0), *row]
            for name in CASES
            for number, row in enumerate(known.get(name, [["not rated yet", "", "", ""]]))
        ],
        (__doc__ or "").partition("\n\n")[2],
    )


if __name__ == "__main__":
    main()
