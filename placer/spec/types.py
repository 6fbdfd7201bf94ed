"""The placement spec as strict pydantic models: what the user asks for."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    ValidationError,
    WithJsonSchema,
    field_serializer,
    model_serializer,
    model_validator,
)
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import CoreSchema

from placer.errors import SpecError, nearest
from placer.grid import NodeLayout
from placer.quantities import format_bytes, spell_bytes
from placer.spec.check import cross_problems, shift_clashes, with_machine_devices
from placer.spec.explain import (
    as_written,
    explain_errors,
    misspelt_keys,
    one_per_slip,
    wrong_fields,
)
from placer.spec.fields import (
    OPTIMIZERS,
    AllocatorName,
    BatchNormMode,
    ByteSize,
    Count,
    DeviceMemory,
    DeviceName,
    KindName,
    MachineName,
    Objective,
    Patterns,
    Precision,
    ScheduleField,
    ShardStateField,
    StoredRule,
)
from placer.spec.loss import LossSpec
from placer.spec.rows import shifted_rows
from placer.spec.space import InputSplit, SpaceSpec

_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxtuple = 6
_SHORT.maxstring = _SHORT.maxother = 100
_MODEL = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class DeviceSpec(BaseModel):
    """A device of a replica: its name, and optionally its memory and kind."""

    model_config = _MODEL

    name: DeviceName = Field(description="Torch's name of the device, such as cuda:0 or cpu.")
    memory: DeviceMemory | None = Field(
        default=None,
        description="Memory that may be used: '16GiB', '500 MB' or a number of bytes. Default: the "
        "memory of the kind, or of the device if this machine has it.",
    )
    kind: KindName | None = Field(
        default=None,
        description="Its kind in the device catalogue, such as 'a100' or 'h100', or a file that "
        "'placer calibrate' or 'placer profile' wrote.",
    )
    allocator: AllocatorName | None = Field(
        default=None,
        description="How torch's CUDA allocator takes memory: 'default', in segments of fixed sizes, "
        "or 'expandable', in segments that grow, which wastes less. If not given, 'expandable'.",
    )

    def __repr__(self) -> str:
        """The name, with the memory or else the kind."""
        memory = None if self.memory is None else format_bytes(self.memory)
        return repr("=".join(filter(None, (self.name, memory or self.kind))))

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_serializer
    def _shortest(self) -> str | dict[str, Any]:
        memory = None if self.memory is None else spell_bytes(self.memory)
        given = {"memory": memory, "kind": self.kind, "allocator": self.allocator}
        fields = {key: value for key, value in given.items() if value is not None}
        return {"name": self.name, **fields} if fields else self.name

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        name = schema["properties"]["name"]
        return {"anyOf": [{k: v for k, v in name.items() if k != "title"}, schema]}


class OptimizerBytes(BaseModel):
    """An optimizer that placer does not know by name, described by the bytes of its state."""

    model_config = _MODEL

    bytes_per_parameter: StrictInt = Field(
        ge=0, description="Bytes of optimizer state per parameter element; 8 for fp32 Adam."
    )


def _optimizer(value: Any) -> str | OptimizerBytes:
    if isinstance(value, OptimizerBytes):
        return value
    if isinstance(value, Mapping) and set(value) == {"bytes_per_parameter"}:
        nbytes = value["bytes_per_parameter"]
        if isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes >= 0:
            return OptimizerBytes(bytes_per_parameter=nbytes)
    if isinstance(value, str) and value.lower() in OPTIMIZERS:
        return value.lower()
    near = nearest(value.lower(), OPTIMIZERS) if isinstance(value, str) else None
    hint = f"; did you mean {near!r}?" if near else ""
    known = ", ".join(repr(name) for name in OPTIMIZERS)
    raise ValueError(
        f"{value!r} is not an optimizer{hint} (expected {known}, or {{'bytes_per_parameter': n}})"
    )


_OPTIMIZER_SCHEMA = {
    "anyOf": [
        {"enum": list(OPTIMIZERS)},
        {
            "type": "object",
            "properties": {"bytes_per_parameter": {"type": "integer", "minimum": 0}},
            "required": ["bytes_per_parameter"],
            "additionalProperties": False,
        },
    ]
}
Optimizer = Annotated[
    str | OptimizerBytes, PlainValidator(_optimizer), WithJsonSchema(_OPTIMIZER_SCHEMA)
]


class PlacementSpec(BaseModel):
    """A placement spec: which layers go to which devices, and how many replicas there are.

    The constructor raises ``SpecError`` with every problem found. Loading a spec runs no code.

    >>> spec = PlacementSpec(devices=["cuda:0", "cuda:1"], layers={"decoder": "cuda:1"}, replicas=2)
    >>> spec.device_rows(2)
    [['cuda:0', 'cuda:1'], ['cuda:2', 'cuda:3']]
    """

    model_config = _MODEL

    schema_uri: str | None = Field(
        default=None, alias="$schema", description="Where editors find this schema; not used."
    )
    version: Literal[1] = Field(default=1, description="Version of the spec format.")
    machine: MachineName | None = Field(
        default=None,
        description="Instead of devices, the machine that has them: one that comes with placer, such as "
        "dgx-a100, or a JSON file; dgx-a100:4 has four nodes. Its links decide how long transfers and sums "
        "of gradients take.",
    )
    devices: tuple[DeviceSpec, ...] = Field(
        min_length=1, description="Devices of the first replica, in the order of the stages."
    )
    stages: Count = Field(
        default="auto",
        description="Number of stages of a replica, each on a device of its own: so many of the devices are "
        "used. 'auto': all of them.",
    )
    layers: dict[str, DeviceName] = Field(
        default={},
        description="Pattern -> device. A pattern is a module path and covers its whole subtree; "
        "'*' matches within one part of the path, '**' across parts. Later entries win. Placer chooses "
        "a device for layers that no pattern matches, and for operations between layers, unless all "
        "layers are on one device. {} is fully automatic.",
    )
    inputs: dict[str, Literal["whole"] | InputSplit] = Field(
        default={},
        description="Name of an input, such as image or batch.image, or a pattern as in layers -> how it is "
        "split with the batch: 'whole' if every slice needs all of it, or {'batch_dim': n}; and with "
        "{'space_dims': [...]} which dimensions are cut in space. Placer finds out "
        "what is not said here, and asks where the example cannot tell.",
    )
    stored: dict[str, StoredRule] = Field(
        default={},
        description="Name of a value that forward stores, such as encoder.aux_loss, or of a result, such as "
        "result.loss, or a pattern -> how those of slices of the batch give that of the whole batch, where "
        "placer cannot tell.",
    )
    batch: Count = Field(
        default="auto",
        description="Number of rows (samples) of a step, all replicas together, to plan for. 'auto': as many "
        "as the example input has.",
    )
    replicas: Count = Field(
        default=1, description="Number of copies of the stages that share the batch, or 'auto'."
    )
    replica_devices: tuple[tuple[DeviceName, ...], ...] = Field(
        default=(),
        description="One row of devices for each replica after the first; by default the device list, "
        "shifted by its length per replica.",
    )
    microbatches: Count = Field(
        default=1,
        description="Number of micro-batches that a replica's batch is split into, or 'auto'.",
    )
    schedule: ScheduleField = Field(
        default="GPipe",
        description="Order of micro-batch forwards and backwards, by torch's name. auto: the best of 1F1B "
        "and, with a process per device, InterleavedZeroBubble.",
    )
    precision: Precision = Field(
        default="fp32",
        description="bf16 and fp16 run the stages, but not the loss, under autocast.",
    )
    checkpoint: Patterns = Field(
        default=(), description="Patterns of layers to recompute in backward, or 'auto'."
    )
    offload: Patterns = Field(
        default=(),
        description="Patterns of layers whose saved activations are kept in host memory, or 'auto'.",
    )
    chunks: Count = Field(
        default=1,
        description="Number of chunks in which a convolution runs that reads a concatenation of channels, as "
        "of the skip of a U-Net: only a chunk of that is made at a time. 'auto': several if the model does "
        "not fit otherwise.",
    )
    space: SpaceSpec = Field(
        default=SpaceSpec(shards=1),
        description="Number of devices over which every stage is split in space: each has a part of all "
        "values, and neighbours exchange what a convolution looks at. The devices of a stage follow one "
        "another in the device list. An object says which dims and layers are cut, and how. 'auto': as many "
        "as is fastest, if the model does not fit otherwise.",
    )
    offload_overlap: StrictBool = Field(
        default=False,
        description="Copy offloaded activations on a separate CUDA stream while kernels run. A "
        "device then has one more of them in memory in forward, and one in backward.",
    )
    batch_norm: BatchNormMode = Field(
        default="per_microbatch",
        description="per_microbatch: batch statistics of each micro-batch; deferred: running statistics "
        "are updated once per step, as if the batch had not been split; sync: statistics over replicas.",
    )
    optimizer: Optimizer = Field(
        default="adam", description="The optimizer whose state the memory estimate counts."
    )
    shard_state: ShardStateField = Field(
        default="none",
        description="optimizer: the optimizer's state of every parameter is divided over the replicas, and "
        "over the shards in space, instead of kept whole by each; for one process per device. gradients: "
        "gradients too, which are then summed after every micro-batch. auto: what the model needs to fit.",
    )
    shard_over: Count = Field(
        default="auto",
        description="Number of neighbouring replicas between which the state is divided; it must divide the "
        "replicas. auto: all of them, or those of a node if that is faster.",
    )
    node_layout: NodeLayout | Literal["auto"] = Field(
        default="stages",
        description="Which ranks are next to each other, and so in one node, with one process per device: "
        "the stages of a replica, which send each other activations, or the replicas of a stage, which sum "
        "gradients. auto: what is faster on the machine.",
    )
    compile: StrictBool = Field(
        default=False,
        description="Compile the code of every stage with torch.compile, when it first runs. Peaks and times "
        "of a plan are those of stages that are not compiled.",
    )
    loss: LossSpec | None = Field(
        default=None,
        description="The loss whose memory is counted on the last stage's device: a name, or an object "
        "with the shapes of its target. If not given, cross_entropy is assumed for results with classes "
        "(2 or more channels), and the mean of squares for others.",
    )
    training: StrictBool = Field(
        default=True, description="Count gradients, optimizer state and saved activations."
    )
    reserve: ByteSize | None = Field(
        default=None,
        description="Bytes per device that plans leave free for what cannot be predicted, such as "
        "other processes and libraries; by default 2% of a GPU's memory.",
    )
    context: ByteSize | None = Field(
        default=None,
        description="Bytes that a process takes on a device before it makes a tensor (the CUDA "
        "context); the default depends on the device kind.",
    )
    host_memory: DeviceMemory | None = Field(
        default=None,
        description="Bytes of host memory that the offloaded activations of all processes together may "
        "take; by default there is no limit.",
    )
    objective: Objective = Field(
        default="throughput",
        description="throughput: the least time of a step with this number of micro-batches; memory: the "
        "lowest maximum of the devices' peaks; latency: the least time for one sample; bottleneck: the "
        "least time of the slowest device, to which a step of many micro-batches comes near; devices: for "
        "auto, the fewest devices, and on these the least time.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _all_problems(
        cls, data: Any, handler: ModelWrapValidatorHandler[PlacementSpec]
    ) -> PlacementSpec:
        problems = []
        try:
            spec = handler(given := with_machine_devices(data))
        except ValidationError as error:
            problems = explain_errors(error, given, cls.known_keys())
        if not isinstance(data, PlacementSpec):
            problems += cross_problems(data, wrong_fields(problems))
        if meant := misspelt_keys(problems, data):
            try:
                cls.model_validate({meant.get(key, key): value for key, value in data.items()})
            except SpecError as error:
                problems += as_written(error.problems, meant)
        if problems:
            raise SpecError(SpecError.UNNAMED, one_per_slip(problems))
        return spec

    @field_serializer("reserve", "context", "host_memory")
    def _spelled_bytes(self, value: int | None) -> str | int | None:
        return None if value is None else spell_bytes(value)

    @field_serializer("optimizer")
    def _plain_optimizer(self, value: str | OptimizerBytes) -> Any:
        return value if isinstance(value, str) else value.model_dump()

    @classmethod
    def known_keys(cls) -> list[str]:
        """The keys that a spec may have, as JSON spells them."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def __repr__(self) -> str:
        """The fields that differ from their defaults; of many layers, only the first few."""
        given = [
            f"{name}={_SHORT.repr(getattr(self, name))}"
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        return f"PlacementSpec({', '.join(given)})"

    __str__ = __repr__

    @property
    def batch_dims(self) -> dict[str, int | None]:
        """Pattern of ``inputs`` -> the dimension of the batch, None for inputs that are whole."""
        return {
            pattern: None if split == "whole" else split.batch_dim
            for pattern, split in self.inputs.items()
            if split == "whole" or "batch_dim" in split.model_fields_set
        }

    @property
    def space_dims(self) -> dict[str, tuple[int, ...]]:
        """Pattern of ``inputs`` -> the dimensions that are cut in space."""
        return {
            pattern: split.space_dims
            for pattern, split in self.inputs.items()
            if isinstance(split, InputSplit) and split.space_dims is not None
        }

    def device_rows(self, replicas: int) -> list[list[str]]:
        """The device names of each replica; row 0 is ``devices``.

        Raises ``SpecError`` if two replicas would share a device.
        """
        names = [device.name for device in self.devices]
        if self.replica_devices and len(self.replica_devices) == replicas - 1:
            return [names, *(list(row) for row in self.replica_devices)]
        if problems := shift_clashes(names, replicas):
            raise SpecError(SpecError.UNNAMED, problems)
        return shifted_rows(names, replicas)

    def on_its_stages(self) -> PlacementSpec:
        """This spec with only the devices of its ``stages``."""
        count = len(self.devices) if self.stages == "auto" else self.stages * self.space.number
        return self if count >= len(self.devices) else self.with_devices(self.devices[:count])

    def with_devices(self, devices: Sequence[DeviceSpec]) -> PlacementSpec:
        """A copy of this spec with other ``devices``."""
        return self.model_copy(update={"devices": tuple(devices)})

    def with_layers(self, layers: Mapping[str, str]) -> PlacementSpec:
        """A copy of this spec with other ``layers``."""
        return self.model_copy(update={"layers": dict(layers)})

    def to_json(self) -> str:
        """The spec as JSON text, without fields that have their default values."""
        # pydantic's exclude_defaults does not leave out fields that have a serializer.
        given = {
            name for name, f in type(self).model_fields.items() if getattr(self, name) != f.default
        }
        if self.machine is not None:
            given.discard("devices")
        if not self.offload:  # as auto may decide
            given.discard("offload_overlap")
        return self.model_dump_json(by_alias=True, include=given, indent=2) + "\n"
