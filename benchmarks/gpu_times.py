"""Seconds on a GPU: rates fitted to times on one H100, and their predictions for models kept out of the fit.

The times of the operations of 8 models, and of single convolutions, come from files that are not part of
this repository (``--data``); the fitted rates are in `placer.machine.h100`. Every model's operations are
recorded by `placer.cost` in a dry run, and matched with the measured ones by name and shapes.

    python -m benchmarks.gpu_times --data FOLDER             # fit, compare, write the page
    python -m benchmarks.gpu_times --data FOLDER --before OLD.json    # … with another estimate beside
    python -m benchmarks.gpu_times --data FOLDER --rates              # only fit, and print the rates
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from benchmarks.gpu_cases import (
    PROFILED,
    GPUCase,
    capped_case,
    capped_usage,
    case_costs,
    case_plan,
)
from benchmarks.loss import MEAN_SQUARE
from benchmarks.record import table, write_page
from placer.cost import CostTable, estimate_costs, storages
from placer.cost.operations import Operation
from placer.machine import catalogue
from placer.machine.catalogue import CATALOGUE
from placer.machine.h100 import H100_PEAKS
from placer.machine.rates import CLASSES, HEAVY, Key, Rate, Rates, complete_rates, with_launch
from placer.partition.stage_cost.optimizer import optimizer_seconds
from placer.program import Program, flatten_call, lower

_SAME = {  # the profiler's names, and those of the operations that a dry run makes
    "clamp_min": "relu", "_to_copy": "copy", "clone": "copy",
    "cudnn_convolution": "convolution", "cudnn_convolution_transpose": "convolution",
    "native_batch_norm": "batch_norm", "cudnn_batch_norm": "batch_norm",
    "native_batch_norm_backward": "batch_norm_backward",
    "cudnn_batch_norm_backward": "batch_norm_backward",
}  # fmt: skip
_ATTENTION = {
    "_efficient_attention_forward": "attention", "_cudnn_attention_forward": "attention",
    "_efficient_attention_backward": "attention_backward",
    "_cudnn_attention_backward": "attention_backward",
}  # fmt: skip
_CLEAR = 1e-3  # seconds: convolutions by themselves were timed with their launch, 0.2 ms
_TILES = (1, 32, 64, 128)
_ADAM_PASSES = 19
_CONVOLUTIONS = ("convolution", "convolution_input", "convolution_weight")
_TRANSPOSED = tuple(f"transposed_{name}" for name in _CONVOLUTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Calls that ran the same operations: seconds per call, and the number of calls in a step."""

    family: str
    operations: tuple[Operation, ...]
    seconds: float
    count: int
    host: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measured step; of a capped one also the GiB that were reserved, of 15.49.

    ``starved``: the workspaces that find no room in three steps, by the model of the allocator.
    """

    name: str
    family: str
    subject: GPUCase
    seconds: float
    reserved: float | None = None
    starved: int = 0


def _normal(name: str) -> str:
    name = name.removeprefix("aten::").rstrip("_")
    return _SAME.get(name, name)


def _build(case: GPUCase) -> tuple[Any, Any]:
    try:
        with torch.device("meta"):
            return case.build()
    except RuntimeError:  # it reads a value of a tensor
        model, x = case.build()
        return model, x.to("meta")


def recorded_operations(case: GPUCase) -> tuple[dict[Any, tuple[Operation, ...]], int]:
    """Name and shapes of every operation of a dry run -> what it is; bytes that are trained."""
    model, x = _build(case)
    program = lower(model, (x,))
    found: dict[Any, tuple[Operation, ...]] = {}
    real = storages.operations_of

    def spy(op: Any, args: Any, kwargs: Any, result: Any, inputs: Any, outputs: Any) -> Any:
        ran = real(op, args, kwargs, result, inputs, outputs)
        if ran:
            name = _normal(op._schema.name.partition("::")[2])
            found.setdefault(_key(name, [list(t.shape) for t in inputs]), ran)
            if ran[0].name.startswith("attention"):
                found[ran[0].name] = ran
        return ran

    with mock.patch.object(storages, "operations_of", spy):
        costs = estimate_costs(
            program,
            flatten_call(program.call, (x,), {}),
            precision=case.fields.get("precision", "fp32"),
            kernels="cuda",
            loss=MEAN_SQUARE,
        )
    return found, costs.trained_nbytes


def _key(name: str, shapes: Sequence[Sequence[int]]) -> Any:
    if name in _ATTENTION:
        return _ATTENTION[name]
    kept = [tuple(s) for s in shapes if s]
    return name, tuple(kept[:2] if name == "convolution" else kept)


def operation_rows(data: Path) -> tuple[list[Row], dict[str, float]]:
    """The rows of operations.json that could be matched, and their share of each model's time."""
    measured = json.loads((data / "operations.json").read_text())["models"]
    rows, shares = [], {}
    for model, case in PROFILED.items():
        known, trained = recorded_operations(case)
        total = matched = optimizer = 0.0
        for name, shapes, count, device_us, host_us in measured[model]["ops"]:
            seconds = device_us * 1e-6 / count
            total += device_us
            if name.startswith("aten::_foreach"):
                optimizer += device_us * 1e-6
                matched += device_us
                continue
            ran = known.get(_key(_normal(name), json.loads(shapes)))
            if ran is None or not device_us:
                continue
            matched += device_us
            host = host_us * 1e-6 / count
            rows.append(
                Row(family=case.family, operations=ran, seconds=seconds, count=count, host=host)
            )
        adam = Operation("optimizer", "float32", 0, _ADAM_PASSES * trained, 0)
        rows.append(Row(family=case.family, operations=(adam,), seconds=optimizer, count=1))
        shares[model] = matched / total
    return rows, shares


