"""What files that commands take say: a spec or a plan, and which command made the plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from placer.cli.options import ModelOptions
from placer.errors import PlacerError
from placer.plan.store import load_plan, plan_from_json
from placer.plan.types import Origin, Plan
from placer.spec import PlacementSpec
from placer.spec.load import LayerPaths, spec_in
from placer.spec.text import SpecText


def load_spec_or_plan(path: Path, *, layer_paths: LayerPaths | None = None) -> PlacementSpec | Plan:
    """The spec, as `load_spec` reads it, or the plan in the file. Raises ``PlacerError``."""
    text = SpecText.read(path)
    data = text.last_values()
    if isinstance(data, dict) and isinstance(data.get("stages"), list):
        return plan_from_json(text.values(), source=str(path))
    return spec_in(text, data, layer_paths)


def given_placement(
    options: ModelOptions, path: Path | None
) -> tuple[ModelOptions, PlacementSpec | Plan]:
    """The options of the model, and the spec or plan in the file ``path``.

    Without a file, both are from the plan that ``options`` have as their model. Raises ``PlacerError``.
    """
    if path is not None:
        return options, load_spec_or_plan(path, layer_paths=options.layer_paths)
    plan = saved_plan(options)
    return made_of(plan, options)[0], plan


def saved_plan(options: ModelOptions) -> Plan:
    """The plan in the file that ``options`` have as their model. Raises ``PlacerError`` if it is no file."""
    if not options.model.endswith(".json"):
        raise PlacerError("SPEC", "is missing", "give MODEL and SPEC, or only a saved plan (.json)")
    plan = load_plan(options.model)
    if (loss := plan.loss) is not None:
        function, *target = _found(options.model, loss.function, *loss.target)
        plan = replace(plan, loss=replace(loss, function=function, target=tuple(target)))
    return plan


def with_origin(plan: Plan, options: ModelOptions, inputs: str, spec: PlacementSpec) -> Plan:
    """``plan``, which says that this command made it of the model of ``options`` and of ``spec``."""
    values = asdict(options)
    return replace(
        plan,
        origin=Origin(
            command=shlex.join(["placer", *sys.argv[1:]]),
            model=values.pop("model"),
            options=values,
            inputs=inputs,
            spec=spec.to_json(),
            kinds=tuple(dict.fromkeys(device.kind for device in spec.devices if device.kind)),
        ),
    )


def made_of(plan: Plan, given: ModelOptions) -> tuple[ModelOptions, PlacementSpec]:
    """The model and the spec that ``plan``, a file that ``given`` has as its model, was made of.

    Raises ``PlacerError`` if the plan does not say so, or if other options say it too.
    """
    if plan.origin is None:
        problem = "was made in Python, and does not say of which model"
        raise PlacerError(given.model, problem, "give MODEL and SPEC instead")
    if given != ModelOptions(model=given.model, inputs=[], keywords=[], model_arguments=[]):
        problem = "says how the model was called, and options do too"
        raise PlacerError(given.model, problem, "leave them out, or give MODEL and SPEC instead")
    options = ModelOptions(model=plan.origin.model, **plan.origin.options)  # type: ignore[arg-type]
    model, *inputs = _found(given.model, options.model, *options.inputs)
    spec = PlacementSpec.model_validate_json(plan.origin.spec)
    if plan.loss is not None and spec.loss is not None:
        spec = spec.model_copy(update={"loss": plan.loss.spec})
    return replace(options, model=model, inputs=inputs), spec


def _found(saved: str, *texts: str) -> Iterator[str]:
    """``texts`` of the plan ``saved``: those that name a file which is not here have its whole path.

    It is looked for beside the plan and above. Raises ``PlacerError`` if it is not there either.
    """
    for text in texts:
        path = Path(text.rpartition(":")[0])
        folders = [Path(), *Path(saved).resolve().parents]
        if path.suffix != ".py":
            yield text
        elif found := next((each for each in folders if (each / path).is_file()), None):
            yield str(found / text)
        else:
            problem = f"was made with {text}, which is neither here nor in a folder above the plan"
            remedy = "call placer in the folder where the plan was made, or give MODEL and SPEC"
            raise PlacerError(saved, problem, remedy)
