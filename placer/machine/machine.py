"""A machine: nodes of devices, and the links between them; read from JSON, or shipped with placer."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from placer.errors import PlacerError, nearest
from placer.jsonfile import read_json
from placer.machine.catalogue import DeviceKind
from placer.machine.kindfile import find_kind
from placer.machine.links import Link, Links
from placer.machine.rates import Rates
from placer.quantities import parse_bytes

_MODEL = ConfigDict(extra="forbid", frozen=True)
_SHIPPED = resources.files("placer.machine") / "shipped"


def _rate(value: Any) -> float:
    """Bytes per second, as a number or as text such as "250GB/s"."""
    if isinstance(value, str):
        size, slash, second = value.rpartition("/")
        if not slash or second.strip() != "s":
            raise ValueError(f"{value!r} is not a rate; write text such as '250GB/s'")
        return float(parse_bytes(size))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a rate; write bytes per second, or '250GB/s'")
    return float(value)


Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0)]


class LinkSpec(BaseModel):
    """A kind of link. Rates are those that are reached, not those of a data sheet."""

    model_config = _MODEL

    send: Rate = Field(description="Bytes per second from one device to another.")
    bus: Rate | None = Field(
        default=None,
        description="Bus bandwidth of a collective, per device; by default what is sent.",
    )
    latency: float = Field(default=0.0, ge=0, description="Seconds before the first byte arrives.")

    @property
    def link(self) -> Link:
        """The link as numbers."""
        return Link(send=self.send, bus=self.bus or self.send, latency=self.latency)


class Machine(BaseModel):
    """Nodes of equal devices, and the links inside a node and between nodes.

    >>> machine = find_machine("dgx-a100:2")
    >>> machine.devices, machine.links.node
    (16, 8)
    """

    model_config = _MODEL

    schema_uri: str | None = Field(default=None, alias="$schema")
    version: Literal[1] = 1
    name: str = Field(description="How plans call it.")
    source: str = Field(default="", description="Where the numbers come from.")
    nodes: int = Field(default=1, ge=1, le=2**16, description="The number of nodes.")
    devices_per_node: int = Field(ge=1, le=2**10, description="The devices of each node.")
    device_type: Literal["cuda", "cpu"] = Field(default="cuda", description="As torch names it.")
    kind: str = Field(
        description="The kind of every device: a name of the catalogue, or a file of placer calibrate."
    )
    memory: str | int | None = Field(
        default=None, description="Bytes of each device; by default those of its kind."
    )
    inside: LinkSpec = Field(description="The links between devices of a node.")
    network: LinkSpec | None = Field(
        default=None,
        description="The links between nodes, each network card; needed from two nodes on.",
    )
    network_cards: int = Field(default=1, ge=1, description="The network cards of a node.")
    sustained: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="The share of the kind's half-precision rates that is kept up over many steps.",
    )

    @property
    def devices(self) -> int:
        """The number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def links(self) -> Links:
        """The links between the ranks of a job with one process per device."""
        return Links(
            inside=self.inside.link,
            network=None if self.nodes == 1 or self.network is None else self.network.link,
            node=self.devices_per_node,
            cards=self.network_cards,
        )

    def names(self) -> list[str]:
        """The names of all devices, those of the first node first."""
        return [f"{self.device_type}:{index}" for index in range(self.devices)]


@functools.lru_cache(maxsize=16)
def device_kind_of(machine: Machine) -> DeviceKind:
    """The kind of the devices of ``machine``, at the rates that they keep up and with its links."""
    kind = find_kind(machine.kind)
    slower = {
        key: rate.scaled(machine.sustained) if key[1] == "half" else rate
        for key, rate in kind.rates.table.items()
    }
    return replace(kind, rates=Rates(slower), link_bandwidth=machine.inside.send)


def shipped_machines() -> list[str]:
    """The names of the machines that come with placer."""
    return sorted(entry.name.removesuffix(".json") for entry in _SHIPPED.iterdir())


@functools.lru_cache(maxsize=16)
def find_machine(name: str) -> Machine:
    """The machine with this name, or the one that the file with this name describes.

    ``name:n`` is the same machine with n nodes. Raises ``PlacerError`` if there is none, or if the file does
    not describe one.
    """
    base, colon, count = name.rpartition(":")
    if not colon or not count.isdecimal():
        base, count = name, ""
    if base.lower().endswith(".json"):
        source, data = base, read_json(Path(base))
    elif base in shipped_machines():
        source, data = base, read_json(Path(str(_SHIPPED / f"{base}.json")))
    else:
        near = nearest(base, shipped_machines())
        raise PlacerError(
            f"machine {name!r}",
            "is not known",
            f"did you mean {near!r}? " * (near is not None)
            + f"known are {', '.join(shipped_machines())}; or name a file (placer machine -o FILE)",
        )
    if count and isinstance(data, dict):
        data = {**data, "nodes": int(count)}
    try:
        machine = Machine.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = "/" + "/".join(map(str, first["loc"]))
        raise PlacerError(f"{source} {where}", first["msg"], "see docs/machines.md") from None
    if machine.nodes > 1 and machine.network is None:
        raise PlacerError(
            f"{source} /network",
            f"is missing, and the machine has {machine.nodes} nodes",
            'write "network": {"send": "10GB/s"}',
        )
    return machine
