"""Generate functions that take their inputs in a list and clear it: PyTorch's "boxed" convention.

With plain arguments, the caller's frame would keep every input alive until the function returns.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

_numbers = itertools.count()
_ASSIGNMENT = re.compile(r"\s+(\w+)\s*(?::[^=]*)?=")
_NODES = "__placer_nodes__"  # the global of generated code that has the node of each line


def compile_graph(graph: fx.Graph) -> Callable[..., Any]:
    """The function ``forward(self, …)`` of ``graph``.

    This is not an ``fx.GraphModule``, whose properties (``code``, ``graph``) would clash with layers
    of the same names.
    """
    made = graph.python_code(root_module="self")
    file = f"<placer stage {next(_numbers)}>"
    # Tracebacks show the lines of this entry. Without a time it is never compared with a file.
    linecache.cache[file] = (len(made.src), None, made.src.splitlines(keepends=True), file)
    names = dict(made.globals)
    assigned = map(_ASSIGNMENT.match, made.src.split("\n"))
    names[_NODES] = {line: found[1] for line, found in enumerate(assigned, start=1) if found}
    exec(compile(made.src, file, "exec", dont_inherit=True), names)
    forward: Callable[..., Any] = names["forward"]
    return forward


def node_lines(code_globals: Mapping[str, Any]) -> Mapping[int, str] | None:
    """Line number -> name of the node that the line computes; None if the globals are of other code."""
    return code_globals.get(_NODES)


class BoxedCodeGen(CodeGen):
    """Writes ``def forward(self, device, boxed_inputs)``.

    The graph's first placeholder is the device. If the second one is named ``tree``, it gets the value
    of ``self``. All others are in the list.
    """

    def __init__(self, tree: str) -> None:
        super().__init__()
        self._tree = tree

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars]
        first, *boxed = names[1:] if names and names[0] == "self" else names
        box = "boxed_inputs"
        while box in names:
            box += "_"
        lines = [f"def forward(self, {first}, {box}){maybe_return_annotation}:"]
        if boxed and boxed[0] == self._tree:
            lines.append(f"    {boxed.pop(0)} = self")
        if boxed:
            lines.append(f"    {', '.join(boxed)}, = {box}")
            lines.append(f"    {box}.clear()")
        return "\n".join(lines)
