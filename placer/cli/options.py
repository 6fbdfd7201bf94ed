"""The arguments and options that several commands share. This file does not import torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import typer

from placer.cli.fields import OptionGroup
from placer.cli.output import human_console
from placer.cli.progress import progress
from placer.cli.values import parse_values
from placer.errors import PlacerError
from placer.inputs import is_example, parse_inputs

if TYPE_CHECKING:
    from rich.console import Console

    from placer.cli.loaded_model import LoadedModel
    from placer.plan.types import Plan
    from placer.spec import LossSpec, PlacementSpec

REPEATABLE: dict[str, Any] = {"default_factory": list, "show_default": False}
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:callable or path/file.py:callable that returns the model "
        "(a class or a function).",
    ),
]
Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="Placement spec (JSON, YAML or TOML).")]
SpecOrPlan = Annotated[
    Path | None,
    typer.Argument(
        metavar="[SPEC]",
        help="Placement spec (JSON, YAML or TOML) or saved plan. Without it, MODEL is a saved plan.",
    ),
]
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="An input of forward, such as 1x3x224x224 or mask=4x16:bool; repeatable. "
        "16x64:int64<50257 are integers from 0 to 50256. Or path/file.py:callable that returns the "
        "arguments of forward, which may be lists and dicts of tensors.",
        **REPEATABLE,
    ),
]
Keywords = Annotated[
    list[str],
    typer.Option(
        "--kwarg",
        metavar="KEY=VALUE",
        help="An argument of forward that is not a tensor; repeatable.",
        **REPEATABLE,
    ),
]
ModelArguments = Annotated[
    list[str],
    typer.Option(
        "--model-arg",
        "-m",
        metavar="KEY=VALUE",
        help="An argument of MODEL, such as width=32; repeatable.",
        **REPEATABLE,
    ),
]
Evaluation = Annotated[
    bool, typer.Option("--eval", help="Put the model into eval mode (default: training mode).")
]
IgnoreDeviceMoves = Annotated[
    bool,
    typer.Option(
        "--ignore-device-moves",
        help="For a model that was split by hand: ignore the devices that its code moves tensors "
        'and layers to, as in x.to("cuda:1").',
    ),
]
Page = Annotated[
    Path | None, typer.Option("--html", metavar="PAGE", help="Write the plan as an HTML page here.")
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Explain why each stage ends where it does.")
]
Saved = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan saved by 'plan -o' (JSON).")]
Processes = Annotated[
    bool,
    typer.Option(
        "--processes",
        help="Plan for one process per device, as under torchrun, instead of a single process.",
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="NAME",
        help="The loss whose memory is counted: a function of torch.nn.functional, such as cross_entropy; "
        "mean_square; or path/file.py:callable, which gets the result and the target.",
    ),
]
Target = Annotated[
    list[str],
    typer.Option(
        "--target",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="The target of the loss for the whole batch, written like --input, such as "
        "2x128x128:int64<105; several are a tuple, or with names a dict. Or path/file.py:callable that "
        "returns it.",
        **REPEATABLE,
    ),
]
WholeBatch = Annotated[
    bool,
    typer.Option(
        "--whole-batch",
        help="The loss is computed once, over all micro-batches and replicas, as with "
        "placed.step(…, whole_batch=True).",
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="A file that 'placer profile' wrote for this model, or 'placer calibrate' for the "
        "device: times on all devices of that type are estimated from it.",
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="Kind of the devices, such as a100 or h100, or a file that 'placer calibrate' wrote.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Only JSON on stdout; human-readable text on stderr.")
]


def to_file(metavar: str, help_text: str) -> Any:
    """The option that names the file of a command's result."""
    return typer.Option("--output", "-o", metavar=metavar, help=help_text)


