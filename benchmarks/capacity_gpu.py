"""How large a volume trains on GPUs of 16 GiB, counting the memory that torch's allocator reserves.

The edges of `benchmarks.capacity` count only the bytes of tensors. Here, a plan must fit with workspaces,
the bytes that the allocator reserves (with expandable segments), the context, and 2 % kept free. Kernels may
be starved of the workspace that they ask for, which makes them slower; the page says where, and has the
largest edge without that. All figures are predicted, not measured on a GPU. Nothing is allocated.

    python -m benchmarks.capacity_gpu [MODEL ...] [--devices N ...]

Models that are not named keep their figures in results/capacity_gpu.json. All take more than an hour.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.capacity import DEVICES, SUBJECTS, Subject
from benchmarks.loss import LOSS
from benchmarks.record import RESULTS, table, write_page
from placer.api import as_spec
from placer.plan.types import Plan
from placer.program import flatten_call, lower
from placer.simulation.judge import JudgingPlanner

MEMORY = 16  # GiB per device
METHODS: dict[str, Mapping[str, Any]] = {
    "placer, objective memory": {},
    "placer, checkpoint auto": {"checkpoint": "auto"},
}
_FILE = RESULTS / "capacity_gpu.json"


@dataclass(slots=True)
class Search:
    """Judged plans of one model, each made once."""

    subject: Subject
    planners: dict[int, JudgingPlanner] = field(default_factory=dict)
    plans: dict[Any, Plan] = field(default_factory=dict)

    def plan(self, method: str, devices: int, edge: int) -> Plan:
        if edge not in self.planners:
            with torch.device("meta"):
                x = torch.empty(1, self.subject.channels, edge, edge, edge)
            program = lower(self.subject.build().to("meta"), (x,))
            self.planners[edge] = JudgingPlanner(program, flatten_call(program.call, (x,), {}))
        key = method, devices, edge
        if key not in self.plans:
            named = [{"name": f"cuda:{i}", "memory": f"{MEMORY}GiB"} for i in range(devices)]
            spec = as_spec({"devices": named, "objective": "memory", **LOSS, **METHODS[method]})
            self.plans[key] = self.planners[edge](spec)
        return self.plans[key]

    def row(self, method: str, devices: int, tensors: int) -> dict[str, Any]:
        """The largest edge that fits, the workspaces starved there, and the largest edge without starved
        ones.

        ``tensors`` is the largest edge by the bytes of tensors, where the search begins. It goes up
        while edges fit, else down till one does: larger ones beyond that are not tried.
        """
        step, plan = self.subject.step, partial(self.plan, method, devices)
        edge = tensors
        if plan(edge).fits:
            while plan(edge + step).fits:
                edge += step
        else:
            while edge > step and not plan(edge).fits:
                edge -= step
        unstarved = edge
        while unstarved > step and _starved(plan(unstarved)):
            unstarved -= step
        return {
            "method": method,
            "devices": devices,
            "tensors": tensors,
            "edge": edge,
            "starved": _starved(plan(edge)),
            "unstarved": unstarved,
            "reserved": [d.reserved for d in plan(edge).devices],
        }


def _starved(plan: Plan) -> int:
    return sum(device.starved for device in plan.devices)


def rows(name: str, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of one model, on each of these numbers of devices."""
    known = json.loads((RESULTS / "capacity.json").read_text())[name]
    by_tensors = {
        (row["method"], row["devices"]): row["edge"] for row in known if row["memory_gib"] == MEMORY
    }
    search = Search(SUBJECTS[name])
    for devices in counts:
        for method in METHODS:
            began = time.process_time()
            row = search.row(method, devices, by_tensors[method, devices])
            print(name, row, f"{time.process_time() - began:.0f} CPU s", flush=True)
            yield row


def write(results: Mapping[str, list[dict[str, Any]]]) -> None:
    """The page: a line per model, method and number of devices."""
    lines = []
    for name, found in results.items():
        for row in found:
            starved = f"{row['starved']} per step" if row["starved"] else "none"
            known = (row[key] for key in ("method", "devices", "tensors", "edge"))
            lines.append([name, *known, starved, row["unstarved"]])
    header = ["model", "method", "devices", "edge by tensors", "edge by torch's allocator",
              "kernels that starve there", "edge where none does"]  # fmt: skip
    note = (
        f"Predicted, not yet measured on a GPU. Edge of the largest cube that one training step fits on "
        f"devices of {MEMORY} GiB: Adam, batch 1, fp32, multiples of 16 (SwinUNETR: 32). *By tensors*: the "
        "fullest device's tensors by dry run, nothing kept back "
        "([capacity](capacity.md)). *By torch's allocator*: with workspaces, what the allocator reserves "
        "(expandable segments), 520 MiB of context, and 2 % kept free. A kernel starves where it finds less "
        "memory to work in than it wants: the step runs, and is slower."
    )
    command = "python -m benchmarks.capacity_gpu"
    title = "The largest volume that trains on GPUs of 16 GiB"
    write_page("capacity_gpu", title, command, [*table(header, lines), note, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=[], help=", ".join(SUBJECTS))
    parser.add_argument("--devices", type=int, action="append", choices=DEVICES, default=[])
    given = parser.parse_args()
    unknown = [name for name in given.models if name not in SUBJECTS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    found: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    for name in given.models or SUBJECTS:
        for row in rows(name, given.devices or DEVICES):
            key = row["devices"], row["method"]
            others = [r for r in found.get(name, []) if (r["devices"], r["method"]) != key]
            order = list(METHODS)
            found[name] = sorted(
                [*others, row], key=lambda r: (r["devices"], order.index(r["method"]))
            )
            _FILE.write_text(json.dumps(found, indent=1) + "\n")
    write({name: found[name] for name in SUBJECTS if name in found})


if __name__ == "__main__":
    main()
