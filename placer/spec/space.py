"""How a spec says that inputs are split with the batch, and stages in space."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StrictInt,
    model_serializer,
    model_validator,
)
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from placer.spec.fields import Count

_MODEL = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class InputSplit(BaseModel):
    """How an input is split with the batch, and cut in space."""

    model_config = _MODEL

    batch_dim: StrictInt | None = Field(
        default=None,
        description="The dimension along which the input has a row per sample; -1 is the last one, and null "
        "says that every slice needs all of it. Placer finds out if it is left out.",
    )
    space_dims: tuple[StrictInt, ...] | None = Field(
        default=None,
        description="The dimensions that are cut if stages are split in space, in the order of the dims of "
        "space; none if the input is not cut. By default those after the first two.",
    )

    @model_validator(mode="after")
    def _says_something(self) -> InputSplit:
        if not self.model_fields_set:
            raise ValueError('says nothing; write "batch_dim", "space_dims" or both')
        return self

    @model_serializer(mode="wrap")
    def _shortest(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class SpaceSpec(BaseModel):
    """How stages are split in space."""

    model_config = _MODEL

    shards: Count = Field(description="The number of devices of a stage, or 'auto'.")
    grid: tuple[StrictInt, ...] = Field(
        default=(),
        description="The number of parts along each of the dims; their product is the number of shards. By "
        "default placer chooses the grid of the least faces between parts.",
    )
    dims: tuple[StrictInt | Literal["depth", "height", "width"], ...] = Field(
        default=(),
        description="The dimensions of the inputs that are cut, as numbers or, for inputs of rows x channels "
        "x space, names. By default all after the first two.",
    )
    layers: tuple[str, ...] = Field(
        default=(),
        description="Patterns of the layers that are cut; others run whole on every shard. By default all "
        "are cut that can be.",
    )
    own_boxes: bool = Field(
        default=False,
        description="Whether each process passes its own part of the inputs that are cut, as placer.Box. "
        "Then only that part is counted; for one process per device.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        return {"shards": value} if isinstance(value, int | str) else value

    @property
    def number(self) -> int:
        """The number of devices of a stage; 1 while "auto" is not resolved."""
        return self.shards if isinstance(self.shards, int) else 1

    @model_validator(mode="after")
    def _agree(self) -> SpaceSpec:
        if self.grid and self.shards == "auto":
            raise ValueError("a grid needs a number of shards, not 'auto'")
        if self.grid and (min(self.grid) < 1 or math.prod(self.grid) != self.shards):
            parts = "x".join(map(str, self.grid))
            raise ValueError(
                f"grid {parts} has {math.prod(self.grid)} parts, not {self.shards}; its numbers must "
                "multiply to the number of shards"
            )
        if self.dims and len(self.grid) > len(self.dims):
            raise ValueError(f"grid has {len(self.grid)} numbers for {len(self.dims)} dims")
        return self

    @model_serializer
    def _shortest(self) -> int | str | dict[str, Any]:
        given = {"grid": self.grid, "dims": self.dims, "layers": self.layers}
        fields: dict[str, Any] = {key: list(value) for key, value in given.items() if value}
        fields |= {"own_boxes": True} if self.own_boxes else {}
        return {"shards": self.shards, **fields} if fields else self.shards

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [*schema["properties"]["shards"]["anyOf"], schema]}
