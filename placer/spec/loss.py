"""The ``loss`` of a spec: which function of a model's result a training step ends with, and its target."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from placer.errors import PlacerError, nearest
from placer.inputs import InputSpec, is_example, parse_input

MEAN_SQUARE = "mean_square"  # the sum of the mean squares of all results; it has no target
OF_CLASSES = ("cross_entropy", "nll_loss")  # of torch.nn.functional, with a class for each point
OF_VALUES = (  # of torch.nn.functional, with a target like the result
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss",
    "multilabel_soft_margin_loss",
)  # fmt: skip
LOSSES = (MEAN_SQUARE, *OF_CLASSES, *OF_VALUES)
_CALLABLE = r"[^:\s]+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


def _function(value: Any) -> str:
    if isinstance(value, str) and (value in LOSSES or re.fullmatch(_CALLABLE, value)):
        return value
    name = value.rpartition(".")[2].lower() if isinstance(value, str) else ""
    near = f"{name}_loss" if f"{name}_loss" in LOSSES else nearest(name, LOSSES)
    known = f"did you mean {near!r}?" if near else f"known are {', '.join(LOSSES)}."
    raise ValueError(
        f"{value!r} is not a known loss; {known} Or name a function of yours: path/file.py:callable"
    )


def _target(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{value!r} is not a target; write text such as '2x128x128:int64<105'")
    parse_target(texts)
    return tuple(texts)


def parse_target(texts: list[str] | tuple[str, ...]) -> list[InputSpec]:
    """The tensors of a target that is written as inputs are; none of one that a callable makes.

    Raises ``ValueError`` for a wrong text.
    """
    if len(texts) == 1 and is_example(texts[0]):
        return []
    try:
        found = [parse_input(text, option="--target") for text in texts]
    except PlacerError as error:
        text = error.where.removeprefix("--target ")
        raise ValueError(f"{text!r}: {error.problem}; {error.remedy}") from None
    names = [item.name for item in found]
    if None in names and any(names):
        raise ValueError("some tensors have names; name all of them (a dict) or none (a tuple)")
    return found


_FUNCTION_SCHEMA = {
    "anyOf": [{"enum": list(LOSSES)}, {"type": "string", "pattern": f"^{_CALLABLE}$"}],
    "examples": ["cross_entropy", "losses.py:dice_ce"],
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class LossSpec(BaseModel):
    """A loss by its name, with the shapes of its target for the whole batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: Annotated[str, PlainValidator(_function), WithJsonSchema(_FUNCTION_SCHEMA)] = Field(
        description="A function of torch.nn.functional; 'mean_square', the sum of the mean squares of "
        "all results; or path/file.py:callable, which gets the result of the model and the target, or the "
        "result alone if there is no target."
    )
    target: Annotated[
        tuple[str, ...], PlainValidator(_target), WithJsonSchema({**_TEXTS, "default": []})
    ] = Field(
        default=(),
        description="The target of the whole batch, written as inputs are on the command line, such as "
        "'2x1x128x128x128:int64<105'; several are a tuple, and with names (mask=…) a dict. Or "
        "path/file.py:callable, which makes it. By default, functions of torch get classes, or values "
        "like the result.",
    )

    whole_batch: bool = Field(
        default=False,
        description="It is computed once, over the results of all micro-batches and replicas, as with "
        "placed.step(…, whole_batch=True). The schedule must be GPipe.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_target(self) -> LossSpec:
        if self.function == MEAN_SQUARE and self.target:
            raise ValueError(f"'{MEAN_SQUARE}' has no target; leave it out, or name another loss")
        return self

    @model_serializer
    def _shortest(self) -> str | dict[str, Any]:
        if not self.target and not self.whole_batch:
            return self.function
        found: dict[str, Any] = {"function": self.function}
        if self.target:
            found["target"] = self.target[0] if len(self.target) == 1 else list(self.target)
        return {**found, "whole_batch": True} if self.whole_batch else found

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [_FUNCTION_SCHEMA, schema]}
