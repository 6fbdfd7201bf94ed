"""The fingerprint of a program: a hash of its graph and the names, shapes and dtypes of its state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import fx, nn


def fingerprint_graph(model: nn.Module, graph: fx.Graph, lines: Sequence[str]) -> str:
    """The SHA-256 of the graph in hexadecimal digits, which is the same in every process.

    ``lines`` are its `graph_lines`. It changes with every operation and argument, and with the names, shapes
    and dtypes of parameters and buffers; but not with constants that forward returns or stores, which need
    no operation.
    """
    output, number = graph.output_node(), {node: i for i, node in enumerate(graph.nodes)}
    computed = [number[node] for node in output.args[0] if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    text = "\n".join([*lines[:-1], f"output {computed}"])
    digest = hashlib.sha256(text.encode())
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            digest.update(f"{kind} {name} {list(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()


def graph_lines(graph: fx.Graph) -> tuple[str, ...]:
    """One line per node: operation, target and arguments. Nodes appear as numbers, not by name."""
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    return tuple(_line(node, number) for node in graph.nodes)


def varying_lines(
    graph: fx.Graph, results: Sequence[Any], labels: Mapping[fx.Node, str]
) -> list[str]:
    """Like `graph_lines`, with a line for the results; nodes with a label get no line of their own."""
    varying = [node for node in graph.nodes if node not in labels]
    number = {node: f"%{index}" for index, node in enumerate(varying)} | dict(labels)
    return [*(_line(node, number) for node in varying), _spell(results, number)]


def _line(node: fx.Node, labels: Mapping[fx.Node, str]) -> str:
    arguments = f"{_spell(node.args, labels)} {_spell(node.kwargs, labels)}"
    return f"{node.op} {_target_name(node.target)} {arguments}"


def _target_name(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    if getattr(target, "__module__", "") == "placer.program.targets":
        return repr(target) if not isinstance(target, FunctionType) else target.__qualname__
    module = getattr(target, "__module__", "")
    return f"{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def _spell(value: Any, labels: Mapping[fx.Node, str]) -> str:
    if type(value) is fx.Node:
        return labels[value]
    if isinstance(value, (str, int, float, bool, complex, bytes)) or value is None or value is ...:
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "(" + ",".join([_spell(item, labels) for item in value]) + ")"
    if isinstance(value, dict):
        return "{" + ",".join([f"{k!r}:{_spell(v, labels)}" for k, v in value.items()]) + "}"
    if isinstance(value, slice):
        return f"slice{_spell((value.start, value.stop, value.step), labels)}"
    if callable(value):
        return _target_name(value)
    # The default repr contains an address, which differs between processes.
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
