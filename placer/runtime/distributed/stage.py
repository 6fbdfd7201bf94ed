"""One stage as the module that ``torch.distributed.pipelining`` drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from placer.capture import unflatten_output
from placer.runtime.distributed.boundary import Crossings, Wire, rebuild
from placer.runtime.distributed.faults import locate_failure
from placer.runtime.distributed.wire import from_wire, hollow, to_wire
from placer.runtime.place import CALLER
from placer.runtime.replica import Replica
from placer.runtime.transfer import transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One micro-batch of this replica; None for ``crossings`` means that it has no rows."""

    inputs: Mapping[str, Tensor]  # what the stages read of the model's own inputs, at the caller's
    crossings: Crossings | None
    inputs_here: bool = False  # are these on the rank's device already?
    leaves: Sequence[Tensor] = ()  # all of the model's inputs, flattened
    target: Any = None
    rows: int = 1


@dataclass(slots=True)
class Run:
    """One pass of a batch through this rank: what goes in, and what the last stage leaves here."""

    microbatches: Sequence[Microbatch]
    # A micro-batch's part of the loss of the batch, of its result; None: inference
    loss_of: Callable[[Microbatch, Any], Tensor] | None
    scale: float = 1.0
    losses: list[Tensor] = field(default_factory=list)
    results: dict[int, list[Any]] = field(default_factory=dict)

    def add_loss(self, loss: Tensor) -> Tensor:
        """Keep the loss of a micro-batch; returns what backward starts from."""
        self.losses.append(loss.detach())
        return loss if self.scale == 1.0 else loss * self.scale


class StageModule(nn.Module):
    """Takes the wires of a micro-batch, runs the stage's code on the rank's part, returns wires.

    The last stage computes the loss itself, so that only a scalar leaves it. A micro-batch without
    rows sends zeros and runs nothing.
    """

    def __init__(
        self,
        index: int,
        replica: Replica,
        part: nn.Module,
        after: tuple[Wire, ...] | None,
    ) -> None:
        super().__init__()
        self._index = index
        self._replica = replica
        self.__dict__["_part"] = part  # its parameters are those of the rank's part
        state = replica.staged.stages[index].state
        self._weights = [part.get_parameter(n) for n in state if _is_parameter(part, n)]
        self.after = after  # None for the last stage
        self.run: Run | None = None

    @property
    def part(self) -> nn.Module:
        """The rank's part, whose modules the stage runs."""
        part: nn.Module = self.__dict__["_part"]
        return part

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What this stage reads that is to get a gradient; split backwards ask for it.

        That are its parameters, and in a step the model's own inputs that require gradients.
        """
        given = self.run.microbatches if self.run is not None else ()
        inputs = (x for m in given for x in m.inputs.values() if x.requires_grad)
        return iter(dict.fromkeys((*self._weights, *inputs)))  # type: ignore[arg-type]

    def forward(self, *wires: Tensor, microbatch: int) -> Any:
        run = self.run
        assert run is not None
        given = run.microbatches[microbatch]
        if given.crossings is None:
            return self._nothing(run)
        phase = "forward"
        try:
            values = self._compute(wires, given, given.crossings)
            phase = "boundary"
            self._compare(values, given.crossings, run)
            if self.after is None:
                phase = "result"
                if run.loss_of is None:
                    run.results[microbatch] = values
                    return torch.zeros(1)
                output = unflatten_output(given.crossings.staged.call, values)
                phase = "loss_fn"
                return run.add_loss(run.loss_of(given, output))
            return tuple(to_wire(t, w.numel) for t, w in zip(values, self.after, strict=True))
        except Exception as error:
            code = given.crossings.staged.stages[self._index]
            raise locate_failure(code, phase, error) from error

    def _compute(
        self, wires: tuple[Tensor, ...], given: Microbatch, crossings: Crossings
    ) -> list[Any]:
        """The tensors that cross next; for the last stage the leaves of the result."""
        staged, index = crossings.staged, self._index
        replica, code = self._replica.with_program(staged), staged.stages[index]
        place = replica.places[index]
        replica.follow_attributes(self.part)
        values: dict[str, Any] = {}
        remaining = iter(wires)
        for value in crossings.boundaries[index - 1] if index else ():
            tensors = [from_wire(next(remaining), wire.shape) for wire in value.wires]
            values[value.name] = rebuild(value, tensors)
            del tensors
        for wire in wires:
            hollow(wire)
        last = index == len(staged.stages) - 1
        after = () if last else crossings.boundaries[index]
        kept = {value.name for value in after}
        if last:
            kept.update(str(name) for kind, name in staged.result if kind == "value")
        inputs = []
        for name in code.inputs:
            if name in staged.constants:
                inputs.append(replica.constant(name, place))
            elif name in given.inputs:
                own = given.inputs[name]
                # The caller's own is never written to.
                shared = given.inputs_here and name not in staged.written_inputs
                inputs.append(own if shared else transfer(own, CALLER, place))
            else:
                inputs.append(values[name] if name in kept else values.pop(name))
        outputs = replica.run_stage(self._part, code, inputs)
        values.update(zip(code.outputs, outputs, strict=True))
        if last:
            values.update({n: x for n, x in given.inputs.items() if n in kept})
            return [values[x] if kind == "value" else x for kind, x in staged.result]
        return [leaf for value in after for leaf in _tensors(values[value.name])]

    def _compare(self, values: list[Any], crossings: Crossings, run: Run) -> None:
        """Raise ``ValueError`` when the others expect other tensors, as found without data."""
        if self.after is None:  # a result is sent in inference only
            expected: Sequence[Any] = crossings.result if run.loss_of is None else ()
        else:
            expected = crossings.wires[self._index]
        for value, wire in zip(values, expected, strict=False):
            if not isinstance(wire, Wire):
                continue
            if not isinstance(value, Tensor):
                raise ValueError(f"hands on a {type(value).__name__} where others expect a tensor")
            if tuple(value.shape) != wire.shape:
                raise ValueError(
                    f"hands on a tensor of shape {list(value.shape)} where shapes alone say "
                    f"{list(wire.shape)}: a hook changed it, or it depends on the data; place the layers "
                    "that make it, and all after them, on the last device, and have them return other "
                    "shapes"
                )
            if value.dtype != wire.dtype:
                raise ValueError(
                    f"hands on a tensor of {value.dtype} where others expect {wire.dtype}: a hook changed "
                    "it; convert in the model, before placer.compile"
                )

    def _nothing(self, run: Run) -> Any:
        grad = run.loss_of is not None
        device = self._replica.places[self._index].device
        if self.after is None:
            return torch.zeros(() if grad else 1, device=device, requires_grad=grad)
        return tuple(
            torch.zeros(
                w.numel, dtype=w.dtype, device=device, requires_grad=grad and w.requires_grad
            )
            for w in self.after
        )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_parameter(part: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in part.get_submodule(path)._parameters
