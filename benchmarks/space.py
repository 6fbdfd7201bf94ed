"""A U-Net split in space: memory of each shard, the largest volumes, and a step on this machine.

    python -m benchmarks.space [shares] [capacity] [networks] [ranks]

``networks`` are MONAI's SegResNet and DynUNet. All parts but ``ranks`` allocate nothing: they are dry runs of
every kind of rank, the first with a CPU's kernels, the others with an H100's and placer's model of torch's
allocator on devices of 16 GiB. ``ranks`` runs two processes with one thread each, and needs a quiet machine
with two cores. Parts that are not named keep their figures in results/space.json.

The loss is computed in forward, so that it is split too: a mean of squares, or cross-entropy with a target of
the volume's size. Training is with Adam, batch 1, fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from benchmarks.capacity import SUBJECTS
from benchmarks.distributed.timing import KEEP_FREED_MEMORY
from benchmarks.record import RESULTS, table, write_page
from examples.unet3d import unet3d
from placer.executor.distributed.runtime import runtime_of_rank
from placer.executor.places.place import CALLER
from placer.simulation.ranks import RankLedger

GIB = 2**30
SLABS: tuple[Any, ...] = (2, 4, 8, {"shards": 8, "grid": [2, 2, 2]})
CAPACITY: tuple[tuple[int, int, Any, bool], ...] = (  # edge, devices, grid, is recomputed
    (320, 2, None, True),
    (400, 4, None, True),
    (512, 8, None, True),
    (320, 4, None, False),
    (400, 8, None, False),
    (1024, 64, [4, 4, 4], True),
)
NETWORKS = {
    "SegResNet": {2: 240, 4: 288, 8: 368},
    "DynUNet": {2: 256, 4: 320, 8: 384},
}  # first edges
_STEP = 16
RANKS = ((96, 16, 1), (96, 16, 4), (96, 24, 1), (96, 24, 4))  # edge, width, chunks
_ROUNDS = 5


class WithLoss(nn.Module):
    """A network and its loss: cross-entropy if there is a target, else a mean of squares."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = self.network(x)
        return y.square().mean() if target is None else F.cross_entropy(y, target)


def is_itself(loss: Tensor) -> Tensor:
    """The result is the loss."""
    return loss


def _case(
    edge: int, width: int, *, classes: bool = False, device: str = "meta", network: str = ""
) -> Any:
    with torch.device(device):
        own = SUBJECTS[network].build() if network else unet3d(width=width, depth=4)
        model = WithLoss(own)
        inputs = [torch.empty(1, 1, edge, edge, edge)]
        if classes:
            inputs.append(torch.zeros(1, edge, edge, edge, dtype=torch.int64))
    return model, tuple(inputs)


def _plan(edge: int, shards: int, spec: dict[str, Any], **case: Any) -> placer.Plan:
    model, inputs = _case(edge, 32, **case)
    return placer.make_plan(model, spec, inputs, loss_fn=is_itself, processes=shards > 1)


def _peak(plan: placer.Plan) -> int:
    return max(device.peak for device in plan.devices)


def measure_shares() -> list[dict[str, Any]]:
    """The largest peak of a shard at 128³, beside that of one device."""
    rows = []
    for classes in (False, True):
        plain = _peak(_plan(128, 1, {"devices": ["cpu:0"]}, classes=classes))
        chunked = _peak(_plan(128, 1, {"devices": ["cpu:0"], "chunks": 16}, classes=classes))
        for space in SLABS:
            shards = space if isinstance(space, int) else space["shards"]
            spec = {
                "devices": [f"cpu:{i}" for i in range(shards)],
                "space": space if isinstance(space, dict) else {"shards": space, "grid": [space]},
                "chunks": 4,
            }
            plan = _plan(128, shards, spec, classes=classes)
            rows.append(
                {
                    "classes": classes,
                    "grid": "2x2x2" if isinstance(space, dict) else f"{shards} slabs",
                    "shards": shards,
                    "peak": _peak(plan),
                    "plain": plain,
                    "chunked": chunked,
                    "sent": plan.stages[0].exchanged_nbytes,
                }
            )
            print(rows[-1], flush=True)
    return rows


def measure_capacity() -> list[dict[str, Any]]:
    """Whether volumes train on devices of 16 GiB, with context, reserve and the allocator's blocks."""
    rows = []
    for edge, shards, grid, recomputed in CAPACITY:
        devices = [{"name": f"cuda:{i}", "memory": "16GiB", "kind": "h100"} for i in range(shards)]
        space = {"shards": shards, "grid": grid or [shards]}
        spec = {"devices": devices, "space": space, "chunks": 16}
        if recomputed:
            spec["checkpoint"] = "auto"
        began = time.process_time()
        plan = _plan(edge, shards, spec)
        worst = max(plan.devices, key=lambda device: device.needed)
        rows.append(
            {
                "edge": edge,
                "shards": shards,
                "grid": "x".join(map(str, space["grid"])),
                "recomputed": recomputed,
                "fits": plan.fits,
                "peak": worst.peak,
                "reserved": worst.reserved,
                "needed": worst.needed,
                "starved": max(device.starved for device in plan.devices),
                "sent": plan.stages[0].exchanged_nbytes,
                "seconds": plan.step_seconds,
                "planning": time.process_time() - began,
            }
        )
        print(rows[-1], flush=True)
    return rows


