"""The published workloads: answers obey the rules and are near the optima, and errors are detected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.msr.__main__ import FOLDER, main, place
from benchmarks.msr.search import search_plainly, solve
from benchmarks.msr.workload import (
    Workload,
    WorkloadError,
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


def _node(number: int, **fields: object) -> dict[str, object]:
    node = {"id": number, "fpgaLatency": 1, "size": 1, "isBackwardNode": False}
    return {**node, **fields}


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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"nodes": None}, "'nodes': None; it must be of type list"),
        ({"maxFPGAs": 0}, "at least 1 device"),
        ({"maxFPGAs": True}, "it must be of type int"),
        ({"maxSizePerFPGA": float("nan")}, "it must be a number from 0 to 1e[+]300"),
        ({"maxSizePerFPGA": 10**400}, "it must be a number from 0 to 1e[+]300"),
        ({"nodes": [_node(1, colorClass=[7])], "edges": []}, "'colorClass': .7.; it must be of"),
        ({"nodes": [_node(1, isBackwardNode=None)], "edges": []}, "must be true or false"),
        ({"nodes": [_node(True)], "edges": []}, "'id': True; it must be of type int"),
        ({"nodes": [_node(1), _node(1)], "edges": []}, "the id 1 of an earlier node"),
        ({"nodes": [_node(1, supportedOnFpga=0)], "edges": []}, "not run on an accelerator"),
        ({"nodes": [_node(i, fpgaLatency=9e299) for i in (1, 2)], "edges": []}, "add up to more"),
        ({"edges": [{"sourceId": 1, "destId": 9, "cost": 1}]}, "no node: 9"),
        ({"edges": [{"sourceId": 1, "cost": 1}]}, "has no 'destId'"),
    ],
)
def test_a_file_that_is_no_workload_is_told_so(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(_workload().data | change))
    with pytest.raises(WorkloadError, match=problem):
        read_workload(path)
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(WorkloadError, match="JSON"):
            read_workload(path)


def _placed(data: dict[str, Any], path: Path) -> dict[str, Any]:
    path.write_text(json.dumps(data))
    return place(path)


def test_few_nodes_many_devices_and_cycles(tmp_path: Path) -> None:
    data = _workload().data
    path = tmp_path / "some.json"
    none = _placed({**data, "nodes": [], "edges": []}, path)
    assert none["max_load"] == 0 and none["devices"] == [[], []] and none["proven"]
    one = _placed({**data, "nodes": data["nodes"][:1], "edges": []}, path)
    assert one["max_load"] == 3 and one["proven"]
    single = _placed({**data, "maxFPGAs": 1, "maxSizePerFPGA": 4}, path)
    assert single["max_load"] == 10 and single["proven"]
    many = _placed({**data, "maxFPGAs": 9}, path)
    assert many["max_load"] == 7 and many["proven"] and len(many["devices"]) == 9
    back = {"sourceId": 3, "destId": 2, "cost": 1}  # 2 and 3 share a device then
    cycle = _placed({**data, "edges": [*data["edges"], back]}, path)
    assert cycle["max_load"] == 8 and cycle["proven"]


def test_a_device_may_be_full_but_for_rounding(tmp_path: Path) -> None:
    nodes = [_node(i, size=0.1) for i in range(6)]  # three of them: 0.30000000000000004
    data = {"nodes": nodes, "edges": [], "maxFPGAs": 2, "maxSizePerFPGA": 0.3}
    assert _placed(data, tmp_path / "full.json")["max_load"] == 3


def test_a_limit_that_nothing_keeps(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"keeps the limit of 1\.5 bytes"):
        _placed({**_workload().data, "maxSizePerFPGA": 1.5}, tmp_path / "small.json")


def test_operations_without_edges_go_where_they_cost_least(tmp_path: Path) -> None:
    """4 shares no value with the chain of three and is beside the one that leaves room for it."""
    data = _workload().data
    nodes = [*data["nodes"], _node(5, fpgaLatency=2, isBackwardNode=True)]
    edges = [*data["edges"], {"sourceId": 4, "destId": 5, "cost": 1}]
    found = _placed(
        {**data, "nodes": nodes, "edges": edges, "maxSizePerFPGA": 4}, tmp_path / "x.json"
    )
    assert found["max_load"] == check_placement(
        read_workload(tmp_path / "x.json"), found["devices"]
    )
    assert found["max_load"] >= found["lower_bound"]