_SpecOrPlan = TypeVar("_SpecOrPlan", bound="PlacementSpec | Plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The options that name the loss whose memory is counted. Its function is not imported here."""

    loss: Loss = None
    target: Target
    whole_batch: WholeBatch = False

    def spec(self, default: LossSpec | None = None) -> LossSpec | None:
        """The loss that the options name, or ``default``. Raises ``PlacerError`` if it is no loss."""
        from pydantic import ValidationError

        from placer.spec.loss import LossSpec

        given = {"function": self.loss, "target": self.target, "whole_batch": self.whole_batch}
        given = {name: value for name, value in given.items() if value}
        if not given:
            return default
        if self.loss is None and default is None:
            option = "--target" if self.target else "--whole-batch"
            raise PlacerError(option, "is given without a loss", "give --loss too")
        named = {} if default is None or self.loss is not None else dict(default)
        try:
            return LossSpec.model_validate({**named, **given})
        except ValidationError as error:
            (detail, *_) = error.errors()
            option = "--target" if "target" in detail["loc"] else f"--loss {self.loss}"
            raise PlacerError(option, str(detail["ctx"]["error"])) from None

    def added_to(self, wanted: _SpecOrPlan) -> _SpecOrPlan:
        """A spec or plan with the loss that the options name, if they are given."""
        from placer.plan.types import Plan, PlannedLoss

        named = wanted.loss.spec if isinstance(wanted.loss, PlannedLoss) else wanted.loss
        found = self.spec(named)
        if found is None or found == named:
            return wanted
        if isinstance(wanted, Plan):
            counted = PlannedLoss(
                function=found.function, target=found.target, whole_batch=found.whole_batch
            )
            return cast("_SpecOrPlan", replace(wanted, loss=counted))
        return cast("_SpecOrPlan", wanted.model_copy(update={"loss": found}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The arguments and options that name a model and example inputs for it."""

    model: Model
    inputs: Inputs
    keywords: Keywords
    model_arguments: ModelArguments
    evaluation: Evaluation = False
    ignore_device_moves: IgnoreDeviceMoves = False

    def check(self, *, inputs_required: bool = True) -> None:
        """Raise ``PlacerError`` for the errors in options that are found without importing torch."""
        shapes, examples = self.split_inputs()
        parse_inputs(shapes, required=inputs_required and not examples)
        parse_values("--kwarg", self.keywords)
        parse_values("--model-arg", self.model_arguments)

    def split_inputs(self) -> tuple[list[str], list[str]]:
        """The inputs given as shapes, and the input given as a callable, of which there is at most one.

        Raises ``PlacerError`` if a callable is given with other inputs.
        """
        examples = [text for text in self.inputs if is_example(text)]
        shapes = [text for text in self.inputs if not is_example(text)]
        if len(examples) > 1 or (examples and shapes):
            raise PlacerError(
                f"--input {examples[0]}",
                "makes all arguments of forward",
                "leave out the other --input",
            )
        return shapes, examples

    def load(self, console: Console, **wanted: Any) -> LoadedModel:
        """Import torch, and build the model and its inputs as ``wanted``, the options of `load_model`."""
        with progress(console, "importing torch and the model"):
            from placer.cli.loaded_model import load_model

            return load_model(self, **wanted)

    def layer_paths(self) -> list[str] | None:
        """The paths of the model's modules, to check a wrong spec against; None without the model."""
        from placer.api import layer_paths_of

        try:
            model = self.load(human_console(as_json=True), inputs_required=False).model
        except PlacerError:
            return None
        return layer_paths_of(model)


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters of ``command`` that stand for several options by one per option, for typer."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, OptionGroup] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = _group(parameter)
        if group is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            groups[parameter.name] = group
            parameters += group.parameters

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group.make(**{p.name: values.pop(p.name) for p in group.parameters})
        command(**values)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _group(parameter: inspect.Parameter) -> OptionGroup | None:
    """The options that ``parameter`` stands for; None if it is one option."""
    if (kind := parameter.annotation) in (ModelOptions, LossOptions):
        hints = get_type_hints(kind, include_extras=True)
        parts = inspect.signature(kind).parameters.values()
        return OptionGroup([p.replace(annotation=hints[p.name]) for p in parts], kind)
    marks = getattr(parameter.annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, OptionGroup)), None)