def measure_networks() -> list[dict[str, Any]]:
    """The largest cubes that other networks train on, and those that even shares of one device allow."""
    rows = []
    for network, starts in NETWORKS.items():
        for shards, start in starts.items():
            largest = _Largest(network, shards)
            edge = largest.search(start, largest.in_space)
            even = largest.search(edge, largest.by_even_shares)
            worst = max(largest.plan(edge).devices, key=lambda device: device.needed)
            notes = largest.plan(edge).notes
            rows.append(
                {
                    "network": network,
                    "shards": shards,
                    "edge": edge,
                    "even": even,
                    "peak": worst.peak,
                    "needed": worst.needed,
                    "starved": max(device.starved for device in largest.plan(edge).devices),
                    "gathered": sum("Gathered" in note for note in notes),
                }
            )
            print(rows[-1], flush=True)
    return rows


class _Largest:
    """Searches the largest cubes of a network; nothing is recomputed."""

    def __init__(self, network: str, shards: int) -> None:
        self._network, self._shards = network, shards
        self.plan = cache(self._plan)

    def _plan(self, edge: int, *, whole: bool = False) -> placer.Plan:
        shards = 1 if whole else self._shards
        memory = "1024GiB" if whole else "16GiB"
        devices = [{"name": f"cuda:{i}", "memory": memory, "kind": "h100"} for i in range(shards)]
        spec: dict[str, Any] = {"devices": devices}
        if not whole:
            spec |= {"space": {"shards": shards, "grid": [shards]}, "chunks": 16}
        return _plan(edge, shards, spec, network=self._network)

    def in_space(self, edge: int) -> bool:
        return self.plan(edge).fits

    def by_even_shares(self, edge: int) -> bool:
        """Would the plain model fit if what its allocator reserves could be divided evenly?"""
        (plain,) = self.plan(edge, whole=True).devices
        (device, *_) = self.plan(edge).devices
        assert device.budget is not None
        share = (plain.needed - plain.context) / self._shards + plain.context
        return share <= device.budget - device.reserve

    def search(self, edge: int, fits: Callable[[int], bool]) -> int:
        """The largest edge that fits, from one that is near."""
        if not fits(edge):
            return self.search(edge - _STEP, fits)
        while fits(edge + _STEP):
            edge += _STEP
        return edge


def measure_ranks() -> list[dict[str, Any]]:
    """CPU and wall seconds of a step in one process and in two, bytes sent, and each rank's peak."""
    os.environ |= KEEP_FREED_MEMORY
    rows = []
    for edge, width, chunks in RANKS:
        alone = _run(1, edge, width, 1)[0]
        both = _run(2, edge, width, chunks)
        model, inputs = _case(edge, width)
        spec = {"devices": ["cpu:0", "cpu:1"], "space": 2, "chunks": chunks}
        plan = placer.make_plan(model, spec, inputs, loss_fn=is_itself, processes=True)
        rows.append(
            {
                "edge": edge,
                "width": width,
                "chunks": chunks,
                "cpu": [alone["cpu"], max(rank["cpu"] for rank in both)],
                "wall": [alone["wall"], max(rank["wall"] for rank in both)],
                "sent": [rank["sent"] for rank in both],
                "counted": plan.stages[0].exchanged_nbytes,
                "peaks": [rank["peak"] for rank in both],
                "planned": [device.peak for device in plan.devices],
            }
        )
        print(rows[-1], flush=True)
    return rows


def _run(ranks: int, edge: int, width: int, chunks: int) -> list[dict[str, Any]]:
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (ranks, edge, width, chunks, results), nprocs=ranks)
    return sorted((results.get() for _ in range(ranks)), key=lambda row: row["rank"])


def _rank(rank: int, ranks: int, edge: int, width: int, chunks: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "LOCAL_RANK": str(rank)}
    torch.manual_seed(0)
    model, inputs = _case(edge, width, device="cpu")
    inputs[0].normal_()
    spec: dict[str, Any] = {"devices": ["cpu:0"]}
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        spec = {"devices": ["cpu:0", "cpu:1"], "space": 2, "chunks": chunks}
    placed = placer.compile(model, spec, inputs)
    optimizer = torch.optim.Adam(placed.parameters())

    def step() -> None:
        placed.step(*inputs, loss_fn=is_itself)
        optimizer.step()
        optimizer.zero_grad()

    step()
    cpu, wall = _least(step)
    found = {"rank": rank, "cpu": cpu, "wall": wall, "sent": 0, "peak": 0}
    if ranks > 1:
        exchange = runtime_of_rank(placed).exchange  # type: ignore[arg-type]
        before = exchange.sent_nbytes  # type: ignore[union-attr]
        ledger = RankLedger(kernels=lambda _: "cpu")
        ledger.add_state((*placed.parameters(), *placed.buffers()))
        for state in optimizer.state.values():
            ledger.add_state(x for x in state.values() if x.dim())
        ledger.add(inputs[0], CALLER, kind="input")
        with ledger:
            step()
        found["sent"] = exchange.sent_nbytes - before  # type: ignore[union-attr]
        found["peak"] = ledger.timeline().peaks()["rank"].nbytes
        dist.destroy_process_group()
    results.put(found)


