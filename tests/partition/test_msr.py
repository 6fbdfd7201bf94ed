"""The published workloads: rules kept, optima reached and proven; the checker catches what it must."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.msr.__main__ import FOLDER, main, place
from benchmarks.msr.workload import Workload, check_placement, partition_problem
from placer.partition import solve

published = pytest.mark.skipif(not FOLDER.exists(), reason="the published workloads are not here")


@published
@pytest.mark.parametrize(
    "name", ["layer_gnmt_inference", "operator_bert_3_training", "operator_resnet50_training"]
)
def test_published_optima_are_reached_and_proven(name: str) -> None:
    known = json.loads((FOLDER / "optima.json").read_text())[name]["optimum"]
    found = place(FOLDER / f"{name}.json")
    assert found["max_load"] == pytest.approx(known, rel=1e-5)
    assert found["lower_bound"] == pytest.approx(found["max_load"], rel=1e-9)
    assert found["proven"]


@published
def test_the_command_prints_one_json_object(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(FOLDER / "layer_bert24_training.json")
    monkeypatch.setattr("sys.argv", ["msr", path, "--json"])
    main()
    found = json.loads(capsys.readouterr().out)
    assert {"file", "max_load", "lower_bound", "seconds", "devices"} <= set(found)
    assert len(found["devices"]) == 6


def _workload() -> Workload:
    """a -> b -> c forward, and the backward of a; moving an output takes 1."""
    nodes = [
        {"id": i, "fpgaLatency": t, "size": 1, "isBackwardNode": i == 4, "colorClass": c}
        for i, t, c in ((1, 3, 7), (2, 2, None), (3, 4, None), (4, 1, 7))
    ]
    edges = [{"sourceId": a, "destId": b, "cost": 1} for a, b in ((1, 2), (2, 3), (1, 3), (3, 4))]
    return Workload(
        name="tiny",
        data={"nodes": nodes, "edges": edges, "maxFPGAs": 2, "maxSizePerFPGA": 3},
    )


def test_the_checker_counts_by_the_files_rules() -> None:
    workload = _workload()
    # a and its backward: 4, a's output out, c's in; b and c: 6, a's in, c's out.
    assert check_placement(workload, [[1, 4], [2, 3]]) == 8
    solution = solve(partition_problem(workload))
    assert solution is not None and solution.optimality.proven
    assert solution.optimality.value == 8


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ([[1], [2, 3, 4]], "colour"),
        ([[1, 4, 2, 3], []], "holds 4"),
        ([[1, 4, 3], [2]], "not contiguous"),
        ([[1, 4], [2]], "not placed"),
        ([[1, 4, 2], [2, 3]], "on devices"),
    ],
)
def test_the_checker_refuses_what_breaks_a_rule(devices: list[list[int]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_placement(_workload(), devices)