def convolution_rows(data: Path) -> list[Row]:
    """The rows of convolutions.json that take so long that their launch does not matter."""
    rows = []
    for row in json.loads((data / "convolutions.json").read_text())["rows"]:
        dtype = "half" if row["dtype"] == "bfloat16" else "float32"
        x, weight, groups = row["input"], row["weight"], row["groups"]
        out = _output_shape(row)
        base = math.prod(x) if row["transposed"] else math.prod(out)
        flops = 2 * base * math.prod(weight[1:])
        size = 2 if dtype == "half" else 4
        nbytes = size * (math.prod(x) + math.prod(weight) + math.prod(out))
        names = _TRANSPOSED if row["transposed"] else _CONVOLUTIONS
        widths = (out[1] // groups, x[1] // groups, out[1] // groups)
        for name, part, width in zip(
            names, ("forward", "grad_input", "grad_weight"), widths, strict=True
        ):
            seconds = row[part][1] * 1e-6
            if seconds < _CLEAR or (
                part == "grad_input" and x[1] <= 3
            ):  # an image needs no gradient
                continue
            ran = (Operation(name, dtype, flops, nbytes, width),)
            rows.append(Row(family=_owner(weight), operations=ran, seconds=seconds, count=1))
    return rows


def _owner(weight: Sequence[int]) -> str:
    """The families that have a weight of this shape, to keep them out of a fit."""
    return "/".join(sorted(_FAMILIES_OF.get(tuple(weight), {"none"})))


_FAMILIES_OF: dict[tuple[int, ...], set[str]] = {}


def note_weights() -> None:
    """Record which families have weights of which shapes."""
    for case in PROFILED.values():
        for parameter in _build(case)[0].parameters():
            _FAMILIES_OF.setdefault(tuple(parameter.shape), set()).add(case.family)


def _output_shape(row: Mapping[str, Any]) -> list[int]:
    x, weight, found = row["input"], row["weight"], []
    for d in range(len(x) - 2):
        n, k, s, p = x[2 + d], weight[2 + d], row["stride"][d], row["padding"][d]
        reach = row["dilation"][d] * (k - 1)
        if row["transposed"]:
            found.append((n - 1) * s - 2 * p + reach + row["output_padding"][d] + 1)
        else:
            found.append((n + 2 * p - reach - 1) // s + 1)
    channels = weight[1] * row["groups"] if row["transposed"] else weight[0]
    return [x[0], channels, *found]


def fit(rows: Sequence[Row]) -> Rates:
    """The rates that fit ``rows`` best: least softened squares of log(predicted / measured)."""
    table: dict[Key, Rate] = {}
    for dtype in ("float32", "half"):
        for names in (_CONVOLUTIONS, _TRANSPOSED):
            found = _fit_together([(name, dtype) for name in names], rows, tiled=True)
            table |= found
        for name in CLASSES:
            if "convolution" not in name:
                table |= _fit_together([(name, dtype)], rows, tiled=False)
    return complete_rates(_determined(table, rows), H100_PEAKS)


def _determined(table: Mapping[Key, Rate], rows: Sequence[Row]) -> dict[Key, Rate]:
    """``table`` without rates fitted to fewer rows than they have parameters, if the other dtype has enough.

    Otherwise one odd convolution would decide for all, as that of a 3-channel image in half precision did.
    """
    count = Counter((o.name, o.dtype) for row in rows for o in row.operations)

    def enough(key: Key) -> bool:
        return key in table and count[key] >= (3 if table[key].flops else 2)

    return {
        key: rate
        for key, rate in table.items()
        if enough(key) or not enough((key[0], "float32" if key[1] == "half" else "half"))
    }


def _fit_together(keys: Sequence[Key], rows: Sequence[Row], *, tiled: bool) -> dict[Key, Rate]:
    """One rate for each of ``keys``; {} where none of the rows is of them."""
    mine = [r for r in rows if {(o.name, o.dtype) for o in r.operations} <= set(keys)]
    present = {(o.name, o.dtype) for r in mine for o in r.operations}
    keys = [key for key in keys if key in present]
    if not keys:
        return {}
    target = np.array([r.seconds for r in mine])
    weights = np.sqrt(np.array([r.count * r.seconds for r in mine]) ** 0.5)
    peaks = [H100_PEAKS.of(key) for key in keys]
    rowed = [any(o.width for r in mine for o in r.operations) and "norm" in k[0] for k in keys]
    matrix = ["convolution" in k[0] or k[0] in ("product", "unaligned_product", "attention",
              "attention_backward", "recurrent") for k in keys]  # fmt: skip

    def rates(x: Any, tiles: Sequence[int]) -> dict[Key, Rate]:
        made = {}
        for i, key in enumerate(keys):
            overhead, flops, bandwidth, row = np.exp(x[4 * i : 4 * i + 4])
            made[key] = Rate(
                overhead=overhead,
                flops=flops if matrix[i] else 0.0,
                bandwidth=bandwidth,
                row_bandwidth=row if rowed[i] else 0.0,
                tile=tiles[i],
            )
        return made

    best: tuple[float, dict[Key, Rate]] | None = None
    low, high = [], []
    starts: list[list[float]] = [[], []]
    for peak in peaks:
        for start, row in zip(starts, (2e10, 2e9), strict=True):
            start += [math.log(v) for v in (4e-6, peak / 3, 1e12, row)]
        low += [math.log(v) for v in (1e-6, peak / 1e3, 5e10, 1e9)]
        high += [math.log(v) for v in (2e-5, peak, H100_PEAKS.bandwidth, 1e12)]
    choices = [(1,) * len(keys)]
    if tiled:  # forward and the input's gradient are the same kernels, with other numbers
        ending = [key[0].endswith("_weight") for key in keys]
        choices = [tuple(b if w else a for w in ending) for a, b in product(_TILES, repeat=2)]
    for tiles in choices:

        def off(x: Any, tiles: Sequence[int] = tiles) -> Any:
            made = rates(x, tiles)
            said = [
                sum(made[o.name, o.dtype].seconds(o.flops, o.nbytes, o.width) for o in r.operations)
                for r in mine
            ]
            return np.log(np.array(said) / target) * weights

        for start in starts if any(rowed) else starts[:1]:
            found = least_squares(off, start, bounds=(low, high), loss="soft_l1", f_scale=0.02)
            if best is None or found.cost < best[0]:
                best = found.cost, rates(found.x, tiles)
    assert best is not None
    return best[1]


def launch_seconds(rows: Sequence[Row]) -> tuple[float, float]:
    """The median of the host's seconds per light and per heavy operation, in the profiler's own time."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for row in rows:
        if row.host and row.count > 1:
            heavy = row.operations[0].name in HEAVY
            found[heavy] += [row.host / len(row.operations)] * row.count
    return float(np.median(found[False])), float(np.median(found[True]))


def fit_launch(rates: Rates, rows: Sequence[Row], known: Sequence[Case]) -> Rates:
    """``rates`` with the launches that explain ``known`` steps best.

    One number: how many times longer than the profiler's time in an operation the host takes for it,
    with the Python around it.
    """
    light, heavy = launch_seconds(rows)
    factors = np.arange(0.5, 4.01, 0.1)

    def off(factor: float) -> float:
        found = _with_launch(rates, factor * light, factor * heavy)
        return sum(abs(math.log(_step(case.subject, found) / case.seconds)) for case in known)

    best = float(min(factors, key=off))
    return _with_launch(rates, best * light, best * heavy)


def _with_launch(rates: Rates, light: float, heavy: float) -> Rates:
    return with_launch(rates, light=light, product=heavy, convolution=heavy)


_KNOWN: dict[int, tuple[Program, Sequence[Tensor], CostTable]] = {}


def _costs(case: GPUCase) -> tuple[Program, Sequence[Tensor], CostTable]:
    """The case's program, its inputs, and its costs, which no rate changes."""
    if id(case) not in _KNOWN:
        model, x = _build(case)
        program = lower(model, (x,))
        leaves = flatten_call(program.call, (x,), {})
        _KNOWN[id(case)] = program, leaves, case_costs(program, leaves, case)
    return _KNOWN[id(case)]


def _step(case: GPUCase, rates: Rates) -> float:
    """Seconds of a step on one device that keeps everything, as a plan estimates them."""
    costs = _costs(case)[2]
    kind = replace(CATALOGUE["h100"], rates=rates)
    found = costs.work.seconds(kind)
    passes = [max(p.device.sum(), p.host.sum()) for p in (found.forward, found.backward)]
    trained = costs.trained_nbytes
    return float(sum(passes)) + optimizer_seconds(trained, "adam", kind)


def predict(case: GPUCase, rates: Rates | None = None) -> float:
    """Seconds of a step that a plan for one H100 estimates, with these rates instead of the catalogue's."""
    program, leaves, costs = _costs(case)
    kind = CATALOGUE["h100"]
    known = kind if rates is None else replace(kind, rates=rates)
    with mock.patch.dict(catalogue.CATALOGUE, {"h100": known}):
        return case_plan(program, leaves, case, costs).step_seconds


def cases(data: Path) -> list[Case]:
    """The steps of operations.json, and those of fits_16GiB.json that trained."""
    measured = json.loads((data / "operations.json").read_text())["models"]
    found = [
        Case(
            name=name,
            family=case.family,
            subject=case,
            seconds=measured[name]["step_ms_median"] / 1e3,
        )
        for name, case in PROFILED.items()
    ]
    best: dict[str, tuple[Case, Any]] = {}
    for row in json.loads((data / "fits_16GiB.json").read_text()):
        if not row["trained"]:
            continue
        words = [w for w in ("checkpoint", "offload", "precision") if w in row]
        words = [row[word] if word == "precision" else word for word in words]
        name = " ".join([row["model"], f"{row['edge']}³", *words])
        subject = capped_case(row)
        case = Case(
            name=name,
            family=row["model"],
            subject=subject,
            seconds=row["step_s"],
            reserved=row["reserved"],
        )
        if (
            name not in best or case.seconds < best[name][0].seconds
        ):  # of both allocators the better
            best[name] = case, row
    return [*found, *(replace(c, starved=capped_usage(row).starved) for c, row in best.values())]


def write_rates(rates: Rates, measured: Iterable[Key]) -> None:
    """Print the table of `placer.machine.h100`."""
    for key in measured:
        r = rates[key]
        cells = (r.overhead * 1e6, r.flops / 1e12, r.bandwidth / 1e9, r.row_bandwidth / 1e9)
        numbers = ", ".join(f"{value:.3g}" for value in cells)
        print(f"    {json.dumps(key[0])}, {json.dumps(key[1])}: ({numbers}, {r.tile}),")


def _quantiles(ratios: Sequence[float]) -> str:
    if not ratios:
        return "not known"
    off = np.abs(np.array(ratios) - 1)
    return " / ".join(f"{np.quantile(off, q):.0%}" for q in (0.5, 0.8, 1.0))


def write_results(
    rows: Sequence[Row], shares: Mapping[str, float], known: Sequence[Case],
    before: Mapping[str, float],
) -> None:  # fmt: skip
    """The page: the fit per class, and every step as predicted with its family kept out of the fit."""
    profiled = [case for case in known if case.name in PROFILED]
    whole = fit_launch(fit(rows), rows, profiled)
    cells, now, held = [], [], []
    roomy = []  # of the steps in which every kernel has the workspace that it wants, as ``held``
    for family in dict.fromkeys(case.family for case in known):
        rest = [r for r in rows if family not in r.family.split("/")]
        others = [case for case in profiled if case.family != family]
        kept_out = whole if len(rest) == len(rows) else fit_launch(fit(rest), rest, others)
        for case in (c for c in known if c.family == family):
            said = [predict(case.subject, rates) for rates in (whole, kept_out)]
            ratios = [value / case.seconds for value in said]
            now.append(ratios[0])
            held.append(ratios[1])
            roomy += [] if case.starved else [ratios[1]]
            old = before.get(case.name)
            cells.append(
                [
                    case.name,
                    "" if case.reserved is None else f"{case.reserved:.2f}",
                    case.starved or "",
                    f"{case.seconds * 1e3:.1f}",
                    "" if old is None else f"{old * 1e3:.1f} ({old / case.seconds:.2f})",
                    *(f"{v * 1e3:.1f} ({r:.2f})" for v, r in zip(said, ratios, strict=True)),
                ]
            )
            print(cells[-1], flush=True)
    past = [before[c.name] / c.seconds for c in known if c.name in before]
    within = {
        name: f"{sum(abs(r - 1) <= 0.25 for r in ratios)} of {len(ratios)}"
        for name, ratios in (("before", past), ("now", now), ("held", held), ("roomy", roomy))
    }
    spread = {"before": _quantiles(past), "now": _quantiles(now), "held": _quantiles(held)}
    lines = [
        "Seconds of a whole training step (Adam), measured and as a plan says them for "
        '`"kind": "h100"`, where it recomputes and offloads what was recomputed and offloaded then; in '
        "brackets predicted / measured. *Before* is the estimate of one rate of "
        "FLOPs and one bandwidth. *Kept out*: the rates are fitted anew without the rows of that "
        "family of models, and a class that nothing else measures takes the rate of one like it.",
        "",
        *table(
            ["step", "reserved, GiB", "starved", "measured, ms", "before", "now", "kept out"], cells
        ),
        f"Within 25 %: {within['before']} before, {within['now']} now, {within['held']} kept out. "
        f"Off by, median / 80th percentile / most: {spread['before']} before, {spread['now']} now, "
        f"{spread['held']} kept out.",
        "",
        f"**Without starved kernels: {within['roomy']} kept out are within 25 %.** *Starved* are the "
        "workspaces that find no room in three steps, by the dry run and the model of the allocator alone "
        "(`benchmarks.reserved`). A plan with such kernels says that they will run slower, not how much: "
        "such steps took 1.0 to 7.3 times what is predicted now.",
        "",
        "Rows with bytes reserved are of a GPU held to 16 GiB (15.49 GiB for the allocator), the faster "
        "of both modes of the allocator. What is moved to "
        "the host and back counts with 0.65 of the link's 64 GB/s. Of the two steps that offload, one took "
        "597 ms longer than its operations are said to, for 31.8 GB out and back (0.83 of the link), the "
        "other 1,253 ms for 49.4 GB (0.62, with 6 starved kernels in three steps): copies and kernels took "
        "turns on one stream.",
        "",
        "## The fit per class",
        "",
        "Seconds of an operation = overhead + FLOPs / rate + bytes / bandwidth. Columns are padded to "
        "the tile; a normalisation's bandwidth is at most that of a row times its rows. Of the device "
        "time of the 8 models, the rows found again are "
        + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        + ". Convolutions by themselves count where they took a millisecond or more.",
        "",
    ]
    fits = []
    for key in whole.table:
        mine = [r for r in rows if (r.operations[0].name, r.operations[0].dtype) == key]
        if not mine:
            continue
        said = [
            sum(whole[o.name, o.dtype].seconds(o.flops, o.nbytes, o.width) for o in r.operations)
            for r in mine
        ]
        ratios = [s / r.seconds for s, r in zip(said, mine, strict=True)]
        total = sum(s * r.count for s, r in zip(said, mine, strict=True))
        truth = sum(r.seconds * r.count for r in mine)
        rate = whole[key]
        fits.append(
            [
                f"{key[0]}, {key[1]}",
                len(mine),
                f"{rate.overhead * 1e6:.3g}",
                f"{rate.flops / 1e12:.3g}" if rate.flops else "",
                f"{rate.bandwidth / 1e9:.4g}",
                f"{rate.row_bandwidth / 1e9:.3g}" if rate.row_bandwidth else "",
                rate.tile if rate.tile > 1 else "",
                f"{sum(abs(x - 1) <= 0.25 for x in ratios) / len(ratios):.0%}",
                _quantiles(ratios),
                f"{total / truth:.2f}",
            ]
        )
    header = ["class", "rows", "overhead, µs", "TFLOP/s", "GB/s", "GB/s per row", "tile",
              "within 25 %", "off by, median / 80 % / most", "sum / measured"]  # fmt: skip
    lines += table(header, fits)
    light, heavy = (whole[name, "float32"].launch for name in ("pointwise", "convolution"))
    lines += [
        f"A convolution's two gradients are one row. Launching takes the host {light * 1e6:.0f} µs "
        f"for an operation, {heavy * 1e6:.0f} µs for a convolution, a product or attention.",
        "",
        "Source of the times: one NVIDIA H100 80GB HBM3, driver 580, torch 2.11.0+cu130, cuDNN 9.19, "
        "2026-11-22. The page was computed, not measured, on the machine below.",
        "",
    ]
    write_page(
        "gpu_times",
        "Seconds on an H100, predicted and measured",
        "python -m benchmarks.gpu_times --data FOLDER",
        lines,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of operations.json")
    parser.add_argument("--before", type=Path, help="step seconds of an earlier estimate (JSON)")
    parser.add_argument("--rates", action="store_true", help="only fit, and print the rates")
    given = parser.parse_args()
    note_weights()
    rows, shares = operation_rows(given.data)
    rows += convolution_rows(given.data)
    known = cases(given.data)
    if given.rates:
        profiled = [case for case in known if case.name in PROFILED]
        found = {(o.name, o.dtype) for row in rows for o in row.operations}
        whole = fit_launch(fit(rows), rows, profiled)
        write_rates(whole, [key for key in whole.table if key in found])
        print([whole[name, "float32"].launch for name in ("pointwise", "convolution")])
        return
    before = json.loads(given.before.read_text()) if given.before else {}
    write_results(rows, shares, known, before)


if __name__ == "__main__":
    main()
