"""The published workloads: answers obey the rules and are near the optima, and errors are detected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.msr.__main__ import FOLDER, main, place
from benchmarks.msr.search import search_plainly, solve
from benchmarks.msr.workload import (
    Workload,
    check_placement,
    partition_problem,
    read_workload,
)
from placer.partition.solver.problem import largest_load

published = pytest.mark.skipif(not FOLDER.exists(), reason="the published workloads are not here")


@published
def test_a_published_optimum_is_reached_and_proven() -> None:
    known = json.loads((FOLDER / "optima.json").read_text())["operator_bert_6_inference"]["optimum"]
    found = place(FOLDER / "operator_bert_6_inference.json")
    assert found["max_load"] == pytest.approx(known, rel=1e-5)
    assert found["lower_bound"] == pytest.approx(found["max_load"], rel=1e-9)
    assert found["proven"]


@published
@pytest.mark.parametrize(
    ("name", "most"), [("operator_bert_6_inference", 1.0001), ("operator_resnet50_training", 1.01)]
)
def test_placers_own_search_is_near_published_optima(name: str, most: float) -> None:
    known = json.loads((FOLDER / "optima.json").read_text())[name]["optimum"]
    problem = partition_problem(read_workload(FOLDER / f"{name}.json"))
    found = search_plainly(problem)
    assert found is not None and largest_load(problem, found) <= most * known


@published
def test_the_command_prints_one_json_object(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(FOLDER / "layer_bert24_training.json")
    monkeypatch.setattr("sys.argv", ["msr", path, "--json"])
    main()
    found = json.loads(capsys.readouterr().out)
    assert {"file", "max_load", "lower_bound", "seconds", "devices"} <= set(found)
    assert len(found["devices"]) == 6


def _workload() -> Workload:
    """Forward a -> b -> c, and the backward of a; transferring an output takes 1."""
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
    assert solution is not None and solution.proven
    assert solution.value == 8
