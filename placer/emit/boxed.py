"""Generate functions that take their inputs in a list and clear it: PyTorch's "boxed" convention.

With plain arguments, the caller's frame would keep every input alive until the function returns.
"""

from __future__ import annotations

from typing import Any

from torch.fx.graph import CodeGen


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
        lines = [f"def {self._func_name}(self, {first}, {box}){maybe_return_annotation}:"]
        if boxed and boxed[0] == self._tree:
            lines.append(f"    {boxed.pop(0)} = self")
        if boxed:
            lines.append(f"    {', '.join(boxed)}, = {box}")
            lines.append(f"    {box}.clear()")
        return "\n".join(lines)