def _least(step: Callable[[], None]) -> tuple[float, float]:
    """The least CPU and wall seconds of a few steps."""
    cpu, wall = [], []
    for _ in range(_ROUNDS):
        before = time.process_time(), time.perf_counter()
        step()
        cpu.append(time.process_time() - before[0])
        wall.append(time.perf_counter() - before[1])
    return min(cpu), min(wall)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"


def _page(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = ["## Memory of a shard at 128³, in 4 chunks", ""]
    lines += table(
        ["loss", "shards", "peak, GiB", "shares of the plain peak", "of it in chunks", "sent, MiB"],
        [
            (
                "cross-entropy" if row["classes"] else "mean of squares",
                row["grid"],
                f"{row['peak'] / GIB:.3f}",
                f"{row['shards'] * row['peak'] / row['plain']:.2f}",
                f"{row['shards'] * row['peak'] / row['chunked']:.2f}",
                f"{row['sent'] / 2**20:.0f}",
            )
            for row in found.get("shares", [])
        ],
    )
    lines += [
        "A share of 1 is the peak of one device, divided by the number of shards. Sent are the bytes of one "
        "shard in the middle per step, forward and backward.",
        "",
        "## Volumes on devices of 16 GiB, in 16 chunks",
        "",
    ]
    lines += table(
        [
            "edge",
            "devices",
            "recomputed",
            "fits",
            "tensors, GiB",
            "needed",
            "starved",
            "planned in",
        ],
        [
            (
                f"{row['edge']}³",
                f"{row['shards']} ({row['grid']})",
                "auto" if row["recomputed"] else "nothing",
                "yes" if row["fits"] else "no",
                _gib(row["peak"]),
                _gib(row["needed"]),
                row["starved"],
                f"{row['planning']:.0f} CPU s",
            )
            for row in found.get("capacity", [])
        ],
    )
    lines += [
        "Needed is what the process takes of the device: reserved by torch's allocator, and the context; 2 % "
        "of the memory are kept free besides. Starved are kernels without room for their workspace.",
        "",
        "## The largest cubes of other networks on devices of 16 GiB",
        "",
        "In 16 chunks, with nothing recomputed; edges are multiples of 16.",
        "",
    ]
    lines += table(
        ["network", "devices", "edge", "by even shares", "tensors, GiB", "needed", "starved"],
        [
            (
                row["network"],
                f"{row['shards']} slabs",
                f"{row['edge']}³",
                f"{row['even']}³",
                _gib(row["peak"]),
                _gib(row["needed"]),
                row["starved"],
            )
            for row in found.get("networks", [])
        ],
    )
    lines += [
        "By even shares: the largest cube for which the memory of the plain model on one device, divided by "
        "the number of devices, would fit. Chunks save what makes more possible.",
        "",
        "## A step in two processes of one thread, beside one process",
        "",
    ]
    lines += table(
        [
            "volume, width",
            "chunks",
            "CPU s",
            "ratio",
            "wall s",
            "ratio",
            "sent = counted, MiB",
            "peaks, MiB (planned)",
        ],
        [
            (
                f"{row['edge']}³, {row['width']}",
                row["chunks"],
                f"{row['cpu'][0]:.2f}, {row['cpu'][1]:.2f}",
                f"{row['cpu'][0] / row['cpu'][1]:.2f}",
                f"{row['wall'][0]:.2f}, {row['wall'][1]:.2f}",
                f"{row['wall'][0] / row['wall'][1]:.2f}",
                f"{max(row['sent']) / 2**20:.2f} = {row['counted'] / 2**20:.2f}",
                ", ".join(f"{p / 2**20:.1f}" for p in row["peaks"])
                + f" ({', '.join(f'{p / 2**20:.1f}' for p in row['planned'])})",
            )
            for row in found.get("ranks", [])
        ],
    )
    lines += [
        "CPU seconds of one process without chunks, and of a rank; the least of five steps.",
        "",
    ]
    return lines


def main() -> None:
    parts = {
        "shares": measure_shares,
        "capacity": measure_capacity,
        "networks": measure_networks,
        "ranks": measure_ranks,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=[[], *parts])
    asked = parser.parse_args().parts or list(parts)
    torch.set_num_threads(1)
    file = RESULTS / "space.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for part in asked:
        found[part] = parts[part]()
        file.write_text(json.dumps(found, indent=1) + "\n")
    write_page("space", "A U-Net split in space", "python -m benchmarks.space", _page(found))


if __name__ == "__main__":
    main()
