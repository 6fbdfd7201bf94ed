"""Build and capture the model that a command names, with its example inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from placer.api import check_layers, lower_call, takes_dict
from placer.cli.options import ModelOptions
from placer.cli.progress import progress
from placer.cli.target import build_model, load_example
from placer.cli.values import parse_values
from placer.cost import find_loss
from placer.inputs import parse_inputs
from placer.plan.types import Plan
from placer.program import IgnoreDeviceMoves, Program
from placer.spec import PlacementSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and the arguments for one call of it; ``target`` is MODEL on the command line."""

    target: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ignore_device_moves: bool = False

    @property
    def has_inputs(self) -> bool:
        """Was any argument of forward given?"""
        return bool(self.args or self.kwargs)

    def record(
        self,
        console: Console,
        wanted: PlacementSpec | Plan | None = None,
        *,
        searched: bool = False,
    ) -> tuple[Program, list[Tensor]]:
        """Capture the model, to be placed as ``wanted`` says. Returns the program and its input tensors."""
        if isinstance(wanted, PlacementSpec):
            check_layers(self.model, wanted)  # `lower_call` does it too, after it is said to record
            find_loss(wanted.loss)
        with progress(console, "recording the operations of the model"):
            given = wanted or PlacementSpec.model_validate({"devices": ["cpu"]})
            return self.captured(given, searched=searched)

    def captured(
        self, wanted: PlacementSpec | Plan, *, searched: bool
    ) -> tuple[Program, list[Tensor]]:
        """`record` without telling."""
        return lower_call(
            self.model,
            self.args,
            dict(self.kwargs),
            wanted,
            ignore_device_moves=self.ignore_device_moves,
            searched=searched,
        )


def load_model(
    options: ModelOptions,
    *,
    allocate: bool = False,
    double: bool = False,
    inputs_required: bool = True,
    seed: int = 0,
    moves: IgnoreDeviceMoves | None = None,
) -> LoadedModel:
    """Build the model that ``options`` name, and its inputs, on ``meta`` unless ``allocate`` is set.

    ``double`` converts all floating-point parameters, buffers and inputs to float64. ``seed`` is for
    weights and inputs, and ``moves`` is told of the model's own choice of devices. Arguments that a callable
    makes are used as they are, in memory or on ``meta``; a dict, or several named inputs, are one of them if
    forward has no arguments with the names of the keys. Raises ``PlacerError`` for invalid options, and if
    the model's own code raises an exception.
    """
    torch.manual_seed(seed)
    arguments = parse_values("--model-arg", options.model_arguments)
    if moves is None and options.ignore_device_moves:
        moves = IgnoreDeviceMoves()
    model = build_model(options.model, arguments, allocate=allocate, moves=moves)
    model.train(not options.evaluation)
    if double:
        model.double()
    args, kwargs = make_arguments(model, options, allocate=allocate, required=inputs_required)
    if double:
        args, kwargs = tree_map_only(Tensor, _to_double, (args, kwargs))
    return LoadedModel(
        target=options.model,
        model=model,
        args=args,
        kwargs=kwargs,
        ignore_device_moves=options.ignore_device_moves,
    )


def make_arguments(
    model: nn.Module, options: ModelOptions, *, allocate: bool, required: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of forward that ``options`` describe, on ``meta`` unless ``allocate`` is set."""
    shapes, examples = options.split_inputs()
    wanted = parse_inputs(shapes, required=required and not examples)
    kwargs = parse_values("--kwarg", options.keywords)
    args: tuple[Any, ...] = ()
    made: dict[str, Any] = {}
    for text in examples:
        args, made = load_example(text, values_needed=allocate)
    for item in wanted:
        tensor = item.random() if allocate else item.on_meta()
        if item.name is None:
            args += (tensor,)
        else:
            made[item.name] = tensor
    # A single wrong name is a mistake; more names than forward has arguments are the keys of a dict.
    several = len(made) > len(inspect.signature(model.forward).parameters)
    if not args and (examples or several) and takes_dict(model, made):
        args, made = (made,), {}
    return args, {**made, **kwargs}


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
